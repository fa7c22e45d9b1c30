"""RPC server: calls and streams within limits. The client is rpc_client.py.

A call beyond a limit is refused before it starts, with a REFUSED frame, so the client knows that it was not executed. The
server never stops reading a connection for lack of capacity, because the frames that free capacity (TAKEN, LEAVE) arrive on
the same connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from remit.world.interfaces import NotServed, Service
from remit.world.net.frames import ITEM_BYTES, WINDOW_BYTES, Address, Frame, Kind, NoFrame, framed, next_frame, reason

if TYPE_CHECKING:
    from remit.world.net.tls import Secure

CALLS_MAX: Final = 1_024
CALLS_BYTES_MAX: Final = 256 << 20
CONNECTIONS_MAX: Final = 1_024
CLOSE_MS: Final = 1_000
"""How long running requests may take after shutdown began."""


@asynccontextmanager
async def listening(place: Address, service: Service, secure: Secure | None = None) -> AsyncGenerator[None, None]:
    """Serve `service` at an address. At a `tls:` address only peers that `secure` admits are served."""
    listener = _Listener(service, secure)
    if place.secure:
        async with _listening_securely(place, listener, secure):
            yield
        return
    server = await _open(place, listener)
    node = Path(place.path).stat().st_ino if place.path else 0  # noqa: ASYNC240 - one stat of a local file
    try:
        yield
    finally:
        try:
            await listener.close(server)
        finally:
            if place.path:
                _remove(Path(place.path), node)


@asynccontextmanager
async def _listening_securely(place: Address, listener: _Listener, secure: Secure | None) -> AsyncGenerator[None, None]:
    if secure is None or secure.answering is None:
        raise NotServed(f"{place} needs TLS, and this process has no certificate", "configure one")
    from remit.world.net.connections import Bound, Listen  # imported late: the keeper, which must stay small, never serves TLS
    from remit.world.net.tls import Doorstep, greeting

    doorstep = Doorstep(secure.answering, lambda: listener.count, CONNECTIONS_MAX)
    with closing(Bound(Listen(place.host, place.port), secure=True)) as bound:
        try:
            async with greeting(bound.socket, listener.protocol, doorstep):
                yield
                listener.turn_away()
        finally:
            listener.turn_away()
            await listener.end()


async def _open(place: Address, listener: _Listener) -> asyncio.Server:
    try:
        if not place.path:
            return await asyncio.start_server(listener.begin, place.host, place.port)
        if await _answers(place.path):
            # Binding would silently take the path away from the process that serves it.
            raise NotServed(f"{place} is already in use", "stop the process that listens there, or use another address")
        server = await asyncio.start_unix_server(listener.begin, place.path)
        Path(place.path).chmod(0o600)  # noqa: ASYNC240
    except OSError as error:
        raise NotServed(f"cannot listen at {place} ({reason(error)})", "use another address") from error
    return server


async def _answers(path: str) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


def _remove(path: Path, node: int) -> None:
    with suppress(OSError):
        if path.stat().st_ino == node:
            path.unlink()


class _Flow:
    """One outgoing stream: its task, and how many bytes its reader has not consumed yet."""

    __slots__ = ("_moved", "task", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self.task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()

    async def room(self) -> None:
        while self.under_way >= WINDOW_BYTES:
            self._moved.clear()
            await self._moved.wait()

    def taken(self, count: int) -> None:
        self.under_way = max(0, self.under_way - count)
        self._moved.set()

    def leave(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _Listener:
    """All connections and calls of one address. No task outlives `close`."""

    def __init__(self, service: Service, secure: Secure | None = None) -> None:
        self._service, self._secure = service, secure
        self._conversations: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._closing = False

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing or len(self._conversations) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        if self._secure is not None and not self._secure.knows(writer.transport):
            writer.transport.abort()  # signed by the right authority, but not an admitted role
            return
        # With a limit of 0, `drain` waits until the kernel has all data, so nothing written is lost when the connection closes.
        # TLS treats 0 as always full, so the limit is 1 byte there.
        writer.transport.set_write_buffer_limits(high=0 if self._secure is None else 1)
        _ = _keep(self._converse(reader, writer), self._conversations)

    @property
    def count(self) -> int:
        return len(self._conversations)

    def protocol(self) -> asyncio.StreamReaderProtocol:
        """Return a protocol for one connection."""
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self.begin)

    async def close(self, server: asyncio.Server) -> None:
        loop = asyncio.get_running_loop()
        for socket in server.sockets:
            loop.remove_reader(socket.fileno())
        self.turn_away()
        try:
            # asyncio's server fails if it is closed during an accept, so connections being accepted are let in and rejected
            # first.
            for _ in range(3):
                await asyncio.sleep(0)
            server.close()
        finally:
            server.close()
            await self.end()

    def turn_away(self) -> None:
        """Accept no more calls, and cancel streams, which would never end."""
        self._closing = True
        for task in self._streams:
            task.cancel()

    async def end(self) -> None:
        try:
            if self._requests:
                await asyncio.wait(self._requests, timeout=CLOSE_MS / 1000)
        finally:
            tasks = [*self._streams, *self._requests, *self._conversations]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flows: dict[int, _Flow] = {}
        try:
            while self._take(await next_frame(reader), flows, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, NoFrame):
            pass  # the client is gone, or does not speak this protocol
        finally:
            for flow in flows.values():
                flow.leave()
            writer.transport.abort()

    def _take(self, frame: Frame, flows: dict[int, _Flow], writer: asyncio.StreamWriter) -> bool:
        """Start or continue the call of a frame. Returns False for an invalid frame, which ends the connection."""
        flow = flows.get(frame.tag)
        match frame.kind:
            case Kind.REQUEST | Kind.STREAM if not self._has_room(frame):
                _write(writer, framed(Kind.REFUSED, frame.tag))
                return (
                    writer.transport.get_write_buffer_size() < WINDOW_BYTES
                )  # disconnect a client that sends requests without reading the refusals
            case Kind.REQUEST:
                _ = self._begin(self._answer(frame, writer), self._requests, len(frame.body))
            case Kind.STREAM if flow is None:
                flow = flows[frame.tag] = _Flow()
                flow.task = self._begin(self._send(frame, writer, flow), self._streams, len(frame.body))
                flow.task.add_done_callback(lambda _: flows.pop(frame.tag, None))
            case Kind.TAKEN if len(frame.body) == 8:
                if flow is not None:  # else it has ended meanwhile
                    flow.taken(int.from_bytes(frame.body))
            case Kind.LEAVE:
                if flow is not None:
                    flow.leave()
            case _:
                return False
        return True

    def _has_room(self, frame: Frame) -> bool:
        return (
            not self._closing
            and len(self._requests) + len(self._streams) < CALLS_MAX
            and self._bytes + len(frame.body) <= CALLS_BYTES_MAX
        )

    def _begin(self, work: Coroutine[Any, Any, None], kept: set[asyncio.Task[None]], size: int) -> asyncio.Task[None]:
        def done(_: object) -> None:
            self._bytes -= size

        self._bytes += size
        task = _keep(work, kept)
        task.add_done_callback(done)
        return task

    async def _answer(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        reply = framed(Kind.BROKEN, frame.tag)
        try:
            reply = framed(Kind.REPLY, frame.tag, await self._service.request(frame.body))
        except Exception as error:  # noqa: BLE001 - any failure aborts only this call
            _complain(error)
        finally:
            _write(writer, reply)
        await _drained(writer)

    async def _send(self, frame: Frame, writer: asyncio.StreamWriter, flow: _Flow) -> None:
        last = framed(Kind.BROKEN, frame.tag)
        try:
            async with aclosing(self._service.stream(frame.body)) as items:
                async for item in items:
                    piece = framed(Kind.ITEM, frame.tag, item)
                    await flow.room()
                    flow.under_way += len(item) + ITEM_BYTES
                    _write(writer, piece)
                    await _drained(writer)
            last = framed(Kind.END, frame.tag)
        except Exception as error:  # noqa: BLE001 - any failure aborts only this call
            _complain(error)
        finally:
            _write(writer, last)
        await _drained(writer)


def _keep(work: Coroutine[Any, Any, None], kept: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    kept.add(task)
    task.add_done_callback(kept.discard)
    return task


def _write(writer: asyncio.StreamWriter, piece: bytes) -> None:
    if not writer.is_closing():
        writer.write(piece)


async def _drained(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the client is gone: its connection ends by itself
        await writer.drain()


def _complain(error: Exception) -> None:
    """Log the failure of a service; the client only learns that there is no reply."""
    told = {"message": "RPC service raised an exception; the call was aborted", "exception": error}
    asyncio.get_running_loop().call_exception_handler(told)
