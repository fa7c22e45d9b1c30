"""Control groups (cgroup v1 and v2): limits, usage, kill.

By cgroups as they are found; why it runs is not known here.

A machine has cgroups of version 2, of version 1, or both at once (then memory and the like are in the old ones, and the new one
is there for killing a tree at a stroke). So each mounted hierarchy that proves usable is taken, and one group is a directory of
the same name in each. What is usable is found by trying: files say little about what a container or a missing right forbids.

A name is used again one day; a name and the number of its directory are not, so a group that was written down is never confused
with a later one. An empty group is removed; one in which somebody runs is never given out twice.
"""

# Paths are text here: there are a dozen for each start and end, and a `Path` costs as much as the call that it is for.
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
"""How many links a directory without others in it has: its name, and its dot."""
_PIECE: Final = 1 << 16
_SHARES_MIN, _SHARES_MAX = 2, 262_144
_GONE: Final = (errno.ENOENT, errno.ENODEV)
"""A group that is not there, or no longer: reading in one that was removed meanwhile says ENODEV."""


class Occupied(Exception):
    """Somebody runs in the group of that name."""


class Hierarchy:
    """One mounted tree of groups, and our directory in it. Below are the two dialects."""

    version: ClassVar[Literal["v1", "v2"]]

    def __init__(self, parent: Path, controllers: Iterable[str], *, kills: bool = False) -> None:
        self.parent, self._at = parent, str(parent)
        self.controllers = frozenset(controllers)
        self.kills = kills
        """Does one write end everybody inside, also those who are being born?"""

    def limit(self, name: str, limits: Limits) -> None:
        raise NotImplementedError

    def memory_bytes(self, name: str) -> int:
        raise NotImplementedError

    def cpu_ms(self, name: str) -> int:
        raise NotImplementedError

    def oom_kills(self, name: str) -> int:
        raise NotImplementedError

    def members(self, name: str) -> list[int]:
        """Work that may may make groups below its own: they are its own all the same."""
        found: set[int] = set()
        for place in _below(self.of(name)):
            found.update(map(int, _text(f"{place}/{_ENTRANCE}").split()))
        return sorted(found)

    def remove(self, name: str) -> bool:
        """Is it gone? Not while somebody is inside."""
        for place in _below(self.of(name)):
            try:
                os.rmdir(place)
            except OSError as error:
                if error.errno not in _GONE:
                    return False
        return True

    def stop_births(self, name: str) -> None:
        """Nobody inside can have children any more, so that killing one by one comes to an end."""
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
            # Memory and swap together: else what is over the limit goes to swap. Absent where the system has no such count.
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
        # Kernels before 4.13 do not count them; there, that the limit was hit is the evidence that is left.
        told = _fields(self.of(name, "memory.oom_control"))
        return told["oom_kill"] if "oom_kill" in told else int(_text(self.of(name, "memory.failcnt")) or 0)


class V2(Hierarchy):
    version = "v2"

    def limit(self, name: str, limits: Limits) -> None:
        if limits.memory_bytes and "memory" in self.controllers:
            self.set(name, "memory.max", limits.memory_bytes)
            _write(self.of(name, "memory.swap.max"), "0")
            _write(self.of(name, "memory.oom.group"), "1")  # all or nothing: half a tree is no use to anybody
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
    """Descriptors: of the group of version 2 in which a process begins (0: none), and of those that it joins by writing 0.

    Of version 1 it is the file of single threads: to move a whole process takes a lock of all the machine, a thread does not.
    """

    into: int
    entrances: tuple[int, ...]


