"""Claims, operations, actors, evidence, verdicts and refusal codes.

Message types of the authority's write path. The rules that decide a claim are in law/ and commitment/.

An **operation** is one intent of a client: an id that stays the same over every retry, the actor, the evidence it acted on,
and a claim. Its **verdict** is stored with it, so a retry returns the same answer. An operation id carries the incarnation
and the time window in which it was issued. The authority refuses an id whose window is past the retention of outcomes and
never executes it; so a forgotten outcome cannot lead to a second execution.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NewType, get_args

import msgspec
from msgspec import Meta, Struct, field

from remit.model.kinds import NodeHealth, PolicySpec
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition, Natural
from remit.model.objects import dec_hook, enc_hook
from remit.model.records import DecisionSpec, EventSpec, GrantSpec, SummarySpec
from remit.model.resources import Amount, Duration
from remit.model.roles import Role

OperationID = NewType("OperationID", str)

ShortText = Annotated[str, Meta(max_length=512)]


def operation_id(incarnation: str, window: int, nonce: str) -> OperationID:
    return OperationID(f"{incarnation}.{window}.{nonce}")


def parse_operation_id(operation: str) -> tuple[str, int] | None:
    """Returns the incarnation and the window that an operation id was issued in; None if the text is not an operation id."""
    parts = operation.split(".")
    if len(parts) != 3 or not parts[0] or not parts[2] or len(operation) > 128:
        return None
    return (parts[0], int(parts[1])) if parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 16 else None


class Actor(Struct, frozen=True, omit_defaults=True, gc=False):
    """The author of a claim, with the lease and epoch that authorise it. People and their tokens act without a lease. An actor
    with a `tenant` may act in that tenant only.
    """

    name: ShortText
    role: Role
    lease: ShortText = ""
    epoch: Natural = 0
    tenant: ShortText = ""


class Evidence(Struct, frozen=True, omit_defaults=True, gc=False):
    """The basis of a claim: the store revision that the actor had observed, and the age of that view."""

    revision: Natural = 0
    age_ms: Natural = 0


class Claim(Struct, frozen=True, tag_field="do", tag=str.lower, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Base of everything that the authority can be asked to do. The tag `do` is the claim's name on the wire."""


# ----------------------------------------------------------------------------------------------------- declared objects


class Apply(Claim, frozen=True):
    """Create or replace a declared object.

    `expect` is the revision at which the object must be; 0 means that it must not exist. With `fill`, a new workload is
    created together with its first replicas, unless there are too many of them for one transaction.
    """

    thing: AnyObject
    expect: Natural | None = None
    fill: bool = False


class Delete(Claim, frozen=True):
    """Delete a declared object. With finalizers or dependants left it is marked as deleting instead."""

    kind: ShortText
    name: ShortText
    tenant: ShortText = ""
    expect: Natural | None = None


class Rollback(Claim, frozen=True):
    """Publish the policies of an earlier policy revision again, as a new revision."""

    to: Natural


class Adopt(Claim, frozen=True):
    """Adopt a policy revision from the parent scope, on lease: `ttl` counts from `asked_ms`, the time at which this scope
    requested it.
    """

    number: Natural
    policies: dict[ShortText, PolicySpec]
    ttl: Duration
    asked_ms: Natural


# --------------------------------------------------------------------------------------------------------------- replicas


class Spawn(Claim, frozen=True):
    """Create the pending replicas `first` to `first + count - 1` of a workload's generation."""

    tenant: ShortText
    workload: ShortText
    generation: Natural
    first: Natural
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1


class Bind(Claim, frozen=True):
    """Bind a replica, as observed at revision `at`, to a node and to devices of that node, charged to a grant."""

    replica: ShortText
    at: Natural
    node: ShortText
    grant: ShortText
    devices: Annotated[dict[ShortText, Natural], Meta(max_length=1024)] = field(default_factory=dict)
    policy: Natural = 0


