"""Claims, operations, actors, evidence, verdicts and refusal codes.

The words of the one door; who may say them is in law/.

An **operation** is one intent: an id that stays the same over every retry, the actor, the evidence it acted on, and a claim.
Its **verdict** is stored with it, so asking again gets the same answer. Ids carry the incarnation and the window that they were
issued in; past its retention an id is refused, never executed, so forgetting an outcome can never repeat a deed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NewType, get_args

import msgspec
from msgspec import Meta, Struct, field

from remit.model.kinds import NodeHealth, PolicySpec
from remit.model.metadata import Condition, Natural
from remit.model.objects import AnyObject, dec_hook, enc_hook
from remit.model.records import DecisionSpec, EventSpec, GrantSpec, SummarySpec
from remit.model.resources import Amount, Duration

OperationID = NewType("OperationID", str)

Short = Annotated[str, Meta(max_length=512)]


def operation_id(incarnation: str, window: int, nonce: str) -> OperationID:
    return OperationID(f"{incarnation}.{window}.{nonce}")


def window_of(operation: str) -> tuple[str, int] | None:
    """The incarnation and window that an id was issued in; None if it is no operation id."""
    parts = operation.split(".")
    if len(parts) != 3 or not parts[0] or not parts[2] or len(operation) > 128:
        return None
    return (parts[0], int(parts[1])) if parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 16 else None


class Role(StrEnum):
    """In what capacity somebody acts. Each transition has exactly one of these as its owner."""

    __hash__ = str.__hash__  # Enum's own is written in Python, and roles are looked up at every claim.

    USER = "user"
    OPERATOR = "operator"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    NODES = "node-lifecycle"
    REPAIR = "repair"
    ROLLOUT = "rollout"
    WORKLOADS = "workloads"
    ENDPOINTS = "endpoints"
    BUDGETS = "budgets"
    POLICY = "policy"
    AUTOSCALER = "autoscaler"
    AUTHORITY = "authority"


class Actor(Struct, frozen=True, omit_defaults=True, gc=False):
    """Who asks, and the lease and epoch that let it act; people act without a lease. Who has a `tenant` acts in it alone."""

    name: Short
    role: Role
    lease: Short = ""
    epoch: Natural = 0
    tenant: Short = ""


class Evidence(Struct, frozen=True, omit_defaults=True, gc=False):
    """What the asker had seen: the store revision, and how old that view was."""

    revision: Natural = 0
    age_ms: Natural = 0


class Claim(Struct, frozen=True, tag_field="do", tag=str.lower, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Anything that may be asked."""


# ------------------------------------------------------------------------------------------------------- what is declared


class Apply(Claim, frozen=True):
    """Create or replace a declared object. `expect` is the revision that it must stand at; 0: it must not exist.

    `fill`: a workload that is new is made together with its first replicas, if these are not too many.
    """

    thing: AnyObject
    expect: Natural | None = None
    fill: bool = False


class Delete(Claim, frozen=True):
    kind: Short
    name: Short
    tenant: Short = ""
    expect: Natural | None = None


class Rollback(Claim, frozen=True):
    """Publish the policies of an earlier revision again, as a new one."""

    to: Natural


class Adopt(Claim, frozen=True):
    """Take a policy revision from the scope above, on lease: `ttl` counts from `asked_ms`, when this scope asked for it."""

    number: Natural
    policies: dict[Short, PolicySpec]
    ttl: Duration
    asked_ms: Natural


# --------------------------------------------------------------------------------------------------------------- replicas


class Spawn(Claim, frozen=True):
    """Make pending replicas `first` to `first + count - 1` of a workload's generation."""

    tenant: Short
    workload: Short
    generation: Natural
    first: Natural
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1


class Bind(Claim, frozen=True):
    """Bind a replica, as seen at revision `at`, to a node and devices of it, drawing on a grant."""

    replica: Short
    at: Natural
    node: Short
    grant: Short
    devices: Annotated[dict[Short, Natural], Meta(max_length=1024)] = field(default_factory=dict)
    policy: Natural = 0


class Reserve(Claim, frozen=True):
    """Hold room for a replica until it is bound; `victims`, each as seen at a revision, drain in the same transaction."""

    replica: Short
    at: Natural
    node: Short
    grant: Short
    devices: Annotated[dict[Short, Natural], Meta(max_length=1024)] = field(default_factory=dict)
    policy: Natural = 0
    victims: Annotated[dict[Short, Natural], Meta(max_length=1024)] = field(default_factory=dict)


