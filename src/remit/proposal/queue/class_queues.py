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

    Without `cures` it is a backoff: only time ends it. `since` is the version that the attempt saw, `at_ms` the time at
    which it ended.
    """

    reason: str
    cures: frozenset[UnblockKey]
    until_ms: int
    at_ms: int
    since: int


class ClassQueue:
    """Replicas of one tenant and one priority with equal requirements, so that the result of an attempt for one holds for all.

    Each member is in one of three places. `_fresh` is the queue, in order of arrival. `_flying` are members in flight, each
    with its position; positions are assigned in the order in which members are first taken. `_landed` are members that were
    returned; their positions precede all members of `_fresh`, because members are taken in order.
    """

    __slots__ = (
        *("_flying", "_fresh", "_landed", "_places", "_taken", "_youngest"),
        *("amount", "attempts", "deadline_ms", "failed_ms", "failures", "key", "priority", "serial", "tenant", "told", "wait"),
    )

    def __init__(self, key: Hashable, tenant: str, priority: int, amount: Vector, deadline_ms: int | None = None) -> None:
        self.key, self.tenant, self.priority, self.amount, self.deadline_ms = key, tenant, priority, amount, deadline_ms
        self.serial = 0
        """Assigned by the backlog: creation order of queues, to break ties."""
        self.wait: QueueWait | None = None
        self.attempts = 0
        self.failures = self.failed_ms = 0
        """Consecutive failures since a member was placed or a long wait began, and the time of the last one."""
        self.told = ""
        """Unused."""
        self._youngest = [0, 0]
        """Shared by the members that arrived at the same time: that time, and how many of them are still in `_fresh`."""
        self._fresh: OrderedDict[Member, list[int]] = OrderedDict()
        self._flying: dict[Member, tuple[int, int]] = {}
        self._landed: dict[Member, tuple[int, int]] = {}
        self._places: list[tuple[int, Member]] = []
        """Heap of the positions in `_landed`. A removed member stays in it until it reaches the top; the top is never stale."""
        self._taken = 0

    def __repr__(self) -> str:
        return f"Line({self.key!r}, {self.tenant}, {self.priority}, {self.standing}: {self.queued}+{self.flying})"

    def __len__(self) -> int:
        """Number of members, queued and in flight."""
        return len(self._fresh) + len(self._landed) + len(self._flying)

    @property
    def queued(self) -> int:
        return len(self._fresh) + len(self._landed)

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def standing(self) -> str:
        """`active`, `waiting` for an event, or in `backoff`."""
        return "active" if self.wait is None else "waiting" if self.wait.cures else "backoff"

    def add(self, member: Member, now_ms: int) -> None:
        """Appends a member. Arrival times never decrease along the queue."""
        together = self._youngest
        if now_ms > together[0]:
            together = self._youngest = [now_ms, 0]
        together[1] += 1
        self._fresh[member] = together

    def head_ms(self) -> int:
        """Arrival time of the first queued member. The queue must not be empty."""
        if self._landed:
            return self._landed[self._places[0][1]][1]
        return next(iter(self._fresh.values()))[0]

    def run(self) -> int:
        """Lower bound on how many members at the head arrived at the same time. The queue must not be empty."""
        return 1 if self._landed else next(iter(self._fresh.values()))[1]

    def arrived_ms(self, member: Member) -> int:
        fresh = self._fresh.get(member)
        return fresh[0] if fresh is not None else (self._landed.get(member) or self._flying[member])[1]

    def members(self) -> list[Member]:
        """Queued members in order."""
        return [*sorted(self._landed, key=lambda member: self._landed[member][0]), *self._fresh]

    def in_flight(self, member: Member) -> bool:
        return member in self._flying

    def pop(self, count: int) -> list[Member]:
        """Takes `count` members from the head, which must exist; they are in flight from then on."""
        flying, popped = self._flying, self._pop_landed(count) if self._landed else []
        fresh, place = self._fresh, self._taken
        for _ in range(count - len(popped)):
            member, together = fresh.popitem(last=False)
            together[1] -= 1
            flying[member] = (place, together[0])
            place += 1
            popped.append(member)
        self._taken = place
        return popped

    def _pop_landed(self, count: int) -> list[Member]:
        popped: list[Member] = []
        while len(popped) < count and self._landed:
            member = heappop(self._places)[1]
            self._flying[member] = self._landed.pop(member)
            popped.append(member)
            self._clear_top()
        return popped

    def put_back(self, member: Member) -> None:
        """Returns a member in flight to its old position."""
        place = self._landed[member] = self._flying.pop(member)
        heappush(self._places, (place[0], member))

    def remove(self, member: Member) -> bool:
        """Removes a member wherever it is; returns whether it was in flight."""
        if self._flying.pop(member, None) is not None:
            return True
        together = self._fresh.pop(member, None)
        if together is not None:
            together[1] -= 1
        else:
            del self._landed[member]
            self._clear_top()
        return False

    def _clear_top(self) -> None:
        places, landed = self._places, self._landed
        while places and landed.get(places[0][1], (-1,))[0] != places[0][0]:
            heappop(places)
        if len(places) > 2 * len(landed) + _SLACK:
            places[:] = [(place, member) for member, (place, _) in landed.items()]
            heapify(places)


MINUTE_MS: Final = 60_000
NO_DEADLINE: Final = 1 << 62


_Entry = tuple[int, int, int, ClassQueue]


class Ageing(NamedTuple):
    """A priority level rises by `step` per minute, by `bound` at most."""

    step: int = 1
    bound: int = 10

    def lifted(self, priority: int, waited_ms: int) -> int:
        return priority + min(self.bound, self.step * (max(0, waited_ms) // MINUTE_MS))


class QueueOrder:
    """Queues ordered by the arrival of their heads; if `urgent`, by deadline before that.

    Heap entries are corrected lazily. Taking a head only makes the key of its queue later, so an outdated entry is corrected
    when it reaches the top. A returned head makes the key earlier, so the queue is pushed again.
    """

    __slots__ = ("_entries", "_heap", "_urgent")

    def __init__(self, *, urgent: bool) -> None:
        self._urgent = urgent
        self._entries: dict[ClassQueue, _Entry] = {}
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, line: ClassQueue) -> None:
        """Adds a queue that became active, or whose head changed. It must have a queued member."""
        head_ms = line.head_ms()
        known = self._entries.get(line)
        if known is not None and known[1] <= head_ms:
            return
        urgency = line.deadline_ms if self._urgent and line.deadline_ms is not None else NO_DEADLINE
        entry = self._entries[line] = (urgency, head_ms, line.serial, line)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def drop(self, line: ClassQueue) -> None:
        """Removes a queue that is no longer active or has no queued member."""
        self._entries.pop(line, None)

    def first(self) -> _Entry | None:
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            line = entry[3]
            if entries.get(line) is not entry:
                heappop(heap)
                continue
            head_ms = line.head_ms()
            if head_ms == entry[1]:
                return entry
            entries[line] = entry = (entry[0], head_ms, entry[2], line)
            heapreplace(heap, entry)
        return None


class PriorityLevel:
    """Active queues of one priority: ordered per tenant (`lanes`), and all together by age."""

    __slots__ = ("_oldest", "lanes", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.lanes: dict[str, QueueOrder] = {}
        self._oldest = QueueOrder(urgent=False)

    def put(self, line: ClassQueue) -> None:
        lane = self.lanes.get(line.tenant)
        if lane is None:
            lane = self.lanes[line.tenant] = QueueOrder(urgent=True)
        lane.put(line)
        self._oldest.put(line)

    def drop(self, line: ClassQueue) -> None:
        lane = self.lanes.get(line.tenant)
        if lane is not None:
            lane.drop(line)
            if not lane:
                del self.lanes[line.tenant]
            self._oldest.drop(line)

    def waited_ms(self, now_ms: int) -> int:
        """How long the oldest head has waited."""
        oldest = self._oldest.first()
        return 0 if oldest is None else now_ms - oldest[1]


class PriorityLevels:
    """All active queues with queued members, by priority."""

    __slots__ = ("_ranks", "ageing")

    def __init__(self, ageing: Ageing) -> None:
        self.ageing = ageing
        self._ranks: dict[int, PriorityLevel] = {}

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def put(self, line: ClassQueue) -> None:
        rank = self._ranks.get(line.priority)
        if rank is None:
            rank = self._ranks[line.priority] = PriorityLevel(line.priority)
        rank.put(line)

    def drop(self, line: ClassQueue) -> None:
        rank = self._ranks.get(line.priority)
        if rank is not None:
            rank.drop(line)
            if not rank.lanes:
                del self._ranks[line.priority]

    def tenants(self) -> list[str]:
        return list(dict.fromkeys(tenant for rank in self._ranks.values() for tenant in rank.lanes))

    def descending(self, now_ms: int) -> Iterator[dict[str, list[QueueOrder]]]:
        """The lanes of each tenant from the highest effective priority down; levels that ageing has made equal are merged."""
        levels: dict[int, list[PriorityLevel]] = {}
        for priority, rank in self._ranks.items():
            levels.setdefault(self.ageing.lifted(priority, rank.waited_ms(now_ms)), []).append(rank)
        for level in sorted(levels, reverse=True):
            lanes: dict[str, list[QueueOrder]] = {}
            for rank in levels[level]:
                for tenant, lane in rank.lanes.items():
                    lanes.setdefault(tenant, []).append(lane)
            yield lanes
