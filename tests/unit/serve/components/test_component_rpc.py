"""Assignment streams of agents: the whole state first, then changes of their own nodes only; and the component RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

import msgspec
import pytest

from remit.client.remote_store import RangeRequest, RowsPage, WatchRequest
from remit.client.rpc import EndpointReply, UnreadableRequest, assignment_source
from remit.law.timing import Timing
from remit.model.kinds import NodeHealth
from remit.model.kinds.registry import AnyObject
from remit.model.objects import encode, key
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

TIMING = Timing(1_000)


class Server:
    """A watch cache fed by the test, its store, and the assignment feed built on both."""

    def __init__(self, world: World, *objects: AnyObject) -> None:
        self.world, self.store, self.board = world, MemoryStore(), WatchCache(world.clock)
        self.feed = AssignmentFeed(self.board, self.store, world.clock, TIMING)
        self.incarnation, self.revision = "one", 1
        self.list(*objects)

    @property
    def head(self) -> Head:
        return Head(self.incarnation, 1, self.revision, "a", 0, "")

    def list(self, *objects: AnyObject) -> None:
        rows = [Row(key(obj), encode(obj), self.revision) for obj in objects]
        self.board.begin_list(self.head, self.revision)
        self.board.add_page([*rows, Row("incarnation", self.incarnation.encode(), self.revision)])
        self.board.end_list()

    def write(self, *objects: AnyObject, drop: tuple[str, ...] = ()) -> None:
        self.revision += 1
        changes = [RowChange(key(obj), encode(obj), self.revision) for obj in objects]
        changes += [RowChange(name, None, self.revision) for name in drop]
        self.board.apply(WatchEvent(self.revision - 1, self.revision, tuple(changes), 0, 0, None, self.head))


class StreamReader:
    """One stream of assignments, read item by item."""

    def __init__(self, server: Server, *nodes: str) -> None:
        self.lines = server.feed.stream(AssignmentsRequest(nodes))

    async def next(self) -> AssignmentsUpdate:
        return decode_assignments(await anext(self.lines))


def world_test(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run_test() -> None:
        async def scenario() -> None:
            await test(virtual_world())

        run_virtually(scenario())

    run_test.__name__, run_test.__doc__, run_test.__module__ = test.__name__, test.__doc__, test.__module__
    return run_test


@world_test
async def test_first_update_is_whole_with_needed_generations(world: World) -> None:
    on_n1 = [replica("w", 0, "bound", "n1"), replica("w", 1, "running", "n1")]
    server = Server(world, ready("n1"), ready("n2"), *work("w"), *on_n1, replica("w", 2, "bound", "n2"))
    reader = StreamReader(server, "n1")
    update = await reader.next()
    assert (update.whole, update.incarnation, update.revision) == (True, "one", 1)
    assert [one.replica for one in update.replicas] == on_n1
    assert [one.spec.generation for one in update.generations] == [1]
    assert {name: at for name, (_, at) in update.nodes.items()} == {"n1": 1}
    await reader.lines.aclose()


@world_test
async def test_later_updates_contain_changes_and_each_generation_once(world: World) -> None:
    server = Server(world, ready("n1"), ready("n2"), *work("w"), replica("w", 0, "bound", "n1"))
    reader = StreamReader(server, "n1")
    await reader.next()
    server.write(replica("w", 0, "starting", "n1"), replica("w", 1, "bound", "n2"))
    update = await reader.next()
    assert (update.whole, [one.replica.status.phase for one in update.replicas]) == (False, ["starting"])
    assert (update.generations, update.nodes, update.revision) == ((), {}, 2)
    server.write(ready("n1", NodeHealth.SUSPECT))
    assert list((await reader.next()).nodes) == ["n1"]
    await reader.lines.aclose()


@world_test
async def test_released_moved_or_deleted_replicas_are_reported_gone(world: World) -> None:
    on = [replica("w", n, "running", "n1") for n in range(3)]
    server = Server(world, ready("n1"), ready("n2"), *work("w"), *on)
    reader = StreamReader(server, "n1")
    await reader.next()
    server.write(replica("w", 0, "released", "n1"), replica("w", 1, "bound", "n2"), drop=("replica/t1/w-2",))
    update = await reader.next()
    assert (sorted(update.gone), update.replicas) == (["replica/t1/w-0", "replica/t1/w-1", "replica/t1/w-2"], ())
    await reader.lines.aclose()


@world_test
async def test_reserved_replica_is_not_assigned_until_bound(world: World) -> None:
    server = Server(world, ready("n1"), *work("w"), replica("w", 0, "reserved", "n1"))
    reader = StreamReader(server, "n1")
    assert (await reader.next()).replicas == ()
    server.write(replica("w", 0, "bound", "n1"))
    assert len((await reader.next()).replicas) == 1
    await reader.lines.aclose()


@world_test
async def test_deleted_node_is_reported_gone(world: World) -> None:
    server = Server(world, ready("n1"))
    reader = StreamReader(server, "n1")
    await reader.next()
    server.write(drop=("node/n1",))
    assert (await reader.next()).nodes_gone == ("n1",)
    await reader.lines.aclose()


@world_test
async def test_idle_stream_sends_age_once_per_heartbeat(world: World) -> None:
    server = Server(world, ready("n1"))
    reader = StreamReader(server, "n1")
    await reader.next()
    for beat in (1, 2):
        update = await reader.next()
        assert (update.age_ms, update.replicas, update.whole) == (beat * TIMING.heartbeat_ms, (), False)
    await reader.lines.aclose()


@world_test
async def test_lagging_server_sends_nothing_until_cache_reaches_store(world: World) -> None:
    """F04 F06: another server may have sent the agent newer assignments."""
    server = Server(world, ready("n1"), *work("w"))
    for _ in range(2):
        await chain.raise_epoch(server.store, "a", "one")
    reader = StreamReader(server, "n1")
    waiting = asyncio.ensure_future(reader.next())
    await world.clock.sleep_ms(5_000)
    assert not waiting.done()
    server.write(replica("w", 0, "bound", "n1"))
    update = await waiting
    assert (update.revision, len(update.replicas)) == (2, 1)
    await reader.lines.aclose()


@world_test
async def test_new_incarnation_ends_stream(world: World) -> None:
    """F10."""
    server = Server(world, ready("n1"))
    reader = StreamReader(server, "n1")
    await reader.next()
    server.incarnation = "two"
    server.list(ready("n1"))
    with pytest.raises(StopAsyncIteration):
        await reader.next()


@world_test
async def test_closed_stream_is_unsubscribed(world: World) -> None:
    server = Server(world, ready("n1"), ready("n2"))
    reader = StreamReader(server, "n1", "n2", "n1")
    await reader.next()
    await reader.lines.aclose()
    assert server.board._node_listeners == {}


# -- the agent's side --------------------------------------------------------------------------------------------------------


class ScriptedLink:
    """Servers by name: each sends its script and then fails or ends."""

    def __init__(self, scripts: dict[str, list[bytes | LinkError]]) -> None:
        self.scripts, self.connected = scripts, list[str]()

    async def request(self, to: str, body: bytes, /) -> bytes:
        raise NotSent("nobody", "start it")

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        self.connected.append(to)
        for item in self.scripts[to]:
            if isinstance(item, LinkError):
                raise item
            yield item

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return nullcontext()


@world_test
async def test_agent_connects_to_next_server_after_stream_ends_or_fails(world: World) -> None:
    update = msgspec.json.encode(AssignmentsUpdate("one", 7))
    net = ScriptedLink({"a": [update], "b": [update, ReplyLost("it was lost", "ask again")], "c": [b"garbled"]})
    feed = assignment_source(net, ["a", "b", "c"])
    results: list[str] = []
    for _ in range(4):
        try:
            async with aclosing(feed(["n1"])) as items:
                results += [f"{update.revision}" async for update in items]
        except LinkError as error:
            results.append(error.cause.partition(" (")[0])
    assert net.connected == ["a", "b", "c", "a"]
    assert results == ["7", "it was lost", "c sent assignments that cannot be decoded", "7"]


# -- component RPC -----------------------------------------------------------------------------------------------------------


@world_test
async def test_component_service_dispatches_claims_rows_and_assignments_by_type(world: World) -> None:
    server = Server(world, ready("n1"))
    await server.store.commit(Commit(puts=(("node/n1", encode(ready("n1"))),)))
    service = ComponentService(FakeAuthority(world), server.store, server.feed, Keyring(world.disk, world.ids))
    status = msgspec.json.decode(await service.request(b'{"type":"call"}'), type=EndpointReply).status
    assert status is not None and status.scope == "eu"
    page = msgspec.json.decode(await service.request(msgspec.json.encode(RangeRequest(prefix="node/"))), type=RowsPage)
    assert [name for name, _, _ in page.rows] == ["node/n1"]
    async with aclosing(service.stream(msgspec.json.encode(AssignmentsRequest(("n1",))))) as lines:
        assert decode_assignments(await anext(lines)).whole
    async with aclosing(service.stream(msgspec.json.encode(WatchRequest("node/")))) as lines:
        assert b"node/n1" in await anext(lines)


@pytest.mark.parametrize("body", [b"", b'{"type":"no-such"}', b'{"type":"range","limit":0}', b"\xff", b"[" * 5_000])
def test_unreadable_request_is_answered_not_raised(body: bytes) -> None:
    async def scenario() -> None:
        world = virtual_world()
        server = Server(world, ready("n1"))
        service = ComponentService(FakeAuthority(world), server.store, server.feed, Keyring(world.disk, world.ids))
        assert msgspec.json.decode(await service.request(body), type=EndpointReply).failed == "unread"
        with pytest.raises(UnreadableRequest, match="use type orders or rows"):
            await anext(service.stream(body))

    run_virtually(scenario())
