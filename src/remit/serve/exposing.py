"""How does a part without an API of its own tell what it counts? `/metrics` on this machine's own address, and nothing else.

No token is asked for: what is told names no object and nobody, and only this machine is answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from ipaddress import ip_address
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remit.serve.metrics import Metrics
from remit.world.binding import LOCALHOST, Bound, Listen
from remit.world.http import http_listening
from remit.world.promises import NotServed

PATH: Final = "/metrics"
CONNECTIONS_MAX: Final = 20


class Exposed:
    """The ASGI application."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await Response(b"only GET /metrics is answered here\n", 404)(scope, receive, send)
            return
        accept = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), "")
        body, media = self._metrics.written(accept)
        await Response(body, headers={"content-type": media})(scope, receive, send)


@asynccontextmanager
async def exposed(metrics: Metrics, listen: Listen) -> AsyncIterator[str]:
    """Answer for as long as this lasts. Yields where."""
    if listen.host != LOCALHOST and not ip_address(listen.host).is_loopback:
        raise NotServed(
            f"{listen.host} can be reached from other machines, and metrics are told here without a token",
            "use 127.0.0.1 or ::1 for --metrics, and let something that knows whom it answers pass it on",
        )
    with closing(Bound(listen)) as bound:
        async with http_listening(Exposed(metrics), bound, closing=lambda: None, connections_max=CONNECTIONS_MAX):
            yield f"{bound.url}{PATH}"
