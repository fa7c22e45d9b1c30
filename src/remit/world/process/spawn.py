"""Prepares and spawns a process: user, streams, cgroup, sandbox.

If any part of the spec cannot be provided, `NotStarted` is raised: a process never runs with more permissions or fewer
limits than specified. A spec that needs no step between fork and exec is started with vfork, which is faster.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import resource
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from remit.world.interfaces import NotStarted, ProcessSpec, StartTooLate
from remit.world.process.isolation import BUBBLEWRAP, bubblewrap_args, bubblewrap_env, host_directory

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_RESULT_BYTES_MAX: Final = 64
_UID_MAX: Final = 2**32 - 2
OPEN_FILES_LIMIT: Final = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Limit of open files at program start. Child processes get this limit, even if this process raises its own."""

EXEC_FIXES: Final = {
    errno.ENOENT: "install it, or give its path",
    errno.EACCES: "make it executable for this user",
    errno.EPERM: "make it executable for this user",
    errno.ENOTDIR: "give its path",
    errno.ENOEXEC: "use a program built for this machine, or begin the script with #!",
    errno.E2BIG: "use fewer or shorter arguments and environment variables",
    errno.EAGAIN: "raise this user's process limit, or run fewer processes",
    errno.ENOMEM: "free memory on this machine",
    errno.EMFILE: "raise the agent's limit of open files (ulimit -n)",
}
_STEP_ERRORS: Final = {
    "join": ("its cgroup cannot be joined", "run `remit doctor`"),
    "files": ("its limit of open files cannot be set", "check the node's system log"),
    "user": ("cannot switch to its user", "run the agent as root, or leave `user` out"),
    "parent": ("it cannot be tied to the lifetime of its starter", "run on Linux"),
}


def raise_open_files_limit() -> None:
    """Raise this process's limit of open files to the maximum: each watched process needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class GroupRemoved(Exception):
    """The cgroup was removed by a cleanup between its creation and its first member. Create it again."""


class ProcessIdentity(NamedTuple):
    """User and groups of a process."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class CloneUnsupported(Exception):
    """This machine cannot create a process inside a cgroup: the process has to join it."""


