"""Is a new workload made together with the replicas that a controller would ask for, and with nothing else ever?"""

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
from tests.properties.authority_world import OPERATOR, USER, Scope, story, tenant, workload
from tests.unit.commitment.authority_fixture import move
from tests.unit.correction.controller_fixture import Table, work


def made(scope: Scope, name: str) -> list[dict[str, Any]]:
    """The replicas of one workload in their order, without their uids, which are nobody's choice."""
    rows = [row for key, (_, row) in sorted(scope.checker.rows.items()) if key.startswith(f"replica/t1/{name}-")]
    return [{**row, "metadata": {**row["metadata"], "uid": ""}} for row in rows]


async def alike(scope: Scope, count: int, **shape: Any) -> list[dict[str, Any]]:
    """One that was filled has what one has whose replicas were asked for: answers that."""
    await scope.must(USER, Apply(workload("w", **shape), fill=True))
    filled = made(scope, "w")
    await scope.must(USER, Apply(workload("v", **shape)))
    assert made(scope, "v") == []
    await scope.must(scope.actors["workloads"], Spawn("t1", "v", 1, 0, count))
    for one in (spawned := made(scope, "v")):
        one["metadata"]["name"] = one["metadata"]["name"].replace("v-", "w-")
        one["spec"]["workload"] = "w"
    assert filled == spawned
    return filled


@story
async def test_a_new_workload_comes_with_its_replicas_in_one_commit(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=3), fill=True))
    keys = [f"replica/t1/w-{index}" for index in range(3)]
    assert {scope.at(key) for key in keys} == {scope.at("workload/t1/w")}
    assert [scope.phase(key) for key in keys] == ["pending"] * 3
    uids = {scope.row(key)["metadata"]["uid"] for key in (*keys, "workload/t1/w")}
    assert len(uids) == 4
    await move(scope, keys[0], "cancel")
    await scope.must(scope.actors["workloads"], Forget(keys[0], scope.at(keys[0])), Spawn("t1", "w", 1, 0))


@story
async def test_they_are_those_that_would_have_been_asked_for(scope: Scope) -> None:
    assert len(await alike(scope, 2, replicas=2)) == 2


@story
async def test_they_rank_as_their_class_says(scope: Scope) -> None:
    assert [one["spec"]["priority"] for one in await alike(scope, 1, replicas=1, priority="high")] == [100]


@story
async def test_they_rank_no_higher_than_policy_allows__though_it_gives_them_a_higher_class_itself(scope: Scope) -> None:
    """S29."""
    given_ = PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_class="top")
    most = PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=70)
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(given_, most)))))
    assert [one["spec"]["priority"] for one in await alike(scope, 1, replicas=1)] == [70]


@story
async def test_of_a_job_no_more_come_than_run_at_once(scope: Scope) -> None:
    assert len(await alike(scope, 2, replicas=2, type_="job", completions=5)) == 2
    await scope.must(USER, Apply(workload("few", replicas=5, type_="job", completions=2), fill=True))
    assert len(made(scope, "few")) == 2


@story
async def test_without_the_word_none_come(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=3)))
    assert made(scope, "w") == []


@story
async def test_a_daemon_a_schedule_and_nothing_begin_with_none(scope: Scope) -> None:
    shapes: list[dict[str, Any]] = [
        {"type_": "daemon", "replicas": 1},
        {"type_": "job", "replicas": 1, "schedule": "0 3 * * *"},
        {"replicas": 0},
    ]
    for number, shape in enumerate(shapes):
        await scope.must(USER, Apply(workload(f"w{number}", **shape), fill=True))
        assert made(scope, f"w{number}") == [], shape


@story
async def test_too_many_are_left_to_the_controller__all_of_them(scope: Scope) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "INITIAL_REPLICAS_MAX", 3)
        await scope.must(USER, Apply(workload("w", replicas=4), fill=True), Apply(workload("v", replicas=3), fill=True))
    assert (made(scope, "w"), len(made(scope, "v"))) == ([], 3)


@story
async def test_only_a_new_one_is_filled(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=2)))
    await scope.must(USER, Apply(workload("w", replicas=2), fill=True), Apply(workload("w", replicas=4), fill=True))
    assert made(scope, "w") == []
    await scope.must(USER, Apply(workload("v", replicas=1), fill=True), Apply(workload("v", replicas=4), fill=True))
    assert len(made(scope, "v")) == 1, "also if both come in one batch"
    await scope.must(OPERATOR, Apply(tenant("t3"), fill=True))


@story
async def test_one_that_is_going_is_not_filled__its_successor_is(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=1), fill=True))
    assert await scope.must(USER, Delete("Workload", "w", "t1")) == [0], "a replica is left"
    assert await scope.refused(USER, Apply(workload("w", replicas=2), fill=True)) is Code.DELETING
    key = "replica/t1/w-0"
    before = scope.row(key)["metadata"]["uid"]
    await move(scope, key, "cancel")
    workloads = scope.actors["workloads"]
    await scope.must(workloads, Forget(key, scope.at(key)))
    assert await scope.must(workloads, Delete("Workload", "w", "t1")) == [1]
    await scope.must(USER, Apply(workload("w", replicas=2), fill=True))
    assert len(made(scope, "w")) == 2 and scope.row(key)["metadata"]["uid"] != before


@story
async def test_asked_again_under_the_same_id_it_changes_nothing(scope: Scope) -> None:
    """F01."""
    operation = await scope.operation(USER, Apply(workload("w", replicas=2), fill=True))
    first = await scope.send([operation])
    before = await scope.dump()
    assert await scope.send([operation]) == first and isinstance(first, list) and isinstance(first[0], Accepted)
    assert await scope.dump() == before


@story
async def test_what_is_refused_leaves_no_replica(scope: Scope) -> None:
    await scope.must(USER, Apply(workload("w", replicas=2)))
    for claim, code in (
        (Apply(workload("v", owner="nobody"), fill=True), Code.NOT_FOUND),
        (Apply(workload("v", priority="nothing"), fill=True), Code.NOT_FOUND),
        (Apply(workload("v", replicas=-1), fill=True), Code.INVALID),
        (Apply(workload("w"), expect=0, fill=True), Code.EXISTS),
    ):
        assert await scope.refused(USER, claim) is code


@story
async def test_what_is_only_tried_leaves_no_replica__and_is_shown_as_it_would_be(scope: Scope) -> None:
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
def test_it_begins_with_what_its_controller_would_make_where_nothing_is(type_: Any, drawn: dict[str, Any]) -> None:
    """The controller finds nothing missing, and nothing too much."""
    shape = drawn if type_ == "job" else {"replicas": drawn["replicas"]}
    declared, first = work("w", type_=type_, **shape)
    census = DesiredReplicas(Table(declared, first).board)
    count = initial_replicas(declared.spec)
    assert census.diff(declared).spawn == (((0, count),) if count else ())
