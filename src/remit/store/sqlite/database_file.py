"""SQLite schema, WAL and fsync settings, reads, writes; blocking.

store.py calls this from one thread at a time; maintenance.py does indexing and compaction.

Every version of a row is written once, into `log`, whose id is `revision << 20 | position in its commit << 1 | deleted`. The
log grows only at its end, so a commit writes few pages, independent of the keys it touches. `keys` holds (key, id) of every
version: the newest id below a bound is the row as of that revision, so neither a range in the past nor a commit has to
look up the previous version.

`keys` is in key order, so updating it at each commit would rewrite a page for nearly every row, which measured as more than
half of all work. It therefore lags behind: versions past `indexed` are in memory (`recent`), are read again from the log
when the file is opened, and are written into `keys` later, thousands at a time in key order (maintenance.py).

Everything that is read is verified: SQLite's checksum VFS checks every page, and each log row has a checksum over its id,
key and value, so that an index entry that points to a wrong row is detected as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import apsw
from apsw import sqlite_extra

from remit.store.chain import decode_head
from remit.store.keys import check_revision, prefix_end, range_start
from remit.store.protocol import (
    HEAD,
    Commit,
    Committed,
    Compacted,
    Conflict,
    Corrupt,
    Head,
    NewerSchema,
    Page,
    Row,
    RowChange,
    StoreError,
    Unavailable,
)
from remit.store.sqlite.directory_lock import corrupt_error, create_private_file, translate, translating_errors
from remit.store.sqlite.recent_index import RecentIndex, Version
from remit.store.watch_feed import Transaction

FILE_NAME = "store.sqlite"
SCHEMA = 1
SQLITE_MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x52454D54
_PAGE_BYTES = 8192
_CACHE_KIB = 128 << 10
_RESERVED_BYTES = 8
"""Space at the end of each page, where the VFS keeps its checksum."""
_HEADER_BYTES = 100
_REVISION_SHIFT = 20
_WAL_BYTES_KEPT = 64 << 20
WAL_PAGES_MAX = 16_384
_PAST_ALL_KEYS = b""
"""SQLite orders every text before every blob, so this bounds a range without an end."""

LogRow = tuple[int, str, bytes | None, int]

_APPEND = """
    INSERT INTO log SELECT id, CAST(substr(value, 34, size) AS TEXT), iif(id & 1, NULL, substr(value, 34 + size)), sum
    FROM (
        SELECT
            value,
            CAST(CAST(substr(value, 1, 19) AS TEXT) AS INTEGER) AS id,
            CAST(CAST(substr(value, 20, 10) AS TEXT) AS INTEGER) AS sum,
            CAST(CAST(substr(value, 30, 4) AS TEXT) AS INTEGER) AS size
        FROM carray(?)
    )
