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
    ExitStatus,
    IsolationSupport,
    NotStarted,
    ProcessHandle,
    ProcessSpec,
    PtySize,
    Usage,
    WorldError,
    check_group_name,
    check_process_spec,
    check_start_deadline,
)
from remit.world.process import exec_session, procfs, spawn
from remit.world.process.cgroup_discovery import find_cgroups
from remit.world.process.cgroups import PARENT, Cgroups, GroupId, GroupOccupied, parse_group_id
from remit.world.process.isolation import BUBBLEWRAP
from remit.world.process.reaper import Reaper
from remit.world.process.spawn_server import SpawnServer, StartOutcomeUnknown

EXIT_STATUSES_MAX: Final = 10_000
"""Number of exit statuses remembered for late calls of `wait`. For older ones only the fact of the end is known."""

_STOP_POLL_MS: Final = 10
_POLL_MS: Final = 200
_REAPED_PER_START: Final = 2
"""Number of children checked at each start, so that a start costs the same with thousands of children. More than one, so that
children without a waiter are reaped faster than new ones are started.
"""
_GROUP_RETRIES_MAX: Final = 3

_PidAndStart = tuple[int, int]
"""A pid with its start time."""


class ProcessRunner:
    """Runs real processes. `parent`: our directory in the cgroup hierarchies; another runner on this machine may share it.

    `start` must be called from the main thread: a process with `with_parent` dies with the thread that started it.
    """

    def __init__(self, clock: Clock, *, parent: str = PARENT) -> None:
        self._clock = clock
        self._parent = parent
        self._discovered: Cgroups | None = None
        self._reaper = Reaper()
        self._spawn_server: SpawnServer | None = SpawnServer()
        """None: this machine does not support starting a process inside its cgroup."""
        self._children: dict[ProcessHandle, None] = {}
        self._exit_statuses: dict[ProcessHandle, ExitStatus] = {}
        self._exec_count = 0

    async def start(self, spec: ProcessSpec, /) -> ProcessHandle:
        check_process_spec(spec)
        for child in tuple(self._children)[:_REAPED_PER_START]:
            if not self._finalize(child) and child in self._children:
                self._children[child] = self._children.pop(child)  # move it to the end of the queue
        # Not in a thread: it takes a millisecond or two, and a cancelled caller never leaves an unknown process behind.
        check_start_deadline(spec, self._clock.now_ms())
        pid, group_id = await self._spawn(spec)
        process = procfs.process_info(pid)
        if process is None:
            raise NotStarted("/proc does not show the started process", "run on Linux with /proc mounted")
        running = ProcessHandle(pid, self._start_time(process), str(group_id) if group_id is not None else "")
        self._children[running] = None
        return running

    async def wait(self, running: ProcessHandle, /) -> ExitStatus:
        while self._is_running(running):
            await _wait_for_end(running.pid, lambda: self._is_running(running))
        self._finalize(running)
        return self._exit_statuses.get(running, ExitStatus())

    def is_alive(self, running: ProcessHandle, /) -> bool:
        return self._is_running(running)

    async def stop(self, running: ProcessHandle, /, *, grace_ms: int) -> None:
        if (group_id := self._group_id(running)) is not None:
            await self._stop_group(running, group_id, grace_ms)
        elif self._find_process(running) is not None:
            await self._stop_processes(running, grace_ms)
        self._finalize(running)

    async def start_exec(
        self, running: ProcessHandle, spec: ProcessSpec, /, *, window: PtySize | None = None
    ) -> exec_session.ProcessExecSession:
        check_process_spec(spec)
        target = exec_session.exec_target(running, spec, self._group_id(running), self._members(running))
        self._exec_count += 1
        name = f"exec-{os.getpid()}-{self._exec_count}"  # unique among the runners of this machine and within this one

        def is_running() -> bool:
            return self._is_running(running) and target.pid in self._members(running)

        return await exec_session.start_exec(spec, target, self._cgroups, name, is_running, window)

    def usage(self, running: ProcessHandle, /) -> Usage:
        if (group_id := self._group_id(running)) is not None:
            return self._cgroups.usage(group_id.name)
        if self._find_process(running) is None:
            return Usage()
        members = procfs.process_tree(running.pid)
        return Usage(sum(process.cpu_ms for process in members), sum(process.memory_bytes for process in members), len(members))

    def isolation_support(self) -> IsolationSupport:
        cgroups = self._cgroups
        return IsolationSupport(cgroups.name, cgroups.controllers, cgroups.reason, shutil.which(BUBBLEWRAP) is not None)

    def live_groups(self) -> tuple[str, ...]:
        for child in tuple(self._children):
            self._finalize(child)
        return tuple(name for name in self._cgroups.names() if not self._cgroups.remove(name))

    async def kill_group(self, group: str, /) -> None:
        check_group_name(group)
        while self._cgroups.members(group):
            self._cgroups.kill(group)
            await self._clock.sleep_ms(_STOP_POLL_MS)
        for child in [known for known in self._children if known.group.startswith(f"{group}#")]:
            self._finalize(child)
        self._cgroups.remove(group)

    # -- start -----------------------------------------------------------------------------------------------------------------

    @property
    def _cgroups(self) -> Cgroups:
        """Discovered on first use: that forks, and many runners never need them."""
        if self._discovered is None:
            self._discovered = find_cgroups(self._parent)
        return self._discovered

    async def _spawn(self, spec: ProcessSpec) -> tuple[int, GroupId | None]:
        if not spec.group or self._cgroups.name == "none":
            return spawn.spawn(spec), None
        for _ in range(_GROUP_RETRIES_MAX):
            try:
                return await self._spawn_inside(spec)
            except spawn.GroupRemoved:
                continue
            except spawn.CloneUnsupported:
                self._spawn_server = None
        raise NotStarted(
            f"cgroup {spec.group} was removed {_GROUP_RETRIES_MAX} times during the start",
            "check which process removes cgroups there",
        )

    async def _spawn_inside(self, spec: ProcessSpec) -> tuple[int, GroupId]:
        name, group_id = spec.group, None
        try:
            group_id = self._cgroups.create(name, spec.limits)
            if spec.with_parent:
                self._reaper.register(group_id.inode, self._cgroups.directories(name))
            return await self._create_inside(spec), group_id
        except GroupOccupied:
            raise NotStarted(f"a process still runs in group {name}", "stop it first: a group runs once at a time") from None
        except FileNotFoundError:
            self._remove_group(group_id)
            raise spawn.GroupRemoved(name) from None
        except OSError as error:
            self._remove_group(group_id)
            reason = (error.strerror or str(error)).lower()
            raise NotStarted(f"cgroup {name} cannot be created with these limits ({reason})", "run `remit doctor`") from error
        except (NotStarted, spawn.GroupRemoved, spawn.CloneUnsupported):
            self._remove_group(group_id)
            raise

    async def _create_inside(self, spec: ProcessSpec) -> int:
        """Start through the spawn server, which creates the process inside its cgroups; without it, fork here and join them."""
        name, server = spec.group, self._spawn_server
        if server is None:
            with self._cgroups.join_fds(name) as join_fds:
                return spawn.spawn(spec, join_fds=join_fds)
        left_ms = None if spec.not_after_ms is None else spec.not_after_ms - self._clock.now_ms()
        try:
            with self._cgroups.clone_target(name) as target, spawn.prepare(spec) as prepared:
                return await server.spawn(spec, prepared, target, left_ms)
        except StartOutcomeUnknown:
            await self._kill_unknown(name)
            raise NotStarted("the spawn server ended during the start", "no action needed: the start is retried") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._kill_unknown(name))
            raise

    async def _kill_unknown(self, group: str) -> None:
        """Kill and reap all processes of the group: one of them may be ours with an unknown pid, which cannot be tracked."""
        unknown = self._cgroups.members(group)
        await self.kill_group(group)
        for pid in unknown:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait

    def _remove_group(self, group_id: GroupId | None) -> None:
        """Remove a cgroup if it is empty, and unregister it from the reaper."""
        if group_id is not None and self._cgroups.remove(group_id.name):
            self._reaper.unregister(group_id.inode, self._cgroups.directories(group_id.name))

    # -- membership and end ----------------------------------------------------------------------------------------------------

    def _group_id(self, running: ProcessHandle) -> GroupId | None:
        """Return its cgroup, if it has one that was not replaced by another of the same name."""
        group_id = parse_group_id(running.group) if running.group else None
        return group_id if group_id is not None and self._cgroups.is_current(group_id) else None

    def _members(self, running: ProcessHandle) -> list[int]:
        """Return the pids of the run; none if its pid or cgroup was reused by another."""
        if (group_id := self._group_id(running)) is not None:
            return self._cgroups.members(group_id.name)
        if running.group or self._find_process(running) is None:
            return []
        return [process.pid for process in procfs.process_tree(running.pid)]

    async def _stop_group(self, running: ProcessHandle, group_id: GroupId, grace_ms: int) -> None:
        name, cgroups = group_id.name, self._cgroups
        until_ms = self._clock.now_ms() + grace_ms
        with _translating_errors(f"the cgroup {name}"):
            cgroups.signal(name, signal.SIGTERM, exclude=_bubblewrap_processes(running.pid, cgroups.members(name)))
            while cgroups.is_current(group_id) and cgroups.members(name):
                if self._clock.now_ms() >= until_ms:
                    cgroups.kill(name)
                await self._clock.sleep_ms(_STOP_POLL_MS)

    async def _stop_processes(self, running: ProcessHandle, grace_ms: int) -> None:
        """Stop without a cgroup: the process group, and all descendants whose chain of parents still runs."""
        ours = self._related_processes(running, set())
        spared = _bubblewrap_processes(running.pid, [pid for pid, _ in ours])
        until_ms = self._clock.now_ms() + grace_ms
        with _translating_errors(f"process group {running.pid}"):
            _signal({process for process in ours if process[0] not in spared}, signal.SIGTERM)
            # Repeat: a member may fork while the others are killed.
            while ours := _still_running(ours | self._related_processes(running, ours)):
                if self._clock.now_ms() >= until_ms:
                    _signal(ours, signal.SIGKILL)
                await self._clock.sleep_ms(_STOP_POLL_MS)

    def _related_processes(self, running: ProcessHandle, ours: set[_PidAndStart]) -> set[_PidAndStart]:
        """Return the members of its process group, if that was not reused, and their descendants and those of `ours`."""
        processes = {(process.pid, process.start_ticks) for process in procfs.process_group(running.pid)}
        if self._find_process(running) is None and ours.isdisjoint(processes):
            processes = set()  # the number was reused for another group
        return processes | {
            (process.pid, process.start_ticks) for pid, _ in sorted(processes | ours) for process in procfs.process_tree(pid)
        }

    def _is_running(self, running: ProcessHandle) -> bool:
        if running in self._children:  # a child keeps its pid until it is reaped, and waitid is the fastest check
            with suppress(ChildProcessError):
                return _child_status(running.pid) is None
        process = self._find_process(running)
        return process is not None and process.is_running

    def _find_process(self, running: ProcessHandle) -> procfs.ProcessInfo | None:
        """Return the process itself, running or dead, and never another one with the same pid."""
        process = procfs.process_info(running.pid)
        return process if process is not None and self._start_time(process) == running.start_time else None

    def _start_time(self, process: procfs.ProcessInfo) -> str:
        return f"{self._clock.boot()}/{process.start_ticks}"

    def _finalize(self, running: ProcessHandle) -> bool:
        """Record how it ended and release its resources. Returns whether nothing remains to be done."""
        if self._is_running(running):
            return False
        group_id = self._group_id(running)
        if running in self._children and not self._reap(running, group_id):
            return False
        if group_id is not None and running not in self._exit_statuses and self._cgroups.had_oom_kill(group_id.name):
            self._remember(running, ExitStatus(oom=True))
        if group_id is not None:
            self._remove_group(group_id)
        elif (
            removed := parse_group_id(running.group) if running.group else None
        ) is not None:  # another runner has removed the cgroup
            self._reaper.unregister(removed.inode, self._cgroups.directories(removed.name))
        return True

    def _reap(self, running: ProcessHandle, group_id: GroupId | None) -> bool:
        """Reap a child. Without a cgroup this waits until its process group is empty, so its number is not reused before."""
        try:
            status = _child_status(running.pid)
        except ChildProcessError:  # other code in this process has reaped it
            del self._children[running]
            return True
        if status is None:
            return False
        oom = group_id is not None and self._cgroups.had_oom_kill(group_id.name)
        exited = status.si_code == os.CLD_EXITED
        self._remember(
            running, ExitStatus(code=status.si_status, oom=oom) if exited else ExitStatus(signal=status.si_status, oom=oom)
        )
        if group_id is None and procfs.process_group(running.pid):
            return False
        os.waitpid(running.pid, 0)
        del self._children[running]
        return True

    def _remember(self, running: ProcessHandle, ended: ExitStatus) -> None:
        self._exit_statuses[running] = ended
        while len(self._exit_statuses) > EXIT_STATUSES_MAX:
            del self._exit_statuses[next(iter(self._exit_statuses))]


