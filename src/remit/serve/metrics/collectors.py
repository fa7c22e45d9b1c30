"""Collects samples from server, authority, store, scheduler, controllers, agent.

Read from them when somebody asks; nobody is slowed down meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Final

from remit import __version__
from remit.commitment.authority import Authority
from remit.commitment.metrics import AuthorityCounts
from remit.model.claims import Code, Role
from remit.model.counters import OTHER, Counts, largest
from remit.model.objects import KINDS
from remit.model.resources import DEVICES, WHOLE
from remit.serve.metrics.exposition import Sample, Source

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.correction.controller_set import Crew
    from remit.proposal.scheduler import Scheduler
    from remit.serve.server_context import Desk
    from remit.store.sqlite.store import SqliteStore
    from remit.world.structured_log import Chronicle

TENANTS_MAX: Final = 20
"""Of so many tenants it is told how much of their quota they use: of those who use the most."""
QUANTILES: Final = ("0.5", "0.9", "0.99", "1")
QUEUED: Final = "queued"
_AGENT: Final = f"{Role.AGENT}/"
_KIND: Final = {kind.lower(): kind for kind in KINDS}
_REASONS: Final = frozenset(Code)


def _named(name: str) -> str:
    """A resource as a label: kinds of devices are people's own words, and there may be many."""
    return name if name in ("cpu", "memory") else "devices" if name.startswith(DEVICES) else OTHER


def _in_units(resource: str, count: float) -> float:
    """Cores and devices are kept in thousandths."""
    return count / WHOLE if resource in ("cpu", "devices") else count


# -- the server ----------------------------------------------------------------------------------------------------------------


def of_server(desk: Desk) -> Source:
    """The scope as this server sees it, what the authority does if it is here, the store, and the API."""

    def told() -> Iterator[Sample]:
        board = desk.board
        yield Sample("remit_build_info", 1, (__version__,))
        for phase, keys in board.by_phase.items():
            yield Sample("remit_replicas", len(keys), (phase.value,))
        nodes = Counts()
        for _, kept in board.kind("node/"):
            nodes.add(kept.thing.status.health.value)
        yield from (Sample("remit_nodes", count, (health,)) for health, count in nodes.items())
        for word, count in board.counts().items():
            if word in _KIND:
                yield Sample("remit_objects", count, (_KIND[word],))
        yield Sample("remit_view_age_seconds", board.age_ms() / 1000, ("server",))
        yield Sample("remit_store_revision", board.revision)
        yield Sample("remit_watchers", desk.watchers)
        yield from _passages(desk)
        yield from _requests(desk)
        leading = desk.standby.leading
        yield Sample("remit_authority_leading", int(leading is not None))
        yield from _decided(desk.standby.tally)
        if leading is not None:
            yield from _authority(leading, desk.clock.now_ms())

    return told


def _passages(desk: Desk) -> Iterator[Sample]:
    passages = desk.passages
    yield Sample("remit_bind_duration_seconds", passages.bound)
    yield Sample("remit_start_duration_seconds", passages.started)
    yield Sample("remit_ready_duration_seconds", passages.ready)
    yield Sample("remit_replica_attempts", passages.attempts)
    yield from _counted("remit_phase_entries_total", passages.entered)


def _requests(desk: Desk) -> Iterator[Sample]:
    requests = desk.requests
    for labels, count in requests.counts.items():
        yield Sample("remit_http_requests_total", count, labels)
    for route, took in requests.took.items():
        yield Sample("remit_http_request_duration_seconds", took, (route,))
    yield Sample("remit_http_requests_in_flight", requests.under_way)
    yield from _counted("remit_http_problems_total", requests.problems)
    yield from _counted("remit_http_throttled_total", requests.throttled)


def _counted(name: str, counts: Counts) -> Iterator[Sample]:
    return (Sample(name, count, (kind,)) for kind, count in sorted(counts.items()))


def _decided(tally: AuthorityCounts) -> Iterator[Sample]:
    yield Sample("remit_authority_batch_size", tally.batches)
    yield Sample("remit_authority_commit_duration_seconds", tally.commits)
    yield from _counted("remit_operations_total", tally.accepted)
    yield from _counted("remit_refusals_total", tally.refused)
    for reason, count in tally.left().items():
        yield Sample("remit_evicted_replicas_total", count, (reason,))


