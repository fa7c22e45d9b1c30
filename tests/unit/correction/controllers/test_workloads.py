"""Workload controller: replicas made and removed, jobs, daemons, deletion, conditions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.correction.controllers.workload_status import condition_debounce_ms
from remit.correction.controllers.workloads import WorkloadController
from remit.correction.framework.actions import Action
from remit.law.workload_rules import condition_of
from remit.model.claims import Accepted, Code, Refused, Spawn
from remit.model.kinds import Disruption, NodeHealth, Placement, Rollout, Workload
from remit.model.records import Phase, Replica
from remit.model.resources import Duration
from tests.unit.correction.controller_fixture import (
    TEMPO,
    ControllerBench,
    claim_words,
    condition_reasons,
    ready,
    replica,
    work,
)

KEY = "workload/t1/w"
DEBOUNCE_MS = condition_debounce_ms(TEMPO)


def controller(table: ControllerBench) -> WorkloadController:
    return WorkloadController(DesiredReplicas(table.board), table.clock)


def members(*phases: str, **status: Any) -> list[Replica]:
    return [
        replica("w", n, phase, "" if phase in ("pending", "released") else "n1", **status) for n, phase in enumerate(phases)
    ]


def message_of(workload: Workload, type_: str) -> str:
    found = condition_of(workload.status.conditions, type_)
    assert found is not None
    return found.message


def claims_on(*objects: Any) -> list[str]:
    table = ControllerBench(*objects)
    return claim_words(table.reconcile(controller(table), KEY))


# -- services ----------------------------------------------------------------------------------------------------------------


def test_missing_replicas_get_lowest_free_names() -> None:
    """F29: names are derived from the workload, so a second spawn finds the first."""
    kept = [replica("w", 1), replica("w", 3)]
    assert claims_on(*work("w", 5), *kept) == ["spawn 0+1", "spawn 2+1", "spawn 4+1"]


def test_complete_workload_needs_no_action() -> None:
    assert claims_on(*work("w", 2), *members("serving", "starting")) == []


def test_leaving_or_failed_replica_counts_until_released() -> None:
    """S13: never more live replicas than desired and surge."""
    for phase in ("draining", "stopping", "unknown", "failed"):
        assert claims_on(*work("w", 2), *members("serving", phase)) == [], phase


def test_released_replica_is_left_to_repair_or_forgotten_if_surplus() -> None:
    assert claims_on(*work("w", 2), *members("serving", "released")) == []
    assert claims_on(*work("w", 1), *members("serving", "released")) == ["forget w-1"]


def test_scale_down_removes_least_useful_replicas_first() -> None:
    phases = ("serving", "pending", "serving", "starting", "serving")
    assert claims_on(*work("w", 3), ready("n1"), *members(*phases)) == ["cancel w-1", "remove w-3"]


def test_scale_down_prefers_suspect_and_draining_nodes() -> None:
    on = [replica("w", n, "serving", f"n{n}") for n in range(4)]
    nodes = [ready("n0", NodeHealth.SUSPECT), ready("n1"), ready("n2", draining=True), ready("n3")]
    assert claims_on(*work("w", 2), *nodes, *on) == ["remove w-2", "remove w-0"]


def test_scale_down_keeps_replicas_spread() -> None:
    on = [replica("w", n, "serving", node) for n, node in enumerate(("n0", "n0", "n1", "n2"))]
    assert claims_on(*work("w", 3), ready("n0"), ready("n1"), ready("n2"), *on) == ["remove w-1"]


def test_scale_down_counts_draining_replicas_first() -> None:
    assert claims_on(*work("w", 1), *members("serving", "draining")) == []


def test_unknown_replica_is_not_preferred_to_serving_one() -> None:
    assert claims_on(*work("w", 2), *members("serving", "unknown", "serving")) == []
    assert claims_on(*work("w", 1), *members("serving", "unknown", "serving")) == ["remove w-2"]


def test_surge_exists_only_while_older_generation_has_replicas() -> None:
    rollout = Rollout(max_surge=1)
    declared, new = work("w", 2, at=2)
    spec = replace(declared.spec, rollout=rollout, template=replace(declared.spec.template, command=("new",)))
    declared, new = replace(declared, spec=spec), replace(new, spec=replace(new.spec, spec=spec))
    _, old = work("w", 2)
    assert claims_on(declared, new, old, *members("serving", "serving")) == ["spawn 2+1"]
    current = [replace(member, spec=replace(member.spec, generation=2)) for member in members("serving", "serving")]
    assert claims_on(declared, new, *current) == []


def test_generation_number_reused_after_restore_is_compared_by_spec() -> None:
    """F10: scaled, restored to a backup without that, then changed: generation 2 both times."""
    declared, new = work("w", 3, at=2)
    _, old = work("w", 2)
    table = ControllerBench(declared, new, old, *members("serving", "serving", "serving"))
    workloads = controller(table)
    assert claim_words(table.reconcile(workloads, KEY)) == []
    spec = replace(declared.spec, rollout=Rollout(max_surge=1), template=replace(declared.spec.template, command=("new",)))
    table.write(replace(declared, spec=spec), replace(new, spec=replace(new.spec, spec=spec)))
    assert claim_words(table.reconcile(workloads, KEY)) == ["spawn 3+1"]


def test_scaling_service_does_not_restart_it() -> None:
    declared, new = work("w", 3, at=2)
    _, old = work("w", 2)
    assert claims_on(declared, new, old, *members("serving", "serving")) == ["spawn 2+1"]


# -- jobs --------------------------------------------------------------------------------------------------------------------


def job(replicas: int = 2, *, done: Any = (), **more: Any) -> ControllerBench:
    return ControllerBench(*work("w", replicas, type_="job", **more), *done)


def test_job_runs_completions_in_parallel_and_keeps_finished() -> None:
    table = job(2, completions=5)
    assert claim_words(table.reconcile(controller(table), KEY)) == ["spawn 0+2"]
    table = job(2, done=members("released", "running", result="ok"), completions=5)
    assert claim_words(table.reconcile(controller(table), KEY)) == ["spawn 2+1"]


def test_finished_replica_is_settled() -> None:
    table = job(1, done=members("finished", result="ok"))
    assert claim_words(table.reconcile(controller(table), KEY)) == ["settle w-0"]


def test_complete_job_is_kept_then_deleted() -> None:
    table = job(1, done=members("released", result="ok"), keep=Duration(60_000))
    workloads = controller(table)
    claims = table.reconcile(workloads, KEY)
    assert condition_reasons(claims)["Complete"] == ("True", "Done")
    table.observe(table.board.get(KEY), claims)
    assert claim_words(table.reconcile(workloads, KEY)) == []
    assert table.requeue_ms(workloads, KEY) == 60_000
    table.clock.at_ms += 60_000
    assert claim_words(table.reconcile(workloads, KEY)) == ["delete Workload w"]


def test_scheduled_job_does_not_run_and_reports_unimplemented() -> None:
    table = job(1, schedule="0 3 * * *")
    workloads = controller(table)
    assert claim_words(table.reconcile(workloads, KEY)) == []
    table.clock.at_ms += DEBOUNCE_MS
    after = table.observe(table.board.get(KEY), table.reconcile(workloads, KEY))
    assert message_of(after, "Admitted").startswith("schedules are not implemented yet")


def test_job_fails_after_retries_and_remaining_replicas_are_removed() -> None:
    done = [replica("w", 0, "released", result="exit 1", failures=4), replica("w", 1, "running", "n1")]
    table = job(2, done=done, retries=3)
    claims = table.reconcile(controller(table), KEY)
    assert claim_words(claims) == ["remove w-1"]
    assert condition_reasons(claims)["Failed"] == ("True", "RetriesExhausted")
    assert message_of(table.observe(table.board.get(KEY), claims), "Failed") == "w-0 failed 4 times; last failure: exit 1"


def test_job_failure_reason_survives_its_replicas() -> None:
    table = job(1, done=[replica("w", 0, "released", result="exit 1", failures=1)], retries=0)
    workloads = controller(table)
    after = table.observe(table.board.get(KEY), table.reconcile(workloads, KEY))
    assert message_of(after, "Failed") == "w-0 failed once; last failure: exit 1"
    table.write(replica("w", 0, "released", failures=1))
    assert "Failed" not in condition_reasons(table.reconcile(workloads, KEY))


def test_job_fails_at_deadline() -> None:
    table = job(1, done=members("running"), deadline=Duration(30_000))
    workloads = controller(table)
    assert table.requeue_ms(workloads, KEY) is not None
    assert "Failed" not in condition_reasons(table.reconcile(workloads, KEY))
    table.clock.at_ms += 30_000
    claims = table.reconcile(workloads, KEY)
    assert condition_reasons(claims)["Failed"] == ("True", "DeadlineExceeded")
    table.observe(table.board.get(KEY), claims)
    assert claim_words(table.reconcile(workloads, KEY)) == ["remove w-0"]


def test_changed_failed_job_starts_again() -> None:
    table = job(1, done=members("released", result="exit 1", failures=4))
    workloads = controller(table)
    after = table.observe(table.board.get(KEY), table.reconcile(workloads, KEY))
    meta = replace(after.metadata, generation=2)
    table.write(replace(after, metadata=meta, spec=replace(after.spec, retries=9)))
    assert condition_reasons(table.reconcile(workloads, KEY))["Failed"] == ("False", "Changed")


# -- daemons -----------------------------------------------------------------------------------------------------------------


def test_daemon_runs_on_each_matching_node() -> None:
    placement = Placement(node_selector={"disk": "ssd"})
    nodes = [ready(f"n{n}", labels={"disk": "ssd" if n else "hdd"}) for n in range(3)]
    assert claims_on(*work("w", type_="daemon", placement=placement), *nodes) == ["spawn 0+2"]


def test_daemon_skips_suspect_node_and_leaves_unmatched_one() -> None:
    placement = Placement(node_selector={"disk": "ssd"})
    nodes = [ready("n0", NodeHealth.SUSPECT, labels={"disk": "ssd"}), ready("n1", labels={"disk": "hdd"})]
    astray = replica("w", 0, "serving", "n1")
    assert claims_on(*work("w", type_="daemon", placement=placement), *nodes, astray) == ["remove w-0"]


def test_node_change_triggers_daemons_only() -> None:
    table = ControllerBench(*work("w"), *work("d", type_="daemon"))
    workloads = controller(table)
    for key, kept in tuple(table.board.of_kind("workload/")):
        workloads.keys_for(key, None, kept.obj)
    assert list(workloads.keys_for("node/n", None, ready("n"))) == ["workload/t1/d"]
    assert list(workloads.keys_for("node/n", ready("n"), ready("n"))) == []


# -- deletion ----------------------------------------------------------------------------------------------------------------


def deleting(declared: Workload, **more: Any) -> Workload:
    return replace(declared, metadata=replace(declared.metadata, deleting=True, **more))


def test_deleted_workload_ends_replicas_before_itself() -> None:
    declared, first = work("w", 4)
    phases = ("pending", "serving", "finished", "released")
    assert claims_on(deleting(declared), first, *members(*phases)) == ["cancel w-0", "remove w-1", "settle w-2", "forget w-3"]
    assert claims_on(deleting(declared), first, *members("draining", "unknown")) == []
    assert claims_on(deleting(declared), first) == ["delete Workload w"]


def test_finalizer_keeps_workload_but_not_its_replicas() -> None:
    declared, first = work("w")
    held = deleting(declared, finalizers=("example.com/hold",))
    assert claims_on(held, first, *members("serving")) == ["remove w-0"]
    assert claims_on(held, first) == []


def test_replicas_without_workload_are_found_by_resync_and_ended() -> None:
    """F31."""
    table = ControllerBench(*members("pending", "serving", "released"))
    workloads = controller(table)
    assert list(workloads.all_keys()) == [KEY]
    assert claim_words(table.reconcile(workloads, KEY)) == ["cancel w-0", "remove w-1", "forget w-2"]


# -- conditions --------------------------------------------------------------------------------------------------------------


def test_service_conditions_progress_from_admitted_to_rolled_out() -> None:
    declared, first = work("w", 2)
    table = ControllerBench(declared, first)
    workloads = controller(table)
    claims = table.reconcile(workloads, KEY)
    assert condition_reasons(claims) == {
        "Admitted": ("True", "Accepted"), "Available": ("False", "TooFewReady"), "Progressing": ("True", "RollingOut")
    }  # fmt: skip
    declared = table.observe(declared, claims)
    for phases, then in (
        (("bound", "starting"), {"Scheduled": ("True", "AllBound")}),
        (("ready", "running"), {"Available": ("True", "EnoughReady")}),
        (("serving", "serving"), {"Ready": ("True", "AllReady"), "Progressing": ("True", "RolledOut")}),
    ):
        table.write(*members(*phases))
        claims = table.reconcile(workloads, KEY)
        assert condition_reasons(claims) == then
        declared = table.observe(declared, claims)
    assert table.reconcile(workloads, KEY) == []
    assert {condition.observed_generation for condition in declared.status.conditions} == {1}
    assert all(condition.last_transition for condition in declared.status.conditions)


@pytest.mark.parametrize(
    ("replicas", "unavailable", "available", "message"),
    [
        (2, 0, 0, "fewer than 2 of 2 desired replicas are ready; at most 0 may be unavailable (rollout.maxUnavailable)"),
        (1, 0, 0, "no replica is ready; at most 0 may be unavailable (rollout.maxUnavailable)"),
        (3, 2, 2, "fewer than 2 of 3 desired replicas are ready; at least 2 must be available (disruption.minAvailable)"),
    ],
)
def test_unavailable_service_states_the_rule_that_requires_more_ready_replicas(
    replicas: int, unavailable: int, available: int, message: str
) -> None:
    declared, first = work("w", replicas)
    rules = replace(declared.spec, rollout=Rollout(max_unavailable=unavailable), disruption=Disruption(min_available=available))
    table = ControllerBench(replace(declared, spec=rules), first)
    assert message in str(table.reconcile(controller(table), KEY))


def test_negative_condition_is_reported_after_debounce_with_reason() -> None:
    declared, first = work("w", 2)
    table = ControllerBench(declared, first, *members("serving", "serving"))
    workloads = controller(table)
    declared = table.observe(declared, table.reconcile(workloads, KEY))
    table.write(replica("w", 0, "pending"))
    assert table.requeue_ms(workloads, KEY) == DEBOUNCE_MS
    assert "Scheduled" not in condition_reasons(table.reconcile(workloads, KEY))
    table.clock.at_ms += DEBOUNCE_MS
    assert condition_reasons(table.reconcile(workloads, KEY))["Scheduled"] == ("False", "Queued")
    assert condition_reasons(table.reconcile(workloads, KEY))["Ready"] == ("False", "Queued")


def test_brief_changes_are_not_reported() -> None:
    """L10."""
    declared, first = work("w", 2)
    table = ControllerBench(declared, first, *members("serving", "serving"))
    workloads = controller(table)
    table.observe(declared, table.reconcile(workloads, KEY))
    for _ in range(4):
        for phase in ("running", "serving"):
            table.write(replica("w", 0, phase, "n1"))
            assert {"Scheduled", "Ready"}.isdisjoint(condition_reasons(table.reconcile(workloads, KEY)))
            table.clock.at_ms += DEBOUNCE_MS - 1


def test_short_job_reports_only_completion() -> None:
    table = job(1, done=members("running"))
    assert condition_reasons(table.reconcile(controller(table), KEY)) == {}


def test_waiting_job_reports_queued() -> None:
    table = job(1, done=members("pending"))
    workloads = controller(table)
    table.reconcile(workloads, KEY)
    table.clock.at_ms += DEBOUNCE_MS
    assert condition_reasons(table.reconcile(workloads, KEY)) == {
        "Admitted": ("True", "Accepted"),
        "Scheduled": ("False", "Queued"),
    }


def test_refused_spawn_is_reported_as_condition() -> None:
    declared, first = work("w", 2)
    table = ControllerBench(declared, first)
    workloads = controller(table)
    action = Action(Spawn("t1", "w", 1, 0, 2))
    workloads.on_verdict(KEY, action, Refused(Code.LIMIT, "there are too many replicas"))
    table.reconcile(workloads, KEY)
    table.clock.at_ms += DEBOUNCE_MS
    claims = table.reconcile(workloads, KEY)
    assert condition_reasons(claims)["Admitted"] == ("False", "Limit")
    table.observe(declared, claims)
    workloads.on_verdict(KEY, action, Accepted(7))
    assert condition_reasons(table.reconcile(workloads, KEY))["Admitted"] == ("True", "Accepted")


def test_refusal_condition_clears_when_nothing_is_missing() -> None:
    """Another instance of this controller may have spawned the replicas."""
    table = ControllerBench(*work("w", 2))
    workloads = controller(table)
    workloads.on_verdict(KEY, Action(Spawn("t1", "w", 1, 0, 2)), Refused(Code.STALE_EPOCH, "another acts"))
    table.write(*members("pending", "pending"))
    assert condition_reasons(table.reconcile(workloads, KEY))["Admitted"] == ("True", "Accepted")


def test_rollout_reports_last_failure_of_new_replica() -> None:
    declared, first = work("w", 1)
    table = ControllerBench(
        declared, first, replica("w", 0, "released", result="not started", reason="no such file", failures=1)
    )
    workloads = controller(table)
    declared = table.observe(declared, table.reconcile(workloads, KEY))
    assert message_of(declared, "Progressing") == "w-0: not started: no such file"
    table.write(replica("w", 0, "pending", failures=1))
    assert "Progressing" not in condition_reasons(table.reconcile(workloads, KEY))
    table.write(replica("w", 0, "released", result="exit 3", failures=2))
    assert message_of(table.observe(declared, table.reconcile(workloads, KEY)), "Progressing") == "w-0: exit 3"


def test_stalled_rollout_reports_deadline_exceeded() -> None:
    declared, first = work("w", 1)
    table = ControllerBench(declared, first, *members("starting"))
    workloads = controller(table)
    declared = table.observe(declared, table.reconcile(workloads, KEY))
    table.clock.at_ms += int(declared.spec.rollout.progress_deadline)
    assert condition_reasons(table.reconcile(workloads, KEY))["Progressing"] == ("False", "ProgressDeadlineExceeded")


# -- properties --------------------------------------------------------------------------------------------------------------

PHASES = st.sampled_from([phase.value for phase in Phase])


@given(st.lists(PHASES, max_size=8), st.integers(0, 6), st.sampled_from(["job", "service"]))
def test_live_replicas_never_exceed_desired(phases: list[str], desired: int, type_: str) -> None:
    """S13: spawned and requeued replicas fit beside the live ones."""
    declared, first = work("w", desired, type_=type_)
    table = ControllerBench(declared, first, *members(*phases))
    census = DesiredReplicas(table.board)
    found = census.diff(declared)
    live = sum(phase != "released" for phase in phases)
    coming = sum(count for _, count in found.spawn) + len(found.requeue)
    assert not coming or live + coming <= desired
    taken = {n for n, _ in enumerate(phases)}
    assert all(taken.isdisjoint(range(start, start + count)) for start, count in found.spawn)


@given(st.lists(PHASES, max_size=8), st.integers(0, 6), st.sampled_from(["job", "service"]))
def test_repeated_reconcile_makes_same_claims(phases: list[str], desired: int, type_: str) -> None:
    """F20 F21: it gets no event and keeps no state that would change the decision."""
    objects: list[Any] = [*work("w", desired, type_=type_), *members(*phases)]
    table = ControllerBench(*objects)
    once = controller(table)
    assert (
        table.reconcile(once, KEY) == table.reconcile(once, KEY) == table.reconcile(controller(ControllerBench(*objects)), KEY)
    )