def _child_status(pid: int) -> os.waitid_result | None:
    """Return how a child has ended, or None, without reaping it. Raises ChildProcessError."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


async def _wait_for_end(pid: int, lives: Callable[[], bool]) -> None:
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
            loop.add_reader(handle, _wake, ended)
            await ended
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _wake(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _bubblewrap_processes(leader: int, pids: Collection[int]) -> frozenset[int]:
    """Return the processes of bubblewrap itself, which get no SIGTERM. Pid 1 of the sandbox would end before the replica, and
    its exit code would be lost.
    """
    if procfs.executable(leader) != shutil.which(BUBBLEWRAP):
        return frozenset()
    bubblewrap = frozenset(pid for pid in pids if procfs.namespace_pid(pid) < 2)
    return frozenset() if len(bubblewrap) == len(pids) else bubblewrap  # all of them: the sandbox is still starting


def _still_running(members: set[_PidAndStart]) -> set[_PidAndStart]:
    current = ((member, procfs.process_info(member[0])) for member in sorted(members))
    return {member for member, now in current if now is not None and now.start_ticks == member[1] and now.is_running}


def _signal(members: set[_PidAndStart], number: signal.Signals) -> None:
    """Signal processes that still have the recorded start time. The pidfd is opened before the check, so the pid cannot be
    reused.
    """
    for pid, ticks in sorted(members):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            now = procfs.process_info(pid)
            if now is not None and now.start_ticks == ticks:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            continue
        finally:
            os.close(handle)


@contextmanager
def _translating_errors(what: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise WorldError(f"no permission to stop {what}", "run as the same user, or as root") from error
