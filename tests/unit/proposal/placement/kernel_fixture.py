"""Nodes of mixed sizes, workloads with each sort of placement, and a kernel over them."""

from __future__ import annotations

import numpy as np

from remit.law.fit import Requirements
from remit.law.requirements import compile_requirements
from remit.model.kinds import (
    Affinity,
    Node,
    NodeHealth,
    NodeSpec,
    NodeStatus,
    Placement,
    Spread,
    Taint,
    Template,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.node_columns import NodeColumns, NodeFree
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.kernel import Kernel

PLACES: dict[str, Placement] = {
    "plain": Placement(node_selector={"disk": "ssd"}),
    "spread": Placement(topology_spread=(Spread(topology_key="zone", max_skew=2),)),
    "soft": Placement(topology_spread=(Spread(topology_key="rack", max_skew=1, when_unsatisfiable="ScheduleAnyway"),)),
    "near": Placement(affinity=(Affinity(topology_key="zone", label_selector={"app": "near"}),)),
    "away": Placement(anti_affinity=(Affinity(topology_key="node", label_selector={"app": "away"}),)),
    "apart": Placement(anti_affinity=(Affinity(topology_key="rack", label_selector={"app": "apart"}),)),
    "shunned": Placement(anti_affinity=(Affinity(topology_key="node", label_selector={"app": "plain"}),)),
}


def node(row: int, rng: np.random.Generator, *taints: Taint, racks: int = 40) -> Node:
    cores = int(rng.choice((4, 8, 16)))
    labels = {"disk": str(rng.choice(("ssd", "hdd"))), "rack": f"r{row % racks}"}
    spec = NodeSpec(
        region="eu", zone=f"eu-{row % 3}", capacity=Amount({"cpu": 1_000 * cores, "memory": cores << 32}), taints=taints
    )
    metadata = Metadata(name=f"node-{row}", labels=labels)
    return Node(metadata=metadata, spec=spec, status=NodeStatus(health=NodeHealth.READY))


def full(one: Node) -> NodeFree:
    return NodeFree(one, dict(one.spec.capacity.pairs), {})


def ask(name: str, cpu: int = 300) -> Requirements:
    template = Template(command=("serve",), resources=Amount({"cpu": cpu, "memory": 1 << 30}))
    spec = WorkloadSpec(type="service", template=template, placement=PLACES[name])
    return compile_requirements("acme", name, {"app": name}, spec, ())


def kernel(columns: NodeColumns) -> Kernel:
    return Kernel(columns, ColumnPeerCounts(columns, {}))
