"""Kind Tenant: an owner of workloads, with its quota, weight and limits."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.metadata import Metadata, Natural, Object, ObjectStatus, Quota, Record
from remit.model.resources import Amount
from remit.model.roles import OPERATORS


class TenantLimits(Record, frozen=True):
    """Limits on what a tenant may declare, and on its request rate, so that no tenant exhausts shared capacity. A limit that is
    lowered below the present usage removes nothing; it only rejects further growth.
    """

    workloads: Annotated[Natural, Meta(description="maximum number of workloads")] = 100_000
    replicas: Annotated[Natural, Meta(description="maximum sum of replicas over all workloads, without daemons")] = 1_000_000
    secrets: Annotated[Natural, Meta(description="maximum number of secrets")] = 10_000
    configs: Annotated[Natural, Meta(description="maximum number of configs")] = 10_000
    bytes: Annotated[Natural, Meta(description="maximum stored size of all declared objects")] = 1 << 30
    requests_per_second: Annotated[
        int, Meta(ge=1, le=1_000_000, description="sustained rate of writes and of expensive reads, which count by their cost")
    ] = 200
    requests_burst: Annotated[int, Meta(ge=1, le=10_000_000, description="requests that may exceed the rate in one burst")] = (
        1_000
    )


class TenantSpec(Record, frozen=True):
    quota: Quota
    emergency_quota: Quota = Amount()
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    limits: TenantLimits = TenantLimits()


class Tenant(Object, tag="Tenant", frozen=True, kw_only=True):
    metadata: Metadata
    spec: TenantSpec
    status: ObjectStatus = ObjectStatus()


TENANT: Final = KindDefinition(
    struct=Tenant,
    summary="an owner of workloads: quota, emergency quota and weight",
    plural="tenants",
    aliases=("ten", "tn"),
    foreign_names=("namespace", "namespaces", "ns", "project", "projects", "queue", "queues", "quota", "resourcequota"),
    declared_by=OPERATORS,
    tenant_readable=True,
    scheduler_view=True,
    sample=sample("risk", {"quota": {"cpu": "200", "memory": "512Gi"}}),
    columns=(
        ListColumn("QUOTA", "spec.quota", fluid=True),
        ListColumn("EMERGENCY QUOTA", "spec.emergency_quota", fluid=True),
        ListColumn("WEIGHT", "spec.weight", right=True),
    ),
)
