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
from remit.correction.framework.actions import Again, Concern, Deed, Later, Remit, Wish
from remit.correction.framework.work_queue import UNDONE_MAX, Agenda, Fights, Pauses
from remit.law.lifecycle import SNAPSHOT_AGE_MS_MAX
from remit.law.overrides import Instant
from remit.law.timing import Timing
from remit.model.claims import Accepted, Actor, AnyClaim, Code, Evidence, RecordEvent, Refused, SetCondition, Verdict
from remit.model.objects import key_of
from remit.model.records import EventSpec
from remit.model.resources import Duration
from remit.observation.watch_cache import Board
from remit.world.interfaces import World

FRESH_MS: Final = SNAPSHOT_AGE_MS_MAX // 2
"""Maximum age of the watch cache for acting. Half of what the authority accepts, because claims age further on their way."""

LOOKS_MAX: Final = 2_000
"""Keys reconciled in one go before other tasks of the process run."""

SWEEP_MAX: Final = 100
"""The same limit during a resync, when no key has changed: new changes should not wait long behind it."""


class Times(NamedTuple):
    """Time of a reconcile: on the local clock, as wall clock for display, and on the authority's clock if known; and the
    timeouts.
    """

    now_ms: int
    wall: str
    tempo: Timing
    authority: Instant | None = None


