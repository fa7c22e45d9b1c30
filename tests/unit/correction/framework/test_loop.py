"""Does a loop look when it should, ask once, and stop where it must? One controller, a real authority, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, OutcomeUnknown
from remit.commitment.authority import Authority
from remit.correction.framework.actions import Action, ControllerPermissions, KeyTrigger, ReconcileResult, RequeueAfter
from remit.correction.framework.loop import CACHE_AGE_MS_MAX, Controller, ControllerLoop, LoopTiming, ReconcileTime
from remit.model.claims import (
    Accepted,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Code,
    Delete,
    Mark,
    Operation,
    RecordEvent,
    Refused,
    Role,
    SetCondition,
    Verdict,
)
from remit.model.kinds import Node, NodeHealth, Region
from remit.model.metadata import Condition, Metadata
from remit.model.objects import decode
from remit.model.records import Event
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import WatchCache
from remit.store.memory import MemoryStore
from remit.world.interfaces import World
from tests.properties.authority_world import HOUR, OPERATOR, node
from tests.unit.client.fake_authority import ForwardingEndpoint
from tests.unit.world.virtual_world import run_virtually, virtual_world

CADENCE = LoopTiming(heartbeat_ms=1_000)


class Wire(ForwardingEndpoint):
    """An endpoint that writes down what is asked, and loses answers when told."""

    def __init__(self, authority: Authority) -> None:
        self.target = self.authority = authority
        self.asked: list[Operation] = []
        self.answers: list[Verdict] = []
        self.lose = False
        self.answer_after_ms = 0
        self.statuses = 0

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        self.asked += operations
        verdicts = await self.authority.submit(operations)
        if self.lose:
            raise OutcomeUnknown("lost")
        if self.answer_after_ms:
            await self.authority.clock.sleep_ms(self.answer_after_ms)
        self.answers += verdicts
        return verdicts

    async def status(self) -> AuthorityStatus:
        self.statuses += 1
        return await self.authority.status()

    async def renew(self, actor: Actor, /) -> bool:
        return await self.authority.renew(actor)

    def claims(self, kind: type[Any]) -> list[Any]:
        return [one.claim for one in self.asked if isinstance(one.claim, kind)]


class Marker(Controller):
    """Every node should be ready. What else it wishes for, the test says."""

    permissions = ControllerPermissions(Role.NODES, claims=(Mark,), transitions=("evict", "doubt", "lose"))

    def __init__(self, board: WatchCache) -> None:
        super().__init__(board)
        self.looks: list[tuple[str, int]] = []
        self.more: Callable[[str], Iterable[ReconcileResult]] = lambda key: ()
        self.once = ""
        self.heard_of: list[tuple[str, Verdict | None]] = []

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[KeyTrigger]:
        return (key,) if key.startswith("node/") else ()

    def all_keys(self) -> Iterable[str]:
        return [key for key, _ in self.cache.of_kind("node/")]

    def reconcile(self, key: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        self.looks.append((key, times.now_ms))
        kept = self.cache.rows.get(key)
        if kept is None:
            return
        after = {NodeHealth.JOINING: NodeHealth.READY, NodeHealth.SUSPECT: NodeHealth.READY}
        if kept.obj.status.health in after:
            yield Action(Mark(kept.obj.metadata.name, kept.revision, NodeHealth.READY), self.once)
        yield from self.more(key)

    def on_verdict(self, key: str, deed: Action, verdict: Verdict | None) -> None:
        self.heard_of.append((key, verdict))


class Room:
    """An authority in its store, and loops over one board each."""

    def __init__(self, world: World, store: MemoryStore, authority: Authority, group: asyncio.TaskGroup) -> None:
        self.world, self.store, self.authority, self._group = world, store, authority, group
        self.failures: list[RetriesExhausted] = []
        self._count = 0

    def loop(self, *, frozen: bool = False) -> tuple[Marker, ControllerLoop, Wire, asyncio.Task[None]]:
        """`frozen`: its board is fed no more once it has looked."""
        self._count += 1
        wire, board = Wire(self.authority), WatchCache(self.world.clock)
        name = f"c{self._count}"
        client = AuthorityClient({"a": wire}, Actor(name, Role.NODES), self.world)
        marker = Marker(board)
        loop = ControllerLoop(marker, client, self.world, name=name, timing=CADENCE, on_failure=self.failures.append)
        follower = Reflector(self.store, self.store, self.world, board, idle_ms=CADENCE.watch_idle_ms)
        feeding = self._group.create_task(follower.run())
        if frozen:
            self._group.create_task(self._freeze(marker, feeding))
        return marker, loop, wire, self._group.create_task(loop.run())

    async def _freeze(self, marker: Marker, feeding: asyncio.Task[None]) -> None:
        while not marker.looks:
            await self.sleep(1)
        feeding.cancel()

    async def sleep(self, ms: int) -> None:
        await self.world.clock.sleep_ms(ms)

    async def ask(self, actor: Actor, *claims: AnyClaim) -> list[Verdict]:
        return await AuthorityClient({"a": self.authority}, actor, self.world).submit_many(claims)

    async def nodes(self, *names: str) -> None:
        await self.ask(OPERATOR, *(Apply(node(name)) for name in names))

    async def health(self, name: str) -> str:
        row = await self.store.get(f"node/{name}")
        assert row is not None
        found = decode(row.value)
        assert isinstance(found, Node)
        return found.status.health

    async def events(self) -> list[str]:
        page = await self.store.range("event/", limit=100)
        found = [decode(row.value) for row in page.rows]
        return [event.spec.reason for event in found if isinstance(event, Event)]


def room(test: Callable[[Room], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def tell() -> None:
        async def whole() -> None:
            world, store = virtual_world(), MemoryStore()
            authority = await Authority.take_over(store, scope="r1", holder="a", clock=world.clock, ids=world.ids)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(authority.run(heartbeat_ms=1_000))]
                made = Room(world, store, authority, group)
                await made.ask(OPERATOR, Apply(Region(metadata=Metadata(name="r1"))))
                await test(made)
                for task in (*tasks, *group._tasks):
                    task.cancel()

        run_virtually(whole())

    tell.__name__, tell.__doc__, tell.__module__ = test.__name__, test.__doc__, test.__module__
    return tell


@room
async def test_it_reacts_to_what_changes__and_asks_once(r: Room) -> None:
    _, _, wire, _ = r.loop()
    await r.sleep(500)
    await r.nodes("n1", "n2")
    await r.sleep(300)
    assert [await r.health(name) for name in ("n1", "n2")] == ["ready", "ready"]
    assert len(wire.claims(Mark)) == 2


@room
async def test_what_comes_alone_is_looked_at_at_once(r: Room) -> None:
    marker, _, _, _ = r.loop()
    await r.sleep(500)
    asked_ms = r.world.clock.now_ms()
    await r.nodes("n1")
    await r.sleep(300)
    assert [at_ms - asked_ms for key, at_ms in marker.looks][:1] == [0]


@room
async def test_an_answer_that_comes_after_the_board_has_shown_the_deed_is_followed_by_a_look(r: Room) -> None:
    """L6: what is next for a key is not left to the next sweep."""
    marker, _, wire, _ = r.loop()
    await r.sleep(500)
    wire.answer_after_ms = 50
    await r.nodes("n1")
    await r.sleep(300)
    assert await r.health("n1") == "ready"
    assert len(marker.looks) == 2, "to see what came of it"


@room
async def test_it_says_on_what_it_decided(r: Room) -> None:
    """S22."""
    _, _, wire, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    (asked,) = (one for one in wire.asked if isinstance(one.claim, Mark))
    assert asked.evidence.revision > 0
    assert (asked.actor.role, asked.actor.lease, asked.actor.epoch) == (Role.NODES, "node-lifecycle", 1)


@room
async def test_it_sweeps_now_and_then_whatever_was_heard(r: Room) -> None:
    """F05: a watch that has lost something is made good."""
    marker, loop, _, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    loop.cache._listeners.remove(loop)
    marker.looks.clear()
    await r.sleep(4 * CADENCE.resync_ms)
    assert 4 <= len(marker.looks) <= 8
    gaps = {later - sooner for (_, sooner), (_, later) in zip(marker.looks, marker.looks[1:], strict=False)}
    assert all(CADENCE.resync_ms * 3 // 4 <= gap <= CADENCE.resync_ms + 100 for gap in gaps)
    assert len(gaps) > 1, "with jitter: copies that began together do not sweep together"


@room
async def test_idle_it_asks_for_nothing(r: Room) -> None:
    """L10."""
    _, _, wire, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    before = len(wire.asked)
    await r.sleep(600_000)
    assert len(wire.asked) == before


@room
async def test_one_of_several_copies_acts__the_others_wait_without_a_commit__and_one_takes_over(r: Room) -> None:
    """L8 F33."""
    first, second = r.loop(), r.loop()
    await r.sleep(1_000)
    await r.nodes("n1")
    await r.sleep(200_000)
    acquires = len(first[2].claims(Acquire)) + len(second[2].claims(Acquire))
    assert acquires == 2, "each asked once, and was told"
    acting, waiting = (first, second) if first[0].looks else (second, first)
    assert waiting[0].looks == []
    acting[3].cancel()
    await r.sleep(2 * CADENCE.timing.lease_ms + 5_000)
    await r.nodes("n2")
    await r.sleep(1_000)
    assert await r.health("n2") == "ready"
    assert waiting[0].looks


@room
async def test_a_deed_outside_the_remit_is_not_asked__and_told_once(r: Room) -> None:
    marker, _, wire, _ = r.loop()
    marker.more = lambda key: (Action(Delete("Node", "n1")),)
    await r.nodes("n1")
    await r.sleep(3 * CADENCE.resync_ms)
    assert wire.claims(Delete) == []
    assert await r.events() == ["OutsideRemit"]


@room
async def test_what_is_undone_twice_is_told__and_not_done_a_third_time(r: Room) -> None:
    """Loop detection: somebody else calls the node suspect each time."""
    marker, _, wire, _ = r.loop()
    marker.once = "mark n1"
    await r.nodes("n1")
    for _ in range(6):
        await r.sleep(1_000)
        row = await r.store.get("node/n1")
        assert row is not None
        holder = wire.asked[-1].actor
        await r.ask(replace(holder, lease="node-lifecycle"), Mark("n1", row.revision, NodeHealth.SUSPECT))
    await r.sleep(2 * CADENCE.resync_ms)
    assert len(wire.claims(Mark)) == 2
    assert await r.events() == ["Fought"]
    assert await r.health("n1") == "suspect"
    await r.sleep(CADENCE.undo_hold_ms)
    assert await r.health("n1") == "ready", "after a long pause it is tried again"


@room
async def test_a_condition_that_stands_is_not_said_again(r: Room) -> None:
    marker, _, wire, _ = r.loop()

    def speak(key: str) -> Iterable[ReconcileResult]:
        condition = Condition(type="Fine", status="True", reason="Why", last_transition=r.world.clock.wall())
        return (Action(SetCondition("Node", "n1", condition)),)

    marker.more = speak
    await r.nodes("n1")
    await r.sleep(5 * CADENCE.resync_ms)
    assert len(wire.claims(SetCondition)) == 1


@room
async def test_time_itself_is_news_if_a_controller_says_so(r: Room) -> None:
    marker, _, _, _ = r.loop()
    marker.more = lambda key: (RequeueAfter(7_000),)
    await r.nodes("n1")
    await r.sleep(1_000)
    (_, at_ms) = marker.looks[-1]
    await r.sleep(10_000)
    assert (marker.looks[-1][1] - at_ms) in range(6_900, 7_100)


@room
async def test_what_is_refused_is_asked_ever_more_slowly__and_at_last_told(r: Room) -> None:
    """F32: one key that never succeeds costs no more than a claim now and then."""
    marker, _, wire, _ = r.loop()
    marker.more = lambda key: (Action(Mark("n1", 1, NodeHealth.LOST)),)
    await r.nodes("n1")
    await r.sleep(CADENCE.backoff.stuck_after_ms + 2 * CADENCE.backoff.slow_ms)
    assert "Stuck" in await r.events()
    before = len(wire.claims(Mark))
    assert before < 120
    await r.sleep(10 * CADENCE.backoff.slow_ms)
    assert len(wire.claims(Mark)) - before <= 20
    assert any(
        isinstance(verdict, Refused) and verdict.code is not Code.STALE_EPOCH for _, verdict in marker.heard_of if verdict
    )


@room
async def test_after_silence_the_same_operations_are_asked_again_under_their_ids(r: Room) -> None:
    """F01: redelivery; the deed is done once."""
    _, _, wire, _ = r.loop()
    await r.sleep(500)
    wire.lose = True
    await r.nodes("n1")
    await r.sleep(2_000)
    wire.lose = False
    await r.sleep(30_000)
    marks = [one for one in wire.asked if isinstance(one.claim, Mark)]
    assert len(marks) > 1
    assert len({one.id for one in marks}) == 1
    assert await r.health("n1") == "ready"
    assert isinstance(wire.answers[-1], Accepted)


@room
async def test_a_board_that_is_too_old_is_not_acted_on(r: Room) -> None:
    """F04."""
    await r.nodes("n1")
    marker, _, _, _ = r.loop(frozen=True)
    await r.sleep(500)
    assert marker.looks
    marker.looks.clear()
    await r.sleep(CACHE_AGE_MS_MAX)
    before = len(marker.looks)
    await r.sleep(5 * CADENCE.resync_ms)
    assert len(marker.looks) == before


@room
async def test_a_copy_that_was_deposed_asks_for_nothing_more_at_its_epoch(r: Room) -> None:
    """F15: the epoch fences whatever comes late."""
    marker, _, wire, _ = r.loop()
    await r.nodes("n1")
    await r.sleep(500)
    usurper = Actor(wire.asked[-1].actor.name, Role.NODES)
    await r.ask(usurper, Acquire("node-lifecycle", HOUR))
    before = len(wire.asked)
    await r.nodes("n2")
    await r.sleep(1_000)
    late = [one for one in wire.asked[before:] if isinstance(one.claim, Mark) and one.actor.epoch == 1]
    assert len(late) <= 1
    refused = [verdict for _, verdict in marker.heard_of if isinstance(verdict, Refused)]
    assert all(one.code is Code.STALE_EPOCH for one in refused)


@room
async def test_events_of_a_loop_have_names_of_their_own(r: Room) -> None:
    """A second copy, or a second term, does not write over what the first has told."""
    marker, _, wire, _ = r.loop()
    marker.more = lambda key: (Action(Delete("Node", "n1")),)
    await r.nodes("n1")
    await r.sleep(500)
    (note,) = wire.claims(RecordEvent)
    assert note.name == "node-lifecycle-1-1"
    assert note.event.source == Role.NODES