"""
"""Inserts all rows in one SQLite step, each packed into one blob. Row by row, the writing thread would release and take the GIL
hundreds of times per commit, and each time wait for the event loop's thread to release it.
"""


class GroupResult(NamedTuple):
    """Result of a group: one outcome per commit, and the transactions to publish to watchers."""

    outcomes: list[Committed | Conflict]
    transactions: list[Transaction]


def first_id(revision: int) -> int:
    """Return the lower bound of all ids of `revision` and later."""
    return revision << _REVISION_SHIFT


class DatabaseFile:
    """One open database. After `Corrupt` it still serves the reads it can, and accepts no more writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recent = RecentIndex()
        self.wal_pages = 0
        self.damage: Corrupt | None = None
        check_header(path)
        load_checksums()
        with translating_errors(path):
            self.db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                self._configure()
                self._load()
            except BaseException:
                self.db.close()
                raise

    def close(self) -> None:
        with translating_errors(self.path):
            self.db.close()

    def _configure(self) -> None:
        db = self.db
        # The directory lock already guarantees one owner. With exclusive locking SQLite keeps its WAL index on the heap,
        # without a shared-memory file whose mapping could fail on a full disk.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        if db.execute("PRAGMA journal_mode=WAL").get != "wal":
            raise Unavailable(f"{self.path}: the file system does not support a write-ahead log; use another --data directory")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        db.execute("PRAGMA temp_store=MEMORY")
        db.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_KEPT}")
        # Checkpoints run as maintenance, after the answers: within a commit they would delay its caller.
        db.execute("PRAGMA wal_autocheckpoint=0")
        if db.execute("PRAGMA checksum_verification").get != "1":
            raise corrupt_error(self.path, "its pages have no checksums, so it was not written by Remit")
        db.set_wal_hook(self._on_wal)

    def _on_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self.wal_pages = pages
        return apsw.SQLITE_OK

    def _load(self) -> None:
        facts = dict(self.db.execute("SELECT name, value FROM meta"))
        try:
            self.compacted: int = facts["compacted"]
            self.swept: int = facts["swept"]
            self.indexed: int = facts["indexed"]
        except KeyError as missing:
            raise corrupt_error(self.path, f"its table meta lacks {missing}") from None
        last = self.db.execute("SELECT max(id) FROM log").get
        self.revision: int = max((last or 0) >> _REVISION_SHIFT, self.compacted)
        versions: Iterable[Version] = self.db.execute("SELECT key, id FROM log WHERE id >= ? ORDER BY id", (self.indexed,))
        self.recent.add((key, id_) for key, id_ in versions if key)

    # Reads

    def get(self, key: str) -> Row | None:
        with self.reading():
            return self._row(self._newest(key))

    def has_version(self, key: str) -> bool:
        """Return whether any version of the key exists, including a deletion."""
        with self.reading():
            return self._newest(key) != 0

    def head(self) -> Head | None:
        row = self.get(HEAD)
        return None if row is None else decode_head(row.value)

    def range(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        if revision:
            check_revision(revision, compacted=self.compacted, now=self.revision)
        at = revision or self.revision
        with self.reading():
            versions = self._range_versions(range_start(prefix, after), prefix_end(prefix), first_id(at + 1), limit + 1)
            rows = self._rows(id_ for _, id_ in versions[:limit])
        return Page(tuple(rows), at, more=len(versions) > limit)

    def replay(self, after: int, rows: int) -> list[Transaction]:
        """Return complete transactions after revision `after`: about `rows` log rows, and at least one transaction if there is
        one.
        """
        if after < self.compacted:
            raise Compacted(after, self.compacted)
        with self.reading():
            start = first_id(after + 1)
            last = self.db.execute("SELECT id FROM log WHERE id >= ? ORDER BY id LIMIT 1 OFFSET ?", (start, rows)).get
            # The transaction that exceeds the limit is included completely.
            end = first_id((last >> _REVISION_SHIFT) + 1) if last is not None else first_id(self.revision + 1)
            log: list[LogRow] = list(
                self.db.execute("SELECT id, key, value, sum FROM log WHERE id >= ? AND id < ? ORDER BY id", (start, end))
            )
            return list(self._transactions(log))

    def _transactions(self, rows: Iterable[LogRow]) -> Iterator[Transaction]:
        revision, changes = 0, list[RowChange]()
        for row in rows:
            self._verify(row)
            id_, key, value, _ = row
            if id_ >> _REVISION_SHIFT != revision:
                if revision:
                    yield Transaction(revision, changes)
                revision, changes = id_ >> _REVISION_SHIFT, []
            if key:
                changes.append(RowChange(key, value, revision))
        if revision:
            yield Transaction(revision, changes)

    def _newest(self, key: str) -> int:
        """Return the id of the key's last version, which may be a deletion; 0 if it never existed. Memory is always newer than
        `keys`.
        """
        if (id_ := self.recent.ids.get(key)) is not None:
            return id_
        indexed = self.db.execute("SELECT id FROM keys WHERE key = ? ORDER BY id DESC LIMIT 1", (key,)).get
        return int(indexed or 0)

    def _range_versions(self, start: str, end: str | None, below: int, limit: int) -> list[Version]:
        """Return the newest version below id `below` of each key that existed then, in key order, at most `limit` of them."""
        versions: list[Version] = []
        while True:
            missing = limit - len(versions)
            indexed: list[Version] = list(
                self.db.execute(
                    "SELECT key, max(id) FROM keys WHERE key >= ? AND key < ? AND id < ? GROUP BY key ORDER BY key LIMIT ?",
                    (start, _PAST_ALL_KEYS if end is None else end, below, missing),
                )
            )
            newest: dict[str, int] = dict(indexed)
            # Both sources are complete up to this key; the rest is left for the next round.
            edge: str | None = indexed[-1][0] if len(indexed) == missing else None
            fresh = 0
            for key in self.recent.walk(start, end):
                if edge is not None and key > edge:
                    break
                if id_ := self.recent.newest(key, below):
                    newest[key] = max(id_, newest.get(key, 0))
                    fresh += 1
                    if fresh == missing:
                        edge = key
                        break
            live = [(key, id_) for key, id_ in newest.items() if not id_ & 1 and (edge is None or key <= edge)]
            versions += sorted(live)
            if edge is None or len(versions) >= limit:
                return versions[:limit]
            start = edge + "\0"

    def _row(self, id_: int) -> Row | None:
        return None if not id_ or id_ & 1 else self._rows((id_,))[0]

    def _rows(self, ids: Iterable[int]) -> list[Row]:
        row_ids = list(ids)
        rows: list[LogRow] = list(
            self.db.executemany("SELECT id, key, value, sum FROM log WHERE id = ?", ((id_,) for id_ in row_ids))
        )
        if len(rows) != len(row_ids):
            raise corrupt_error(self.path, f"the index names {len(row_ids) - len(rows)} rows that are not in the log")
        return [self._live_row(row) for row in rows]

    def _live_row(self, row: LogRow) -> Row:
        self._verify(row)
        id_, key, value, _ = row
        if value is None:
            raise corrupt_error(self.path, f"row {id_} of {key!r} has no value")
        return Row(key, value, id_ >> _REVISION_SHIFT)

    def _verify(self, row: LogRow) -> None:
        id_, key, value, stored = row
        if checksum(id_, key, value) != stored:
            raise corrupt_error(self.path, f"row {id_} of {key!r} does not match its checksum")

    def reading(self) -> _Reading:
        return _Reading(self)

    # Writes

    def write(self, commits: Sequence[Commit]) -> GroupResult:
        """Apply a group of commits in one SQLite transaction with one fsync. Each is checked against the effects of those
        before it.
        """
        if self.damage is not None:
            raise self.damage
        # Maintenance normally keeps the log shorter. If it fails, commits must fail too, before the log fills the disk.
        if self.wal_pages > WAL_PAGES_MAX:
            self.checkpoint()
        with self.reading():
            written, rows = self._decide(commits)
        if rows:
            self._append(rows)
            self.recent.add((row[1], row[0]) for row in rows if row[1])
            self.revision += len(written.transactions)
        return written

    def _decide(self, commits: Sequence[Commit]) -> tuple[GroupResult, list[LogRow]]:
        group: dict[str, int] = {}
        written, rows = GroupResult([], []), list[LogRow]()
        revision = self.revision
        for commit in commits:
            if (conflict := self._conflict(commit, group)) is not None:
                written.outcomes.append(conflict)
                continue
            revision += 1
            commit_rows = log_rows(revision, commit)
            rows += commit_rows
            group.update((key, id_) for id_, key, _, _ in commit_rows)
            written.outcomes.append(Committed(revision))
            changes = [RowChange(key, value, revision) for _, key, value, _ in commit_rows if key]
            written.transactions.append(Transaction(revision, changes))
        return written, rows

    def _conflict(self, commit: Commit, group: dict[str, int]) -> Conflict | None:
        for guard in commit.guards:
            id_ = group.get(guard.key) or self._newest(guard.key)
            found = 0 if id_ & 1 else id_ >> _REVISION_SHIFT  # a deleted row is absent, which a guard states as revision 0
            if found != guard.revision:
                return Conflict(guard.key, guard.revision, found)
        return None

    def _append(self, rows: Sequence[LogRow], facts: Sequence[tuple[str, int]] = ()) -> None:
        committing = False
        try:
            self.db.execute("BEGIN IMMEDIATE")
            self.db.execute(_APPEND, (apsw.carray(tuple([_pack(row) for row in rows])),))
            if facts:
                self.db.executemany("INSERT OR REPLACE INTO meta VALUES(?, ?)", facts)
            committing = True  # from here on, an error of the disk leaves the outcome unknown
            self.db.execute("COMMIT")
        except (apsw.Error, OSError, MemoryError) as error:
            self.roll_back()
            raise self.record_damage(translate(error, self.path, committing=committing)) from error

    def rebase(self, revision: int, commit: Commit) -> None:
        """Write `commit` as `revision`, skipping revisions, and drop the history before it. Used by restore only."""
        rows = log_rows(revision, commit)
        self._append(rows, [("compacted", revision)])
        self.recent.add((row[1], row[0]) for row in rows)
        self.revision = self.compacted = revision

    def roll_back(self) -> None:
        """Roll back to the last commit. After some errors SQLite has already done so."""
        if self.db.in_transaction:
            with translating_errors(self.path):
                self.db.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the database, so that the log is written from its beginning again."""
        with self.reading():
            self.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self.wal_pages = 0

    def record_damage(self, error: StoreError) -> StoreError:
        if isinstance(error, Corrupt):
            self.damage = error
        return error


class _Reading:
    """Translates errors, and records damage so that nothing is written after it was detected."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, StoreError):
            self._file.record_damage(error)
        elif isinstance(error, (apsw.Error, OSError, MemoryError)):
            raise self._file.record_damage(translate(error, self._file.path)) from error


def log_rows(revision: int, commit: Commit) -> list[LogRow]:
    """Return the log rows of a transaction. One without changes still takes a revision, so it gets a row with an empty key."""
    ids = range(first_id(revision), first_id(revision + 1), 2)
    rows: list[LogRow] = [
        (id_, key, value, checksum(id_, key, value)) for id_, (key, value) in zip(ids, commit.puts, strict=False)
    ]
    deleted = commit.deletes or (() if rows else ("",))
    rows += [(id_ | 1, key, None, checksum(id_ | 1, key, None)) for id_, key in zip(ids[len(rows) :], deleted, strict=False)]
    return rows


def _pack(row: LogRow) -> bytes:
    """Pack a row for `_APPEND`: three numbers of fixed width, the key, and the value up to the end."""
    id_, key, value, stored = row
    name = key.encode()
    return b"%019d%010d%04d%b%b" % (id_, stored, len(name), name, value or b"")


def checksum(id_: int, key: str, value: bytes | None) -> int:
    return crc32(value or b"", crc32(key.encode(), id_ & 0xFFFFFFFF))


def create_database(path: Path) -> None:
    """Create an empty database under another name and rename it, so that it is complete or does not exist."""
    load_checksums()
    if Path(f"{path}-wal").exists():
        raise corrupt_error(path, "the database is missing, but its write-ahead log exists")
    temporary = path.with_name(path.name + ".new")
    with translating_errors(temporary):
        create_private_file(temporary)
        db = apsw.Connection(str(temporary))
        try:
            db.reserve_bytes(reserve=_RESERVED_BYTES)
            for statement in _create_statements():
                db.execute(statement)
        finally:
            db.close()
        rename_durably(temporary, path)


def _create_statements() -> Iterator[str]:
    return chain(
        (f"PRAGMA page_size={_PAGE_BYTES}", "PRAGMA journal_mode=DELETE", "BEGIN"),
        (
            f"PRAGMA application_id={APPLICATION_ID}",
            f"PRAGMA user_version={SCHEMA}",
            "CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID",
            "CREATE TABLE log(id INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB, sum INTEGER NOT NULL)",
            "CREATE TABLE keys(key TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY(key, id)) WITHOUT ROWID",
            "INSERT INTO meta VALUES('compacted', 0), ('swept', 0), ('indexed', 0)",
        ),
        ("COMMIT",),
    )


def check_header(path: Path) -> None:
    """Check the file's application id and schema before SQLite opens it: opening could already modify a foreign file."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise translate(error, path) from error
    if len(header) < _HEADER_BYTES or not header.startswith(SQLITE_MAGIC):
        raise corrupt_error(path, "it is not a SQLite database")
    schema, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    if application != APPLICATION_ID:
        raise corrupt_error(path, "it is a SQLite database, but not one of Remit")
    if schema > SCHEMA:
        raise NewerSchema(f"{path} has schema {schema}, this Remit reads {SCHEMA}; nothing was changed: upgrade Remit")


def rename_durably(temporary: Path, path: Path) -> None:
    """Sync the content, rename it into place, and sync the directory."""
    sync(temporary, os.O_RDWR)
    temporary.replace(path)
    sync(path.parent, os.O_RDONLY)


def sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load_checksums() -> None:
    """Register SQLite's checksum VFS, once per process: then every page is verified when it is read."""
    if "cksmvfs" in apsw.vfs_names():
        return
    db = apsw.Connection(":memory:")
    try:
        sqlite_extra.load(db, "cksumvfs")
    except (sqlite_extra.NotAvailable, LookupError, apsw.Error) as error:
        raise Unavailable(f"this build of apsw lacks SQLite's cksumvfs ({error}); install apsw from PyPI") from error
    finally:
        db.close()
