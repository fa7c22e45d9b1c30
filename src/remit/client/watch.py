"""List and watch with resume and resync; reports only differences.

The watcher lists all objects, then streams changes. After any interruption it lists again and reports only what differs.

No change is lost and none is reported twice: the watcher remembers the version (the revision) of each object, so a relist
shows what was created, changed or deleted while the stream was down. It keeps one name and one number per object.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from remit.client.api_caller import ApiCaller, ApiError, Query, ServerBusy, Unanswered, decode_response, undecodable
from remit.client.retry import RetryPolicy
from remit.model.wire.api_types import LIST_LIMIT_MAX, ListOf, WatchLine
from remit.world.interfaces import LinkError

T = TypeVar("T")

COMPACTED: Final = "compacted"
RESTORED: Final = "restored"
LIST_RESTARTS_MAX: Final = 5
"""How often a list is restarted because its revision was compacted while it was being read."""

SILENCE_MS: Final = 15_000
"""A watch that receives nothing for this long is considered broken; servers send a heartbeat line every few seconds."""

RETRY_POLICY: Final = RetryPolicy(base_ms=100, cap_ms=5_000)


class Changed(Struct, Generic[T], frozen=True):
    """An object was created or changed."""

    object: T
    revision: int


class Deleted(Struct, frozen=True):
    """An object was deleted, or no longer matches the selector."""

    kind: str
    name: str
    tenant: str
    revision: int


class Bookmark(Struct, frozen=True):
    """All changes up to `revision` have been reported."""

    revision: int


class Synced(Struct, frozen=True):
    """All objects that existed at `revision` have been reported: after the first list, and again after each relist."""

    revision: int


WatchUpdate = Changed[T] | Deleted | Bookmark | Synced


class ListResult(NamedTuple, Generic[T]):
    """All objects that matched at `revision`."""

    items: list[T]
    revision: int


class WatchSource(Struct, Generic[T], frozen=True):
    """A collection to list and watch: path and query, decoders, the key of an object, and the version that tells two states
    apart.
    """

    kind: str
    path: str
    query: Query
    list_decoder: msgspec.json.Decoder[ListOf[T]]
    object_decoder: msgspec.json.Decoder[T]
    key: Callable[[T], tuple[str, str]]
    """Return the tenant and name of an object."""
    version: Callable[[T], Any]


async def list_pages(
    caller: ApiCaller, source: WatchSource[T], *, size: int = LIST_LIMIT_MAX
) -> AsyncGenerator[ListResult[T], None]:
    """Yield a list page by page, all at one revision. Raises `ApiError` (`compacted`) if that revision is compacted before the
    last page.
    """
    query = {**source.query, "limit": str(size)}
    while True:
        page = decode_response(source.list_decoder, await caller.read(source.path, query))
        yield ListResult(page.items, page.metadata.revision)
        if not page.metadata.next:
            return
        query["continue"] = page.metadata.next


async def list_all(caller: ApiCaller, source: WatchSource[T]) -> ListResult[T]:
    for attempt in range(LIST_RESTARTS_MAX):
        items: list[T] = []
        revision = 0
        try:
            async with aclosing(list_pages(caller, source)) as all_pages:
                async for page in all_pages:
                    items += page.items
                    revision = page.revision
            return ListResult(items, revision)
        except ApiError as error:
            if error.code != COMPACTED or attempt == LIST_RESTARTS_MAX - 1:
                raise
    raise AssertionError("the last round returns or raises")


class Watcher(Generic[T]):
    """One watch. `lost` is called with the reason each time the stream is interrupted, before the watcher lists again."""

    def __init__(
        self,
        caller: ApiCaller,
        source: WatchSource[T],
        *,
        silence_ms: int = SILENCE_MS,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._caller, self._source, self._silence_ms = caller, source, silence_ms
        self._lost = lost
        self._versions: dict[tuple[str, str], Any] = {}
        self._complete = True
        """Whether every existing object has a known version. If not, deletions of unknown objects must be reported as well."""
        self._revision = 0
        self._incarnation = ""
        self._failures = 0

    async def events(self, after: ListResult[T] | int | None = None) -> AsyncGenerator[WatchUpdate[T], None]:
        """Yield events for ever. Raises `Unanswered` if the first list fails, and `ApiError` if the server refuses."""
        synced = self._resume_after(after)
        has_synced = synced
        while True:
            if not synced:
                try:
                    async with aclosing(self._relist()) as differences:
                        async for event in differences:
                            yield event
                    synced = has_synced = True
                except Unanswered as error:
                    if not has_synced:
                        raise
                    await self._back_off(error.reason)
                    continue
                except ApiError as error:
                    if error.code != COMPACTED:
                        raise
                    await self._back_off(error.detail)
                    continue
            began_ms, retry_after_ms = self._caller.clock.now_ms(), 0
            try:
                async with aclosing(self._stream_events()) as events:
                    async for event in events:
                        yield event
                reason = "the server ended the watch"
            except _Resync as resync:
                reason = str(resync)
            except ServerBusy as busy:
                reason, retry_after_ms = str(busy), busy.retry_after_ms
            except LinkError as error:
                reason = error.cause
            except TimeoutError:
                reason = f"nothing was received for {self._silence_ms} ms"
            except ApiError as error:
                if error.code != COMPACTED:
                    raise
                reason = error.detail
            synced = False
            if self._caller.clock.now_ms() - began_ms >= RETRY_POLICY.cap_ms:
                self._failures = 0
            await self._back_off(reason, retry_after_ms)

    def _resume_after(self, after: ListResult[T] | int | None) -> bool:
        if after is None:
            return False
        if isinstance(after, int):
            self._revision, self._complete = after, False
        else:
            self._revision = after.revision
            self._versions = {self._source.key(item): self._source.version(item) for item in after.items}
        return True

    async def _back_off(self, reason: str, retry_after_ms: int = 0) -> None:
        """Sleep with full jitter below a ceiling that doubles, so that disconnected watchers do not all list at once."""
        self._failures += 1
        if self._lost is not None:
            self._lost(reason)
        caller = self._caller
        await caller.clock.sleep_ms(
            retry_after_ms + RETRY_POLICY.backoff_ms(self._failures, 2 * RETRY_POLICY.cap_ms, caller.randomness)
        )

    # -------------------------------------------------------------------------------------------------------- relist

    async def _relist(self) -> AsyncGenerator[WatchUpdate[T], None]:
        incarnation = (await self._caller.status(fresh=True)).incarnation
        if self._incarnation not in ("", incarnation):
            self._forget_versions()
        self._incarnation = incarnation
        source, listed_keys, revision = self._source, set[tuple[str, str]](), 0
        async with aclosing(list_pages(self._caller, source)) as all_pages:
            async for page in all_pages:
                if page.revision < self._revision:
                    self._forget_versions()
                    self._revision = page.revision
                revision = page.revision
                for item in page.items:
                    key = source.key(item)
                    listed_keys.add(key)
                    if (event := self._changed(key, item, revision)) is not None:
                        yield event
        for tenant, name in [key for key in self._versions if key not in listed_keys]:
            del self._versions[tenant, name]
            yield Deleted(source.kind, name, tenant, revision)
        self._revision, self._complete = revision, True
        yield Synced(revision)

    def _forget_versions(self) -> None:
        """Invalidate all known versions. After a restore, a revision number may be reused for a different state."""
        self._versions = dict.fromkeys(self._versions)

    def _changed(self, key: tuple[str, str], item: T, revision: int) -> Changed[T] | None:
        version = self._source.version(item)
        if self._versions.get(key) == version:
            return None
        self._versions[key] = version
        return Changed(item, revision)

    # --------------------------------------------------------------------------------------------------------------- stream

    async def _stream_events(self) -> AsyncGenerator[WatchUpdate[T], None]:
        """Yield events until the server ends the stream or it breaks: `_Resync`, `LinkError`, `ServerBusy`, `TimeoutError`,
        `ApiError`.
        """
        query = {**self._source.query, "watch": "true", "after": str(self._revision)}
        timeout_ms = self._caller.clock.timeout_ms
        async with AsyncExitStack() as stack:
            async with timeout_ms(self._silence_ms):
                reply = await stack.enter_async_context(self._caller.open_stream(self._source.path, query))
            lines = await stack.enter_async_context(aclosing(reply.lines()))
            while True:
                async with timeout_ms(self._silence_ms):  # must not span a yield: another task may continue the generator
                    line = await anext(lines, None)
                if line is None:
                    return
                if (event := self._parse_line(line)) is not None:
                    yield event

    def _parse_line(self, line: bytes) -> WatchUpdate[T] | None:
        try:
            event = _line_decoder.decode(line)
            if event.type == "changed":
                item = self._source.object_decoder.decode(event.object)
                self._revision = event.revision
                return self._changed(self._source.key(item), item, event.revision)
            if event.type == "deleted":
                self._revision = event.revision
                return self._deleted(msgspec.json.decode(event.object), event.revision)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise undecodable(error) from error
        if event.type == "bookmark":
            self._revision = max(self._revision, event.revision)
            return Bookmark(event.revision)
        if event.type == "resync":
            if event.reason == RESTORED:
                self._forget_versions()
            raise _Resync(event.reason)
        return None

    def _deleted(self, obj: Any, revision: int) -> Deleted | None:
        """Report a deletion. Deleted objects arrive as their metadata; items without metadata, such as endpoints, arrive as
        they were.
        """
        match obj:
            case {"metadata": {"name": str(name), **more}}:
                key = (str(more.get("tenant", "")), name)
            case _:
                key = self._source.key(msgspec.convert(obj, self._source.object_decoder.type))
        known = self._versions.pop(key, _UNKNOWN) is not _UNKNOWN
        return Deleted(self._source.kind, key[1], key[0], revision) if known or not self._complete else None


_line_decoder: msgspec.json.Decoder[WatchLine] = msgspec.json.Decoder(WatchLine)
_UNKNOWN: Final = object()


class _Resync(Exception):
    """The server asks the client to list again."""
