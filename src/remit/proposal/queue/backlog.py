"""Backlog of pending replicas: active, waiting and backoff; fills a round by progressive filling.

Time, randomness and events are passed in by the caller. Nothing is placed or charged here (see kernel.py and fair_share.py).

Replicas with equal requirements form one queue and share one result: an attempt for some of them holds for all, so reasons,
waits and backoffs belong to queues. A queue is **active**, **waiting** for an event, or in **backoff**. Waiting queues and
queues in backoff are skipped without being examined, so work that cannot be placed does not block other work (F23). Each of
them has a time at which it is tried again in any case.

**No wake-up is lost** (F22). The caller counts in `version` the changes it has applied to its view. An attempt starts with
`begin_attempt`, which returns the version it sees, and may end with `wait`; if one of its events happened after that
version, the queue stays active. An event at version N is visible to an attempt that began at N: changes are applied, counted
and reported before an attempt begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from remit.proposal.queue.class_queues import Ageing, ClassQueue, Member, PriorityLevels, QueueOrder, QueueWait, UnblockKey
from remit.proposal.queue.fair_share import FairShareLedger, ShareParts, TenantShare
from remit.proposal.queue.wakeups import QueuePredicate, UnblockHistory

QueueRun = tuple[ClassQueue, list[Member]]
"""Consecutive turns of one queue's members."""


class TenantAllocation:
    """Turns allocated to one tenant. They are counted one by one and taken out of the queues in larger pieces, which is
    cheaper.
    """

    __slots__ = ("_lanes", "_reserved", "_round", "parts", "queue", "remaining", "tenant_share")

    def __init__(self, tenant_share: TenantShare, lanes: list[QueueOrder], round_: FillRound) -> None:
        self.tenant_share = tenant_share
        self._lanes, self._round = lanes, round_
        self.queue: ClassQueue | None = None
        self.parts: ShareParts = []
        self.remaining = self._reserved = 0

    def next_queue(self) -> ClassQueue | None:
        """The queue whose turn is next, valid for at least `remaining` turns; None if nothing is queued."""
        self.flush()
        entries = [entry for lane in self._lanes if (entry := lane.first()) is not None]
        if not entries:
            return None
        queue = self.queue = min(entries)[3]
        self.parts = self.tenant_share.parts(queue.amount)
        # If this is the tenant's only queue, all of its members are next, regardless of arrival times.
        alone = len(entries) == 1 and sum(map(len, self._lanes)) == 1
        self.remaining = self._reserved = queue.queued if alone else queue.head_run()
        return queue

    def flush(self) -> None:
        """Takes the members whose turns were used out of the queue."""
        if self.queue is not None and self._reserved > self.remaining:
            self._round.take_members(self.queue, self._reserved - self.remaining)
        self.remaining = self._reserved = 0


