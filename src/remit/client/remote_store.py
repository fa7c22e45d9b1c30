"""Read-only `Store` over a link: range and watch.

The reading half of a store over a link; what the rows mean is the reader's affair.

`RemoteRows` is the near end, `RowsService` the far end. What a store refuses keeps its exact meaning on the way: compacted
history, a watcher that lags, a store that cannot serve now. Nothing can be written this way.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from remit.store.protocol import (
    PAGE_ROWS_MAX,
    Change,
    Commit,
    Committed,
    Compacted,
    Conflict,
    Event,
    Head,
    Invalid,
    Page,
    ReadOnly,
    Resync,
    Row,
    Span,
    Store,
    StoreError,
    Unavailable,
)
from remit.world.interfaces import Link, LinkError

LINES_KEPT: Final = 32
LINE_BYTES_KEPT: Final = 1 << 20
"""A longer one is one watcher's own: it lags, and has much folded into one."""

_NONE: Final = msgspec.Raw(b"null")


class RangeOf(Struct, frozen=True, omit_defaults=True, tag="range"):
    """As `Store.range`; with `key`, that one row alone."""

    prefix: Annotated[str, Meta(max_length=512)] = ""
    after: Annotated[str, Meta(max_length=512)] = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_ROWS_MAX)] = 1_000
    revision: Annotated[int, Meta(ge=0)] = 0
    key: Annotated[str, Meta(max_length=512)] = ""


class RowsFrom(Struct, frozen=True, omit_defaults=True, tag="rows"):
    """As `Store.watch`."""

    prefix: Annotated[str, Meta(max_length=512)] = ""
    after: Annotated[int, Meta(ge=0)] = 0


class Why(Struct, frozen=True, omit_defaults=True):
    """What the store refused, and with which numbers."""

    failed: Literal["compacted", "resync", "unavailable", "invalid"]
    said: str = ""
    asked: int = 0
    oldest: int = 0


class RowsPage(Struct, frozen=True, omit_defaults=True):
    rows: tuple[tuple[str, msgspec.Raw, int], ...] = ()
    revision: int = 0
    more: bool = False
    why: Why | None = None


class RowsEvent(Struct, frozen=True, omit_defaults=True):
    after: int = 0
    revision: int = 0
    changes: tuple[tuple[str, msgspec.Raw, int], ...] = ()
    superseded: int = 0
    elsewhere: int = 0
    span: Span | None = None
    head: Head | None = None
    why: Why | None = None


_pages: msgspec.json.Decoder[RowsPage] = msgspec.json.Decoder(RowsPage)
_events: msgspec.json.Decoder[RowsEvent] = msgspec.json.Decoder(RowsEvent)
_encode: Final = msgspec.json.Encoder().encode
_UNREAD: Final = (msgspec.DecodeError, ValueError, RecursionError)


class RemoteRows:
    """The rows that `names` serve, over a link: one of them, and after a failure the next. A `Store` that cannot be written."""

    def __init__(self, link: Link, names: Sequence[str]) -> None:
        if not names:
            raise ValueError("rows are read from at least one server")
        self._link, self._names = link, tuple(names)
        self._at = 0

    async def get(self, key: str) -> Row | None:
        page = await self._page(RangeOf(key=key))
        return page.rows[0] if page.rows else None

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        return await self._page(RangeOf(prefix, after, limit, revision))

    async def watch(self, prefix: str, *, after: int) -> RemoteWatch:
        return RemoteWatch(self, prefix, after)

    async def revision(self) -> int:
        return (await self._page(RangeOf(key="head"))).revision

    async def commit(self, commit: Commit) -> Committed | Conflict:
        raise ReadOnly("rows that are read from afar cannot be written; ask the authority")

    async def compact(self, revision: int) -> None:
        raise ReadOnly("rows that are read from afar cannot be compacted")

    async def close(self) -> None:
        """Nothing is held."""

    async def _page(self, wanted: RangeOf) -> Page:
        try:
            page = _pages.decode(await self._link.request(self._names[self._at], _encode(wanted)))
        except LinkError as error:
            self.turn()
            raise Unavailable(error.cause) from error
        except _UNREAD as error:
            self.turn()
            raise Unavailable(f"an answer that cannot be read ({error})") from error
        if page.why is not None:
            raise _raised(page.why)
        return Page(tuple(Row(key, _value(raw) or b"", at) for key, raw, at in page.rows), page.revision, page.more)

    def turn(self) -> None:
        self._at = (self._at + 1) % len(self._names)

    async def events(self, wanted: RowsFrom) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(self._link.stream(self._names[self._at], _encode(wanted))) as lines:
                async for line in lines:
                    yield _event(_events.decode(line))
        except LinkError as error:
            self.turn()
            raise Unavailable(error.cause) from error
        except _UNREAD as error:
            self.turn()
            raise Unavailable(f"an event that cannot be read ({error})") from error
        raise Unavailable("the server ended the watch")


