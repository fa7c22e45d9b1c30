"""Are files that no disk may keep for their owner alone, whole, gone when they should be, and never in another's directory?"""

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


def vault(tmp_path: Path, memory: Path) -> TmpfsSecretFiles:
    return TmpfsSecretFiles(tmp_path / "agent", tmp_path / "agent" / "vault", memory)


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o777


def test_files_are_for_their_owner_alone_and_a_second_set_replaces_the_first(tmp_path: Path, memory: Path) -> None:
    one = vault(tmp_path, memory)
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


def test_whoever_was_killed_half_way_leaves_nothing_that_is_not_found(tmp_path: Path, memory: Path) -> None:
    one = vault(tmp_path, memory)
    root = one.put("u1.1", {X: b"1"}, "").parent
    (root / "u2.1.making").mkdir()
    (root / "u3.1.going").mkdir()
    assert one.names() == ("u1.1", "u2.1", "u3.1")
    one.put("u2.1", {X: b"2"}, "")
    one.remove("u3.1")
    assert sorted(path.name for path in root.iterdir()) == ["u1.1", "u2.1"]
    one.destroy()
    assert not root.exists()


def test_two_agents_have_two_vaults_and_one_finds_its_own_again(tmp_path: Path, memory: Path) -> None:
    one, other = vault(tmp_path, memory), TmpfsSecretFiles(tmp_path / "b", tmp_path / "b" / "vault", memory)
    one.put("u1.1", {X: b"1"}, "")
    assert other.names() == () and vault(tmp_path, memory).names() == ("u1.1",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another's directory")
def test_nothing_is_put_where_somebody_else_was_first(tmp_path: Path, memory: Path) -> None:
    one = vault(tmp_path, memory)
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
def test_they_belong_to_the_user_that_the_work_runs_as(tmp_path: Path, memory: Path) -> None:
    user = pwd.getpwnam("nobody")
    place = vault(tmp_path, memory).put("u1.1", {Y: b"2"}, "nobody")
    assert {path.stat().st_uid for path in (place, place / "a", place / "a/b", place / Y)} == {user.pw_uid}


def test_without_memory_they_are_kept_below_and_that_is_told(tmp_path: Path) -> None:
    one = vault(tmp_path, tmp_path / "nothing")
    assert not one.in_memory
    assert one.put("u1.1", {X: b"1"}, "") == tmp_path / "agent" / "vault" / "u1.1"


def test_this_machine_has_memory_for_them(tmp_path: Path) -> None:
    assert TmpfsSecretFiles(tmp_path, tmp_path).in_memory == os.access(TMPFS, os.W_OK)
