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
from remit.commitment.batch import (
    NO_ERRORS,
    AnswerOfPreviousBatch,
    BatchAnswer,
    BatchBase,
    PreparedBatch,
    encode_draft,
    prepare,
)
from remit.commitment.books import Books, DecisionTime
from remit.commitment.metrics import AuthorityMetrics
from remit.commitment.operation_queue import BATCH_LIMITS, BatchLimits, BatchSlice, OperationQueue, split_slices
from remit.commitment.outcomes import BATCH_PREFIX, WINDOW_MS, AuditEntry, Outcomes
from remit.commitment.recovery import load
from remit.commitment.rulings.leases import LeaseRenewals, check_fence
from remit.commitment.rulings.registry import UNLEASED_ROLES
from remit.law.timing import Timing
from remit.model.claims import Accepted, Actor, Code, Operation, Refused, Verdict
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.store import chain
from remit.store.protocol import CommitOutcomeUnknown, Committed, Head, Invalid, Store, StoreError, Unavailable
from remit.world.concurrency import first_failure
from remit.world.interfaces import Clock, Ids

T = TypeVar("T")

QUEUE_MAX: Final = 65_536
"""Maximum number of operations queued in one lane. More are refused with `Overloaded`."""

HISTORY_REVISIONS: Final = 20_000
"""Revisions that stay readable for watches and paged lists. Older ones are compacted."""

LOAD_HEARTBEATS_MS_MAX: Final = 600_000
"""Maximum time for which a takeover advances the chain without leading. A load that never ends must not block standbys."""

COMPACT_EVERY_BATCHES: Final = 4_000
RETRY_MS: Final = 200
YIELDS_BEFORE_NEXT_BATCH: Final = 3
"""Event loop iterations granted to a commit before the next batch is decided. By then the write is on its way to the disk, and
clients that were just answered have sent their next operations.
"""


class DecidedBatch(NamedTuple):
    """A decided batch, and the slices of submissions that it answers."""

    slices: Sequence[BatchSlice]
    prepared: PreparedBatch


class LeadershipLost(Exception):
    """Another authority has taken over. `by` is its head, if it is known."""

    def __init__(self, by: Head | None) -> None:
        self.by = by
        super().__init__(f"leadership lost to {by.holder} at epoch {by.epoch}" if by else "leadership lost")


