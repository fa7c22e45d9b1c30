"""Process runner: start, wait, stop, find again by pid and start time.

Pids are reused, so nothing is done to a bare pid: the start time must match the recorded one. Two properties of Linux make
that safe. A dead child keeps its pid until it is reaped, so it is reaped only when its process group is empty. And a pid is
not reused while a process group of that number has a member, so a group that still contains a process we saw earlier is
still the same group.

A process can leave its process group and its parents can end, but it cannot leave its cgroup. So if the spec names a group
and cgroups are usable, the cgroup determines which processes belong to the run, and the whole tree is killed through it.

asyncio's subprocesses are not used: they kill a running child when the loop's objects are destroyed, and replicas must
outlive the agent.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from remit.world.interfaces import (
    Clock,
    Confinement,
    Ended,
    NotStarted,
    Order,
    Running,
    Usage,
    WorldError,
    check_group,
    check_in_time,
    check_order,
)
from remit.world.process import exec_session, procfs, spawn
from remit.world.process.cgroup_discovery import find
from remit.world.process.cgroups import PARENT, Cgroups, GroupMark, Occupied, mark_of
from remit.world.process.exec_session import Window
from remit.world.process.isolation import PROGRAM
from remit.world.process.reaper import Guard
from remit.world.process.spawn_server import Lost, Starter

ENDED_MAX: Final = 10_000
"""Number of exit statuses remembered for late calls of `wait`. For older ones only the fact of the end is known."""

_LOOK_MS: Final = 10
_POLL_MS: Final = 200
_SETTLED_AT_ONCE: Final = 2
"""Number of children checked at each start, so that a start costs the same with thousands of children. More than one, so that
children without a waiter are reaped faster than new ones are started.
"""
_SWEPT_MAX: Final = 3

_One = tuple[int, int]
"""A pid with its start time."""


class ProcessRunner:
    """Runs real processes. `parent`: our directory in the cgroup hierarchies; another runner on this machine may share it.

    `start` must be called from the main thread: a process with `with_parent` dies with the thread that started it.
    """

    def __init__(self, clock: Clock, *, parent: str = PARENT) -> None:
        self._clock = clock
        self._parent = parent
        self._found: Cgroups | None = None
        self._guard = Guard()
        self._starter: Starter | None = Starter()
        """None: this machine does not support starting a process inside its cgroup."""
        self._children: dict[Running, None] = {}
        self._ended: dict[Running, Ended] = {}
        self._entered = 0

    async def start(self, order: Order, /) -> Running:
        check_order(order)
        for child in tuple(self._children)[:_SETTLED_AT_ONCE]:
            if not self._settle(child) and child in self._children:
                self._children[child] = self._children.pop(child)  # move it to the end of the queue
        # Not in a thread: it takes a millisecond or two, and a cancelled caller never leaves an unknown process behind.
        check_in_time(order, self._clock.now_ms())
        pid, mark = await self._spawn(order)
        found = procfs.member(pid)
        if found is None:
            raise NotStarted("/proc does not show the started process", "run on Linux with /proc mounted")
        running = Running(pid, self._began(found), str(mark) if mark is not None else "")
        self._children[running] = None
        return running

    async def wait(self, running: Running, /) -> Ended:
        while self._lives(running):
            await _until_it_ends(running.pid, lambda: self._lives(running))
        self._settle(running)
        return self._ended.get(running, Ended())

    def alive(self, running: Running, /) -> bool:
        return self._lives(running)

    async def stop(self, running: Running, /, *, grace_ms: int) -> None:
        if (mark := self._mark(running)) is not None:
            await self._stop_group(running, mark, grace_ms)
        elif self._known(running) is not None:
            await self._stop_processes(running, grace_ms)
        self._settle(running)

    async def enter(self, running: Running, order: Order, /, *, window: Window | None = None) -> exec_session.Entered:
        check_order(order)
        around = exec_session.surroundings(running, order, self._mark(running), self._members(running))
        self._entered += 1
        name = f"exec-{os.getpid()}-{self._entered}"  # unique among the runners of this machine and within this one

        def is_there() -> bool:
            return self._lives(running) and around.pid in self._members(running)

        return await exec_session.enter(order, around, self._cgroups, name, is_there, window)

    def usage(self, running: Running, /) -> Usage:
        if (mark := self._mark(running)) is not None:
            return self._cgroups.usage(mark.name)
        if self._known(running) is None:
            return Usage()
        members = procfs.tree(running.pid)
        return Usage(sum(one.cpu_ms for one in members), sum(one.memory_bytes for one in members), len(members))

    def confinement(self) -> Confinement:
        found = self._cgroups
        return Confinement(found.name, found.controllers, found.why, shutil.which(PROGRAM) is not None)

    def leftovers(self) -> tuple[str, ...]:
        for child in tuple(self._children):
            self._settle(child)
        return tuple(name for name in self._cgroups.names() if not self._cgroups.remove(name))

    async def clear(self, group: str, /) -> None:
        check_group(group)
        while self._cgroups.members(group):
            self._cgroups.kill(group)
            await self._clock.sleep_ms(_LOOK_MS)
        for child in [one for one in self._children if one.group.startswith(f"{group}#")]:
            self._settle(child)
        self._cgroups.remove(group)

    # -- start -----------------------------------------------------------------------------------------------------------

    @property
    def _cgroups(self) -> Cgroups:
        """Discovered on first use: that forks, and many runners never need them."""
        if self._found is None:
            self._found = find(self._parent)
        return self._found

    async def _spawn(self, order: Order) -> tuple[int, GroupMark | None]:
        if not order.group or self._cgroups.name == "none":
            return spawn.spawn(order), None
        for _ in range(_SWEPT_MAX):
            try:
                return await self._spawn_inside(order)
            except spawn.Swept:
                continue
            except spawn.Unusable:
                self._starter = None
        raise NotStarted(
            f"cgroup {order.group} was removed {_SWEPT_MAX} times during the start", "check which process removes cgroups there"
        )

    async def _spawn_inside(self, order: Order) -> tuple[int, GroupMark]:
        name, mark = order.group, None
        try:
            mark = self._cgroups.make(name, order.limits)
            if order.with_parent:
                self._guard.hold(mark.number, self._cgroups.places(name))
            return await self._begin_inside(order), mark
        except Occupied:
            raise NotStarted(
                f"group {name} still has running processes", "stop them first: a group runs once at a time"
            ) from None
        except FileNotFoundError:
            self._drop(mark)
            raise spawn.Swept(name) from None
        except OSError as error:
            self._drop(mark)
            why = (error.strerror or str(error)).lower()
            raise NotStarted(f"cgroup {name} cannot be created with these limits ({why})", "run `remit doctor`") from error
        except (NotStarted, spawn.Swept, spawn.Unusable):
            self._drop(mark)
            raise

    async def _begin_inside(self, order: Order) -> int:
        """Start through the spawn server, which creates the process inside its cgroups; without it, fork here and join them."""
        name, starter = order.group, self._starter
        if starter is None:
            with self._cgroups.entrances(name) as entrances:
                return spawn.spawn(order, entrances=entrances)
        left_ms = None if order.not_after_ms is None else order.not_after_ms - self._clock.now_ms()
        try:
            with self._cgroups.birthplace(name) as entry, spawn.prepared(order) as prepared:
                return await starter.spawn(order, prepared, entry, left_ms)
        except Lost:
            await self._undo(name)
            raise NotStarted("the spawn server ended during the start", "no action needed: the start is retried") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._undo(name))
            raise

    async def _undo(self, group: str) -> None:
        """Kill and reap whatever was started in the group: its pid is unknown, so it cannot be tracked."""
        unknown = self._cgroups.members(group)
        await self.clear(group)
        for pid in unknown:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait

    def _drop(self, mark: GroupMark | None) -> None:
        """Remove a cgroup if it is empty, and unregister it from the reaper."""
        if mark is not None and self._cgroups.remove(mark.name):
            self._guard.let_go(mark.number, self._cgroups.places(mark.name))

    # -- membership and end -----------------------------------------------------------------------------------------------

    def _mark(self, running: Running) -> GroupMark | None:
        """Return its cgroup, if it has one that was not replaced by another of the same name."""
        mark = mark_of(running.group) if running.group else None
        return mark if mark is not None and self._cgroups.holds(mark) else None

    def _members(self, running: Running) -> list[int]:
        """Return the pids of the run; none if its pid or cgroup was reused by another."""
        if (mark := self._mark(running)) is not None:
            return self._cgroups.members(mark.name)
        if running.group or self._known(running) is None:
            return []
        return [one.pid for one in procfs.tree(running.pid)]

    async def _stop_group(self, running: Running, mark: GroupMark, grace_ms: int) -> None:
        name, cgroups = mark.name, self._cgroups
        until_ms = self._clock.now_ms() + grace_ms
        with _told(f"the cgroup {name}"):
            cgroups.signal(name, signal.SIGTERM, but=_not_asked(running.pid, cgroups.members(name)))
            while cgroups.holds(mark) and cgroups.members(name):
                if self._clock.now_ms() >= until_ms:
                    cgroups.kill(name)
                await self._clock.sleep_ms(_LOOK_MS)

    async def _stop_processes(self, running: Running, grace_ms: int) -> None:
        """Stop without a cgroup: the process group, and all descendants whose chain of parents still runs."""
        ours = self._relatives(running, set())
        spared = _not_asked(running.pid, [pid for pid, _ in ours])
        until_ms = self._clock.now_ms() + grace_ms
        with _told(f"process group {running.pid}"):
            _signal({one for one in ours if one[0] not in spared}, signal.SIGTERM)
            # Repeat: a member may fork while the others are killed.
            while ours := _living(ours | self._relatives(running, ours)):
                if self._clock.now_ms() >= until_ms:
                    _signal(ours, signal.SIGKILL)
                await self._clock.sleep_ms(_LOOK_MS)

    def _relatives(self, running: Running, ours: set[_One]) -> set[_One]:
        """Return the members of its process group, if that was not reused, and their descendants and those of `ours`."""
        found = {(one.pid, one.ticks) for one in procfs.group(running.pid)}
        if self._known(running) is None and ours.isdisjoint(found):
            found = set()  # the number was reused for another group
        return found | {(one.pid, one.ticks) for pid, _ in sorted(found | ours) for one in procfs.tree(pid)}

    def _lives(self, running: Running) -> bool:
        if running in self._children:  # a child keeps its pid until it is reaped, and waitid is the fastest check
            with suppress(ChildProcessError):
                return _told_of(running.pid) is None
        found = self._known(running)
        return found is not None and found.runs

    def _known(self, running: Running) -> procfs.Member | None:
        """Return the process itself, running or dead, and never another one with the same pid."""
        found = procfs.member(running.pid)
        return found if found is not None and self._began(found) == running.began else None

    def _began(self, found: procfs.Member) -> str:
        return f"{self._clock.boot()}/{found.ticks}"

    def _settle(self, running: Running) -> bool:
        """Record how it ended and release its resources. Returns whether nothing remains to be done."""
        if self._lives(running):
            return False
        mark = self._mark(running)
        if running in self._children and not self._reaped(running, mark):
            return False
        if mark is not None and running not in self._ended and self._cgroups.oom(mark.name):
            self._remember(running, Ended(oom=True))
        if mark is not None:
            self._drop(mark)
        elif (gone := mark_of(running.group) if running.group else None) is not None:  # another runner has removed the cgroup
            self._guard.let_go(gone.number, self._cgroups.places(gone.name))
        return True

    def _reaped(self, running: Running, mark: GroupMark | None) -> bool:
        """Reap a child. Without a cgroup this waits until its process group is empty, so its number is not reused before."""
        try:
            told = _told_of(running.pid)
        except ChildProcessError:  # other code in this process has reaped it
            del self._children[running]
            return True
        if told is None:
            return False
        oom = mark is not None and self._cgroups.oom(mark.name)
        exited = told.si_code == os.CLD_EXITED
        self._remember(running, Ended(code=told.si_status, oom=oom) if exited else Ended(signal=told.si_status, oom=oom))
        if mark is None and procfs.group(running.pid):
            return False
        os.waitpid(running.pid, 0)
        del self._children[running]
        return True

    def _remember(self, running: Running, ended: Ended) -> None:
        self._ended[running] = ended
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]


def _told_of(pid: int) -> os.waitid_result | None:
    """Return how a child has ended, or None, without reaping it. Raises ChildProcessError."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


