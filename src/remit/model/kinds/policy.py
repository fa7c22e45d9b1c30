"""Kind Policy: rules on where workloads may run, and on their priority.

Types only: law/admission.py and law/requirements.py apply the rules.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from remit.model.artifacts import PolicyPermit
from remit.model.constraints import DistinctItems, NonEmptyList, constrained
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.metadata import ClassName, Labels, Metadata, Name, Object, ObjectStatus, Priority, Record, Resources, Text
from remit.model.resources import Amount, Duration
from remit.model.roles import Role

PRIORITY_LIMIT: Final = 2_000_000_000
"""The highest possible priority."""


class PolicyMatch(Record, frozen=True):
    """Selects the workloads of a rule: every given condition must match; without conditions all workloads match."""

    tenants: Annotated[tuple[Name, ...], constrained(DistinctItems(), max_length=1024)] = ()
    labels: Labels = field(default_factory=dict)


AllowedNames = Annotated[tuple[Name, ...], constrained(DistinctItems(), NonEmptyList(), min_length=1, max_length=1024)]


class PolicyAllow(Record, frozen=True):
    """Places where the workloads may be bound. An absent list allows every place of its kind."""

    regions: AllowedNames = ()
    zones: AllowedNames = ()
    pools: AllowedNames = ()


class PolicyDefaults(Record, frozen=True):
    """Values for fields that a workload leaves out. Resources are filled in one by one: a workload that sets only cpu gets the
    default memory.
    """

    priority_class: ClassName = ""
    resources: Resources = Amount()
    stop_grace: Duration = Duration(0)


class PolicyRule(Record, frozen=True):
    """`priorityClass` is forced on the matching workloads; `defaults.priorityClass` applies only where the author sets none.
    `priorityMax` is the highest priority that an author may choose. `exec: false` forbids commands in running replicas.
    `reason` is shown to users whose request this rule rejects.
    """

    match: PolicyMatch = PolicyMatch()
    allow: PolicyAllow = PolicyAllow()
    permit: PolicyPermit = PolicyPermit()
    priority_class: ClassName = ""
    priority_max: Priority = PRIORITY_LIMIT
    defaults: PolicyDefaults = PolicyDefaults()
    exec: Annotated[bool, Meta(description="false: remit exec is forbidden in replicas of these workloads")] = True
    reason: Text = ""


class PolicySpec(Record, frozen=True):
    """All rules that match a workload apply to it: a place is allowed only if every matching rule allows it."""

    rules: Annotated[tuple[PolicyRule, ...], Meta(min_length=1, max_length=1024)]
    description: Text = ""


class Policy(Object, tag="Policy", frozen=True, kw_only=True):
    metadata: Metadata
    spec: PolicySpec
    status: ObjectStatus = ObjectStatus()


POLICY: Final = KindDefinition(
    struct=Policy,
    summary="rules on where workloads may run, and on their priority",
    plural="policies",
    aliases=("pol",),
    declared_by=frozenset({Role.OPERATOR, Role.POLICY}),
    sample=sample(
        "residency",
        {"rules": [{"match": {"tenants": ["risk"]}, "allow": {"regions": ["eu-central"]}, "reason": "data stays in the EU"}]},
    ),
    columns=(ListColumn("RULES", "spec.rules", "count", right=True), ListColumn("DESCRIPTION", fluid=True)),
)
