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
from remit.world.clock import SharedTimer
from remit.world.net.connections import BACKLOG, BoundSocket, CoalescingTransport, ConnectionLimiter, address_key
from remit.world.net.tls import TlsAcceptLimits, peer_identity, tls_accept

CONNECTIONS_MAX: Final = 2_000
HEAD_BYTES_MAX: Final = 64 << 10
HEAD_S_MAX: Final = 10.0
"""How long the head of a request may take to arrive, counted from the connection or from its first byte."""
PIPELINED_MAX: Final = 32
"""Number of requests read from a connection before the first of them is answered."""
KEEP_ALIVE_S: Final = 75
DRAIN_S: Final = 15.0
"""How long accepted requests may take after shutdown began."""

OnRejected = Callable[[str, int, str, str], None]
"""Called for a connection that is closed before the application saw a request: client address, status, code, reason."""

SendResponse = Callable[[Mapping[str, Any], int, Sequence[tuple[bytes, bytes]], bytes], bool]
"""Sends a complete response (status, headers, body) to the request of this scope in one write, in place of the two ASGI
messages. Returns False if that is not possible now; then nothing was sent, and the caller sends the messages.
"""
SendChunk = Callable[[Mapping[str, Any], bytes], bool]
"""Sends one chunk of a response that has begun and has no content length. Returns False in the same cases."""


@asynccontextmanager
async def serve_http(
    app: Callable[..., Any],
    bound: BoundSocket,
    *,
    on_closing: Callable[[], None],
    connections_max: int = CONNECTIONS_MAX,
    tls_context: Callable[[], ssl.SSLContext] | None = None,
    on_rejected: OnRejected = lambda address, status, code, reason: None,
) -> AsyncGenerator[None, None]:
    """Serve an ASGI application while the context is open.

    `on_closing` is called once nothing new is accepted; it must end endless responses. `tls_context` returns the
    TLS context for a new connection; None serves plain HTTP. `on_rejected` is called for every rejected connection.

    The ASGI scope has extra entries: `bearer` is the identity from the client certificate, `abort` closes the connection at
    once, `whole` sends a complete response (`SendResponse`) and `piece` one chunk (`SendChunk`).
    """
    # uvicorn logs hostile requests and application errors in many lines; the application logs its own errors in one.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    config = Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
    )
    config.load()
    shared = _SharedState(connections_max, on_rejected)

    def factory() -> _Connection:
        return _Connection(config, shared, {})

    try:
        async with _accepting(bound, factory, shared, tls_context):
            yield
    finally:
        for connection in list(shared.connections):
            connection.shutdown()
        on_closing()
        await _drain(shared)


def _accepting(
    bound: BoundSocket,
    factory: Callable[[], _Connection],
    shared: _SharedState,
    tls_context: Callable[[], ssl.SSLContext] | None,
) -> AbstractAsyncContextManager[None]:
    if tls_context is None:
        return _accepting_plain(bound, factory)
    limits = TlsAcceptLimits(
        tls_context,
        lambda: len(shared.connections),
        shared.connections_max,
        _TLS_REQUIRED.response,
        lambda address, reason: shared.on_rejected(address, _TLS_REQUIRED.status, _TLS_REQUIRED.code, reason),
        shared.limiter,
    )
    return tls_accept(bound.socket, factory, limits)


