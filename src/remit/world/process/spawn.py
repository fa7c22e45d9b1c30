"""Prepares and spawns a process: user, streams, cgroup, sandbox.

Its user, streams, group and sandbox are set before its first instruction.

Whatever cannot be had as ordered is `NotStarted`: nothing ever runs with more rights, or with fewer bounds, than was asked for.
An order that needs nothing before its first instruction is started without a copy of this process, which is quicker.
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

from remit.world.interfaces import NotStarted, Order
from remit.world.process.isolation import PROGRAM, outer_directory, outside, sandboxed

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_TOLD_BYTES_MAX: Final = 64
_UID_MAX: Final = 2**32 - 2
FILES: Final = resource.getrlimit(resource.RLIMIT_NOFILE)
"""As it was when we began: what we start gets no more open files than that, whatever we need ourselves."""

CURES: Final = {
    errno.ENOENT: "install it, or give its path",
    errno.EACCES: "make it executable for this user",
    errno.EPERM: "make it executable for this user",
    errno.ENOTDIR: "give its path",
    errno.ENOEXEC: "run a program that is built for this machine, or begin the script with #!",
    errno.E2BIG: "give it fewer or shorter arguments and variables",
    errno.EAGAIN: "raise this user's limit of processes, or run less",
    errno.ENOMEM: "free memory on this machine",
    errno.EMFILE: "raise this process's limit of open files",
}
_STEPS: Final = {
    "join": ("its cgroup cannot be joined", "see `remit doctor`"),
    "files": ("its limit of open files cannot be set", "see what the machine says of it"),
    "user": ("its user cannot be taken on", "run the agent as root, or leave `user` out"),
    "parent": ("its end cannot be tied to that of its starter", "run on Linux"),
}


def need_many_files() -> None:
    """Allow this process as many open files as it may allow itself: one is needed for each process that it watches."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Swept(Exception):
    """The group was removed by somebody who clears up, between its making and its first member. Make it again."""


class Identity(NamedTuple):
    """Who a process is to be."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class Unusable(Exception):
    """This machine does not let a process be born inside a group: it has to join."""


class Prepared(NamedTuple):
    """An order, looked at: the words that are run, as whom, and the files for what it says (below 0: nowhere)."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    identity: Identity | None
    streams: tuple[int, ...]


@contextmanager
def prepared(order: Order) -> Iterator[Prepared]:
    """Whatever can be found wrong before there is a process. The files are closed afterwards."""
    identity = identity_of(order.user)
    argv, env = _wrapped(order, other=identity is not None) if order.sandbox == "bwrap" else (order.argv, order.env)
    _give(order.writable, identity)
    with ExitStack() as files:
        yield Prepared(argv, env, identity, tuple(_stream(path, identity, files) for path in (order.stdout, order.stderr)))


def spawn(order: Order, *, entrances: Sequence[int] = ()) -> int:
    """The number of the new process. `entrances`: of the groups that it joins before anything else."""
    with prepared(order) as (argv, env, identity, streams), ExitStack() as files:
        hear, tell = _pipe(order)
        files.callback(os.close, hear)
        files.callback(os.close, tell)
        needs = bool(entrances) or identity is not None or order.with_parent
        needs = needs or resource.getrlimit(resource.RLIMIT_NOFILE) != FILES
        begin = _beginning(tuple(entrances), identity, os.getpid() if order.with_parent else 0, tell) if needs else None
        try:
            process = subprocess.Popen(  # noqa: S603 - never through a shell, and what may run is decided above
                argv,
                env=dict(env),
                cwd=outer_directory(order),
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                start_new_session=True,
                preexec_fn=begin,
            )
        except OSError as error:
            raise _refused(order, argv, error) from error
        except subprocess.SubprocessError as error:
            step, _, code = os.read(hear, _TOLD_BYTES_MAX).decode().partition(" ")
            raise not_begun(order, argv, step, int(code or 0)) from error
        except ValueError as error:
            raise NotStarted(f"{order.argv[0]!r} cannot be run ({error})", "mend the order") from error
    # From here on it is watched by its number. A handle would complain that the work outlives it, which is the promise.
    process.returncode = 0
    return process.pid


def _wrapped(order: Order, *, other: bool) -> tuple[tuple[str, ...], Mapping[str, str]]:
    program = shutil.which(PROGRAM)
    if program is None:
        raise NotStarted("bubblewrap is not installed, and the order wants a sandbox", "apt install bubblewrap")
    # Inside, a program that is not there would only be an exit code. What another root or a mount has is seen only there.
    if order.root is None and not order.mounts and not _is_there(order):
        raise NotStarted(f"{order.argv[0]} cannot be run (no such file or directory)", CURES[errno.ENOENT])
    needed = (*order.writable, *(one.source for one in order.mounts), *((order.root,) if order.root is not None else ()))
    missing = [place for place in needed if not place.exists()]
    if missing:
        raise NotStarted(f"{missing[0]} is to be seen in its sandbox, and is not there", "make it, or leave it out")
    return sandboxed(order, program, other=other), outside(order.env)


