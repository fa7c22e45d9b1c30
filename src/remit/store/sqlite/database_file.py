"""SQLite schema, reads, writes; blocking.

Blocking, one thread at a time: sqlite.py decides who calls; upkeep.py tidies.

Every version of a row is written once, into `log`, whose id is `revision << 20 | place in its commit << 1 | deleted`. The log
only grows at its end, so a commit writes few pages, whatever keys it touches. `keys` holds (key, id) of every version: the
newest id below a bound is the row as of that revision, so that neither a range in the past nor a commit needs to look up what
was there before.

`keys` is in key order, so bringing it up to date at each commit would rewrite a page for nearly every row: measured, that is
more than half of all work. It therefore lags: versions past `indexed` are in memory (`recent`), read again from the log when
the file is opened, and written into `keys` later, thousands at a time in key order (upkeep.py).

What is read is checked: SQLite's checksum shim verifies every page, and each log row carries a checksum over its id, key and
value, so that an index that points to a wrong row shows as well.
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
    Change,
    Commit,
    Committed,
    Compacted,
    Conflict,
    Corrupt,
    Head,
    NewerSchema,
    Page,
    Row,
    StoreError,
    Unavailable,
)
from remit.store.sqlite.directory_lock import corrupt, make_private, translate, translated
from remit.store.sqlite.recent_index import Recent, Version
from remit.store.watch_feed import Transaction

FILE_NAME = "store.sqlite"
SCHEMA = 1
SIGN = b"SQLite format 3\0"
APPLICATION = 0x52454D54
_PAGE_BYTES = 8192
_CACHE_KIB = 128 << 10
_RESERVED_BYTES = 8
"""At the end of each page, where the shim keeps its checksum."""
_HEADER_BYTES = 100
_REVISION_SHIFT = 20
_WAL_BYTES_KEPT = 64 << 20
WAL_PAGES_MAX = 16_384
_PAST_ALL_KEYS = b""
"""SQLite orders every text before every blob, so this ends a range that has no end."""

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
"""All rows in one step of SQLite, each packed into one blob. Row by row, the thread that writes would give up and take back
Python's lock hundreds of times a commit, and wait each time until the thread that decides lets go of it."""


class Written(NamedTuple):
    """What became of a group: one outcome for each commit, and the transactions that watchers are to hear of."""

    outcomes: list[Committed | Conflict]
    transactions: list[Transaction]


def first_id(revision: int) -> int:
    """Every id of `revision` and later is at least this."""
    return revision << _REVISION_SHIFT


