"""Access log and request metrics.

The access log has every request at level debug; at other levels only failed and slow requests, rate-limited.

No label value comes from a request: requests without a route count as route `none`, and unknown methods and codes as
`other`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from remit.commitment.outcomes import AuditEntry
from remit.model.counters import OTHER, SECONDS_BUCKETS, BoundedCounter, Histogram
from remit.serve.http.routes import Route
from remit.world.clock import stopwatch_ns
from remit.world.structured_log import LogLevel, StructuredLog

SLOW_S: Final = 1.0
EXPECTED_STATUSES: Final = frozenset((404, 410))
"""Logged only at debug: lookups of objects that may not exist, and watches that start too far back."""
PROBE_ROUTES: Final = frozenset(("getHealth", "getReadiness"))
"""Health probes: called repeatedly while they fail, so they are logged only at debug."""


class AccessLine:
    """One request in the access log. `path` is as the client sent it."""

    __slots__ = ("actor", "code", "duration_s", "method", "path", "route", "status", "streams", "tenant", "trace")

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.route = self.trace = self.code = self.actor = self.tenant = ""
        self.status, self.duration_s, self.streams = 0, 0.0, False


class AccessLog:
    """Writes the access log. `logs_all`: every request is logged; determined once, because it is checked for each request."""

    def __init__(self, log: StructuredLog) -> None:
        self._log = log
        self.logs_all = log.is_enabled("debug")

    def should_log(self, status: int, duration_s: float, *, streams: bool) -> bool:
        """Return whether a request may have to be logged. `write` decides by route and level."""
        return self.logs_all or status >= 400 or (duration_s > SLOW_S and not streams)

    def write(self, line: AccessLine) -> None:
        fields: dict[str, object] = {
            "trace": line.trace, "method": line.method, "route": line.route, "path": line.path, "status": line.status,
            "code": line.code, "actor": line.actor, "tenant": line.tenant, "took_ms": round(line.duration_s * 1000, 1),
        }  # fmt: skip
        slow = line.duration_s > SLOW_S and not line.streams
        level: LogLevel = "debug"
        if line.route in PROBE_ROUTES:
            pass
        elif line.status >= 500 or slow:
            level = "warning"
        elif line.status >= 400 and line.status not in EXPECTED_STATUSES:
            level = "info"
        event = "request refused" if line.status >= 400 else "slow request" if slow else "request"
        if self.logs_all or not line.status:
            getattr(self._log, level)(event, **fields)
        else:
            self._log.rate_limited(level, f"{line.route} {line.status} {line.code}", event, **fields)


def decision_logger(log: StructuredLog) -> Callable[[AuditEntry], None] | None:
    """Return a function that logs each decision of the authority with the trace of its request; None unless debug is logged."""
    if not log.is_enabled("debug"):
        return None

    def tell(entry: AuditEntry) -> None:
        log.debug(
            "operation refused" if entry.code else "operation accepted",
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
"""Status class of requests whose client left before the response."""


class RequestMetrics:
    """Counters of one server. A request costs two clock readings and three additions."""

    def __init__(self, now_ns: Callable[[], int] = stopwatch_ns) -> None:
        self.now_ns = now_ns
        self.in_flight = 0
        self.counts: dict[tuple[str, str, str], int] = {}
        """Requests by route, method and status class."""
        self.durations: dict[str, Histogram] = {}
        """Durations by route. Streams are left out: they last as long as the client listens."""
        self.problems = BoundedCounter()
        self.throttled = BoundedCounter()
        """Rate-limited requests (429), by flow class."""

    def count_problem(self, code: str, status: int, route: Route | None) -> None:
        """Count a request that is answered with a problem."""
        self.problems.add(code)
        if status == TOO_MANY_REQUESTS and route is not None:
            self.throttled.add("first" if route.unqueued else "tenants" if _TENANT in route.path else "scope")

    def begin(self) -> int:
        self.in_flight += 1
        return self.now_ns()

    def end(self, started_ns: int, route: str, method: str, status: int, *, streams: bool = False) -> float:
        """Record a finished request and return its duration in seconds. `status` 0: the client left before the response."""
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
