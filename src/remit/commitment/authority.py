"""The active authority of a scope: takes over, decides operations in batches, commits, and only then answers.

The order of steps is the safety argument:

1. *Take over*: raise the epoch in the store, which fences every older authority. Then read all rows at or after that
   revision, and give every lease a full new term. The chain advances by empty batches while the rows are read, so that
   standbys see a live leader.
2. *Decide* a batch of operations against a draft over the books. Nothing is visible yet (batch.py).
3. *Commit* the batch's rows, outcomes and audit entries in one transaction that advances the chain.
4. *Absorb* the draft into the books and answer the callers. Refusals wait for this step too: only a successful transaction
   proves that the epoch was still current when they were decided.

While one batch is being written, the next is decided on top of its draft, provided that a full batch is queued. It is
written only after the batch before it was absorbed. If that batch was lost, the operations of both are decided again.

If the reply of step 3 is lost, an empty batch at the same sequence settles whether the commit landed (store/chain.py).
Nothing is absorbed or decided until that is known. If another writer advanced the chain, this authority has lost leadership:
it writes nothing more and answers nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from remit.client.endpoint import AuthorityStatus, EndpointError, NotLeader, OutcomeUnknown, Overloaded
from remit.commitment import recovery
from remit.commitment.batch import NO_FAULTS, Answer, Ground, Known, Prepared, prepare, written_out
from remit.commitment.books import Books, Moment
from remit.commitment.metrics import AuthorityCounts
from remit.commitment.operation_queue import BATCH_MAX, BatchMax, Piece, Queue, cut
from remit.commitment.outcomes import BATCH, WINDOW_MS, Entry, Outcomes
from remit.commitment.recovery import load
from remit.commitment.rulings.leases import Hearing, claimant
from remit.commitment.rulings.registry import UNLEASED
from remit.law.timing import Timing
from remit.model.claims import Accepted, Actor, Code, Operation, Refused, Verdict
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.store import chain
from remit.store.protocol import Committed, Head, Invalid, Store, StoreError, Unanswered, Unavailable
from remit.world.concurrency import one_failure
from remit.world.interfaces import Clock, Ids

T = TypeVar("T")

QUEUE_MAX: Final = 65_536
"""Maximum number of operations queued in one lane. More are refused with `Overloaded`."""

HISTORY_KEPT: Final = 20_000
"""Revisions that stay readable for watches and paged lists. Older ones are compacted."""

READING_MS_MAX: Final = 600_000
"""Maximum time for which a takeover may advance the chain without leading. A load that never ends must not block the standbys.
"""

COMPACT_EVERY: Final = 4_000
RETRY_MS: Final = 200
STEPS: Final = 3
"""Event loop iterations granted to a commit before the next batch is decided. By then the write is on its way to the disk, and
clients that were just answered have sent their next operations.
"""


class Decided(NamedTuple):
    """A decided batch, and the slices of submissions that it answers."""

    pieces: Sequence[Piece]
    prepared: Prepared


class Deposed(Exception):
    """Another authority has taken over. `by` is its head, if it is known."""

    def __init__(self, by: Head | None) -> None:
        self.by = by
        super().__init__(
            f"leadership lost to {by.holder} at epoch {by.epoch}" if by else "leadership lost" if by else "deposed"
        )


class Authority:
    """The active authority of one scope. Created by `take_over`; decides operations while `run` runs. Satisfies
    `client.endpoint.Endpoint`.
    """

    def __init__(
        self,
        store: Store,
        scope: str,
        clock: Clock,
        place: chain.Place,
        books: Books,
        outcomes: Outcomes,
        batch_max: BatchMax = BATCH_MAX,
        tempo: Timing = Timing(),
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
        """Operations still to be decided one at a time, because a batch that contains them could not be written."""
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
        tempo: Timing = Timing(),
    ) -> Authority:
        """Fence every older authority of this scope, and load its state from the store.

        `position` is the chain position of this authority's epoch, if the epoch was raised already (for example when the
        process opened a store that it owns exclusively). With `heartbeat_ms`, the chain advances at that interval during the
        load, so that standbys do not take over.
        """
        place = place or await chain.seize(store, holder, ids.incarnation())
        moment = Moment(clock.now_ms(), clock.boot(), {}, clock.now_ms(), place.head.sequence, place.head.incarnation)
        kept = await store.range(BATCH, limit=1)
        new = recovery.is_new(place, kept=bool(kept.rows))
        # A new store has no rows to read, and an empty batch would make it look used (`recovery.is_new_store`).
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

    # -- endpoint ----------------------------------------------------------------------------------------------------------

    async def submit(self, operations: Sequence[Operation], /) -> list[Verdict]:
        """Return one verdict per operation, in order, once all of them are durable."""
        if self._ended is not None:
            raise self._turned()
        operations = tuple(operations)  # copied: the caller may change its list while the operations are queued
        if not operations:
            return []
        if not self._queue.has_room(operations, QUEUE_MAX):
            raise Overloaded(RETRY_MS)
        answer = self._queue.put(operations)
        self._wake.set()
        return await answer

    async def status(self) -> AuthorityStatus:
        """Return the scope's status: epoch, sequence, current window, heartbeat interval and lease renewal ages.

        A new window is announced only after a batch has recorded it. Otherwise a crash of this authority would leave clients
        with ids of a window that its successor does not know.
        """
        if self._ended is not None:
            raise self._turned()
        if self._running and self._window() > self.outcomes.window:
            answer = self._queue.put(())
            self._wake.set()
            with suppress(Overloaded):  # the previous window is then still the latest recorded one
                await answer
        head, now_ms, window = self._place.head, self.clock.now_ms(), self.outcomes.window
        stand = head.incarnation, head.epoch, head.sequence, window, WINDOW_MS, head.holder, self.clock.boot(), now_ms
        return AuthorityStatus(self.scope, *stand, self.tempo.heartbeat_ms, *self.hearing.silences(self.books, now_ms))

    async def renew(self, actor: Actor, /) -> bool:
        """Restart the term of the actor's lease. Return False if the actor does not hold it.

        The answer waits until a read of the store that began after this call confirms the epoch: an authority that lost
        leadership must not extend a lease whose term its successor has begun to count.
        """
        return (await self._renew((actor,)))[0]

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> list[bool]:
        """Renew the leases of many agents, as `renew` does, and keep the latest state that each reports for its node."""
        held = await self._renew([beat.actor for beat in beats])
        for beat, mine in zip(beats, held, strict=True):
            if mine:
                self.hearing.told(beat)
        return held

    async def heartbeat_ages(self) -> HeartbeatReport:
        if self._ended is not None:
            raise self._turned()
        return self.hearing.heard(self._place.head.incarnation, self.clock.now_ms())

    async def node_states(self, nodes: Sequence[str], /) -> list[NodeState]:
        if self._ended is not None:
            raise self._turned()
        return self.hearing.states(nodes)

    async def _renew(self, actors: Sequence[Actor]) -> list[bool]:
        received_ms = self.clock.now_ms()
        confirmed = await self._read_head()
        if confirmed is None:
            raise OutcomeUnknown("the store could not be read, so leadership is unconfirmed; retry the renewal")
        if confirmed.epoch != self._place.head.epoch or self._ended is not None:
            raise NotLeader(confirmed.holder)
        draft = self.ground().draft()
        held = [actor.role not in UNLEASED and claimant(draft, actor) is None for actor in actors]
        for actor, mine in zip(actors, held, strict=True):
            if mine:
                self.hearing.renewed(actor, received_ms)
        return held

    async def _read_head(self) -> Head | None:
        """Return the head by a read of the store that began after this call, or None if the store cannot be read. Concurrent
        callers share one read.
        """
        if self._confirming is not None:
            # The read in flight began before this call, so it proves nothing about now. All callers waiting here share the next
            # one.
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

    # -- batch loop --------------------------------------------------------------------------------------------------------

    async def run(self, *, beat_ms: int = 0) -> None:
        """Process batches until leadership is lost (raises `LeadershipLost`) or the task is cancelled. With `heartbeat_ms`, an
        idle authority commits an empty batch at that interval, so that standbys see that it is alive.
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
            self._queue.fail_all(self._turned())  # operations that were only queued were not executed

    async def _keep_house(self) -> None:
        """Compact the store's history in the background, so that no batch waits for it."""
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
        """Decide and write batches while full ones are queued. The next batch is decided while the current one is being
        written.
        """
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
            except BaseException as error:  # noqa: BLE001 (also cancellation and our own bugs: every caller must get an answer)
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
        """Decide the next batch, on top of `below` if that batch is still being written. Return None if the next operations
        must be decided one at a time: those are not pipelined.
        """
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
        """Handle a row that the store rejects, for example because it is too large: decide the operations of the batch one at a
        time to find the one that wrote it. A batch of one has found it; that operation is refused when it is decided again.
        """
        operations = [operation for piece in pieces for operation in piece.operations]
        if not operations:
            raise fault
        self._queue.give_back(pieces)
        if len(operations) == 1:
            self._faults = {operations[0].id: str(fault)}
        self._suspects = max(self._suspects, len(operations))

    async def _failed(self, current: Decided, following: Decided | None, error: BaseException) -> None:
        """Fail the callers of a batch that was not written, or may not have been. Operations decided on top of it return to the
        queue, since they did not happen.
        """
        self._take_back(following)
        if isinstance(error, Invalid):
            self._suspect(current.pieces, error)
            return
        told: EndpointError
        if isinstance(error, Unavailable):
            told = Overloaded(RETRY_MS, str(error))
        elif isinstance(error, Deposed):
            told = NotLeader(error.by.holder if error.by else "")
        else:
            # Cancelled, a lost commit that could not be settled, or a bug of ours: the batch may have been written.
            told = OutcomeUnknown(
                str(error) or str(error) or "the authority stopped while it wrote this batch; retry with the same operation ids"
            )
        for piece in current.pieces:
            piece.waiting.fail(told)
        if not isinstance(error, Unavailable):
            raise Deposed(None) if isinstance(error, OutcomeUnknown) else error from error
        await self.clock.sleep_ms(RETRY_MS)

    def _take_back(self, *decided: Decided | None) -> None:
        for one in reversed(decided):
            if one is not None:
                self._queue.give_back(one.pieces)

    def _verdict(self, answer: Answer, plain: Accepted) -> Verdict:
        """Return the verdict as it was recorded, so that every retry receives the same answer."""
        if isinstance(answer, Entry) and answer.plain:
            return plain
        entry = answer.entry if isinstance(answer, Known) else answer
        if not isinstance(entry, Entry):
            return entry
        verdict = self.outcomes.known(entry.id)
        return verdict if verdict is not None else Refused(Code(entry.code), entry.detail)

    async def _write(self, prepared: Prepared) -> int | None:
        """Commit a batch and absorb it. Return its revision, or None if the batch was lost and must be decided again."""
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
        """Write the first batches of a new incarnation: they mark the restored state as unconfirmed (recovery.py).

        Replicas are marked in slices. The marker row is written with the last slice, so an interrupted run starts over.
        """
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

    def _turned(self) -> NotLeader:
        return NotLeader(self._ended.by.holder if self._ended is not None and self._ended.by is not None else "")


async def _advance(
    store: Store,
    clock: Clock,
    place: chain.Place,
    head: Head,
    puts: Sequence[tuple[str, bytes]] = (),
    deletes: Sequence[str] = (),
) -> chain.Place:
    """Commit a batch. Return the resulting chain position: at `head`, or at an empty batch if this one was lost for good."""
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
            # The lost batch may have landed before the successor took over. Only the successor knows its outcomes.
            raise OutcomeUnknown(
                "leadership was lost before a commit was confirmed; retry with the same operation ids at the new leader"
            )
        return settled


class _Beats:
    """Advances the chain by empty batches while other work runs. `position` is the current chain position."""

    def __init__(self, store: Store, clock: Clock, place: chain.Place, beat_ms: int) -> None:
        self.place = place
        self._store, self._clock, self._beat_ms = store, clock, beat_ms

    async def during(self, work: Awaitable[T]) -> T:
        """Await `work` while the chain advances at the interval. Losing leadership cancels the work. A batch in flight is
        awaited to its end, because the chain position is unknown until then.
        """
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
                with suppress(Unavailable):  # nothing was written; the next attempt may succeed
                    head = chain.advance(self.place.head, (), ())
                    self.place = await _advance(self._store, self._clock, self.place, head)
