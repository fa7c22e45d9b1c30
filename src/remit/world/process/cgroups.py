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
CONTROLLERS: Final = ("cpu", "cpuacct", "memory", "pids")
_PROCS_FILE: Final = "cgroup.procs"
_LINKS_OF_LEAF: Final = 2
"""Link count of a directory without subdirectories: its entry in the parent directory, and its own `.` entry."""
_READ_BYTES: Final = 1 << 16
_SHARES_MIN, _SHARES_MAX = 2, 262_144
_GONE_ERRORS: Final = (errno.ENOENT, errno.ENODEV)
"""Errors of a cgroup that does not exist any more: reading in a removed one returns ENODEV."""


class GroupOccupied(Exception):
    """The group still has processes."""


class CgroupHierarchy:
    """One mounted cgroup hierarchy, and our directory in it. Subclasses implement v1 and v2."""

    version: ClassVar[Literal["v1", "v2"]]

    def __init__(self, parent: Path, controllers: Iterable[str], *, supports_kill: bool = False) -> None:
        self.parent, self._parent_text = parent, str(parent)
        self.controllers = frozenset(controllers)
        self.supports_kill = supports_kill
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
        pids: set[int] = set()
        for directory in _subtree(self.path_of(name)):
            pids.update(map(int, _text(f"{directory}/{_PROCS_FILE}").split()))
        return sorted(pids)

    def remove(self, name: str) -> bool:
        """Remove the group and those below it. Returns False if it has processes."""
        for directory in _subtree(self.path_of(name)):
            try:
                os.rmdir(directory)
            except OSError as error:
                if error.errno not in _GONE_ERRORS:
                    return False
        return True

    def forbid_forks(self, name: str) -> None:
        """Forbid forks in the group, so that killing its processes one by one comes to an end."""
        if "pids" in self.controllers:
            for directory in _subtree(self.path_of(name)):
                _write_if_present(f"{directory}/pids.max", "0")

    def pids(self, name: str) -> int:
        return int(_text(self.path_of(name, "pids.current")) or 0)

    def path_of(self, name: str, file: str = "") -> str:
        return f"{self._parent_text}/{name}/{file}" if file else f"{self._parent_text}/{name}"

    def write_limit(self, name: str, file: str, value: int) -> None:
        _write_file(self.path_of(name, file), str(value))


class CgroupV1(CgroupHierarchy):
    version = "v1"

    def limit(self, name: str, limits: Limits) -> None:
        if limits.memory_bytes and "memory" in self.controllers:
            self.write_limit(name, "memory.limit_in_bytes", limits.memory_bytes)
            # Memory and swap together: otherwise the excess is swapped out. The file is absent if swap is not accounted.
            _write_if_present(self.path_of(name, "memory.memsw.limit_in_bytes"), str(limits.memory_bytes))
        if limits.cpu_milli and "cpu" in self.controllers:
            self.write_limit(name, "cpu.shares", cpu_shares(limits.cpu_milli))
        if limits.pids and "pids" in self.controllers:
            self.write_limit(name, "pids.max", limits.pids)

    def memory_bytes(self, name: str) -> int:
        used = int(_text(self.path_of(name, "memory.usage_in_bytes")) or 0)
        return max(0, used - _fields(self.path_of(name, "memory.stat")).get("total_inactive_file", 0))

    def cpu_ms(self, name: str) -> int:
        return int(_text(self.path_of(name, "cpuacct.usage")) or 0) // 1_000_000

    def oom_kills(self, name: str) -> int:
        # Kernels before 4.13 do not count OOM kills; there, hitting the limit is the only evidence.
        counters = _fields(self.path_of(name, "memory.oom_control"))
        return counters["oom_kill"] if "oom_kill" in counters else int(_text(self.path_of(name, "memory.failcnt")) or 0)


