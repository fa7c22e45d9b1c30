"""Capacity answers: equal to what the scheduler binds, with hard, reclaimable and soft capacity kept apart."""

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
from tests.properties.proposal.cluster_strategies import clusters
from tests.unit.observation.row_fixtures import ready
from tests.unit.proposal.cluster_fixtures import A_GPU, RULES, Cluster, ranked, rich
from tests.unit.proposal.explain.pending_cases import full, health, override, poor, three_nodes


def capacity_of(cluster: Cluster, made: Workload, **more: Any) -> CapacityAnswer:
    return compute_capacity(cluster.view(), made, RULES, **more)


def test_capacity_reports_room_and_quota() -> None:
    found = capacity_of(three_nodes().with_(poor("5")), workload("w", "2"))
    assert (found.hard.room, found.hard.quota, found.hard.replicas, found.capped) == (6, 2, 2, False)
    assert found.hard.where.zones == {"a": 2, "b": 2, "c": 2}
    assert found.stop is not None and found.stop.reason == "over_quota"
    change = found.stop.unblocks[0].changes[0]
    assert (change.kind, change.amount) == ("quota", amounts(cpu="1"))


def test_hard_reclaimable_and_soft_capacity_are_never_added() -> None:
    found = capacity_of(three_nodes(), workload("w", "1"))
    kinds: list[Any] = [found.hard, found.reclaimable, found.soft]
    for one, other in product(kinds, kinds):
        with pytest.raises(TypeError):
            one + other


def test_stop_names_reason_and_remedies_for_next_replica() -> None:
    found = capacity_of(three_nodes(), workload("w", "3"))
    assert found.hard.replicas == 3
    assert found.stop is not None and found.stop.reason == "no_room"
    assert [change.kind for one in found.stop.unblocks for change in one.changes] == ["grow", "shrink", "nodes"]
    assert found.stop.nearest is not None and found.stop.nearest.lacks == amounts(cpu="2")


def test_capacity_search_stops_at_requested_number() -> None:
    found = capacity_of(three_nodes(), workload("w"), most=5)
    assert (found.hard.replicas, found.capped, found.stop) == (5, True, None)


def test_soft_capacity_is_skipped_when_limit_was_reached() -> None:
    closed = ready("n4")
    cluster = three_nodes().with_(replace(closed, spec=replace(closed.spec, unschedulable=True)))
    assert capacity_of(cluster, workload("w"), most=5).soft.why == "most"
    assert capacity_of(cluster, workload("w", "9")).soft.why == "place"


def test_shrink_remedy_needs_no_quota_change() -> None:
    found = capacity_of(three_nodes().with_(poor("8")), workload("w", "10"))
    assert found.stop is not None
    kinds = [[change.kind for change in one.changes] for one in found.stop.unblocks]
    assert kinds == [["quota", "grow"], ["shrink"]]


def test_kinds_of_capacity_cannot_be_added() -> None:
    found = capacity_of(three_nodes(), workload("w"))
    parts: list[Any] = [found.hard, found.reclaimable, found.soft]
    for one in parts:
        for other in parts:
            with pytest.raises(TypeError):
                one + other


def test_lower_priority_is_reclaimable_within_disruption_limit() -> None:
    cluster = three_nodes().with_(ranked("high", 100)).work(workload("low", "3"), 0, on=("n1", "n2", "n3"))
    made = workload("w", "2", priority="high")
    found = capacity_of(cluster, made)
    assert (found.hard.replicas, found.reclaimable.room, found.reclaimable.victims) == (0, 6, 3)
    protected = workload("low", "3", disruption=Disruption(min_available=2))
    guarded = capacity_of(three_nodes().with_(ranked("high", 100)).work(protected, 0, on=("n1", "n2", "n3")), made)
    assert (guarded.reclaimable.room, guarded.reclaimable.victims) == (2, 1)


def test_several_victims_of_one_node_are_reclaimed() -> None:
    cluster = three_nodes().with_(ranked("high", 100)).work(workload("low", "2"), 0, on=("n1", "n1", "n2", "n2", "n3", "n3"))
    found = capacity_of(cluster, workload("w", "1", priority="high"))
    assert (found.hard.replicas, found.reclaimable.room, found.reclaimable.victims) == (0, 12, 6)


def test_all_lower_priority_replicas_of_node_are_reclaimable() -> None:
    nodes = [ready(name, "8") for name in ("n1", "n2")]
    cluster = Cluster(rich(), *nodes, ranked("high", 100)).work(workload("low", "3"), 0, on=("n1", "n1", "n2", "n2"))
    found = capacity_of(cluster, workload("w", "1", priority="high")).reclaimable
    assert (found.room, found.victims, found.where.nodes) == (12, 4, {"n1": 6, "n2": 6})
    large = capacity_of(cluster, workload("w", "7", priority="high")).reclaimable
    assert (large.room, large.victims) == (2, 4)


def test_draining_replica_is_not_reclaimable_and_hides_no_other() -> None:
    cluster = Cluster(rich(), ready("n1", "8"), ranked("high", 100)).work(workload("low", "2"), 0, on=("n1", "n1", "n1", "n1"))
    leaver = next(one for one in cluster.of(Replica) if one.metadata.name == "low-0")
    cluster = cluster.with_(replace(leaver, status=replace(leaver.status, phase=Phase.DRAINING)))
    found = capacity_of(cluster, workload("w", "2", priority="high"))
    assert (found.hard.room, found.reclaimable.room, found.reclaimable.victims) == (0, 3, 3)


