"""How is a file kept that is only ever added to? In pieces of a size, the oldest of which go; what is in it is not known here.

A line that was added is with the system before anybody is told: killing the process loses none. `settle` forces it to the disk.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from remit.world.disk import told

PIECE_BYTES: Final = 8 << 20
PIECES: Final = 8
_READ_BYTES: Final = 1 << 20
_MODE: Final = 0o600
_PIECE: Final = re.compile(r"(?P<name>.+)\.(?P<number>[0-9]{12})")


class FileTrail:
    """`name` is the piece that is written; the older ones stand beside it with a number, the highest the youngest."""

    def __init__(self, directory: Path, name: str, *, piece_bytes: int = PIECE_BYTES, pieces: int = PIECES) -> None:
        self._directory, self._name, self._path = directory, name, directory / name
        self._piece_bytes, self._pieces = piece_bytes, pieces
        self._unsettled = False
        self._turning = threading.Lock()
        with told(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._opened()
            self._size = os.fstat(self._file).st_size
            self._mend()

    def add(self, line: bytes) -> None:
        """One whole line. Raises `DiskError`; then nothing of it is there, or a part that the next one is parted from."""
        with told(self._path):
            if self._size + len(line) > self._piece_bytes and self._size:
                self._turn()
            written = os.write(self._file, line)
            self._size, self._unsettled = self._size + written, True
            if written < len(line):
                os.write(self._file, b"\n")
                raise OSError(28, "no room for a whole line")

    def settle(self) -> None:
        """Nothing that was added before this is lost with the machine. It may be asked from another thread."""
        if not self._unsettled:
            return
        self._unsettled = False
        with told(self._path):
            with self._turning:
                file = os.dup(self._file)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def backwards(self) -> Iterator[bytes]:
        """Every line that is kept, the newest first. It may be asked from another thread than the one that adds."""
        for path in (self._directory / self._name, *reversed(self._older())):
            with suppress(FileNotFoundError), told(path):
                yield from _backwards(path)

    def close(self) -> None:
        os.close(self._file)

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._directory / self._name, flags, _MODE)

    def _mend(self) -> None:
        """The last line of a process that was killed may be cut short: it ends here."""
        if self._size:
            with (self._path).open("rb") as file:
                file.seek(self._size - 1)
                if file.read(1) != b"\n":
                    self._size += os.write(self._file, b"\n")

    def _older(self) -> list[Path]:
        found = [
            path for path in self._directory.iterdir() if (match := _PIECE.fullmatch(path.name)) and match["name"] == self._name
        ]
        return sorted(found)

    def _turn(self) -> None:
        older = self._older()
        number = int(older[-1].name.rpartition(".")[2]) + 1 if older else 1
        os.fsync(self._file)
        (self._path).rename(self._directory / f"{self._name}.{number:012d}")
        with self._turning:
            os.close(self._file)
            self._file, self._size = self._opened(), 0
        for path in older[: max(0, len(older) + 2 - self._pieces)]:
            path.unlink(missing_ok=True)


def _backwards(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        at, rest = file.seek(0, os.SEEK_END), b""
        while at > 0:
            start = max(0, at - _READ_BYTES)
            file.seek(start)
            lines = (file.read(at - start) + rest).split(b"\n")
            at, rest = start, lines[0]
            yield from (line for line in reversed(lines[1:]) if line)
        if rest:
            yield rest
