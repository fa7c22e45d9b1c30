"""Runs by itself beside whoever starts work: makes each process right inside its groups. What may run: see starting.py.

A process that is put into a cgroup after its birth makes the machine wait until every processor has looked up: ten or twenty
milliseconds, where nothing was moved just before. One that is born inside, or moves itself as a thread, does not. The former
needs `clone3`, which Python does not offer and which only a process with a single thread may use: this one. It is small too,
and so quickly copied.

It reads, from a socket on its stdin, a message for each start: descriptors alone. The first is a file with the words
(`marshal`, of the same Python), the second a pipe: there the number of the new process is written, and, should that not get as
far as its program, the step and the error. The pipe ends when the program has begun. The new process is a child of this one's
parent. When the socket ends, this ends. Nothing is imported but what every Python has.
"""

from __future__ import annotations

import ctypes
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
_CLONE3: Final = 435
"""Of every architecture."""
_CLONE_PARENT: Final = 0x8000
_CLONE_INTO_CGROUP: Final = 0x2_0000_0000
_PR_SET_PDEATHSIG: Final = 1
_FDS_MAX: Final = 32
_ANSWER: Final = "pid {}\n"


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends when its starter has, and not before
    heard = socket(fileno=0)
    nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in a copy would touch, and so copy, all that there is
    while True:
        _, told, _, _ = heard.recvmsg(1, CMSG_SPACE(4 * _FDS_MAX), MSG_CMSG_CLOEXEC)
        if not told:
            return 0
        fds = [fd for _, _, data in told for fd in struct.unpack(f"{len(data) // 4}i", data)]
        try:
            _begin(fds, nothing)
        finally:
            for fd in fds:
                os.close(fd)


def _begin(fds: list[int], nothing: int) -> None:
    words, tell, *rest = fds
    asked = marshal.loads(os.pread(words, os.fstat(words).st_size, 0))  # noqa: S302 - from our own parent, by a descriptor
    into = rest.pop(0) if asked["into"] else 0
    try:
        if asked["until_ns"] and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= asked["until_ns"]:
            raise TimeoutError(0, "late")
        pid = _born(into)
    except OSError as error:
        _say(tell, f"{'late' if isinstance(error, TimeoutError) else 'clone'} {error.errno}\n")
        return
    if pid:
        _say(tell, _ANSWER.format(pid))
        return
    _become(asked, rest, tell, nothing)


def _born(into: int) -> int:
    """As `fork`: 0 in the new process. Its parent is ours; with `into` it begins in that group."""
    flags = _CLONE_PARENT | (_CLONE_INTO_CGROUP if into else 0)
    words = ctypes.create_string_buffer(struct.pack("11Q", flags, *(0,) * 9, into), 88)
    pid = _LIBC.syscall(_CLONE3, words, len(words))
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    return int(pid)


def _become(asked: dict[str, Any], rest: list[int], tell: int, nothing: int) -> NoReturn:
    """What a new process does first, and then its program."""
    step, code = "join", 0
    try:
        streams = [rest.pop(0) if has else nothing for has in asked["streams"]]
        for entrance in rest:
            os.write(entrance, b"0")
        step = "files"
        resource.setrlimit(resource.RLIMIT_NOFILE, asked["files"])
        step = "user"
        if asked["identity"] is not None:
            uid, gid, groups = asked["identity"]
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        step = "parent"
        if asked["parent"]:  # after the user: whoever changes that loses this
            if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
            if os.getppid() != asked["parent"]:  # it has ended just before: nobody will send the signal
                os._exit(128 + signal.SIGKILL)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        step = "cwd"
        if asked["cwd"] is not None:
            os.chdir(asked["cwd"])
        step = "exec"
        for at, stream in enumerate((nothing, *streams)):
            os.dup2(stream, at)
        os.execvpe(asked["argv"][0], asked["argv"], asked["env"])  # noqa: S606 - never through a shell
    except OSError as error:
        code = error.errno or 0
    except BaseException:  # noqa: BLE001 - a copy of this process must not go on as another one
        step = "bug"
    _say(tell, f"{step} {code}\n")
    os._exit(127)


def _say(tell: int, words: str) -> None:
    with suppress(OSError):  # nobody waits for it any more
        os.write(tell, words.encode())


if __name__ == "__main__":
    sys.exit(main())
