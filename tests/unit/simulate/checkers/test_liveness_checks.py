"""Liveness checks: stalled work in a healthy cluster is reported after its bound; progressing work is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remit.simulate.checkers.judge import Bounds, Core, Judge
from remit.simulate.checkers.liveness_checks import LIVENESS_CHECKS
from tests.unit.simulate.checkers.false_decisions import decide
from tests.unit.simulate.checkers.history_builder import ROLES, HistoryBuilder, World, healed, node, pass_time

NEWER = {"command": ["y"], "resources": {"cpu": "1"}}
Stall = Callable[[HistoryBuilder], None]
STALLS: list[tuple[str, Stall, int]] = []
"""The check that must report it, the function that builds the stall, and the seconds that must pass before."""


def stalls(check: str, seconds: int) -> Callable[[Stall], Stall]:
    def register(stall: Stall) -> Stall:
        STALLS.append((check, stall, seconds))
        return stall

    return register


@stalls("placeable_replicas_are_bound", 60)
def pending_replica_with_free_capacity(h: HistoryBuilder) -> None:
    h.spawn(0)
    healed(h)


@stalls("placeable_gang_runs", 60)
def gang_with_free_capacity(h: HistoryBuilder) -> None:
    h.declare("g", gang={"min": 3}, template={"command": ["x"], "resources": {"cpu": "2"}})
    h.spawn(0, 1, 2, workload="g")
    healed(h)


@stalls("reservations_do_not_leak", 120)
def reservation_never_bound(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    held = h.status(a, phase="reserved", node="n1", grants=["tenant/t1"])
    h.commit({a: held}, [h.entry("reserve", a, "scheduler")])
    healed(h)


@stalls("expired_grants_are_closed", 130)
def expired_grant_never_closed(h: HistoryBuilder) -> None:
    h.grant("s", ttl="10s", status={"deadline": {"boot": "b1", "atMs": h.world.now_ms + 10_000}})
    healed(h)


@stalls("orphan_processes_end", 120)
def process_of_released_attempt(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    h.move(a, "unknown", "node-lifecycle", before="running")
    h.world.now_ms += 31_000
    h.move(a, "failed", "node-lifecycle", result="lost")
    h.move(a, "released", "repair", grants=None)
    healed(h)


@stalls("running_replicas_have_processes", 60)
def replica_running_without_process(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    healed(h)


@stalls("silent_nodes_become_unknown", 21)
def silent_node_still_ready(h: HistoryBuilder) -> None:
    h.commit({"node/n3": node("n3")}, [h.entry("apply", "node/n3", "operator")])
    healed(h, silent=frozenset({"n2"}))


@stalls("silent_nodes_become_unknown", 21)
def ready_node_among_mass_silence(h: HistoryBuilder) -> None:
    h.mark("suspect", "n1")
    healed(h, silent=frozenset({"n1", "n2"}))


@stalls("returned_nodes_become_ready", 15)
def returned_node_not_ready(h: HistoryBuilder) -> None:
    h.mark("suspect", "n1")
    h.mark("unknown", "n1")
    healed(h)


@stalls("unknown_replicas_are_resolved", 30)
def unknown_replica_on_healthy_node(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a)
    h.move(a, "unknown", "node-lifecycle", before="running")
    healed(h)


@stalls("unknown_replicas_are_resolved", 60)
def unknown_replica_on_silent_node(h: HistoryBuilder) -> None:
    h.commit({"node/n3": node("n3")}, [h.entry("apply", "node/n3", "operator")])
    (a,) = h.spawn(0)
    h.run(a, "n2")
    h.move(a, "unknown", "node-lifecycle", before="running")
    healed(h, silent=frozenset({"n2"}))


@stalls("deletions_complete", 60)
def deleted_workload_remains(h: HistoryBuilder) -> None:
    h.spawn(0)
    work = h.rows["workload/t1/w"]
    going = {**work, "metadata": {**work["metadata"], "deleting": True}}
    h.commit({"workload/t1/w": going}, [h.entry("delete", "workload/t1/w", "user")])
    healed(h)


@stalls("desired_state_is_reached", 120)
def service_lacks_replica(h: HistoryBuilder) -> None:
    for key in h.spawn(0, 1):
        h.run(key)
    healed(h, calm=True)


@stalls("desired_state_is_reached", 120)
def service_has_surplus_replica(h: HistoryBuilder) -> None:
    h.spawn(0, 1, 2, 3)
    healed(h, calm=True)


@stalls("desired_state_is_reached", 120)
def service_on_old_generation(h: HistoryBuilder) -> None:
    h.declare("w", replicas=1)
    h.spawn(0)
    h.declare("w", 2, replicas=1, template=NEWER, rollout={"maxSurge": 0})
    healed(h, calm=True)


@stalls("desired_state_is_reached", 120)
def old_replica_not_retired(h: HistoryBuilder) -> None:
    h.declare("w", replicas=1)
    (old,) = h.spawn(0)
    h.run(old, until="ready")
    h.declare("w", 2, replicas=1, template=NEWER)
    (new,) = h.spawn(1, generation=2)
    h.run(new, "n2", until="ready")
    healed(h, calm=True)


@stalls("desired_state_is_reached", 120)
def new_generation_without_replicas(h: HistoryBuilder) -> None:
    h.declare("w", replicas=1)
    (old,) = h.spawn(0)
    h.run(old, until="ready")
    h.declare("w", 2, replicas=1, template=NEWER)
    healed(h, calm=True)


@stalls("desired_state_is_reached", 120)
def failed_job_without_condition(h: HistoryBuilder) -> None:
    failed_job(h, retries=0)
    healed(h, calm=True)


@stalls("desired_state_is_reached", 120)
def job_lacks_replica(h: HistoryBuilder) -> None:
    h.declare("w", replicas=0)
    h.declare("j", type="job", replicas=1, completions=2)
    h.spawn(0, workload="j")
    healed(h, calm=True)


@stalls("desired_state_is_reached", 120)
def failed_job_not_retried(h: HistoryBuilder) -> None:
    failed_job(h, retries=1)
    healed(h, calm=True)


@stalls("ready_replicas_become_serving", 60)
def ready_replica_not_serving(h: HistoryBuilder) -> None:
    (a,) = h.spawn(0)
    h.run(a, until="ready")
    healed(h)


@stalls("node_health_does_not_flap", 0)
def node_health_flaps(h: HistoryBuilder) -> None:
    healed(h, calm=True)
    for health in ("suspect", "ready") * 4:
        h.mark(health, "n1")


def failed_job(h: HistoryBuilder, *, retries: int) -> None:
    """A job with one replica whose first attempt failed, and no service beside it."""
    h.declare("w", replicas=0)
    h.declare("j", type="job", replicas=1, retries=retries)
    (a,) = h.spawn(0, workload="j")
    h.run(a)
    h.move(a, "failed", "agent/n1", result="failed")
    h.move(a, "released", "repair", grants=None)


@pytest.mark.parametrize(("check", "stall", "seconds"), STALLS, ids=[stall.__name__ for _, stall, _ in STALLS])
def test_stall_is_reported_after_its_bound_and_not_before(check: str, stall: Stall, seconds: int) -> None:
    h = HistoryBuilder().prepare()
    stall(h)
    pass_time(h, seconds)
    assert check not in h.found
    pass_time(h, 3)
    assert check in h.found
    found = next(one for one in h.world.judge.violations if one.check == check)
    assert found.property == LIVENESS_CHECKS[check][0]
    assert len([one for one in h.world.judge.violations if one.check == check]) == 1, "reported once"


def test_service_in_desired_state_is_no_violation() -> None:
    """Serving, with a released replica and a daemon beside it, and a node that is suspect now and then."""
    h = HistoryBuilder().prepare(replicas=1)
    h.declare("d", type="daemon")
    old, new = h.spawn(0, 1)
    h.run(old)
    h.release(old)
    h.run(new, until="ready")
    h.world.judge.on_process_started("n1", "r1", new, "uw1", 1, 1)
    healed(h, calm=True)
    for _ in range(6):
        pass_time(h, 50)
        h.move(new, "serving", "endpoints")
        h.mark("suspect", "n1")
        pass_time(h, 10)
        h.mark("ready", "n1")
        h.move(new, "ready", "endpoints")
    assert h.found == []


def test_job_out_of_retries_with_condition_is_no_violation() -> None:
    h = HistoryBuilder().prepare()
    failed_job(h, retries=0)
    job = h.rows["workload/t1/j"]
    with_condition = {**job, "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "RetriesExhausted"}]}}
    h.commit({"workload/t1/j": with_condition}, [h.entry("observe", "workload/t1/j", "workloads")])
    healed(h, calm=True)
    pass_time(h, 200)
    assert h.found == []


def test_generation_that_changes_only_counts_needs_no_replacement() -> None:
    h = HistoryBuilder().prepare()
    for key in h.spawn(0, 1, 2):
        h.run(key)
    h.declare("w", 2, rollout={"maxSurge": 3})
    healed(h, calm=True)
    pass_time(h, 200)
    assert "desired_state_is_reached" not in h.found


def test_old_replica_may_stay_until_new_one_is_ready() -> None:
    h = HistoryBuilder().prepare()
    h.declare("w", replicas=1)
    (old,) = h.spawn(0)
    h.run(old, until="ready")
    h.declare("w", 2, replicas=1, template=NEWER)
    (new,) = h.spawn(1, generation=2)
    h.run(new, "n2")
    healed(h, calm=True)
    pass_time(h, 200)
    assert "desired_state_is_reached" not in h.found


def test_desired_state_is_checked_only_in_calm_phase() -> None:
    h = HistoryBuilder().prepare()
    healed(h)
    pass_time(h, 200)
    assert h.found == []


def test_ended_replica_of_shrunk_job_is_no_violation() -> None:
    h = HistoryBuilder().prepare()
    h.declare("w", replicas=0)
    h.declare("j", type="job", replicas=2, retries=3)
    a, b = h.spawn(0, 1, workload="j")
    for key in (a, b):
        h.run(key)
    h.declare("j", 2, type="job", replicas=1, retries=3)
    h.move(b, "failed", "agent/n1", result="failed")
    h.move(b, "released", "repair", grants=None)
    healed(h, calm=True)
    pass_time(h, 200)
    assert "desired_state_is_reached" not in h.found


def test_replica_outside_healthy_core_is_undecided() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a, "n2")
    h.world.judge.heal(Core(frozenset({"r1"}), {"r1": frozenset({"n1"})}, frozenset(ROLES), h.world.now_ms, {}, calm=True))
    pass_time(h, 200)
    h.world.judge.conclude()
    assert h.found == [] and any(why.startswith("desired_state_is_reached") for why in h.world.judge.undecided)


def test_chain_without_commits_has_no_leader() -> None:
    h = HistoryBuilder().prepare()
    healed(h)
    pass_time(h, 17, beats=False)
    assert h.found == []
    pass_time(h, 1, beats=False)
    assert h.found == ["leader_exists"]


def test_commits_without_audit_do_not_count_as_leading() -> None:
    h = HistoryBuilder().prepare()
    healed(h)
    for _ in range(9):
        h.commit({}, [], audit=False)
        pass_time(h, 2, beats=False)
    assert h.found == ["leader_exists"]


def test_repeated_takeovers_in_healthy_cluster_are_violation() -> None:
    h = HistoryBuilder().prepare()
    healed(h)
    h.take_over("a2")
    h.take_over("a1")
    pass_time(h, 20)
    h.take_over("a2")
    pass_time(h, 1)
    assert h.found == [], "a few takeovers after the faults are allowed"
    h.take_over("a1")
    pass_time(h, 1)
    assert h.found == ["leader_is_stable"]


def test_every_liveness_check_has_stalling_history() -> None:
    """Leadership checks are covered above, decision checks in test_decision_checks.py."""
    elsewhere = {"leader_exists", "leader_is_stable", "pending_replicas_are_tried", "pending_replicas_have_a_reason"}
    assert {check for check, _, _ in STALLS} | elsewhere == set(LIVENESS_CHECKS)


def test_longer_heartbeat_scales_bounds() -> None:
    world = World()
    world.judge = Judge(lambda: world.now_ms, Bounds(pace=2))
    h = HistoryBuilder(world).prepare()
    pending_replica_with_free_capacity(h)
    pass_time(h, 120)
    assert h.found == []
    pass_time(h, 3)
    assert h.found == ["placeable_replicas_are_bound"]


def test_progressing_work_is_no_violation() -> None:
    h = HistoryBuilder().prepare(replicas=1)
    (a,) = h.spawn(0)
    healed(h, calm=True)
    pass_time(h, 50)
    h.bind(a)
    h.move(a, "starting", "agent/n1")
    h.world.judge.on_process_started("n1", "r1", a, "uw0", 1, 1)
    h.move(a, "running", "agent/n1")
    pass_time(h, 200)
    h.world.judge.conclude()
    assert h.found == [] and h.world.judge.undecided == []


BLOCKED: dict[str, dict[str, Any]] = {
    "no capacity": {"template": {"command": ["x"], "resources": {"cpu": "5"}}},
    "no matching labels": {"placement": {"nodeSelector": {"disk": "tape"}}},
    "no quota": {"template": {"command": ["x"], "resources": {"memory": "1Mi"}}},
    "no device": {"template": {"command": ["x"], "devices": [{"kind": "gpu", "count": 1}]}},
    "no affinity peer": {"placement": {"affinity": [{"labelSelector": {"app": "friend"}, "topologyKey": "zone"}]}},
}


@pytest.mark.parametrize("why", BLOCKED)
def test_unplaceable_work_may_wait(why: str) -> None:
    h = HistoryBuilder().prepare()
    h.declare("c", **BLOCKED[why])
    (key,) = h.spawn(0, workload="c")
    healed(h)
    for _ in range(2):
        pass_time(h, 50)
        decide(h, key)
    assert h.found == []


def test_work_may_wait_while_its_roles_are_unhealthy() -> None:
    h = HistoryBuilder().prepare()
    pending_replica_with_free_capacity(h)
    healed(h, roles=frozenset())
    pass_time(h, 200)
    assert h.found == []


def test_interruption_restarts_waiting_time() -> None:
    h = HistoryBuilder().prepare()
    pending_replica_with_free_capacity(h)
    pass_time(h, 40)
    closed = {
        f"node/{n}": {**h.rows[f"node/{n}"], "spec": {**h.rows[f"node/{n}"]["spec"], "draining": True}} for n in ("n1", "n2")
    }
    opened = {key: h.rows[key] for key in closed}
    h.commit(closed, [h.entry("apply", key, "operator") for key in closed])
    pass_time(h, 2)
    h.commit(opened, [h.entry("apply", key, "operator") for key in opened])
    pass_time(h, 40)
    assert "placeable_replicas_are_bound" not in h.found


def test_unknown_replicas_may_stay_during_mass_silence() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a)
    h.mark("suspect", "n1", "n2")
    h.mark("unknown", "n1", "n2")
    h.move(a, "unknown", "node-lifecycle", before="running")
    healed(h, silent=frozenset({"n1", "n2"}))
    pass_time(h, 200)
    assert h.found == []
    h.world.judge.conclude()
    assert any("mass silence" in why for why in h.world.judge.undecided)


def test_waiting_at_end_of_run_is_undecided() -> None:
    h = HistoryBuilder().prepare()
    pending_replica_with_free_capacity(h)
    pass_time(h, 5)
    h.world.judge.conclude()
    assert h.found == [] and any("at the end of the run" in why for why in h.world.judge.undecided)


def test_end_of_run_is_checked_too() -> None:
    h = HistoryBuilder().prepare()
    pending_replica_with_free_capacity(h)
    pass_time(h, 1)
    h.world.now_ms += 61_000
    h.commit({}, [])
    h.world.judge.conclude()
    assert h.found == ["placeable_replicas_are_bound"]


def test_unceasing_writes_are_violation_at_end() -> None:
    h = HistoryBuilder().prepare()
    healed(h, calm=True)
    for _ in range(100):
        pass_time(h, 1)
        h.commit({"workload/t1/w": h.rows["workload/t1/w"]}, [h.entry("apply", "workload/t1/w", "user")])
    h.world.judge.conclude()
    assert h.found == ["writes_cease"]


@pytest.mark.parametrize(("every", "found"), [(1, ["refused_requests_back_off"]), (3, [])])
def test_refused_requests_must_back_off(every: int, found: list[str]) -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.run(a, until="ready")
    healed(h, calm=True)
    for second in range(100):
        pass_time(h, 1)
        if second % every == 0:
            h.commit({}, [h.entry("note", "e", "user", code="role")])
    h.world.judge.conclude()
    assert [check for check in h.found if check == "refused_requests_back_off"] == found


def test_writes_are_undecided_for_short_run() -> None:
    h = HistoryBuilder().prepare()
    healed(h, calm=True)
    pass_time(h, 10)
    h.world.judge.conclude()
    assert h.found == [] and any(why.startswith("writes_cease") for why in h.world.judge.undecided)


def test_call_without_timely_answer_is_violation() -> None:
    for ends in ("answered", "gave up", "never"):
        h = HistoryBuilder().prepare()
        h.commit({}, [h.entry("note", "e", "user", id="r1-i1.1.x", code="role")])
        at = h.revision
        for operation in ("r1-i1.1.x", "quick"):
            h.world.judge.on_submit("r1", operation)
        h.world.judge.on_abandoned("r1", "quick")
        pass_time(h, 41)
        if ends == "answered":
            h.world.judge.on_answer("r1", "r1-i1.1.x", "role", 0, at)
        elif ends == "gave up":
            h.world.judge.on_abandoned("r1", "r1-i1.1.x")
        else:
            h.world.judge.conclude()
        assert h.found == ["calls_are_answered"], ends
        assert [one.key for one in h.world.judge.violations] == ["r1-i1.1.x"]


def oversubscribed(h: HistoryBuilder) -> list[str]:
    """Four replicas of three cores each, where each of the two nodes has room for one."""
    h.declare("big", replicas=4, template={"command": ["x"], "resources": {"cpu": "3"}})
    keys = h.spawn(0, 1, 2, 3, workload="big")
    healed(h)
    return keys


def test_oversubscribed_work_must_be_partly_bound() -> None:
    h = HistoryBuilder().prepare()
    oversubscribed(h)
    pass_time(h, 62)
    assert h.found == ["placeable_replicas_are_bound"]


def test_oversubscribed_work_bound_one_by_one_is_no_violation() -> None:
    h = HistoryBuilder().prepare()
    keys = oversubscribed(h)
    pass_time(h, 50)
    h.run(keys[3])
    pass_time(h, 50)
    h.run(keys[1], "n2")
    pass_time(h, 120)
    assert "placeable_replicas_are_bound" not in h.found
