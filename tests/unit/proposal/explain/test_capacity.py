"""Is the room that is told the room that the scheduler finds, and are the three sorts of it kept apart?"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.model.kinds import Affinity, Disruption, NodeHealth, NodePool, NodePoolSpec, Placement, Spread, Workload
from remit.model.metadata import Metadata
from remit.model.records import Phase, Replica
from remit.proposal.explain.capacity import CapacityAnswer, compute_capacity
from tests.properties.authority_world import TAINTED, amounts, workload
from tests.properties.test_explanations import clusters
from tests.unit.observation.row_fixtures import ready
from tests.unit.proposal.cluster_fixtures import A_GPU, RULES, Cluster, ranked, rich
from tests.unit.proposal.explain.test_pending import full, health, override, poor, three


def asked(cluster: Cluster, made: Workload, **more: Any) -> CapacityAnswer:
    return compute_capacity(cluster.view(), made, RULES, **more)


def test_room_and_quota_are_both_told() -> None:
    found = asked(three().with_(poor("5")), workload("w", "2"))
    assert (found.hard.room, found.hard.quota, found.hard.replicas, found.capped) == (6, 2, 2, False)
    assert found.hard.where.zones == {"a": 2, "b": 2, "c": 2}
    assert found.stop is not None and found.stop.reason == "over_quota"
    change = found.stop.unblocks[0].changes[0]
    assert (change.kind, change.amount) == ("quota", amounts(cpu="1"))


def test_hard_reclaimable_and_soft_capacity_are_never_added() -> None:
    found = asked(three(), workload("w", "1"))
    kinds: list[Any] = [found.hard, found.reclaimable, found.soft]
    for one, other in product(kinds, kinds):
        with pytest.raises(TypeError):
            one + other


def test_what_stops_the_next_one_is_told_with_what_would_let_it_in() -> None:
    found = asked(three(), workload("w", "3"))
    assert found.hard.replicas == 3
    assert found.stop is not None and found.stop.reason == "no_room"
    assert [change.kind for one in found.stop.unblocks for change in one.changes] == ["grow", "shrink", "nodes"]
    assert found.stop.nearest is not None and found.stop.nearest.lacks == amounts(cpu="2")


def test_no_more_are_looked_for_than_asked_for() -> None:
    found = asked(three(), workload("w"), most=5)
    assert (found.hard.replicas, found.capped, found.stop) == (5, True, None)


def test_where_no_more_were_looked_for_that_is_why_nothing_is_soft() -> None:
    closed = ready("n4")
    cluster = three().with_(replace(closed, spec=replace(closed.spec, unschedulable=True)))
    assert asked(cluster, workload("w"), most=5).soft.why == "most"
    assert asked(cluster, workload("w", "9")).soft.why == "place"


def test_to_ask_for_less_takes_no_more_quota_than_the_lesser_ones_do() -> None:
    found = asked(three().with_(poor("8")), workload("w", "10"))
    assert found.stop is not None
    kinds = [[change.kind for change in one.changes] for one in found.stop.unblocks]
    assert kinds == [["quota", "grow"], ["shrink"]]


def test_the_three_never_add() -> None:
    found = asked(three(), workload("w"))
    parts: list[Any] = [found.hard, found.reclaimable, found.soft]
    for one in parts:
        for other in parts:
            with pytest.raises(TypeError):
                one + other


def test_lower_work_is_reclaimable__and_only_as_much_of_it_as_may_go() -> None:
    cluster = three().with_(ranked("high", 100)).work(workload("low", "3"), 0, on=("n1", "n2", "n3"))
    made = workload("w", "2", priority="high")
    found = asked(cluster, made)
    assert (found.hard.replicas, found.reclaimable.room, found.reclaimable.victims) == (0, 6, 3)
    kept = workload("low", "3", disruption=Disruption(min_available=2))
    guarded = asked(three().with_(ranked("high", 100)).work(kept, 0, on=("n1", "n2", "n3")), made)
    assert (guarded.reclaimable.room, guarded.reclaimable.victims) == (2, 1)


def test_one_after_another_goes_from_the_same_node() -> None:
    cluster = three().with_(ranked("high", 100)).work(workload("low", "2"), 0, on=("n1", "n1", "n2", "n2", "n3", "n3"))
    found = asked(cluster, workload("w", "1", priority="high"))
    assert (found.hard.replicas, found.reclaimable.room, found.reclaimable.victims) == (0, 12, 6)


def test_all_lower_work_of_a_node_is_reclaimable__though_one_of_them_would_do_for_some() -> None:
    nodes = [ready(name, "8") for name in ("n1", "n2")]
    cluster = Cluster(rich(), *nodes, ranked("high", 100)).work(workload("low", "3"), 0, on=("n1", "n1", "n2", "n2"))
    found = asked(cluster, workload("w", "1", priority="high")).reclaimable
    assert (found.room, found.victims, found.where.nodes) == (12, 4, {"n1": 6, "n2": 6})
    large = asked(cluster, workload("w", "7", priority="high")).reclaimable
    assert (large.room, large.victims) == (2, 4)


def test_those_who_go_already_are_nobody_s_to_reclaim__and_hide_nobody_else() -> None:
    cluster = Cluster(rich(), ready("n1", "8"), ranked("high", 100)).work(workload("low", "2"), 0, on=("n1", "n1", "n1", "n1"))
    leaver = next(one for one in cluster.of(Replica) if one.metadata.name == "low-0")
    cluster = cluster.with_(replace(leaver, status=replace(leaver.status, phase=Phase.DRAINING)))
    found = asked(cluster, workload("w", "2", priority="high"))
    assert (found.hard.room, found.reclaimable.room, found.reclaimable.victims) == (0, 3, 3)


def test_reclaimable_is_within_what_is_left_of_the_quota() -> None:
    cluster = three().with_(ranked("high", 100), poor("12")).work(workload("low", "3"), 0, on=("n1", "n2", "n3"))
    found = asked(cluster, workload("w", "1", priority="high"))
    assert (found.hard.room, found.hard.replicas) == (3, 3)
    assert (found.reclaimable.room, found.reclaimable.replicas) == (9, 0)


def test_reclaimable_respects_spread() -> None:
    even = Placement(topology_spread=(Spread(topology_key="zone", max_skew=1),))
    cluster = three().with_(ranked("high", 100)).work(workload("low", "3"), 0, on=("n1", "n1", "n2"))
    cluster = cluster.with_(drop=["node/n3"])
    found = asked(cluster.with_(ready("n1", "8", zone="a")), workload("w", "3", priority="high", placement=even))
    zones = {zone: found.hard.where.zones.get(zone, 0) + found.reclaimable.where.zones.get(zone, 0) for zone in "ab"}
    assert abs(zones["a"] - zones["b"]) <= 1


@pytest.mark.parametrize(("why", "more"), [("class", {"priority": "meek"}), ("gang", {"gang": 2}), ("priority", {})])
def test_why_nothing_is_reclaimable(why: str, more: dict[str, Any]) -> None:
    cluster = full(three().with_(ranked("meek", 50, preempts=False)))
    assert asked(cluster, workload("w", "2", **more)).reclaimable.why == why


def test_nodes_that_take_no_work_are_soft__lost_ones_are_nothing() -> None:
    words = [NodeHealth.SUSPECT, NodeHealth.LOST, NodeHealth.READY]
    nodes = [health(ready(f"n{n}"), word) for n, word in enumerate(words)]
    cordoned = replace(nodes[2], spec=replace(nodes[2].spec, unschedulable=True))
    found = asked(Cluster(rich(), *nodes[:2], cordoned), workload("w", "2"))
    assert (found.hard.room, found.soft.room, found.soft.causes) == (0, 4, {"cordoned": 2, "suspect": 2})


def test_what_a_pool_may_bring_is_soft() -> None:
    spec = NodePoolSpec(region="r1", zones=("a",), capacity=amounts(cpu="4"), min=0, max=4)
    pool = NodePool(metadata=Metadata(name="default"), spec=spec)
    found = asked(three(), workload("w", "4"), pools=[pool])
    assert (found.hard.room, found.soft.room, found.soft.causes) == (3, 1, {"pool default may grow": 1})
    assert asked(three(), workload("w", "4")).soft.why == "none"


def test_those_that_keep_away_from_their_own_kind_need_drop_only_that() -> None:
    apart = Placement(anti_affinity=(Affinity(label_selector={"app": "w"}, topology_key="node"),))
    found = asked(three(), workload("w", placement=apart, labels={"app": "w"}))
    assert found.hard.room == 3 and found.stop is not None
    assert [[change.what for change in one.changes] for one in found.stop.unblocks] == [["n1"], ["anti-affinity"]]


def test_of_a_daemon_there_is_one_a_node__and_nothing_that_it_could_drop() -> None:
    made = workload("w")
    found = asked(three(), replace(made, spec=replace(made.spec, type="daemon")))
    assert found.hard.room == 3 and found.stop is not None and found.stop.reason == "anti_affinity"
    assert [[change.kind for change in one.changes] for one in found.stop.unblocks] == [["nodes"]]


def test_a_gang_comes_whole_or_not_at_all() -> None:
    found = asked(three(), workload("w", "4", 5, gang=5))
    assert (found.hard.room, found.hard.replicas) == (3, 0)
    assert found.stop is not None and found.stop.reason == "gang_short"


def test_work_that_is_paused_gets_nothing() -> None:
    found = asked(three().with_(override("hold", "pause-expansion", workloads=("t1/w",))), workload("w"))
    assert (found.hard.replicas, found.hard.room) == (0, 12)
    assert found.stop is not None and found.stop.reason == "override"


def test_there_is_no_such_class_or_tenant() -> None:
    with pytest.raises(ValueError, match="there is no priority class high"):
        asked(three(), workload("w", priority="high"))
    found = asked(three().with_(drop=["tenant/t1"]), workload("w"))
    assert (found.hard.quota, found.hard.room) == (0, 12)
    assert found.stop is not None and "tenant/t1 does not exist" in found.stop.detail


def test_devices_are_placed_one_by_one() -> None:
    found = asked(Cluster(rich(), ready("n1", gpus=2), ready("n2", taints=(TAINTED,), gpus=2)), workload("w", devices=A_GPU))
    assert (found.hard.room, found.hard.where.nodes) == (2, {"n1": 2})


@given(clusters(), st.sampled_from([1, 3, 50]))
def test_hard_is_as_many_as_the_scheduler_binds(cluster: Cluster, most: int) -> None:
    """Of the same work under another name, so many are made as were asked about; the scheduler binds as many as were told."""
    made = next(one for one in cluster.of(Workload) if one.metadata.name == "w")
    other = replace(made, metadata=replace(made.metadata, name="v"))
    cluster = cluster.with_(drop=[name for name in cluster.things if name.startswith("replica/t1/w-0")])
    found = asked(cluster, other, most=most)
    note(str(found))
    most = max(most, made.spec.gang.min if made.spec.gang is not None else 1)
    bound = cluster.work(other, most).scheduled().bound
    mine = sum(name.startswith("replica/t1/v-") for name in bound)
    assert found.hard.replicas == mine
    assert found.stop is not None or mine == most
