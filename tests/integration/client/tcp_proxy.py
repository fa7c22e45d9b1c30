"""A TCP proxy between client and server that tests can cut. Contains no tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Passes bytes both ways. `lose` selects requests, by their bytes, whose answer is dropped; counted in `lost`."""

    def __init__(self, port: int) -> None:
        self.port = port
        """Port of the server."""
        self.lose: Callable[[bytes], bool] = lambda _: False
        self.lost = 0
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Abort every connection."""
        for writer in tuple(self._open):
            writer.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        losing = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                back = group.create_task(self._return(far_reader, writer, losing))
                await self._forward(reader, far_writer, losing)
                if not losing.is_set():
                    back.cancel()
        finally:
            self._open -= {writer, far_writer}
            writer.transport.abort()
            far_writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, far: asyncio.StreamWriter, losing: asyncio.Event) -> None:
        with suppress(OSError):
            while piece := await reader.read(65_536):
                if self.lose(piece):
                    self.lost += 1
                    losing.set()
                far.write(piece)
                await far.drain()

    async def _return(self, far: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: asyncio.Event) -> None:
        """A lost answer is still awaited, so that the server has acted; then the connection is aborted."""
        with suppress(OSError):
            while piece := await far.read(65_536):
                if losing.is_set():
                    break
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def proxied(port: int) -> AsyncGenerator[tuple[Proxy, str], None]:
    proxy = Proxy(port)
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        with suppress(asyncio.CancelledError):
            await proxy.connected(reader, writer)
        connections.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield proxy, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in tuple(connections):
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
