"""What does a report need that only the server knows? How it was started, what it does now, its last lines. No objects."""

from __future__ import annotations

import gc
import platform
import sys
from typing import Final

from msgspec import Struct
from starlette.responses import Response

from remit import __version__
from remit.serve.asked import Asked
from remit.serve.desk import Desk
from remit.serve.doubts import doubts
from remit.serve.reading import encoded
from remit.serve.routes import Answer, Route
from remit.world.stacks import tasks, threads


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


ROUTES: Final = (
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
