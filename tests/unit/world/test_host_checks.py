"""Host checks: everything missing on a machine is named with its fix, by removing one thing at a time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from remit.world import host_checks
from remit.world.host_checks import HostCheck, run_host_checks
from remit.world.interfaces import BootIdUnavailable, IsolationSupport, NoFreePorts
from remit.world.process.runner import ProcessRunner


def check_named(name: str, data: Path, port: int = 0) -> HostCheck:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    return next(one for one in run_host_checks(data, port) if one.name == name)


def test_complete_machine_fails_no_check(tmp_path: Path) -> None:
    found = run_host_checks(tmp_path, 1)
    assert {one.name for one in found} >= {"clock", "cgroups", "bubblewrap", "API port", "replica ports", "data directory"}
    assert not [one for one in found if one.state == "fail"]
    assert all(one.cure for one in found if one.state != "ok")


def test_missing_bubblewrap_is_reported_with_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.world.host_checks.shutil.which", lambda _: None)
    found = check_named("bubblewrap", tmp_path)
    assert (found.state, found.found) == ("warn", "not installed")
    assert "apt-get install bubblewrap" in found.cure


def test_bubblewrap_without_user_namespaces_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "tool_output", lambda _words, timeout_s: "")
    monkeypatch.setattr("remit.world.host_checks.shutil.which", lambda _: "/usr/bin/bwrap")
    found = check_named("bubblewrap", tmp_path)
    assert found.state == "warn"
    assert "user namespaces" in found.cure


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs work as others")
def test_bubblewrap_working_only_for_root_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where unprivileged users may not create namespaces: the check runs it as such a user."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\ntest $(id -u) = 0 && echo inside\n")
    program.chmod(0o755)
    for place in (tmp_path, *tmp_path.parents):
        if place.owner() == tmp_path.owner() and not place.stat().st_mode & 0o001:
            place.chmod(0o755)  # the unprivileged user must reach it
    monkeypatch.setattr("remit.world.host_checks.shutil.which", lambda _: str(program))
    found = check_named("bubblewrap", tmp_path)
    assert found.state == "warn" and "for an unprivileged user" in found.found
    assert "--work-user root" in found.cure and "userns" in found.cure
    program.write_text("#!/bin/sh\necho inside\n")
    assert check_named("bubblewrap", tmp_path).state == "ok"


def test_cgroups_without_memory_limit_are_reported_with_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support = IsolationSupport("v2", ("cpu", "pids"), "no limit of memory: it is not handed down", sandbox=True)
    monkeypatch.setattr(ProcessRunner, "isolation_support", lambda _self: support)
    found = check_named("cgroups", tmp_path)
    assert (found.state, found.found) == ("warn", "v2: no limit of memory: it is not handed down")
    assert "Delegate=yes" in found.cure


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = check_named("API port", tmp_path, taken.getsockname()[1])
    assert found.state == "warn"
    assert "--listen" in found.cure


def test_no_free_port_for_work_fails_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(_self: object, count: int, /) -> list[int]:
        raise NoFreePorts(f"{count} ports cannot be had", "end what listens")

    monkeypatch.setattr("remit.world.host_checks.KernelPorts.find_free", none)
    found = check_named("replica ports", tmp_path)
    assert (found.state, found.cure) == ("fail", "end what listens")


def test_missing_boot_id_fails_clock_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise BootIdUnavailable("there is no boot id", "mount /proc")

    monkeypatch.setattr(host_checks, "BootClock", none)
    found = host_checks._clock()
    assert (found.state, found.found, found.cure) == ("fail", "there is no boot id", "mount /proc")


@pytest.mark.parametrize(("state", "expected"), [(5, "warn"), (0, "ok"), (-1, "ok")])
def test_unsynchronised_wall_clock_is_warning(monkeypatch: pytest.MonkeyPatch, state: int, expected: str) -> None:
    class Library:
        def __init__(self, _: object) -> None: ...

        def adjtimex(self, _: object) -> int:
            return state

    monkeypatch.setattr("remit.world.host_checks.ctypes.CDLL", Library)
    assert host_checks._wall_clock().state == expected


def test_unwritable_data_directory_fails_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("remit.world.host_checks.tempfile.NamedTemporaryFile", refuses)
    found = check_named("data directory", tmp_path / "not" / "yet")
    assert found.state == "fail"
    assert "read-only file system" in found.found
    assert "--data" in found.cure


def test_low_open_files_limit_is_warning_with_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.world.host_checks.resource.getrlimit", lambda _: (256, 1 << 20))
    found = check_named("open files", tmp_path)
    assert (found.state, found.found) == ("warn", "limit is 256")
    assert "ulimit" in found.cure
