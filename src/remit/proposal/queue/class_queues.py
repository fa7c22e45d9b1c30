"""Queues of equal replicas and their order by priority, age, deadline and arrival.

Equal work, first come first served, and why it waits. Whose turn it is, is not decided here.

By priority, age, deadline and arrival. Only lines that may be tried are known here.

**Age.** A priority rises by a step for every whole minute that its oldest head has waited, so that a steady stream of slightly
more important work cannot keep it out for ever. The rise is bounded, for two reasons. What must come first in an incident has
to stay first, however much old work there is: nothing passes work that is more than the bound above it. And without a bound,
everything that waits long would end above everything new, and priorities would mean nothing in a full cluster, where they
matter most.

Age belongs to a priority and not to one line, so that it never decides between two tenants of the same priority: else whoever
floods the queue first would, with older heads, shut out the others for as long as the rise lasts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from remit.proposal.queue.fair_share import Vector

Member = Hashable
"""A replica, by whatever name the caller has for it."""

Cure = Hashable
"""An event that may end a wait: `("quota", "tenant/a")`, `("room",)`, `("node",)`, `("policy",)`, `("grant", name)`, ..."""

_SLACK: Final = 16


class Wait(NamedTuple):
    """Why a line is not tried now, what would end that, and when it is tried all the same.

    Without `cures` it is a backoff: only time ends it. `since` is the version that the attempt had seen, `at_ms` when it ended.
    """

    reason: str
    cures: frozenset[Cure]
    until_ms: int
    at_ms: int
    since: int


class Line:
    """Replicas of one tenant and one priority that ask the same of a node, so that all of them have one fate.

    Three places, and a member is in one of them. `_fresh` is the queue, in order of arrival. Those taken are `_flying`, each
    with its place; places are given in the order in which members are first taken. `_landed` are those that came back: their
    places lie before every fresh one, for nobody is taken before those in front of him.
    """

    __slots__ = (
        *("_flying", "_fresh", "_landed", "_places", "_taken", "_youngest"),
        *("amount", "attempts", "deadline_ms", "failed_ms", "failures", "key", "priority", "serial", "tenant", "told", "wait"),
    )

    def __init__(self, key: Hashable, tenant: str, priority: int, amount: Vector, deadline_ms: int | None = None) -> None:
        self.key, self.tenant, self.priority, self.amount, self.deadline_ms = key, tenant, priority, amount, deadline_ms
        self.serial = 0
        """Given by the backlog: the order in which lines were begun, to break ties."""
        self.wait: Wait | None = None
        self.attempts = 0
        self.failures = self.failed_ms = 0
        """How often it failed since something of it was last placed, or had a reason to wait for long; and when it last did."""
        self.told = ""
        """The last reason that everybody in it was told."""
        self._youngest = [0, 0]
        """Those that arrived together share one of these: when, and how many of them are fresh."""
        self._fresh: OrderedDict[Member, list[int]] = OrderedDict()
        self._flying: dict[Member, tuple[int, int]] = {}
        self._landed: dict[Member, tuple[int, int]] = {}
        self._places: list[tuple[int, Member]] = []
        """A heap of those that landed. One that was removed stays until it comes to the top, which is never stale."""
        self._taken = 0

    def __repr__(self) -> str:
        return f"Line({self.key!r}, {self.tenant}, {self.priority}, {self.standing}: {self.queued}+{self.flying})"

    def __len__(self) -> int:
        """Members, queued and in flight."""
        return len(self._fresh) + len(self._landed) + len(self._flying)

    @property
    def queued(self) -> int:
        return len(self._fresh) + len(self._landed)

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def standing(self) -> str:
        """`active`, `waiting` for a cure, or in `backoff`."""
        return "active" if self.wait is None else "waiting" if self.wait.cures else "backoff"

    def add(self, member: Member, now_ms: int) -> None:
        """At the end. No arrival counts as earlier than one that came before it."""
        together = self._youngest
        if now_ms > together[0]:
            together = self._youngest = [now_ms, 0]
        together[1] += 1
        self._fresh[member] = together

    def head_ms(self) -> int:
        """When the first in the queue arrived. Somebody must be queued."""
        if self._landed:
            return self._landed[self._places[0][1]][1]
        return next(iter(self._fresh.values()))[0]

    def run(self) -> int:
        """How many at the front arrived together, at least. Somebody must be queued."""
        return 1 if self._landed else next(iter(self._fresh.values()))[1]

    def arrived_ms(self, member: Member) -> int:
        fresh = self._fresh.get(member)
        return fresh[0] if fresh is not None else (self._landed.get(member) or self._flying[member])[1]

    def members(self) -> list[Member]:
        """Those queued, first one first."""
        return [*sorted(self._landed, key=lambda member: self._landed[member][0]), *self._fresh]

    def in_flight(self, member: Member) -> bool:
        return member in self._flying

    def pop(self, count: int) -> list[Member]:
        """So many from the front, who must be there; they are in flight then."""
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
        """From flight to its old place."""
        place = self._landed[member] = self._flying.pop(member)
        heappush(self._places, (place[0], member))

    def remove(self, member: Member) -> bool:
        """From wherever it is: was it in flight?"""
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


_Entry = tuple[int, int, int, Line]


class Ageing(NamedTuple):
    """A priority rises by `step` a minute, by `bound` at most."""

    step: int = 1
    bound: int = 10

    def lifted(self, priority: int, waited_ms: int) -> int:
        return priority + min(self.bound, self.step * (max(0, waited_ms) // MINUTE_MS))


class Order:
    """Lines by the arrival of their heads; if `urgent`, earlier deadlines go before that. First one first.

    Entries in the heap stay where they are. A head that is taken only makes its line's key later, so an entry that is out of
    date is corrected when it comes to the top; a head that comes back makes it earlier, and is put in anew.
    """

    __slots__ = ("_entries", "_heap", "_urgent")

    def __init__(self, *, urgent: bool) -> None:
        self._urgent = urgent
        self._entries: dict[Line, _Entry] = {}
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, line: Line) -> None:
        """It may be tried, or its head is another than before. Somebody of it must be queued."""
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

    def drop(self, line: Line) -> None:
        """It may not be tried any more, or nobody of it is queued."""
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


class Rank:
    """The lines of one priority that may be tried: a lane for each tenant, and all of them by age."""

    __slots__ = ("_oldest", "lanes", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.lanes: dict[str, Order] = {}
        self._oldest = Order(urgent=False)

    def put(self, line: Line) -> None:
        lane = self.lanes.get(line.tenant)
        if lane is None:
            lane = self.lanes[line.tenant] = Order(urgent=True)
        lane.put(line)
        self._oldest.put(line)

    def drop(self, line: Line) -> None:
        lane = self.lanes.get(line.tenant)
        if lane is not None:
            lane.drop(line)
            if not lane:
                del self.lanes[line.tenant]
            self._oldest.drop(line)

    def waited_ms(self, now_ms: int) -> int:
        """How long the oldest head has been here."""
        oldest = self._oldest.first()
        return 0 if oldest is None else now_ms - oldest[1]


class Ranks:
    """All lines that may be tried and have somebody queued."""

    __slots__ = ("_ranks", "ageing")

    def __init__(self, ageing: Ageing) -> None:
        self.ageing = ageing
        self._ranks: dict[int, Rank] = {}

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def put(self, line: Line) -> None:
        rank = self._ranks.get(line.priority)
        if rank is None:
            rank = self._ranks[line.priority] = Rank(line.priority)
        rank.put(line)

    def drop(self, line: Line) -> None:
        rank = self._ranks.get(line.priority)
        if rank is not None:
            rank.drop(line)
            if not rank.lanes:
                del self._ranks[line.priority]

    def tenants(self) -> list[str]:
        return list(dict.fromkeys(tenant for rank in self._ranks.values() for tenant in rank.lanes))

    def descending(self, now_ms: int) -> Iterator[dict[str, list[Order]]]:
        """The lanes of each tenant, from the highest effective priority down; those that came level are together."""
        levels: dict[int, list[Rank]] = {}
        for priority, rank in self._ranks.items():
            levels.setdefault(self.ageing.lifted(priority, rank.waited_ms(now_ms)), []).append(rank)
        for level in sorted(levels, reverse=True):
            lanes: dict[str, list[Order]] = {}
            for rank in levels[level]:
                for tenant, lane in rank.lanes.items():
                    lanes.setdefault(tenant, []).append(lane)
            yield lanes
