"""Queues of equal replicas and their order by priority, age, deadline and arrival.

A `ClassQueue` is first in, first out, and records why it waits. `PriorityLevels` orders the active queues; waiting queues
are not in it.

**Ageing.** A priority level rises by one step for every full minute that its oldest head has waited, so that a steady stream
of slightly more important work cannot starve it. The rise is bounded for two reasons. Incident work must stay first however
much old work exists: ageing never passes work that is more than the bound above. And without a bound, all work that waits
long would end up above all new work, which would disable priorities in a full cluster, where they matter most.

Age belongs to a priority level and not to a queue, so that it never decides between two tenants of the same priority.
Otherwise a tenant that floods the queue first would have the older heads and shut out the others for as long as the rise
lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from remit.proposal.queue.fair_share import Vector

Member = Hashable
"""A replica, identified by any hashable key of the caller."""

UnblockKey = Hashable
"""Key of an event that may end a wait: `("quota", "tenant/a")`, `("room",)`, `("node",)`, `("policy",)`, `("grant", name)`, ...
"""

_SLACK: Final = 16


class QueueWait(NamedTuple):
    """Why a queue is not active, which events end that, and when it is tried in any case.

    Without `unblock_events` it is a backoff: only time ends it. `since` is the version that the attempt saw, `at_ms` the
    time at which it ended.
    """

    reason: str
    unblock_events: frozenset[UnblockKey]
    until_ms: int
    at_ms: int
    since: int
    detail: str = ""
    """The detail that the attempt recorded; empty for a backoff."""


class ClassQueue:
    """Replicas of one tenant and one priority with equal requirements, so that the result of an attempt for one holds for all.

    Each member is in one of three places. `_queue` holds new members, in order of arrival. `_in_flight` are members in
    flight, each with its position; positions are assigned in the order in which members are first taken. `_returned` are
    members that were returned; their positions precede all members of `_queue`, because members are taken in order.
    """

    __slots__ = (
        *("_in_flight", "_queue", "_returned", "_returned_heap", "_next_position", "_last_arrival"),
        *("amount", "attempts", "deadline_ms", "failed_ms", "failures", "key", "priority", "serial", "tenant", "wait"),
    )

    def __init__(self, key: Hashable, tenant: str, priority: int, amount: Vector, deadline_ms: int | None = None) -> None:
        self.key, self.tenant, self.priority, self.amount, self.deadline_ms = key, tenant, priority, amount, deadline_ms
        self.serial = 0
        """Assigned by the backlog: creation order of queues, to break ties."""
        self.wait: QueueWait | None = None
        self.attempts = 0
        self.failures = self.failed_ms = 0
        """Consecutive failures since a member was placed or a long wait began, and the time of the last one."""
        self._last_arrival = [0, 0]
        """The latest arrival time, and how many members with that time are still in `_queue`. They share this list."""
        self._queue: OrderedDict[Member, list[int]] = OrderedDict()
        self._in_flight: dict[Member, tuple[int, int]] = {}
        self._returned: dict[Member, tuple[int, int]] = {}
        self._returned_heap: list[tuple[int, Member]] = []
        """Heap of the positions in `_returned`. A removed member stays until it reaches the top; the top is never stale."""
        self._next_position = 0

    def __repr__(self) -> str:
        return f"ClassQueue({self.key!r}, {self.tenant}, {self.priority}, {self.state}: {self.queued}+{self.in_flight_count})"

    def __len__(self) -> int:
        """Number of members, queued and in flight."""
        return len(self._queue) + len(self._returned) + len(self._in_flight)

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self._returned)

    @property
    def in_flight_count(self) -> int:
        return len(self._in_flight)

    @property
    def state(self) -> str:
        """`active`, `waiting` for an event, or in `backoff`."""
        return "active" if self.wait is None else "waiting" if self.wait.unblock_events else "backoff"

    def add(self, member: Member, now_ms: int) -> None:
        """Appends a member. Arrival times never decrease along the queue."""
        arrival = self._last_arrival
        if now_ms > arrival[0]:
            arrival = self._last_arrival = [now_ms, 0]
        arrival[1] += 1
        self._queue[member] = arrival

    def head_ms(self) -> int:
        """Arrival time of the first queued member. The queue must not be empty."""
        if self._returned:
            return self._returned[self._returned_heap[0][1]][1]
        return next(iter(self._queue.values()))[0]

    def head_run(self) -> int:
        """Lower bound on how many members at the head arrived at the same time. The queue must not be empty."""
        return 1 if self._returned else next(iter(self._queue.values()))[1]

    def arrived_ms(self, member: Member) -> int:
        arrival = self._queue.get(member)
        return arrival[0] if arrival is not None else (self._returned.get(member) or self._in_flight[member])[1]

    def members(self) -> list[Member]:
        """Queued members in order."""
        return [*sorted(self._returned, key=lambda member: self._returned[member][0]), *self._queue]

    def in_flight(self, member: Member) -> bool:
        return member in self._in_flight

    def pop(self, count: int) -> list[Member]:
        """Takes `count` members from the head, which must exist; they are in flight from then on."""
        in_flight, popped = self._in_flight, self._pop_returned(count) if self._returned else []
        queue, position = self._queue, self._next_position
        for _ in range(count - len(popped)):
            member, arrival = queue.popitem(last=False)
            arrival[1] -= 1
            in_flight[member] = (position, arrival[0])
            position += 1
            popped.append(member)
        self._next_position = position
        return popped

    def _pop_returned(self, count: int) -> list[Member]:
        popped: list[Member] = []
        while len(popped) < count and self._returned:
            member = heappop(self._returned_heap)[1]
            self._in_flight[member] = self._returned.pop(member)
            popped.append(member)
            self._clear_top()
        return popped

    def return_member(self, member: Member) -> None:
        """Returns a member in flight to its old position."""
        position = self._returned[member] = self._in_flight.pop(member)
        heappush(self._returned_heap, (position[0], member))

    def remove(self, member: Member) -> bool:
        """Removes a member wherever it is; returns whether it was in flight."""
        if self._in_flight.pop(member, None) is not None:
            return True
        arrival = self._queue.pop(member, None)
        if arrival is not None:
            arrival[1] -= 1
        else:
            del self._returned[member]
            self._clear_top()
        return False

    def _clear_top(self) -> None:
        heap, returned = self._returned_heap, self._returned
        while heap and returned.get(heap[0][1], (-1,))[0] != heap[0][0]:
            heappop(heap)
        if len(heap) > 2 * len(returned) + _SLACK:
            heap[:] = [(position, member) for member, (position, _) in returned.items()]
            heapify(heap)


MINUTE_MS: Final = 60_000
NO_DEADLINE: Final = 1 << 62


_Entry = tuple[int, int, int, ClassQueue]


class Ageing(NamedTuple):
    """A priority level rises by `step` per minute, by `bound` at most."""

    step: int = 1
    bound: int = 10

    def effective_priority(self, priority: int, waited_ms: int) -> int:
        return priority + min(self.bound, self.step * (max(0, waited_ms) // MINUTE_MS))


class QueueOrder:
    """Queues ordered by the arrival of their heads; if `by_deadline`, by deadline before that.

    Heap entries are corrected lazily. Taking a head only makes the key of its queue later, so an outdated entry is corrected
    when it reaches the top. A returned head makes the key earlier, so the queue is pushed again.
    """

    __slots__ = ("_by_deadline", "_entries", "_heap")

    def __init__(self, *, by_deadline: bool) -> None:
        self._by_deadline = by_deadline
        self._entries: dict[ClassQueue, _Entry] = {}
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, queue: ClassQueue) -> None:
        """Adds a queue that became active, or whose head changed. It must have a queued member."""
        head_ms = queue.head_ms()
        previous = self._entries.get(queue)
        if previous is not None and previous[1] <= head_ms:
            return
        urgency = queue.deadline_ms if self._by_deadline and queue.deadline_ms is not None else NO_DEADLINE
        entry = self._entries[queue] = (urgency, head_ms, queue.serial, queue)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def drop(self, queue: ClassQueue) -> None:
        """Removes a queue that is no longer active or has no queued member."""
        self._entries.pop(queue, None)

    def first(self) -> _Entry | None:
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            queue = entry[3]
            if entries.get(queue) is not entry:
                heappop(heap)
                continue
            head_ms = queue.head_ms()
            if head_ms == entry[1]:
                return entry
            entries[queue] = entry = (entry[0], head_ms, entry[2], queue)
            heapreplace(heap, entry)
        return None


class PriorityLevel:
    """Active queues of one priority: ordered per tenant (`lanes`), and all together by age."""

    __slots__ = ("_oldest", "lanes", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.lanes: dict[str, QueueOrder] = {}
        self._oldest = QueueOrder(by_deadline=False)

    def put(self, queue: ClassQueue) -> None:
        lane = self.lanes.get(queue.tenant)
        if lane is None:
            lane = self.lanes[queue.tenant] = QueueOrder(by_deadline=True)
        lane.put(queue)
        self._oldest.put(queue)

    def drop(self, queue: ClassQueue) -> None:
        lane = self.lanes.get(queue.tenant)
        if lane is not None:
            lane.drop(queue)
            if not lane:
                del self.lanes[queue.tenant]
            self._oldest.drop(queue)

    def waited_ms(self, now_ms: int) -> int:
        """How long the oldest head has waited."""
        oldest = self._oldest.first()
        return 0 if oldest is None else now_ms - oldest[1]


class PriorityLevels:
    """All active queues with queued members, by priority."""

    __slots__ = ("_levels", "ageing")

    def __init__(self, ageing: Ageing) -> None:
        self.ageing = ageing
        self._levels: dict[int, PriorityLevel] = {}

    def __bool__(self) -> bool:
        return bool(self._levels)

    def put(self, queue: ClassQueue) -> None:
        level = self._levels.get(queue.priority)
        if level is None:
            level = self._levels[queue.priority] = PriorityLevel(queue.priority)
        level.put(queue)

    def drop(self, queue: ClassQueue) -> None:
        level = self._levels.get(queue.priority)
        if level is not None:
            level.drop(queue)
            if not level.lanes:
                del self._levels[queue.priority]

    def tenants(self) -> list[str]:
        return list(dict.fromkeys(tenant for level in self._levels.values() for tenant in level.lanes))

    def descending(self, now_ms: int) -> Iterator[dict[str, list[QueueOrder]]]:
        """The lanes of each tenant from the highest effective priority down; levels that ageing has made equal are merged."""
        levels: dict[int, list[PriorityLevel]] = {}
        for priority, level in self._levels.items():
            levels.setdefault(self.ageing.effective_priority(priority, level.waited_ms(now_ms)), []).append(level)
        for priority_value in sorted(levels, reverse=True):
            lanes: dict[str, list[QueueOrder]] = {}
            for level in levels[priority_value]:
                for tenant, lane in level.lanes.items():
                    lanes.setdefault(tenant, []).append(lane)
            yield lanes
