"""Metric definitions and text exposition; `/metrics` of processes without an API.

All metrics are defined in one table, from which docs/metrics.md is generated; a sample that is not in the table is a bug.
Names follow the Prometheus conventions. Label values come from closed sets, or are bounded and then counted as `other`, so
the number of series does not grow with the load.

A process without an API serves `/metrics` on loopback only. It needs no token: metrics name no objects, and only this
machine can reach them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing
from ipaddress import ip_address
from typing import Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remit.model.counters import Histogram
from remit.world.interfaces import ListenFailed
from remit.world.net.connections import LOCALHOST, BoundSocket, ListenAddress
from remit.world.net.http_server import serve_http

MetricComponent = Literal["server", "scheduler", "controllers", "agent"]


class MetricDefinition(NamedTuple):
    """One metric. `component` is the process that reports it; `remit up` runs server, scheduler and controllers as one process.

    A metric with a `former_name` is exposed under both names for one release.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    component: MetricComponent
    help: str
    labels: tuple[str, ...] = ()
    former_name: str = ""


_DEFINITIONS: Final = (
    MetricDefinition("remit_replicas", "gauge", "server", "Replicas by phase.", ("phase",)),
    MetricDefinition("remit_nodes", "gauge", "server", "Nodes by health.", ("health",)),
    MetricDefinition("remit_objects", "gauge", "server", "Stored objects by kind.", ("kind",)),
    MetricDefinition("remit_phase_entries_total", "counter", "server", "Transitions of replicas into a phase.", ("phase",)),
    MetricDefinition(
        "remit_bind_duration_seconds", "histogram", "server", "Time from a replica becoming pending until it is bound."
    ),
    MetricDefinition("remit_start_duration_seconds", "histogram", "server", "Time from a replica being bound until it runs."),
    MetricDefinition(
        "remit_ready_duration_seconds", "histogram", "server", "Time from a replica being bound until it is ready."
    ),
    MetricDefinition("remit_replica_attempts", "histogram", "server", "Attempts that a replica had made when it was released."),
    MetricDefinition(
        "remit_operations_total",
        "counter",
        "server",
        "Operations accepted by the authority, by type of operation.",
        ("operation", "did"),
    ),
    MetricDefinition(
        "remit_refusals_total", "counter", "server", "Operations refused by the authority, by refusal code.", ("code",)
    ),
    MetricDefinition(
        "remit_evicted_replicas_total", "counter", "server", "Replicas that lost their node, by cause.", ("reason",)
    ),
    MetricDefinition(
        "remit_authority_is_leader",
        "gauge",
        "server",
        "1 while this server is the authority of its scope, otherwise 0.",
        former_name="remit_authority_leading",
    ),
    MetricDefinition("remit_authority_epoch", "gauge", "server", "Epoch of the authority; every takeover increases it."),
    MetricDefinition("remit_authority_batch_size", "histogram", "server", "Operations per batch of the authority."),
    MetricDefinition(
        "remit_authority_commit_duration_seconds",
        "histogram",
        "server",
        "Time from the decision on a batch until it is durable.",
    ),
    MetricDefinition(
        "remit_authority_replicas",
        "gauge",
        "server",
        "Replicas in the memory of the authority.",
        former_name="remit_books_replicas",
    ),
    MetricDefinition(
        "remit_authority_outcomes",
        "gauge",
        "server",
        "Recorded outcomes of operations, which answer retries.",
        former_name="remit_books_outcomes",
    ),
    MetricDefinition(
        "remit_heartbeat_age_seconds",
        "gauge",
        "server",
        "Time since a node's last heartbeat, by quantile; 1 is the maximum.",
        ("quantile",),
    ),
    MetricDefinition(
        "remit_tenant_quota_used_ratio",
        "gauge",
        "server",
        "Share of a tenant's quota in use; only the tenants with the highest shares.",
        ("tenant", "resource"),
    ),
    MetricDefinition("remit_view_age_seconds", "gauge", "server", "Age of a component's view of the store.", ("component",)),
    MetricDefinition(
        "remit_store_write_duration_seconds",
        "histogram",
        "server",
        "Time to make a group of commits durable, including fsync.",
    ),
    MetricDefinition("remit_store_write_rows", "histogram", "server", "Rows per group of commits; a group shares one fsync."),
    MetricDefinition("remit_store_bytes", "gauge", "server", "Size of the store on disk, including its write-ahead log."),
    MetricDefinition("remit_store_revision", "gauge", "server", "Latest store revision seen by this server."),
    MetricDefinition(
        "remit_http_requests_total",
        "counter",
        "server",
        "HTTP requests by route, method and status class; route is none if no route matched.",
        ("route", "method", "status_class"),
    ),
    MetricDefinition(
        "remit_http_request_duration_seconds",
        "histogram",
        "server",
        "Duration of HTTP requests by route, without streams.",
        ("route",),
    ),
    MetricDefinition("remit_http_requests_in_flight", "gauge", "server", "HTTP requests in progress, including streams."),
    MetricDefinition(
        "remit_http_problems_total",
        "counter",
        "server",
        "HTTP requests answered with a problem document, by problem code.",
        ("code",),
    ),
    MetricDefinition(
        "remit_http_throttled_total",
        "counter",
        "server",
        "HTTP requests rejected with 429, by class of flow.",
        ("flow",),
    ),
    MetricDefinition(
        "remit_watchers", "gauge", "server", "Open streams of users and components: watches, followed logs, exec sessions."
    ),
    MetricDefinition(
        "remit_pending_replicas",
        "gauge",
        "scheduler",
        "Replicas waiting for placement, by reason; queued: waiting for a scheduling round.",
        ("reason",),
    ),
    MetricDefinition(
        "remit_pending_resources",
        "gauge",
        "scheduler",
        "Resources requested by waiting replicas: cores, bytes of memory, devices.",
        ("reason", "resource"),
    ),
    MetricDefinition(
        "remit_schedule_attempts_total", "counter", "scheduler", "Placement attempts of replicas, by result.", ("result",)
    ),
    MetricDefinition(
        "remit_schedule_attempt_duration_seconds",
        "histogram",
        "scheduler",
        "Duration of one scheduling round, which places many replicas.",
    ),
    MetricDefinition("remit_preemption_victims", "histogram", "scheduler", "Replicas preempted for one reservation."),
    MetricDefinition(
        "remit_is_leader",
        "gauge",
        "controllers",
        "1 while this process holds the lease of the role, otherwise 0.",
        ("role",),
        former_name="remit_leading",
    ),
    MetricDefinition(
        "remit_controller_queue_depth",
        "gauge",
        "controllers",
        "Keys in the controller's work queue.",
        ("controller",),
        former_name="remit_controller_due_keys",
    ),
    MetricDefinition(
        "remit_controller_reconciles_total",
        "counter",
        "controllers",
        "Keys reconciled.",
        ("controller",),
        former_name="remit_controller_looks_total",
    ),
    MetricDefinition(
        "remit_controller_retries_total",
        "counter",
        "controllers",
        "Reconciles whose operations were refused or not answered.",
        ("controller",),
    ),
    MetricDefinition(
        "remit_agent_starts_total", "counter", "agent", "Starts of replicas by this agent, by result.", ("result",)
    ),
    MetricDefinition("remit_agent_fetch_duration_seconds", "histogram", "agent", "Time to fetch the artifacts of a replica."),
    MetricDefinition("remit_agent_replicas_running", "gauge", "agent", "Replicas running on this agent's nodes."),
    MetricDefinition("remit_agent_nodes", "gauge", "agent", "Nodes hosted by this agent."),
    MetricDefinition("remit_log_lines_total", "counter", "server", "Log lines written, by level.", ("level",)),
    MetricDefinition("remit_build_info", "gauge", "server", "Always 1; the version is in the label.", ("version",)),
)

