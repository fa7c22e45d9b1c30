"""Client of the spawn server (spawn_server_main.py), a small process that starts others.

If an answer does not arrive, it is unknown whether the process was started. Then the spawn server is killed, so that it
starts nothing more, and the caller kills everything in the cgroup. Therefore only processes with a cgroup are started this
way.
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

from remit.world.interfaces import NotStarted, ProcessSpec
from remit.world.process.cgroups import CloneTarget
from remit.world.process.isolation import host_directory
from remit.world.process.spawn import OPEN_FILES_LIMIT, PreparedProcess, start_error

PROGRAM: Final = Path(__file__).with_name("spawn_server_main.py")
ANSWER_S_MAX: Final = 10.0
"""A spawn server that has not answered for this long is treated as hung."""

_RESULT_BYTES_MAX: Final = 256


class StartOutcomeUnknown(Exception):
    """It is unknown whether the process was started; nothing more will be. The caller must kill its cgroup."""


class SpawnServer:
    """Handle of the spawn server of this process. Used from the main thread, and in one event loop at a time."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._pid = 0

    @property
    def pid(self) -> int:
        """Pid of the spawn server; 0 if none runs."""
        return self._pid

    def __del__(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def spawn(self, spec: ProcessSpec, prepared: PreparedProcess, target: CloneTarget, left_ms: int | None) -> int:
        """Start a process and return its pid once its program is executed. `left_ms`: time until the start deadline.

        Raises `NotStarted` and `spawn.GroupRemoved`, after which nothing runs; `spawn.CloneUnsupported` if this machine does
        not support it; and `StartOutcomeUnknown`. On cancellation the spawn server is killed, so it starts nothing later.
        """
        until_ns = 0 if left_ms is None else time.clock_gettime_ns(time.CLOCK_BOOTTIME) + left_ms * 1_000_000
        with ExitStack() as files:
            request_fd = _memory_file(_encode_request(spec, prepared, target, until_ns), files)
            streams = [stream for stream in prepared.streams if stream >= 0]
            result_fd, report_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            files.callback(os.close, result_fd)
            try:
                server_pid = self._send(
                    [request_fd, report_fd, *([target.cgroup_fd] if target.cgroup_fd else []), *streams, *target.join_fds]
                )
            finally:
                os.close(report_fd)
            answer = await self._read_answer(result_fd, server_pid)
        return self._parse_answer(spec, prepared, answer, server_pid)

    def _parse_answer(self, spec: ProcessSpec, prepared: PreparedProcess, answer: bytes, server_pid: int) -> int:
        lines = dict(line.split(" ", 1) for line in answer.decode().splitlines() if " " in line)
        pid = int(lines.pop("pid", 0))
        if pid and not lines:
            return pid
        if pid:  # it failed before its program was executed, and has ended
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not lines:
            self.kill(server_pid)
            raise StartOutcomeUnknown
        step, code = next(iter(lines.items()))
        raise start_error(spec, prepared.argv, step, int(code))

    async def _read_answer(self, result_fd: int, server_pid: int) -> bytes:
        """Read the answer until the program is executed or has failed."""
        loop, answer = asyncio.get_running_loop(), bytearray()
        complete: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                chunk = os.read(result_fd, _RESULT_BYTES_MAX)
            except BlockingIOError:
                return
            answer.extend(chunk)
            if not chunk and not complete.done():
                complete.set_result(None)

        loop.add_reader(result_fd, read)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await complete
        except TimeoutError:
            self.kill(server_pid)
            raise StartOutcomeUnknown from None
        except asyncio.CancelledError:
            self.kill(server_pid)
            raise
        finally:
            loop.remove_reader(result_fd)
        return bytes(answer)

    # -- server process --------------------------------------------------------------------------------------------------------

    def _send(self, fds: list[int]) -> int:
        """Send the request and return the pid of the server that got it."""
        for _ in range(2):
            if self._socket is None:
                self._start_server()
            try:
                if self._socket is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    self._socket.sendmsg([b"."], rights)
                    return self._pid
            except (BrokenPipeError, ConnectionError, BlockingIOError):  # it has ended, or does not read
                self.kill(self._pid)
        raise NotStarted("the spawn server keeps ending", "check the node's system log")

    def _start_server(self) -> None:
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
            reason = (error.strerror or str(error)).lower()
            raise NotStarted(f"the spawn server cannot be started ({reason})", "check the node's system log") from error
        finally:
            theirs.close()
        process.returncode = 0  # watched through its socket; Popen would warn that it outlives it
        ours.setblocking(False)
        self._socket, self._pid = ours, process.pid

    def kill(self, pid: int) -> None:
        """Kill this server, so that it starts nothing more. The outcome of a pending start is unknown: see
        `StartOutcomeUnknown`.
        """
        if not pid or pid != self._pid:
            return  # it has been replaced already
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._pid = 0


def _encode_request(spec: ProcessSpec, prepared: PreparedProcess, target: CloneTarget, until_ns: int) -> bytes:
    directory, env = host_directory(spec), prepared.env
    texts = ["" if directory is None else str(directory), *prepared.argv, *env, *env.values()]
    words = os.fsencode("\0".join(texts)).split(b"\0")  # one call instead of dozens
    if len(words) != len(texts):
        raise NotStarted(f"{spec.argv[0]!r} cannot be run (embedded null byte)", "correct the command")
    cuts = accumulate((1, len(prepared.argv), len(env), len(env)))
    argv, names, values = (words[first:end] for first, end in pairwise(cuts))
    identity = prepared.identity
    return marshal.dumps(
        {
            "argv": argv,
            "env": dict(zip(names, values, strict=True)),
            "cwd": words[0] or None,
            "identity": None if identity is None else tuple(identity),
            "parent": os.getpid() if spec.with_parent else 0,
            "files": OPEN_FILES_LIMIT,
            "streams": [stream >= 0 for stream in prepared.streams],
            "into": bool(target.cgroup_fd),
            "until_ns": until_ns,
        }
    )


def _memory_file(data: bytes, files: ExitStack) -> int:
    """Put the request into a memory file: the size of a message is limited."""
    file = os.memfd_create("start")
    files.callback(os.close, file)
    os.write(file, data)
    return file
