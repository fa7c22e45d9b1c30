"""Limits of concurrent streams and large bodies per tenant.

`SharedLimit` is one capacity with ceilings: a tenant gets at most a quarter, and all tenants together three quarters. The
last quarter is left for operators and for tenants that hold little. Components have the same capacity again for themselves,
so that agents always get their assignments.

`WatchLimit` bounds open streams. A flow may hold as many as are still free: the first gets half of all, the next half of the
rest, and so on. So a flow without streams always finds a free one, and nothing is reserved for idle flows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from remit.model.identity import Principal
from remit.serve.http.replies import ApiProblem

TENANT_FRACTION: Final = 4
"""A tenant gets 1/4 of the limit at most, and all tenants together leave 1/4 free."""
SMALL_FRACTION: Final = 64
"""A tenant with at most 1/64 of the limit may go on acquiring when all tenants together have reached theirs."""
_COMPONENTS: Final = "components"
_USERS: Final = "people"
_TENANTS: Final = "tenants"


class SharedLimit:
    """A capacity of `limit` units, shared by principals."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held[_COMPONENTS] + self._held[_USERS]

    def acquire(self, principal: Principal, amount: int = 1) -> bool:
        """Acquire `amount` units for a principal. False: over a limit, and nothing was acquired."""
        if not self._allows(principal, amount):
            return False
        for name in _accounts(principal):
            self._held[name] += amount
        return True

    def release(self, principal: Principal, amount: int = 1) -> None:
        for name in _accounts(principal):
            self._held[name] -= amount
            if not self._held[name]:
                del self._held[name]

    def _allows(self, principal: Principal, amount: int) -> bool:
        names = _accounts(principal)
        if self._held[names[0]] + amount > self.limit:
            return False
        if not principal.tenant:
            return True
        tenant_total, tenants_total = self._held[names[-1]] + amount, self._held[_TENANTS] + amount
        return tenant_total <= max(1, self.limit // TENANT_FRACTION) and (
            tenants_total <= self.limit - self.limit // TENANT_FRACTION or tenant_total <= self.limit // SMALL_FRACTION
        )


def _accounts(principal: Principal) -> tuple[str, ...]:
    if principal.audience in ("agent", "component"):
        return (_COMPONENTS,)
    return (_USERS, _TENANTS, f"tenant {principal.tenant}") if principal.tenant else (_USERS,)


WATCH_RETRY_MS = 5_000


class WatchLimit:
    """Open streams of users, or of components. The two have separate limits so that one cannot crowd out the other."""

    def __init__(self, watches_max: int) -> None:
        self._max = watches_max
        self._held: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def slot(self, flow: str) -> Iterator[None]:
        """Hold one stream for the duration of the context. Raises `ApiProblem` if there are too many."""
        flow_count, free = self._held[flow], self._max - self.count
        if not free:
            raise _too_many_watches("overloaded", f"all {self.count} streams of this server are in use")
        if flow_count >= free:
            raise _too_many_watches(
                "throttled", f"{flow} has {flow_count} streams open, and only {free} are free for all callers"
            )
        self._held[flow] += 1
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            self._held[flow] -= 1
            if not self._held[flow]:
                del self._held[flow]


def _too_many_watches(code: str, detail: str) -> ApiProblem:
    cure = "close a watch, log or exec session that is not needed, or use another server"
    return ApiProblem(429, code, detail, cure=cure, retry_after_ms=WATCH_RETRY_MS)
