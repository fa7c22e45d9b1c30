"""Policy rule and tenant limit types.

Types only: law/admission.py and law/requirements.py apply the rules, law/charges.py counts usage against the limits.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from remit.model.artifacts import PolicyPermit
from remit.model.constraints import DistinctItems, NonEmptyList, constrained
from remit.model.metadata import ClassName, Labels, Name, Natural, Priority, Record, Resources, Text
from remit.model.resources import Amount, Duration

PRIORITY_LIMIT: Final = 2_000_000_000
"""The highest possible priority."""


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
