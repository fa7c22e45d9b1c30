"""Backup archive format, and restore of a backup as a new incarnation.

A backup is a tar with a label and the store's database file. The label is trusted only after the file's size and digest
match it.

A restored store is distinct from the store that it replaces, although most of its rows are the same: it gets a new
incarnation, an epoch above every earlier writer's, and revisions that were never used. A client of the old store notices at
its next request. The replaced store is kept. Restore blocks, and requires that no process owns the directory. Inside an
event loop: `await offload(lambda: restore(...))`.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from remit.store.chain import CHANGED_KEYS_MAX, ReplacedStore, RestoreReport, encode_head, head_after_restore, next_revision
from remit.store.protocol import HEAD, PAGE_ROWS_MAX, Commit, Corrupt, NewerSchema, StoreError
from remit.store.sqlite.database_file import FILE_NAME, DatabaseFile, check_header, first_id, rename_durably, sync
from remit.store.sqlite.directory_lock import (
    PRIVATE_FILE,
    DirectoryLock,
    corrupt_error,
    create_private_file,
    translating_errors,
)


def restore(backup: Path, directory: Path, *, incarnation: str) -> RestoreReport:
    """Replace the store in `directory` by a copy of `backup`. The old store is kept as `replaced-N.sqlite`.

    Raises `StoreInUse` if a process uses the directory. Until the last step, one rename, the old store is unchanged; if
    there was none, a failed restore leaves nothing behind.
    """
    check_header(backup)  # before anything is created
    owner = DirectoryLock(directory)
    temporary = directory / f"{FILE_NAME}.restoring"
    try:
        try:
            _copy(backup, temporary)
            restored = _rebase(backup, temporary, directory, incarnation)
            with translating_errors(directory):
                _swap(temporary, directory, restored.replaced)
            return restored
        finally:
            for name in (temporary, _wal(temporary)):
                name.unlink(missing_ok=True)
    except BaseException:
        owner.undo()
        raise
    finally:
        owner.release()


def _copy(backup: Path, temporary: Path) -> None:
    with translating_errors(temporary):
        _wal(temporary).unlink(missing_ok=True)
        create_private_file(temporary)
        shutil.copyfile(backup, temporary)


def _rebase(backup: Path, temporary: Path, directory: Path, incarnation: str) -> RestoreReport:
    try:
        file = DatabaseFile(temporary)
    except Corrupt as error:
        raise Corrupt(f"the backup {backup} is damaged ({error}); the store was not changed: use another backup") from error
    try:
        _check_pages(backup, file)
        old_revision, old_head = file.revision, file.head()
        replaced = _describe_replaced(directory, file)
        head, revision = head_after_restore(old_head, replaced, incarnation), next_revision(old_revision, replaced)
        file.rebase(revision, Commit(puts=((HEAD, encode_head(head)),)))
        # The copy must be a single file before it is renamed: a write-ahead log next to it would be lost.
        file.checkpoint()
    finally:
        file.close()
    return RestoreReport(old_revision, old_head, revision, head, replaced)


def _check_pages(backup: Path, file: DatabaseFile) -> None:
    """Verify every page: a restore is rare, and must not replace a good store by a damaged one."""
    try:
        with file.reading():
            verdict = file.db.execute("PRAGMA quick_check(1)").get
        if verdict != "ok":
            raise corrupt_error(file.path, str(verdict))
    except Corrupt as error:
        raise Corrupt(f"the backup {backup} is damaged ({error}); the store was not changed: use another backup") from error


def _describe_replaced(directory: Path, backup: DatabaseFile) -> ReplacedStore | None:
    path = directory / FILE_NAME
    if not path.exists():
        return None
    kept_at = str(_free_name(directory))
    try:
        file = DatabaseFile(path)
    except StoreError as error:
        return ReplacedStore(kept_at, None, None, (), 0, str(error))
    try:
        changed, count = _changed_since(file, backup)
        # Empties the write-ahead log, so that the kept file is complete by itself.
        file.checkpoint()
        return ReplacedStore(kept_at, file.revision, file.head(), changed, count, "")
    except StoreError as error:
        return ReplacedStore(kept_at, None, None, (), 0, str(error))
    finally:
        file.close()


def _changed_since(file: DatabaseFile, backup: DatabaseFile) -> tuple[tuple[str, ...], int]:
    """Return keys that `file` changed after the backup, at most `CHANGED_KEYS_MAX`, and their total number."""
    after = first_id(backup.revision + 1)
    with file.reading():
        count: int = file.db.execute(
            "SELECT count(DISTINCT key) FROM log WHERE id >= ? AND key NOT IN ('', ?)", (after, HEAD)
        ).get
        rows: list[tuple[str]] = list(
            file.db.execute(
                "SELECT DISTINCT key FROM log WHERE id >= ? AND key NOT IN ('', ?) ORDER BY key LIMIT ?",
                (after, HEAD, CHANGED_KEYS_MAX),
            )
        )
    keys = [key for (key,) in rows]
    for key in _deleted_and_swept(file, backup):
        count += 1
        if len(keys) < 2 * CHANGED_KEYS_MAX:
            keys.append(key)
    return tuple(sorted(keys)[:CHANGED_KEYS_MAX]), count


def _deleted_and_swept(file: DatabaseFile, backup: DatabaseFile) -> Iterator[str]:
    """Yield keys whose deletion was compacted away: keys that the backup has and the store does not know."""
    if file.compacted <= backup.revision:
        return
    page = backup.range("", "", PAGE_ROWS_MAX, 0)
    while True:
        for row in page.rows:
            if not file.has_version(row.key):
                yield row.key
        if not page.more:
            return
        page = backup.range("", page.rows[-1].key, PAGE_ROWS_MAX, 0)


def _swap(temporary: Path, directory: Path, replaced: ReplacedStore | None) -> None:
    """Link the old file under its new name first, then rename over it: a store exists at every moment."""
    path = directory / FILE_NAME
    if replaced is not None:
        kept_path = Path(replaced.kept_at)
        os.link(path, kept_path)
        kept_path.chmod(PRIVATE_FILE)  # older versions of Remit made it readable by others
        # Only a store that could not be read still has a log. It belongs to the kept file, never to the new one.
        if _wal(path).exists():
            _wal(path).replace(_wal(kept_path))
            _wal(kept_path).chmod(PRIVATE_FILE)
        sync(directory, os.O_RDONLY)
    rename_durably(temporary, path)


def _free_name(directory: Path) -> Path:
    number = 1
    while (name := directory / f"replaced-{number}.sqlite").exists():
        number += 1
    return name


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


FORMAT: Final = 1
LABEL: Final = "label.json"
STORE: Final = "store.sqlite"
LABEL_BYTES_MAX: Final = 64 << 10
READ_BYTES: Final = 256 << 10
END: Final = bytes(2 * tarfile.BLOCKSIZE)


class BackupLabel(Struct, frozen=True, kw_only=True):
    """Describes a backup: its origin and position. `taken` is informational. `sha256` and `bytes` are of the database file."""

    format: int = FORMAT
    version: str
    scope: str
    incarnation: str
    epoch: int
    sequence: int
    revision: int
    taken: str
    bytes: int
    sha256: str


def file_digest(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file."""
    digest, size = sha256(), 0
    with translating_errors(path), path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def archive_head(label: BackupLabel) -> bytes:
    """Return the part of the archive before the database file."""
    encoded = msgspec.json.format(msgspec.json.encode(label)) + b"\n"
    return _header(LABEL, len(encoded)) + encoded + _padding(len(encoded)) + _header(STORE, label.bytes)


