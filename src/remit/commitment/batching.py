"""What does one batch say? Operations decided in their order, on what is committed and what is being written. No I/O here.

A batch may be decided while the one before it is still being written. Then it is decided on top of that one's draft, and holds
only what it changed itself; it is written only after that one was, and thrown away if that one was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from remit.commitment.auditing import deed_of, entry_of
from remit.commitment.books import NOTES_MAX, Books, Moment
from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.commitment.leasing import claimant
from remit.commitment.outcomes import Batch, Entry, Outcomes, batch_key, digest, encode_batch
from remit.commitment.queueing import BATCH_MAX
from remit.commitment.rulings import refuse
from remit.model.claims import Abandon, Accepted, Code, Operation, Refused, Role, Verdict, window_of
from remit.model.kinds import Workload, WorkloadStatus
from remit.model.objects import AnyObject, decoded, encode, remember
from remit.model.records import Generation, Replica
from remit.model.soundness import is_sound_spec
from remit.store import chain
from remit.store.protocol import Head, Invalid

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
