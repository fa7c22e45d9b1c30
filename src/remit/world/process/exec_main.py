"""Joins a process's namespaces and executes the command (standalone).

    python -I -S exec_main.py N

N is the descriptor of a socket, over which exec_session.py sends the spec and receives the result.

This program is started with an empty environment, so it never loads anything that the replica's environment names
(LD_PRELOAD and the like); only the command itself gets that environment. The order of the steps matters. The cgroup comes
first, so that everything else counts against the right limits. The user is switched before joining a user namespace, which
belongs to that user, but after joining any other namespace, which only root may do. Capabilities are dropped last. Only the
standard library is imported.
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

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
SPEC_BYTES_MAX: Final = 64 << 20
_PDEATHSIG, _NO_NEW_PRIVS, _CAPBSET_READ, _CAPBSET_DROP = 1, 38, 23, 24
_CAP_VERSION_3: Final = 0x20080522
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_step = "read"
"""The current step; reported if it fails."""


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        spec = json.loads(_read_spec(control))
        for file in (control.fileno(), spec["beside"]):
            os.set_inheritable(file, False)  # the command inherits only its three standard streams
        for join_fd in spec["entrances"]:
            _set_step("join")
            os.write(join_fd, b"0")
            os.close(join_fd)
        _set_step("files")
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(spec["files"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _join_namespaces(spec)
        if spec["namespaces"] & CLONE_NEWPID:
            _set_step("fork")
            _die_with_parent()
            # Signals sent to the whole process group are for the command; this process must survive them to report how it
            # ended.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            child = os.fork()
            if child:
                return _relay_exit(child, control)
            os.setsid()
        _execute(spec, control)
    except OSError as error:
        _report(control, {"step": _step, "errno": error.errno or errno.EIO})
    except Exception as error:  # noqa: BLE001 - our own bug: reported, since stderr of this process is the command's
        _report(control, {"step": _step, "errno": errno.EIO, "bug": repr(error)})
    return 126


def _set_step(step: str) -> None:
    global _step
    _step = step


def _read_spec(control: socket.socket) -> bytes:
    chunks, size = [], 0
    while chunk := control.recv(1 << 16):
        chunks.append(chunk)
        size += len(chunk)
        if size > SPEC_BYTES_MAX:
            raise OSError(errno.E2BIG, "the spec is too long")
    return b"".join(chunks)


def _report(control: socket.socket, what: dict[str, Any], *files: int) -> None:
    socket.send_fds(control, [json.dumps(what).encode() + b"\n"], list(files))


def _join_namespaces(spec: dict[str, Any]) -> None:
    """Switch to the user, and join the namespaces of the running process."""
    user_first = spec["namespaces"] & CLONE_NEWUSER
    if user_first:
        _switch_user(spec["user"])
    if spec["namespaces"]:
        _set_step("namespaces")
        if _LIBC.setns(spec["beside"], spec["namespaces"]):
            raise OSError(ctypes.get_errno(), "setns")
    if not user_first:
        _switch_user(spec["user"])


def _switch_user(user: list[Any] | None) -> None:
    _set_step("user")
    if user is not None:
        uid, gid, groups = user
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def _execute(spec: dict[str, Any], control: socket.socket) -> None:
    if spec["window"] is not None:
        _set_step("terminal")
        _open_terminal(spec["window"], control)
    if spec["directory"]:
        _set_step("directory")
        os.chdir(spec["directory"])
    _set_step("rights")
    if spec["confined"]:
        _drop_capabilities()
    for number in signal.Signals:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)  # Python ignores some signals, and the command must not inherit that
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _die_with_parent()
    _set_step("run")
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606 - never through a shell


def _open_terminal(window: list[int], control: socket.socket) -> None:
    """Open a terminal in the current mount namespace, so that the command finds it by name, owned by its user."""
    near, far = os.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", *window, 0, 0))
    fcntl.ioctl(far, termios.TIOCSCTTY, 0)
    for stream in (0, 1, 2):
        os.dup2(far, stream)
    if far > 2:
        os.close(far)
    _report(control, {"terminal": True}, near)
    os.close(near)


def _drop_capabilities() -> None:
    """Drop all capabilities and disable privilege escalation, as bubblewrap does for the replica."""
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


def _die_with_parent() -> None:
    """Die with the parent process. Set after the user is switched, because switching clears this setting."""
    if _LIBC.prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _relay_exit(child: int, control: socket.socket) -> int:
    """Wait for the child and end in the same way.

    Only children of a process enter a new pid namespace, so the command is a child and this process reports its exit status.
    """
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
