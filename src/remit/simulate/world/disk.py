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
from remit.world.interfaces import (
    READ_BYTES_MAX,
    Disk,
    DiskError,
    DiskFull,
    FetchLimits,
    FetchPermissions,
    FetchProgress,
    FileBusy,
    FileMissing,
    FileTooLarge,
    NotDurable,
    NotFetched,
    NotUnpacked,
    Randomness,
    UnpackLimits,
    UnpackResult,
)

_TEMPORARY_SUFFIX: Final = ".writing"
"""The real disk hides names with this suffix: they are temporary files of atomic writes."""
_ROOT: Final = Path("/")

Entry = bytes | None
"""The content of a file, or None for a directory. A path that does not exist has no entry."""


class ProcessKilled(DiskError):
    """The calling process was killed: none of its operations reach the disk any more."""


class SimDisk:
    """The disk of one machine. It outlives the processes, and each process has its own `mount`.

    The simulation switches its faults: `full` rejects what needs space, `failing` rejects everything, and `not_syncing` makes
    changes visible without syncing them.
    """

    def __init__(self, *, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.full = self.failing = self.not_syncing = False
        self._entries: dict[Path, Entry] = {_ROOT: None}
        self._unsynced: dict[Path, list[Entry | FileMissing]] = {}
        """Earlier contents of each path with unsynced changes, oldest first: a crash may bring any of them back."""
        self._locks: dict[Path, _LockHolder] = {}

    @property
    def rejects_writes(self) -> bool:
        return self.full or self.failing

    def mount(self, alive: Callable[[], bool]) -> Disk:
        """The disk as one process sees it, until `alive()` returns false."""
        return _Mount(self, alive)

    def crash(self, randomness: Randomness) -> None:
        """The machine lost power; its processes must be dead already. Each unsynced path gets one of its earlier contents or
        its latest one.
        """
        self._locks.clear()
        unsynced, self._unsynced = sorted(self._unsynced.items()), {}
        for path, earlier in unsynced:
            now = self._entries[path] if path in self._entries else _missing(path)
            self._restore_content(path, randomness.choice([*earlier, now]))

    def used_bytes(self) -> int:
        return sum(len(content) for content in self._entries.values() if content is not None)

    def free_bytes(self) -> int:
        return 0 if self.full else max(0, self.capacity_bytes - self.used_bytes())

    # Called by a mount after it has checked that its process is alive. Paths are absolute and normalized.

    def entry(self, path: Path) -> Entry | FileMissing:
        """Return the entry, or why it is missing. A path whose parent is a file is missing too, as on the real disk."""
        self.check_works(path)
        return self._entries[path] if path in self._entries else _missing(path)

    def put(self, path: Path, content: Entry) -> None:
        """Set the content of `path`. Old and new content exist at the same time, so space for both is needed."""
        if self.full or len(content or b"") > self.free_bytes():
            raise DiskFull(f"no space for {path} (No space left on device)", "free space on this disk")
        self._record_earlier(path)
        self._entries[path] = content
        self._locks.pop(path, None)  # a lock is on the replaced file, not on the new one

    def drop(self, path: Path) -> None:
        self._record_earlier(path)
        self._entries.pop(path, None)
        self._locks.pop(path, None)

    def sync(self, directory: Path) -> None:
        """Sync a directory: all changes of names in it are then durable, also earlier ones."""
        if self.not_syncing:
            cause = f"{directory} could not be synced (Input/output error)"
            raise NotDurable(cause, "repair the disk, then retry")
        for path in [path for path in self._unsynced if path.parent == directory]:
            del self._unsynced[path]

    def names(self, directory: Path) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in self._entries if path.parent == directory and path != _ROOT))

    def tree_of(self, directory: Path) -> list[Path]:
        """The directory and everything in it, innermost first."""
        inside = [path for path in self._entries if path == directory or directory in path.parents]
        return sorted(inside, key=lambda path: (-len(path.parts), path))

    def move(self, source: Path, to: Path) -> None:
        """Move a tree atomically, without syncing it."""
        for inside in reversed(self.tree_of(source)):
            content = self._entries[inside]
            self.drop(inside)
            self.put(to / inside.relative_to(source), content)

    def bytes_below(self, directory: Path) -> int:
        return sum(len(self._entries[path] or b"") for path in self.tree_of(directory))

    def acquire_lock(self, path: Path, holder: _LockHolder) -> None:
        if path in self._locks and self._locks[path].alive():
            raise FileBusy(f"{path} is locked by another process", "stop that process, or use another path")
        self._locks[path] = holder

    def release_lock(self, path: Path, holder: _LockHolder) -> None:
        if self._locks.get(path) is holder:
            del self._locks[path]

    def check_works(self, path: Path) -> None:
        if self.failing:
            raise DiskError(f"{path} cannot be used (Input/output error)", "repair the disk, or use another path")

    def _record_earlier(self, path: Path) -> None:
        before = self._entries[path] if path in self._entries else _missing(path)
        self._unsynced.setdefault(path, []).append(before)

    def _restore_content(self, path: Path, content: Entry | FileMissing) -> None:
        if not isinstance(content, FileMissing):
            if path.parent in self._entries:  # otherwise the directory itself was lost, with everything in it
                self._entries[path] = content
            return
        for inside in [entry_path for entry_path in self._entries if entry_path == path or path in entry_path.parents]:
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
        resolved = self._resolve(path)
        entry = self._disk.entry(resolved)
        if isinstance(entry, FileMissing):
            raise entry
        if entry is None:
            raise _is_directory(resolved)
        if len(entry) > bytes_max:
            raise FileTooLarge(f"{path} has more than {bytes_max} bytes", "check which program wrote it, and move it away")
        return entry

    def write_atomically(self, path: Path, data: bytes) -> None:
        resolved = self._resolve(path)
        self._check_directory(resolved.parent, resolved)
        if self._disk.entry(resolved) is None:
            raise _is_directory(resolved)
        self._disk.put(resolved, bytes(data))
        self._disk.sync(resolved.parent)

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        resolved = self._resolve(path)
        self._check_directory(resolved.parent, resolved)
        entry = self._disk.entry(resolved)
        if entry is None:
            raise _is_directory(resolved)
        self._disk.put(resolved, (b"" if isinstance(entry, FileMissing) else entry) + bytes(data))
        if durably:
            self._disk.sync(resolved.parent)

    def exists(self, path: Path) -> bool:
        return not isinstance(self._disk.entry(self._resolve(path)), FileMissing)

    def remove(self, path: Path) -> None:
        resolved = self._resolve(path)
        entry, parent = self._disk.entry(resolved), self._disk.entry(resolved.parent)
        if entry is None:
            raise _is_directory(resolved)
        if isinstance(parent, bytes):
            raise _missing(resolved)
        if not isinstance(entry, FileMissing):
            self._disk.drop(resolved)
        if parent is None:
            self._disk.sync(resolved.parent)  # also if the file was already gone: an earlier removal may be unsynced

    def make_directory(self, path: Path, *, durably: bool = True) -> None:
        resolved = self._resolve(path)
        missing = [directory for directory in resolved.parents if isinstance(self._disk.entry(directory), FileMissing)]
        for directory in (*reversed(missing), resolved):
            self._check_directory(directory.parent, directory)
            entry = self._disk.entry(directory)
            if isinstance(entry, FileMissing):
                self._disk.put(directory, None)
            elif entry is not None:
                raise DiskError(f"{directory} is not a directory", "move it away, or use another path")
            if durably:
                self._disk.sync(directory.parent)

    def remove_tree(self, path: Path) -> None:
        resolved = self._resolve(path)
        for inside in self._disk.tree_of(resolved):
            self._disk.drop(inside)

    def list(self, directory: Path) -> tuple[str, ...]:
        resolved = self._resolve(directory)
        self._check_directory(resolved, resolved)
        names = self._disk.names(resolved)
        return tuple(name for name in names if not (name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)))

    def free_bytes(self, path: Path) -> int:
        entry = self._disk.entry(self._resolve(path))
        if isinstance(entry, FileMissing):
            raise entry
        return self._disk.free_bytes()

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        resolved = self._resolve(path)
        self._check_directory(resolved.parent, resolved)
        entry = self._disk.entry(resolved)
        if entry is None:
            raise _is_directory(resolved)
        if isinstance(entry, FileMissing):
            self._disk.put(resolved, b"")
        holder = _LockHolder(self._alive)
        self._disk.acquire_lock(resolved, holder)
        try:
            yield
        finally:
            self._disk.release_lock(resolved, holder)

    def _resolve(self, path: Path) -> Path:
        if not self._alive():
            raise ProcessKilled(f"the process that uses {path} was killed", "restart it")
        if not path.is_absolute():
            raise ValueError(f"{path} is relative; a simulated machine has no current directory, use an absolute path")
        return Path(os.path.normpath(path))

    def _check_directory(self, directory: Path, of: Path) -> None:
        if self._disk.entry(directory) is not None:
            raise _missing(of)


