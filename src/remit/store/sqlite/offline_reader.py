"""Reads a copy of a store owned by another process. Takes no lock, and writes nothing to the store.

The owner locks its file exclusively, so SQLite would not let a second process read it. But a plain copy of the database and
then of its write-ahead log is consistent if that log was not restarted meanwhile: everything that the owner checkpointed into
the database during the copy is also in the log, which is copied later, and the end of a log that was being written is cut
off by its checksums. A restarted log has another header; then the copy is repeated.

Do not use this inside the process that owns the store: closing a second descriptor of the file would release its locks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from remit.store.protocol import PAGE_ROWS_MAX, Head, Page, Row, StoreError, Unavailable
from remit.store.sqlite.database_file import FILE_NAME, DatabaseFile, check_header
from remit.store.sqlite.directory_lock import create_private_file, translating_errors

COPY_TRIES: Final = 8
_WAL_HEADER_BYTES: Final = 32


class StoreNotFound(StoreError):
    """The directory contains no store of Remit."""


class _FileState(NamedTuple):
    """State that must not change during the copy: the header of the log or, without a log, the database file."""

    header: bytes
    file: tuple[int, int, int]

    def unchanged(self, after: _FileState) -> bool:
        return self.header == after.header and (bool(self.header) or self.file == after.file)


class OfflineReader:
    """One state of a store, at `revision`. `scratch` is an empty directory, which the caller removes afterwards."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        path = directory / FILE_NAME
        with translating_errors(directory):
            if not directory.is_dir():
                raise StoreNotFound(f"there is no directory {directory}; give the data directory of a scope")
            if not path.is_file():
                raise StoreNotFound(
                    f"{directory} contains no data of Remit (no {FILE_NAME}); give the data directory of a scope"
                )
        check_header(path)
        self._file = DatabaseFile(_copy(path, scratch / FILE_NAME))
        self.revision = self._file.revision

    def __enter__(self) -> OfflineReader:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._file.close()

    def head(self) -> Head | None:
        return self._file.head()

    def get(self, key: str) -> Row | None:
        return self._file.get(key)

    def pages(self, prefix: str, after: str = "") -> Iterator[Page]:
        """Yield all rows whose key starts with `prefix`, after key `after`, in key order."""
        while True:
            page = self._file.range(prefix, after, PAGE_ROWS_MAX, 0)
            yield page
            if not page.more:
                return
            after = page.rows[-1].key

    def rows(self, prefix: str) -> Iterator[Row]:
        for page in self.pages(prefix):
            yield from page.rows


def _copy(path: Path, into: Path) -> Path:
    log, log_into = _wal(path), _wal(into)
    for _ in range(COPY_TRIES):
        with translating_errors(path):
            before = _file_state(path, log)
            for target in (into, log_into):
                create_private_file(target)
            shutil.copyfile(path, into)
            if before.header:
                try:
                    shutil.copyfile(log, log_into)
                except FileNotFoundError:
                    continue  # the owner has just closed the store
            else:
                log_into.unlink()
            if before.unchanged(_file_state(path, log)):
                return into
    raise Unavailable(f"{path} changes faster than it can be copied; retry, or read a backup of it")


def _file_state(path: Path, log: Path) -> _FileState:
    stat = path.stat()
    try:
        with log.open("rb") as file:
            header = file.read(_WAL_HEADER_BYTES)
    except FileNotFoundError:
        header = b""
    return _FileState(header, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")
