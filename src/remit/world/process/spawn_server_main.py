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
    heard = socket(fileno=0)
    nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the child would touch, and so copy, all memory
    while True:
        _, told, _, _ = heard.recvmsg(1, CMSG_SPACE(4 * _FDS_MAX), MSG_CMSG_CLOEXEC)
        if not told:
            return 0
        fds = [fd for _, _, data in told for fd in struct.unpack(f"{len(data) // 4}i", data)]
        try:
            _start(fds, nothing)
        finally:
            for fd in fds:
                os.close(fd)


def _ignore_signal(_number: int, _frame: object) -> None:
    return


def _start(fds: list[int], nothing: int) -> None:
    words, tell, *rest = fds
    asked = marshal.loads(os.pread(words, os.fstat(words).st_size, 0))  # noqa: S302 - from our own parent, through a descriptor
    into = rest.pop(0) if asked["into"] else 0
    streams = [rest.pop(0) if has else nothing for has in asked["streams"]]
    step = "files"
    try:
        if resource.getrlimit(resource.RLIMIT_NOFILE) != asked["files"]:
            resource.setrlimit(resource.RLIMIT_NOFILE, asked["files"])
        programs = _candidates(asked["argv"][0], asked["env"])
        step = "late"
        if asked["until_ns"] and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= asked["until_ns"]:
            raise TimeoutError(0, "late")
        step = "clone"
        pid = _clone(into)
    except OSError as error:
        _report(tell, f"{step} {error.errno}\n")
        return
    if pid:
        _report(tell, _ANSWER.format(pid))
        return
    _execute(asked, programs, (nothing, *streams), rest, tell)


def _candidates(word: bytes, env: dict[bytes, bytes]) -> list[bytes]:
    """Return the files to try for a program. If none exists, the last one, for its error."""
    if b"/" in word:
        return [word]
    places = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    found = [os.path.join(place, word) for place in places]  # noqa: PTH118 - this process must stay small
    return [one for one in found if not _is_absent(one)] or found[-1:]


def _is_absent(path: bytes) -> bool:
    if not path.startswith(b"/"):  # relative to the working directory of the new process
        return False
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as error:
        return error.errno in _ABSENT
    return False


def _clone(into: int) -> int:
    """Fork: returns 0 in the child, whose parent is our parent. With `into` the child starts in that cgroup."""
    flags = _CLONE_PARENT | (_CLONE_INTO_CGROUP if into else 0)
    words = ctypes.create_string_buffer(struct.pack("11Q", flags, *(0,) * 9, into), 88)
    pid = _LIBC.syscall(_CLONE3, words, len(words))
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    return int(pid)


def _execute(
    asked: dict[str, Any], programs: list[bytes], streams: tuple[int, ...], entrances: list[int], tell: int
) -> NoReturn:
    """Run in the child: apply the settings, then execute the program."""
    step, code = "join", 0
    try:
        for entrance in entrances:
            os.write(entrance, b"0")
        step = "user"
        if asked["identity"] is not None:
            uid, gid, groups = asked["identity"]
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        step = "parent"
        if asked["parent"]:  # after the user is switched, which clears this setting
            if _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
            if os.getppid() != asked["parent"]:  # the parent ended before prctl, so no signal will come
                os._exit(128 + signal.SIGKILL)
        os.setsid()
        step = "cwd"
        if asked["cwd"] is not None:
            os.chdir(asked["cwd"])
        step = "exec"
        for at, stream in enumerate(streams):
            os.dup2(stream, at)
        for program in programs:
            try:
                os.execve(program, asked["argv"], asked["env"])  # noqa: S606 - never through a shell
            except OSError as error:
                code = code if code and code not in _ABSENT else error.errno or 0
    except OSError as error:
        code = error.errno or 0
    except BaseException:  # noqa: BLE001 - a forked child must never return into the server loop
        step = "bug"
    _report(tell, f"{step} {code}\n")
    os._exit(127)


def _report(tell: int, words: str) -> None:
    with suppress(OSError):  # the client has stopped waiting
        os.write(tell, words.encode())


if __name__ == "__main__":
    sys.exit(main())
