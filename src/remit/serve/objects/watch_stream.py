"""One watch: history from the store, then live changes, with bookmarks.

What happened since a revision, then what happens; what it means is for others to say.

A watch that begins in the past is told that from the store's log first, then joins the server's board (hub.py). What each can
rely on: all that happened up to a bookmark's revision has been told before the bookmark, so a watch is taken up again after
the last of those.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Final

from starlette.responses import Response

from remit.model.objects import decode
from remit.serve.http.fair_queue import flow_of
from remit.serve.http.replies import Failure
from remit.serve.http.request_context import Asked
from remit.serve.http.streams import LARGE_BYTES, AtOnce, Bookmark, Heartbeat, Reason, Resync, line, watched
from remit.serve.objects.reads import Selector, labels_on, prefix_of, selector_of
from remit.serve.objects.watch_hub import Listening, News, Told
from remit.serve.server_context import Desk
from remit.store.protocol import Change, Compacted, Event, StoreError, Watch
from remit.store.protocol import Invalid as NoSuchRevision
from remit.store.protocol import Resync as Lagged

HEARTBEAT_BEATS: Final = 2
PICKED_AT_ONCE: Final = 32
"""Of so many changes a selector is asked before others have their turn."""
OFF_BOARD: Final = frozenset({"Event", "Decision"})
"""Kinds that grow with the run, which no board keeps: their watches are told from the store's log throughout."""


async def get_watch(asked: Asked, desk: Desk, kind: str) -> Response:
    wanted = selector_of(asked, kind)
    if asked.query["continue"]:
        raise Failure(400, "malformed", "a watch has no pages", field="continue", cure="leave it out, and say after=REVISION")
    prefix = prefix_of(kind, asked.tenant)
    after = asked.query["after"]
    now = await desk.store.revision()
    try:
        past = await desk.store.watch(prefix, after=now if after is None else after)
    except NoSuchRevision:
        # It was told by a store that is no more: a backup was restored that had not come so far.
        detail = f"revision {after} has not been yet; the store stands at {now}"
        raise Failure(410, "compacted", detail, cure="list again, then watch after its revision", revision=now) from None
    flow, _ = flow_of(asked.principal)
    watch = _Watch(desk, flow, prefix, wanted, now if after is None else after, past, kind not in OFF_BOARD)
    return watched(watch.lines(), desk, pulse=watch.pulse, opened=watch.opened)


class _Watch:
    """The lines of one watch. `after`: all that happened up to there has been told."""

    def __init__(self, desk: Desk, flow: str, prefix: str, wanted: Selector, after: int, past: Watch, on_board: bool) -> None:
        self._desk, self._prefix, self._wanted, self._after, self._past = desk, prefix, wanted, after, past
        self._on_board = on_board
        self._labels_of = labels_on(desk.board)
        self._heartbeat_ms = HEARTBEAT_BEATS * desk.tempo.beat_ms
        self._due_ms = 0
        """When something must be said again, even if it is nothing."""
        self._listening: Listening | None = None
        self._picking = desk.picking(flow)
        self._incarnation = ""
        self._send: AtOnce | None = None

    def opened(self, send: AtOnce) -> None:
        """The answer has begun."""
        self._send = send

    def pulse(self) -> None:
        """Look whether something must be said."""
        if self._listening is not None and self._desk.clock.now_ms() >= self._due_ms:
            self._listening.wake()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        self._incarnation = self._desk.hub.incarnation
        try:
            with self._desk.hub.listening(self._prefix) as listening:
                async with aclosing(self._replayed(self._desk.hub.revision if self._on_board else None)) as past:
                    async for piece in past:
                        yield piece
                async with aclosing(self._live(listening)) as present:
                    async for piece in present:
                        yield piece
        except Compacted:
            yield _resync("compacted")
        except Lagged:
            yield _resync("lagging")
        except StoreError:
            yield _resync("shutdown")
        finally:
            await self._past.close()

    async def _replayed(self, until: int | None) -> AsyncGenerator[bytes, None]:
        """From the store's log: up to where the board stands, or for ever."""
        yield self._said(line(Bookmark(self._after)))
        while until is None or self._after < until:
            try:
                async with self._until_due():
                    event: Event = await anext(aiter(self._past))
            except TimeoutError:
                yield self._said(line(Heartbeat(self._after)))
                continue
            if event.revision <= self._after:
                continue
            lines = [self._line(None, self._told(change), known=False) for change in event.changes]
            self._after = event.revision
            if any(lines):
                yield self._said(b"".join(lines) + line(Bookmark(self._after)))
        await self._past.close()

    async def _live(self, listening: Listening) -> AsyncGenerator[bytes, None]:
        hub = self._desk.hub
        self._listening = listening
        while True:
            listening.at_once = None if self._wanted else self._at_once
            await listening.wait()
            listening.at_once = None
            if self._incarnation and hub.incarnation != self._incarnation:
                yield _resync("restored")
                return
            self._incarnation = hub.incarnation
            if listening.lagging:
                yield _resync("lagging")
                return
            news, after, self._after = listening.take(), self._after, max(self._after, hub.revision)
            piece = b"" if news is None else await self._piece(news, after, self._after)
            if piece:
                yield self._said(piece)
            elif self._desk.clock.now_ms() >= self._due_ms:
                yield self._said(line(Heartbeat(self._after)))

    def _at_once(self, news: News) -> bool:
        """Tell one who wants everything and keeps up, which most do: to wake whoever sends would cost as much again."""
        hub = self._desk.hub
        if self._send is None or news.first <= self._after or hub.incarnation != self._incarnation:
            return False
        piece = news.piece(hub.revision)
        if len(piece) >= LARGE_BYTES or not self._send(piece):
            return False
        self._after = max(self._after, hub.revision)
        self._said(piece)
        return True

    async def _piece(self, news: News, after: int, until: int) -> bytes:
        """What of this has happened after that revision and is wanted; nothing, if nothing is.

        Somebody may have very many watches with long selectors. Those of one flow are looked after one by one, and none for
        long without letting others have their turn.
        """
        if not self._wanted and news.first > after:
            return news.piece(until)
        lines: list[bytes] = []
        changes = list(news.changes.values())
        async with self._picking:
            for start in range(0, len(changes), PICKED_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                some = changes[start : start + PICKED_AT_ONCE]
                lines += [self._line(old, told, known=True) for old, told in some if told.revision > after]
        found = b"".join(lines)
        return found + line(Bookmark(until)) if found else b""

    def _until_due(self) -> AbstractAsyncContextManager[object]:
        return self._desk.clock.timeout_ms(max(0, self._due_ms - self._desk.clock.now_ms()))

    def _said(self, piece: bytes) -> bytes:
        self._due_ms = self._desk.clock.now_ms() + self._heartbeat_ms
        return piece

    def _told(self, change: Change) -> Told:
        new = decode(change.value) if change.value is not None and self._wanted else None
        return Told(change.key, change.value, change.revision, None, new)

    def _line(self, old: Any, told: Told, *, known: bool) -> bytes:
        """Nothing, if it concerns nobody here: it was not picked before, and is not now. If what it was before is not `known`,
        it may have been picked.
        """
        if not self._wanted:
            return told.deleted() if told.value is None else told.changed()
        if told.value is not None and self._wanted.picks(told.new, self._labels_of):
            return told.changed()
        if known and (old is None or not self._wanted.picks(old, self._labels_of)):
            return b""
        return told.deleted()


def _resync(reason: Reason) -> bytes:
    return line(Resync(reason))
