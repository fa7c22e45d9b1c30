"""Size-bounded log files: rotated replica output and append-only log segments.

`FileLogFiles` rotates output files while a process writes to them. A file that is too long is copied to a rotated file and
truncated; its writer has opened it for appending, so it continues at the beginning. Only bytes written between the last
copied byte and the truncation are lost. A rotated file is named after the offset of its first byte in everything ever
written (`a.out@0000000000001024`), so readers keep their position over any number of rotations and restarts.

Replicas may own these files or run as our user. So this code never follows a symbolic link, never blocks on a pipe, and
never copies without a bound.

`FileAppendLog` (the audit log) writes lines to segments of bounded size and deletes the oldest. A line is in the kernel's
page cache before `add` returns, so killing the process loses nothing; `sync` makes it durable.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from remit.world.files.disk import translating_os_errors
from remit.world.interfaces import DiskError, FileMissing, LogChunk

_OUTPUT_FILE: Final = re.compile(r"(?P<name>.+)@(?P<start>[0-9]{16})")
_COPYING: Final = ".copying"
_COPY_BYTES: Final = 1 << 20
_RETRIES_MAX: Final = 8
"""How often a reader retries because the file was rotated while it was read."""
_OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _RotatedFile(NamedTuple):
    start: int
    size: int
    name: str


class FileLogFiles:
    """Log files on the file system of this machine."""

    def rotate(self, directory: Path, name: str, *, bytes_max: int, rotated_max: int) -> bool:
        with _open_directory(directory) as place:
            file = _open_regular(place, name, os.O_RDWR)
            if file is None:
                return False
            try:
                size = os.fstat(file).st_size
                if size <= bytes_max:
                    return False
                _rotate(place, name, file, size, bytes_max, rotated_max)
            finally:
                os.close(file)
            for piece in _rotated_files(place, name)[: -rotated_max or None]:
                os.unlink(piece.name, dir_fd=place)
        return True

    def span(self, directory: Path, name: str) -> tuple[int, int]:
        with _open_directory(directory) as place:
            for _ in range(_RETRIES_MAX):
                older = _rotated_files(place, name)
                size = _size(place, name)
                if older == _rotated_files(place, name):
                    break
        if size is None and not older:
            raise FileMissing(
                f"{directory / name} does not exist", "check whether the process was started, or its output has expired"
            )
        base = _end_offset(older)
        return older[0].start if older else base, base + (size or 0)

    def read(self, directory: Path, name: str, start: int, bytes_max: int) -> LogChunk:
        with _open_directory(directory) as place:
            for _ in range(_RETRIES_MAX):
                older = _rotated_files(place, name)
                found = _read(place, name, older, start, bytes_max)
                if older == _rotated_files(place, name):  # otherwise it was rotated meanwhile, and these may be the wrong bytes
                    break
        if found is None:
            raise FileMissing(
                f"{directory / name} does not exist", "check whether the process was started, or its output has expired"
            )
        return found

    def prune(self, directory: Path, keep: Collection[str], *, files_max: int, bytes_max: int, age_ms_max: int) -> None:
        kept, now_s = frozenset(keep), time.time()
        with _open_directory(directory) as place:
            ended: dict[str, list[tuple[str, os.stat_result]]] = {}
            for name in _names(place):
                beginning = name.removeprefix(".").partition("@")[0].removesuffix(_COPYING).rpartition(".")[0]
                if beginning not in kept:
                    with suppress(FileNotFoundError):
                        ended.setdefault(beginning, []).append((name, os.stat(name, dir_fd=place, follow_symlinks=False)))
            newest = {beginning: max(found.st_mtime for _, found in those) for beginning, those in ended.items()}
            size = 0
            for count, beginning in enumerate(sorted(ended, key=lambda one: (-newest[one], one)), start=1):
                size += sum(found.st_size for _, found in ended[beginning])
                if count > files_max or size > bytes_max or (now_s - newest[beginning]) * 1000 > age_ms_max:
                    for name, _ in ended[beginning]:
                        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                            os.unlink(name, dir_fd=place)


def _rotate(place: int, name: str, file: int, size: int, bytes_max: int, older: int) -> None:
    """Copy the end of the file to a rotated file and truncate it. If the disk is full, truncate it without the copy."""
    base = _end_offset(_rotated_files(place, name))
    skip = max(0, size - (older + 1) * bytes_max)  # copy no more than is retained in total
    with suppress(OSError):  # skip a leading hole: a writer that does not append leaves one after a truncation
        skip = max(skip, os.lseek(file, skip, os.SEEK_DATA))
    draft = f".{name}{_COPYING}"
    with suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=place)
    try:
        copy = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600, dir_fd=place)
        try:
            _copy(file, copy, skip, size + bytes_max)
        finally:
            os.close(copy)
        os.rename(draft, f"{name}@{base + skip:016d}", src_dir_fd=place, dst_dir_fd=place)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=place)
    os.ftruncate(file, 0)


def _copy(file: int, copy: int, offset: int, end_max: int) -> None:
    """Copy up to the end, including what is written meanwhile, but not beyond `end_max`."""
    while offset < end_max:
        data = os.pread(file, _COPY_BYTES, offset)
        if not data:
            return
        left = memoryview(data)
        while left:
            left = left[os.write(copy, left) :]
        offset += len(data)


def _read(place: int, name: str, older: list[_RotatedFile], start: int, bytes_max: int) -> LogChunk | None:
    base = _end_offset(older)
    for piece in older:
        if start < piece.start + piece.size:
            data = _read_bytes(place, piece.name, max(0, start - piece.start), bytes_max)
            if data:
                return LogChunk(max(start, piece.start), data)
    size = _size(place, name)
    if size is None:
        return LogChunk(base, b"") if older else None
    at = min(max(start, base), base + size)  # `start` beyond the end: the file was truncated by someone else
    return LogChunk(at, _read_bytes(place, name, at - base, bytes_max))


def _read_bytes(place: int, name: str, offset: int, bytes_max: int) -> bytes:
    file = _open_regular(place, name, os.O_RDONLY)
    if file is None:
        return b""
    try:
        return os.pread(file, bytes_max, offset)
    finally:
        os.close(file)


def _size(place: int, name: str) -> int | None:
    try:
        found = os.stat(name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _names(place: int) -> list[str]:
    return os.listdir(place)


def _rotated_files(place: int, name: str) -> list[_RotatedFile]:
    found = []
    for entry in _names(place):
        match = _OUTPUT_FILE.fullmatch(entry)
        if match is not None and match["name"] == name and (size := _size(place, entry)) is not None:
            found.append(_RotatedFile(int(match["start"]), size, entry))
    return sorted(found)


def _end_offset(older: list[_RotatedFile]) -> int:
    return older[-1].start + older[-1].size if older else 0


def _open_regular(place: int, name: str, mode: int) -> int | None:
    """Open a regular file; return None if there is none of that name."""
    try:
        file = os.open(name, mode | _OPEN_FLAGS, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return None
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    return None


@contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    try:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise FileMissing(
            f"cannot open directory {directory} ({why})", "check whether any process was started there"
        ) from error
    try:
        yield place
    except OSError as error:
        raise DiskError(
            f"cannot use directory {directory} ({error.strerror or error})", "fix the disk, or use another path"
        ) from error
    finally:
        os.close(place)


SEGMENT_BYTES: Final = 8 << 20
SEGMENTS_MAX: Final = 8
_READ_BYTES: Final = 1 << 20
_MODE: Final = 0o600
_SEGMENT_FILE: Final = re.compile(r"(?P<name>.+)\.(?P<number>[0-9]{12})")


class FileAppendLog:
    """Append-only log in segments. `name` is the active segment; older ones have a numeric suffix, the newest the highest."""

    def __init__(
        self, directory: Path, name: str, *, segment_bytes: int = SEGMENT_BYTES, segments_max: int = SEGMENTS_MAX
    ) -> None:
        self._directory, self._name, self._path = directory, name, directory / name
        self._segment_bytes, self._segments_max = segment_bytes, segments_max
        self._unsynced = False
        self._rotating = threading.Lock()
        with translating_os_errors(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._open()
            self._size = os.fstat(self._file).st_size
            self._terminate_last_line()

    def add(self, line: bytes) -> None:
        """Append one complete line. Raises `DiskError`; then nothing was written, or a partial line that is terminated."""
        with translating_os_errors(self._path):
            if self._size + len(line) > self._segment_bytes and self._size:
                self._rotate()
            written = os.write(self._file, line)
            self._size, self._unsynced = self._size + written, True
            if written < len(line):
                os.write(self._file, b"\n")
                raise OSError(28, "no space for a complete line")

    def sync(self) -> None:
        """Make everything that was added before this call durable. Can be called from another thread."""
        if not self._unsynced:
            return
        self._unsynced = False
        with translating_os_errors(self._path):
            with self._rotating:
                file = os.dup(self._file)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def read_backwards(self) -> Iterator[bytes]:
        """Yield all retained lines, newest first. Can be called from another thread than `add`."""
        for path in (self._directory / self._name, *reversed(self._old_segments())):
            with suppress(FileNotFoundError), translating_os_errors(path):
                yield from _lines_backwards(path)

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._directory / self._name, flags, _MODE)

    def _terminate_last_line(self) -> None:
        """Terminate a last line that a killed process left incomplete."""
        if self._size:
            with (self._path).open("rb") as file:
                file.seek(self._size - 1)
                if file.read(1) != b"\n":
                    self._size += os.write(self._file, b"\n")

    def _old_segments(self) -> list[Path]:
        found = [
            path
            for path in self._directory.iterdir()
            if (match := _SEGMENT_FILE.fullmatch(path.name)) and match["name"] == self._name
        ]
        return sorted(found)

    def _rotate(self) -> None:
        older = self._old_segments()
        number = int(older[-1].name.rpartition(".")[2]) + 1 if older else 1
        os.fsync(self._file)
        (self._path).rename(self._directory / f"{self._name}.{number:012d}")
        with self._rotating:
            os.close(self._file)
            self._file, self._size = self._open(), 0
        for path in older[: max(0, len(older) + 2 - self._segments_max)]:
            path.unlink(missing_ok=True)


def _lines_backwards(path: Path) -> Iterator[bytes]:
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
