"""Safe unpacking of tar and zip; bounded decompression.

Archives are untrusted, so no entry name is used as a path. A name is walked component by component from the target
directory, each with `O_NOFOLLOW`, so a symbolic link that the archive itself created is never followed. The target of a link
may contain `..` only at its beginning, and not more often than there are real directories above the link; the path that
remains is inside, or is another link with the same property.

Decompression only reads forwards and counts its output, so decompression bombs are noticed on the way. All calls block;
artifacts.py runs them in threads.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from remit.world.concurrency import StopSignal
from remit.world.interfaces import NotUnpacked, UnpackLimits, UnpackResult
from remit.world.process.spawn import resolve_user

READ_MAX: Final = 4 << 20
"""Largest single read. A header that asks for more is forged, and would make the reader hold it all in memory."""
MEMORY_MAX: Final = 256 << 20
"""Memory limit of xz decompression. The header of the archive asks for the amount, and may ask for any."""
_READ_BYTES: Final = 64 << 10


def is_zip(file: IO[bytes]) -> bool:
    return _starts_with(file, b"PK\x03\x04", b"PK\x05\x06")


def is_zstd(file: IO[bytes]) -> bool:
    return _starts_with(file, b"\x28\xb5\x2f\xfd")


def decompressed(file: IO[bytes]) -> IO[bytes]:
    """Return a decompressing reader of `file`, or `file` itself if it is not compressed."""
    if _starts_with(file, b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[return-value]
    if _starts_with(file, b"BZh"):
        return bz2.BZ2File(file, "rb")
    if _starts_with(file, b"\xfd7zXZ\x00"):
        return io.BufferedReader(_XzReader(file), _READ_BYTES)
    return file


def _starts_with(file: IO[bytes], *marks: bytes) -> bool:
    file.seek(0)
    head = file.read(8)
    file.seek(0)
    return head.startswith(marks)


class _XzReader(io.RawIOBase):
    """Like `lzma.LZMAFile`, but with a memory limit. LZMAFile uses as much memory as the file's header asks for."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._decompressor = file, self._new_decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview, /) -> int:  # type: ignore[override]
        while True:
            if self._decompressor.eof:
                data = self._decompressor.unused_data or self._file.read(_READ_BYTES)
                data = data.lstrip(b"\0")
                if not data:
                    return 0
                self._decompressor = self._new_decompressor()
            else:
                data = self._file.read(_READ_BYTES) if self._decompressor.needs_input else b""
                if not data and self._decompressor.needs_input:
                    raise EOFError("the compressed data is truncated")
            try:
                chunk = self._decompressor.decompress(data, len(into))
            except lzma.LZMAError as error:
                raise NotUnpacked(
                    f"the archive cannot be decompressed ({error})", "compress it again, with gzip or xz -6"
                ) from error
            if chunk:
                into[: len(chunk)] = chunk
                return len(chunk)

    @staticmethod
    def _new_decompressor() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_MAX)


class BoundedReader:
    """A forward-only reader that bounds the number of bytes read and allows only forward seeks, which archive readers need."""

    def __init__(self, file: IO[bytes], bytes_max: int, stop: StopSignal) -> None:
        self._file, self._bytes_max, self._stop = file, bytes_max, stop
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= READ_MAX:
            raise NotUnpacked("a header of the archive is too long", "create the archive again")
        self._stop.check()
        chunks, remaining = [], size
        while remaining and (chunk := self._file.read(remaining)):
            chunks.append(chunk)
            remaining -= len(chunk)
        self._position += size - remaining
        if self._position > self._bytes_max:
            raise NotUnpacked(
                f"the archive unpacks to more than {self._bytes_max >> 20} MiB, too much for its size", "make it smaller"
            )
        return b"".join(chunks)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0 or offset < self._position:
            raise NotUnpacked("the archive's entries are not in sequence", "create the archive again")
        while self._position < offset and self.read(min(READ_MAX, offset - self._position)):
            pass
        return self._position


