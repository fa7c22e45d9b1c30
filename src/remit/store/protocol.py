"""Store interface, transaction and event types, errors.

Only promises here: memory.py and sqlite.py keep them.

Truth is a map from key to bytes. Each committed transaction gets the next **revision**, shared by every row it changed, so
a revision names one state of the whole map. A transaction is guarded key by key: it applies whole, or not at all.

Failures are of two kinds, and a caller must never confuse them: after most errors nothing was applied; after `Unanswered`
the transaction may have been applied, or may be applied still. `chain.py` says how a writer finds out.
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
"""The key of the writer's chain; see chain.py."""


class Head(msgspec.Struct, frozen=True):
    """Where the writer's chain stands: its last batch, who wrote it, and a digest over it and every batch before it."""

    incarnation: str
    epoch: int
    sequence: int
    holder: str
    count: int
    digest: str


class Span(NamedTuple):
    """Batches `first` to `last` of the chain, which together changed so many `rows` (head rows apart)."""

    first: int
    last: int
    rows: int


class Row(NamedTuple):
    """One key as of one revision; `revision` is that of the transaction which last changed it."""

    key: str
    value: bytes
    revision: int


class Page(NamedTuple):
    """Part of a range. Ask again with `after=rows[-1].key` and this `revision` while `more`: all pages show one state."""

    rows: tuple[Row, ...]
    revision: int
    more: bool


class Guard(NamedTuple):
    """`key` must stand at exactly this revision; 0 means that it must be absent."""

    key: str
    revision: int


class Commit(NamedTuple):
    """One transaction: every guard holds and every change applies, or nothing does. A key may be changed once."""

    guards: Sequence[Guard] = ()
    puts: Sequence[tuple[str, bytes]] = ()
    deletes: Sequence[str] = ()


class Committed(NamedTuple):
    revision: int


class Conflict(NamedTuple):
    """Nothing was applied: these guards did not hold. `found` is the row's revision then, 0 if absent."""

    key: str
    expected: int
    found: int


class Change(NamedTuple):
    """What a transaction did to one key; `value` is None for a deletion."""

    key: str
    value: bytes | None
    revision: int


class Event(NamedTuple):
    """All that happened under a prefix after revision `after`, up to and including `revision`.

    Usually that is one transaction. For a watcher that lags, consecutive ones are folded into one event: the last change of
    each key stays, and `superseded` counts those folded away. `elsewhere` counts changes outside the prefix. `span` and
    `head` tell which batches of the writer's chain are covered, so that a watcher can prove that it missed none
    (`chain.gap`). The head row itself is in none of these counts.
    """

    after: int
    revision: int
    changes: tuple[Change, ...]
    superseded: int
    elsewhere: int
    span: Span | None
    head: Head | None


class Watch(Protocol):
    """An ordered feed of events. Iterating raises `Resync` if this watcher fell too far behind, and `Compacted`."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def close(self) -> None: ...


class Store(Protocol):
    async def get(self, key: str) -> Row | None:
        """The row as of now: linearizable, after every commit that was answered before this call."""
        ...

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        """Rows whose key starts with `prefix`, in key order, past `after`, as of `revision` (0: as of now)."""
        ...

    async def commit(self, commit: Commit) -> Committed | Conflict: ...

    async def watch(self, prefix: str, *, after: int) -> Watch:
        """Every event past revision `after`. Raises `Compacted` if the history since then is gone."""
        ...

    async def compact(self, revision: int) -> None:
        """Forget the history before `revision`: ranges and watches from before it raise `Compacted` from now on."""
        ...

    async def revision(self) -> int: ...

    async def close(self) -> None: ...


class StoreError(Exception):
    """The outside failed. Unless it is `Unanswered`, nothing was applied."""


class Unanswered(StoreError):
    """The answer was lost: the transaction may have been applied, or may be applied later. See `chain.settle`."""


class Unavailable(StoreError):
    """The store cannot serve now; nothing was applied."""


class NoSpace(Unavailable):
    """No room to write; nothing was applied, reads go on. Cure: free space, or compact."""


class ReadOnly(Unavailable):
    """The place cannot be written."""


class Closed(Unavailable):
    """This store was closed."""


class Corrupt(StoreError):
    """What was read is not what was written. Nothing more is written; cure: restore a backup."""


class NewerSchema(StoreError):
    """Written by a newer Remit. Nothing was touched; cure: upgrade this one."""


class Owned(StoreError):
    """Another process owns this store."""

    def __init__(self, place: str, pid: int | None) -> None:
        self.place, self.pid = place, pid
        who = f"process {pid}" if pid else "another process"
        super().__init__(f"{place} is owned by {who}; stop it, or use another --data directory")


class Compacted(StoreError):
    """History before `oldest` is gone. Cure: list anew, then watch from the list's revision."""

    def __init__(self, asked: int, oldest: int) -> None:
        self.asked, self.oldest = asked, oldest
        super().__init__(f"revision {asked} was compacted; the oldest kept is {oldest}: list anew and watch from there")


class Resync(StoreError):
    """This watcher fell too far behind and was dropped. Cure: list anew, then watch from the list's revision."""

    def __init__(self, seen: int, now: int) -> None:
        self.seen, self.now = seen, now
        super().__init__(f"watcher at revision {seen} fell behind {now}: list anew and watch from there")


class Invalid(StoreError):
    """The caller broke the store's rules (a key twice in one commit, a row too large, a future revision)."""
