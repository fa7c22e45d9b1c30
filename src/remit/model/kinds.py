"""Which objects exist, and what may be written in them? Frozen structs, the same for manifests, API and store.

Two rules keep this page short: a field that is absent means its default, so a stored row holds only what was said; and limits
stand on the type (`Meta`), so that the reader of manifests, the JSON Schema and the decoder all enforce the same ones. What
needs more than one field to judge is in manifests.py.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from remit.model.quantity import format_duration
from remit.model.resources import Amount, Duration

API_VERSION = "remit/v1"

END = r"$(?!\n)"
"""The very end: to Python a bare `$` also stands before a last newline, and a name with a newline in it would pass."""

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?" + END
DNS_NAME = r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?" + END
LABEL_KEY = r"^([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?" + END
LABEL_VALUE = r"^([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?" + END
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*" + END

Name = Annotated[str, Meta(pattern=DNS_LABEL, max_length=63, description="a DNS label: a-z, 0-9 and -")]
LabelKey = Annotated[str, Meta(pattern=LABEL_KEY, max_length=317, description="a label key")]
LabelValue = Annotated[str, Meta(pattern=LABEL_VALUE, max_length=63, description="a label value")]
Labels = Annotated[dict[LabelKey, LabelValue], Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
EnvName = Annotated[str, Meta(pattern=ENV_NAME, max_length=256)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Resources = Annotated[Amount, Meta(extra={"devices": False}, description="resources by name, such as cpu and memory")]
Quota = Annotated[Amount, Meta(extra={"devices": True}, description="resources by name, and devices by kind")]


class Record(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Anything written inside an object."""


class Object(Record, tag_field="kind", frozen=True, kw_only=True):
    """Anything with a kind and a name of its own."""

    api_version: Literal["remit/v1"] = "remit/v1"


class Owner(Record, frozen=True):
    """What this object belongs to; when that goes, so does this."""

    kind: str
    name: Name
    uid: str = ""


