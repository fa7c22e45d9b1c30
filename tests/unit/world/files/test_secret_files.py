"""Secret files in tmpfs: private, complete, removed on time, and never in a directory of another user."""

from __future__ import annotations

import os
import pwd
from pathlib import Path, PurePosixPath

import pytest

from remit.world.files.secret_files import TMPFS, TmpfsSecretFiles
from remit.world.interfaces import DiskError

X, Y = PurePosixPath("a/x"), PurePosixPath("a/b/y")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    place = tmp_path / "shm"
    place.mkdir(mode=0o1777)
    return place


def secret_files(tmp_path: Path, memory: Path) -> TmpfsSecretFiles:
    return TmpfsSecretFiles(tmp_path / "agent", tmp_path / "agent" / "vault", memory)


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o777


def test_secret_files_are_private_and_second_set_replaces_first(tmp_path: Path, memory: Path) -> None:
    one = secret_files(tmp_path, memory)
    place = one.put("u1.1", {X: b"1", Y: b"2"}, "")
    assert place == one.path_of("u1.1") and place.is_relative_to(memory)
    assert ((place / X).read_bytes(), (place / Y).read_bytes()) == (b"1", b"2")
    assert [mode(path) for path in (place / X, place / "a", place / "a/b", place)] == [0o400, 0o700, 0o700, 0o700]
    assert mode(place.parent) == (0o711 if os.geteuid() == 0 else 0o700)
    one.put("u1.1", {X: b"3"}, "")
    assert (place / X).read_bytes() == b"3" and not (place / Y).exists()
    assert one.names() == ("u1.1",) and one.has("u1.1")
    one.remove("u1.1")
    one.remove("u1.1")
    assert not one.has("u1.1") and one.names() == () and not list(place.parent.iterdir())


def test_interrupted_put_or_remove_is_found_afterwards(tmp_path: Path, memory: Path) -> None:
    one = secret_files(tmp_path, memory)
    root = one.put("u1.1", {X: b"1"}, "").parent
    (root / "u2.1.making").mkdir()
    (root / "u3.1.going").mkdir()
    assert one.names() == ("u1.1", "u2.1", "u3.1")
    one.put("u2.1", {X: b"2"}, "")
    one.remove("u3.1")
    assert sorted(path.name for path in root.iterdir()) == ["u1.1", "u2.1"]
    one.destroy()
    assert not root.exists()


def test_two_agents_have_separate_directories(tmp_path: Path, memory: Path) -> None:
    one, other = secret_files(tmp_path, memory), TmpfsSecretFiles(tmp_path / "b", tmp_path / "b" / "vault", memory)
    one.put("u1.1", {X: b"1"}, "")
    assert other.names() == () and secret_files(tmp_path, memory).names() == ("u1.1",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another's directory")
def test_directory_of_another_user_or_symlink_is_refused(tmp_path: Path, memory: Path) -> None:
    one = secret_files(tmp_path, memory)
    root = one.path_of("x").parent
    root.mkdir()
    os.chown(root, 65534, 65534)
    with pytest.raises(DiskError, match="owned by another user"):
        one.put("u1.1", {X: b"1"}, "")
    root.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root.symlink_to(elsewhere)
    with pytest.raises(DiskError):
        one.put("u1.1", {X: b"1"}, "")
    assert not list(elsewhere.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_secret_files_belong_to_work_user(tmp_path: Path, memory: Path) -> None:
    user = pwd.getpwnam("nobody")
    place = secret_files(tmp_path, memory).put("u1.1", {Y: b"2"}, "nobody")
    assert {path.stat().st_uid for path in (place, place / "a", place / "a/b", place / Y)} == {user.pw_uid}


def test_without_tmpfs_files_are_on_disk_and_reported_so(tmp_path: Path) -> None:
    one = secret_files(tmp_path, tmp_path / "nothing")
    assert not one.in_memory
    assert one.put("u1.1", {X: b"1"}, "") == tmp_path / "agent" / "vault" / "u1.1"


def test_tmpfs_is_used_where_writable(tmp_path: Path) -> None:
    assert TmpfsSecretFiles(tmp_path, tmp_path).in_memory == os.access(TMPFS, os.W_OK)
