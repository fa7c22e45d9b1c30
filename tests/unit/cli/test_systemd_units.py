"""Tests of the systemd units in deploy/systemd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from remit.cli.main import COMMANDS, remit
from tests.tidy.source_tree import ROOT

UNIT_DIRECTORY = ROOT / "deploy" / "systemd"
UNITS = sorted(UNIT_DIRECTORY.glob("*.service"))


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_every_component_has_a_unit() -> None:
    assert [unit.stem for unit in UNITS] == ["remit-agent", "remit-controllers", "remit-scheduler", "remit-server"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_starts_an_existing_command_with_valid_options(unit: Path) -> None:
    (args,) = (line.split() for line in settings(unit)["ExecStart"])
    assert args[0] == "/opt/remit/bin/remit" and args[1] in COMMANDS and f"remit-{args[1]}" == unit.stem
    command = remit.get_command(click.Context(remit), args[1])
    assert command is not None
    known = {name for param in command.params for name in param.opts}
    assert {arg for arg in args if arg.startswith("--")} <= known
    assert args[-1] == "$REMIT_MORE" and "--log-format" in args  # for journald, which rotates logs itself
    named = {name for param in command.params if (name := param.envvar)}
    for line in settings(unit).get("Environment", []):
        for name in re.findall(r"(REMIT_[A-Z_]+)=", line):
            assert name in named or f"${{{name}}}" in " ".join(args)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_restarts_and_has_the_required_hardening(unit: Path) -> None:
    options = settings(unit)
    assert options["Restart"] == ["always"] and int(options["TimeoutStopSec"][0]) >= 20
    if unit.stem == "remit-agent":
        assert options["KillMode"] == ["process"] and options["Delegate"] == ["yes"] and options["OOMPolicy"] == ["continue"]
        forbidden = {
            "RestrictNamespaces",
            "NoNewPrivileges",
            "ProtectControlGroups",
            "PrivateDevices",
            "ProtectSystem",
            "PrivateTmp",
        }
        assert not forbidden & set(options), "these settings break the sandbox and cgroups of replicas"
    else:
        assert options["NoNewPrivileges"] == ["yes"] and options["ProtectSystem"] == ["strict"] and options["User"] == ["remit"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_analyze_accepts_the_units(tmp_path: Path) -> None:
    """Program and user are replaced by existing ones, because the real ones are created at installation."""
    program = tmp_path / "remit"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for unit in UNITS:
        text = unit.read_text().replace("/opt/remit/bin/remit", str(program))
        (tmp_path / unit.name).write_text(re.sub(r"(User|Group)=remit", r"\1=root", text))
    files = [str(tmp_path / unit.name) for unit in UNITS]
    command = ["systemd-analyze", "verify", "--man=no", *files]
    env = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    errors = [line for line in done.stderr.splitlines() if "remit-" in line and "multi-user" not in line]
    assert not errors, "\n".join(errors)
