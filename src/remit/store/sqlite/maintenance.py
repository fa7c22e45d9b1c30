"""Indexing, compaction, checkpoint and backup copy, in slices.

Each slice is short, and none changes what a reader sees. No caller waits for their durability, so these transactions do not
sync: the next commit's fsync includes them, and after a crash they are repeated from the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import apsw

from remit.store.protocol import Head
from remit.store.sqlite.database_file import DatabaseFile, first_id, rename_durably
from remit.store.sqlite.directory_lock import create_private_file, translate, translating_errors

T = TypeVar("T")

RECENT_VERSIONS_MAX = 1 << 18
INDEX_SLICE_KEYS = 1_024
SWEEP_SLICE_ROWS = 512
SWEEP_READ_ROWS = 2_048
SWEEP_KEYS_MAX = 1 << 17
WAL_PAGES_DUE = 1_000
BACKUP_SLICE_PAGES = 512


_INDEX = """
    INSERT OR IGNORE INTO keys
    SELECT CAST(substr(value, 20) AS TEXT), CAST(CAST(substr(value, 1, 19) AS TEXT) AS INTEGER) FROM carray(?)
"""
"""One SQLite step for all rows, for the reason given at `database_file._APPEND`."""


class BackupResult(NamedTuple):
    """Position of the store when the backup was complete."""

    path: str
    revision: int
    head: Head | None


class IndexPass:
    """One walk over the recent versions in key order that writes them into `keys`, a slice at a time.

    Neighbours in key order share pages, so a pass over many keys rewrites each page of `keys` once, not once per row.
    """

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self._below = first_id(file.revision + 1)
        self._keys = file.recent.begin_pass()

    def step(self, keys: int) -> bool:
        """Write the next `keys`; returns True when the pass is complete. A failure loses nothing: the log has everything."""
        file, below = self._file, self._below
        batch = list(islice(self._keys, keys))
        done = len(batch) < keys
        rows = file.recent.versions(batch, below)
        with maintenance_transaction(file):
            if rows:
                file.db.execute(_INDEX, (apsw.carray(tuple([b"%019d%b" % (id_, key.encode()) for key, id_ in rows])),))
            if done:
                file.db.execute("UPDATE meta SET value = ? WHERE name = 'indexed'", (below,))
        file.recent.drop(batch, below)
        if done:
            file.indexed = below
            file.recent.end_pass()
        return done


class Maintenance:
    """Maintenance that is due after a group of commits."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self._pass: IndexPass | None = None

    def is_due(self) -> bool:
        file = self._file
        return self._pass is not None or file.recent.count > RECENT_VERSIONS_MAX or file.wal_pages > WAL_PAGES_DUE

    def step(self, rows_written: int) -> None:
        """Run one slice. `rows_written` since the last step: indexing runs at twice the rate of writes, so it catches up."""
        if self._pass is not None or self._file.recent.count > RECENT_VERSIONS_MAX:
            self._index(max(INDEX_SLICE_KEYS, 2 * rows_written))
        if self._file.wal_pages > WAL_PAGES_DUE:
            self._file.checkpoint()

    def index_below(self, id_: int) -> bool:
        """Index one slice; returns True once every version below `id_` is in `keys`."""
        if self._file.indexed < id_:
            self._index(INDEX_SLICE_KEYS)
        return self._file.indexed >= id_

    def _index(self, keys: int) -> None:
        current = self._pass or IndexPass(self._file)
        # No pass is recorded during the step: if it fails, the next call starts a new pass, which misses nothing.
        self._pass = None
        if not current.step(keys):
            self._pass = current


def set_compacted(file: DatabaseFile, revision: int) -> None:
    """Reject reads of the history before `revision`; only then may it be deleted."""
    with maintenance_transaction(file):
        file.db.execute("UPDATE meta SET value = ? WHERE name = 'compacted'", (revision,))
    file.compacted = revision


