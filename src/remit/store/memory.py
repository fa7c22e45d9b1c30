"""In-memory store for tests and simulation.

It does no I/O and never waits: each request is one step of the event loop, so it is linearizable. Several authorities may
share one instance. History is kept until it is compacted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from remit.store.chain import (
    CHANGED_KEYS_MAX,
    ReplacedStore,
    RestoreReport,
    decode_head,
    encode_head,
    head_after_restore,
    next_revision,
)
from remit.store.keys import KeyOrder, check_commit, check_key, check_range, check_revision, prefix_end, range_start
from remit.store.protocol import (
    HEAD,
    Commit,
    Committed,
    Compacted,
    Conflict,
    Head,
    Invalid,
    Page,
    Row,
    RowChange,
    StoreClosed,
    Watch,
)
from remit.store.watch_feed import FeedLimits, Transaction, WatchFeed

_REPLAY_TRANSACTIONS = 1_024


class MemoryBackup(NamedTuple):
    """A backup: every row as of `revision`."""

    revision: int
    rows: tuple[Row, ...]


class MemoryStore:
    def __init__(self, limits: FeedLimits = FeedLimits()) -> None:
        self._versions: dict[str, list[RowChange]] = {}
        self._order = KeyOrder()
        self._log: list[Transaction] = []
        self._log_floor = 0
        self._revision = self._compacted = 0
        self._limits = limits
        self._feed = WatchFeed(0, limits)
        self._closed = False

    async def get(self, key: str) -> Row | None:
        check_key(key)
        self._check_open()
        return self._row(key, self._revision)

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        check_range(prefix, after, limit)
        self._check_open()
        if revision:
            check_revision(revision, compacted=self._compacted, now=self._revision)
        at = revision or self._revision
        rows: list[Row] = []
        for key in self._order.walk(range_start(prefix, after), prefix_end(prefix)):
            if (row := self._row(key, at)) is not None:
                if len(rows) == limit:
                    return Page(tuple(rows), at, more=True)
                rows.append(row)
        return Page(tuple(rows), at, more=False)

    async def commit(self, commit: Commit) -> Committed | Conflict:
        check_commit(commit)
        self._check_open()
        for guard in commit.guards:
            row = self._row(guard.key, self._revision)
            found = row.revision if row else 0
            if found != guard.revision:
                return Conflict(guard.key, guard.revision, found)
        revision = self._revision + 1
        changes = [RowChange(key, value, revision) for key, value in commit.puts]
        changes += [RowChange(key, None, revision) for key in commit.deletes]
        self._apply(Transaction(revision, changes), changes)
        return Committed(revision)

    async def watch(self, prefix: str, *, after: int) -> Watch:
        check_range(prefix, "", 1)
        self._check_open()
        check_revision(after, compacted=self._compacted, now=self._revision)
        return self._feed.watch(prefix, after, self._replay)

    async def compact(self, revision: int) -> None:
        self._check_open()
        if revision < 0 or revision > self._revision:
            raise Invalid(f"cannot compact at {revision}; the store is at {self._revision}")
        if revision <= self._compacted:
            return
        self._compacted = revision
        for transaction in self._log[: revision - self._log_floor]:
            for change in transaction.changes:
                self._drop_old_versions(change.key)
            if transaction.head is not None:
                self._drop_old_versions(HEAD)
        del self._log[: revision - self._log_floor]
        self._log_floor = revision
        self._order.reset(self._versions)

    async def revision(self) -> int:
        self._check_open()
        return self._revision

    async def close(self) -> None:
        self._closed = True
        self._feed.close()

    async def backup(self) -> MemoryBackup:
        self._check_open()
        keys = self._order.walk("", None)
        rows = tuple(row for key in keys if (row := self._row(key, self._revision)) is not None)
        return MemoryBackup(self._revision, rows)

    @classmethod
    def restore(
        cls, backup: MemoryBackup, *, incarnation: str, replacing: MemoryStore | None = None, limits: FeedLimits = FeedLimits()
    ) -> tuple[MemoryStore, RestoreReport]:
        """Return a new store with the content of `backup`, in a new incarnation. `replacing` is not changed."""
        store = cls(limits)
        head: Head | None = None
        for row in backup.rows:
            store._versions[row.key] = [RowChange(*row)]
            if row.key == HEAD:
                head = decode_head(row.value)
        replaced = replacing._changed_since(backup) if replacing is not None else None
        new_head, revision = head_after_restore(head, replaced, incarnation), next_revision(backup.revision, replaced)
        store._versions.setdefault(HEAD, []).append(RowChange(HEAD, encode_head(new_head), revision))
        store._order.reset(store._versions)
        # Older revisions cannot be read: those after the backup's never existed in this store.
        store._revision = store._compacted = store._log_floor = revision
        store._feed = WatchFeed(revision, limits)
        return store, RestoreReport(backup.revision, head, revision, new_head, replaced)

    def _changed_since(self, backup: MemoryBackup) -> ReplacedStore:
        """Describe this store as replaced. Compaction drops deletions, so keys of the backup that are unknown here were
        deleted.
        """
        changed = [key for key, versions in self._versions.items() if key != HEAD and versions[-1].revision > backup.revision]
        changed += [row.key for row in backup.rows if row.key not in self._versions]
        changed.sort()
        row = self._row(HEAD, self._revision)
        head = decode_head(row.value) if row else None
        return ReplacedStore("memory", self._revision, head, tuple(changed[:CHANGED_KEYS_MAX]), len(changed), "")

    def _apply(self, transaction: Transaction, changes: Sequence[RowChange]) -> None:
        new_keys = [change.key for change in changes if change.key not in self._versions]
        for change in changes:
            self._versions.setdefault(change.key, []).append(change)
        self._order.add(new_keys)
        self._log.append(transaction)
        self._revision = transaction.revision
        self._feed.publish((transaction,))

    def _row(self, key: str, revision: int) -> Row | None:
        versions = self._versions.get(key)
        if versions is None:
            return None
        index = bisect_left(versions, revision + 1, key=_revision_of) - 1
        if index < 0 or (value := versions[index].value) is None:
            return None
        return Row(key, value, versions[index].revision)

    def _drop_old_versions(self, key: str) -> None:
        """Drop the versions of `key` that cannot be read at or after the compacted revision."""
        versions = self._versions.get(key)
        if versions is None:
            return
        keep = max(0, bisect_left(versions, self._compacted + 1, key=_revision_of) - 1)
        if versions[keep].value is None and versions[keep].revision <= self._compacted:
            keep += 1
        del versions[:keep]
        if not versions:
            del self._versions[key]

    async def _replay(self, after: int) -> Sequence[Transaction]:
        self._check_open()
        if after < self._compacted:
            raise Compacted(after, self._compacted)
        start = after - self._log_floor
        return self._log[start : start + _REPLAY_TRANSACTIONS]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")


def _revision_of(change: RowChange) -> int:
    return change.revision
