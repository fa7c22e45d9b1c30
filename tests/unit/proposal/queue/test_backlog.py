"""Who waits for what, who is woken by what, and whose turn is it? One story at a time; all interleavings are in properties."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from remit.proposal.queue.backlog import BACKOFF_MS_MAX, RETRY_MS_MAX, RETRY_MS_MIN, Backlog
from remit.proposal.queue.class_queues import Ageing, ClassQueue, Member, UnblockKey
from remit.proposal.queue.fair_share import FairShareLedger, Vector
from remit.proposal.queue.wakeups import UnblockHistory

ROOM: UnblockKey = ("room",)
CPU: Vector = (("cpu", 1),)
MINUTE_MS = 60_000


def shares(cpu: int = 1000) -> FairShareLedger:
    return FairShareLedger({"cpu": cpu}, half_life_ms=0)


def middle(limit: int) -> int:
    return limit // 2


def backlog(*, ageing: Ageing | None = None, past: UnblockHistory | None = None, lot: Callable[[int], int] = middle) -> Backlog:
    return Backlog(lot, ageing=ageing, history=past)


def put(
    queue: Backlog,
    key: str,
    members: range,
    *,
    tenant: str = "a",
    priority: int = 0,
    amount: Vector = CPU,
    deadline_ms: int | None = None,
    now_ms: int = 0,
) -> ClassQueue:
    for member in members:
        line = queue.add(key, lambda: ClassQueue(key, tenant, priority, amount, deadline_ms), member, now_ms)
    return line


def order(queue: Backlog, limit: int = 1000, now_ms: int = 0) -> list[Member]:
    return [member for _, members in queue.take(limit, now_ms, shares()) for member in members]


def refuse(queue: Backlog, line: ClassQueue, *cures: UnblockKey, reason: str = "no_room", now_ms: int = 0) -> bool:
    """One attempt that finds nothing."""
    return queue.wait(line, reason, frozenset(cures or (ROOM,)), since=queue.begin_attempt(line), now_ms=now_ms)


# Waiting and waking


def test_a_cure_that_happens_while_its_line_is_tried_keeps_the_line_active() -> None:
    """F22: the wake-up comes when nobody waits yet."""
    queue = backlog()
    line = put(queue, "w", range(3))
    since = queue.begin_attempt(line)
    queue.on_event(ROOM, 1)
    assert not queue.wait(line, "no_room", frozenset({ROOM}), since=since, now_ms=0)
    assert line.state == "active" and order(queue) == [0, 1, 2]
    assert refuse(queue, line), "an attempt that began after it has seen it"
    assert line.state == "waiting"


def test_an_attempt_on_an_older_view_counts_from_that_view() -> None:
    """F22: what is asked is when the view was taken, not when the attempt began."""
    queue = backlog()
    line = put(queue, "w", range(1))
    queue.on_event(ROOM, 7)
    assert queue.begin_attempt(line) == 7
    assert not queue.wait(line, "no_room", frozenset({ROOM}), since=6, now_ms=0)
    assert queue.wait(line, "no_room", frozenset({ROOM}), since=7, now_ms=0)


def test_room_for_others_that_came_meanwhile_is_no_cure() -> None:
    """F22, the other way: who is woken by everything is never asleep."""
    queue = backlog()
    small, large = put(queue, "small", range(1)), put(queue, "large", range(1, 2))
    since = {line: queue.begin_attempt(line) for line in (small, large)}
    queue.on_event(ROOM, 1, which=lambda line: line is small)
    assert not queue.wait(small, "no_room", frozenset({ROOM}), since=since[small], now_ms=0)
    assert queue.wait(large, "no_room", frozenset({ROOM}), since=since[large], now_ms=0)


def test_what_the_past_has_forgotten_counts_as_happened() -> None:
    """F22: the memory of cures is bounded, and no wake-up is lost by that."""
    queue = backlog(past=UnblockHistory(2, 2))
    line = put(queue, "w", range(1))
    since = queue.begin_attempt(line)
    queue.on_event(("quota", "a"), 1)
    for version, other in enumerate(("x", "y"), 2):
        queue.on_event(("quota", other), version)
    assert not queue.wait(line, "over_quota", frozenset({("quota", "a")}), since=since, now_ms=0)
    assert refuse(queue, line, ("quota", "a"))
    queue.on_event(("quota", "a"), 4)

    since = queue.begin_attempt(line)
    for version in (5, 6, 7):
        queue.on_event(ROOM, version, which=lambda line: False)
    assert not queue.wait(line, "no_room", frozenset({ROOM}), since=since, now_ms=0), "whom the first was for is forgotten"
    assert queue.wait(line, "no_room", frozenset({ROOM}), since=5, now_ms=0), "the rest is known: it was for others"


def test_news_may_be_told_out_of_order() -> None:
    """F22"""
    past, line = UnblockHistory(), ClassQueue("w", "a", 0, CPU)
    past.record(ROOM, 5, lambda line: True)
    past.record(ROOM, 3)
    assert (
        past.happened_since(line, [ROOM], 4)
        and past.happened_since(line, [ROOM], 2)
        and not past.happened_since(line, [ROOM], 5)
    )
    past.record(ROOM, 2)
    assert past.happened_since(line, [ROOM], 2)


def test_a_cure_wakes_the_lines_that_wait_for_it_and_no_others() -> None:
    queue = backlog()
    quota: UnblockKey = ("quota", "a")
    cures: dict[str, tuple[UnblockKey, ...]] = {"q": (quota,), "r": (ROOM,), "both": (ROOM, quota), "p": (("policy",),)}
    lines = {key: put(queue, key, range(i, i + 1)) for i, key in enumerate(cures)}
    for key, line in lines.items():
        assert refuse(queue, line, *cures[key])
    assert queue.on_event(quota, 1) == 2
    assert [key for key, line in lines.items() if line.state == "active"] == ["q", "both"]
    assert queue.on_event(ROOM, 2, which=lambda line: line.key != "r") == 0
    assert queue.on_event(("quota", "b"), 3) == 0
    assert queue.on_event(ROOM, 4) == 1
    assert [line.key for line, _ in queue.waiting()] == ["p"]


def test_every_wait_has_a_reason_a_cure_and_an_end() -> None:
    ends = []
    for lot in (lambda limit: 0, middle, lambda limit: limit):
        queue = backlog(lot=lot)
        line = put(queue, "w", range(2))
        assert refuse(queue, line, now_ms=100)
        assert line.wait is not None
        assert (line.wait.reason, line.wait.unblock_events, line.wait.at_ms) == ("no_room", frozenset({ROOM}), 100)
        ends.append(line.wait.until_ms - 100)
        assert queue.next_ms() == line.wait.until_ms
        assert order(queue, now_ms=line.wait.until_ms - 1) == []
        assert order(queue, now_ms=line.wait.until_ms) == [0, 1], "L2: it is tried again whatever happens"
    assert ends == [RETRY_MS_MIN, (RETRY_MS_MIN + RETRY_MS_MAX) // 2, RETRY_MS_MAX] and RETRY_MS_MAX == 60_000
    with pytest.raises(ValueError, match="cannot wait without an unblock event"):
        queue.wait(line, "no_room", frozenset(), since=0, now_ms=0)


def test_a_wait_may_end_sooner_but_not_later() -> None:
    queue = backlog()
    line = put(queue, "w", range(1))
    for until_ms, expected in ((30_000, 30_000), (90_000, 52_500)):
        queue.wait(line, "held", frozenset({("override",)}), since=queue.begin_attempt(line), now_ms=0, until_ms=until_ms)
        assert line.wait is not None and line.wait.until_ms == expected


def test_a_later_attempt_knows_better() -> None:
    queue = backlog()
    line = put(queue, "w", range(2))
    older = queue.begin_attempt(line)
    queue.on_event(("node",), 1)
    assert refuse(queue, line, ("quota", "a"), reason="over_quota")
    assert queue.wait(line, "no_room", frozenset({ROOM}), since=older, now_ms=0)
    assert line.wait is not None and line.wait.reason == "over_quota"


def test_whoever_joins_a_line_that_waits_waits_with_it() -> None:
    queue = backlog()
    line = put(queue, "w", range(2))
    refuse(queue, line)
    put(queue, "w", range(2, 5))
    assert order(queue) == [] and line.attempts == 1
    assert {reason: tuple(tally) for reason, tally in queue.reasons().items()} == {"no_room": (1, 5)}


def test_a_backoff_doubles_up_to_its_bound_and_starts_anew_after_a_success() -> None:
    queue = backlog(lot=lambda limit: 0)
    line = put(queue, "w", range(3))
    pauses, now_ms = [], 0
    for _ in range(12):
        queue.begin_attempt(line)
        queue.back_off(line, "silence", now_ms)
        assert line.wait is not None and line.state == "backoff"
        assert queue.on_event(ROOM, queue.version + 1) == 0, "only time ends it"
        pauses.append(line.wait.until_ms - now_ms)
        assert order(queue, now_ms=line.wait.until_ms - 1) == []
        now_ms = line.wait.until_ms
        (member,) = order(queue, 1, now_ms)
        queue.return_member(member)
    assert pauses == [min(200 << i, BACKOFF_MS_MAX) for i in range(12)]
    queue.remove(order(queue, 1, now_ms)[0])
    queue.back_off(line, "silence", now_ms)
    assert line.wait is not None and line.wait.until_ms - now_ms == 200
    assert backlog_pause(lambda limit: limit) == 100, "half of it is kept whatever the lot"


def backlog_pause(lot: Callable[[int], int]) -> int:
    queue = backlog(lot=lot)
    line = put(queue, "w", range(1))
    queue.back_off(line, "silence", 0)
    assert line.wait is not None
    return line.wait.until_ms


# Heads and lines


def test_an_impossible_head_stands_in_nobodys_way() -> None:
    """F23: ten thousand replicas that fit nowhere, before and above everything else, cost one attempt."""
    queue = backlog()
    line = put(queue, "impossible", range(10_000), priority=100)
    others = put(queue, "possible", range(10_000, 10_050), now_ms=1)
    placed: list[Member] = []
    for now_ms in range(1, 20):
        for run, members in queue.take(256, now_ms, shares()):
            since = queue.begin_attempt(run)
            for member in members:
                if run is line:
                    queue.return_member(member)
                else:
                    placed.append(member)
                    queue.remove(member)
            if run is line:
                assert queue.wait(run, "no_room", frozenset({ROOM}), since=since, now_ms=now_ms)
    assert placed == list(range(10_000, 10_050)) and queue.queue("possible") is None and len(others) == 0
    assert line.attempts == 1 and line.members() == list(range(10_000))


def operations(work: Callable[[], Any]) -> int:
    """How many steps of the interpreter it takes in the scheduler's own code."""
    count = 0

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "remit/proposal" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_taking_costs_the_same_however_many_lines_wait() -> None:
    """F23: what waits is not looked at."""
    costs = []
    for lines in (10, 10_000):
        queue = backlog()
        for i in range(lines):
            refuse(queue, put(queue, f"w{i}", range(i, i + 1), tenant=f"t{i % 7}", priority=i % 3))
        for i in range(20):
            put(queue, f"active{i}", range(-i * 5 - 5, -i * 5), tenant=f"t{i % 7}", priority=i % 3)
        costs.append(operations(lambda: queue.take(60, 1, shares())))  # noqa: B023  (called at once)
    assert costs[0] == costs[1] > 60


