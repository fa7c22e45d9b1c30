"""Backlog of pending replicas: active, waiting and backoff; fills a round by progressive filling.

One turn at a time to whoever has the least. Nobody is charged here: see fairness.py.

Time, chance and news are given by the caller; nothing is placed here.

Replicas that ask the same stand in one line and have one fate: one attempt speaks for all of them, so reasons, waits and
backoffs belong to lines. A line is **active**, **waiting** for a cure, or in **backoff**. The last two are passed over without
being looked at, so that nothing which cannot be placed stands in the way of anything else (F23); and each of them has an
instant at which it is tried all the same.

**No wake-up is lost** (F22). The caller counts what it has applied to its view in `version`. An attempt begins with `begin`,
which says the version that it sees, and may end with `wait`; if one of its cures happened after that version the line stays
active. A cure at version N is part of what an attempt that began at N has seen: news is applied, counted and told before
anything begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from remit.proposal.queue.class_queues import Ageing, Cure, Line, Member, Order, Ranks, Wait
from remit.proposal.queue.fair_share import Parts, Shares, Standing
from remit.proposal.queue.wakeups import Past, Which

Run = tuple[Line, list[Member]]
"""Members of one line whose turns follow each other."""


class _Hand:
    """What one tenant is given: counted turn by turn, and taken out of the lines in larger pieces, which is cheaper."""

    __slots__ = ("_lanes", "_round", "_start", "left", "line", "parts", "standing")

    def __init__(self, standing: Standing, lanes: list[Order], round_: Round) -> None:
        self.standing = standing
        self._lanes, self._round = lanes, round_
        self.line: Line | None = None
        self.parts: Parts = []
        self.left = self._start = 0

    def draw(self) -> Line | None:
        """The line whose turn it is, with `left` for how many turns at least; None if nobody is queued."""
        self.settle()
        entries = [entry for lane in self._lanes if (entry := lane.first()) is not None]
        if not entries:
            return None
        line = self.line = min(entries)[3]
        self.parts = self.standing.parts(line.amount)
        # Alone, it is next whatever the arrivals of those behind its head.
        alone = len(entries) == 1 and sum(map(len, self._lanes)) == 1
        self.left = self._start = line.queued if alone else line.run()
        return line

    def settle(self) -> None:
        """Take out of the line what was given of it."""
        if self.line is not None and self._start > self.left:
            self._round.draw(self.line, self._start - self.left)
        self.left = self._start = 0


class Round:
    """One taking of turns by progressive filling: the tenant with the least share gets a turn, which counts at once, and so on.

    Each tenant that competes costs once, each turn costs a step of a heap; one tenant alone is given everything in bulk.
    """

    __slots__ = ("_counts", "_drawn", "_lines", "_ranks", "_standing", "_standings", "left")

    def __init__(self, limit: int, ranks: Ranks, standing: Callable[[str], Standing]) -> None:
        self.left = limit
        self._ranks = ranks
        self._standing = standing
        self._standings: dict[str, Standing] = {}
        """Kept for the whole round: what a tenant is given at one priority counts at the next."""
        self._lines: list[Line] = []
        self._counts: list[int] = []
        self._drawn: dict[Line, list[Member]] = {}

    def fill(self, lanes: dict[str, list[Order]]) -> None:
        """Turns among equals, until nobody is queued or the limit is reached. Equal shares go by the tenants' names."""
        hands = [_Hand(self._of(tenant), lanes[tenant], self) for tenant in sorted(lanes)]
        turns = [(hand.standing.share, i, hand) for i, hand in enumerate(hands)]
        heapify(turns)
        lines, counts, limit = self._lines, self._counts, self.left
        last: Line | None = None
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

    def _of(self, tenant: str) -> Standing:
        found = self._standings.get(tenant)
        if found is None:
            found = self._standings[tenant] = self._standing(tenant)
        return found

    def draw(self, line: Line, count: int) -> None:
        """So many of the line are given out; their order is that of the line."""
        self._drawn.setdefault(line, []).extend(line.pop(count))
        if not line.queued:
            self._ranks.drop(line)

    def drawn(self) -> list[Line]:
        """The lines of which something was given out."""
        return list(self._drawn)

    def runs(self) -> list[Run]:
        """What was given out, in the order of the turns."""
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

