"""HTTP server for tests whose handler writes each response byte by byte: wrong, late, partial or none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote


@dataclass
class RawRequest:
    """One request, with methods to respond to it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader = field(repr=False)

    def answer(self, status: int, value: Any = None, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        lines = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
        self.writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body)

    def problem(self, status: int, code: str, detail: str = "", *, retry_after: int = 0, **more: Any) -> None:
        headers = {"Retry_After": str(retry_after)} if retry_after else {}
        self.answer(status, {"status": status, "code": code, "detail": detail, **more}, **headers)

    def begin(self) -> None:
        self.writer.write(b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def line(self, value: Any) -> None:
        self.chunk(json.dumps(value).encode() + b"\n")

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")


class Cut(Exception):
    """Raised by a handler: close the connection at once."""


Handler = Callable[[RawRequest], Awaitable[None]]


@asynccontextmanager
async def raw_server(handler: Handler, port: int = 0) -> AsyncGenerator[str, None]:
    """Yield the server's address. A handler that returns keeps the connection open for the next request."""
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            while True:
                await handler(await _read_request(reader, writer))
                await writer.drain()
        except (Cut, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port, backlog=1_024)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in tuple(connections):
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> RawRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    path, _, query = target.partition("?")
    return RawRequest(method, unquote(path), dict(parse_qsl(query)), headers, body, writer, reader)
