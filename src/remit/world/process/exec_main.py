"""Joins a process's namespaces and executes the command (standalone).

In a process that has nothing of ours. Nothing is decided.

    python -I -S enter.py N      with a socket as descriptor N, over which its starter says what to do and hears what came of it

It is started with an empty environment and never loads what work named for itself (LD_PRELOAD and the like): that environment
is given to the command alone, with its first instruction. The order of steps matters: first the cgroup, so that all else counts
against the right limits; a user of its own before a user namespace, which belongs to that user, and after any other namespace,
which only root may join; all rights are given up last. Nothing is imported but what every Python has.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import termios
from typing import Any, Final

NEWUSER: Final = 0x10000000
NEWPID: Final = 0x20000000
SPEC_BYTES_MAX: Final = 64 << 20
_PDEATHSIG, _NO_NEW_PRIVS, _CAPBSET_READ, _CAPBSET_DROP = 1, 38, 23, 24
_CAP_VERSION_3: Final = 0x20080522
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_step = "read"
"""How far it has come; told if it comes no further."""


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        spec = json.loads(_said(control))
        for file in (control.fileno(), spec["beside"]):
            os.set_inheritable(file, False)  # the command has its three streams, and nothing else
        for entrance in spec["entrances"]:
            _at("join")
            os.write(entrance, b"0")
            os.close(entrance)
        _at("files")
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(spec["files"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _enter(spec)
        if spec["namespaces"] & NEWPID:
            _at("fork")
            _end_with_parent()
            # What is sent to all of the run is for the command to heed or not: the one who tells of its end must outlive it.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            child = os.fork()
            if child:
                return _relayed(child, control)
            os.setsid()
        _become(spec, control)
    except OSError as error:
        _tell(control, {"step": _step, "errno": error.errno or errno.EIO})
    except Exception as error:  # noqa: BLE001 - our own bug: told, since nobody sees what this process says
        _tell(control, {"step": _step, "errno": errno.EIO, "bug": repr(error)})
    return 126


def _at(step: str) -> None:
    global _step
    _step = step


def _said(control: socket.socket) -> bytes:
    pieces, size = [], 0
    while piece := control.recv(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > SPEC_BYTES_MAX:
            raise OSError(errno.E2BIG, "too much was said")
    return b"".join(pieces)


def _tell(control: socket.socket, what: dict[str, Any], *files: int) -> None:
    socket.send_fds(control, [json.dumps(what).encode() + b"\n"], list(files))


def _enter(spec: dict[str, Any]) -> None:
    """Take on the user, and join the namespaces of the one that runs."""
    user_first = spec["namespaces"] & NEWUSER
    if user_first:
        _take_on(spec["user"])
    if spec["namespaces"]:
        _at("namespaces")
        if _LIBC.setns(spec["beside"], spec["namespaces"]):
            raise OSError(ctypes.get_errno(), "setns")
    if not user_first:
        _take_on(spec["user"])


def _take_on(user: list[Any] | None) -> None:
    _at("user")
    if user is not None:
        uid, gid, groups = user
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def _become(spec: dict[str, Any], control: socket.socket) -> None:
    if spec["window"] is not None:
        _at("terminal")
        _take_terminal(spec["window"], control)
    if spec["directory"]:
        _at("directory")
        os.chdir(spec["directory"])
    _at("rights")
    if spec["confined"]:
        _give_up_rights()
    for number in signal.Signals:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)  # Python ignores some, and a command must not inherit that
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _end_with_parent()
    _at("run")
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606 - never through a shell: that is the point


def _take_terminal(window: list[int], control: socket.socket) -> None:
    """One of the namespace that it is in now, so that the command finds it by its name; and it is owned by its user."""
    near, far = os.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", *window, 0, 0))
    fcntl.ioctl(far, termios.TIOCSCTTY, 0)
    for stream in (0, 1, 2):
        os.dup2(far, stream)
    if far > 2:
        os.close(far)
    _tell(control, {"terminal": True}, near)
    os.close(near)


def _give_up_rights() -> None:
    """As a sandbox has none to give: not now, and not by any program that is run from here."""
    number = 0
    while _LIBC.prctl(_CAPBSET_READ, number, 0, 0, 0) >= 0:
        if _LIBC.prctl(_CAPBSET_DROP, number, 0, 0, 0) and ctypes.get_errno() != errno.EPERM:
            raise OSError(ctypes.get_errno(), "prctl")
        number += 1
    header = struct.pack("II", _CAP_VERSION_3, 0)
    if _LIBC.capset(header, struct.pack("IIIIII", *(0,) * 6)):
        raise OSError(ctypes.get_errno(), "capset")
    if _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _end_with_parent() -> None:
    """Whoever asked for it has gone with our starter. After the user: who changes that loses this."""
    if _LIBC.prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _relayed(child: int, control: socket.socket) -> int:
    """A number space is entered by children alone: this one only says how its child ended, by ending alike."""
    control.close()
    for stream in (0, 1, 2):
        os.close(stream)
    ended = os.waitid(os.P_PID, child, os.WEXITED)
    if ended is None or ended.si_code == os.CLD_EXITED:
        return 0 if ended is None else ended.si_status
    signal.signal(ended.si_status, signal.SIG_DFL) if ended.si_status not in (9, 19) else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (ended.si_status,))
    os.kill(os.getpid(), ended.si_status)
    return 128 + ended.si_status


if __name__ == "__main__":
    code = main()
    os._exit(code)