class Cadence(NamedTuple):
    """Intervals of a controller loop, most of them multiples of the heartbeat interval. Up to `claims` claims are sent in one
    batch, and up to `ahead` batches are in flight.
    """

    beat_ms: int = 2_000
    claims: int = 500
    ahead: int = 4

    @property
    def tempo(self) -> Timing:
        return Timing(self.beat_ms)

    @property
    def sweep_ms(self) -> int:
        """Interval between two resyncs of all keys."""
        return 30 * self.beat_ms

    @property
    def gather_ms(self) -> int:
        """Changes arrive in bursts. The first is reconciled at once; those within this time after it together."""
        return max(1, self.beat_ms // 400)

    @property
    def together_ms(self) -> int:
        """Coalesced requeues run on a grid of this interval, all that are due together."""
        return max(1, self.beat_ms // 8)

    @property
    def idle_ms(self) -> int:
        """A watch that is silent for this long is considered dead."""
        return 5 * self.beat_ms

    @property
    def pauses(self) -> Pauses:
        return Pauses(self.beat_ms // 20, 5 * self.beat_ms, 150 * self.beat_ms, 15 * self.beat_ms)

    @property
    def truce_ms(self) -> int:
        """How long an action that was repeatedly undone is not repeated."""
        return 300 * self.beat_ms


class Controller:
    """The part of a loop that is specific to one controller.

    A controller may keep derived state, but it decides nothing that the watch cache does not show, and `reconcile` never
    awaits.
    """

    remit: ClassVar[Remit]
    lease: ClassVar[str] = ""
    """Lease name, if it is not the role's own. Two controllers of one role need two leases."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[Concern]:
        """Return the keys to reconcile after a change. Called for every change, also while another process acts."""
        raise NotImplementedError

    def everything(self) -> Iterable[str]:
        """Return all current keys, for a resync."""
        raise NotImplementedError

    def reconcile(self, key: str, times: Times) -> Iterable[Wish]:
        """Return the actions that bring the object to its desired state, and when to reconcile again."""
        raise NotImplementedError

    def heard(self, key: str, deed: Deed, verdict: Verdict | None) -> None:
        """Called with the verdict of an action; None if the outcome is unknown."""

    def began(self, times: Times) -> None:
        """Called when this process has acquired the lease."""

    async def beside(self, loop: Loop) -> None:
        """Runs while this process holds the lease, for controllers that need more input than the watch cache."""


class _Batch:
    """Claims sent together, each with the key that requested it. Events have an empty key."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.claims: list[AnyClaim] = []
        self.of: list[tuple[str, Deed]] = []

    def add(self, key: str, deeds: Iterable[Deed]) -> None:
        for deed in deeds:
            self.claims.append(deed.claim)
            self.of.append((key, deed))


class Loop:
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
        cadence: Cadence = Cadence(),
        failed: Callable[[RetriesExhausted], None] | None = None,
    ) -> None:
        self.controller, self.board, self.client = controller, controller.board, client
        self.world, self.cadence = world, cadence
        self.role = controller.remit.role
        self.chance = world.chance.stream(f"{self.role} {controller.lease} {name}")
        self.incarnation = ""
        self.fights = Fights(cadence.truce_ms)
        """Per incarnation: a restore undoes actions, which is not the work of another writer."""
        self.outside: dict[str, None] = {}
        """Permission violations that were reported. Each is reported once; their number is limited by the claim types."""
        self.lease = lease or controller.lease or self.role.value
        self._candidate = LeaseCandidate(client, world.clock, self.lease, Duration(cadence.tempo.lease_ms))
        self._name, self._failed = name, failed
        self._wake = asyncio.Event()
        self._term: _Term | None = None
        self.looks = self.retries = 0
        """Number of reconciles, and of keys whose actions were refused or not answered."""
        self.board.subscribe(self)

    # -- watch events --------------------------------------------------------------------------------------------------------

    def changed(self, key: str, old: Any, new: Any) -> None:
        mine = self.controller.concerns(key, old, new)
        if mine and self._term is not None:
            self.look_at(mine)

    def reached(self) -> None:
        """Wake up the loop, unless nothing in its queue depends on this commit, which is the common case."""
        if self._term is None or self._term.waits():
            self._wake.set()

    def look_at(self, keys: Iterable[Concern]) -> None:
        """Queue keys for reconciliation.

        Coalesced keys are rounded up to a common grid, so that keys due at about the same time are reconciled together, and
        the loop is not woken for them if it wakes earlier anyway.
        """
        if self._term is None:
            return
        now_ms, agenda = self.world.clock.now_ms(), self._term.agenda
        for key in keys:
            if isinstance(key, Later):
                next_ms, together_ms = agenda.next_ms(), self.cadence.together_ms
                at_ms = -(-(now_ms + key.in_ms) // together_ms) * together_ms
                agenda.look_at(key.key, at_ms)
                if next_ms is not None and next_ms <= at_ms:
                    continue
            else:
                agenda.news(key, now_ms)
            self._wake.set()

    @property
    def due(self) -> int | None:
        """Number of keys due; None while another process holds the lease."""
        return None if self._term is None else len(self._term.agenda)

    # -- lease ---------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Acquire the lease, act while it is held, and start over. Runs until cancelled."""
        async with asyncio.TaskGroup() as whole:
            while True:
                while not self.board.sober:
                    self._wake.clear()
                    await self._wake.wait()
                tenure = await self._acquire()
                if tenure is None:
                    pause_ms = self.cadence.beat_ms
                    await self.world.clock.sleep_ms(pause_ms + self.chance.uniform_ms(pause_ms))
                    continue
                await self._serve(tenure, whole)

    async def _acquire(self) -> LeaseHold | None:
        self.client.actor = Actor(self._name, self.role)
        try:
            return await self._candidate.acquire()
        except RetriesExhausted as error:
            self.gave_up(error)
            return None

    async def _serve(self, tenure: LeaseHold, whole: asyncio.TaskGroup) -> None:
        self.client.actor = tenure.actor
        term = self._term = _Term(self, tenure, whole)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(self._renew(tenure), name="renew"),
                    group.create_task(self.controller.beside(self), name="background"),
                ]
                await term.act(self._wake)
                for task in beside:
                    task.cancel()
        finally:
            self._term = None

    async def _renew(self, tenure: LeaseHold) -> None:
        pause_ms = self.cadence.tempo.lease_ms // 3
        while not tenure.is_lost:
            await self.world.clock.sleep_ms(pause_ms - self.chance.uniform_ms(pause_ms // 8))
            try:
                await tenure.renew(self.client, deadline_ms=pause_ms)
            except RetriesExhausted:
                continue
        self._wake.set()

    def gave_up(self, error: RetriesExhausted) -> None:
        if self._failed is not None:
            self._failed(error)

    def times(self) -> Times:
        clock = self.world.clock
        return Times(clock.now_ms(), clock.wall(), self.cadence.tempo, self.client.authority_clock())


class _Term:
    """One lease term. Answers that arrive after its end are ignored."""

    def __init__(self, loop: Loop, tenure: LeaseHold, whole: asyncio.TaskGroup) -> None:
        self._loop, self._tenure, self._whole = loop, tenure, whole
        self._controller, self._board, self._clock = loop.controller, loop.board, loop.world.clock
        self._incarnation = loop.board.head.incarnation if loop.board.head is not None else ""
        if loop.incarnation != self._incarnation:
            loop.incarnation, loop.fights = self._incarnation, Fights(loop.cadence.truce_ms)
        self.agenda = Agenda(loop.chance.uniform_ms, loop.cadence.pauses, RetryBudget())
        self._under_way: dict[asyncio.Task[None], None] = {}
        self._born = self._told = 0
        self._saw = False

    async def act(self, wake: asyncio.Event) -> None:
        cadence, chance = self._loop.cadence, self._loop.chance
        self._controller.began(self._loop.times())
        sweep_ms = looked_ms = self._clock.now_ms()
        while self._goes_on(now_ms := self._clock.now_ms()):
            wake.clear()
            if now_ms >= sweep_ms:
                sweep_ms = now_ms + cadence.sweep_ms - chance.uniform_ms(cadence.sweep_ms // 4)
                self.agenda.sweep(self._controller.everything())
            may = len(self._under_way) < cadence.ahead and self._sees()
            if may and self._turn(now_ms):
                looked_ms = now_ms
                await self._clock.sleep_ms(0)
                continue
            until_ms = min(sweep_ms, self._tenure.valid_until_ms)
            if may and (next_ms := self.agenda.next_ms()) is not None:
                until_ms = min(until_ms, next_ms)
            try:
                async with self._clock.timeout_ms(max(1, until_ms - now_ms)):
                    await wake.wait()
            except TimeoutError:
                continue
            # A single change is reconciled at once. The rest of a burst is gathered for `coalesce_ms`.
            await self._clock.sleep_ms(max(0, looked_ms + cadence.gather_ms - self._clock.now_ms()))

    def _goes_on(self, now_ms: int) -> bool:
        head = self._board.head
        return self._tenure.is_valid(now_ms) and head is not None and head.incarnation == self._incarnation

    def _sees(self) -> bool:
        """Return whether the watch cache is fresh and shows everything that was committed before this lease term."""
        board = self._board
        self._saw = board.sober and board.revision >= self._tenure.revision and board.age_ms() < FRESH_MS
        return self._saw

    def waits(self) -> bool:
        """Return whether the loop waits for the revision that the watch cache has reached: to become fresh again, or to show
        the effect of an accepted action. A verdict that arrives after the cache has shown its commit makes its key due at
        once; no further commit would wake the loop for it.
        """
        board = self._board
        known = board.head is not None and board.head.incarnation == self._incarnation
        return not known or not self._saw or len(self.agenda) > 0 or self.agenda.waits_for(board.revision)

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def _turn(self, now_ms: int) -> bool:
        """Reconcile due keys, up to one batch of claims. Return False if none was due."""
        times = self._loop.times()
        batch = _Batch(Evidence(self._board.revision, self._board.age_ms()))
        looked = 0
        while looked < (LOOKS_MAX if self.agenda else SWEEP_MAX) and len(batch.claims) < self._loop.cadence.claims:
            key = self.agenda.take(now_ms, self._board.revision)
            if key is None:
                break
            looked += 1
            deeds = self._deeds(key, times, batch)
            if deeds:
                batch.add(key, deeds)
            else:
                self.agenda.settled(key)
        self._loop.looks += looked
        for key in self.agenda.stuck():
            stuck_after = Duration(self._loop.cadence.pauses.stuck_after_ms)
            message = (
                f"actions for {key} have been refused or unanswered for {stuck_after} or longer; "
                "retries continue at a slower rate. `remit audit` lists the refusals"
            )
            batch.add("", [self._event(key, "Stuck", message)])
        if batch.claims:
            self._born += 1
            task = self._whole.create_task(self._ask(batch), name=f"{self._loop.role} batch {self._born}")
            self._under_way[task] = None
            task.add_done_callback(self._ended)
        return looked > 0

    def _deeds(self, key: str, times: Times, batch: _Batch) -> list[Deed]:
        """Return the actions for a key that may be submitted: permitted, not applied already, and not repeatedly undone."""
        found: list[Deed] = []
        fights, remit = self._loop.fights, self._controller.remit
        for wish in islice(self._controller.reconcile(key, times), self._loop.cadence.claims):
            if isinstance(wish, Again):
                self.agenda.look_at(key, times.now_ms + max(1, wish.in_ms))
            elif why := remit.outside(wish.claim):
                if why not in self._loop.outside:
                    self._loop.outside[why] = None
                    batch.add("", [self._event(key, "OutsideRemit", why)])
            elif wish.once and fights.held(wish.once, times.now_ms):
                self.agenda.look_at(key, times.now_ms + self._loop.cadence.sweep_ms)
                if fights.untold(wish.once):
                    pause = Duration(self._loop.cadence.truce_ms)
                    message = (
                        f"another writer undid this action {UNDONE_MAX} times, so it is not repeated for {pause}: {wish.once}. "
                        "`remit audit` shows the other writer"
                    )
                    batch.add("", [self._event(key, "Fought", message)])
            elif not self._stands(wish.claim):
                found.append(wish)
        return found

    def _stands(self, claim: AnyClaim) -> bool:
        """Return whether the claim sets a condition that is already set so. Unchanged conditions are not written."""
        if not isinstance(claim, SetCondition):
            return False
        thing = self._board.get(key_of(claim.kind, claim.name, claim.tenant))
        known = () if thing is None else thing.status.conditions
        return any(replace(one, last_transition=claim.condition.last_transition) == claim.condition for one in known)

    def _event(self, key: str, reason: str, message: str) -> Deed:
        self._told += 1
        actor = self._tenure.actor
        event = EventSpec(regarding=key, type="Warning", reason=reason, message=message, source=self._loop.role)
        return Deed(RecordEvent(f"{actor.lease.replace('/', '.')}-{actor.epoch}-{self._told}", event))

    # -- submit -------------------------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        self._loop.reached()

    async def _ask(self, batch: _Batch) -> None:
        verdicts = await self._answered(batch)
        self._learn(batch, verdicts)

    async def _answered(self, batch: _Batch) -> Sequence[Verdict] | None:
        """Submit a batch, and again under the same ids while the outcome is unknown. Return the verdicts; None if the lease
        term ended or nothing was executed.
        """
        client = self._loop.client
        try:
            return await client.submit_many(batch.claims, evidence=batch.evidence)
        except RetriesExhausted as error:
            lost, silent = error, error.outcome_unknown
        while True:
            self._loop.gave_up(lost)
            if not silent or not self._tenure.is_valid(self._clock.now_ms()):
                return None
            try:
                return await client.resume(lost.operations, submitted_ms=lost.submitted_ms)
            except RetriesExhausted as error:
                lost = error

    def _learn(self, batch: _Batch, verdicts: Sequence[Verdict] | None) -> None:
        now_ms = self._clock.now_ms()
        by_key: dict[str, list[Verdict | None]] = {}
        for index, (key, deed) in enumerate(batch.of):
            verdict = None if verdicts is None else verdicts[index]
            by_key.setdefault(key, []).append(verdict)
            if isinstance(verdict, Accepted) and deed.once:
                self._loop.fights.done(deed.once, now_ms)
            if isinstance(verdict, Refused) and verdict.code in (Code.STALE_EPOCH, Code.LEASE_EXPIRED):
                self._tenure.mark_lost()
            if key:
                self._controller.heard(key, deed, verdict)
        by_key.pop("", None)
        for key, said in by_key.items():
            revision = max((one.revision for one in said if one is not None), default=0)
            if all(isinstance(one, Accepted) for one in said):
                self.agenda.accepted(key, revision, self._board.revision)
            else:
                progress = any(isinstance(one, Accepted) for one in said)
                self._loop.retries += 1
                self.agenda.failed(key, now_ms, revision, self._board.revision, progress=progress)
