"""The active authority: takeover, batch loop (decide, write, absorb, answer), heartbeats.

The one active authority of a scope: it decides in batches, writes, and only then answers.

The order of steps is the safety argument:

1. *Take over*: raise the epoch in the store (from here every older authority is fenced), then read everything at or after
   that revision, and give every lease a full new term. The chain beats meanwhile, for standbys to see.
2. *Decide* a batch of operations against a draft over the books: nothing is visible yet (batching.py).
3. *Commit* the batch's rows, its outcomes and its audit in one transaction that advances the chain.
4. *Absorb* the draft into the books, and answer everybody. Refusals too wait for this: only a transaction that went through
   proves that the epoch was still current when they were decided.

While a batch is being committed, the next one is decided on top of its draft, if a whole one waits. It is committed only after
the one before it was absorbed; if that one was not, the operations of both are decided anew.

If the answer of step 3 is lost, an empty batch at the same sequence settles whether it landed (chain.py), and only then is
anything absorbed or decided anew. If the chain was advanced by somebody else, this authority is deposed: it writes and
answers nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from remit.client.endpoint import NoVerdict, Overloaded, Silence, Status, Turned
from remit.commitment import recovery
from remit.commitment.batch import NO_FAULTS, Answer, Ground, Known, Prepared, prepare, written_out
from remit.commitment.books import Books, Moment
from remit.commitment.metrics import AuthorityCounts
from remit.commitment.operation_queue import BATCH_MAX, BatchMax, Piece, Queue, cut
from remit.commitment.outcomes import BATCH, WINDOW_MS, Entry, Outcomes
from remit.commitment.recovery import load
from remit.commitment.rulings.leases import Hearing, claimant
from remit.commitment.rulings.registry import UNLEASED
from remit.law.timing import Tempo
from remit.model.claims import Accepted, Actor, Code, Operation, Refused, Verdict
from remit.model.wire.agent_messages import Beat, Heard, NodeState
from remit.store import chain
from remit.store.protocol import Committed, Head, Invalid, Store, StoreError, Unanswered, Unavailable
from remit.world.concurrency import one_failure
from remit.world.interfaces import Clock, Ids

T = TypeVar("T")

QUEUE_MAX: Final = 65_536
"""Operations that may wait in one lane."""

HISTORY_KEPT: Final = 20_000
"""How many revisions stay readable for watchers and paged lists before they are compacted away."""

READING_MS_MAX: Final = 600_000
"""For so long one that takes over may beat without leading: it may never come to the end of what it reads."""

COMPACT_EVERY: Final = 4_000
RETRY_MS: Final = 200
STEPS: Final = 3
"""Of the event loop, until a commit that was begun is on its way to the disk, and those just answered have asked again."""


class Decided(NamedTuple):
    """A batch, and whose operations are in it."""

    pieces: Sequence[Piece]
    prepared: Prepared


class Deposed(Exception):
    """Another authority has taken over; `by` is its head, if it is known."""

    def __init__(self, by: Head | None) -> None:
        self.by = by
        super().__init__(f"deposed by {by.holder} at epoch {by.epoch}" if by else "deposed")


class Authority:
    """Made by `take_over`; works while `run` runs. Satisfies `client.endpoint.Endpoint`."""

    def __init__(
        self,
        store: Store,
        scope: str,
        clock: Clock,
        place: chain.Place,
        books: Books,
        outcomes: Outcomes,
        batch_max: BatchMax = BATCH_MAX,
        tempo: Tempo = Tempo(),
    ) -> None:
        self.store = store
        self.scope = scope
        self.clock = clock
        self.books = books
        self.outcomes = outcomes
        self.batch_max = batch_max
        self.tempo = tempo
        self._place = place
        self.hearing = Hearing(clock.now_ms())
        self._first_window = outcomes.window
        self._queue = Queue(batch_max.operations)
        self._wake = asyncio.Event()
        self._ended: Deposed | None = None
        self._running = False
        self._early = 0
        self._confirming: asyncio.Future[Head | None] | None = None
        self._batches = 0
        self._house = asyncio.Event()
        self._oldest = 1
        self._suspects = 0
        """How many operations are still to be decided one by one, because a batch of them could not be written."""
        self._faults: Mapping[str, str] = NO_FAULTS
        self.tally = AuthorityCounts()

    @classmethod
    async def take_over(
        cls,
        store: Store,
        *,
        scope: str,
        holder: str,
        clock: Clock,
        ids: Ids,
        place: chain.Place | None = None,
        batch_max: BatchMax = BATCH_MAX,
        beat_ms: int = 0,
        tempo: Tempo = Tempo(),
    ) -> Authority:
        """Fence every older authority of this scope and continue from what it left in the store.

        `place` is where the epoch was raised, if that was done already, as by opening a store that one process owns. With
        `beat_ms` the chain advances that often while all there is is read, so that standbys see that somebody does.
        """
        place = place or await chain.seize(store, holder, ids.incarnation())
        moment = Moment(clock.now_ms(), clock.boot(), {}, clock.now_ms(), place.head.sequence, place.head.incarnation)
        kept = await store.range(BATCH, limit=1)
        new = recovery.is_new(place, kept=bool(kept.rows))
        # In a new store there is nothing to read, and a beat would look as if there were.
        beats = _Beats(store, clock, place, 0 if new else beat_ms)
        books, outcomes = await beats.during(load(store, place, moment, lambda: beats.place.revision))
        authority = cls(store, scope, clock, beats.place, books, outcomes, batch_max, tempo)
        authority._oldest = int(kept.rows[0].key.removeprefix(BATCH)) if kept.rows else authority.head.sequence + 1
        if await recovery.is_due(store, place.head.incarnation):
            await authority._doubt_everything(new=new)
        return authority

    @property
    def head(self) -> Head:
        return self._place.head

    # -- what may be asked -----------------------------------------------------------------------------------------------

    async def ask(self, operations: Sequence[Operation], /) -> list[Verdict]:
        """One verdict an operation, in order, once they are durable."""
        if self._ended is not None:
            raise self._turned()
        operations = tuple(operations)  # the asker's own list is the asker's to change
        if not operations:
            return []
        if not self._queue.has_room(operations, QUEUE_MAX):
            raise Overloaded(RETRY_MS)
        answer = self._queue.put(operations)
        self._wake.set()
        return await answer

    async def status(self) -> Status:
        """Where the scope stands. A window is announced only once a batch has recorded it: one that died with this authority
        would leave its clients with ids that no successor knows.
        """
        if self._ended is not None:
            raise self._turned()
        if self._running and self._window() > self.outcomes.window:
            answer = self._queue.put(())
            self._wake.set()
            with suppress(Overloaded):  # then the window before is still the last that is recorded
                await answer
        head, now_ms, window = self._place.head, self.clock.now_ms(), self.outcomes.window
        stand = head.incarnation, head.epoch, head.sequence, window, WINDOW_MS, head.holder, self.clock.boot(), now_ms
        return Status(self.scope, *stand, self.tempo.beat_ms, *self.hearing.silences(self.books, now_ms))

    async def renew(self, actor: Actor, /) -> bool:
        """Begin the lease's term anew, from now. Answered only after the store has confirmed, later than this call, that
        nobody has taken over: a deposed authority must not extend what its successor has begun to count.
        """
        return (await self._renew((actor,)))[0]

    async def beat(self, beats: Sequence[Beat], /) -> list[bool]:
        """As `renew`, for many agents at once; and what each says of its node is kept until it says more."""
        held = await self._renew([beat.actor for beat in beats])
        for beat, mine in zip(beats, held, strict=True):
            if mine:
                self.hearing.told(beat)
        return held

    async def heard(self) -> Heard:
        if self._ended is not None:
            raise self._turned()
        return self.hearing.heard(self._place.head.incarnation, self.clock.now_ms())

    async def states(self, nodes: Sequence[str], /) -> list[NodeState]:
        if self._ended is not None:
            raise self._turned()
        return self.hearing.states(nodes)

    async def _renew(self, actors: Sequence[Actor]) -> list[bool]:
        received_ms = self.clock.now_ms()
        confirmed = await self._read_head()
        if confirmed is None:
            raise Silence("the store could not confirm who leads")
        if confirmed.epoch != self._place.head.epoch or self._ended is not None:
            raise Turned(confirmed.holder)
        draft = self.ground().draft()
        held = [actor.role not in UNLEASED and claimant(draft, actor) is None for actor in actors]
        for actor, mine in zip(actors, held, strict=True):
            if mine:
                self.hearing.renewed(actor, received_ms)
        return held

    async def _read_head(self) -> Head | None:
        """The head, by a read of the store that began after this call; None if it cannot be read. Callers share one read."""
        if self._confirming is not None:
            # That read began before this call, so it proves too little; the next one is shared by all who wait here.
            await asyncio.wait([self._confirming])
        if self._confirming is not None and not self._confirming.done():
            return await asyncio.shield(self._confirming)
        mine: asyncio.Future[Head | None] = asyncio.get_running_loop().create_future()
        self._confirming = mine
        try:
            place = await chain.read_place(self.store)
            mine.set_result(None if place is None else place.head)
        except StoreError:
            mine.set_result(None)
        finally:
            if not mine.done():
                mine.set_result(None)
        return mine.result()

    # -- working ---------------------------------------------------------------------------------------------------------

    async def run(self, *, beat_ms: int = 0) -> None:
        """Work until deposed (raises `Deposed`) or cancelled. With `beat_ms`, an idle authority advances the chain that
        often, so that standbys see that it lives.
        """
        self._ended = None
        self._running = True
        try:
            with one_failure():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._keep_house())
                    while True:
                        await self._wait_for_work(beat_ms)
                        await self._work()
        except Deposed as deposed:
            self._ended = deposed
            raise
        finally:
            self._running = False
            self._ended = self._ended or Deposed(None)
            self._queue.fail_all(self._turned())  # what was only queued did not happen

    async def _keep_house(self) -> None:
        """Compact the history beside the work, never in its way."""
        while True:
            await self._house.wait()
            self._house.clear()
            try:
                await self.store.compact(max(0, self._place.revision - HISTORY_KEPT))
            except Unavailable:
                continue

    async def _wait_for_work(self, beat_ms: int) -> None:
        if self._queue:
            return
        self._wake.clear()
        if not beat_ms:
            await self._wake.wait()
            return
        try:
            async with self.clock.timeout_ms(beat_ms):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _work(self) -> None:
        """Batch after batch, as long as whole ones wait: the next is decided while one is being written."""
        current: Decided | None = self._decide(None)
        while current is not None:
            writing = asyncio.ensure_future(self._write(current.prepared))
            following: Decided | None = None
            try:
                for _ in range(STEPS):
                    await asyncio.sleep(0)
                if self._queue.full and not writing.done():
                    following = self._decide(current.prepared)
                revision = await writing
            except BaseException as error:  # noqa: BLE001  (cancelled, or our own bug too: nobody may be left waiting)
                writing.cancel()
                await self._failed(current, following, error)
                return
            if revision is None:
                self._take_back(current, following)
                return
            plain = Accepted(revision)
            self._queue.answer(current.pieces, [self._verdict(answer, plain) for answer in current.prepared.answers])
            self._suspects, self._faults = max(0, self._suspects - len(current.prepared.answers)), NO_FAULTS
            self._batches += 1
            if self._batches % COMPACT_EVERY == 0:
                self._house.set()
            current = following

    def _decide(self, below: Prepared | None) -> Decided | None:
        """The next batch; on top of another that is being written, perhaps none."""
        while below is None or not self._suspects:
            pieces = self._queue.take(one=self._suspects > 0)
            operations = [operation for piece in pieces for operation in piece.operations]
            try:
                prepared = prepare(self.ground(below), operations, self._faults)
            except Invalid as fault:
                self._suspect(pieces, fault)
                continue
            except BaseException:
                self._queue.give_back(pieces)
                raise
            pieces, rest = cut(pieces, len(prepared.answers))
            self._queue.put_off(rest, pieces)
            return Decided(pieces, prepared)
        return None

    def _suspect(self, pieces: Sequence[Piece], fault: Invalid) -> None:
        """A row that the store will not take, too large say. Deciding one by one finds whose it is."""
        operations = [operation for piece in pieces for operation in piece.operations]
        if not operations:
            raise fault
        self._queue.give_back(pieces)
        if len(operations) == 1:
            self._faults = {operations[0].id: str(fault)}
        self._suspects = max(self._suspects, len(operations))

    async def _failed(self, current: Decided, following: Decided | None, error: BaseException) -> None:
        """What those hear whose batch was not written, or may not have been; what was decided on top of it did not happen."""
        self._take_back(following)
        if isinstance(error, Invalid):
            self._suspect(current.pieces, error)
            return
        told: NoVerdict
        if isinstance(error, Unavailable):
            told = Overloaded(RETRY_MS, str(error))
        elif isinstance(error, Deposed):
            told = Turned(error.by.holder if error.by else "")
        else:
            # Cancelled, a lost answer that could not be settled, or our own bug: what was under way may have been written.
            told = Silence(str(error) or "the authority stopped in the middle of the batch")
        for piece in current.pieces:
            piece.waiting.fail(told)
        if not isinstance(error, Unavailable):
            raise Deposed(None) if isinstance(error, Silence) else error from error
        await self.clock.sleep_ms(RETRY_MS)

    def _take_back(self, *decided: Decided | None) -> None:
        for one in reversed(decided):
            if one is not None:
                self._queue.give_back(one.pieces)

    def _verdict(self, answer: Answer, plain: Accepted) -> Verdict:
        """What was recorded is what is answered, now and at every retry."""
        if isinstance(answer, Entry) and answer.plain:
            return plain
        entry = answer.entry if isinstance(answer, Known) else answer
        if not isinstance(entry, Entry):
            return entry
        verdict = self.outcomes.known(entry.id)
        return verdict if verdict is not None else Refused(Code(entry.code), entry.detail)

    async def _write(self, prepared: Prepared) -> int | None:
        """Commit and absorb. Answers the revision; None if the batch was lost and must be decided anew."""
        head, began_ms = prepared.head, self.clock.now_ms()
        self._place = await _advance(self.store, self.clock, self._place, head, prepared.puts, prepared.deletes)
        if self._place.head != head:
            return None
        revision = self._place.revision
        self.books.absorb(prepared.draft, revision, dict(prepared.puts))
        self.outcomes.record(head.sequence, prepared.batch, revision)
        self.hearing.took(prepared.draft.heard)
        self._oldest = prepared.oldest
        self.tally.wrote(prepared.batch.entries, self.clock.now_ms() - began_ms)
        return revision

    async def _doubt_everything(self, *, new: bool) -> None:
        """The first batches of a new incarnation, in slices; the marker goes with the last, so an interrupted one resumes."""
        names, most = sorted(self.books.replicas), self.batch_max.replicas
        slices = [names[i : i + most] for i in range(0, len(names), most)]
        for index, part in enumerate([*slices, []]):
            last = index == len(slices)
            written = None
            while written is None:
                ground = self.ground()
                draft = ground.draft()
                recovery.doubt(draft, part)
                if last:
                    recovery.disown(draft)
                    recovery.await_nodes(draft)
                    recovery.vacate(draft, self._place.head.epoch, new=new)
                marker = (recovery.MARKER, self._place.head.incarnation.encode())
                written = await self._write(written_out(ground, draft, marker=marker if last else None))

    def ground(self, below: Prepared | None = None) -> Ground:
        head, oldest = (self._place.head, self._oldest) if below is None else (below.head, below.oldest)
        clock, hearing, wall = self.clock, self.hearing, self.clock.wall()
        moment = Moment(
            clock.now_ms(), clock.boot(), hearing.at_ms, hearing.since_ms, head.sequence + 1, head.incarnation, self.tempo, wall
        )
        return Ground(self.books, self.outcomes, head, oldest, moment, self._window(), wall, below, self.batch_max.replicas)

    def _window(self) -> int:
        if self.outcomes.crowded():
            self._early = max(self._early, self.outcomes.window + 1 - self._first_window - self._elapsed())
        return max(self.outcomes.window, self._first_window + self._elapsed() + self._early)

    def _elapsed(self) -> int:
        return (self.clock.now_ms() - self.hearing.since_ms) // WINDOW_MS

    def _turned(self) -> Turned:
        return Turned(self._ended.by.holder if self._ended is not None and self._ended.by is not None else "")


async def _advance(
    store: Store,
    clock: Clock,
    place: chain.Place,
    head: Head,
    puts: Sequence[tuple[str, bytes]] = (),
    deletes: Sequence[str] = (),
) -> chain.Place:
    """Commit a batch. Answers where the chain stands then: at `head`, or at an empty batch if this one was lost for good."""
    try:
        answer = await store.commit(chain.batch(place, head, puts, deletes))
    except Unanswered:
        return await _settle(store, clock, place, head)
    if not isinstance(answer, Committed):
        now = await chain.read_place(store)
        raise Deposed(now.head if now else None)
    return chain.Place(head, answer.revision)


async def _settle(store: Store, clock: Clock, place: chain.Place, lost: Head) -> chain.Place:
    while True:
        try:
            settled = await chain.settle(store, place, lost)
        except Unavailable:
            await clock.sleep_ms(RETRY_MS)
            continue
        if isinstance(settled, chain.Deposed):
            # The lost batch may have landed before the successor took over: its outcomes are for that one to tell.
            raise Silence("deposed after a lost answer; ask the new authority the same ids")
        return settled


class _Beats:
    """Advances the chain by empty batches `during` some work; `place` is where it stands."""

    def __init__(self, store: Store, clock: Clock, place: chain.Place, beat_ms: int) -> None:
        self.place = place
        self._store, self._clock, self._beat_ms = store, clock, beat_ms

    async def during(self, work: Awaitable[T]) -> T:
        """Whoever is deposed over it leaves off. A batch under way is seen to its end: else nobody would know the place."""
        over = asyncio.Event()
        with one_failure():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat(over))
                done = await work
                over.set()
        return done

    async def _beat(self, over: asyncio.Event) -> None:
        until_ms = self._clock.now_ms() + READING_MS_MAX
        while self._beat_ms and not over.is_set() and self._clock.now_ms() < until_ms:
            try:
                async with self._clock.timeout_ms(self._beat_ms):
                    await over.wait()
            except TimeoutError:
                with suppress(Unavailable):  # nothing was written; the next may be
                    head = chain.advance(self.place.head, (), ())
                    self.place = await _advance(self._store, self._clock, self.place, head)
