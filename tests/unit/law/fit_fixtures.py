"""Nodes and compiled requirements for tests of placement rules, in short form."""

from __future__ import annotations

from remit.law import fit
from remit.law.requirements import compile_requirements
from remit.model.kinds import (
    Device,
    DeviceRequest,
    Node,
    NodeHealth,
    NodeSpec,
    NodeStatus,
    Placement,
    PolicySpec,
    Taint,
    Template,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.node_columns import NodeFree
from tests.unit.law.fit_oracle import PlacementCase, Work


def ask_of(work: Work, scene: PlacementCase) -> fit.Requirements:
    return compile_requirements(work.tenant, work.name, work.labels, work.spec, scene.policies)


def requirements_of(
    *devices: DeviceRequest, placement: Placement = Placement(), policies: tuple[PolicySpec, ...] = (), **resources: int
) -> fit.Requirements:
    template = Template(command=("run",), resources=Amount(resources), devices=devices)
    spec = WorkloadSpec(type="service", template=template, placement=placement)
    return compile_requirements("risk", "api", {"app": "api"}, spec, policies)


def node(name: str = "n", zone: str = "a", models: str = "", taints: tuple[Taint, ...] = (), **labels: str) -> NodeFree:
    """`models` lists the models of its GPUs, one letter each; `-` is a GPU without a model."""
    devices = tuple(Device(name=f"gpu-{n}", kind="gpu", model=m.strip("-")) for n, m in enumerate(models))
    spec = NodeSpec(region="north", zone=zone, capacity=Amount({"cpu": 1000}), devices=devices, taints=taints)
    made = Node(metadata=Metadata(name=name, labels=labels), spec=spec, status=NodeStatus(health=NodeHealth.READY))
    return NodeFree(made, {"cpu": 1000}, {})
