"""Limits of concurrent streams and large bodies per tenant.

Counted by whom it is held for; what is shared, and whose turn it is, is not known.

Components have as much again, for themselves: whatever people hold, agents hear their orders. One tenant has a quarter at most,
and all tenants together three quarters; the last quarter is for those who look what is wrong, and for tenants that have little.

So many at once, and no flow has all. What they are told is not known here.

A flow may hold as many streams as are still free: one alone gets half of all, the next half of the rest, and so on. So whoever
has none yet finds a place, however many another has, and nobody's share is reserved while nobody wants it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from remit.model.identity import Principal
from remit.serve.http.replies import Failure

EACH: Final = 4
LITTLE: Final = 64
"""One part in so many is little."""
_COMPONENTS: Final = "components"
_PEOPLE: Final = "people"
_TENANTS: Final = "tenants"


class Shares:
    """Of `most` in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held[_COMPONENTS] + self._held[_PEOPLE]

    def take(self, asker: Principal, amount: int = 1) -> bool:
        """False: it may not have so much more, and has not taken it."""
        if not self._may_have(asker, amount):
            return False
        for name in _names(asker):
            self._held[name] += amount
        return True

    def give_back(self, asker: Principal, amount: int = 1) -> None:
        for name in _names(asker):
            self._held[name] -= amount
            if not self._held[name]:
                del self._held[name]

    def _may_have(self, asker: Principal, amount: int) -> bool:
        names = _names(asker)
        if self._held[names[0]] + amount > self.most:
            return False
        if not asker.tenant:
            return True
        mine, tenants = self._held[names[-1]] + amount, self._held[_TENANTS] + amount
        return mine <= max(1, self.most // EACH) and (tenants <= self.most - self.most // EACH or mine <= self.most // LITTLE)


def _names(asker: Principal) -> tuple[str, ...]:
    if asker.audience in ("agent", "component"):
        return (_COMPONENTS,)
    return (_PEOPLE, _TENANTS, f"tenant {asker.tenant}") if asker.tenant else (_PEOPLE,)


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
