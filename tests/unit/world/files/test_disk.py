"""File disk: errors and remaining files when the file system refuses an operation."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remit.world.files.disk import FileDisk, hint_unrelated_subdirectories
from remit.world.interfaces import AccessDenied, DiskError, DiskFull, FileBusy, NotDurable


def refuse(code: int) -> Callable[..., Any]:
    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refused


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("write", errno.ENOSPC, DiskFull),
        ("write", errno.EDQUOT, DiskFull),
        ("fsync", errno.EIO, DiskError),
        ("ftruncate", errno.EROFS, AccessDenied),
        ("rename", errno.EACCES, AccessDenied),
    ],
)
def test_refused_write_keeps_old_content_and_leaves_no_temporary_file(
    call: str, code: int, kind: type[DiskError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = FileDisk(), tmp_path / "file"
    disk.write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse(code))
        with pytest.raises(kind) as caught:
            disk.write_atomically(path, b"new")
    assert not isinstance(caught.value, NotDurable)
    assert caught.value.cure
    assert disk.read(path) == b"old"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208 - also what list() would hide


def test_unsynced_directory_makes_write_not_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path, synced = FileDisk(), tmp_path / "file", list[int]()

    def fsync(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 2:
            raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NotDurable):
        disk.write_atomically(path, b"new")
    assert disk.read(path) == b"new"


def test_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    FileDisk().write_atomically(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_temporary_file_of_killed_writer_is_reused(tmp_path: Path) -> None:
    (tmp_path / ".file.writing").write_bytes(b"much longer than what comes now")
    disk = FileDisk()
    assert disk.list(tmp_path) == ()
    disk.write_atomically(tmp_path / "file", b"short")
    assert disk.read(tmp_path / "file") == b"short"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_concurrent_writer_is_refused(tmp_path: Path) -> None:
    disk, path = FileDisk(), tmp_path / "file"
    disk.write_atomically(path, b"old")
    with (tmp_path / ".file.writing").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FileBusy):
            disk.write_atomically(path, b"new")
    assert disk.read(path) == b"old"


def test_temporary_file_renamed_before_lock_is_not_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other writer finishes between open and lock: the open file is then the live one."""
    path, flock = tmp_path / "file", fcntl.flock
    temporary = tmp_path / ".file.writing"
    temporary.write_bytes(b"theirs")

    def late(fd: int, how: int) -> None:
        temporary.rename(path)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileBusy):
        FileDisk().write_atomically(path, b"ours")
    assert path.read_bytes() == b"theirs"


def test_concurrent_writers_never_publish_mixed_content(tmp_path: Path) -> None:
    disk, path, written, mixed = FileDisk(), tmp_path / "file", list[int](), list[bytes]()

    def write(letter: bytes) -> None:
        for _ in range(50):
            try:
                disk.write_atomically(path, letter * 50_000)
                written.append(1)
            except FileBusy:
                pass
            data = path.read_bytes() if path.exists() else b""
            if data and data != data[:1] * 50_000:
                mixed.append(data[:1])

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written
    assert not mixed


def test_files_are_private_to_owner(tmp_path: Path) -> None:
    disk = FileDisk()
    disk.make_directory(tmp_path / "made")
    disk.write_atomically(tmp_path / "made" / "file", b"secret")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "made" / "file").stat().st_mode & 0o777 == 0o600


def test_file_in_place_of_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="not a directory"):
        FileDisk().make_directory(tmp_path / "file")


def test_symlink_in_place_of_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"keep")
    (tmp_path / ".file.writing").symlink_to(tmp_path / "victim")
    with pytest.raises(DiskError):
        FileDisk().write_atomically(tmp_path / "file", b"x")
    assert (tmp_path / "victim").read_bytes() == b"keep"


def test_error_inside_lock_is_not_reported_as_lock_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), FileDisk().lock(tmp_path / "lock"):
        raise FileNotFoundError("mine")


def test_directory_placement_hint_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hint_unrelated_subdirectories(tmp_path)
    hint_unrelated_subdirectories(tmp_path)
    hint_unrelated_subdirectories(tmp_path / "absent")
    monkeypatch.setattr(fcntl, "ioctl", refuse(errno.EOPNOTSUPP))
    hint_unrelated_subdirectories(tmp_path)
    assert list(tmp_path.iterdir()) == []
