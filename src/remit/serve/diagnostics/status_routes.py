"""Status, healthz, readyz, unheld leases, restore state, support bundle.

Which leases of the scheduler and the controllers nobody holds, as the authority has heard; no decisions.

A scope without them stands still and breaks nothing: what is declared is kept, what runs goes on, and nothing says that nobody
makes, places or replaces anything. So whoever asks how it stands, or why work does not move on, is told here.

What a scope is at, whether the process lives, and whether it is of use just now; no history.

Counted on the board, for people; the authority knows it by itself.

How it was started, what it does now, its last lines. No objects.
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
from remit.client.endpoint import EndpointError, AuthorityStatus
from remit.commitment.books import AWAITED_NODE
from remit.correction.controller_set import CONTROLLERS
from remit.model.claims import Role
from remit.model.objects import key_of
from remit.model.records import GrantPhase, Phase
from remit.model.resources import format_duration
from remit.model.wire.api_types import IdleLease, ScopeStatus
from remit.observation.watch_cache import Board
from remit.proposal.explain.result_types import WorkloadExplanation
from remit.proposal.scheduler import LEASE
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_context import RequestContext
from remit.serve.http.routes import TEXT, ResponseSpec, Route
from remit.serve.objects.reads import json_response
from remit.serve.server_context import ServerContext
from remit.world.host_checks import tasks, threads

SCHEDULER: Final = "scheduler"
LEASE_COMPONENTS: Final[dict[str, str]] = {
    LEASE: SCHEDULER,
    **{one.lease or one.remit.role.value: "controllers" for one in CONTROLLERS},
}
"""Which command runs who acts under a lease."""


def unheld_leases(status: AuthorityStatus, watch_cache: Board, default_ttl_ms: int) -> tuple[IdleLease, ...]:
    """`usual_ms` is the term of one that was never taken. A new authority gives everybody a full term to be heard again."""
    return tuple(_unheld(status, watch_cache, default_ttl_ms))


def _unheld(status: AuthorityStatus, watch_cache: Board, default_ttl_ms: int) -> Iterator[IdleLease]:
    for lease, component in LEASE_COMPONENTS.items():
        if component == SCHEDULER and _other_scheduler_active(status, default_ttl_ms):
            continue
        stored = watch_cache.get(key_of("Lease", lease))
        cure = f"start `remit {component}`; if it runs, its log says what keeps it from acting"
        if stored is None or not stored.spec.holder:
            if status.listened_ms > default_ttl_ms:
                reason = "was never taken" if stored is None else "was given back"
                yield IdleLease(lease=lease, part=component, why=f"nobody holds the lease {lease}: it {reason}", cure=cure)
            continue
        silent_ms = status.silent.get(lease, status.listened_ms)
        if silent_ms > stored.spec.ttl:
            qualifier = "" if lease in status.silent else " at least"  # what was before it this authority cannot know
            detail = f"nobody holds the lease {lease}: it was not renewed for {_duration_text(silent_ms)}{qualifier}"
            yield IdleLease(lease=lease, part=component, silent_ms=silent_ms, why=detail, cure=cure)


def _other_scheduler_active(status: AuthorityStatus, ttl_ms: int) -> bool:
    """Of several schedulers that act at once each has a lease of its own, beside the usual one."""
    return any(lease.startswith(f"{LEASE}/") and silent_ms <= ttl_ms for lease, silent_ms in status.silent.items())


def _duration_text(ms: int) -> str:
    return format_duration(ms // 1_000 * 1_000 or ms)


async def add_unheld_leases(explanation: WorkloadExplanation, server: ServerContext) -> WorkloadExplanation:
    """If it waits for somebody to make or place its replicas, and nobody does that: the lease, and the cure."""
    declared = server.watch_cache.get(f"workload/{explanation.tenant}/{explanation.name}")
    daemon = declared is not None and declared.spec.type == "daemon"  # how many it wants only who makes them knows
    if not (explanation.missing or explanation.groups or daemon):
        return explanation
    try:
        status = await server.standby.status()
    except EndpointError:
        return explanation
    unheld = {lease.lease: lease for lease in unheld_leases(status, server.watch_cache, server.timing.lease_ms)}
    makes, places = unheld.get(Role.WORKLOADS.value), unheld.get(LEASE)
    hints = [
        f"{lease.why}; {lease.cure}" for lease in (makes if explanation.missing or daemon else None, places if explanation.groups else None) if lease
    ]
    limit = "missing" if makes is not None and daemon and not explanation.limit else explanation.limit
    return replace(explanation, unattended="; ".join(hints), limit=limit)


FRESH_HEARTBEATS: Final = 5
"""So many beats old what the board shows may be: an authority that has nothing to do says something at every beat."""
READY_MS_MAX: Final = 2_000


async def status(request: RequestContext, server: ServerContext) -> Response:
    stands = await server.standby.status()
    watch_cache = server.watch_cache
    nodes: dict[str, int] = {}
    for _, row in watch_cache.kind("node/"):
        health = row.thing.status.health.value
        nodes[health] = nodes.get(health, 0) + 1
    answer = ScopeStatus(
        scope=stands.scope,
        incarnation=stands.incarnation,
        epoch=stands.epoch,
        window=stands.window,
        window_ms=stands.window_ms,
        revision=watch_cache.revision,
        leader=stands.leader,
        nodes=dict(sorted(nodes.items())),
        replicas={phase.value: len(keys) for phase, keys in watch_cache.by_phase.items() if keys},
        version=__version__,
        uptime_ms=server.clock.now_ms() - server.started_ms,
        board_age_ms=watch_cache.age_ms(),
        idle=unheld_leases(stands, watch_cache, server.timing.lease_ms) if watch_cache.sober else (),
    )
    return json_response(answer)


async def healthz(request: RequestContext, server: ServerContext) -> Response:
    return Response(b"ok\n", media_type=TEXT)


async def readyz(request: RequestContext, server: ServerContext) -> Response:
    """An authority is reached, and the board is sober and fresh."""
    try:
        async with server.clock.timeout_ms(READY_MS_MAX):
            await server.standby.status()
    except EndpointError as error:
        raise _not_ready(f"no authority is reached: {error}") from None
    except TimeoutError:
        raise _not_ready("the authority does not answer") from None
    if server.closing.is_set():
        raise _not_ready("the server is ending")
    if not server.watch_cache.sober:
        raise _not_ready("the rows of the scope are still being read")
    age_ms = server.watch_cache.age_ms()
    if age_ms > FRESH_HEARTBEATS * server.timing.heartbeat_ms:
        raise _not_ready(f"nothing was heard from the store for {age_ms} ms")
    return Response(b"ready\n", media_type=TEXT)


def _not_ready(reason: str) -> ApiProblem:
    return ApiProblem(503, "unavailable", reason, cure="wait a little, and look again", retry_after_ms=1_000)


STATUS_ROUTES: Final = (
    Route(
        "GET",
        "/v1/status",
        "getStatus",
        "Where the scope stands: who leads, at which revision, how many nodes and replicas are how, and who does not act.",
        status,
        tag="server",
        responses=(ResponseSpec(200, "how it stands", ScopeStatus),),
        audience=("user", "agent", "component"),
    ),
    Route(
        "GET",
        "/healthz",
        "getHealth",
        "Does the process live?",
        healthz,
        tag="server",
        responses=(ResponseSpec(200, "it does", str, TEXT),),
        anonymous=True,
        unqueued=True,
    ),
    Route(
        "GET",
        "/readyz",
        "getReadiness",
        "Is an authority reached, and is what this server knows fresh?",
        readyz,
        tag="server",
        responses=(ResponseSpec(200, "so it is", str, TEXT),),
        anonymous=True,
        unqueued=True,
    ),
)


RESTORED_REASON: Final = "restored"
_AWAITED_NODE_PREFIX: Final = f"summary/{AWAITED_NODE}"


def unconfirmed_after_restore(watch_cache: Board) -> dict[str, object]:
    """How many of each are awaited or void; nothing, if the scope doubts nothing."""
    unknown = sum(watch_cache.get(key).status.reason == RESTORED_REASON for key in watch_cache.by_phase[Phase.UNKNOWN])
    nodes = sum(key.startswith(_AWAITED_NODE_PREFIX) for key, _ in watch_cache.kind("summary/"))
    void_grants = sum(row.thing.status.phase is GrantPhase.VOID for _, row in watch_cache.kind("grant/"))
    counts = {"replicas_unknown": unknown, "nodes_awaited": nodes, "grants_void": void_grants}
    return {name: count for name, count in counts.items() if count}


class SupportAnswer(Struct, frozen=True, kw_only=True):
    """`settings` are those that it was started with; `counts` are objects by kind; `log` are its last lines, as written."""

    version: str
    python: str
    machine: str
    settings: dict[str, str | int | bool]
    counts: dict[str, int]
    unconfirmed_after_restore: dict[str, object]
    collected: list[int]
    tasks: list[str]
    threads: dict[str, list[str]]
    log: list[str]


async def support(request: RequestContext, server: ServerContext) -> Response:
    settings: dict[str, str | int | bool] = {
        "scope": server.scope,
        "name": server.name,
        "beat_ms": server.timing.heartbeat_ms,
        "leads": server.standby.leading is not None,
        "store": type(server.store).__name__,
        "log_level": "" if server.log is None else server.log.level,
        "uptime_ms": server.clock.now_ms() - server.started_ms,
        "watchers": server.open_watches,
    }
    answer = SupportAnswer(
        version=__version__,
        python=sys.version,
        machine=platform.platform(),
        settings=settings,
        counts=dict(sorted(server.watch_cache.counts().items())),
        doubts=unconfirmed_after_restore(server.watch_cache),
        collected=list(gc.get_count()),
        tasks=tasks(),
        threads=threads(),
        log=[] if server.log is None else server.log.recent(),
    )
    return json_response(answer)


SUPPORT_ROUTES: Final = (
    Route(
        "GET",
        "/v1/support",
        "getSupport",
        "What a report about this server needs: settings, counts, where its tasks stand, its last lines of log.",
        support,
        tag="server",
        responses=(ResponseSpec(200, "no object, token or value of anybody is in it", SupportAnswer),),
        tenant_access=False,
        audited=True,
    ),
)
