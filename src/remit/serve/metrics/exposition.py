"""Metric definitions and text exposition; `/metrics` of processes without an API.

One table, from which the page about them is made. Nothing is counted here.

Names are as Prometheus' users expect them: `_total` counts, `_seconds` and `_bytes` are units. Labels come from closed sets,
or are held to a bound, past which everything is `other`: so the number of series depends on the version of Remit alone.

As Prometheus reads them, when it asks; a sample in no table is a bug. Nothing is counted here.

`/metrics` on this machine's own address, and nothing else.

No token is asked for: what is told names no object and nobody, and only this machine is answered.
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
from remit.world.interfaces import NotServed
from remit.world.net.connections import LOCALHOST, Bound, Listen
from remit.world.net.http_server import http_listening

MetricComponent = Literal["server", "scheduler", "controllers", "agent"]


class MetricDefinition(NamedTuple):
    """One metric. `part` is who tells it; in `remit up` the first three are one process."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    component: MetricComponent
    help: str
    labels: tuple[str, ...] = ()


_DEFINITIONS: Final = (
    MetricDefinition("remit_replicas", "gauge", "server", "Replicas, by the phase they are in.", ("phase",)),
    MetricDefinition("remit_nodes", "gauge", "server", "Nodes, by their health.", ("health",)),
    MetricDefinition("remit_objects", "gauge", "server", "Objects that are stored, by kind.", ("kind",)),
    MetricDefinition("remit_phase_entries_total", "counter", "server", "How often replicas came into a phase.", ("phase",)),
    MetricDefinition("remit_bind_duration_seconds", "histogram", "server", "From when a replica was seen pending until it was bound."),
    MetricDefinition("remit_start_duration_seconds", "histogram", "server", "From when a replica was bound until it ran."),
    MetricDefinition("remit_ready_duration_seconds", "histogram", "server", "From when a replica was bound until it was ready."),
    MetricDefinition("remit_replica_attempts", "histogram", "server", "How many attempts replicas had made when they were released."),
    MetricDefinition(
        "remit_operations_total", "counter", "server", "Operations that the authority accepted, by what they do.", ("did",)
    ),
    MetricDefinition("remit_refusals_total", "counter", "server", "Operations that the authority refused, by code.", ("code",)),
    MetricDefinition(
        "remit_evicted_replicas_total", "counter", "server", "Replicas that lost their place, by what took it.", ("reason",)
    ),
    MetricDefinition("remit_authority_leading", "gauge", "server", "1 while this server is the authority of its scope."),
    MetricDefinition("remit_authority_epoch", "gauge", "server", "The epoch of the chain: it rises with each takeover."),
    MetricDefinition("remit_authority_batch_size", "histogram", "server", "Operations in one batch of the authority."),
    MetricDefinition(
        "remit_authority_commit_duration_seconds", "histogram", "server", "From when a batch is decided until it is durable."
    ),
    MetricDefinition("remit_books_replicas", "gauge", "server", "Replicas in the authority's books."),
    MetricDefinition("remit_books_outcomes", "gauge", "server", "Outcomes that are remembered, for whoever asks again."),
    MetricDefinition(
        "remit_heartbeat_age_seconds",
        "gauge",
        "server",
        "For how long nodes were not heard; quantile 1: the longest.",
        ("quantile",),
    ),
    MetricDefinition(
        "remit_tenant_quota_used_ratio",
        "gauge",
        "server",
        "Of a tenant's quota, how much is used: those who use the most.",
        ("tenant", "resource"),
    ),
    MetricDefinition("remit_view_age_seconds", "gauge", "server", "How old what a part sees of the store is.", ("component",)),
    MetricDefinition(
        "remit_store_write_duration_seconds",
        "histogram",
        "server",
        "How long a group of commits took to be durable, its fsync included.",
    ),
    MetricDefinition("remit_store_write_rows", "histogram", "server", "Rows in a group of commits: they share one fsync."),
    MetricDefinition("remit_store_bytes", "gauge", "server", "Size of the store on the disk, with its write-ahead log."),
    MetricDefinition("remit_store_revision", "gauge", "server", "The revision that the server has seen."),
    MetricDefinition(
        "remit_http_requests_total",
        "counter",
        "server",
        "Requests, by route; a path that leads nowhere is none.",
        ("route", "method", "status_class"),
    ),
    MetricDefinition(
        "remit_http_request_duration_seconds",
        "histogram",
        "server",
        "How long requests took, by route; not of streams.",
        ("route",),
    ),
    MetricDefinition("remit_http_requests_in_flight", "gauge", "server", "Requests that are being answered, streams included."),
    MetricDefinition(
        "remit_http_problems_total", "counter", "server", "Requests that were answered with a problem, by its code.", ("code",)
    ),
    MetricDefinition(
        "remit_http_throttled_total",
        "counter",
        "server",
        "Requests that were told to come back later (429), by flow.",
        ("flow",),
    ),
    MetricDefinition("remit_watchers", "gauge", "server", "Streams that are open."),
    MetricDefinition(
        "remit_pending_replicas",
        "gauge",
        "scheduler",
        "Replicas that wait for a place, by the reason; queued: their turn comes yet.",
        ("reason",),
    ),
    MetricDefinition(
        "remit_pending_resources",
        "gauge",
        "scheduler",
        "What those ask for: cores, bytes of memory, devices.",
        ("reason", "resource"),
    ),
    MetricDefinition(
        "remit_schedule_attempts_total", "counter", "scheduler", "Replicas that were tried, by what came of it.", ("result",)
    ),
    MetricDefinition(
        "remit_schedule_attempt_duration_seconds",
        "histogram",
        "scheduler",
        "How long one round of placing took; it places many at once.",
    ),
    MetricDefinition("remit_preemption_victims", "histogram", "scheduler", "Replicas that had to leave for one reservation."),
    MetricDefinition("remit_leading", "gauge", "controllers", "1 while this copy holds the lease of the role.", ("role",)),
    MetricDefinition("remit_controller_due_keys", "gauge", "controllers", "Keys that wait to be looked at.", ("controller",)),
    MetricDefinition("remit_controller_looks_total", "counter", "controllers", "Keys that were looked at.", ("controller",)),
    MetricDefinition(
        "remit_controller_retries_total",
        "counter",
        "controllers",
        "Looks whose deeds were refused or not answered.",
        ("controller",),
    ),
    MetricDefinition("remit_agent_starts_total", "counter", "agent", "Starts of work, by what came of them.", ("result",)),
    MetricDefinition("remit_agent_fetch_duration_seconds", "histogram", "agent", "How long it took to fetch what work needs."),
    MetricDefinition("remit_agent_replicas_running", "gauge", "agent", "Replicas that run here."),
    MetricDefinition("remit_agent_nodes", "gauge", "agent", "Nodes that this agent plays."),
    MetricDefinition("remit_log_lines_total", "counter", "server", "Lines that were logged, by level.", ("level",)),
    MetricDefinition("remit_build_info", "gauge", "server", "1; the version in its label.", ("version",)),
)

