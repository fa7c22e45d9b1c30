"""Store interface, transaction and event types, errors. memory.py and sqlite/ implement it.

A store is a map from key to bytes. Each committed transaction gets the next **revision**, which all rows it changed share,
so a revision names one state of the whole map. A transaction is guarded key by key: it applies completely, or not at all.

Callers must tell two kinds of failure apart. After most errors nothing was applied. After `CommitOutcomeUnknown` the
transaction may have been applied, or may still be; chain.py describes how a writer finds out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

KEY_BYTES_MAX = 512
VALUE_BYTES_MAX = 8 << 20
ROWS_PER_COMMIT_MAX = 1 << 16
PAGE_ROWS_MAX = 10_000


HEAD = "head"
"""Key of the head row of the writer chain; see chain.py."""


class Head(msgspec.Struct, frozen=True):
    """Position of the writer chain: its last batch, the writer (`holder`), and a digest over this batch and all before it."""

    incarnation: str
    epoch: int
    sequence: int
    holder: str
    count: int
    digest: str


class Span(NamedTuple):
    """Batches `first` to `last` of the chain, which together changed `rows` rows (head rows not counted)."""

    first: int
    last: int
    rows: int


class Row(NamedTuple):
    """A key with its value; `revision` is that of the transaction which last changed it."""

    key: str
    value: bytes
    revision: int


class Page(NamedTuple):
    """Part of a range. If `more`, continue with `after=rows[-1].key` and this `revision`: all pages show the same state."""

    rows: tuple[Row, ...]
    revision: int
    more: bool


class Guard(NamedTuple):
    """Condition of a transaction: `key` must be at exactly this revision; 0 means that it must not exist."""

    key: str
    revision: int


class Commit(NamedTuple):
    """One transaction: all guards hold and all changes apply, or nothing does. A key may be changed only once."""

    guards: Sequence[Guard] = ()
    puts: Sequence[tuple[str, bytes]] = ()
    deletes: Sequence[str] = ()


class Committed(NamedTuple):
    revision: int


class Conflict(NamedTuple):
    """Nothing was applied: this guard did not hold. `found` is the row's current revision, 0 if it does not exist."""

    key: str
    expected: int
    found: int


class RowChange(NamedTuple):
    """Change of one key by a transaction; `value` is None for a deletion."""

    key: str
    value: bytes | None
    revision: int


class WatchEvent(NamedTuple):
    """Everything that happened under a prefix after revision `after`, up to and including `revision`.

    Usually that is one transaction. For a slow watcher, consecutive transactions are folded into one event: it has the last
    change of each key, and `superseded` counts the dropped ones. `elsewhere` counts changes outside the prefix. `span` and
    `head` tell which batches of the writer chain are covered, so that a watcher can prove that it missed none (`chain.gap`).
    The head row itself is not counted.
    """

    after: int
    revision: int
    changes: tuple[RowChange, ...]
    superseded: int
    elsewhere: int
    span: Span | None
    head: Head | None


class Watch(Protocol):
    """An ordered feed of events. Iteration raises `Resync` if this watcher fell too far behind, and `Compacted`."""

    def __aiter__(self) -> AsyncIterator[WatchEvent]: ...

    async def close(self) -> None: ...


class Store(Protocol):
    async def get(self, key: str) -> Row | None:
        """Return the current row. Linearizable: it reflects every commit that was answered before this call."""
        ...

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        """Return rows whose key starts with `prefix`, in key order, after key `after`, as of `revision` (0: current)."""
        ...

    async def commit(self, commit: Commit) -> Committed | Conflict: ...

    async def watch(self, prefix: str, *, after: int) -> Watch:
        """Watch all events after revision `after`. Raises `Compacted` if that history is gone."""
        ...

    async def compact(self, revision: int) -> None:
        """Drop the history before `revision`: ranges and watches from before it raise `Compacted` from now on."""
        ...

    async def revision(self) -> int: ...

    async def close(self) -> None: ...


class StoreError(Exception):
    """A store operation failed. Nothing was applied, except after `CommitOutcomeUnknown`."""


class CommitOutcomeUnknown(StoreError):
    """The answer was lost: the transaction may have been applied, or may be applied later. See `chain.settle`."""


class Unavailable(StoreError):
    """The store cannot serve now; nothing was applied."""


class NoSpace(Unavailable):
    """The disk is full; nothing was applied, and reads still work. Fix: free space, or compact."""


class ReadOnly(Unavailable):
    """The data directory cannot be written."""


class StoreClosed(Unavailable):
    """The store is closed."""


class Corrupt(StoreError):
    """The data read is not what was written. The store accepts no more writes. Fix: restore a backup."""


class NewerSchema(StoreError):
    """The store was written by a newer version of Remit, and was left unchanged. Fix: upgrade this program."""


class StoreInUse(StoreError):
    """Another process owns this store."""

    def __init__(self, path: str, pid: int | None) -> None:
        self.path, self.pid = path, pid
        who = f"process {pid}" if pid else "another process"
        super().__init__(f"{path} is in use by {who}; stop it, or use another --data directory")


class Compacted(StoreError):
    """History before `oldest` is gone. Fix: list again, then watch from the list's revision."""

    def __init__(self, revision: int, oldest: int) -> None:
        self.revision, self.oldest = revision, oldest
        super().__init__(f"revision {revision} is compacted, the oldest available is {oldest}; list again and watch from there")


class Resync(StoreError):
    """This watcher fell too far behind and was dropped. Fix: list again, then watch from the list's revision."""

    def __init__(self, seen: int, now: int) -> None:
        self.seen, self.now = seen, now
        super().__init__(f"watcher at revision {seen} fell too far behind {now}; list again and watch from there")


class Invalid(StoreError):
    """The request is invalid (a key twice in one commit, a row too large, a future revision). A bug of the caller."""
