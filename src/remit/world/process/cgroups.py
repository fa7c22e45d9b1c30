"""Control groups (cgroup v1 and v2): limits, usage, kill.

A machine has cgroup v2, v1, or both at once (then controllers such as memory are in v1, and v2 serves to kill a tree in one
step). So every mounted hierarchy that proves usable is used, and a group is a directory of the same name in each of them.
Usability is found by trying (cgroup_discovery.py): the files say little about what a container or a missing permission
forbids.

Names are reused, but a name together with the inode of its directory is not, so a recorded group is never confused with a
later one. Empty groups are removed; a group with processes is never handed out again.
"""

# Paths are strings here: each start and end uses a dozen of them, and a `Path` costs as much as the system call it is for.
# ruff: noqa: PTH102, PTH106, PTH116

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple

from remit.world.interfaces import Limits, Usage

PARENT: Final = "remit"
WANTED: Final = ("cpu", "cpuacct", "memory", "pids")
_ENTRANCE: Final = "cgroup.procs"
_ALONE: Final = 2
"""Link count of a directory without subdirectories: its name and its dot."""
_PIECE: Final = 1 << 16
_SHARES_MIN, _SHARES_MAX = 2, 262_144
_GONE: Final = (errno.ENOENT, errno.ENODEV)
"""Errors of a cgroup that does not exist any more: reading in a removed one returns ENODEV."""


class Occupied(Exception):
    """The group still has processes."""


class Hierarchy:
    """One mounted cgroup hierarchy, and our directory in it. Subclasses implement v1 and v2."""

    version: ClassVar[Literal["v1", "v2"]]

    def __init__(self, parent: Path, controllers: Iterable[str], *, kills: bool = False) -> None:
        self.parent, self._at = parent, str(parent)
        self.controllers = frozenset(controllers)
        self.kills = kills
        """Whether one write kills all members, including processes being forked."""

    def limit(self, name: str, limits: Limits) -> None:
        raise NotImplementedError

    def memory_bytes(self, name: str) -> int:
        raise NotImplementedError

    def cpu_ms(self, name: str) -> int:
        raise NotImplementedError

    def oom_kills(self, name: str) -> int:
        raise NotImplementedError

    def members(self, name: str) -> list[int]:
        """Return the pids in the group and in groups below it: a process may create cgroups below its own."""
        found: set[int] = set()
        for place in _below(self.of(name)):
            found.update(map(int, _text(f"{place}/{_ENTRANCE}").split()))
        return sorted(found)

    def remove(self, name: str) -> bool:
        """Remove the group and those below it. Returns False if it has processes."""
        for place in _below(self.of(name)):
            try:
                os.rmdir(place)
            except OSError as error:
                if error.errno not in _GONE:
                    return False
        return True

    def stop_births(self, name: str) -> None:
        """Forbid forks in the group, so that killing its processes one by one comes to an end."""
        if "pids" in self.controllers:
            for place in _below(self.of(name)):
                _write(f"{place}/pids.max", "0")

    def pids(self, name: str) -> int:
        return int(_text(self.of(name, "pids.current")) or 0)

    def of(self, name: str, file: str = "") -> str:
        return f"{self._at}/{name}/{file}" if file else f"{self._at}/{name}"

    def set(self, name: str, file: str, value: int) -> None:
        _put(self.of(name, file), str(value))


class V1(Hierarchy):
    version = "v1"

    def limit(self, name: str, limits: Limits) -> None:
        if limits.memory_bytes and "memory" in self.controllers:
            self.set(name, "memory.limit_in_bytes", limits.memory_bytes)
            # Memory and swap together: otherwise the excess is swapped out. The file is absent if swap is not accounted.
            _write(self.of(name, "memory.memsw.limit_in_bytes"), str(limits.memory_bytes))
        if limits.cpu_milli and "cpu" in self.controllers:
            self.set(name, "cpu.shares", shares(limits.cpu_milli))
        if limits.pids and "pids" in self.controllers:
            self.set(name, "pids.max", limits.pids)

    def memory_bytes(self, name: str) -> int:
        used = int(_text(self.of(name, "memory.usage_in_bytes")) or 0)
        return max(0, used - _fields(self.of(name, "memory.stat")).get("total_inactive_file", 0))

    def cpu_ms(self, name: str) -> int:
        return int(_text(self.of(name, "cpuacct.usage")) or 0) // 1_000_000

    def oom_kills(self, name: str) -> int:
        # Kernels before 4.13 do not count OOM kills; there, hitting the limit is the only evidence.
        told = _fields(self.of(name, "memory.oom_control"))
        return told["oom_kill"] if "oom_kill" in told else int(_text(self.of(name, "memory.failcnt")) or 0)


