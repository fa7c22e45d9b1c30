"""Property: a bind on the fast path equals the bind by all rules.

In one of two scopes the fast path is disabled. Heads contain a digest of all rows since the beginning: equal heads mean
equal rows.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from remit.commitment.rulings import placement
from remit.model.claims import Apply, Bind, Code, Delete, Evidence, Mark, Refused
from remit.model.kinds import NodeHealth, Policy, PolicyAllow, PolicyRule, PolicySpec
from remit.model.metadata import Metadata
from tests.properties.authority_world import OPERATOR, Scope, node, scope_test
from tests.properties.commitment.authority_machine import APART, STEPS
from tests.properties.commitment.books_check import stale
from tests.properties.commitment.faulty_scope_machine import books, summed
from tests.properties.commitment.twin_scopes import SORTS, TwinScopes, one_by_one, plain
from tests.unit.commitment.authority_fixture import T1, acquire_leases, bind, mark_node, restore_backup, spawn_replicas

FITS_PLAINLY = placement.fits_plainly


@settings(max_examples=settings().max_examples // 2 or 1)
@given(sorts=SORTS, rounds=st.lists(STEPS, min_size=1, max_size=3))
def test_fast_bind_equals_bind_by_rules(sorts: set[int], rounds: list[list[tuple[int, int, int]]]) -> None:
    twins = TwinScopes()
    twins.do(twins.set_up_both(sorts | {0, 11}))
    try:
        for steps in rounds:
            asks = twins.collected(steps)
            found = twins.do(one_by_one(twins.r, asks))
            with mock.patch.object(placement, "fits_plainly", lambda *_: False):
                expected = twins.do(one_by_one(twins.other, asks))
            assert plain(found) == plain(expected)
            assert twins.r.row("head") == twins.other.row("head")
            assert books(twins.r.books) == books(twins.other.books) == summed(twins.r)
            assert [*stale(twins.r.books), *stale(twins.other.books)] == []
    finally:
        twins.teardown()


def recording_fast_binds() -> tuple[list[bool], Any]:
    taken: list[bool] = []

    def record(*arguments: Any) -> bool:
        taken.append(FITS_PLAINLY(*arguments))
        return taken[-1]

    return taken, mock.patch.object(placement, "fits_plainly", record)


@scope_test
async def test_plain_bind_takes_fast_path_from_first_one(scope: Scope) -> None:
    """Fenced jobs too, since no node is awaited."""
    taken, recording = recording_fast_binds()
    with recording:
        for key in [*await spawn_replicas(scope, "w", 2), *await spawn_replicas(scope, "job", 2, type_="job")]:
            await bind(scope, key)
            assert scope.row(key)["status"]["grants"] == [T1]
    assert taken == [True] * 4


@scope_test
async def test_fenced_replica_is_not_bound_while_node_is_awaited(scope: Scope) -> None:
    """It may run there. Replicas that may run twice are bound meanwhile."""
    keys = [*await spawn_replicas(scope, "w", 2), *await spawn_replicas(scope, "job", 2, type_="job")]
    await restore_backup(scope)
    await acquire_leases(scope, "node-lifecycle", "scheduler")
    await mark_node(scope, "n1", NodeHealth.JOINING, NodeHealth.READY)
    taken, recording = recording_fast_binds()
    with recording:
        await bind(scope, keys[0])
        assert (
            await scope.refused(scope.actors["scheduler"], Bind(keys[2], scope.at(keys[2]), "n1", T1)) is Code.AWAITING_REPORTS
        )
        await mark_node(scope, "n2", NodeHealth.JOINING, NodeHealth.READY)
        await bind(scope, keys[2])
    assert taken == [True, False, True]


@scope_test
async def test_replica_of_deleted_workload_is_not_bound(scope: Scope) -> None:
    keys = await spawn_replicas(scope, "w", 2)
    await bind(scope, keys[0])
    await scope.must(OPERATOR, Delete("Workload", "w", "t1"))
    taken, recording = recording_fast_binds()
    with recording:
        assert await scope.refused(scope.actors["scheduler"], Bind(keys[1], scope.at(keys[1]), "n1", T1)) is Code.DELETING
    assert taken == [False]


@scope_test
async def test_invalid_bind_is_refused_by_rules(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n3", "1")))
    await scope.must(scope.actors["node-lifecycle"], Mark("n3", scope.at("node/n3"), NodeHealth.READY))
    keys = [*await spawn_replicas(scope, "w", 8), *await spawn_replicas(scope, "job", 2, type_="job")]
    keys += await spawn_replicas(scope, "apart", 2, labels={"app": "apart"}, placement=APART)
    for key in ("replica/t1/w-0", "replica/t1/job-0"):
        await bind(scope, key)
    await bind(scope, "replica/t1/w-1", "n3")
    await bind(scope, "replica/t1/apart-0")
    w, scheduler = "replica/t1/w-2", scope.actors["scheduler"]
    wrong = [
        (Bind(w, scope.at(w) - 1, "n1", T1), Code.REVISION),
        (Bind(w, scope.at(w), "none", T1), Code.NOT_FOUND),
        (Bind(w, scope.at(w), "n3", T1), Code.NO_ROOM),
        (Bind(w, scope.at(w), "n1", "none"), Code.NOT_FOUND),
        (Bind(w, scope.at(w), "n1", "tenant/t2"), Code.NOT_OWNER),
        (Bind(w, scope.at(w), "n1", T1, {"gpu-0": 1}), Code.DEVICE_MISMATCH),
        (Bind("replica/t1/w-0", scope.at("replica/t1/w-0"), "n1", T1), Code.PHASE),
        (Bind("replica/t1/apart-1", scope.at("replica/t1/apart-1"), "n1", T1), Code.ANTI_AFFINITY),
    ]
    for claim, code in wrong:
        assert await scope.refused(scheduler, claim) is code, claim
    assert await scope.refused(scheduler, Bind(w, scope.at(w), "n1", T1), Evidence(1, 60_001)) is Code.STALE_EVIDENCE
    await scope.must(OPERATOR, Apply(node("n1", "8", unschedulable=True)))
    assert await scope.refused(scheduler, Bind(w, scope.at(w), "n1", T1)) is Code.DRAINING
    await scope.must(scope.actors["node-lifecycle"], Mark("n2", scope.at("node/n2"), NodeHealth.SUSPECT))
    assert await scope.refused(scheduler, Bind(w, scope.at(w), "n2", T1)) is Code.NODE_UNREADY


async def more_nodes(scope: Scope, *names: str) -> None:
    """Equal to n1 in all attributes, so that its cached results apply to them."""
    for name in names:
        await scope.must(OPERATOR, Apply(node(name)))
        await scope.must(scope.actors["node-lifecycle"], Mark(name, scope.at(f"node/{name}"), NodeHealth.READY))


@scope_test
async def test_replica_is_not_bound_twice_in_one_batch(scope: Scope) -> None:
    """F02"""
    await more_nodes(scope, "n3")
    first, second = await spawn_replicas(scope, "w", 2)
    await bind(scope, first)
    claims = [Bind(second, scope.at(second), name, T1) for name in ("n1", "n3")]
    verdicts = await scope.ask(scope.actors["scheduler"], *claims)
    assert [v.code if isinstance(v, Refused) else None for v in verdicts] == [None, Code.REVISION]


@scope_test
async def test_suspect_node_refuses_bind_despite_equal_ready_node(scope: Scope) -> None:
    await more_nodes(scope, "n3")
    first, second = await spawn_replicas(scope, "w", 2)
    await bind(scope, first)
    await scope.must(scope.actors["node-lifecycle"], Mark("n3", scope.at("node/n3"), NodeHealth.SUSPECT))
    assert await scope.refused(scope.actors["scheduler"], Bind(second, scope.at(second), "n3", T1)) is Code.NODE_UNREADY


@scope_test
async def test_anti_affinity_of_bound_replica_excludes_others(scope: Scope) -> None:
    await more_nodes(scope, "n3")
    shy = await spawn_replicas(scope, "shy", 3, labels={"app": "apart"})
    (apart,) = await spawn_replicas(scope, "apart", labels={"app": "apart"}, placement=APART)
    await bind(scope, shy[0], "n3")
    await bind(scope, apart)
    assert await scope.refused(scope.actors["scheduler"], Bind(shy[1], scope.at(shy[1]), "n1", T1)) is Code.ANTI_AFFINITY
    await bind(scope, shy[1], "n3")


@scope_test
async def test_bind_records_policy_revision(scope: Scope) -> None:
    rule = PolicyRule(allow=PolicyAllow(zones=("a",)))
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,)))))
    taken, recording = recording_fast_binds()
    with recording:
        for key in await spawn_replicas(scope, "w", 2):
            await bind(scope, key)
            assert scope.row(key)["status"]["policy"] == 1
    assert taken == [True, True]