class PreparedProcess(NamedTuple):
    """A checked spec: the arguments to execute, the identity, and descriptors for stdout and stderr (negative: discard)."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    identity: ProcessIdentity | None
    streams: tuple[int, ...]


@contextmanager
def prepare(spec: ProcessSpec) -> Iterator[PreparedProcess]:
    """Check everything that can be checked before a process exists. The descriptors are closed on exit."""
    identity = resolve_user(spec.user)
    argv, env = _sandbox_command(spec, other=identity is not None) if spec.sandbox == "bwrap" else (spec.argv, spec.env)
    _give_directories(spec.writable, identity)
    with ExitStack() as files:
        yield PreparedProcess(
            argv, env, identity, tuple(_open_output(path, identity, files) for path in (spec.stdout, spec.stderr))
        )


def spawn(spec: ProcessSpec, *, join_fds: Sequence[int] = ()) -> int:
    """Start the process and return its pid. `join_fds`: descriptors of the cgroups that it joins first."""
    with prepare(spec) as (argv, env, identity, streams), ExitStack() as files:
        result_fd, report_fd = _pipe(spec)
        files.callback(os.close, result_fd)
        files.callback(os.close, report_fd)
        needs = bool(join_fds) or identity is not None or spec.with_parent
        needs = needs or resource.getrlimit(resource.RLIMIT_NOFILE) != OPEN_FILES_LIMIT
        preexec = _preexec(tuple(join_fds), identity, os.getpid() if spec.with_parent else 0, report_fd) if needs else None
        try:
            process = subprocess.Popen(  # noqa: S603 - never through a shell; argv was checked above
                argv,
                env=dict(env),
                cwd=host_directory(spec),
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                start_new_session=True,
                preexec_fn=preexec,
            )
        except OSError as error:
            raise _exec_error(spec, argv, error) from error
        except subprocess.SubprocessError as error:
            step, _, code = os.read(result_fd, _RESULT_BYTES_MAX).decode().partition(" ")
            raise start_error(spec, argv, step, int(code or 0)) from error
        except ValueError as error:
            raise NotStarted(f"{spec.argv[0]!r} cannot be run ({error})", "correct the command") from error
    # From here on it is watched by pid. Popen would warn that the process outlives it, which is intended.
    process.returncode = 0
    return process.pid


def _sandbox_command(spec: ProcessSpec, *, other: bool) -> tuple[tuple[str, ...], Mapping[str, str]]:
    program = shutil.which(BUBBLEWRAP)
    if program is None:
        raise NotStarted("the process needs a sandbox, and bubblewrap is not installed", "apt install bubblewrap")
    # Inside the sandbox a missing program would only show as an exit code. A program in another root or in a mount cannot be
    # checked here.
    if spec.root is None and not spec.mounts and not _program_exists(spec):
        raise NotStarted(f"{spec.argv[0]} cannot be run (no such file or directory)", EXEC_FIXES[errno.ENOENT])
    needed = (*spec.writable, *(mount.source for mount in spec.mounts), *((spec.root,) if spec.root is not None else ()))
    missing = [path for path in needed if not path.exists()]
    if missing:
        raise NotStarted(f"{missing[0]} is part of the sandbox and does not exist", "create it, or remove it from the spec")
    return bubblewrap_args(spec, program, other=other), bubblewrap_env(spec.env)


def _program_exists(spec: ProcessSpec) -> bool:
    program = spec.argv[0]
    if "/" in program and spec.directory is not None:
        program = str(spec.directory / program)
    return shutil.which(program, path=spec.env.get("PATH", os.defpath)) is not None


def resolve_user(user: str) -> ProcessIdentity | None:
    """Resolve a user name, or a number as `#1000`, which need not exist in the user database. None: keep the current user."""
    if not user:
        return None
    number = user[1:] if user.startswith("#") and user[1:].isdecimal() and user.isascii() else ""
    try:
        uid = int(number[:12]) if number else pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise NotStarted(f"user {user!r} does not exist on this machine", "create the user, or name another") from None
    if uid > _UID_MAX:
        raise NotStarted(f"user: {user} is out of range", f"use at most #{_UID_MAX}")
    if uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        own = pwd.getpwuid(os.geteuid()).pw_name if _has_name(os.geteuid()) else str(os.geteuid())
        cure = f"run the agent as root, or leave `user` out to run as {own}"
        raise NotStarted(f"{own} has no permission to run processes as {user!r}", cure)
    if number:
        return ProcessIdentity(uid, uid, (uid,))
    entry = pwd.getpwnam(user)
    return ProcessIdentity(entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(user, entry.pw_gid)))


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _give_directories(paths: Sequence[Path], identity: ProcessIdentity | None) -> None:
    """Give the directories to the user. Only this process can have created them, so none is a symbolic link of someone else."""
    if identity is None:
        return
    for path in paths:
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(directory, identity.uid, identity.gid)
            finally:
                os.close(directory)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise NotStarted(
                f"{path} cannot be given to its user ({reason})", "create it, or remove it from the spec"
            ) from error


def _pipe(spec: ProcessSpec) -> tuple[int, int]:
    try:
        return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _exec_error(spec, spec.argv, error) from error


def _open_output(path: Path | None, identity: ProcessIdentity | None, files: ExitStack) -> int:
    if path is None:
        return subprocess.DEVNULL
    try:
        # Do not follow a symbolic link or block on a named pipe that a replica may have put there.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(path, flags, 0o600)
        files.callback(os.close, file)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotStarted(f"{path} is not a regular file", "move it away, or use another path")
        os.set_blocking(file, True)
        if identity is not None:
            os.fchown(file, identity.uid, identity.gid)  # programs open /dev/stdout again by name
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotStarted(
            f"{path} cannot be opened for the output ({reason})", "create its directory, or free disk space"
        ) from error
    return file


def _preexec(join_fds: tuple[int, ...], identity: ProcessIdentity | None, parent: int, report_fd: int) -> Callable[[], None]:
    """Return the function that runs between fork and exec. The child has no other threads, so only system calls are safe."""

    def begin() -> None:
        step = "join"
        try:
            for join_fd in join_fds:
                os.write(join_fd, b"0")
            step = "files"
            resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES_LIMIT)
            step = "user"
            if identity is not None:
                os.setgroups(identity.groups)
                os.setresgid(identity.gid, identity.gid, identity.gid)
                os.setresuid(identity.uid, identity.uid, identity.uid)
            step = "parent"
            if parent:  # after the user is switched, which clears this setting
                if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
                    raise OSError(ctypes.get_errno(), "prctl")
                if os.getppid() != parent:  # the parent ended before prctl, so no signal will come
                    os._exit(128 + signal.SIGKILL)
        except OSError as error:
            os.write(report_fd, f"{step} {error.errno}".encode())
            raise

    return begin


def start_error(spec: ProcessSpec, argv: tuple[str, ...], step: str, code: int) -> Exception:
    """Translate the step and error code at which a start failed into an exception."""
    if step in ("join", "clone") and code in (errno.ENODEV, errno.ENOENT):
        return GroupRemoved(spec.group)
    if step == "clone" and code not in (errno.EAGAIN, errno.ENOMEM):
        return CloneUnsupported(os.strerror(code).lower())
    if step == "late":
        return StartTooLate("the start deadline has passed", "look up the state of the process, then order a new start")
    if step == "cwd" and spec.directory is not None:
        return _exec_error(spec, argv, OSError(code, os.strerror(code), str(spec.directory)))
    if step in ("exec", "clone"):
        return _exec_error(spec, argv, OSError(code, os.strerror(code)))
    cause, cure = _STEP_ERRORS.get(step, ("it failed before its first instruction", "check the node's system log"))
    return NotStarted(f"{spec.argv[0]} cannot be run: {cause} ({os.strerror(code).lower()})", cure)


def _exec_error(spec: ProcessSpec, argv: tuple[str, ...], error: OSError) -> NotStarted:
    reason, directory = (error.strerror or str(error)).lower(), spec.directory
    if directory is not None and str(error.filename) == str(directory):
        return NotStarted(f"directory {directory} cannot be entered ({reason})", "create it, or name another")
    return NotStarted(f"{argv[0]} cannot be run ({reason})", EXEC_FIXES.get(error.errno or 0, "check the node's system log"))
