"""SQLite store on files that tear at a power cut.

Real files under the real store; what the store makes of it is not known here.

A layer below SQLite's checksum shim remembers, for every file under a `TornDisk`, what each sector was since the file was
last forced to the device. A crash draws for each sector which of these it finds, for each file how long it is, and for each
name that was not forced whether it is there. What was forced always stays.

SQLite knows one checksum shim a process, so while there is a `TornDisk` the layer is under it for all, and files elsewhere pass
through. The passage is not quite faithful: an error that SQLite would pass over while it closes is raised there.
Nothing is forced for real, and everything is drawn from a `Chance`: one seed is one crash.

The real SQLite store on a disk that tears.

The same service as in stores.py, over a `SqliteStore` in a directory of its own. A power cut falls inside any write, force or
truncation; what had not been forced is found by lot (torn.py). Then the store is opened anew. What it finds that nobody was
told of was written all the same, so the witness hears of it before anybody else does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import apsw

from remit.simulate.world.clock import SimOffload
from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.store import Sent, StoreService, T, Witness, Work
from remit.store import chain
from remit.store.protocol import HEAD, Commit, Committed, Conflict, Event, StoreError
from remit.store.sqlite.database_file import load_checksums
from remit.store.sqlite.directory_lock import LOCK_NAME
from remit.store.sqlite.store import SqliteStore
from remit.world.interfaces import Chance
from remit.world.randomness import SeededChance

# ruff: noqa: N802 - the names of what SQLite calls are its own


SECTOR_BYTES: Final = 512
_CONTENTS_MAX: Final = 8
"""Of one sector that are remembered. Past it the newest go: the oldest one is what was forced."""
_LAYER: Final = "remit-torn"
_SHIM: Final = "cksmvfs"
_BASE: Final = "unix"
_JOURNALS: Final = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL


class PowerCut(BaseException):
    """The power went in the middle of a call. No program outlives that, so no program should catch it."""


class TornDisk:
    """While inside, SQLite's files under `directory` can be torn. One process at a time has its stores there, on one thread.

    `lying` is a disk that answers every force and does nothing.
    """

    def __init__(self, directory: Path, *, lying: bool = False) -> None:
        self.directory = directory.resolve()
        self.calls = 0
        """How many writes, cuts to length, forces and removals there were."""
        self.dark = False
        """The power went inside a call, and `crash` was not called yet."""
        self._lying = lying
        self._dark_at = 0
        self._told: Callable[[], None] = _nothing
        self._closing = False
        self.life = 0
        """How many processes had their stores here before: a file that one of them opened is dead."""
        self._traces: dict[Path, _Trace] = {}
        self._removed: dict[Path, tuple[bytes, _Trace]] = {}

    def __enter__(self) -> TornDisk:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not _disks:
            _put_shim_on(_LAYER)
        _disks[self.directory] = self
        return self

    def __exit__(self, _type: object, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.kill()
        _disks.pop(self.directory, None)
        # A connection made room for the files of the layer that it was opened with, and those of the system are larger.
        if not _disks and not _passing:
            _put_shim_on(_BASE)

    def cut_after(self, calls: int, told: Callable[[], None] | None = None) -> None:
        """Cut the power inside the `calls`-th call from here on: `told` hears of it, then that call raises `PowerCut`.

        `told` is inside SQLite: it notes who is dead, and `crash` comes later.
        """
        if calls < 1:
            raise ValueError(f"the power cannot go after {calls} calls")
        self._dark_at, self._told = self.calls + calls, told or _nothing

    def kill(self) -> None:
        """The process that has stores here ends. Nothing more is written, its locks are let go, what it wrote stays.

        A store that is left over can only fail; its own `close` gives back the descriptor of its lock.
        """
        self._closing = True
        try:
            for connection in apsw.connections():
                if _inside(connection.filename, self.directory):
                    connection.close(True)
        finally:
            self._closing = False
        self.life += 1
        for lock in sorted(self.directory.rglob(LOCK_NAME)):
            lock.unlink()  # whoever comes next makes a new one, and the old hold is on a file without a name
        self.dark, self._dark_at, self._told = False, 0, _nothing

    def crash(self, chance: Chance) -> None:
        """The machine loses its power: the process ends, and what it had not forced is found by lot."""
        self.kill()
        traces, self._traces = sorted(self._traces.items()), {}
        removed, self._removed = sorted(self._removed.items()), {}
        for path, trace in traces:
            if not path.exists() or path.stat().st_ino != trace.inode:
                continue  # it was renamed, and whoever did that has forced it before
            if not trace.named and chance.below(2):
                path.unlink()
            elif trace.torn(path.stat().st_size):
                path.write_bytes(_found(path.read_bytes(), trace, chance))
        for path, (content, trace) in removed:
            if not path.exists() and chance.below(2):
                path.write_bytes(_found(content, trace, chance))

    # What the layer below SQLite asks and tells.

    def off(self, life: int) -> bool:
        """Nothing that a process of this life does now reaches the disk."""
        return self.dark or self._closing or life != self.life

    def check_power(self, life: int) -> bool:
        """False while a dead process is being put away, and its last deeds are to be passed over in silence."""
        if self._closing:
            return False
        if self.off(life):
            raise PowerCut(f"the power of {self.directory} is off")
        return True

    def count(self) -> None:
        self.calls += 1
        if self.calls == self._dark_at:
            self.dark = True
            self._told()
            raise PowerCut(f"the power of {self.directory} went in call {self.calls}")

    def trace(self, path: Path, *, existed: bool) -> _Trace:
        found = path.stat()
        known = self._traces.get(path)
        if known is None or known.inode != found.st_ino:
            known = self._traces[path] = _Trace(found.st_ino, found.st_size, named=existed)
        return known

    def force(self, trace: _Trace, size: int) -> None:
        if not self._lying:
            trace.earlier.clear()
            trace.size = size

    def force_names(self, directory: Path) -> None:
        if self._lying:
            return
        for path, trace in self._traces.items():
            if path.parent == directory:
                trace.named = True
        for path in [path for path in self._removed if path.parent == directory]:
            del self._removed[path]

    def note_removal(self, path: Path) -> None:
        """Before the name goes: unless its directory is forced, a crash may bring it back."""
        if not path.exists():
            return
        trace = self.trace(path, existed=True)
        if trace.named:
            self._removed.setdefault(path, (path.read_bytes(), trace))
        del self._traces[path]


class _Trace:
    """What one file was, since it was last forced."""

    def __init__(self, inode: int, size: int, *, named: bool) -> None:
        self.inode, self.size, self.named = inode, size, named
        self.earlier: dict[int, list[bytes]] = {}
        """Of each sector that changed, all that it was, oldest first; what it is now is in the file."""

    def torn(self, size: int) -> bool:
        return bool(self.earlier) or size != self.size

    def note(self, first: int, old: bytes) -> None:
        for place in range(0, len(old), SECTOR_BYTES):
            contents = self.earlier.setdefault(first + place // SECTOR_BYTES, [])
            if len(contents) < _CONTENTS_MAX:
                contents.append(old[place : place + SECTOR_BYTES])


def _found(now: bytes, trace: _Trace, chance: Chance) -> bytes:
    """The content after a crash. All or nothing is drawn as well: of many sectors a mixture is hardly ever either."""
    mood = chance.choice(("kept", "lost", "mixed"))
    if mood == "kept":
        return now
    sizes = sorted((trace.size, len(now)))
    size = trace.size if mood == "lost" else chance.choice((*sizes, sizes[0] + chance.below(sizes[1] - sizes[0] + 1)))
    found = bytearray(now.ljust(max(size, len(now)), b"\0"))
    for sector, contents in sorted(trace.earlier.items()):
        start = sector * SECTOR_BYTES
        latest = now[start : start + SECTOR_BYTES]
        latest += contents[-1][len(latest) :]  # past its end the file was cut, and what was there may be there still
        found[start : start + SECTOR_BYTES] = contents[0] if mood == "lost" else chance.choice((*contents, latest))
    return bytes(found[:size])


class _TornFile(apsw.VFSFile):
    """One open file. Once the power is off it writes no more."""

    def __init__(self, disk: TornDisk, path: Path, name: Any, flags: list[int]) -> None:
        existed = path.exists()
        super().__init__(_BASE, name, flags)
        self._disk, self._path, self._life = disk, path, disk.life
        self._trace = disk.trace(path, existed=existed)
        # As SQLite does for real: the first force of a journal that it may have made also forces its name.
        self._forces_name = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & _JOURNALS)

    def xRead(self, amount: int, offset: int) -> bytes:
        return super().xRead(amount, offset) if self._disk.check_power(self._life) else b""

    def xWrite(self, data: Any, offset: int) -> None:
        if self._disk.check_power(self._life):
            content = bytes(data)
            self._note(offset, offset + len(content))
            super().xWrite(content, offset)
            self._disk.count()

    def xTruncate(self, newsize: int) -> None:
        if self._disk.check_power(self._life):
            self._note(newsize, super().xFileSize())
            super().xTruncate(newsize)
            self._disk.count()

    def xSync(self, flags: int) -> None:
        if self._disk.check_power(self._life):
            self._disk.count()
            self._disk.force(self._trace, super().xFileSize())
            if self._forces_name:
                self._disk.force_names(self._path.parent)
                self._forces_name = False

    def xLock(self, level: int) -> None:
        if self._disk.off(self._life):
            raise apsw.BusyError("the power is off")  # so that a connection that closes does not tidy up first
        super().xLock(level)

    def xFileSize(self) -> int:
        return super().xFileSize() if self._disk.check_power(self._life) else 0

    def _note(self, start: int, end: int) -> None:
        """Remember the sectors from `start` up to `end` as they are."""
        first, past = start // SECTOR_BYTES, -(-end // SECTOR_BYTES)
        if past > first:
            length = (past - first) * SECTOR_BYTES
            self._trace.note(first, super().xRead(length, first * SECTOR_BYTES).ljust(length, b"\0"))


class _PassingFile(apsw.VFSFile):
    """One open file that is under no `TornDisk`."""

    def __init__(self, name: Any, flags: list[int]) -> None:
        super().__init__(_BASE, name, flags)
        _passing.add(self)

    def xClose(self) -> None:
        _passing.discard(self)
        super().xClose()


class _Layer(apsw.VFS):
    """The files of the system, with those under a `TornDisk` watched."""

    def __init__(self) -> None:
        super().__init__(_LAYER, _BASE)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = _path_of(name)
        disk = _disk_of(path)
        if disk is None or path is None:
            return _PassingFile(name, flags)
        if not disk.check_power(disk.life):
            raise apsw.CantOpenError("the power is off")
        return _TornFile(disk, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        path = Path(filename)
        disk = _disk_of(path)
        if disk is None:
            super().xDelete(filename, syncdir)
        elif disk.check_power(disk.life):
            disk.note_removal(path)
            super().xDelete(filename, False)
            disk.count()
            if syncdir:
                disk.force_names(path.parent)


_disks: Final[dict[Path, TornDisk]] = {}
_passing: Final[set[_PassingFile]] = set()
_layers: Final[list[_Layer]] = []
"""The one that there is. SQLite keeps a bare pointer to it, so it is never let go."""


def _put_shim_on(layer: str) -> None:
    """Load the checksum shim anew: it takes for its files what is the default at that time."""
    if not _layers:
        _layers.append(_Layer())
    if _SHIM in apsw.vfs_names():
        apsw.unregister_vfs(_SHIM)
    apsw.set_default_vfs(layer)
    load_checksums()


def _path_of(name: str | apsw.URIFilename | None) -> Path | None:
    """SQLite gives whole names without links; a temporary file has none."""
    if name is None:
        return None
    return Path(name if isinstance(name, str) else name.filename())


def _disk_of(path: Path | None) -> TornDisk | None:
    if path is None or not _disks:
        return None
    return next((_disks[place] for place in path.parents if place in _disks), None)


def _inside(filename: str, directory: Path) -> bool:
    return bool(filename) and directory in Path(filename).parents


def _nothing() -> None:
    pass


CALLS_MAX: Final = 12
"""How many calls of the file system after a fault was injected the power may go: about one group of commits."""

_NEVER: Final = 1 << 60


class DurableService(StoreService):
    """Open it with `begin`, and let its directory go with `end`."""

    def __init__(self, loop: SimLoop, network: Network, scope: str, seed: str, witness: Witness) -> None:
        super().__init__(loop, network, scope, seed, witness)
        self._place = tempfile.TemporaryDirectory(prefix="remit-torn-")
        self._disk = TornDisk(Path(self._place.name) / "store")
        self._disk.__enter__()
        self._chance = SeededChance(f"{seed}/{self.name}/torn")
        self._seen = 0
        self._cuts = 0
        self._senders: dict[bytes, Sent] = {}
        self._closed = self.worsen({"away": True})

    def begin(self) -> None:
        """Open the store, in a new life of its process."""
        self.unit = self.loop.unit(self.name)
        self.loop.spawn(self._open(), name="open the store", unit=self.unit)

    def end(self) -> None:
        self._disk.__exit__(None, None, None)
        self._place.cleanup()

    async def _open(self) -> None:
        unit = self.unit
        offload = SimOffload(lambda: 1 + self.lots.randrange(4), lambda: not unit.dead)
        store = await SqliteStore.open(self._disk.directory, offload=offload, holder=self.name, incarnation="durable")
        watch = await store.watch("", after=self._seen)
        while self._seen < store.place.revision:  # opening raises the epoch
            self._found(await anext(aiter(watch)))
        await watch.close()
        self.store = store
        self._closed()

    def _found(self, event: Event) -> None:
        """One transaction, as it stands in the store; its sender is known by the head that it wrote."""
        puts = [(change.key, change.value) for change in event.changes if change.value is not None]
        deletes = [change.key for change in event.changes if change.value is None]
        head = b"" if event.head is None else chain.encode_head(event.head)
        self._seen = event.revision
        self.applied(Commit(puts=(*puts, (HEAD, head)), deletes=deletes), event.revision, self._senders.pop(head, None))

    def perform(self, work: Work[T], done: Callable[[T], None], failed: Callable[[StoreError], None]) -> None:
        async def performed() -> None:
            try:
                result = await work()
            except StoreError as error:
                failed(error)
                return
            done(result)

        self.loop.spawn(performed(), name="serve", unit=self.unit)

    async def apply(self, commit: Commit, sent: Sent) -> Committed | Conflict:
        self.check(writing=True)
        head = next((value for key, value in commit.puts if key == HEAD), b"")
        self._senders[head] = sent
        answer = await self.store.commit(commit)
        if isinstance(answer, Committed):
            self._seen = answer.revision
            self.applied(commit, answer.revision, self._senders.pop(head, None))
        else:
            self._senders.pop(head, None)
        return answer

    # -- what a fault does -----------------------------------------------------------------------------------------------

    def cut_power(self, calls: int) -> Callable[[], None]:
        """In the middle of the file system's `calls`-th call from now. Answers how to call it off, if it has not come."""
        self._cuts += 1
        self._disk.cut_after(calls, self._die)
        return lambda: self._disk.cut_after(_NEVER)

    def _die(self) -> None:
        """Its process is dead from here on; what is left of its files is looked at once the call is over."""
        self.loop.kill(self.unit)
        self._closed()  # it may have gone while it was being opened
        self._closed = self.worsen({"away": True})
        self.break_watches()
        self.loop.call_soon(self._lose, context=self.loop.root.context)

    def _lose(self) -> None:
        self._disk.crash(self._chance.stream(f"crash {self._cuts}"))
        self.loop.call_later(0.5 + 2 * self.lots.random(), self.begin, context=self.loop.root.context)
