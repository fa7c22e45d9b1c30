"""Secret files in memory (tmpfs), one directory per attempt.

Each directory is built under a temporary name and renamed once it is complete, so readers see all files or the previous
state. /dev/shm is writable by every user, so a root directory that this user does not own is refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

from remit.world.files.disk import translating_os_errors
from remit.world.interfaces import AccessDenied, DiskError
from remit.world.process.spawn import ProcessIdentity, resolve_user

TMPFS: Final = Path("/dev/shm")  # noqa: S108 - a shared directory, so ownership is checked before use
_TEMPORARY_SUFFIX: Final = ".making"
_REMOVING_SUFFIX: Final = ".going"
_PRIVATE: Final = 0o700
_TRAVERSABLE: Final = 0o711
_FILE: Final = 0o400


class SecretFiles(Protocol):
    """Files of secrets, by attempt. `name` identifies an attempt and is safe as a file name.

    Calls block: async code calls them through an `Offload`. They raise `DiskError` and `NotStarted`.
    """

    def put(self, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        """Replace the files of `name` by `files`, readable by `user` only, and return their directory."""
        ...

    def path_of(self, name: str, /) -> Path:
        """Return the directory of `name`, whether or not it exists. It stays the same until the machine restarts."""
        ...

    def has(self, name: str, /) -> bool: ...

    def remove(self, name: str, /) -> None: ...

    def names(self) -> tuple[str, ...]: ...


class TmpfsSecretFiles:
    """Secret files on tmpfs, or in `fallback` on disk if the host has no tmpfs; `in_memory` tells which one is used.

    `owner` is the directory of the agent that keeps them: each agent gets a root directory of its own.
    """

    def __init__(self, owner: Path, fallback: Path, tmpfs: Path = TMPFS) -> None:
        digest = hashlib.sha256(os.fsencode(owner.absolute())).hexdigest()[:16]
        self.in_memory = tmpfs.is_dir() and os.access(tmpfs, os.W_OK | os.X_OK)
        self._root = tmpfs / f"remit-{os.geteuid()}-{digest}" if self.in_memory else fallback

    def put(self, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        identity = resolve_user(user)
        temporary, directory = self._root / (name + _TEMPORARY_SUFFIX), self.path_of(name)
        with translating_os_errors(directory):
            self._make_root()
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(_PRIVATE)
            for path, data in files.items():
                _write(temporary, path, data, identity)
            _own(temporary, identity)
            self.remove(name)
            temporary.rename(directory)
        return directory

    def path_of(self, name: str, /) -> Path:
        return self._root / name

    def has(self, name: str, /) -> bool:
        return self.path_of(name).is_dir()

    def remove(self, name: str, /) -> None:
        """Rename the directory before deleting it, so that a partly deleted one is never visible under its name."""
        going = self._root / (name + _REMOVING_SUFFIX)
        shutil.rmtree(going, ignore_errors=True)
        try:
            self.path_of(name).rename(going)
        except FileNotFoundError:
            return
        except OSError as error:
            raise DiskError(
                f"{self.path_of(name)} cannot be removed ({error.strerror})", "find out which process uses it (lsof)"
            ) from error
        shutil.rmtree(going, ignore_errors=True)

    def names(self) -> tuple[str, ...]:
        try:
            entries = sorted(entry.name for entry in self._root.iterdir())
        except OSError:
            return ()
        return tuple(dict.fromkeys(name.removesuffix(_TEMPORARY_SUFFIX).removesuffix(_REMOVING_SUFFIX) for name in entries))

    def destroy(self) -> None:
        """Remove everything. Call this when nothing runs any more."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _make_root(self) -> None:
        """Create the root directory. As root it is made traversable but not listable, so that replicas of other users reach
        their own directory by name and cannot see the others.
        """
        self._root.mkdir(_PRIVATE, parents=not self.in_memory, exist_ok=True)
        status = self._root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise AccessDenied(
                f"{self._root} is owned by another user",
                "remove it: secrets are not written to a directory that another user can read",
            )
        self._root.chmod(_TRAVERSABLE if os.geteuid() == 0 else _PRIVATE)


def _write(root: Path, path: PurePosixPath, data: bytes, identity: ProcessIdentity | None) -> None:
    directory = root
    for part in path.parts[:-1]:
        directory = directory / part
        directory.mkdir(_PRIVATE, exist_ok=True)
        _own(directory, identity)
    file = os.open(directory / path.parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE)
    try:
        if identity is not None:
            os.fchown(file, identity.uid, identity.gid)
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
    finally:
        os.close(file)


def _own(directory: Path, identity: ProcessIdentity | None) -> None:
    if identity is not None:
        os.chown(directory, identity.uid, identity.gid, follow_symlinks=False)
