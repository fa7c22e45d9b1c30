"""As whom does work run that names nobody, and can it reach its room? Asked of this machine, as whoever runs the tests."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from remit.agent.directory import AgentDirectory
from remit.world.interfaces import AccessDenied, NotStarted
from remit.world.process import isolation
from remit.world.process.isolation import (
    UID_COUNT,
    UID_FIRST,
    USER_PER_TENANT,
    closed_parent,
    default_user,
    make_reachable,
    tenant_user,
)
from remit.world.process.spawn import ProcessIdentity, resolve_user

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs work as others")


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(isolation, "REACHABLE_DIRECTORY", tmp_path / "rooms")
    return tmp_path / "rooms"


def test_an_agent_that_is_root_makes_nobody_root_who_does_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(isolation, "_is_mapped", lambda _: True)
    assert default_user("") == default_user(USER_PER_TENANT) == USER_PER_TENANT
    assert default_user("daemon") == "daemon"
    assert default_user("root") == "", "whoever runs the agent may say so"
    with pytest.raises(NotStarted, match="user 'no-such-user' does not exist"):
        default_user("no-such-user")


def test_root_of_a_namespace_that_has_nobody_else_runs_work_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(isolation, "_UID_MAP", tmp_path / "uid_map")
    (tmp_path / "uid_map").write_text("         0       1000          1\n")
    assert default_user("") == ""
    (tmp_path / "uid_map").write_text("         0       1000          1\n         1     100000      65536\n")
    assert default_user("") == "nobody", "there is no room for one of each tenant"
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    assert default_user("") == USER_PER_TENANT


def test_each_tenant_has_a_user_of_its_own__the_same_everywhere_and_nobody_elses() -> None:
    users_ = [tenant_user(f"tenant-{number}") for number in range(500)]
    assert len(set(users_)) == 500
    assert tenant_user("risk") == "#2088228795", "it follows from the name alone: rooms of before stay its own"
    for user in users_:
        assert UID_FIRST <= int(user[1:]) < UID_FIRST + UID_COUNT < 2**31


def test_an_agent_that_is_not_root_runs_work_as_itself_and_as_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    own = pwd.getpwuid(1)
    monkeypatch.setattr(os, "geteuid", lambda: own.pw_uid)
    assert default_user("") == default_user(own.pw_name) == ""
    with pytest.raises(NotStarted, match="has no permission to run processes as 'nobody'"):
        default_user("nobody")


@as_root
def test_a_user_may_be_given_by_number() -> None:
    assert resolve_user("#1879048192") == ProcessIdentity(1879048192, 1879048192, (1879048192,))
    assert resolve_user("#0") is None
    for wrong in ("#", "#x", "#-1", "# 1", "#٣", "#4294967295", "#" + "9" * 100):
        with pytest.raises(NotStarted):
            resolve_user(wrong)


@as_root
def test_below_what_is_closed_rooms_are_elsewhere_and_found_by_a_link(tmp_path: Path, rooms: Path) -> None:
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    assert closed_parent(closed / "agent" / "work") is not None
    directory = AgentDirectory(closed / "agent")
    directory.create()
    assert directory.work.parent == rooms
    assert (directory.root / "work").readlink() == directory.work
    assert directory.work.stat().st_mode & 0o777 == rooms.stat().st_mode & 0o777 == 0o711
    (directory.work / "u1.1").mkdir()
    directory.create()
    assert (directory.root / "work" / "u1.1").is_dir(), "the next start finds what is there"
    directory.remove_work_link()
    assert (directory.root / "work" / "u1.1").is_dir()
    (directory.work / "u1.1").rmdir()
    directory.remove_work_link()
    assert not list(rooms.iterdir()), "nothing is left elsewhere of what has ended"
    directory.create()
    assert directory.work.is_dir() and directory.work.parent == rooms


@as_root
def test_rooms_of_before_move_there_with_all_that_is_in_them(tmp_path: Path, rooms: Path) -> None:
    place = tmp_path / "work"
    (place / "u1.1").mkdir(parents=True)
    make_reachable(place)
    assert place.is_symlink()
    assert (place / "u1.1").is_dir()
    assert place.resolve().parent == rooms


@as_root
def test_no_rooms_are_made_where_somebody_else_may_change_them(tmp_path: Path, rooms: Path) -> None:
    rooms.mkdir()
    os.chown(rooms, 1, 1)
    with pytest.raises(AccessDenied, match="not owned by root"):
        make_reachable(tmp_path / "work")


def test_where_all_may_pass_rooms_stay_in_their_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(isolation, "closed_parent", lambda _: None)
    directory = AgentDirectory(tmp_path / "agent")
    directory.create()
    assert directory.work == tmp_path / "agent" / "work"
    assert not directory.work.is_symlink()
