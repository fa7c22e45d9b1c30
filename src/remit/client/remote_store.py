"""Read-only `Store` over a link: range and watch.

`RemoteStore` is the client side, `StoreReadService` the server side. Store errors keep their exact meaning over the network:
compacted history, a watcher that lags, a store that is unavailable. Writing is not supported. The rows are not interpreted
here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from remit.client.retry_loop import ServerRotation
from remit.store.protocol import (
    PAGE_ROWS_MAX,
    Commit,
    Committed,
    Compacted,
    Conflict,
    Head,
    Invalid,
    Page,
    ReadOnly,
    Resync,
    Row,
    RowChange,
    Span,
    Store,
    StoreError,
    Unavailable,
    WatchEvent,
)
from remit.world.interfaces import Link, LinkError

CACHED_LINES_MAX: Final = 32
CACHED_LINE_BYTES_MAX: Final = 1 << 20
"""A longer line is not cached: it is a merged event for one watcher that lags, which no other watcher will receive."""

_NULL: Final = msgspec.Raw(b"null")


class RangeRequest(Struct, frozen=True, omit_defaults=True, tag="range"):
    """Parameters of `Store.range`; with `key`, only that row."""

    prefix: Annotated[str, Meta(max_length=512)] = ""
    after: Annotated[str, Meta(max_length=512)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_ROWS_MAX)] = 1_000
    revision: Annotated[int, Meta(ge=0)] = 0
    key: Annotated[str, Meta(max_length=512)] = ""


class WatchRequest(Struct, frozen=True, omit_defaults=True, tag="rows"):
    """Parameters of `Store.watch`."""

    prefix: Annotated[str, Meta(max_length=512)] = ""
    after: Annotated[int, Meta(ge=0)] = 0


class StoreFailure(Struct, frozen=True, omit_defaults=True):
    """A store error in transit, with its numbers."""

    failed: Literal["compacted", "resync", "unavailable", "invalid"]
    said: str = ""
    asked: int = 0
    oldest: int = 0


class RowsPage(Struct, frozen=True, omit_defaults=True):
    rows: tuple[tuple[str, msgspec.Raw, int], ...] = ()
    revision: int = 0
    more: bool = False
    why: StoreFailure | None = None


class RowsEvent(Struct, frozen=True, omit_defaults=True):
    after: int = 0
    revision: int = 0
    changes: tuple[tuple[str, msgspec.Raw, int], ...] = ()
    superseded: int = 0
    elsewhere: int = 0
    span: Span | None = None
    head: Head | None = None
    why: StoreFailure | None = None


_page_decoder: msgspec.json.Decoder[RowsPage] = msgspec.json.Decoder(RowsPage)
_event_decoder: msgspec.json.Decoder[RowsEvent] = msgspec.json.Decoder(RowsEvent)
_encode: Final = msgspec.json.Encoder().encode
_DECODE_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)


class RemoteStore:
    """The rows served by `names`, over a link: from one of them, and after a failure from the next. A `Store` that cannot be
    written.
    """

    def __init__(self, link: Link, names: Sequence[str]) -> None:
        self._link, self._servers = link, ServerRotation(names)

    async def get(self, key: str) -> Row | None:
        page = await self._page(RangeRequest(key=key))
        return page.rows[0] if page.rows else None

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        return await self._page(RangeRequest(prefix, after, limit, revision))

    async def watch(self, prefix: str, *, after: int) -> RemoteWatch:
        return RemoteWatch(self, prefix, after)

    async def revision(self) -> int:
        return (await self._page(RangeRequest(key="head"))).revision

    async def commit(self, commit: Commit) -> Committed | Conflict:
        raise ReadOnly("a remote store is read-only; submit an operation to the authority")

    async def compact(self, revision: int) -> None:
        raise ReadOnly("a remote store is read-only and cannot be compacted")

    async def close(self) -> None:
        """Do nothing: the link is closed by its owner."""

    async def _page(self, request: RangeRequest) -> Page:
        server = self._servers.current
        try:
            page = _page_decoder.decode(await self._link.request(server, _encode(request)))
        except LinkError as error:
            self._servers.switch_from(server)
            raise Unavailable(error.cause) from error
        except _DECODE_ERRORS as error:
            self._servers.switch_from(server)
            raise Unavailable(f"the reply cannot be decoded ({error})") from error
        if page.why is not None:
            raise _error_from(page.why)
        return Page(tuple(Row(key, _decode_value(raw) or b"", at) for key, raw, at in page.rows), page.revision, page.more)

    async def events(self, request: WatchRequest) -> AsyncGenerator[WatchEvent, None]:
        server = self._servers.current
        try:
            async with aclosing(self._link.stream(server, _encode(request))) as lines:
                async for line in lines:
                    yield _decode_event(_event_decoder.decode(line))
        except LinkError as error:
            self._servers.switch_from(server)
            raise Unavailable(error.cause) from error
        except _DECODE_ERRORS as error:
            self._servers.switch_from(server)
            raise Unavailable(f"an event cannot be decoded ({error})") from error
        raise Unavailable("the server ended the watch")


class RemoteWatch:
    """One watch. Raises what the remote store raises, and `Unavailable` when the connection breaks."""

    def __init__(self, rows: RemoteStore, prefix: str, after: int) -> None:
        self._events = rows.events(WatchRequest(prefix, after))

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self._events

    async def close(self) -> None:
        await self._events.aclose()


class StoreReadService:
    """Server side, over a store. Watchers that keep up receive the same events, so each event is encoded once for all."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: dict[tuple[str, int, int], bytes] = {}
        """The last few encoded events, by prefix, start and end revision."""

    async def page(self, request: RangeRequest) -> bytes:
        try:
            if request.key:
                row = await self._store.get(request.key)
                revision = row.revision if row is not None else await self._store.revision()
                page = Page((row,) if row is not None else (), revision, more=False)
            else:
                page = await self._store.range(
                    request.prefix, after=request.after, limit=request.limit, revision=request.revision
                )
        except StoreError as error:
            return _encode(RowsPage(why=_failure_of(error)))
        return _encode(
            RowsPage(tuple((row.key, _encode_value(row.value), row.revision) for row in page.rows), page.revision, page.more)
        )

    async def events(self, request: WatchRequest) -> AsyncGenerator[bytes, None]:
        try:
            watch = await self._store.watch(request.prefix, after=request.after)
            try:
                async for event in watch:
                    yield self._line(request.prefix, event)
            finally:
                await watch.close()
        except StoreError as error:
            yield _encode(RowsEvent(why=_failure_of(error)))

    def _line(self, prefix: str, event: WatchEvent) -> bytes:
        """Return the encoded event. Events with the same prefix and revision range are equal for all watchers, so they are
        cached.
        """
        cache_key = prefix, event.after, event.revision
        line = self._lines.get(cache_key)
        if line is None:
            changes = tuple([(key, _encode_value(value), revision) for key, value, revision in event.changes])
            fields = event.after, event.revision, changes, event.superseded, event.elsewhere, event.span, event.head
            line = _encode(RowsEvent(*fields))
            if len(line) <= CACHED_LINE_BYTES_MAX:
                if len(self._lines) >= CACHED_LINES_MAX:
                    del self._lines[next(iter(self._lines))]
                self._lines[cache_key] = line
        return line


