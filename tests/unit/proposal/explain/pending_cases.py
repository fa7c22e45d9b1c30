"""Clusters in which a workload is pending, one for each reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from remit.model.claims import Code
from remit.model.kinds import (
    Affinity,
    DeviceRequest,
    Node,
    NodeHealth,
    NodeStatus,
    Override,
    OverrideScope,
    OverrideSpec,
    OverrideStatus,
    Placement,
    PolicyAllow,
    PolicyRule,
    PolicySpec,
    Spread,
    Tenant,
    TenantSpec,
)
from remit.model.metadata import Deadline, Metadata, RecordMetadata
from remit.model.records import Grant, GrantSpec, GrantStatus, PolicyRevision, PolicyRevisionSpec
from remit.model.resources import Duration
from remit.proposal.explain.result_types import FilterFunnel
from tests.properties.authority_world import TAINTED, amounts, workload
from tests.unit.observation.row_fixtures import ready
from tests.unit.proposal.cluster_fixtures import A_GPU, NOW, Cluster, ranked, rich


def sums(passage: FilterFunnel) -> bool:
    return passage.nodes == passage.fits + sum(step.refused for step in passage.steps)


def health(node: Node, state: NodeHealth) -> Node:
    return replace(node, status=NodeStatus(health=state))


def override(name: str, effect: Any, **scope: Any) -> Override:
    return Override(
        metadata=Metadata(name=name),
        spec=OverrideSpec(effect=effect, scope=OverrideScope(**scope), ttl=Duration(60_000), reason="r", author="a"),
        status=OverrideStatus(deadline=Deadline(boot=NOW[0], at_ms=NOW[1] + 60_000)),
    )


def slice_of(name: str, cpu: str, *, until_ms: int) -> Grant:
    """A slice of t1's quota that another scope gave."""
    return Grant(
        metadata=RecordMetadata(name=name),
        spec=GrantSpec(holder="scope/here", amount=amounts(cpu=cpu), issuer="above", tenant="t1", ttl=Duration(60_000)),
        status=GrantStatus(deadline=Deadline(boot=NOW[0], at_ms=until_ms)),
    )


def published(*rules: PolicyRule) -> PolicyRevision:
    spec = PolicyRevisionSpec(number=1, policies={"p": PolicySpec(rules=rules)})
    return PolicyRevision(metadata=RecordMetadata(name=f"{1:08d}"), spec=spec)


def three_nodes(**more: Any) -> Cluster:
    """Three nodes in three zones, each with four cores, and a tenant with ample quota."""
    return Cluster(rich(), *(ready(f"n{n}", zone=zone, **more) for n, zone in enumerate("abc", 1)))


def full(cluster: Cluster, cpu: str = "3") -> Cluster:
    """A filler replica runs on every node."""
    return cluster.work(workload("filler", cpu, labels={"app": "filler"}), 0, on=("n1", "n2", "n3"))


APART = Placement(anti_affinity=(Affinity(label_selector={"app": "w"}, topology_key="zone"),))
NEAR_DATABASE = Placement(affinity=(Affinity(label_selector={"app": "db"}, topology_key="zone"),))
EVENLY = Placement(topology_spread=(Spread(topology_key="zone", max_skew=1),))
ANTI_AFFINITY = Placement(anti_affinity=(Affinity(label_selector={"app": "w"}, topology_key="zone"),))
MINE = {"app": "w"}
A_SHARE = (DeviceRequest(kind="gpu", share="600m"),)


def unready() -> Cluster:
    cluster = three_nodes()
    nodes = [health(node, NodeHealth.SUSPECT) for node in cluster.of(Node)]
    return cluster.with_(*nodes).work(workload("w"))


def cordoned() -> Cluster:
    cluster = three_nodes()
    nodes = [replace(node, spec=replace(node.spec, unschedulable=True)) for node in cluster.of(Node)]
    return cluster.with_(*nodes).work(workload("w"))


def crowded_zone() -> Cluster:
    """One replica runs in zone a, and only zone a has free capacity: a second one there would exceed the skew."""
    cluster = three_nodes().work(workload("filler", "4"), 0, on=("n2", "n3"))
    return cluster.work(workload("w", placement=EVENLY), 1, on=("n1",))


def gpus_taken() -> Cluster:
    cluster = Cluster(rich(), ready("n1", gpus=1))
    holder = workload("holder", devices=A_GPU)
    return cluster.work(holder, 0, on=("n1",), devices={"gpu-0": 1000}).work(workload("w", devices=A_GPU))


def shares_taken() -> Cluster:
    cluster = Cluster(rich(), ready("n1", gpus=1))
    holder = workload("holder", devices=A_SHARE)
    return cluster.work(holder, 0, on=("n1",), devices={"gpu-0": 600}).work(workload("w", devices=A_SHARE))


