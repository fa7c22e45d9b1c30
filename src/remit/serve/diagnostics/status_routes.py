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
from remit.client.endpoint import NoVerdict, Status
from remit.commitment.books import AWAITED_NODE
from remit.correction.controller_set import CONTROLLERS
from remit.model.claims import Role
from remit.model.objects import key_of
from remit.model.records import GrantPhase, Phase
from remit.model.resources import format_duration
from remit.model.wire.api_types import IdleLease, ScopeStatus
from remit.observation.watch_cache import Board
from remit.proposal.explain.result_types import WorkloadTold
from remit.proposal.scheduler import LEASE
from remit.serve.http.replies import Failure
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import TEXT, Answer, Route
from remit.serve.objects.reads import encoded
from remit.serve.server_context import Desk
from remit.world.host_checks import tasks, threads

SCHEDULER: Final = "scheduler"
PARTS: Final[dict[str, str]] = {
    LEASE: SCHEDULER,
    **{one.lease or one.remit.role.value: "controllers" for one in CONTROLLERS},
}
"""Which command runs who acts under a lease."""


def idle_leases(stands: Status, board: Board, usual_ms: int) -> tuple[IdleLease, ...]:
    """`usual_ms` is the term of one that was never taken. A new authority gives everybody a full term to be heard again."""
    return tuple(_idle(stands, board, usual_ms))


def _idle(stands: Status, board: Board, usual_ms: int) -> Iterator[IdleLease]:
    for lease, part in PARTS.items():
        if part == SCHEDULER and _another_schedules(stands, usual_ms):
            continue
        found = board.get(key_of("Lease", lease))
        cure = f"start `remit {part}`; if it runs, its log says what keeps it from acting"
        if found is None or not found.spec.holder:
            if stands.listened_ms > usual_ms:
                how = "was never taken" if found is None else "was given back"
                yield IdleLease(lease=lease, part=part, why=f"nobody holds the lease {lease}: it {how}", cure=cure)
            continue
        silent_ms = stands.silent.get(lease, stands.listened_ms)
        if silent_ms > found.spec.ttl:
            least = "" if lease in stands.silent else " at least"  # what was before it this authority cannot know
            why = f"nobody holds the lease {lease}: it was not renewed for {_words(silent_ms)}{least}"
            yield IdleLease(lease=lease, part=part, silent_ms=silent_ms, why=why, cure=cure)


def _another_schedules(stands: Status, term_ms: int) -> bool:
    """Of several schedulers that act at once each has a lease of its own, beside the usual one."""
    return any(lease.startswith(f"{LEASE}/") and silent_ms <= term_ms for lease, silent_ms in stands.silent.items())