def test_reclaimable_is_limited_by_remaining_quota() -> None:
    cluster = three_nodes().with_(ranked("high", 100), poor("12")).work(workload("low", "3"), 0, on=("n1", "n2", "n3"))
    found = capacity_of(cluster, workload("w", "1", priority="high"))
    assert (found.hard.room, found.hard.replicas) == (3, 3)
    assert (found.reclaimable.room, found.reclaimable.replicas) == (9, 0)


def test_reclaimable_respects_topology_spread() -> None:
    even = Placement(topology_spread=(Spread(topology_key="zone", max_skew=1),))
    cluster = three_nodes().with_(ranked("high", 100)).work(workload("low", "3"), 0, on=("n1", "n1", "n2"))
    cluster = cluster.with_(drop=["node/n3"])
    found = capacity_of(cluster.with_(ready("n1", "8", zone="a")), workload("w", "3", priority="high", placement=even))
    zones = {zone: found.hard.where.zones.get(zone, 0) + found.reclaimable.where.zones.get(zone, 0) for zone in "ab"}
    assert abs(zones["a"] - zones["b"]) <= 1


@pytest.mark.parametrize(("why", "more"), [("class", {"priority": "meek"}), ("gang", {"gang": 2}), ("priority", {})])
def test_reason_why_nothing_is_reclaimable(why: str, more: dict[str, Any]) -> None:
    cluster = full(three_nodes().with_(ranked("meek", 50, preempts=False)))
    assert capacity_of(cluster, workload("w", "2", **more)).reclaimable.why == why


def test_cordoned_and_suspect_nodes_are_soft_and_lost_ones_count_nothing() -> None:
    healths = [NodeHealth.SUSPECT, NodeHealth.LOST, NodeHealth.READY]
    nodes = [health(ready(f"n{n}"), health_) for n, health_ in enumerate(healths)]
    cordoned = replace(nodes[2], spec=replace(nodes[2].spec, unschedulable=True))
    found = capacity_of(Cluster(rich(), *nodes[:2], cordoned), workload("w", "2"))
    assert (found.hard.room, found.soft.room, found.soft.causes) == (0, 4, {"cordoned": 2, "suspect": 2})


def test_node_pool_growth_is_soft_capacity() -> None:
    spec = NodePoolSpec(region="r1", zones=("a",), capacity=amounts(cpu="4"), min=0, max=4)
    pool = NodePool(metadata=Metadata(name="default"), spec=spec)
    found = capacity_of(three_nodes(), workload("w", "4"), pools=[pool])
    assert (found.hard.room, found.soft.room, found.soft.causes) == (3, 1, {"pool default may grow": 1})
    assert capacity_of(three_nodes(), workload("w", "4")).soft.why == "none"


def test_remedies_for_anti_affinity_are_new_node_or_dropping_it() -> None:
    anti_affinity = Placement(anti_affinity=(Affinity(label_selector={"app": "w"}, topology_key="node"),))
    found = capacity_of(three_nodes(), workload("w", placement=anti_affinity, labels={"app": "w"}))
    assert found.hard.room == 3 and found.stop is not None
    assert [[change.what for change in one.changes] for one in found.stop.unblocks] == [["n1"], ["anti-affinity"]]


def test_daemon_capacity_is_one_per_node_and_needs_new_node() -> None:
    made = workload("w")
    found = capacity_of(three_nodes(), replace(made, spec=replace(made.spec, type="daemon")))
    assert found.hard.room == 3 and found.stop is not None and found.stop.reason == "anti_affinity"
    assert [[change.kind for change in one.changes] for one in found.stop.unblocks] == [["nodes"]]


def test_gang_counts_whole_or_not_at_all() -> None:
    found = capacity_of(three_nodes(), workload("w", "4", 5, gang=5))
    assert (found.hard.room, found.hard.replicas) == (3, 0)
    assert found.stop is not None and found.stop.reason == "gang_short"


def test_paused_workload_has_no_capacity() -> None:
    found = capacity_of(three_nodes().with_(override("hold", "pause-expansion", workloads=("t1/w",))), workload("w"))
    assert (found.hard.replicas, found.hard.room) == (0, 12)
    assert found.stop is not None and found.stop.reason == "override"


def test_unknown_priority_class_raises_and_unknown_tenant_stops() -> None:
    with pytest.raises(ValueError, match="there is no priority class high"):
        capacity_of(three_nodes(), workload("w", priority="high"))
    found = capacity_of(three_nodes().with_(drop=["tenant/t1"]), workload("w"))
    assert (found.hard.quota, found.hard.room) == (0, 12)
    assert found.stop is not None and "tenant/t1 does not exist" in found.stop.detail


def test_devices_are_counted_one_by_one() -> None:
    found = capacity_of(
        Cluster(rich(), ready("n1", gpus=2), ready("n2", taints=(TAINTED,), gpus=2)), workload("w", devices=A_GPU)
    )
    assert (found.hard.room, found.hard.where.nodes) == (2, {"n1": 2})


@given(clusters(), st.sampled_from([1, 3, 50]))
def test_hard_capacity_equals_what_scheduler_binds(cluster: Cluster, most: int) -> None:
    """As many replicas of the same work under another name are created as were queried; the scheduler binds `hard.replicas`."""
    made = next(one for one in cluster.of(Workload) if one.metadata.name == "w")
    other = replace(made, metadata=replace(made.metadata, name="v"))
    cluster = cluster.with_(drop=[name for name in cluster.objects if name.startswith("replica/t1/w-0")])
    found = capacity_of(cluster, other, most=most)
    note(str(found))
    most = max(most, made.spec.gang.min if made.spec.gang is not None else 1)
    bound = cluster.work(other, most).scheduled().bound
    mine = sum(name.startswith("replica/t1/v-") for name in bound)
    assert found.hard.replicas == mine
    assert found.stop is not None or mine == most
