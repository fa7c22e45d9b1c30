"""Controller loop: watch, resync, reconcile(key), batched claims, lease.

One loop for every controller; what is wrong, and what cures it, the controller says.

A loop is keyed and level-triggered. It watches to react and sweeps to recover: `reconcile(key)` is told no event, looks at the
board, and wishes for deeds until what stands is what should stand. Of several copies one holds the lease and acts; all follow
the board. Every claim carries the lease's epoch and the board's revision and age, and a board that is too old is not acted on.

What keeps a loop from doing harm stands apart: when a key may be looked at again in agenda.py, what it may do at all in
remits.py, and whether somebody undoes its deeds in fights.py. After silence the same operations are asked again under their ids
until they are answered, or the term is over: then the epoch fences them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple

from msgspec.structs import replace

from remit.client.authority_client import Client, NoAnswer
from remit.client.lease_holder import Candidate, Tenure
from remit.client.retry import RetryBudget
from remit.correction.framework.actions import Again, Concern, Deed, Later, Remit, Wish
from remit.correction.framework.work_queue import Agenda, Fights, Pauses
from remit.law.lifecycle import SNAPSHOT_FRESH_MS
from remit.law.overrides import Instant
from remit.law.timing import Tempo
from remit.model.claims import Accepted, Actor, AnyClaim, Code, Evidence, Note, Observe, Refused, Verdict
from remit.model.objects import key_of
from remit.model.records import EventSpec
from remit.model.resources import Duration
from remit.observation.watch_cache import Board
from remit.world.interfaces import World

FRESH_MS: Final = SNAPSHOT_FRESH_MS // 2
"""A board older than this is not acted on: what is asked on the way grows older still."""

LOOKS_MAX: Final = 2_000
"""So many keys are looked at before others get a turn."""

SWEEP_MAX: Final = 100
"""So many, if there is no news of any: what comes meanwhile is not to wait for long."""


class Times(NamedTuple):
    """When a look is taken: on the own clock, for people, and on the authority's if that is known; and how fast all goes."""

    now_ms: int
    wall: str
    tempo: Tempo
    authority: Instant | None = None


