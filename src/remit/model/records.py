"""Kinds written by the authority: Replica, Generation, Grant, Lease, Decision, Event, Summary.

Replicas, grants, leases and evidence; nobody declares these.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, field

from remit.model.kinds import PolicySpec, WorkloadSpec
from remit.model.metadata import Deadline, Natural, Object, Quota, Record, Stamp
from remit.model.resources import Amount, Duration


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
    drew on first; `failures` counts the attempts that crashed, `ports` are those that its agent has announced; `victims`, each
    with its uid and attempt, must be gone before a reservation is bound; `before` is the phase that `unknown` interrupted.
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


class Replica(Object, tag="Replica", frozen=True, kw_only=True):
    metadata: Stamp
    spec: ReplicaSpec
    status: ReplicaStatus = ReplicaStatus()


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


class Standing(StrEnum):
    """Has a peer said what it holds from us? `met`: not yet, and nothing waits for it. `awaited`: not since a restore, and
    nothing is granted to other scopes until it does. `vouched`: yes.
    """

    MET = "met"
    AWAITED = "awaited"
    VOUCHED = "vouched"


class PeerSpec(Record, frozen=True):
    """Which incarnation of another scope this one deals with; `former` are those before it, which it never deals with again."""

    incarnation: str = ""
    former: tuple[str, ...] = ()
    standing: Standing = Standing.MET


class Peer(Object, tag="Peer", frozen=True, kw_only=True):
    metadata: Stamp
    spec: PeerSpec


class LeaseSpec(Record, frozen=True):
    """Who may act in a role, until it stops renewing. Renewals live in the authority's memory; the epoch is what fences."""

    holder: Annotated[str, Meta(max_length=253)] = ""
    epoch: Natural = 0
    ttl: Duration = Duration(15_000)


class Lease(Object, tag="Lease", frozen=True, kw_only=True):
    metadata: Stamp
    spec: LeaseSpec


class Candidate(Record, frozen=True):
    """A node that was considered, its score in thousandths, and what each plug-in gave it."""

    node: str
    score: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class Nearest(Record, frozen=True):
    """The node that came closest to taking a replica that fits nowhere, what it refused, and what it is short of."""

    node: str
    refused: tuple[str, ...] = ()
    lacks: dict[str, int] = field(default_factory=dict)


class DecisionSpec(Record, frozen=True):
    """The evidence of one scheduling decision about equal replicas: what was seen and how old it was, what each filter left
    out (with `fits`, that adds up to `nodes`), who came first, what was left of the grant, and what came of it.

    `replicas` says for each where it was put, or nothing. `verdict` is `bound`, `reserved`, `refused` or `waiting`; `reason` is
    a refusal's code; `cures` are the events that end a wait, and `never` says that none can as things are declared now.
    """

    replicas: dict[str, str] = field(default_factory=dict)
    attempt: Natural = 1
    revision: Natural = 0
    age_ms: Natural = 0
    nodes: Natural = 0
    funnel: tuple[tuple[str, int], ...] = ()
    fits: Natural = 0
    candidates: tuple[Candidate, ...] = ()
    nearest: Nearest | None = None
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
    """Whom a reservation pushes aside, and for whom."""


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