class Ganged(Claim, frozen=True, tag="gang"):
    """Bind at least the gang's `min` members together, or none."""

    members: Annotated[tuple[Bind, ...], Meta(min_length=1, max_length=10_000)]


class Move(Claim, frozen=True):
    """Take one named transition of the lifecycle table with a replica, as seen at revision `at`, in one attempt."""

    replica: Short
    at: Natural
    transition: Short
    attempt: Natural = 0
    result: Short = ""
    reason: Short = ""
    ports: Annotated[dict[Short, Annotated[int, Meta(ge=1, le=65535)]], Meta(max_length=64)] = field(default_factory=dict)
    """What `run` announces: on which of the node's ports each that was asked for is reached."""


class Forget(Claim, frozen=True):
    """Drop the record of a released replica."""

    replica: Short
    at: Natural


class Mark(Claim, frozen=True):
    """Say how a node is."""

    node: Short
    at: Natural
    health: NodeHealth
    reason: Short = ""


# ----------------------------------------------------------------------------------------------------------------- grants


class Issue(Claim, frozen=True):
    """Hand authority on: debit the parent, and record what the holder may take."""

    name: Short
    spec: GrantSpec


class Accept(Claim, frozen=True):
    """Take up a grant that another scope has issued (and debited) to this one, or its renewal at a higher serial.

    A letter: `sender` is the issuer's incarnation, `to` the one of this scope that the issuer recognises, both as they stood
    when the amount was read. So a restored scope takes up nothing that was offered to the one before, or by the one before.
    """

    name: Short
    spec: GrantSpec
    serial: Natural
    asked_ms: Natural
    sender: Short
    to: Short


class Renew(Claim, frozen=True):
    """Extend a grant that was issued here, by its own term, but never past its parent."""

    name: Short


class Yield(Claim, frozen=True):
    """The holder gives part of a grant back: debited here first; the report that follows credits the issuer."""

    name: Short
    amount: Amount


class Close(Claim, frozen=True):
    """End a grant: no more draws. What is drawn stays charged; for a holder in this scope the rest returns at once."""

    name: Short


class Credit(Claim, frozen=True):
    """The holder's report reached its issuer: `remaining` is what it still has. Reports count by (epoch, report).

    A letter: `sender` is the holder's incarnation, `to` the one of this scope that the holder recognises, both as they stood
    when `remaining` was read. A grant that is void since a restore is not reported on: what is left of it is not known.
    """

    name: Short
    epoch: Natural
    report: Natural
    remaining: Amount
    sender: Short
    to: Short
    final: bool = False


class Vouch(Claim, frozen=True):
    """After a restore: everything that a holder says it has from us, so that nothing is granted twice.

    A letter: `sender` is the holder's incarnation, `to` the one of this scope that the holder recognises, both as they stood
    when its grants were read. Once it recognises the new one, it takes up nothing more from the one before.
    """

    holder: Short
    epoch: Natural
    grants: dict[Short, GrantSpec]
    sender: Short
    to: Short


class Recognise(Claim, frozen=True):
    """Deal with this incarnation of another scope from now on, and never again with the one that it replaces.

    `replaces` is what is on record here (empty at first contact). Read it *before* asking the peer which incarnation it is:
    then the answer is newer than the record, and of two that are asked for at once only one is accepted.
    """

    peer: Short
    incarnation: Short
    replaces: Short = ""


class DeclareLost(Claim, frozen=True, tag="declare-lost"):
    """An operator's word that a holder is gone and fenced: what it held returns."""

    holder: Short


# ----------------------------------------------------------------------------------------------------------------- leases


class Acquire(Claim, frozen=True):
    """Become the holder of a free or lapsed lease, at a new epoch."""

    lease: Short
    ttl: Duration


class Vacate(Claim, frozen=True):
    lease: Short


# -------------------------------------------------------------------------------------------------- what merges in any order


class Note(Claim, frozen=True):
    """Record an event; the same name is the same event."""

    name: Short
    event: EventSpec


class Explain(Claim, frozen=True):
    """Record the evidence of one scheduling decision."""

    name: Short
    tenant: Short
    decision: DecisionSpec


