"""Exec session interface and implementation: a command run next to a running process.

The command is started by a separate program (exec_main.py), which gets its instructions over a socket and nothing else of
this process. All processes of the command are in a cgroup below the one of the replica: they count against the replica's
limits, and can be killed alone or with it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from remit.world.interfaces import CommandOutput, ExitStatus, NotStarted, ProcessHandle, ProcessSpec, PtySize
from remit.world.process import procfs, spawn
from remit.world.process.cgroups import Cgroups, GroupId
from remit.world.process.exec_main import CLONE_NEWUSER

PROGRAM: Final = Path(__file__).with_name("exec_main.py")
READ_BYTES: Final = 32 << 10
START_S_MAX: Final = 10.0
"""Time limit for starting a command, which only has to be found and executed."""

_POLL_S: Final = 0.01
_RESULT_BYTES_MAX: Final = 4_096
_NAMESPACES: Final = {"user": CLONE_NEWUSER, "mnt": 0x00020000, "pid": 0x20000000, "ipc": 0x08000000}
_CLOSED_ERRORS: Final = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a stream or terminal whose other end is closed."""
_EOF_KEY: Final = b"\x04"

_STEP_ERRORS: Final = {
    "join": ("the process to run next to has ended", "check that the replica runs, then retry"),
    "namespaces": ("the sandbox cannot be joined", "run the agent as root, or as the user of the replica"),
    "user": ("cannot switch to its user", "run the agent as root, or leave `user` out"),
    "terminal": ("no terminal is available", "run the command without a terminal, or check the node's system log"),
    "directory": ("its working directory cannot be entered", "check that the directory still exists"),
}


class ExecTarget(NamedTuple):
    """Where a command runs: the process whose namespaces it joins, these namespaces as clone flags, and the replica's cgroup,
    if there is one.
    """

    pid: int
    namespaces: int
    group_id: GroupId | None


def exec_target(running: ProcessHandle, spec: ProcessSpec, group_id: GroupId | None, members: Sequence[int]) -> ExecTarget:
    """Determine the environment to join. `members`: pids of all processes of the run. Raises `NotStarted`."""
    if spec.sandbox == "none":
        return ExecTarget(running.pid, 0, group_id)
    # Pid 1 of the sandbox is bubblewrap itself: it has exactly the namespaces that bubblewrap created, independent of what the
    # replica has done since. Pid 2 exists only once bubblewrap has created all of them.
    numbers = {procfs.namespace_pid(pid): pid for pid in members}
    if 1 not in numbers or max(numbers) < 2:
        raise NotStarted("the replica's sandbox is not ready", "retry in a moment")
    first = numbers[1]
    joined = sum(flag for name, flag in _NAMESPACES.items() if _namespace(first, name) != _namespace(os.getpid(), name))
    return ExecTarget(first, joined, group_id)


def _namespace(pid: int, name: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/{name}").readlink())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotStarted(
            f"the replica's sandbox cannot be inspected ({reason})", "run the agent as root, or as the user of the replica"
        ) from error


async def start_exec(
    spec: ProcessSpec, target: ExecTarget, cgroups: Cgroups, name: str, is_running: Callable[[], bool], window: PtySize | None
) -> ProcessExecSession:
    """Start the command. `name`: of the cgroup below that of the process.

    `is_running` returns whether the process still runs. It is called after a pidfd pins the process, when its pid cannot be
    reused any more.
    """
    with ExitStack() as stack:
        target_pidfd = _open_pidfd(target.pid, stack)
        if not is_running():
            raise NotStarted("the process to run next to has ended", "check that the replica runs, then retry")
        group = _create_group_below(cgroups, target.group_id, name, stack)
        with ExitStack() as passed:
            join_fds = _open_join_files(cgroups, group, passed)
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            passed.callback(theirs.close)
            ends, streams = _pipes(stack, passed) if window is None else ((-1, -1, -1), (subprocess.DEVNULL,) * 3)
            process = _start_program(theirs.fileno(), streams, (target_pidfd, theirs.fileno(), *join_fds))
        stack.callback(_reap, process)
        session = ProcessExecSession(process.pid, target_pidfd, cgroups, group)
        stack.callback(os.close, session.pidfd)
        stack.callback(session.kill)
        ours.setblocking(False)
        request = _encode_spec(spec, target, target_pidfd, join_fds, window)
        terminal = await _await_start(ours, request, spec, stack)
        session.attach(terminal if window is not None else -1, ends)
        stack.pop_all()
        ours.close()
        process.returncode = 0  # from here on it is watched by pidfd; Popen must not wait for it
    return session


