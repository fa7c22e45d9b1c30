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
UNREGISTERED_MAX: Final = 16
"""With this many removed groups unreported, they are reported at once. That many fit into one write to a pipe."""
RESTART_S: Final = 0.2
"""Pause before a reaper that has ended is restarted, in case it ends at once every time."""


class Reaper:
    """Handle of the reaper of this process, used in one event loop.

    Call `register` before a group has a member, and `unregister` when it has none any more.
    """

    def __init__(self) -> None:
        self._registered: dict[str, None] = {}
        self._unregistered: list[str] = []
        """Removals that were not sent yet. A removed group is harmless to the reaper, so they are sent with the next
        registration.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: int | None = None

    @property
    def pid(self) -> int:
        """Pid of the reaper; 0 if none runs."""
        return 0 if self._process is None else self._process.pid

    def register(self, inode: int, directories: Sequence[str]) -> None:
        """Register a group by the inode of its first directory. Raises `NotStarted`: it would outlive this process."""
        group = _line(inode, directories)
        self._registered[group] = None
        removals, self._unregistered = self._unregistered, []
        try:
            self._send("".join((*removals, f"+\t{group}\n")))
        except OSError as error:
            del self._registered[group]
            reason = (error.strerror or str(error)).lower()
            raise NotStarted(f"the reaper cannot be started ({reason})", "check the node's system log") from error

    def unregister(self, inode: int, directories: Sequence[str]) -> None:
        group = _line(inode, directories)
        if self._registered.pop(group, group) is None:
            self._unregistered.append(f"-\t{group}\n")
            if len(self._unregistered) >= UNREGISTERED_MAX:
                removals, self._unregistered = self._unregistered, []
                with suppress(OSError):  # a restarted reaper gets the list of the remaining groups
                    self._send("".join(removals))

    def _send(self, line: str) -> None:
        process, data = self._process, line.encode()
        if process is not None and process.stdin is not None:
            try:
                if os.write(process.stdin.fileno(), data) == len(data):
                    return
            except (BrokenPipeError, BlockingIOError):
                pass
        self._restart()

    def _restart(self) -> None:
        self._kill()
        if not self._registered:
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
            remaining = memoryview("".join(f"+\t{group}\n" for group in self._registered).encode())
            while remaining:
                remaining = remaining[os.write(process.stdin.fileno(), remaining) :]
        os.set_blocking(process.stdin.fileno(), False)
        self._handle = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._handle, self._on_exit, loop)

    def _on_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        self._kill()
        loop.call_later(RESTART_S, self._restart_later, loop)

    def _restart_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._process is None:
            try:
                self._restart()
            except OSError:
                loop.call_later(RESTART_S, self._restart_later, loop)

    def _kill(self) -> None:
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


def _line(inode: int, directories: Sequence[str]) -> str:
    return "\t".join((str(inode), *directories))
