"""Declared kinds: Region, Node, Tenant, PriorityClass, Policy, Workload, Allotment, Override.

Places, tenants, rules and work; frozen structs, the same in manifests, API and store.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, field

from remit.model.artifacts import Artifact, Rootfs, Volume
from remit.model.constraints import (
    AtMost,
    Distinct,
    Inside,
    Lasts,
    Matching,
    MountPoint,
    Part,
    Program,
    Schedule,
    TakesTime,
    limited,
)
from remit.model.metadata import (
    LINE,
    OPTIONAL_KEY,
    OPTIONAL_LABEL,
    URL_PATH,
    ClassName,
    Condition,
    Count,
    Deadline,
    EnvName,
    FileName,
    LabelKey,
    Labels,
    LabelValue,
    Line,
    Metadata,
    Name,
    Natural,
    Object,
    OwnedName,
    OwnKey,
    OwnLabels,
    Port,
    Priority,
    Quota,
    Record,
    Resources,
    Text,
)
from remit.model.policies import PolicyRule, TenantLimits
from remit.model.resources import Amount, Duration

PRIORITY_MAX = 1_000_000_000
"""Above it is the system's own work, which no tenant's may push aside."""

Places = Annotated[tuple[Name, ...], limited(Distinct(), max_length=64)]
Command = Annotated[tuple[Text, ...], limited(Program(), min_length=1, max_length=1024)]


class RegionSpec(Record, frozen=True):
    zones: Places = ()
    description: Text = ""


class Region(Object, tag="Region", frozen=True, kw_only=True):
    metadata: Metadata
    spec: RegionSpec = RegionSpec()


TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class Taint(Record, frozen=True):
    key: OwnKey
    effect: TaintEffect
    value: LabelValue = ""


class Device(Record, frozen=True):
    """One device of a node: owned whole by one replica, or shared in thousandths by several."""

    name: Name
    kind: Name
    model: LabelValue = ""


class NodeSpec(Record, frozen=True):
    region: Name
    zone: Name
    capacity: Resources
    pool: Name = "default"
    devices: Annotated[tuple[Device, ...], limited(Distinct("name"), max_length=1024)] = ()
    taints: Annotated[tuple[Taint, ...], Meta(max_length=64)] = ()
    unschedulable: bool = False
    draining: bool = False
    drain_deadline: Annotated[Duration, Meta(description="how long a drain may take before it is said to be overdue")] = (
        Duration(600_000)
    )
    drain_force: Annotated[bool, Meta(description="past the deadline, go on in spite of disruption limits")] = False
    address: Annotated[str, Meta(pattern=LINE, max_length=253, description="the host on which replicas are reached")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="where the agent itself answers there; 0: nowhere")] = 0


class NodeHealth(StrEnum):
    """How sure is the authority that this node is there? Only `ready` ones take new work."""

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


class NodePoolSpec(Record, frozen=True):
    """Nodes of one shape, and how many of them an autoscaler may bring."""

    region: Name
    zones: Annotated[tuple[Name, ...], limited(Distinct(), min_length=1, max_length=64)]
    capacity: Resources
    devices: Annotated[tuple[Device, ...], limited(Distinct("name"), max_length=1024)] = ()
    labels: OwnLabels = field(default_factory=dict)
    taints: Annotated[tuple[Taint, ...], Meta(max_length=64)] = ()
    min: Count = 0
    max: Count = 0


class NodePool(Object, tag="NodePool", frozen=True, kw_only=True):
    metadata: Metadata
    spec: NodePoolSpec


# ------------------------------------------------------------------------------------------------------ tenants and rules


class TenantSpec(Record, frozen=True):
    quota: Quota
    emergency_quota: Quota = Amount()
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    limits: TenantLimits = TenantLimits()


class Tenant(Object, tag="Tenant", frozen=True, kw_only=True):
    metadata: Metadata
    spec: TenantSpec


class PriorityClassSpec(Record, frozen=True):
    value: Annotated[Priority, limited(AtMost(PRIORITY_MAX, "priorities"))]
    preempts: bool = True
    description: Text = ""


class PriorityClass(Object, tag="PriorityClass", frozen=True, kw_only=True):
    metadata: Metadata
    spec: PriorityClassSpec


class PolicySpec(Record, frozen=True):
    """Every rule that matches a workload binds it: the places allowed are those that each of them allows."""

    rules: Annotated[tuple[PolicyRule, ...], Meta(min_length=1, max_length=1024)]
    description: Text = ""


class Policy(Object, tag="Policy", frozen=True, kw_only=True):
    metadata: Metadata
    spec: PolicySpec


# --------------------------------------------------------------------------------------------------------------- work


class DeviceAsk(Record, frozen=True):
    """`count` whole devices of a kind, or a `share` of one; of any model, or one of `models`."""

    kind: Name
    count: Annotated[int, Meta(ge=0, le=1024)] = 0
    share: Annotated[str | int | float, Meta(extra={"quantity": "share", "limits": (Part(),)})] = ""
    models: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()


class PortAsk(Record, frozen=True):
    name: Name
    port: Annotated[int, Meta(ge=0, le=65535, description="0: chosen on the node and announced")] = 0


class HttpProbe(Record, frozen=True):
    port: Name | Port
    path: Annotated[str, Meta(pattern=URL_PATH, max_length=2048)] = "/"


class TcpProbe(Record, frozen=True):
    port: Name | Port


class ExecProbe(Record, frozen=True):
    command: Command


class Probe(Record, frozen=True):
    """One of `http`, `tcp` or `exec`."""

    http: HttpProbe | None = None
    tcp: TcpProbe | None = None
    exec: ExecProbe | None = None
    period: Annotated[Duration, limited(TakesTime("it would be asked without a pause", "write a longer one, such as 10s"))] = (
        Duration(10_000)
    )
    timeout: Annotated[Duration, limited(TakesTime("no answer comes in no time", "write a longer one, such as 1s"))] = Duration(
        1_000
    )
    failures: Annotated[int, Meta(ge=1, le=1000)] = 3


class Probes(Record, frozen=True):
    start: Probe | None = None
    ready: Probe | None = None
    live: Probe | None = None


class Mount(Record, frozen=True):
    """A Secret or Config as files under `path`, or as environment if `path` is empty: all of its keys, or only `keys`."""

    name: Name
    path: Annotated[str, limited(Inside(absolute=True), MountPoint(), pattern=LINE, max_length=1024)] = ""
    keys: Annotated[tuple[FileName, ...], limited(Distinct(), max_length=256)] = ()


class Restart(Record, frozen=True):
    """When a process that ends is started again within its attempt. By default a service's always is, and a job's never: a
    job that fails begins a new attempt, as often as `retries` says. `limit` 0: as often as it takes.
    """

    when: Literal["always", "failure", "never", ""] = ""
    backoff: Annotated[
        Duration, limited(TakesTime("it would be started again without a pause", "write a longer one, such as 1s"))
    ] = Duration(1_000)
    backoff_max: Duration = Duration(60_000)
    limit: Count = 0


class Template(Record, frozen=True):
    """What one replica runs and needs."""

    command: Command
    env: Annotated[dict[EnvName, Text], Meta(max_length=1024)] = field(default_factory=dict)
    ports: Annotated[tuple[PortAsk, ...], limited(Distinct("name"), max_length=64)] = ()
    resources: Resources = Amount()
    devices: Annotated[tuple[DeviceAsk, ...], Meta(max_length=64)] = ()
    probes: Probes = Probes()
    stop_grace: Duration = Duration(30_000)
    restart: Restart = Restart()
    working_directory: Annotated[Line, limited(Inside(absolute=True))] = ""
    user: Annotated[str, Meta(pattern=LINE, max_length=63)] = ""
    sandbox: Literal["none", "bwrap", "default"] = "default"
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=64)] = ()
    rootfs: Rootfs | None = None
    volumes: Annotated[tuple[Volume, ...], limited(Distinct("name"), max_length=64)] = ()
    secrets: Annotated[tuple[Mount, ...], limited(Distinct("name"), max_length=64)] = ()
    configs: Annotated[tuple[Mount, ...], limited(Distinct("name"), max_length=64)] = ()


class Standby(Record, frozen=True):
    """Replicas that another region starts when the condition holds, out of a budget published ahead."""

    region: Name
    replicas: Annotated[int, Meta(ge=1, le=1_000_000)]
    budget: Name
    when: Literal["region-lost"] = "region-lost"


class Toleration(Record, frozen=True):
    key: Annotated[str, limited(Matching(OPTIONAL_KEY, 317, "a label key", "write the key of the taint"), max_length=317)] = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] = ""


class NodeExpression(Record, frozen=True):
    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()


class Spread(Record, frozen=True):
    topology_key: LabelKey
    max_skew: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "DoNotSchedule"
    label_selector: Labels = field(default_factory=dict)


class Affinity(Record, frozen=True):
    """Near to (or, as anti-affinity, away from) replicas of this tenant whose labels match, by topology domain."""

    label_selector: Annotated[dict[LabelKey, LabelValue], Meta(min_length=1, max_length=64)]
    topology_key: LabelKey


class Placement(Record, frozen=True):
    regions: Places = ()
    zones: Places = ()
    pools: Places = ()
    standby: Annotated[tuple[Standby, ...], Meta(max_length=16)] = ()
    node_selector: Labels = field(default_factory=dict)
    expressions: Annotated[tuple[NodeExpression, ...], Meta(max_length=64)] = ()
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=64)] = ()
    topology_spread: Annotated[tuple[Spread, ...], Meta(max_length=8)] = ()
    affinity: Annotated[tuple[Affinity, ...], Meta(max_length=8)] = ()
    anti_affinity: Annotated[tuple[Affinity, ...], Meta(max_length=8)] = ()


class Gang(Record, frozen=True):
    """At least `min` replicas are bound in one transaction, or none."""

    min: Annotated[int, Meta(ge=1, le=10_000)]


class Disruption(Record, frozen=True):
    min_available: Count = 0


class Rollout(Record, frozen=True):
    max_surge: Count = 1
    max_unavailable: Count = 0
    progress_deadline: Annotated[
        Duration,
        limited(TakesTime("a rollout would have failed before it began", "write a longer one, or leave it out for 10m")),
    ] = Duration(600_000)
    auto_rollback: bool = False


class WorkloadSpec(Record, frozen=True):
    type: Literal["job", "service", "daemon"]
    template: Template
    replicas: Count = 1
    priority_class: ClassName = ""
    replace: Literal["fenced", "eager", ""] = ""
    fence: Duration = Duration(300_000)
    mode: Literal["serialized", "autonomous"] = "serialized"
    placement: Placement = Placement()
    gang: Gang | None = None
    disruption: Disruption = Disruption()
    rollout: Rollout = Rollout()
    completions: Count = 0
    retries: Annotated[int, Meta(ge=0, le=10_000)] = 3
    timeout: Duration = Duration(0)
    deadline: Duration = Duration(0)
    schedule: Annotated[str, limited(Schedule(), max_length=256)] = ""
    keep: Annotated[Duration, Meta(description="how long a finished job is kept before it is deleted")] = Duration(3_600_000)

    @property
    def never_twice(self) -> bool:
        """Must a replacement wait until the old copy is surely gone? Jobs unless told otherwise; services if told."""
        return self.replace == "fenced" or (not self.replace and self.type == "job")


class WorkloadStatus(Record, frozen=True):
    conditions: tuple[Condition, ...] = ()


class Workload(Object, tag="Workload", frozen=True, kw_only=True):
    metadata: Metadata
    spec: WorkloadSpec
    status: WorkloadStatus = WorkloadStatus()


class AllotmentSpec(Record, frozen=True):
    """How many replicas of which generation a region is to run, on which grant."""

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


# --------------------------------------------------------------------------------------------------------- for a while only


Effect = Literal["pause-expansion", "avoid", "pin", "boost", "hold-repair", "freeze-autoscaler", "lend-budget"]
"""Nothing new is placed for the work named; nothing new on the places named; the work only on the places; its priority is
raised; it is not repaired; nodes neither come nor go there; the work may draw on a budget that is not its own."""

Listed = Annotated[tuple[Name, ...], limited(Distinct(), max_length=1024)]

OVERRIDE_TTL_MS_MAX = 7 * 86_400_000


class OverrideScope(Record, frozen=True):
    """What an override speaks of: work, by tenant or as `tenant/name`, and places; all that any of the lists names."""

    tenants: Listed = ()
    workloads: Annotated[tuple[OwnedName, ...], limited(Distinct(), max_length=1024)] = ()
    regions: Listed = ()
    zones: Listed = ()
    pools: Listed = ()
    nodes: Listed = ()


class OverrideSpec(Record, frozen=True):
    """A person's word against the rules, for a while. `postcondition` says what must be true when it ends."""

    effect: Effect
    scope: OverrideScope
    ttl: Annotated[
        Duration,
        limited(
            TakesTime("it would be over before it began", "write how long it holds, such as 30m"),
            Lasts(OVERRIDE_TTL_MS_MAX, "use at most 7d; what holds for longer belongs into a Policy or the object itself"),
        ),
    ]
    reason: Annotated[str, limited(Matching(r"\S", 4096, "a reason", "say why, for whoever meets it later"), max_length=4096)]
    author: Annotated[str, limited(Matching(r"\S", 253, "an author", "say who answers for it"), pattern=LINE, max_length=253)]
    by: Annotated[int, Meta(ge=0, le=PRIORITY_MAX, description="how much a boost adds to the priority")] = 0
    budget: Annotated[
        str,
        limited(Matching(OPTIONAL_LABEL, 63, "a DNS label", "use a-z, 0-9 and -, as in the budget's name"), max_length=63),
    ] = ""
    postcondition: Text = ""


class OverrideStatus(Record, frozen=True):
    """`deadline` is the authority's: when the term that it gave ends, on its own clock."""

    deadline: Deadline | None = None


class Override(Object, tag="Override", frozen=True, kw_only=True):
    metadata: Metadata
    spec: OverrideSpec
    status: OverrideStatus = OverrideStatus()
