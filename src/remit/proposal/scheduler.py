"""Scheduler process: lease, view, batches in flight.

One of several copies holds the lease and acts; the mind is in cycle.py.

All of them follow the store, so that whoever comes to hold the lease has seen everything. The holder proposes in batches,
and while one is being committed it prepares the next on what it assumes: the authority is never left without work, and a
refusal costs one replica its turn, not the batch.

A copy that pauses, restarts or is deposed does no harm: its claims carry its epoch, and after a break it begins from its view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from remit.client.authority_client import Client, NoAnswer
from remit.client.lease_holder import Candidate, Tenure
from remit.law.lifecycle import SNAPSHOT_FRESH_MS
from remit.model.claims import Actor, Role, Verdict
from remit.model.resources import Duration
from remit.observation.reflector import Follower
from remit.observation.scheduler_view import PARTS, View
from remit.proposal.cycle import Cycle
from remit.proposal.metrics import Path, SchedulerCounts, Tell, untold
from remit.proposal.placement.builtin_plugins import DEFAULT
from remit.proposal.placement.plugins import Filter, Score
from remit.proposal.placement.preemption_candidates import Pace
from remit.proposal.proposals import Proposal
from remit.store.protocol import Store
from remit.world.interfaces import World

LEASE: Final = "scheduler"


class Rhythm(NamedTuple):
    """How long the lease lasts, after how much silence the watch is dead, how many replicas travel together, and how many
    batches may be under way: another beside one, if so many wait for it. After a batch the next is begun a millisecond later
    for each in it, up to `gather_ms`: those who come in a flood travel together, at a fraction of the cost, and who comes alone
    waits for nobody.
    """

    lease_ms: int = 15_000
    idle_ms: int = 10_000
    batch: int = 1_000
    ahead: int = 2
    worth: int = 256
    gather_ms: int = 60


class Scheduler:
    """One copy. `store` is followed; `sure` answers the first list, linearizably. `run` goes on for ever."""

    def __init__(
        self,
        store: Store,
        sure: Store,
        client: Client,
        world: World,
        *,
        name: str,
        lease: str = LEASE,
        rhythm: Rhythm = Rhythm(),
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT,
        pace: Pace = Pace(),
        failed: Callable[[NoAnswer], None] | None = None,
        view: View | None = None,
        tell: Tell = untold,
        stopwatch_ns: Callable[[], int] | None = None,
    ) -> None:
        self.tally = SchedulerCounts()
        self._stopwatch_ns = stopwatch_ns or (lambda: world.clock.now_ms() * 1_000_000)
        self.view = View(world.clock) if view is None else view
        self.cycle: Cycle | None = None
        """While it leads."""
        self._follower = Follower(store, sure, world, self.view, idle_ms=rhythm.idle_ms, parts=PARTS)
        self._client, self._world, self._name, self._rhythm = client, world, name, rhythm
        self._candidate = Candidate(client, world.clock, lease, Duration(rhythm.lease_ms))
        self._filters, self._scores, self._pace = tuple(filters), tuple(scores), pace
        self._failed, self._tell = failed, tell
        self._wake = self.view.subscribe()
        self._chance = world.chance.stream(f"scheduler {name}")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow(), name="follow")
            group.create_task(self.lead(), name="lead")

    async def follow(self) -> None:
        """See everything, for ever; whoever does only this proposes nothing."""
        await self._follower.follow()

    async def lead(self) -> None:
        """For ever: become the holder of the lease, act while that lasts, and begin anew."""
        async with asyncio.TaskGroup() as group:
            await self._lead(group)

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        while True:
            while not self.view.sober:
                self._wake.clear()
                await self._wake.wait()
            tenure = await self._acquire()
            if tenure is None:
                pause_ms = self._rhythm.lease_ms // 4
                await self._world.clock.sleep_ms(pause_ms + self._chance.uniform_ms(pause_ms))
                continue
            await self._serve(tenure, group)

    async def _acquire(self) -> Tenure | None:
        self._client.actor = Actor(self._name, Role.SCHEDULER)
        try:
            return await self._candidate.acquire()
        except NoAnswer as error:
            self._give_up(error)
            return None

    async def _serve(self, tenure: Tenure, whole: asyncio.TaskGroup) -> None:
        """One term. What it asks may be answered after its end: that teaches nobody, and holds up nobody."""
        self._client.actor = tenure.actor
        cycle = self.cycle = Cycle(
            self.view,
            self._chance.uniform_ms,
            f"{self._name}-{tenure.actor.epoch}",
            filters=self._filters,
            scores=self._scores,
            pace=self._pace,
            tell=self._tell,
        )
        asking = Asking(self, cycle, tenure, whole)
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(tenure), name="renew")
                await self._act(cycle, tenure, asking)
                renewing.cancel()
            if asking.count:
                self._tell(Path.OVER)
        finally:
            self.cycle = None
            cycle.resign()

    async def _renew(self, tenure: Tenure) -> None:
        pause_ms = self._rhythm.lease_ms // 3
        while not tenure.lost:
            await self._world.clock.sleep_ms(pause_ms - self._chance.uniform_ms(pause_ms // 8))
            try:
                await tenure.renew(self._client, deadline_ms=pause_ms)
            except NoAnswer:
                continue
        self._wake.set()

    async def _act(self, cycle: Cycle, tenure: Tenure, asking: Asking) -> None:
        clock, rhythm, not_before_ms = self._world.clock, self._rhythm, 0
        while tenure.may_act(now_ms := clock.now_ms()) and not cycle.over:
            if now_ms < not_before_ms and len(cycle.backlog) < rhythm.batch:
                await clock.sleep_ms(not_before_ms - now_ms)
                not_before_ms = 0
                continue
            self._wake.clear()
            cycle.hear(now_ms, self._client.authority_ms())
            may = self._has_room(cycle, asking) and self.view.sober and self.view.age_ms() < SNAPSHOT_FRESH_MS
            if may:
                began_ns = self._stopwatch_ns()
                proposal = cycle.propose(now_ms, self._rhythm.batch)
                if proposal:
                    self.tally.proposed(proposal, (self._stopwatch_ns() - began_ns) / 1e9)
                    asking.begin(proposal)
                    not_before_ms = now_ms + min(rhythm.gather_ms, len(proposal.claims))
                    continue
            until_ms = tenure.held_until_ms
            if may and (next_ms := cycle.next_ms()) is not None:
                until_ms = min(until_ms, next_ms)
            try:
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _has_room(self, cycle: Cycle, asking: Asking) -> bool:
        """One batch may always be under way. Another only if it is worth it: few who come meanwhile are placed together, when
        the answer is there, at hardly more than the cost of one.
        """
        return not asking.count or (asking.count < self._rhythm.ahead and len(cycle.backlog) >= self._rhythm.worth)

    def _give_up(self, error: NoAnswer) -> None:
        if self._failed is not None:
            self._failed(error)


class Asking:
    """The proposals under way in one term."""

    def __init__(self, scheduler: Scheduler, cycle: Cycle, tenure: Tenure, group: asyncio.TaskGroup) -> None:
        self._scheduler, self._cycle, self._tenure, self._group = scheduler, cycle, tenure, group
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._born = 0

    @property
    def count(self) -> int:
        return len(self._tasks)

    def begin(self, proposal: Proposal) -> None:
        self._born += 1
        task = self._group.create_task(self._ask(proposal), name=f"ask {self._born}")
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._scheduler._wake.set()

    async def _ask(self, proposal: Proposal) -> None:
        clock = self._scheduler._world.clock
        verdicts = await self._answered(proposal)
        self._scheduler.tally.answered(proposal, verdicts)
        if verdicts is None:
            self._cycle.unanswered(proposal, clock.now_ms())
        else:
            self._cycle.learn(proposal, verdicts, clock.now_ms())

    async def _answered(self, proposal: Proposal) -> list[Verdict] | None:
        """The verdicts, however often it takes to ask for them under the same ids; None if nothing of it has happened."""
        client = self._scheduler._client
        try:
            return await client.ask_many(proposal.claims, evidence=proposal.evidence)
        except NoAnswer as error:
            lost, silent = error, error.silent
        while True:
            self._scheduler._give_up(lost)
            if not silent:
                return None
            if not self._tenure.may_act(self._scheduler._world.clock.now_ms()):
                return None  # the term ends, and what was assumed with it
            self._scheduler._tell(Path.RESUMED)
            try:
                return await client.resume(lost.operations, asked_ms=lost.asked_ms)
            except NoAnswer as error:
                lost = error