def sweep(file: DatabaseFile) -> Iterator[None]:
    """Delete everything that no reader at or after the compacted revision can see; each `next` does one slice.

    The log is walked from where the last sweep ended: each row there makes the earlier versions of its key unreachable, and
    a deletion also itself. So the work is proportional to the rows written since, however many keys there are. Many rows are
    collected before any is deleted, then removed from `log` and from `keys`, each in its own order, because neighbours share
    pages.

    Rows are deleted before their index entries, and deletions last: an interrupted sweep is repeated from the log, and finds
    each entry through the row that made it unreachable. In the opposite order, leftovers would stay forever. Everything
    below the compacted revision must already be in `keys`.
    """
    below = first_id(file.compacted + 1)
    while True:
        bounds: dict[str, int] = {}
        gone: list[int] = []
        deletions: list[int] = []
        seen, rows = file.swept, [(0, "")]
        while rows and len(bounds) < SWEEP_KEYS_MAX:
            rows = _log_slice(file, seen, below)
            # A deletion goes too: its own id is below a bound that is one higher. A row with an empty key is in no index.
            bounds.update((key, id_ + (id_ & 1)) for id_, key in rows if key)
            deletions += (id_ for id_, _ in rows if id_ & 1)
            seen = rows[-1][0] if rows else seen
            yield
        if seen == file.swept:
            return
        ordered = sorted(bounds.items())
        for key_slice in _slices(ordered):
            with file.reading():
                ids_found = file.db.executemany("SELECT id FROM keys WHERE key = ? AND id < ?", key_slice)
                gone += (id_ for (id_,) in ids_found if not id_ & 1)
            yield
        gone.sort()
        for ids in _slices(gone):
            _delete(file, "DELETE FROM log WHERE id = ?", [(id_,) for id_ in ids])
            yield
        for key_slice in _slices(ordered):
            _delete(file, "DELETE FROM keys WHERE key = ? AND id < ?", key_slice)
            yield
        for ids in _slices(deletions):
            _delete(file, "DELETE FROM log WHERE id = ?", [(id_,) for id_ in ids])
            yield
        _delete(file, "UPDATE meta SET value = ? WHERE name = 'swept'", [(seen,)])
        file.swept = seen


def _log_slice(file: DatabaseFile, after: int, below: int) -> list[tuple[int, str]]:
    with file.reading():
        return list(
            file.db.execute(
                "SELECT id, key FROM log WHERE id > ? AND id < ? ORDER BY id LIMIT ?", (after, below, SWEEP_READ_ROWS)
            )
        )


def _delete(file: DatabaseFile, statement: str, bindings: Sequence[tuple[int] | tuple[str, int]]) -> None:
    with maintenance_transaction(file):
        file.db.executemany(statement, bindings)
    if file.wal_pages > WAL_PAGES_DUE:
        file.checkpoint()


def _slices(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(rows), SWEEP_SLICE_ROWS):
        yield rows[start : start + SWEEP_SLICE_ROWS]


class BackupCopy:
    """Copies the running database, a slice of pages at a time.

    The copy uses the writing connection, so SQLite applies each later commit to the pages already copied: the result shows
    the state of the last slice.
    """

    def __init__(self, file: DatabaseFile, path: Path) -> None:
        self._file, self._path = file, path
        self._temporary = path.with_name(path.name + ".part")
        with translating_errors(self._temporary):
            create_private_file(self._temporary)
            self._target = apsw.Connection(str(self._temporary))
            try:
                self._copy = self._target.backup("main", file.db, "main")
            except BaseException:
                self._target.close()
                raise

    def step(self) -> BackupResult | None:
        with translating_errors(self._temporary):
            if not self._copy.step(BACKUP_SLICE_PAGES):
                return None
            self._copy.finish()
            self._target.close()
            rename_durably(self._temporary, self._path)
        return BackupResult(str(self._path), self._file.revision, self._file.head())

    def discard(self) -> None:
        """Remove an incomplete copy. Has no effect after the copy is in place."""
        with translating_errors(self._temporary):
            self._copy.close(True)
            self._target.close()
            self._temporary.unlink(missing_ok=True)


@contextmanager
def maintenance_transaction(file: DatabaseFile) -> Iterator[None]:
    """One maintenance transaction, without an fsync of its own."""
    if file.damage is not None:
        raise file.damage
    try:
        file.db.execute("PRAGMA synchronous=NORMAL")
        file.db.execute("BEGIN IMMEDIATE")
        yield
        file.db.execute("COMMIT")
    except (apsw.Error, OSError, MemoryError) as error:
        file.roll_back()
        raise file.record_damage(translate(error, file.path)) from error
    finally:
        file.db.execute("PRAGMA synchronous=FULL")
