"""Backlog: waiting and wake-ups, and the order in which queues are tried. All interleavings are in the property tests."""

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


def backlog(
    *, ageing: Ageing | None = None, history: UnblockHistory | None = None, rng_: Callable[[int], int] = middle
) -> Backlog:
    return Backlog(rng_, ageing=ageing, history=history)


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
        queue_ = queue.add(key, lambda: ClassQueue(key, tenant, priority, amount, deadline_ms), member, now_ms)
    return queue_


def order(queue: Backlog, limit: int = 1000, now_ms: int = 0) -> list[Member]:
    return [member for _, members in queue.take(limit, now_ms, shares()) for member in members]


def refuse(queue: Backlog, queue_: ClassQueue, *cures: UnblockKey, reason: str = "no_room", now_ms: int = 0) -> bool:
    """One attempt that fails."""
    return queue.wait(queue_, reason, frozenset(cures or (ROOM,)), since=queue.begin_attempt(queue_), now_ms=now_ms)


# Waiting and wake-ups


def test_event_during_attempt_keeps_queue_active() -> None:
    """F22: the event comes while the queue does not wait yet."""
    queue = backlog()
    queue_ = put(queue, "w", range(3))
    since = queue.begin_attempt(queue_)
    queue.on_event(ROOM, 1)
    assert not queue.wait(queue_, "no_room", frozenset({ROOM}), since=since, now_ms=0)
    assert queue_.state == "active" and order(queue) == [0, 1, 2]
    assert refuse(queue, queue_), "a later attempt has seen the event"
    assert queue_.state == "waiting"


def test_attempt_on_older_view_counts_events_since_that_view() -> None:
    """F22: the revision of the view counts, not the start of the attempt."""
    queue = backlog()
    queue_ = put(queue, "w", range(1))
    queue.on_event(ROOM, 7)
    assert queue.begin_attempt(queue_) == 7
    assert not queue.wait(queue_, "no_room", frozenset({ROOM}), since=6, now_ms=0)
    assert queue.wait(queue_, "no_room", frozenset({ROOM}), since=7, now_ms=0)


def test_event_restricted_to_other_queue_is_no_wakeup() -> None:
    """F22, the converse: a queue that every event wakes would never sleep."""
    queue = backlog()
    small, large = put(queue, "small", range(1)), put(queue, "large", range(1, 2))
    since = {queue_: queue.begin_attempt(queue_) for queue_ in (small, large)}
    queue.on_event(ROOM, 1, which=lambda queue_: queue_ is small)
    assert not queue.wait(small, "no_room", frozenset({ROOM}), since=since[small], now_ms=0)
    assert queue.wait(large, "no_room", frozenset({ROOM}), since=since[large], now_ms=0)


def test_events_beyond_bounded_history_count_as_happened() -> None:
    """F22: the history of events is bounded, and no wake-up is lost by that."""
    queue = backlog(history=UnblockHistory(2, 2))
    queue_ = put(queue, "w", range(1))
    since = queue.begin_attempt(queue_)
    queue.on_event(("quota", "a"), 1)
    for version, other in enumerate(("x", "y"), 2):
        queue.on_event(("quota", other), version)
    assert not queue.wait(queue_, "over_quota", frozenset({("quota", "a")}), since=since, now_ms=0)
    assert refuse(queue, queue_, ("quota", "a"))
    queue.on_event(("quota", "a"), 4)

    since = queue.begin_attempt(queue_)
    for version in (5, 6, 7):
        queue.on_event(ROOM, version, which=lambda queue_: False)
    assert not queue.wait(queue_, "no_room", frozenset({ROOM}), since=since, now_ms=0), "the first event's queues are forgotten"
    assert queue.wait(queue_, "no_room", frozenset({ROOM}), since=5, now_ms=0), "later events are known to be for others"


def test_events_may_be_recorded_out_of_order() -> None:
    """F22"""
    history, queue_ = UnblockHistory(), ClassQueue("w", "a", 0, CPU)
    history.record(ROOM, 5, lambda queue_: True)
    history.record(ROOM, 3)
    assert (
        history.happened_since(queue_, [ROOM], 4)
        and history.happened_since(queue_, [ROOM], 2)
        and not history.happened_since(queue_, [ROOM], 5)
    )
    history.record(ROOM, 2)
    assert history.happened_since(queue_, [ROOM], 2)


