"""Decides a batch of operations over a draft and encodes it as rows, with audit entries.

Who did what to which object; it is the outcome's record too. No I/O here.

Operations decided in their order, on what is committed and what is being written. No I/O here.

A batch may be decided while the one before it is still being written. Then it is decided on top of that one's draft, and holds
only what it changed itself; it is written only after that one was, and thrown away if that one was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from remit.commitment.books import NOTES_MAX, Books, Moment
from remit.commitment.decide import decide, tag
from remit.commitment.draft import Draft
from remit.commitment.operation_queue import BATCH_MAX
from remit.commitment.outcomes import Batch, Entry, Outcomes, batch_key, digest, encode_batch
from remit.commitment.rulings.leases import claimant
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
    Role,
    Verdict,
    window_of,
)
from remit.model.kinds import NodeHealth, Workload, WorkloadStatus
from remit.model.manifests.validation import is_sound_spec
from remit.model.objects import AnyObject, decoded, encode, key, key_of, remember
from remit.model.records import Generation, Replica
from remit.store import chain
from remit.store.protocol import Head, Invalid


def deed_of(operation: Operation) -> tuple[str, str]:
    """What is asked, and of which object, as the audit calls them. Raises if this is no operation: what came over a wire was
    checked, but what was given by reference was checked by nobody, and its words are written where a successor must read them.
    """
    actor, evidence, claim = operation.actor, operation.evidence, operation.claim
    did, field = _NAMES[type(claim)]
    subject = getattr(claim, field) if field else _subject(claim)
    plain = type(operation.id) is type(operation.trace) is type(actor.name) is type(actor.lease) is type(subject) is str
    texts = plain or all(isinstance(one, str) for one in (operation.id, operation.trace, actor.name, actor.lease, subject))
    if not texts or not (type(evidence.revision) is type(evidence.age_ms) is type(actor.epoch) is int):
        raise TypeError("id, trace, actor and subject are text, and epoch, revision and age whole numbers")
    if type(actor.role) is not Role:
        raise TypeError(f"{actor.role!r} is no role")
    return did or _deed(claim), subject


def entry_of(operation: Operation, deed: tuple[str, str], taken: str, ruled: int | Refused) -> Entry:
    """One operation as the audit keeps it."""
    actor, evidence, (did, subject) = operation.actor, operation.evidence, deed
    number, code, detail = (
        (0, ruled.code.value, ruled.detail) if isinstance(ruled, Refused) else (ruled, "", _said(operation.claim))
    )
    entry = Entry(
        operation.id, taken, did, subject, actor.name, actor.role, actor.lease, actor.epoch,
        evidence.revision, evidence.age_ms, number, code, detail, operation.trace,
    )  # fmt: skip
    texts = len(operation.id) + len(subject) + len(actor.name) + len(actor.lease) + len(detail) + len(operation.trace)
    return entry if texts <= TEXT_MAX else _cut(entry)


def _said(claim: AnyClaim) -> str:
    """What an accepted claim says of its cause: how an attempt ended, how a node is, where work goes."""
    match claim:
        case Move(result=str(result), reason=str(reason)):
            return f"{result} {reason}".strip()
        case Mark(health=NodeHealth() as health, reason=str(reason)):
            return f"{health} {reason}".strip()
        case Bind(node=str(node)) | Reserve(node=str(node)):
            return f"to {node}"
        case _:
            return ""


TEXT_MAX: Final = 1024
"""More than an honest operation says of itself in all. The asker chooses these words, and no batch may outgrow its row: the
store would refuse it, and what says so would be as large again, and so for ever."""


def _cut(entry: Entry) -> Entry:
    """Each text cut to its share. An id that would lose anything is none: those have 128 characters at most."""
    most = TEXT_MAX // 2
    cut = {
        name: text[:most] + "…"
        for name in ("id", "did", "subject", "actor", "lease", "detail", "trace")
        if len(text := getattr(entry, name)) > most
    }
    return replace(entry, **cut)


def _deed(claim: AnyClaim) -> str:
    """What was asked, as the audit calls it: the claim, and for a move which one."""
    return f"move {claim.transition}" if isinstance(claim, Move) else tag(type(claim))


def _subject(claim: AnyClaim) -> str:
    """The object that a claim is about which names it in no field of its own."""
    if isinstance(claim, Apply):
        return key(claim.thing)
    return key_of(claim.kind, claim.name, claim.tenant) if isinstance(claim, Delete) else ""


_FIELDS: Final = ("replica", "name", "node", "lease", "workload", "operation", "holder", "peer")


def _names(claim: type[Claim]) -> tuple[str, str]:
    """What the audit calls a claim, and the field that names its object; empty where each claim must be looked at."""
    field = next((field for field in _FIELDS if field in claim.__struct_fields__), "")
    return ("" if claim is Move else tag(claim)), ("" if claim in (Apply, Delete) else field)


_NAMES: Final = {claim: _names(claim) for claim in CLAIMS}


AUDIT_BATCHES_KEPT: Final = 100_000
OPERATION_BYTES_MAX: Final = 4 << 20
"""Half of what a row may have: a larger claim would be refused by the store, and so end the authority."""

_UNTOLD: Final = WorkloadStatus()
_MISMATCH: Final = Refused(Code.OPERATION_MISMATCH, "the id was used for something else a moment ago")


class Known(NamedTuple):
    """The answer is that of the batch before, once it is recorded."""

    entry: Entry


Answer = Verdict | Entry | Known


class Prepared(NamedTuple):
    """A batch that was decided but not written; `head` is the chain's after it, and `oldest` the oldest batch row then."""

    draft: Draft
    batch: Batch
    entries: Mapping[str, Entry]
    answers: Sequence[Answer]
    puts: Sequence[tuple[str, bytes]]
    deletes: Sequence[str]
    head: Head
    oldest: int


