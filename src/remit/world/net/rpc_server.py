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

from remit.world.interfaces import ListenFailed, Service
from remit.world.net.frames import (
    ITEM_BYTES,
    WINDOW_BYTES,
    Frame,
    FrameError,
    FrameKind,
    RpcAddress,
    os_error_text,
    pack_frame,
    read_frame,
)

if TYPE_CHECKING:
    from remit.world.net.tls import LinkTls

CALLS_MAX: Final = 1_024
CALLS_BYTES_MAX: Final = 256 << 20
CONNECTIONS_MAX: Final = 1_024
CLOSE_MS: Final = 1_000
"""Maximum duration of running requests after the start of a shutdown."""


@asynccontextmanager
async def serve_rpc(address: RpcAddress, service: Service, tls: LinkTls | None = None) -> AsyncGenerator[None, None]:
    """Serve `service` at an address. At a `tls:` address only peers that `tls` admits are served."""
    listener = _Listener(service, tls)
    if address.secure:
        async with _serving_tls(address, listener, tls):
            yield
        return
    server = await _open(address, listener)
    node = Path(address.path).stat().st_ino if address.path else 0  # noqa: ASYNC240 - one stat of a local file
    try:
        yield
    finally:
        try:
            await listener.close(server)
        finally:
            if address.path:
                _remove(Path(address.path), node)


@asynccontextmanager
async def _serving_tls(address: RpcAddress, listener: _Listener, tls: LinkTls | None) -> AsyncGenerator[None, None]:
    if tls is None or tls.server_context is None:
        raise ListenFailed(f"{address} needs TLS, and this process has no certificate", "configure one")
    # Imported late: the keeper, which must stay small, never serves TLS.
    from remit.world.net.connections import BoundSocket, ListenAddress
    from remit.world.net.tls import TlsAcceptLimits, tls_accept

    limits = TlsAcceptLimits(tls.server_context, lambda: listener.count, CONNECTIONS_MAX)
    with closing(BoundSocket(ListenAddress(address.host, address.port), secure=True)) as bound:
        try:
            async with tls_accept(bound.socket, listener.protocol, limits):
                yield
                listener.stop_accepting()
        finally:
            listener.stop_accepting()
            await listener.finish()


async def _open(address: RpcAddress, listener: _Listener) -> asyncio.Server:
    try:
        if not address.path:
            return await asyncio.start_server(listener.accept, address.host, address.port)
        if await _is_served(address.path):
            # Binding would silently take the path away from the process that serves it.
            raise ListenFailed(f"{address} is already in use", "stop the process that listens there, or use another address")
        server = await asyncio.start_unix_server(listener.accept, address.path)
        Path(address.path).chmod(0o600)  # noqa: ASYNC240
    except OSError as error:
        raise ListenFailed(f"cannot listen at {address} ({os_error_text(error)})", "use another address") from error
    return server


async def _is_served(path: str) -> bool:
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


