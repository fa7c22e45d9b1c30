"""Status, healthz, readyz, unheld leases, restore state, support bundle.

A scope without a scheduler or controllers keeps its state and its running replicas, but creates, places and replaces
nothing, and nothing fails. So the status and the explanation of a workload name the leases that are not held.
"""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response

from remit import __version__
from remit.client.endpoint import AuthorityStatus, EndpointError
from remit.commitment.books import AWAITED_NODE
from remit.correction.controller_set import CONTROLLERS
from remit.model.objects import key_of
from remit.model.records import GrantPhase, Phase
from remit.model.resources import format_duration
from remit.model.roles import Role
from remit.model.wire.api_types import IdleLease, ScopeStatus
from remit.observation.watch_cache import WatchCache
from remit.proposal.explain.result_types import WorkloadExplanation
from remit.proposal.scheduler import LEASE
from remit.serve.http.media_types import TEXT
from remit.serve.http.replies import ApiProblem
from remit.serve.http.routes import RequestContext, ResponseSpec, Route
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext
from remit.world.host_checks import task_stacks, thread_stacks

SCHEDULER: Final = "scheduler"
LEASE_COMPONENTS: Final[dict[str, str]] = {
    LEASE: SCHEDULER,
    **{controller.lease or controller.permissions.role.value: "controllers" for controller in CONTROLLERS},
}
"""Which `remit` command runs the holder of each lease."""


def unheld_leases(status: AuthorityStatus, watch_cache: WatchCache, default_ttl_ms: int) -> tuple[IdleLease, ...]:
    """Return the leases of the scheduler and the controllers that are not held. `default_ttl_ms` is the term of a lease that
    was never taken. After a takeover every holder gets a full term to renew.
    """
    return tuple(_unheld(status, watch_cache, default_ttl_ms))


def _unheld(status: AuthorityStatus, watch_cache: WatchCache, default_ttl_ms: int) -> Iterator[IdleLease]:
    for lease, component in LEASE_COMPONENTS.items():
        if component == SCHEDULER and _other_scheduler_active(status, default_ttl_ms):
            continue
        stored = watch_cache.get(key_of("Lease", lease))
        cure = f"start `remit {component}`; if it is running, see its log"
        unheld = f"lease {lease} (remit {component}) is not held"
        if stored is None or not stored.spec.holder:
            if status.listened_ms > default_ttl_ms:
                reason = "was never acquired" if stored is None else "was released"
                yield IdleLease(lease=lease, part=component, why=f"{unheld}: it {reason}", cure=cure)
            continue
        silent_ms = status.silent.get(lease, status.listened_ms)
        if silent_ms > stored.spec.ttl:
            # The authority does not know about renewals before its takeover.
            qualifier = "" if lease in status.silent else "at least "
            detail = f"{unheld}: not renewed for {qualifier}{_duration_text(silent_ms)}"
            yield IdleLease(lease=lease, part=component, silent_ms=silent_ms, why=detail, cure=cure)


def _other_scheduler_active(status: AuthorityStatus, ttl_ms: int) -> bool:
    """Return whether another scheduler is active. Schedulers that run side by side have leases of their own besides the common
    one.
    """
    return any(lease.startswith(f"{LEASE}/") and silent_ms <= ttl_ms for lease, silent_ms in status.silent.items())