WRITE_BYTES: Final = 256 << 10
TARGET_MAX: Final = 4_096
DIRECTORY_BYTES_MAX: Final = 64 << 20
"""Largest central directory of a zip archive, which is read into memory."""

_RECREATE: Final = "create the archive again from regular files"


class Unpacker:
    """Puts files and links below the directory `into`, with `at` as prefix of all names, owned by `user`."""

    def __init__(self, into: Path, user: str, limits: UnpackLimits, stop: StopSignal, at: Path = Path()) -> None:
        self._into, self._limits, self._stop, self._prefix = into, limits, stop, at.parts
        self._identity = resolve_user(user)
        self._files = self._bytes = 0
        self._bytes_max = limits.bytes_max
        self._root = -1
        self._parent: tuple[tuple[str, ...], int] = ((), -1)
        """The directory of the last entry, kept open because the next entry is often there too."""

    def unpack(self, archive: Path) -> UnpackResult:
        size = archive.stat().st_size
        self._bytes_max = min(self._limits.bytes_max, max(self._limits.ratio_max * size, 64 << 20))
        with self, archive.open("rb") as file:
            try:
                self._directory_fd(self._prefix)
                if is_zip(file):
                    self._unpack_zip(file)
                elif is_zstd(file):
                    raise NotUnpacked(
                        "the archive is compressed with zstd, which is not supported", "compress it with gzip, xz or bzip2"
                    )
                else:
                    self._unpack_tar(file)
            except (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
                raise NotUnpacked(f"the file is not a readable archive ({error})", "create a tar or zip archive") from error
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise NotUnpacked(
                    f"the archive cannot be unpacked ({reason})", "check that it is complete, and the free disk space"
                ) from error
        return UnpackResult(self._files, self._bytes)

    def copy(self, file: Path, to: Path) -> None:
        """Copy one regular file."""
        with self, _translating_errors(to), file.open("rb") as content:
            self._write_file(self._components(str(to)), 0o755, self._read_chunks(content), replaces=False)

    def make_directory(self, to: Path) -> None:
        """Create a directory if it does not exist."""
        with self, _translating_errors(to):
            self._directory_fd(self._components(str(to)))

    def symlink(self, to: Path, target: Path) -> None:
        """Create a symbolic link to any path of the host. The caller has checked that the target is allowed."""
        with self, _translating_errors(to):
            parts = self._components(str(to))
            os.symlink(target, self._name_of(parts), dir_fd=self._directory_fd(parts[:-1]))

    # -- archives --------------------------------------------------------------------------------------------------------------

    def _unpack_tar(self, file: IO[bytes]) -> None:
        meter = BoundedReader(decompressed(file), self._bytes_max + (64 << 20), self._stop)
        with tarfile.open(fileobj=meter, mode="r:", errorlevel=2) as tar:  # type: ignore[call-overload]
            while (entry := tar.next()) is not None:
                self._count_entry()
                parts = self._components(entry.name)
                if entry.isdir():
                    self._make_entry_directory(parts, entry.mode)
                elif entry.isreg():
                    with tar.extractfile(entry) as content:
                        self._write_file(parts, entry.mode, self._read_chunks(content))
                elif entry.issym():
                    self._write_symlink(parts, entry.linkname)
                elif entry.islnk():
                    self._write_hard_link(parts, self._components(entry.linkname))
                else:
                    raise NotUnpacked(f"{_quoted(entry.name)} is a device or a named pipe", _RECREATE)
                tar.members = []  # tarfile keeps the members for random access, which is not used here

    def _unpack_zip(self, file: IO[bytes]) -> None:
        _check_central_directory(file)
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                self._count_entry()
                parts, mode = self._components(entry.filename), entry.external_attr >> 16
                file_type = stat.S_IFMT(mode)
                if entry.flag_bits & 1:
                    raise NotUnpacked(f"{_quoted(entry.filename)} is encrypted", "create the archive again without a password")
                if entry.is_dir():
                    self._make_entry_directory(parts, mode or 0o755)
                elif file_type == stat.S_IFLNK:
                    with archive.open(entry) as content:
                        self._write_symlink(parts, os.fsdecode(content.read(TARGET_MAX + 1)))
                elif file_type in (0, stat.S_IFREG):
                    with archive.open(entry) as content:
                        self._write_file(parts, mode or 0o644, self._read_chunks(content))
                else:
                    raise NotUnpacked(f"{_quoted(entry.filename)} is a device or a named pipe", _RECREATE)

    def _count_entry(self) -> None:
        self._stop.check()
        self._files += 1
        if self._files > self._limits.files_max:
            raise NotUnpacked(f"the archive has more than {self._limits.files_max} entries", "split it into several archives")

    def _read_chunks(self, content: Any) -> Iterator[bytes]:
        while chunk := content.read(WRITE_BYTES):
            self._stop.check()
            self._bytes += len(chunk)
            if self._bytes > self._bytes_max:
                raise NotUnpacked(
                    f"the archive unpacks to more than {self._bytes_max >> 20} MiB, too much for its size", "make it smaller"
                )
            yield chunk

    # -- entries ---------------------------------------------------------------------------------------------------------------

    def _components(self, name: str) -> tuple[str, ...]:
        """Split a name into path components, with the prefix; raise `NotUnpacked` if it leaves the target directory."""
        components = tuple(step for step in name.split("/") if step not in ("", "."))
        if name.startswith("/") or ".." in components or "\0" in name:
            raise NotUnpacked(
                f"{_quoted(name)} is outside of the target directory", "create the archive again with relative names"
            )
        if len(components) > self._limits.depth_max:
            raise NotUnpacked(
                f"{_quoted(name)} is nested deeper than {self._limits.depth_max} directories", "use a flatter directory tree"
            )
        return (*self._prefix, *components)

    def _make_entry_directory(self, parts: tuple[str, ...], mode: int) -> None:
        at = self._directory_fd(parts)
        if parts != self._prefix:
            os.fchmod(at, (mode & 0o755) | 0o700)

    def _write_file(self, parts: tuple[str, ...], mode: int, chunks: Iterator[bytes], *, replaces: bool = True) -> None:
        name, at = self._name_of(parts), self._directory_fd(parts[:-1])
        if replaces:
            _remove_existing(name, at)
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
        try:
            for chunk in chunks:
                remaining = memoryview(chunk)
                while remaining:
                    remaining = remaining[os.write(file, remaining) :]
            if self._identity is not None:
                os.fchown(file, self._identity.uid, self._identity.gid)
            os.fchmod(file, (mode & 0o755) | 0o600)  # no setuid, setgid or sticky bit, and no write permission for others
        finally:
            os.close(file)

    def _write_symlink(self, parts: tuple[str, ...], target: str) -> None:
        name, at = self._name_of(parts), self._directory_fd(parts[:-1])
        if not self._limits.as_root:
            _check_target("/".join(parts), target, len(parts) - 1)
        elif not target or len(target) > TARGET_MAX or "\0" in target:
            raise NotUnpacked(f"{_quoted(name)} is a symbolic link without a valid target", _RECREATE)
        _remove_existing(name, at)
        os.symlink(target, name, dir_fd=at)
        if self._identity is not None:
            os.chown(name, self._identity.uid, self._identity.gid, dir_fd=at, follow_symlinks=False)

    def _write_hard_link(self, parts: tuple[str, ...], of: tuple[str, ...]) -> None:
        """Link to an entry unpacked earlier: never to anything outside, and never through a symbolic link."""
        if not of or parts == of:
            raise NotUnpacked(f"{_quoted('/'.join(parts))} is a hard link without a valid target", _RECREATE)
        source = os.dup(self._directory_fd(of[:-1], make=False))
        try:
            status = os.stat(of[-1], dir_fd=source, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise NotUnpacked(
                    f"{_quoted('/'.join(parts))} is a hard link to something that is not a regular file", _RECREATE
                )
            name, at = self._name_of(parts), self._directory_fd(parts[:-1])
            _remove_existing(name, at)
            os.link(of[-1], name, src_dir_fd=source, dst_dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            raise NotUnpacked(f"{_quoted('/'.join(parts))} is a hard link to a missing entry", _RECREATE) from None
        finally:
            os.close(source)

    def _name_of(self, parts: tuple[str, ...]) -> str:
        if not parts:
            raise NotUnpacked("an entry of the archive has no name", _RECREATE)
        return parts[-1]

    # -- target directories ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        try:
            self._into.mkdir(mode=0o755, exist_ok=True)
            self._root = os.open(self._into, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._own(self._root)
        except OSError as error:
            raise NotUnpacked(f"{self._into} cannot be used ({error.strerror})", "check the free disk space") from error

    def __exit__(self, *_: object) -> None:
        for fd in (self._parent[1], self._root):
            if fd >= 0:
                os.close(fd)
        self._parent, self._root = ((), -1), -1

    def _directory_fd(self, parts: tuple[str, ...], *, make: bool = True) -> int:
        """Return a descriptor of the directory, creating missing components. It is valid until the next call."""
        if not parts:
            return self._root
        if self._parent[0] == parts:
            return self._parent[1]
        at = os.dup(self._root)
        try:
            for step in parts:
                at = self._open_component(at, step, make)
        except OSError as error:
            os.close(at)
            if isinstance(error, NotADirectoryError) or getattr(error, "errno", 0) in _LINK_ERRORS:
                raise NotUnpacked(
                    f"the path of {_quoted('/'.join(parts))} contains a symbolic link or a file", _RECREATE
                ) from error
            raise
        if self._parent[1] >= 0:
            os.close(self._parent[1])
        self._parent = parts, at
        return at

    def _open_component(self, at: int, step: str, make: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            below = os.open(step, flags, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(step, 0o755, dir_fd=at)
            below = os.open(step, flags, dir_fd=at)
            self._own(below)
        os.close(at)
        return below

    def _own(self, directory: int) -> None:
        if self._identity is not None:
            os.fchown(directory, self._identity.uid, self._identity.gid)


@contextmanager
def _translating_errors(to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotUnpacked(f"cannot write {to} ({reason})", "give each artifact and volume a path of its own") from error


_LINK_ERRORS: Final = (20, 40)
"""ENOTDIR and ELOOP: what opening a symbolic link with `O_NOFOLLOW` returns, with and without `O_DIRECTORY`."""


def _remove_existing(name: str, at: int) -> None:
    """Remove an earlier entry of the same name: the later one wins. A directory is never replaced."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def _check_target(name: str, target: str, depth: int) -> None:
    components = [step for step in PurePosixPath(target).parts if step != "."]
    climbs = next((count for count, step in enumerate(components) if step != ".."), len(components))
    outside = target.startswith("/") or climbs > depth or ".." in components[climbs:]
    if (not components and target != ".") or outside or len(target) > TARGET_MAX or "\0" in target:
        raise NotUnpacked(
            f"{_quoted(name)} is a symbolic link out of the target directory", "use relative links that stay inside"
        )


def _check_central_directory(file: IO[bytes]) -> None:
    """Check the length of a zip's central directory before `zipfile` reads all of it into memory."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 65_557))
    tail = file.read(65_557)
    end = tail.rfind(b"PK\x05\x06")
    length = int.from_bytes(tail[end + 12 : end + 16], "little") if end >= 0 else 0
    file.seek(0)
    if length > DIRECTORY_BYTES_MAX:
        raise NotUnpacked("the archive has too many entries", "create a tar archive instead")


def _quoted(name: str) -> str:
    return ascii(name[:120])
