"""Property: the backlog behaves like plain lists under any order of attempts, events, arrivals and time.

The model keeps lists, inspects everything at every step and forgets nothing. In one machine the event history is long enough,
and both agree in everything. In the other it is as short as possible: a queue may be tried once too often, but a wake-up that
the model has seen is never lost.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from remit.proposal.queue.backlog import RETRY_MS_MAX, RETRY_MS_MIN, Backlog, QueueRun
from remit.proposal.queue.class_queues import Ageing, ClassQueue, Member, QueueWait
from remit.proposal.queue.fair_share import FairShareLedger, Vector
from remit.proposal.queue.wakeups import UnblockHistory
from tests.properties.effort import tries

AGEING = Ageing(step=1, bound=3)
CAPACITY = {"cpu": 9, "memory": 18}
WEIGHTS = {"c": 2}


class ClassSpec(NamedTuple):
    """Properties of the members of one class queue."""

    tenant: str
    priority: int
    amount: Vector
    deadline_ms: int | None = None


KINDS = (
    ClassSpec("a", 0, (("cpu", 1), ("memory", 4))),
    ClassSpec("a", 0, (("cpu", 2),)),
    ClassSpec("a", 2, (("memory", 1),), 500_000),
    ClassSpec("b", 0, (("cpu", 3), ("memory", 1))),
    ClassSpec("b", 6, (("cpu", 1),)),
    ClassSpec("c", 0, (("memory", 2), ("unheard-of", 5)), 90_000),
)
CURES = (("room",), ("node",), ("quota", "a"))
A_KIND = st.integers(0, len(KINDS) - 1)
EVERYBODY, ODD, EVEN = frozenset(range(len(KINDS))), frozenset({1, 3, 5}), frozenset({0, 2, 4})
NEWS = st.tuples(st.sampled_from(CURES), st.sampled_from([None, ODD, EVEN]))
SOME_CURES = st.frozensets(st.sampled_from(CURES), min_size=1, max_size=3)


class Pending:
    """A member in the model."""

    def __init__(self, member: int, arrived_ms: int) -> None:
        self.member, self.arrived_ms, self.flying = member, arrived_ms, False


class ModelQueue:
    """A class queue in the model: a list."""

    def __init__(self, kind: int, serial: int) -> None:
        self.kind, self.serial = KINDS[kind], serial
        self.members: list[Pending] = []
        self.wait: QueueWait | None = None

    def queued(self) -> list[Pending]:
        return [member for member in self.members if not member.flying]

    def key(self) -> tuple[int, int, int]:
        deadline = self.kind.deadline_ms
        return (1 << 70 if deadline is None else deadline, self.queued()[0].arrived_ms, self.serial)


class WakeUp(NamedTuple):
    """An event, and the classes it concerns."""

    version: int
    cure: tuple[str, ...]
    kinds: frozenset[int]


class Attempt(NamedTuple):
    line: ClassQueue
    plain: ModelQueue
    kind: int
    since: int


def picks(kinds: frozenset[int]) -> Callable[[ClassQueue], bool]:
    return lambda line: line.key in kinds


class BacklogMachine(RuleBasedStateMachine):
    attempts = Bundle("attempts")
    past: ClassVar[tuple[int, int]] = (1000, 1000)

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1000
        self.counter = 0
        self.backlog = Backlog(self.lot, ageing=AGEING, history=UnblockHistory(*self.past))
        self.shares = FairShareLedger(CAPACITY, WEIGHTS, 0)
        self.plain: dict[int, ModelQueue] = {}
        self.serial = 0
        self.placed: list[ClassSpec] = []
        self.news: list[WakeUp] = []

    def lot(self, limit: int) -> int:
        self.counter += 7919
        return self.counter % (limit + 1)

    # What is pending

    @initialize(counts=st.lists(st.integers(0, 4), min_size=len(KINDS), max_size=2 * len(KINDS)))
    def fill(self, counts: list[int]) -> None:
        """Start with some members."""
        for i, count in enumerate(counts):
            self.add(i % len(KINDS), i * 5, count, i % 2)

    @rule(kind=A_KIND, member=st.integers(0, 60), count=st.integers(1, 8), ms=st.sampled_from([0, 1]))
    def add(self, kind: int, member: int, count: int, ms: int) -> None:
        self.now_ms += ms
        tenant, priority, amount, deadline_ms = KINDS[kind]
        for one in range(member, member + count):
            if self.backlog.queue_of(one) is not None:
                continue
            self.backlog.add(kind, lambda: ClassQueue(kind, tenant, priority, amount, deadline_ms), one, self.now_ms)
            if kind not in self.plain:
                self.serial += 1
                self.plain[kind] = ModelQueue(kind, self.serial)
            self.plain[kind].members.append(Pending(one, self.now_ms))

    @rule(data=st.data())
    @precondition(lambda self: self.plain)
    def cancel_member(self, data: st.DataObject) -> None:
        """A queued or in-flight member is no longer wanted."""
        plain = self.plain[data.draw(st.sampled_from(sorted(self.plain)))]
        member = data.draw(st.sampled_from([one.member for one in plain.members]))
        self.remove(member)
        self.backlog.remove(member)

    def remove(self, member: int) -> None:
        self.backlog.remove(member)
        for kind, plain in list(self.plain.items()):
            plain.members = [one for one in plain.members if one.member != member]
            if not plain.members:
                del self.plain[kind]

    @rule(data=st.data())
    @precondition(lambda self: self.flying())
    def place_some_members(self, data: st.DataObject) -> None:
        """Some in-flight members are placed; the rest of their queue returns, in any order."""
        kind = data.draw(st.sampled_from(sorted({kind for kind, _ in self.flying()})))
        members = data.draw(st.permutations([one for of, one in self.flying() if of == kind]))
        placed = data.draw(st.integers(0, len(members)))
        for one in members[:placed]:
            self.shares.charge(KINDS[kind].tenant, KINDS[kind].amount, 1, self.now_ms)
            self.placed.append(KINDS[kind])
            self.remove(one.member)
        for one in members[placed : data.draw(st.integers(placed, len(members)))]:
            self.backlog.return_member(one.member)
            one.flying = False

    @rule(count=st.integers(1, 5))
    def release(self, count: int) -> None:
        for kind in self.placed[:count]:
            self.shares.charge(kind.tenant, kind.amount, -1, self.now_ms)
        del self.placed[:count]

    # Attempts and cures

    @rule(target=attempts, kind=A_KIND)
    def begin(self, kind: int) -> object:
        line = self.backlog.queue(kind)
        if line is None:
            return multiple()
        return Attempt(line, self.plain[kind], kind, self.backlog.begin_attempt(line))

    @rule(attempt=attempts, cures=SOME_CURES)
    def end(self, attempt: Attempt, cures: frozenset[tuple[str, ...]]) -> None:
        """Attempts end in any order, also very late, also twice."""
        waits = self.backlog.wait(attempt.line, "no_room", cures, since=attempt.since, now_ms=self.now_ms)
        plain = self.plain.get(attempt.kind)
        if plain is not attempt.plain:
            assert not waits, "a removed queue waits"
            return
        if plain.wait is not None and plain.wait.since > attempt.since:
            assert waits and attempt.line.wait == plain.wait, "an older attempt overrode a later one"
            return
        cured = any(one.version > attempt.since and one.cure in cures and attempt.kind in one.kinds for one in self.news)
        plain.wait = None
        if cured:
            assert not waits, "a wake-up was lost"
        elif self.exact or waits:
            assert waits, "a retry without a cause"
            plain.wait = attempt.line.wait
            assert (
                plain.wait is not None
                and plain.wait[:2] == ("no_room", cures)
                and plain.wait[3:5] == (self.now_ms, attempt.since)
            )
            assert RETRY_MS_MIN <= plain.wait.until_ms - self.now_ms <= RETRY_MS_MAX

    @rule(kind=A_KIND)
    def back_off(self, kind: int) -> None:
        line = self.backlog.queue(kind)
        if line is not None:
            self.backlog.back_off(line, "lost_race", self.now_ms)
            assert line.wait is not None and line.state == "backoff" and line.wait.until_ms > self.now_ms
            self.plain[kind].wait = line.wait

    @rule(data=st.data(), news=st.lists(NEWS, max_size=4), cures=SOME_CURES)
    @precondition(lambda self: self.plain)
    def attempt_in_vain(
        self, data: st.DataObject, news: list[tuple[tuple[str, ...], frozenset[int] | None]], cures: frozenset[Any]
    ) -> None:
        """Many things may happen during an attempt."""
        attempt = self.begin(data.draw(st.sampled_from(sorted(self.plain))))
        assert isinstance(attempt, Attempt)
        for one in news:
            self.wake_up(one)
        self.end(attempt, cures)

    @rule(news=NEWS)
    def wake_up(self, news: tuple[tuple[str, ...], frozenset[int] | None]) -> None:
        cure, kinds = news
        self.backlog.version += 1
        woken = self.backlog.on_event(cure, self.backlog.version, None if kinds is None else picks(kinds))
        picked = EVERYBODY if kinds is None else kinds
        self.news.append(WakeUp(self.backlog.version, cure, picked))
        cured = [
            plain for kind, plain in self.plain.items() if kind in picked and plain.wait and cure in plain.wait.unblock_events
        ]
        for plain in cured:
            plain.wait = None
        assert woken == len(cured)

    @rule(ms=st.sampled_from([1, 100, 5_000, 59_999, 60_000, 300_000]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    # Order of queues

    @rule(limit=st.integers(0, 3) | st.integers(0, 25))
    def take(self, limit: int) -> None:
        for plain in self.plain.values():
            if plain.wait is not None and plain.wait.until_ms <= self.now_ms:
                plain.wait = None
        taken = self.backlog.take(limit, self.now_ms, self.shares)
        assert shown(taken) == self.expected(limit)

    def expected(self, limit: int) -> list[tuple[int, int]]:
        """By definition: inspect everything, pick one, count it, repeat."""
        active = {kind: plain for kind, plain in self.plain.items() if plain.wait is None}
        levels: dict[int, int] = {}
        for priority in {plain.kind.priority for plain in active.values()}:
            heads = [
                plain.queued()[0].arrived_ms for plain in active.values() if plain.kind.priority == priority and plain.queued()
            ]
            waited = self.now_ms - min(heads, default=self.now_ms)
            levels[priority] = priority + min(AGEING.bound, AGEING.step * (waited // 60_000))
        taken: list[tuple[int, int]] = []
        while len(taken) < limit:
            queued = {kind: plain for kind, plain in active.items() if plain.queued()}
            if not queued:
                break
            top = max(levels[plain.kind.priority] for plain in queued.values())
            first = [(kind, plain) for kind, plain in queued.items() if levels[plain.kind.priority] == top]
            kind, plain = min(first, key=lambda one: (self.share(one[1].kind.tenant), one[1].kind.tenant, one[1].key()))
            head = plain.queued()[0]
            head.flying = True
            taken.append((kind, head.member))
        return taken

    def share(self, tenant: str) -> Fraction:
        held = [kind for kind in self.placed if kind.tenant == tenant]
        held += [KINDS[kind] for kind, _ in self.flying() if KINDS[kind].tenant == tenant]
        sums = {name: sum(dict(kind.amount).get(name, 0) for kind in held) for name in CAPACITY}
        return max(Fraction(sums[name], total) for name, total in CAPACITY.items()) / WEIGHTS.get(tenant, 1)

    def flying(self) -> list[tuple[int, Pending]]:
        return [(kind, member) for kind, plain in self.plain.items() for member in plain.members if member.flying]

    # Invariants

    @property
    def exact(self) -> bool:
        return self.past == BacklogMachine.past

    @invariant()
    def queues_equal_model(self) -> None:
        lines = {line.key: line for line in self.backlog.queues()}
        assert lines.keys() == self.plain.keys()
        for kind, plain in self.plain.items():
            line = lines[kind]
            assert line.members() == [one.member for one in plain.queued()]
            assert line.in_flight_count == len(plain.members) - len(plain.queued()) and len(line) == len(plain.members)
            assert [line.arrived_ms(member.member) for member in plain.members] == [
                member.arrived_ms for member in plain.members
            ]
            assert line.wait == plain.wait
        assert len(self.backlog) == sum(len(plain.members) for plain in self.plain.values())

    @invariant()
    def waits_are_reported_and_expire(self) -> None:
        waiting = {kind: plain.wait for kind, plain in self.plain.items() if plain.wait is not None}
        assert {line.key: wait for line, wait in self.backlog.waiting()} == waiting
        assert self.backlog.next_ms() == min((wait.until_ms for wait in waiting.values()), default=None)
        assert self.backlog.active == any(plain.wait is None and plain.queued() for plain in self.plain.values())
        reasons = self.backlog.reasons()
        assert sum(tally.queues for tally in reasons.values()) == len(waiting)
        assert sum(tally.members for tally in reasons.values()) == sum(len(self.plain[kind].members) for kind in waiting)

    @invariant()
    def removed_queues_leave_no_state(self) -> None:
        backlog, waits = self.backlog, [plain.wait for plain in self.plain.values() if plain.wait is not None]
        assert backlog._waiters.keys() == {cure for wait in waits for cure in wait.unblock_events}
        assert backlog._queues_in_flight.keys() == {KINDS[kind].tenant for kind, _ in self.flying()}
        assert len(backlog._timers) <= 2 * len(waits) + 65
        assert len(backlog._history) <= self.past[0]
        for line in backlog.queues():
            assert len(line._returned_heap) <= 2 * len(line._returned) + 17


class ForgetfulMachine(BacklogMachine):
    past = (2, 1)


def shown(taken: list[QueueRun]) -> list[tuple[int, Member]]:
    assert all(members for _, members in taken), "an empty run"
    assert all(one[0] is not other[0] for one, other in pairwise(taken)), "one run in two parts"
    return [(line.key, member) for line, members in taken for member in members]  # type: ignore[misc]  # the keys are kinds


TestBacklog = BacklogMachine.TestCase
TestForgetful = ForgetfulMachine.TestCase
# Steps are cheap here, and rare ones must be combined.
TestBacklog.settings = TestForgetful.settings = tries(100, 300)