def _duration_text(ms: int) -> str:
    return format_duration(ms // 1_000 * 1_000 or ms)


async def add_unheld_leases(explanation: WorkloadExplanation, server: ServerContext) -> WorkloadExplanation:
    """Add unheld leases to an explanation if the workload waits for replicas to be created or placed."""
    declared = server.watch_cache.get(f"workload/{explanation.tenant}/{explanation.name}")
    daemon = (
        declared is not None and declared.spec.type == "daemon"
    )  # only its controller knows how many replicas a daemon needs
    if not (explanation.missing or explanation.groups or daemon):
        return explanation
    try:
        status = await server.authority.standby.status()
    except EndpointError:
        return explanation
    unheld = {lease.lease: lease for lease in unheld_leases(status, server.watch_cache, server.timing.lease_ms)}
    makes, places = unheld.get(Role.WORKLOADS.value), unheld.get(LEASE)
    hints = [
        f"{lease.why}; {lease.cure}"
        for lease in (makes if explanation.missing or daemon else None, places if explanation.groups else None)
        if lease
    ]
    limit = "missing" if makes is not None and daemon and not explanation.limit else explanation.limit
    return replace(explanation, unattended="; ".join(hints), limit=limit)


FRESH_HEARTBEATS: Final = 5
"""Maximum age of the watch cache, in heartbeats. An idle authority commits once per heartbeat."""
READY_MS_MAX: Final = 2_000


async def status(request: RequestContext, server: ServerContext) -> Response:
    authority_status = await server.authority.standby.status()
    watch_cache = server.watch_cache
    nodes: dict[str, int] = {}
    for _, row in watch_cache.of_kind("node/"):
        health = row.obj.status.health.value
        nodes[health] = nodes.get(health, 0) + 1
    cache_age_ms = watch_cache.age_ms()
    answer = ScopeStatus(
        scope=authority_status.scope,
        incarnation=authority_status.incarnation,
        epoch=authority_status.epoch,
        window=authority_status.window,
        window_ms=authority_status.window_ms,
        revision=watch_cache.revision,
        leader=authority_status.leader,
        nodes=dict(sorted(nodes.items())),
        replicas={phase.value: len(keys) for phase, keys in watch_cache.by_phase.items() if keys},
        version=__version__,
        uptime_ms=server.clock.now_ms() - server.started_ms,
        cache_age_ms=cache_age_ms,
        board_age_ms=cache_age_ms,
        idle=unheld_leases(authority_status, watch_cache, server.timing.lease_ms) if watch_cache.is_current else (),
    )
    return json_response(answer)


async def healthz(request: RequestContext, server: ServerContext) -> Response:
    return Response(b"ok\n", media_type=TEXT)


async def readyz(request: RequestContext, server: ServerContext) -> Response:
    """Ready: an authority can be reached, and the watch cache is current."""
    try:
        async with server.clock.timeout_ms(READY_MS_MAX):
            await server.authority.standby.status()
    except EndpointError as error:
        raise _not_ready(f"the authority cannot be reached: {error}") from None
    except TimeoutError:
        raise _not_ready("the authority does not answer") from None
    if server.streams.closing.is_set():
        raise _not_ready("the server is shutting down")
    if not server.watch_cache.is_current:
        raise _not_ready("the watch cache is still loading")
    age_ms = server.watch_cache.age_ms()
    if age_ms > FRESH_HEARTBEATS * server.timing.heartbeat_ms:
        raise _not_ready(f"the watch cache is {age_ms} ms old")
    return Response(b"ready\n", media_type=TEXT)


def _not_ready(reason: str) -> ApiProblem:
    return ApiProblem(503, "unavailable", reason, cure="retry shortly", retry_after_ms=1_000)


STATUS_ROUTES: Final = (
    Route(
        "GET",
        "/v1/status",
        "getStatus",
        "State of the scope: leader, revision, nodes and replicas by state, and leases that are not held.",
        status,
        tag="server",
        responses=(ResponseSpec(200, "the state of the scope", ScopeStatus),),
        audience=("user", "agent", "component"),
    ),
    Route(
        "GET",
        "/healthz",
        "getHealth",
        "Liveness: the process runs.",
        healthz,
        tag="server",
        responses=(ResponseSpec(200, "the process runs", str, TEXT),),
        anonymous=True,
        unqueued=True,
    ),
    Route(
        "GET",
        "/readyz",
        "getReadiness",
        "Readiness: an authority can be reached, and the watch cache of this server is current.",
        readyz,
        tag="server",
        responses=(ResponseSpec(200, "the server is ready", str, TEXT),),
        anonymous=True,
        unqueued=True,
    ),
)


RESTORED_REASON: Final = "restored"
_AWAITED_NODE_PREFIX: Final = f"summary/{AWAITED_NODE}"


def unconfirmed_after_restore(watch_cache: WatchCache) -> dict[str, object]:
    """Return how many replicas, nodes and grants are unconfirmed after a restore; empty if none are."""
    unknown = sum(watch_cache.get(key).status.reason == RESTORED_REASON for key in watch_cache.by_phase[Phase.UNKNOWN])
    nodes = sum(key.startswith(_AWAITED_NODE_PREFIX) for key, _ in watch_cache.of_kind("summary/"))
    void_grants = sum(row.obj.status.phase is GrantPhase.VOID for _, row in watch_cache.of_kind("grant/"))
    counts = {"replicas_unknown": unknown, "nodes_awaited": nodes, "grants_void": void_grants}
    return {name: count for name, count in counts.items() if count}


class SupportAnswer(Struct, frozen=True, kw_only=True):
    """`settings`: how the server was started; `counts`: objects by kind; `log`: the last log lines."""

    version: str
    python: str
    machine: str
    settings: dict[str, str | int | bool]
    counts: dict[str, int]
    doubts: dict[str, object]
    collected: list[int]
    tasks: list[str]
    threads: dict[str, list[str]]
    log: list[str]


async def support(request: RequestContext, server: ServerContext) -> Response:
    settings: dict[str, str | int | bool] = {
        "scope": server.authority.scope,
        "name": server.authority.name,
        "beat_ms": server.timing.heartbeat_ms,
        "leads": server.authority.standby.leading is not None,
        "store": type(server.store).__name__,
        "log_level": "" if server.telemetry.log is None else server.telemetry.log.level,
        "uptime_ms": server.clock.now_ms() - server.started_ms,
        "watchers": server.streams.count,
    }
    answer = SupportAnswer(
        version=__version__,
        python=sys.version,
        machine=platform.platform(),
        settings=settings,
        counts=dict(sorted(server.watch_cache.count_by_kind().items())),
        doubts=unconfirmed_after_restore(server.watch_cache),
        collected=list(gc.get_count()),
        tasks=task_stacks(),
        threads=thread_stacks(),
        log=[] if server.telemetry.log is None else server.telemetry.log.recent(),
    )
    return json_response(answer)


SUPPORT_ROUTES: Final = (
    Route(
        "GET",
        "/v1/support",
        "getSupport",
        "Data for a support bundle: settings, object counts, tasks and threads, last log lines.",
        support,
        tag="server",
        responses=(ResponseSpec(200, "support data, without objects, tokens or secret values", SupportAnswer),),
        tenant_access=False,
        audited=True,
    ),
)
