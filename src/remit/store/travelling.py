"""How does a backup travel? One tar: a label that says what it is, then the store's file. Blocking; nothing is restored here.

Whoever takes one apart believes the label only after the file has turned out to be the one that it names, byte for byte.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from remit.store.faults import translated
from remit.store.owner import PRIVATE_FILE, make_private
from remit.store.protocol import Corrupt, NewerSchema

FORMAT: Final = 1
LABEL: Final = "label.json"
STORE: Final = "store.sqlite"
LABEL_BYTES_MAX: Final = 64 << 10
PIECE_BYTES: Final = 256 << 10
END: Final = bytes(2 * tarfile.BLOCKSIZE)


class Label(Struct, frozen=True, kw_only=True):
    """What a backup is of, and where that stood: `taken` is for people. `sha256` and `bytes` are of the store's file."""

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


def digest_of(path: Path) -> tuple[int, str]:
    """How many bytes, and the SHA-256 over them."""
    taken, size = sha256(), 0
    with translated(path), path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            taken.update(piece)
            size += len(piece)
    return size, taken.hexdigest()


def opening(label: Label) -> bytes:
    """What comes before the store's bytes."""
    said = msgspec.json.format(msgspec.json.encode(label)) + b"\n"
    return _header(LABEL, len(said)) + said + _padding(len(said)) + _header(STORE, label.bytes)


def closing(label: Label) -> bytes:
    """What comes after them."""
    return _padding(label.bytes) + END


def _header(name: str, size: int) -> bytes:
    one = tarfile.TarInfo(name)
    one.size, one.mode = size, PRIVATE_FILE
    return one.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def unpack(backup: Path, into: Path) -> Label:
    """The store's file, at `into`, which only its owner may read. Raises `Corrupt` if it is not whole, or none of Remit's, and
    `NewerSchema` if a later Remit made it; then `into` is gone again.
    """
    try:
        with translated(backup), tarfile.open(backup, "r|") as tar:
            return _unpacked(backup, tar, into)
    except tarfile.TarError as error:
        into.unlink(missing_ok=True)
        raise _damaged(backup, f"it is no whole tar: {error}") from None
    except BaseException:
        into.unlink(missing_ok=True)
        raise


def _unpacked(backup: Path, tar: tarfile.TarFile, into: Path) -> Label:
    label = _label(backup, _member(backup, tar, LABEL, LABEL_BYTES_MAX))
    store = _member(backup, tar, STORE, label.bytes)
    make_private(into)
    taken, size = sha256(), 0
    with into.open("wb") as file:
        for piece in _pieces(store):
            taken.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    if (size, taken.hexdigest()) != (label.bytes, label.sha256):
        raise _damaged(backup, f"{size} bytes are not the {label.bytes} that its label names, or not the same ones")
    return label


def _member(backup: Path, tar: tarfile.TarFile, name: str, bytes_max: int) -> IO[bytes]:
    found = tar.next()
    opened = tar.extractfile(found) if found is not None and found.isreg() else None
    if found is None or opened is None or found.name != name or found.size > bytes_max:
        raise _damaged(backup, f"there should be {name} in it, of at most {bytes_max} bytes")
    return opened


def _label(backup: Path, file: IO[bytes]) -> Label:
    said = file.read(LABEL_BYTES_MAX)
    try:
        format_ = msgspec.json.decode(said, type=dict[str, object]).get("format")
        if isinstance(format_, int) and format_ > FORMAT:
            raise NewerSchema(f"{backup} has format {format_}, this Remit knows {FORMAT}; nothing was touched: upgrade Remit")
        return msgspec.json.decode(said, type=Label)
    except msgspec.MsgspecError as error:
        raise _damaged(backup, f"its label cannot be read: {error}") from None


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def _damaged(backup: Path, why: str) -> Corrupt:
    return Corrupt(f"{backup} is no backup, or damaged ({why}); nothing was touched: use another")
