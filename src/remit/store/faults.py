"""What does an error of SQLite mean to a caller of the store? A translation only: nothing is retried or mended here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from remit.store.owner import place_error
from remit.store.protocol import Corrupt, NoSpace, ReadOnly, StoreError, Unanswered, Unavailable

_DAMAGED = (apsw.SQLITE_IOERR_DATA, apsw.SQLITE_IOERR_CORRUPTFS, apsw.SQLITE_IOERR_SHORT_READ)


def corrupt(place: Path, what: str) -> Corrupt:
    return Corrupt(f"{place}: {what}; nothing more is written: stop, keep the file aside, and restore a backup")


def translate(error: Exception, place: Path, *, committing: bool = False) -> StoreError:
    """`committing`: the transaction was being made durable. Only then can it be unknown whether it was applied."""
    if isinstance(error, apsw.FullError):
        return NoSpace(f"{place}: no room to write; nothing was applied: free space there, or compact")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, apsw.FormatError)):
        return corrupt(place, f"what was read is not what was written ({error})")
    if isinstance(error, apsw.IOError):
        code = getattr(error, "extendedresult", 0)
        if code in _DAMAGED:
            return corrupt(place, f"a page does not match its checksum ({error})")
        if committing:
            return Unanswered(
                f"{place}: the disk failed while committing ({error}, code {code}); settle it, and check the disk"
            )
        return Unavailable(f"{place}: the disk failed ({error}, code {code}); nothing was applied: check the disk")
    if isinstance(error, (apsw.ReadOnlyError, apsw.PermissionsError)):
        return ReadOnly(f"{place} cannot be written ({error}); make it writable, or use another --data directory")
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return Unavailable(f"{place} is in use by another program ({error}); close that program, then try again")
    if isinstance(error, (apsw.CantOpenError, apsw.NoMemError, MemoryError)):
        return Unavailable(f"{place} cannot be opened ({error}); nothing was applied: check memory, open files and the disk")
    if isinstance(error, OSError):
        return place_error(error, place)
    return Unavailable(f"{place}: SQLite refused ({type(error).__name__}: {error}); nothing was applied: report this")


@contextmanager
def translated(place: Path) -> Iterator[None]:
    """Around work that commits nothing a caller waits for."""
    try:
        yield
    except (apsw.Error, OSError, MemoryError) as error:
        raise translate(error, place) from error