class Ground(NamedTuple):
    """What a batch is decided on. `below` is the batch before it, if that one is still being written."""

    books: Books
    outcomes: Outcomes
    head: Head
    oldest: int
    moment: Moment
    window: int
    wall: str
    below: Prepared | None = None
    replicas_max: int = BATCH_MAX.replicas

    def draft(self) -> Draft:
        return Draft(self.books, self.moment) if self.below is None else self.below.draft.follow(self.moment)


NO_FAULTS: Final[Mapping[str, str]] = MappingProxyType({})
NO_ENTRIES: Final[Mapping[str, Entry]] = MappingProxyType({})


def prepare(ground: Ground, operations: Sequence[Operation], faults: Mapping[str, str] = NO_FAULTS) -> Prepared:
    """Decide operations in their order. Not more than may be in one batch: the rest have no answer, and are for the next.

    `faults` are operations, by id, that are not to be tried again, and why.
    """
    draft, outcomes = ground.draft(), ground.outcomes
    below = NO_ENTRIES if ground.below is None else ground.below.entries
    entries: dict[str, Entry] = {}
    answers: list[Answer] = []
    audited: list[Entry] = []
    most = len(draft.replicas) + ground.replicas_max
    for operation in operations:
        if len(draft.replicas) > most:
            break
        try:
            id_, deed = operation.id, deed_of(operation)
            taken, size = digest(operation)
        except UnicodeEncodeError as error:
            answers.append(Refused(Code.INVALID, f"it has text that is not Unicode: {error.reason}"))
            continue
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the asker's)
            answers.append(refuse(Code.INVALID, f"this is no operation: {type(error).__name__}: {error}"))
            continue
        before = entries.get(id_) or below.get(id_)
        if before is not None and before.digest in ("", taken):
            answers.append(before if id_ in entries else Known(before))
            continue
        known = outcomes.judge(id_, taken) if before is None else _MISMATCH
        if known is not None:
            answers.append(known)
            if isinstance(known, Refused) and not known.revision:
                audited.append(entry_of(operation, deed, taken, known))
            continue
        if size > OPERATION_BYTES_MAX:
            ruled: int | Refused = Refused(Code.LIMIT, f"the operation has {size} bytes; {OPERATION_BYTES_MAX} at most")
        elif isinstance(operation.claim, Abandon):
            ruled = _abandon(ground, draft, operation, operation.claim.operation, entries)
        elif faults and id_ in faults:
            ruled = Refused(Code.FAULT, faults[id_])
        else:
            try:
                ruled = decide(draft, operation)
            except Exception as fault:  # noqa: BLE001  (whatever it is, it must not take the authority with it)
                # Our own bug. The draft may be half written: it is thrown away, and the batch decided without this one.
                return prepare(ground, operations, {**faults, id_: f"{type(fault).__name__}: {fault}"})
        entry = entry_of(operation, deed, taken, ruled)
        entries[id_] = entry
        answers.append(entry)
    return written_out(ground, draft, answers, entries, audited)


