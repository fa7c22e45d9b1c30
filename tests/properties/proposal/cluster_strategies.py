"""Hypothesis strategy for clusters with a pending workload, in which every rule may refuse it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from remit.model.kinds import (
    Affinity,
    DeviceRequest,
    Node,
    NodeHealth,
    NodeStatus,
    Placement,
    PolicyAllow,
    PolicyRule,
    Spread,
    Taint,
    Tenant,
    TenantSpec,
)
from remit.model.metadata import Metadata
from tests.properties.authority_world import amounts, workload
from tests.unit.observation.row_fixtures import ready
from tests.unit.proposal.cluster_fixtures import A_GPU, Cluster
from tests.unit.proposal.explain.pending_cases import published

ZONES = ("a", "b", "c")
LABELS = {"app": "w"}
TAINT = Taint(key="dedicated", value="x", effect="NoSchedule")
often = st.sampled_from([False, False, False, True])


@st.composite
def nodes(draw: st.DrawFn, name: str) -> Node:
    made = ready(
        name,
        draw(st.sampled_from(["1", "2", "4"])),
        zone=draw(st.sampled_from(ZONES)),
        gpus=draw(st.integers(0, 2)),
        pool=draw(st.sampled_from(["default", "gpu"])),
        labels={"disk": "ssd"} if draw(st.booleans()) else {},
        taints=(TAINT,) if draw(often) else (),
        unschedulable=draw(often),
    )
    return replace(made, status=NodeStatus(health=draw(st.sampled_from([NodeHealth.READY] * 3 + [NodeHealth.SUSPECT]))))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    key = draw(st.sampled_from(["zone", "node", "pool"]))
    other = draw(st.sampled_from([LABELS, {"app": "other"}]))
    return Placement(
        zones=draw(st.sampled_from([(), (), (), ("a",), ("b", "c")])),
        node_selector={"disk": "ssd"} if draw(often) else {},
        topology_spread=(Spread(topology_key=key, max_skew=1),) if draw(often) else (),
        affinity=(Affinity(label_selector=other, topology_key=key),) if draw(often) else (),
        anti_affinity=(Affinity(label_selector=other, topology_key=key),) if draw(often) else (),
    )


ASKS: Any = st.sampled_from(
    [
        (),
        (),
        A_GPU,
        (DeviceRequest(kind="gpu", count=2),),
        (DeviceRequest(kind="gpu", share="600m"),),
    ]
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    count = draw(st.integers(1, 4))
    quota = amounts(cpu=draw(st.sampled_from(["1", "3", "100"])), memory="100Gi", gpu=draw(st.sampled_from([0, 1, 100])))
    cluster = Cluster(Tenant(metadata=Metadata(name="t1"), spec=TenantSpec(quota=quota)))
    names = [f"n{n}" for n in range(count)]
    cluster = cluster.with_(*(draw(nodes(name)) for name in names))
    if draw(often):
        cluster = cluster.with_(published(PolicyRule(allow=PolicyAllow(zones=draw(st.sampled_from([("a",), ("b", "c")]))))))
    there = st.lists(st.sampled_from(names), max_size=3)
    shy = Placement(anti_affinity=(Affinity(label_selector=LABELS, topology_key="zone"),)) if draw(often) else Placement()
    cluster = cluster.work(
        workload("other", draw(st.sampled_from(["500m", "1"])), labels={"app": "other"}, placement=shy), 0, on=draw(there)
    )
    gang = draw(st.sampled_from([0, 0, 0, 2, 3]))
    made = workload(
        "w",
        draw(st.sampled_from(["500m", "1", "2", "3"])),
        4,
        gang=gang,
        devices=draw(ASKS),
        placement=draw(placements()),
        labels=LABELS,
    )
    on = () if gang or made.spec.template.devices else draw(st.lists(st.sampled_from(names), max_size=2))
    return cluster.work(made, max(gang, 1), on=on)
