"""Long-lived responses: limits, bookmarks, heartbeats, disconnects, shutdown.

A stream ends when its content ends, the client disconnects or stalls, its token is revoked, or the server shuts down. The
caller produces the content.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remit.model.identity import Principal
from remit.model.wire.api_types import LINES_TYPE
from remit.serve.auth.access_control import TokenIndex
from remit.serve.http.connection_limits import WatchLimit
from remit.world.concurrency import first_failure
from remit.world.interfaces import Clock

SEND_MS_MAX: Final = 30_000
"""A client that takes nothing for this long is disconnected."""
LARGE_BYTES: Final = 64 << 10
"""Bodies of at least this size are sent in chunks, each after the previous one was taken."""

TrySend = Callable[[bytes], bool]
"""Sends a piece at once, without waking a task. False: not possible now, for example because the connection is congested."""
ResyncReason = Literal["compacted", "lagging", "restored", "shutdown"]


class BookmarkLine(Struct, frozen=True, tag_field="type", tag="bookmark"):
    """Everything up to this revision has been sent: a watch resumes after it."""

    revision: int


class HeartbeatLine(Struct, frozen=True, tag_field="type", tag="heartbeat"):
    """A bookmark sent because nothing has changed for a while."""

    revision: int


class ResyncLine(Struct, frozen=True, tag_field="type", tag="resync"):
    """The last line of a watch: the client must list again."""

    reason: ResyncReason
    cure: str = "list again, then watch after its revision"


_encode: Final = msgspec.json.Encoder().encode


def json_line(value: object) -> bytes:
    return _encode(value) + b"\n"


class HeartbeatTimer:
    """One timer for all streams. Every registered callback is called once per interval, with its length."""

    def __init__(self, clock: Clock, heartbeat_ms: int) -> None:
        self._clock, self._interval_ms = clock, min(heartbeat_ms, SEND_MS_MAX)
        self._callbacks: dict[Callable[[int], None], None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def subscribed(self, callback: Callable[[int], None]) -> Iterator[None]:
        self._callbacks[callback] = None
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="pulse")
        try:
            yield
        finally:
            del self._callbacks[callback]
            if not self._callbacks:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await self._clock.sleep_ms(self._interval_ms)
            for callback in list(self._callbacks):
                callback(self._interval_ms)


class OpenStreams:
    """Open watches, logs and sessions of one server. `closing` is set when the server shuts down and ends every stream."""

    def __init__(self, clock: Clock, tokens: TokenIndex, heartbeat_ms: int, streams_max: int) -> None:
        self.clock, self.tokens = clock, tokens
        self.closing = asyncio.Event()
        self.heartbeat_timer = HeartbeatTimer(clock, heartbeat_ms)
        self.user_watches, self.component_watches = WatchLimit(streams_max), WatchLimit(streams_max)
        """Separate limits, so that watches of users never keep agents from following their assignments."""
        self._selector_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def count(self) -> int:
        return self.user_watches.count + self.component_watches.count

    def slot(self, principal: Principal) -> AbstractContextManager[None]:
        """Return a context that counts one open stream. Entering it raises `ApiProblem` if there are too many."""
        if principal.audience != "user":
            return self.component_watches.slot(f"token {principal.token}")
        return self.user_watches.slot(f"tenant {principal.tenant}" if principal.tenant else principal.subject)

    def selector_lock(self, flow: str) -> asyncio.Lock:
        """Return the lock that serialises selector evaluation over the watches of one flow. It exists as long as a watch of the
        flow refers to it.
        """
        lock = self._selector_locks.get(flow)
        if lock is None:
            lock = self._selector_locks[flow] = asyncio.Lock()
        return lock


class StreamResponse(Response):
    """Sends what `pieces` yields until it ends, the client disconnects, or the server shuts down. On shutdown `final_piece` is
    sent; without one the response is cut off.

    `pieces` is always closed. `on_heartbeat` is called at every heartbeat, so that the producer can send something although
    nothing happened. `on_open` is called when the response has started, with a function that sends a piece at once. The
    heartbeat also detects clients that have stalled: one timer per piece would cost more than the piece.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        streams: OpenStreams,
        *,
        media: str = LINES_TYPE,
        final_piece: bytes = b"",
        headers: Mapping[str, str] | None = None,
        on_heartbeat: Callable[[], None] | None = None,
        on_open: Callable[[TrySend], None] | None = None,
    ) -> None:
        self._on_heartbeat, self._on_open = on_heartbeat, on_open
        self._sending, self._sent_count = False, 0
        self._count_at_heartbeat, self._stalled_ms = -1, 0
        self._cut_off = asyncio.Event()
        """Set when the token is no longer valid, or the client has stalled."""
        self.principal: Principal | None = None
        """The caller, whose token must stay valid for as long as the stream lasts."""
        self._pieces, self._streams, self._final_piece = pieces, streams, final_piece
        self.status_code = 200
        self.media_type = media
        self.background = None
        self.init_headers({"Cache-Control": "no-store", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})
                return
            try_send: TrySend = partial(scope["piece"], scope) if "piece" in scope else _never_send
            if self._on_open is not None:
                self._on_open(try_send)
            with self._streams.heartbeat_timer.subscribed(self._check_client), first_failure():
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(self._send_all(send, try_send))
                    disconnect = group.create_task(_wait_for_disconnect(receive))
                    closing = group.create_task(self._streams.closing.wait())
                    revocation = group.create_task(self._wait_until_revoked())
                    stall = group.create_task(self._cut_off.wait())
                    tasks = (sending, disconnect, closing, revocation, stall)
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
            cut_off = any(_completed(task) for task in (revocation, stall))
            if _completed(disconnect) or (cut_off and not _completed(sending)):
                abort_connection(scope)  # the client cannot, or may not, receive the end
                return
            shutdown = _completed(closing) and not _completed(sending)
            if shutdown and not self._final_piece:
                return  # no last chunk: an unfinished response must not look complete
            with suppress(TimeoutError):
                async with self._streams.clock.timeout_ms(SEND_MS_MAX):
                    await send(
                        {"type": "http.response.body", "body": self._final_piece if shutdown else b"", "more_body": False}
                    )

    async def _wait_until_revoked(self) -> None:
        """Wait until the caller's token is revoked."""
        if self.principal is None:
            await asyncio.Event().wait()
        else:
            await self._streams.tokens.wait_until_revoked(self.principal)

    def _check_client(self, ms: int) -> None:
        """Called at every heartbeat: check that the token is still valid and that the client has taken something lately."""
        if self._on_heartbeat is not None:
            self._on_heartbeat()
        self._stalled_ms = self._stalled_ms + ms if self._sending and self._sent_count == self._count_at_heartbeat else 0
        self._count_at_heartbeat = self._sent_count
        if self._stalled_ms >= SEND_MS_MAX or (
            self.principal is not None and not self._streams.tokens.is_valid(self.principal)
        ):
            self._cut_off.set()

    async def _send_all(self, send: Send, try_send: TrySend) -> None:
        async for piece in self._pieces:
            if len(piece) >= LARGE_BYTES or not try_send(piece):
                self._sending = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._sending = False
            self._sent_count += 1


def _never_send(piece: bytes) -> bool:
    return False


def _completed(task: asyncio.Task[Any]) -> bool:
    """Return whether the task ended by itself, not by cancellation."""
    return task.done() and not task.cancelled()


def abort_connection(scope: Scope) -> None:
    """Close the connection at once and drop what was not sent yet, which would stay in memory otherwise."""
    abort = scope.get("abort")
    if abort is not None:
        abort()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


SHUTDOWN_LINE: Final = json_line(ResyncLine("shutdown"))


def watch_response(
    lines: AsyncGenerator[bytes, None],
    streams: OpenStreams,
    *,
    on_heartbeat: Callable[[], None] | None = None,
    on_open: Callable[[TrySend], None] | None = None,
) -> StreamResponse:
    """Return a watch response: NDJSON whose last line tells the client how to continue."""
    return StreamResponse(lines, streams, final_piece=SHUTDOWN_LINE, on_heartbeat=on_heartbeat, on_open=on_open)