def _missing(path: Path) -> FileMissing:
    return FileMissing(f"{path} does not exist (No such file or directory)", "create it, or correct the path")


def _is_directory(path: Path) -> DiskError:
    return DiskError(f"{path} cannot be used (Is a directory)", "use the path of a file")


PROGRESS_STEPS: Final = 4


class ArtifactSources:
    """The artifacts that can be fetched: content of each source, and how long a fetch takes. The simulation fills it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fetch_s = 0.02
        self.unavailable = False
        """Fetches fail for now."""


class SimArtifactFetcher:
    def __init__(self, disk: SimDisk, sources: ArtifactSources, alive: Callable[[], bool]) -> None:
        self._disk, self._entries, self._sources = disk.mount(alive), disk, sources

    async def fetch(
        self,
        source: str,
        to: Path,
        /,
        *,
        sha256: str,
        permissions: FetchPermissions,
        limits: FetchLimits = FetchLimits(),
        on_progress: FetchProgress,
    ) -> int:
        _check_source(source, permissions)
        content = self._sources.files.get(source)
        await asyncio.sleep(self._sources.fetch_s / PROGRESS_STEPS)
        if content is None or self._sources.unavailable:
            raise NotFetched(
                f"{source} cannot be reached", "check that the source is available", retryable=self._sources.unavailable
            )
        if len(content) > limits.bytes_max:
            raise NotFetched(f"the artifact has more than {limits.bytes_max >> 20} MiB", "make it smaller, or split it")
        for step in range(1, PROGRESS_STEPS):
            on_progress(len(content) * step // PROGRESS_STEPS, len(content))
            await asyncio.sleep(self._sources.fetch_s / PROGRESS_STEPS)
        on_progress(len(content), len(content))
        actual = hashlib.sha256(content).hexdigest()
        if actual != sha256:
            raise NotFetched(f"the content has digest {actual}, not {sha256}", "correct sha256 if this is the intended content")
        self._disk.write_atomically(to, content)
        return len(content)

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", limits: UnpackLimits = UnpackLimits()
    ) -> UnpackResult:
        await asyncio.sleep(self._sources.fetch_s / PROGRESS_STEPS)
        files = size = 0
        self._disk.make_directory(into, durably=False)
        try:
            with tarfile.open(fileobj=io.BytesIO(self._disk.read(archive))) as tar:
                for member in tar:
                    files, size = files + 1, size + member.size
                    steps = PurePosixPath(member.name)
                    if steps.is_absolute() or ".." in steps.parts or not (member.isreg() or member.isdir()):
                        cause = f"{member.name!r} is outside of the target directory, or is neither file nor directory"
                        raise NotUnpacked(cause, "create the archive with relative names of files")
                    if files > limits.files_max or size > limits.bytes_max:
                        cause = f"the archive has more than {limits.files_max} files or {limits.bytes_max} bytes"
                        raise NotUnpacked(cause, "make it smaller")
                    content = tar.extractfile(member)
                    if content is None:
                        self._disk.make_directory(into / steps, durably=False)
                    else:
                        self._put(into / steps, content.read())
        except tarfile.TarError as error:
            raise NotUnpacked(f"not a readable archive ({error})", "create a tar or zip archive") from error
        return UnpackResult(files, size)

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        content = self._disk.read(file)
        if self._disk.exists(to):
            raise NotUnpacked(f"{to.name} already exists", "give each artifact its own path")
        self._put(to, content)

    async def make_directory(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        self._disk.make_directory(directory, durably=False)

    async def symlink(self, link: Path, target: Path, /, *, below: Path) -> None:
        raise NotUnpacked("the simulated disk has no symbolic links", "use a sandbox")

    async def publish(self, source: Path, to: Path, /) -> None:
        if self._disk.exists(to):
            raise FileBusy(f"{to} already exists", "remove it, or use another name")
        if not self._disk.exists(source):
            raise FileMissing(f"{source} does not exist", "create it, or correct the path")
        self._entries.move(source, to)

    async def change_stamp(self, path: Path, /) -> str:
        try:
            return hashlib.sha256(self._disk.read(path)).hexdigest()
        except DiskError:
            return ""

    async def digest(self, path: Path, /) -> str:
        return hashlib.sha256(self._disk.read(path)).hexdigest()

    async def size(self, directory: Path, /) -> int:
        return self._entries.bytes_below(directory)

    async def resolve_allowed(self, directory: Path, allowed: tuple[Path, ...], /) -> Path | None:
        inside = any(root == directory or root in directory.parents for root in allowed)
        return directory if inside and self._disk.exists(directory) else None

    def _put(self, path: Path, content: bytes) -> None:
        self._disk.make_directory(path.parent, durably=False)
        self._disk.write_atomically(path, content)


def _check_source(source: str, permissions: FetchPermissions) -> None:
    try:
        address = parse_source(source)
    except InvalidSource as error:
        raise NotFetched(f"source {error.cause}", error.cure) from error
    if address.scheme == "file":
        if not any(directory in Path(address.path).parents for directory in permissions.directories):
            raise NotFetched(f"{address.path} is not below an artifact directory", "start the agent with --artifact-dir")
        return
    reason = host_denial_reason(address.host, permissions.hosts)
    if reason:
        raise NotFetched(f"fetching from this host is not allowed: {reason}", "use a public host")


_SECRETS_ROOT: Final = Path("/vault")


class SimSecretFiles:
    def __init__(self) -> None:
        self.files: dict[str, dict[PurePosixPath, bytes]] = {}

    def put(self, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        self.files[name] = dict(files)
        return self.path_of(name)

    def path_of(self, name: str, /) -> Path:
        return _SECRETS_ROOT / name

    def has(self, name: str, /) -> bool:
        return name in self.files

    def remove(self, name: str, /) -> None:
        self.files.pop(name, None)

    def names(self) -> tuple[str, ...]:
        return tuple(self.files)
