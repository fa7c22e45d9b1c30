"""A minimal HTTP service for tests of clients; the real server is in serve/.

One POST a request; `/v1/ask` is answered whole, `/v1/follow` in lines. An interrupted answer is visible: there is none, or its
last chunk is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from remit.world.interfaces import ListenFailed, Service

GRACE_S = 1.0


@asynccontextmanager
async def serve_http_service(port: int, service: Service, *, token: str) -> AsyncGenerator[int, None]:
    """Serve at `port` of 127.0.0.1 (0: any free one) and yield the port."""
    open_calls: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_calls.add(task)
        try:
            await _Connection(reader, writer, service, token).go_on()
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - the closed connection shows any error
            pass
        finally:
            open_calls.discard(task)
            writer.transport.abort()

    try:
        server = await asyncio.start_server(connected, "127.0.0.1", port, backlog=1_024)
    except OSError as error:
        raise ListenFailed(f"port {port} cannot be had ({error})", "end who holds it") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        _Connection.ending = True
        try:
            busy = [task for task in open_calls if not task.get_name().startswith("idle")]
            if busy:
                await asyncio.wait(busy, timeout=GRACE_S)
            for task in tuple(open_calls):
                task.cancel()
            await asyncio.gather(*open_calls, return_exceptions=True)
        finally:
            _Connection.ending = False


class _Connection:
    """One connection. Its task is called `idle` or `stream` while shutdown need not wait for it."""

    ending = False

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: Service, token: str) -> None:
        self._reader, self._writer, self._service, self._token = reader, writer, service, token

    async def go_on(self) -> None:
        while not _Connection.ending:
            self._name("idle")
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
            self._name("busy")
            if headers.get("authorization") != f"Bearer {self._token}":
                self._answer(401, b'{"status":401,"code":"unauthenticated","detail":"no such token","cure":"give it"}')
            elif (method, path) == ("POST", "/v1/ask"):
                self._answer(200, await self._service.request(body))
            elif (method, path) == ("POST", "/v1/follow"):
                await self._follow(body)
            else:
                self._answer(404, b'{"status":404,"code":"no_such_path","detail":"no such path"}')
            await self._writer.drain()

    def _name(self, name: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(name)

    def _answer(self, status: int, body: bytes) -> None:
        self._writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    async def _follow(self, body: bytes) -> None:
        self._name("idle, as far as the end is concerned: a stream")
        self._writer.write(b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            disconnected = group.create_task(self._until_disconnected())
            sending = group.create_task(self._send_stream(body))
            await asyncio.wait((disconnected, sending), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                sending.cancel()
            disconnected.cancel()
        if sending.cancelled():
            raise ConnectionResetError

    async def _until_disconnected(self) -> None:
        while await self._reader.read(1):
            pass

    async def _send_stream(self, body: bytes) -> None:
        async with aclosing(self._service.stream(body)) as items:
            async for item in items:
                self._writer.write(b"%x\r\n%b\n\r\n" % (len(item) + 1, item))
                await self._writer.drain()
        self._writer.write(b"0\r\n\r\n")