def poor(cpu: str) -> Tenant:
    return Tenant(metadata=Metadata(name="t1"), spec=TenantSpec(quota=amounts(cpu=cpu)))


def deleting() -> Cluster:
    made = workload("w")
    return three_nodes().work(replace(made, metadata=replace(made.metadata, deleting=True)))


CASES: dict[str, tuple[Code, bool, Callable[[], Cluster]]] = {
    "node-health": (Code.NODE_UNREADY, False, unready),
    "cordon": (Code.DRAINING, False, cordoned),
    "place": (Code.PLACE, True, lambda: three_nodes().work(workload("w", placement=Placement(zones=("nowhere",))))),
    "policy": (
        Code.POLICY,
        True,
        lambda: three_nodes().with_(published(PolicyRule(allow=PolicyAllow(zones=("z",))))).work(workload("w")),
    ),
    "taint": (Code.TAINT, True, lambda: three_nodes(taints=(TAINTED,)).work(workload("w"))),
    "selector": (
        Code.SELECTOR,
        True,
        lambda: three_nodes().work(workload("w", placement=Placement(node_selector={"disk": "ssd"}))),
    ),
    "room": (Code.NO_ROOM, False, lambda: full(three_nodes()).work(workload("w", "2"))),
    "too large": (Code.NO_ROOM, True, lambda: three_nodes().work(workload("w", "5"))),
    "device": (Code.DEVICE_TAKEN, False, gpus_taken),
    "no such device": (Code.DEVICE_TAKEN, True, lambda: three_nodes().work(workload("w", devices=A_GPU))),
    "share": (Code.DEVICE_TAKEN, False, shares_taken),
    "spread": (Code.SPREAD, False, crowded_zone),
    "affinity": (Code.AFFINITY, False, lambda: three_nodes().work(workload("w", placement=NEAR_DATABASE))),
    "anti-affinity": (
        Code.ANTI_AFFINITY,
        False,
        lambda: three_nodes().work(workload("w", placement=APART, labels=MINE), 1, on=("n1", "n2", "n3")),
    ),
    "shunned": (
        Code.ANTI_AFFINITY,
        False,
        lambda: (
            three_nodes()
            .work(workload("shy", placement=ANTI_AFFINITY), 0, on=("n1", "n2", "n3"))
            .work(workload("w", labels=MINE))
        ),
    ),
    "quota": (Code.OVER_QUOTA, False, lambda: three_nodes().with_(poor("500m")).work(workload("w"))),
    "no tenant": (Code.OVER_QUOTA, False, lambda: three_nodes().with_(drop=["tenant/t1"]).work(workload("w"))),
    "grant expired": (
        Code.GRANT_EXPIRED,
        False,
        lambda: three_nodes().with_(slice_of("slice", "8", until_ms=NOW[1] - 1)).work(workload("w")),
    ),
    "slice too small": (
        Code.OVER_QUOTA,
        False,
        lambda: three_nodes().with_(slice_of("slice", "400m", until_ms=NOW[1] + 60_000)).work(workload("w")),
    ),
    "gang short of members": (Code.GANG_SHORT, False, lambda: three_nodes().work(workload("w", gang=3), 2)),
    "gang short of room": (Code.GANG_SHORT, False, lambda: full(three_nodes()).work(workload("w", "1", 5, gang=5), 5)),
    "gang short of quota": (
        Code.OVER_QUOTA,
        False,
        lambda: three_nodes().with_(poor("2")).work(workload("w", "1", 3, gang=3), 3),
    ),
    "paused": (
        Code.OVERRIDE,
        False,
        lambda: three_nodes().with_(override("hold", "pause-expansion", workloads=("t1/w",))).work(workload("w")),
    ),
    "avoided": (
        Code.OVERRIDE,
        False,
        lambda: three_nodes().with_(override("away", "avoid", zones=("a", "b", "c"))).work(workload("w")),
    ),
    "pinned": (
        Code.OVERRIDE,
        False,
        lambda: three_nodes().with_(override("pin", "pin", workloads=("t1/w",), zones=("z",))).work(workload("w")),
    ),
    "deleting": (Code.DELETING, True, deleting),
    "quota and room": (Code.OVER_QUOTA, False, lambda: full(three_nodes()).with_(poor("10")).work(workload("w", "2"))),
    "taint and room": (Code.TAINT, True, lambda: full(three_nodes(taints=(TAINTED,))).work(workload("w", "2"))),
    "no nodes": (Code.NO_ROOM, True, lambda: Cluster(rich()).work(workload("w"))),
}


def outranked(**more: Any) -> Cluster:
    """Lower-priority work fills every node, and a class that may preempt it waits."""
    cluster = three_nodes().with_(ranked("high", 100), ranked("meek", 50, preempts=False))
    return cluster.work(workload("low", "3", **more), 0, on=("n1", "n2", "n3"))