class Cadence(NamedTuple):
    """How long things take, in beats or as a number; `claims` travel together, and `ahead` such batches are under way."""

    beat_ms: int = 2_000
    claims: int = 500
    ahead: int = 4

    @property
    def tempo(self) -> Tempo:
        return Tempo(self.beat_ms)

    @property
    def sweep_ms(self) -> int:
        """Everything is looked at about so often, whatever was heard."""
        return 30 * self.beat_ms

    @property
    def gather_ms(self) -> int:
        """Changes come in swarms: the first is looked at, and one look serves all that come within so long after it."""
        return max(1, self.beat_ms // 400)

    @property
    def together_ms(self) -> int:
        """What is not urgent is looked at so often at most, and then all of it."""
        return max(1, self.beat_ms // 8)

    @property
    def idle_ms(self) -> int:
        """After so much silence a watch is dead."""
        return 5 * self.beat_ms

    @property
    def pauses(self) -> Pauses:
        return Pauses(self.beat_ms // 20, 5 * self.beat_ms, 150 * self.beat_ms, 15 * self.beat_ms)

    @property
    def truce_ms(self) -> int:
        """For so long a deed that is undone again and again is not repeated."""
        return 300 * self.beat_ms


class Controller:
    """What one loop asks. It keeps notes, decides nothing by them that the board does not show, and never waits in a look."""

    remit: ClassVar[Remit]
    lease: ClassVar[str] = ""
    """Beyond the role's own: two controllers of one role hold two leases."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[Concern]:
        """Whose key a change is news to. It is told of every change, also while another copy acts."""
        raise NotImplementedError

    def everything(self) -> Iterable[str]:
        """Every key that there is now."""
        raise NotImplementedError

    def reconcile(self, key: str, times: Times) -> Iterable[Wish]:
        """What to do now, so that it comes to be as it should."""
        raise NotImplementedError

    def heard(self, key: str, deed: Deed, verdict: Verdict | None) -> None:
        """What came of a deed; None: nothing is known."""

    def began(self, times: Times) -> None:
        """This copy acts from now on."""

    async def beside(self, loop: Loop) -> None:
        """Runs while this copy acts, if there is more to see than the board shows."""


class _Batch:
    """Claims that travel together, each with the key that wants it; what is only told has none."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.claims: list[AnyClaim] = []
        self.of: list[tuple[str, Deed]] = []

    def add(self, key: str, deeds: Iterable[Deed]) -> None:
        for deed in deeds:
            self.claims.append(deed.claim)
            self.of.append((key, deed))


class Loop:
    """One copy of one controller. `client` is its own; `run` goes on for ever. Somebody else feeds the board."""

    def __init__(
        self,
        controller: Controller,
        client: Client,
        world: World,
        *,
        name: str,
        lease: str = "",
        cadence: Cadence = Cadence(),
        failed: Callable[[NoAnswer], None] | None = None,
    ) -> None:
        self.controller, self.board, self.client = controller, controller.board, client
        self.world, self.cadence = world, cadence
        self.role = controller.remit.role
        self.chance = world.chance.stream(f"{self.role} {controller.lease} {name}")
        self.incarnation = ""
        self.fights = Fights(cadence.truce_ms)
        """Of one incarnation: a restore undoes what was done, and nobody is to blame."""
        self.outside: dict[str, None] = {}
        """What was wished for against the remit; each is told once, and there are only so many claims."""
        self.lease = lease or controller.lease or self.role.value
        self._candidate = Candidate(client, world.clock, self.lease, Duration(cadence.tempo.lease_ms))
        self._name, self._failed = name, failed
        self._wake = asyncio.Event()
        self._term: _Term | None = None
        self.looks = self.retries = 0
        """How often a key was looked at, and how often what was wished for it was refused or not answered."""
        self.board.subscribe(self)

    # -- hearing ---------------------------------------------------------------------------------------------------------

    def changed(self, key: str, old: Any, new: Any) -> None:
        mine = self.controller.concerns(key, old, new)
        if mine and self._term is not None:
            self.look_at(mine)

    def reached(self) -> None:
        """Most of what is reached is news to none of the keys here: then there is nothing to wake for."""
        if self._term is None or self._term.waits():
            self._wake.set()

    def look_at(self, keys: Iterable[Concern]) -> None:
        """There is news of these. What is only looked at later is looked at together with all that comes due at about the same
        time, and nobody is woken for it who would wake before.
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
        """How many keys are due; None while another copy acts."""
        return None if self._term is None else len(self._term.agenda)

    # -- holding the role ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever: become the holder of the lease, act while that lasts, and begin anew."""
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

    async def _acquire(self) -> Tenure | None:
        self.client.actor = Actor(self._name, self.role)
        try:
            return await self._candidate.acquire()
        except NoAnswer as error:
            self.gave_up(error)
            return None

    async def _serve(self, tenure: Tenure, whole: asyncio.TaskGroup) -> None:
        self.client.actor = tenure.actor
        term = self._term = _Term(self, tenure, whole)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(self._renew(tenure), name="renew"),
                    group.create_task(self.controller.beside(self), name="beside"),
                ]
                await term.act(self._wake)
                for task in beside:
                    task.cancel()
        finally:
            self._term = None

    async def _renew(self, tenure: Tenure) -> None:
        pause_ms = self.cadence.tempo.lease_ms // 3
        while not tenure.lost:
            await self.world.clock.sleep_ms(pause_ms - self.chance.uniform_ms(pause_ms // 8))
            try:
                await tenure.renew(self.client, deadline_ms=pause_ms)
            except NoAnswer:
                continue
        self._wake.set()

    def gave_up(self, error: NoAnswer) -> None:
        if self._failed is not None:
            self._failed(error)

    def times(self) -> Times:
        clock = self.world.clock
        return Times(clock.now_ms(), clock.wall(), self.cadence.tempo, self.client.authority_ms())


class _Term:
    """One tenure. What it asked may be answered after its end: that teaches nobody."""

    def __init__(self, loop: Loop, tenure: Tenure, whole: asyncio.TaskGroup) -> None:
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
            until_ms = min(sweep_ms, self._tenure.held_until_ms)
            if may and (next_ms := self.agenda.next_ms()) is not None:
                until_ms = min(until_ms, next_ms)
            try:
                async with self._clock.timeout_ms(max(1, until_ms - now_ms)):
                    await wake.wait()
            except TimeoutError:
                continue
            # What comes alone is looked at right away; the rest of a swarm waits for one another.
            await self._clock.sleep_ms(max(0, looked_ms + cadence.gather_ms - self._clock.now_ms()))

    def _goes_on(self, now_ms: int) -> bool:
        head = self._board.head
        return self._tenure.may_act(now_ms) and head is not None and head.incarnation == self._incarnation

    def _sees(self) -> bool:
        """Does the board show all that was done before this term, and is it fresh?"""
        board = self._board
        self._saw = board.sober and board.revision >= self._tenure.revision and board.age_ms() < FRESH_MS
        return self._saw

    def waits(self) -> bool:
        """Is this what the board has come to waited for: to see again, or to see what was done? What was answered after the
        board had shown it is due at once, and nothing that the board comes to will say so.
        """
        board = self._board
        known = board.head is not None and board.head.incarnation == self._incarnation
        return not known or not self._saw or len(self.agenda) > 0 or self.agenda.waits_for(board.revision)

    # -- looking ---------------------------------------------------------------------------------------------------------

    def _turn(self, now_ms: int) -> bool:
        """Look at what is due, as much as travels together. False if nothing was."""
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
            batch.add("", [self._event(key, "Stuck", "it does not come to be as it should, and is tried ever more slowly")])
        if batch.claims:
            self._born += 1
            task = self._whole.create_task(self._ask(batch), name=f"{self._loop.role} asks {self._born}")
            self._under_way[task] = None
            task.add_done_callback(self._ended)
        return looked > 0

    def _deeds(self, key: str, times: Times, batch: _Batch) -> list[Deed]:
        """What is wished for this key and may be asked: nothing outside the remit, nothing that stands already, and nothing
        that somebody undoes again and again.
        """
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
                    batch.add("", [self._event(key, "Fought", f"somebody has undone it twice: {wish.once}")])
            elif not self._stands(wish.claim):
                found.append(wish)
        return found

    def _stands(self, claim: AnyClaim) -> bool:
        """Is a condition as it should be already? What says nothing new is not said."""
        if not isinstance(claim, Observe):
            return False
        thing = self._board.get(key_of(claim.kind, claim.name, claim.tenant))
        known = () if thing is None else thing.status.conditions
        return any(replace(one, last_transition=claim.condition.last_transition) == claim.condition for one in known)

    def _event(self, key: str, reason: str, message: str) -> Deed:
        self._told += 1
        actor = self._tenure.actor
        event = EventSpec(regarding=key, type="Warning", reason=reason, message=message, source=self._loop.role)
        return Deed(Note(f"{actor.lease.replace('/', '.')}-{actor.epoch}-{self._told}", event))

    # -- asking ----------------------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        self._loop.reached()

    async def _ask(self, batch: _Batch) -> None:
        verdicts = await self._answered(batch)
        self._learn(batch, verdicts)

    async def _answered(self, batch: _Batch) -> Sequence[Verdict] | None:
        """The verdicts, however often it takes to ask under the same ids; None if the term is over, or nothing has happened."""
        client = self._loop.client
        try:
            return await client.ask_many(batch.claims, evidence=batch.evidence)
        except NoAnswer as error:
            lost, silent = error, error.silent
        while True:
            self._loop.gave_up(lost)
            if not silent or not self._tenure.may_act(self._clock.now_ms()):
                return None
            try:
                return await client.resume(lost.operations, asked_ms=lost.asked_ms)
            except NoAnswer as error:
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
                self._tenure.end()
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
