"""List and watch with resume and resync; reports only differences.

A list, then news; after any break a list again, and only what differs.

No change is lost and none is told twice: each object's mark (its revision) is remembered, so a list tells what came, changed or
went while nobody listened. What is remembered is one name and one number an object.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from remit.client.api_caller import ApiError, Caller, Held, Query, Unanswered, decoded, unread
from remit.client.retry import RetryShape
from remit.model.wire.api_types import LIST_LIMIT_MAX, ListOf, WatchLine
from remit.world.interfaces import LinkError

T = TypeVar("T")

COMPACTED: Final = "compacted"
RESTORED: Final = "restored"
RESTARTS_MAX: Final = 5
"""How often a list is begun anew because its revision was compacted while it was read."""

SILENCE_MS: Final = 15_000
"""A watch that says nothing for so long, not even that it is there, is broken: servers say so every few seconds."""

SHAPE: Final = RetryShape(base_ms=100, cap_ms=5_000)


class Changed(Struct, Generic[T], frozen=True):
    """It came, or is another now."""

    object: T
    revision: int


class Deleted(Struct, frozen=True):
    """It is gone, or matches no more."""

    kind: str
    name: str
    tenant: str
    revision: int


class Bookmark(Struct, frozen=True):
    """Everything up to `revision` has been told."""

    revision: int


class Synced(Struct, frozen=True):
    """All that stood at `revision` has been told: at the beginning, and again after each break."""

    revision: int


Watched = Changed[T] | Deleted | Bookmark | Synced


class Listed(NamedTuple, Generic[T]):
    """What stood at `revision`, all of it."""

    items: list[T]
    revision: int


class Source(Struct, Generic[T], frozen=True):
    """What is listed and watched: where it is found, how it is read, what each is called, and when two are the same."""

    kind: str
    path: str
    query: Query
    lists: msgspec.json.Decoder[ListOf[T]]
    ones: msgspec.json.Decoder[T]
    called: Callable[[T], tuple[str, str]]
    """Its tenant and name."""
    mark: Callable[[T], Any]


async def pages(caller: Caller, source: Source[T], *, size: int = LIST_LIMIT_MAX) -> AsyncGenerator[Listed[T], None]:
    """A list page by page, all at one revision. Raises `ApiError` (`compacted`) if that is gone before the last of them."""
    query = {**source.query, "limit": str(size)}
    while True:
        page = decoded(source.lists, await caller.read(source.path, query))
        yield Listed(page.items, page.metadata.revision)
        if not page.metadata.next:
            return
        query["continue"] = page.metadata.next


async def listed(caller: Caller, source: Source[T]) -> Listed[T]:
    for turn in range(RESTARTS_MAX):
        items: list[T] = []
        revision = 0
        try:
            async with aclosing(pages(caller, source)) as all_pages:
                async for page in all_pages:
                    items += page.items
                    revision = page.revision
            return Listed(items, revision)
        except ApiError as error:
            if error.code != COMPACTED or turn == RESTARTS_MAX - 1:
                raise
    raise AssertionError("the last turn returns or raises")


class Watcher(Generic[T]):
    """One watch. `lost` is told why, each time that news stopped coming and all is listed again."""

    def __init__(
        self, caller: Caller, source: Source[T], *, silence_ms: int = SILENCE_MS, lost: Callable[[str], None] | None = None
    ) -> None:
        self._caller, self._source, self._silence_ms = caller, source, silence_ms
        self._lost = lost
        self._marks: dict[tuple[str, str], Any] = {}
        self._whole = True
        """Is all that exists among the marks? Else something may be deleted that was never told."""
        self._revision = 0
        self._incarnation = ""
        self._failures = 0

    async def events(self, after: Listed[T] | int | None = None) -> AsyncGenerator[Watched[T], None]:
        """For ever. Raises `Unanswered` if the first list cannot be had, and `ApiError` if the server will not have it."""
        synced = self._begin(after)
        begun = synced
        while True:
            if not synced:
                try:
                    async with aclosing(self._relist()) as differences:
                        async for told in differences:
                            yield told
                    synced = begun = True
                except Unanswered as error:
                    if not begun:
                        raise
                    await self._rest(error.why)
                    continue
                except ApiError as error:
                    if error.code != COMPACTED:
                        raise
                    await self._rest(error.detail)
                    continue
            began_ms, rest_ms = self._caller.clock.now_ms(), 0
            try:
                async with aclosing(self._news()) as news:
                    async for told in news:
                        yield told
                why = "the server ended the watch"
            except _Resync as resync:
                why = str(resync)
            except Held as held:
                why, rest_ms = str(held), held.retry_after_ms
            except LinkError as error:
                why = error.cause
            except TimeoutError:
                why = f"nothing was heard for {self._silence_ms} ms"
            except ApiError as error:
                if error.code != COMPACTED:
                    raise
                why = error.detail
            synced = False
            if self._caller.clock.now_ms() - began_ms >= SHAPE.cap_ms:
                self._failures = 0
            await self._rest(why, rest_ms)

    def _begin(self, after: Listed[T] | int | None) -> bool:
        if after is None:
            return False
        if isinstance(after, int):
            self._revision, self._whole = after, False
        else:
            self._revision = after.revision
            self._marks = {self._source.called(one): self._source.mark(one) for one in after.items}
        return True

    async def _rest(self, why: str, rest_ms: int = 0) -> None:
        """Full jitter, up to a ceiling that doubles: watchers that were cut off together do not all list at once."""
        self._failures += 1
        if self._lost is not None:
            self._lost(why)
        caller = self._caller
        await caller.clock.sleep_ms(rest_ms + SHAPE.pause_ms(self._failures, 2 * SHAPE.cap_ms, caller.chance))

    # -------------------------------------------------------------------------------------------------------- differences

    async def _relist(self) -> AsyncGenerator[Watched[T], None]:
        incarnation = (await self._caller.status(fresh=True)).incarnation
        if self._incarnation not in ("", incarnation):
            self._forget()
        self._incarnation = incarnation
        source, here, revision = self._source, set[tuple[str, str]](), 0
        async with aclosing(pages(self._caller, source)) as all_pages:
            async for page in all_pages:
                if page.revision < self._revision:
                    self._forget()
                    self._revision = page.revision
                revision = page.revision
                for one in page.items:
                    called = source.called(one)
                    here.add(called)
                    if (told := self._differs(called, one, revision)) is not None:
                        yield told
        for tenant, name in [called for called in self._marks if called not in here]:
            del self._marks[tenant, name]
            yield Deleted(source.kind, name, tenant, revision)
        self._revision, self._whole = revision, True
        yield Synced(revision)

    def _forget(self) -> None:
        """The scope was restored: a number that was given before may have been given again, to something else."""
        self._marks = dict.fromkeys(self._marks)

    def _differs(self, called: tuple[str, str], one: T, revision: int) -> Changed[T] | None:
        mark = self._source.mark(one)
        if self._marks.get(called) == mark:
            return None
        self._marks[called] = mark
        return Changed(one, revision)

    # --------------------------------------------------------------------------------------------------------------- news

    async def _news(self) -> AsyncGenerator[Watched[T], None]:
        """Until the server ends it, or it breaks: `_Resync`, `LinkError`, `Held`, `TimeoutError`, `ApiError`."""
        query = {**self._source.query, "watch": "true", "after": str(self._revision)}
        timeout_ms = self._caller.clock.timeout_ms
        async with AsyncExitStack() as stack:
            async with timeout_ms(self._silence_ms):
                reply = await stack.enter_async_context(self._caller.opened(self._source.path, query))
            lines = await stack.enter_async_context(aclosing(reply.lines()))
            while True:
                async with timeout_ms(self._silence_ms):  # it may not reach around a yield: who reads on may be another task
                    line = await anext(lines, None)
                if line is None:
                    return
                if (told := self._read(line)) is not None:
                    yield told

    def _read(self, line: bytes) -> Watched[T] | None:
        try:
            told = _lines.decode(line)
            if told.type == "changed":
                one = self._source.ones.decode(told.object)
                self._revision = told.revision
                return self._differs(self._source.called(one), one, told.revision)
            if told.type == "deleted":
                self._revision = told.revision
                return self._deleted(msgspec.json.decode(told.object), told.revision)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise unread(error) from error
        if told.type == "bookmark":
            self._revision = max(self._revision, told.revision)
            return Bookmark(told.revision)
        if told.type == "resync":
            if told.reason == RESTORED:
                self._forget()
            raise _Resync(told.reason)
        return None

    def _deleted(self, gone: Any, revision: int) -> Deleted | None:
        """What is left of an object is its metadata; what has none is told as it was."""
        match gone:
            case {"metadata": {"name": str(name), **more}}:
                called = (str(more.get("tenant", "")), name)
            case _:
                called = self._source.called(msgspec.convert(gone, self._source.ones.type))
        known = self._marks.pop(called, _UNKNOWN) is not _UNKNOWN
        return Deleted(self._source.kind, called[1], called[0], revision) if known or not self._whole else None


_lines: msgspec.json.Decoder[WatchLine] = msgspec.json.Decoder(WatchLine)
_UNKNOWN: Final = object()


class _Resync(Exception):
    """The server says that all must be listed again."""
