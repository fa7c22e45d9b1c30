"""Tests of the goals of a workload, and of the texts about its progress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from click import ClickException

from remit.cli.session.wait_conditions import GoalStatus, workload_goal_status
from remit.cli.session.workload_progress import format_funnel, format_limit, format_stages, funnel, list_progress, load_progress
from remit.client.api_caller import ApiError
from remit.law.workload_rules import Limit, ReplicaCounts, workload_progress
from remit.model.kinds import Template, Workload, WorkloadSpec, WorkloadStatus
from remit.model.metadata import Condition, Metadata
from remit.model.records import Phase
from remit.model.wire.api_types import WorkloadLimit, WorkloadProgressItem

P = Phase


def workload(type_: Any = "service", *conditions: Condition, deleting: bool = False, **spec: Any) -> Workload:
    return Workload(
        metadata=Metadata(name="web", tenant="risk", generation=2, deleting=deleting),
        spec=WorkloadSpec(type=type_, template=Template(command=("true",)), **spec),
        status=WorkloadStatus(conditions),
    )


def progress(declared: Workload, *phases: Phase, done: int = 0) -> WorkloadProgressItem:
    """The progress that the server returns. `done` of the released replicas have completed."""
    counts = ReplicaCounts({phase: phases.count(phase) for phase in phases}, done)
    found = workload_progress(declared, counts, Limit("queued") if P.PENDING in phases else None)
    limit = WorkloadLimit(code=found.limit.code, detail=found.limit.detail, never=found.limit.never)
    return WorkloadProgressItem(
        tenant="risk",
        name="web",
        revision=1,
        desired=found.desired,
        ready=found.ready,
        placed=found.placed,
        done=found.done,
        stages=dict(found.stages),
        limit=limit,
    )


def goal(declared: Workload, *phases: Phase, must_complete: bool = False) -> GoalStatus:
    return workload_goal_status(declared, progress(declared, *phases), must_complete=must_complete)


def goal_status(declared: Workload, *phases: Phase, must_complete: bool = False) -> tuple[bool, bool]:
    """Return whether the goal is reached, and whether all replicas are placed."""
    status = goal(declared, *phases, must_complete=must_complete)
    return status.reached, status.placed


ROLLED = Condition(type="Progressing", status="True", reason="RolledOut", observed_generation=2)


def test_stages_and_limit_are_formatted() -> None:
    found = progress(workload(replicas=3), P.SERVING, P.SERVING, P.PENDING)
    assert (format_stages(found), format_limit(found)) == ("serving 2, queued 1", "queued")
    assert format_limit(progress(workload(replicas=1), P.STARTING)) == "starting: preparing the process"
    assert format_stages(progress(workload(replicas=1))) == "none"


def test_blocked_rollout_counts_as_placed() -> None:
    """The replica was placed and then failed."""
    message = "web-1: not started"
    blocked = Condition(type="Progressing", status="True", reason="RollingOut", message=message, observed_generation=2)
    assert goal_status(workload("service", blocked, replicas=1), P.RELEASED) == (False, True)


def test_failed_job_fails_the_goal_with_its_reason() -> None:
    failed = Condition(type="Failed", status="True", reason="RetriesExhausted", observed_generation=2)
    assert "RetriesExhausted" in goal(workload("job", failed, replicas=1)).failed


def test_funnel_stages_include_replicas_in_later_stages() -> None:
    assert funnel(progress(workload(replicas=6), P.PENDING, P.BOUND, P.STARTING, P.READY, P.SERVING), "service") == [
        ("created", 5), ("placed", 4), ("bound", 4), ("started", 2), ("ready", 2), ("serving", 1),
    ]  # fmt: skip


def test_funnel_of_a_job_includes_completed_replicas() -> None:
    declared = workload("job", replicas=2, completions=5)
    found = progress(declared, P.RELEASED, P.RELEASED, P.FINISHED, P.RUNNING, P.BOUND, done=3)
    assert funnel(found, "job") == [
        ("created", 5), ("placed", 5), ("bound", 5), ("started", 4), ("done", 3),
    ]  # fmt: skip


def test_service_is_ready_when_its_generation_is_rolled_out() -> None:
    assert goal_status(workload("service", ROLLED, replicas=1), P.SERVING) == (True, True)
    assert goal_status(workload("service", replicas=1), P.SERVING) == (False, True)
    assert goal_status(workload("service", ROLLED, replicas=1), P.PENDING) == (False, False)
    assert goal_status(workload("service", replicas=1), P.STARTING) == (False, True)
    assert goal_status(workload("service", replicas=1)) == (False, False)


def test_service_being_deleted_fails_the_goal() -> None:
    """It desires 0 replicas, so the numbers alone would look like success."""
    status = goal(workload("service", ROLLED, deleting=True, replicas=1))
    assert not status.reached and "deleted" in status.failed


def test_ready_service_not_reported_as_rolled_out_is_limited_by_controllers() -> None:
    assert "controllers" in goal(workload("service", replicas=1), P.SERVING).limit
    assert goal(workload("job", replicas=1), P.RUNNING, must_complete=True).limit == ""


def test_job_is_ready_when_running_or_only_when_complete() -> None:
    assert goal_status(workload("job", replicas=2), P.RUNNING, P.RUNNING) == (True, True)
    assert goal_status(workload("job", replicas=2), P.RUNNING, P.STARTING) == (False, True)
    assert goal_status(workload("job", replicas=1), P.RUNNING, must_complete=True) == (False, True)


def test_funnel_shows_only_the_furthest_of_equal_stages() -> None:
    found = progress(workload(replicas=4), P.PENDING, P.BOUND, P.SERVING)
    assert format_funnel(funnel(found, "service")) == "created 3, bound 2, serving 1"
    assert workload_goal_status(workload(replicas=4), found).text == "created 3, bound 2, serving 1 of 4 desired"
    assert format_funnel(funnel(progress(workload(replicas=2), P.SERVING, P.SERVING), "service")) == "serving 2"
    assert format_funnel(funnel(progress(workload("job", replicas=1), P.RUNNING), "job")) == "started 1, done 0"


class FailingApi:
    """A client whose server answers every request with one code."""

    def __init__(self, code: str) -> None:
        self._code = code

    async def workload_progress(self, name: str, *, tenant: str) -> WorkloadProgressItem:
        raise ApiError(404, self._code, f"{tenant}/{name}")

    async def list_workload_progress(self, *, tenant: str) -> Any:
        raise ApiError(404, self._code, tenant)


def test_server_without_the_route_is_reported_as_too_old() -> None:
    older: Any = FailingApi("no_such_path")
    for call in (load_progress(older, "web", "risk"), list_progress(older, "risk")):
        with pytest.raises(ClickException, match="upgrade the server"):
            asyncio.run(call)


def test_deleted_workload_has_no_progress() -> None:
    api: Any = FailingApi("not_found")
    assert asyncio.run(load_progress(api, "web", "risk")) is None
