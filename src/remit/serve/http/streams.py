"""Long-lived responses: bookmarks, heartbeats, disconnects, shutdown.

To one listener, who may leave or lag, or is told to come back. No content here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remit.model.identity import Principal
from remit.serve.http.routes import NDJSON
from remit.world.concurrency import one_failure
from remit.world.interfaces import Clock

if TYPE_CHECKING:
    from remit.serve.server_context import Desk

SEND_MS_MAX: Final = 30_000
"""Who takes nothing for so long is not listened for any more."""
LARGE_BYTES: Final = 64 << 10
"""What is as large leaves in pieces, each once the one before has been taken."""

AtOnce = Callable[[bytes], bool]
"""Sends a piece without anybody being woken for it. False: it cannot be done so just now."""
Reason = Literal["compacted", "lagging", "restored", "shutdown"]


class Bookmark(Struct, frozen=True, tag_field="type", tag="bookmark"):
    """Everything up to this revision has been told: a watch goes on after it."""

    revision: int


class Heartbeat(Struct, frozen=True, tag_field="type", tag="heartbeat"):
    """As a bookmark; nothing has happened for a while."""

    revision: int


class Resync(Struct, frozen=True, tag_field="type", tag="resync"):
    """The last line of a watch."""

    reason: Reason
    cure: str = "list again, then watch after its revision"


_encode: Final = msgspec.json.Encoder().encode


def line(value: object) -> bytes:
    return _encode(value) + b"\n"


class Pulse:
    """One timer for all who are told something without end: each is called once in a beat, with how long that is."""

    def __init__(self, clock: Clock, beat_ms: int) -> None:
        self._clock, self._ms = clock, min(beat_ms, SEND_MS_MAX)
        self._all: dict[Callable[[int], None], None] = {}
        self._beating: asyncio.Task[None] | None = None

    @contextmanager
    def felt(self, by: Callable[[int], None]) -> Iterator[None]:
        self._all[by] = None
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat(), name="pulse")
        try:
            yield
        finally:
            del self._all[by]
            if not self._all:
                self._beating.cancel()
                self._beating = None

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep_ms(self._ms)
            for by in list(self._all):
                by(self._ms)


class Streamed(Response):
    """Sends what `pieces` yields until it ends, the listener leaves, or the server closes: then `last` is sent; without one it
    is broken off.

    `pieces` is closed whatever happens. It counts as one of the desk's watchers from when it is sent. `pulse` is called now and
    then, so that whoever makes the pieces may say something although nothing has happened; `opened`, once the answer has begun,
    with what sends a piece without anybody being woken. A listener who takes nothing for
    long is noticed at the same time: a timer for each piece would cost more than the piece.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        desk: Desk,
        *,
        media: str = NDJSON,
        last: bytes = b"",
        headers: Mapping[str, str] | None = None,
        pulse: Callable[[], None] | None = None,
        opened: Callable[[AtOnce], None] | None = None,
    ) -> None:
        self._pulse, self._opened = pulse, opened
        self._under_way, self._count = False, 0
        self._seen, self._stuck_ms = -1, 0
        self._over = asyncio.Event()
        """Nothing more may be said, or is heard."""
        self.principal: Principal | None = None
        """Whose token must stay good for as long as this lasts."""
        self._pieces, self._desk, self._last = pieces, desk, last
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
            at_once: AtOnce = partial(scope["piece"], scope) if "piece" in scope else _not_at_once
            if self._opened is not None:
                self._opened(at_once)
            with self._desk.pulse.felt(self._beat), one_failure():
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(self._send_all(send, at_once))
                    leaving = group.create_task(_left(receive))
                    closing = group.create_task(self._desk.closing.wait())
                    lapsing = group.create_task(self._lapse())
                    ending = group.create_task(self._over.wait())
                    tasks = (sending, leaving, closing, lapsing, ending)
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
            over = any(_ended(task) for task in (lapsing, ending))
            if _ended(leaving) or (over and not _ended(sending)):
                cut(scope)  # nobody hears, or may hear, how it ends
                return
            ended = _ended(closing) and not _ended(sending)
            if ended and not self._last:
                return  # broken off without a last chunk: what was to go on must not look whole
            with suppress(TimeoutError):
                async with self._desk.clock.timeout_ms(SEND_MS_MAX):
                    await send({"type": "http.response.body", "body": self._last if ended else b"", "more_body": False})

    async def _lapse(self) -> None:
        """Until the asker's token is revoked."""
        if self.principal is None:
            await asyncio.Event().wait()
        else:
            await self._desk.identities.lapse(self.principal)

    def _beat(self, ms: int) -> None:
        """Is the token still good, and has the listener taken something of a piece of late?"""
        if self._pulse is not None:
            self._pulse()
        self._stuck_ms = self._stuck_ms + ms if self._under_way and self._count == self._seen else 0
        self._seen = self._count
        if self._stuck_ms >= SEND_MS_MAX or (self.principal is not None and not self._desk.identities.good(self.principal)):
            self._over.set()

    async def _send_all(self, send: Send, at_once: AtOnce) -> None:
        async for piece in self._pieces:
            if len(piece) >= LARGE_BYTES or not at_once(piece):
                self._under_way = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._under_way = False
            self._count += 1


def _not_at_once(piece: bytes) -> bool:
    return False


def _ended(task: asyncio.Task[Any]) -> bool:
    """By itself, and not because it was told to."""
    return task.done() and not task.cancelled()


def cut(scope: Scope) -> None:
    """Close the connection at once; what has not been taken yet is let go, and would be held for as long otherwise."""
    abort = scope.get("abort")
    if abort is not None:
        abort()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


LAST: Final = line(Resync("shutdown"))


def watched(
    lines: AsyncGenerator[bytes, None],
    desk: Desk,
    *,
    pulse: Callable[[], None] | None = None,
    opened: Callable[[AtOnce], None] | None = None,
) -> Streamed:
    """A watch: NDJSON, whose last line says how to go on."""
    return Streamed(lines, desk, last=LAST, pulse=pulse, opened=opened)