def written_out(
    ground: Ground,
    draft: Draft,
    answers: Sequence[Answer] = (),
    entries: Mapping[str, Entry] = NO_ENTRIES,
    audited: Sequence[Entry] = (),
    marker: tuple[str, bytes] | None = None,
) -> Prepared:
    """A draft as the rows that make it true, with the batch's own row and, if given, one more."""
    if ground.below is not None:
        draft.subtract(ground.below.draft)
    puts: list[tuple[str, bytes]] = [] if marker is None else [marker]
    deletes: list[str] = []
    for changes in (draft.replicas, draft.things, draft.notes):
        for name, thing in changes.items():
            if thing is None:
                deletes.append(name)
                continue
            row = encode(thing)
            puts.append((name, row))
            if _surely_readable(thing):
                remember(row, thing)  # whoever shows it in this process has it from here
            else:
                _check_readable(name, row)
    if draft.notes:
        deletes += _too_old(ground, draft)
    sequence = ground.head.sequence + 1
    batch = _batch(ground, (*entries.values(), *audited))
    puts.append((batch_key(sequence), encode_batch(batch)))
    # Two old rows go with each new one, until enough are gone; never one whose outcomes a successor needs.
    last = min(sequence - AUDIT_BATCHES_KEPT, batch.first, ground.oldest + 2)
    deletes += [batch_key(old) for old in range(ground.oldest, last)]
    head = chain.advance(ground.head, puts, deletes)
    return Prepared(draft, batch, entries, answers, puts, deletes, head, max(ground.oldest, last))


def _too_old(ground: Ground, draft: Draft) -> Iterator[str]:
    """Which notes go, so that not more than enough are kept."""
    if len(ground.books.notes) + len(draft.notes) <= NOTES_MAX // 2:
        return
    kept = dict.fromkeys(ground.books.notes)
    for notes in (*(() if ground.below is None else (ground.below.draft.notes,)), draft.notes):
        for name, note in notes.items():
            kept.pop(name, None)
            if note is not None:
                kept[name] = None
    for name in list(islice(kept, max(len(kept) - NOTES_MAX, 0))):
        if name not in draft.notes:
            draft.notes[name] = None
            yield name


def _check_readable(name: str, row: bytes) -> None:
    """Every row must be readable for whoever takes over; a claim that was given by reference was checked by nobody."""
    try:
        decoded(row)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Invalid(f"{name} would not be readable: {error}") from None


def _surely_readable(thing: AnyObject) -> bool:
    """Has no claim put words of its own into it, but such as were judged before?"""
    match thing:
        case Replica(status=status):
            return not (status.result or status.reason or status.devices or status.victims)
        case Workload(spec=spec, metadata=meta, status=status):
            return status == _UNTOLD and not (meta.annotations or meta.owners or meta.finalizers) and is_sound_spec(spec)
        case Generation(spec=spec):
            return is_sound_spec(spec.spec)
    return False


def _batch(ground: Ground, entries: tuple[Entry, ...]) -> Batch:
    sequence = ground.head.sequence + 1
    horizon = ground.outcomes.next_horizon(ground.window)
    # A batch under way is not among those recorded. It need not be: the window of any id it can have executed was announced, so
    # an earlier batch has recorded that window.
    first = ground.outcomes.first(horizon, sequence)
    return Batch(ground.head.epoch, ground.window, horizon, first, ground.wall, entries)


def _abandon(ground: Ground, draft: Draft, operation: Operation, target: str, entries: dict[str, Entry]) -> int | Refused:
    """Unless the target has an outcome, make this its outcome, whatever its payload. Either way the answer is the target's
    own outcome (`Outcomes.record`).
    """
    nobody = Refused(Code.ROLE, "nobody asks as the authority") if operation.actor.role is Role.AUTHORITY else None
    fenced = nobody or claimant(draft, operation.actor)
    if fenced is not None:
        return fenced
    before = entries.get(target) or (None if ground.below is None else ground.below.entries.get(target))
    if before is not None:
        return before.number if not before.code else Refused(Code(before.code), before.detail)
    known = ground.outcomes.known(target)
    if known is not None:
        return known.number if isinstance(known, Accepted) else Refused(known.code, known.detail)
    issued = window_of(target)
    if issued is None:
        return Refused(Code.INVALID, "operation: not an operation id")
    if issued[0] != ground.outcomes.incarnation or issued[1] < ground.outcomes.horizon:
        return Refused(Code.OPERATION_EXPIRED, f"operation {target} is older than the outcomes kept")
    refused = Refused(Code.ABANDONED, f"operation {target} was abandoned")
    entries[target] = Entry(target, "", "abandoned", "", "", "", "", 0, 0, 0, 0, Code.ABANDONED.value, refused.detail, "")
    return refused
