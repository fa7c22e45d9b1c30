"""What is inside of compressed bytes? Read forwards, and counted: what swells without end is noticed on the way."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from typing import IO, Final

from remit.world.carriage import NotUnpacked
from remit.world.stopping import Stop

READ_MAX: Final = 4 << 20
"""No honest reader asks for more at once; one that was told to by a header would have it all in memory."""
MEMORY_MAX: Final = 256 << 20
"""So much may reading of an xz archive take: its maker says how much, and could say anything."""
_PIECE: Final = 64 << 10


def is_zip(file: IO[bytes]) -> bool:
    return _begins(file, b"PK\x03\x04", b"PK\x05\x06")


def is_zstd(file: IO[bytes]) -> bool:
    return _begins(file, b"\x28\xb5\x2f\xfd")


def expanded(file: IO[bytes]) -> IO[bytes]:
    """The bytes inside, or the file itself if it is not compressed."""
    if _begins(file, b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[return-value]
    if _begins(file, b"BZh"):
        return bz2.BZ2File(file, "rb")
    if _begins(file, b"\xfd7zXZ\x00"):
        return io.BufferedReader(_Xz(file), _PIECE)
    return file


def _begins(file: IO[bytes], *marks: bytes) -> bool:
    file.seek(0)
    found = file.read(8)
    file.seek(0)
    return found.startswith(marks)


class _Xz(io.RawIOBase):
    """As `lzma.LZMAFile`, which lets the file say how much memory it takes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._inner = file, self._anew()

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview, /) -> int:  # type: ignore[override]
        while True:
            if self._inner.eof:
                left = self._inner.unused_data or self._file.read(_PIECE)
                left = left.lstrip(b"\0")
                if not left:
                    return 0
                self._inner = self._anew()
            else:
                left = self._file.read(_PIECE) if self._inner.needs_input else b""
                if not left and self._inner.needs_input:
                    raise EOFError("it ends in the middle")
            try:
                piece = self._inner.decompress(left, len(into))
            except lzma.LZMAError as error:
                raise NotUnpacked(f"it cannot be decompressed ({error})", "compress it anew, with gzip or xz -6") from error
            if piece:
                into[: len(piece)] = piece
                return len(piece)

    @staticmethod
    def _anew() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_MAX)


class Meter:
    """A file that is read forwards, and not for ever. It seeks as a reader of archives does: onwards, over what it skips."""

    def __init__(self, file: IO[bytes], bytes_max: int, stop: Stop) -> None:
        self._file, self._bytes_max, self._stop = file, bytes_max, stop
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= READ_MAX:
            raise NotUnpacked("a head in it is far too long", "make it anew")
        self._stop.check()
        pieces, left = [], size
        while left and (piece := self._file.read(left)):
            pieces.append(piece)
            left -= len(piece)
        self._at += size - left
        if self._at > self._bytes_max:
            raise NotUnpacked(
                f"it comes to more than {self._bytes_max >> 20} MiB, which is too much for its size", "make it smaller"
            )
        return b"".join(pieces)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0 or offset < self._at:
            raise NotUnpacked("its parts are not one after another", "make it anew")
        while self._at < offset and self.read(min(READ_MAX, offset - self._at)):
            pass
        return self._at
