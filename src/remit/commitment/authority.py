"""Who makes claims true? The one active authority of a scope: it decides in batches, writes, and only then answers.

The order of steps is the safety argument:

1. *Take over*: raise the epoch in the store (from here every older authority is fenced), then read everything at or after
   that revision, and give every lease a full new term.
2. *Decide* a batch of operations against a draft over the books: nothing is visible yet.
3. *Commit* the batch's rows, its outcomes and its audit in one transaction that advances the chain.
4. *Absorb* the draft into the books, and answer everybody. Refusals too wait for this: only a transaction that went through
   proves that the epoch was still current when they were decided.

If the answer of step 3 is lost, an empty batch at the same sequence settles whether it landed (chain.py), and only then is
anything absorbed or decided anew. If the chain was advanced by somebody else, this authority is deposed: it writes and
answers nothing any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from remit.client.link import LinkError, Overloaded, Silence, Status, Turned
from remit.commitment import restoring
from remit.commitment.auditing import entry_of
from remit.commitment.books import NOTES_MAX, Books, Moment
from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.commitment.leasing import claimant
from remit.commitment.loading import load
from remit.commitment.outcomes import BATCH, WINDOW_MS, Batch, Entry, Outcomes, batch_key, digest, encode_batch
from remit.commitment.rulings import UNLEASED
from remit.model.claims import (
    Abandon,
    Accepted,
    Actor,
    Code,
    Operation,
    Refused,
    Role,
    Verdict,
    window_of,
)
from remit.model.objects import decode, encode
from remit.store import chain
from remit.store.protocol import Committed, Head, Invalid, Store, StoreError, Unanswered, Unavailable
from remit.world.promises import Clock, Ids

BATCH_MAX: Final = 256
QUEUE_MAX: Final = 65_536
AUDIT_BATCHES_KEPT: Final = 100_000
HISTORY_KEPT: Final = 20_000
"""How many revisions stay readable for watchers and paged lists before they are compacted away."""

SLICE: Final = 10_000
COMPACT_EVERY: Final = 4_000
RETRY_MS: Final = 200
OPERATION_BYTES_MAX: Final = 4 << 20
"""Half of what a row may have: a larger claim would be refused by the store, and so end the authority."""


class Prepared(NamedTuple):
    """A batch that was decided but not written."""

    draft: Draft
    batch: Batch
    answers: list[Verdict | Entry]
    puts: list[tuple[str, bytes]]
    deletes: list[str]
    oldest: int


class Waiting(NamedTuple):
    operations: Sequence[Operation]
    answer: asyncio.Future[list[Verdict]]


class Deposed(Exception):
    """Another authority has taken over; `by` is its head, if it is known."""

    def __init__(self, by: Head | None) -> None:
        self.by = by
        super().__init__(f"deposed by {by.holder} at epoch {by.epoch}" if by else "deposed")


class Authority:
    """Made by `take_over`; works while `run` runs. Satisfies `client.link.Link`."""

    def __init__(self, store: Store, scope: str, clock: Clock, place: chain.Place, books: Books, outcomes: Outcomes) -> None:
        self.store = store
        self.scope = scope
        self.clock = clock
        self.books = books
        self.outcomes = outcomes
        self.heard: dict[str, int] = {}
        self._place = place
        self._since_ms = clock.now_ms()
        self._first_window = outcomes.window
        self._queue: deque[Waiting] = deque()
        self._queued = 0
        self._wake = asyncio.Event()
        self._ended: Deposed | None = None
        self._running = False
        self._early = 0
        self._confirming: asyncio.Future[Head | None] | None = None
        self._batches = 0
        self._house = asyncio.Event()
        self._oldest = 1

    @classmethod
    async def take_over(
        cls, store: Store, *, scope: str, holder: str, clock: Clock, ids: Ids, place: chain.Place | None = None
    ) -> Authority:
        """Fence every older authority of this scope and continue from what it left in the store.

        `place` is where the epoch was raised, if that was done already, as by opening a store that one process owns.
        """
        place = place or await chain.seize(store, holder, ids.incarnation())
        moment = Moment(clock.now_ms(), clock.boot(), {}, clock.now_ms(), place.head.sequence, place.head.incarnation)
        books, outcomes = await load(store, place, moment)
        authority = cls(store, scope, clock, place, books, outcomes)
        kept = await store.range(BATCH, limit=1)
        authority._oldest = int(kept.rows[0].key.removeprefix(BATCH)) if kept.rows else place.head.sequence + 1
        if await restoring.is_due(store, place.head.incarnation):
            await authority._doubt_everything()
        return authority

    @property
    def head(self) -> Head:
        return self._place.head

    # -- what may be asked -----------------------------------------------------------------------------------------------

    async def ask(self, operations: Sequence[Operation], /) -> list[Verdict]:
        """One verdict an operation, in order, once they are durable."""
        if self._ended is not None:
            raise self._turned()
        if not operations:
            return []
        if self._queued + len(operations) > QUEUE_MAX:
            raise Overloaded(RETRY_MS)
        waiting = Waiting(operations, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._queued += len(operations)
        self._wake.set()
        return await waiting.answer

    async def status(self) -> Status:
        """Where the scope stands. A window is announced only once a batch has recorded it: one that died with this authority
        would leave its clients with ids that no successor knows.
        """
        if self._running and self._ended is None and self._window() > self.outcomes.window:
            waiting = Waiting((), asyncio.get_running_loop().create_future())
            self._queue.append(waiting)
            self._wake.set()
            await waiting.answer
        head = self._place.head
        return Status(self.scope, head.incarnation, head.epoch, head.sequence, self.outcomes.window, WINDOW_MS, head.holder)

    async def renew(self, actor: Actor, /) -> bool:
        """Begin the lease's term anew, from now. Answered only after the store has confirmed, later than this call, that
        nobody has taken over: a deposed authority must not extend what its successor has begun to count.
        """
        received_ms = self.clock.now_ms()
        confirmed = await self._read_head()
        if confirmed is None:
            raise Silence("the store could not confirm who leads")
        if confirmed.epoch != self._place.head.epoch or self._ended is not None:
            raise Turned(confirmed.holder)
        if actor.role in UNLEASED or claimant(self._draft(), actor) is not None:
            return False
        self.heard[actor.lease] = max(received_ms, self.heard.get(actor.lease, 0))
        return True

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
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_house())
                while True:
                    await self._wait_for_work(beat_ms)
                    await self._work()
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            self._ended = first if isinstance(first, Deposed) else None
            raise first from None
        finally:
            self._running = False
            self._ended = self._ended or Deposed(None)
            self._turn_away()

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
        """One batch, from the queue to the answers."""
        taken: list[Waiting] = []
        count = 0
        while self._queue and (count == 0 or count + len(self._queue[0].operations) <= BATCH_MAX):
            waiting = self._queue.popleft()
            count += len(waiting.operations)
            taken.append(waiting)
        self._queued -= count
        operations = [operation for waiting in taken for operation in waiting.operations]
        verdicts: list[Verdict] = []
        try:
            await self.decide_and_commit(operations, verdicts)
        except Unavailable as unavailable:
            _answer(taken, verdicts, Overloaded(RETRY_MS, str(unavailable)))
            await self.clock.sleep_ms(RETRY_MS)
        except Deposed as deposed:
            _answer(taken, verdicts, Turned(deposed.by.holder if deposed.by else ""))
            raise
        except BaseException as error:
            # Cancelled, a lost answer that could not be settled, or our own bug: what was under way may have been written.
            _answer(taken, verdicts, Silence(str(error) or "the authority stopped in the middle of the batch"))
            raise Deposed(None) if isinstance(error, Silence) else error from error
        else:
            _answer(taken, verdicts, None)
            self._batches += 1
            if self._batches % COMPACT_EVERY == 0:
                self._house.set()

    async def decide_and_commit(self, operations: Sequence[Operation], verdicts: list[Verdict]) -> None:
        """Decide and write, batch by batch, adding to `verdicts` what is durable.

        Raises, for the batch that was under way: `Deposed` or `Unavailable` (nothing of it written), `Silence` (unknown).
        """
        most, faults = BATCH_MAX, dict[str, str]()
        while True:
            part = operations[len(verdicts) : len(verdicts) + most]
            try:
                prepared = self._prepare(part, faults)
                revision = await self._write(prepared, None)
            except Invalid as fault:
                # A row that the store will not take, too large say. Deciding them one by one finds whose it is.
                if not part:
                    raise
                most, faults = 1, {part[0].id: str(fault)} if len(part) == 1 else {}
                continue
            if revision is not None:
                plain = Accepted(revision)
                verdicts += [self._verdict(answer, plain) for answer in prepared.answers]
            if len(verdicts) >= len(operations) and revision is not None:
                return

    def _prepare(self, operations: Sequence[Operation], faults: Mapping[str, str] = MappingProxyType({})) -> Prepared:
        draft = self._draft()
        window = self._window()
        entries: dict[str, Entry] = {}
        answers: list[Verdict | Entry] = []
        audited: list[Entry] = []
        for operation in operations:
            if len(draft.replicas) > SLICE:
                break
            try:
                taken, size = digest(operation)
            except UnicodeEncodeError as error:
                answers.append(Refused(Code.INVALID, f"it has text that is not Unicode: {error.reason}"))
                continue
            before = entries.get(operation.id)
            if before is not None and before.digest in ("", taken):
                answers.append(before)
                continue
            known = self.outcomes.judge(operation.id, taken) if before is None else _MISMATCH
            if known is not None:
                answers.append(known)
                if isinstance(known, Refused) and not known.revision:
                    audited.append(entry_of(operation, taken, known))
                continue
            if size > OPERATION_BYTES_MAX:
                ruled: int | Refused = Refused(Code.LIMIT, f"the operation has {size} bytes; {OPERATION_BYTES_MAX} at most")
            elif isinstance(operation.claim, Abandon):
                ruled = self._abandon(draft, operation, operation.claim.operation, entries)
            elif operation.id in faults:
                ruled = Refused(Code.FAULT, faults[operation.id])
            else:
                try:
                    ruled = decide(draft, operation)
                except Exception as fault:  # noqa: BLE001  (whatever it is, it must not take the authority with it)
                    # Our own bug. The draft may be half written: it is thrown away, and the batch decided without this one.
                    return self._prepare(operations, {**faults, operation.id: f"{type(fault).__name__}: {fault}"})
            entry = entry_of(operation, taken, ruled)
            entries[operation.id] = entry
            answers.append(entry)
        return self._prepared(draft, self._batch((*entries.values(), *audited), window), answers)

    def _prepared(self, draft: Draft, batch: Batch, answers: list[Verdict | Entry]) -> Prepared:
        puts: list[tuple[str, bytes]] = []
        deletes: list[str] = []
        for changes in (draft.replicas, draft.things, draft.notes):
            for name, thing in changes.items():
                if thing is None:
                    deletes.append(name)
                else:
                    puts.append((name, encode(thing)))
        self._check_readable(draft)
        crowd = len(self.books.notes.keys() | draft.notes.keys()) - NOTES_MAX if draft.notes else 0
        for name in islice(self.books.notes, max(crowd, 0)):
            if name not in draft.notes:
                draft.notes[name] = None
                deletes.append(name)
        sequence = self._place.head.sequence + 1
        puts.append((batch_key(sequence), encode_batch(batch)))
        # Two old rows go with each new one, until enough are gone; never one whose outcomes a successor needs.
        last = min(sequence - AUDIT_BATCHES_KEPT, batch.first, self._oldest + 2)
        deletes += [batch_key(old) for old in range(self._oldest, last)]
        return Prepared(draft, batch, answers, puts, deletes, max(self._oldest, last))

    def _check_readable(self, draft: Draft) -> None:
        """Every row must be readable for whoever takes over; a claim that was given by reference was checked by nobody."""
        for name, thing in (*draft.things.items(), *draft.notes.items()):
            if thing is not None:
                try:
                    decode(encode(thing))
                except (msgspec.MsgspecError, ValueError) as error:
                    raise Invalid(f"{name} would not be readable: {error}") from None

    def _batch(self, entries: tuple[Entry, ...], window: int) -> Batch:
        sequence = self._place.head.sequence + 1
        horizon = self.outcomes.next_horizon(window)
        first = self.outcomes.first(horizon, sequence)
        return Batch(self._place.head.epoch, window, horizon, first, self.clock.wall(), entries)

    def _abandon(self, draft: Draft, operation: Operation, target: str, entries: dict[str, Entry]) -> int | Refused:
        """Unless the target has an outcome, make this its outcome, whatever its payload. Either way the answer is the target's
        own outcome (`Outcomes.record`).
        """
        nobody = Refused(Code.ROLE, "nobody asks as the authority") if operation.actor.role is Role.AUTHORITY else None
        fenced = nobody or claimant(draft, operation.actor)
        if fenced is not None:
            return fenced
        before = entries.get(target)
        if before is not None:
            return before.number if not before.code else Refused(Code(before.code), before.detail)
        known = self.outcomes.known(target)
        if known is not None:
            return known.number if isinstance(known, Accepted) else Refused(known.code, known.detail)
        issued = window_of(target)
        if issued is None:
            return Refused(Code.INVALID, "operation: not an operation id")
        if issued[0] != self.outcomes.incarnation or issued[1] < self.outcomes.horizon:
            return Refused(Code.OPERATION_EXPIRED, f"operation {target} is older than the outcomes kept")
        refused = Refused(Code.ABANDONED, f"operation {target} was abandoned")
        entries[target] = Entry(target, "", "abandoned", "", "", "", "", 0, 0, 0, 0, Code.ABANDONED.value, refused.detail, "")
        return refused

    def _verdict(self, answer: Verdict | Entry, plain: Accepted) -> Verdict:
        """What was recorded is what is answered, now and at every retry."""
        if not isinstance(answer, Entry):
            return answer
        if answer.plain:
            return plain
        verdict = self.outcomes.known(answer.id)
        return verdict if verdict is not None else Refused(Code(answer.code), answer.detail)

    async def _write(self, prepared: Prepared, marker: tuple[str, bytes] | None) -> int | None:
        """Commit and absorb. Answers the revision; None if the batch was lost and must be decided anew."""
        place = self._place
        puts = [*prepared.puts, marker] if marker else prepared.puts
        head = chain.advance(place.head, puts, prepared.deletes)
        try:
            answer = await self.store.commit(chain.batch(place, head, puts, prepared.deletes))
        except Unanswered:
            settled = await self._settle(place, head)
            self._place = settled
            if settled.head != head:
                return None
            revision = settled.revision
        else:
            if not isinstance(answer, Committed):
                now = await chain.read_place(self.store)
                raise Deposed(now.head if now else None)
            revision = answer.revision
            self._place = chain.Place(head, revision)
        self.books.absorb(prepared.draft, revision, dict(prepared.puts))
        self.outcomes.record(head.sequence, prepared.batch, revision)
        self.heard.update(prepared.draft.heard)
        self._oldest = prepared.oldest
        return revision

    async def _doubt_everything(self) -> None:
        """The first batches of a new incarnation, in slices; the marker goes with the last, so an interrupted one resumes."""
        names = sorted(self.books.replicas)
        slices = [names[i : i + SLICE] for i in range(0, len(names), SLICE)]
        for index, part in enumerate([*slices, []]):
            last = index == len(slices)
            written = None
            while written is None:
                draft = self._draft()
                restoring.doubt(draft, part)
                if last:
                    restoring.disown(draft)
                    restoring.await_nodes(draft)
                    restoring.vacate(draft, self._place.head.epoch)
                prepared = self._prepared(draft, self._batch((), self._window()), [])
                marker = (restoring.MARKER, self._place.head.incarnation.encode())
                written = await self._write(prepared, marker if last else None)

    async def _settle(self, place: chain.Place, lost: Head) -> chain.Place:
        while True:
            try:
                settled = await chain.settle(self.store, place, lost)
            except Unavailable:
                await self.clock.sleep_ms(RETRY_MS)
                continue
            if isinstance(settled, chain.Deposed):
                # The lost batch may have landed before the successor took over: its outcomes are for that one to tell.
                raise Silence("deposed after a lost answer; ask the new authority the same ids")
            return settled

    def _draft(self) -> Draft:
        head = self._place.head
        moment = Moment(self.clock.now_ms(), self.clock.boot(), self.heard, self._since_ms, head.sequence + 1, head.incarnation)
        return Draft(self.books, moment)

    def _window(self) -> int:
        if self.outcomes.crowded():
            self._early = max(self._early, self.outcomes.window + 1 - self._first_window - self._elapsed())
        return max(self.outcomes.window, self._first_window + self._elapsed() + self._early)

    def _elapsed(self) -> int:
        return (self.clock.now_ms() - self._since_ms) // WINDOW_MS

    def _turned(self) -> Turned:
        return Turned(self._ended.by.holder if self._ended is not None and self._ended.by is not None else "")

    def _turn_away(self) -> None:
        """Nobody waits for ever for an authority that has stopped; what was only queued did not happen."""
        _answer(list(self._queue), [], self._turned())
        self._queue.clear()
        self._queued = 0


_MISMATCH: Final = Refused(Code.OPERATION_MISMATCH, "the id was used for something else in the same batch")


def _answer(taken: Sequence[Waiting], verdicts: list[Verdict], error: LinkError | None) -> None:
    """Give each asker its verdicts, or the error. One whose operations were begun but not finished is told nothing."""
    start = 0
    for waiting in taken:
        end = start + len(waiting.operations)
        if waiting.answer.done():
            pass
        elif end <= len(verdicts):
            waiting.answer.set_result(verdicts[start:end])
        elif error is not None:
            begun = start < len(verdicts)
            waiting.answer.set_exception(Silence("part of it is done; ask the same ids again") if begun else error)
        start = end