class ProcessExecSession:
    """Implements `ExecSession`. The command is killed when the process that it runs next to ends."""

    def __init__(self, pid: int, target_pidfd: int, cgroups: Cgroups, group: str) -> None:
        self.pid = pid
        self._target_pidfd, self._cgroups, self._group = target_pidfd, cgroups, group
        self._loop = asyncio.get_running_loop()
        self._terminal = -1
        self._input = -1
        self._outputs: dict[int, str] = {}
        self._writable_future: asyncio.Future[None] | None = None
        self._exit_status: asyncio.Future[ExitStatus] = self._loop.create_future()
        self.pidfd = os.pidfd_open(pid)

    def attach(self, terminal: int, pipes: Sequence[int]) -> None:
        """Take ownership of the descriptors."""
        if terminal >= 0:
            self._terminal, self._input, self._outputs = terminal, terminal, {terminal: "stdout"}
        else:
            self._input, self._outputs = pipes[0], {pipes[1]: "stdout", pipes[2]: "stderr"}
        for file in (self._input, *self._outputs):
            os.set_blocking(file, False)
        self._loop.add_reader(self._target_pidfd, self._on_target_exit)
        self._loop.add_reader(self.pidfd, self._on_exit)

    async def read(self) -> CommandOutput | None:
        while self._outputs:
            for file, name in tuple(self._outputs.items()):
                try:
                    data = os.read(file, READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""  # a terminal reports EIO once its other end is closed
                if data:
                    self._outputs[file] = self._outputs.pop(file)  # read the other stream first next time
                    return CommandOutput("stdout" if name == "stdout" else "stderr", data)
                self._close_output(file)
            if self._outputs:
                await self._readable(self._outputs)
        return None

    async def write(self, data: bytes, /) -> None:
        remaining = memoryview(data)
        while remaining and self._input >= 0:
            try:
                remaining = remaining[os.write(self._input, remaining) :]
            except BlockingIOError:
                await self._writable(self._input)
            except OSError as error:
                if error.errno not in _CLOSED_ERRORS:
                    raise
                self._close_input()

    def close_input(self) -> None:
        if self._terminal < 0:
            self._close_input()
        elif self._input >= 0:
            with suppress(OSError):
                os.write(self._input, _EOF_KEY)

    def resize(self, window: PtySize, /) -> None:
        if self._terminal >= 0:
            with suppress(OSError):
                fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *window, 0, 0))

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._exit_status)

    def kill(self) -> None:
        """Kill all processes of the command that exist now."""
        if self._group:
            self._cgroups.kill(self._group)
        members = procfs.process_tree(self.pid) if not self._group and not self._exit_status.done() else ()
        for process in members:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if not self._exit_status.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def kill_all(self) -> None:
        self.kill()
        await self.wait()
        while self._group and self._cgroups.members(self._group):
            self._cgroups.kill(self._group)
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        try:
            await self.kill_all()
        finally:
            self._release()

    def _release(self) -> None:
        self._close_input()
        for file in tuple(self._outputs):
            self._close_output(file)
        for handle in (self.pidfd, self._target_pidfd):
            if handle >= 0:
                self._loop.remove_reader(handle)
                os.close(handle)
        self.pidfd = self._target_pidfd = -1
        if self._group:
            self._cgroups.remove(self._group)

    def _on_exit(self) -> None:
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
        if status is not None:
            self._loop.remove_reader(self.pidfd)
            exited = status.si_code == os.CLD_EXITED
            self._exit_status.set_result(ExitStatus(code=status.si_status) if exited else ExitStatus(signal=status.si_status))

    def _on_target_exit(self) -> None:
        self._loop.remove_reader(self._target_pidfd)
        self.kill()

    def _close_input(self) -> None:
        file, self._input = self._input, -1
        if file >= 0:
            self._loop.remove_writer(file)
            if self._writable_future is not None:
                _wake(self._writable_future)  # wake a writer that waits for space: there will be none
            if file != self._terminal:
                os.close(file)

    def _close_output(self, file: int) -> None:
        del self._outputs[file]
        self._loop.remove_reader(file)
        if file == self._terminal:
            self._close_input()
            self._terminal = -1
        os.close(file)

    async def _readable(self, files: Sequence[int] | dict[int, str]) -> None:
        came: asyncio.Future[None] = self._loop.create_future()
        watched = tuple(files)
        for file in watched:
            self._loop.add_reader(file, _wake, came)
        try:
            await came
        finally:
            for file in watched:
                self._loop.remove_reader(file)

    async def _writable(self, file: int) -> None:
        came = self._writable_future = self._loop.create_future()
        self._loop.add_writer(file, _wake, came)
        try:
            await came
        finally:
            self._writable_future = None
            if self._input == file:  # else the descriptor may have been reused
                self._loop.remove_writer(file)


