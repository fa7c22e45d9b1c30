"""What did a restore bring back, and what did it set aside? Only the account of it: restore.py and memory.py do it."""

from __future__ import annotations

from typing import NamedTuple

from remit.store.chain import digest
from remit.store.protocol import Head

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
