"""Kind Config: values for the replicas which mount them."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.metadata import FileName, Metadata, Object, ObjectStatus, Record
from remit.model.roles import PEOPLE
from remit.model.secrets import PLAIN_CHARS_MAX


class DataSpec(Record, frozen=True):
    data: Annotated[dict[FileName, Annotated[str, Meta(max_length=PLAIN_CHARS_MAX)]], Meta(max_length=256)] = field(
        default_factory=dict
    )


class Config(Object, tag="Config", frozen=True, kw_only=True):
    metadata: Metadata
    spec: DataSpec
    status: ObjectStatus = ObjectStatus()


CONFIG: Final = KindDefinition(
    struct=Config,
    summary="values for the replicas which mount them",
    plural="configs",
    aliases=("cfg",),
    foreign_names=("configmap", "configmaps", "cm"),
    declared_by=PEOPLE,
    tenanted=True,
    tenant_limit="configs",
    sample=sample("risk-settings", {"data": {"MODE": "live"}}, "risk"),
    columns=(ListColumn("DATA", "spec.data", "count", right=True), ListColumn("KEYS", fluid=True)),
)
