"""Decides a batch of operations over a draft and encodes it as rows, with its audit entries. No I/O.

Operations are decided in order, against the committed books and the batch that is being written. An audit entry records
which actor did what to which object; the same record is the stored outcome of the operation id.

A batch may be decided while the previous one is still being written. It is then decided on top of that batch's draft and
contains only its own changes. It is written after the previous batch, and discarded if that batch was lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from remit.commitment.books import NOTES_MAX, Books, DecisionTime
from remit.commitment.decide import decide, tag
from remit.commitment.draft import Draft
from remit.commitment.operation_queue import BATCH_LIMITS
from remit.commitment.outcomes import AuditEntry, BatchRecord, Outcomes, batch_key, digest, encode_batch
from remit.commitment.rulings.leases import check_fence
from remit.commitment.rulings.registry import refuse
from remit.model.claims import (
    CLAIMS,
    Abandon,
    Accepted,
    AnyClaim,
    Apply,
    Bind,
    Claim,
    Code,
    Delete,
    Mark,
    Move,
    Operation,
    Refused,
    Reserve,
    Verdict,
    parse_operation_id,
)
from remit.model.kinds import NodeHealth, Workload, WorkloadStatus
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.validation import is_known_valid_spec
from remit.model.objects import cache_decoded, decode_cached, encode, key, key_of
from remit.model.records import Generation, Replica, result_text
from remit.model.roles import Role
from remit.store import chain
from remit.store.protocol import Head, Invalid


def audit_names(operation: Operation) -> tuple[str, str]:
    """Return the verb and the subject of an operation, as the audit names them.

    Raises TypeError for values of the wrong type. Operations from the network were validated by decoding, but in-process
    callers pass objects unchecked, and these values are stored in rows that a successor must be able to read.
    """
    actor, evidence, claim = operation.actor, operation.evidence, operation.claim
    verb, field = _AUDIT_FIELDS[type(claim)]
    subject = getattr(claim, field) if field else _subject(claim)
    are_plain = type(operation.id) is type(operation.trace) is type(actor.name) is type(actor.lease) is type(subject) is str
    are_text = are_plain or all(
        isinstance(text, str) for text in (operation.id, operation.trace, actor.name, actor.lease, subject)
    )
    if not are_text or not (type(evidence.revision) is type(evidence.age_ms) is type(actor.epoch) is int):
        raise TypeError(
            "id, trace, actor.name, actor.lease and the subject must be text; epoch, revision and age must be integers"
        )
    if type(actor.role) is not Role:
        raise TypeError(f"actor.role: {actor.role!r} is not a role")
    return verb or _verb(claim), subject


def audit_entry(operation: Operation, names: tuple[str, str], payload_digest: str, result: int | Refused) -> AuditEntry:
    """Return the audit entry of one decided operation."""
    actor, evidence, (verb, subject) = operation.actor, operation.evidence, names
    number, code, detail = (
        (0, result.code.value, result.detail) if isinstance(result, Refused) else (result, "", _stated_cause(operation.claim))
    )
    entry = AuditEntry(
        operation.id, payload_digest, verb, subject, actor.name, actor.role, actor.lease, actor.epoch,
        evidence.revision, evidence.age_ms, number, code, detail, operation.trace,
    )  # fmt: skip
    text_length = len(operation.id) + len(subject) + len(actor.name) + len(actor.lease) + len(detail) + len(operation.trace)
    return entry if text_length <= TEXT_MAX else _truncate(entry)


def _stated_cause(claim: AnyClaim) -> str:
    """Return the cause that an accepted claim states: the result of an attempt, the health of a node, the target of a
    placement.
    """
    match claim:
        case Bind(node=str(node)):
            return f"to {node}"
        case Reserve(node=str(node)):
            return f"on {node}"
        case Move(result=str(result), reason=str(reason)):
            return result_text(result, reason)
        case Mark(health=NodeHealth() as health, reason=str(reason)):
            return result_text(health.value, reason)
        case _:
            return ""


TEXT_MAX: Final = 1024
"""Maximum total length of the texts in an audit entry, more than a well-behaved operation needs. Callers choose these texts,
and a batch must fit into its row. Otherwise the store would reject the row, and the audit entry of that refusal would be
just as large.
"""


def _truncate(entry: AuditEntry) -> AuditEntry:
    """Shorten each text to its share. A shortened id is never a valid one, because valid ids have at most 128 characters."""
    share = TEXT_MAX // 2
    shortened = {
        name: text[:share] + "…"
        for name in ("id", "did", "subject", "actor", "lease", "detail", "trace")
        if len(text := getattr(entry, name)) > share
    }
    return replace(entry, **shortened)


def _verb(claim: AnyClaim) -> str:
    """Return the verb of a claim: its tag, and for a move also the transition."""
    return f"move {claim.transition}" if isinstance(claim, Move) else tag(type(claim))


def _subject(claim: AnyClaim) -> str:
    """Return the key of the object of a claim that names it in several fields."""
    if isinstance(claim, Apply):
        return key(claim.thing)
    return key_of(claim.kind, claim.name, claim.tenant) if isinstance(claim, Delete) else ""


_SUBJECT_FIELDS: Final = ("replica", "name", "node", "lease", "workload", "operation", "holder", "peer")


def _audit_fields(claim: type[Claim]) -> tuple[str, str]:
    """Return the audit verb of a claim type and the field that names its subject. Empty where they depend on the claim's
    values.
    """
    field = next((field for field in _SUBJECT_FIELDS if field in claim.__struct_fields__), "")
    return ("" if claim is Move else tag(claim)), ("" if claim in (Apply, Delete) else field)


_AUDIT_FIELDS: Final = {claim: _audit_fields(claim) for claim in CLAIMS}


AUDIT_BATCHES: Final = 100_000
OPERATION_BYTES_MAX: Final = 4 << 20
"""Maximum size of one operation: half of a row. The store would reject a larger one, which would stop the authority."""

_EMPTY_STATUS: Final = WorkloadStatus()
_MISMATCH: Final = Refused(
    Code.OPERATION_MISMATCH, "id: it was used for a different operation a moment ago; use a new operation id"
)


class AnswerOfPreviousBatch(NamedTuple):
    """Marks an operation that the previous batch answers, as soon as that batch is recorded."""

    entry: AuditEntry


BatchAnswer = Verdict | AuditEntry | AnswerOfPreviousBatch


class PreparedBatch(NamedTuple):
    """A batch that was decided but not written. `head` is the chain's head after it, and `oldest` the oldest batch row left
    then.
    """

    draft: Draft
    batch: BatchRecord
    entries: Mapping[str, AuditEntry]
    answers: Sequence[BatchAnswer]
    puts: Sequence[tuple[str, bytes]]
    deletes: Sequence[str]
    head: Head
    oldest: int


class BatchBase(NamedTuple):
    """The state that a batch is decided on. `previous` is the batch before it, if that is still being written."""

    books: Books
    outcomes: Outcomes
    head: Head
    oldest: int
    time: DecisionTime
    window: int
    wall: str
    previous: PreparedBatch | None = None
    replicas_max: int = BATCH_LIMITS.replicas

    def draft(self) -> Draft:
        return Draft(self.books, self.time) if self.previous is None else self.previous.draft.follow(self.time)


NO_ERRORS: Final[Mapping[str, str]] = MappingProxyType({})
NO_ENTRIES: Final[Mapping[str, AuditEntry]] = MappingProxyType({})


def prepare(base: BatchBase, operations: Sequence[Operation], known_errors: Mapping[str, str] = NO_ERRORS) -> PreparedBatch:
    """Decide operations in order, up to the limit of one batch. Operations beyond it get no answer and belong to the next
    batch.

    `known_errors` maps ids of operations that must not be decided again to the error they caused.
    """
    draft, outcomes = base.draft(), base.outcomes
    previous_entries = NO_ENTRIES if base.previous is None else base.previous.entries
    entries: dict[str, AuditEntry] = {}
    answers: list[BatchAnswer] = []
    audited: list[AuditEntry] = []
    # On top of a batch in flight, the draft already has the replicas of that batch, which do not count here.
    replicas_limit = len(draft.changes.replicas) + base.replicas_max
    for operation in operations:
        if len(draft.changes.replicas) > replicas_limit:
            break
        try:
            id_, names = operation.id, audit_names(operation)
            payload_digest, size = digest(operation)
        except UnicodeEncodeError as error:
            answers.append(
                Refused(Code.INVALID, f"operation: contains text that is not valid Unicode ({error.reason}); send UTF-8")
            )
            continue
        except Exception as error:  # noqa: BLE001 (any error here is caused by the caller's value)
            answers.append(refuse(Code.INVALID, f"operation: not a valid operation ({type(error).__name__}: {error})"))
            continue
        earlier = entries.get(id_) or previous_entries.get(id_)
        # An entry without a digest was written by `_abandon`, which knows only the id of its target.
        if earlier is not None and earlier.digest in ("", payload_digest):
            answers.append(earlier if id_ in entries else AnswerOfPreviousBatch(earlier))
            continue
        known = outcomes.check_id(id_, payload_digest) if earlier is None else _MISMATCH
        if known is not None:
            answers.append(known)
            # A refusal without a revision is new. It is audited, but not recorded: the id may have an outcome of its own.
            if isinstance(known, Refused) and not known.revision:
                audited.append(audit_entry(operation, names, payload_digest, known))
            continue
        if size > OPERATION_BYTES_MAX:
            result: int | Refused = Refused(
                Code.LIMIT, f"operation: {size} bytes exceed the limit of {OPERATION_BYTES_MAX}; split it into smaller ones"
            )
        elif isinstance(operation.claim, Abandon):
            result = _abandon(base, draft, operation, operation.claim.operation, entries)
        elif known_errors and id_ in known_errors:
            result = Refused(Code.INTERNAL_ERROR, known_errors[id_])
        else:
            try:
                result = decide(draft, operation)
            except Exception as bug:  # noqa: BLE001 (a failing operation must not stop the authority)
                # A bug of ours. The draft may be half written, so it is discarded, and the batch is decided again without this
                # operation.
                return prepare(base, operations, {**known_errors, id_: f"{type(bug).__name__}: {bug}"})
        entry = audit_entry(operation, names, payload_digest, result)
        entries[id_] = entry
        answers.append(entry)
    return encode_draft(base, draft, answers, entries, audited)


def encode_draft(
    base: BatchBase,
    draft: Draft,
    answers: Sequence[BatchAnswer] = (),
    entries: Mapping[str, AuditEntry] = NO_ENTRIES,
    audited: Sequence[AuditEntry] = (),
    marker: tuple[str, bytes] | None = None,
) -> PreparedBatch:
    """Encode a draft as the rows to write, with the row of the batch itself and, if given, a marker row."""
    if base.previous is not None:
        draft.changes.subtract(base.previous.draft.changes)
    puts: list[tuple[str, bytes]] = [] if marker is None else [marker]
    deletes: list[str] = []
    for changes in (draft.changes.replicas, draft.changes.objects, draft.changes.notes):
        for name, obj in changes.items():
            if obj is None:
                deletes.append(name)
                continue
            row = encode(obj)
            puts.append((name, row))
            if _is_surely_decodable(obj):
                cache_decoded(row, obj)  # lets readers in this process reuse the decoded object
            else:
                _check_decodable(name, row)
    if draft.changes.notes:
        deletes += _expire_notes(base, draft)
    sequence = base.head.sequence + 1
    batch = _batch_record(base, (*entries.values(), *audited))
    puts.append((batch_key(sequence), encode_batch(batch)))
    # Each batch deletes up to two old batch rows until few enough remain, but never one whose outcomes a successor must load.
    last = min(sequence - AUDIT_BATCHES, batch.first, base.oldest + 2)
    deletes += [batch_key(batch_number) for batch_number in range(base.oldest, last)]
    head = chain.advance(base.head, puts, deletes)
    return PreparedBatch(draft, batch, entries, answers, puts, deletes, head, max(base.oldest, last))


def _expire_notes(base: BatchBase, draft: Draft) -> Iterator[str]:
    """Yield the keys of the oldest notes beyond the limit, and mark them deleted in the draft."""
    if len(base.books.notes) + len(draft.changes.notes) <= NOTES_MAX // 2:
        return
    notes_left = dict.fromkeys(base.books.notes)
    for notes in (*(() if base.previous is None else (base.previous.draft.changes.notes,)), draft.changes.notes):
        for name, note in notes.items():
            notes_left.pop(name, None)
            if note is not None:
                notes_left[name] = None
    for name in list(islice(notes_left, max(len(notes_left) - NOTES_MAX, 0))):
        if name not in draft.changes.notes:
            draft.changes.notes[name] = None
            yield name


def _check_decodable(name: str, row: bytes) -> None:
    """Raise Invalid if the row cannot be decoded: a successor must be able to load it, and in-process claims were not
    validated.
    """
    try:
        decode_cached(row)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Invalid(f"{name} cannot be stored: the row would not decode: {error}") from None


def _is_surely_decodable(obj: AnyObject) -> bool:
    """Return whether the object certainly decodes: it contains no unvalidated text of a claim."""
    match obj:
        case Replica(status=status):
            return not (status.result or status.reason or status.devices or status.victims)
        case Workload(spec=spec, metadata=meta, status=status):
            return (
                status == _EMPTY_STATUS
                and not (meta.annotations or meta.owners or meta.finalizers)
                and is_known_valid_spec(spec)
            )
        case Generation(spec=spec):
            return is_known_valid_spec(spec.spec)
    return False


def _batch_record(base: BatchBase, entries: tuple[AuditEntry, ...]) -> BatchRecord:
    sequence = base.head.sequence + 1
    horizon = base.outcomes.next_horizon(base.window)
    # A batch in flight is not among the recorded ones, and need not be: an earlier batch has recorded the window of every id
    # that it can contain, because windows are announced only once recorded.
    first = base.outcomes.first_sequence(horizon, sequence)
    return BatchRecord(base.head.epoch, base.window, horizon, first, base.wall, entries)


def _abandon(base: BatchBase, draft: Draft, operation: Operation, target: str, entries: dict[str, AuditEntry]) -> int | Refused:
    """Record `abandoned` as the outcome of the target, unless the target has an outcome. The answer is the target's outcome in
    both cases (`Outcomes.record`).
    """
    forbidden = (
        Refused(Code.ROLE, "actor.role: authority may not submit operations; act in your own role")
        if operation.actor.role is Role.AUTHORITY
        else None
    )
    fenced = forbidden or check_fence(draft, operation.actor)
    if fenced is not None:
        return fenced
    earlier = entries.get(target) or (None if base.previous is None else base.previous.entries.get(target))
    if earlier is not None:
        return earlier.number if not earlier.code else Refused(Code(earlier.code), earlier.detail)
    known = base.outcomes.get(target)
    if known is not None:
        return known.number if isinstance(known, Accepted) else Refused(known.code, known.detail)
    issued = parse_operation_id(target)
    if issued is None:
        return Refused(Code.INVALID, "operation: not an operation id; pass the id of the operation to abandon")
    if issued[0] != base.outcomes.incarnation or issued[1] < base.outcomes.horizon:
        return Refused(
            Code.OPERATION_EXPIRED,
            f"operation {target} is older than the retained outcomes, so it may have been executed; read the object it was "
            "about",
        )
    refused = Refused(Code.ABANDONED, f"operation {target} was abandoned by its client before it was executed")
    entries[target] = AuditEntry(target, "", "abandoned", "", "", "", "", 0, 0, 0, 0, Code.ABANDONED.value, refused.detail, "")
    return refused
