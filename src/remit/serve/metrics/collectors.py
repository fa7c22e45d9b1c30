"""Collects samples from server, authority, store, scheduler, controllers, agent.

Values are read at each scrape; between scrapes collecting costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Final

from remit import __version__
from remit.commitment.authority import Authority
from remit.commitment.metrics import AuthorityMetrics
from remit.model.claims import Code
from remit.model.counters import OTHER, BoundedCounter, largest_with_other
from remit.model.kinds.registry import BY_PREFIX
from remit.model.resources import DEVICES_PREFIX, WHOLE_DEVICE
from remit.model.roles import Role
from remit.serve.metrics.exposition import MetricSource, Sample

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.commitment.standby import Standby
    from remit.correction.controller_set import ControllerSet
    from remit.observation.watch_cache import WatchCache
    from remit.proposal.scheduler import Scheduler
    from remit.serve.http.request_telemetry import RequestMetrics
    from remit.serve.http.streams import OpenStreams
    from remit.serve.metrics.lifecycle_metrics import LifecycleMetrics
    from remit.serve.metrics.telemetry import Telemetry
    from remit.store.sqlite.store import SqliteStore
    from remit.world.interfaces import Clock
    from remit.world.structured_log import StructuredLog

TENANTS_MAX: Final = 20
"""Tenants with the highest quota use that are reported."""
QUANTILES: Final = ("0.5", "0.9", "0.99", "1")
QUEUED: Final = "queued"
_AGENT_LEASE_PREFIX: Final = f"{Role.AGENT}/"
_REASONS: Final = frozenset(Code)


def _resource_label(name: str) -> str:
    """Return a resource as label value. Users name device types freely, so all devices have one label."""
    return name if name in ("cpu", "memory") else "devices" if name.startswith(DEVICES_PREFIX) else OTHER


def _in_units(resource: str, count: float) -> float:
    """Cores and devices are counted in thousandths."""
    return count / WHOLE_DEVICE if resource in ("cpu", "devices") else count


# -- the server ----------------------------------------------------------------------------------------------------------------


def server_metrics(
    standby: Standby, watch_cache: WatchCache, streams: OpenStreams, telemetry: Telemetry, clock: Clock
) -> MetricSource:
    """The scope as this server sees it, its API, the store's revision, and the authority if it runs here."""

    def samples() -> Iterator[Sample]:
        yield Sample("remit_build_info", 1, (__version__,))
        for phase, keys in watch_cache.by_phase.items():
            yield Sample("remit_replicas", len(keys), (phase.value,))
        nodes = BoundedCounter()
        for _, row in watch_cache.of_kind("node/"):
            nodes.add(row.obj.status.health.value)
        yield from (Sample("remit_nodes", count, (health,)) for health, count in nodes.items())
        for prefix, count in watch_cache.count_by_kind().items():
            if prefix in BY_PREFIX:
                yield Sample("remit_objects", count, (BY_PREFIX[prefix].kind,))
        yield Sample("remit_view_age_seconds", watch_cache.age_ms() / 1000, ("server",))
        yield Sample("remit_store_revision", watch_cache.revision)
        yield Sample("remit_watchers", streams.count)
        yield from _lifecycle_samples(telemetry.lifecycle)
        yield from _request_samples(telemetry.requests)
        authority = standby.leading
        yield Sample("remit_authority_is_leader", int(authority is not None))
        yield from _decision_samples(standby.metrics)
        if authority is not None:
            yield from _authority_samples(authority, clock.now_ms())

    return samples


def _lifecycle_samples(lifecycle: LifecycleMetrics) -> Iterator[Sample]:
    yield Sample("remit_bind_duration_seconds", lifecycle.bind_durations)
    yield Sample("remit_start_duration_seconds", lifecycle.start_durations)
    yield Sample("remit_ready_duration_seconds", lifecycle.ready_durations)
    yield Sample("remit_replica_attempts", lifecycle.attempts)
    yield from _count_samples("remit_phase_entries_total", lifecycle.phase_entries)


def _request_samples(metrics: RequestMetrics) -> Iterator[Sample]:
    for labels, count in metrics.counts.items():
        yield Sample("remit_http_requests_total", count, labels)
    for route, duration in metrics.durations.items():
        yield Sample("remit_http_request_duration_seconds", duration, (route,))
    yield Sample("remit_http_requests_in_flight", metrics.in_flight)
    yield from _count_samples("remit_http_problems_total", metrics.problems)
    yield from _count_samples("remit_http_throttled_total", metrics.throttled)


def _count_samples(name: str, counts: BoundedCounter) -> Iterator[Sample]:
    return (Sample(name, count, (kind,)) for kind, count in sorted(counts.items()))


def _decision_samples(metrics: AuthorityMetrics) -> Iterator[Sample]:
    yield Sample("remit_authority_batch_size", metrics.batches)
    yield Sample("remit_authority_commit_duration_seconds", metrics.commits)
    for operation, count in sorted(metrics.accepted.items()):
        yield Sample("remit_operations_total", count, (operation, operation))
    yield from _count_samples("remit_refusals_total", metrics.refused)
    for reason, count in metrics.node_losses().items():
        yield Sample("remit_evicted_replicas_total", count, (reason,))


