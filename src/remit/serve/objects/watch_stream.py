"""One watch: history from the store, then live changes, with bookmarks.

A watch that starts in the past is replayed from the store's log first, and then follows the watch cache (watch_hub.py).
Guarantee: everything up to the revision of a bookmark was sent before it, so a watch resumes after the last bookmark.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Final

from starlette.responses import Response

from remit.model.kinds.registry import DEFINITIONS
from remit.model.objects import decode
from remit.serve.http.fair_queue import flow_of
from remit.serve.http.replies import ApiProblem
from remit.serve.http.routes import RequestContext
from remit.serve.http.streams import (
    LARGE_BYTES,
    BookmarkLine,
    HeartbeatLine,
    ResyncLine,
    ResyncReason,
    TrySend,
    json_line,
    watch_response,
)
from remit.serve.objects.reads import Selector, key_prefix, label_lookup, selector_from_query
from remit.serve.objects.watch_hub import ChangeBatch, ObjectChange, Subscription
from remit.serve.server_context import ServerContext
from remit.store.protocol import Compacted, RowChange, StoreError, Watch, WatchEvent
from remit.store.protocol import Invalid as NoSuchRevision
from remit.store.protocol import Resync as Lagged

HEARTBEAT_INTERVALS: Final = 2
CHANGES_PER_STEP: Final = 32
"""Changes matched against a selector before other tasks get to run."""
UNCACHED_KINDS: Final = frozenset(definition.kind for definition in DEFINITIONS if definition.note)
"""Kinds that grow without bound and are not in the watch cache. Their watches read the store's log throughout."""


async def get_watch(request: RequestContext, server: ServerContext, kind: str) -> Response:
    selector = selector_from_query(request, kind)
    if request.query["continue"]:
        raise ApiProblem(
            400,
            "malformed",
            "continue: cannot be combined with watch",
            field="continue",
            cure="omit it, and set after=REVISION",
        )
    prefix = key_prefix(kind, request.tenant)
    after = request.query["after"]
    now = await server.store.revision()
    try:
        history = await server.store.watch(prefix, after=now if after is None else after)
    except NoSuchRevision:
        # The revision comes from a store that was replaced: an older backup was restored.
        detail = f"revision {after} is newer than the store's revision {now}"
        raise ApiProblem(410, "compacted", detail, cure="list again, then watch after its revision", revision=now) from None
    flow, _ = flow_of(request.principal)
    watch = _WatchStream(server, flow, prefix, selector, now if after is None else after, history, kind not in UNCACHED_KINDS)
    return watch_response(watch.lines(), server.streams, on_heartbeat=watch.on_heartbeat, on_open=watch.on_open)


