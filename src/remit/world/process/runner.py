"""Process runner: start, wait, stop, find again by pid and start time.

Processes in groups of their own; why one runs, and what it writes, is not known here.

A number is used again one day, so nothing is done to a pid alone: its start time must be the one that was written down. Two
facts of Linux make that safe. A dead child keeps its number until it is reaped, so it is reaped only when its group is empty.
And a number is not given out while a group of that number has a member, so a group in which somebody is still there whom we
saw when it was ours is still ours.

A process can leave its process group, and its parents can end; it cannot leave its cgroup. So where there are cgroups and the
order names one, that says who belongs to a run, and the whole tree is ended by it.

Not asyncio's subprocesses: they kill a child that is still running when the loop's objects go, and work must outlive us.
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
"""How many ends are remembered for whoever waits late. Of an older one only that it ended is known."""

_LOOK_MS: Final = 10
_POLL_MS: Final = 200
_SETTLED_AT_ONCE: Final = 2
"""How many children are looked at with each start, so that a start costs the same with thousands of them. More than one, so
that those for whom nobody waits are reaped sooner than others come.
"""
_SWEPT_MAX: Final = 3

_One = tuple[int, int]
"""A pid with its start time."""


class ProcessRunner:
    """Real processes. `parent`: the directory of cgroups that is ours; another runner of the machine may share it.

    `start` must be called from the main thread: what is to end with its parent ends with the thread that started it.
    """

    def __init__(self, clock: Clock, *, parent: str = PARENT) -> None:
        self._clock = clock
        self._parent = parent
        self._found: Cgroups | None = None
        self._guard = Guard()
        self._starter: Starter | None = Starter()
        """None: on this machine nothing can be started so."""
        self._children: dict[Running, None] = {}
        self._ended: dict[Running, Ended] = {}
        self._entered = 0

    async def start(self, order: Order, /) -> Running:
        check_order(order)
        for child in tuple(self._children)[:_SETTLED_AT_ONCE]:
            if not self._settle(child) and child in self._children:
                self._children[child] = self._children.pop(child)  # to the end of the line
        # Here and not in a thread: it takes a millisecond or two, and whoever is cancelled has started nothing unknown.
        check_in_time(order, self._clock.now_ms())
        pid, mark = await self._spawn(order)
        found = procfs.member(pid)
        if found is None:
            raise NotStarted("/proc does not show the process that was started", "mount /proc, and run on Linux")
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
        name = f"exec-{os.getpid()}-{self._entered}"  # no other runner's of this machine, nor of this one before

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

    # -- how a run begins ------------------------------------------------------------------------------------------------

    @property
    def _cgroups(self) -> Cgroups:
        """Looked for when they are first asked for: that forks, and many a runner never needs them."""
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
        raise NotStarted(f"the cgroup {order.group} vanished {_SWEPT_MAX} times", "see who removes what is in there")

    async def _spawn_inside(self, order: Order) -> tuple[int, GroupMark]:
        name, mark = order.group, None
        try:
            mark = self._cgroups.make(name, order.limits)
            if order.with_parent:
                self._guard.hold(mark.number, self._cgroups.places(name))
            return await self._begin_inside(order), mark
        except Occupied:
            raise NotStarted(
                f"in the group {name} somebody still runs", "end that first: a name is run once at a time"
            ) from None
        except FileNotFoundError:
            self._drop(mark)
            raise spawn.Swept(name) from None
        except OSError as error:
            self._drop(mark)
            why = (error.strerror or str(error)).lower()
            raise NotStarted(f"the cgroup {name} cannot be made as ordered ({why})", "see `remit doctor`") from error
        except (NotStarted, spawn.Swept, spawn.Unusable):
            self._drop(mark)
            raise

    async def _begin_inside(self, order: Order) -> int:
        """Through a starter, which makes it where it belongs; else by ourselves, and it joins."""
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
            raise NotStarted("whoever starts work here ended over it", "nothing to do: it is tried anew") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._undo(name))
            raise

    async def _undo(self, group: str) -> None:
        """Something of ours may be in there, and nobody was told its number."""
        unknown = self._cgroups.members(group)
        await self.clear(group)
        for pid in unknown:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait

    def _drop(self, mark: GroupMark | None) -> None:
        """Remove a group, if nobody is in it. One that is gone has not to be ended with us any more."""
        if mark is not None and self._cgroups.remove(mark.name):
            self._guard.let_go(mark.number, self._cgroups.places(mark.name))

    # -- who belongs to it, and how that ends ----------------------------------------------------------------------------

    def _mark(self, running: Running) -> GroupMark | None:
        """Its cgroup, if it has one and that is still the one it was."""
        mark = mark_of(running.group) if running.group else None
        return mark if mark is not None and self._cgroups.holds(mark) else None

    def _members(self, running: Running) -> list[int]:
        """All that is known to have come of it; nobody, if it is not the one that it was."""
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
        """Without a cgroup: the process group, and whoever descends from it by parents who still run."""
        ours = self._relatives(running, set())
        spared = _not_asked(running.pid, [pid for pid, _ in ours])
        until_ms = self._clock.now_ms() + grace_ms
        with _told(f"process group {running.pid}"):
            _signal({one for one in ours if one[0] not in spared}, signal.SIGTERM)
            # Again and again: a member may be born while the others are killed.
            while ours := _living(ours | self._relatives(running, ours)):
                if self._clock.now_ms() >= until_ms:
                    _signal(ours, signal.SIGKILL)
                await self._clock.sleep_ms(_LOOK_MS)

    def _relatives(self, running: Running, ours: set[_One]) -> set[_One]:
        """Who is found in its process group, if that is still the one it was, and below those whom we know."""
        found = {(one.pid, one.ticks) for one in procfs.group(running.pid)}
        if self._known(running) is None and ours.isdisjoint(found):
            found = set()  # the number belongs to somebody else by now
        return found | {(one.pid, one.ticks) for pid, _ in sorted(found | ours) for one in procfs.tree(pid)}

    def _lives(self, running: Running) -> bool:
        if running in self._children:  # until it is reaped its number is its own, and the system says at once how it is
            with suppress(ChildProcessError):
                return _told_of(running.pid) is None
        found = self._known(running)
        return found is not None and found.runs

    def _known(self, running: Running) -> procfs.Member | None:
        """The process itself, dead or alive, and never another one of the same number."""
        found = procfs.member(running.pid)
        return found if found is not None and self._began(found) == running.began else None

    def _began(self, found: procfs.Member) -> str:
        return f"{self._clock.boot()}/{found.ticks}"

    def _settle(self, running: Running) -> bool:
        """Note how it ended, and let go what was kept for it. Is there nothing more to do?"""
        if self._lives(running):
            return False
        mark = self._mark(running)
        if running in self._children and not self._reaped(running, mark):
            return False
        if mark is not None and running not in self._ended and self._cgroups.oom(mark.name):
            self._remember(running, Ended(oom=True))
        if mark is not None:
            self._drop(mark)
        elif (gone := mark_of(running.group) if running.group else None) is not None:  # somebody else has cleared it up
            self._guard.let_go(gone.number, self._cgroups.places(gone.name))
        return True

    def _reaped(self, running: Running, mark: GroupMark | None) -> bool:
        """A number is let go once nobody of its process group is left; at once if a cgroup says who belongs to it."""
        try:
            told = _told_of(running.pid)
        except ChildProcessError:  # somebody else in this process has reaped it
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
    """How a child has ended, if it has; it is not reaped by that. Raises ChildProcessError."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


async def _until_it_ends(pid: int, lives: Callable[[], bool]) -> None:
    """One descriptor tells the end of any process, also of one that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # no descriptor is left for that: looked at now and then, until one is
        await asyncio.sleep(_POLL_MS / 1000)
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    try:
        # Looked at again now that the descriptor holds whoever has the number: before, it could still have changed hands.
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
    """A sandbox's own processes: the first would end before what it holds, and with it the exit code of that."""
    if procfs.program(leader) != shutil.which(PROGRAM):
        return frozenset()
    own = frozenset(pid for pid in pids if procfs.inside(pid) < 2)
    return frozenset() if len(own) == len(pids) else own  # all of them: it is only just beginning


def _living(members: set[_One]) -> set[_One]:
    found = ((one, procfs.member(one[0])) for one in sorted(members))
    return {one for one, now in found if now is not None and now.ticks == one[1] and now.runs}


def _signal(members: set[_One], number: signal.Signals) -> None:
    """Those who are still who they were: the handle is opened first, and then looked at."""
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
        raise WorldError(f"{what} may not be ended", "run as the user whom it runs as, or as root") from error
