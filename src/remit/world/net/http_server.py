"""HTTP server on uvicorn's parser: limits, drain at shutdown.

A connection or request beyond a limit is rejected before the application sees it. On shutdown the server accepts nothing new
and finishes the requests it has accepted, for at most `DRAIN_S`. Nothing polls, so an idle server uses no CPU.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from email.utils import formatdate
from typing import Any, Final, NamedTuple

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from remit.law.certificate_identity import NO_IDENTITY, CertificateIdentity
from remit.world.clock import Patience
from remit.world.net.connections import BACKLOG, Bound, ConnectionLimiter, Corked, origin
from remit.world.net.tls import Doorstep, bearer_at, greeting

CONNECTIONS_MAX: Final = 2_000
HEAD_BYTES_MAX: Final = 64 << 10
HEAD_S_MAX: Final = 10.0
"""How long the head of a request may take to arrive, counted from the connection or from its first byte."""
PIPELINED_MAX: Final = 32
"""Number of requests read from a connection before the first of them is answered."""
KEEP_ALIVE_S: Final = 75
DRAIN_S: Final = 15.0
"""How long accepted requests may take after shutdown began."""

Turned = Callable[[str, int, str, str], None]
"""Called for a connection that is closed before the application saw a request: client address, status, code, reason."""

Whole = Callable[[Mapping[str, Any], int, Sequence[tuple[bytes, bytes]], bytes], bool]
"""Sends a complete response (status, headers, body) to the request of this scope in one write, in place of the two ASGI
messages. Returns False if that is not possible now; then nothing was sent, and the caller sends the messages.
"""
Piece = Callable[[Mapping[str, Any], bytes], bool]
"""Sends one chunk of a response that has begun and has no content length. Returns False in the same cases."""


@asynccontextmanager
async def http_listening(
    app: Callable[..., Any],
    bound: Bound,
    *,
    closing: Callable[[], None],
    connections_max: int = CONNECTIONS_MAX,
    secure: Callable[[], ssl.SSLContext] | None = None,
    turned: Turned = lambda address, status, code, why: None,
) -> AsyncGenerator[None, None]:
    """Serve an ASGI application while the context is open.

    `closing` is called once nothing new is accepted; it must end endless responses. `secure` returns the TLS context for a
    new connection; None serves plain HTTP. `turned` is called for every rejected connection.

    The ASGI scope has extra entries: `bearer` is the identity from the client certificate, `abort` closes the connection at
    once, `whole` sends a complete response (`SendResponse`) and `piece` one chunk (`SendChunk`).
    """
    # uvicorn logs hostile requests and application errors in many lines; the application logs its own errors in one.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    config = Config(
        app,
        http=_Guarded,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
    )
    config.load()
    shared = _Shared(connections_max, turned)

    def factory() -> _Guarded:
        return _Guarded(config, shared, {})

    try:
        async with _taking(bound, factory, shared, secure):
            yield
    finally:
        for connection in list(shared.connections):
            connection.shutdown()
        closing()
        await _drained(shared)


def _taking(
    bound: Bound, factory: Callable[[], _Guarded], shared: _Shared, secure: Callable[[], ssl.SSLContext] | None
) -> AbstractAsyncContextManager[None]:
    if secure is None:
        return _taking_all(bound, factory)
    doorstep = Doorstep(
        secure,
        lambda: len(shared.connections),
        shared.connections_max,
        _PLAIN.words,
        lambda address, why: shared.turned(address, _PLAIN.status, _PLAIN.code, why),
        shared.crowd,
    )
    return greeting(bound.socket, factory, doorstep)


@asynccontextmanager
async def _taking_all(bound: Bound, factory: Callable[[], _Guarded]) -> AsyncGenerator[None, None]:
    server = await asyncio.get_running_loop().create_server(factory, sock=bound.socket, backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()


async def _drained(shared: _Shared) -> None:
    """Wait until accepted requests are answered and the responses are written."""
    until = asyncio.get_running_loop().time() + DRAIN_S
    try:
        while shared.tasks and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(set(shared.tasks), timeout=left)
    finally:
        for task in shared.tasks:
            task.cancel()
        for connection in list(shared.connections):
            connection.transport.close()  # data that is already buffered is still sent
    for _ in range(3):
        await asyncio.sleep(0)


class _Shared(ServerState):
    """State shared by all connections of a server."""

    def __init__(self, connections_max: int, turned: Turned) -> None:
        super().__init__()
        self.connections_max, self.turned = connections_max, turned
        self.crowd = ConnectionLimiter(connections_max)
        self.resting = Patience(asyncio.get_running_loop())
        """Idle connections: the last response is complete, and the next request has not begun."""
        self.silent: dict[_Guarded, None] = {}
        """Connections without a complete request head so far, oldest first."""
        self._dated = 0

    def date(self) -> None:
        """Refresh the Date header, at most once a second and only when a request arrives."""
        now = int(time.time())
        if now != self._dated:
            self._dated = now
            self.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


_PROBLEM: Final = '{{"title":"{title}","status":{status},"code":"{code}","detail":"{detail}","cure":"{cure}"}}'
_TURNED: Final = (
    "HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\ncontent-length: {length}\r\n"
    "retry-after: 5\r\nconnection: close\r\n\r\n{body}"
)


class _Away(NamedTuple):
    """A prepared response to a connection that is closed before the application sees a request."""

    status: int
    code: str
    detail: str
    words: bytes


def _turned(status: int, title: str, code: str, detail: str, cure: str) -> _Away:
    body = _PROBLEM.format(title=title, status=status, code=code, detail=detail, cure=cure)
    return _Away(status, code, detail, _TURNED.format(status=status, title=title, length=len(body), body=body).encode())


_BUSY: Final = _turned(
    503, "Service Unavailable", "overloaded", "too many connections", "use fewer connections, or retry later"
)
_CROWDED: Final = _turned(
    503,
    "Service Unavailable",
    "overloaded",
    "too many connections from this address",
    "reuse connections, or retry later",
)
_LARGE: Final = _turned(
    431, "Request Header Fields Too Large", "too_large", "the request head is too large", "send fewer or shorter headers"
)
_SLOW: Final = _turned(408, "Request Timeout", "timeout", "the request head did not arrive in time", "send it without pauses")
_NO_HTTP: Final = _turned(
    400,
    "Bad Request",
    "malformed",
    "this is not an HTTP/1.1 request",
    "use HTTP/1.1; use https:// only if the server has TLS enabled",
)
_UPGRADE: Final = _turned(
    400,
    "Bad Request",
    "malformed",
    "a request with a body cannot ask for an Upgrade; only HTTP/1.1 is supported",
    "send no Upgrade header",
)
_PLAIN: Final = _turned(400, "Bad Request", "tls", "this server accepts TLS only", "use https:// instead of http://")


class _Guarded(HttpToolsProtocol):
    """One connection, with limits on the number of connections and on the size and duration of a request head."""

    server_state: _Shared

    def __init__(self, config: Config, shared: _Shared, state: dict[str, Any]) -> None:
        super().__init__(config, shared, state)
        self._head_timer: asyncio.TimerHandle | None = None
        self._heading = False
        """Whether a head has begun and is incomplete. Most heads arrive in one read; the timer starts only for the others."""
        self._loose = 0
        """Bytes received since the parser last completed something: bounds heads, chunk headers and trailers."""
        self._turned = False
        self._in_the_middle = False
        """Whether the client was rejected while it was still sending a request."""
        self._deaf = False
        """Further requests are ignored; the accepted ones are answered, then the connection closes."""
        self._answering: RequestResponseCycle | None = None
        """The last request that the application began to answer; pipelined ones come after it."""
        self._bearer: CertificateIdentity = NO_IDENTITY
        self.due_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._corked = Corked(transport, self.loop, self._sends_on)
        super().connection_made(self._corked)
        self._bearer = bearer_at(transport)
        shared = self.server_state
        welcome = shared.crowd.admits(self._address)
        shared.crowd.came(self._address)
        if not welcome and not self._make_room(self._address):
            self._turn(_CROWDED)
        elif len(self.connections) > shared.connections_max and not self._make_room():
            self._turn(_BUSY)
        else:
            shared.silent[self] = None
            self._await_head()

    def _sends_on(self) -> bool:
        """Return whether the request was answered before its body had arrived completely."""
        if self._turned:
            return self._in_the_middle
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and cycle.response_complete and cycle.more_body

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _make_room(self, address: str | None = None) -> bool:
        """Close the oldest connection that has sent no request, to admit this one. With an `address`, only one from there.

        Otherwise a few thousand silent connections would lock out all other clients.
        """
        silent = self.server_state.silent
        first = next((one for one in silent if address is None or origin(one._address) == origin(address)), None)
        if first is not None:
            first._turn(_BUSY if address is None else _CROWDED)
        return first is not None

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.crowd.left(self._address)
        self._head_came()
        self.server_state.silent.pop(self, None)
        self.server_state.resting.let_go(self)
        self._abandon()  # uvicorn notifies only the newest request, which may be queued behind it
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle a half-closed connection: the client may still read the response to a complete request.

        A response that has started may be endless, and it is unknown whether the client still reads it, so then the
        connection closes.
        """
        one = self._answering
        wanted = one is not None and not (one.response_complete or one.response_started or self.cycle.more_body)
        if wanted and self._hears() and self.scheme == "http":
            self._fall_deaf()
            return True
        return False

    def data_received(self, data: bytes) -> None:
        if self._corked.lingers:
            self._corked.passed(len(data))
        if not self._hears() or self._corked.lingers:
            return
        self._loose += len(data)
        super().data_received(data)
        if not self._hears():
            return
        if self._heading and self._head_timer is None:
            self._await_head()
        if self._loose > HEAD_BYTES_MAX:
            self._turn(_LARGE)

    def _hears(self) -> bool:
        """Return whether received data is processed. That includes the rest of the last accepted request."""
        return not self._turned and not (self._deaf and not self.cycle.more_body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.server_state.resting.let_go(self)
        self.scope["bearer"] = self._bearer  # type: ignore[typeddict-unknown-key]
        # None of these references the scope, so it is freed without the garbage collector.
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["whole"] = self._whole  # type: ignore[typeddict-unknown-key]
        self.scope["piece"] = self._piece  # type: ignore[typeddict-unknown-key]
        self._heading = True

    def on_headers_complete(self) -> None:
        self._head_came()
        if self._turned or self._deaf:
            return
        if self._loose > HEAD_BYTES_MAX and _size(self.url, self.headers) > HEAD_BYTES_MAX:
            self._turn(_LARGE)
            return
        upgrades = self.parser.should_upgrade()
        if upgrades and any(name in _BODIED for name, _ in self.headers):
            self._turn(_UPGRADE)  # the parser delivers no body for such a request, and would take it for the next request
            return
        if self.url[:1] != b"/":
            self._name_host()
        self._loose = 0
        self.server_state.silent.pop(self, None)
        self.server_state.date()
        super().on_headers_complete()
        self.headers = []  # trailers are added to this list, and are ignored
        if upgrades or len(self.pipeline) >= PIPELINED_MAX:
            self._fall_deaf()

    def _name_host(self) -> None:
        """Use the host of an absolute request target, which overrides the Host header."""
        with suppress(httptools.HttpParserInvalidURLError):
            url = httptools.parse_url(self.url)
            host = (url.host or b"") + (b":%d" % url.port if url.port else b"")
            self.headers[:] = [(b"host", host), *((name, value) for name, value in self.headers if name != b"host")]

    def _fall_deaf(self) -> None:
        """Close the connection once the accepted requests are answered; the last response carries `connection: close`."""
        self._deaf = True
        self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _whole(self, scope: Mapping[str, Any], status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        cycle = self._answering
        if cycle is None or cycle.scope is not scope or cycle.disconnected or cycle.response_started or self.flow.write_paused:
            return False
        pieces, lines, closes = [STATUS_LINE[status]], 1, False
        for name, value in (*cycle.default_headers, *headers):
            pieces += (name, b": ", value, b"\r\n")
            lines += 1
            closes = closes or name == b"connection"
        head = b"".join(pieces)
        if head.count(b"\r") != lines or head.count(b"\n") != lines or _UNFIT.search(head):
            return False  # a header value contains a line break: leave the error to uvicorn
        cycle.keep_alive = cycle.keep_alive and not closes
        head += b"\r\n" if closes or cycle.keep_alive else b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self._corked.write_whole(head if scope["method"] == "HEAD" else head + body)
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def _piece(self, scope: Mapping[str, Any], data: bytes) -> bool:
        cycle = self._answering
        if cycle is None or cycle.scope is not scope or cycle.disconnected or cycle.response_complete or self.flow.write_paused:
            return False
        if not cycle.chunked_encoding or not data or scope["method"] == "HEAD":
            return False
        self._corked.write_whole(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def on_chunk_header(self) -> None:
        self._loose = 0

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        if self._hears():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._loose = 0
        if self._hears():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Replaces uvicorn's method, which starts an event-loop timer after every response."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self.server_state.resting.keep(self, KEEP_ALIVE_S)

    def over(self) -> None:
        """Close the connection: it was idle for `KEEP_ALIVE_S`."""
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._turn(_NO_HTTP)

    def shutdown(self) -> None:
        self._head_came()
        super().shutdown()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S_MAX, self._turn, _SLOW)

    def _head_came(self) -> None:
        self._heading = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _abandon(self) -> None:
        """Mark the response that is being produced, if any, as disconnected."""
        one = self._answering
        if one is not None and not one.response_complete:
            one.disconnected = True
            one.message_event.set()

    def _turn(self, why: _Away) -> None:
        """Send the reason and close the connection; the application does not see the request.

        A response to an earlier request that has not started yet is sent first. While a response is being sent, no reason
        can be sent.
        """
        self._head_came()
        self.server_state.silent.pop(self, None)
        self.server_state.turned(self._address, why.status, why.code, why.detail)
        one = self._answering
        unanswered = one is not None and not (one.response_started or one.response_complete)
        if unanswered and (self.pipeline or not self.cycle.more_body):
            self._fall_deaf()
            return
        self._turned, self._in_the_middle = True, why in (_LARGE, _NO_HTTP, _UPGRADE)
        if not self.transport.is_closing():
            if one is None or one.response_complete or unanswered:
                self._abandon()
                self._corked.write_whole(why.words)
            self.transport.close()


_BODIED: Final = frozenset((b"content-length", b"transfer-encoding"))


def _size(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) for name, value in headers)


_UNFIT: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
