"""A wire between a client and a server that is cut when a test wants it. No test is in here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Passes bytes both ways. `lose`: which requests, by their bytes, are passed on and never answered; counted in `lost`."""

    def __init__(self, port: int) -> None:
        self.port = port
        """Of the server."""
        self.lose: Callable[[bytes], bool] = lambda _: False
        self.lost = 0
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Every connection, now."""
        for writer in tuple(self._open):
            writer.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        deaf = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                back = group.create_task(self._back(far_reader, writer, deaf))
                await self._there(reader, far_writer, deaf)
                if not deaf.is_set():
                    back.cancel()
        finally:
            self._open -= {writer, far_writer}
            writer.transport.abort()
            far_writer.transport.abort()

    async def _there(self, reader: asyncio.StreamReader, far: asyncio.StreamWriter, deaf: asyncio.Event) -> None:
        with suppress(OSError):
            while piece := await reader.read(65_536):
                if self.lose(piece):
                    self.lost += 1
                    deaf.set()
                far.write(piece)
                await far.drain()

    async def _back(self, far: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event) -> None:
        """An answer that is not to be heard is waited for, so that the deed is done; then all is cut."""
        with suppress(OSError):
            while piece := await far.read(65_536):
                if deaf.is_set():
                    break
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def proxied(port: int) -> AsyncGenerator[tuple[Proxy, str], None]:
    proxy = Proxy(port)
    talks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        with suppress(asyncio.CancelledError):
            await proxy.connected(reader, writer)
        talks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield proxy, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for talk in tuple(talks):
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