METRICS: Final[dict[str, MetricDefinition]] = {metric.name: metric for metric in _DEFINITIONS}

_EXPOSED: Final[dict[str, tuple[MetricDefinition, ...]]] = {
    metric.name: (metric, metric._replace(name=metric.former_name, help=f"Deprecated: use {metric.name}."))
    if metric.former_name
    else (metric,)
    for metric in _DEFINITIONS
}
"""The families that each metric is exposed as: its own, and that of its former name."""


OPENMETRICS: Final = "application/openmetrics-text"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


class Sample(NamedTuple):
    """One value or histogram of a metric. `labels` are in the order of its definition."""

    name: str
    value: float | Histogram
    labels: tuple[str, ...] = ()


MetricSource = Callable[[], Iterable[Sample]]
"""Yields the current samples of a component. It is called at every scrape and keeps nothing between two calls except counters.
"""


class MetricsRegistry:
    """All metrics of one process. Satisfies prometheus-client's `Collector`."""

    def __init__(self, *sources: MetricSource) -> None:
        self._sources = list(sources)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add(self, source: MetricSource) -> None:
        self._sources.append(source)

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: sources must not be called before their components exist."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for source in self._sources:
            for sample in source():
                for definition in _EXPOSED[sample.name]:
                    family = families.get(definition.name)
                    if family is None:
                        family = families[definition.name] = _family(definition)
                    _add_sample(family, sample)
        yield from families.values()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics in the format that the `Accept` header prefers, OpenMetrics or Prometheus text, and its media
        type.
        """
        if any(media.partition(";")[0].strip().lower() == OPENMETRICS for media in accept.split(",")):
            written: bytes = generate_openmetrics(self._registry)  # type: ignore[no-untyped-call]
            return written, OPENMETRICS_TYPE
        return generate_latest(self._registry), PLAIN_TYPE


def _family(definition: MetricDefinition) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    match definition.type:
        case "counter":
            return CounterMetricFamily(definition.name, definition.help, labels=definition.labels)
        case "gauge":
            return GaugeMetricFamily(definition.name, definition.help, labels=definition.labels)
        case "histogram":
            return HistogramMetricFamily(definition.name, definition.help, labels=definition.labels)


def _add_sample(family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily, sample: Sample) -> None:
    if isinstance(family, HistogramMetricFamily):
        if not isinstance(sample.value, Histogram):
            raise TypeError(f"{sample.name} is a histogram, and its sample is a single value")
        buckets = [
            ("+Inf" if bound == float("inf") else repr(float(bound)), count) for bound, count in sample.value.cumulative()
        ]
        family.add_metric(sample.labels, buckets, sample.value.sum)
    elif isinstance(sample.value, Histogram):
        raise TypeError(f"{sample.name} is not a histogram, and its sample is one")
    else:
        family.add_metric(sample.labels, sample.value)


PATH: Final = "/metrics"
CONNECTIONS_MAX: Final = 20


class MetricsApplication:
    """ASGI application that serves `/metrics`."""

    def __init__(self, metrics: MetricsRegistry) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await Response(b"only GET /metrics is served here\n", 404)(scope, receive, send)
            return
        accept = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), "")
        body, media = self._metrics.render(accept)
        await Response(body, headers={"content-type": media})(scope, receive, send)


@asynccontextmanager
async def serve_metrics(metrics: MetricsRegistry, listen: ListenAddress) -> AsyncIterator[str]:
    """Serve `/metrics` while the context is open. Yields its URL."""
    if listen.host != LOCALHOST and not ip_address(listen.host).is_loopback:
        raise ListenFailed(
            f"metrics are served without a token, and {listen.host} is reachable from other machines",
            "use 127.0.0.1 or ::1 for --metrics, behind a proxy that authenticates",
        )
    with closing(BoundSocket(listen)) as bound:
        async with serve_http(MetricsApplication(metrics), bound, on_closing=lambda: None, connections_max=CONNECTIONS_MAX):
            yield f"{bound.url}{PATH}"