def _authority(authority: Authority, now_ms: int) -> Iterator[Sample]:
    yield Sample("remit_authority_epoch", authority.head.epoch)
    yield Sample("remit_books_replicas", len(authority.books.replicas))
    yield Sample("remit_books_outcomes", len(authority.outcomes))
    ages = sorted(max(0, now_ms - at_ms) for lease, at_ms in authority.hearing.at_ms.items() if lease.startswith(_AGENT))
    for quantile in QUANTILES if ages else ():
        at = max(0, ceil(float(quantile) * len(ages)) - 1)
        yield Sample("remit_heartbeat_age_seconds", ages[at] / 1000, (quantile,))
    yield from _quotas(authority)


def _quotas(authority: Authority) -> Iterator[Sample]:
    """How much of what they may use do tenants use? Sums over all slices of a tenant."""
    amounts: dict[str, dict[str, int]] = {}
    used: dict[str, dict[str, int]] = {}
    for ledger in authority.books.grants.values():
        if not ledger.tenant:
            continue
        for name, count in ledger.amount.items():
            _gather(amounts, ledger.tenant, _named(name), count)
        for name, count in ledger.used.items():
            _gather(used, ledger.tenant, _named(name), count)
    ratios = {
        resource: {
            tenant: used.get(tenant, {}).get(resource, 0) / amount[resource]
            for tenant, amount in amounts.items()
            if amount.get(resource)
        }
        for resource in ("cpu", "memory", "devices")
    }
    for resource, shares in ratios.items():
        use = {tenant: share for tenant, share in shares.items() if share > 0}  # one who uses nothing is nobody's concern
        few = {tenant: share for tenant, share in largest(use, TENANTS_MAX).items() if tenant != OTHER}
        yield from (Sample("remit_tenant_quota_used_ratio", share, (tenant, resource)) for tenant, share in few.items())


def _gather(into: dict[str, dict[str, int]], tenant: str, resource: str, count: int) -> None:
    theirs = into.setdefault(tenant, {})
    theirs[resource] = theirs.get(resource, 0) + count


def of_store(store: SqliteStore) -> Source:
    """Only a store on this machine's own disk has all this to tell."""

    def told() -> Iterator[Sample]:
        yield Sample("remit_store_write_duration_seconds", store.writes)
        yield Sample("remit_store_write_rows", store.groups)
        yield Sample("remit_store_bytes", store.size_bytes())

    return told


def of_log(log: Chronicle) -> Source:
    return lambda: _counted("remit_log_lines_total", log.counts)


# -- its components ------------------------------------------------------------------------------------------------------------


def of_scheduler(scheduler: Scheduler) -> Source:
    def told() -> Iterator[Sample]:
        tally, cycle = scheduler.tally, scheduler.cycle
        yield from _counted("remit_schedule_attempts_total", tally.attempts)
        yield Sample("remit_schedule_attempt_duration_seconds", tally.rounds)
        yield Sample("remit_preemption_victims", tally.victims)
        yield Sample("remit_view_age_seconds", scheduler.view.age_ms() / 1000, ("scheduler",))
        yield Sample("remit_leading", int(cycle is not None), (Role.SCHEDULER.value,))
        replicas: dict[str, int] = {}
        resources: dict[tuple[str, str], int] = {}
        for line in cycle.backlog.lines() if cycle is not None else ():
            reason = QUEUED if line.wait is None else line.wait.reason if line.wait.reason in _REASONS else OTHER
            replicas[reason] = replicas.get(reason, 0) + len(line)
            for name, count in line.amount:
                at = reason, _named(name)
                resources[at] = resources.get(at, 0) + count * len(line)
        yield from (Sample("remit_pending_replicas", count, (reason,)) for reason, count in sorted(replicas.items()))
        for (reason, resource), count in sorted(resources.items()):
            yield Sample("remit_pending_resources", _in_units(resource, count), (reason, resource))

    return told


def of_controllers(crew: Crew) -> Source:
    def told() -> Iterator[Sample]:
        yield Sample("remit_view_age_seconds", crew.board.age_ms() / 1000, ("controllers",))
        for loop in crew.loops:
            name = (loop.lease.partition("/")[2] or loop.lease,)
            yield Sample("remit_leading", int(loop.due is not None), (loop.lease,))
            yield Sample("remit_controller_due_keys", loop.due or 0, name)
            yield Sample("remit_controller_looks_total", loop.looks, name)
            yield Sample("remit_controller_retries_total", loop.retries, name)

    return told


def of_agent(agent: Agent) -> Source:
    def told() -> Iterator[Sample]:
        yield from _counted("remit_agent_starts_total", agent.starts)
        yield Sample("remit_agent_fetch_duration_seconds", agent.fetches)
        yield Sample("remit_agent_replicas_running", agent.running())
        yield Sample("remit_agent_nodes", agent.hosts)

    return told
