"""Client of the reaper (reaper_main.py), which kills registered cgroups when this process dies.

The kernel can kill a child with its parent, but not the children of that child. The reaper is started on first use, and
restarted with all registered groups when it has ended or does not read.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from remit.world.interfaces import NotStarted

PROGRAM: Final = Path(__file__).with_name("reaper_main.py")
GONE_MAX: Final = 16
"""Number of removed groups that are reported at the latest; so many fit into one write to a pipe."""
AGAIN_S: Final = 0.2
"""Pause before a reaper that has ended is restarted, in case it ends at once every time."""


class Guard:
    """Handle of the reaper of this process, used in one event loop.

    Call `hold` before a group has a member, and `let_go` when it has none any more.
    """

    def __init__(self) -> None:
        self._held: dict[str, None] = {}
        self._gone: list[str] = []
        """Removals that were not sent yet. A removed group is harmless to the reaper, so they are sent with the next
        registration.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: int | None = None

    @property
    def pid(self) -> int:
        """Pid of the reaper; 0 if none runs."""
        return 0 if self._process is None else self._process.pid

    def hold(self, number: int, places: Sequence[str]) -> None:
        """Register a group by the inode of its first directory. Raises `NotStarted`: it would outlive this process."""
        group = _line(number, places)
        self._held[group] = None
        gone, self._gone = self._gone, []
        try:
            self._say("".join((*gone, f"+\t{group}\n")))
        except OSError as error:
            del self._held[group]
            why = (error.strerror or str(error)).lower()
            raise NotStarted(f"the reaper cannot be started ({why})", "check the node's system log") from error

    def let_go(self, number: int, places: Sequence[str]) -> None:
        group = _line(number, places)
        if self._held.pop(group, group) is None:
            self._gone.append(f"-\t{group}\n")
            if len(self._gone) >= GONE_MAX:
                gone, self._gone = self._gone, []
                with suppress(OSError):  # a restarted reaper gets the list of the remaining groups
                    self._say("".join(gone))

    def _say(self, line: str) -> None:
        process, data = self._process, line.encode()
        if process is not None and process.stdin is not None:
            try:
                if os.write(process.stdin.fileno(), data) == len(data):
                    return
            except (BrokenPipeError, BlockingIOError):
                pass
        self._anew()

    def _anew(self) -> None:
        self._end()
        if not self._held:
            return
        process = subprocess.Popen(  # noqa: S603 - our own program
            (sys.executable, "-I", "-S", str(PROGRAM)),
            env={},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        if process.stdin is None:
            raise RuntimeError("Popen returned no pipe")
        self._process = process
        with suppress(BrokenPipeError):  # it has ended already, and will be restarted
            left = memoryview("".join(f"+\t{group}\n" for group in self._held).encode())
            while left:
                left = left[os.write(process.stdin.fileno(), left) :]
        os.set_blocking(process.stdin.fileno(), False)
        self._handle = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._handle, self._ended, loop)

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end()
        loop.call_later(AGAIN_S, self._follow, loop)

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._process is None:
            try:
                self._anew()
            except OSError:
                loop.call_later(AGAIN_S, self._follow, loop)

    def _end(self) -> None:
        """Kill the reaper. If it is only stopped (SIGSTOP), it would otherwise kill by an outdated list when it continues."""
        process, self._process = self._process, None
        handle, self._handle = self._handle, None
        if handle is not None:
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _line(number: int, places: Sequence[str]) -> str:
    return "\t".join((str(number), *places))
