"""RPC client: one multiplexed connection per peer. The server is rpc_server.py.

A call that fails before its frame is written to a connection raises `NotSent`: the peer cannot have received it. From then
on a failure raises `ReplyLost`, unless the peer answers that it refused to start the call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from remit.world.interfaces import LinkError, NotSent, ReplyLost, Service
from remit.world.net.frames import (
    BODY_BYTES_MAX,
    ITEM_BYTES,
    WINDOW_BYTES,
    Frame,
    FrameError,
    FrameKind,
    RpcAddress,
    os_error_text,
    pack_frame,
    parse_address,
    read_frame,
)
from remit.world.net.rpc_server import serve_rpc

if TYPE_CHECKING:
    from remit.world.net.tls import LinkTls


class SocketLink:
    """A link over sockets. `addresses` maps peer names to `unix:/path`, `tcp:127.0.0.1:port` or, with `secure`,
    `tls:host:port`.

    A connection is opened on first use and reopened after a failure. It is closed when a frame exceeds `bytes_max`. Nothing
    is sent to a peer that `tls` does not admit.
    """

    def __init__(self, addresses: Mapping[str, str], tls: LinkTls | None = None, *, bytes_max: int = BODY_BYTES_MAX) -> None:
        self._tls, self._bytes_max = tls, bytes_max
        self._addresses = {name: parse_address(text) for name, text in addresses.items()}
        self._connections: dict[str, _Connection] = {}
        self._connect_locks: dict[str, asyncio.Lock] = {}

    async def request(self, to: str, body: bytes, /) -> bytes:
        connection = await self._connection_to(to)
        call = connection.call(FrameKind.REQUEST, body)
        try:
            reply = await call.next()
        finally:
            connection.forget(call)
        if reply is None:
            raise ReplyLost(f"{to} answered a request as if it were a stream", "check that both processes run the same version")
        return reply

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        connection = await self._connection_to(to)
        call = connection.call(FrameKind.STREAM, body)
        taken = 0
        try:
            while (item := await call.next()) is not None:
                yield item
                taken += len(item) + ITEM_BYTES
                if taken >= WINDOW_BYTES // 4:
                    connection.write(FrameKind.TAKEN, call.tag, taken.to_bytes(8))
                    taken = 0
        finally:
            connection.forget(call)
            if not call.ended:
                connection.write(FrameKind.LEAVE, call.tag)

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return serve_rpc(self._address(at), service, self._tls)

    async def close(self) -> None:
        """Close every connection. Calls that wait for a reply fail; the next call opens a new connection."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()

    def _address(self, name: str) -> RpcAddress:
        if name not in self._addresses:
            raise NotSent(f"no address is configured for {name}", "add it to the addresses of this process")
        return self._addresses[name]

    async def _connection_to(self, to: str) -> _Connection:
        """Return a usable connection. The caller must write before its next await, while it is known to be usable."""
        connection = self._connections.get(to)
        if connection is None or not connection.usable:
            async with self._connect_locks.setdefault(to, asyncio.Lock()):
                connection = self._connections.get(to)
                if connection is None or not connection.usable:
                    made = await _connect(self._address(to), to, self._tls, self._bytes_max)
                    connection = self._connections[to] = made
        return connection


