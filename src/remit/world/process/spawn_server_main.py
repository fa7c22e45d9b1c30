"""Spawn server: starts processes directly inside their cgroup (standalone).

Runs by itself beside whoever starts work: makes each process right inside its groups. What may run: see starting.py.

A process that is put into a cgroup after its birth makes the machine wait until every processor has looked up: ten or twenty
milliseconds, where nothing was moved just before. One that is born inside, or moves itself as a thread, does not. The former
needs `clone3`, which Python does not offer and which only a process with a single thread may use: this one. It is small too,
and so quickly copied.

It reads, from a socket on its stdin, a message for each start: descriptors alone. The first is a file with the words
(`marshal`, of the same Python), the second a pipe: there the number of the new process is written, and, should that not get as
far as its program, the step and the error. The pipe ends when the program has begun. The new process is a child of this one's
parent. When the socket ends, this ends. Nothing is imported but what every Python has.

Whatever a copy of this process touches the machine must copy first, page by page, and that takes longer than the steps
themselves. So all that can be made ready is, before there is a copy; and what this process has set once is set in the copy too.
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
"""Looked up once: a copy that did so would touch many pages."""
_CLONE3: Final = 435
"""Of every architecture."""
_CLONE_PARENT: Final = 0x8000
_CLONE_INTO_CGROUP: Final = 0x2_0000_0000
_PR_SET_PDEATHSIG: Final = 1
_FDS_MAX: Final = 32
_ANSWER: Final = "pid {}\n"
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
        # It ends when its starter has, and not before. To hear and do nothing is not to ignore: that a program would inherit.
        signal.signal(number, _heed_not)
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


def _heed_not(_number: int, _frame: object) -> None:
    return


def _begin(fds: list[int], nothing: int) -> None:
    words, tell, *rest = fds
    asked = marshal.loads(os.pread(words, os.fstat(words).st_size, 0))  # noqa: S302 - from our own parent, by a descriptor
    into = rest.pop(0) if asked["into"] else 0
    streams = [rest.pop(0) if has else nothing for has in asked["streams"]]
    step = "files"
    try:
        if resource.getrlimit(resource.RLIMIT_NOFILE) != asked["files"]:
            resource.setrlimit(resource.RLIMIT_NOFILE, asked["files"])
        programs = _programs(asked["argv"][0], asked["env"])
        step = "late"
        if asked["until_ns"] and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= asked["until_ns"]:
            raise TimeoutError(0, "late")
        step = "clone"
        pid = _born(into)
    except OSError as error:
        _say(tell, f"{step} {error.errno}\n")
        return
    if pid:
        _say(tell, _ANSWER.format(pid))
        return
    _become(asked, programs, (nothing, *streams), rest, tell)


def _programs(word: bytes, env: dict[bytes, bytes]) -> list[bytes]:
    """Which files are tried for a program, one after another. If none is there, the last: for its error."""
    if b"/" in word:
        return [word]
    places = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    found = [os.path.join(place, word) for place in places]  # noqa: PTH118 - this process is to be small
    return [one for one in found if not _is_absent(one)] or found[-1:]


def _is_absent(path: bytes) -> bool:
    if not path.startswith(b"/"):  # it depends on where the program begins
        return False
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as error:
        return error.errno in _ABSENT
    return False


def _born(into: int) -> int:
    """As `fork`: 0 in the new process. Its parent is ours; with `into` it begins in that group."""
    flags = _CLONE_PARENT | (_CLONE_INTO_CGROUP if into else 0)
    words = ctypes.create_string_buffer(struct.pack("11Q", flags, *(0,) * 9, into), 88)
    pid = _LIBC.syscall(_CLONE3, words, len(words))
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    return int(pid)


def _become(
    asked: dict[str, Any], programs: list[bytes], streams: tuple[int, ...], entrances: list[int], tell: int
) -> NoReturn:
    """What a new process does first, and then its program."""
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
        if asked["parent"]:  # after the user: whoever changes that loses this
            if _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
            if os.getppid() != asked["parent"]:  # it has ended just before: nobody will send the signal
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
    except BaseException:  # noqa: BLE001 - a copy of this process must not go on as another one
        step = "bug"
    _say(tell, f"{step} {code}\n")
    os._exit(127)


def _say(tell: int, words: str) -> None:
    with suppress(OSError):  # nobody waits for it any more
        os.write(tell, words.encode())


if __name__ == "__main__":
    sys.exit(main())
