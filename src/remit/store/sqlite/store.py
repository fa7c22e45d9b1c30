"""SQLite store: group commit and event-loop side.

A promise only: the thread that keeps it is made outside this room.

Who waits for whom is decided here; file.py does all that blocks.

Commits that arrive while one is being written wait together and are written as one group: one transaction of SQLite and one
fsync, however many wait. Each keeps its own revision and is answered only after that fsync.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from remit.model.counters import SECONDS, SIZES, Buckets
from remit.store import chain
from remit.store.keys import check_commit, check_key, check_range, check_revision
from remit.store.protocol import (
    Closed,
    Commit,
    Committed,
    Conflict,
    Invalid,
    Page,
    Row,
    StoreError,
    Unanswered,
    Watch,
)
from remit.store.sqlite.database_file import FILE_NAME, File, Written, create, first_id
from remit.store.sqlite.directory_lock import Ownership, translated
from remit.store.sqlite.maintenance import Backup, BackupCopy, Upkeep, set_compacted, sweep
from remit.store.watch_feed import Bounds, Feed, Transaction

T = TypeVar("T")


class Offload(Protocol):
    """Run `work` elsewhere, one piece at a time, in the order of the calls.

    One dedicated thread keeps this. Order is what makes reads linearizable: a read that is asked for after a commit was
    answered runs after it. Two pieces at once would let two hands into one file.
    """

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


GROUP_ROWS_MAX = 4_096
GROUP_BYTES_MAX = 4 << 20
_REPLAY_ROWS = 4_096
_SWEPT = object()

Answer = asyncio.Future[Committed | Conflict]


class _Waiting(NamedTuple):
    commit: Commit
    answer: Answer


class _Opened(NamedTuple):
    owner: Ownership
    file: File


class SqliteStore:
    """Made by `open`. `place` is the head that opening wrote: it raised the epoch, so older writers are fenced."""

    place: chain.Place

    def __init__(
        self, opened: _Opened, offload: Offload, bounds: Bounds, stopwatch_ns: Callable[[], int] | None = None
    ) -> None:
        self._owner, self._file = opened
        self._stopwatch_ns = stopwatch_ns
        self.writes, self.groups = Buckets(SECONDS), Buckets(SIZES)
        """How long a group took to be durable, one fsync included, and how many rows were in it."""
        self._offload = offload
        self._upkeep = Upkeep(self._file)
        self._feed = Feed(self._file.revision, bounds)
        self._queue: deque[_Waiting] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._compacting = asyncio.Lock()
        self._backing_up = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        offload: Offload,
        holder: str,
        incarnation: str,
        bounds: Bounds = Bounds(),
        stopwatch_ns: Callable[[], int] | None = None,
    ) -> SqliteStore:
        """Own `directory`, and raise the epoch there as `holder`. `incarnation` names the chain if it starts here.
        With `stopwatch_ns`, writes are timed.
        """
        store = cls(await offload(lambda: _open(directory)), offload, bounds, stopwatch_ns)
        try:
            store.place = await chain.seize(store, holder, incarnation)
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
            raise Invalid(f"revision {revision} never was")
        return await self._offload(lambda: self._file.range(prefix, after, limit, revision))

    async def commit(self, commit: Commit) -> Committed | Conflict:
        check_commit(commit)
        self._check_open()
        answer: Answer = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(commit, answer))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="store writer")
        return await answer

    async def watch(self, prefix: str, *, after: int) -> Watch:
        check_range(prefix, "", 1)
        self._check_open()
        check_revision(after, compacted=self._file.compacted, now=self._file.revision)
        return self._feed.watch(prefix, after, self._replay)

    async def compact(self, revision: int) -> None:
        """In slices, between which commits go on. If it is cut short the next one takes up where it ended."""
        async with self._compacting:
            self._check_open()
            if revision < 0 or revision > self._file.revision:
                raise Invalid(f"compact at {revision}; the store is at {self._file.revision}")
            if revision > self._file.compacted:
                await self._offload(lambda: set_compacted(self._file, revision))
            below = first_id(self._file.compacted + 1)
            while not await self._offload(lambda: self._upkeep.index_below(below)):
                self._check_open()
            slices = sweep(self._file)
            while await self._offload(lambda: next(slices, _SWEPT)) is not _SWEPT:
                self._check_open()

    async def revision(self) -> int:
        self._check_open()
        return await self._offload(lambda: self._file.revision)

    async def backup(self, path: Path) -> Backup:
        """A consistent copy at `path`, made while the store runs; put in place only once it is whole."""
        async with self._backing_up:
            self._check_open()
            copy = await self._offload(lambda: BackupCopy(self._file, path))
            try:
                while (backup := await self._offload(copy.step)) is None:
                    self._check_open()
                return backup
            finally:
                await self._offload(copy.abandon)

    @property
    def directory(self) -> Path:
        return self._file.path.parent

    @property
    def is_backing_up(self) -> bool:
        return self._backing_up.locked()

    def size_bytes(self) -> int:
        """On the disk: the file and its write-ahead log. Blocking, if only for a moment."""
        path = self._file.path
        return sum(part.stat().st_size for part in (path, path.with_name(path.name + "-wal")) if part.exists())

    async def close(self) -> None:
        """Answer what was accepted, then let go of the file and the directory."""
        if self._closed:
            return
        self._closed = True
        self._feed.close()
        if self._writer is not None:
            await self._writer
        # A compaction or a backup under way notices between its slices, and must be out before the file goes.
        async with self._compacting, self._backing_up:
            try:
                await self._offload(self._file.close)
            finally:
                self._owner.release()

    async def _write_all(self) -> None:
        """Runs while commits wait. One task at a time, held by the store, and waited for in `close`."""
        try:
            while self._queue:
                group = self._next_group()
                await self._write(group)
                if self._upkeep.due():
                    await self._tidy(sum(len(one.commit.puts) + len(one.commit.deletes) for one in group))
        finally:
            self._writer = None
            for waiting in self._queue:
                waiting.answer.cancel()
            self._queue.clear()

    def _next_group(self) -> list[_Waiting]:
        """The commits that wait, up to a bound: a group without one would make its first member wait for its last.

        Whoever gave up while waiting is left out: nobody would hear that it was applied.
        """
        group: list[_Waiting] = []
        rows = size = 0
        while self._queue and rows < GROUP_ROWS_MAX and size < GROUP_BYTES_MAX:
            waiting = self._queue.popleft()
            if not waiting.answer.done():
                group.append(waiting)
                rows += len(waiting.commit.puts) + len(waiting.commit.deletes)
                size += sum(len(value) for _, value in waiting.commit.puts)
        return group

    async def _write(self, group: Sequence[_Waiting]) -> None:
        commits = [one.commit for one in group]
        try:
            written: Written = await self._offload(lambda: self._timed(commits))
        except StoreError as error:
            for one in group:
                if not one.answer.done():
                    one.answer.set_exception(_copy_of(error))
            return
        except BaseException as error:
            # Cancelled, or our own bug: whether the group was written is not known here.
            for one in group:
                if not one.answer.done():
                    one.answer.set_exception(Unanswered(f"the writer was stopped ({error!r}); settle it"))
            raise
        self._feed.publish(written.transactions)
        for one, outcome in zip(group, written.outcomes, strict=True):
            if not one.answer.done():
                one.answer.set_result(outcome)

    def _timed(self, commits: Sequence[Commit]) -> Written:
        """In the writer's own thread: who waits for the thread is not timed."""
        if self._stopwatch_ns is None:
            return self._file.write(commits)
        began_ns = self._stopwatch_ns()
        written = self._file.write(commits)
        self.writes.add((self._stopwatch_ns() - began_ns) / 1e9)
        self.groups.add(sum(len(one.changes) for one in written.transactions))
        return written

    async def _tidy(self, rows: int) -> None:
        try:
            await self._offload(lambda: self._upkeep.step(rows))
        except StoreError:
            # Upkeep may fail without harm: the log has everything. What is wrong shows in the next commit as its own error:
            # damage is noted in the file, and a write-ahead log that cannot be carried over stops commits at its bound.
            return

    async def _replay(self, after: int) -> Sequence[Transaction]:
        self._check_open()
        return await self._offload(lambda: self._file.replay(after, _REPLAY_ROWS))

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this store was closed; open it again")


def _open(directory: Path) -> _Opened:
    owner = Ownership(directory)
    try:
        path = directory / FILE_NAME
        with translated(path):
            missing = not path.exists()
        if missing:
            create(path)
        return _Opened(owner, File(path))
    except BaseException:
        owner.release()
        raise


def _copy_of(error: StoreError) -> StoreError:
    """One exception object per waiter: raising one object in several tasks would mix up their tracebacks."""
    copy = type(error)(str(error))
    copy.__cause__ = error
    return copy
