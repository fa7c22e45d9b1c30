"""Kind PriorityClass: a named priority."""

from __future__ import annotations

from typing import Annotated, Final

from remit.model.constraints import UserMaximum, constrained
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.metadata import Metadata, Object, ObjectStatus, Priority, Record, Text
from remit.model.roles import OPERATORS

USER_PRIORITY_MAX: Final = 1_000_000_000
"""Priorities above this are reserved for Remit's own work, which no tenant's workload can preempt."""


class PriorityClassSpec(Record, frozen=True):
    value: Annotated[Priority, constrained(UserMaximum(USER_PRIORITY_MAX, "priorities"))]
    preempts: bool = True
    description: Text = ""


class PriorityClass(Object, tag="PriorityClass", frozen=True, kw_only=True):
    metadata: Metadata
    spec: PriorityClassSpec
    status: ObjectStatus = ObjectStatus()


PRIORITY_CLASS: Final = KindDefinition(
    struct=PriorityClass,
    summary="a named priority; a higher number is more urgent",
    plural="priorityclasses",
    aliases=("pc",),
    declared_by=OPERATORS,
    tenant_readable=True,
    scheduler_view=True,
    sample=sample("critical", {"value": 1000}),
    columns=(
        ListColumn("VALUE", "spec.value", right=True),
        ListColumn("PREEMPTS", "spec.preempts", "yes-no"),
        ListColumn("DESCRIPTION", "spec.description", fluid=True),
    ),
)
