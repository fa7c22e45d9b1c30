"""Simulated disk with crash semantics, in-memory secret files, artifact fetching.

In memory: no real file is touched.

A change is whole at once. What was not forced to the device (`Unsettled`) is remembered with all that was there before, and a
crash of the machine draws which of these it finds. SQLite's files are not in here: torn.py keeps those.

Files by their source, in memory; nothing is reached.

The twin of `world.carrier.FileCarrier`. Its disk knows no links and no owners, so an archive with a link in it is refused here.

In the memory of its machine, which forgets them with its power.

The twin of `world.vault.FileVault`.
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

from remit.law.fetch_policy import why_no_host
from remit.model.artifacts import Unreadable, read_source
from remit.world.files.artifacts import FetchBounds, NotFetched, NotUnpacked, Progress, Reach, UnpackBounds, Unpacked
from remit.world.interfaces import READ_BYTES_MAX, Busy, Chance, Disk, DiskError, Missing, NoRoom, TooLarge, Unsettled

_WRITING: Final = ".writing"
"""The real disk hides names that end so: they are its half-written neighbours."""
_ROOT: Final = Path("/")

Entry = bytes | None
"""A file's content, or None for a directory. What is not there has no entry."""


class Killed(DiskError):
    """The process that asks was killed: nothing that it still does reaches the disk."""


class SimDisk:
    """One machine's disk. It outlives its processes, of which each has a `mount` of its own.

    The faults are switched by whoever runs the simulation: `full` refuses what needs room, `failing` refuses everything, and
    `unsettling` makes changes visible without forcing them to the device.
    """

    def __init__(self, *, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.full = self.failing = self.unsettling = False
        self._entries: dict[Path, Entry] = {_ROOT: None}
        self._before: dict[Path, list[Entry | Missing]] = {}
        """For each path that a crash may change: what it was since the last time it was surely forced, oldest first."""
        self._holders: dict[Path, _Holder] = {}

    @property
    def takes_nothing(self) -> bool:
        return self.full or self.failing

    def mount(self, alive: Callable[[], bool]) -> Disk:
        """The disk as one process sees it, until `alive()` is false."""
        return _Mount(self, alive)

    def crash(self, chance: Chance) -> None:
        """The machine lost power. Its processes must be dead by now: each path that was not forced is one of what it was."""
        self._holders.clear()
        unsettled, self._before = sorted(self._before.items()), {}
        for path, earlier in unsettled:
            now = self._entries[path] if path in self._entries else _absent(path)
            self._put_back(path, chance.choice([*earlier, now]))

    def used_bytes(self) -> int:
        return sum(len(content) for content in self._entries.values() if content is not None)

    def free_bytes(self) -> int:
        return 0 if self.full else max(0, self.capacity_bytes - self.used_bytes())

    # What a mount does here, once it knows that its process lives. Paths are whole and plain.

    def entry(self, path: Path) -> Entry | Missing:
        """Nothing can be looked up under a file: that is told as missing, as the real disk does."""
        self.check_works(path)
        return self._entries[path] if path in self._entries else _absent(path)

    def put(self, path: Path, content: Entry) -> None:
        """Make `path` be that. A second path for the new content is needed before the old one goes, so both need room."""
        if self.full or len(content or b"") > self.free_bytes():
            raise NoRoom(f"no room for {path} (No space left on device)", "free space there")
        self._note(path)
        self._entries[path] = content
        self._holders.pop(path, None)  # a new file took the place of the one that was locked

    def drop(self, path: Path) -> None:
        self._note(path)
        self._entries.pop(path, None)
        self._holders.pop(path, None)

    def force(self, directory: Path) -> None:
        """All names in `directory` are then on the device, also those of earlier changes."""
        if self.unsettling:
            cause = f"{directory} could not be forced to disk (Input/output error)"
            raise Unsettled(cause, "mend the disk, then do it again")
        for path in [path for path in self._before if path.parent == directory]:
            del self._before[path]

    def names(self, directory: Path) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in self._entries if path.parent == directory and path != _ROOT))

    def under(self, directory: Path) -> list[Path]:
        """It and all that is in it, the innermost first."""
        inside = [path for path in self._entries if path == directory or directory in path.parents]
        return sorted(inside, key=lambda path: (-len(path.parts), path))

    def move(self, made: Path, to: Path) -> None:
        """All of it at once, and nothing of it is forced."""
        for inside in reversed(self.under(made)):
            content = self._entries[inside]
            self.drop(inside)
            self.put(to / inside.relative_to(made), content)

    def bytes_below(self, directory: Path) -> int:
        return sum(len(self._entries[path] or b"") for path in self.under(directory))

    def hold(self, path: Path, holder: _Holder) -> None:
        if path in self._holders and self._holders[path].alive():
            raise Busy(f"{path} is held by another process", "stop that one, or use another place")
        self._holders[path] = holder

    def let_go(self, path: Path, holder: _Holder) -> None:
        if self._holders.get(path) is holder:
            del self._holders[path]

    def check_works(self, path: Path) -> None:
        if self.failing:
            raise DiskError(f"{path} cannot be used (Input/output error)", "mend the disk, or use another place")

    def _note(self, path: Path) -> None:
        was = self._entries[path] if path in self._entries else _absent(path)
        self._before.setdefault(path, []).append(was)

    def _put_back(self, path: Path, found: Entry | Missing) -> None:
        if not isinstance(found, Missing):
            if path.parent in self._entries:  # else the directory itself was lost, with all that is in it
                self._entries[path] = found
            return
        for inside in [one for one in self._entries if one == path or path in one.parents]:
            del self._entries[inside]