class V2(Hierarchy):
    version = "v2"

    def limit(self, name: str, limits: Limits) -> None:
        if limits.memory_bytes and "memory" in self.controllers:
            self.set(name, "memory.max", limits.memory_bytes)
            _write(self.of(name, "memory.swap.max"), "0")
            _write(self.of(name, "memory.oom.group"), "1")  # kill all processes together: a part of a process tree is of no use
        if limits.cpu_milli and "cpu" in self.controllers:
            self.set(name, "cpu.weight", weight(limits.cpu_milli))
        if limits.pids and "pids" in self.controllers:
            self.set(name, "pids.max", limits.pids)

    def memory_bytes(self, name: str) -> int:
        used = int(_text(self.of(name, "memory.current")) or 0)
        return max(0, used - _fields(self.of(name, "memory.stat")).get("inactive_file", 0))

    def cpu_ms(self, name: str) -> int:
        return _fields(self.of(name, "cpu.stat")).get("usage_usec", 0) // 1_000

    def oom_kills(self, name: str) -> int:
        return _fields(self.of(name, "memory.events")).get("oom_kill", 0)


class Birthplace(NamedTuple):
    """Descriptors for a start inside a group: the v2 directory in which the process is created (0: none), and the v1 files that
    it joins by writing 0.

    For v1 these are the `tasks` files: moving a thread needs no global lock, moving a process does.
    """

    into: int
    entrances: tuple[int, ...]


