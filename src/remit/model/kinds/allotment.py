"""Kind Allotment: how many replicas of a workload a region is to run."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.metadata import Count, Metadata, Name, Natural, Object, ObjectStatus, Record
from remit.model.roles import Role


class AllotmentSpec(Record, frozen=True):
    """The number of replicas, of which generation and charged to which grant, that a region is to run of a workload."""

    workload: Name
    region: Name
    replicas: Count
    generation: Natural = 0
    grant: Annotated[str, Meta(max_length=253)] = ""
    standby: bool = False
    when: Literal["region-lost", ""] = ""


class Allotment(Object, tag="Allotment", frozen=True, kw_only=True):
    metadata: Metadata
    spec: AllotmentSpec
    status: ObjectStatus = ObjectStatus()


ALLOTMENT: Final = KindDefinition(
    struct=Allotment,
    summary="how many replicas of a workload a region is to run",
    plural="allotments",
    aliases=("al",),
    declared_by=frozenset({Role.OPERATOR, Role.WORKLOADS, Role.BUDGETS}),
    tenanted=True,
    sample=sample("risk-api-eu-west", {"workload": "risk-api", "region": "eu-west", "replicas": 2}, "risk"),
    columns=(
        ListColumn("WORKLOAD", "spec.workload"),
        ListColumn("REGION", "spec.region"),
        ListColumn("REPLICAS", "spec.replicas", right=True),
        ListColumn("STANDBY"),
        ListColumn("GRANT", "spec.grant"),
    ),
)