async def _until_it_ends(pid: int, lives: Callable[[], bool]) -> None:
    """Wait for the end of any process, also one that is not our child, through a pidfd."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # out of file descriptors: poll until one is free
        await asyncio.sleep(_POLL_MS / 1000)
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    try:
        # Check again now that the pidfd pins the process: before, the pid could have been reused.
        if lives():
            loop.add_reader(handle, _tell, ended)
            await ended
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _tell(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _not_asked(leader: int, pids: Collection[int]) -> frozenset[int]:
    """Return the processes of bubblewrap itself, which get no SIGTERM. Pid 1 of the sandbox would end before the replica, and
    its exit code would be lost.
    """
    if procfs.program(leader) != shutil.which(PROGRAM):
        return frozenset()
    own = frozenset(pid for pid in pids if procfs.inside(pid) < 2)
    return frozenset() if len(own) == len(pids) else own  # all of them: the sandbox is still starting


def _living(members: set[_One]) -> set[_One]:
    found = ((one, procfs.member(one[0])) for one in sorted(members))
    return {one for one, now in found if now is not None and now.ticks == one[1] and now.runs}


def _signal(members: set[_One], number: signal.Signals) -> None:
    """Signal processes that still have the recorded start time. The pidfd is opened before the check, so the pid cannot be
    reused.
    """
    for pid, ticks in sorted(members):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            now = procfs.member(pid)
            if now is not None and now.ticks == ticks:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            continue
        finally:
            os.close(handle)


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise WorldError(f"no permission to stop {what}", "run as the same user, or as root") from error
