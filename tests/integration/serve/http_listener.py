"""A minimal application behind an HTTP listener on a real socket, and raw requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from remit.world.net.connections import BoundSocket, ListenAddress
from remit.world.net.http_server import serve_http

App = Callable[[Any, Any, Any], Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def respond(send: Any, data: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(data)).encode())]})
    await send({"type": "http.response.body", "body": data})


@asynccontextmanager
async def listening(app: App, closing: Callable[[], None] = lambda: None, **more: Any) -> AsyncIterator[BoundSocket]:
    bound = BoundSocket(ListenAddress("127.0.0.1", 0))
    try:
        async with serve_http(app, bound, on_closing=closing, **more):
            yield bound
    finally:
        bound.close()


async def ask(bound: BoundSocket, data: bytes = GET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
    writer.write(data)
    return reader, writer
