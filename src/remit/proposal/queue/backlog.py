"""Backlog of pending replicas: active, waiting and backoff; fills a round by progressive filling.

Time, randomness and events are passed in by the caller. Nothing is placed or charged here (see kernel.py and fair_share.py).

Replicas with equal requirements form one queue and share one result: an attempt for some of them holds for all, so reasons,
waits and backoffs belong to queues. A queue is **active**, **waiting** for an event, or in **backoff**. Waiting queues and
queues in backoff are skipped without being examined, so work that cannot be placed does not block other work (F23). Each of
them has a time at which it is tried again in any case.

**No wake-up is lost** (F22). The caller counts in `version` the changes it has applied to its view. An attempt starts with
`begin`, which returns the version it sees, and may end with `wait`; if one of its events happened after that version, the
queue stays active. An event at version N is visible to an attempt that began at N: changes are applied, counted and reported
before an attempt begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from remit.proposal.queue.class_queues import Ageing, UnblockKey, ClassQueue, Member, QueueOrder, PriorityLevels, QueueWait
from remit.proposal.queue.fair_share import ShareParts, FairShareLedger, TenantShare
from remit.proposal.queue.wakeups import UnblockHistory, QueuePredicate

QueueRun = tuple[ClassQueue, list[Member]]
"""Consecutive turns of one queue's members."""


class TenantAllocation:
    """Turns allocated to one tenant. They are counted one by one and taken out of the queues in larger pieces, which is
    cheaper.
    """

    __slots__ = ("_lanes", "_round", "_start", "left", "line", "parts", "standing")

    def __init__(self, standing: TenantShare, lanes: list[QueueOrder], round_: FillRound) -> None:
        self.standing = standing
        self._lanes, self._round = lanes, round_
        self.line: ClassQueue | None = None
        self.parts: ShareParts = []
        self.left = self._start = 0

    def draw(self) -> ClassQueue | None:
        """The queue whose turn is next, valid for at least `left` turns; None if nothing is queued."""
        self.settle()
        entries = [entry for lane in self._lanes if (entry := lane.first()) is not None]
        if not entries:
            return None
        line = self.line = min(entries)[3]
        self.parts = self.standing.parts(line.amount)
        # If this is the tenant's only queue, all of its members are next, whatever their arrival times.
        alone = len(entries) == 1 and sum(map(len, self._lanes)) == 1
        self.left = self._start = line.queued if alone else line.run()
        return line

    def settle(self) -> None:
        """Takes the allocated turns out of the queue."""
        if self.line is not None and self._start > self.left:
            self._round.draw(self.line, self._start - self.left)
        self.left = self._start = 0


class FillRound:
    """One round of progressive filling: repeatedly gives a turn to the tenant with the smallest share, which counts at once.

    The cost is one step per competing tenant and one heap operation per turn; a single tenant is served in bulk.
    """

    __slots__ = ("_counts", "_drawn", "_lines", "_ranks", "_standing", "_standings", "left")

    def __init__(self, limit: int, ranks: PriorityLevels, standing: Callable[[str], TenantShare]) -> None:
        self.left = limit
        self._ranks = ranks
        self._standing = standing
        self._standings: dict[str, TenantShare] = {}
        """Kept for the whole round: turns given at one priority count at the next."""
        self._lines: list[ClassQueue] = []
        self._counts: list[int] = []
        self._drawn: dict[ClassQueue, list[Member]] = {}

    def fill(self, lanes: dict[str, list[QueueOrder]]) -> None:
        """Gives out turns at one priority until nothing is queued or the limit is reached. Equal shares are ordered by tenant
        name.
        """
        hands = [TenantAllocation(self._of(tenant), lanes[tenant], self) for tenant in sorted(lanes)]
        turns = [(hand.standing.share, i, hand) for i, hand in enumerate(hands)]
        heapify(turns)
        lines, counts, limit = self._lines, self._counts, self.left
        last: ClassQueue | None = None
        while limit and turns:
            _, i, hand = turns[0]
            line = hand.line if hand.left else hand.draw()
            if line is None:
                heappop(turns)
                continue
            count = 1 if len(turns) > 1 else min(limit, hand.left)
            limit -= count
            hand.left -= count
            heapreplace(turns, (hand.standing.add(hand.parts, count), i, hand))
            if line is last:
                counts[-1] += count
            else:
                lines.append(line)
                counts.append(count)
                last = line
        for hand in hands:
            hand.settle()
        self.left = limit

    def _of(self, tenant: str) -> TenantShare:
        found = self._standings.get(tenant)
        if found is None:
            found = self._standings[tenant] = self._standing(tenant)
        return found

    def draw(self, line: ClassQueue, count: int) -> None:
        """Takes this many members out of the queue, in queue order."""
        self._drawn.setdefault(line, []).extend(line.pop(count))
        if not line.queued:
            self._ranks.drop(line)

    def drawn(self) -> list[ClassQueue]:
        """The queues from which members were taken."""
        return list(self._drawn)

    def runs(self) -> list[QueueRun]:
        """The members taken, in the order of their turns."""
        given = dict.fromkeys(self._drawn, 0)
        found = []
        for line, count in zip(self._lines, self._counts, strict=True):
            start = given[line]
            given[line] = end = start + count
            found.append((line, self._drawn[line][start:end]))
        return found