class Authority:
    """The active authority of one scope. Created by `take_over`; decides operations while `run` runs. Satisfies
    `client.endpoint.Endpoint`.
    """

    def __init__(
        self,
        store: Store,
        scope: str,
        clock: Clock,
        position: chain.ChainPosition,
        books: Books,
        outcomes: Outcomes,
        batch_limits: BatchLimits = BATCH_LIMITS,
        timing: Timing = Timing(),
    ) -> None:
        self.store = store
        self.scope = scope
        self.clock = clock
        self.books = books
        self.outcomes = outcomes
        self.batch_limits = batch_limits
        self.timing = timing
        self._position = position
        self.renewals = LeaseRenewals(clock.now_ms())
        self._first_window = outcomes.window
        self._queue = OperationQueue(batch_limits.operations)
        self._wake = asyncio.Event()
        self._leadership_lost: LeadershipLost | None = None
        self._running = False
        self._windows_early = 0
        self._head_read: asyncio.Future[Head | None] | None = None
        self._batches = 0
        self._compaction_due = asyncio.Event()
        self._oldest_batch = 1
        self._singles_left = 0
        """Operations still to be decided one at a time, because a batch that contains them could not be written."""
        self._known_errors: Mapping[str, str] = NO_ERRORS
        self.metrics = AuthorityMetrics()

    @classmethod
    async def take_over(
        cls,
        store: Store,
        *,
        scope: str,
        holder: str,
        clock: Clock,
        ids: Ids,
        position: chain.ChainPosition | None = None,
        batch_limits: BatchLimits = BATCH_LIMITS,
        heartbeat_ms: int = 0,
        timing: Timing = Timing(),
    ) -> Authority:
        """Fence every older authority of this scope, and load its state from the store.

        `position` is the chain position of this authority's epoch, if the epoch was raised already (for example when the
        process opened a store that it owns exclusively). With `heartbeat_ms`, the chain advances at that interval during the
        load, so that standbys do not take over.
        """
        position = position or await chain.raise_epoch(store, holder, ids.incarnation())
        decision_time = DecisionTime(
            clock.now_ms(), clock.boot(), {}, clock.now_ms(), position.head.sequence, position.head.incarnation
        )
        batches = await store.range(BATCH_PREFIX, limit=1)
        new = recovery.is_new_store(position, has_batches=bool(batches.rows))
        # A new store has no rows to read, and an empty batch would make it look used (`recovery.is_new_store`).
        heartbeats = _ChainHeartbeats(store, clock, position, 0 if new else heartbeat_ms)
        books, outcomes = await heartbeats.during(load(store, position, decision_time, lambda: heartbeats.position.revision))
        authority = cls(store, scope, clock, heartbeats.position, books, outcomes, batch_limits, timing)
        authority._oldest_batch = (
            int(batches.rows[0].key.removeprefix(BATCH_PREFIX)) if batches.rows else authority.head.sequence + 1
        )
        if await recovery.needs_distrust(store, position.head.incarnation):
            await authority._distrust_restored_state(new=new)
        return authority

    @property
    def head(self) -> Head:
        return self._position.head

    # -- endpoint ----------------------------------------------------------------------------------------------------------

    async def submit(self, operations: Sequence[Operation], /) -> list[Verdict]:
        """Return one verdict per operation, in order, once all of them are durable."""
        if self._leadership_lost is not None:
            raise self._not_leader()
        operations = tuple(operations)  # copied: the caller may change its list while the operations are queued
        if not operations:
            return []
        if not self._queue.has_capacity(operations, QUEUE_MAX):
            raise Overloaded(RETRY_MS)
        future = self._queue.put(operations)
        self._wake.set()
        return await future

    async def status(self) -> AuthorityStatus:
        """Return the scope's status: epoch, sequence, current window, heartbeat interval and lease renewal ages.

        A new window is announced only after a batch has recorded it. Otherwise a crash of this authority would leave clients
        with ids of a window that its successor does not know.
        """
        if self._leadership_lost is not None:
            raise self._not_leader()
        if self._running and self._current_window() > self.outcomes.window:
            future = self._queue.put(())
            self._wake.set()
            with suppress(Overloaded):  # the previous window is then still the latest recorded one
                await future
        head, now_ms, window = self._position.head, self.clock.now_ms(), self.outcomes.window
        chain_fields = head.incarnation, head.epoch, head.sequence, window, WINDOW_MS, head.holder, self.clock.boot(), now_ms
        return AuthorityStatus(
            self.scope, *chain_fields, self.timing.heartbeat_ms, *self.renewals.renewal_ages(self.books, now_ms)
        )

    async def renew(self, actor: Actor, /) -> bool:
        """Restart the term of the actor's lease. Return False if the actor does not hold it.

        The answer waits until a read of the store that began after this call confirms the epoch: an authority that lost
        leadership must not extend a lease whose term its successor has begun to count.
        """
        return (await self._renew_leases((actor,)))[0]

    async def heartbeat(self, heartbeats: Sequence[NodeHeartbeat], /) -> list[bool]:
        """Renew the leases of many agents, as `renew` does, and keep the latest state that each reports for its node."""
        held = await self._renew_leases([heartbeat.actor for heartbeat in heartbeats])
        for heartbeat, is_held in zip(heartbeats, held, strict=True):
            if is_held:
                self.renewals.record_state(heartbeat)
        return held

    async def heartbeat_ages(self) -> HeartbeatReport:
        if self._leadership_lost is not None:
            raise self._not_leader()
        return self.renewals.heartbeat_report(self._position.head.incarnation, self.clock.now_ms())

    async def node_states(self, nodes: Sequence[str], /) -> list[NodeState]:
        if self._leadership_lost is not None:
            raise self._not_leader()
        return self.renewals.node_states(nodes)

    async def _renew_leases(self, actors: Sequence[Actor]) -> list[bool]:
        received_ms = self.clock.now_ms()
        confirmed = await self._read_head()
        if confirmed is None:
            raise OutcomeUnknown("the store could not be read, so leadership is unconfirmed; retry the renewal")
        if confirmed.epoch != self._position.head.epoch or self._leadership_lost is not None:
            raise NotLeader(confirmed.holder)
        draft = self.batch_base().draft()
        held = [actor.role not in UNLEASED_ROLES and check_fence(draft, actor) is None for actor in actors]
        for actor, is_held in zip(actors, held, strict=True):
            if is_held:
                self.renewals.record_renewal(actor, received_ms)
        return held

    async def _read_head(self) -> Head | None:
        """Return the head by a read of the store that began after this call, or None if the store cannot be read. Concurrent
        callers share one read.
        """
        if self._head_read is not None:
            # The read in flight began before this call, so it proves nothing about now. All waiting callers share
            # the next one.
            await asyncio.wait([self._head_read])
        if self._head_read is not None and not self._head_read.done():
            return await asyncio.shield(self._head_read)
        read: asyncio.Future[Head | None] = asyncio.get_running_loop().create_future()
        self._head_read = read
        try:
            position = await chain.read_position(self.store)
            read.set_result(None if position is None else position.head)
        except StoreError:
            read.set_result(None)
        finally:
            if not read.done():
                read.set_result(None)
        return read.result()

    # -- batch loop --------------------------------------------------------------------------------------------------------

    async def run(self, *, heartbeat_ms: int = 0) -> None:
        """Process batches until leadership is lost (raises `LeadershipLost`) or the task is cancelled. With `heartbeat_ms`, an
        idle authority commits an empty batch at that interval, so that standbys see that it is alive.
        """
        self._leadership_lost = None
        self._running = True
        try:
            with first_failure():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._compact_history())
                    while True:
                        await self._wait_for_work(heartbeat_ms)
                        await self._process_batches()
        except LeadershipLost as error:
            self._leadership_lost = error
            raise
        finally:
            self._running = False
            self._leadership_lost = self._leadership_lost or LeadershipLost(None)
            self._queue.fail_all(self._not_leader())  # operations that were only queued were not executed

    async def _compact_history(self) -> None:
        """Compact the store's history in the background, so that no batch waits for it."""
        while True:
            await self._compaction_due.wait()
            self._compaction_due.clear()
            try:
                await self.store.compact(max(0, self._position.revision - HISTORY_REVISIONS))
            except Unavailable:
                continue

    async def _wait_for_work(self, heartbeat_ms: int) -> None:
        if self._queue:
            return
        self._wake.clear()
        if not heartbeat_ms:
            await self._wake.wait()
            return
        try:
            async with self.clock.timeout_ms(heartbeat_ms):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _process_batches(self) -> None:
        """Decide and write batches while full ones are queued. The next batch is decided while the current one is being
        written.
        """
        current: DecidedBatch | None = self._decide_batch(None)
        while current is not None:
            writing = asyncio.ensure_future(self._commit(current.prepared))
            following: DecidedBatch | None = None
            try:
                for _ in range(YIELDS_BEFORE_NEXT_BATCH):
                    await asyncio.sleep(0)
                # Fewer operations wait for the next batch anyway: many small batches would cost a transaction each.
                if self._queue.has_full_batch and not writing.done():
                    following = self._decide_batch(current.prepared)
                revision = await writing
            except BaseException as error:  # noqa: BLE001 (also cancellation and our own bugs: every caller must get an answer)
                writing.cancel()
                await self._fail_batch(current, following, error)
                return
            if revision is None:
                self._return_to_queue(current, following)
                return
            plain = Accepted(revision)
            self._queue.answer(current.slices, [self._verdict(answer, plain) for answer in current.prepared.answers])
            self._singles_left, self._known_errors = max(0, self._singles_left - len(current.prepared.answers)), NO_ERRORS
            self._batches += 1
            if self._batches % COMPACT_EVERY_BATCHES == 0:
                self._compaction_due.set()
            current = following

    def _decide_batch(self, previous: PreparedBatch | None) -> DecidedBatch | None:
        """Decide the next batch, on top of `previous` if that batch is still being written. Return None if the next operations
        must be decided one at a time: those are not pipelined.
        """
        while previous is None or not self._singles_left:
            slices = self._queue.take(single=self._singles_left > 0)
            operations = [operation for part in slices for operation in part.operations]
            try:
                prepared = prepare(self.batch_base(previous), operations, self._known_errors)
            except Invalid as error:
                self._isolate_failure(slices, error)
                continue
            except BaseException:
                self._queue.return_to_queue(slices)
                raise
            slices, rest = split_slices(slices, len(prepared.answers))
            self._queue.defer(rest, slices)
            return DecidedBatch(slices, prepared)
        return None

    def _isolate_failure(self, slices: Sequence[BatchSlice], error: Invalid) -> None:
        """Handle a row that the store rejects, for example because it is too large: decide the operations of the batch one at a
        time to find the one that wrote it. A batch of one has found it; that operation is refused when it is decided again.
        """
        operations = [operation for part in slices for operation in part.operations]
        if not operations:
            raise error
        self._queue.return_to_queue(slices)
        if len(operations) == 1:
            self._known_errors = {operations[0].id: str(error)}
        self._singles_left = max(self._singles_left, len(operations))

    async def _fail_batch(self, current: DecidedBatch, following: DecidedBatch | None, error: BaseException) -> None:
        """Fail the callers of a batch that was not written, or may not have been. Operations decided on top of it return to the
        queue, since they did not happen.
        """
        self._return_to_queue(following)
        if isinstance(error, Invalid):
            self._isolate_failure(current.slices, error)
            return
        failure: EndpointError
        if isinstance(error, Unavailable):
            failure = Overloaded(RETRY_MS, str(error))
        elif isinstance(error, LeadershipLost):
            failure = NotLeader(error.by.holder if error.by else "")
        else:
            # Cancelled, a lost commit that could not be settled, or a bug of ours: the batch may have been written.
            failure = OutcomeUnknown(
                str(error) or "the authority stopped while it wrote this batch; retry with the same operation ids"
            )
        for part in current.slices:
            part.submission.fail(failure)
        if not isinstance(error, Unavailable):
            # `_settle_commit` raises OutcomeUnknown only after it has found the head of another writer.
            raise LeadershipLost(None) if isinstance(error, OutcomeUnknown) else error from error
        await self.clock.sleep_ms(RETRY_MS)

    def _return_to_queue(self, *decided: DecidedBatch | None) -> None:
        for batch in reversed(decided):
            if batch is not None:
                self._queue.return_to_queue(batch.slices)

    def _verdict(self, answer: BatchAnswer, plain: Accepted) -> Verdict:
        """Return the verdict as it was recorded, so that every retry receives the same answer."""
        if isinstance(answer, AuditEntry) and answer.plain:
            return plain
        entry = answer.entry if isinstance(answer, AnswerOfPreviousBatch) else answer
        if not isinstance(entry, AuditEntry):
            return entry
        verdict = self.outcomes.get(entry.id)
        return verdict if verdict is not None else Refused(Code(entry.code), entry.detail)

    async def _commit(self, prepared: PreparedBatch) -> int | None:
        """Commit a batch and absorb it. Return its revision, or None if the batch was lost and must be decided again."""
        head, began_ms = prepared.head, self.clock.now_ms()
        self._position = await _commit_batch(self.store, self.clock, self._position, head, prepared.puts, prepared.deletes)
        if self._position.head != head:
            return None
        # No await from here to the end: renewals and status requests read the books, outcomes and renewals as one state.
        revision = self._position.revision
        self.books.absorb(prepared.draft.changes, prepared.draft.time, revision, dict(prepared.puts))
        self.outcomes.record(head.sequence, prepared.batch, revision)
        self.renewals.record_acquired(prepared.draft.changes.renewed_ms)
        self._oldest_batch = prepared.oldest
        self.metrics.record_batch(prepared.batch.entries, self.clock.now_ms() - began_ms)
        return revision

    async def _distrust_restored_state(self, *, new: bool) -> None:
        """Write the first batches of a new incarnation: they mark the restored state as unconfirmed (recovery.py).

        Replicas are marked in slices. The marker row (`recovery.INCARNATION_KEY`) is written with the last slice, so an
        interrupted run starts over.
        """
        names, slice_max = sorted(self.books.replicas), self.batch_limits.replicas
        slices = [names[i : i + slice_max] for i in range(0, len(names), slice_max)]
        for index, names_slice in enumerate([*slices, []]):
            last = index == len(slices)
            revision = None
            while revision is None:  # None: the batch was lost, so it is encoded again for the head after it
                base = self.batch_base()
                draft = base.draft()
                recovery.mark_replicas_unknown(draft, names_slice)
                if last:
                    recovery.void_grants(draft)
                    recovery.mark_nodes_unknown(draft)
                    recovery.vacate_leases(draft, self._position.head.epoch, new=new)
                marker = (recovery.INCARNATION_KEY, self._position.head.incarnation.encode())
                revision = await self._commit(encode_draft(base, draft, marker=marker if last else None))

    def batch_base(self, previous: PreparedBatch | None = None) -> BatchBase:
        head, oldest = (self._position.head, self._oldest_batch) if previous is None else (previous.head, previous.oldest)
        clock, renewals, wall = self.clock, self.renewals, self.clock.wall()
        decision_time = DecisionTime(
            clock.now_ms(),
            clock.boot(),
            renewals.renewed_ms,
            renewals.since_ms,
            head.sequence + 1,
            head.incarnation,
            self.timing,
            wall,
        )
        return BatchBase(
            self.books,
            self.outcomes,
            head,
            oldest,
            decision_time,
            self._current_window(),
            wall,
            previous,
            self.batch_limits.replicas,
        )

    def _current_window(self) -> int:
        if self.outcomes.is_window_full():
            self._windows_early = max(
                self._windows_early, self.outcomes.window + 1 - self._first_window - self._windows_elapsed()
            )
        return max(self.outcomes.window, self._first_window + self._windows_elapsed() + self._windows_early)

    def _windows_elapsed(self) -> int:
        return (self.clock.now_ms() - self.renewals.since_ms) // WINDOW_MS

    def _not_leader(self) -> NotLeader:
        return NotLeader(
            self._leadership_lost.by.holder
            if self._leadership_lost is not None and self._leadership_lost.by is not None
            else ""
        )


