"""Writer chain: head row, fencing by epoch, digests, settle after a lost answer; head of a restored store.

One head row that every batch compares and advances.

The head is `(incarnation, epoch, sequence)` with the count and digest of the rows that its batch changed. Three things follow:

- **Fencing.** A batch is guarded by the head that its writer last saw. Whoever raises the epoch (`seize`) changes the head, so
  every batch that an older writer still has under way fails its guard, however late it arrives.
- **A lost answer is settled, not guessed.** A read is no barrier: the lost batch may land after it. So the writer commits an
  *empty* batch at the same sequence, guarded by the same head (`settle`). It or the lost one wins, never both; whoever's digest
  stands in the head has won.
- **Gaps show.** Sequences count up by one, each event accounts for every row of its batches, and each digest is taken over
  the digest before it and the rows. A watcher that checks them (`gap`) cannot miss a batch; one that sees every row, unfolded,
  cannot follow a history that forked either.

Only the account of it: restore.py and memory.py do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from remit.store.protocol import HEAD, Commit, Committed, Corrupt, Event, Guard, Head, Store, Unanswered

DIGEST_CHARACTERS = 32
"""Of SHA-256, which processors have instructions for."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Head).decode


class Place(NamedTuple):
    """A head as one reader knows it, with the revision that guards it (0: there is no chain yet)."""

    head: Head
    revision: int


class Deposed(NamedTuple):
    """Somebody else advanced the chain; nothing of ours will be written any more."""

    by: Head


def encode_head(head: Head) -> bytes:
    return _encode(head)


def decode_head(value: bytes) -> Head:
    try:
        return _decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the head row does not decode ({error}); restore a backup") from None


def digest(before: str, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str]) -> str:
    """Over the digest before and every row: a table of all keys and lengths first, so that no two batches share one stream."""
    table = _encode((before, [(key, len(value)) for key, value in puts], deletes))
    return sha256(b"".join([table, *(value for _, value in puts)])).hexdigest()[:DIGEST_CHARACTERS]


def advance(head: Head, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str]) -> Head:
    """The head after a batch that makes these changes."""
    return Head(
        incarnation=head.incarnation,
        epoch=head.epoch,
        sequence=head.sequence + 1,
        holder=head.holder,
        count=len(puts) + len(deletes),
        digest=digest(head.digest, puts, deletes),
    )


def batch(place: Place, head: Head, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str] = ()) -> Commit:
    """The transaction that moves the chain from `place` to `head` and makes the changes `head` was computed from."""
    return Commit(
        guards=(Guard(HEAD, place.revision),),
        puts=(*puts, (HEAD, _encode(head))),
        deletes=deletes,
    )


async def read_place(store: Store) -> Place | None:
    row = await store.get(HEAD)
    return None if row is None else Place(decode_head(row.value), row.revision)


async def seize(store: Store, holder: str, incarnation: str) -> Place:
    """Raise the epoch: from here on every older writer is fenced. `incarnation` names the chain if it starts here.

    Losing a race here is harmless: the epoch is raised again over whatever stands. It ends because each round either wins or
    follows another's progress. If an answer was lost and that very head is found in place, that was it, and it need not be
    raised once more. That is why no two that live may have one `holder` name.
    """
    lost: Head | None = None
    while True:
        place = await read_place(store)
        if place is not None and place.head == lost:
            return place
        if place is None:
            place = Place(Head(incarnation, 0, 0, "", 0, ""), 0)
        old = place.head
        head = Head(
            incarnation=old.incarnation,
            epoch=old.epoch + 1,
            sequence=old.sequence + 1,
            holder=holder,
            count=0,
            digest=_seized(old, old.epoch + 1, holder),
        )
        try:
            answer = await store.commit(batch(place, head, ()))
        except Unanswered:
            lost = head
            continue
        if isinstance(answer, Committed):
            return Place(head, answer.revision)