class _WatchStream:
    """The lines of one watch. `_after`: everything up to this revision has been sent."""

    def __init__(
        self, server: ServerContext, flow: str, prefix: str, selector: Selector, after: int, history: Watch, is_cached: bool
    ) -> None:
        self._server, self._prefix, self._selector, self._after, self._history = server, prefix, selector, after, history
        self._is_cached = is_cached
        self._labels_of = label_lookup(server.watch_cache)
        self._heartbeat_ms = HEARTBEAT_INTERVALS * server.timing.heartbeat_ms
        self._heartbeat_due_ms = 0
        """When the next line is due, even if it is a heartbeat."""
        self._subscription: Subscription | None = None
        self._selector_lock = server.streams.selector_lock(flow)
        self._incarnation = ""
        self._send: TrySend | None = None

    def on_open(self, send: TrySend) -> None:
        """Called when the response has started."""
        self._send = send

    def on_heartbeat(self) -> None:
        """Called at every heartbeat of the server: wake the stream if a line is due."""
        if self._subscription is not None and self._server.clock.now_ms() >= self._heartbeat_due_ms:
            self._subscription.wake()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        self._incarnation = self._server.hub.incarnation
        try:
            with self._server.hub.subscribe(self._prefix) as subscription:
                async with aclosing(self._replay(self._server.hub.revision if self._is_cached else None)) as history:
                    async for piece in history:
                        yield piece
                async with aclosing(self._live(subscription)) as live:
                    async for piece in live:
                        yield piece
        except Compacted:
            yield _resync_line("compacted")
        except Lagged:
            yield _resync_line("lagging")
        except StoreError:
            yield _resync_line("shutdown")
        finally:
            await self._history.close()

    async def _replay(self, until: int | None) -> AsyncGenerator[bytes, None]:
        """Replay the store's log up to revision `until`, or without end if it is None."""
        yield self._sent(json_line(BookmarkLine(self._after)))
        while until is None or self._after < until:
            try:
                async with self._until_due():
                    event: WatchEvent = await anext(aiter(self._history))
            except TimeoutError:
                yield self._sent(json_line(HeartbeatLine(self._after)))
                continue
            if event.revision <= self._after:
                continue
            lines = [self._line(None, self._object_change(change), old_is_known=False) for change in event.changes]
            self._after = event.revision
            if any(lines):
                yield self._sent(b"".join(lines) + json_line(BookmarkLine(self._after)))
        await self._history.close()

    async def _live(self, subscription: Subscription) -> AsyncGenerator[bytes, None]:
        hub = self._server.hub
        self._subscription = subscription
        while True:
            subscription.try_send = None if self._selector else self._try_send
            await subscription.wait()
            subscription.try_send = None
            if self._incarnation and hub.incarnation != self._incarnation:
                yield _resync_line("restored")
                return
            self._incarnation = hub.incarnation
            if subscription.is_lagging:
                yield _resync_line("lagging")
                return
            batch, after, self._after = subscription.take(), self._after, max(self._after, hub.revision)
            piece = b"" if batch is None else await self._matching_lines(batch, after, self._after)
            if piece:
                yield self._sent(piece)
            elif self._server.clock.now_ms() >= self._heartbeat_due_ms:
                yield self._sent(json_line(HeartbeatLine(self._after)))

    def _try_send(self, batch: ChangeBatch) -> bool:
        """Send a batch at once, without waking the stream's task, which would cost as much again. Only for watches without a
        selector that have kept up.
        """
        hub = self._server.hub
        if self._send is None or batch.first_revision <= self._after or hub.incarnation != self._incarnation:
            return False
        piece = batch.encode(hub.revision)
        if len(piece) >= LARGE_BYTES or not self._send(piece):
            return False
        self._after = max(self._after, hub.revision)
        self._sent(piece)
        return True

    async def _matching_lines(self, batch: ChangeBatch, after: int, until: int) -> bytes:
        """Return the lines of changes after revision `after` that match the selector; empty if there are none.

        A caller may have many watches with long selectors. Those of one flow are evaluated one at a time, and yield to other
        tasks every `CHANGES_PER_STEP` changes.
        """
        if not self._selector and batch.first_revision > after:
            return batch.encode(until)
        lines: list[bytes] = []
        changes = list(batch.changes.values())
        async with self._selector_lock:
            for start in range(0, len(changes), CHANGES_PER_STEP):
                if start:
                    await asyncio.sleep(0)
                step = changes[start : start + CHANGES_PER_STEP]
                lines += [self._line(old, change, old_is_known=True) for old, change in step if change.revision > after]
        matching = b"".join(lines)
        return matching + json_line(BookmarkLine(until)) if matching else b""

    def _until_due(self) -> AbstractAsyncContextManager[object]:
        return self._server.clock.timeout_ms(max(0, self._heartbeat_due_ms - self._server.clock.now_ms()))

    def _sent(self, piece: bytes) -> bytes:
        self._heartbeat_due_ms = self._server.clock.now_ms() + self._heartbeat_ms
        return piece

    def _object_change(self, change: RowChange) -> ObjectChange:
        new = decode(change.value) if change.value is not None and self._selector else None
        return ObjectChange(change.key, change.value, change.revision, None, new)

    def _line(self, old: Any, change: ObjectChange, *, old_is_known: bool) -> bytes:
        """Return the line of a change; empty if the object matched neither before nor after it. Without `old_is_known` it may
        have matched before, so a `deleted` line is sent.
        """
        if not self._selector:
            return change.deleted_line() if change.value is None else change.changed_line()
        if change.value is not None and self._selector.matches(change.new, self._labels_of):
            return change.changed_line()
        if old_is_known and (old is None or not self._selector.matches(old, self._labels_of)):
            return b""
        return change.deleted_line()


def _resync_line(reason: ResyncReason) -> bytes:
    return json_line(ResyncLine(reason))
