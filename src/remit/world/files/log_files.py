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
        with _open_directory(directory) as directory_fd:
            file = _open_regular(directory_fd, name, os.O_RDWR)
            if file is None:
                return False
            try:
                size = os.fstat(file).st_size
                if size <= bytes_max:
                    return False
                _rotate(directory_fd, name, file, size, bytes_max, rotated_max)
            finally:
                os.close(file)
            for rotated in _rotated_files(directory_fd, name)[: -rotated_max or None]:
                os.unlink(rotated.name, dir_fd=directory_fd)
        return True

    def span(self, directory: Path, name: str) -> tuple[int, int]:
        with _open_directory(directory) as directory_fd:
            for _ in range(_RETRIES_MAX):
                rotated = _rotated_files(directory_fd, name)
                size = _size(directory_fd, name)
                if rotated == _rotated_files(directory_fd, name):
                    break
        if size is None and not rotated:
            raise FileMissing(
                f"{directory / name} does not exist", "check whether the process was started, or its output has expired"
            )
        base = _end_offset(rotated)
        return rotated[0].start if rotated else base, base + (size or 0)

    def read(self, directory: Path, name: str, start: int, bytes_max: int) -> LogChunk:
        with _open_directory(directory) as directory_fd:
            for _ in range(_RETRIES_MAX):
                rotated = _rotated_files(directory_fd, name)
                chunk = _read(directory_fd, name, rotated, start, bytes_max)
                if rotated == _rotated_files(
                    directory_fd, name
                ):  # otherwise it was rotated meanwhile, and these may be the wrong bytes
                    break
        if chunk is None:
            raise FileMissing(
                f"{directory / name} does not exist", "check whether the process was started, or its output has expired"
            )
        return chunk

    def prune(self, directory: Path, keep: Collection[str], *, files_max: int, bytes_max: int, age_ms_max: int) -> None:
        kept_stems, now_s = frozenset(keep), time.time()
        with _open_directory(directory) as directory_fd:
            ended: dict[str, list[tuple[str, os.stat_result]]] = {}
            for name in _names(directory_fd):
                stem = name.removeprefix(".").partition("@")[0].removesuffix(_COPYING).rpartition(".")[0]
                if stem not in kept_stems:
                    with suppress(FileNotFoundError):
                        ended.setdefault(stem, []).append((name, os.stat(name, dir_fd=directory_fd, follow_symlinks=False)))
            newest = {stem: max(status.st_mtime for _, status in entries) for stem, entries in ended.items()}
            size = 0
            for count, stem in enumerate(sorted(ended, key=lambda name: (-newest[name], name)), start=1):
                size += sum(status.st_size for _, status in ended[stem])
                if count > files_max or size > bytes_max or (now_s - newest[stem]) * 1000 > age_ms_max:
                    for name, _ in ended[stem]:
                        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                            os.unlink(name, dir_fd=directory_fd)


def _rotate(directory_fd: int, name: str, file: int, size: int, bytes_max: int, rotated_max: int) -> None:
    """Copy the end of the file to a rotated file and truncate it. If the disk is full, truncate it without the copy."""
    base = _end_offset(_rotated_files(directory_fd, name))
    skip = max(0, size - (rotated_max + 1) * bytes_max)  # copy no more than is retained in total
    with suppress(OSError):  # skip a leading hole: a writer that does not append leaves one after a truncation
        skip = max(skip, os.lseek(file, skip, os.SEEK_DATA))
    temporary = f".{name}{_COPYING}"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory_fd)
    try:
        copy = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600, dir_fd=directory_fd)
        try:
            _copy(file, copy, skip, size + bytes_max)
        finally:
            os.close(copy)
        os.rename(temporary, f"{name}@{base + skip:016d}", src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory_fd)
    os.ftruncate(file, 0)


def _copy(file: int, copy: int, offset: int, end_max: int) -> None:
    """Copy up to the end, including what is written meanwhile, but not beyond `end_max`."""
    while offset < end_max:
        data = os.pread(file, _COPY_BYTES, offset)
        if not data:
            return
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(copy, remaining) :]
        offset += len(data)


def _read(directory_fd: int, name: str, rotated: list[_RotatedFile], start: int, bytes_max: int) -> LogChunk | None:
    base = _end_offset(rotated)
    for item in rotated:
        if start < item.start + item.size:
            data = _read_bytes(directory_fd, item.name, max(0, start - item.start), bytes_max)
            if data:
                return LogChunk(max(start, item.start), data)
    size = _size(directory_fd, name)
    if size is None:
        return LogChunk(base, b"") if rotated else None
    at = min(max(start, base), base + size)  # `start` beyond the end: the file was truncated by someone else
    return LogChunk(at, _read_bytes(directory_fd, name, at - base, bytes_max))


def _read_bytes(directory_fd: int, name: str, offset: int, bytes_max: int) -> bytes:
    file = _open_regular(directory_fd, name, os.O_RDONLY)
    if file is None:
        return b""
    try:
        return os.pread(file, bytes_max, offset)
    finally:
        os.close(file)


def _size(directory_fd: int, name: str) -> int | None:
    try:
        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _names(directory_fd: int) -> list[str]:
    return os.listdir(directory_fd)


def _rotated_files(directory_fd: int, name: str) -> list[_RotatedFile]:
    files = []
    for entry in _names(directory_fd):
        match = _OUTPUT_FILE.fullmatch(entry)
        if match is not None and match["name"] == name and (size := _size(directory_fd, entry)) is not None:
            files.append(_RotatedFile(int(match["start"]), size, entry))
    return sorted(files)


def _end_offset(rotated: list[_RotatedFile]) -> int:
    return rotated[-1].start + rotated[-1].size if rotated else 0


def _open_regular(directory_fd: int, name: str, mode: int) -> int | None:
    """Open a regular file; return None if there is none of that name."""
    try:
        file = os.open(name, mode | _OPEN_FLAGS, dir_fd=directory_fd)
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
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FileMissing(
            f"cannot open directory {directory} ({reason})", "check whether any process was started there"
        ) from error
    try:
        yield directory_fd
    except OSError as error:
        raise DiskError(
            f"cannot use directory {directory} ({error.strerror or error})", "fix the disk, or use another path"
        ) from error
    finally:
        os.close(directory_fd)


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
        segments = [
            path
            for path in self._directory.iterdir()
            if (match := _SEGMENT_FILE.fullmatch(path.name)) and match["name"] == self._name
        ]
        return sorted(segments)

    def _rotate(self) -> None:
        segments = self._old_segments()
        number = int(segments[-1].name.rpartition(".")[2]) + 1 if segments else 1
        os.fsync(self._file)
        (self._path).rename(self._directory / f"{self._name}.{number:012d}")
        with self._rotating:
            os.close(self._file)
            self._file, self._size = self._open(), 0
        for path in segments[: max(0, len(segments) + 2 - self._segments_max)]:
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
