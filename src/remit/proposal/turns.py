"""In which order do lines come? By priority, age, deadline and arrival. Only lines that may be tried are known here.

**Age.** A priority rises by a step for every whole minute that its oldest head has waited, so that a steady stream of slightly
more important work cannot keep it out for ever. The rise is bounded, for two reasons. What must come first in an incident has
to stay first, however much old work there is: nothing passes work that is more than the bound above it. And without a bound,
everything that waits long would end above everything new, and priorities would mean nothing in a full cluster, where they
matter most.

Age belongs to a priority and not to one line, so that it never decides between two tenants of the same priority: else whoever
floods the queue first would, with older heads, shut out the others for as long as the rise lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from remit.proposal.lines import Line

MINUTE_MS: Final = 60_000
NO_DEADLINE: Final = 1 << 62
_SLACK: Final = 16

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
