"""What is left on a machine's disk when the machine or one of its processes dies? In memory: no real file is touched.

A change is whole at once. What was not forced to the device (`Unsettled`) is remembered with all that was there before, and a
crash of the machine draws which of these it finds. SQLite's files are not in here: torn.py keeps those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from remit.world.promises import READ_BYTES_MAX, Busy, Chance, Disk, DiskError, Missing, NoRoom, TooLarge, Unsettled

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
