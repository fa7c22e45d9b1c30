"""Initial replicas of a new workload equal those its controller would spawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.commitment.dry_run import dry_run
from remit.commitment.rulings import workloads
from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.law.workload_rules import initial_replicas
from remit.model.claims import Accepted, Apply, Code, Delete, Forget, Spawn
from remit.model.kinds import Policy, PolicyMatch, PolicyRule, PolicySpec, Workload
from remit.model.metadata import Metadata
from tests.properties.authority_world import OPERATOR, USER, Scope, scope_test, tenant, workload
from tests.unit.commitment.authority_fixture import commit_transitions
from tests.unit.correction.controller_fixture import ControllerBench, work


def replicas_of(scope: Scope, name: str) -> list[dict[str, Any]]:
    """The replicas of one workload in order, without their random uids."""
    rows = [row for key, (_, row) in sorted(scope.checker.rows.items()) if key.startswith(f"replica/t1/{name}-")]
    return [{**row, "metadata": {**row["metadata"], "uid": ""}} for row in rows]


async def filled_like_spawned(scope: Scope, count: int, **shape: Any) -> list[dict[str, Any]]:
    """Check that initial replicas equal spawned ones, and return them."""
    await scope.must(USER, Apply(workload("w", **shape), fill=True))
    filled = replicas_of(scope, "w")
    await scope.must(USER, Apply(workload("v", **shape)))
    assert replicas_of(scope, "v") == []
    await scope.must(scope.actors["workloads"], Spawn("t1", "v", 1, 0, count))
    for one in (spawn_replicas := replicas_of(scope, "v")):
        one["metadata"]["name"] = one["metadata"]["name"].replace("v-", "w-")
        one["spec"]["workload"] = "w"
    assert filled == spawn_replicas
    return filled


@scope_test
async def test_new_workload_and_replicas_share_one_commit(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=3), fill=True))
    keys = [f"replica/t1/w-{index}" for index in range(3)]
    assert {scope.at(key) for key in keys} == {scope.at("workload/t1/w")}
    assert [scope.phase(key) for key in keys] == ["pending"] * 3
    uids = {scope.row(key)["metadata"]["uid"] for key in (*keys, "workload/t1/w")}
    assert len(uids) == 4
    await commit_transitions(scope, keys[0], "cancel")
    await scope.must(scope.actors["workloads"], Forget(keys[0], scope.at(keys[0])), Spawn("t1", "w", 1, 0))


@scope_test
async def test_initial_replicas_equal_spawned_ones(scope: Scope) -> None:
    assert len(await filled_like_spawned(scope, 2, replicas=2)) == 2


@scope_test
async def test_initial_replicas_have_priority_of_class(scope: Scope) -> None:
    assert [one["spec"]["priority"] for one in await filled_like_spawned(scope, 1, replicas=1, priority="high")] == [100]


@scope_test
async def test_initial_replicas_respect_policy_priority_maximum(scope: Scope) -> None:
    """S29."""
    given_class = PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_class="top")
    most = PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=70)
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(given_class, most)))))
    assert [one["spec"]["priority"] for one in await filled_like_spawned(scope, 1, replicas=1)] == [70]


@scope_test
async def test_job_gets_no_more_replicas_than_parallelism_or_completions(scope: Scope) -> None:
    assert len(await filled_like_spawned(scope, 2, replicas=2, type_="job", completions=5)) == 2
    await scope.must(USER, Apply(workload("few", replicas=5, type_="job", completions=2), fill=True))
    assert len(replicas_of(scope, "few")) == 2


@scope_test
async def test_apply_without_fill_creates_no_replicas(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=3)))
    assert replicas_of(scope, "w") == []


@scope_test
async def test_daemon_scheduled_job_and_zero_replicas_start_empty(scope: Scope) -> None:
    shapes: list[dict[str, Any]] = [
        {"type_": "daemon", "replicas": 1},
        {"type_": "job", "replicas": 1, "schedule": "0 3 * * *"},
        {"replicas": 0},
    ]
    for number, shape in enumerate(shapes):
        await scope.must(USER, Apply(workload(f"w{number}", **shape), fill=True))
        assert replicas_of(scope, f"w{number}") == [], shape


@scope_test
async def test_workload_over_initial_limit_is_left_to_controller(scope: Scope) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "INITIAL_REPLICAS_MAX", 3)
        await scope.must(USER, Apply(workload("w", replicas=4), fill=True), Apply(workload("v", replicas=3), fill=True))
    assert (replicas_of(scope, "w"), len(replicas_of(scope, "v"))) == ([], 3)


@scope_test
async def test_only_new_workload_is_filled(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=2)))
    await scope.must(USER, Apply(workload("w", replicas=2), fill=True), Apply(workload("w", replicas=4), fill=True))
    assert replicas_of(scope, "w") == []
    await scope.must(USER, Apply(workload("v", replicas=1), fill=True), Apply(workload("v", replicas=4), fill=True))
    assert len(replicas_of(scope, "v")) == 1, "also within one batch"
    await scope.must(OPERATOR, Apply(tenant("t3"), fill=True))


@scope_test
async def test_deleting_workload_is_not_filled_but_its_successor_is(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=1), fill=True))
    assert await scope.must(USER, Delete("Workload", "w", "t1")) == [0], "a replica is left"
    assert await scope.refused(USER, Apply(workload("w", replicas=2), fill=True)) is Code.DELETING
    key = "replica/t1/w-0"
    before = scope.row(key)["metadata"]["uid"]
    await commit_transitions(scope, key, "cancel")
    workloads = scope.actors["workloads"]
    await scope.must(workloads, Forget(key, scope.at(key)))
    assert await scope.must(workloads, Delete("Workload", "w", "t1")) == [1]
    await scope.must(USER, Apply(workload("w", replicas=2), fill=True))
    assert len(replicas_of(scope, "w")) == 2 and scope.row(key)["metadata"]["uid"] != before


@scope_test
async def test_repeated_operation_creates_no_more_replicas(scope: Scope) -> None:
    """F01."""
    operation = await scope.operation(USER, Apply(workload("w", replicas=2), fill=True))
    first = await scope.send([operation])
    before = await scope.dump()
    assert await scope.send([operation]) == first and isinstance(first, list) and isinstance(first[0], Accepted)
    assert await scope.dump() == before


@scope_test
async def test_refused_workload_creates_no_replicas(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=2)))
    for claim, code in (
        (Apply(workload("v", owner="nobody"), fill=True), Code.NOT_FOUND),
        (Apply(workload("v", priority="nothing"), fill=True), Code.NOT_FOUND),
        (Apply(workload("v", replicas=-1), fill=True), Code.INVALID),
        (Apply(workload("w"), expect=0, fill=True), Code.EXISTS),
    ):
        assert await scope.refused(USER, claim) is code


@scope_test
async def test_dry_run_shows_workload_and_creates_no_replicas(scope: Scope) -> None:
    before = await scope.dump()
    for fill in (True, False):
        (one,) = dry_run(scope.lead.authority, USER, [Apply(workload("w", replicas=2), fill=fill)])
        assert one.result == 1 and isinstance(one.obj, Workload) and one.obj.metadata.generation == 1
    assert await scope.dump() == before


SPECS = st.fixed_dictionaries(
    {"replicas": st.integers(0, 6)},
    optional={"completions": st.integers(0, 6), "schedule": st.just("0 3 * * *")},
)


@given(st.sampled_from(["job", "service"]), SPECS)
def test_initial_count_equals_controller_diff(type_: Any, drawn: dict[str, Any]) -> None:
    """The controller finds nothing missing and nothing surplus."""
    shape = drawn if type_ == "job" else {"replicas": drawn["replicas"]}
    declared, first = work("w", type_=type_, **shape)
    census = DesiredReplicas(ControllerBench(declared, first).board)
    count = initial_replicas(declared.spec)
    assert census.diff(declared).spawn == (((0, count),) if count else ())
