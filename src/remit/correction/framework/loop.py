"""Controller loop: watch, resync, reconcile(key), batched claims, lease.

The loop is keyed and level-triggered. It reacts to watch events and recovers by periodic resyncs. `reconcile(key)` receives
no event: it reads the watch cache and returns actions until the actual state matches the desired state. Of several
processes, one holds the controller's lease and acts; all keep their watch caches up to date. Every claim carries the lease's
epoch and the cache's revision and age, and the loop does not act on a cache that is too old.

The safeguards are separate: work_queue.py decides when a key may be reconciled again and detects actions that are repeatedly
undone; actions.py limits what a controller may request. After a lost reply the same operations are submitted again under
their ids until they are answered or the lease term ends; after that the epoch fences them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple

from msgspec.structs import replace

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.lease_holder import LeaseCandidate, LeaseHold
from remit.client.retry import RetryBudget
from remit.correction.framework.actions import (
    Action,
    ControllerPermissions,
    KeyTrigger,
    ReconcileResult,
    RequeueAfter,
    RequeueCoalesced,
    describe_claim,
)
from remit.correction.framework.work_queue import UNDONE_MAX, BackoffPolicy, UndoDetector, WorkQueue
from remit.law.lifecycle import SNAPSHOT_AGE_MS_MAX
from remit.law.overrides import Instant
from remit.law.timing import Timing
from remit.model.claims import Accepted, Actor, AnyClaim, Code, Evidence, RecordEvent, Refused, SetCondition, Verdict
from remit.model.objects import key_of
from remit.model.records import EventSpec
from remit.model.resources import Duration
from remit.observation.watch_cache import WatchCache
from remit.world.interfaces import World

CACHE_AGE_MS_MAX: Final = SNAPSHOT_AGE_MS_MAX // 2
"""Maximum age of the watch cache for acting. Half of what the authority accepts, because claims age further on their way."""

RECONCILES_MAX: Final = 2_000
"""Keys reconciled in one go before other tasks of the process run."""

RESYNC_RECONCILES_MAX: Final = 100
"""The same limit during a resync, when no key has changed: new changes should not wait long behind it."""


class ReconcileTime(NamedTuple):
    """Time of a reconcile: on the local clock, as wall clock for display, and on the authority's clock if known; and the
    timeouts.
    """

    now_ms: int
    wall: str
    timing: Timing
    authority: Instant | None = None


class LoopTiming(NamedTuple):
    """Intervals of a controller loop, most of them multiples of the heartbeat interval. Up to
    `claims_per_batch` claims are sent together, and up to `batches_in_flight` such batches are in flight.
    """

    heartbeat_ms: int = 2_000
    claims_per_batch: int = 500
    batches_in_flight: int = 4

    @property
    def timing(self) -> Timing:
        return Timing(self.heartbeat_ms)

    @property
    def resync_ms(self) -> int:
        """Interval between two resyncs of all keys."""
        return 30 * self.heartbeat_ms

    @property
    def coalesce_ms(self) -> int:
        """Changes arrive in bursts. The first is reconciled at once; those within this time after it together."""
        return max(1, self.heartbeat_ms // 400)

    @property
    def requeue_grid_ms(self) -> int:
        """Coalesced requeues run on a grid of this interval, all that are due together."""
        return max(1, self.heartbeat_ms // 8)

    @property
    def watch_idle_ms(self) -> int:
        """A watch that is silent for this long is considered dead."""
        return 5 * self.heartbeat_ms

    @property
    def backoff(self) -> BackoffPolicy:
        return BackoffPolicy(self.heartbeat_ms // 20, 5 * self.heartbeat_ms, 150 * self.heartbeat_ms, 15 * self.heartbeat_ms)

    @property
    def undo_hold_ms(self) -> int:
        """How long an action that was repeatedly undone is not repeated."""
        return 300 * self.heartbeat_ms


class Controller:
    """The part of a loop that is specific to one controller.

    A controller may keep derived state, but it decides nothing that the watch cache does not show, and `reconcile` never
    awaits.
    """

    permissions: ClassVar[ControllerPermissions]
    lease: ClassVar[str] = ""
    """Lease name, if it is not the role's own. Two controllers of one role need two leases."""

    def __init__(self, cache: WatchCache) -> None:
        self.cache = cache

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[KeyTrigger]:
        """Return the keys to reconcile after a change. Called for every change, also while another process acts."""
        raise NotImplementedError

    def all_keys(self) -> Iterable[str]:
        """Return all current keys, for a resync."""
        raise NotImplementedError

    def reconcile(self, key: str, time: ReconcileTime) -> Iterable[ReconcileResult]:
        """Return the actions that bring the object to its desired state, and when to reconcile again."""
        raise NotImplementedError

    def on_verdict(self, key: str, action: Action, verdict: Verdict | None) -> None:
        """Called with the verdict of an action; None if the outcome is unknown."""

    def on_lease_acquired(self, time: ReconcileTime) -> None:
        """Called when this process has acquired the lease."""

    async def background(self, loop: ControllerLoop) -> None:
        """Runs while this process holds the lease, for controllers that need more input than the watch cache."""