class FillRound:
    """One round of progressive filling: repeatedly gives a turn to the tenant with the smallest share, which counts at once.

    The cost is one step per competing tenant and one heap operation per turn; a single tenant is served in bulk.
    """

    __slots__ = ("_levels", "_load_share", "_shares", "_taken", "_turn_counts", "_turn_queues", "remaining")

    def __init__(self, limit: int, levels: PriorityLevels, load_share: Callable[[str], TenantShare]) -> None:
        self.remaining = limit
        self._levels = levels
        self._load_share = load_share
        self._shares: dict[str, TenantShare] = {}
        """Kept for the whole round: turns given at one priority count at the next."""
        self._turn_queues: list[ClassQueue] = []
        self._turn_counts: list[int] = []
        self._taken: dict[ClassQueue, list[Member]] = {}

    def fill(self, lanes: dict[str, list[QueueOrder]]) -> None:
        """Takes members of one priority, each time from the tenant with the smallest share, until none is queued or the limit
        is reached. Tenants with equal shares are ordered by name.
        """
        allocations = [TenantAllocation(self._share_of(tenant), lanes[tenant], self) for tenant in sorted(lanes)]
        turns = [(allocation.tenant_share.share, i, allocation) for i, allocation in enumerate(allocations)]
        heapify(turns)
        queues, counts, limit = self._turn_queues, self._turn_counts, self.remaining
        last: ClassQueue | None = None
        while limit and turns:
            _, i, allocation = turns[0]
            queue = allocation.queue if allocation.remaining else allocation.next_queue()
            if queue is None:
                heappop(turns)
                continue
            count = 1 if len(turns) > 1 else min(limit, allocation.remaining)
            limit -= count
            allocation.remaining -= count
            heapreplace(turns, (allocation.tenant_share.add(allocation.parts, count), i, allocation))
            if queue is last:
                counts[-1] += count
            else:
                queues.append(queue)
                counts.append(count)
                last = queue
        for allocation in allocations:
            allocation.flush()
        self.remaining = limit

    def _share_of(self, tenant: str) -> TenantShare:
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = self._load_share(tenant)
        return share

    def take_members(self, queue: ClassQueue, count: int) -> None:
        """Takes this many members out of the queue, in queue order."""
        self._taken.setdefault(queue, []).extend(queue.pop(count))
        if not queue.queued:
            self._levels.drop(queue)

    def queues(self) -> list[ClassQueue]:
        """The queues from which members were taken."""
        return list(self._taken)

    def runs(self) -> list[QueueRun]:
        """The members taken, in the order of their turns."""
        given = dict.fromkeys(self._taken, 0)
        runs = []
        for queue, count in zip(self._turn_queues, self._turn_counts, strict=True):
            start = given[queue]
            given[queue] = end = start + count
            runs.append((queue, self._taken[queue][start:end]))
        return runs


RETRY_MS_MIN: Final = 45_000
RETRY_MS_MAX: Final = 60_000
BACKOFF_MS_BASE: Final = 200
BACKOFF_MS_MAX: Final = 20_000
_DOUBLINGS_MAX: Final = 20
_SLACK: Final = 64

Jitter = Callable[[int], int]
"""Returns a random number from 0 up to and including the limit, as `Randomness.jitter_ms` does."""


class ReasonCount(NamedTuple):
    queues: int
    members: int


