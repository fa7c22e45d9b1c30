"""Policy rule and tenant limit types.

The parts of policies and tenants; what follows from them is in law/.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from remit.model.artifacts import PolicyPermit
from remit.model.constraints import Distinct, NamesSome, limited
from remit.model.metadata import ClassName, Labels, Name, Natural, Priority, Record, Resources, Text
from remit.model.resources import Amount, Duration

PRIORITY_LIMIT: Final = 2_000_000_000
"""No priority is higher."""


class TenantLimits(Record, frozen=True):
    """How much a tenant may declare, and how fast it may ask: so that no one fills what all share. Lowered below what there is,
    a limit takes nothing away; it only lets nothing more in.
    """

    workloads: Annotated[Natural, Meta(description="workloads at once")] = 100_000
    replicas: Annotated[Natural, Meta(description="replicas that all workloads together ask for; daemons aside")] = 1_000_000
    secrets: Annotated[Natural, Meta(description="secrets at once")] = 10_000
    configs: Annotated[Natural, Meta(description="configs at once")] = 10_000
    bytes: Annotated[Natural, Meta(description="of all that it declares, as it is stored")] = 1 << 30
    requests_per_second: Annotated[int, Meta(ge=1, le=1_000_000, description="writes, and expensive reads by their cost")] = 200
    requests_burst: Annotated[int, Meta(ge=1, le=10_000_000, description="so many at once after a rest")] = 1_000


class PolicyMatch(Record, frozen=True):
    """Which workloads a rule speaks of: all of what is named must match; nothing named matches everything."""

    tenants: Annotated[tuple[Name, ...], limited(Distinct(), max_length=1024)] = ()
    labels: Labels = field(default_factory=dict)


Allowed = Annotated[tuple[Name, ...], limited(Distinct(), NamesSome(), min_length=1, max_length=1024)]


class PolicyAllow(Record, frozen=True):
    """Where they may be bound; a list that is left out allows every place of that sort."""

    regions: Allowed = ()
    zones: Allowed = ()
    pools: Allowed = ()


class PolicyDefaults(Record, frozen=True):
    """What a workload has that does not say otherwise. Of resources each by itself: who writes only cpu is given memory."""

    priority_class: ClassName = ""
    resources: Resources = Amount()
    stop_grace: Duration = Duration(0)


class PolicyRule(Record, frozen=True):
    """`priority_class` is what these workloads have, whatever their authors would like; where there is a default, authors may
    write another. `priority_max` is the most that anybody may write. `exec` false: nobody runs a command beside their
    replicas. `reason` is told to those who are refused by it.
    """

    match: PolicyMatch = PolicyMatch()
    allow: PolicyAllow = PolicyAllow()
    permit: PolicyPermit = PolicyPermit()
    priority_class: ClassName = ""
    priority_max: Priority = PRIORITY_LIMIT
    defaults: PolicyDefaults = PolicyDefaults()
    exec: Annotated[bool, Meta(description="false: no command runs beside their replicas (remit exec)")] = True
    reason: Text = ""