class _Holder:
    """Who has a lock. Each hold is another one, so that nobody lets go of a later holder's."""

    def __init__(self, alive: Callable[[], bool]) -> None:
        self.alive = alive


class _Mount:
    """`Disk` for one process. Each deed happens at one instant, so that no second writer can be in the middle of one."""

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
            raise TooLarge(f"{path} has more than {bytes_max} bytes", "see what wrote it; move it away")
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
            raise _absent(place)
        if not isinstance(found, Missing):
            self._disk.drop(place)
        if parent is None:
            self._disk.force(place.parent)  # also if it was gone: an earlier removal may not have been forced

    def make_directory(self, path: Path, *, durably: bool = True) -> None:
        place = self._place(path)
        missing = [one for one in place.parents if isinstance(self._disk.entry(one), Missing)]
        for one in (*reversed(missing), place):
            self._check_directory(one.parent, one)
            found = self._disk.entry(one)
            if isinstance(found, Missing):
                self._disk.put(one, None)
            elif found is not None:
                raise DiskError(f"{one} is no directory", "move it away, or use another place")
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
        return tuple(name for name in names if not (name.startswith(".") and name.endswith(_WRITING)))

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
        holder = _Holder(self._alive)
        self._disk.hold(place, holder)
        try:
            yield
        finally:
            self._disk.let_go(place, holder)

    def _place(self, path: Path) -> Path:
        if not self._alive():
            raise Killed(f"the process that uses {path} was killed", "start it anew")
        if not path.is_absolute():
            raise ValueError(f"{path} is relative, and a simulated machine has no current directory")
        return Path(os.path.normpath(path))

    def _check_directory(self, directory: Path, of: Path) -> None:
        if self._disk.entry(directory) is not None:
            raise _absent(of)


def _absent(path: Path) -> Missing:
    return Missing(f"{path} is not there (No such file or directory)", "make it, or correct the path")


def _is_directory(path: Path) -> DiskError:
    return DiskError(f"{path} cannot be used (Is a directory)", "mend the disk, or use another place")


PIECES: Final = 4