class File:
    """One open database. After `Corrupt` it reads on where it can, and writes no more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recent = Recent()
        self.wal_pages = 0
        self.damage: Corrupt | None = None
        check_header(path)
        load_checksums()
        with translated(path):
            self.db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                self._configure()
                self._load()
            except BaseException:
                self.db.close()
                raise

    def close(self) -> None:
        with translated(self.path):
            self.db.close()

    def _configure(self) -> None:
        db = self.db
        # The directory's lock already names one owner. With exclusive locking SQLite keeps its WAL index on the heap: no
        # shared-memory file that a full disk could tear from under a mapping.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        if db.execute("PRAGMA journal_mode=WAL").get != "wal":
            raise Unavailable(f"{self.path}: the file system cannot keep a write-ahead log; use another --data directory")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        db.execute("PRAGMA temp_store=MEMORY")
        db.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_KEPT}")
        # Checkpoints are upkeep, after the answers: inside a commit they would hold up the one who waits for it.
        db.execute("PRAGMA wal_autocheckpoint=0")
        if db.execute("PRAGMA checksum_verification").get != "1":
            raise corrupt(self.path, "its pages carry no checksums, so it was not written by Remit")
        db.set_wal_hook(self._note_wal)

    def _note_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self.wal_pages = pages
        return apsw.SQLITE_OK

    def _load(self) -> None:
        facts = dict(self.db.execute("SELECT name, value FROM meta"))
        try:
            self.compacted: int = facts["compacted"]
            self.swept: int = facts["swept"]
            self.indexed: int = facts["indexed"]
        except KeyError as missing:
            raise corrupt(self.path, f"its table of facts lacks {missing}") from None
        last = self.db.execute("SELECT max(id) FROM log").get
        self.revision: int = max((last or 0) >> _REVISION_SHIFT, self.compacted)
        versions: Iterable[Version] = self.db.execute("SELECT key, id FROM log WHERE id >= ? ORDER BY id", (self.indexed,))
        self.recent.add((key, id_) for key, id_ in versions if key)

    # Reading

    def get(self, key: str) -> Row | None:
        with self.reading():
            return self._row(self._newest(key))

    def knows(self, key: str) -> bool:
        """Is there any version of it, a deletion included?"""
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
            found = self._range_versions(range_start(prefix, after), prefix_end(prefix), first_id(at + 1), limit + 1)
            rows = self._rows(id_ for _, id_ in found[:limit])
        return Page(tuple(rows), at, more=len(found) > limit)

    def replay(self, after: int, rows: int) -> list[Transaction]:
        """Whole transactions after revision `after`: as many as make up `rows` log rows, and at least one if there is one."""
        if after < self.compacted:
            raise Compacted(after, self.compacted)
        with self.reading():
            start = first_id(after + 1)
            last = self.db.execute("SELECT id FROM log WHERE id >= ? ORDER BY id LIMIT 1 OFFSET ?", (start, rows)).get
            # The transaction that goes past the limit comes whole: where it ends is only known to the log.
            end = first_id((last >> _REVISION_SHIFT) + 1) if last is not None else first_id(self.revision + 1)
            found: list[LogRow] = list(
                self.db.execute("SELECT id, key, value, sum FROM log WHERE id >= ? AND id < ? ORDER BY id", (start, end))
            )
            return list(self._transactions(found))

    def _transactions(self, rows: Iterable[LogRow]) -> Iterator[Transaction]:
        revision, changes = 0, list[Change]()
        for row in rows:
            self._verify(row)
            id_, key, value, _ = row
            if id_ >> _REVISION_SHIFT != revision:
                if revision:
                    yield Transaction(revision, changes)
                revision, changes = id_ >> _REVISION_SHIFT, []
            if key:
                changes.append(Change(key, value, revision))
        if revision:
            yield Transaction(revision, changes)

    def _newest(self, key: str) -> int:
        """The id of the key's last version, a deletion included; 0 if it never was. Memory is always newer than `keys`."""
        if (id_ := self.recent.ids.get(key)) is not None:
            return id_
        found = self.db.execute("SELECT id FROM keys WHERE key = ? ORDER BY id DESC LIMIT 1", (key,)).get
        return int(found or 0)

    def _range_versions(self, start: str, end: str | None, below: int, wanted: int) -> list[Version]:
        """The newest version below id `below` of each key that then lived, in key order, at most `wanted` of them."""
        found: list[Version] = []
        while True:
            want = wanted - len(found)
            indexed: list[Version] = list(
                self.db.execute(
                    "SELECT key, max(id) FROM keys WHERE key >= ? AND key < ? AND id < ? GROUP BY key ORDER BY key LIMIT ?",
                    (start, _PAST_ALL_KEYS if end is None else end, below, want),
                )
            )
            newest: dict[str, int] = dict(indexed)
            # Both sources are known up to here; what lies past it is left for the next round.
            edge: str | None = indexed[-1][0] if len(indexed) == want else None
            fresh = 0
            for key in self.recent.walk(start, end):
                if edge is not None and key > edge:
                    break
                if id_ := self.recent.newest(key, below):
                    newest[key] = max(id_, newest.get(key, 0))
                    fresh += 1
                    if fresh == want:
                        edge = key
                        break
            live = [(key, id_) for key, id_ in newest.items() if not id_ & 1 and (edge is None or key <= edge)]
            found += sorted(live)
            if edge is None or len(found) >= wanted:
                return found[:wanted]
            start = edge + "\0"

    def _row(self, id_: int) -> Row | None:
        return None if not id_ or id_ & 1 else self._rows((id_,))[0]

    def _rows(self, ids: Iterable[int]) -> list[Row]:
        asked = list(ids)
        rows: list[LogRow] = list(
            self.db.executemany("SELECT id, key, value, sum FROM log WHERE id = ?", ((id_,) for id_ in asked))
        )
        if len(rows) != len(asked):
            raise corrupt(self.path, f"the index names {len(asked) - len(rows)} rows that are not in the log")
        return [self._live_row(row) for row in rows]

    def _live_row(self, row: LogRow) -> Row:
        self._verify(row)
        id_, key, value, _ = row
        if value is None:
            raise corrupt(self.path, f"row {id_} of {key!r} has no value")
        return Row(key, value, id_ >> _REVISION_SHIFT)

    def _verify(self, row: LogRow) -> None:
        id_, key, value, kept = row
        if checksum(id_, key, value) != kept:
            raise corrupt(self.path, f"row {id_} of {key!r} does not match its checksum")

    def reading(self) -> _Reading:
        return _Reading(self)

    # Writing

    def write(self, commits: Sequence[Commit]) -> Written:
        """Apply a group in one transaction of SQLite with one fsync: each is judged after what those before it did."""
        if self.damage is not None:
            raise self.damage
        if self.wal_pages > WAL_PAGES_MAX:
            self.checkpoint()
        with self.reading():
            written, rows = self._decide(commits)
        if rows:
            self._append(rows)
            self.recent.add((row[1], row[0]) for row in rows if row[1])
            self.revision += len(written.transactions)
        return written

    def _decide(self, commits: Sequence[Commit]) -> tuple[Written, list[LogRow]]:
        group: dict[str, int] = {}
        written, rows = Written([], []), list[LogRow]()
        revision = self.revision
        for commit in commits:
            if (conflict := self._refusal(commit, group)) is not None:
                written.outcomes.append(conflict)
                continue
            revision += 1
            mine = log_rows(revision, commit)
            rows += mine
            group.update((key, id_) for id_, key, _, _ in mine)
            written.outcomes.append(Committed(revision))
            changes = [Change(key, value, revision) for _, key, value, _ in mine if key]
            written.transactions.append(Transaction(revision, changes))
        return written, rows

    def _refusal(self, commit: Commit, group: dict[str, int]) -> Conflict | None:
        for guard in commit.guards:
            id_ = group.get(guard.key) or self._newest(guard.key)
            found = 0 if id_ & 1 else id_ >> _REVISION_SHIFT
            if found != guard.revision:
                return Conflict(guard.key, guard.revision, found)
        return None

    def _append(self, rows: Sequence[LogRow], facts: Sequence[tuple[str, int]] = ()) -> None:
        committing = False
        try:
            self.db.execute("BEGIN IMMEDIATE")
            self.db.execute(_APPEND, (apsw.carray(tuple([_packed(row) for row in rows])),))
            if facts:
                self.db.executemany("INSERT OR REPLACE INTO meta VALUES(?, ?)", facts)
            committing = True
            self.db.execute("COMMIT")
        except (apsw.Error, OSError, MemoryError) as error:
            self.roll_back()
            raise self.note(translate(error, self.path, committing=committing)) from error

    def rebase(self, revision: int, commit: Commit) -> None:
        """Write `commit` as `revision`, past a hole in the revisions, and forget the history before it. For restore only."""
        rows = log_rows(revision, commit)
        self._append(rows, [("compacted", revision)])
        self.recent.add((row[1], row[0]) for row in rows)
        self.revision = self.compacted = revision

    def roll_back(self) -> None:
        """Back to what was committed. After some errors SQLite has rolled back already."""
        if self.db.in_transaction:
            with translated(self.path):
                self.db.execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Carry the write-ahead log over into the database, so that the log starts again from its beginning."""
        with self.reading():
            self.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self.wal_pages = 0

    def note(self, error: StoreError) -> StoreError:
        if isinstance(error, Corrupt):
            self.damage = error
        return error


class _Reading:
    """Translates errors, and notes damage so that nothing is written after it was seen."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, StoreError):
            self._file.note(error)
        elif isinstance(error, (apsw.Error, OSError, MemoryError)):
            raise self._file.note(translate(error, self._file.path)) from error