def test_event_wakes_only_queues_that_wait_for_it() -> None:
    queue = backlog()
    quota: UnblockKey = ("quota", "a")
    events: dict[str, tuple[UnblockKey, ...]] = {"q": (quota,), "r": (ROOM,), "both": (ROOM, quota), "p": (("policy",),)}
    lines = {key: put(queue, key, range(i, i + 1)) for i, key in enumerate(events)}
    for key, queue_ in lines.items():
        assert refuse(queue, queue_, *events[key])
    assert queue.on_event(quota, 1) == 2
    assert [key for key, queue_ in lines.items() if queue_.state == "active"] == ["q", "both"]
    assert queue.on_event(ROOM, 2, which=lambda queue_: queue_.key != "r") == 0
    assert queue.on_event(("quota", "b"), 3) == 0
    assert queue.on_event(ROOM, 4) == 1
    assert [queue_.key for queue_, _ in queue.waiting()] == ["p"]


def test_every_wait_has_reason_unblock_event_and_deadline() -> None:
    ends = []
    for rng_ in (lambda limit: 0, middle, lambda limit: limit):
        queue = backlog(rng_=rng_)
        queue_ = put(queue, "w", range(2))
        assert refuse(queue, queue_, now_ms=100)
        assert queue_.wait is not None
        assert (queue_.wait.reason, queue_.wait.unblock_events, queue_.wait.at_ms) == ("no_room", frozenset({ROOM}), 100)
        ends.append(queue_.wait.until_ms - 100)
        assert queue.next_ms() == queue_.wait.until_ms
        assert order(queue, now_ms=queue_.wait.until_ms - 1) == []
        assert order(queue, now_ms=queue_.wait.until_ms) == [0, 1], "L2: retried at the deadline in any case"
    assert ends == [RETRY_MS_MIN, (RETRY_MS_MIN + RETRY_MS_MAX) // 2, RETRY_MS_MAX] and RETRY_MS_MAX == 60_000
    with pytest.raises(ValueError, match="cannot wait without an unblock event"):
        queue.wait(queue_, "no_room", frozenset(), since=0, now_ms=0)


def test_wait_deadline_may_be_earlier_but_not_later_than_default() -> None:
    queue = backlog()
    queue_ = put(queue, "w", range(1))
    for until_ms, expected in ((30_000, 30_000), (90_000, 52_500)):
        queue.wait(queue_, "held", frozenset({("override",)}), since=queue.begin_attempt(queue_), now_ms=0, until_ms=until_ms)
        assert queue_.wait is not None and queue_.wait.until_ms == expected


def test_newer_attempts_reason_wins_over_older_attempts() -> None:
    queue = backlog()
    queue_ = put(queue, "w", range(2))
    older = queue.begin_attempt(queue_)
    queue.on_event(("node",), 1)
    assert refuse(queue, queue_, ("quota", "a"), reason="over_quota")
    assert queue.wait(queue_, "no_room", frozenset({ROOM}), since=older, now_ms=0)
    assert queue_.wait is not None and queue_.wait.reason == "over_quota"


def test_member_added_to_waiting_queue_waits_with_it() -> None:
    queue = backlog()
    queue_ = put(queue, "w", range(2))
    refuse(queue, queue_)
    put(queue, "w", range(2, 5))
    assert order(queue) == [] and queue_.attempts == 1
    assert {reason: tuple(tally) for reason, tally in queue.reasons().items()} == {"no_room": (1, 5)}


def test_backoff_doubles_to_bound_and_restarts_after_success() -> None:
    queue = backlog(rng_=lambda limit: 0)
    queue_ = put(queue, "w", range(3))
    pauses, now_ms = [], 0
    for _ in range(12):
        queue.begin_attempt(queue_)
        queue.back_off(queue_, "silence", now_ms)
        assert queue_.wait is not None and queue_.state == "backoff"
        assert queue.on_event(ROOM, queue.version + 1) == 0, "only its deadline ends a backoff"
        pauses.append(queue_.wait.until_ms - now_ms)
        assert order(queue, now_ms=queue_.wait.until_ms - 1) == []
        now_ms = queue_.wait.until_ms
        (member,) = order(queue, 1, now_ms)
        queue.return_member(member)
    assert pauses == [min(200 << i, BACKOFF_MS_MAX) for i in range(12)]
    queue.remove(order(queue, 1, now_ms)[0])
    queue.back_off(queue_, "silence", now_ms)
    assert queue_.wait is not None and queue_.wait.until_ms - now_ms == 200
    assert backlog_pause(lambda limit: limit) == 100, "jitter keeps at least half"


def backlog_pause(rng_: Callable[[int], int]) -> int:
    queue = backlog(rng_=rng_)
    queue_ = put(queue, "w", range(1))
    queue.back_off(queue_, "silence", 0)
    assert queue_.wait is not None
    return queue_.wait.until_ms


# Heads and queues


def test_impossible_head_does_not_block_other_queues() -> None:
    """F23: ten thousand unschedulable replicas with the highest priority and age cost one attempt."""
    queue = backlog()
    queue_ = put(queue, "impossible", range(10_000), priority=100)
    others = put(queue, "possible", range(10_000, 10_050), now_ms=1)
    placed: list[Member] = []
    for now_ms in range(1, 20):
        for run, members in queue.take(256, now_ms, shares()):
            since = queue.begin_attempt(run)
            for member in members:
                if run is queue_:
                    queue.return_member(member)
                else:
                    placed.append(member)
                    queue.remove(member)
            if run is queue_:
                assert queue.wait(run, "no_room", frozenset({ROOM}), since=since, now_ms=now_ms)
    assert placed == list(range(10_000, 10_050)) and queue.queue("possible") is None and len(others) == 0
    assert queue_.attempts == 1 and queue_.members() == list(range(10_000))


def operations(work: Callable[[], Any]) -> int:
    """Number of interpreter steps in the scheduler's own code."""
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


def test_take_costs_same_regardless_of_waiting_queues() -> None:
    """F23: waiting queues are not visited."""
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


def test_add_and_remove_cost_same_regardless_of_queue_length() -> None:
    costs = []
    for members in (100, 20_000):
        queue = backlog()
        put(queue, "w", range(members))
        costs.append(operations(lambda: come_and_go(queue)))  # noqa: B023  (called at once)
    assert costs[0] == costs[1]


def test_returned_member_keeps_its_position() -> None:
    queue = backlog()
    put(queue, "w", range(6))
    assert order(queue, 4) == [0, 1, 2, 3]
    put(queue, "w", range(6, 8), now_ms=5)
    for member in (3, 0, 2):
        queue.return_member(member)
    assert order(queue, 5) == [0, 2, 3, 4, 5]
    assert order(queue) == [6, 7], "members in flight are not taken again"


def test_returned_head_moves_its_queue_forward() -> None:
    queue = backlog()
    put(queue, "w", range(1), now_ms=1)
    put(queue, "w", range(1, 2), now_ms=3)
    put(queue, "v", range(2, 3), now_ms=2)
    assert order(queue, 1, 5) == [0] and order(queue, 1, 5) == [2]
    queue.return_member(2)
    queue.return_member(0)
    assert order(queue, now_ms=5) == [0, 2, 1]


def test_queue_with_others_in_flight_survives_removal_of_last_member() -> None:
    queue = backlog()
    put(queue, "w", range(3))
    assert order(queue, 2) == [0, 1]
    queue.remove(2)
    assert not queue.active and order(queue) == []
    queue.return_member(1)
    queue.return_member(0)
    queue.remove(0)
    assert order(queue) == [1]


def test_member_removed_in_flight_may_be_returned_late_without_effect() -> None:
    queue = backlog()
    put(queue, "w", range(2))
    assert order(queue) == [0, 1]
    queue.remove(0)
    queue.remove(0)
    queue.return_member(0)
    put(queue, "w", range(1), now_ms=9)
    queue.return_member(0)
    queue.return_member(1)
    assert order(queue) == [1, 0] and len(queue) == 2, "it was added again, at the end"


def test_empty_queue_leaves_no_state_behind() -> None:
    queue = backlog()
    for i in range(3):
        queue_ = put(queue, "w", range(3))
        order(queue, i)
        refuse(queue, queue_)
        for member in range(3):
            queue.remove(member)
        assert len(queue) == 0 and not list(queue.queues()) and not list(queue.waiting())
        assert queue.next_ms() is None and not queue.active and not queue._waiters and not queue._queues_in_flight
        assert not refuse(queue, queue_), "an attempt that ends after its queue is gone"
        queue.back_off(queue_, "silence", 0)
        assert queue.next_ms() is None


def test_expired_timers_and_stale_heap_entries_do_not_accumulate() -> None:
    queue = backlog()
    queue_ = put(queue, "w", range(4))
    for version in range(1, 2000):
        for member in order(queue, 3, version):
            queue.return_member(member)
        assert refuse(queue, queue_, now_ms=version)
        queue.on_event(ROOM, version)
    (rank,) = queue._levels._levels.values()
    assert max(len(queue._timers), len(rank._oldest._heap), len(rank.lanes["a"]._heap), len(queue_._returned_heap)) < 100


def test_member_cannot_be_added_twice() -> None:
    queue = backlog()
    put(queue, "w", range(1))
    with pytest.raises(ValueError, match="already"):
        put(queue, "v", range(1))
    with pytest.raises(ValueError, match="expected a new, empty queue"):
        queue.add("x", lambda: ClassQueue("y", "a", 0, CPU), 5, 0)


# Order of queues


def test_order_is_priority_then_share_then_deadline_then_arrival() -> None:
    queue = backlog()
    put(queue, "late", range(1), now_ms=3)
    put(queue, "early", range(1, 2), now_ms=2)
    put(queue, "urgent", range(2, 3), deadline_ms=900, now_ms=5)
    put(queue, "more urgent", range(3, 4), deadline_ms=800, now_ms=6)
    put(queue, "b", range(4, 6), tenant="b", amount=(("cpu", 2),), now_ms=7)
    put(queue, "first", range(6, 7), priority=1, now_ms=9)
    # a had one turn at the higher priority, so b comes first; b's replicas are twice as large.
    assert order(queue, now_ms=10) == [6, 4, 3, 2, 5, 1, 0]


def test_run_is_from_one_queue_and_single_tenant_gets_it_whole() -> None:
    queue = backlog()
    a = put(queue, "a", range(1000))
    assert queue.take(600, 0, shares()) == [(a, list(range(600)))]
    b = put(queue, "b", range(1000, 1002), tenant="b")
    # a has 600 in flight, which count.
    assert queue.take(4, 0, shares()) == [(b, [1000, 1001]), (a, [600, 601])]


def test_equal_tenants_alternate() -> None:
    queue = backlog()
    for i, tenant in enumerate("cab"):
        put(queue, tenant, range(10 * i, 10 * i + 3), tenant=tenant)
    assert order(queue) == [10, 20, 0, 11, 21, 1, 12, 22, 2]


def test_early_flood_of_one_tenant_does_not_block_later_tenants() -> None:
    """Age decides nothing between tenants of one priority: the flood is minutes older and yields all the same."""
    queue = backlog()
    put(queue, "flood", range(10_000), tenant="flood")
    put(queue, "late", range(10_000, 10_003), tenant="late", now_ms=5 * MINUTE_MS)
    assert order(queue, 6, 5 * MINUTE_MS) == [0, 10_000, 1, 10_001, 2, 10_002]


def test_work_without_counted_resources_alternates_like_the_rest() -> None:
    queue = backlog()
    put(queue, "free", range(10_000), tenant="a", amount=())
    put(queue, "paid", range(10_000, 10_010), tenant="b", amount=(("cpu", 10),))
    taken = order(queue, 200)
    assert len([member for member in taken if isinstance(member, int) and member >= 10_000]) == 10


def test_ageing_raises_priority_up_to_bound() -> None:
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
        assert order(queue, now_ms=now_ms) == expected[first], "level: they alternate by share and name"


def test_age_is_that_of_members_queued_now() -> None:
    queue = backlog(ageing=Ageing(step=1, bound=5))
    put(queue, "old", range(1))
    put(queue, "old", range(1, 2), now_ms=10 * MINUTE_MS)
    put(queue, "above", range(2, 3), priority=2, now_ms=10 * MINUTE_MS)
    now_ms = 10 * MINUTE_MS
    assert order(queue, 1, now_ms) == [0], "ten minutes old"
    assert order(queue, 1, now_ms) == [2], "the remaining member is new"
    queue.return_member(0)
    queue.return_member(2)
    assert order(queue, now_ms=now_ms) == [0, 1, 2], "a returned member keeps its age"


def test_take_respects_limit_and_zero_takes_nothing() -> None:
    queue = backlog()
    put(queue, "w", range(5))
    assert order(queue, 0) == [] == order(queue, -1)
    assert order(queue, 2) == [0, 1] and order(queue, 9) == [2, 3, 4] and order(queue, 9) == []
    assert not queue.active and len(queue) == 5