def come_and_go(queue: Backlog) -> None:
    put(queue, "w", range(-5, 0))
    for member in (-3, 50, 0, 1):
        queue.remove(member)


def test_adding_and_removing_costs_the_same_however_long_the_line() -> None:
    costs = []
    for members in (100, 20_000):
        queue = backlog()
        put(queue, "w", range(members))
        costs.append(operations(lambda: come_and_go(queue)))  # noqa: B023  (called at once)
    assert costs[0] == costs[1]


def test_who_is_returned_stands_where_he_stood() -> None:
    queue = backlog()
    put(queue, "w", range(6))
    assert order(queue, 4) == [0, 1, 2, 3]
    put(queue, "w", range(6, 8), now_ms=5)
    for member in (3, 0, 2):
        queue.return_member(member)
    assert order(queue, 5) == [0, 2, 3, 4, 5]
    assert order(queue) == [6, 7], "who is in flight is not taken again"


def test_a_head_that_comes_back_brings_its_line_forward() -> None:
    queue = backlog()
    put(queue, "w", range(1), now_ms=1)
    put(queue, "w", range(1, 2), now_ms=3)
    put(queue, "v", range(2, 3), now_ms=2)
    assert order(queue, 1, 5) == [0] and order(queue, 1, 5) == [2]
    queue.return_member(2)
    queue.return_member(0)
    assert order(queue, now_ms=5) == [0, 2, 1]


