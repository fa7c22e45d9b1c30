"""Spawn server: starts processes directly inside their cgroup (standalone).

Moving a process into a cgroup after its creation makes the kernel wait for an RCU grace period: ten to twenty milliseconds
if nothing was moved just before. Creating it inside the cgroup (v2), or moving a single thread (v1), does not. Creating it
inside needs `clone3`, which Python does not offer and which is safe only in a process with a single thread: this one. It is
also small, so it is cheap to fork.

The server reads one message per start from a socket on stdin; a message consists of descriptors only. The first is a file
with the request (`marshal`, same Python). The second is a pipe: the server writes the pid of the new process to it, and the
step and error code if the process fails before its program is executed. The pipe closes when the program is executed. The
new process is a child of this server's parent. When the socket closes, the server ends. Only the standard library is
imported.

After the fork, every memory page that the child touches is copied, which takes longer than the steps themselves. So
everything that can be prepared is prepared before the fork, and settings made in this process are inherited.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import marshal
import os
import resource
import signal
import struct
import sys
import time
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, socket
from contextlib import suppress
from typing import Any, Final, NoReturn

_LIBC: Final = ctypes.PyDLL(None, use_errno=True)
_PRCTL: Final = _LIBC["prctl"]
"""Looked up once: a lookup in the child would touch many pages."""
_CLONE3: Final = 435
"""The same on every architecture."""
_CLONE_PARENT: Final = 0x8000
_CLONE_INTO_CGROUP: Final = 0x2_0000_0000
_PR_SET_PDEATHSIG: Final = 1
_FDS_MAX: Final = 32
_ANSWER: Final = "pid {}\n"
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
        # The server ends when its starter has ended, and not before. A handler that does nothing is not inherited by the
        # started program; SIG_IGN would be.
        signal.signal(number, _ignore_signal)
    requests = socket(fileno=0)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the child would touch, and so copy, all memory
    while True:
        _, control, _, _ = requests.recvmsg(1, CMSG_SPACE(4 * _FDS_MAX), MSG_CMSG_CLOEXEC)
        if not control:
            return 0
        fds = [fd for _, _, data in control for fd in struct.unpack(f"{len(data) // 4}i", data)]
        try:
            _start(fds, null)
        finally:
            for fd in fds:
                os.close(fd)


def _ignore_signal(_number: int, _frame: object) -> None:
    return


def _start(fds: list[int], null: int) -> None:
    request_fd, report_fd, *other_fds = fds
    request = marshal.loads(os.pread(request_fd, os.fstat(request_fd).st_size, 0))  # noqa: S302 - from our parent
    cgroup_fd = other_fds.pop(0) if request["into"] else 0
    streams = [other_fds.pop(0) if has else null for has in request["streams"]]
    step = "files"
    try:
        if resource.getrlimit(resource.RLIMIT_NOFILE) != request["files"]:
            resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
        programs = _candidates(request["argv"][0], request["env"])
        step = "late"
        if request["until_ns"] and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= request["until_ns"]:
            raise TimeoutError(0, "late")
        step = "clone"
        pid = _clone(cgroup_fd)
    except OSError as error:
        _report(report_fd, f"{step} {error.errno}\n")
        return
    if pid:
        _report(report_fd, _ANSWER.format(pid))
        return
    _execute(request, programs, (null, *streams), other_fds, report_fd)


def _candidates(program: bytes, env: dict[bytes, bytes]) -> list[bytes]:
    """Return the files to try for a program. If none exists, the last one, for its error."""
    if b"/" in program:
        return [program]
    directories = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    paths = [os.path.join(directory, program) for directory in directories]  # noqa: PTH118 - this process must stay small
    return [path for path in paths if not _is_absent(path)] or paths[-1:]


def _is_absent(path: bytes) -> bool:
    if not path.startswith(b"/"):  # relative to the working directory of the new process
        return False
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as error:
        return error.errno in _ABSENT
    return False


def _clone(cgroup_fd: int) -> int:
    """Fork: returns 0 in the child, whose parent is our parent. With `cgroup_fd` the child starts in that cgroup."""
    flags = _CLONE_PARENT | (_CLONE_INTO_CGROUP if cgroup_fd else 0)
    args = ctypes.create_string_buffer(struct.pack("11Q", flags, *(0,) * 9, cgroup_fd), 88)
    pid = _LIBC.syscall(_CLONE3, args, len(args))
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    return int(pid)


def _execute(
    request: dict[str, Any], programs: list[bytes], streams: tuple[int, ...], join_fds: list[int], report_fd: int
) -> NoReturn:
    """Run in the child: apply the settings, then execute the program."""
    step, code = "join", 0
    try:
        for join_fd in join_fds:
            os.write(join_fd, b"0")
        step = "user"
        if request["identity"] is not None:
            uid, gid, groups = request["identity"]
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        step = "parent"
        if request["parent"]:  # after the user is switched, which clears this setting
            if _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
            if os.getppid() != request["parent"]:  # the parent ended before prctl, so no signal will come
                os._exit(128 + signal.SIGKILL)
        os.setsid()
        step = "cwd"
        if request["cwd"] is not None:
            os.chdir(request["cwd"])
        step = "exec"
        for at, stream in enumerate(streams):
            os.dup2(stream, at)
        for program in programs:
            try:
                os.execve(program, request["argv"], request["env"])  # noqa: S606 - never through a shell
            except OSError as error:
                code = code if code and code not in _ABSENT else error.errno or 0
    except OSError as error:
        code = error.errno or 0
    except BaseException:  # noqa: BLE001 - a forked child must never return into the server loop
        step = "bug"
    _report(report_fd, f"{step} {code}\n")
    os._exit(127)


def _report(report_fd: int, text: str) -> None:
    with suppress(OSError):  # the client has stopped waiting
        os.write(report_fd, text.encode())


if __name__ == "__main__":
    sys.exit(main())
