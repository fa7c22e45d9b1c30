"""Progress of a workload: replicas by stage, what limits it, and the reason words of its conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.law.workload_rules import (
    STAGE_REASONS,
    PendingReason,
    PendingReasons,
    ReplicaCounts,
    WorkloadProgress,
    count_replicas,
    pending_limit,
    pending_reason,
    pending_reasons,
    stage_reason,
    workload_progress,
)
from remit.model.kinds import Template, Workload, WorkloadSpec, WorkloadStatus
from remit.model.metadata import Condition, Metadata, RecordMetadata
from remit.model.records import DecisionSpec, Phase, Replica, ReplicaSpec, ReplicaStatus

P = Phase
NO_REASONS: PendingReasons = {}
PHASES = st.lists(st.sampled_from(list(Phase)), max_size=12)


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


def decision(revision: int, reason: str, replicas: dict[str, str], **fields: Any) -> tuple[int, DecisionSpec]:
    return revision, DecisionSpec(replicas=replicas, verdict="waiting", reason=reason, **fields)


def summarize(declared: Workload, members: Sequence[Replica], reasons: PendingReasons = NO_REASONS) -> WorkloadProgress:
    """The progress as the server computes it from rows."""
    counts = count_replicas((one.status.phase, one.status.result) for one in members)
    pending = [one.metadata for one in members if one.status.phase is P.PENDING]
    known = [pending_reason(meta.tenant, meta.name, meta.revision, reasons) for meta in pending]
    limit = pending_limit([reason for reason in known if reason is not None]) if pending else None
    return workload_progress(declared, counts, limit)


@given(PHASES)
def test_every_replica_counts_at_exactly_one_stage(phases: list[Phase]) -> None:
    found = summarize(workload(replicas=1), replicas(*phases))
    assert sum(found.stages.values()) + phases.count(P.RELEASED) == len(phases)


@given(PHASES, st.integers(0, 12))
def test_missing_replicas_are_the_earliest_stage(phases: list[Phase], desired: int) -> None:
    is_missing = desired > sum(phase is not Phase.RELEASED for phase in phases)
    assert (stage_reason("service", desired, phases) == STAGE_REASONS["admitted"]) is is_missing


def test_limit_is_earliest_stage_with_replicas() -> None:
    steps = [
        ([], "Creating"),
        (["pending", "serving"], "Queued"),
        (["reserved", "serving"], "WaitingForPreemption"),
        (["bound", "serving"], "NotStarted"),
        (["starting", "bound"], "NotStarted"),
        (["running", "unknown"], "NodeUnreachable"),
        (["running", "serving"], "NotReady"),
        (["ready", "serving"], "NotInEndpoints"),
        (["serving", "serving"], ""),
    ]
    for phases, limit in steps:
        assert stage_reason("service", 2, [Phase(phase) for phase in phases]) == limit, phases


def test_released_replicas_that_will_be_retried_are_not_missing() -> None:
    assert stage_reason("service", 2, [Phase.SERVING], retriable=1) == "AwaitingRetry"
    assert stage_reason("service", 3, [Phase.SERVING], retriable=1) == "Creating"
    assert stage_reason("service", 1, [Phase.SERVING], retriable=1) == ""


def test_running_job_has_no_limit_and_finished_replicas_count() -> None:
    assert stage_reason("job", 3, [Phase.RUNNING, Phase.RELEASED, Phase.FINISHED]) == ""
    assert stage_reason("job", 4, [Phase.RUNNING, Phase.RELEASED, Phase.FINISHED]) == STAGE_REASONS["admitted"]


def test_stage_reasons_are_unique_camel_case_words() -> None:
    assert all(word.isalnum() and word[0].isupper() for word in STAGE_REASONS.values())
    assert len(set(STAGE_REASONS.values())) == len(STAGE_REASONS)


def test_replicas_are_held_up_in_several_stages__the_earliest_limits_readers_and_conditions_alike() -> None:
    phases = [Phase.STARTING, Phase.STARTING, Phase.BOUND, Phase.SERVING]
    assert summarize(workload(replicas=4), replicas(*phases)).limit.code == "bound"
    assert stage_reason("service", 4, phases) == STAGE_REASONS["bound"]


def test_ready_service_has_no_limit() -> None:
    progress = summarize(workload(replicas=2), replicas(P.SERVING, P.SERVING))
    assert (progress.ready, progress.desired, progress.limit.code, progress.stages) == (2, 2, "", {"serving": 2})


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
    progress = summarize(workload(replicas=2), replicas(P.SERVING, P.PENDING), reasons)
    assert (progress.limit.code, progress.limit.detail) == ("over_quota", "cpu is used up")
    assert progress.stages == {"queued": 1, "serving": 1}


def test_decision_older_than_the_replica_is_ignored() -> None:
    reasons = pending_reasons([decision(7, "no_room", {"risk/web-0": ""})])
    recreated = [replace(replica, metadata=replace(replica.metadata, revision=8)) for replica in replicas(P.PENDING)]
    assert summarize(workload(replicas=1), recreated, reasons).limit.code == "queued"
    assert summarize(workload(replicas=1), replicas(P.PENDING), reasons).limit.code == "no_room"


def test_pending_replica_without_decision_is_queued() -> None:
    assert summarize(workload(replicas=1), replicas(P.PENDING)).limit.code == "queued"


def test_permanent_reason_is_marked_never() -> None:
    reasons = pending_reasons([decision(1, "no_such_place", {"risk/web-0": ""}, never=True)])
    assert summarize(workload(replicas=1), replicas(P.PENDING), reasons).limit.never


@pytest.mark.parametrize(
    ("phases", "limit"),
    [((P.SERVING,), "missing"), ((P.SERVING, P.STARTING), "starting"), ((P.SERVING, P.FAILED), "failed"), ((), "missing")],
)
def test_limit_is_the_phase_of_the_unready_replicas_or_missing(phases: tuple[Phase, ...], limit: str) -> None:
    assert summarize(workload(replicas=2), replicas(*phases)).limit.code == limit


def test_blocked_rollout_is_the_limit_with_its_message() -> None:
    progressing = Condition(
        type="Progressing", status="True", reason="RollingOut", message="web-1: not started", observed_generation=2
    )
    progress = summarize(workload("service", progressing, replicas=1), replicas(P.SERVING, P.RELEASED))
    assert (progress.limit.code, progress.limit.detail) == ("rollout", "web-1: not started")
    before = replace(progressing, observed_generation=1)
    assert summarize(workload("service", before, replicas=1), replicas(P.SERVING)).limit.code == "", (
        "conditions of another generation must be ignored"
    )


def test_refused_admission_is_the_limit_with_its_reason() -> None:
    condition = Condition(
        type="Admitted", status="False", reason="NoSchedules", message="schedules are not supported", observed_generation=2
    )
    progress = summarize(workload("job", condition, replicas=1), [])
    assert (progress.limit.code, progress.limit.detail) == ("NoSchedules", "schedules are not supported")


def test_released_replicas_are_not_counted() -> None:
    progress = summarize(workload(replicas=1), replicas(P.SERVING, P.RELEASED))
    assert (progress.ready, progress.stages, progress.limit.code) == (1, {"serving": 1}, "")


def test_job_progress_counts_completions() -> None:
    declared = workload("job", replicas=2, completions=4)
    progress = summarize(declared, [*replicas(P.RELEASED, P.RELEASED, P.FINISHED, result="ok"), *replicas(P.RUNNING)])
    assert (progress.ready, progress.desired, progress.stages) == (3, 4, {"running": 1, "done": 3})
    assert progress.limit.code == ""
    all_done = summarize(declared, replicas(*[P.RELEASED] * 4, result="ok"))
    assert (all_done.ready, all_done.limit.code) == (4, "")


def test_finished_job_replicas_leave_the_rest_missing() -> None:
    """As while no controllers run."""
    progress = summarize(workload("job", replicas=2, completions=5), replicas(P.FINISHED, P.FINISHED, result="ok"))
    assert (progress.ready, progress.limit.code) == (2, "missing")


def test_failed_job_has_its_reason_as_permanent_limit() -> None:
    failed = Condition(type="Failed", status="True", reason="RetriesExhausted", observed_generation=2)
    progress = summarize(workload("job", failed, replicas=1), [])
    assert (progress.limit.code, progress.limit.never) == ("RetriesExhausted", True)


def test_workload_being_deleted_desires_no_replicas() -> None:
    progress = summarize(workload(replicas=3, deleting=True), replicas(P.STOPPING))
    assert (progress.desired, progress.limit.code) == (0, "deleting")


def test_stated_reason_is_the_detail_of_the_phase_that_limits() -> None:
    counts = ReplicaCounts({P.STARTING: 1, P.SERVING: 1})
    assert workload_progress(workload(replicas=2), counts, stated="fetching 3 MiB").limit.detail == "fetching 3 MiB"
    assert workload_progress(workload(replicas=2), counts).limit.detail == "preparing the process"
    missing = workload_progress(workload(replicas=3), counts, stated="fetching 3 MiB").limit
    assert (missing.code, missing.detail) == ("missing", "replicas have not been created yet")