RETRY_MS_MIN: Final = 45_000
RETRY_MS_MAX: Final = 60_000
BACKOFF_MS_BASE: Final = 200
BACKOFF_MS_MAX: Final = 20_000
_DOUBLINGS_MAX: Final = 20
_SLACK: Final = 64

Jitter = Callable[[int], int]
"""Returns a random number from 0 up to and including the limit, as `Chance.uniform_ms`."""


class ReasonCount(NamedTuple):
    lines: int
    members: int


class Backlog:
    """All replicas to be placed. Its size is that of the pending work; a waiting queue costs nothing until it is woken."""

    def __init__(self, lot: Jitter, *, ageing: Ageing | None = None, past: UnblockHistory | None = None) -> None:
        self.version = 0
        """Version of the caller's view; it never decreases."""
        self._lot = lot
        self._past = UnblockHistory() if past is None else past
        self._lines: dict[Hashable, ClassQueue] = {}
        self._home: dict[Member, ClassQueue] = {}
        self._ranks = PriorityLevels(ageing or Ageing())
        self._inactive: dict[ClassQueue, tuple[int, int, ClassQueue]] = {}
        """Queues that wait or back off, each with its current timer entry."""
        self._timers: list[tuple[int, int, ClassQueue]] = []
        """Heap of timers. An entry that is not the current one of its queue is stale."""
        self._waiters: dict[UnblockKey, dict[ClassQueue, None]] = {}
        self._airborne: dict[str, dict[ClassQueue, None]] = {}
        """Queues with members in flight, by tenant."""
        self._serial = 0

    def __len__(self) -> int:
        """Number of members, queued and in flight."""
        return len(self._home)

    @property
    def active(self) -> bool:
        """Whether `take` would return something now."""
        return bool(self._ranks)

    def lines(self) -> Iterator[ClassQueue]:
        return iter(self._lines.values())

    def line(self, key: Hashable) -> ClassQueue | None:
        return self._lines.get(key)

    def line_of(self, member: Member) -> ClassQueue | None:
        return self._home.get(member)

    def add(self, key: Hashable, make_line: Callable[[], ClassQueue], member: Member, now_ms: int) -> ClassQueue:
        """Appends a member to the queue of this key, which is created if needed. A member that joins a waiting queue waits with
        it.
        """
        if member in self._home:
            raise ValueError(f"{member!r} is already in the backlog")
        line = self._lines.get(key)
        if line is None:
            line = make_line()
            if line.key != key or len(line):
                raise ValueError(f"make_line returned {line!r}; expected a new, empty queue with key {key!r}")
            self._serial += 1
            line.serial = self._serial
            self._lines[key] = line
        self._home[member] = line
        line.add(member, now_ms)
        if line.queued == 1 and line.wait is None:
            self._ranks.put(line)
        return line

    def remove(self, member: Member) -> None:
        """Removes a member that was placed or is no longer desired. A member that is not in the backlog is ignored."""
        line = self._home.pop(member, None)
        if line is None:
            return
        if line.remove(member):
            line.failures = 0
            self._landed(line)
        elif not line.queued:
            self._ranks.drop(line)
        if not len(line):
            self._wake(line)
            self._ranks.drop(line)
            del self._lines[line.key]

    def take_rest(self, line: ClassQueue) -> list[Member]:
        """Takes all remaining members of a queue: a gang is tried complete, whatever the limit of the batch."""
        members = line.pop(line.queued)
        self._ranks.drop(line)
        return members

    def returned(self, member: Member) -> None:
        """Puts a member that was taken but not placed back to its old position, before members that arrived later."""
        line = self._home.get(member)
        if line is None or not line.in_flight(member):
            return  # it was removed during the attempt, and perhaps added again
        line.put_back(member)
        self._landed(line)
        if line.wait is None:
            self._ranks.put(line)

    def _landed(self, line: ClassQueue) -> None:
        if not line.flying:
            lines = self._airborne[line.tenant]
            del lines[line]
            if not lines:
                del self._airborne[line.tenant]

    def begin(self, line: ClassQueue) -> int:
        """Starts an attempt for this queue; returns the version that the attempt sees."""
        line.attempts += 1
        return self.version

    def wait(
        self, line: ClassQueue, reason: str, cures: frozenset[UnblockKey], *, since: int, now_ms: int, until_ms: int | None = None
    ) -> bool:
        """Records that an attempt which saw version `since` could not place the queue. Returns False if it is to be tried again
        at once.

        The queue is retried after 45 to 60 s in any case, or at `until_ms` if that is earlier. Jitter keeps queues that
        started to wait together from being retried together.
        """
        if not cures:
            raise ValueError(f"{line!r} cannot wait without an unblock event; use back_off")
        if self._lines.get(line.key) is not line:
            return False
        if line.wait is not None and line.wait.since > since:
            return True  # a later attempt has newer information
        if now_ms - line.failed_ms > 2 * BACKOFF_MS_MAX:
            # Not earlier: a refused claim releases what it had taken, and would wake this queue and others without end.
            line.failures = 0
        self._wake(line)
        if self._past.cured(line, cures, since):
            return False
        retry_ms = now_ms + RETRY_MS_MIN + self._lot(RETRY_MS_MAX - RETRY_MS_MIN)
        if until_ms is not None:
            retry_ms = min(retry_ms, until_ms)
        self._put_aside(line, QueueWait(reason, cures, retry_ms, now_ms, since))
        for cure in cures:  # the order of this set does not matter: each event has its own entry
            self._waiters.setdefault(cure, {})[line] = None
        return True

    def back_off(self, line: ClassQueue, reason: str, now_ms: int) -> None:
        """Records a failure that only time can resolve, such as a lost race or a timeout. Each failure doubles the pause.

        At least half of the pause remains after jitter, so that a queue which fails immediately does not spin.
        """
        if self._lines.get(line.key) is not line:
            return
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS_BASE << min(line.failures, _DOUBLINGS_MAX))
        line.failures, line.failed_ms = line.failures + 1, now_ms
        self._wake(line)
        until_ms = now_ms + pause_ms - self._lot(pause_ms // 2)
        self._put_aside(line, QueueWait(reason, frozenset(), until_ms, now_ms, self.version))

    def failed(self, line: ClassQueue, reason: str, now_ms: int) -> None:
        """Like `back_off`, but the first failure in a while causes no pause: its refusal updated the view, so the next attempt
        may succeed.
        """
        if line.failures:
            self.back_off(line, reason, now_ms)
        else:
            line.failures, line.failed_ms = 1, now_ms

    def happened(self, cure: UnblockKey, version: int, which: QueuePredicate | None = None) -> int:
        """Wakes the queues that wait for this event, or those of them that `which` selects; returns how many."""
        self.version = max(self.version, version)
        self._past.note(cure, version, which)
        woken = [line for line in self._waiters.get(cure, ()) if which is None or which(line)]
        for line in woken:
            self._wake(line)
        return len(woken)

    def _put_aside(self, line: ClassQueue, wait: QueueWait) -> None:
        line.wait = wait
        self._ranks.drop(line)
        entry = self._inactive[line] = (wait.until_ms, line.serial, line)
        heappush(self._timers, entry)
        if len(self._timers) > 2 * len(self._inactive) + _SLACK:
            self._timers = list(self._inactive.values())
            heapify(self._timers)

    def _wake(self, line: ClassQueue) -> None:
        if line.wait is None:
            return
        for cure in line.wait.cures:
            waiters = self._waiters[cure]
            del waiters[line]
            if not waiters:
                del self._waiters[cure]
        line.wait = None
        del self._inactive[line]
        if line.queued:
            self._ranks.put(line)

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

    def ripen(self, now_ms: int) -> None:
        """Activates queues whose wait or backoff has expired."""
        while (until_ms := self.next_ms()) is not None and until_ms <= now_ms:
            self._wake(self._timers[0][2])

    def tenants(self) -> list[str]:
        """Tenants with active queues."""
        return self._ranks.tenants()

    def take(self, limit: int, now_ms: int, shares: FairShareLedger) -> list[QueueRun]:
        """Takes the next `limit` members in the order of their turns, as runs of one queue; they are in flight from then on.

        First by effective priority (class_queues.py). Within a priority, turns go to the tenant with the smallest dominant
        share, and each turn counts at once (progressive filling). Within a tenant by deadline, arrival, and age of the
        queue. Members in flight count towards their tenant until they are removed or returned, so `shares` only needs to be
        charged with placed replicas.
        """
        self.ripen(now_ms)
        round_ = FillRound(max(0, limit), self._ranks, lambda tenant: self._standing(tenant, now_ms, shares))
        for lanes in self._ranks.descending(now_ms):
            if not round_.left:
                break
            round_.fill(lanes)
        for line in round_.drawn():
            self._airborne.setdefault(line.tenant, {})[line] = None
        return round_.runs()

    def _standing(self, tenant: str, now_ms: int, shares: FairShareLedger) -> TenantShare:
        standing = shares.standing(tenant, now_ms)
        for line in self._airborne.get(tenant, ()):
            standing.add(standing.parts(line.amount), line.flying)
        return standing

    def waiting(self) -> Iterator[tuple[ClassQueue, QueueWait]]:
        """Every queue that is not active, with its reason, in the order in which they became inactive."""
        for line in self._inactive:
            if line.wait is not None:
                yield line, line.wait

    def reasons(self) -> dict[str, ReasonCount]:
        """Number of queues and members for each waiting reason."""
        found: dict[str, ReasonCount] = {}
        for line, wait in self.waiting():
            lines, members = found.get(wait.reason, (0, 0))
            found[wait.reason] = ReasonCount(lines + 1, members + len(line))
        return dict(sorted(found.items()))