async def settle(store: Store, place: Place, lost: Head) -> Place | Deposed:
    """After a lost answer: has `lost` landed on `place`? Answers the place where the chain now stands.

    If it is `lost`, that batch is in; if it is another head of the same epoch and sequence, it is the empty batch, and the
    lost one can never land. Raises `Unanswered` never: it asks until it knows; `Unavailable` passes through.
    """
    empty = advance(place.head, (), ())
    while True:
        try:
            answer = await store.commit(batch(place, empty, ()))
        except Unanswered:
            continue
        if isinstance(answer, Committed):
            return Place(empty, answer.revision)
        now = await read_place(store)
        if now is None:
            raise Corrupt("the head row is gone; restore a backup")
        if now.head in (lost, empty):
            return now
        return Deposed(now.head)


def gap(seen: Head, event: Event) -> str | None:
    """Why does `event` not follow from `seen` without a break? None if it does. The cure for any gap is to list anew."""
    if event.span is None or event.head is None:
        return "it carries no head"
    if event.head.incarnation != seen.incarnation:
        return f"the scope was restored: incarnation {seen.incarnation} became {event.head.incarnation}"
    if event.span.first != seen.sequence + 1:
        return f"it starts at sequence {event.span.first}, {seen.sequence + 1} was due"
    if event.head.epoch < seen.epoch:
        return f"its epoch {event.head.epoch} is older than {seen.epoch}"
    rows = len(event.changes) + event.superseded + event.elsewhere
    if rows != event.span.rows or event.span.last != event.head.sequence:
        return f"it accounts for {rows} rows of {event.span.rows}, up to {event.span.last} of {event.head.sequence}"
    whole = event.span.first == event.span.last and not event.superseded and not event.elsewhere
    if whole and event.head.digest != _due(seen, event):
        return f"the digest of sequence {event.head.sequence} is not that of its rows after {seen.sequence}"
    return None


def _due(seen: Head, event: Event) -> str:
    """The digest that an event should have which shows one whole batch."""
    head = event.head
    if head is not None and head.epoch != seen.epoch:
        return _seized(seen, head.epoch, head.holder)
    puts = [(change.key, change.value) for change in event.changes if change.value is not None]
    return digest(seen.digest, puts, [change.key for change in event.changes if change.value is None])


def _seized(before: Head, epoch: int, holder: str) -> str:
    """A takeover changes no rows; its digest is over who took over, and after what."""
    return digest(f"{before.digest} {epoch} {holder}", (), ())


CHANGED_KEYS_MAX = 10_000
RESTORER = "restore"


class Replaced(NamedTuple):
    """The store that the backup took the place of. Its file is kept at `kept_at`; nothing in it was changed.

    `revision` is None if it could not be read, and `unreadable` says why. Otherwise `changed` are keys that it changed after
    the backup's revision, in key order and at most `CHANGED_KEYS_MAX`: what was acknowledged and is not in the backup.
    `changed_count` counts all of them.
    """

    kept_at: str
    revision: int | None
    head: Head | None
    changed: tuple[str, ...]
    changed_count: int
    unreadable: str


class Restored(NamedTuple):
    """`backup_revision` and `backup_head` are where the backup stood; `revision` and `head` where the store stands now."""

    backup_revision: int
    backup_head: Head | None
    revision: int
    head: Head
    replaced: Replaced | None


def next_revision(backup_revision: int, replaced: Replaced | None) -> int:
    """Past everything that either store ever answered, so that no revision means two states to a client that kept one."""
    return max(backup_revision, (replaced.revision or 0) if replaced else 0) + 1


def reborn_head(backup: Head | None, replaced: Replaced | None, incarnation: str) -> Head:
    """The first head of the new incarnation: the sequence goes on, and the epoch is above that of every earlier writer. It is
    one more than a takeover would make it, so that it shows that this was none, also where there is nothing else to see.
    """
    old = backup or Head(incarnation, 0, 0, "", 0, "")
    other = replaced.head if replaced else None
    epoch = max(old.epoch, other.epoch if other else 0) + 2
    return Head(
        incarnation=incarnation,
        epoch=epoch,
        sequence=old.sequence + 1,
        holder=RESTORER,
        count=0,
        digest=digest(f"{old.digest} {incarnation} {epoch} {RESTORER}", (), ()),
    )