@asynccontextmanager
async def _accepting_plain(bound: BoundSocket, factory: Callable[[], _Connection]) -> AsyncGenerator[None, None]:
    server = await asyncio.get_running_loop().create_server(factory, sock=bound.socket, backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()


async def _drain(shared: _SharedState) -> None:
    """Wait until accepted requests are answered and the responses are written."""
    until = asyncio.get_running_loop().time() + DRAIN_S
    try:
        while shared.tasks and (remaining_s := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(set(shared.tasks), timeout=remaining_s)
    finally:
        for task in shared.tasks:
            task.cancel()
        for connection in list(shared.connections):
            connection.transport.close()  # data that is already buffered is still sent
    for _ in range(3):
        await asyncio.sleep(0)


class _SharedState(ServerState):
    """State shared by all connections of a server."""

    def __init__(self, connections_max: int, on_rejected: OnRejected) -> None:
        super().__init__()
        self.connections_max, self.on_rejected = connections_max, on_rejected
        self.limiter = ConnectionLimiter(connections_max)
        self.idle = SharedTimer(asyncio.get_running_loop())
        """Idle connections: the last response is complete, and the next request has not begun."""
        self.without_request: dict[_Connection, None] = {}
        """Connections without a complete request head so far, oldest first."""
        self._date_s = 0

    def refresh_date_header(self) -> None:
        """Refresh the Date header, at most once a second and only when a request arrives."""
        now = int(time.time())
        if now != self._date_s:
            self._date_s = now
            self.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


_PROBLEM: Final = '{{"title":"{title}","status":{status},"code":"{code}","detail":"{detail}","cure":"{cure}"}}'
_RESPONSE: Final = (
    "HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\ncontent-length: {length}\r\n"
    "retry-after: 5\r\nconnection: close\r\n\r\n{body}"
)


class _Rejection(NamedTuple):
    """A prepared response to a connection that is closed before the application sees a request."""

    status: int
    code: str
    detail: str
    response: bytes


def _rejection(status: int, title: str, code: str, detail: str, cure: str) -> _Rejection:
    body = _PROBLEM.format(title=title, status=status, code=code, detail=detail, cure=cure)
    return _Rejection(status, code, detail, _RESPONSE.format(status=status, title=title, length=len(body), body=body).encode())


_OVERLOADED: Final = _rejection(
    503, "Service Unavailable", "overloaded", "too many connections", "use fewer connections, or retry later"
)
_ADDRESS_OVERLOADED: Final = _rejection(
    503,
    "Service Unavailable",
    "overloaded",
    "too many connections from this address",
    "reuse connections, or retry later",
)
_HEAD_TOO_LARGE: Final = _rejection(
    431, "Request Header Fields Too Large", "too_large", "the request head is too large", "send fewer or shorter headers"
)
_HEAD_TIMEOUT: Final = _rejection(
    408, "Request Timeout", "timeout", "the request head did not arrive in time", "send it without pauses"
)
_NOT_HTTP: Final = _rejection(
    400,
    "Bad Request",
    "malformed",
    "this is not an HTTP/1.1 request",
    "use HTTP/1.1; use https:// only if the server has TLS enabled",
)
_UPGRADE_WITH_BODY: Final = _rejection(
    400,
    "Bad Request",
    "malformed",
    "a request with a body cannot ask for an Upgrade, and no other protocol is supported",
    "send no Upgrade header",
)
_TLS_REQUIRED: Final = _rejection(400, "Bad Request", "tls", "this server accepts TLS only", "use https:// instead of http://")


class _Connection(HttpToolsProtocol):
    """One connection, with limits on the number of connections and on the size and duration of a request head."""

    server_state: _SharedState

    def __init__(self, config: Config, shared: _SharedState, state: dict[str, Any]) -> None:
        super().__init__(config, shared, state)
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        """Whether a head has begun and is incomplete. Most heads arrive in one read; the timer starts only for the others."""
        self._unparsed_bytes = 0
        """Bytes received since the parser last completed something: bounds heads, chunk headers and trailers."""
        self._rejected = False
        self._rejected_mid_request = False
        """Whether the client was rejected while it was still sending a request."""
        self._ignores_requests = False
        """Further requests are ignored; the accepted ones are answered, then the connection closes."""
        self._current: RequestResponseCycle | None = None
        """The last request that the application began to answer; pipelined ones come after it."""
        self._identity: CertificateIdentity = NO_IDENTITY
        self.due_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._coalescing = CoalescingTransport(transport, self.loop, self._request_incomplete)
        super().connection_made(self._coalescing)
        self._identity = peer_identity(transport)
        shared = self.server_state
        admitted = shared.limiter.admits(self._address)
        shared.limiter.opened(self._address)
        if not admitted and not self._close_silent(self._address):
            self._reject(_ADDRESS_OVERLOADED)
        elif len(self.connections) > shared.connections_max and not self._close_silent():
            self._reject(_OVERLOADED)
        else:
            shared.without_request[self] = None
            self._start_head_timer()

    def _request_incomplete(self) -> bool:
        """Return whether the request was answered before its body had arrived completely."""
        if self._rejected:
            return self._rejected_mid_request
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and cycle.response_complete and cycle.more_body

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _close_silent(self, address: str | None = None) -> bool:
        """Close the oldest connection that has sent no request, to admit this one. With an `address`, only one from there.

        Otherwise a few thousand silent connections would lock out all other clients.
        """
        silent = self.server_state.without_request
        oldest = next(
            (
                connection
                for connection in silent
                if address is None or address_key(connection._address) == address_key(address)
            ),
            None,
        )
        if oldest is not None:
            oldest._reject(_OVERLOADED if address is None else _ADDRESS_OVERLOADED)
        return oldest is not None

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.limiter.closed(self._address)
        self._stop_head_timer()
        self.server_state.without_request.pop(self, None)
        self.server_state.idle.cancel(self)
        self._mark_disconnected()  # uvicorn notifies only the newest request, which may be queued behind it
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle a half-closed connection: the client may still read the response to a complete request.

        A response that has started may be endless, and it is unknown whether the client still reads it, so then the
        connection closes.
        """
        current = self._current
        unanswered = current is not None and not (current.response_complete or current.response_started or self.cycle.more_body)
        if unanswered and self._accepts_input() and self.scheme == "http":
            self._ignore_requests()
            return True
        return False

    def data_received(self, data: bytes) -> None:
        if self._coalescing.lingering:
            self._coalescing.discarded(len(data))
        if not self._accepts_input() or self._coalescing.lingering:
            return
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if not self._accepts_input():
            return
        if self._in_head and self._head_timer is None:
            self._start_head_timer()
        if self._unparsed_bytes > HEAD_BYTES_MAX:
            self._reject(_HEAD_TOO_LARGE)

    def _accepts_input(self) -> bool:
        """Return whether received data is processed. That includes the rest of the last accepted request."""
        return not self._rejected and not (self._ignores_requests and not self.cycle.more_body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.server_state.idle.cancel(self)
        self.scope["bearer"] = self._identity  # type: ignore[typeddict-unknown-key]
        # None of these references the scope, so it is freed without the garbage collector.
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["whole"] = self._send_response  # type: ignore[typeddict-unknown-key]
        self.scope["piece"] = self._send_chunk  # type: ignore[typeddict-unknown-key]
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        if self._rejected or self._ignores_requests:
            return
        if self._unparsed_bytes > HEAD_BYTES_MAX and _head_size(self.url, self.headers) > HEAD_BYTES_MAX:
            self._reject(_HEAD_TOO_LARGE)
            return
        upgrades = self.parser.should_upgrade()
        if upgrades and any(name in _BODY_HEADERS for name, _ in self.headers):
            # The parser delivers no body for such a request, and would take it for the next request.
            self._reject(_UPGRADE_WITH_BODY)
            return
        if self.url[:1] != b"/":
            self._use_target_host()
        self._unparsed_bytes = 0
        self.server_state.without_request.pop(self, None)
        self.server_state.refresh_date_header()
        super().on_headers_complete()
        self.headers = []  # trailers are added to this list, and are ignored
        if upgrades or len(self.pipeline) >= PIPELINED_MAX:
            self._ignore_requests()

    def _use_target_host(self) -> None:
        """Use the host of an absolute request target, which overrides the Host header."""
        with suppress(httptools.HttpParserInvalidURLError):
            url = httptools.parse_url(self.url)
            host = (url.host or b"") + (b":%d" % url.port if url.port else b"")
            self.headers[:] = [(b"host", host), *((name, value) for name, value in self.headers if name != b"host")]

    def _ignore_requests(self) -> None:
        """Close the connection once the accepted requests are answered; the last response carries `connection: close`."""
        self._ignores_requests = True
        self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def _send_response(
        self, scope: Mapping[str, Any], status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        cycle = self._current
        if cycle is None or cycle.scope is not scope or cycle.disconnected or cycle.response_started or self.flow.write_paused:
            return False
        parts, lines, closes = [STATUS_LINE[status]], 1, False
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
            lines += 1
            closes = closes or name == b"connection"
        head = b"".join(parts)
        if head.count(b"\r") != lines or head.count(b"\n") != lines or _CONTROL_CHARACTERS.search(head):
            return False  # a header value contains a line break: leave the error to uvicorn
        cycle.keep_alive = cycle.keep_alive and not closes
        head += b"\r\n" if closes or cycle.keep_alive else b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self._coalescing.write_through(head if scope["method"] == "HEAD" else head + body)
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def _send_chunk(self, scope: Mapping[str, Any], data: bytes) -> bool:
        cycle = self._current
        if cycle is None or cycle.scope is not scope or cycle.disconnected or cycle.response_complete or self.flow.write_paused:
            return False
        if not cycle.chunked_encoding or not data or scope["method"] == "HEAD":
            return False
        self._coalescing.write_through(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def on_chunk_header(self) -> None:
        self._unparsed_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if self._accepts_input():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._accepts_input():
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
            self.server_state.idle.schedule(self, KEEP_ALIVE_S)

    def expired(self) -> None:
        """Close the connection: it was idle for `KEEP_ALIVE_S`."""
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._reject(_NOT_HTTP)

    def shutdown(self) -> None:
        self._stop_head_timer()
        super().shutdown()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S_MAX, self._reject, _HEAD_TIMEOUT)

    def _stop_head_timer(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _mark_disconnected(self) -> None:
        """Mark the response that is being produced, if any, as disconnected."""
        current = self._current
        if current is not None and not current.response_complete:
            current.disconnected = True
            current.message_event.set()

    def _reject(self, rejection: _Rejection) -> None:
        """Send the reason and close the connection; the application does not see the request.

        A response to an earlier request that has not started yet is sent first. While a response is being sent, no reason
        can be sent.
        """
        self._stop_head_timer()
        self.server_state.without_request.pop(self, None)
        self.server_state.on_rejected(self._address, rejection.status, rejection.code, rejection.detail)
        current = self._current
        unanswered = current is not None and not (current.response_started or current.response_complete)
        if unanswered and (self.pipeline or not self.cycle.more_body):
            self._ignore_requests()
            return
        self._rejected, self._rejected_mid_request = True, rejection in (_HEAD_TOO_LARGE, _NOT_HTTP, _UPGRADE_WITH_BODY)
        if not self.transport.is_closing():
            if current is None or current.response_complete or unanswered:
                self._mark_disconnected()
                self._coalescing.write_through(rejection.response)
            self.transport.close()


_BODY_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding"))


def _head_size(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) for name, value in headers)


_CONTROL_CHARACTERS: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
