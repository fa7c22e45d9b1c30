"""Atomic, durable small files; locks.

New content is written to a temporary file in the same directory (`.name.writing`), synced, and renamed over the old file;
then the directory is synced. A crash leaves at most that temporary file behind, which the next write reuses.
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

from remit.world.interfaces import (
    READ_BYTES_MAX,
    AccessDenied,
    DiskError,
    DiskFull,
    FileBusy,
    FileMissing,
    FileTooLarge,
    NotDurable,
)

_TEMPORARY_SUFFIX: Final = ".writing"
_MODE: Final = 0o600
"""Files may hold a journal or a token, so only the owner can read them."""
_GET_FLAGS, _SET_FLAGS = 0x8008_6601, 0x4008_6602
_TOPDIR_FLAG: Final = 0x2_0000
"""FS_TOPDIR_FL, as set by `chattr +T`."""
_FLAGS_BYTES: Final = struct.calcsize("l")


class FileDisk:
    """The file system of this machine."""

    def read(self, path: Path, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        with translating_os_errors(path), path.open("rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise FileTooLarge(f"{path} is larger than {bytes_max} bytes", "find out which program wrote it; move it away")
        return data

    def write_atomically(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}{_TEMPORARY_SUFFIX}")
        with translating_os_errors(path):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            _lock_temporary(fd, temporary, path)
            with translating_os_errors(path), _unlinked_on_failure(temporary):
                os.ftruncate(fd, 0)
                _write_all(fd, data)
                os.fsync(fd)
                temporary.rename(path)
        finally:
            os.close(fd)
        _sync_directory(path.parent)

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        with translating_os_errors(path):
            created = durably and not path.exists()
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
            try:
                _write_all(fd, data)
                if durably:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
        if created:
            _sync_directory(path.parent)

    def exists(self, path: Path) -> bool:
        with translating_os_errors(path):
            return path.exists()

    def remove(self, path: Path) -> None:
        with translating_os_errors(path):
            path.unlink(missing_ok=True)
        if self.exists(path.parent):
            _sync_directory(
                path.parent
            )  # also if it did not exist: a crash may have interrupted an earlier removal before this sync

    def make_directory(self, path: Path, *, durably: bool = True) -> None:
        if not durably:
            with translating_os_errors(path):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        missing = [directory for directory in path.parents if not self.exists(directory)]
        for directory in (*reversed(missing), path):
            with translating_os_errors(directory), suppress(FileExistsError):  # another process may create it at the same time
                directory.mkdir(mode=0o700)
            _sync_directory(
                directory.parent
            )  # also if it existed: a crash may have interrupted an earlier creation before this sync
        if not path.is_dir():
            raise DiskError(f"{path} is not a directory", "move it away, or use another path")

    def remove_tree(self, path: Path) -> None:
        try:
            path.rmdir()  # fast path for directories that were never written to
        except OSError:
            shutil.rmtree(path, ignore_errors=True)

    def list(self, directory: Path) -> tuple[str, ...]:
        with translating_os_errors(directory):
            names = [entry.name for entry in directory.iterdir()]
        return tuple(sorted(name for name in names if not (name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX))))

    def free_bytes(self, path: Path) -> int:
        with translating_os_errors(path):
            status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        with translating_os_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            if not _try_lock(fd, path):
                raise FileBusy(f"{path} is locked by another process", "stop that process, or use another path")
            yield
        finally:
            os.close(fd)  # releases the lock


def hint_unrelated_subdirectories(directory: Path) -> None:
    """Hint to the file system that subdirectories of this directory are unrelated and belong in separate block groups.

    Within one group ext4 skips every inode that was freed in the last minutes, one by one, before it allocates one. Where
    thousands of small files come and go, creating a file takes half a millisecond; in a separate group it takes a hundredth
    of that.
    """
    with suppress(OSError):  # only a hint: most file systems do not support it
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(_FLAGS_BYTES)))[0]
            if not flags & _TOPDIR_FLAG:
                fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _TOPDIR_FLAG))
        finally:
            os.close(fd)


def _lock_temporary(fd: int, temporary: Path, path: Path) -> None:
    """Lock the temporary file. Two writers of one temporary file would publish a mixture of both contents."""
    busy = FileBusy(f"{path} is being written by another process", "make sure that only one process writes it")
    if not _try_lock(fd, path):
        raise busy
    # Another writer may have renamed the file between our open and our lock: then our descriptor is the live file and must not
    # be truncated.
    with translating_os_errors(path):
        try:
            same = os.fstat(fd).st_ino == temporary.stat().st_ino
        except FileNotFoundError:
            same = False
    if not same:
        raise busy


def _try_lock(fd: int, path: Path) -> bool:
    with translating_os_errors(path):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _write_all(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


@contextmanager
def _unlinked_on_failure(temporary: Path) -> Iterator[None]:
    """Remove the temporary file after a failed write, to give its space back on a full disk. The old content is untouched."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _sync_directory(directory: Path) -> None:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        cause = f"{directory} could not be synced ({error.strerror})"
        raise NotDurable(cause, "fix the disk, then repeat the operation") from error


@contextmanager
def translating_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: Path) -> DiskError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return FileMissing(f"{path} does not exist ({reason})", "create it, or correct the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no space for {path} ({reason})", "free space there")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied(f"{path} is not accessible ({reason})", "change its permissions, or use another path")
    return DiskError(f"{path} cannot be used ({reason})", "fix the disk, or use another path")