def _encode_value(value: bytes | None) -> msgspec.Raw:
    """Encode a row value. Almost every value is a JSON object and is embedded as it is; any other is sent as a string."""
    if value is None:
        return _NULL
    return msgspec.Raw(value) if value[:1] == b"{" else msgspec.Raw(_encode(value.decode()))


def _decode_value(raw: msgspec.Raw) -> bytes | None:
    data = bytes(raw)
    if data[:1] == b"{":
        return data
    return None if data == b"null" else msgspec.json.decode(data, type=str).encode()


def _decode_event(event: RowsEvent) -> WatchEvent:
    if event.why is not None:
        raise _error_from(event.why)
    changes = tuple(RowChange(key, _decode_value(raw), at) for key, raw, at in event.changes)
    return WatchEvent(event.after, event.revision, changes, event.superseded, event.elsewhere, event.span, event.head)


def _failure_of(error: StoreError) -> StoreFailure:
    match error:
        case Compacted():
            return StoreFailure("compacted", str(error), error.revision, error.oldest)
        case Resync():
            return StoreFailure("resync", str(error), error.seen, error.now)
        case Invalid():
            return StoreFailure("invalid", str(error))
        case _:
            return StoreFailure("unavailable", str(error))


def _error_from(why: StoreFailure) -> StoreError:
    match why.failed:
        case "compacted":
            return Compacted(why.asked, why.oldest)
        case "resync":
            return Resync(why.asked, why.oldest)
        case "invalid":
            return Invalid(why.said)
        case _:
            return Unavailable(why.said)
