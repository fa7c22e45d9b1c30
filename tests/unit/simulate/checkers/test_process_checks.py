"""Is what ran judged by the runner's record alone? Starts without orders, second copies, ends that were none."""

from __future__ import annotations

from tests.unit.simulate.checkers.history_builder import Pen

FENCED = {"replace": "fenced", "fence": "1m"}
LOST_MS = 70_000


def started(**more: str) -> tuple[Pen, str]:
    """One replica, running on n1 as process 1."""
    pen = Pen().furnish(**more)
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.move(a, "starting", "agent/n1")
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    pen.move(a, "running", "agent/n1")
    return pen, a


def give_up(pen: Pen, key: str) -> None:
    """Its node falls silent, and after the fence the attempt is given up."""
    pen.move(key, "unknown", "node-lifecycle", before="running")
    pen.world.now_ms += LOST_MS
    pen.move(key, "failed", "node-lifecycle", result="lost")
    pen.move(key, "released", "repair", grants=None)
    pen.requeue(key)


def again(pen: Pen, key: str, pid: int = 2) -> None:
    """A second attempt, on n2."""
    pen.bind(key, "n2")
    pen.move(key, "starting", "agent/n2")
    pen.world.judge.on_process_started("n2", "r1", key, "uw0", 2, pid)


def test_a_life_that_ends_before_the_next_begins_is_lawful() -> None:
    pen, a = started(**FENCED)
    pen.move(a, "draining", "workloads")
    pen.move(a, "stopping", "agent/n1")
    pen.world.judge.on_process_ended("n1", 1)
    pen.move(a, "released", "agent/n1", grants=None, result="ok")
    pen.requeue(a)
    again(pen, a)
    pen.world.judge.conclude()
    assert pen.found == [] and not pen.world.judge.waived


def test_a_copy_that_stops_itself_in_time_is_replaced_lawfully() -> None:
    pen, a = started(**FENCED)
    pen.world.judge.on_process_ended("n1", 1)
    give_up(pen, a)
    again(pen, a)
    pen.world.judge.conclude()
    assert pen.found == []


def test_a_fence_that_passes_while_the_copy_runs_is_a_breach() -> None:
    pen, a = started(**FENCED)
    give_up(pen, a)
    assert pen.found == ["ended_work_runs_no_more"]


def test_a_second_copy_of_fenced_work_is_a_breach() -> None:
    pen, a = started(**FENCED)
    give_up(pen, a)
    again(pen, a)
    assert "one_copy_at_a_time" in pen.found
    pen.world.judge.conclude()
    assert "intervals_are_disjoint" in pen.found


def test_a_second_copy_of_a_job_is_a_breach_by_default() -> None:
    pen, a = started(type="job", fence="1m")
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 2)
    assert pen.found == ["one_copy_at_a_time"]


def test_a_second_copy_of_eager_work_is_waived_by_name() -> None:
    pen, a = started()
    give_up(pen, a)
    again(pen, a)
    pen.world.judge.conclude()
    assert pen.found == [] and pen.world.judge.waived["eager"] == 3, "given up, released, and run twice"


def test_an_end_that_was_none_is_a_breach_also_of_eager_work() -> None:
    pen, a = started()
    pen.move(a, "draining", "workloads")
    pen.move(a, "stopping", "agent/n1")
    pen.move(a, "released", "agent/n1", grants=None, result="ok")
    assert pen.found == ["ended_work_runs_no_more"]


def test_a_start_without_its_own_commit_is_a_breach() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    assert pen.found == ["runs_only_what_was_ordered"]


def test_a_start_on_another_node_than_ordered_is_a_breach() -> None:
    pen = Pen().furnish()
    (a,) = pen.spawn(0)
    pen.bind(a)
    pen.move(a, "starting", "agent/n1")
    pen.world.judge.on_process_started("n2", "r1", a, "uw0", 1, 1)
    assert pen.found == ["runs_only_what_was_ordered"]


def test_an_order_that_is_executed_after_its_release_is_a_breach() -> None:
    pen, a = started(**FENCED)
    pen.world.judge.on_process_ended("n1", 1)
    give_up(pen, a)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert pen.found == ["runs_only_what_was_ordered"]


def test_an_order_of_eager_work_is_executed_after_its_release_by_name_only_if_its_node_was_given_up() -> None:
    pen, a = started()
    pen.world.judge.on_process_ended("n1", 1)
    give_up(pen, a)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert pen.found == [] and pen.world.judge.waived == {"eager": 1}
    pen, a = started()
    pen.world.judge.on_process_ended("n1", 1)
    pen.move(a, "failed", "agent/n1", result="crashed")
    pen.move(a, "released", "repair", grants=None)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert pen.found == ["runs_only_what_was_ordered"]


