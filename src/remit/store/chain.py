"""Writer chain: head row, fencing by epoch, digests, settle after a lost answer; head of a restored store.

The head is one row that every batch compares and advances: `(incarnation, epoch, sequence)` with the number of rows that its
batch changed and a digest. Three properties follow:

- **Fencing.** A batch is guarded by the head that its writer last saw. Raising the epoch (`raise_epoch`) changes the head, so
  every batch that an older writer still has in flight fails its guard, however late it arrives.
- **A lost answer is settled, not guessed.** A read is no barrier: the lost batch may be applied after it. So the writer
  commits an *empty* batch at the same sequence, guarded by the same head (`settle`). Either that one or the lost one is
  applied, never both; the digest in the head shows which.
- **Gaps are detected.** Sequences increase by one, each event accounts for every row of its batches, and each digest covers
  the previous digest and the rows. A watcher that checks them (`gap`) cannot miss a batch; one that receives every row,
  unfolded, also notices a forked history.

The types of a restore are defined here too; sqlite/backup.py and memory.py perform it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from remit.store.protocol import HEAD, Commit, CommitOutcomeUnknown, Committed, Corrupt, Guard, Head, Store, WatchEvent

DIGEST_CHARACTERS = 32
"""Truncated SHA-256, which CPUs have instructions for."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Head).decode


class ChainPosition(NamedTuple):
    """A head as one reader knows it, with the revision of its row, which guards the next batch (0: there is no chain yet)."""

    head: Head
    revision: int


class FencedOut(NamedTuple):
    """Another writer advanced the chain (to `head`); no batch of this writer will be applied any more."""

    head: Head


def encode_head(head: Head) -> bytes:
    return _encode(head)


def decode_head(value: bytes) -> Head:
    try:
        return _decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the head row cannot be decoded ({error}); restore a backup") from None


def digest(before: str, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str]) -> str:
    """Digest of a batch: the previous digest, a table of all keys and lengths, then the values.

    With the table first, no two different batches produce the same byte stream.
    """
    table = _encode((before, [(key, len(value)) for key, value in puts], deletes))
    return sha256(b"".join([table, *(value for _, value in puts)])).hexdigest()[:DIGEST_CHARACTERS]


def advance(head: Head, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str]) -> Head:
    """Return the head after a batch with these changes."""
    return Head(
        incarnation=head.incarnation,
        epoch=head.epoch,
        sequence=head.sequence + 1,
        holder=head.holder,
        count=len(puts) + len(deletes),
        digest=digest(head.digest, puts, deletes),
    )


def batch(position: ChainPosition, head: Head, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str] = ()) -> Commit:
    """Return the transaction that moves the chain from `position` to `head`. `head` must be computed from the same changes."""
    return Commit(
        guards=(Guard(HEAD, position.revision),),
        puts=(*puts, (HEAD, _encode(head))),
        deletes=deletes,
    )


async def read_position(store: Store) -> ChainPosition | None:
    row = await store.get(HEAD)
    return None if row is None else ChainPosition(decode_head(row.value), row.revision)


async def raise_epoch(store: Store, holder: str, incarnation: str) -> ChainPosition:
    """Raise the epoch, which fences every older writer. `incarnation` names the chain if it starts here.

    Losing a race is harmless: the epoch is raised again over the current head, and each round either wins or follows the
    progress of another writer. If an answer was lost and the head of that attempt is found in place, the attempt succeeded
    and is not repeated. This requires that no two live writers have the same `holder` name.
    """
    lost: Head | None = None
    while True:
        position = await read_position(store)
        if position is not None and position.head == lost:
            return position
        if position is None:
            position = ChainPosition(Head(incarnation, 0, 0, "", 0, ""), 0)
        old = position.head
        head = Head(
            incarnation=old.incarnation,
            epoch=old.epoch + 1,
            sequence=old.sequence + 1,
            holder=holder,
            count=0,
            digest=_takeover_digest(old, old.epoch + 1, holder),
        )
        try:
            answer = await store.commit(batch(position, head, ()))
        except CommitOutcomeUnknown:
            lost = head
            continue
        if isinstance(answer, Committed):
            return ChainPosition(head, answer.revision)


