"""Kinds written by the authority: Replica, Generation, Grant, Lease, Decision, Event, Summary.

Also PolicyRevision and Peer. Users never declare these kinds; the authority writes them when it accepts claims.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, field

from remit.model.kinds.definition import KindDefinition, ListColumn
from remit.model.kinds.policy import PolicySpec
from remit.model.kinds.workload import WorkloadSpec
from remit.model.metadata import Deadline, Natural, Object, Quota, Record, RecordMetadata
from remit.model.resources import Amount, Duration


class Phase(StrEnum):
    """Position of a replica in its lifecycle. The transitions and their owners are in law/lifecycle.py."""

    __hash__ = str.__hash__  # Enum's own hash is written in Python, and every claim looks phases up.

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


PROCESS_ENDED: Final = "the process ended"
"""How the reason of a replica begins that is no longer ready because its process ended."""


class ReplicaSpec(Record, frozen=True):
    workload: str
    generation: int
    index: int = 0
    priority: int = 0


class ReplicaStatus(Record, frozen=True):
    """`devices` are thousandths by device name. `grants` are all ledgers that are charged for the replica, first the one that
    the claim drew on. `failures` counts the attempts that crashed. `ports` are reported by the agent. `victims`, each with
    its uid and attempt, must be released before a reservation can be bound. `before` is the phase that `unknown`
    interrupted.
    """

    phase: Phase = Phase.PENDING
    attempt: int = 1
    failures: int = 0
    node: str = ""
    ports: dict[str, int] = field(default_factory=dict)
    devices: dict[str, int] = field(default_factory=dict)
    grants: tuple[str, ...] = ()
    policy: int = 0
    victims: dict[str, str] = field(default_factory=dict)
    result: str = ""
    reason: str = ""
    before: str = ""


def result_text(result: str, reason: str) -> str:
    """Format how an attempt ended, as `lost: node n7 sent no heartbeats`. Either part may be empty."""
    return f"{result}: {reason}" if result and reason else result or reason


class Replica(Object, tag="Replica", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: ReplicaSpec
    status: ReplicaStatus = ReplicaStatus()


REPLICA: Final = KindDefinition(
    struct=Replica,
    plural="replicas",
    aliases=("rp", "r"),
    foreign_names=("pod", "pods", "po", "alloc", "allocs", "allocation", "allocations", "task", "tasks"),
    tenanted=True,
    columns=(
        ListColumn("PHASE", least=8),
        ListColumn("NODE", "status.node", least=8),
        ListColumn("ATTEMPT", "status.attempt", right=True),
        ListColumn("RESTARTS", right=True),
        ListColumn("REASON", fluid=True),
        ListColumn("WORKLOAD", "spec.workload", wide=True),
        ListColumn("GENERATION", "spec.generation", wide=True, right=True),
        ListColumn("PRIORITY", "spec.priority", wide=True, right=True),
        ListColumn("PORTS", wide=True),
        ListColumn("DEVICES", wide=True),
    ),
)


class GenerationSpec(Record, frozen=True):
    """One generation of a workload. It is kept while replicas of it exist, and for rollback."""

    workload: str
    generation: int
    labels: dict[str, str]
    spec: WorkloadSpec


class Generation(Object, tag="Generation", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: GenerationSpec


GENERATION: Final = KindDefinition(
    struct=Generation,
    plural="generations",
    aliases=("gen",),
    tenanted=True,
    scheduler_view=True,
    composed_name=True,
    columns=(
        ListColumn("WORKLOAD", "spec.workload"),
        ListColumn("GENERATION", "spec.generation", right=True),
        ListColumn("TYPE", "spec.spec.type"),
        ListColumn("REPLICAS", "spec.spec.replicas", right=True),
    ),
)


class PolicyRevisionSpec(Record, frozen=True):
    """All policies of one numbered publication. `deadline` is set if it was adopted from another scope, on lease."""

    number: int
    policies: dict[str, PolicySpec]
    deadline: Deadline | None = None


class PolicyRevision(Object, tag="PolicyRevision", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: PolicyRevisionSpec


POLICY_REVISION: Final = KindDefinition(
    struct=PolicyRevision,
    plural="policyrevisions",
    aliases=("pr",),
    scheduler_view=True,
    columns=(ListColumn("NUMBER", "spec.number", right=True), ListColumn("POLICIES", "spec.policies", "names", fluid=True)),
)


class GrantSpec(Record, frozen=True):
    """Authority over `amount` for the time `ttl`, taken from `parent` (another grant in this scope, or a tenant's quota).

    `holder` draws on the grant: a role of this scope (an offer to a framework, a shard, a node's slots), or another scope
    (`scope/eu-west`), whose own authority keeps the ledger. `issuer` is set on the copy in the holder's scope. `shares`
    limits each tenant inside a budget and is charged to the tenants' emergency quota.
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
    """`returned` is what the holder has returned by its reports; `report` is the number of the last report and `epoch` the
    reporter's epoch.
    """

    phase: GrantPhase = GrantPhase.LIVE
    deadline: Deadline | None = None
    serial: Natural = 1
    returned: Quota = Amount()
    epoch: Natural = 0
    report: Natural = 0


class Grant(Object, tag="Grant", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: GrantSpec
    status: GrantStatus = GrantStatus()


GRANT: Final = KindDefinition(
    struct=Grant,
    plural="grants",
    aliases=("gr",),
    scheduler_view=True,
    columns=(
        ListColumn("HOLDER", "spec.holder"),
        ListColumn("PURPOSE", "spec.purpose"),
        ListColumn("TENANT", "spec.tenant"),
        ListColumn("AMOUNT", "spec.amount", fluid=True),
        ListColumn("PHASE", "status.phase"),
        ListColumn("PARENT", "spec.parent"),
    ),
)


class PeerConfirmation(StrEnum):
    """Whether a peer has confirmed what it holds from this scope. `met`: not yet, and nothing depends on it. `awaited`: not
    since a restore of this scope, which issues no grants to other scopes until the peer confirms. `vouched`: confirmed.
    """

    MET = "met"
    AWAITED = "awaited"
    VOUCHED = "vouched"


class PeerSpec(Record, frozen=True):
    """The incarnation of another scope that this scope recognises. `former` are its earlier incarnations, which are rejected
    for good.
    """

    incarnation: str = ""
    former: tuple[str, ...] = ()
    standing: PeerConfirmation = PeerConfirmation.MET


class Peer(Object, tag="Peer", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: PeerSpec


PEER: Final = KindDefinition(
    struct=Peer,
    plural="peers",
    columns=(ListColumn("STATE", "spec.standing"), ListColumn("INCARNATION", "spec.incarnation")),
)


class LeaseSpec(Record, frozen=True):
    """The right to act in a role, valid while the holder renews it. Renewals are kept in the authority's memory only; the epoch
    is the fencing token.
    """

    holder: Annotated[str, Meta(max_length=253)] = ""
    epoch: Natural = 0
    ttl: Duration = Duration(15_000)


class Lease(Object, tag="Lease", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: LeaseSpec


LEASE: Final = KindDefinition(
    struct=Lease,
    plural="leases",
    aliases=("ls",),
    columns=(
        ListColumn("HOLDER", "spec.holder"),
        ListColumn("EPOCH", "spec.epoch", right=True),
        ListColumn("TTL", "spec.ttl", right=True),
    ),
)


class DecisionCandidate(Record, frozen=True):
    """A candidate node: its score in thousandths, and the part of each plug-in (`parts`)."""

    node: str
    score: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class NearestNode(Record, frozen=True):
    """The node that came closest to fitting a replica that fits nowhere: the rules that rejected it, and the resources it
    lacks.
    """

    node: str
    refused: tuple[str, ...] = ()
    lacks: dict[str, int] = field(default_factory=dict)


class DecisionSpec(Record, frozen=True):
    """The evidence of one scheduling decision for replicas with equal requirements: the observed revision and its age, the
    nodes that each filter rejected (with `fits` they add up to `nodes`), the best candidates, what was left of the grant,
    and the result.

    `replicas` maps each replica to its node, or to an empty text. `verdict` is `bound`, `reserved`, `refused` or `waiting`.
    `reason` is a refusal code. `cures` are the events that can end a wait; `never` means that none can until a declared
    object changes.
    """

    replicas: dict[str, str] = field(default_factory=dict)
    attempt: Natural = 1
    revision: Natural = 0
    age_ms: Natural = 0
    nodes: Natural = 0
    funnel: tuple[tuple[str, int], ...] = ()
    fits: Natural = 0
    candidates: tuple[DecisionCandidate, ...] = ()
    nearest: NearestNode | None = None
    grant: str = ""
    left: dict[str, int] = field(default_factory=dict)
    policy: Natural = 0
    overrides: tuple[str, ...] = ()
    verdict: str = ""
    reason: str = ""
    detail: str = ""
    cures: tuple[str, ...] = ()
    never: bool = False
    victims: dict[str, str] = field(default_factory=dict)
    """Preemption victims of a reservation, each with the replica it makes room for."""


class Decision(Object, tag="Decision", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: DecisionSpec


DECISION: Final = KindDefinition(
    struct=Decision,
    plural="decisions",
    aliases=("dec",),
    tenanted=True,
    note=True,
    composed_name=True,
    columns=(
        ListColumn("VERDICT", "spec.verdict"),
        ListColumn("REASON", "spec.reason"),
        ListColumn("PLACED", right=True),
        ListColumn("FIT", right=True),
        ListColumn("DETAIL", "spec.detail", fluid=True),
    ),
)


class EventSpec(Record, frozen=True):
    regarding: str
    type: Literal["Normal", "Warning"] = "Normal"
    reason: str = ""
    message: str = ""
    source: str = ""
    count: Natural = 1


class Event(Object, tag="Event", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: EventSpec


EVENT: Final = KindDefinition(
    struct=Event,
    plural="events",
    aliases=("ev",),
    note=True,
    columns=(
        ListColumn("TYPE"),
        ListColumn("REASON", "spec.reason"),
        ListColumn("REGARDING", "spec.regarding"),
        ListColumn("FROM", "spec.source"),
        ListColumn("COUNT", "spec.count", right=True),
        ListColumn("MESSAGE", "spec.message", fluid=True),
    ),
)


class SummarySpec(Record, frozen=True):
    """A holder's report of its usage. The report with the higher (epoch, sequence) is the newer one."""

    holder: str
    epoch: Natural
    sequence: Natural
    used: Quota = Amount()
    counts: dict[str, int] = field(default_factory=dict)


class Summary(Object, tag="Summary", frozen=True, kw_only=True):
    metadata: RecordMetadata
    spec: SummarySpec


SUMMARY: Final = KindDefinition(
    struct=Summary,
    plural="summaries",
    aliases=("sum",),
    scheduler_view=True,
    columns=(ListColumn("HOLDER", "spec.holder"), ListColumn("EPOCH", right=True), ListColumn("USED", "spec.used", fluid=True)),
)
