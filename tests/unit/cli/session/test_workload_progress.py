"""Tests of workload progress and its limiting factor."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.cli.session.wait_conditions import workload_goal_status
from remit.cli.session.workload_progress import (
    PendingReason,
    format_funnel,
    format_stages,
    funnel,
    pending_reasons,
    summarize_progress,
)
from remit.model.kinds import Template, Workload, WorkloadSpec, WorkloadStatus
from remit.model.metadata import Condition, Metadata, RecordMetadata
from remit.model.records import Decision, DecisionSpec, Phase, Replica, ReplicaSpec, ReplicaStatus

P = Phase


def workload(type_: Any = "service", *conditions: Condition, deleting: bool = False, **spec: Any) -> Workload:
    return Workload(
        metadata=Metadata(name="web", tenant="risk", generation=2, deleting=deleting),
        spec=WorkloadSpec(type=type_, template=Template(command=("true",)), **spec),
        status=WorkloadStatus(conditions),
    )


def replicas(*phases: Phase, result: str = "", reason: str = "") -> list[Replica]:
    return [
        Replica(
            metadata=RecordMetadata(name=f"web-{index}", tenant="risk"),
            spec=ReplicaSpec(workload="web", generation=2, index=index),
            status=ReplicaStatus(phase=phase, result=result if phase in (P.FINISHED, P.RELEASED) else "", reason=reason),
        )
        for index, phase in enumerate(phases)
    ]


def decision(revision: int, reason: str, replicas: dict[str, str], **fields: Any) -> Decision:
    spec = DecisionSpec(replicas=replicas, verdict="waiting", reason=reason, **fields)
    return Decision(metadata=RecordMetadata(name=f"d{revision}", tenant="risk", revision=revision), spec=spec)


ROLLED = Condition(type="Progressing", status="True", reason="RolledOut", observed_generation=2)


def test_ready_service_has_no_limit() -> None:
    progress = summarize_progress(workload(replicas=2), replicas(P.SERVING, P.SERVING))
    assert (progress.ready, progress.desired, progress.limit, format_stages(progress)) == (2, 2, "", "serving 2")


def test_pending_replica_has_the_reason_of_the_latest_decision() -> None:
    reasons = pending_reasons(
        [
            decision(7, "over_quota", {"risk/web-1": ""}, detail="cpu is used up"),
            decision(5, "no_room", {"risk/web-1": "", "risk/web-2": ""}, detail="one node is full"),
            decision(9, "", {"risk/web-2": "n1"}),
        ]
    )
    assert reasons["risk", "web-1"] == PendingReason("over_quota", "cpu is used up", False, 7)
    assert reasons["risk", "web-2"].reason == "no_room"
    progress = summarize_progress(workload(replicas=2), replicas(P.SERVING, P.PENDING), reasons)
    assert (progress.limit, progress.detail) == ("over_quota", "cpu is used up")
    assert format_stages(progress) == "serving 1, queued 1"


def test_decision_older_than_the_replica_is_ignored() -> None:
    reasons = pending_reasons([decision(7, "no_room", {"risk/web-0": ""})])
    recreated = [replace(replica, metadata=replace(replica.metadata, revision=8)) for replica in replicas(P.PENDING)]
    assert summarize_progress(workload(replicas=1), recreated, reasons).limit == "queued"
    assert summarize_progress(workload(replicas=1), replicas(P.PENDING), reasons).limit == "no_room"


def test_pending_replica_without_decision_is_queued() -> None:
    assert summarize_progress(workload(replicas=1), replicas(P.PENDING)).limit == "queued"


def test_permanent_reason_is_marked_never() -> None:
    reasons = pending_reasons([decision(1, "no_such_place", {"risk/web-0": ""}, never=True)])
    assert summarize_progress(workload(replicas=1), replicas(P.PENDING), reasons).never


@pytest.mark.parametrize(
    ("phases", "limit"),
    [((P.SERVING,), "missing"), ((P.SERVING, P.STARTING), "starting"), ((P.SERVING, P.FAILED), "failed"), ((), "missing")],
)
def test_limit_is_the_phase_of_the_unready_replicas_or_missing(phases: tuple[Phase, ...], limit: str) -> None:
    assert summarize_progress(workload(replicas=2), replicas(*phases)).limit == limit


def test_blocked_rollout_is_the_limit_with_its_message() -> None:
    progressing = Condition(
        type="Progressing", status="True", reason="RollingOut", message="web-1: not started", observed_generation=2
    )
    progress = summarize_progress(workload("service", progressing, replicas=1), replicas(P.SERVING, P.RELEASED))
    assert (progress.limit, progress.detail) == ("rollout", "web-1: not started")
    declared = workload("service", progressing, replicas=1)
    assert goal_status(declared, P.RELEASED) == (False, True), "the replica was placed and then failed"
    before = replace(progressing, observed_generation=1)
    assert summarize_progress(workload("service", before, replicas=1), replicas(P.SERVING)).limit == "", (
        "conditions of another generation must be ignored"
    )


def test_refused_admission_is_the_limit_with_its_reason() -> None:
    condition = Condition(
        type="Admitted", status="False", reason="NoSchedules", message="schedules are not supported", observed_generation=2
    )
    progress = summarize_progress(workload("job", condition, replicas=1), [])
    assert (progress.limit, progress.detail) == ("NoSchedules", "schedules are not supported")


def test_released_replicas_are_not_counted() -> None:
    progress = summarize_progress(workload(replicas=1), replicas(P.SERVING, P.RELEASED))
    assert (progress.ready, progress.stages, progress.limit) == (1, {"serving": 1}, "")


def test_job_progress_counts_completions() -> None:
    declared = workload("job", replicas=2, completions=4)
    progress = summarize_progress(declared, [*replicas(P.RELEASED, P.RELEASED, P.FINISHED, result="ok"), *replicas(P.RUNNING)])
    assert (progress.ready, progress.desired, progress.stages) == (3, 4, {"running": 1, "done": 3})
    assert progress.limit == ""
    all_done = summarize_progress(declared, replicas(*[P.RELEASED] * 4, result="ok"))
    assert (all_done.ready, all_done.limit) == (4, "")


def test_finished_job_replicas_leave_the_rest_missing() -> None:
    """As while no controllers run."""
    progress = summarize_progress(workload("job", replicas=2, completions=5), replicas(P.FINISHED, P.FINISHED, result="ok"))
    assert (progress.ready, progress.limit) == (2, "missing")


def test_failed_job_has_its_reason_as_permanent_limit() -> None:
    failed = Condition(type="Failed", status="True", reason="RetriesExhausted", observed_generation=2)
    progress = summarize_progress(workload("job", failed, replicas=1), [])
    assert (progress.limit, progress.never) == ("RetriesExhausted", True)
    status = workload_goal_status(workload("job", failed, replicas=1), [], progress)
    assert "RetriesExhausted" in status.failed


def test_funnel_stages_include_replicas_in_later_stages() -> None:
    stages = funnel(replicas(P.PENDING, P.BOUND, P.STARTING, P.READY, P.SERVING), 6, "service")
    assert stages == [
        ("admitted", 6), ("queued", 5), ("scheduled", 4), ("bound", 4), ("starting", 3), ("ready", 2), ("serving", 1),
    ]  # fmt: skip


def goal_status(declared: Workload, *phases: Phase, must_complete: bool = False) -> tuple[bool, bool]:
    """Return whether the goal is reached, and whether all replicas are placed."""
    members = replicas(*phases)
    status = workload_goal_status(declared, members, summarize_progress(declared, members), must_complete=must_complete)
    return status.reached, status.placed


def test_service_is_ready_when_its_generation_is_rolled_out() -> None:
    assert goal_status(workload("service", ROLLED, replicas=1), P.SERVING) == (True, True)
    assert goal_status(workload("service", replicas=1), P.SERVING) == (False, True)
    assert goal_status(workload("service", ROLLED, replicas=1), P.PENDING) == (False, False)
    assert goal_status(workload("service", replicas=1), P.STARTING) == (False, True)
    assert goal_status(workload("service", replicas=1)) == (False, False)


def test_service_being_deleted_fails_the_goal() -> None:
    """It desires 0 replicas, so the numbers alone would look like success."""
    declared = workload("service", ROLLED, deleting=True, replicas=1)
    status = workload_goal_status(declared, [], summarize_progress(declared, []))
    assert not status.reached and "deleted" in status.failed


def test_ready_service_not_reported_as_rolled_out_is_limited_by_controllers() -> None:
    members = replicas(P.SERVING)
    declared = workload("service", replicas=1)
    assert "controllers" in workload_goal_status(declared, members, summarize_progress(declared, members)).limit
    task = workload("job", replicas=1)
    assert (
        workload_goal_status(task, replicas(P.RUNNING), summarize_progress(task, replicas(P.RUNNING)), must_complete=True).limit
        == ""
    )


def test_job_is_ready_when_running_or_only_when_complete() -> None:
    assert goal_status(workload("job", replicas=2), P.RUNNING, P.RUNNING) == (True, True)
    assert goal_status(workload("job", replicas=2), P.RUNNING, P.STARTING) == (False, True)
    assert goal_status(workload("job", replicas=1), P.RUNNING, must_complete=True) == (False, True)


def test_workload_being_deleted_desires_no_replicas() -> None:
    progress = summarize_progress(workload(replicas=3, deleting=True), replicas(P.STOPPING))
    assert (progress.desired, progress.limit) == (0, "deleting")


def test_funnel_shows_only_the_furthest_of_equal_stages() -> None:
    assert (
        format_funnel(funnel(replicas(P.PENDING, P.BOUND, P.SERVING), 4, "service"))
        == "admitted 4 > queued 3 > bound 2 > serving 1"
    )
    assert format_funnel(funnel(replicas(P.SERVING, P.SERVING), 2, "service")) == "serving 2"
    assert format_funnel(funnel(replicas(P.RUNNING), 1, "job")) == "running 1 > done 0"