METRICS: Final[dict[str, MetricDefinition]] = {meter.name: meter for meter in _DEFINITIONS}


OPENMETRICS: Final = "application/openmetrics-text"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


class Sample(NamedTuple):
    """One value of a metric, or how values are spread; `labels` in the order of its meter."""

    name: str
    value: float | Histogram
    labels: tuple[str, ...] = ()


MetricSource = Callable[[], Iterable[Sample]]
"""Says how things stand, whenever it is asked: nothing is kept between two askings but what was counted meanwhile."""


class MetricsRegistry:
    """Of one process: all that its parts have to tell. Satisfies prometheus-client's `Collector`."""

    def __init__(self, *sources: MetricSource) -> None:
        self._sources = list(sources)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add(self, source: MetricSource) -> None:
        self._sources.append(source)

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked of parts before they are there."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for source in self._sources:
            for sample in source():
                family = families.get(sample.name)
                if family is None:
                    family = families[sample.name] = _family(METRICS[sample.name])
                _add_sample(family, sample)
        yield from families.values()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """As the asker likes it best of the two ways there are; and its type."""
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
            raise TypeError(f"{sample.name} is a histogram")
        buckets = [
            ("+Inf" if bound == float("inf") else repr(float(bound)), count) for bound, count in sample.value.cumulative()
        ]
        family.add_metric(sample.labels, buckets, sample.value.sum)
    elif isinstance(sample.value, Histogram):
        raise TypeError(f"{sample.name} is no histogram")
    else:
        family.add_metric(sample.labels, sample.value)


PATH: Final = "/metrics"
CONNECTIONS_MAX: Final = 20


class MetricsApplication:
    """The ASGI application."""

    def __init__(self, metrics: MetricsRegistry) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await Response(b"only GET /metrics is answered here\n", 404)(scope, receive, send)
            return
        accept = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), "")
        body, media = self._metrics.render(accept)
        await Response(body, headers={"content-type": media})(scope, receive, send)


@asynccontextmanager
async def serve_metrics(metrics: MetricsRegistry, listen: Listen) -> AsyncIterator[str]:
    """Answer for as long as this lasts. Yields where."""
    if listen.host != LOCALHOST and not ip_address(listen.host).is_loopback:
        raise NotServed(
            f"{listen.host} can be reached from other machines, and metrics are told here without a token",
            "use 127.0.0.1 or ::1 for --metrics, and let something that knows whom it answers pass it on",
        )
    with closing(Bound(listen)) as bound:
        async with http_listening(MetricsApplication(metrics), bound, closing=lambda: None, connections_max=CONNECTIONS_MAX):
            yield f"{bound.url}{PATH}"
