"""Who is told which replicas serve, and can a watcher miss one?"""

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
from tests.unit.serve.watch_cache_fixtures import HEAD_1, Told


def at(name: str, host: str) -> Node:
    node = ready(name)
    return replace(node, spec=replace(node.spec, address=host))


def serving(told: Told) -> list[str]:
    return [one.replica for one in EndpointIndex(told.board, told.clock).list_endpoints().items]


def scope() -> Told:
    web = (replica("web", 0, "serving", "n1", ports={"http": 31_000}), replica("web", 1, "ready", "n1"))
    return Told(at("n1", "127.0.0.1"), at("n2", "127.0.0.2"), tenant("t1"), *work("web"), *work("api"), *web)


def test_listed_are_those_that_serve__with_where_they_are_reached() -> None:
    told = scope()
    book = EndpointIndex(told.board, told.clock)
    found = book.list_endpoints()
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
    assert book.list_endpoints("t2").items == [] and book.list_endpoints("t1", "api").items == []
    assert msgspec.json.decode(encode(found))["items"][0]["ports"] == {"http": 31_000}


async def lines(book: EndpointIndex, after: int | None, count: int, **of: str) -> list[Any]:
    """So many lines; heartbeats are not counted."""
    found: list[Any] = []
    watch = book.watch(after, **of)
    try:
        async for piece in watch:
            found += [msgspec.json.decode(one) for one in piece.splitlines()]
            if len(found) >= count:
                break
    finally:
        await watch.aclose()
    return found


def told_of(found: list[Any]) -> list[tuple[str, int, str]]:
    return [(one["type"], one["revision"], one.get("object", {}).get("replica", "")) for one in found]


def test_a_watch_after_a_list__is_told_each_change_and_then_a_bookmark() -> None:
    told = scope()
    book = EndpointIndex(told.board, told.clock)
    told.tell(replica("web", 1, "serving", "n2", ports={"http": 1}))
    told.tell(replica("api", 0, "serving", "n2"))
    told.tell(replica("web", 0, "draining", "n1"))
    found = asyncio.run(lines(book, 1, 4))
    assert told_of(found) == [("changed", 2, "web-1"), ("changed", 3, "api-0"), ("deleted", 4, "web-0"), ("bookmark", 4, "")]
    assert serving(told) == ["api-0", "web-1"]
    assert told_of(asyncio.run(lines(book, 3, 2, service="web", tenant="t1"))) == [("deleted", 4, "web-0"), ("bookmark", 4, "")]


def test_a_node_that_moves__moves_what_serves_there() -> None:
    told = scope()
    book = EndpointIndex(told.board, told.clock)
    told.tell(at("n1", "127.0.0.9"))
    (changed, bookmark) = asyncio.run(lines(book, 1, 2))
    assert changed["object"]["host"] == "127.0.0.9" and bookmark == {"type": "bookmark", "revision": 2}


def test_what_changes_nothing_of_where_it_is_reached__is_not_told() -> None:
    told = scope()
    book = EndpointIndex(told.board, told.clock)
    told.tell(replace(at("n1", "127.0.0.1"), spec=replace(at("n1", "127.0.0.1").spec, unschedulable=True)))
    told.tell(replica("api", 0, "ready", "n2"))
    told.tell(drop=["replica/t1/web-1"])
    told.tell(replica("api", 1, "serving", "n2"))
    assert told_of(asyncio.run(lines(book, 1, 2))) == [("changed", 5, "api-1"), ("bookmark", 5, "")]


def test_a_row_that_is_gone__serves_no_more() -> None:
    told = scope()
    book = EndpointIndex(told.board, told.clock)
    told.tell(drop=["replica/t1/web-0"])
    assert told_of(asyncio.run(lines(book, 1, 1)))[0] == ("deleted", 2, "web-0")
    assert book.list_endpoints().items == []


def test_a_watch_of_what_was_forgotten__is_sent_to_list_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "CHANGES_MAX", 2)
    told = scope()
    book = EndpointIndex(told.board, told.clock)
    for number in range(4):
        told.tell(replica("web", 1, "serving" if number % 2 else "ready", "n2", ports={"http": number}))
    (last,) = asyncio.run(lines(book, 1, 1))
    assert (last["type"], last["reason"]) == ("resync", "compacted")
    assert last["cure"]


def test_a_watcher_that_falls_behind__is_told_that_it_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "CHANGES_MAX", 2)
    monkeypatch.setattr(endpoints, "LINES_PER_CHUNK", 1)
    told = scope()
    book = EndpointIndex(told.board, told.clock)

    async def slow() -> list[Any]:
        told.tell(replica("web", 1, "serving", "n2"), replica("web", 2, "serving", "n2"))
        watch = book.watch(1)
        first = msgspec.json.decode((await anext(watch)).splitlines()[0])
        for number in range(5):
            told.tell(replica("web", 1, "serving", "n2", ports={"http": number}))
        return [first, *[msgspec.json.decode(one) async for one in watch]]

    found = asyncio.run(slow())
    assert found[0]["type"] == "changed"
    assert (found[-1]["type"], found[-1]["reason"]) == ("resync", "lagging")


def test_a_restored_scope__ends_every_watch() -> None:
    told = scope()
    book = EndpointIndex(told.board, told.clock)

    async def over_a_restore() -> Any:
        watch = book.watch(None)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        told.board.begin_list(replace(HEAD_1, incarnation="two"), 9)
        told.board.end_list()
        last = msgspec.json.decode(await waiting)
        await watch.aclose()
        return last

    last = asyncio.run(over_a_restore())
    assert (last["type"], last["reason"]) == ("resync", "restored")


def test_whoever_hears_nothing__hears_that_somebody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "HEARTBEAT_MS", 20)
    told = scope()
    book = EndpointIndex(told.board, told.clock)
    assert told_of(asyncio.run(lines(book, None, 1))) == [("heartbeat", 1, "")]


def test_a_server_that_has_just_begun__does_not_pretend_to_know_what_was_before() -> None:
    """Somebody watched another server, or this one before it was restarted: what ended meanwhile nobody here has seen."""
    begun = Told()
    begun.board = WatchCache(begun.clock)
    book = EndpointIndex(begun.board, begun.clock)
    begun.board.begin_list(HEAD_1, 7)
    begun.board.add_page([Row(key(one), encode(one), 5) for one in (at("n1", ""), replica("web", 0, "serving", "n1"))])
    begun.board.end_list()
    assert [one.replica for one in book.list_endpoints().items] == ["web-0"]
    (last,) = asyncio.run(lines(book, 6, 1))
    assert (last["type"], last["reason"]) == ("resync", "compacted")
    begun.revision = 7
    begun.tell(replica("web", 1, "serving", "n1"))
    assert told_of(asyncio.run(lines(book, 7, 2))) == [("changed", 8, "web-1"), ("bookmark", 8, "")]
