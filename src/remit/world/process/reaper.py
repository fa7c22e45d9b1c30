"""Client of the reaper.

Told to a guard, which outlives us; it is in guard.py, and runs by itself.

The kernel ends a child with its parent, and not the children of that one. A guard is started when it is first needed; and anew,
with all that is held, when it has ended or does not listen.
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
"""It is told of so many groups that are gone at the latest: a pipe takes them in one piece."""
AGAIN_S: Final = 0.2
"""One that has ended is followed by another after so long: it may be that none can live here."""


class Guard:
    """Of one process, and of the event loop in which it is used. `hold` a group before anybody is in it, `let_go` when nobody
    is any more.
    """

    def __init__(self) -> None:
        self._held: dict[str, None] = {}
        self._gone: list[str] = []
        """What it has not been told yet. A group that is gone is nobody's, so it is told with the next that is held."""
        self._process: subprocess.Popen[bytes] | None = None
        self._handle: int | None = None

    @property
    def pid(self) -> int:
        """0: none runs."""
        return 0 if self._process is None else self._process.pid

    def hold(self, number: int, places: Sequence[str]) -> None:
        """A group by the number of its first directory. Raises `NotStarted`: then nobody would end it."""
        group = _line(number, places)
        self._held[group] = None
        gone, self._gone = self._gone, []
        try:
            self._say("".join((*gone, f"+\t{group}\n")))
        except OSError as error:
            del self._held[group]
            why = (error.strerror or str(error)).lower()
            raise NotStarted(f"nobody would end it with its starter ({why})", "see what the machine says of it") from error

    def let_go(self, number: int, places: Sequence[str]) -> None:
        group = _line(number, places)
        if self._held.pop(group, group) is None:
            self._gone.append(f"-\t{group}\n")
            if len(self._gone) >= GONE_MAX:
                gone, self._gone = self._gone, []
                with suppress(OSError):  # the next one that is needed is told of what is left then
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
            raise RuntimeError("it was started with a pipe")
        self._process = process
        with suppress(BrokenPipeError):  # it has ended already, and is followed by another
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
        """One that was only stopped would kill by an old list when it goes on."""
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
