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
from remit.model.claims import Actor, Verdict
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.observation.reflector import Reflector
from remit.observation.scheduler_view import LIST_RANGES, SchedulerView
from remit.proposal.cycle import Cycle
from remit.proposal.metrics import CoverageMark, OnMark, SchedulerCounts, ignore_mark
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, Score
from remit.proposal.placement.preemption_candidates import VictimRateLimit
from remit.proposal.proposals import Proposal
from remit.store.protocol import Store
from remit.world.interfaces import World

LEASE: Final = "scheduler"


class SchedulerTiming(NamedTuple):
    """Timing and batch sizes of a scheduler.

    `lease_ms` is the lease's duration. A watch without messages for `idle_ms` is restarted. A batch has up to `batch_max`
    replicas. Up to `batches_in_flight_max` batches are in flight, but another one is started only if at least
    `second_batch_min` replicas are pending. After a batch of n claims the next one starts n milliseconds later, at most
    `batch_delay_ms_max`: replicas that arrive in a burst share a batch, which costs far less per replica, while a single
    arrival is not delayed.
    """

    lease_ms: int = 15_000
    idle_ms: int = 10_000
    batch_max: int = 1_000
    batches_in_flight_max: int = 2
    second_batch_min: int = 256
    batch_delay_ms_max: int = 60


