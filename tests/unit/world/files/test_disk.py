"""What does the disk say and leave behind when the file system refuses?"""

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
def test_a_write_that_is_refused_leaves_the_old_content_and_nothing_else(
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


def test_a_directory_that_cannot_be_forced_leaves_the_write_unsettled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path, forced = FileDisk(), tmp_path / "file", list[int]()

    def fsync(fd: int) -> None:
        forced.append(fd)
        if len(forced) == 2:
            raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NotDurable):
        disk.write_atomically(path, b"new")
    assert disk.read(path) == b"new"


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    FileDisk().write_atomically(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_the_neighbour_of_a_killed_writer_is_used_again(tmp_path: Path) -> None:
    (tmp_path / ".file.writing").write_bytes(b"much longer than what comes now")
    disk = FileDisk()
    assert disk.list(tmp_path) == ()
    disk.write_atomically(tmp_path / "file", b"short")
    assert disk.read(tmp_path / "file") == b"short"
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_a_second_writer_at_once_is_refused(tmp_path: Path) -> None:
    disk, path = FileDisk(), tmp_path / "file"
    disk.write_atomically(path, b"old")
    with (tmp_path / ".file.writing").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FileBusy):
            disk.write_atomically(path, b"new")
    assert disk.read(path) == b"old"


def test_a_neighbour_that_was_renamed_before_the_lock_is_not_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other writer finishes between our open and our lock: what we have open is then the live file."""
    path, flock = tmp_path / "file", fcntl.flock
    neighbour = tmp_path / ".file.writing"
    neighbour.write_bytes(b"theirs")

    def late(fd: int, how: int) -> None:
        neighbour.rename(path)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileBusy):
        FileDisk().write_atomically(path, b"ours")
    assert path.read_bytes() == b"theirs"


def test_many_writers_in_threads_never_publish_a_mixture(tmp_path: Path) -> None:
    disk, path, written, odd = FileDisk(), tmp_path / "file", list[int](), list[bytes]()

    def write(letter: bytes) -> None:
        for _ in range(50):
            try:
                disk.write_atomically(path, letter * 50_000)
                written.append(1)
            except FileBusy:
                pass
            data = path.read_bytes() if path.exists() else b""
            if data and data != data[:1] * 50_000:
                odd.append(data[:1])

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written
    assert not odd


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    disk = FileDisk()
    disk.make_directory(tmp_path / "made")
    disk.write_atomically(tmp_path / "made" / "file", b"secret")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "made" / "file").stat().st_mode & 0o777 == 0o600


def test_a_file_in_the_way_of_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="not a directory"):
        FileDisk().make_directory(tmp_path / "file")


def test_a_link_in_the_place_of_the_neighbour_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"keep")
    (tmp_path / ".file.writing").symlink_to(tmp_path / "victim")
    with pytest.raises(DiskError):
        FileDisk().write_atomically(tmp_path / "file", b"x")
    assert (tmp_path / "victim").read_bytes() == b"keep"


def test_an_error_inside_a_lock_is_not_taken_for_the_locks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), FileDisk().lock(tmp_path / "lock"):
        raise FileNotFoundError("mine")


def test_to_keep_directories_apart_is_a_hint__what_takes_none_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint_unrelated_subdirectories(tmp_path)
    hint_unrelated_subdirectories(tmp_path)
    hint_unrelated_subdirectories(tmp_path / "absent")
    monkeypatch.setattr(fcntl, "ioctl", refuse(errno.EOPNOTSUPP))
    hint_unrelated_subdirectories(tmp_path)
    assert list(tmp_path.iterdir()) == []
