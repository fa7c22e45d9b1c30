"""Is a plain bind that is decided in one go the bind that the rules would have made? Two scopes, the same asks, every row.

In one scope no bind is taken for plain, so each goes through the rules one by one. Heads carry a digest of every row since the
beginning: if they are equal, everything is.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from remit.commitment.rulings import placement
from remit.model.claims import Apply, Bind, Code, Delete, Evidence, Mark, Refused
from remit.model.kinds import NodeHealth, Policy, PolicySpec
from remit.model.metadata import Metadata
from remit.model.policies import PolicyAllow, PolicyRule
from tests.properties.authority_world import OPERATOR, Scope, node, story
from tests.properties.books_check import stale
from tests.properties.test_authority_machine import APART, DEEDS, books, summed
from tests.properties.test_pipelined_batches import SORTS, Twins, one_by_one, plain
from tests.unit.commitment.authority_fixture import T1, bind, spawned
from tests.unit.commitment.test_recovery import led_again, marked, restored

PLAINLY = placement.fits_plainly


@settings(max_examples=settings().max_examples // 2 or 1)
@given(sorts=SORTS, rounds=st.lists(DEEDS, min_size=1, max_size=3))
def test_a_plain_bind_is_the_same_bind(sorts: set[int], rounds: list[list[tuple[int, int, int]]]) -> None:
    twins = Twins()
    twins.do(twins.furnish_both(sorts | {0, 11}))
    try:
        for deeds in rounds:
            asks = twins.collected(deeds)
            found = twins.do(one_by_one(twins.r, asks))
            with mock.patch.object(placement, "fits_plainly", lambda *_: False):
                expected = twins.do(one_by_one(twins.other, asks))
            assert plain(found) == plain(expected)
            assert twins.r.row("head") == twins.other.row("head")
            assert books(twins.r.books) == books(twins.other.books) == summed(twins.r)
            assert [*stale(twins.r.books), *stale(twins.other.books)] == []
    finally:
        twins.teardown()


def watched() -> tuple[list[bool], Any]:
    taken: list[bool] = []

    def plainly(*arguments: Any) -> bool:
        taken.append(PLAINLY(*arguments))
        return taken[-1]

    return taken, mock.patch.object(placement, "fits_plainly", plainly)


@story
async def test_what_is_plain_is_bound_in_one_go_from_the_first_on(scope: Scope) -> None:
    """Jobs too, although they must never run twice: nothing is awaited."""
    taken, watching = watched()
    with watching:
        for key in [*await spawned(scope, "w", 2), *await spawned(scope, "job", 2, type_="job")]:
            await bind(scope, key)
            assert scope.row(key)["status"]["grants"] == [T1]
    assert taken == [True] * 4


@story
async def test_what_must_never_run_twice_is_not_bound_while_a_node_is_awaited(scope: Scope) -> None:
    """It may be running there. Whoever may run twice is bound meanwhile."""
    keys = [*await spawned(scope, "w", 2), *await spawned(scope, "job", 2, type_="job")]
    await restored(scope)
    await led_again(scope, "node-lifecycle", "scheduler")
    await marked(scope, "n1", NodeHealth.JOINING, NodeHealth.READY)
    taken, watching = watched()
    with watching:
        await bind(scope, keys[0])
        assert (
            await scope.refused(scope.actors["scheduler"], Bind(keys[2], scope.at(keys[2]), "n1", T1)) is Code.AWAITING_REPORTS
        )
        await marked(scope, "n2", NodeHealth.JOINING, NodeHealth.READY)
        await bind(scope, keys[2])
    assert taken == [True, False, True]


@story
async def test_nothing_of_a_workload_that_is_going_is_bound(scope: Scope) -> None:
    keys = await spawned(scope, "w", 2)
    await bind(scope, keys[0])
    await scope.must(OPERATOR, Delete("Workload", "w", "t1"))
    taken, watching = watched()
    with watching:
        assert await scope.refused(scope.actors["scheduler"], Bind(keys[1], scope.at(keys[1]), "n1", T1)) is Code.DELETING
    assert taken == [False]


@story
async def test_what_is_not_plain_is_left_to_the_rules(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n3", "1")))
    await scope.must(scope.actors["node-lifecycle"], Mark("n3", scope.at("node/n3"), NodeHealth.READY))
    keys = [*await spawned(scope, "w", 8), *await spawned(scope, "job", 2, type_="job")]
    keys += await spawned(scope, "apart", 2, labels={"app": "apart"}, placement=APART)
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
    """Of the make of n1: what the rules answered about that one holds for them."""
    for name in names:
        await scope.must(OPERATOR, Apply(node(name)))
        await scope.must(scope.actors["node-lifecycle"], Mark(name, scope.at(f"node/{name}"), NodeHealth.READY))


@story
async def test_a_replica_is_not_bound_twice_in_one_batch(scope: Scope) -> None:
    """F02"""
    await more_nodes(scope, "n3")
    first, second = await spawned(scope, "w", 2)
    await bind(scope, first)
    claims = [Bind(second, scope.at(second), name, T1) for name in ("n1", "n3")]
    verdicts = await scope.ask(scope.actors["scheduler"], *claims)
    assert [v.code if isinstance(v, Refused) else None for v in verdicts] == [None, Code.REVISION]


@story
async def test_a_node_that_is_suspected_takes_nothing_whatever_its_like_takes(scope: Scope) -> None:
    await more_nodes(scope, "n3")
    first, second = await spawned(scope, "w", 2)
    await bind(scope, first)
    await scope.must(scope.actors["node-lifecycle"], Mark("n3", scope.at("node/n3"), NodeHealth.SUSPECT))
    assert await scope.refused(scope.actors["scheduler"], Bind(second, scope.at(second), "n3", T1)) is Code.NODE_UNREADY


@story
async def test_who_is_shunned_is_not_put_beside_those_who_shun_it(scope: Scope) -> None:
    await more_nodes(scope, "n3")
    shy = await spawned(scope, "shy", 3, labels={"app": "apart"})
    (apart,) = await spawned(scope, "apart", labels={"app": "apart"}, placement=APART)
    await bind(scope, shy[0], "n3")
    await bind(scope, apart)
    assert await scope.refused(scope.actors["scheduler"], Bind(shy[1], scope.at(shy[1]), "n1", T1)) is Code.ANTI_AFFINITY
    await bind(scope, shy[1], "n3")


@story
async def test_a_binding_names_the_policy_that_it_was_judged_by(scope: Scope) -> None:
    rule = PolicyRule(allow=PolicyAllow(zones=("a",)))
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,)))))
    taken, watching = watched()
    with watching:
        for key in await spawned(scope, "w", 2):
            await bind(scope, key)
            assert scope.row(key)["status"]["policy"] == 1
    assert taken == [True, True]
