"""Endpoints: the list of serving replicas, and watches that miss no change."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from remit.model.kinds import Node
from remit.model.objects import encode, key
from remit.model.wire.api_types import EndpointItem
from remit.observation.watch_cache import WatchCache
from remit.serve.objects import endpoints
from remit.serve.objects.endpoints import EndpointIndex
from remit.store.protocol import Row
from tests.unit.observation.row_fixtures import ready, replica, tenant, work
from tests.unit.serve.watch_cache_fixtures import HEAD_1, CacheFixture


def at(name: str, host: str) -> Node:
    node = ready(name)
    return replace(node, spec=replace(node.spec, address=host))


def serving(cache: CacheFixture) -> list[str]:
    return [one.replica for one in EndpointIndex(cache.board, cache.clock).list_endpoints().items]


def scope() -> CacheFixture:
    web = (replica("web", 0, "serving", "n1", ports={"http": 31_000}), replica("web", 1, "ready", "n1"))
    return CacheFixture(at("n1", "127.0.0.1"), at("n2", "127.0.0.2"), tenant("t1"), *work("web"), *work("api"), *web)


def test_list_contains_serving_replicas_with_addresses() -> None:
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)
    found = index.list_endpoints()
    assert (found.kind, found.metadata.revision) == ("EndpointList", 1)
    assert found.items == [
        EndpointItem(
            tenant="t1",
            service="web",
            replica="web-0",
            node="n1",
            region="r1",
            zone="a",
            host="127.0.0.1",
            ports={"http": 31_000},
        )
    ]
    assert index.list_endpoints("t2").items == [] and index.list_endpoints("t1", "api").items == []
    assert msgspec.json.decode(encode(found))["items"][0]["ports"] == {"http": 31_000}


async def lines(index: EndpointIndex, after: int | None, count: int, **of: str) -> list[Any]:
    """Read this many lines of a watch, without heartbeats."""
    found: list[Any] = []
    watch = index.watch(after, **of)
    try:
        async for piece in watch:
            found += [msgspec.json.decode(one) for one in piece.splitlines()]
            if len(found) >= count:
                break
    finally:
        await watch.aclose()
    return found


def summary(found: list[Any]) -> list[tuple[str, int, str]]:
    return [(one["type"], one["revision"], one.get("object", {}).get("replica", "")) for one in found]


def test_watch_after_list_yields_each_change_and_bookmark() -> None:
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)
    cache.apply(replica("web", 1, "serving", "n2", ports={"http": 1}))
    cache.apply(replica("api", 0, "serving", "n2"))
    cache.apply(replica("web", 0, "draining", "n1"))
    found = asyncio.run(lines(index, 1, 4))
    assert summary(found) == [("changed", 2, "web-1"), ("changed", 3, "api-0"), ("deleted", 4, "web-0"), ("bookmark", 4, "")]
    assert serving(cache) == ["api-0", "web-1"]
    assert summary(asyncio.run(lines(index, 3, 2, service="web", tenant="t1"))) == [
        ("deleted", 4, "web-0"),
        ("bookmark", 4, ""),
    ]


def test_moved_node_changes_addresses_of_its_endpoints() -> None:
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)
    cache.apply(at("n1", "127.0.0.9"))
    (changed, bookmark) = asyncio.run(lines(index, 1, 2))
    assert changed["object"]["host"] == "127.0.0.9" and bookmark == {"type": "bookmark", "revision": 2}


def test_changes_without_effect_on_endpoints_are_not_sent() -> None:
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)
    cache.apply(replace(at("n1", "127.0.0.1"), spec=replace(at("n1", "127.0.0.1").spec, unschedulable=True)))
    cache.apply(replica("api", 0, "ready", "n2"))
    cache.apply(drop=["replica/t1/web-1"])
    cache.apply(replica("api", 1, "serving", "n2"))
    assert summary(asyncio.run(lines(index, 1, 2))) == [("changed", 5, "api-1"), ("bookmark", 5, "")]


def test_deleted_replica_row_removes_endpoint() -> None:
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)
    cache.apply(drop=["replica/t1/web-0"])
    assert summary(asyncio.run(lines(index, 1, 1)))[0] == ("deleted", 2, "web-0")
    assert index.list_endpoints().items == []


def test_watch_of_forgotten_revision_must_resync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "CHANGES_MAX", 2)
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)
    for number in range(4):
        cache.apply(replica("web", 1, "serving" if number % 2 else "ready", "n2", ports={"http": number}))
    (last,) = asyncio.run(lines(index, 1, 1))
    assert (last["type"], last["reason"]) == ("resync", "compacted")
    assert last["cure"]


def test_slow_watcher_must_resync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "CHANGES_MAX", 2)
    monkeypatch.setattr(endpoints, "LINES_PER_CHUNK", 1)
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)

    async def slow() -> list[Any]:
        cache.apply(replica("web", 1, "serving", "n2"), replica("web", 2, "serving", "n2"))
        watch = index.watch(1)
        first = msgspec.json.decode((await anext(watch)).splitlines()[0])
        for number in range(5):
            cache.apply(replica("web", 1, "serving", "n2", ports={"http": number}))
        return [first, *[msgspec.json.decode(one) async for one in watch]]

    found = asyncio.run(slow())
    assert found[0]["type"] == "changed"
    assert (found[-1]["type"], found[-1]["reason"]) == ("resync", "lagging")


def test_restore_ends_every_watch() -> None:
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)

    async def watch_across_restore() -> Any:
        watch = index.watch(None)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        cache.board.begin_list(replace(HEAD_1, incarnation="two"), 9)
        cache.board.end_list()
        last = msgspec.json.decode(await waiting)
        await watch.aclose()
        return last

    last = asyncio.run(watch_across_restore())
    assert (last["type"], last["reason"]) == ("resync", "restored")


def test_idle_watch_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "HEARTBEAT_MS", 20)
    cache = scope()
    index = EndpointIndex(cache.board, cache.clock)
    assert summary(asyncio.run(lines(index, None, 1))) == [("heartbeat", 1, "")]


def test_new_server_requires_resync_for_earlier_revisions() -> None:
    """The client watched another server, or this one before a restart: this server has not seen endpoints removed meanwhile."""
    fixture = CacheFixture()
    fixture.board = WatchCache(fixture.clock)
    index = EndpointIndex(fixture.board, fixture.clock)
    fixture.board.begin_list(HEAD_1, 7)
    fixture.board.add_page([Row(key(one), encode(one), 5) for one in (at("n1", ""), replica("web", 0, "serving", "n1"))])
    fixture.board.end_list()
    assert [one.replica for one in index.list_endpoints().items] == ["web-0"]
    (last,) = asyncio.run(lines(index, 6, 1))
    assert (last["type"], last["reason"]) == ("resync", "compacted")
    fixture.revision = 7
    fixture.apply(replica("web", 1, "serving", "n1"))
    assert summary(asyncio.run(lines(index, 7, 2))) == [("changed", 8, "web-1"), ("bookmark", 8, "")]