class _Call:
    """Received data of one call that is not consumed yet, bounded by the stream's window."""

    __slots__ = ("_arrival", "_buffered_bytes", "_failure", "_items", "ended", "tag", "to")

    def __init__(self, to: str, tag: int) -> None:
        self.to, self.tag = to, tag
        self.ended = False
        self._buffered_bytes = 0
        self._items: deque[bytes] = deque()
        self._failure: LinkError | None = None
        self._arrival: asyncio.Future[None] | None = None

    async def next(self) -> bytes | None:
        """Return the next item, or None at the end of a stream. A failure is raised after all earlier items are consumed."""
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self.ended:
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        item = self._items.popleft()
        self._buffered_bytes -= len(item) + ITEM_BYTES
        return item

    def receive(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.REPLY | FrameKind.ITEM:
                self._buffered_bytes += len(frame.body) + ITEM_BYTES
                if (
                    self._buffered_bytes - len(frame.body) > WINDOW_BYTES + ITEM_BYTES
                ):  # a correct peer waits until some is consumed
                    raise FrameError("it exceeded the window of a stream")
                self._items.append(frame.body)
                self._wake()
            case FrameKind.END:
                self.ended = True
                self._wake()
            case FrameKind.REFUSED:
                self.fail(NotSent(f"{self.to} is at its limit and refused the call", "retry later"))
            case _:
                self.fail(ReplyLost(f"{self.to} aborted the call", "check its log, then retry"))

    def fail(self, failure: LinkError) -> None:
        if not self.ended:
            self.ended, self._failure = True, failure
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


async def _connect(address: RpcAddress, to: str, tls: LinkTls | None, bytes_max: int) -> _Connection:
    try:
        if address.path:
            reader, writer = await asyncio.open_unix_connection(address.path)
        elif address.secure:
            reader, writer = await _connect_tls(address, to, tls)
        else:
            reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError as error:
        raise NotSent(f"cannot connect to {to} at {address} ({os_error_text(error)})", "start it, then retry") from error
    return _Connection(reader, writer, to, bytes_max)


async def _connect_tls(address: RpcAddress, to: str, tls: LinkTls | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if tls is None or tls.client_context is None:
        raise NotSent(f"{to} at {address} needs TLS, and this process has no certificate", "configure one")
    from ssl import SSLError  # imported late: the keeper, which must stay small, never uses TLS

    from remit.world.net.tls import CLOSE_S_MAX, HANDSHAKE_S_MAX, reason_of

    try:
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=tls.client_context(),
            ssl_handshake_timeout=HANDSHAKE_S_MAX, ssl_shutdown_timeout=CLOSE_S_MAX,
        )  # fmt: skip
    except SSLError as error:
        cause = f"the certificate of {to} at {address} is not trusted ({reason_of(error)})"
        raise NotSent(
            cause, "check which process listens there; a peer with an expired certificate, or of another scope, must join again"
        ) from error
    if not tls.admits_peer(writer.transport):
        writer.transport.abort()
        raise NotSent(f"the peer at {address} is not {to}", "check which machine has that address now")
    return reader, writer


class _Connection:
    """One connection. When it ends, all calls that wait for a reply on it fail."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: str, bytes_max: int) -> None:
        self._reader, self._writer, self._to, self._bytes_max = reader, writer, to, bytes_max
        self._calls: dict[int, _Call] = {}
        self._tag = 0
        self._broken = False
        self._reading = asyncio.create_task(self._read(), name=f"link to {to}")

    @property
    def usable(self) -> bool:
        return not (self._broken or self._writer.is_closing() or self._reader.at_eof())

    def call(self, kind: FrameKind, body: bytes) -> _Call:
        frame = pack_frame(kind, self._tag + 1, body)
        self._tag += 1
        call = self._calls[self._tag] = _Call(self._to, self._tag)
        self._writer.write(frame)
        return call

    def forget(self, call: _Call) -> None:
        self._calls.pop(call.tag, None)

    def write(self, kind: FrameKind, tag: int, body: bytes = b"") -> None:
        if self.usable:
            self._writer.write(pack_frame(kind, tag, body))

    async def close(self) -> None:
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    async def _read(self) -> None:
        """Read replies, including those that the peer wrote before it closed the connection."""
        reason = "the connection was closed"
        try:
            while True:
                frame = await read_frame(self._reader, self._bytes_max)
                if (call := self._calls.get(frame.tag)) is not None:
                    call.receive(frame)
        except (OSError, FrameError) as error:
            reason = str(error)
        except asyncio.IncompleteReadError:
            reason = "the peer closed the connection"
        finally:
            self._broken = True
            self._writer.close()
            for call in self._calls.values():
                call.fail(ReplyLost(f"{self._to} did not answer: {reason}", "retry with the same operation id"))