class Reserve(Claim, frozen=True):
    """Reserve capacity for a replica until it is bound. The `victims`, each with the revision at which it was observed, start
    to drain in the same transaction.
    """

    replica: ShortText
    at: Natural
    node: ShortText
    grant: ShortText
    devices: Annotated[dict[ShortText, Natural], Meta(max_length=1024)] = field(default_factory=dict)
    policy: Natural = 0
    victims: Annotated[dict[ShortText, Natural], Meta(max_length=1024)] = field(default_factory=dict)


class BindGang(Claim, frozen=True, tag="gang"):
    """Bind at least the gang's `min` members in one transaction, or none of them."""

    members: Annotated[tuple[Bind, ...], Meta(min_length=1, max_length=10_000)]


class Move(Claim, frozen=True):
    """Take one named transition of the lifecycle table for one attempt of a replica, as observed at revision `at`."""

    replica: ShortText
    at: Natural
    transition: ShortText
    attempt: Natural = 0
    result: ShortText = ""
    reason: ShortText = ""
    ports: Annotated[dict[ShortText, Annotated[int, Meta(ge=1, le=65535)]], Meta(max_length=64)] = field(default_factory=dict)
    """Sent with `run`: for each requested port, by name, the port of the node on which it is reachable."""


class Forget(Claim, frozen=True):
    """Delete the record of a released replica."""

    replica: ShortText
    at: Natural


class Mark(Claim, frozen=True):
    """Set the health of a node."""

    node: ShortText
    at: Natural
    health: NodeHealth
    reason: ShortText = ""


# ----------------------------------------------------------------------------------------------------------------- grants


class Issue(Claim, frozen=True):
    """Issue a grant: debit its parent, and record what the holder may draw."""

    name: ShortText
    spec: GrantSpec


class Accept(Claim, frozen=True):
    """Accept a grant that another scope has issued to this one and debited, or its renewal under a higher serial.

    This is a peer message: `sender` is the issuer's incarnation and `to` the incarnation of this scope that the issuer
    recognises, both as they were when the amount was read. So a restored scope accepts nothing that was offered to, or by,
    an earlier incarnation.
    """

    name: ShortText
    spec: GrantSpec
    serial: Natural
    asked_ms: Natural
    sender: ShortText
    to: ShortText


class Renew(Claim, frozen=True):
    """Extend a grant that was issued in this scope by its own term, but never past the deadline of its parent."""

    name: ShortText


class ReturnCapacity(Claim, frozen=True, tag="yield"):
    """Return part of a grant to its issuer. The amount is debited here first; the report that follows credits the issuer."""

    name: ShortText
    amount: Amount


class Close(Claim, frozen=True):
    """Close a grant: nothing more can be drawn. Drawn capacity stays charged; if the holder is in this scope, the rest returns
    to the parent at once.
    """

    name: ShortText


class Credit(Claim, frozen=True):
    """Record a holder's report at its issuer: `remaining` is what the holder still has. The report with the highest (epoch,
    report) counts.

    This is a peer message: `sender` is the holder's incarnation and `to` the incarnation of this scope that the holder
    recognises, both as they were when `remaining` was read. A grant that is void since a restore is not reported, because
    its remaining amount is unknown.
    """

    name: ShortText
    epoch: Natural
    report: Natural
    remaining: Amount
    sender: ShortText
    to: ShortText
    final: bool = False


class ConfirmHoldings(Claim, frozen=True, tag="vouch"):
    """Record, after a restore of this scope, all grants that a holder has from it, so that no capacity is granted twice.

    This is a peer message: `sender` is the holder's incarnation and `to` the incarnation of this scope that the holder
    recognises, both as they were when its grants were read. Once the holder recognises the new incarnation, it accepts
    nothing more from the previous one.
    """

    holder: ShortText
    epoch: Natural
    grants: dict[ShortText, GrantSpec]
    sender: ShortText
    to: ShortText


