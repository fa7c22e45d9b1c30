"""How does this server stand? What a scope is at, whether the process lives, and whether it is of use just now; no history."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from remit import __version__
from remit.client.endpoint import NoVerdict
from remit.model.answers import ScopeStatus
from remit.serve.acting import idle_leases
from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.failures import Failure
from remit.serve.reading import encoded
from remit.serve.routes import TEXT, Answer, Route

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


ROUTES: Final = (
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
