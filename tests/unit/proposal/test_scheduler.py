"""Does one of several copies schedule, and harm nobody when it is slow, cut off, restarted or deposed? In virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, NotLeader, OutcomeUnknown
from remit.commitment.authority import Authority
from remit.model.claims import Acquire, Actor, Apply, Bind, Mark, Operation, Role, Spawn, Verdict
from remit.model.kinds import NodeHealth
from remit.model.objects import AnyObject
from remit.proposal.scheduler import Scheduler, SchedulerTiming
from remit.store.memory import MemoryStore
from remit.world.interfaces import World
from tests.properties.authority_world import HOUR, OPERATOR, USER, node, tenant, workload
from tests.unit.client.fake_authority import ForwardingEndpoint
from tests.unit.world.virtual_world import run_virtually, virtual_world


class Wire(ForwardingEndpoint):
    """An endpoint that fails when told: `lose` an answer, `turn` everybody away, or (`away`) all but renewals."""

    def __init__(self, authority: Authority) -> None:
        self.target = self.authority = authority
        self.mode = "pass"
        self.asked: list[Operation] = []

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        if self.mode in ("turn", "away"):
            raise NotLeader()
        verdicts = await self.authority.submit(operations)
        self.asked += operations
        if self.mode == "lose":
            raise OutcomeUnknown("lost")
        return verdicts

    async def status(self) -> AuthorityStatus:
        return await self.authority.status()

    async def renew(self, actor: Actor, /) -> bool:
        if self.mode == "turn":
            raise OutcomeUnknown("cut")
        return await self.authority.renew(actor)


class Town:
    """An authority in its store, furnished, and as many schedulers as are wanted."""

    def __init__(self, world: World, store: MemoryStore, authority: Authority, group: asyncio.TaskGroup) -> None:
        self.world, self.store, self.authority, self._group = world, store, authority, group
        self.wires: list[Wire] = []
        self.failures: list[RetriesExhausted] = []
        self._count = 0

    async def ask(self, actor: Actor, *claims: Any) -> list[Verdict]:
        client = AuthorityClient({"a": self.authority}, actor, self.world)
        return await client.submit_many(claims)

    def scheduler(self) -> tuple[Scheduler, Wire, asyncio.Task[None]]:
        self._count += 1
        wire = Wire(self.authority)
        name = f"s{self._count}"
        client = AuthorityClient({"a": wire}, Actor(name, Role.SCHEDULER), self.world)
        rhythm = SchedulerTiming(lease_ms=3_000, idle_ms=2_000, batch_max=10)
        made = Scheduler(self.store, self.store, client, self.world, name=name, timing=rhythm, on_failure=self.failures.append)
        return made, wire, self._group.create_task(made.run())

    async def want(self, name: str, count: int, cpu: str = "1") -> None:
        await self.ask(USER, Apply(workload(name, cpu, count)))
        holder = Actor("w", Role.WORKLOADS, "workloads", 1)
        await self.ask(holder, Spawn("t1", name, 1, 0, count))

    async def phases(self) -> dict[str, str]:
        page = await self.store.range("replica/", limit=1_000)
        found = [(row.key, json.loads(row.value)) for row in page.rows]
        return {key.rpartition("/")[2]: row.get("status", {}).get("phase", "pending") for key, row in found}

    async def bound_within(self, ms: int, count: int) -> None:
        until_ms = self.world.clock.now_ms() + ms
        while list((await self.phases()).values()).count("bound") < count:
            assert self.world.clock.now_ms() < until_ms, await self.phases()
            await self.world.clock.sleep_ms(50)


def town(test: Callable[[Town], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def tell() -> None:
        async def whole() -> None:
            world, store = virtual_world(), MemoryStore()
            authority = await Authority.take_over(store, scope="r1", holder="a", clock=world.clock, ids=world.ids)
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(authority.run())]
                made = Town(world, store, authority, group)
                await furnish(made)
                await test(made)
                for task in (*running, *group._tasks):
                    task.cancel()

        run_virtually(whole())

    tell.__name__, tell.__doc__, tell.__module__ = test.__name__, test.__doc__, test.__module__
    return tell


async def furnish(t: Town) -> None:
    for lease, role in (("workloads", Role.WORKLOADS), ("node-lifecycle", Role.NODES)):
        await t.ask(Actor(lease[0], role), Acquire(lease, HOUR))
    things: list[AnyObject] = [tenant("t1", "100"), node("n1", "16"), node("n2", "16")]
    await t.ask(OPERATOR, *(Apply(thing) for thing in things))
    for name in ("n1", "n2"):
        row = await t.store.get(f"node/{name}")
        assert row is not None
        await t.ask(Actor("n", Role.NODES, "node-lifecycle", 1), Mark(name, row.revision, NodeHealth.READY))


@town
async def test_work_is_bound_soon_after_it_comes(t: Town) -> None:
    """L1."""
    t.scheduler()
    await t.want("a", 25)
    await t.bound_within(10_000, 25)


@town
async def test_of_two_copies_one_acts_and_the_other_takes_over_when_it_stops(t: Town) -> None:
    """L8."""
    (first, wire, task), (second, other, _) = t.scheduler(), t.scheduler()
    await t.want("a", 5)
    await t.bound_within(10_000, 5)
    leads = first if first.cycle is not None else second
    assert (first.cycle is None) != (second.cycle is None)
    if leads is second:
        other.mode = "turn"
    else:
        task.cancel()
    await t.want("b", 5)
    await t.bound_within(30_000, 10)
    assert not [op for one in (wire, other) for op in one.asked if isinstance(op.claim, Bind) and op.actor.epoch == 0]


@town
async def test_answers_are_lost_for_a_while__nothing_is_asked_under_a_second_id(t: Town) -> None:
    """F01. What was silent is asked again as it was, until it is known."""
    _, wire, _ = t.scheduler()
    await t.want("a", 3)
    await t.bound_within(10_000, 3)
    wire.mode = "lose"
    await t.want("b", 8)
    await t.bound_within(10_000, 11)
    while not t.failures:
        await t.world.clock.sleep_ms(10)
    wire.mode = "away"  # not silent any more; but what was, may have happened
    await t.world.clock.sleep_ms(25_000)
    wire.mode = "pass"
    await t.world.clock.sleep_ms(10_000)
    ids: dict[tuple[str, int], set[str]] = {}
    for op in wire.asked:
        if isinstance(op.claim, Bind):
            ids.setdefault((op.claim.replica, op.claim.at), set()).add(op.id)
    assert all(len(found) == 1 for found in ids.values()), ids


@town
async def test_deposed_while_it_is_cut_off__it_stops_by_itself_and_leaves_no_phantom(t: Town) -> None:
    """F16."""
    made, wire, _ = t.scheduler()
    await t.want("a", 3)
    await t.bound_within(10_000, 3)
    wire.mode = "turn"
    await t.want("b", 3)
    await t.world.clock.sleep_ms(6_000)
    assert made.cycle is None
    assert not made.view.assumed
    wire.mode = "pass"
    await t.bound_within(20_000, 6)


def hears(made: Scheduler) -> list[int]:
    """When the cycle in office hears, from now on."""
    cycle = made.cycle
    assert cycle is not None
    heard, hear = list[int](), cycle.on_changes

    def noted(now_ms: int, authority: Any) -> None:
        heard.append(now_ms)
        hear(now_ms, authority)

    cycle.on_changes = noted  # type: ignore[method-assign]
    return heard


@town
async def test_a_wait_that_is_due_does_not_make_it_spin_while_its_view_is_in_doubt(t: Town) -> None:
    made, _, _ = t.scheduler()
    await t.want("huge", 1, "99")
    await t.world.clock.sleep_ms(10_000)
    heard = hears(made)
    made.view.set_restore_marker(b"another")
    made.view.set_restore_marker = lambda marker: None  # type: ignore[method-assign]  # and nobody allays it
    await t.world.clock.sleep_ms(100_000)
    assert len(heard) < 2_000


@town
async def test_a_wait_that_is_due_does_not_make_it_spin_while_its_view_is_too_old(t: Town) -> None:
    """It keeps its lease, but sees nothing new; what is due can only be tried on what it has seen."""
    made, _, _ = t.scheduler()
    await t.want("huge", 1, "99")
    await t.world.clock.sleep_ms(10_000)
    heard = hears(made)
    made.view.apply = lambda event: None  # type: ignore[method-assign]
    made.view.advance = lambda head, revision: None  # type: ignore[method-assign]
    await t.world.clock.sleep_ms(200_000)
    assert made.view.age_ms() > 120_000
    assert 0 < len(heard) < 4_000
