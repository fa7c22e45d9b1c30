"""Pending replicas whose reason has not been recorded yet.

Whoever stands in a line that waits has its reason; nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final, cast

from remit.proposal.attempts import SAID_MS
from remit.proposal.queue.class_queues import Line

TOLD_MAX: Final = 4_096
"""How many are told at once of a wait that they were not tried for themselves."""

RETELL_MS: Final = 45_000
"""How often everybody in a line that is longer than a batch is told again that it waits."""


class Untold:
    def __init__(self) -> None:
        self._slots: dict[int, None] = {}
        """Of their lines some wait, and some are to be tried before long."""
        self._again: dict[Line, int] = {}
        """Of lines of which not everybody was told, or not this time: when all in them are to be."""
        self._look = False
        """May a line have begun to wait since it was last looked?"""

    def joins(self, slot: int, line: Line) -> None:
        self._slots[slot] = None
        self._look = self._look or line.wait is not None

    def goes(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def tried(self, line: Line, slots: Collection[int], told: bool, now_ms: int) -> None:
        """These were tried in vain with their line, and told so; or not, because they were a moment ago."""
        self._look = True
        for slot in slots if line.wait is not None else ():
            self._slots.pop(slot, None)
        if line.queued > len(slots):
            self._again.setdefault(line, now_ms)
        elif not told:
            self._again.setdefault(line, now_ms + RETELL_MS - SAID_MS)

    def refused(self, line: Line, now_ms: int) -> None:
        """Some of it were claimed a place for, refused, and told so. Those behind them stand as long, and were never tried."""
        self._look = True
        self._again.setdefault(line, now_ms + RETELL_MS)

    def times_ms(self) -> Iterable[int]:
        return self._again.values()

    def take(self, now_ms: int, line_of: Callable[[int], Line | None]) -> dict[Line, list[int]]:
        """Who is to be told now, by line."""
        for line in [line for line, at_ms in self._again.items() if at_ms <= now_ms]:
            del self._again[line]
            if len(line):  # one that is to be tried just now may go on waiting after that: then they are told
                self._slots.update(dict.fromkeys(cast(Iterable[int], line.members())))
                self._again[line], self._look = now_ms + RETELL_MS, True
        lines: dict[Line, list[int]] = {}
        some = list(islice(self._slots, TOLD_MAX)) if self._look else []
        self._look = self._look and len(self._slots) > len(some)
        for slot in some:
            del self._slots[slot]
            line_ = line_of(slot)
            if line_ is not None and line_.wait is not None:
                lines.setdefault(line_, []).append(slot)
            elif line_ is not None:
                self._slots[slot] = None
        return lines
