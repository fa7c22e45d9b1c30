"""Lock file of a data directory; SQLite error translation."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw

from remit.store.protocol import CommitOutcomeUnknown, Corrupt, NoSpace, ReadOnly, StoreError, StoreInUse, Unavailable

LOCK_NAME = "owner"
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
_PID_BYTES_MAX = 32
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class DirectoryLock:
    """An flock, which the kernel releases when the process ends, however it ends. The pid in the file is informational."""

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        self._created_lock: Path | None = None
        self._created_directories: tuple[Path, ...] = ()
        try:
            self._created_directories = tuple(path for path in (directory, *directory.parents) if not path.exists())
            directory.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            while not self._lock(directory / LOCK_NAME):
                pass
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
            # A directory that became read-only may still allow writing an existing lock file, as above.
            if not os.access(directory, os.W_OK):
                raise ReadOnly(f"{directory} cannot be written; make it writable, or use another --data directory")
        except OSError as error:
            self.undo()
            raise translate_os_error(error, directory) from error
        except BaseException:
            self.undo()
            raise

    def _lock(self, path: Path) -> bool:
        """Open and lock the file. Returns False if its creator has removed it meanwhile: a lock on it would exclude no other
        process.
        """
        created = True
        try:
            self._fd = os.open(path, _OPEN_FLAGS | os.O_EXCL, PRIVATE_FILE)
        except FileExistsError:
            self._fd, created = os.open(path, _OPEN_FLAGS, PRIVATE_FILE), False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(str(path.parent), _pid_in(self._fd)) from None
        if not _is_named(path, self._fd):
            os.close(self._fd)
            self._fd = -1
            return False
        self._created_lock = path if created else None
        return True

    def undo(self) -> None:
        """Release the lock and remove what this object created: the lock file and empty directories."""
        with suppress(OSError):
            if self._created_lock is not None:
                self._created_lock.unlink()  # while it is locked, so that a concurrent locker notices
        for path in self._created_directories:
            with suppress(OSError):
                path.rmdir()
        self.release()

    def release(self) -> None:
        self._created_lock, self._created_directories = None, ()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def owner_pid(directory: Path) -> int | None:
    """Return the pid of the process that owns this directory (0 if unknown), or None if there is none. Takes no lock."""
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


def create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read. SQLite gives its journal files the same mode."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))


def translate_os_error(error: OSError, path: Path) -> Unavailable:
    """Translate an error of the file system."""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnly(f"{path} cannot be written ({error.strerror}); make it writable, or use another --data directory")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"no space at {path} ({error.strerror}); free space there")
    return Unavailable(f"{path} cannot be used: {error}; fix that, then restart")


def _is_named(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, _PID_BYTES_MAX, 0).strip()
    return int(text) if text.isdigit() else None


_DAMAGED = (apsw.SQLITE_IOERR_DATA, apsw.SQLITE_IOERR_CORRUPTFS, apsw.SQLITE_IOERR_SHORT_READ)


def corrupt_error(path: Path, what: str) -> Corrupt:
    return Corrupt(f"{path}: {what}; no more writes are accepted: stop, keep a copy of the file, and restore a backup")


def translate(error: Exception, path: Path, *, committing: bool = False) -> StoreError:
    """Translate an error of SQLite. `committing`: it failed during COMMIT, so the commit may have been applied."""
    if isinstance(error, apsw.FullError):
        return NoSpace(f"{path}: the disk is full; nothing was applied: free space there, or compact")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, apsw.FormatError)):
        return corrupt_error(path, f"the data read is not what was written ({error})")
    if isinstance(error, apsw.IOError):
        code = getattr(error, "extendedresult", 0)
        if code in _DAMAGED:
            return corrupt_error(path, f"a page does not match its checksum ({error})")
        if committing:
            return CommitOutcomeUnknown(
                f"{path}: the disk failed during a commit ({error}, code {code}); settle the commit, and check the disk"
            )
        return Unavailable(f"{path}: the disk failed ({error}, code {code}); nothing was applied: check the disk")
    if isinstance(error, (apsw.ReadOnlyError, apsw.PermissionsError)):
        return ReadOnly(f"{path} cannot be written ({error}); make it writable, or use another --data directory")
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return Unavailable(f"{path} is in use by another program ({error}); stop that program, then retry")
    if isinstance(error, (apsw.CantOpenError, apsw.NoMemError, MemoryError)):
        return Unavailable(f"{path} cannot be opened ({error}); nothing was applied: check memory, open files and the disk")
    if isinstance(error, OSError):
        return translate_os_error(error, path)
    return Unavailable(f"{path}: SQLite failed ({type(error).__name__}: {error}); nothing was applied: report this as a bug")


@contextmanager
def translating_errors(path: Path) -> Iterator[None]:
    """Translate errors of work that commits nothing a caller waits for."""
    try:
        yield
    except (apsw.Error, OSError, MemoryError) as error:
        raise translate(error, path) from error
