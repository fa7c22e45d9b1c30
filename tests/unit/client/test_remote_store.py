"""Remote store: reads, watches and refusals mean the same as those of the store behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

import msgspec
import pytest

from remit.client.remote_store import RangeRequest, RemoteStore, RowsEvent, StoreReadService, WatchRequest, _decode_event
from remit.store.memory import MemoryStore
from remit.store.protocol import (
    Commit,
    Compacted,
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
    WatchEvent,
)
from remit.world.interfaces import LinkError, NotSent, ReplyLost, Service
from tests.unit.world.virtual_world import run_virtually

JSON, TEXT = b'{"a":{"b":[1,2]}}', "plain \u00fc".encode()


class StoreLink:
    """A link to named services; requests to those in `down` fail with the given error."""

    def __init__(self, **services: StoreReadService) -> None:
        self.services = services
        self.down: dict[str, LinkError] = {}
        self.garbled: bytes | None = None
        self.requested: list[str] = []

    async def request(self, to: str, body: bytes, /) -> bytes:
        self.requested.append(to)
        if to in self.down:
            raise self.down[to]
        answer = await self.services[to].page(msgspec.json.decode(body, type=RangeRequest))
        return answer if self.garbled is None else self.garbled

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        self.requested.append(to)
        if to in self.down:
            raise self.down[to]
        async with aclosing(self.services[to].events(msgspec.json.decode(body, type=WatchRequest))) as items:
            async for item in items:
                yield item if self.garbled is None else self.garbled

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return nullcontext()


class FailingStore(MemoryStore):
    """A store whose reads fail with a given error."""

    def __init__(self, why: Callable[[], StoreError]) -> None:
        super().__init__()
        self.why = why

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        raise self.why()

    async def watch(self, prefix: str, *, after: int) -> Any:
        raise self.why()


def connected(*stores: Store) -> tuple[RemoteStore, StoreLink]:
    net = StoreLink(**{f"s{n}": StoreReadService(store) for n, store in enumerate(stores)})
    return RemoteStore(net, sorted(net.services)), net


async def filled_store() -> MemoryStore:
    store = MemoryStore()
    await store.commit(Commit(puts=(("a/1", JSON), ("a/2", TEXT), ("b/1", JSON))))
    return store


def test_reads_equal_those_of_store() -> None:
    async def scene() -> None:
        store = await filled_store()
        rows, _ = connected(store)
        assert await rows.get("a/2") == await store.get("a/2")
        assert await rows.get("none") is None
        assert await rows.revision() == await store.revision()
        for requested in (
            {"prefix": "a/"},
            {"prefix": "", "limit": 2},
            {"prefix": "", "after": "a/1"},
            {"prefix": "", "revision": 1},
        ):
            assert await rows.range(**requested) == await store.range(**requested), requested

    run_virtually(scene())


def test_watch_delivers_events_of_store() -> None:
    async def scene() -> None:
        store = await filled_store()
        rows, _ = connected(store)
        watch, store_watch = await rows.watch("a/", after=1), await store.watch("a/", after=1)
        await store.commit(Commit(puts=(("a/3", TEXT),), deletes=("a/1",)))
        await store.commit(Commit(puts=(("b/2", JSON),)))
        near, there = aiter(watch), aiter(store_watch)
        for _ in range(2):
            assert await anext(near) == await anext(there)
        await watch.close()

    run_virtually(scene())


def test_event_with_span_and_head_survives_encoding() -> None:
    head = Head("one", 2, 7, "a", 3, "digest")
    encoded = msgspec.json.encode(RowsEvent(1, 9, (), 4, 2, Span(5, 7, 2), head))
    assert _decode_event(msgspec.json.decode(encoded, type=RowsEvent)) == WatchEvent(1, 9, (), 4, 2, Span(5, 7, 2), head)


REFUSALS: list[Callable[[], StoreError]] = [
    lambda: Compacted(3, 9),
    lambda: Resync(3, 9),
    lambda: Invalid("a future revision"),
    lambda: Unavailable("the disk is gone"),
]


@pytest.mark.parametrize("why", REFUSALS, ids=["compacted", "resync", "invalid", "unavailable"])
def test_store_refusal_keeps_its_type_and_text(why: Callable[[], StoreError]) -> None:
    """F07: a client that must list again has to learn it."""

    async def scene() -> None:
        rows, _ = connected(FailingStore(why))
        with pytest.raises(type(why())) as listed:
            await rows.range("a/")
        watch = await rows.watch("a/", after=1)
        with pytest.raises(type(why())) as watched:
            await anext(aiter(watch))
        assert str(listed.value) == str(watched.value) == str(why())

    run_virtually(scene())


@pytest.mark.parametrize("failure", [NotSent("no server", "start it"), ReplyLost("it was lost", "ask again")])
def test_failed_server_is_replaced_by_next_which_is_kept(failure: LinkError) -> None:
    async def scene() -> None:
        rows, net = connected(await filled_store(), await filled_store())
        net.down = {"s0": failure}
        with pytest.raises(Unavailable, match=failure.cause):
            await rows.get("a/1")
        assert await rows.get("a/1") == Row("a/1", JSON, 1)
        assert await rows.get("a/1") is not None
        assert net.requested == ["s0", "s1", "s1"]

    run_virtually(scene())


def test_broken_watch_is_unavailable_and_next_server_serves_it() -> None:
    async def scene() -> None:
        rows, net = connected(await filled_store(), await filled_store())
        net.down = {"s0": ReplyLost("it was lost", "ask again")}
        with pytest.raises(Unavailable):
            await anext(aiter(await rows.watch("", after=0)))
        event = await anext(aiter(await rows.watch("", after=0)))
        assert [change.key for change in event.changes] == ["a/1", "a/2", "b/1"]
        assert net.requested == ["s0", "s1"]

    run_virtually(scene())


@pytest.mark.parametrize("garbled", [b"", b"null", b"[]", b'{"revision":"x"}', b"\xff", b"[" * 5_000])
def test_undecodable_reply_is_unavailable(garbled: bytes) -> None:
    async def scene() -> None:
        rows, net = connected(await filled_store())
        net.garbled = garbled
        with pytest.raises(Unavailable):
            await rows.get("a/1")
        with pytest.raises(Unavailable):
            await anext(aiter(await rows.watch("", after=0)))

    run_virtually(scene())


def test_remote_store_is_read_only() -> None:
    async def scene() -> None:
        rows, net = connected(await filled_store())
        with pytest.raises(ReadOnly):
            await rows.commit(Commit(puts=(("a/1", JSON),)))
        with pytest.raises(ReadOnly):
            await rows.compact(1)
        assert net.requested == []

    run_virtually(scene())


def test_remote_store_needs_a_server() -> None:
    with pytest.raises(ValueError, match="at least one"):
        RemoteStore(StoreLink(), [])
