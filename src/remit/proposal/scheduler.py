"""Scheduler process: leader lease, view, and proposal batches in flight.

The scheduling decisions are in cycle.py. Of several scheduler replicas one holds the lease and proposes.

All of them follow the store, so a new leader starts with a complete view. The leader proposes in batches. While one batch is
being committed, it prepares the next one on the assumption that the first succeeds; this keeps the authority busy, and a
refusal delays one replica, not the batch.

A scheduler that pauses, restarts or loses the lease is harmless: its claims carry its epoch and are refused, and after the
gap it starts again from its view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.lease_holder import LeaseCandidate, LeaseHold
from remit.law.lifecycle import SNAPSHOT_AGE_MS_MAX
from remit.model.claims import Actor, Role, Verdict
from remit.model.resources import Duration
from remit.observation.reflector import Follower
from remit.observation.scheduler_view import PARTS, View
from remit.proposal.cycle import Cycle
from remit.proposal.metrics import CoverageMark, SchedulerCounts, OnMark, ignore_mark
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, Score
from remit.proposal.placement.preemption_candidates import VictimRateLimit
from remit.proposal.proposals import Proposal
from remit.store.protocol import Store
from remit.world.interfaces import World

LEASE: Final = "scheduler"


class SchedulerTiming(NamedTuple):
    """Timing and batch sizes of a scheduler.

    `lease_ms` is the lease's duration. A watch without messages for `idle_ms` is restarted. A batch has up to `batch`
    replicas. Up to `ahead` batches are in flight, but another one is started only if at least `worth` replicas are pending.
    After a batch of n claims the next one starts n milliseconds later, at most `gather_ms`: replicas that arrive in a burst
    share a batch, which costs far less per replica, while a single arrival is not delayed.
    """

    lease_ms: int = 15_000
    idle_ms: int = 10_000
    batch: int = 1_000
    ahead: int = 2
    worth: int = 256
    gather_ms: int = 60


class Scheduler:
    """One scheduler replica. `store` is watched; `sure` serves the initial list with linearizable reads."""

    def __init__(
        self,
        store: Store,
        sure: Store,
        client: AuthorityClient,
        world: World,
        *,
        name: str,
        lease: str = LEASE,
        rhythm: SchedulerTiming = SchedulerTiming(),
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT_SCORES,
        pace: VictimRateLimit = VictimRateLimit(),
        failed: Callable[[RetriesExhausted], None] | None = None,
        view: View | None = None,
        tell: OnMark = ignore_mark,
        stopwatch_ns: Callable[[], int] | None = None,
    ) -> None:
        self.tally = SchedulerCounts()
        self._stopwatch_ns = stopwatch_ns or (lambda: world.clock.now_ms() * 1_000_000)
        self.view = View(world.clock) if view is None else view
        self.cycle: Cycle | None = None
        """The current cycle while this replica is the leader."""
        self._follower = Follower(store, sure, world, self.view, idle_ms=rhythm.idle_ms, parts=PARTS)
        self._client, self._world, self._name, self._rhythm = client, world, name, rhythm
        self._candidate = LeaseCandidate(client, world.clock, lease, Duration(rhythm.lease_ms))
        self._filters, self._scores, self._pace = tuple(filters), tuple(scores), pace
        self._failed, self._tell = failed, tell
        self._wake = self.view.subscribe()
        self._chance = world.chance.stream(f"scheduler {name}")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow(), name="follow")
            group.create_task(self.lead(), name="lead")

    async def follow(self) -> None:
        """Keeps the view up to date, without proposing anything."""
        await self._follower.follow()

    async def lead(self) -> None:
        """Acquires the lease, schedules while holding it, and starts over when it is lost. Never returns."""
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

    async def _acquire(self) -> LeaseHold | None:
        self._client.actor = Actor(self._name, Role.SCHEDULER)
        try:
            return await self._candidate.acquire()
        except RetriesExhausted as error:
            self._give_up(error)
            return None

    async def _serve(self, tenure: LeaseHold, whole: asyncio.TaskGroup) -> None:
        """Schedules for one term of the lease.

        Requests in flight at its end run in the outer group `whole`, so that they do not delay the next term; their results
        are ignored.
        """
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
        asking = InFlightProposals(self, cycle, tenure, whole)
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(tenure), name="renew")
                await self._act(cycle, tenure, asking)
                renewing.cancel()
            if asking.count:
                self._tell(CoverageMark.OVER)
        finally:
            self.cycle = None
            cycle.resign()

    async def _renew(self, tenure: LeaseHold) -> None:
        pause_ms = self._rhythm.lease_ms // 3
        while not tenure.is_lost:
            await self._world.clock.sleep_ms(pause_ms - self._chance.uniform_ms(pause_ms // 8))
            try:
                await tenure.renew(self._client, deadline_ms=pause_ms)
            except RetriesExhausted:
                continue
        self._wake.set()

    async def _act(self, cycle: Cycle, tenure: LeaseHold, asking: InFlightProposals) -> None:
        clock, rhythm, not_before_ms = self._world.clock, self._rhythm, 0
        while tenure.is_valid(now_ms := clock.now_ms()) and not cycle.over:
            if now_ms < not_before_ms and len(cycle.backlog) < rhythm.batch:
                await clock.sleep_ms(not_before_ms - now_ms)
                not_before_ms = 0
                continue
            self._wake.clear()
            cycle.hear(now_ms, self._client.authority_clock())
            may = self._has_room(cycle, asking) and self.view.sober and self.view.age_ms() < SNAPSHOT_AGE_MS_MAX
            if may:
                began_ns = self._stopwatch_ns()
                proposal = cycle.propose(now_ms, self._rhythm.batch)
                if proposal:
                    self.tally.proposed(proposal, (self._stopwatch_ns() - began_ns) / 1e9)
                    asking.begin(proposal)
                    not_before_ms = now_ms + min(rhythm.gather_ms, len(proposal.claims))
                    continue
            until_ms = tenure.valid_until_ms
            if may and (next_ms := cycle.next_ms()) is not None:
                until_ms = min(until_ms, next_ms)
            try:
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _has_room(self, cycle: Cycle, asking: InFlightProposals) -> bool:
        """Whether another batch may start. The first one always may.

        Another one must be worth its fixed cost: a few arrivals are placed together when the verdicts of the current batch
        are in.
        """
        return not asking.count or (asking.count < self._rhythm.ahead and len(cycle.backlog) >= self._rhythm.worth)

    def _give_up(self, error: RetriesExhausted) -> None:
        if self._failed is not None:
            self._failed(error)


class InFlightProposals:
    """The proposals in flight during one term."""

    def __init__(self, scheduler: Scheduler, cycle: Cycle, tenure: LeaseHold, group: asyncio.TaskGroup) -> None:
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
        """Returns the verdicts, retrying with the same operation ids as long as the outcome is unknown; None if nothing was
        applied.
        """
        client = self._scheduler._client
        try:
            return await client.submit_many(proposal.claims, evidence=proposal.evidence)
        except RetriesExhausted as error:
            lost, silent = error, error.outcome_unknown
        while True:
            self._scheduler._give_up(lost)
            if not silent:
                return None
            if not self._tenure.is_valid(self._scheduler._world.clock.now_ms()):
                return None  # the lease has ended, and with it all assumptions of this term
            self._scheduler._tell(CoverageMark.RESUMED)
            try:
                return await client.resume(lost.operations, submitted_ms=lost.submitted_ms)
            except RetriesExhausted as error:
                lost = error
