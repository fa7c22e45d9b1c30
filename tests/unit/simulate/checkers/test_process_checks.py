"""Process checks, judged by the process record alone: unordered starts, second copies, and ends that did not happen."""

from __future__ import annotations

from tests.unit.simulate.checkers.history_builder import HistoryBuilder

FENCED = {"replace": "fenced", "fence": "1m"}
LOST_MS = 70_000


def started(**more: str) -> tuple[HistoryBuilder, str]:
    """One replica, running on n1 as process 1."""
    h = HistoryBuilder().prepare(**more)
    (a,) = h.spawn(0)
    h.bind(a)
    h.move(a, "starting", "agent/n1")
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    h.move(a, "running", "agent/n1")
    return h, a


def give_up(h: HistoryBuilder, key: str) -> None:
    """Mark the node silent and, after the fence, give up the attempt."""
    h.move(key, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += LOST_MS
    h.move(key, "failed", "node-lifecycle", result="lost")
    h.move(key, "released", "repair", grants=None)
    h.requeue(key)


def start_second_attempt(h: HistoryBuilder, key: str, pid: int = 2) -> None:
    """Start a second attempt on n2."""
    h.bind(key, "n2")
    h.move(key, "starting", "agent/n2")
    h.world.judge.on_process_started("n2", "r1", key, "uw0", 2, pid)


def test_attempt_that_ends_before_next_starts_is_lawful() -> None:
    h, a = started(**FENCED)
    h.move(a, "draining", "workloads")
    h.move(a, "stopping", "agent/n1")
    h.world.judge.on_process_ended("n1", 1)
    h.move(a, "released", "agent/n1", grants=None, result="ok")
    h.requeue(a)
    start_second_attempt(h, a)
    h.world.judge.conclude()
    assert h.found == [] and not h.world.judge.waived


def test_process_that_stops_itself_in_time_is_replaced_lawfully() -> None:
    h, a = started(**FENCED)
    h.world.judge.on_process_ended("n1", 1)
    give_up(h, a)
    start_second_attempt(h, a)
    h.world.judge.conclude()
    assert h.found == []


def test_process_still_running_after_fence_is_violation() -> None:
    h, a = started(**FENCED)
    give_up(h, a)
    assert h.found == ["ended_attempts_have_no_process"]


def test_second_copy_of_fenced_work_is_violation() -> None:
    h, a = started(**FENCED)
    give_up(h, a)
    start_second_attempt(h, a)
    assert "fenced_replica_has_one_process" in h.found
    h.world.judge.conclude()
    assert "run_intervals_are_disjoint" in h.found


def test_second_copy_of_job_is_violation_by_default() -> None:
    h, a = started(type="job", fence="1m")
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 2)
    assert h.found == ["fenced_replica_has_one_process"]


def test_second_copy_of_eager_work_is_waived() -> None:
    h, a = started()
    give_up(h, a)
    start_second_attempt(h, a)
    h.world.judge.conclude()
    assert h.found == [] and h.world.judge.waived["eager"] == 3, "given up, released and running twice"


def test_reported_end_without_process_end_is_violation() -> None:
    h, a = started()
    h.move(a, "draining", "workloads")
    h.move(a, "stopping", "agent/n1")
    h.move(a, "released", "agent/n1", grants=None, result="ok")
    assert h.found == ["ended_attempts_have_no_process"]


def test_start_before_starting_commit_is_violation() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.bind(a)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    assert h.found == ["processes_have_committed_start"]


def test_start_on_other_node_is_violation() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.bind(a)
    h.move(a, "starting", "agent/n1")
    h.world.judge.on_process_started("n2", "r1", a, "uw0", 1, 1)
    assert h.found == ["processes_have_committed_start"]


def test_start_after_release_is_violation() -> None:
    h, a = started(**FENCED)
    h.world.judge.on_process_ended("n1", 1)
    give_up(h, a)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert h.found == ["processes_have_committed_start"]


def test_late_start_of_eager_work_is_waived_only_if_node_was_given_up() -> None:
    h, a = started()
    h.world.judge.on_process_ended("n1", 1)
    give_up(h, a)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert h.found == [] and h.world.judge.waived == {"eager": 1}
    h, a = started()
    h.world.judge.on_process_ended("n1", 1)
    h.move(a, "failed", "agent/n1", result="crashed")
    h.move(a, "released", "repair", grants=None)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert h.found == ["processes_have_committed_start"]