class CgroupV2(CgroupHierarchy):
    version = "v2"

    def limit(self, name: str, limits: Limits) -> None:
        if limits.memory_bytes and "memory" in self.controllers:
            self.write_limit(name, "memory.max", limits.memory_bytes)
            _write_if_present(self.path_of(name, "memory.swap.max"), "0")
            # Kill all processes of a group together: a part of a process tree is of no use.
            _write_if_present(self.path_of(name, "memory.oom.group"), "1")
        if limits.cpu_milli and "cpu" in self.controllers:
            self.write_limit(name, "cpu.weight", cpu_weight(limits.cpu_milli))
        if limits.pids and "pids" in self.controllers:
            self.write_limit(name, "pids.max", limits.pids)

    def memory_bytes(self, name: str) -> int:
        used = int(_text(self.path_of(name, "memory.current")) or 0)
        return max(0, used - _fields(self.path_of(name, "memory.stat")).get("inactive_file", 0))

    def cpu_ms(self, name: str) -> int:
        return _fields(self.path_of(name, "cpu.stat")).get("usage_usec", 0) // 1_000

    def oom_kills(self, name: str) -> int:
        return _fields(self.path_of(name, "memory.events")).get("oom_kill", 0)


class CloneTarget(NamedTuple):
    """Descriptors for a start inside a group: the v2 directory in which the process is created (0: none), and the v1 files that
    it joins by writing 0.

    For v1 these are the `tasks` files: moving a thread needs no global lock, moving a process does.
    """

    cgroup_fd: int
    join_fds: tuple[int, ...]


class GroupId(NamedTuple):
    """Recorded identity of a group: its name, and the inode of its directory, which is unique."""

    name: str
    inode: int

    def __str__(self) -> str:
        return f"{self.name}#{self.inode}"


def parse_group_id(text: str) -> GroupId | None:
    name, _, inode = text.rpartition("#")
    return GroupId(name, int(inode)) if name and inode.isascii() and inode.isdigit() else None