class Scheduler:
    """One scheduler replica. `store` is watched; `linearizable_store` serves the initial list with linearizable reads."""

    def __init__(
        self,
        store: Store,
        linearizable_store: Store,
        client: AuthorityClient,
        world: World,
        *,
        name: str,
        lease: str = LEASE,
        timing: SchedulerTiming = SchedulerTiming(),
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT_SCORES,
        victim_rate: VictimRateLimit = VictimRateLimit(),
        on_failure: Callable[[RetriesExhausted], None] | None = None,
        view: SchedulerView | None = None,
        on_mark: OnMark = ignore_mark,
        stopwatch_ns: Callable[[], int] | None = None,
    ) -> None:
        self.counts = SchedulerCounts()
        self._stopwatch_ns = stopwatch_ns or (lambda: world.clock.now_ms() * 1_000_000)
        self.view = SchedulerView(world.clock) if view is None else view
        self.cycle: Cycle | None = None
        """The current cycle while this replica is the leader."""
        self._reflector = Reflector(store, linearizable_store, world, self.view, idle_ms=timing.idle_ms, ranges=LIST_RANGES)
        self._client, self._world, self._name, self._timing = client, world, name, timing
        self._candidate = LeaseCandidate(client, world.clock, lease, Duration(timing.lease_ms))
        self._filters, self._scores, self._victim_rate = tuple(filters), tuple(scores), victim_rate
        self._on_failure, self._on_mark = on_failure, on_mark
        self._wake = self.view.subscribe()
        self._rng = world.randomness.stream(f"scheduler {name}")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow(), name="follow")
            group.create_task(self.lead(), name="lead")

    async def follow(self) -> None:
        """Keeps the view up to date, without proposing anything."""
        await self._reflector.run()

    async def lead(self) -> None:
        """Acquires the lease, schedules while holding it, and starts over when it is lost. Never returns."""
        async with asyncio.TaskGroup() as group:
            await self._lead(group)

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        while True:
            while not self.view.is_current:
                self._wake.clear()
                await self._wake.wait()
            lease = await self._acquire()
            if lease is None:
                pause_ms = self._timing.lease_ms // 4
                await self._world.clock.sleep_ms(pause_ms + self._rng.jitter_ms(pause_ms))
                continue
            await self._serve_term(lease, group)

    async def _acquire(self) -> LeaseHold | None:
        self._client.actor = Actor(self._name, Role.SCHEDULER)
        try:
            return await self._candidate.acquire()
        except RetriesExhausted as error:
            self._report_failure(error)
            return None

    async def _serve_term(self, lease: LeaseHold, outer_group: asyncio.TaskGroup) -> None:
        """Schedules for one term of the lease.

        Requests in flight at its end run in the outer group, so that they do not delay the next term; their results
        are ignored.
        """
        self._client.actor = lease.actor
        cycle = self.cycle = Cycle(
            self.view,
            self._rng.jitter_ms,
            f"{self._name}-{lease.actor.epoch}",
            filters=self._filters,
            scores=self._scores,
            victim_rate=self._victim_rate,
            on_mark=self._on_mark,
        )
        proposals = InFlightProposals(self, cycle, lease, outer_group)
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(lease), name="renew")
                await self._schedule(cycle, lease, proposals)
                renewing.cancel()
            if proposals.count:
                self._on_mark(CoverageMark.OVER)
        finally:
            self.cycle = None
            cycle.step_down()

    async def _renew(self, lease: LeaseHold) -> None:
        pause_ms = self._timing.lease_ms // 3
        while not lease.is_lost:
            await self._world.clock.sleep_ms(pause_ms - self._rng.jitter_ms(pause_ms // 8))
            try:
                await lease.renew(self._client, deadline_ms=pause_ms)
            except RetriesExhausted:
                continue
        self._wake.set()

    async def _schedule(self, cycle: Cycle, lease: LeaseHold, proposals: InFlightProposals) -> None:
        clock, timing, not_before_ms = self._world.clock, self._timing, 0
        while lease.is_valid(now_ms := clock.now_ms()) and not cycle.term_over:
            if now_ms < not_before_ms and len(cycle.backlog) < timing.batch_max:
                await clock.sleep_ms(not_before_ms - now_ms)
                not_before_ms = 0
                continue
            self._wake.clear()
            cycle.on_changes(now_ms, self._client.authority_clock())
            may_propose = (
                self._may_start_batch(cycle, proposals) and self.view.is_current and self.view.age_ms() < SNAPSHOT_AGE_MS_MAX
            )
            if may_propose:
                began_ns = self._stopwatch_ns()
                proposal = cycle.propose(now_ms, self._timing.batch_max)
                if proposal:
                    self.counts.count_proposal(proposal, (self._stopwatch_ns() - began_ns) / 1e9)
                    proposals.submit(proposal)
                    not_before_ms = now_ms + min(timing.batch_delay_ms_max, len(proposal.claims))
                    continue
            until_ms = lease.valid_until_ms
            if may_propose and (next_ms := cycle.next_ms()) is not None:
                until_ms = min(until_ms, next_ms)
            try:
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _may_start_batch(self, cycle: Cycle, proposals: InFlightProposals) -> bool:
        """Whether another batch may start. The first one always may.

        Another one must be worth its fixed cost: a few arrivals are placed together when the verdicts of the current batch
        are in.
        """
        return not proposals.count or (
            proposals.count < self._timing.batches_in_flight_max and len(cycle.backlog) >= self._timing.second_batch_min
        )

    def _report_failure(self, error: RetriesExhausted) -> None:
        if self._on_failure is not None:
            self._on_failure(error)


class InFlightProposals:
    """The proposals in flight during one term."""

    def __init__(self, scheduler: Scheduler, cycle: Cycle, lease: LeaseHold, group: asyncio.TaskGroup) -> None:
        self._scheduler, self._cycle, self._lease, self._group = scheduler, cycle, lease, group
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._started = 0

    @property
    def count(self) -> int:
        return len(self._tasks)

    def submit(self, proposal: Proposal) -> None:
        self._started += 1
        task = self._group.create_task(self._submit(proposal), name=f"ask {self._started}")
        self._tasks[task] = None
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._scheduler._wake.set()

    async def _submit(self, proposal: Proposal) -> None:
        clock = self._scheduler._world.clock
        verdicts = await self._verdicts(proposal)
        self._scheduler.counts.count_verdicts(proposal, verdicts)
        if verdicts is None:
            self._cycle.on_no_answer(proposal, clock.now_ms())
        else:
            self._cycle.on_verdicts(proposal, verdicts, clock.now_ms())

    async def _verdicts(self, proposal: Proposal) -> list[Verdict] | None:
        """Returns the verdicts, retrying with the same operation ids as long as the outcome is unknown; None if nothing was
        applied.
        """
        client = self._scheduler._client
        try:
            return await client.submit_many(proposal.claims, evidence=proposal.evidence)
        except RetriesExhausted as error:
            failure, outcome_unknown = error, error.outcome_unknown
        while True:
            self._scheduler._report_failure(failure)
            if not outcome_unknown:
                return None
            if not self._lease.is_valid(self._scheduler._world.clock.now_ms()):
                return None  # the lease has ended, and with it all assumptions of this term
            self._scheduler._on_mark(CoverageMark.RESUMED)
            try:
                return await client.resume(failure.operations, submitted_ms=failure.submitted_ms)
            except RetriesExhausted as error:
                failure = error
