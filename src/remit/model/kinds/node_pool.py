"""Kind NodePool: a group of identical nodes, and how many of them an autoscaler may run."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from remit.model.constraints import DistinctItems, constrained
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.kinds.node import Device, Taint
from remit.model.metadata import Count, Metadata, Name, Object, ObjectStatus, Record, Resources, UserLabels
from remit.model.roles import OPERATORS


class NodePoolSpec(Record, frozen=True):
    """A group of identical nodes, and the minimum and maximum number that an autoscaler may run."""

    region: Name
    zones: Annotated[tuple[Name, ...], constrained(DistinctItems(), min_length=1, max_length=64)]
    capacity: Resources
    devices: Annotated[tuple[Device, ...], constrained(DistinctItems("name"), max_length=1024)] = ()
    labels: UserLabels = field(default_factory=dict)
    taints: Annotated[tuple[Taint, ...], Meta(max_length=64)] = ()
    min: Count = 0
    max: Count = 0


class NodePool(Object, tag="NodePool", frozen=True, kw_only=True):
    metadata: Metadata
    spec: NodePoolSpec
    status: ObjectStatus = ObjectStatus()


NODE_POOL: Final = KindDefinition(
    struct=NodePool,
    summary="a group of identical nodes, and how many an autoscaler may run",
    plural="nodepools",
    aliases=("np", "pools"),
    declared_by=OPERATORS,
    tenant_readable=True,
    sample=sample(
        "general",
        {"region": "eu-central", "capacity": {"cpu": "32", "memory": "128Gi"}, "zones": ["eu-central-a"], "max": 20},
    ),
    columns=(
        ListColumn("REGION", "spec.region"),
        ListColumn("ZONES", "spec.zones", "names"),
        ListColumn("CAPACITY", "spec.capacity"),
        ListColumn("MIN", "spec.min", right=True),
        ListColumn("MAX", "spec.max", right=True),
    ),
)
