"""Telemetry of one server: request and lifecycle metrics, the registry that exposes them, the access log."""

from __future__ import annotations

from remit.observation.watch_cache import WatchCache
from remit.serve.http.request_telemetry import AccessLog, RequestMetrics
from remit.serve.metrics.exposition import MetricsRegistry
from remit.serve.metrics.lifecycle_metrics import LifecycleMetrics
from remit.world.interfaces import Clock
from remit.world.structured_log import StructuredLog


class Telemetry:
    """`registry` exposes the metrics, with those of other components in this process."""

    def __init__(self, watch_cache: WatchCache, clock: Clock, log: StructuredLog | None) -> None:
        self.requests = RequestMetrics()
        self.lifecycle = LifecycleMetrics(watch_cache, clock)
        self.registry = MetricsRegistry()
        self.log, self.access_log = log, None if log is None else AccessLog(log)