def test_a_line_of_which_all_others_are_in_flight_loses_its_last_one() -> None:
    queue = backlog()
    put(queue, "w", range(3))
    assert order(queue, 2) == [0, 1]
    queue.remove(2)
    assert not queue.active and order(queue) == []
    queue.return_member(1)
    queue.return_member(0)
    queue.remove(0)
    assert order(queue) == [1]


def test_who_is_removed_in_flight_may_be_returned_by_one_who_does_not_know() -> None:
    queue = backlog()
    put(queue, "w", range(2))
    assert order(queue) == [0, 1]
    queue.remove(0)
    queue.remove(0)
    queue.return_member(0)
    put(queue, "w", range(1), now_ms=9)
    queue.return_member(0)
    queue.return_member(1)
    assert order(queue) == [1, 0] and len(queue) == 2, "it came anew, and stands at the end"


def test_nothing_is_left_of_a_line_that_is_empty() -> None:
    queue = backlog()
    for i in range(3):
        line = put(queue, "w", range(3))
        order(queue, i)
        refuse(queue, line)
        for member in range(3):
            queue.remove(member)
        assert len(queue) == 0 and not list(queue.queues()) and not list(queue.waiting())
        assert queue.next_ms() is None and not queue.active and not queue._waiters and not queue._queues_in_flight
        assert not refuse(queue, line), "an attempt that ends after its line"
        queue.back_off(line, "silence", 0)
        assert queue.next_ms() is None