class _ActionBatch:
    """Claims sent together, each with the key that requested it. Events have an empty key."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.claims: list[AnyClaim] = []
        self.actions: list[tuple[str, Action]] = []

    def add(self, key: str, actions: Iterable[Action]) -> None:
        for action in actions:
            self.claims.append(action.claim)
            self.actions.append((key, action))


class ControllerLoop:
    """One process's loop of one controller. `client` is not shared; `run` runs until cancelled. The caller keeps the watch
    cache up to date.
    """

    def __init__(
        self,
        controller: Controller,
        client: AuthorityClient,
        world: World,
        *,
        name: str,
        lease: str = "",
        timing: LoopTiming = LoopTiming(),
        on_failure: Callable[[RetriesExhausted], None] | None = None,
    ) -> None:
        self.controller, self.cache, self.client = controller, controller.cache, client
        self.world, self.timing = world, timing
        self.role = controller.permissions.role
        self.rng = world.randomness.stream(f"{self.role} {controller.lease} {name}")
        self.incarnation = ""
        self.undo_detector = UndoDetector(timing.undo_hold_ms)
        """Per incarnation: a restore undoes actions, which is not the work of another writer."""
        self.reported_violations: dict[str, None] = {}
        """Permission violations that were reported. Each is reported once; their number is limited by the claim types."""
        self.lease = lease or controller.lease or self.role.value
        self._candidate = LeaseCandidate(client, world.clock, self.lease, Duration(timing.timing.lease_ms))
        self._name, self._on_failure = name, on_failure
        self._wake = asyncio.Event()
        self._term: _LeaseTerm | None = None
        self.reconciles = self.retries = 0
        """Number of reconciles, and of keys whose actions were refused or not answered."""
        self.cache.subscribe(self)

    # -- watch events --------------------------------------------------------------------------------------------------------

    def on_change(self, key: str, old: Any, new: Any) -> None:
        keys = self.controller.keys_for(key, old, new)
        if keys and self._term is not None:
            self.enqueue(keys)

    def on_commit(self) -> None:
        """Wake up the loop, unless nothing in its queue depends on this commit, which is the common case."""
        if self._term is None or self._term.is_waiting():
            self._wake.set()

    def enqueue(self, keys: Iterable[KeyTrigger]) -> None:
        """Queue keys for reconciliation.

        Coalesced keys are rounded up to a common grid, so that keys due at about the same time are reconciled together, and
        the loop is not woken for them if it wakes earlier anyway.
        """
        if self._term is None:
            return
        now_ms, queue = self.world.clock.now_ms(), self._term.queue
        for key in keys:
            if isinstance(key, RequeueCoalesced):
                next_run_ms, grid_ms = queue.next_run_ms(), self.timing.requeue_grid_ms
                at_ms = -(-(now_ms + key.in_ms) // grid_ms) * grid_ms
                queue.enqueue_at(key.key, at_ms)
                if next_run_ms is not None and next_run_ms <= at_ms:
                    continue
            else:
                queue.enqueue(key, now_ms)
            self._wake.set()

    @property
    def queue_depth(self) -> int | None:
        """Number of keys due; None while another process holds the lease."""
        return None if self._term is None else len(self._term.queue)

    # -- lease ---------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Acquire the lease, act while it is held, and start over. Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                while not self.cache.is_current:
                    self._wake.clear()
                    await self._wake.wait()
                lease = await self._acquire()
                if lease is None:
                    pause_ms = self.timing.heartbeat_ms
                    await self.world.clock.sleep_ms(pause_ms + self.rng.jitter_ms(pause_ms))
                    continue
                await self._serve(lease, tasks)

    async def _acquire(self) -> LeaseHold | None:
        self.client.actor = Actor(self._name, self.role)
        try:
            return await self._candidate.acquire()
        except RetriesExhausted as error:
            self.report_failure(error)
            return None

    async def _serve(self, lease: LeaseHold, tasks: asyncio.TaskGroup) -> None:
        self.client.actor = lease.actor
        term = self._term = _LeaseTerm(self, lease, tasks)
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._renew(lease), name="renew"),
                    group.create_task(self.controller.background(self), name="background"),
                ]
                await term.act(self._wake)
                for task in background:
                    task.cancel()
        finally:
            self._term = None

    async def _renew(self, lease: LeaseHold) -> None:
        pause_ms = self.timing.timing.lease_ms // 3
        while not lease.is_lost:
            await self.world.clock.sleep_ms(pause_ms - self.rng.jitter_ms(pause_ms // 8))
            try:
                await lease.renew(self.client, deadline_ms=pause_ms)
            except RetriesExhausted:
                continue
        self._wake.set()

    def report_failure(self, error: RetriesExhausted) -> None:
        if self._on_failure is not None:
            self._on_failure(error)

    def reconcile_time(self) -> ReconcileTime:
        clock = self.world.clock
        return ReconcileTime(clock.now_ms(), clock.wall(), self.timing.timing, self.client.authority_clock())


class _LeaseTerm:
    """One lease term. Answers that arrive after its end are ignored."""

    def __init__(self, loop: ControllerLoop, lease: LeaseHold, tasks: asyncio.TaskGroup) -> None:
        self._loop, self._lease, self._tasks = loop, lease, tasks
        self._controller, self._cache, self._clock = loop.controller, loop.cache, loop.world.clock
        self._incarnation = loop.cache.head.incarnation if loop.cache.head is not None else ""
        if loop.incarnation != self._incarnation:
            loop.incarnation, loop.undo_detector = self._incarnation, UndoDetector(loop.timing.undo_hold_ms)
        self.queue = WorkQueue(loop.rng.jitter_ms, loop.timing.backoff, RetryBudget())
        self._in_flight: dict[asyncio.Task[None], None] = {}
        self._batches_sent = self._events_sent = 0
        self._was_cache_usable = False

    async def act(self, wake: asyncio.Event) -> None:
        timing, rng = self._loop.timing, self._loop.rng
        self._controller.on_lease_acquired(self._loop.reconcile_time())
        resync_at_ms = reconciled_ms = self._clock.now_ms()
        while self._may_continue(now_ms := self._clock.now_ms()):
            wake.clear()  # before the queue is read: a change that arrives later must wake the next round
            if now_ms >= resync_at_ms:
                resync_at_ms = now_ms + timing.resync_ms - rng.jitter_ms(timing.resync_ms // 4)
                self.queue.resync(self._controller.all_keys())
            may_reconcile = len(self._in_flight) < timing.batches_in_flight and self._is_cache_usable()
            if may_reconcile and self._reconcile_due(now_ms):
                reconciled_ms = now_ms
                await self._clock.sleep_ms(0)
                continue
            until_ms = min(resync_at_ms, self._lease.valid_until_ms)
            if may_reconcile and (next_run_ms := self.queue.next_run_ms()) is not None:
                until_ms = min(until_ms, next_run_ms)
            try:
                async with self._clock.timeout_ms(max(1, until_ms - now_ms)):
                    await wake.wait()
            except TimeoutError:
                continue
            # A single change is reconciled at once. The rest of a burst is gathered for `coalesce_ms`.
            await self._clock.sleep_ms(max(0, reconciled_ms + timing.coalesce_ms - self._clock.now_ms()))

    def _may_continue(self, now_ms: int) -> bool:
        head = self._cache.head
        return self._lease.is_valid(now_ms) and head is not None and head.incarnation == self._incarnation

    def _is_cache_usable(self) -> bool:
        """Return whether the watch cache is fresh and shows everything that was committed before this lease term."""
        cache = self._cache
        self._was_cache_usable = (
            cache.is_current and cache.revision >= self._lease.revision and cache.age_ms() < CACHE_AGE_MS_MAX
        )
        return self._was_cache_usable

    def is_waiting(self) -> bool:
        """Return whether the loop waits for the revision that the watch cache has reached: to become fresh again, or to show
        the effect of an accepted action. A verdict that arrives after the cache has shown its commit makes its key due at
        once; no further commit would wake the loop for it.
        """
        cache = self._cache
        same_incarnation = cache.head is not None and cache.head.incarnation == self._incarnation
        return (
            not same_incarnation
            or not self._was_cache_usable
            or len(self.queue) > 0
            or self.queue.is_waiting_for(cache.revision)
        )

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def _reconcile_due(self, now_ms: int) -> bool:
        """Reconcile due keys, up to one batch of claims. Return False if none was due."""
        time = self._loop.reconcile_time()
        batch = _ActionBatch(Evidence(self._cache.revision, self._cache.age_ms()))
        reconciled = 0
        while (
            reconciled < (RECONCILES_MAX if self.queue else RESYNC_RECONCILES_MAX)
            and len(batch.claims) < self._loop.timing.claims_per_batch
        ):
            key = self.queue.take(now_ms, self._cache.revision)
            if key is None:
                break
            reconciled += 1
            actions = self._actions_for(key, time, batch)
            if actions:
                batch.add(key, actions)
            else:
                self.queue.done(key)
        self._loop.reconciles += reconciled
        for key in self.queue.take_stuck():
            stuck_after = Duration(self._loop.timing.backoff.stuck_after_ms)
            message = (
                f"actions for {key} have been refused or unanswered for {stuck_after} or longer; retries continue at a slower "
                "rate. `remit audit` lists the refusals"
            )
            batch.add("", [self._event(key, "Stuck", message)])
        if batch.claims:
            self._batches_sent += 1
            task = self._tasks.create_task(self._submit(batch), name=f"{self._loop.role} batch {self._batches_sent}")
            self._in_flight[task] = None
            task.add_done_callback(self._on_batch_done)
        return reconciled > 0

    def _actions_for(self, key: str, time: ReconcileTime, batch: _ActionBatch) -> list[Action]:
        """Return the actions for a key that may be submitted: permitted, not applied already, and not repeatedly undone."""
        actions: list[Action] = []
        detector, permissions = self._loop.undo_detector, self._controller.permissions
        for result in islice(self._controller.reconcile(key, time), self._loop.timing.claims_per_batch):
            if isinstance(result, RequeueAfter):
                self.queue.enqueue_at(key, time.now_ms + max(1, result.in_ms))
            elif violation := permissions.violation_of(result.claim):
                if violation not in self._loop.reported_violations:
                    self._loop.reported_violations[violation] = None
                    batch.add("", [self._event(key, "UndeclaredOperation", violation)])
            elif result.undo_key and detector.is_held(result.undo_key, time.now_ms):
                self.queue.enqueue_at(key, time.now_ms + self._loop.timing.resync_ms)
                if detector.take_unreported(result.undo_key):
                    pause = Duration(self._loop.timing.undo_hold_ms)
                    message = (
                        f"another writer undid this {UNDONE_MAX} times, so it is not repeated for {pause}: "
                        f"{describe_claim(result.claim)}. `remit audit` shows the other writer"
                    )
                    batch.add("", [self._event(key, "RepeatedlyUndone", message)])
            elif not self._is_already_set(result.claim):
                actions.append(result)
        return actions

    def _is_already_set(self, claim: AnyClaim) -> bool:
        """Return whether the claim sets a condition that is already set so. Unchanged conditions are not written."""
        if not isinstance(claim, SetCondition):
            return False
        obj = self._cache.get(key_of(claim.kind, claim.name, claim.tenant))
        conditions = () if obj is None else obj.status.conditions
        return any(
            replace(condition, last_transition=claim.condition.last_transition) == claim.condition for condition in conditions
        )

    def _event(self, key: str, reason: str, message: str) -> Action:
        self._events_sent += 1
        actor = self._lease.actor
        event = EventSpec(regarding=key, type="Warning", reason=reason, message=message, source=self._loop.role)
        return Action(RecordEvent(f"{actor.lease.replace('/', '.')}-{actor.epoch}-{self._events_sent}", event))

    # -- submit -------------------------------------------------------------------------------------------------------------

    def _on_batch_done(self, task: asyncio.Task[None]) -> None:
        self._in_flight.pop(task, None)
        self._loop.on_commit()

    async def _submit(self, batch: _ActionBatch) -> None:
        verdicts = await self._submit_until_answered(batch)
        self._on_verdicts(batch, verdicts)

    async def _submit_until_answered(self, batch: _ActionBatch) -> Sequence[Verdict] | None:
        """Submit a batch, and again under the same ids while the outcome is unknown. Return the verdicts; None if the lease
        term ended or nothing was executed.
        """
        client = self._loop.client
        try:
            return await client.submit_many(batch.claims, evidence=batch.evidence)
        except RetriesExhausted as error:
            last_error, outcome_unknown = error, error.outcome_unknown
        while True:
            self._loop.report_failure(last_error)
            if not outcome_unknown or not self._lease.is_valid(self._clock.now_ms()):
                return None
            try:
                return await client.resume(last_error.operations, submitted_ms=last_error.submitted_ms)
            except RetriesExhausted as error:
                last_error = error

    def _on_verdicts(self, batch: _ActionBatch, verdicts: Sequence[Verdict] | None) -> None:
        now_ms = self._clock.now_ms()
        by_key: dict[str, list[Verdict | None]] = {}
        for index, (key, action) in enumerate(batch.actions):
            verdict = None if verdicts is None else verdicts[index]
            by_key.setdefault(key, []).append(verdict)
            if isinstance(verdict, Accepted) and action.undo_key:
                self._loop.undo_detector.record(action.undo_key, now_ms)
            if isinstance(verdict, Refused) and verdict.code in (Code.STALE_EPOCH, Code.LEASE_EXPIRED):
                self._lease.mark_lost()
            if key:
                self._controller.on_verdict(key, action, verdict)
        by_key.pop("", None)
        for key, key_verdicts in by_key.items():
            revision = max((answer.revision for answer in key_verdicts if answer is not None), default=0)
            if all(isinstance(answer, Accepted) for answer in key_verdicts):
                self.queue.accepted(key, revision, self._cache.revision)
            else:
                progress = any(isinstance(answer, Accepted) for answer in key_verdicts)
                self._loop.retries += 1
                self.queue.failed(key, now_ms, revision, self._cache.revision, progress=progress)
