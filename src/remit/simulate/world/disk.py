"""Simulated disk with crash semantics, in-memory secret files, artifact fetching.

Everything is in memory; no real file is touched. A change is atomic. A change that was not synced (`NotDurable`) is recorded
together with the earlier contents of the path, and a machine crash draws which of these contents survives. The files of
SQLite stores are not on this disk: see power_loss.py. The disk has no symbolic links and no owners, so an archive with a
link in it is rejected.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from remit.law.fetch_policy import host_denial_reason
from remit.model.artifacts import InvalidSource, parse_source
from remit.world.files.artifacts import FetchBounds, NotFetched, NotUnpacked, Progress, Reach, UnpackBounds, Unpacked
from remit.world.interfaces import READ_BYTES_MAX, Busy, Chance, Disk, DiskError, Missing, NoRoom, TooLarge, Unsettled

_TEMPORARY_SUFFIX: Final = ".writing"
"""The real disk hides names with this suffix: they are temporary files of atomic writes."""
_ROOT: Final = Path("/")

Entry = bytes | None
"""The content of a file, or None for a directory. A path that does not exist has no entry."""


class ProcessKilled(DiskError):
    """The calling process was killed: none of its operations reach the disk any more."""


class SimDisk:
    """The disk of one machine. It outlives the processes, and each process has its own `mount`.

    The simulation switches its faults: `full` rejects what needs space, `failing` rejects everything, and `unsettling` makes
    changes visible without syncing them.
    """

    def __init__(self, *, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.full = self.failing = self.unsettling = False
        self._entries: dict[Path, Entry] = {_ROOT: None}
        self._before: dict[Path, list[Entry | Missing]] = {}
        """Earlier contents of each path with unsynced changes, oldest first: a crash may bring any of them back."""
        self._holders: dict[Path, _LockHolder] = {}

    @property
    def takes_nothing(self) -> bool:
        return self.full or self.failing

    def mount(self, alive: Callable[[], bool]) -> Disk:
        """The disk as one process sees it, until `alive()` returns false."""
        return _Mount(self, alive)

    def crash(self, chance: Chance) -> None:
        """The machine lost power; its processes must be dead already. Each unsynced path gets one of its earlier contents or
        its latest one.
        """
        self._holders.clear()
        unsettled, self._before = sorted(self._before.items()), {}
        for path, earlier in unsettled:
            now = self._entries[path] if path in self._entries else _missing(path)
            self._put_back(path, chance.choice([*earlier, now]))

    def used_bytes(self) -> int:
        return sum(len(content) for content in self._entries.values() if content is not None)

    def free_bytes(self) -> int:
        return 0 if self.full else max(0, self.capacity_bytes - self.used_bytes())

    # Called by a mount after it has checked that its process is alive. Paths are absolute and normalized.

    def entry(self, path: Path) -> Entry | Missing:
        """A path below a file is missing, as on the real disk."""
        self.check_works(path)
        return self._entries[path] if path in self._entries else _missing(path)

    def put(self, path: Path, content: Entry) -> None:
        """Set the content of `path`. Old and new content exist at the same time, so space for both is needed."""
        if self.full or len(content or b"") > self.free_bytes():
            raise NoRoom(f"no space for {path} (No space left on device)", "free space on this disk")
        self._note(path)
        self._entries[path] = content
        self._holders.pop(path, None)  # a lock is on the replaced file, not on the new one

    def drop(self, path: Path) -> None:
        self._note(path)
        self._entries.pop(path, None)
        self._holders.pop(path, None)

    def force(self, directory: Path) -> None:
        """Sync a directory: all changes of names in it are then durable, also earlier ones."""
        if self.unsettling:
            cause = f"{directory} could not be synced (Input/output error)"
            raise Unsettled(cause, "repair the disk, then retry")
        for path in [path for path in self._before if path.parent == directory]:
            del self._before[path]

    def names(self, directory: Path) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in self._entries if path.parent == directory and path != _ROOT))

    def under(self, directory: Path) -> list[Path]:
        """The directory and everything in it, innermost first."""
        inside = [path for path in self._entries if path == directory or directory in path.parents]
        return sorted(inside, key=lambda path: (-len(path.parts), path))

    def move(self, made: Path, to: Path) -> None:
        """Move a tree atomically, without syncing it."""
        for inside in reversed(self.under(made)):
            content = self._entries[inside]
            self.drop(inside)
            self.put(to / inside.relative_to(made), content)

    def bytes_below(self, directory: Path) -> int:
        return sum(len(self._entries[path] or b"") for path in self.under(directory))

    def hold(self, path: Path, holder: _LockHolder) -> None:
        if path in self._holders and self._holders[path].alive():
            raise Busy(f"{path} is locked by another process", "stop that process, or use another path")
        self._holders[path] = holder

    def let_go(self, path: Path, holder: _LockHolder) -> None:
        if self._holders.get(path) is holder:
            del self._holders[path]

    def check_works(self, path: Path) -> None:
        if self.failing:
            raise DiskError(f"{path} cannot be used (Input/output error)", "repair the disk, or use another path")

    def _note(self, path: Path) -> None:
        was = self._entries[path] if path in self._entries else _missing(path)
        self._before.setdefault(path, []).append(was)

    def _put_back(self, path: Path, found: Entry | Missing) -> None:
        if not isinstance(found, Missing):
            if path.parent in self._entries:  # otherwise the directory itself was lost, with everything in it
                self._entries[path] = found
            return
        for inside in [one for one in self._entries if one == path or path in one.parents]:
            del self._entries[inside]


class _LockHolder:
    """The holder of a lock. Every acquisition has its own object, so that a late release does not affect the next holder."""

    def __init__(self, alive: Callable[[], bool]) -> None:
        self.alive = alive


class _Mount:
    """`Disk` for one process. Each operation happens at one instant, so no other writer can see a half-done one."""

    def __init__(self, disk: SimDisk, alive: Callable[[], bool]) -> None:
        self._disk, self._alive = disk, alive

    def read(self, path: Path, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        place = self._place(path)
        found = self._disk.entry(place)
        if isinstance(found, Missing):
            raise found
        if found is None:
            raise _is_directory(place)
        if len(found) > bytes_max:
            raise TooLarge(f"{path} has more than {bytes_max} bytes", "check which program wrote it, and move it away")
        return found

    def write_atomically(self, path: Path, data: bytes) -> None:
        place = self._place(path)
        self._check_directory(place.parent, place)
        if self._disk.entry(place) is None:
            raise _is_directory(place)
        self._disk.put(place, bytes(data))
        self._disk.force(place.parent)

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        place = self._place(path)
        self._check_directory(place.parent, place)
        found = self._disk.entry(place)
        if found is None:
            raise _is_directory(place)
        self._disk.put(place, (b"" if isinstance(found, Missing) else found) + bytes(data))
        if durably:
            self._disk.force(place.parent)

    def exists(self, path: Path) -> bool:
        return not isinstance(self._disk.entry(self._place(path)), Missing)

    def remove(self, path: Path) -> None:
        place = self._place(path)
        found, parent = self._disk.entry(place), self._disk.entry(place.parent)
        if found is None:
            raise _is_directory(place)
        if isinstance(parent, bytes):
            raise _missing(place)
        if not isinstance(found, Missing):
            self._disk.drop(place)
        if parent is None:
            self._disk.force(place.parent)  # also if the file was already gone: an earlier removal may be unsynced

    def make_directory(self, path: Path, *, durably: bool = True) -> None:
        place = self._place(path)
        missing = [one for one in place.parents if isinstance(self._disk.entry(one), Missing)]
        for one in (*reversed(missing), place):
            self._check_directory(one.parent, one)
            found = self._disk.entry(one)
            if isinstance(found, Missing):
                self._disk.put(one, None)
            elif found is not None:
                raise DiskError(f"{one} is not a directory", "move it away, or use another path")
            if durably:
                self._disk.force(one.parent)

    def remove_tree(self, path: Path) -> None:
        place = self._place(path)
        for inside in self._disk.under(place):
            self._disk.drop(inside)

    def list(self, directory: Path) -> tuple[str, ...]:
        place = self._place(directory)
        self._check_directory(place, place)
        names = self._disk.names(place)
        return tuple(name for name in names if not (name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)))

    def free_bytes(self, path: Path) -> int:
        found = self._disk.entry(self._place(path))
        if isinstance(found, Missing):
            raise found
        return self._disk.free_bytes()

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        place = self._place(path)
        self._check_directory(place.parent, place)
        found = self._disk.entry(place)
        if found is None:
            raise _is_directory(place)
        if isinstance(found, Missing):
            self._disk.put(place, b"")
        holder = _LockHolder(self._alive)
        self._disk.hold(place, holder)
        try:
            yield
        finally:
            self._disk.let_go(place, holder)

    def _place(self, path: Path) -> Path:
        if not self._alive():
            raise ProcessKilled(f"the process that uses {path} was killed", "restart it")
        if not path.is_absolute():
            raise ValueError(f"{path} is relative; a simulated machine has no current directory, use an absolute path")
        return Path(os.path.normpath(path))

    def _check_directory(self, directory: Path, of: Path) -> None:
        if self._disk.entry(directory) is not None:
            raise _missing(of)


def _missing(path: Path) -> Missing:
    return Missing(f"{path} does not exist (No such file or directory)", "create it, or correct the path")


def _is_directory(path: Path) -> DiskError:
    return DiskError(f"{path} cannot be used (Is a directory)", "use the path of a file")


PROGRESS_STEPS: Final = 4


class ArtifactSources:
    """The artifacts that can be fetched: content of each source, and how long a fetch takes. The simulation fills it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.takes_s = 0.02
        self.fails = False
        """Fetches fail for now."""


