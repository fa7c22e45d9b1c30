"""Whose directory is this? One lock file, held by the process that owns the store. What is in the store is not looked at."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from remit.store.protocol import NoSpace, Owned, ReadOnly, Unavailable

LOCK_NAME = "owner"
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
_PID_BYTES_MAX = 32
_OPENED = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Ownership:
    """An flock, which the system lets go when the process ends, however it ends. The pid inside is for people."""

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        self._lock_made: Path | None = None
        self._directories_made: tuple[Path, ...] = ()
        try:
            self._directories_made = tuple(path for path in (directory, *directory.parents) if not path.exists())
            directory.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            while not self._lock(directory / LOCK_NAME):
                pass
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
            # The file is opened for writing above, which a directory that turned read-only may still allow.
            if not os.access(directory, os.W_OK):
                raise ReadOnly(f"{directory} cannot be written; make it writable, or use another --data directory")
        except OSError as error:
            self.undo()
            raise place_error(error, directory) from error
        except BaseException:
            self.undo()
            raise

    def _lock(self, path: Path) -> bool:
        """False: whoever had made this file has taken it away meanwhile, so a lock on it keeps nobody out."""
        made = True
        try:
            self._fd = os.open(path, _OPENED | os.O_EXCL, PRIVATE_FILE)
        except FileExistsError:
            self._fd, made = os.open(path, _OPENED, PRIVATE_FILE), False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Owned(str(path.parent), _pid_in(self._fd)) from None
        if not _is_named(path, self._fd):
            os.close(self._fd)
            self._fd = -1
            return False
        self._lock_made = path if made else None
        return True

    def undo(self) -> None:
        """Release it, and leave nothing where nothing was: neither a lock that was made for it, nor empty directories."""
        with suppress(OSError):
            if self._lock_made is not None:
                self._lock_made.unlink()  # while it is held: whoever comes next notices
        for path in self._directories_made:
            with suppress(OSError):
                path.rmdir()
        self.release()

    def release(self) -> None:
        self._lock_made, self._directories_made = None, ()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def owner_of(directory: Path) -> int | None:
    """The process that owns this directory now, by the pid that it left there; None if nobody does. Nothing is taken."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(fd) or 0
    finally:
        os.close(fd)
    return None


def make_private(path: Path) -> None:
    """An empty file in this place that only its owner may read. SQLite gives the journals beside it the same mode."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))


def place_error(error: OSError, place: Path) -> Unavailable:
    """What a refusal of the file system means for the store."""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnly(f"{place} cannot be written ({error.strerror}); make it writable, or use another --data directory")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"no room at {place} ({error.strerror}); free space there")
    return Unavailable(f"{place} cannot be used: {error}; mend that, then start again")


def _is_named(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, _PID_BYTES_MAX, 0).strip()
    return int(text) if text.isdigit() else None