class RemoteWatch:
    """One watch. It raises what the far store raises, and `Unavailable` when the way to it breaks."""

    def __init__(self, rows: RemoteRows, prefix: str, after: int) -> None:
        self._events = rows.events(RowsFrom(prefix, after))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def close(self) -> None:
        await self._events.aclose()


class RowsService:
    """The far end, over a store. Those who keep up are told the same: it is written out once for all of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: dict[tuple[str, int, int], bytes] = {}
        """By prefix, and from which revision to which: the last few."""

    async def page(self, wanted: RangeOf) -> bytes:
        try:
            if wanted.key:
                row = await self._store.get(wanted.key)
                revision = row.revision if row is not None else await self._store.revision()
                page = Page((row,) if row is not None else (), revision, more=False)
            else:
                page = await self._store.range(wanted.prefix, after=wanted.after, limit=wanted.limit, revision=wanted.revision)
        except StoreError as error:
            return _encode(RowsPage(why=_why(error)))
        return _encode(RowsPage(tuple((row.key, _raw(row.value), row.revision) for row in page.rows), page.revision, page.more))

    async def events(self, wanted: RowsFrom) -> AsyncGenerator[bytes, None]:
        try:
            watch = await self._store.watch(wanted.prefix, after=wanted.after)
            try:
                async for event in watch:
                    yield self._line(wanted.prefix, event)
            finally:
                await watch.close()
        except StoreError as error:
            yield _encode(RowsEvent(why=_why(error)))

    def _line(self, prefix: str, event: Event) -> bytes:
        """The same stretch of revisions under the same prefix is the same event, whoever watches."""
        of = prefix, event.after, event.revision
        line = self._lines.get(of)
        if line is None:
            changes = tuple([(key, _raw(value), revision) for key, value, revision in event.changes])
            told = event.after, event.revision, changes, event.superseded, event.elsewhere, event.span, event.head
            line = _encode(RowsEvent(*told))
            if len(line) <= LINE_BYTES_KEPT:
                if len(self._lines) >= LINES_KEPT:
                    del self._lines[next(iter(self._lines))]
                self._lines[of] = line
        return line


def _raw(value: bytes | None) -> msgspec.Raw:
    """Almost every value is a JSON object, and travels as it is; any other as a string."""
    if value is None:
        return _NONE
    return msgspec.Raw(value) if value[:1] == b"{" else msgspec.Raw(_encode(value.decode()))


def _value(raw: msgspec.Raw) -> bytes | None:
    data = bytes(raw)
    if data[:1] == b"{":
        return data
    return None if data == b"null" else msgspec.json.decode(data, type=str).encode()


def _event(told: RowsEvent) -> Event:
    if told.why is not None:
        raise _raised(told.why)
    changes = tuple(Change(key, _value(raw), at) for key, raw, at in told.changes)
    return Event(told.after, told.revision, changes, told.superseded, told.elsewhere, told.span, told.head)


def _why(error: StoreError) -> Why:
    match error:
        case Compacted():
            return Why("compacted", str(error), error.asked, error.oldest)
        case Resync():
            return Why("resync", str(error), error.seen, error.now)
        case Invalid():
            return Why("invalid", str(error))
        case _:
            return Why("unavailable", str(error))


def _raised(why: Why) -> StoreError:
    match why.failed:
        case "compacted":
            return Compacted(why.asked, why.oldest)
        case "resync":
            return Resync(why.asked, why.oldest)
        case "invalid":
            return Invalid(why.said)
        case _:
            return Unavailable(why.said)
