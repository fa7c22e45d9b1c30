"""Kind Node: a machine, with its capacity, devices, taints and health."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta

from remit.model.constraints import DistinctItems, constrained
from remit.model.kinds.definition import KindDefinition, ListColumn, Reference, sample
from remit.model.metadata import LINE, Condition, LabelValue, Metadata, Name, Object, Record, Resources, Text, UserKey
from remit.model.resources import Duration
from remit.model.roles import Role

TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class Taint(Record, frozen=True):
    key: UserKey
    effect: TaintEffect
    value: LabelValue = ""


class Device(Record, frozen=True):
    """One device of a node: allocated as a whole to one replica, or shared by several in thousandths."""

    name: Name
    kind: Name
    model: LabelValue = ""


class NodeSpec(Record, frozen=True):
    region: Name
    zone: Name
    capacity: Resources
    pool: Name = "default"
    devices: Annotated[tuple[Device, ...], constrained(DistinctItems("name"), max_length=1024)] = ()
    taints: Annotated[tuple[Taint, ...], Meta(max_length=64)] = ()
    unschedulable: bool = False
    draining: bool = False
    drain_deadline: Annotated[Duration, Meta(description="time limit of a drain; past it the drain is reported as overdue")] = (
        Duration(600_000)
    )
    drain_force: Annotated[bool, Meta(description="past drainDeadline, evict even if that violates disruption limits")] = False
    address: Annotated[
        str, Meta(pattern=LINE, max_length=253, description="host on which replicas of this node are reached")
    ] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the agent's own API on that host; 0: none")] = 0


class NodeHealth(StrEnum):
    """The authority's assessment of a node's liveness. Only `ready` nodes take new work."""

    __hash__ = str.__hash__

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    UNKNOWN = "unknown"
    LOST = "lost"


class NodeStatus(Record, frozen=True):
    health: NodeHealth = NodeHealth.JOINING
    reason: Text = ""
    conditions: tuple[Condition, ...] = ()


class Node(Object, tag="Node", frozen=True, kw_only=True):
    metadata: Metadata
    spec: NodeSpec
    status: NodeStatus = NodeStatus()


NODE: Final = KindDefinition(
    struct=Node,
    summary="a machine: its region and zone, capacity, devices and taints",
    plural="nodes",
    aliases=("no",),
    declared_by=frozenset({Role.OPERATOR, Role.AGENT}),
    references=(Reference("spec.region", "Region"),),
    scheduler_view=True,
    sample=sample("node-7", {"region": "eu-central", "capacity": {"cpu": "32", "memory": "128Gi"}, "zone": "eu-central-a"}),
    columns=(
        ListColumn("HEALTH", least=14),
        ListColumn("REGION", "spec.region"),
        ListColumn("ZONE", "spec.zone"),
        ListColumn("POOL", "spec.pool"),
        ListColumn("CPU REQUESTS", right=True),
        ListColumn("MEMORY REQUESTS", right=True),
        ListColumn("REPLICAS", right=True),
        ListColumn("REASON", fluid=True),
        ListColumn("DEVICES", wide=True),
        ListColumn("ADDRESS", wide=True),
        ListColumn("TAINTS", wide=True),
    ),
)