class GroupMark(NamedTuple):
    """One group as it is written down: its name, and the number that no other directory has had."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


def mark_of(text: str) -> GroupMark | None:
    name, _, number = text.rpartition("#")
    return GroupMark(name, int(number)) if name and number.isascii() and number.isdigit() else None


class Cgroups:
    """All the hierarchies that are usable here, as one. None at all is lawful: then there are no groups."""

    def __init__(self, hierarchies: Sequence[Hierarchy], why: str = "") -> None:
        self._all = tuple(sorted(hierarchies, key=lambda one: (not one.kills, one.version != "v2", one.parent)))
        self.why = why
        """What is missing, in words; empty if nothing is."""

    @property
    def name(self) -> Literal["v2", "v1", "none"]:
        """By whom limits are kept: a version 2 that only kills is there too where limits are of version 1."""
        limiting = [one for one in self._all if one.controllers & {"memory", "pids", "cpu"}]
        return (limiting or list(self._all))[0].version if self._all else "none"

    @property
    def controllers(self) -> tuple[str, ...]:
        found = {name for one in self._all for name in one.controllers}
        return tuple(sorted(found | ({"kill"} if any(one.kills for one in self._all) else set())))

    def make(self, name: str, limits: Limits) -> GroupMark:
        """A new group with nobody inside. Raises `Occupied`, or OSError."""
        try:
            os.mkdir(self._all[0].of(name), 0o755)  # mostly there is none
        except FileExistsError:
            if not self.remove(name):
                raise Occupied(name) from None
            os.mkdir(self._all[0].of(name), 0o755)
        try:
            for one in self._all:
                with suppress(FileExistsError):  # the first is ours; one that is empty is left of an earlier one
                    os.mkdir(one.of(name), 0o755)
                one.limit(name, limits)
            return GroupMark(name, os.stat(self._all[0].of(name)).st_ino)
        except OSError:
            self.remove(name)
            raise

    def places(self, name: str) -> list[str]:
        """Its directory in each hierarchy; the first is the one that is numbered, and whose members count."""
        return [one.of(name) for one in self._all]

    @contextmanager
    def entrances(self, name: str) -> Iterator[tuple[int, ...]]:
        """Whoever writes 0 to each of these has joined."""
        with ExitStack() as opened:
            yield tuple(_opened(one.of(name, _ENTRANCE), os.O_WRONLY, opened) for one in self._all)

    @contextmanager
    def birthplace(self, name: str) -> Iterator[Birthplace]:
        """Where a process of one thread is born that shall be in all of them from the beginning on."""
        with ExitStack() as opened:
            into = [one for one in self._all if one.version == "v2"][:1]
            born = _opened(into[0].of(name), os.O_PATH | os.O_DIRECTORY, opened) if into else 0
            joined = (_opened(one.of(name, "tasks"), os.O_WRONLY, opened) for one in self._all if one not in into)
            yield Birthplace(born, tuple(joined))

    def holds(self, mark: GroupMark) -> bool:
        """Is this the same group still?"""
        if not self._all:
            return False
        try:
            return os.stat(self._all[0].of(mark.name)).st_ino == mark.number
        except OSError:
            return False

    def members(self, name: str) -> list[int]:
        """Whoever has not ended. All of a group are in each of its directories, so one tells them."""
        return self._all[0].members(name) if self._all else []

    def names(self) -> tuple[str, ...]:
        found: set[str] = set()
        for one in self._all:
            with suppress(OSError):
                found.update(place.name for place in one.parent.iterdir() if place.is_dir() and not place.name.startswith("."))
        return tuple(sorted(found))

    def signal(self, name: str, number: signal.Signals, *, but: frozenset[int] = frozenset()) -> None:
        """Each member once. A handle is opened first and membership read again, so that no stranger of that number is hit."""
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
        """Once is not always enough where no hierarchy kills at a stroke: call it until nobody is left."""
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
        """Is it gone everywhere? The first is tried first: if somebody is inside, the others stay whole."""
        return all(one.remove(name) for one in self._all)


def shares(milli: int) -> int:
    """A processor is 1024 shares."""
    return min(max(milli * 1024 // 1000, _SHARES_MIN), _SHARES_MAX)


def weight(milli: int) -> int:
    """The same range on the scale of version 2, from 1 to 10,000; as the runtimes of containers reckon it."""
    return 1 + (shares(milli) - _SHARES_MIN) * 9_999 // (_SHARES_MAX - _SHARES_MIN)


# -- small files ---------------------------------------------------------------------------------------------------------------


def _below(place: str) -> list[str]:
    """A group and the groups inside it, innermost first. A directory's links count those in it, so most need no look."""
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
    """What a group that is gone, or a controller that is not there, says: nothing."""
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
    """Where it is possible: older or smaller systems do not have every file."""
    with suppress(OSError):
        _put(path, text)
