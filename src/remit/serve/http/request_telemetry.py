"""Access log and request metrics.

All at debug; those that were refused, were slow or tripped over a bug always.

Counted on the way; the names of routes are the only names kept.

Nothing that an asker writes becomes the name of a count: a path that leads nowhere counts under `none`, and a method or a code
that is not in the table of its kind under `other`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from remit.commitment.outcomes import Entry
from remit.model.counters import OTHER, SECONDS, Buckets, Counts
from remit.serve.http.routes import Route
from remit.world.clock import stopwatch_ns
from remit.world.structured_log import Chronicle, Level

SLOW_S: Final = 1.0
ORDINARY: Final = frozenset((404, 410))
"""Whoever looks whether something is there, or has watched from too far back, does nothing odd."""
PROBES: Final = frozenset(("getHealth", "getReadiness"))
"""These are asked for as long as the answer is no."""


class AccessLine:
    """One request, as far as it concerns a reader of the log. `path` is as the asker wrote it."""

    __slots__ = ("actor", "code", "method", "path", "route", "status", "streams", "tenant", "took_s", "trace")

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.route = self.trace = self.code = self.actor = self.tenant = ""
        self.status, self.took_s, self.streams = 0, 0.0, False


class Access:
    """`everything`: is each request told? Known once, so that it costs nothing where it is not."""

    def __init__(self, log: Chronicle) -> None:
        self._log = log
        self.everything = log.tells("debug")

    def concerns(self, status: int, took_s: float, *, streams: bool) -> bool:
        """Is it worth looking closer?"""
        return self.everything or status >= 400 or (took_s > SLOW_S and not streams)

    def told(self, one: AccessLine) -> None:
        fields: dict[str, object] = {
            "trace": one.trace, "method": one.method, "route": one.route, "path": one.path, "status": one.status,
            "code": one.code, "actor": one.actor, "tenant": one.tenant, "took_ms": round(one.took_s * 1000, 1),
        }  # fmt: skip
        slow = one.took_s > SLOW_S and not one.streams
        level: Level = "debug"
        if one.route in PROBES:
            pass
        elif one.status >= 500 or slow:
            level = "warning"
        elif one.status >= 400 and one.status not in ORDINARY:
            level = "info"
        event = "request refused" if one.status >= 400 else "request was slow" if slow else "request"
        if self.everything or not one.status:
            getattr(self._log, level)(event, **fields)
        else:
            self._log.seldom(level, f"{one.route} {one.status} {one.code}", event, **fields)


def decisions_told(log: Chronicle) -> Callable[[Entry], None] | None:
    """What the authority decided, each operation with the trace of the request behind it; None where nobody would read it."""
    if not log.tells("debug"):
        return None

    def tell(entry: Entry) -> None:
        log.debug(
            "refused" if entry.code else "accepted",
            trace=entry.trace,
            operation=entry.id,
            did=entry.did,
            subject=entry.subject,
            actor=entry.actor,
            role=entry.role,
            revision=entry.seen,
            age_ms=entry.age_ms,
            code=entry.code,
            detail=entry.detail,
        )

    return tell


NOWHERE: Final = "none"
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))
CLASSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx")
TOO_MANY: Final = 429
_TENANT: Final = "{tenant}"
GONE: Final = "gone"
"""Of an asker who left before it was answered."""


class Requests:
    """Of one server. One request costs two readings of a clock and three additions."""

    def __init__(self, now_ns: Callable[[], int] = stopwatch_ns) -> None:
        self.now_ns = now_ns
        self.under_way = 0
        self.counts: dict[tuple[str, str, str], int] = {}
        """By route, method and class of status."""
        self.took: dict[str, Buckets] = {}
        """By route; of what streams, nothing: it lasts for as long as the asker listens."""
        self.problems = Counts()
        self.throttled = Counts()
        """By flow: who was told to come back later."""

    def refused(self, code: str, status: int, route: Route | None) -> None:
        """It is answered with a problem."""
        self.problems.add(code)
        if status == TOO_MANY and route is not None:
            self.throttled.add("first" if route.first else "tenants" if _TENANT in route.path else "scope")

    def began(self) -> int:
        self.under_way += 1
        return self.now_ns()

    def ended(self, began_ns: int, route: str, method: str, status: int, *, streams: bool = False) -> float:
        """Answers how many seconds it took. `status` 0: nobody was there to be answered."""
        self.under_way -= 1
        took_s = (self.now_ns() - began_ns) / 1e9
        kind = CLASSES[status // 100 - 1] if 100 <= status < 600 else GONE
        key = route, method if method in METHODS else OTHER, kind
        self.counts[key] = self.counts.get(key, 0) + 1
        if not streams:
            spread = self.took.get(route)
            if spread is None:
                spread = self.took[route] = Buckets(SECONDS)
            spread.add(took_s)
        return took_s
