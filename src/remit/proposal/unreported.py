"""Pending replicas whose reason has not been recorded yet.

Replicas in a waiting queue share the queue's reason; this module tracks which of them still need a record of it. It writes
no records itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final, cast

from remit.proposal.attempts import REPORT_INTERVAL_MS
from remit.proposal.queue.class_queues import ClassQueue

REPORTS_MAX: Final = 4_096
"""Replicas reported in one cycle that were not part of an attempt themselves."""

REPORT_AGAIN_MS: Final = 45_000
"""How often all members of a queue longer than a batch are reported again."""


class UnreportedReplicas:
    def __init__(self) -> None:
        self._slots: dict[int, None] = {}
        """Replicas to report. Some of their queues wait; others are about to be tried."""
        self._again: dict[ClassQueue, int] = {}
        """Queues of which not all members were reported, and when all of them are due."""
        self._look = False
        """Whether a queue may have started to wait since the last check."""

    def joins(self, slot: int, line: ClassQueue) -> None:
        self._slots[slot] = None
        self._look = self._look or line.wait is not None

    def goes(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def tried(self, line: ClassQueue, slots: Collection[int], told: bool, now_ms: int) -> None:
        """These members were tried without success. `told`: a record was written; it is omitted if the same was recorded a
        moment ago.
        """
        self._look = True
        for slot in slots if line.wait is not None else ():
            self._slots.pop(slot, None)
        if line.queued > len(slots):
            self._again.setdefault(line, now_ms)
        elif not told:
            self._again.setdefault(line, now_ms + REPORT_AGAIN_MS - REPORT_INTERVAL_MS)

    def refused(self, line: ClassQueue, now_ms: int) -> None:
        """Some members were claimed, refused and reported. The members behind them wait as long and were never tried."""
        self._look = True
        self._again.setdefault(line, now_ms + REPORT_AGAIN_MS)

    def times_ms(self) -> Iterable[int]:
        return self._again.values()

    def take(self, now_ms: int, line_of: Callable[[int], ClassQueue | None]) -> dict[ClassQueue, list[int]]:
        """Replicas to report now, by queue."""
        for line in [line for line, at_ms in self._again.items() if at_ms <= now_ms]:
            del self._again[line]
            if len(line):  # a queue that is about to be tried may keep waiting after that; its members are reported then
                self._slots.update(dict.fromkeys(cast(Iterable[int], line.members())))
                self._again[line], self._look = now_ms + REPORT_AGAIN_MS, True
        lines: dict[ClassQueue, list[int]] = {}
        some = list(islice(self._slots, REPORTS_MAX)) if self._look else []
        self._look = self._look and len(self._slots) > len(some)
        for slot in some:
            del self._slots[slot]
            line_ = line_of(slot)
            if line_ is not None and line_.wait is not None:
                lines.setdefault(line_, []).append(slot)
            elif line_ is not None:
                self._slots[slot] = None
        return lines