def test_old_timers_and_places_do_not_pile_up() -> None:
    queue = backlog()
    line = put(queue, "w", range(4))
    for version in range(1, 2000):
        for member in order(queue, 3, version):
            queue.return_member(member)
        assert refuse(queue, line, now_ms=version)
        queue.on_event(ROOM, version)
    (rank,) = queue._levels._levels.values()
    assert max(len(queue._timers), len(rank._oldest._heap), len(rank.lanes["a"]._heap), len(line._returned_heap)) < 100


def test_a_member_is_here_once() -> None:
    queue = backlog()
    put(queue, "w", range(1))
    with pytest.raises(ValueError, match="already"):
        put(queue, "v", range(1))
    with pytest.raises(ValueError, match="expected a new, empty queue"):
        queue.add("x", lambda: ClassQueue("y", "a", 0, CPU), 5, 0)


# Whose turn is it?


def test_priority_goes_first_then_the_smaller_share_then_the_deadline_then_arrival() -> None:
    queue = backlog()
    put(queue, "late", range(1), now_ms=3)
    put(queue, "early", range(1, 2), now_ms=2)
    put(queue, "urgent", range(2, 3), deadline_ms=900, now_ms=5)
    put(queue, "more urgent", range(3, 4), deadline_ms=800, now_ms=6)
    put(queue, "b", range(4, 6), tenant="b", amount=(("cpu", 2),), now_ms=7)
    put(queue, "first", range(6, 7), priority=1, now_ms=9)
    # a had one turn at the higher priority, so b comes first; b's replicas are twice as large.
    assert order(queue, now_ms=10) == [6, 4, 3, 2, 5, 1, 0]