async def _commit_batch(
    store: Store,
    clock: Clock,
    position: chain.ChainPosition,
    head: Head,
    puts: Sequence[tuple[str, bytes]] = (),
    deletes: Sequence[str] = (),
) -> chain.ChainPosition:
    """Commit a batch. Return the resulting chain position: at `head`, or at an empty batch if this one was lost for good."""
    try:
        answer = await store.commit(chain.batch(position, head, puts, deletes))
    except CommitOutcomeUnknown:
        return await _settle_commit(store, clock, position, head)
    if not isinstance(answer, Committed):
        position_now = await chain.read_position(store)
        raise LeadershipLost(position_now.head if position_now else None)
    return chain.ChainPosition(head, answer.revision)


async def _settle_commit(store: Store, clock: Clock, position: chain.ChainPosition, lost: Head) -> chain.ChainPosition:
    while True:
        try:
            settled = await chain.settle(store, position, lost)
        except Unavailable:
            await clock.sleep_ms(RETRY_MS)
            continue
        if isinstance(settled, chain.FencedOut):
            # The lost batch may have landed before the successor took over. Only the successor knows its outcomes.
            raise OutcomeUnknown(
                "leadership was lost before a commit was confirmed; retry with the same operation ids at the new leader"
            )
        return settled


class _ChainHeartbeats:
    """Advances the chain by empty batches while other work runs. `position` is the current chain position."""

    def __init__(self, store: Store, clock: Clock, position: chain.ChainPosition, heartbeat_ms: int) -> None:
        self.position = position
        self._store, self._clock, self._heartbeat_ms = store, clock, heartbeat_ms

    async def during(self, work: Awaitable[T]) -> T:
        """Await `work` while the chain advances at the interval. Losing leadership cancels the work. A batch in flight is
        awaited to its end, because the chain position is unknown until then.
        """
        finished = asyncio.Event()
        with first_failure():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._advance_chain(finished))
                result = await work
                finished.set()
        return result

    async def _advance_chain(self, finished: asyncio.Event) -> None:
        until_ms = self._clock.now_ms() + LOAD_HEARTBEATS_MS_MAX
        while self._heartbeat_ms and not finished.is_set() and self._clock.now_ms() < until_ms:
            try:
                async with self._clock.timeout_ms(self._heartbeat_ms):
                    await finished.wait()
            except TimeoutError:
                with suppress(Unavailable):  # nothing was written; the next attempt may succeed
                    head = chain.advance(self.position.head, (), ())
                    self.position = await _commit_batch(self._store, self._clock, self.position, head)
