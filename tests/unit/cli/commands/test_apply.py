"""Tests of the output of `remit plan`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import remit.cli.commands.apply as module
from remit.cli.commands.apply import show_placement
from remit.cli.main import remit
from remit.cli.output.console import console
from remit.model.objects import encode
from remit.model.wire.api_types import PlanAnswer, PlanItem, PlannedPlacement
from tests.unit.proposal.explain.pending_cases import CASES

CREATED = PlanAnswer(revision=812, items=(PlanItem(kind="Workload", name="web", tenant="risk", action="create"),))
WEB = """
apiVersion: remit/v1
kind: Workload
metadata: {name: web, tenant: risk}
spec: {type: service, replicas: 1, template: {command: ["true"], resources: {cpu: "1", memory: 1Gi}}}
"""


def pending(case: str) -> Any:
    return msgspec.json.decode(encode(CASES[case][2]().explained()))


def placement_text(capsys: pytest.CaptureFixture[str], placement: PlannedPlacement) -> str:
    show_placement(console(), placement)
    return capsys.readouterr().out


def test_printed_apply_command_reaches_the_same_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats all flags of the server, also --ca-file."""
    ca_file, manifest = tmp_path / "my ca.pem", tmp_path / "web.yaml"
    ca_file.write_text("")
    manifest.write_text(WEB)
    monkeypatch.setattr(module, "call_server", lambda context, operation: CREATED)
    flags = ["--server", "https://remit:7420", "--tenant", "risk", "--ca-file", str(ca_file)]
    args = ["plan", "-f", str(manifest), *flags]
    result = CliRunner().invoke(remit, args, prog_name="remit", env={"REMIT_TOKEN": "token-of-a-member-unused"})
    command = result.stdout.splitlines()[-1].partition("to apply exactly this plan: ")[2]
    words = shlex.split(command)
    assert words[:6] == ["remit", "apply", "-f", str(manifest), "--if-unchanged", "812"], result.output
    assert sorted(words[6:]) == sorted(flags)


def test_unplaced_replicas_of_a_plan_would_stay_pending(capsys: pytest.CaptureFixture[str]) -> None:
    text = placement_text(capsys, PlannedPlacement(wanted=2, placed=1, nodes={"n1": 1}, waits=pending("room")))
    assert "the rest would stay pending: no_room (not-now)  0 of 3 nodes fit: 3 too little free cpu" in text
    assert "fix:" not in text and "unblocks if" in text


def test_blocked_rollout_of_a_plan_has_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    stops = {"reason": "rollout_blocked", "meaning": "no new replica can be placed", "cure": "add capacity"}
    text = placement_text(capsys, PlannedPlacement(wanted=1, placed=0, stops=stops))
    assert "the rollout would not proceed: rollout_blocked  no new replica can be placed\n      fix: add capacity\n" in text