class Backlog:
    """All replicas to be placed. Its size is that of the pending work; a waiting queue costs nothing until it is woken."""

    def __init__(self, jitter: Jitter, *, ageing: Ageing | None = None, history: UnblockHistory | None = None) -> None:
        self.version = 0
        """Version of the caller's view; it never decreases."""
        self._jitter = jitter
        self._history = UnblockHistory() if history is None else history
        self._queues: dict[Hashable, ClassQueue] = {}
        self._queue_by_member: dict[Member, ClassQueue] = {}
        self._levels = PriorityLevels(ageing or Ageing())
        self._inactive: dict[ClassQueue, tuple[int, int, ClassQueue]] = {}
        """Queues that wait or back off, each with its current timer entry."""
        self._timers: list[tuple[int, int, ClassQueue]] = []
        """Heap of timers. An entry that is not the current one of its queue is stale."""
        self._waiters: dict[UnblockKey, dict[ClassQueue, None]] = {}
        self._queues_in_flight: dict[str, dict[ClassQueue, None]] = {}
        """Queues with members in flight, by tenant."""
        self._serial = 0

    def __len__(self) -> int:
        """Number of members, queued and in flight."""
        return len(self._queue_by_member)

    @property
    def active(self) -> bool:
        """Whether `take` would return something now."""
        return bool(self._levels)

    def queues(self) -> Iterator[ClassQueue]:
        return iter(self._queues.values())

    def queue(self, key: Hashable) -> ClassQueue | None:
        return self._queues.get(key)

    def queue_of(self, member: Member) -> ClassQueue | None:
        return self._queue_by_member.get(member)

    def add(self, key: Hashable, make_queue: Callable[[], ClassQueue], member: Member, now_ms: int) -> ClassQueue:
        """Appends a member to the queue of this key, which is created if needed. A member that joins a waiting queue waits with
        it.
        """
        if member in self._queue_by_member:
            raise ValueError(f"{member!r} is already in the backlog")
        queue = self._queues.get(key)
        if queue is None:
            queue = make_queue()
            if queue.key != key or len(queue):
                raise ValueError(f"make_queue returned {queue!r}; expected a new, empty queue with key {key!r}")
            self._serial += 1
            queue.serial = self._serial
            self._queues[key] = queue
        self._queue_by_member[member] = queue
        queue.add(member, now_ms)
        if queue.queued == 1 and queue.wait is None:
            self._levels.put(queue)
        return queue

    def remove(self, member: Member) -> None:
        """Removes a member that was placed or is no longer desired. A member that is not in the backlog is ignored."""
        queue = self._queue_by_member.pop(member, None)
        if queue is None:
            return
        if queue.remove(member):
            queue.failures = 0
            self._drop_if_none_in_flight(queue)
        elif not queue.queued:
            self._levels.drop(queue)
        if not len(queue):
            self._wake(queue)
            self._levels.drop(queue)
            del self._queues[queue.key]

    def take_rest(self, queue: ClassQueue) -> list[Member]:
        """Takes all remaining members of a queue: a gang is tried complete, even beyond the limit of the batch."""
        members = queue.pop(queue.queued)
        self._levels.drop(queue)
        return members

    def return_member(self, member: Member) -> None:
        """Puts a member that was taken but not placed back to its old position, before members that arrived later."""
        queue = self._queue_by_member.get(member)
        if queue is None or not queue.in_flight(member):
            return  # it was removed during the attempt, and perhaps added again
        queue.return_member(member)
        self._drop_if_none_in_flight(queue)
        if queue.wait is None:
            self._levels.put(queue)

    def _drop_if_none_in_flight(self, queue: ClassQueue) -> None:
        if not queue.in_flight_count:
            queues = self._queues_in_flight[queue.tenant]
            del queues[queue]
            if not queues:
                del self._queues_in_flight[queue.tenant]

    def begin_attempt(self, queue: ClassQueue) -> int:
        """Starts an attempt for this queue; returns the version that the attempt sees."""
        queue.attempts += 1
        return self.version

    def wait(
        self,
        queue: ClassQueue,
        reason: str,
        unblock_events: frozenset[UnblockKey],
        *,
        since: int,
        now_ms: int,
        until_ms: int | None = None,
        detail: str = "",
    ) -> bool:
        """Records that an attempt which saw version `since` could not place the queue. Returns False if it is to be tried again
        at once.

        The queue is retried after 45 to 60 s in any case, or at `until_ms` if that is earlier. Jitter keeps queues that
        started to wait together from being retried together.
        """
        if not unblock_events:
            raise ValueError(f"{queue!r} cannot wait without an unblock event; use back_off")
        if self._queues.get(queue.key) is not queue:
            return False
        if queue.wait is not None and queue.wait.since > since:
            return True  # a later attempt has newer information
        if now_ms - queue.failed_ms > 2 * BACKOFF_MS_MAX:
            # Not earlier: a refused claim releases what it had taken, and would wake this queue and others without end.
            queue.failures = 0
        self._wake(queue)
        if self._history.happened_since(queue, unblock_events, since):
            return False
        retry_ms = now_ms + RETRY_MS_MIN + self._jitter(RETRY_MS_MAX - RETRY_MS_MIN)
        if until_ms is not None:
            retry_ms = min(retry_ms, until_ms)
        self._deactivate(queue, QueueWait(reason, unblock_events, retry_ms, now_ms, since, detail))
        for event in unblock_events:  # the order of this set does not matter: each event has its own entry
            self._waiters.setdefault(event, {})[queue] = None
        return True

    def back_off(self, queue: ClassQueue, reason: str, now_ms: int) -> None:
        """Records a failure that only time can resolve, such as a lost race or a timeout. Each failure doubles the pause.

        At least half of the pause remains after jitter, so that a queue which fails immediately does not spin.
        """
        if self._queues.get(queue.key) is not queue:
            return
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS_BASE << min(queue.failures, _DOUBLINGS_MAX))
        queue.failures, queue.failed_ms = queue.failures + 1, now_ms
        self._wake(queue)
        until_ms = now_ms + pause_ms - self._jitter(pause_ms // 2)
        self._deactivate(queue, QueueWait(reason, frozenset(), until_ms, now_ms, self.version))

    def record_failure(self, queue: ClassQueue, reason: str, now_ms: int) -> None:
        """Like `back_off`, but the first failure in a while causes no pause: its refusal updated the view, so the next attempt
        may succeed.
        """
        if queue.failures:
            self.back_off(queue, reason, now_ms)
        else:
            queue.failures, queue.failed_ms = 1, now_ms

    def on_event(self, event: UnblockKey, version: int, which: QueuePredicate | None = None) -> int:
        """Wakes the queues that wait for this event, or those of them that `which` selects; returns how many."""
        self.version = max(self.version, version)
        self._history.record(event, version, which)
        woken = [queue for queue in self._waiters.get(event, ()) if which is None or which(queue)]
        for queue in woken:
            self._wake(queue)
        return len(woken)

    def _deactivate(self, queue: ClassQueue, wait: QueueWait) -> None:
        queue.wait = wait
        self._levels.drop(queue)
        entry = self._inactive[queue] = (wait.until_ms, queue.serial, queue)
        heappush(self._timers, entry)
        if len(self._timers) > 2 * len(self._inactive) + _SLACK:
            self._timers = list(self._inactive.values())
            heapify(self._timers)

    def _wake(self, queue: ClassQueue) -> None:
        if queue.wait is None:
            return
        for event in queue.wait.unblock_events:
            waiters = self._waiters[event]
            del waiters[queue]
            if not waiters:
                del self._waiters[event]
        queue.wait = None
        del self._inactive[queue]
        if queue.queued:
            self._levels.put(queue)

    def next_ms(self) -> int | None:
        """When the next wait or backoff expires, if there is one. `take` wakes expired queues, so callers need no timer of
        their own.
        """
        while self._timers:
            entry = self._timers[0]
            if self._inactive.get(entry[2]) is entry:
                return entry[0]
            heappop(self._timers)
        return None

    def wake_expired(self, now_ms: int) -> None:
        """Activates queues whose wait or backoff has expired."""
        while (until_ms := self.next_ms()) is not None and until_ms <= now_ms:
            self._wake(self._timers[0][2])

    def tenants(self) -> list[str]:
        """Tenants with active queues."""
        return self._levels.tenants()

    def take(self, limit: int, now_ms: int, shares: FairShareLedger) -> list[QueueRun]:
        """Takes the next `limit` members in the order of their turns, as runs of one queue; they are in flight from then on.

        First by effective priority (class_queues.py). Within a priority, turns go to the tenant with the smallest dominant
        share, and each turn counts at once (progressive filling). Within a tenant by deadline, arrival, and age of the
        queue. Members in flight count towards their tenant until they are removed or returned, so `shares` only needs to be
        charged with placed replicas.
        """
        self.wake_expired(now_ms)
        round_ = FillRound(max(0, limit), self._levels, lambda tenant: self._tenant_share(tenant, now_ms, shares))
        for lanes in self._levels.descending(now_ms):
            if not round_.remaining:
                break
            round_.fill(lanes)
        for queue in round_.queues():
            self._queues_in_flight.setdefault(queue.tenant, {})[queue] = None
        return round_.runs()

    def _tenant_share(self, tenant: str, now_ms: int, shares: FairShareLedger) -> TenantShare:
        share = shares.tenant_share(tenant, now_ms)
        for queue in self._queues_in_flight.get(tenant, ()):
            share.add(share.parts(queue.amount), queue.in_flight_count)
        return share

    def waiting(self) -> Iterator[tuple[ClassQueue, QueueWait]]:
        """Every queue that is not active, with its reason, in the order in which they became inactive."""
        for queue in self._inactive:
            if queue.wait is not None:
                yield queue, queue.wait

    def reasons(self) -> dict[str, ReasonCount]:
        """Number of queues and members for each waiting reason."""
        counts: dict[str, ReasonCount] = {}
        for queue, wait in self.waiting():
            queues, members = counts.get(wait.reason, (0, 0))
            counts[wait.reason] = ReasonCount(queues + 1, members + len(queue))
        return dict(sorted(counts.items()))