def _authority_samples(authority: Authority, now_ms: int) -> Iterator[Sample]:
    yield Sample("remit_authority_epoch", authority.head.epoch)
    yield Sample("remit_authority_replicas", len(authority.books.replicas))
    yield Sample("remit_authority_outcomes", len(authority.outcomes))
    ages = sorted(
        max(0, now_ms - at_ms)
        for lease, at_ms in authority.renewals.renewed_ms.items()
        if lease.startswith(_AGENT_LEASE_PREFIX)
    )
    for quantile in QUANTILES if ages else ():
        index = max(0, ceil(float(quantile) * len(ages)) - 1)
        yield Sample("remit_heartbeat_age_seconds", ages[index] / 1000, (quantile,))
    yield from _quota_samples(authority)


def _quota_samples(authority: Authority) -> Iterator[Sample]:
    """Share of the quota that tenants use, summed over all grants of a tenant."""
    amounts: dict[str, dict[str, int]] = {}
    used: dict[str, dict[str, int]] = {}
    for ledger in authority.books.grants.values():
        if not ledger.tenant:
            continue
        for name, count in ledger.amount.items():
            _add_amount(amounts, ledger.tenant, _resource_label(name), count)
        for name, count in ledger.used.items():
            _add_amount(used, ledger.tenant, _resource_label(name), count)
    ratios = {
        resource: {
            tenant: used.get(tenant, {}).get(resource, 0) / amount[resource]
            for tenant, amount in amounts.items()
            if amount.get(resource)
        }
        for resource in ("cpu", "memory", "devices")
    }
    for resource, shares in ratios.items():
        use = {tenant: share for tenant, share in shares.items() if share > 0}  # tenants that use nothing are not reported
        few = {tenant: share for tenant, share in largest_with_other(use, TENANTS_MAX).items() if tenant != OTHER}
        yield from (Sample("remit_tenant_quota_used_ratio", share, (tenant, resource)) for tenant, share in few.items())


def _add_amount(totals: dict[str, dict[str, int]], tenant: str, resource: str, count: int) -> None:
    tenant_amounts = totals.setdefault(tenant, {})
    tenant_amounts[resource] = tenant_amounts.get(resource, 0) + count


def store_metrics(store: SqliteStore) -> MetricSource:
    """Metrics of a local SQLite store; other stores do not have them."""

    def samples() -> Iterator[Sample]:
        yield Sample("remit_store_write_duration_seconds", store.writes)
        yield Sample("remit_store_write_rows", store.groups)
        yield Sample("remit_store_bytes", store.size_bytes())

    return samples


def log_metrics(log: StructuredLog) -> MetricSource:
    return lambda: _count_samples("remit_log_lines_total", log.counts)


# -- components ----------------------------------------------------------------------------------------------------------------


def scheduler_metrics(scheduler: Scheduler) -> MetricSource:
    def samples() -> Iterator[Sample]:
        counts, cycle = scheduler.counts, scheduler.cycle
        yield from _count_samples("remit_schedule_attempts_total", counts.attempts)
        yield Sample("remit_schedule_attempt_duration_seconds", counts.propose_s)
        yield Sample("remit_preemption_victims", counts.victims)
        yield Sample("remit_view_age_seconds", scheduler.view.age_ms() / 1000, ("scheduler",))
        yield Sample("remit_is_leader", int(cycle is not None), (Role.SCHEDULER.value,))
        replicas: dict[str, int] = {}
        resources: dict[tuple[str, str], int] = {}
        for line in cycle.backlog.queues() if cycle is not None else ():
            reason = QUEUED if line.wait is None else line.wait.reason if line.wait.reason in _REASONS else OTHER
            replicas[reason] = replicas.get(reason, 0) + len(line)
            for name, count in line.amount:
                key = reason, _resource_label(name)
                resources[key] = resources.get(key, 0) + count * len(line)
        yield from (Sample("remit_pending_replicas", count, (reason,)) for reason, count in sorted(replicas.items()))
        for (reason, resource), count in sorted(resources.items()):
            yield Sample("remit_pending_resources", _in_units(resource, count), (reason, resource))

    return samples


def controller_metrics(controllers: ControllerSet) -> MetricSource:
    def samples() -> Iterator[Sample]:
        yield Sample("remit_view_age_seconds", controllers.cache.age_ms() / 1000, ("controllers",))
        for loop in controllers.loops:
            name = (loop.lease.partition("/")[2] or loop.lease,)
            yield Sample("remit_is_leader", int(loop.queue_depth is not None), (loop.lease,))
            yield Sample("remit_controller_queue_depth", loop.queue_depth or 0, name)
            yield Sample("remit_controller_reconciles_total", loop.reconciles, name)
            yield Sample("remit_controller_retries_total", loop.retries, name)

    return samples


def agent_metrics(agent: Agent) -> MetricSource:
    def samples() -> Iterator[Sample]:
        yield from _count_samples("remit_agent_starts_total", agent.starts)
        yield Sample("remit_agent_fetch_duration_seconds", agent.fetches)
        yield Sample("remit_agent_replicas_running", agent.running_attempts())
        yield Sample("remit_agent_nodes", agent.held_nodes)

    return samples