class Metadata(Record, frozen=True):
    name: Name
    tenant: Annotated[str, Meta(pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?" + END)] = ""
    labels: Labels = field(default_factory=dict)
    annotations: Annotated[dict[LabelKey, Text], Meta(max_length=64)] = field(default_factory=dict)
    owners: Annotated[tuple[Owner, ...], Meta(max_length=16)] = ()
    finalizers: Annotated[tuple[LabelKey, ...], Meta(max_length=16)] = ()
    uid: str = ""
    generation: Natural = 0
    revision: Natural = 0
    deleting: bool = False


class Stamp(Record, frozen=True):
    """Metadata of the authority's own records: it names them itself, so nothing is checked again at each reading."""

    name: str
    tenant: str = ""
    uid: str = ""
    generation: int = 0
    revision: int = 0


class Condition(Record, frozen=True):
    """What an observer says of an object: `reason` is a stable word for programs, `message` is prose for people."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    observed_generation: Natural = 0
    last_transition: str = ""


# ------------------------------------------------------------------------------------------------------------- places


class RegionSpec(Record, frozen=True):
    zones: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    description: Text = ""


class Region(Object, tag="Region", frozen=True, kw_only=True):
    metadata: Metadata
    spec: RegionSpec = RegionSpec()


TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class Taint(Record, frozen=True):
    key: LabelKey
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
    devices: Annotated[tuple[Device, ...], Meta(max_length=1024)] = ()
    taints: Annotated[tuple[Taint, ...], Meta(max_length=64)] = ()
    unschedulable: bool = False
    draining: bool = False


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
    conditions: tuple[Condition, ...] = ()


class Node(Object, tag="Node", frozen=True, kw_only=True):
    metadata: Metadata
    spec: NodeSpec
    status: NodeStatus = NodeStatus()


class NodePoolSpec(Record, frozen=True):
    """Nodes of one shape, and how many of them an autoscaler may bring."""

    region: Name
    zones: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]
    capacity: Resources
    devices: Annotated[tuple[Device, ...], Meta(max_length=1024)] = ()
    labels: Labels = field(default_factory=dict)
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


class Tenant(Object, tag="Tenant", frozen=True, kw_only=True):
    metadata: Metadata
    spec: TenantSpec


Priority = Annotated[int, Meta(ge=-1_000_000_000, le=2_000_000_000, description="higher is more urgent")]


class PriorityClassSpec(Record, frozen=True):
    value: Priority
    preempts: bool = True
    description: Text = ""


class PriorityClass(Object, tag="PriorityClass", frozen=True, kw_only=True):
    metadata: Metadata
    spec: PriorityClassSpec


class PolicyMatch(Record, frozen=True):
    """Which workloads a rule speaks of: all of what is named must match; nothing named matches everything."""

    tenants: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()
    labels: Labels = field(default_factory=dict)


class PolicyAllow(Record, frozen=True):
    """Where they may be bound; an empty list allows every place of that sort."""

    regions: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()
    zones: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()
    pools: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()


class PolicyRule(Record, frozen=True):
    match: PolicyMatch = PolicyMatch()
    allow: PolicyAllow = PolicyAllow()
    priority_class: Annotated[str, Meta(max_length=63)] = ""
    priority_max: Priority = 2_000_000_000
    reason: Text = ""


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
    share: Annotated[str | int | float, Meta(extra={"quantity": "share"})] = ""
    models: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()


class PortAsk(Record, frozen=True):
    name: Name
    port: Annotated[int, Meta(ge=0, le=65535, description="0: chosen on the node and announced")] = 0


class HttpProbe(Record, frozen=True):
    port: Name | Port
    path: Annotated[str, Meta(pattern="^/", max_length=2048)] = "/"


class TcpProbe(Record, frozen=True):
    port: Name | Port


class ExecProbe(Record, frozen=True):
    command: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=1024)]


class Probe(Record, frozen=True):
    """One of `http`, `tcp` or `exec`."""

    http: HttpProbe | None = None
    tcp: TcpProbe | None = None
    exec: ExecProbe | None = None
    period: Duration = Duration(10_000)
    timeout: Duration = Duration(1_000)
    failures: Annotated[int, Meta(ge=1, le=1000)] = 3


class Probes(Record, frozen=True):
    start: Probe | None = None
    ready: Probe | None = None
    live: Probe | None = None


class Artifact(Record, frozen=True):
    source: Annotated[str, Meta(min_length=1, max_length=4096)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}" + END)]
    path: Annotated[str, Meta(min_length=1, max_length=1024)] = "."
    unpack: bool = False


class Mount(Record, frozen=True):
    """A Secret or Config as files under `path`, or as environment if `path` is empty."""

    name: Name
    path: Annotated[str, Meta(max_length=1024)] = ""


class Template(Record, frozen=True):
    """What one replica runs and needs."""

    command: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=1024)]
    env: Annotated[dict[EnvName, Text], Meta(max_length=1024)] = field(default_factory=dict)
    ports: Annotated[tuple[PortAsk, ...], Meta(max_length=64)] = ()
    resources: Resources = Amount()
    devices: Annotated[tuple[DeviceAsk, ...], Meta(max_length=64)] = ()
    probes: Probes = Probes()
    stop_grace: Duration = Duration(30_000)
    working_directory: Annotated[str, Meta(max_length=4096)] = ""
    user: Annotated[str, Meta(max_length=63)] = ""
    sandbox: Literal["none", "bwrap", "default"] = "default"
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=64)] = ()
    secrets: Annotated[tuple[Mount, ...], Meta(max_length=64)] = ()
    configs: Annotated[tuple[Mount, ...], Meta(max_length=64)] = ()


class Standby(Record, frozen=True):
    """Replicas that another region starts when the condition holds, out of a budget published ahead."""

    region: Name
    replicas: Annotated[int, Meta(ge=1, le=1_000_000)]
    budget: Name
    when: Literal["region-lost"] = "region-lost"


class Toleration(Record, frozen=True):
    key: Annotated[str, Meta(max_length=317)] = ""
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
    regions: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    zones: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    pools: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
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
    progress_deadline: Duration = Duration(600_000)
    auto_rollback: bool = False


class WorkloadSpec(Record, frozen=True):
    type: Literal["job", "service", "daemon"]
    template: Template
    replicas: Count = 1
    priority_class: Annotated[str, Meta(max_length=63)] = ""
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
    schedule: Annotated[str, Meta(max_length=256)] = ""

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


class DataSpec(Record, frozen=True):
    data: Annotated[dict[LabelKey, Annotated[str, Meta(max_length=65536)]], Meta(max_length=256)] = field(default_factory=dict)


class Secret(Object, tag="Secret", frozen=True, kw_only=True):
    metadata: Metadata
    spec: DataSpec


class Config(Object, tag="Config", frozen=True, kw_only=True):
    metadata: Metadata
    spec: DataSpec


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


# --------------------------------------------------------------------------------------------- what the authority keeps


class Phase(StrEnum):
    """Where a replica stands; who may move it is in law/lifecycle.py."""

    __hash__ = str.__hash__  # Enum's own is written in Python, and phases are looked up at every claim.

    PENDING = "pending"
    RESERVED = "reserved"
    BOUND = "bound"
    STARTING = "starting"
    RUNNING = "running"
    READY = "ready"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    FINISHED = "finished"
    UNKNOWN = "unknown"
    FAILED = "failed"
    RELEASED = "released"


class ReplicaSpec(Record, frozen=True):
    workload: str
    generation: int
    index: int = 0
    priority: int = 0


class ReplicaStatus(Record, frozen=True):
    """`devices` are thousandths by device name; `grants` are all the ledgers that carry its charge, the one that the claim
    drew on first; `victims`, with the attempt of each, must be gone before a reservation is bound; `before` is the phase
    that `unknown` interrupted.
    """

    phase: Phase = Phase.PENDING
    attempt: int = 1
    node: str = ""
    devices: dict[str, int] = field(default_factory=dict)
    grants: tuple[str, ...] = ()
    policy: int = 0
    victims: dict[str, int] = field(default_factory=dict)
    result: str = ""
    reason: str = ""
    before: str = ""


class Replica(Object, tag="Replica", frozen=True, kw_only=True):
    metadata: Stamp
    spec: ReplicaSpec
    status: ReplicaStatus = ReplicaStatus()


class Deadline(Record, frozen=True):
    """An instant on one machine's boot clock; on any other boot it cannot be compared, and counts as passed."""

    boot: str
    at_ms: Natural


class GenerationSpec(Record, frozen=True):
    """One generation of a workload, kept while replicas of it exist, and for rollback."""

    workload: str
    generation: int
    labels: dict[str, str]
    spec: WorkloadSpec


class Generation(Object, tag="Generation", frozen=True, kw_only=True):
    metadata: Stamp
    spec: GenerationSpec


class PolicyRevisionSpec(Record, frozen=True):
    """All policies as of one numbered publication. `deadline` is set where it came from another scope, on lease."""

    number: int
    policies: dict[str, PolicySpec]
    deadline: Deadline | None = None


class PolicyRevision(Object, tag="PolicyRevision", frozen=True, kw_only=True):
    metadata: Stamp
    spec: PolicyRevisionSpec


class GrantSpec(Record, frozen=True):
    """Authority over `amount`, for `ttl`, carved out of `parent` (another grant here, or a tenant's quota).

    `holder` draws on it: a role of this scope (an offer to a framework, a shard, a node's slots), or another scope
    (`scope/eu-west`), whose own authority keeps the books of it. `issuer` is set on the copy that such a holder keeps.
    `shares` caps each tenant inside a budget; they are charged to those tenants' emergency quota.
    """

    holder: Annotated[str, Meta(min_length=1, max_length=253)]
    amount: Quota
    shares: dict[str, Quota] = field(default_factory=dict)
    parent: Annotated[str, Meta(max_length=253)] = ""
    issuer: Annotated[str, Meta(max_length=253)] = ""
    tenant: Annotated[str, Meta(max_length=63)] = ""
    purpose: Literal["quota", "budget", "offer", "shard", "slots"] = "quota"
    ttl: Duration = Duration(0)


class GrantPhase(StrEnum):
    LIVE = "live"
    CLOSED = "closed"
    VOID = "void"


class GrantStatus(Record, frozen=True):
    """`returned` came back by the holder's reports; `report` numbers the last one, `epoch` is the reporter's."""

    phase: GrantPhase = GrantPhase.LIVE
    deadline: Deadline | None = None
    serial: Natural = 1
    returned: Quota = Amount()
    epoch: Natural = 0
    report: Natural = 0


class Grant(Object, tag="Grant", frozen=True, kw_only=True):
    metadata: Stamp
    spec: GrantSpec
    status: GrantStatus = GrantStatus()


class LeaseSpec(Record, frozen=True):
    """Who may act in a role, until it stops renewing. Renewals live in the authority's memory; the epoch is what fences."""

    holder: Annotated[str, Meta(max_length=253)] = ""
    epoch: Natural = 0
    ttl: Duration = Duration(15_000)


class Lease(Object, tag="Lease", frozen=True, kw_only=True):
    metadata: Stamp
    spec: LeaseSpec


class Candidate(Record, frozen=True):
    node: str
    score: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class DecisionSpec(Record, frozen=True):
    """The evidence of one scheduling decision: what was seen and how old, what was left at each filter, what came of it."""

    replica: str
    attempt: Natural = 1
    revision: Natural = 0
    age_ms: Natural = 0
    funnel: tuple[tuple[str, int], ...] = ()
    candidates: tuple[Candidate, ...] = ()
    node: str = ""
    grant: str = ""
    policy: Natural = 0
    verdict: str = ""
    reason: str = ""


class Decision(Object, tag="Decision", frozen=True, kw_only=True):
    metadata: Stamp
    spec: DecisionSpec


class EventSpec(Record, frozen=True):
    regarding: str
    type: Literal["Normal", "Warning"] = "Normal"
    reason: str = ""
    message: str = ""
    source: str = ""
    count: Natural = 1


class Event(Object, tag="Event", frozen=True, kw_only=True):
    metadata: Stamp
    spec: EventSpec


class SummarySpec(Record, frozen=True):
    """What a holder says it uses; of two, the one with the higher (epoch, sequence) is the later."""

    holder: str
    epoch: Natural
    sequence: Natural
    used: Quota = Amount()
    counts: dict[str, int] = field(default_factory=dict)


class Summary(Object, tag="Summary", frozen=True, kw_only=True):
    metadata: Stamp
    spec: SummarySpec


AnyObject = (
    Region | Node | NodePool | Tenant | PriorityClass | Policy | Workload | Secret | Config | Allotment
    | Replica | Generation | PolicyRevision | Grant | Lease | Decision | Event | Summary
)  # fmt: skip

KINDS: dict[str, type[Object]] = {cls.__struct_config__.tag: cls for cls in get_args(AnyObject)}
"""Every kind by its name."""

TENANTED = frozenset({"Workload", "Secret", "Config", "Allotment", "Replica", "Generation", "Decision"})
"""Kinds whose name is unique only within a tenant."""

DECLARED = ("Region", "Node", "NodePool", "Tenant", "PriorityClass", "Policy", "Workload", "Secret", "Config", "Allotment")
"""Kinds that people write; the rest are the authority's own records."""


def dec_hook(type_: type, value: object) -> object:
    if type_ is Amount and isinstance(value, dict):
        return Amount.parse(value)
    if type_ is Duration:
        return Duration.parse(value)
    raise ValueError(f"expected a {type_.__name__}")


def enc_hook(value: object) -> object:
    if isinstance(value, Amount):
        return value.written()
    if isinstance(value, Duration):
        return format_duration(int(value))
    raise TypeError(f"{type(value).__name__} is not stored")


_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_decoders: dict[str, Any] = {kind: msgspec.json.Decoder(cls, dec_hook=dec_hook) for kind, cls in KINDS.items()}
_any_decoder: msgspec.json.Decoder[AnyObject] = msgspec.json.Decoder(AnyObject, dec_hook=dec_hook)


def encode(value: object) -> bytes:
    return _encoder.encode(value)


def decode(value: bytes) -> AnyObject:
    return _any_decoder.decode(value)


def key_of(kind: str, name: str, tenant: str = "") -> str:
    """Where an object stands in its scope's store."""
    return f"{kind.lower()}/{tenant}/{name}" if kind in TENANTED else f"{kind.lower()}/{name}"


def key(thing: AnyObject) -> str:
    return key_of(type(thing).__name__, thing.metadata.name, thing.metadata.tenant)
