"""How does a backup become the store again? Blocking, and only while nobody owns the directory; nothing is destroyed.

A restored store is another one than the store that it replaces, although most of its rows are the same: it gets a new
incarnation, an epoch above every earlier writer's, and revisions that were never used. Whoever still holds on to the old one
finds out at its next step. Inside an event loop: `await offload(lambda: restore(...))`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from remit.store.chain import encode_head
from remit.store.faults import corrupt, translated
from remit.store.file import FILE_NAME, File, check_header, first_id, put_in_place, sync
from remit.store.owner import PRIVATE_FILE, Ownership, make_private
from remit.store.protocol import HEAD, PAGE_ROWS_MAX, Commit, Corrupt, StoreError
from remit.store.restored import CHANGED_KEYS_MAX, Replaced, Restored, next_revision, reborn_head


def restore(backup: Path, directory: Path, *, incarnation: str) -> Restored:
    """Put a copy of `backup` in the place of the store in `directory`, which is kept aside as `replaced-N.sqlite`.

    Raises `Owned` if a process runs on it. Until the very last step, one rename, the old store stands as it was; where there
    was none, nothing is left of what could not be restored.
    """
    check_header(backup)  # before anything is made
    owner = Ownership(directory)
    draft = directory / f"{FILE_NAME}.restoring"
    try:
        try:
            _copy(backup, draft)
            restored = _rebase(backup, draft, directory, incarnation)
            with translated(directory):
                _swap(draft, directory, restored.replaced)
            return restored
        finally:
            for name in (draft, _wal(draft)):
                name.unlink(missing_ok=True)
    except BaseException:
        owner.undo()
        raise
    finally:
        owner.release()


def _copy(backup: Path, draft: Path) -> None:
    with translated(draft):
        _wal(draft).unlink(missing_ok=True)
        make_private(draft)
        shutil.copyfile(backup, draft)


def _rebase(backup: Path, draft: Path, directory: Path, incarnation: str) -> Restored:
    try:
        file = File(draft)
    except Corrupt as error:
        raise Corrupt(f"the backup {backup} is damaged ({error}); the store was not touched: use another backup") from error
    try:
        _check_whole(backup, file)
        old_revision, old_head = file.revision, file.head()
        replaced = _look_at_replaced(directory, file)
        head, revision = reborn_head(old_head, replaced, incarnation), next_revision(old_revision, replaced)
        file.rebase(revision, Commit(puts=((HEAD, encode_head(head)),)))
        # The copy must be one file before it is renamed: a write-ahead log left beside it would be lost.
        file.checkpoint()
    finally:
        file.close()
    return Restored(old_revision, old_head, revision, head, replaced)


def _check_whole(backup: Path, file: File) -> None:
    """Every page, once: a restore is rare, and must not put damage in the place of what may be sound."""
    try:
        with file.reading():
            verdict = file.db.execute("PRAGMA quick_check(1)").get
        if verdict != "ok":
            raise corrupt(file.path, str(verdict))
    except Corrupt as error:
        raise Corrupt(f"the backup {backup} is damaged ({error}); the store was not touched: use another backup") from error


def _look_at_replaced(directory: Path, backup: File) -> Replaced | None:
    path = directory / FILE_NAME
    if not path.exists():
        return None
    kept_at = str(_free_name(directory))
    try:
        file = File(path)
    except StoreError as error:
        return Replaced(kept_at, None, None, (), 0, str(error))
    try:
        changed, count = _changed_since(file, backup)
        # Empties the write-ahead log, so that the file kept aside is whole by itself.
        file.checkpoint()
        return Replaced(kept_at, file.revision, file.head(), changed, count, "")
    except StoreError as error:
        return Replaced(kept_at, None, None, (), 0, str(error))
    finally:
        file.close()


def _changed_since(file: File, backup: File) -> tuple[tuple[str, ...], int]:
    """Keys that `file` changed after the backup: at most `CHANGED_KEYS_MAX` of them, and how many there are."""
    after = first_id(backup.revision + 1)
    with file.reading():
        count: int = file.db.execute(
            "SELECT count(DISTINCT key) FROM log WHERE id >= ? AND key NOT IN ('', ?)", (after, HEAD)
        ).get
        found: list[tuple[str]] = list(
            file.db.execute(
                "SELECT DISTINCT key FROM log WHERE id >= ? AND key NOT IN ('', ?) ORDER BY key LIMIT ?",
                (after, HEAD, CHANGED_KEYS_MAX),
            )
        )
    keys = [key for (key,) in found]
    for key in _deleted_and_swept(file, backup):
        count += 1
        if len(keys) < 2 * CHANGED_KEYS_MAX:
            keys.append(key)
    return tuple(sorted(keys)[:CHANGED_KEYS_MAX]), count


def _deleted_and_swept(file: File, backup: File) -> Iterator[str]:
    """A compaction takes deletions out of the log; what the backup has and the store knows nothing of was deleted."""
    if file.compacted <= backup.revision:
        return
    page = backup.range("", "", PAGE_ROWS_MAX, 0)
    while True:
        for row in page.rows:
            if not file.knows(row.key):
                yield row.key
        if not page.more:
            return
        page = backup.range("", page.rows[-1].key, PAGE_ROWS_MAX, 0)


def _swap(draft: Path, directory: Path, replaced: Replaced | None) -> None:
    """First a second name for the old file, then one rename over the first: at no moment is there no store."""
    path = directory / FILE_NAME
    if replaced is not None:
        kept = Path(replaced.kept_at)
        os.link(path, kept)
        kept.chmod(PRIVATE_FILE)  # it may have been made by a Remit that let others read
        # Only a store that could not be read still has a log; it belongs to the file kept aside, never to the new one.
        if _wal(path).exists():
            _wal(path).replace(_wal(kept))
            _wal(kept).chmod(PRIVATE_FILE)
        sync(directory, os.O_RDONLY)
    put_in_place(draft, path)


def _free_name(directory: Path) -> Path:
    number = 1
    while (name := directory / f"replaced-{number}.sqlite").exists():
        number += 1
    return name


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")