def _words(ms: int) -> str:
    return format_duration(ms // 1_000 * 1_000 or ms)


async def with_who_does_not_act(told: WorkloadTold, desk: Desk) -> WorkloadTold:
    """If it waits for somebody to make or place its replicas, and nobody does that: the lease, and the cure."""
    declared = desk.board.get(f"workload/{told.tenant}/{told.name}")
    daemon = declared is not None and declared.spec.type == "daemon"  # how many it wants only who makes them knows
    if not (told.missing or told.groups or daemon):
        return told
    try:
        stands = await desk.standby.status()
    except NoVerdict:
        return told
    idle = {one.lease: one for one in idle_leases(stands, desk.board, desk.tempo.lease_ms)}
    makes, places = idle.get(Role.WORKLOADS.value), idle.get(LEASE)
    words = [
        f"{one.why}; {one.cure}" for one in (makes if told.missing or daemon else None, places if told.groups else None) if one
    ]
    limit = "missing" if makes is not None and daemon and not told.limit else told.limit
    return replace(told, unattended="; ".join(words), limit=limit)


FRESH_BEATS: Final = 5
"""So many beats old what the board shows may be: an authority that has nothing to do says something at every beat."""
READY_MS_MAX: Final = 2_000


async def status(asked: Asked, desk: Desk) -> Response:
    stands = await desk.standby.status()
    board = desk.board
    nodes: dict[str, int] = {}
    for _, kept in board.kind("node/"):
        health = kept.thing.status.health.value
        nodes[health] = nodes.get(health, 0) + 1
    told = ScopeStatus(
        scope=stands.scope,
        incarnation=stands.incarnation,
        epoch=stands.epoch,
        window=stands.window,
        window_ms=stands.window_ms,
        revision=board.revision,
        leader=stands.leader,
        nodes=dict(sorted(nodes.items())),
        replicas={phase.value: len(keys) for phase, keys in board.by_phase.items() if keys},
        version=__version__,
        uptime_ms=desk.clock.now_ms() - desk.began_ms,
        board_age_ms=board.age_ms(),
        idle=idle_leases(stands, board, desk.tempo.lease_ms) if board.sober else (),
    )
    return encoded(told)


async def healthz(asked: Asked, desk: Desk) -> Response:
    return Response(b"ok\n", media_type=TEXT)


async def readyz(asked: Asked, desk: Desk) -> Response:
    """An authority is reached, and the board is sober and fresh."""
    try:
        async with desk.clock.timeout_ms(READY_MS_MAX):
            await desk.standby.status()
    except NoVerdict as error:
        raise _not_ready(f"no authority is reached: {error}") from None
    except TimeoutError:
        raise _not_ready("the authority does not answer") from None
    if desk.closing.is_set():
        raise _not_ready("the server is ending")
    if not desk.board.sober:
        raise _not_ready("the rows of the scope are still being read")
    age_ms = desk.board.age_ms()
    if age_ms > FRESH_BEATS * desk.tempo.beat_ms:
        raise _not_ready(f"nothing was heard from the store for {age_ms} ms")
    return Response(b"ready\n", media_type=TEXT)


def _not_ready(why: str) -> Failure:
    return Failure(503, "unavailable", why, cure="wait a little, and look again", retry_after_ms=1_000)


STATUS_ROUTES: Final = (
    Route(
        "GET",
        "/v1/status",
        "getStatus",
        "Where the scope stands: who leads, at which revision, how many nodes and replicas are how, and who does not act.",
        status,
        tag="server",
        answers=(Answer(200, "how it stands", ScopeStatus),),
        audience=("user", "agent", "component"),
    ),
    Route(
        "GET",
        "/healthz",
        "getHealth",
        "Does the process live?",
        healthz,
        tag="server",
        answers=(Answer(200, "it does", str, TEXT),),
        open=True,
        first=True,
    ),
    Route(
        "GET",
        "/readyz",
        "getReadiness",
        "Is an authority reached, and is what this server knows fresh?",
        readyz,
        tag="server",
        answers=(Answer(200, "so it is", str, TEXT),),
        open=True,
        first=True,
    ),
)


RESTORED: Final = "restored"
_NODE: Final = f"summary/{AWAITED_NODE}"


def doubts(board: Board) -> dict[str, object]:
    """How many of each are awaited or void; nothing, if the scope doubts nothing."""
    unknown = sum(board.get(key).status.reason == RESTORED for key in board.by_phase[Phase.UNKNOWN])
    nodes = sum(key.startswith(_NODE) for key, _ in board.kind("summary/"))
    void = sum(kept.thing.status.phase is GrantPhase.VOID for _, kept in board.kind("grant/"))
    found = {"replicas_unknown": unknown, "nodes_awaited": nodes, "grants_void": void}
    return {name: count for name, count in found.items() if count}


class SupportAnswer(Struct, frozen=True, kw_only=True):
    """`settings` are those that it was started with; `counts` are objects by kind; `log` are its last lines, as written."""

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


async def support(asked: Asked, desk: Desk) -> Response:
    settings: dict[str, str | int | bool] = {
        "scope": desk.scope,
        "name": desk.name,
        "beat_ms": desk.tempo.beat_ms,
        "leads": desk.standby.leading is not None,
        "store": type(desk.store).__name__,
        "log_level": "" if desk.log is None else desk.log.level,
        "uptime_ms": desk.clock.now_ms() - desk.began_ms,
        "watchers": desk.watchers,
    }
    told = SupportAnswer(
        version=__version__,
        python=sys.version,
        machine=platform.platform(),
        settings=settings,
        counts=dict(sorted(desk.board.counts().items())),
        doubts=doubts(desk.board),
        collected=list(gc.get_count()),
        tasks=tasks(),
        threads=threads(),
        log=[] if desk.log is None else desk.log.recent(),
    )
    return encoded(told)


SUPPORT_ROUTES: Final = (
    Route(
        "GET",
        "/v1/support",
        "getSupport",
        "What a report about this server needs: settings, counts, where its tasks stand, its last lines of log.",
        support,
        tag="server",
        answers=(Answer(200, "no object, token or value of anybody is in it", SupportAnswer),),
        tenants=False,
        audited=True,
    ),
)
