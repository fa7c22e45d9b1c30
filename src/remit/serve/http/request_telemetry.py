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
from remit.model.counters import OTHER, SECONDS_BUCKETS, Histogram, BoundedCounter
from remit.serve.http.routes import Route
from remit.world.clock import stopwatch_ns
from remit.world.structured_log import Chronicle, Level

SLOW_S: Final = 1.0
EXPECTED_STATUSES: Final = frozenset((404, 410))
"""Whoever looks whether something is there, or has watched from too far back, does nothing odd."""
PROBE_ROUTES: Final = frozenset(("getHealth", "getReadiness"))
"""These are asked for as long as the answer is no."""


class AccessLine:
    """One request, as far as it concerns a reader of the log. `path` is as the asker wrote it."""

    __slots__ = ("actor", "code", "method", "path", "route", "status", "streams", "tenant", "duration_s", "trace")

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.route = self.trace = self.code = self.actor = self.tenant = ""
        self.status, self.duration_s, self.streams = 0, 0.0, False


class AccessLog:
    """`everything`: is each request told? Known once, so that it costs nothing where it is not."""

    def __init__(self, log: Chronicle) -> None:
        self._log = log
        self.logs_all = log.tells("debug")

    def should_log(self, status: int, duration_s: float, *, streams: bool) -> bool:
        """Is it worth looking closer?"""
        return self.logs_all or status >= 400 or (duration_s > SLOW_S and not streams)

    def write(self, line: AccessLine) -> None:
        fields: dict[str, object] = {
            "trace": line.trace, "method": line.method, "route": line.route, "path": line.path, "status": line.status,
            "code": line.code, "actor": line.actor, "tenant": line.tenant, "took_ms": round(line.duration_s * 1000, 1),
        }  # fmt: skip
        slow = line.duration_s > SLOW_S and not line.streams
        level: Level = "debug"
        if line.route in PROBE_ROUTES:
            pass
        elif line.status >= 500 or slow:
            level = "warning"
        elif line.status >= 400 and line.status not in EXPECTED_STATUSES:
            level = "info"
        event = "request refused" if line.status >= 400 else "request was slow" if slow else "request"
        if self.logs_all or not line.status:
            getattr(self._log, level)(event, **fields)
        else:
            self._log.seldom(level, f"{line.route} {line.status} {line.code}", event, **fields)


def decision_logger(log: Chronicle) -> Callable[[Entry], None] | None:
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


NO_ROUTE: Final = "none"
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))
STATUS_CLASSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx")
TOO_MANY_REQUESTS: Final = 429
_TENANT: Final = "{tenant}"
DISCONNECTED: Final = "gone"
"""Of an asker who left before it was answered."""


class RequestMetrics:
    """Of one server. One request costs two readings of a clock and three additions."""

    def __init__(self, now_ns: Callable[[], int] = stopwatch_ns) -> None:
        self.now_ns = now_ns
        self.in_flight = 0
        self.counts: dict[tuple[str, str, str], int] = {}
        """By route, method and class of status."""
        self.durations: dict[str, Histogram] = {}
        """By route; of what streams, nothing: it lasts for as long as the asker listens."""
        self.problems = BoundedCounter()
        self.throttled = BoundedCounter()
        """By flow: who was told to come back later."""

    def count_problem(self, code: str, status: int, route: Route | None) -> None:
        """It is answered with a problem."""
        self.problems.add(code)
        if status == TOO_MANY_REQUESTS and route is not None:
            self.throttled.add("first" if route.unqueued else "tenants" if _TENANT in route.path else "scope")

    def begin(self) -> int:
        self.in_flight += 1
        return self.now_ns()

    def end(self, started_ns: int, route: str, method: str, status: int, *, streams: bool = False) -> float:
        """Answers how many seconds it took. `status` 0: nobody was there to be answered."""
        self.in_flight -= 1
        duration_s = (self.now_ns() - started_ns) / 1e9
        kind = STATUS_CLASSES[status // 100 - 1] if 100 <= status < 600 else DISCONNECTED
        key = route, method if method in METHODS else OTHER, kind
        self.counts[key] = self.counts.get(key, 0) + 1
        if not streams:
            histogram = self.durations.get(route)
            if histogram is None:
                histogram = self.durations[route] = Histogram(SECONDS_BUCKETS)
            histogram.add(duration_s)
        return duration_s