def log_rows(revision: int, commit: Commit) -> list[LogRow]:
    """A transaction that changes nothing still takes a revision: an unnamed row keeps its place in the log."""
    ids = range(first_id(revision), first_id(revision + 1), 2)
    rows: list[LogRow] = [
        (id_, key, value, checksum(id_, key, value)) for id_, (key, value) in zip(ids, commit.puts, strict=False)
    ]
    gone = commit.deletes or (() if rows else ("",))
    rows += [(id_ | 1, key, None, checksum(id_ | 1, key, None)) for id_, key in zip(ids[len(rows) :], gone, strict=False)]
    return rows


def _packed(row: LogRow) -> bytes:
    """For `_APPEND`: three numbers of fixed width, the key, and the value up to the end."""
    id_, key, value, kept = row
    name = key.encode()
    return b"%019d%010d%04d%b%b" % (id_, kept, len(name), name, value or b"")


def checksum(id_: int, key: str, value: bytes | None) -> int:
    return crc32(value or b"", crc32(key.encode(), id_ & 0xFFFFFFFF))


def create(path: Path) -> None:
    """An empty database, whole or not at all: made under another name, then put in place."""
    load_checksums()
    if Path(f"{path}-wal").exists():
        raise corrupt(path, "the database is gone while its write-ahead log is still there")
    draft = path.with_name(path.name + ".new")
    with translated(draft):
        make_private(draft)
        db = apsw.Connection(str(draft))
        try:
            db.reserve_bytes(reserve=_RESERVED_BYTES)
            for statement in _create_statements():
                db.execute(statement)
        finally:
            db.close()
        put_in_place(draft, path)