async def settle(store: Store, position: ChainPosition, lost: Head) -> ChainPosition | FencedOut:
    """After a lost answer, find out whether batch `lost` was applied to `position`. Returns where the chain is now.

    If the returned head is `lost`, that batch was applied. If it is another head of the same epoch and sequence, it is the
    empty batch, and the lost one can never be applied. `CommitOutcomeUnknown` is retried here; `Unavailable` is passed on.
    """
    empty = advance(position.head, (), ())
    while True:
        try:
            answer = await store.commit(batch(position, empty, ()))
        except CommitOutcomeUnknown:
            continue  # safe to repeat: all attempts have one guard, so at most one of them is applied
        if isinstance(answer, Committed):
            return ChainPosition(empty, answer.revision)
        now = await read_position(store)
        if now is None:
            raise Corrupt("the head row is missing; restore a backup")
        if now.head in (lost, empty):  # `empty`: an earlier attempt of this loop whose answer was lost
            return now
        return FencedOut(now.head)


def gap(seen: Head, event: WatchEvent) -> str | None:
    """Return why `event` does not follow `seen` without a break; None if it does. After any gap the watcher must relist."""
    if event.span is None or event.head is None:
        return "the event carries no head"
    if event.head.incarnation != seen.incarnation:
        return f"the scope was restored: incarnation {seen.incarnation} became {event.head.incarnation}"
    if event.span.first != seen.sequence + 1:
        return f"it starts at sequence {event.span.first}, expected {seen.sequence + 1}"
    if event.head.epoch < seen.epoch:
        return f"its epoch {event.head.epoch} is older than {seen.epoch}"
    rows = len(event.changes) + event.superseded + event.elsewhere
    if rows != event.span.rows or event.span.last != event.head.sequence:
        return f"it accounts for {rows} rows of {event.span.rows}, up to {event.span.last} of {event.head.sequence}"
    # A digest covers all rows of a batch, so it can be computed only if the event was neither folded nor filtered.
    complete = event.span.first == event.span.last and not event.superseded and not event.elsewhere
    if complete and event.head.digest != _expected_digest(seen, event):
        return f"the digest of sequence {event.head.sequence} does not match its rows after {seen.sequence}"
    return None


def _expected_digest(seen: Head, event: WatchEvent) -> str:
    """Return the digest that an event of one complete batch must have."""
    head = event.head
    if head is not None and head.epoch != seen.epoch:
        return _takeover_digest(seen, head.epoch, head.holder)
    puts = [(change.key, change.value) for change in event.changes if change.value is not None]
    return digest(seen.digest, puts, [change.key for change in event.changes if change.value is None])


def _takeover_digest(before: Head, epoch: int, holder: str) -> str:
    """A takeover changes no rows; its digest covers the previous digest, the new epoch and the holder."""
    return digest(f"{before.digest} {epoch} {holder}", (), ())


CHANGED_KEYS_MAX = 10_000
RESTORE_HOLDER = "restore"


class ReplacedStore(NamedTuple):
    """The store that a restored backup has replaced. Its file is kept unchanged at `kept_at`.

    `revision` is None if it could not be read; then `unreadable` is the reason. Otherwise `changed` lists keys that it changed
    after the backup's revision, in key order and at most `CHANGED_KEYS_MAX`: acknowledged changes that are not in the
    backup. `changed_count` counts all of them.
    """

    kept_at: str
    revision: int | None
    head: Head | None
    changed: tuple[str, ...]
    changed_count: int
    unreadable: str


class RestoreReport(NamedTuple):
    """`backup_revision` and `backup_head` are the position of the backup; `revision` and `head` that of the restored store."""

    backup_revision: int
    backup_head: Head | None
    revision: int
    head: Head
    replaced: ReplacedStore | None


def next_revision(backup_revision: int, replaced: ReplacedStore | None) -> int:
    """Return a revision above all that either store has ever returned, so that a revision never names two states."""
    return max(backup_revision, (replaced.revision or 0) if replaced else 0) + 1


def head_after_restore(backup: Head | None, replaced: ReplacedStore | None, incarnation: str) -> Head:
    """Return the first head of the new incarnation.

    The sequence continues, and the epoch is above that of every earlier writer. It is raised by 2, one more than a takeover
    does, so that a restore can be recognised by the epoch alone.
    """
    old = backup or Head(incarnation, 0, 0, "", 0, "")
    other = replaced.head if replaced else None
    epoch = max(old.epoch, other.epoch if other else 0) + 2
    return Head(
        incarnation=incarnation,
        epoch=epoch,
        sequence=old.sequence + 1,
        holder=RESTORE_HOLDER,
        count=0,
        digest=digest(f"{old.digest} {incarnation} {epoch} {RESTORE_HOLDER}", (), ()),
    )
