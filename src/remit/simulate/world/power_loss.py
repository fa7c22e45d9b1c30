"""SQLite store on real files that are torn by a simulated power cut.

A VFS layer below SQLite's checksum shim records, for every file of a `TornDisk`, what each sector contained since the last
sync of the file. A crash draws for each sector which of these contents survives, for each file its length, and for each
unsynced file name whether the file exists. Synced data always survives. Nothing is synced for real, and everything is drawn
from one random stream, so one seed gives one crash.

SQLite has one checksum shim per process, so while a `TornDisk` exists the layer is below the shim for all databases; files
elsewhere pass through. This is not fully transparent: an error that SQLite would ignore while it closes a file is raised.

`SqliteStoreService` is the service of store.py on a `SqliteStore` in a temporary directory. A power cut happens inside any
write, sync or truncate call, and then the store is opened again. Commits that it finds durable although no client got an
answer are passed to the commit observer before anything else reads them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import apsw

from remit.simulate.world import random_streams
from remit.simulate.world.clock import SimOffload
from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.store import CommitObserver, CommitOrigin, StoreCall, StoreService, T
from remit.store import chain
from remit.store.protocol import HEAD, Commit, Committed, Conflict, StoreError, WatchEvent
from remit.store.sqlite.database_file import load_checksums
from remit.store.sqlite.directory_lock import LOCK_NAME
from remit.store.sqlite.store import SqliteStore
from remit.world.interfaces import Randomness
from remit.world.randomness import SeededRandomness

# ruff: noqa: N802 - the method names are defined by SQLite


SECTOR_BYTES: Final = 512
_CONTENTS_MAX: Final = 8
"""Contents recorded per sector. Past this number newer ones are not recorded; the oldest, which was synced, always is."""
_VFS_NAME: Final = "remit-torn"
_CHECKSUM_VFS: Final = "cksmvfs"
_BASE_VFS: Final = "unix"
_JOURNALS: Final = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL


class PowerCut(BaseException):
    """The power was cut inside a call. It ends the process, so no code should catch it."""


class TornDisk:
    """A context manager: while it is open, SQLite files under `directory` can be torn. One process at a time may have its
    stores there, on one thread.

    `lying` simulates a disk that acknowledges every sync without doing it.
    """

    def __init__(self, directory: Path, *, lying: bool = False) -> None:
        self.directory = directory.resolve()
        self.calls = 0
        """Number of write, truncate, sync and delete calls so far."""
        self.power_off = False
        """The power was cut inside a call, and `crash` was not called yet."""
        self._lying = lying
        self._cut_at_call = 0
        self._on_cut: Callable[[], None] = _nothing
        self._closing = False
        self.life = 0
        """How many processes had their stores here before. Files that were opened in an earlier life are dead."""
        self._histories: dict[Path, _FileHistory] = {}
        self._removed: dict[Path, tuple[bytes, _FileHistory]] = {}

    def __enter__(self) -> TornDisk:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not _disks:
            _reload_checksums_over(_VFS_NAME)
        _disks[self.directory] = self
        return self

    def __exit__(self, _type: object, _error: BaseException | None, _history: TracebackType | None) -> None:
        self.kill()
        _disks.pop(self.directory, None)
        # Wait for pass-through files: their connections allocated memory for file objects of this layer, which are smaller than
        # those of the system's VFS.
        if not _disks and not _pass_through_files:
            _reload_checksums_over(_BASE_VFS)

    def cut_after(self, calls: int, on_cut: Callable[[], None] | None = None) -> None:
        """Cut the power inside the `calls`-th call from now: `on_cut` is called, then that call raises `PowerCut`.

        `on_cut` runs inside SQLite, so it may only mark processes as dead; `crash` is called later.
        """
        if calls < 1:
            raise ValueError(f"calls must be 1 or more, not {calls}")
        self._cut_at_call, self._on_cut = self.calls + calls, on_cut or _nothing

    def kill(self) -> None:
        """End the process that has stores here. Nothing more is written and its locks are released; what it wrote stays.

        Every call of a store that is still open fails; its `close` releases the file descriptor of its lock.
        """
        self._closing = True
        try:
            for connection in apsw.connections():
                if _is_below(connection.filename, self.directory):
                    connection.close(True)
        finally:
            self._closing = False
        self.life += 1
        for lock in sorted(self.directory.rglob(LOCK_NAME)):
            lock.unlink()  # the next process creates a new file; the old lock is on a file without a name
        self.power_off, self._cut_at_call, self._on_cut = False, 0, _nothing

    def crash(self, randomness: Randomness) -> None:
        """The machine loses power: the process ends, and unsynced data is lost, kept or mixed at random."""
        self.kill()
        traces, self._histories = sorted(self._histories.items()), {}
        removed, self._removed = sorted(self._removed.items()), {}
        for path, history in traces:
            if not path.exists() or path.stat().st_ino != history.inode:
                continue  # it was replaced by a rename, which is done only after a sync
            if not history.name_synced and randomness.randrange(2):
                path.unlink()
            elif history.is_changed(path.stat().st_size):
                path.write_bytes(_content_after_crash(path.read_bytes(), history, randomness))
        for path, (content, history) in removed:
            if not path.exists() and randomness.randrange(2):
                path.write_bytes(_content_after_crash(content, history, randomness))

    # Used by the VFS layer below SQLite.

    def is_off(self, life: int) -> bool:
        """Whether operations of a process of this life no longer reach the disk."""
        return self.power_off or self._closing or life != self.life

    def check_power(self, life: int) -> bool:
        """False while a dead process is being closed: its last operations are ignored without an error."""
        if self._closing:
            return False
        if self.is_off(life):
            raise PowerCut(f"the power of {self.directory} is off")
        return True

    def count_call(self) -> None:
        self.calls += 1
        if self.calls == self._cut_at_call:
            self.power_off = True
            self._on_cut()
            raise PowerCut(f"the power of {self.directory} was cut in call {self.calls}")

    def history_of(self, path: Path, *, existed: bool) -> _FileHistory:
        stat = path.stat()
        known = self._histories.get(path)
        if known is None or known.inode != stat.st_ino:
            known = self._histories[path] = _FileHistory(stat.st_ino, stat.st_size, name_synced=existed)
        return known

    def sync(self, history: _FileHistory, size: int) -> None:
        if not self._lying:
            history.earlier.clear()
            history.size = size

    def sync_directory(self, directory: Path) -> None:
        if self._lying:
            return
        for path, history in self._histories.items():
            if path.parent == directory:
                history.name_synced = True
        for path in [path for path in self._removed if path.parent == directory]:
            del self._removed[path]

    def record_removal(self, path: Path) -> None:
        """Called before a delete: unless its directory is synced, a crash may bring the file back."""
        if not path.exists():
            return
        history = self.history_of(path, existed=True)
        if history.name_synced:
            self._removed.setdefault(path, (path.read_bytes(), history))
        del self._histories[path]


class _FileHistory:
    """The contents of one file since its last sync."""

    def __init__(self, inode: int, size: int, *, name_synced: bool) -> None:
        self.inode, self.size, self.name_synced = inode, size, name_synced
        self.earlier: dict[int, list[bytes]] = {}
        """Earlier contents of each changed sector, oldest first. The latest content is in the file itself."""

    def is_changed(self, size: int) -> bool:
        return bool(self.earlier) or size != self.size

    def note(self, first: int, old: bytes) -> None:
        for offset in range(0, len(old), SECTOR_BYTES):
            contents = self.earlier.setdefault(first + offset // SECTOR_BYTES, [])
            if len(contents) < _CONTENTS_MAX:
                contents.append(old[offset : offset + SECTOR_BYTES])


def _content_after_crash(now: bytes, history: _FileHistory, randomness: Randomness) -> bytes:
    """The content of a file after a crash. "All kept" and "all lost" are drawn explicitly, because a random mix of many sectors
    would hardly ever produce them.
    """
    outcome = randomness.choice(("kept", "lost", "mixed"))
    if outcome == "kept":
        return now
    sizes = sorted((history.size, len(now)))
    size = (
        history.size
        if outcome == "lost"
        else randomness.choice((*sizes, sizes[0] + randomness.randrange(sizes[1] - sizes[0] + 1)))
    )
    content = bytearray(now.ljust(max(size, len(now)), b"\0"))
    for sector, contents in sorted(history.earlier.items()):
        start = sector * SECTOR_BYTES
        latest = now[start : start + SECTOR_BYTES]
        latest += contents[-1][len(latest) :]  # beyond a truncation the old content may still be on the disk
        content[start : start + SECTOR_BYTES] = contents[0] if outcome == "lost" else randomness.choice((*contents, latest))
    return bytes(content[:size])


class _TornFile(apsw.VFSFile):
    """An open file on a `TornDisk`. It writes nothing once the power is off."""

    def __init__(self, disk: TornDisk, path: Path, name: Any, flags: list[int]) -> None:
        existed = path.exists()
        super().__init__(_BASE_VFS, name, flags)
        self._disk, self._path, self._life = disk, path, disk.life
        self._history = disk.history_of(path, existed=existed)
        # As in SQLite itself: the first sync of a journal that may be new also syncs its directory.
        self._syncs_directory = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & _JOURNALS)

    def xRead(self, amount: int, offset: int) -> bytes:
        return super().xRead(amount, offset) if self._disk.check_power(self._life) else b""

    def xWrite(self, data: Any, offset: int) -> None:
        if self._disk.check_power(self._life):
            content = bytes(data)
            self._record_sectors(offset, offset + len(content))
            super().xWrite(content, offset)
            self._disk.count_call()

    def xTruncate(self, newsize: int) -> None:
        if self._disk.check_power(self._life):
            self._record_sectors(newsize, super().xFileSize())
            super().xTruncate(newsize)
            self._disk.count_call()

    def xSync(self, flags: int) -> None:
        if self._disk.check_power(self._life):
            self._disk.count_call()
            self._disk.sync(self._history, super().xFileSize())
            if self._syncs_directory:
                self._disk.sync_directory(self._path.parent)
                self._syncs_directory = False

    def xLock(self, level: int) -> None:
        if self._disk.is_off(self._life):
            raise apsw.BusyError("the power is off")  # a closing connection then skips its checkpoint
        super().xLock(level)

    def xFileSize(self) -> int:
        return super().xFileSize() if self._disk.check_power(self._life) else 0

    def _record_sectors(self, start: int, end: int) -> None:
        """Record the current contents of the sectors from `start` to `end`."""
        first, past = start // SECTOR_BYTES, -(-end // SECTOR_BYTES)
        if past > first:
            length = (past - first) * SECTOR_BYTES
            self._history.note(first, super().xRead(length, first * SECTOR_BYTES).ljust(length, b"\0"))


class _PassThroughFile(apsw.VFSFile):
    """An open file outside of every `TornDisk`."""

    def __init__(self, name: Any, flags: list[int]) -> None:
        super().__init__(_BASE_VFS, name, flags)
        _pass_through_files.add(self)

    def xClose(self) -> None:
        _pass_through_files.discard(self)
        super().xClose()


class _TornVfs(apsw.VFS):
    """The system's VFS, with the files of `TornDisk`s intercepted."""

    def __init__(self) -> None:
        super().__init__(_VFS_NAME, _BASE_VFS)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = _path_of(name)
        disk = _disk_of(path)
        if disk is None or path is None:
            return _PassThroughFile(name, flags)
        if not disk.check_power(disk.life):
            raise apsw.CantOpenError("the power is off")
        return _TornFile(disk, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        path = Path(filename)
        disk = _disk_of(path)
        if disk is None:
            super().xDelete(filename, syncdir)
        elif disk.check_power(disk.life):
            disk.record_removal(path)
            super().xDelete(filename, False)
            disk.count_call()
            if syncdir:
                disk.sync_directory(path.parent)


_disks: Final[dict[Path, TornDisk]] = {}
_pass_through_files: Final[set[_PassThroughFile]] = set()
_registered_vfs: Final[list[_TornVfs]] = []
"""The single VFS object. SQLite keeps a raw pointer to it, so it must never be freed."""


def _reload_checksums_over(layer: str) -> None:
    """Reload the checksum shim: it uses the VFS that is the default at that time."""
    if not _registered_vfs:
        _registered_vfs.append(_TornVfs())
    if _CHECKSUM_VFS in apsw.vfs_names():
        apsw.unregister_vfs(_CHECKSUM_VFS)
    apsw.set_default_vfs(layer)
    load_checksums()


def _path_of(name: str | apsw.URIFilename | None) -> Path | None:
    """SQLite passes absolute names without symbolic links; temporary files have none."""
    if name is None:
        return None
    return Path(name if isinstance(name, str) else name.filename())


def _disk_of(path: Path | None) -> TornDisk | None:
    if path is None or not _disks:
        return None
    return next((_disks[directory] for directory in path.parents if directory in _disks), None)


def _is_below(filename: str, directory: Path) -> bool:
    return bool(filename) and directory in Path(filename).parents


def _nothing() -> None:
    pass


POWER_CUT_CALLS_MAX: Final = 12
"""The power cut happens within this many file system calls after the injection: about one group commit."""

_NEVER: Final = 1 << 60


class SqliteStoreService(StoreService):
    """The store of one scope on SQLite. `begin` opens it; `end` removes its directory."""

    def __init__(self, loop: SimLoop, network: Network, scope: str, seed: str, observer: CommitObserver) -> None:
        super().__init__(loop, network, scope, seed, observer)
        self._directory = tempfile.TemporaryDirectory(prefix="remit-torn-")
        self._disk = TornDisk(Path(self._directory.name) / "store")
        self._disk.__enter__()
        self._randomness = SeededRandomness(random_streams.torn_disk(seed, self.name))
        self._observed_revision = 0
        self._power_cuts = 0
        self._senders: dict[bytes, CommitOrigin] = {}
        self._mark_available = self.degrade({"away": True})

    def begin(self) -> None:
        """Open the store in a new unit, as a new process of the database server."""
        self.unit = self.loop.new_unit(self.name)
        self.loop.spawn(self._open(), name="open the store", unit=self.unit)

    def end(self) -> None:
        self._disk.__exit__(None, None, None)
        self._directory.cleanup()

    async def _open(self) -> None:
        unit = self.unit
        offload = SimOffload(lambda: 1 + self.rng.randrange(4), lambda: not unit.dead)
        store = await SqliteStore.open(self._disk.directory, offload=offload, holder=self.name, incarnation="durable")
        watch = await store.watch("", after=self._observed_revision)
        while (
            self._observed_revision < store.position.revision
        ):  # opening the store commits a new epoch, which must be observed too
            self._observe_commit(await anext(aiter(watch)))
        await watch.close()
        self.store = store
        self._mark_available()

    def _observe_commit(self, event: WatchEvent) -> None:
        """Pass on one transaction found in the store. The head that it wrote identifies its sender."""
        puts = [(change.key, change.value) for change in event.changes if change.value is not None]
        deletes = [change.key for change in event.changes if change.value is None]
        head = b"" if event.head is None else chain.encode_head(event.head)
        self._observed_revision = event.revision
        self.record_commit(Commit(puts=(*puts, (HEAD, head)), deletes=deletes), event.revision, self._senders.pop(head, None))

    def perform(self, work: StoreCall[T], done: Callable[[T], None], failed: Callable[[StoreError], None]) -> None:
        async def run_request() -> None:
            try:
                result = await work()
            except StoreError as error:
                failed(error)
                return
            done(result)

        self.loop.spawn(run_request(), name="serve", unit=self.unit)

    async def apply(self, commit: Commit, sent: CommitOrigin) -> Committed | Conflict:
        self.check(writing=True)
        head = next((value for key, value in commit.puts if key == HEAD), b"")
        self._senders[head] = sent
        answer = await self.store.commit(commit)
        if isinstance(answer, Committed):
            self._observed_revision = answer.revision
            self.record_commit(commit, answer.revision, self._senders.pop(head, None))
        else:
            self._senders.pop(head, None)
        return answer

    # -- faults ----------------------------------------------------------------------------------------------------------

    def cut_power(self, calls: int) -> Callable[[], None]:
        """Cut the power inside the `calls`-th file system call from now. Returns a function that cancels it if it has not
        happened.
        """
        self._power_cuts += 1
        self._disk.cut_after(calls, self._on_power_cut)
        return lambda: self._disk.cut_after(_NEVER)

    def _on_power_cut(self) -> None:
        """Runs inside SQLite. The process is dead from now on; the files are torn after the call has returned."""
        self.loop.kill(self.unit)
        self._mark_available()  # the power may be cut while the store is being opened
        self._mark_available = self.degrade({"away": True})
        self.break_watches()
        self.loop.call_soon(self._crash_and_restart, context=self.loop.root.context)

    def _crash_and_restart(self) -> None:
        self._disk.crash(self._randomness.stream(random_streams.torn_disk_crash(self._power_cuts)))
        self.loop.call_later(0.5 + 2 * self.rng.random(), self.begin, context=self.loop.root.context)
