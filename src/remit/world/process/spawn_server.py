"""Client of the spawn server.

Told to a starter, a small process of its own: see starter.py, which runs it.

Whoever is told nothing back, or too late, does not know what runs. Then the starter is ended, so that it begins no more, and
the caller clears the group: that is why only what has a group is started so.
"""

from __future__ import annotations

import array
import asyncio
import marshal
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from remit.world.interfaces import NotStarted, Order
from remit.world.process.cgroups import Birthplace
from remit.world.process.isolation import outer_directory
from remit.world.process.spawn import FILES, Prepared, not_begun

PROGRAM: Final = Path(__file__).with_name("spawn_server_main.py")
ANSWER_S: Final = 10.0
"""After so long without an answer a starter is held for stopped."""

_TOLD_BYTES_MAX: Final = 256


class Lost(Exception):
    """It is not known whether anything was begun; nothing more is. Clear its group."""


class Starter:
    """Of one process; used from its main thread, and in one event loop at a time."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._pid = 0

    @property
    def pid(self) -> int:
        """0: none runs."""
        return self._pid

    def __del__(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def spawn(self, order: Order, prepared: Prepared, entry: Birthplace, left_ms: int | None) -> int:
        """The number of the new process, once its program has begun. `left_ms`: it is not begun any more after that.

        Raises `NotStarted` and `spawning.Swept`, after which nothing runs; `Unusable` where this machine starts nothing so; and
        `Lost`. Whoever is cancelled has begun nothing, too: then that is waited for here.
        """
        until_ns = 0 if left_ms is None else time.clock_gettime_ns(time.CLOCK_BOOTTIME) + left_ms * 1_000_000
        with ExitStack() as files:
            words = _file(_words(order, prepared, entry, until_ns), files)
            streams = [stream for stream in prepared.streams if stream >= 0]
            hear, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            files.callback(os.close, hear)
            try:
                by = self._send([words, tell, *([entry.into] if entry.into else []), *streams, *entry.entrances])
            finally:
                os.close(tell)
            told = await self._answer(hear, by)
        return self._begun(order, prepared, told, by)

    def _begun(self, order: Order, prepared: Prepared, told: bytes, by: int) -> int:
        lines = dict(line.split(" ", 1) for line in told.decode().splitlines() if " " in line)
        pid = int(lines.pop("pid", 0))
        if pid and not lines:
            return pid
        if pid:  # it did not get as far as its program, and is over
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not lines:
            self.end(by)
            raise Lost
        step, code = next(iter(lines.items()))
        raise not_begun(order, prepared.argv, step, int(code))

    async def _answer(self, hear: int, by: int) -> bytes:
        """All that is told until the program has begun, or will not."""
        loop, told = asyncio.get_running_loop(), bytearray()
        over: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                piece = os.read(hear, _TOLD_BYTES_MAX)
            except BlockingIOError:
                return
            told.extend(piece)
            if not piece and not over.done():
                over.set_result(None)

        loop.add_reader(hear, read)
        try:
            async with asyncio.timeout(ANSWER_S):
                await over
        except TimeoutError:
            self.end(by)
            raise Lost from None
        except asyncio.CancelledError:
            self.end(by)
            raise
        finally:
            loop.remove_reader(hear)
        return bytes(told)

    # -- the process -----------------------------------------------------------------------------------------------------

    def _send(self, fds: list[int]) -> int:
        """To whom: its number."""
        for _ in range(2):
            if self._socket is None:
                self._anew()
            try:
                if self._socket is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    self._socket.sendmsg([b"."], rights)
                    return self._pid
            except (BrokenPipeError, ConnectionError, BlockingIOError):  # it has ended, or does not listen
                self.end(self._pid)
        raise NotStarted("whoever starts work here ends at once", "see what the machine says of it")

    def _anew(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                (sys.executable, "-I", "-S", str(PROGRAM)),
                env={},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            why = (error.strerror or str(error)).lower()
            raise NotStarted(f"nobody can start work here ({why})", "see what the machine says of it") from error
        finally:
            theirs.close()
        process.returncode = 0  # watched by its socket; a handle would complain that it outlives it
        ours.setblocking(False)
        self._socket, self._pid = ours, process.pid

    def end(self, pid: int) -> None:
        """This one begins no more. What it was about to begin is told to nobody: see `Lost`."""
        if not pid or pid != self._pid:
            return  # it has ended before, and another may be there by now
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._pid = 0


def _words(order: Order, prepared: Prepared, entry: Birthplace, until_ns: int) -> bytes:
    place, env = outer_directory(order), prepared.env
    texts = ["" if place is None else str(place), *prepared.argv, *env, *env.values()]
    words = os.fsencode("\0".join(texts)).split(b"\0")  # all at once: there are dozens
    if len(words) != len(texts):
        raise NotStarted(f"{order.argv[0]!r} cannot be run (embedded null byte)", "mend the order")
    cuts = accumulate((1, len(prepared.argv), len(env), len(env)))
    argv, names, values = (words[first:end] for first, end in pairwise(cuts))
    identity = prepared.identity
    return marshal.dumps(
        {
            "argv": argv,
            "env": dict(zip(names, values, strict=True)),
            "cwd": words[0] or None,
            "identity": None if identity is None else tuple(identity),
            "parent": os.getpid() if order.with_parent else 0,
            "files": FILES,
            "streams": [stream >= 0 for stream in prepared.streams],
            "into": bool(entry.into),
            "until_ns": until_ns,
        }
    )


def _file(words: bytes, files: ExitStack) -> int:
    """However long they are: a message has a bound."""
    file = os.memfd_create("start")
    files.callback(os.close, file)
    os.write(file, words)
    return file