class SimArtifactFetcher:
    def __init__(self, disk: SimDisk, depot: ArtifactSources, alive: Callable[[], bool]) -> None:
        self._disk, self._entries, self._depot = disk.mount(alive), disk, depot

    async def fetch(
        self, source: str, to: Path, /, *, sha256: str, reach: Reach, bounds: FetchBounds = FetchBounds(), tell: Progress
    ) -> int:
        _check_source(source, reach)
        content = self._depot.files.get(source)
        await asyncio.sleep(self._depot.takes_s / PROGRESS_STEPS)
        if content is None or self._depot.fails:
            raise NotFetched(f"{source} cannot be reached", "check that the source is available", again=self._depot.fails)
        if len(content) > bounds.bytes_max:
            raise NotFetched(f"the artifact has more than {bounds.bytes_max >> 20} MiB", "make it smaller, or split it")
        for part in range(1, PROGRESS_STEPS):
            tell(len(content) * part // PROGRESS_STEPS, len(content))
            await asyncio.sleep(self._depot.takes_s / PROGRESS_STEPS)
        tell(len(content), len(content))
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise NotFetched(f"the content has digest {found}, not {sha256}", "correct sha256 if this is the intended content")
        self._disk.write_atomically(to, content)
        return len(content)

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", bounds: UnpackBounds = UnpackBounds()
    ) -> Unpacked:
        await asyncio.sleep(self._depot.takes_s / PROGRESS_STEPS)
        files = size = 0
        self._disk.make_directory(into, durably=False)
        try:
            with tarfile.open(fileobj=io.BytesIO(self._disk.read(archive))) as tar:
                for one in tar:
                    files, size = files + 1, size + one.size
                    steps = PurePosixPath(one.name)
                    if steps.is_absolute() or ".." in steps.parts or not (one.isreg() or one.isdir()):
                        cause = f"{one.name!r} is outside of the target directory, or is neither file nor directory"
                        raise NotUnpacked(cause, "create the archive with relative names of files")
                    if files > bounds.files_max or size > bounds.bytes_max:
                        cause = f"the archive has more than {bounds.files_max} files or {bounds.bytes_max} bytes"
                        raise NotUnpacked(cause, "make it smaller")
                    content = tar.extractfile(one)
                    if content is None:
                        self._disk.make_directory(into / steps, durably=False)
                    else:
                        self._put(into / steps, content.read())
        except tarfile.TarError as error:
            raise NotUnpacked(f"not a readable archive ({error})", "create a tar or zip archive") from error
        return Unpacked(files, size)

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        content = self._disk.read(file)
        if self._disk.exists(to):
            raise NotUnpacked(f"{to.name} already exists", "give each artifact its own path")
        self._put(to, content)

    async def make(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        self._disk.make_directory(directory, durably=False)

    async def lead(self, link: Path, target: Path, /, *, below: Path) -> None:
        raise NotUnpacked("the simulated disk has no symbolic links", "use a sandbox")

    async def publish(self, made: Path, to: Path, /) -> None:
        if self._disk.exists(to):
            raise Busy(f"{to} already exists", "remove it, or use another name")
        if not self._disk.exists(made):
            raise Missing(f"{made} does not exist", "create it, or correct the path")
        self._entries.move(made, to)

    async def stamp(self, path: Path, /) -> str:
        try:
            return hashlib.sha256(self._disk.read(path)).hexdigest()
        except DiskError:
            return ""

    async def digest(self, path: Path, /) -> str:
        return hashlib.sha256(self._disk.read(path)).hexdigest()

    async def size(self, directory: Path, /) -> int:
        return self._entries.bytes_below(directory)

    async def stands(self, directory: Path, lent: tuple[Path, ...], /) -> Path | None:
        inside = any(one == directory or one in directory.parents for one in lent)
        return directory if inside and self._disk.exists(directory) else None

    def _put(self, path: Path, content: bytes) -> None:
        self._disk.make_directory(path.parent, durably=False)
        self._disk.write_atomically(path, content)


def _check_source(source: str, reach: Reach) -> None:
    try:
        address = parse_source(source)
    except InvalidSource as error:
        raise NotFetched(f"source {error.cause}", error.cure) from error
    if address.scheme == "file":
        if not any(one in Path(address.path).parents for one in reach.directories):
            raise NotFetched(f"{address.path} is not below an artifact directory", "start the agent with --artifact-dir")
        return
    why = host_denial_reason(address.host, reach.hosts)
    if why:
        raise NotFetched(f"fetching from this host is not allowed: {why}", "use a public host")


_SECRETS_ROOT: Final = Path("/vault")


class SimSecretFiles:
    def __init__(self) -> None:
        self.held: dict[str, dict[PurePosixPath, bytes]] = {}

    def put(self, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        self.held[name] = dict(files)
        return self.place(name)

    def place(self, name: str, /) -> Path:
        return _SECRETS_ROOT / name

    def has(self, name: str, /) -> bool:
        return name in self.held

    def remove(self, name: str, /) -> None:
        self.held.pop(name, None)

    def names(self) -> tuple[str, ...]:
        return tuple(self.held)
