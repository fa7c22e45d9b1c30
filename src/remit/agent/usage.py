"""What does each copy take? Processor time between two looks; how it is counted is the runner's affair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from remit.agent.copies import Copy
from remit.agent.keeping import Use
from remit.law.tempo import Tempo

LOOKS: Final = 3
"""In beats: so often it is measured."""


class Meter:
    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._last: dict[tuple[str, int], tuple[int, int]] = {}
        self._milli: dict[tuple[str, int], int] = {}

    def due(self, now_ms: int, tempo: Tempo) -> bool:
        return self._at_ms is None or now_ms - self._at_ms >= LOOKS * tempo.beat_ms

    def take(self, now_ms: int, uses: Sequence[Use]) -> None:
        passed_ms = 0 if self._at_ms is None else now_ms - self._at_ms
        last, self._last, self._milli = self._last, {}, {}
        for use in uses:
            one = use.uid, use.attempt
            self._last[one] = use.cpu_ms, use.memory_bytes
            before = last.get(one)
            if before is not None and passed_ms > 0:
                self._milli[one] = max(0, use.cpu_ms - before[0]) * 1000 // passed_ms
        self._at_ms = now_ms

    def of(self, copy: Copy) -> tuple[int, int]:
        """Thousandths of a processor, and bytes of memory."""
        one = copy.uid, copy.attempt
        return self._milli.get(one, 0), self._last.get(one, (0, 0))[1]