class _OutgoingStream:
    """One outgoing stream: its task, and how many bytes its reader has not consumed yet."""

    __slots__ = ("_window_changed", "in_flight_bytes", "task")

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self._window_changed = asyncio.Event()

    async def wait_for_window(self) -> None:
        while self.in_flight_bytes >= WINDOW_BYTES:
            self._window_changed.clear()
            await self._window_changed.wait()

    def consumed(self, count: int) -> None:
        self.in_flight_bytes = max(0, self.in_flight_bytes - count)
        self._window_changed.set()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _Listener:
    """All connections and calls of one address. No task outlives `close`."""

    def __init__(self, service: Service, tls: LinkTls | None = None) -> None:
        self._service, self._tls = service, tls
        self._connections: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._closing = False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing or len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        if self._tls is not None and not self._tls.admits_peer(writer.transport):
            writer.transport.abort()  # signed by the right authority, but not an admitted role
            return
        # With a limit of 0, `drain` waits until the kernel has all data, so nothing written is lost when the connection closes.
        # TLS treats 0 as always full, so the limit is 1 byte there.
        writer.transport.set_write_buffer_limits(high=0 if self._tls is None else 1)
        _ = _start_task(self._serve_connection(reader, writer), self._connections)

    @property
    def count(self) -> int:
        return len(self._connections)

    def protocol(self) -> asyncio.StreamReaderProtocol:
        """Return a protocol for one connection."""
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self.accept)

    async def close(self, server: asyncio.Server) -> None:
        loop = asyncio.get_running_loop()
        for socket in server.sockets:
            loop.remove_reader(socket.fileno())
        self.stop_accepting()
        try:
            # asyncio's server fails if it is closed during an accept, so connections being accepted are let in and rejected
            # first.
            for _ in range(3):
                await asyncio.sleep(0)
            server.close()
        finally:
            server.close()
            await self.finish()

    def stop_accepting(self) -> None:
        """Accept no more calls, and cancel streams, which would never end."""
        self._closing = True
        for task in self._streams:
            task.cancel()

    async def finish(self) -> None:
        try:
            if self._requests:
                await asyncio.wait(self._requests, timeout=CLOSE_MS / 1000)
        finally:
            tasks = [*self._streams, *self._requests, *self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flows: dict[int, _OutgoingStream] = {}
        try:
            while self._handle_frame(await read_frame(reader), flows, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, FrameError):
            pass  # the client is gone, or does not speak this protocol
        finally:
            for flow in flows.values():
                flow.cancel()
            writer.transport.abort()

    def _handle_frame(self, frame: Frame, flows: dict[int, _OutgoingStream], writer: asyncio.StreamWriter) -> bool:
        """Start or continue the call of a frame. Returns False for an invalid frame, which ends the connection."""
        flow = flows.get(frame.tag)
        match frame.kind:
            case FrameKind.REQUEST | FrameKind.STREAM if not self._has_capacity(frame):
                _write(writer, pack_frame(FrameKind.REFUSED, frame.tag))
                return (
                    writer.transport.get_write_buffer_size() < WINDOW_BYTES
                )  # disconnect a client that sends requests without reading the refusals
            case FrameKind.REQUEST:
                _ = self._start_call(self._serve_request(frame, writer), self._requests, len(frame.body))
            case FrameKind.STREAM if flow is None:
                flow = flows[frame.tag] = _OutgoingStream()
                flow.task = self._start_call(self._serve_stream(frame, writer, flow), self._streams, len(frame.body))
                flow.task.add_done_callback(lambda _: flows.pop(frame.tag, None))
            case FrameKind.TAKEN if len(frame.body) == 8:
                if flow is not None:  # else it has ended meanwhile
                    flow.consumed(int.from_bytes(frame.body))
            case FrameKind.LEAVE:
                if flow is not None:
                    flow.cancel()
            case _:
                return False
        return True

    def _has_capacity(self, frame: Frame) -> bool:
        return (
            not self._closing
            and len(self._requests) + len(self._streams) < CALLS_MAX
            and self._bytes + len(frame.body) <= CALLS_BYTES_MAX
        )

    def _start_call(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]], size: int) -> asyncio.Task[None]:
        def done(_: object) -> None:
            self._bytes -= size

        self._bytes += size
        task = _start_task(work, tasks)
        task.add_done_callback(done)
        return task

    async def _serve_request(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        reply = pack_frame(FrameKind.BROKEN, frame.tag)
        try:
            reply = pack_frame(FrameKind.REPLY, frame.tag, await self._service.request(frame.body))
        except Exception as error:  # noqa: BLE001 - any failure aborts only this call
            _log_failure(error)
        finally:
            _write(writer, reply)
        await _drain(writer)

    async def _serve_stream(self, frame: Frame, writer: asyncio.StreamWriter, flow: _OutgoingStream) -> None:
        last = pack_frame(FrameKind.BROKEN, frame.tag)
        try:
            async with aclosing(self._service.stream(frame.body)) as items:
                async for item in items:
                    frame_bytes = pack_frame(FrameKind.ITEM, frame.tag, item)
                    await flow.wait_for_window()
                    flow.in_flight_bytes += len(item) + ITEM_BYTES
                    _write(writer, frame_bytes)
                    await _drain(writer)
            last = pack_frame(FrameKind.END, frame.tag)
        except Exception as error:  # noqa: BLE001 - any failure aborts only this call
            _log_failure(error)
        finally:
            _write(writer, last)
        await _drain(writer)


def _start_task(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


async def _drain(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the client is gone: its connection ends by itself
        await writer.drain()


def _log_failure(error: Exception) -> None:
    """Log the failure of a service; the client only learns that there is no reply."""
    context = {"message": "RPC service raised an exception; the call was aborted", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)
