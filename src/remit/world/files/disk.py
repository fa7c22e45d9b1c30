"""Atomic, durable small files; locks.

Bytes only: what is in a file is not looked at. Rows are in store/.

A new content is written to a neighbour (`.name.writing`), forced to the device, and renamed over the old one; then the
directory is forced. A crash leaves at most that one neighbour behind, which the next write uses again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from remit.world.interfaces import READ_BYTES_MAX, Busy, DiskError, Forbidden, Missing, NoRoom, TooLarge, Unsettled

_WRITING: Final = ".writing"
_MODE: Final = 0o600
"""A journal or a token may be inside: only its owner reads it."""
_GET_FLAGS, _SET_FLAGS = 0x8008_6601, 0x4008_6602
_APART: Final = 0x2_0000
"""`chattr +T`."""
_FLAGS_BYTES: Final = struct.calcsize("l")


class FileDisk:
    """The file system of this machine."""

    def read(self, path: Path, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        with told(path), path.open("rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise TooLarge(f"{path} has more than {bytes_max} bytes", "see what wrote it; move it away")
        return data

    def write_atomically(self, path: Path, data: bytes) -> None:
        beside = path.with_name(f".{path.name}{_WRITING}")
        with told(path):
            fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            _hold_neighbour(fd, beside, path)
            with told(path), _unlinked_on_failure(beside):
                os.ftruncate(fd, 0)
                _write_all(fd, data)
                os.fsync(fd)
                beside.rename(path)
        finally:
            os.close(fd)
        _force_directory(path.parent)

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        with told(path):
            made = durably and not path.exists()
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
            try:
                _write_all(fd, data)
                if durably:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
        if made:
            _force_directory(path.parent)

    def exists(self, path: Path) -> bool:
        with told(path):
            return path.exists()

    def remove(self, path: Path) -> None:
        with told(path):
            path.unlink(missing_ok=True)
        if self.exists(path.parent):
            _force_directory(path.parent)  # also if it was gone: an earlier removal may have been cut off before this

    def make_directory(self, path: Path, *, durably: bool = True) -> None:
        if not durably:
            with told(path):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        missing = [place for place in path.parents if not self.exists(place)]
        for place in (*reversed(missing), path):
            with told(place), suppress(FileExistsError):  # two may make it at once
                place.mkdir(mode=0o700)
            _force_directory(place.parent)  # also if it was there: an earlier making may have been cut off before this
        if not path.is_dir():
            raise DiskError(f"{path} is no directory", "move it away, or use another place")

    def remove_tree(self, path: Path) -> None:
        try:
            path.rmdir()  # what was never written to is gone at once
        except OSError:
            shutil.rmtree(path, ignore_errors=True)

    def list(self, directory: Path) -> tuple[str, ...]:
        with told(directory):
            names = [place.name for place in directory.iterdir()]
        return tuple(sorted(name for name in names if not (name.startswith(".") and name.endswith(_WRITING))))

    def free_bytes(self, path: Path) -> int:
        with told(path):
            found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        with told(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            if not _held(fd, path):
                raise Busy(f"{path} is held by another process", "stop that one, or use another place")
            yield
        finally:
            os.close(fd)  # which lets the lock go


def keep_apart(directory: Path) -> None:
    """What is made in here has nothing to do with one another: a file system that can gives each directory a region of its own.

    In one region ext4 passes over every inode that was freed in the last minutes, one by one, before it gives out another:
    where thousands of small files come and go, making one takes half a millisecond, and a hundredth of that apart from them.
    """
    with suppress(OSError):  # it is a hint: most file systems have no such thing
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(_FLAGS_BYTES)))[0]
            if not flags & _APART:
                fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _APART))
        finally:
            os.close(fd)


def _hold_neighbour(fd: int, beside: Path, path: Path) -> None:
    """Make sure that nobody else writes here. Two writers in one neighbour would publish a mixture."""
    busy = Busy(f"{path} is being written by another", "let one process own it")
    if not _held(fd, path):
        raise busy
    # Between our open and our lock another may have renamed the neighbour: then ours is the live file, not to be truncated.
    with told(path):
        try:
            same = os.fstat(fd).st_ino == beside.stat().st_ino
        except FileNotFoundError:
            same = False
    if not same:
        raise busy


def _held(fd: int, path: Path) -> bool:
    with told(path):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


@contextmanager
def _unlinked_on_failure(beside: Path) -> Iterator[None]:
    """A full disk should get its room back. The old content was not touched."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _force_directory(directory: Path) -> None:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        cause = f"{directory} could not be forced to disk ({error.strerror})"
        raise Unsettled(cause, "mend the disk, then do it again") from error


@contextmanager
def told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _meaning(error, path) from error


def _meaning(error: OSError, path: Path) -> DiskError:
    why = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Missing(f"{path} is not there ({why})", "make it, or correct the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoom(f"no room for {path} ({why})", "free space there")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Forbidden(f"{path} may not be used ({why})", "change its permissions, or use another place")
    return DiskError(f"{path} cannot be used ({why})", "mend the disk, or use another place")