def test_an_order_of_a_forgotten_replica_is_executed_too_late() -> None:
    pen, a = started()
    pen.world.judge.on_process_ended("n1", 1)
    pen.release(a)
    pen.commit({a: None}, [pen.entry("forget", a, "workloads")])
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert pen.found == ["runs_only_what_was_ordered"]


def test_a_restart_inside_an_attempt_needs_no_new_commit() -> None:
    """S20: while the store refuses writes, what was committed as starting may be started again."""
    pen, a = started(**FENCED)
    pen.world.judge.on_process_ended("n1", 1)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 2)
    assert pen.found == []


def test_what_a_restore_forgot_may_be_started_again_but_not_twice_at_once() -> None:
    pen = Pen().furnish(**FENCED)
    (a,) = pen.spawn(0)
    backup = dict(pen.rows)
    pen.run(a)
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    pen.restore(backup, incarnation="r1-i2")
    pen.doubt()
    pen.mark("joining", "n2")
    pen.mark("ready", "n2")
    pen.mark("lost", "n1")
    pen.bind(a, "n2")
    pen.move(a, "starting", "agent/n2")
    assert pen.found == []
    pen.world.judge.on_process_started("n2", "r1", a, "uw0", 1, 2)
    assert pen.found == ["one_copy_at_a_time"] and "was restored" in pen.world.judge.violations[0].why


# ------------------------------------------------------------------------------------------------------- asked to end

STOPPED = "what_is_ordered_is_not_stopped"


def stop(pen: Pen, by: str = "agent-r1-1#1") -> None:
    pen.world.judge.on_stop_requested("n1", 1, by)


def test_what_is_ordered_is_stopped_by_nobody() -> None:
    pen, a = started()
    pen.world.judge.on_lease_renewed("r1", "agent/n1", 1, pen.world.now_ms)
    pen.world.now_ms += 3_600_000
    stop(pen)
    assert pen.found == [STOPPED] and pen.world.judge.violations[0].property == "S20"
    assert "agent-r1-1#1 at 4600000 ms" in pen.world.judge.story("r1", a)


def test_what_is_unknown_is_still_ordered() -> None:
    pen, a = started()
    pen.move(a, "unknown", "node-lifecycle", before="running")
    stop(pen)
    assert pen.found == [STOPPED]


def test_what_is_to_go_is_stopped() -> None:
    pen, a = started()
    pen.move(a, "draining", "workloads")
    stop(pen)
    pen.move(a, "stopping", "agent/n1")
    stop(pen)
    pen.move(a, "unknown", "node-lifecycle", before="stopping")
    stop(pen)
    assert pen.found == []


def test_a_copy_of_another_attempt_or_of_nothing_is_stopped() -> None:
    pen, a = started()
    give_up(pen, a)
    stop(pen)
    pen.bind(a, "n1")
    stop(pen)
    pen.release(a)
    pen.commit({a: None}, [pen.entry("forget", a, "workloads")])
    stop(pen)
    assert pen.found == []


def test_a_process_that_has_ended_is_asked_in_vain() -> None:
    pen, _ = started()
    pen.world.judge.on_process_ended("n1", 1)
    stop(pen)
    assert pen.found == []


def test_fenced_work_is_stopped_by_its_fence_and_not_before() -> None:
    """Counted from when the last renewal that was answered had been sent, by a clock that may be a little fast."""
    for passed_ms, found in ((59_000, [STOPPED]), (59_900, []), (70_000, [])):
        pen, _ = started(**FENCED)
        pen.world.judge.on_lease_renewed("r1", "agent/n1", 1, pen.world.now_ms)
        pen.world.judge.on_lease_renewed("r1", "agent/n1", 1, pen.world.now_ms - 5_000)
        pen.world.now_ms += passed_ms
        stop(pen, "keeper-r1-1#1")
        assert pen.found == found, passed_ms


def test_a_fence_that_nobody_knows_the_beginning_of_is_not_judged() -> None:
    pen, _ = started(**FENCED)
    stop(pen, "keeper-r1-1#1")
    assert pen.found == [] and any(STOPPED in why for why in pen.world.judge.undecided)


def test_an_order_to_stop_may_have_been_lost_by_a_restore() -> None:
    pen, a = started()
    pen.restore(pen.rows, incarnation="r1-i2")
    pen.doubt()
    stop(pen)
    assert pen.found == [] and pen.world.judge.waived == {"restored": 1}
    pen.world.judge.on_process_ended("n1", 1)
    pen.world.now_ms += 1
    pen.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    stop(pen)
    assert pen.found == [STOPPED], "it was started after the restore"
