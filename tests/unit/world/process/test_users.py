"""Default users of work, and work directories that they can reach, tested as the user running the tests."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from remit.agent.setup import AgentDirectory
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
def work_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(isolation, "REACHABLE_DIRECTORY", tmp_path / "rooms")
    return tmp_path / "rooms"


def test_root_agent_runs_work_as_tenant_user_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(isolation, "_is_mapped", lambda _: True)
    assert default_user("") == default_user(USER_PER_TENANT) == USER_PER_TENANT
    assert default_user("daemon") == "daemon"
    assert default_user("root") == "", "only the agent's operator may choose root"
    with pytest.raises(NotStarted, match="user 'no-such-user' does not exist"):
        default_user("no-such-user")


def test_root_of_single_user_namespace_runs_work_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(isolation, "_UID_MAP", tmp_path / "uid_map")
    (tmp_path / "uid_map").write_text("         0       1000          1\n")
    assert default_user("") == ""
    (tmp_path / "uid_map").write_text("         0       1000          1\n         1     100000      65536\n")
    assert default_user("") == "nobody", "too few user ids for one per tenant"
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    assert default_user("") == USER_PER_TENANT


def test_tenant_users_are_unique_and_stable() -> None:
    users_ = [tenant_user(f"tenant-{number}") for number in range(500)]
    assert len(set(users_)) == 500
    assert tenant_user("risk") == "#2088228795", "it depends on the name only, so existing directories keep their owner"
    for user in users_:
        assert UID_FIRST <= int(user[1:]) < UID_FIRST + UID_COUNT < 2**31


def test_unprivileged_agent_runs_work_only_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    own = pwd.getpwuid(1)
    monkeypatch.setattr(os, "geteuid", lambda: own.pw_uid)
    assert default_user("") == default_user(own.pw_name) == ""
    with pytest.raises(NotStarted, match="has no permission to run processes as 'nobody'"):
        default_user("nobody")


@as_root
def test_user_may_be_numeric() -> None:
    assert resolve_user("#1879048192") == ProcessIdentity(1879048192, 1879048192, (1879048192,))
    assert resolve_user("#0") is None
    for wrong in ("#", "#x", "#-1", "# 1", "#٣", "#4294967295", "#" + "9" * 100):
        with pytest.raises(NotStarted):
            resolve_user(wrong)


@as_root
def test_work_directory_below_closed_path_is_elsewhere_and_linked(tmp_path: Path, work_root: Path) -> None:
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    assert closed_parent(closed / "agent" / "work") is not None
    directory = AgentDirectory(closed / "agent")
    directory.create()
    assert directory.work.parent == work_root
    assert (directory.root / "work").readlink() == directory.work
    assert directory.work.stat().st_mode & 0o777 == work_root.stat().st_mode & 0o777 == 0o711
    (directory.work / "u1.1").mkdir()
    directory.create()
    assert (directory.root / "work" / "u1.1").is_dir(), "existing contents are kept"
    directory.remove_work_link()
    assert (directory.root / "work" / "u1.1").is_dir()
    (directory.work / "u1.1").rmdir()
    directory.remove_work_link()
    assert not list(work_root.iterdir()), "the directory elsewhere is removed"
    directory.create()
    assert directory.work.is_dir() and directory.work.parent == work_root


@as_root
def test_existing_work_directory_is_moved_with_contents(tmp_path: Path, work_root: Path) -> None:
    place = tmp_path / "work"
    (place / "u1.1").mkdir(parents=True)
    make_reachable(place)
    assert place.is_symlink()
    assert (place / "u1.1").is_dir()
    assert place.resolve().parent == work_root


@as_root
def test_work_root_owned_by_other_user_is_refused(tmp_path: Path, work_root: Path) -> None:
    work_root.mkdir()
    os.chown(work_root, 1, 1)
    with pytest.raises(AccessDenied, match="not owned by root"):
        make_reachable(tmp_path / "work")


def test_reachable_work_directory_stays_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(isolation, "closed_parent", lambda _: None)
    directory = AgentDirectory(tmp_path / "agent")
    directory.create()
    assert directory.work == tmp_path / "agent" / "work"
    assert not directory.work.is_symlink()
