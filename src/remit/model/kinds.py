"""Declared kinds: Region, Node, Tenant, PriorityClass, Policy, Workload, Allotment, Override.

Frozen structs with the same shape in manifests, in the API and in the store. Rules between fields are in
manifests/field_rules.py; Secret and Config are in secrets.py, Token is in identity.py.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, field

from remit.model.artifacts import Artifact, Rootfs, Volume
from remit.model.constraints import (
    ContainedPath,
    CronSchedule,
    DeviceShare,
    DistinctItems,
    MatchesPattern,
    MaxDuration,
    MountPoint,
    NamesProgram,
    NonZeroDuration,
    UserMaximum,
    constrained,
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
    Port,
    Priority,
    QualifiedName,
    Quota,
    Record,
    Resources,
    Text,
    UserKey,
    UserLabels,
)
from remit.model.policies import PolicyRule, TenantLimits
from remit.model.resources import Amount, Duration

USER_PRIORITY_MAX = 1_000_000_000
"""Priorities above this are reserved for Remit's own work, which no tenant's workload can preempt."""

PlaceNames = Annotated[tuple[Name, ...], constrained(DistinctItems(), max_length=64)]
Command = Annotated[tuple[Text, ...], constrained(NamesProgram(), min_length=1, max_length=1024)]


class RegionSpec(Record, frozen=True):
    zones: PlaceNames = ()
    description: Text = ""


class Region(Object, tag="Region", frozen=True, kw_only=True):
    metadata: Metadata
    spec: RegionSpec = RegionSpec()


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


# -------------------------------------------------------------------------------------------------------- tenants and policies


class TenantSpec(Record, frozen=True):
    quota: Quota
    emergency_quota: Quota = Amount()
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    limits: TenantLimits = TenantLimits()


class Tenant(Object, tag="Tenant", frozen=True, kw_only=True):
    metadata: Metadata
    spec: TenantSpec


class PriorityClassSpec(Record, frozen=True):
    value: Annotated[Priority, constrained(UserMaximum(USER_PRIORITY_MAX, "priorities"))]
    preempts: bool = True
    description: Text = ""


class PriorityClass(Object, tag="PriorityClass", frozen=True, kw_only=True):
    metadata: Metadata
    spec: PriorityClassSpec


class PolicySpec(Record, frozen=True):
    """All rules that match a workload apply to it: a place is allowed only if every matching rule allows it."""

    rules: Annotated[tuple[PolicyRule, ...], Meta(min_length=1, max_length=1024)]
    description: Text = ""


class Policy(Object, tag="Policy", frozen=True, kw_only=True):
    metadata: Metadata
    spec: PolicySpec


# --------------------------------------------------------------------------------------------------------------- workloads


class DeviceRequest(Record, frozen=True):
    """A request for `count` whole devices of a kind or for a `share` of one device, of any model or of one of `models`."""

    kind: Name
    count: Annotated[int, Meta(ge=0, le=1024)] = 0
    share: Annotated[str | int | float, Meta(extra={"quantity": "share", "limits": (DeviceShare(),)})] = ""
    models: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()


class PortRequest(Record, frozen=True):
    name: Name
    port: Annotated[int, Meta(ge=0, le=65535, description="0: chosen by the agent and reported in the replica's status")] = 0


class HttpProbe(Record, frozen=True):
    port: Name | Port
    path: Annotated[str, Meta(pattern=URL_PATH, max_length=2048)] = "/"


class TcpProbe(Record, frozen=True):
    port: Name | Port


class ExecProbe(Record, frozen=True):
    command: Command


class Probe(Record, frozen=True):
    """A health check by exactly one of `http`, `tcp` or `exec`."""

    http: HttpProbe | None = None
    tcp: TcpProbe | None = None
    exec: ExecProbe | None = None
    period: Annotated[
        Duration, constrained(NonZeroDuration("a period of 0 would probe without a pause", "write a longer one, such as 10s"))
    ] = Duration(10_000)
    timeout: Annotated[
        Duration, constrained(NonZeroDuration("a timeout of 0 leaves no time to answer", "write a longer one, such as 1s"))
    ] = Duration(1_000)
    failures: Annotated[int, Meta(ge=1, le=1000)] = 3


class Probes(Record, frozen=True):
    start: Probe | None = None
    ready: Probe | None = None
    live: Probe | None = None


class Mount(Record, frozen=True):
    """A Secret or Config mounted as files under `path`, or set as environment variables if `path` is empty: all of its keys, or
    only `keys`.
    """

    name: Name
    path: Annotated[str, constrained(ContainedPath(absolute=True), MountPoint(), pattern=LINE, max_length=1024)] = ""
    keys: Annotated[tuple[FileName, ...], constrained(DistinctItems(), max_length=256)] = ()


class Restart(Record, frozen=True):
    """When a process that exits is restarted within its attempt. The default is `always` for services and `never` for jobs: a
    failed job starts a new attempt instead, up to `retries` times. A `limit` of 0 allows any number of restarts.
    """

    when: Literal["always", "failure", "never", ""] = ""
    backoff: Annotated[
        Duration, constrained(NonZeroDuration("a backoff of 0 would restart without a pause", "write a longer one, such as 1s"))
    ] = Duration(1_000)
    backoff_max: Duration = Duration(60_000)
    limit: Count = 0


class Template(Record, frozen=True):
    """The command of one replica, and the resources it needs."""

    command: Command
    env: Annotated[dict[EnvName, Text], Meta(max_length=1024)] = field(default_factory=dict)
    ports: Annotated[tuple[PortRequest, ...], constrained(DistinctItems("name"), max_length=64)] = ()
    resources: Resources = Amount()
    devices: Annotated[tuple[DeviceRequest, ...], Meta(max_length=64)] = ()
    probes: Probes = Probes()
    stop_grace: Duration = Duration(30_000)
    restart: Restart = Restart()
    working_directory: Annotated[Line, constrained(ContainedPath(absolute=True))] = ""
    user: Annotated[str, Meta(pattern=LINE, max_length=63)] = ""
    sandbox: Literal["none", "bwrap", "default"] = "default"
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=64)] = ()
    rootfs: Rootfs | None = None
    volumes: Annotated[tuple[Volume, ...], constrained(DistinctItems("name"), max_length=64)] = ()
    secrets: Annotated[tuple[Mount, ...], constrained(DistinctItems("name"), max_length=64)] = ()
    configs: Annotated[tuple[Mount, ...], constrained(DistinctItems("name"), max_length=64)] = ()


class Standby(Record, frozen=True):
    """Replicas that another region starts when the condition `when` holds, charged to a budget that was issued in advance."""

    region: Name
    replicas: Annotated[int, Meta(ge=1, le=1_000_000)]
    budget: Name
    when: Literal["region-lost"] = "region-lost"


class Toleration(Record, frozen=True):
    key: Annotated[
        str, constrained(MatchesPattern(OPTIONAL_KEY, 317, "a label key", "write the key of the taint"), max_length=317)
    ] = ""
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
    """Places a replica in the same topology domain as matching replicas of its tenant or, as anti-affinity, in a domain without
    any.
    """

    label_selector: Annotated[dict[LabelKey, LabelValue], Meta(min_length=1, max_length=64)]
    topology_key: LabelKey


class Placement(Record, frozen=True):
    regions: PlaceNames = ()
    zones: PlaceNames = ()
    pools: PlaceNames = ()
    standby: Annotated[tuple[Standby, ...], Meta(max_length=16)] = ()
    node_selector: Labels = field(default_factory=dict)
    expressions: Annotated[tuple[NodeExpression, ...], Meta(max_length=64)] = ()
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=64)] = ()
    topology_spread: Annotated[tuple[Spread, ...], Meta(max_length=8)] = ()
    affinity: Annotated[tuple[Affinity, ...], Meta(max_length=8)] = ()
    anti_affinity: Annotated[tuple[Affinity, ...], Meta(max_length=8)] = ()


class Gang(Record, frozen=True):
    """Gang scheduling: at least `min` replicas are bound in one transaction, or none."""

    min: Annotated[int, Meta(ge=1, le=10_000)]


class Disruption(Record, frozen=True):
    min_available: Count = 0


class Rollout(Record, frozen=True):
    max_surge: Count = 1
    max_unavailable: Count = 0
    progress_deadline: Annotated[
        Duration,
        constrained(
            NonZeroDuration("a rollout with a deadline of 0 would fail at once", "write a longer one, or leave it out for 10m")
        ),
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
    schedule: Annotated[str, constrained(CronSchedule(), max_length=256)] = ""
    keep: Annotated[Duration, Meta(description="how long a finished job is kept before it is deleted")] = Duration(3_600_000)

    @property
    def is_fenced(self) -> bool:
        """Whether a replacement must wait until the old attempt has certainly ended. The default is true for jobs and false for
        services and daemons; `replace` overrides it.
        """
        return self.replace == "fenced" or (not self.replace and self.type == "job")


class WorkloadStatus(Record, frozen=True):
    conditions: tuple[Condition, ...] = ()


class Workload(Object, tag="Workload", frozen=True, kw_only=True):
    metadata: Metadata
    spec: WorkloadSpec
    status: WorkloadStatus = WorkloadStatus()


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


# --------------------------------------------------------------------------------------------------------------- overrides


OverrideEffect = Literal["pause-expansion", "avoid", "pin", "boost", "hold-repair", "freeze-autoscaler", "lend-budget"]
"""In order: place nothing new of the workloads; place nothing new on the places; place the workloads only on the places; raise
the workloads' priority; do not repair; neither add nor remove nodes; let the workloads draw on an additional budget.
"""

NameList = Annotated[tuple[Name, ...], constrained(DistinctItems(), max_length=1024)]

OVERRIDE_TTL_MS_MAX = 7 * 86_400_000


class OverrideScope(Record, frozen=True):
    """The workloads (by tenant, or as `tenant/name`) and places that an override applies to. The lists add up."""

    tenants: NameList = ()
    workloads: Annotated[tuple[QualifiedName, ...], constrained(DistinctItems(), max_length=1024)] = ()
    regions: NameList = ()
    zones: NameList = ()
    pools: NameList = ()
    nodes: NameList = ()


class OverrideSpec(Record, frozen=True):
    """An operator's temporary exception from the rules. `postcondition` describes what must be true when it ends."""

    effect: OverrideEffect
    scope: OverrideScope
    ttl: Annotated[
        Duration,
        constrained(
            NonZeroDuration("an override with a ttl of 0 would have no effect", "write how long it is in force, such as 30m"),
            MaxDuration(OVERRIDE_TTL_MS_MAX, "use at most 7d; for longer, change the Policy or the object itself"),
        ),
    ]
    reason: Annotated[
        str,
        constrained(
            MatchesPattern(r"\S", 4096, "a reason", "write why it is needed, for operators who see it later"), max_length=4096
        ),
    ]
    author: Annotated[
        str,
        constrained(
            MatchesPattern(r"\S", 253, "an author", "write the name of the responsible person"), pattern=LINE, max_length=253
        ),
    ]
    by: Annotated[int, Meta(ge=0, le=USER_PRIORITY_MAX, description="how much a boost adds to the priority")] = 0
    budget: Annotated[
        str,
        constrained(
            MatchesPattern(OPTIONAL_LABEL, 63, "a DNS label", "use a-z, 0-9 and -, as in the budget's name"), max_length=63
        ),
    ] = ""
    postcondition: Text = ""


class OverrideStatus(Record, frozen=True):
    """`deadline` is set by the authority: the end of the term, on the authority's clock."""

    deadline: Deadline | None = None


class Override(Object, tag="Override", frozen=True, kw_only=True):
    metadata: Metadata
    spec: OverrideSpec
    status: OverrideStatus = OverrideStatus()