def archive_tail(label: BackupLabel) -> bytes:
    """Return the part of the archive after the database file."""
    return _padding(label.bytes) + END


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, PRIVATE_FILE
    return info.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def extract_backup(backup: Path, into: Path) -> BackupLabel:
    """Extract the database file to `into`, readable by its owner only.

    Raises `Corrupt` if the archive is incomplete or not a backup of Remit, and `NewerSchema` if a newer version made it;
    then `into` is removed.
    """
    try:
        with translating_errors(backup), tarfile.open(backup, "r|") as tar:
            return _extract(backup, tar, into)
    except tarfile.TarError as error:
        into.unlink(missing_ok=True)
        raise _damaged(backup, f"not a complete tar: {error}") from None
    except BaseException:
        into.unlink(missing_ok=True)
        raise


def _extract(backup: Path, tar: tarfile.TarFile, into: Path) -> BackupLabel:
    label = _label(backup, _member(backup, tar, LABEL, LABEL_BYTES_MAX))
    store = _member(backup, tar, STORE, label.bytes)
    create_private_file(into)
    digest, size = sha256(), 0
    with into.open("wb") as file:
        for chunk in _pieces(store):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if (size, digest.hexdigest()) != (label.bytes, label.sha256):
        raise _damaged(backup, f"size or digest of the database ({size} bytes) does not match its label ({label.bytes} bytes)")
    return label


def _member(backup: Path, tar: tarfile.TarFile, name: str, bytes_max: int) -> IO[bytes]:
    member = tar.next()
    content = tar.extractfile(member) if member is not None and member.isreg() else None
    if member is None or content is None or member.name != name or member.size > bytes_max:
        raise _damaged(backup, f"it lacks {name} of at most {bytes_max} bytes")
    return content


def _label(backup: Path, file: IO[bytes]) -> BackupLabel:
    encoded = file.read(LABEL_BYTES_MAX)
    try:
        format_ = msgspec.json.decode(encoded, type=dict[str, object]).get("format")
        if isinstance(format_, int) and format_ > FORMAT:
            raise NewerSchema(f"{backup} has format {format_}, this Remit reads {FORMAT}; nothing was changed: upgrade Remit")
        return msgspec.json.decode(encoded, type=BackupLabel)
    except msgspec.MsgspecError as error:
        raise _damaged(backup, f"its label cannot be read: {error}") from None


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(READ_BYTES):
        yield chunk


def _damaged(backup: Path, reason: str) -> Corrupt:
    return Corrupt(f"{backup} is not a backup, or is damaged ({reason}); nothing was changed: use another backup")