def _wake(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)


# -- start ---------------------------------------------------------------------------------------------------------------------


def _open_pidfd(pid: int, stack: ExitStack) -> int:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise NotStarted("the process to run next to has ended", "check that the replica runs, then retry") from error
    stack.callback(os.close, pidfd)
    return pidfd


def _create_group_below(cgroups: Cgroups, group_id: GroupId | None, name: str, stack: ExitStack) -> str:
    if group_id is None:
        return ""
    group = f"{group_id.name}/{name}"
    try:
        for directory in cgroups.directories(group):
            Path(directory).mkdir(mode=0o755)
    except OSError as error:
        cgroups.remove(group)
        reason = (error.strerror or str(error)).lower()
        raise NotStarted(f"the replica's cgroup cannot be joined ({reason})", "check that the replica runs") from error
    stack.callback(cgroups.remove, group)
    return group


def _open_join_files(cgroups: Cgroups, group: str, passed: ExitStack) -> tuple[int, ...]:
    try:
        return passed.enter_context(cgroups.join_fds(group)) if group else ()
    except OSError as error:
        raise NotStarted("the process to run next to has ended", "check that the replica runs, then retry") from error


def _pipes(stack: ExitStack, passed: ExitStack) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return our ends and the command's ends."""
    ours, theirs = list[int](), list[int]()
    for stream in range(3):
        read, write = os.pipe2(os.O_CLOEXEC)
        near, far = (write, read) if stream == 0 else (read, write)
        stack.callback(os.close, near)
        passed.callback(os.close, far)
        ours.append(near)
        theirs.append(far)
    return (ours[0], ours[1], ours[2]), (theirs[0], theirs[1], theirs[2])


def _start_program(control: int, streams: Sequence[int], passed: Sequence[int]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - our own program; the user's command is not in its arguments
            (sys.executable, "-I", "-S", str(PROGRAM), str(control)),
            env={},
            cwd="/",
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=tuple(passed),
            start_new_session=True,
        )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotStarted(f"cannot start a process ({reason})", "check the node's system log") from error


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _encode_spec(
    spec: ProcessSpec, target: ExecTarget, target_pidfd: int, join_fds: Sequence[int], window: PtySize | None
) -> bytes:
    identity = spawn.resolve_user(spec.user)
    message: dict[str, Any] = {
        "argv": spec.argv,
        "env": dict(spec.env),
        "directory": str(spec.directory) if spec.directory is not None else "",
        "user": None if identity is None else identity,
        "beside": target_pidfd,
        "namespaces": target.namespaces,
        "confined": spec.sandbox != "none",
        "entrances": list(join_fds),
        "files": spawn.OPEN_FILES_LIMIT,
        "window": window,
    }
    return json.dumps(message).encode()


async def _await_start(control: socket.socket, request: bytes, spec: ProcessSpec, stack: ExitStack) -> int:
    """Send the spec and wait until the command is executed. Returns the terminal, or -1. Raises `NotStarted`."""
    loop = asyncio.get_running_loop()
    terminal, result = -1, b""
    try:
        async with asyncio.timeout(START_S_MAX):
            await loop.sock_sendall(control, request)
            control.shutdown(socket.SHUT_WR)
            while True:
                came: asyncio.Future[None] = loop.create_future()
                loop.add_reader(control, _wake, came)
                try:
                    await came
                finally:
                    loop.remove_reader(control)
                chunk, files, _, _ = socket.recv_fds(control, _RESULT_BYTES_MAX, 1)
                for file in files:
                    terminal = file
                    os.set_inheritable(file, False)
                    stack.callback(os.close, file)
                if not chunk or len(result) > _RESULT_BYTES_MAX:
                    break
                result += chunk
    except TimeoutError:
        raise NotStarted("the command did not start in time", "check whether the node is overloaded, then retry") from None
    except OSError as error:
        raise NotStarted("the command's starter ended unexpectedly", "check the node's system log") from error
    for line in result.splitlines():
        _check_result(json.loads(line), spec)
    return terminal


def _check_result(result: dict[str, Any], spec: ProcessSpec) -> None:
    if "step" in result:
        step, code = str(result["step"]), int(result["errno"])
        reason = str(result.get("bug") or os.strerror(code).lower())
        if step == "run":
            raise NotStarted(
                f"{spec.argv[0]} cannot be run ({reason})", spawn.EXEC_FIXES.get(code, "check what the program needs")
            )
        cause, cure = _STEP_ERRORS.get(step, ("it failed before its first instruction", "check the node's system log"))
        raise NotStarted(f"{spec.argv[0]} cannot be run: {cause} ({reason})", cure)
