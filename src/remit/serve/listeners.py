"""May one more be told something without end? So many at once, and no flow has all. What they are told is not known here.

A flow may hold as many streams as are still free: one alone gets half of all, the next half of the rest, and so on. So whoever
has none yet finds a place, however many another has, and nobody's share is reserved while nobody wants it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from remit.serve.failures import Failure

AGAIN_MS = 5_000


class Listeners:
    """Those of one sort: people, or components; a flood of one must not keep the other out."""

    def __init__(self, listeners_max: int) -> None:
        self._max = listeners_max
        self._held: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def one(self, flow: str) -> Iterator[None]:
        """One more, for as long as this lasts. Raises `Failure`."""
        mine, free = self._held[flow], self._max - self.count
        if not free:
            raise _too_many("overloaded", f"{self.count} watchers listen here already, and no more are taken")
        if mine >= free:
            raise _too_many("throttled", f"{flow} has {mine} streams open here, and {free} are left for everybody")
        self._held[flow] += 1
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            self._held[flow] -= 1
            if not self._held[flow]:
                del self._held[flow]


def _too_many(code: str, why: str) -> Failure:
    cure = "end a watch, a log or a session that is not needed, or ask another server"
    return Failure(429, code, why, cure=cure, retry_after_ms=AGAIN_MS)