def _create_statements() -> Iterator[str]:
    return chain(
        (f"PRAGMA page_size={_PAGE_BYTES}", "PRAGMA journal_mode=DELETE", "BEGIN"),
        (
            f"PRAGMA application_id={APPLICATION}",
            f"PRAGMA user_version={SCHEMA}",
            "CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID",
            "CREATE TABLE log(id INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB, sum INTEGER NOT NULL)",
            "CREATE TABLE keys(key TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY(key, id)) WITHOUT ROWID",
            "INSERT INTO meta VALUES('compacted', 0), ('swept', 0), ('indexed', 0)",
        ),
        ("COMMIT",),
    )


def check_header(path: Path) -> None:
    """Read who wrote this before SQLite opens it: opening could already change a file that is not ours to change."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise translate(error, path) from error
    if len(header) < _HEADER_BYTES or not header.startswith(SIGN):
        raise corrupt(path, "it is not a SQLite database")
    schema, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    if application != APPLICATION:
        raise corrupt(path, "it is a SQLite database, but not one of Remit's")
    if schema > SCHEMA:
        raise NewerSchema(f"{path} has schema {schema}, this Remit knows {SCHEMA}; nothing was touched: upgrade Remit")


def put_in_place(draft: Path, path: Path) -> None:
    """Rename once the content is on the disk, and make the rename itself last."""
    sync(draft, os.O_RDWR)
    draft.replace(path)
    sync(path.parent, os.O_RDONLY)


def sync(place: Path, flags: int) -> None:
    fd = os.open(place, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load_checksums() -> None:
    """Register SQLite's checksum shim, once a process: every page is then verified as it is read."""
    if "cksmvfs" in apsw.vfs_names():
        return
    db = apsw.Connection(":memory:")
    try:
        sqlite_extra.load(db, "cksumvfs")
    except (sqlite_extra.NotAvailable, LookupError, apsw.Error) as error:
        raise Unavailable(f"this build of apsw lacks SQLite's cksumvfs ({error}); install apsw from PyPI") from error
    finally:
        db.close()
