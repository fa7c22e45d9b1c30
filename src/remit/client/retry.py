"""Retry policy (backoff, deadline) and retry budget (token bucket).

Arithmetic over a clock reading and a lot; nothing is sent and nobody waits here.

Two bounds, for two dangers. The **shape** bounds one caller: how long, how often, how far apart. The **budget** bounds all
callers of a client together: when everything fails, retries must stay a fraction of the load, or they become the overload
that keeps everything failing.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from remit.world.interfaces import Chance

_DOUBLINGS_MAX: Final = 30
_MILLI: Final = 1000


class RetryShape(Struct, frozen=True):
    """`deadline_ms` bounds a whole call, `try_ms` one try of it. A silent try is given up after `try_ms`."""

    deadline_ms: int = 10_000
    try_ms: int = 3_000
    base_ms: int = 50
    cap_ms: int = 2_000
    attempts_max: int = 16

    def __post_init__(self) -> None:
        if min(self.deadline_ms, self.try_ms, self.base_ms, self.cap_ms, self.attempts_max) < 1:
            raise ValueError(f"every part of a retry shape is at least 1: {self}")

    def pause_ms(self, failures: int, left_ms: int, chance: Chance) -> int:
        """How long to wait after so many failed tries, with `left_ms` to the deadline: full jitter.

        From nothing up to a ceiling that doubles: callers that failed together come back spread over the whole time, not in
        waves. Half of what is left is kept for the try itself.
        """
        ceiling = min(self.cap_ms, self.base_ms << min(max(0, failures - 1), _DOUBLINGS_MAX), left_ms // 2)
        return chance.uniform_ms(max(0, ceiling))


class RetryBudget:
    """A bucket of retries: each first try puts in a share of one, time puts in a few a second, each retry takes one.

    Kept in thousandths, so that it is exact. A retry may be taken ahead, by waiting until it has come in.
    """

    def __init__(self, *, percent: int = 20, per_second: int = 10, tokens_max: int = 100) -> None:
        if not (0 <= percent <= 100 and per_second >= 0 and tokens_max >= 1):
            raise ValueError(f"no retry budget: {percent} % and {per_second}/s, at most {tokens_max}")
        self._share = percent * _MILLI // 100
        self._per_ms = per_second  # so many a second are as many thousandths a millisecond
        self._full = tokens_max * _MILLI
        self._level = min(self._full, per_second * _MILLI)
        self._at_ms: int | None = None

    def first_try(self, now_ms: int) -> None:
        self._flow(now_ms, self._share)

    def take(self, now_ms: int, wait_ms_max: int) -> int | None:
        """Take one retry: how long to wait for it, at the latest. None, and nothing taken, if that is over `wait_ms_max`."""
        self._flow(now_ms, 0)
        short = _MILLI - self._level
        if short > 0 and not self._per_ms:
            return None
        wait_ms = -(-short // self._per_ms) if short > 0 else 0
        if wait_ms > wait_ms_max:
            return None
        self._level -= _MILLI
        return wait_ms

    def _flow(self, now_ms: int, added: int) -> None:
        passed_ms = 0 if self._at_ms is None else max(0, now_ms - self._at_ms)
        self._level = min(self._full, self._level + passed_ms * self._per_ms + added)
        self._at_ms = now_ms
