"""Is an agent told everything of its nodes, once whole and then as it changes, and nothing of others'? And what is the door?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

import msgspec
import pytest

from remit.client.remote_store import RangeRequest, RowsPage, WatchRequest
from remit.client.rpc import EndpointReply, UnreadableRequest, order_feed
from remit.law.timing import Timing
from remit.model.kinds import NodeHealth
from remit.model.objects import AnyObject, encode, key
from remit.model.wire.agent_messages import AssignmentsRequest, AssignmentsUpdate, decode_assignments
from remit.observation.watch_cache import WatchCache
from remit.serve.auth.secrets import Keyring
from remit.serve.components.component_rpc import AssignmentFeed, ComponentService
from remit.store import chain
from remit.store.memory import MemoryStore
from remit.store.protocol import Commit, Head, Row, RowChange, WatchEvent
from remit.world.interfaces import LinkError, NotSent, ReplyLost, Service, World
from tests.unit.client.fake_authority import FakeAuthority
from tests.unit.correction.controller_fixture import ready, replica, work
from tests.unit.world.virtual_world import run_virtually, virtual_world

TEMPO = Timing(1_000)


class Server:
    """A board that is fed by hand, the store that stands behind it, and the feed of orders from both."""

    def __init__(self, world: World, *things: AnyObject) -> None:
        self.world, self.store, self.board = world, MemoryStore(), WatchCache(world.clock)
        self.feed = AssignmentFeed(self.board, self.store, world.clock, TEMPO)
        self.incarnation, self.revision = "one", 1
        self.list(*things)

    @property
    def head(self) -> Head:
        return Head(self.incarnation, 1, self.revision, "a", 0, "")

    def list(self, *things: AnyObject) -> None:
        rows = [Row(key(thing), encode(thing), self.revision) for thing in things]
        self.board.begin_list(self.head, self.revision)
        self.board.add_page([*rows, Row("incarnation", self.incarnation.encode(), self.revision)])
        self.board.end_list()

    def write(self, *things: AnyObject, drop: tuple[str, ...] = ()) -> None:
        self.revision += 1
        changes = [RowChange(key(thing), encode(thing), self.revision) for thing in things]
        changes += [RowChange(name, None, self.revision) for name in drop]
        self.board.apply(WatchEvent(self.revision - 1, self.revision, tuple(changes), 0, 0, None, self.head))


class Reading:
    """One stream of orders, read item by item."""

    def __init__(self, server: Server, *nodes: str) -> None:
        self.lines = server.feed.stream(AssignmentsRequest(nodes))

    async def next(self) -> AssignmentsUpdate:
        return decode_assignments(await anext(self.lines))


def scene(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def tell() -> None:
        async def whole() -> None:
            await test(virtual_world())

        run_virtually(whole())

    tell.__name__, tell.__doc__, tell.__module__ = test.__name__, test.__doc__, test.__module__
    return tell


@scene
async def test_first_everything_of_its_nodes__with_the_generations_that_it_needs(world: World) -> None:
    here = [replica("w", 0, "bound", "n1"), replica("w", 1, "running", "n1")]
    server = Server(world, ready("n1"), ready("n2"), *work("w"), *here, replica("w", 2, "bound", "n2"))
    reading = Reading(server, "n1")
    orders = await reading.next()
    assert (orders.whole, orders.incarnation, orders.revision) == (True, "one", 1)
    assert [one.replica for one in orders.replicas] == here
    assert [one.spec.generation for one in orders.generations] == [1]
    assert {name: at for name, (_, at) in orders.nodes.items()} == {"n1": 1}
    await reading.lines.aclose()


@scene
async def test_then_what_changes_there__and_a_generation_only_once(world: World) -> None:
    server = Server(world, ready("n1"), ready("n2"), *work("w"), replica("w", 0, "bound", "n1"))
    reading = Reading(server, "n1")
    await reading.next()
    server.write(replica("w", 0, "starting", "n1"), replica("w", 1, "bound", "n2"))
    orders = await reading.next()
    assert (orders.whole, [one.replica.status.phase for one in orders.replicas]) == (False, ["starting"])
    assert (orders.generations, orders.nodes, orders.revision) == ((), {}, 2)
    server.write(ready("n1", NodeHealth.SUSPECT))
    assert list((await reading.next()).nodes) == ["n1"]
    await reading.lines.aclose()


@scene
async def test_what_was_released_moved_or_forgotten_is_gone(world: World) -> None:
    on = [replica("w", n, "running", "n1") for n in range(3)]
    server = Server(world, ready("n1"), ready("n2"), *work("w"), *on)
    reading = Reading(server, "n1")
    await reading.next()
    server.write(replica("w", 0, "released", "n1"), replica("w", 1, "bound", "n2"), drop=("replica/t1/w-2",))
    orders = await reading.next()
    assert (sorted(orders.gone), orders.replicas) == (["replica/t1/w-0", "replica/t1/w-1", "replica/t1/w-2"], ())
    await reading.lines.aclose()


@scene
async def test_what_is_only_reserved_is_no_order_yet(world: World) -> None:
    server = Server(world, ready("n1"), *work("w"), replica("w", 0, "reserved", "n1"))
    reading = Reading(server, "n1")
    assert (await reading.next()).replicas == ()
    server.write(replica("w", 0, "bound", "n1"))
    assert len((await reading.next()).replicas) == 1
    await reading.lines.aclose()


@scene
async def test_a_node_that_is_deleted_is_told_as_gone(world: World) -> None:
    server = Server(world, ready("n1"))
    reading = Reading(server, "n1")
    await reading.next()
    server.write(drop=("node/n1",))
    assert (await reading.next()).nodes_gone == ("n1",)
    await reading.lines.aclose()


@scene
async def test_without_news_it_says_once_a_beat_how_old_it_all_is(world: World) -> None:
    server = Server(world, ready("n1"))
    reading = Reading(server, "n1")
    await reading.next()
    for beat in (1, 2):
        orders = await reading.next()
        assert (orders.age_ms, orders.replicas, orders.whole) == (beat * TEMPO.heartbeat_ms, (), False)
    await reading.lines.aclose()


@scene
async def test_a_server_that_lags_tells_nothing_until_its_board_has_come_as_far_as_the_store(world: World) -> None:
    """F04 F06: the agent may have been told more before, by another server."""
    server = Server(world, ready("n1"), *work("w"))
    for _ in range(2):
        await chain.raise_epoch(server.store, "a", "one")
    reading = Reading(server, "n1")
    waiting = asyncio.ensure_future(reading.next())
    await world.clock.sleep_ms(5_000)
    assert not waiting.done()
    server.write(replica("w", 0, "bound", "n1"))
    orders = await waiting
    assert (orders.revision, len(orders.replicas)) == (2, 1)
    await reading.lines.aclose()


@scene
async def test_orders_of_another_incarnation_are_another_stream(world: World) -> None:
    """F10."""
    server = Server(world, ready("n1"))
    reading = Reading(server, "n1")
    await reading.next()
    server.incarnation = "two"
    server.list(ready("n1"))
    with pytest.raises(StopAsyncIteration):
        await reading.next()


@scene
async def test_who_hangs_up_is_forgotten(world: World) -> None:
    server = Server(world, ready("n1"), ready("n2"))
    reading = Reading(server, "n1", "n2", "n1")
    await reading.next()
    await reading.lines.aclose()
    assert server.board._node_listeners == {}


# -- the agent's end ---------------------------------------------------------------------------------------------------------


class Net:
    """Servers by name: each tells what its script says, and then fails or ends."""

    def __init__(self, scripts: dict[str, list[bytes | LinkError]]) -> None:
        self.scripts, self.asked = scripts, list[str]()

    async def request(self, to: str, body: bytes, /) -> bytes:
        raise NotSent("nobody", "start it")

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        self.asked.append(to)
        for item in self.scripts[to]:
            if isinstance(item, LinkError):
                raise item
            yield item

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return nullcontext()


@scene
async def test_after_a_stream_has_ended_or_failed_the_next_server_is_asked(world: World) -> None:
    word = msgspec.json.encode(AssignmentsUpdate("one", 7))
    net = Net({"a": [word], "b": [word, ReplyLost("it was lost", "ask again")], "c": [b"garbled"]})
    feed = order_feed(net, ["a", "b", "c"])
    heard: list[str] = []
    for _ in range(4):
        try:
            async with aclosing(feed(["n1"])) as items:
                heard += [f"{orders.revision}" async for orders in items]
        except LinkError as error:
            heard.append(error.cause.partition(" (")[0])
    assert net.asked == ["a", "b", "c", "a"]
    assert heard == ["7", "it was lost", "c sent orders that cannot be decoded", "7"]


# -- the door ----------------------------------------------------------------------------------------------------------------


@scene
async def test_one_door_for_claims_rows_and_orders__by_what_they_are(world: World) -> None:
    server = Server(world, ready("n1"))
    await server.store.commit(Commit(puts=(("node/n1", encode(ready("n1"))),)))
    door = ComponentService(FakeAuthority(world), server.store, server.feed, Keyring(world.disk, world.ids))
    status = msgspec.json.decode(await door.request(b'{"type":"call"}'), type=EndpointReply).status
    assert status is not None and status.scope == "eu"
    page = msgspec.json.decode(await door.request(msgspec.json.encode(RangeRequest(prefix="node/"))), type=RowsPage)
    assert [name for name, _, _ in page.rows] == ["node/n1"]
    async with aclosing(door.stream(msgspec.json.encode(AssignmentsRequest(("n1",))))) as lines:
        assert decode_assignments(await anext(lines)).whole
    async with aclosing(door.stream(msgspec.json.encode(WatchRequest("node/")))) as lines:
        assert b"node/n1" in await anext(lines)


@pytest.mark.parametrize("body", [b"", b'{"type":"no-such"}', b'{"type":"range","limit":0}', b"\xff", b"[" * 5_000])
def test_words_that_cannot_be_read_are_answered__not_raised(body: bytes) -> None:
    async def whole() -> None:
        world = virtual_world()
        server = Server(world, ready("n1"))
        door = ComponentService(FakeAuthority(world), server.store, server.feed, Keyring(world.disk, world.ids))
        assert msgspec.json.decode(await door.request(body), type=EndpointReply).failed == "unread"
        with pytest.raises(UnreadableRequest, match="use type orders or rows"):
            await anext(door.stream(body))

    run_virtually(whole())
