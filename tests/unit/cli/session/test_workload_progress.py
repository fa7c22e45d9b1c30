"""Is it counted right how far a workload has come, and is one reason named for what limits it?"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.cli.session.wait_conditions import workload_goal_status
from remit.cli.session.workload_progress import format_funnel, format_stages, funnel, summarize_progress
from remit.law.workload_rules import PendingReason, pending_reasons
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


def decision(revision: int, reason: str, replicas: dict[str, str], **more: Any) -> Decision:
    spec = DecisionSpec(replicas=replicas, verdict="waiting", reason=reason, **more)
    return Decision(metadata=RecordMetadata(name=f"d{revision}", tenant="risk", revision=revision), spec=spec)


ROLLED = Condition(type="Progressing", status="True", reason="RolledOut", observed_generation=2)


def test_a_service_that_is_there_is_limited_by_nothing() -> None:
    found = summarize_progress(workload(replicas=2), replicas(P.SERVING, P.SERVING))
    assert (found.arrived, found.wanted, found.limit, format_stages(found)) == (2, 2, "", "serving 2")


def test_what_waits_has_the_reason_of_the_latest_decision() -> None:
    reasons = pending_reasons(
        [
            decision(7, "over_quota", {"risk/web-1": ""}, detail="cpu is used up"),
            decision(5, "no_room", {"risk/web-1": "", "risk/web-2": ""}, detail="one node is full"),
            decision(9, "", {"risk/web-2": "n1"}),
        ]
    )
    assert reasons["risk", "web-1"] == PendingReason("over_quota", "cpu is used up", False, 7)
    assert reasons["risk", "web-2"].reason == "no_room"
    found = summarize_progress(workload(replicas=2), replicas(P.SERVING, P.PENDING), reasons)
    assert (found.limit, found.detail) == ("over_quota", "cpu is used up")
    assert format_stages(found) == "serving 1, queued 1"


def test_a_decision_about_an_earlier_one_of_its_name_says_nothing_of_this() -> None:
    reasons = pending_reasons([decision(7, "no_room", {"risk/web-0": ""})])
    later = [replace(one, metadata=replace(one.metadata, revision=8)) for one in replicas(P.PENDING)]
    assert summarize_progress(workload(replicas=1), later, reasons).limit == "queued"
    assert summarize_progress(workload(replicas=1), replicas(P.PENDING), reasons).limit == "no_room"


def test_what_was_not_tried_yet_is_queued() -> None:
    assert summarize_progress(workload(replicas=1), replicas(P.PENDING)).limit == "queued"


def test_a_reason_that_never_ends_is_told_so() -> None:
    reasons = pending_reasons([decision(1, "no_such_place", {"risk/web-0": ""}, never=True)])
    assert summarize_progress(workload(replicas=1), replicas(P.PENDING), reasons).never


@pytest.mark.parametrize(
    ("phases", "limit"),
    [((P.SERVING,), "missing"), ((P.SERVING, P.STARTING), "starting"), ((P.SERVING, P.FAILED), "failed"), ((), "missing")],
)
def test_what_is_under_way_is_named(phases: tuple[Phase, ...], limit: str) -> None:
    assert summarize_progress(workload(replicas=2), replicas(*phases)).limit == limit


def test_a_rollout_that_is_held_up_says_by_what() -> None:
    rolls = Condition(
        type="Progressing", status="True", reason="RollingOut", message="web-1: not started", observed_generation=2
    )
    found = summarize_progress(workload("service", rolls, replicas=1), replicas(P.SERVING, P.RELEASED))
    assert (found.limit, found.detail) == ("rollout", "web-1: not started")
    made = workload("service", rolls, replicas=1)
    assert looked(made, P.RELEASED) == (False, True), "it had a place, and died there"
    before = replace(rolls, observed_generation=1)
    assert summarize_progress(workload("service", before, replicas=1), replicas(P.SERVING)).limit == "", (
        "that was of another generation"
    )


def test_what_is_not_admitted_says_why() -> None:
    said = Condition(type="Admitted", status="False", reason="NoSchedules", message="nobody keeps them", observed_generation=2)
    found = summarize_progress(workload("job", said, replicas=1), [])
    assert (found.limit, found.detail) == ("NoSchedules", "nobody keeps them")


def test_released_copies_count_for_nothing() -> None:
    found = summarize_progress(workload(replicas=1), replicas(P.SERVING, P.RELEASED))
    assert (found.arrived, found.stages, found.limit) == (1, {"serving": 1}, "")


def test_a_job_counts_what_is_done() -> None:
    made = workload("job", replicas=2, completions=4)
    found = summarize_progress(made, [*replicas(P.RELEASED, P.RELEASED, P.FINISHED, result="ok"), *replicas(P.RUNNING)])
    assert (found.arrived, found.wanted, found.stages) == (3, 4, {"running": 1, "done": 3})
    assert found.limit == ""
    all_done = summarize_progress(made, replicas(*[P.RELEASED] * 4, result="ok"))
    assert (all_done.arrived, all_done.limit) == (4, "")


def test_pieces_that_have_ended_take_nobodys_place__although_nobody_has_settled_them() -> None:
    """As while no controllers run: the rest is missing, and that is said."""
    found = summarize_progress(workload("job", replicas=2, completions=5), replicas(P.FINISHED, P.FINISHED, result="ok"))
    assert (found.arrived, found.limit) == (2, "missing")


def test_a_job_that_failed_says_so() -> None:
    failed = Condition(type="Failed", status="True", reason="RetriesExhausted", observed_generation=2)
    found = summarize_progress(workload("job", failed, replicas=1), [])
    assert (found.limit, found.never) == ("RetriesExhausted", True)
    stands = workload_goal_status(workload("job", failed, replicas=1), [], found)
    assert "RetriesExhausted" in stands.failed


def test_stages_count_those_who_are_further_too() -> None:
    stages = funnel(replicas(P.PENDING, P.BOUND, P.STARTING, P.READY, P.SERVING), 6, "service")
    assert stages == [
        ("admitted", 6), ("queued", 5), ("scheduled", 4), ("bound", 4), ("starting", 3), ("ready", 2), ("serving", 1),
    ]  # fmt: skip


def looked(made: Workload, *phases: Phase, done: bool = False) -> tuple[bool, bool]:
    """Has it arrived, and has all of it a place?"""
    members = replicas(*phases)
    stands = workload_goal_status(made, members, summarize_progress(made, members), done=done)
    return stands.reached, stands.placed


def test_a_service_has_arrived_once_its_generation_is_out() -> None:
    assert looked(workload("service", ROLLED, replicas=1), P.SERVING) == (True, True)
    assert looked(workload("service", replicas=1), P.SERVING) == (False, True)
    assert looked(workload("service", ROLLED, replicas=1), P.PENDING) == (False, False)
    assert looked(workload("service", replicas=1), P.STARTING) == (False, True)
    assert looked(workload("service", replicas=1)) == (False, False)


def test_a_service_that_is_being_deleted_does_not_arrive_any_more() -> None:
    """Nothing is wanted of it, so all that is wanted stands."""
    made = workload("service", ROLLED, deleting=True, replicas=1)
    stands = workload_goal_status(made, [], summarize_progress(made, []))
    assert not stands.reached and "deleted" in stands.failed


def test_what_holds_one_that_is_ready_but_not_said_to_be_out_are_the_controllers() -> None:
    members = replicas(P.SERVING)
    made = workload("service", replicas=1)
    assert "controllers" in workload_goal_status(made, members, summarize_progress(made, members)).limit
    task = workload("job", replicas=1)
    assert workload_goal_status(task, replicas(P.RUNNING), summarize_progress(task, replicas(P.RUNNING)), done=True).limit == ""


def test_a_job_has_arrived_when_it_runs__or_if_asked_when_it_is_done() -> None:
    assert looked(workload("job", replicas=2), P.RUNNING, P.RUNNING) == (True, True)
    assert looked(workload("job", replicas=2), P.RUNNING, P.STARTING) == (False, True)
    assert looked(workload("job", replicas=1), P.RUNNING, done=True) == (False, True)


def test_a_workload_that_is_being_deleted_wants_nothing() -> None:
    found = summarize_progress(workload(replicas=3, deleting=True), replicas(P.STOPPING))
    assert (found.wanted, found.limit) == (0, "deleting")


def test_stages_that_equally_many_have_reached_are_told_once() -> None:
    assert (
        format_funnel(funnel(replicas(P.PENDING, P.BOUND, P.SERVING), 4, "service"))
        == "admitted 4 > queued 3 > bound 2 > serving 1"
    )
    assert format_funnel(funnel(replicas(P.SERVING, P.SERVING), 2, "service")) == "serving 2"
    assert format_funnel(funnel(replicas(P.RUNNING), 1, "job")) == "running 1 > done 0"
