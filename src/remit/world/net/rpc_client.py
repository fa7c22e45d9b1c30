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

from remit.world.interfaces import LinkError, Service, Unheard, Unreached
from remit.world.net.frames import (
    BODY_BYTES_MAX,
    ITEM_BYTES,
    WINDOW_BYTES,
    Address,
    Frame,
    Kind,
    NoFrame,
    address,
    framed,
    next_frame,
    reason,
)
from remit.world.net.rpc_server import listening

if TYPE_CHECKING:
    from remit.world.net.tls import Secure


class SocketLink:
    """A link over sockets. `addresses` maps peer names to `unix:/path`, `tcp:127.0.0.1:port` or, with `secure`,
    `tls:host:port`.

    A connection is opened on first use and reopened after a failure. It is closed when a frame exceeds `bytes_max`. Nothing
    is sent to a peer that `secure` does not admit.
    """

    def __init__(self, addresses: Mapping[str, str], secure: Secure | None = None, *, bytes_max: int = BODY_BYTES_MAX) -> None:
        self._secure, self._bytes_max = secure, bytes_max
        self._addresses = {name: address(text) for name, text in addresses.items()}
        self._connections: dict[str, _Connection] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def request(self, to: str, body: bytes, /) -> bytes:
        connection = await self._connected(to)
        call = connection.call(Kind.REQUEST, body)
        try:
            reply = await call.next()
        finally:
            connection.forget(call)
        if reply is None:
            raise Unheard(f"{to} answered a request as if it were a stream", "check that both processes run the same version")
        return reply

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        connection = await self._connected(to)
        call = connection.call(Kind.STREAM, body)
        taken = 0
        try:
            while (item := await call.next()) is not None:
                yield item
                taken += len(item) + ITEM_BYTES
                if taken >= WINDOW_BYTES // 4:
                    connection.write(Kind.TAKEN, call.tag, taken.to_bytes(8))
                    taken = 0
        finally:
            connection.forget(call)
            if not call.over:
                connection.write(Kind.LEAVE, call.tag)

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return listening(self._address(at), service, self._secure)

    async def close(self) -> None:
        """Close every connection. Calls that wait for a reply fail; the next call opens a new connection."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()

    def _address(self, name: str) -> Address:
        if name not in self._addresses:
            raise Unreached(f"no address is configured for {name}", "add it to the addresses of this process")
        return self._addresses[name]

    async def _connected(self, to: str) -> _Connection:
        """Return a usable connection. The caller must write before its next await, while it is known to be usable."""
        connection = self._connections.get(to)
        if connection is None or not connection.whole:
            async with self._turns.setdefault(to, asyncio.Lock()):
                connection = self._connections.get(to)
                if connection is None or not connection.whole:
                    made = await _connect(self._address(to), to, self._secure, self._bytes_max)
                    connection = self._connections[to] = made
        return connection


class _Call:
    """What was received for one call and is not consumed yet, bounded by the stream's window."""

    __slots__ = ("_came", "_failure", "_held", "_items", "over", "tag", "to")

    def __init__(self, to: str, tag: int) -> None:
        self.to, self.tag = to, tag
        self.over = False
        self._held = 0
        self._items: deque[bytes] = deque()
        self._failure: LinkError | None = None
        self._came: asyncio.Future[None] | None = None

    async def next(self) -> bytes | None:
        """Return the next item, or None at the end of a stream. A failure is raised after all earlier items are consumed."""
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self.over:
                return None
            self._came = asyncio.get_running_loop().create_future()
            await self._came
        item = self._items.popleft()
        self._held -= len(item) + ITEM_BYTES
        return item

    def take(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.REPLY | Kind.ITEM:
                self._held += len(frame.body) + ITEM_BYTES
                if self._held - len(frame.body) > WINDOW_BYTES + ITEM_BYTES:  # a correct peer waits until some is consumed
                    raise NoFrame("it exceeded the window of a stream")
                self._items.append(frame.body)
                self._wake()
            case Kind.END:
                self.over = True
                self._wake()
            case Kind.REFUSED:
                self.fail(Unreached(f"{self.to} is at its limit and refused the call", "retry later"))
            case _:
                self.fail(Unheard(f"{self.to} aborted the call", "check its log, then retry"))

    def fail(self, failure: LinkError) -> None:
        if not self.over:
            self.over, self._failure = True, failure
            self._wake()

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)


async def _connect(place: Address, to: str, secure: Secure | None, bytes_max: int) -> _Connection:
    try:
        if place.path:
            reader, writer = await asyncio.open_unix_connection(place.path)
        elif place.secure:
            reader, writer = await _connect_securely(place, to, secure)
        else:
            reader, writer = await asyncio.open_connection(place.host, place.port)
    except OSError as error:
        raise Unreached(f"cannot connect to {to} at {place} ({reason(error)})", "start it, then retry") from error
    return _Connection(reader, writer, to, bytes_max)


async def _connect_securely(
    place: Address, to: str, secure: Secure | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if secure is None or secure.calling is None:
        raise Unreached(f"{to} at {place} needs TLS, and this process has no certificate", "configure one")
    from ssl import SSLError  # imported late: the keeper, which must stay small, never uses TLS

    from remit.world.net.tls import CLOSING_S_MAX, HANDSHAKE_S_MAX, reason_of

    try:
        reader, writer = await asyncio.open_connection(
            place.host, place.port, ssl=secure.calling(),
            ssl_handshake_timeout=HANDSHAKE_S_MAX, ssl_shutdown_timeout=CLOSING_S_MAX,
        )  # fmt: skip
    except SSLError as error:
        why = f"the certificate of {to} at {place} is not trusted ({reason_of(error)})"
        raise Unreached(
            why, "check which process listens there; a peer with an expired certificate, or of another scope, must join again"
        ) from error
    if not secure.knows(writer.transport):
        writer.transport.abort()
        raise Unreached(f"the peer at {place} is not {to}", "check which machine has that address now")
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
    def whole(self) -> bool:
        return not (self._broken or self._writer.is_closing() or self._reader.at_eof())

    def call(self, kind: Kind, body: bytes) -> _Call:
        piece = framed(kind, self._tag + 1, body)
        self._tag += 1
        call = self._calls[self._tag] = _Call(self._to, self._tag)
        self._writer.write(piece)
        return call

    def forget(self, call: _Call) -> None:
        self._calls.pop(call.tag, None)

    def write(self, kind: Kind, tag: int, body: bytes = b"") -> None:
        if self.whole:
            self._writer.write(framed(kind, tag, body))

    async def close(self) -> None:
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    async def _read(self) -> None:
        """Read replies, including those that the peer wrote before it closed the connection."""
        why = "the connection was closed"
        try:
            while True:
                frame = await next_frame(self._reader, self._bytes_max)
                if (call := self._calls.get(frame.tag)) is not None:
                    call.take(frame)
        except (OSError, NoFrame) as error:
            why = str(error)
        except asyncio.IncompleteReadError:
            why = "the peer closed the connection"
        finally:
            self._broken = True
            self._writer.close()
            for call in self._calls.values():
                call.fail(Unheard(f"{self._to} did not answer: {why}", "retry with the same operation id"))
