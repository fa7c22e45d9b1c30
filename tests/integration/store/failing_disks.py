"""Full, read-only and failing disks: real mounts, and a shim of SQLite's file layer. Contains no tests."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from remit.store.sqlite.database_file import load_checksums
from remit.store.sqlite.store import SqliteStore
from tests.contracts.stores import OneThread


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size (as in `32m`), for tests marked `mounts`.

    Where none can be mounted the test fails: a disk that never fills up proves nothing.
    """
    place.mkdir()
    _system("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        _system("umount", str(place))


@contextmanager
def read_only_view(directory: Path, place: Path) -> Iterator[Path]:
    """The same directory through a read-only bind mount: unlike permission bits, it also restricts root."""
    place.mkdir()
    _system("mount", "--bind", str(directory), str(place))
    try:
        _system("mount", "-o", "remount,ro,bind", str(place))
        yield place
    finally:
        _system("umount", str(place))


def _system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"`{' '.join(command)}` is needed for this test and failed: {done.stderr.strip()}")


@asynccontextmanager
async def open_store(directory: Path) -> AsyncIterator[SqliteStore]:
    thread = OneThread()
    try:
        store = await SqliteStore.open(directory, offload=thread, holder="tester", incarnation="first")
        try:
            yield store
        finally:
            await store.close()
    finally:
        thread.close()


class Faults:
    """Calls of the file layer that fail. `arm` sets it for the next calls; SQLite sees an I/O error."""

    def __init__(self) -> None:
        self.armed: dict[str, int] = {}
        self.failed_calls: list[str] = []

    def arm(self, call: str, times: int = 1) -> None:
        self.armed[call] = times

    def should_fail(self, call: str) -> bool:
        if self.armed.get(call, 0) <= 0:
            return False
        self.armed[call] -= 1
        self.failed_calls.append(call)
        return True


_SHIM = "remit-failing"


@contextmanager
def failing_files() -> Iterator[Faults]:
    """While the context is open, files that SQLite opens can be made to fail: `sync`, `write` and `read`, of `wal` or `db`."""
    load_checksums()
    before, faults = "cksmvfs", Faults()

    class FailingFile(apsw.VFSFile):
        def __init__(self, base: str, name: Any, flags: list[int]) -> None:
            super().__init__(base, name, flags)
            self.kind = "wal" if flags[0] & apsw.SQLITE_OPEN_WAL else "db"

        def xSync(self, flags: int) -> None:
            if faults.should_fail(f"{self.kind} sync"):
                raise _io_error(apsw.SQLITE_IOERR_FSYNC)
            super().xSync(flags)

        def xWrite(self, data: Any, offset: int) -> None:
            if faults.should_fail(f"{self.kind} write"):
                raise _io_error(apsw.SQLITE_IOERR_WRITE)
            super().xWrite(data, offset)

        def xRead(self, amount: int, offset: int) -> bytes:
            if faults.should_fail(f"{self.kind} read"):
                raise _io_error(apsw.SQLITE_IOERR_READ)
            return super().xRead(amount, offset)

    class FailingFiles(apsw.VFS):
        def __init__(self) -> None:
            super().__init__(_SHIM, before, makedefault=True)

        def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
            return FailingFile(before, name, flags)

    shim = FailingFiles()
    try:
        yield faults
    finally:
        shim.unregister()
        # Unregistering the default file layer leaves SQLite to choose another: restore the previous one.
        apsw.set_default_vfs(before)


def _io_error(code: int) -> apsw.IOError:
    error: Any = apsw.IOError("planted")
    error.extendedresult = code
    assert isinstance(error, apsw.IOError)
    return error
