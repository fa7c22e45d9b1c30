"""Is a wait counted from when only the scheduler was to blame, and are many long ones noticed?"""

from __future__ import annotations

from remit.simulate.checkers.judge import Core
from remit.simulate.checkers.progress_checks import DELAYS_MIN, SchedulingDelay, SchedulingDelays
from tests.unit.simulate.checkers.history_builder import ROLES, Pen

CHECK = "work_is_bound_soon"


def healed(pen: Pen, *, calm: bool = False) -> SchedulingDelays:
    nodes = frozenset({"n1", "n2"})
    pen.world.judge.heal(Core(frozenset({pen.scope}), {pen.scope: nodes}, frozenset(ROLES), pen.world.now_ms, {}, calm))
    return pen.world.judge.liveness.delays.get(pen.scope, SchedulingDelays())


def pass_time(pen: Pen, seconds: int) -> None:
    for _ in range(seconds):
        pen.world.now_ms += 1_000
        pen.world.judge.tick()


def lived(pen: Pen, index: int, wait_s: int) -> None:
    """One replica that waits for so long, runs, and makes room."""
    (key,) = pen.spawn(index)
    pass_time(pen, wait_s)
    pen.run(key)
    pen.release(key)


def judged(slow: int, of: int) -> Pen:
    """So many waits, of which so many are longer than they may be."""
    pen = Pen().furnish(replicas=1_000)
    healed(pen)
    for index in range(of):
        lived(pen, index, 6 if index < slow else 0)
    pen.world.judge.conclude()
    return pen


def test_all_but_a_hundredth_are_bound_soon() -> None:
    assert judged(1, 100).found == []


def test_more_than_a_hundredth_that_waited_for_longer_are_noticed() -> None:
    pen = judged(2, 100)
    assert pen.found == [CHECK]
    (violation,) = pen.world.judge.violations
    assert (violation.property, violation.key) == ("L1", "replica/t1/w-0")
    assert violation.why == "it waited for 6000 ms, bound 5000, as did 2 of 100 placeable replicas"


def test_of_few_nothing_is_known() -> None:
    pen = judged(50, 99)
    assert "work_is_bound_soon" not in pen.found
    assert f"{CHECK} in r1: 99 waits were measured, of {DELAYS_MIN} needed" in pen.world.judge.undecided


def test_a_wait_begins_when_it_is_pending_and_ends_when_it_is_bound() -> None:
    pen = Pen().furnish()
    waits = healed(pen)
    lived(pen, 0, 3)
    assert waits.ended == [SchedulingDelay(3_000, "replica/t1/w-0")]


def test_a_reservation_does_not_end_it__but_for_victims_it_waits_with_reason() -> None:
    pen = Pen().furnish()
    waits = healed(pen)
    a, b = pen.spawn(0, 1)
    pass_time(pen, 1)
    pen.commit({a: pen.status(a, phase="reserved", node="n1", grants=["tenant/t1"])}, [pen.entry("reserve", a, "scheduler")])
    pass_time(pen, 1)
    pen.bind(a)
    pen.run(b)
    pen.spawn(2)
    c = "replica/t1/w-2"
    held = pen.status(c, phase="reserved", node="n1", grants=["tenant/t1"], victims={b: pen.copy(b)})
    pen.commit({c: held}, [pen.entry("reserve", c, "scheduler")])
    assert waits.ended == [SchedulingDelay(2_000, a), SchedulingDelay(2_000, b)] and waits.since == {}


def test_the_wait_begins_anew_while_there_is_no_room() -> None:
    pen = Pen().furnish(template={"command": ["x"], "resources": {"cpu": "3"}})
    a, b = pen.spawn(0, 1)
    pen.run(a, "n1")
    pen.run(b, "n2")
    waits = healed(pen)
    (c,) = pen.spawn(2)
    pass_time(pen, 30)
    pen.release(a)
    pass_time(pen, 2)
    pen.bind(c)
    assert waits.ended == [SchedulingDelay(2_000, c)]


def test_the_wait_begins_anew_while_there_is_not_room_for_all() -> None:
    pen = Pen().furnish(template={"command": ["x"], "resources": {"cpu": "3"}})
    waits = healed(pen)
    a, b, c = pen.spawn(0, 1, 2)
    pass_time(pen, 10)
    pen.bind(a, "n1")
    pass_time(pen, 10)
    pen.bind(b, "n2")
    assert waits.ended == [SchedulingDelay(0, a), SchedulingDelay(0, b)] and set(waits.since) == {c}


def test_gangs_and_what_has_terms_towards_others_are_not_measured() -> None:
    pen = Pen().furnish()
    waits = healed(pen)
    pen.declare("g", gang={"min": 2})
    pen.declare("s", placement={"topologySpread": [{"topologyKey": "zone", "maxSkew": 1}]})
    for name in ("g", "s"):
        pen.spawn(0, 1, workload=name)
        assert waits.since == {}, name
    pen.spawn(0)
    assert set(waits.since) == {"replica/t1/w-0"}


def test_what_is_still_waiting_counts_if_that_is_too_long_already() -> None:
    pen = Pen().furnish()
    waits = healed(pen)
    pen.spawn(0)
    pass_time(pen, 3)
    pen.spawn(1)
    pass_time(pen, 3)
    healed(pen, calm=True)
    assert waits.ended == [SchedulingDelay(6_000, "replica/t1/w-0")]
    lived(pen, 2, 1)
    assert len(waits.ended) == 1, "nothing is measured any more"


def test_after_faults_nothing_is_measured() -> None:
    pen = Pen().furnish()
    healed(pen, calm=True)
    lived(pen, 0, 1)
    pen.world.judge.conclude()
    assert pen.world.judge.liveness.delays == {}
    assert not [why for why in pen.world.judge.undecided if CHECK in why]
