"""Retry policy (backoff, deadline) and retry budget (token bucket).

Pure arithmetic over a clock reading and a random number: nothing is sent and nothing sleeps here.

The two limits prevent two different problems. The **policy** bounds one call: how long, how often and how far apart its
attempts are. The **budget** bounds all calls of a client together: when everything fails, retries must stay a fraction of
the load, or they become the overload that keeps everything failing.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from remit.world.interfaces import Randomness

_DOUBLINGS_MAX: Final = 30
_MILLI: Final = 1000


class RetryPolicy(Struct, frozen=True):
    """`deadline_ms` bounds a call with all its attempts, `try_ms` one attempt. An unanswered attempt is abandoned after
    `try_ms`.
    """

    deadline_ms: int = 10_000
    try_ms: int = 3_000
    base_ms: int = 50
    cap_ms: int = 2_000
    attempts_max: int = 16

    def __post_init__(self) -> None:
        if min(self.deadline_ms, self.try_ms, self.base_ms, self.cap_ms, self.attempts_max) < 1:
            raise ValueError(f"every field of a retry policy must be at least 1: {self}")

    def backoff_ms(self, failures: int, remaining_ms: int, randomness: Randomness) -> int:
        """Return the backoff before the next attempt, after `failures` failed ones and `remaining_ms` before the deadline: full
        jitter.

        The backoff is uniform between zero and a ceiling that doubles, so that callers that failed together are spread over
        the complete interval instead of retrying in waves. Half of the remaining time is reserved for the attempt itself.
        """
        ceiling = min(self.cap_ms, self.base_ms << min(max(0, failures - 1), _DOUBLINGS_MAX), remaining_ms // 2)
        return randomness.jitter_ms(max(0, ceiling))


class RetryBudget:
    """Token bucket of retries: each first attempt adds a fraction of a token, time adds a few per second, each retry takes one.

    Counted in thousandths, so that the arithmetic is exact. A token may be taken in advance by waiting until it has accrued.
    """

    def __init__(self, *, percent: int = 20, per_second: int = 10, tokens_max: int = 100) -> None:
        if not (0 <= percent <= 100 and per_second >= 0 and tokens_max >= 1):
            raise ValueError(f"invalid retry budget: {percent} % and {per_second}/s, at most {tokens_max}")
        self._per_call = percent * _MILLI // 100
        self._per_ms = per_second  # tokens per second equal thousandths per millisecond
        self._capacity = tokens_max * _MILLI
        self._level = min(self._capacity, per_second * _MILLI)
        self._at_ms: int | None = None

    def on_first_attempt(self, now_ms: int) -> None:
        self._refill(now_ms, self._per_call)

    def take(self, now_ms: int, wait_ms_max: int) -> int | None:
        """Take one retry token and return how long to wait for it; None, and take nothing, if that exceeds `wait_ms_max`."""
        self._refill(now_ms, 0)
        short = _MILLI - self._level
        if short > 0 and not self._per_ms:
            return None
        wait_ms = -(-short // self._per_ms) if short > 0 else 0
        if wait_ms > wait_ms_max:
            return None
        self._level -= _MILLI
        return wait_ms

    def _refill(self, now_ms: int, added: int) -> None:
        passed_ms = 0 if self._at_ms is None else max(0, now_ms - self._at_ms)
        self._level = min(self._capacity, self._level + passed_ms * self._per_ms + added)
        self._at_ms = now_ms