def _is_there(order: Order) -> bool:
    word = order.argv[0]
    if "/" in word and order.directory is not None:
        word = str(order.directory / word)
    return shutil.which(word, path=order.env.get("PATH", os.defpath)) is not None


def identity_of(user: str) -> Identity | None:
    """None: nothing changes. A user may be given by number, as `#1000`; then it need not be known to the machine."""
    if not user:
        return None
    number = user[1:] if user.startswith("#") and user[1:].isdecimal() and user.isascii() else ""
    try:
        uid = int(number[:12]) if number else pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise NotStarted(f"there is no user {user!r} on this machine", "make that user, or name another") from None
    if uid > _UID_MAX:
        raise NotStarted(f"{user} is the number of no user", f"use at most #{_UID_MAX}")
    if uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        own = pwd.getpwuid(os.geteuid()).pw_name if _has_name(os.geteuid()) else str(os.geteuid())
        cure = f"run the agent as root, or leave `user` out to run as {own}"
        raise NotStarted(f"{own} may not run anything as {user!r}", cure)
    if number:
        return Identity(uid, uid, (uid,))
    found = pwd.getpwnam(user)
    return Identity(found.pw_uid, found.pw_gid, tuple(os.getgrouplist(user, found.pw_gid)))


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _give(places: Sequence[Path], identity: Identity | None) -> None:
    """Let it own the directories that are its own. They are ours to give: nobody else can have put a link there."""
    if identity is None:
        return
    for place in places:
        try:
            directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(directory, identity.uid, identity.gid)
            finally:
                os.close(directory)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise NotStarted(f"{place} cannot be given to its user ({why})", "make it, or leave it out") from error


def _pipe(order: Order) -> tuple[int, int]:
    try:
        return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refused(order, order.argv, error) from error


def _stream(path: Path | None, identity: Identity | None, files: ExitStack) -> int:
    if path is None:
        return subprocess.DEVNULL
    try:
        # Nobody may put a link or a pipe there and have us follow it, or wait for its reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(path, flags, 0o600)
        files.callback(os.close, file)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotStarted(f"{path} is no file that could be written to", "move it away, or name another")
        os.set_blocking(file, True)
        if identity is not None:
            os.fchown(file, identity.uid, identity.gid)  # programs open /dev/stdout again by its name
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise NotStarted(
            f"{path} cannot be opened for what it says ({why})", "make its directory, or free space there"
        ) from error
    return file


def _beginning(entrances: tuple[int, ...], identity: Identity | None, parent: int, tell: int) -> Callable[[], None]:
    """What a new process does first. It is a copy of this one without its threads: only system calls are safe in it."""

    def begin() -> None:
        step = "join"
        try:
            for entrance in entrances:
                os.write(entrance, b"0")
            step = "files"
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
            step = "user"
            if identity is not None:
                os.setgroups(identity.groups)
                os.setresgid(identity.gid, identity.gid, identity.gid)
                os.setresuid(identity.uid, identity.uid, identity.uid)
            step = "parent"
            if parent:  # after the user: whoever changes that loses this
                if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
                    raise OSError(ctypes.get_errno(), "prctl")
                if os.getppid() != parent:  # it has ended just before: nobody will send the signal
                    os._exit(128 + signal.SIGKILL)
        except OSError as error:
            os.write(tell, f"{step} {error.errno}".encode())
            raise

    return begin


def not_begun(order: Order, argv: tuple[str, ...], step: str, code: int) -> Exception:
    """What it means that a new process, or the making of one, came no further than this."""
    if step in ("join", "clone") and code in (errno.ENODEV, errno.ENOENT):
        return Swept(order.group)
    if step == "clone" and code not in (errno.EAGAIN, errno.ENOMEM):
        return Unusable(os.strerror(code).lower())
    if step == "late":
        return NotStarted("it is too late for it to be started", "ask what has become of it, then order it anew")
    if step == "cwd" and order.directory is not None:
        return _refused(order, argv, OSError(code, os.strerror(code), str(order.directory)))
    if step in ("exec", "clone"):
        return _refused(order, argv, OSError(code, os.strerror(code)))
    cause, cure = _STEPS.get(step, ("it did not get to its first instruction", "see what the machine says of it"))
    return NotStarted(f"{order.argv[0]} cannot be run: {cause} ({os.strerror(code).lower()})", cure)


def _refused(order: Order, argv: tuple[str, ...], error: OSError) -> NotStarted:
    why, place = (error.strerror or str(error)).lower(), order.directory
    if place is not None and str(error.filename) == str(place):
        return NotStarted(f"the directory {place} cannot be entered ({why})", "make it, or name another")
    return NotStarted(f"{argv[0]} cannot be run ({why})", CURES.get(error.errno or 0, "see what the machine says of it"))