Lot = Callable[[int], int]
"""From 0 up to and including the limit: `Chance.uniform_ms`."""


class Tally(NamedTuple):
    lines: int
    members: int


class Backlog:
    """Everything that is to be placed. Its size is that of what is pending; lines that wait cost nothing until woken."""

    def __init__(self, lot: Lot, *, ageing: Ageing | None = None, past: Past | None = None) -> None:
        self.version = 0
        """How much the caller has applied to its view; it never goes back."""
        self._lot = lot
        self._past = Past() if past is None else past
        self._lines: dict[Hashable, Line] = {}
        self._home: dict[Member, Line] = {}
        self._ranks = Ranks(ageing or Ageing())
        self._inactive: dict[Line, tuple[int, int, Line]] = {}
        """Lines that wait or back off, each with its entry among the timers."""
        self._timers: list[tuple[int, int, Line]] = []
        """A heap; an entry that is not its line's own is stale."""
        self._waiters: dict[Cure, dict[Line, None]] = {}
        self._airborne: dict[str, dict[Line, None]] = {}
        """By tenant, the lines of which something is in flight."""
        self._serial = 0

    def __len__(self) -> int:
        """Members, queued and in flight."""
        return len(self._home)

    @property
    def active(self) -> bool:
        """Would `take` find something, at once?"""
        return bool(self._ranks)

    def lines(self) -> Iterator[Line]:
        return iter(self._lines.values())

    def line(self, key: Hashable) -> Line | None:
        return self._lines.get(key)

    def line_of(self, member: Member) -> Line | None:
        return self._home.get(member)

    def add(self, key: Hashable, make_line: Callable[[], Line], member: Member, now_ms: int) -> Line:
        """At the end of its line, which is made if there is none. Whoever joins a line that waits, waits with it."""
        if member in self._home:
            raise ValueError(f"{member!r} is in the backlog already")
        line = self._lines.get(key)
        if line is None:
            line = make_line()
            if line.key != key or len(line):
                raise ValueError(f"{line!r} is no new line of the key {key!r}")
            self._serial += 1
            line.serial = self._serial
            self._lines[key] = line
        self._home[member] = line
        line.add(member, now_ms)
        if line.queued == 1 and line.wait is None:
            self._ranks.put(line)
        return line

    def remove(self, member: Member) -> None:
        """It was placed, or is no longer wanted. One that is not here is gone already."""
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

    def take_rest(self, line: Line) -> list[Member]:
        """Everybody else of a line of which somebody was taken: a gang is tried whole, whatever the limit was."""
        members = line.pop(line.queued)
        self._ranks.drop(line)
        return members

    def returned(self, member: Member) -> None:
        """It was taken and not placed: back to its old place, in front of those who came later."""
        line = self._home.get(member)
        if line is None or not line.in_flight(member):
            return  # it was removed while it was being tried, and perhaps came anew
        line.put_back(member)
        self._landed(line)
        if line.wait is None:
            self._ranks.put(line)

    def _landed(self, line: Line) -> None:
        if not line.flying:
            lines = self._airborne[line.tenant]
            del lines[line]
            if not lines:
                del self._airborne[line.tenant]

    def begin(self, line: Line) -> int:
        """An attempt at this line begins now; it sees the answered version."""
        line.attempts += 1
        return self.version

    def wait(
        self, line: Line, reason: str, cures: frozenset[Cure], *, since: int, now_ms: int, until_ms: int | None = None
    ) -> bool:
        """An attempt that saw version `since` found a reason not to place it. False if it is to be tried again at once.

        It is tried again in 45 to 60 s whatever happens, or at `until_ms` if that is sooner; lots keep lines that began to wait
        together from coming back together.
        """
        if not cures:
            raise ValueError(f"{line!r} would wait for nothing: a wait has a cure; see back_off")
        if self._lines.get(line.key) is not line:
            return False
        if line.wait is not None and line.wait.since > since:
            return True  # a later attempt knows better
        if now_ms - line.failed_ms > 2 * BACKOFF_MS_MAX:
            line.failures = 0  # else what fails and gives back what it had taken wakes itself, and others, without end
        self._wake(line)
        if self._past.cured(line, cures, since):
            return False
        retry_ms = now_ms + RETRY_MS_MIN + self._lot(RETRY_MS_MAX - RETRY_MS_MIN)
        if until_ms is not None:
            retry_ms = min(retry_ms, until_ms)
        self._put_aside(line, Wait(reason, cures, retry_ms, now_ms, since))
        for cure in cures:  # a set, but each has a place of its own: their order tells nothing
            self._waiters.setdefault(cure, {})[line] = None
        return True

    def back_off(self, line: Line, reason: str, now_ms: int) -> None:
        """An attempt failed for a reason that nothing cures but time: a lost race, silence. Each failure doubles the pause.

        At least half of it is kept whatever the lot, so that a line which fails at once never spins.
        """
        if self._lines.get(line.key) is not line:
            return
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS_BASE << min(line.failures, _DOUBLINGS_MAX))
        line.failures, line.failed_ms = line.failures + 1, now_ms
        self._wake(line)
        until_ms = now_ms + pause_ms - self._lot(pause_ms // 2)
        self._put_aside(line, Wait(reason, frozenset(), until_ms, now_ms, self.version))

    def failed(self, line: Line, reason: str, now_ms: int) -> None:
        """As `back_off`, but the first in a while costs nothing: it has taught why, so the next attempt may do better."""
        if line.failures:
            self.back_off(line, reason, now_ms)
        else:
            line.failures, line.failed_ms = 1, now_ms

    def happened(self, cure: Cure, version: int, which: Which | None = None) -> int:
        """A cure happened, at this version: how many lines it woke. With `which`, only for the lines that it picks."""
        self.version = max(self.version, version)
        self._past.note(cure, version, which)
        woken = [line for line in self._waiters.get(cure, ()) if which is None or which(line)]
        for line in woken:
            self._wake(line)
        return len(woken)

    def _put_aside(self, line: Line, wait: Wait) -> None:
        line.wait = wait
        self._ranks.drop(line)
        entry = self._inactive[line] = (wait.until_ms, line.serial, line)
        heappush(self._timers, entry)
        if len(self._timers) > 2 * len(self._inactive) + _SLACK:
            self._timers = list(self._inactive.values())
            heapify(self._timers)

    def _wake(self, line: Line) -> None:
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
        """When the next wait or backoff runs out, if there is one. `take` wakes whatever ran out, so nobody else need look."""
        while self._timers:
            entry = self._timers[0]
            if self._inactive.get(entry[2]) is entry:
                return entry[0]
            heappop(self._timers)
        return None

    def ripen(self, now_ms: int) -> None:
        """Whoever's wait or backoff has run out may be tried."""
        while (until_ms := self.next_ms()) is not None and until_ms <= now_ms:
            self._wake(self._timers[0][2])

    def tenants(self) -> list[str]:
        """Those of whom something may be tried."""
        return self._ranks.tenants()

    def take(self, limit: int, now_ms: int, shares: Shares) -> list[Run]:
        """The next `limit` members, in the order of their turns, as runs of one line; they are in flight from now on.

        First by effective priority (see turns.py). Then to the tenant with the least dominant share goes one turn, which counts
        at once, and so on: progressive filling. Within a tenant by deadline, by arrival, by which line was there first. What is
        in flight counts for its tenant here until it is removed or returned; `shares` need only be charged with what is placed.
        """
        self.ripen(now_ms)
        round_ = Round(max(0, limit), self._ranks, lambda tenant: self._standing(tenant, now_ms, shares))
        for lanes in self._ranks.descending(now_ms):
            if not round_.left:
                break
            round_.fill(lanes)
        for line in round_.drawn():
            self._airborne.setdefault(line.tenant, {})[line] = None
        return round_.runs()

    def _standing(self, tenant: str, now_ms: int, shares: Shares) -> Standing:
        standing = shares.standing(tenant, now_ms)
        for line in self._airborne.get(tenant, ()):
            standing.add(standing.parts(line.amount), line.flying)
        return standing

    def waiting(self) -> Iterator[tuple[Line, Wait]]:
        """Every line that is not to be tried now, and why, in the order in which they were put aside."""
        for line in self._inactive:
            if line.wait is not None:
                yield line, line.wait

    def reasons(self) -> dict[str, Tally]:
        """How many lines and members each reason keeps."""
        found: dict[str, Tally] = {}
        for line, wait in self.waiting():
            lines, members = found.get(wait.reason, (0, 0))
            found[wait.reason] = Tally(lines + 1, members + len(line))
        return dict(sorted(found.items()))
