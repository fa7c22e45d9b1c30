"""Reads a copy of a store owned by another process. Takes no lock, and writes nothing to the store.

The owner locks its file exclusively, so SQLite would not let a second process read it. But a plain copy of the database and
then of its write-ahead log is consistent if that log was not restarted meanwhile: whatever the owner checkpointed into the
database during the copy is also in the log, which is copied later, and the end of a log that was being written is cut off by
its checksums. A restarted log has another header; then the copy is repeated.

Do not use this inside the process that owns the store: closing a second descriptor of the file would release its locks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from remit.store.protocol import PAGE_ROWS_MAX, Head, Page, Row, StoreError, Unavailable
from remit.store.sqlite.database_file import FILE_NAME, File, check_header
from remit.store.sqlite.directory_lock import make_private, translated

TRIES: Final = 8
_WAL_HEADER_BYTES: Final = 32


class NoStore(StoreError):
    """The directory contains no store of Remit."""


class _Stand(NamedTuple):
    """What must not change during the copy: the header of the log or, if there is none, the database file itself."""

    header: bytes
    file: tuple[int, int, int]

    def holds(self, after: _Stand) -> bool:
        return self.header == after.header and (bool(self.header) or self.file == after.file)


class Glimpse:
    """One state of a store, at `revision`. `scratch` is an empty directory, which the caller removes afterwards."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        path = directory / FILE_NAME
        with translated(directory):
            if not directory.is_dir():
                raise NoStore(f"there is no directory {directory}; give the data directory of a scope")
            if not path.is_file():
                raise NoStore(f"{directory} contains no data of Remit (no {FILE_NAME}); give the data directory of a scope")
        check_header(path)
        self._file = File(_copied(path, scratch / FILE_NAME))
        self.revision = self._file.revision

    def __enter__(self) -> Glimpse:
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


def _copied(path: Path, into: Path) -> Path:
    log, log_into = _log(path), _log(into)
    for _ in range(TRIES):
        with translated(path):
            before = _stand(path, log)
            for place in (into, log_into):
                make_private(place)
            shutil.copyfile(path, into)
            if before.header:
                try:
                    shutil.copyfile(log, log_into)
                except FileNotFoundError:
                    continue  # the owner has just closed the store
            else:
                log_into.unlink()
            if before.holds(_stand(path, log)):
                return into
    raise Unavailable(f"{path} changes faster than it can be copied; retry, or read a backup of it")


def _stand(path: Path, log: Path) -> _Stand:
    stat = path.stat()
    try:
        with log.open("rb") as file:
            header = file.read(_WAL_HEADER_BYTES)
    except FileNotFoundError:
        header = b""
    return _Stand(header, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")
