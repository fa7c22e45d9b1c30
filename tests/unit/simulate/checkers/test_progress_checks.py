"""Progress checks: scheduling delays count only time that the scheduler is responsible for, and many long ones are reported."""

from __future__ import annotations

from remit.simulate.checkers.judge import Core
from remit.simulate.checkers.progress_checks import DELAYS_MIN, SchedulingDelay, SchedulingDelays
from tests.unit.simulate.checkers.history_builder import ROLES, HistoryBuilder

CHECK = "scheduling_latency_is_bounded"


def healed(h: HistoryBuilder, *, calm: bool = False) -> SchedulingDelays:
    nodes = frozenset({"n1", "n2"})
    h.world.judge.heal(Core(frozenset({h.scope}), {h.scope: nodes}, frozenset(ROLES), h.world.now_ms, {}, calm))
    return h.world.judge.liveness.delays.get(h.scope, SchedulingDelays())


def pass_time(h: HistoryBuilder, seconds: int) -> None:
    for _ in range(seconds):
        h.world.now_ms += 1_000
        h.world.judge.tick()


def run_replica(h: HistoryBuilder, index: int, wait_s: int) -> None:
    """One replica that waits this long, runs, and frees its capacity."""
    (key,) = h.spawn(index)
    pass_time(h, wait_s)
    h.run(key)
    h.release(key)


def history_with_delays(slow: int, of: int) -> HistoryBuilder:
    """A history with this many delays, of which `slow` exceed the bound."""
    h = HistoryBuilder().prepare(replicas=1_000)
    healed(h)
    for index in range(of):
        run_replica(h, index, 6 if index < slow else 0)
    h.world.judge.conclude()
    return h


def test_one_percent_of_delays_may_exceed_bound() -> None:
    assert history_with_delays(1, 100).found == []


def test_more_than_one_percent_over_bound_is_violation() -> None:
    h = history_with_delays(2, 100)
    assert h.found == [CHECK]
    (violation,) = h.world.judge.violations
    assert (violation.property, violation.key) == ("L1", "replica/t1/w-0")
    assert violation.why == "it waited for 6000 ms, bound 5000, as did 2 of 100 placeable replicas"


def test_too_few_delays_are_undecided() -> None:
    h = history_with_delays(50, 99)
    assert "scheduling_latency_is_bounded" not in h.found
    assert f"{CHECK} in r1: 99 waits were measured, of {DELAYS_MIN} needed" in h.world.judge.undecided


def test_delay_counts_from_pending_to_bound() -> None:
    h = HistoryBuilder().prepare()
    waits = healed(h)
    run_replica(h, 0, 3)
    assert waits.ended == [SchedulingDelay(3_000, "replica/t1/w-0")]


def test_reservation_without_victims_does_not_end_delay() -> None:
    h = HistoryBuilder().prepare()
    waits = healed(h)
    a, b = h.spawn(0, 1)
    pass_time(h, 1)
    h.commit({a: h.status(a, phase="reserved", node="n1", grants=["tenant/t1"])}, [h.entry("reserve", a, "scheduler")])
    pass_time(h, 1)
    h.bind(a)
    h.run(b)
    h.spawn(2)
    c = "replica/t1/w-2"
    held = h.status(c, phase="reserved", node="n1", grants=["tenant/t1"], victims={b: h.copy(b)})
    h.commit({c: held}, [h.entry("reserve", c, "scheduler")])
    assert waits.ended == [SchedulingDelay(2_000, a), SchedulingDelay(2_000, b)] and waits.since == {}


def test_delay_restarts_while_no_capacity_is_free() -> None:
    h = HistoryBuilder().prepare(template={"command": ["x"], "resources": {"cpu": "3"}})
    a, b = h.spawn(0, 1)
    h.run(a, "n1")
    h.run(b, "n2")
    waits = healed(h)
    (c,) = h.spawn(2)
    pass_time(h, 30)
    h.release(a)
    pass_time(h, 2)
    h.bind(c)
    assert waits.ended == [SchedulingDelay(2_000, c)]


def test_delay_restarts_while_capacity_does_not_suffice_for_all() -> None:
    h = HistoryBuilder().prepare(template={"command": ["x"], "resources": {"cpu": "3"}})
    waits = healed(h)
    a, b, c = h.spawn(0, 1, 2)
    pass_time(h, 10)
    h.bind(a, "n1")
    pass_time(h, 10)
    h.bind(b, "n2")
    assert waits.ended == [SchedulingDelay(0, a), SchedulingDelay(0, b)] and set(waits.since) == {c}


def test_gangs_and_peer_terms_are_not_measured() -> None:
    h = HistoryBuilder().prepare()
    waits = healed(h)
    h.declare("g", gang={"min": 2})
    h.declare("s", placement={"topologySpread": [{"topologyKey": "zone", "maxSkew": 1}]})
    for name in ("g", "s"):
        h.spawn(0, 1, workload=name)
        assert waits.since == {}, name
    h.spawn(0)
    assert set(waits.since) == {"replica/t1/w-0"}


def test_unfinished_delay_counts_once_over_bound() -> None:
    h = HistoryBuilder().prepare()
    waits = healed(h)
    h.spawn(0)
    pass_time(h, 3)
    h.spawn(1)
    pass_time(h, 3)
    healed(h, calm=True)
    assert waits.ended == [SchedulingDelay(6_000, "replica/t1/w-0")]
    run_replica(h, 2, 1)
    assert len(waits.ended) == 1, "measuring has ended"


def test_no_delays_are_measured_after_faults() -> None:
    h = HistoryBuilder().prepare()
    healed(h, calm=True)
    run_replica(h, 0, 1)
    h.world.judge.conclude()
    assert h.world.judge.liveness.delays == {}
    assert not [why for why in h.world.judge.undecided if CHECK in why]
