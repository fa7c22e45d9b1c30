"""May one more go now? A bucket of permissions that fills with time; no clock is read here."""

from __future__ import annotations

from typing import Final

_WHOLE: Final = 1_000_000


class Bucket:
    """`burst` at once, and then as many a second as is asked for at each draw. Kept in millionths, so that it is exact."""

    def __init__(self, burst: int) -> None:
        self._full = self._level = burst * _WHOLE
        self._at_ms: int | None = None

    def wait_ms(self, now_ms: int, milli_per_s: int) -> int:
        """How long until one may be taken; 0: it was taken now. Time since the last draw counts at this draw's rate."""
        passed_ms = 0 if self._at_ms is None else max(0, now_ms - self._at_ms)
        self._level, self._at_ms = min(self._full, self._level + passed_ms * milli_per_s), now_ms
        if self._level >= _WHOLE:
            self._level -= _WHOLE
            return 0
        return -(-(_WHOLE - self._level) // max(1, milli_per_s))