class Report(Claim, frozen=True):
    """A holder's summary of its use; the highest (epoch, sequence) stands."""

    name: Short
    summary: SummarySpec


class Observe(Claim, frozen=True):
    """Set a condition of an object; the one of the higher observed generation stands, then the later transition."""

    kind: Short
    name: Short
    condition: Condition
    tenant: Short = ""


# ------------------------------------------------------------------------------------------------------------- operations


class Abandon(Claim, frozen=True):
    """Make sure that an operation never happens; if it already has, answer its outcome."""

    operation: Short


AnyClaim = (
    Apply | Delete | Rollback | Adopt | Spawn | Bind | Reserve | Ganged | Move | Forget | Mark
    | Issue | Accept | Renew | Yield | Close | Credit | Vouch | Recognise | DeclareLost | Acquire | Vacate
    | Note | Explain | Report | Observe | Abandon
)  # fmt: skip

CLAIMS: tuple[type[Claim], ...] = get_args(AnyClaim)


class Operation(Struct, frozen=True, omit_defaults=True, gc=False):
    id: OperationID
    actor: Actor
    claim: AnyClaim
    evidence: Evidence = Evidence()
    trace: Short = ""


class Code(StrEnum):
    """Why a claim was refused. What each means, and what cures it, is in law/refusals.py."""

    __hash__ = str.__hash__

    INVALID = "invalid"
    RESERVED = "reserved"
    ROLE = "role"
    TENANT = "tenant"
    NOT_OWNER = "not_owner"
    STALE_EPOCH = "stale_epoch"
    LEASE_EXPIRED = "lease_expired"
    LEASE_HELD = "lease_held"
    STALE_EVIDENCE = "stale_evidence"
    OPERATION_EXPIRED = "operation_expired"
    OPERATION_MISMATCH = "operation_mismatch"
    ABANDONED = "abandoned"
    NOT_FOUND = "not_found"
    EXISTS = "exists"
    REVISION = "revision"
    PHASE = "phase"
    ATTEMPT = "attempt"
    IN_USE = "in_use"
    DELETING = "deleting"
    WAIT = "wait"
    FENCE = "fence"
    NODE_UNREADY = "node_unready"
    DRAINING = "draining"
    NO_ROOM = "no_room"
    DEVICE_TAKEN = "device_taken"
    DEVICE_MISMATCH = "device_mismatch"
    SELECTOR = "selector"
    TAINT = "taint"
    PLACE = "place"
    POLICY = "policy"
    POLICY_LAPSED = "policy_lapsed"
    SPREAD = "spread"
    AFFINITY = "affinity"
    ANTI_AFFINITY = "anti_affinity"
    OVER_QUOTA = "over_quota"
    GRANT_SHORT = "grant_short"
    GRANT_EXPIRED = "grant_expired"
    GRANT_VOID = "grant_void"
    AWAITING_REPORTS = "awaiting_reports"
    GANG_SHORT = "gang_short"
    VICTIMS = "victims"
    OVERRIDE = "override"
    LIMIT = "limit"
    FAULT = "fault"


class Accepted(Struct, frozen=True, omit_defaults=True, tag_field="verdict", tag="accepted", gc=False):
    """It is true as of `revision`. `number` is what the claim asked for, where that is a number (an epoch, say)."""

    revision: int
    number: Natural = 0


class Refused(Struct, frozen=True, omit_defaults=True, tag_field="verdict", tag="refused", gc=False):
    """Nothing changed. `detail` is prose for people; programs read `code`."""

    code: Code
    detail: str = ""
    revision: int = 0


Verdict = Accepted | Refused

_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_decoder: msgspec.json.Decoder[Operation] = msgspec.json.Decoder(Operation, dec_hook=dec_hook)


def encode_operation(operation: Operation) -> bytes:
    return _encoder.encode(operation)


def decode_operation(data: bytes) -> Operation:
    """Raises msgspec.ValidationError, which names the field."""
    return _decoder.decode(data)


def payload(operation: Operation) -> bytes:
    """What an operation's digest is taken over: who asks what. Evidence and trace may differ between retries."""
    actor = operation.actor
    who = (actor.name, actor.role, actor.tenant) if actor.tenant else (actor.name, actor.role)
    return _encoder.encode((*who, operation.claim))