class Depot:
    """All that can be fetched: what each source has, and how long it takes. Whoever runs the simulation fills it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.takes_s = 0.02
        self.fails = False
        """Nothing can be reached for now."""


class SimCarrier:
    def __init__(self, disk: SimDisk, depot: Depot, alive: Callable[[], bool]) -> None:
        self._disk, self._entries, self._depot = disk.mount(alive), disk, depot

    async def fetch(
        self, source: str, to: Path, /, *, sha256: str, reach: Reach, bounds: FetchBounds = FetchBounds(), tell: Progress
    ) -> int:
        _check_source(source, reach)
        content = self._depot.files.get(source)
        await asyncio.sleep(self._depot.takes_s / PIECES)
        if content is None or self._depot.fails:
            raise NotFetched(f"{source} cannot be reached", "see whether it is well", again=self._depot.fails)
        if len(content) > bounds.bytes_max:
            raise NotFetched(f"it has more than {bounds.bytes_max >> 20} MiB", "make it smaller, or several of it")
        for part in range(1, PIECES):
            tell(len(content) * part // PIECES, len(content))
            await asyncio.sleep(self._depot.takes_s / PIECES)
        tell(len(content), len(content))
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise NotFetched(f"what came has the digest {found}, not {sha256}", "correct sha256, if that is what it should be")
        self._disk.write_atomically(to, content)
        return len(content)

    async def unpack(
        self, archive: Path, into: Path, /, *, below: Path, user: str = "", bounds: UnpackBounds = UnpackBounds()
    ) -> Unpacked:
        await asyncio.sleep(self._depot.takes_s / PIECES)
        files = size = 0
        self._disk.make_directory(into, durably=False)
        try:
            with tarfile.open(fileobj=io.BytesIO(self._disk.read(archive))) as tar:
                for one in tar:
                    files, size = files + 1, size + one.size
                    steps = PurePosixPath(one.name)
                    if steps.is_absolute() or ".." in steps.parts or not (one.isreg() or one.isdir()):
                        raise NotUnpacked(f"{one.name!r} leads out of its directory", "make it anew with names below it")
                    if files > bounds.files_max or size > bounds.bytes_max:
                        raise NotUnpacked("it comes to more than it may", "make it smaller")
                    content = tar.extractfile(one)
                    if content is None:
                        self._disk.make_directory(into / steps, durably=False)
                    else:
                        self._put(into / steps, content.read())
        except tarfile.TarError as error:
            raise NotUnpacked(f"it is no archive that can be read ({error})", "make a tar or zip archive of it") from error
        return Unpacked(files, size)

    async def place(self, file: Path, to: Path, /, *, below: Path, user: str = "") -> None:
        content = self._disk.read(file)
        if self._disk.exists(to):
            raise NotUnpacked(f"{to.name} cannot be put there (file exists)", "give each artifact a path of its own")
        self._put(to, content)

    async def make(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        self._disk.make_directory(directory, durably=False)

    async def lead(self, link: Path, target: Path, /, *, below: Path) -> None:
        raise NotUnpacked("this disk knows no links", "use a sandbox")

    async def publish(self, made: Path, to: Path, /) -> None:
        if self._disk.exists(to):
            raise Busy(f"{to} is there already", "remove it, or use another name")
        if not self._disk.exists(made):
            raise Missing(f"{made} is not there", "make it, or correct the path")
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
        address = read_source(source)
    except Unreadable as error:
        raise NotFetched(f"an address {error.cause}", error.cure) from error
    if address.scheme == "file":
        if not any(one in Path(address.path).parents for one in reach.directories):
            raise NotFetched(f"{address.path} is in no directory that this node lends", "start its agent with --artifact-dir")
        return
    why = why_no_host(address.host, reach.hosts)
    if why:
        raise NotFetched(f"nothing is fetched from there: {why}", "use a public one")


_SECRETS_ROOT: Final = Path("/vault")


class SimVault:
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
