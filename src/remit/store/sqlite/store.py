"""SQLite store: group commit and event-loop side.

Commits that arrive while one is being written wait together and are written as one group: one SQLite transaction and one
fsync, however many there are. Each gets its own revision and is answered only after that fsync. database_file.py does all
blocking work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from remit.model.counters import SECONDS_BUCKETS, SIZE_BUCKETS, Histogram
from remit.store import chain
from remit.store.keys import check_commit, check_key, check_range, check_revision
from remit.store.protocol import (
    Commit,
    CommitOutcomeUnknown,
    Committed,
    Conflict,
    Invalid,
    Page,
    Row,
    StoreClosed,
    StoreError,
    Watch,
)
from remit.store.sqlite.database_file import FILE_NAME, DatabaseFile, GroupResult, create_database, first_id
from remit.store.sqlite.directory_lock import DirectoryLock, translating_errors
from remit.store.sqlite.maintenance import BackupCopy, BackupResult, Maintenance, set_compacted, sweep
from remit.store.watch_feed import FeedLimits, Transaction, WatchFeed

T = TypeVar("T")


class StoreOffload(Protocol):
    """Runs `work` in a thread, one item at a time, in the order of the calls.

    The order makes reads linearizable: a read requested after a commit was answered runs after it. Running two items at once
    would let two threads use one connection.
    """

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


GROUP_ROWS_MAX = 4_096
GROUP_BYTES_MAX = 4 << 20
_REPLAY_ROWS = 4_096
_SWEPT = object()

Answer = asyncio.Future[Committed | Conflict]


class _PendingCommit(NamedTuple):
    commit: Commit
    answer: Answer


class _OpenFiles(NamedTuple):
    owner: DirectoryLock
    file: DatabaseFile


class SqliteStore:
    """Created by `open`. `position` is the chain position after `open` raised the epoch, which fences older writers."""

    position: chain.ChainPosition

    def __init__(
        self, files: _OpenFiles, offload: StoreOffload, limits: FeedLimits, stopwatch_ns: Callable[[], int] | None = None
    ) -> None:
        self._lock, self._file = files
        self._stopwatch_ns = stopwatch_ns
        self.writes, self.groups = Histogram(SECONDS_BUCKETS), Histogram(SIZE_BUCKETS)
        """Duration of writing a group, including one fsync, and its number of rows."""
        self._offload = offload
        self._maintenance = Maintenance(self._file)
        self._feed = WatchFeed(self._file.revision, limits)
        self._queue: deque[_PendingCommit] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._compacting = asyncio.Lock()
        self._backing_up = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        offload: StoreOffload,
        holder: str,
        incarnation: str,
        limits: FeedLimits = FeedLimits(),
        stopwatch_ns: Callable[[], int] | None = None,
    ) -> SqliteStore:
        """Lock `directory`, open or create its store, and raise the epoch as `holder`.

        `incarnation` names the chain if it starts here. With `stopwatch_ns`, writes are timed.
        """
        store = cls(await offload(lambda: _open(directory)), offload, limits, stopwatch_ns)
        try:
            store.position = await chain.raise_epoch(store, holder, incarnation)
        except BaseException:
            await store.close()
            raise
        return store

    async def get(self, key: str) -> Row | None:
        check_key(key)
        self._check_open()
        return await self._offload(lambda: self._file.get(key))

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        check_range(prefix, after, limit)
        self._check_open()
        if revision < 0:
            raise Invalid(f"revision {revision} does not exist")
        return await self._offload(lambda: self._file.range(prefix, after, limit, revision))

    async def commit(self, commit: Commit) -> Committed | Conflict:
        check_commit(commit)
        self._check_open()
        answer: Answer = asyncio.get_running_loop().create_future()
        self._queue.append(_PendingCommit(commit, answer))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="store writer")
        return await answer

    async def watch(self, prefix: str, *, after: int) -> Watch:
        check_range(prefix, "", 1)
        self._check_open()
        check_revision(after, compacted=self._file.compacted, now=self._file.revision)
        return self._feed.watch(prefix, after, self._replay)

    async def compact(self, revision: int) -> None:
        """Compact in slices, between which commits continue. If interrupted, the next call continues where it ended."""
        async with self._compacting:
            self._check_open()
            if revision < 0 or revision > self._file.revision:
                raise Invalid(f"cannot compact at {revision}; the store is at {self._file.revision}")
            if revision > self._file.compacted:
                await self._offload(lambda: set_compacted(self._file, revision))
            below = first_id(self._file.compacted + 1)
            while not await self._offload(lambda: self._maintenance.index_below(below)):
                self._check_open()
            slices = sweep(self._file)
            while await self._offload(lambda: next(slices, _SWEPT)) is not _SWEPT:
                self._check_open()

    async def revision(self) -> int:
        self._check_open()
        return await self._offload(lambda: self._file.revision)

    async def backup(self, path: Path) -> BackupResult:
        """Write a consistent copy to `path` while the store runs. It is renamed to `path` only when it is complete."""
        async with self._backing_up:
            self._check_open()
            copy = await self._offload(lambda: BackupCopy(self._file, path))
            try:
                while (backup := await self._offload(copy.step)) is None:
                    self._check_open()
                return backup
            finally:
                await self._offload(copy.discard)

    @property
    def directory(self) -> Path:
        return self._file.path.parent

    @property
    def is_backing_up(self) -> bool:
        return self._backing_up.locked()

    def size_bytes(self) -> int:
        """Return the size of the database and its write-ahead log on disk. Blocks briefly."""
        path = self._file.path
        return sum(part.stat().st_size for part in (path, path.with_name(path.name + "-wal")) if part.exists())

    async def close(self) -> None:
        """Finish the accepted commits, then release the file and the directory."""
        if self._closed:
            return
        self._closed = True
        self._feed.close()
        if self._writer is not None:
            await self._writer
        # A running compaction or backup notices between its slices, and must end before the file is closed.
        async with self._compacting, self._backing_up:
            try:
                await self._offload(self._file.close)
            finally:
                self._lock.release()

    async def _write_all(self) -> None:
        """Write groups while commits wait. There is one such task at a time; `close` waits for it."""
        try:
            while self._queue:
                group = self._next_group()
                await self._write(group)
                if self._maintenance.is_due():
                    await self._maintain(sum(len(pending.commit.puts) + len(pending.commit.deletes) for pending in group))
        finally:
            self._writer = None
            # Commits are left only if the writer failed or was cancelled. They were not written; end the wait of their callers.
            for queued in self._queue:
                queued.answer.cancel()
            self._queue.clear()

    def _next_group(self) -> list[_PendingCommit]:
        """Take waiting commits up to a bound: an unbounded group would make its first member wait for its last.

        Commits whose caller was cancelled while waiting are skipped: no caller would receive their result.
        """
        group: list[_PendingCommit] = []
        rows = size = 0
        while self._queue and rows < GROUP_ROWS_MAX and size < GROUP_BYTES_MAX:
            pending = self._queue.popleft()
            if not pending.answer.done():
                group.append(pending)
                rows += len(pending.commit.puts) + len(pending.commit.deletes)
                size += sum(len(value) for _, value in pending.commit.puts)
        return group

    async def _write(self, group: Sequence[_PendingCommit]) -> None:
        commits = [pending.commit for pending in group]
        try:
            written: GroupResult = await self._offload(lambda: self._write_timed(commits))
        except StoreError as error:
            for pending in group:
                if not pending.answer.done():
                    pending.answer.set_exception(_copy_of(error))
            return
        except BaseException as error:
            # Cancelled, or a bug: it is unknown here whether the group was written.
            for pending in group:
                if not pending.answer.done():
                    pending.answer.set_exception(
                        CommitOutcomeUnknown(f"the store's writer was stopped ({error!r}); settle the commit")
                    )
            raise
        self._feed.publish(written.transactions)
        for pending, outcome in zip(group, written.outcomes, strict=True):
            if not pending.answer.done():
                pending.answer.set_result(outcome)

    def _write_timed(self, commits: Sequence[Commit]) -> GroupResult:
        """Write and measure in the writer's thread, so that waiting for the thread is not measured."""
        if self._stopwatch_ns is None:
            return self._file.write(commits)
        began_ns = self._stopwatch_ns()
        written = self._file.write(commits)
        self.writes.add((self._stopwatch_ns() - began_ns) / 1e9)
        self.groups.add(sum(len(transaction.changes) for transaction in written.transactions))
        return written

    async def _maintain(self, rows: int) -> None:
        try:
            await self._offload(lambda: self._maintenance.step(rows))
        except StoreError:
            # Maintenance may fail without harm: the log has everything. The cause shows in the next commit: damage is recorded
            # in the file, and commits stop when the write-ahead log cannot be checkpointed below its bound.
            return

    async def _replay(self, after: int) -> Sequence[Transaction]:
        self._check_open()
        return await self._offload(lambda: self._file.replay(after, _REPLAY_ROWS))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed; open it again")


def _open(directory: Path) -> _OpenFiles:
    owner = DirectoryLock(directory)
    try:
        path = directory / FILE_NAME
        with translating_errors(path):
            missing = not path.exists()
        if missing:
            create_database(path)
        return _OpenFiles(owner, DatabaseFile(path))
    except BaseException:
        owner.release()
        raise


def _copy_of(error: StoreError) -> StoreError:
    """Return a copy per waiter: raising one exception object in several tasks would mix their tracebacks."""
    copy = type(error)(str(error))
    copy.__cause__ = error
    return copy