def test_start_of_forgotten_replica_is_violation() -> None:
    h, a = started()
    h.world.judge.on_process_ended("n1", 1)
    h.release(a)
    h.commit({a: None}, [h.entry("forget", a, "workloads")])
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 3)
    assert h.found == ["processes_have_committed_start"]


def test_restart_within_attempt_needs_no_commit() -> None:
    """S20: while the store refuses writes, a process committed as starting may be restarted."""
    h, a = started(**FENCED)
    h.world.judge.on_process_ended("n1", 1)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 2)
    assert h.found == []


def test_start_forgotten_by_restore_may_repeat_but_not_overlap() -> None:
    h = HistoryBuilder().prepare(**FENCED)
    (a,) = h.spawn(0)
    backup = dict(h.rows)
    h.run(a)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    h.restore(backup, incarnation="r1-i2")
    h.mark_restored()
    h.mark("joining", "n2")
    h.mark("ready", "n2")
    h.mark("lost", "n1")
    h.bind(a, "n2")
    h.move(a, "starting", "agent/n2")
    assert h.found == []
    h.world.judge.on_process_started("n2", "r1", a, "uw0", 1, 2)
    assert h.found == ["fenced_replica_has_one_process"] and "was restored" in h.world.judge.violations[0].why


# ------------------------------------------------------------------------------------------------------ stop requests

STOPPED = "assigned_processes_are_not_stopped"


def stop(h: HistoryBuilder, by: str = "agent-r1-1#1") -> None:
    h.world.judge.on_stop_requested("n1", 1, by)


def test_stop_of_ordered_process_is_violation() -> None:
    h, a = started()
    h.world.judge.on_lease_renewed("r1", "agent/n1", 1, h.world.now_ms)
    h.world.now_ms += 3_600_000
    stop(h)
    assert h.found == [STOPPED] and h.world.judge.violations[0].property == "S20"
    assert "agent-r1-1#1 at 4600000 ms" in h.world.judge.story("r1", a)


def test_stop_of_unknown_replica_is_violation() -> None:
    h, a = started()
    h.move(a, "unknown", "node-lifecycle", before="running")
    stop(h)
    assert h.found == [STOPPED]


def test_stop_of_draining_replica_is_lawful() -> None:
    h, a = started()
    h.move(a, "draining", "workloads")
    stop(h)
    h.move(a, "stopping", "agent/n1")
    stop(h)
    h.move(a, "unknown", "node-lifecycle", before="stopping")
    stop(h)
    assert h.found == []


def test_stop_of_old_attempt_or_forgotten_replica_is_lawful() -> None:
    h, a = started()
    give_up(h, a)
    stop(h)
    h.bind(a, "n1")
    stop(h)
    h.release(a)
    h.commit({a: None}, [h.entry("forget", a, "workloads")])
    stop(h)
    assert h.found == []


def test_stop_of_ended_process_is_lawful() -> None:
    h, _ = started()
    h.world.judge.on_process_ended("n1", 1)
    stop(h)
    assert h.found == []


def test_fenced_process_is_stopped_only_after_its_fence() -> None:
    """Counted from the sending of the last answered renewal, on a clock that may be slightly fast."""
    for passed_ms, found in ((59_000, [STOPPED]), (59_900, []), (70_000, [])):
        h, _ = started(**FENCED)
        h.world.judge.on_lease_renewed("r1", "agent/n1", 1, h.world.now_ms)
        h.world.judge.on_lease_renewed("r1", "agent/n1", 1, h.world.now_ms - 5_000)
        h.world.now_ms += passed_ms
        stop(h, "keeper-r1-1#1")
        assert h.found == found, passed_ms


def test_stop_by_fence_of_unknown_start_is_undecided() -> None:
    h, _ = started(**FENCED)
    stop(h, "keeper-r1-1#1")
    assert h.found == [] and any(STOPPED in why for why in h.world.judge.undecided)


def test_stop_order_lost_by_restore_is_waived_until_restarted() -> None:
    h, a = started()
    h.restore(h.rows, incarnation="r1-i2")
    h.mark_restored()
    stop(h)
    assert h.found == [] and h.world.judge.waived == {"restored": 1}
    h.world.judge.on_process_ended("n1", 1)
    h.world.now_ms += 1
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    stop(h)
    assert h.found == [STOPPED], "started after the restore"