class GroupMark(NamedTuple):
    """Recorded identity of a group: its name, and the inode of its directory, which is unique."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


def mark_of(text: str) -> GroupMark | None:
    name, _, number = text.rpartition("#")
    return GroupMark(name, int(number)) if name and number.isascii() and number.isdigit() else None


class Cgroups:
    """All usable hierarchies as one. There may be none; then there are no groups."""

    def __init__(self, hierarchies: Sequence[Hierarchy], why: str = "") -> None:
        self._all = tuple(sorted(hierarchies, key=lambda one: (not one.kills, one.version != "v2", one.parent)))
        self.why = why
        """Which limits are missing and why; empty if none are."""

    @property
    def name(self) -> Literal["v2", "v1", "none"]:
        """The version that enforces limits. A v2 hierarchy that can only kill may exist next to v1 controllers."""
        limiting = [one for one in self._all if one.controllers & {"memory", "pids", "cpu"}]
        return (limiting or list(self._all))[0].version if self._all else "none"

    @property
    def controllers(self) -> tuple[str, ...]:
        found = {name for one in self._all for name in one.controllers}
        return tuple(sorted(found | ({"kill"} if any(one.kills for one in self._all) else set())))

    def make(self, name: str, limits: Limits) -> GroupMark:
        """Create an empty group with limits. Raises `GroupOccupied`, or OSError."""
        try:
            os.mkdir(self._all[0].of(name), 0o755)  # usually it does not exist
        except FileExistsError:
            if not self.remove(name):
                raise Occupied(name) from None
            os.mkdir(self._all[0].of(name), 0o755)
        try:
            for one in self._all:
                with suppress(FileExistsError):  # the first was created above; others may be empty remains of an earlier group
                    os.mkdir(one.of(name), 0o755)
                one.limit(name, limits)
            return GroupMark(name, os.stat(self._all[0].of(name)).st_ino)
        except OSError:
            self.remove(name)
            raise

    def places(self, name: str) -> list[str]:
        """Return the group's directory in each hierarchy. The first one provides its inode and its members."""
        return [one.of(name) for one in self._all]

    @contextmanager
    def entrances(self, name: str) -> Iterator[tuple[int, ...]]:
        """Yield descriptors: a process that writes 0 to each of them joins the group."""
        with ExitStack() as opened:
            yield tuple(_opened(one.of(name, _ENTRANCE), os.O_WRONLY, opened) for one in self._all)

    @contextmanager
    def birthplace(self, name: str) -> Iterator[Birthplace]:
        """Yield the descriptors for creating a single-threaded process directly inside the group."""
        with ExitStack() as opened:
            into = [one for one in self._all if one.version == "v2"][:1]
            born = _opened(into[0].of(name), os.O_PATH | os.O_DIRECTORY, opened) if into else 0
            joined = (_opened(one.of(name, "tasks"), os.O_WRONLY, opened) for one in self._all if one not in into)
            yield Birthplace(born, tuple(joined))

    def holds(self, mark: GroupMark) -> bool:
        """Return whether the group still exists and was not replaced by another of the same name."""
        if not self._all:
            return False
        try:
            return os.stat(self._all[0].of(mark.name)).st_ino == mark.number
        except OSError:
            return False

    def members(self, name: str) -> list[int]:
        """Return the pids of running members. All members are in every hierarchy, so one is read."""
        return self._all[0].members(name) if self._all else []

    def names(self) -> tuple[str, ...]:
        found: set[str] = set()
        for one in self._all:
            with suppress(OSError):
                found.update(place.name for place in one.parent.iterdir() if place.is_dir() and not place.name.startswith("."))
        return tuple(sorted(found))

    def signal(self, name: str, number: signal.Signals, *, but: frozenset[int] = frozenset()) -> None:
        """Signal each member once. The pidfd is opened first and the membership read again, so a reused pid is never hit."""
        handles: dict[int, int] = {}
        try:
            for pid in self.members(name):
                if pid not in but:
                    with suppress(OSError):
                        handles[pid] = os.pidfd_open(pid)
            for pid in self.members(name):
                if pid in handles:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handles[pid], number)
        finally:
            for handle in handles.values():
                os.close(handle)

    def kill(self, name: str) -> None:
        """Kill all members. Without `cgroup.kill` one call may not suffice: call it until no member is left."""
        first = self._all[0]
        if first.kills:
            with suppress(FileNotFoundError):
                _put(first.of(name, "cgroup.kill"), "1")
            return
        for one in self._all:
            one.stop_births(name)
        self.signal(name, signal.SIGKILL)

    def usage(self, name: str) -> Usage:
        cpu_ms = max((one.cpu_ms(name) for one in self._all), default=0)
        memory = sum(one.memory_bytes(name) for one in self._all if "memory" in one.controllers)
        counting = [one for one in self._all if "pids" in one.controllers]
        return Usage(cpu_ms, memory, counting[0].pids(name) if counting else len(self.members(name)))

    def oom(self, name: str) -> bool:
        return any(one.oom_kills(name) for one in self._all if "memory" in one.controllers)

    def remove(self, name: str) -> bool:
        """Remove the group from all hierarchies. The first is tried first: if it has processes, the others are left intact."""
        return all(one.remove(name) for one in self._all)


def shares(milli: int) -> int:
    """Convert to cgroup v1 CPU shares: one CPU is 1024."""
    return min(max(milli * 1024 // 1000, _SHARES_MIN), _SHARES_MAX)


def weight(milli: int) -> int:
    """Convert to the cgroup v2 weight (1 to 10,000) by the same formula as container runtimes."""
    return 1 + (shares(milli) - _SHARES_MIN) * 9_999 // (_SHARES_MAX - _SHARES_MIN)


# -- cgroup files ------------------------------------------------------------------------------------------------------------


def _below(place: str) -> list[str]:
    """Return a group and the groups inside it, innermost first. The link count shows that most have none."""
    try:
        if os.stat(place).st_nlink == _ALONE:
            return [place]
    except OSError:
        return [place]
    return [root for root, _, _ in os.walk(place, topdown=False)]


def _opened(path: str, flags: int, files: ExitStack) -> int:
    opened = os.open(path, flags | os.O_CLOEXEC)
    files.callback(os.close, opened)
    return opened


def _text(path: str) -> str:
    """Read a file; empty if the group or the controller does not exist."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = bytearray()
        while piece := os.read(file, _PIECE):
            text += piece
        return text.decode()
    except OSError:
        return ""
    finally:
        os.close(file)


def _fields(path: str) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _put(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _write(path: str, text: str) -> None:
    """Write a file if it exists: not every kernel has all of them."""
    with suppress(OSError):
        _put(path, text)