class Cgroups:
    """All usable hierarchies as one. There may be none; then there are no groups."""

    def __init__(self, hierarchies: Sequence[CgroupHierarchy], reason: str = "") -> None:
        self._hierarchies = tuple(
            sorted(hierarchies, key=lambda tree: (not tree.supports_kill, tree.version != "v2", tree.parent))
        )
        self.reason = reason
        """Which limits are missing and why; empty if none are."""

    @property
    def name(self) -> Literal["v2", "v1", "none"]:
        """The cgroup version that enforces limits. Beside v1 controllers, a v2 hierarchy may exist that can only kill."""
        limiting = [hierarchy for hierarchy in self._hierarchies if hierarchy.controllers & {"memory", "pids", "cpu"}]
        return (limiting or list(self._hierarchies))[0].version if self._hierarchies else "none"

    @property
    def controllers(self) -> tuple[str, ...]:
        names = {name for hierarchy in self._hierarchies for name in hierarchy.controllers}
        return tuple(sorted(names | ({"kill"} if any(hierarchy.supports_kill for hierarchy in self._hierarchies) else set())))

    def create(self, name: str, limits: Limits) -> GroupId:
        """Create an empty group with limits. Raises `GroupOccupied`, or OSError."""
        try:
            os.mkdir(self._hierarchies[0].path_of(name), 0o755)  # usually it does not exist
        except FileExistsError:
            if not self.remove(name):
                raise GroupOccupied(name) from None
            os.mkdir(self._hierarchies[0].path_of(name), 0o755)
        try:
            for hierarchy in self._hierarchies:
                with suppress(FileExistsError):  # the first was created above; others may be empty remains of an earlier group
                    os.mkdir(hierarchy.path_of(name), 0o755)
                hierarchy.limit(name, limits)
            return GroupId(name, os.stat(self._hierarchies[0].path_of(name)).st_ino)
        except OSError:
            self.remove(name)
            raise

    def directories(self, name: str) -> list[str]:
        """Return the group's directory in each hierarchy. The first one provides its inode and its members."""
        return [hierarchy.path_of(name) for hierarchy in self._hierarchies]

    @contextmanager
    def join_fds(self, name: str) -> Iterator[tuple[int, ...]]:
        """Yield descriptors: a process that writes 0 to each of them joins the group."""
        with ExitStack() as stack:
            yield tuple(_open(hierarchy.path_of(name, _PROCS_FILE), os.O_WRONLY, stack) for hierarchy in self._hierarchies)

    @contextmanager
    def clone_target(self, name: str) -> Iterator[CloneTarget]:
        """Yield the descriptors for creating a single-threaded process directly inside the group."""
        with ExitStack() as stack:
            v2 = [hierarchy for hierarchy in self._hierarchies if hierarchy.version == "v2"][:1]
            cgroup_fd = _open(v2[0].path_of(name), os.O_PATH | os.O_DIRECTORY, stack) if v2 else 0
            join_fds = (
                _open(hierarchy.path_of(name, "tasks"), os.O_WRONLY, stack)
                for hierarchy in self._hierarchies
                if hierarchy not in v2
            )
            yield CloneTarget(cgroup_fd, tuple(join_fds))

    def is_current(self, group: GroupId) -> bool:
        """Return whether the group still exists and was not replaced by another of the same name."""
        if not self._hierarchies:
            return False
        try:
            return os.stat(self._hierarchies[0].path_of(group.name)).st_ino == group.inode
        except OSError:
            return False

    def members(self, name: str) -> list[int]:
        """Return the pids of running members. All members are in every hierarchy, so one is read."""
        return self._hierarchies[0].members(name) if self._hierarchies else []

    def names(self) -> tuple[str, ...]:
        names: set[str] = set()
        for hierarchy in self._hierarchies:
            with suppress(OSError):
                names.update(
                    entry.name for entry in hierarchy.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")
                )
        return tuple(sorted(names))

    def signal(self, name: str, signal_number: signal.Signals, *, exclude: frozenset[int] = frozenset()) -> None:
        """Signal each member once. The pidfd is opened first and the membership read again, so a reused pid is never hit."""
        handles: dict[int, int] = {}
        try:
            for pid in self.members(name):
                if pid not in exclude:
                    with suppress(OSError):
                        handles[pid] = os.pidfd_open(pid)
            for pid in self.members(name):
                if pid in handles:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handles[pid], signal_number)
        finally:
            for handle in handles.values():
                os.close(handle)

    def kill(self, name: str) -> None:
        """Kill all members. Without `cgroup.kill` one call may not suffice: call it until no member is left."""
        first = self._hierarchies[0]
        if first.supports_kill:
            with suppress(FileNotFoundError):
                _write_file(first.path_of(name, "cgroup.kill"), "1")
            return
        for hierarchy in self._hierarchies:
            hierarchy.forbid_forks(name)
        self.signal(name, signal.SIGKILL)

    def usage(self, name: str) -> Usage:
        cpu_ms = max((hierarchy.cpu_ms(name) for hierarchy in self._hierarchies), default=0)
        memory = sum(hierarchy.memory_bytes(name) for hierarchy in self._hierarchies if "memory" in hierarchy.controllers)
        counting = [hierarchy for hierarchy in self._hierarchies if "pids" in hierarchy.controllers]
        return Usage(cpu_ms, memory, counting[0].pids(name) if counting else len(self.members(name)))

    def had_oom_kill(self, name: str) -> bool:
        return any(hierarchy.oom_kills(name) for hierarchy in self._hierarchies if "memory" in hierarchy.controllers)

    def remove(self, name: str) -> bool:
        """Remove the group from all hierarchies. The first is tried first: if it has processes, the others are left intact."""
        return all(hierarchy.remove(name) for hierarchy in self._hierarchies)


def cpu_shares(milli: int) -> int:
    """Convert to cgroup v1 CPU shares: one CPU is 1024."""
    return min(max(milli * 1024 // 1000, _SHARES_MIN), _SHARES_MAX)


def cpu_weight(milli: int) -> int:
    """Convert to the cgroup v2 weight (1 to 10,000) by the same formula as container runtimes."""
    return 1 + (cpu_shares(milli) - _SHARES_MIN) * 9_999 // (_SHARES_MAX - _SHARES_MIN)


# -- cgroup files --------------------------------------------------------------------------------------------------------------


def _subtree(directory: str) -> list[str]:
    """Return a group and the groups inside it, innermost first. The link count shows that most have none."""
    try:
        if os.stat(directory).st_nlink == _LINKS_OF_LEAF:
            return [directory]
    except OSError:
        return [directory]
    return [root for root, _, _ in os.walk(directory, topdown=False)]


def _open(path: str, flags: int, stack: ExitStack) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _text(path: str) -> str:
    """Read a file; empty if the group or the controller does not exist."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = bytearray()
        while chunk := os.read(file, _READ_BYTES):
            text += chunk
        return text.decode()
    except OSError:
        return ""
    finally:
        os.close(file)


def _fields(path: str) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _write_file(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _write_if_present(path: str, text: str) -> None:
    """Write a file if it exists: not every kernel has all of them."""
    with suppress(OSError):
        _write_file(path, text)
