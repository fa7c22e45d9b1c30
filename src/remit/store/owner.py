"""Whose directory is this? One lock file, held by the process that owns the store. What is in the store is not looked at."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from remit.store.protocol import NoSpace, Owned, ReadOnly, Unavailable

LOCK_NAME = "owner"
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
_PID_BYTES_MAX = 32


class Ownership:
    """An flock, which the system lets go when the process ends, however it ends. The pid inside is for people."""

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        try:
            directory.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            self._fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Owned(str(directory), _pid_in(self._fd)) from None
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
            # The file is opened for writing above, which a directory that turned read-only may still allow.
            if not os.access(directory, os.W_OK):
                raise ReadOnly(f"{directory} cannot be written; make it writable, or use another --data directory")
        except OSError as error:
            self.release()
            raise place_error(error, directory) from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
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


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, _PID_BYTES_MAX, 0).strip()
    return int(text) if text.isdigit() else None