def test_a_run_is_of_one_line_and_one_tenant_alone_gets_it_whole() -> None:
    queue = backlog()
    a = put(queue, "a", range(1000))
    assert queue.take(600, 0, shares()) == [(a, list(range(600)))]
    b = put(queue, "b", range(1000, 1002), tenant="b")
    # a has 600 in flight, which count.
    assert queue.take(4, 0, shares()) == [(b, [1000, 1001]), (a, [600, 601])]


def test_equal_tenants_take_turns() -> None:
    queue = backlog()
    for i, tenant in enumerate("cab"):
        put(queue, tenant, range(10 * i, 10 * i + 3), tenant=tenant)
    assert order(queue) == [10, 20, 0, 11, 21, 1, 12, 22, 2]


def test_an_early_flood_does_not_shut_out_who_comes_later() -> None:
    """At one priority age decides nothing between tenants: the flood is older by minutes, and gives way all the same."""
    queue = backlog()
    put(queue, "flood", range(10_000), tenant="flood")
    put(queue, "late", range(10_000, 10_003), tenant="late", now_ms=5 * MINUTE_MS)
    assert order(queue, 6, 5 * MINUTE_MS) == [0, 10_000, 1, 10_001, 2, 10_002]


def test_work_that_asks_for_nothing_counted_takes_turns_like_the_rest() -> None:
    queue = backlog()
    put(queue, "free", range(10_000), tenant="a", amount=())
    put(queue, "paid", range(10_000, 10_010), tenant="b", amount=(("cpu", 10),))
    taken = order(queue, 200)
    assert len([member for member in taken if isinstance(member, int) and member >= 10_000]) == 10


def test_age_lifts_a_priority_past_one_that_is_near_and_never_further_than_its_bound() -> None:
    ageing = Ageing(step=2, bound=5)
    for own, waited_ms, lifted in (
        (0, 0, 0),
        (0, 2 * MINUTE_MS - 1, 2),
        (0, 2 * MINUTE_MS, 4),
        (0, 3 * MINUTE_MS, 5),
        (7, 10**12, 12),
        (-3, -5, -3),
    ):
        assert ageing.effective_priority(own, waited_ms) == lifted
    for above, first in ((3, "old"), (5, "level"), (6, "new")):
        queue = backlog(ageing=ageing)
        put(queue, "old", range(2), tenant="b")
        now_ms = 60 * MINUTE_MS
        put(queue, "new", range(2, 4), priority=above, now_ms=now_ms)
        expected = {"old": [0, 1, 2, 3], "level": [2, 0, 3, 1], "new": [2, 3, 0, 1]}
        assert order(queue, now_ms=now_ms) == expected[first], "level: they take turns, by share and name"


def test_age_is_that_of_who_is_queued_now() -> None:
    queue = backlog(ageing=Ageing(step=1, bound=5))
    put(queue, "old", range(1))
    put(queue, "old", range(1, 2), now_ms=10 * MINUTE_MS)
    put(queue, "above", range(2, 3), priority=2, now_ms=10 * MINUTE_MS)
    now_ms = 10 * MINUTE_MS
    assert order(queue, 1, now_ms) == [0], "ten minutes old"
    assert order(queue, 1, now_ms) == [2], "what is left is new"
    queue.return_member(0)
    queue.return_member(2)
    assert order(queue, now_ms=now_ms) == [0, 1, 2], "and it is as old as before when it comes back"


def test_the_limit_is_kept_and_nothing_is_taken_for_nothing() -> None:
    queue = backlog()
    put(queue, "w", range(5))
    assert order(queue, 0) == [] == order(queue, -1)
    assert order(queue, 2) == [0, 1] and order(queue, 9) == [2, 3, 4] and order(queue, 9) == []
    assert not queue.active and len(queue) == 5
