"""How does work run on this machine? Processes in groups of their own; why one runs, and what it writes, is not known here.

A number is used again one day, so nothing is done to a pid alone: its start time must be the one that was written down. Two
facts of Linux make that safe. A dead child keeps its number until it is reaped, so it is reaped only when its group is empty.
And a number is not given out while a group of that number has a member, so a group in which somebody is still there whom we
saw when it was ours is still ours.

Not asyncio's subprocesses: they kill a child that is still running when the loop's objects go, and work must outlive us.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from remit.world.promises import Clock, Ended, NotStarted, Order, Running, WorldError

ENDED_MAX: Final = 10_000
"""How many ends are remembered for whoever waits late. Of an older one only that it ended is known."""

_LOOK_MS: Final = 10
_PROC: Final = Path("/proc")
_NO_MORE: Final = frozenset("ZXx")
"""States of a process that has ended and is only waiting to be reaped."""

_CURES: Final = {
    errno.ENOENT: "install it, or give its path",
    errno.EACCES: "make it executable for this user",
    errno.EPERM: "make it executable for this user",
    errno.ENOTDIR: "give its path",
    errno.ENOEXEC: "run a program that is built for this machine, or begin the script with #!",
    errno.E2BIG: "give it fewer or shorter arguments and variables",
    errno.EAGAIN: "raise this user's limit of processes, or run less",
    errno.ENOMEM: "free memory on this machine",
    errno.EMFILE: "raise this process's limit of open files",
}


class _Member(NamedTuple):
    """One process as /proc tells it."""

    pid: int
    state: str
    group: int
    threads: int
    ticks: int

    @property
    def runs(self) -> bool:
        """A first thread that has ended says nothing about the others."""
        return self.state not in _NO_MORE or self.threads > 1


class ProcessRunner:
    """Standard streams go nowhere: what work says is not kept here."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._children: dict[Running, None] = {}
        self._ended: dict[Running, Ended] = {}

    async def start(self, order: Order, /) -> Running:
        if not order.argv:
            raise ValueError("an order without a program")
        for child in tuple(self._children):
            self._settle(child)
        # Here and not in a thread: it takes a millisecond or two, and whoever is cancelled has started nothing unknown.
        process = _spawn(order)
        member = _member(process.pid)
        # From here on it is watched by its number. A handle would complain that the work outlives it, which is the promise.
        process.returncode = 0
        if member is None:
            raise NotStarted("/proc does not show the process that was started", "mount /proc, and run on Linux")
        running = Running(process.pid, self._began(member))
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
        if self._known(running) is None:
            return
        ours = set(_group(running.pid))
        _signal(running.pid, signal.SIGTERM)
        until_ms, forced = self._clock.now_ms() + grace_ms, False
        while left := _group(running.pid):
            if self._known(running) is None and ours.isdisjoint(left):
                return  # the number belongs to somebody else by now
            ours.update(left)
            if not forced and self._clock.now_ms() >= until_ms:
                forced = True
            if forced:  # again and again: a member may be born while its group is killed
                _signal(running.pid, signal.SIGKILL)
            await self._clock.sleep_ms(_LOOK_MS)
        self._settle(running)

    def _lives(self, running: Running) -> bool:
        member = self._known(running)
        return member is not None and member.runs

    def _known(self, running: Running) -> _Member | None:
        """The process itself, dead or alive, and never another one of the same number."""
        member = _member(running.pid)
        return member if member is not None and self._began(member) == running.began else None

    def _began(self, member: _Member) -> str:
        return f"{self._clock.boot()}/{member.ticks}"

    def _settle(self, running: Running) -> None:
        """Note how a child ended, and let its number go once nobody of its group is left."""
        if running not in self._children:
            return
        try:
            told = os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else in this process has reaped it
            del self._children[running]
            return
        if told is None:
            return
        exited = told.si_code == os.CLD_EXITED
        self._ended[running] = Ended(code=told.si_status) if exited else Ended(signal=told.si_status)
        if not _group(running.pid):
            os.waitpid(running.pid, 0)
            del self._children[running]
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]


def _spawn(order: Order) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - never through a shell, and what may run is decided above
            order.argv,
            env=dict(order.env),
            cwd=order.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        why, place = (error.strerror or str(error)).lower(), order.directory
        if place is not None and str(error.filename) == str(place):
            raise NotStarted(f"the directory {place} cannot be entered ({why})", "make it, or name another") from error
        cure = _CURES.get(error.errno or 0, "see what the machine says of it")
        raise NotStarted(f"{order.argv[0]} cannot be run ({why})", cure) from error
    except ValueError as error:
        raise NotStarted(f"{order.argv[0]!r} cannot be run ({error})", "mend the order") from error


async def _until_it_ends(pid: int, lives: Callable[[], bool]) -> None:
    """One descriptor tells the end of any process, also of one that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
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


def _member(pid: int) -> _Member | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold anything, also spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Member(pid, fields[0].decode(), int(fields[2]), int(fields[17]), int(fields[19]))


def _group(number: int) -> list[tuple[int, int]]:
    """Who of a group still runs: pids with their start times."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return []
    except PermissionError:  # it has members that changed their user
        pass
    members = (_member(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [(one.pid, one.ticks) for one in members if one is not None and one.group == number and one.runs]


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise WorldError(f"process group {group} may not be ended", "run as the user whom it runs as, or as root") from error