class AcceptIncarnation(Claim, frozen=True, tag="recognise"):
    """Recognise this incarnation of another scope from now on, and reject the incarnation that it replaces for good.

    `replaces` is the incarnation on record here (empty at first contact). A client must read it *before* it asks the peer
    for its incarnation: then the peer's answer is newer than the record, and of two concurrent claims only one is accepted.
    """

    peer: ShortText
    incarnation: ShortText
    replaces: ShortText = ""


class DeclareLost(Claim, frozen=True, tag="declare-lost"):
    """An operator's statement that a holder is gone and fenced: everything it held returns to the issuer."""

    holder: ShortText


# ----------------------------------------------------------------------------------------------------------------- leases


class Acquire(Claim, frozen=True):
    """Become the holder of a free or expired lease, at a new epoch."""

    lease: ShortText
    ttl: Duration


class Vacate(Claim, frozen=True):
    """Give up a lease before it expires."""

    lease: ShortText


# ------------------------------------------------------------------------------------------- records that merge in any order


class RecordEvent(Claim, frozen=True, tag="note"):
    """Record an event. Two claims with the same name record the same event once."""

    name: ShortText
    event: EventSpec


class RecordDecision(Claim, frozen=True, tag="explain"):
    """Record the evidence of one scheduling decision."""

    name: ShortText
    tenant: ShortText
    decision: DecisionSpec


class Report(Claim, frozen=True):
    """Record a holder's usage summary; the summary with the highest (epoch, sequence) is kept."""

    name: ShortText
    summary: SummarySpec


class SetCondition(Claim, frozen=True, tag="observe"):
    """Set a condition of an object. The condition with the higher observed generation is kept, then the one with the later
    transition time.
    """

    kind: ShortText
    name: ShortText
    condition: Condition
    tenant: ShortText = ""


# ------------------------------------------------------------------------------------------------------------- operations


class Abandon(Claim, frozen=True):
    """Ensure that an operation is never executed; if it already was, return its outcome."""

    operation: ShortText


AnyClaim = (
    Apply | Delete | Rollback | Adopt | Spawn | Bind | Reserve | BindGang | Move | Forget | Mark
    | Issue | Accept | Renew | ReturnCapacity | Close | Credit | ConfirmHoldings | AcceptIncarnation | DeclareLost
    | Acquire | Vacate
    | RecordEvent | RecordDecision | Report | SetCondition | Abandon
)  # fmt: skip

CLAIMS: tuple[type[Claim], ...] = get_args(AnyClaim)


class Operation(Struct, frozen=True, omit_defaults=True, gc=False):
    id: OperationID
    actor: Actor
    claim: AnyClaim
    evidence: Evidence = Evidence()
    trace: ShortText = ""


class Code(StrEnum):
    """Reason of a refusal, for programs. The meaning and the remedy of each code are in law/refusals.py."""

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
    INTERNAL_ERROR = "internal_error"

    @classmethod
    def _missing_(cls, value: object) -> Code | None:
        """Accept the name that `internal_error` had before: peers of the previous version send it, and rows may contain it."""
        return cls.INTERNAL_ERROR if value == "fault" else None


class Accepted(Struct, frozen=True, omit_defaults=True, tag_field="verdict", tag="accepted", gc=False):
    """The claim holds as of `revision`. `number` is the number that the claim requested, if it requested one (such as an
    epoch).
    """

    revision: int
    number: Natural = 0


class Refused(Struct, frozen=True, omit_defaults=True, tag_field="verdict", tag="refused", gc=False):
    """The claim was refused and nothing changed. `detail` is text for people; programs read `code`."""

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
    """The bytes over which an operation's digest is computed: the actor and the claim. Evidence and trace are left out because
    they may differ between retries.
    """
    actor = operation.actor
    who = (actor.name, actor.role, actor.tenant) if actor.tenant else (actor.name, actor.role)
    return _encoder.encode((*who, operation.claim))
