"""Do the units of systemd start what there is, with options that it has, and keep work alive that must outlive them?"""

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

PLACE = ROOT / "deploy" / "systemd"
UNITS = sorted(PLACE.glob("*.service"))


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_every_part_has_a_unit() -> None:
    assert [unit.stem for unit in UNITS] == ["remit-agent", "remit-controllers", "remit-scheduler", "remit-server"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_starts_a_command_with_options_that_it_has(unit: Path) -> None:
    (words,) = (line.split() for line in settings(unit)["ExecStart"])
    assert words[0] == "/opt/remit/bin/remit" and words[1] in COMMANDS and f"remit-{words[1]}" == unit.stem
    command = remit.get_command(click.Context(remit), words[1])
    assert command is not None
    known = {name for one in command.params for name in one.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert words[-1] == "$REMIT_MORE" and "--log-format" in words  # journald takes lines as they are, and rotates them
    named = {name for one in command.params if (name := one.envvar)}
    for line in settings(unit).get("Environment", []):
        for name in re.findall(r"(REMIT_[A-Z_]+)=", line):
            assert name in named or f"${{{name}}}" in " ".join(words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_comes_back_and_lets_go_of_nothing(unit: Path) -> None:
    said = settings(unit)
    assert said["Restart"] == ["always"] and int(said["TimeoutStopSec"][0]) >= 20
    if unit.stem == "remit-agent":
        assert said["KillMode"] == ["process"] and said["Delegate"] == ["yes"] and said["OOMPolicy"] == ["continue"]
        breaks = {
            "RestrictNamespaces",
            "NoNewPrivileges",
            "ProtectControlGroups",
            "PrivateDevices",
            "ProtectSystem",
            "PrivateTmp",
        }
        assert not breaks & set(said), "the sandbox and the cgroups of work need these"
    else:
        assert said["NoNewPrivileges"] == ["yes"] and said["ProtectSystem"] == ["strict"] and said["User"] == ["remit"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units_as_they_are(tmp_path: Path) -> None:
    """With programs and users that are here: those that they name are made when Remit is installed."""
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
    told = [line for line in done.stderr.splitlines() if "remit-" in line and "multi-user" not in line]
    assert not told, "\n".join(told)
