"""Scheduler with several copies in virtual time: one acts, and slow, cut off, restarted or deposed ones do no harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, NotLeader, OutcomeUnknown
from remit.commitment.authority import Authority
from remit.model.claims import Acquire, Actor, Apply, Bind, Mark, Operation, Spawn, Verdict
from remit.model.kinds import NodeHealth
from remit.model.kinds.registry import AnyObject
from remit.model.roles import Role
from remit.proposal.scheduler import Scheduler, SchedulerTiming
from remit.store.memory import MemoryStore
from remit.world.interfaces import World
from tests.properties.authority_world import HOUR, OPERATOR, USER, node, tenant, workload
from tests.unit.client.fake_authority import ForwardingEndpoint
from tests.unit.world.virtual_world import run_virtually, virtual_world


class FaultyEndpoint(ForwardingEndpoint):
    """An endpoint that fails on request: `lose` the answer, `turn` all calls away, or (`away`) all but renewals."""

    def __init__(self, authority: Authority) -> None:
        self.target = self.authority = authority
        self.mode = "pass"
        self.submitted: list[Operation] = []

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        if self.mode in ("turn", "away"):
            raise NotLeader()
        verdicts = await self.authority.submit(operations)
        self.submitted += operations
        if self.mode == "lose":
            raise OutcomeUnknown("lost")
        return verdicts

    async def status(self) -> AuthorityStatus:
        return await self.authority.status()

    async def renew(self, actor: Actor, /) -> bool:
        if self.mode == "turn":
            raise OutcomeUnknown("cut")
        return await self.authority.renew(actor)


class SchedulerWorld:
    """An authority with its store, prepared objects, and any number of schedulers."""

    def __init__(self, world: World, store: MemoryStore, authority: Authority, group: asyncio.TaskGroup) -> None:
        self.world, self.store, self.authority, self._group = world, store, authority, group
        self.wires: list[FaultyEndpoint] = []
        self.failures: list[RetriesExhausted] = []
        self._count = 0

    async def ask(self, actor: Actor, *claims: Any) -> list[Verdict]:
        client = AuthorityClient({"a": self.authority}, actor, self.world)
        return await client.submit_many(claims)

    def scheduler(self) -> tuple[Scheduler, FaultyEndpoint, asyncio.Task[None]]:
        self._count += 1
        wire = FaultyEndpoint(self.authority)
        name = f"s{self._count}"
        client = AuthorityClient({"a": wire}, Actor(name, Role.SCHEDULER), self.world)
        timing = SchedulerTiming(lease_ms=3_000, idle_ms=2_000, batch_max=10)
        made = Scheduler(self.store, self.store, client, self.world, name=name, timing=timing, on_failure=self.failures.append)
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


def scheduler_test(test: Callable[[SchedulerWorld], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run_test() -> None:
        async def scenario() -> None:
            world, store = virtual_world(), MemoryStore()
            authority = await Authority.take_over(store, scope="r1", holder="a", clock=world.clock, ids=world.ids)
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(authority.run())]
                made = SchedulerWorld(world, store, authority, group)
                await set_up(made)
                await test(made)
                for task in (*running, *group._tasks):
                    task.cancel()

        run_virtually(scenario())

    run_test.__name__, run_test.__doc__, run_test.__module__ = test.__name__, test.__doc__, test.__module__
    return run_test


async def set_up(t: SchedulerWorld) -> None:
    for lease, role in (("workloads", Role.WORKLOADS), ("node-lifecycle", Role.NODES)):
        await t.ask(Actor(lease[0], role), Acquire(lease, HOUR))
    objects: list[AnyObject] = [tenant("t1", "100"), node("n1", "16"), node("n2", "16")]
    await t.ask(OPERATOR, *(Apply(obj) for obj in objects))
    for name in ("n1", "n2"):
        row = await t.store.get(f"node/{name}")
        assert row is not None
        await t.ask(Actor("n", Role.NODES, "node-lifecycle", 1), Mark(name, row.revision, NodeHealth.READY))


@scheduler_test
async def test_new_work_is_bound_within_seconds(t: SchedulerWorld) -> None:
    """L1."""
    t.scheduler()
    await t.want("a", 25)
    await t.bound_within(10_000, 25)


@scheduler_test
async def test_one_of_two_copies_acts_and_other_takes_over(t: SchedulerWorld) -> None:
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
    assert not [op for one in (wire, other) for op in one.submitted if isinstance(op.claim, Bind) and op.actor.epoch == 0]


@scheduler_test
async def test_lost_answers_are_retried_under_same_operation_id(t: SchedulerWorld) -> None:
    """F01. A claim without an answer is submitted again unchanged until its outcome is known."""
    _, wire, _ = t.scheduler()
    await t.want("a", 3)
    await t.bound_within(10_000, 3)
    wire.mode = "lose"
    await t.want("b", 8)
    await t.bound_within(10_000, 11)
    while not t.failures:
        await t.world.clock.sleep_ms(10)
    wire.mode = "away"  # no longer silent, but earlier claims may have been applied
    await t.world.clock.sleep_ms(25_000)
    wire.mode = "pass"
    await t.world.clock.sleep_ms(10_000)
    ids: dict[tuple[str, int], set[str]] = {}
    for op in wire.submitted:
        if isinstance(op.claim, Bind):
            ids.setdefault((op.claim.replica, op.claim.at), set()).add(op.id)
    assert all(len(found) == 1 for found in ids.values()), ids


@scheduler_test
async def test_cut_off_scheduler_steps_down_without_leaving_assumptions(t: SchedulerWorld) -> None:
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


def record_notifications(made: Scheduler) -> list[int]:
    """Times at which the current cycle is notified, from now on."""
    cycle = made.cycle
    assert cycle is not None
    times, original = list[int](), cycle.on_changes

    def recorded(now_ms: int, authority: Any) -> None:
        times.append(now_ms)
        original(now_ms, authority)

    cycle.on_changes = recorded  # type: ignore[method-assign]
    return times


@scheduler_test
async def test_due_wait_does_not_spin_while_view_is_unconfirmed(t: SchedulerWorld) -> None:
    made, _, _ = t.scheduler()
    await t.want("huge", 1, "99")
    await t.world.clock.sleep_ms(10_000)
    times = record_notifications(made)
    made.view.set_restore_marker(b"another")
    made.view.set_restore_marker = lambda marker: None  # type: ignore[method-assign]  # and the marker is never written
    await t.world.clock.sleep_ms(100_000)
    assert len(times) < 2_000


@scheduler_test
async def test_due_wait_does_not_spin_while_view_is_stale(t: SchedulerWorld) -> None:
    """It keeps its lease, but sees nothing new; due waits can only be tried on the view it has."""
    made, _, _ = t.scheduler()
    await t.want("huge", 1, "99")
    await t.world.clock.sleep_ms(10_000)
    times = record_notifications(made)
    made.view.apply = lambda event: None  # type: ignore[method-assign]
    made.view.advance = lambda head, revision: None  # type: ignore[method-assign]
    await t.world.clock.sleep_ms(200_000)
    assert made.view.age_ms() > 120_000
    assert 0 < len(times) < 4_000
