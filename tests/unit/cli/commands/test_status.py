"""Tests of the output and exit code of `remit status`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

import remit.cli.commands.status as status
from remit.cli.main import remit
from remit.model.wire.api_types import IdleLease, ScopeStatus

HEALTHY = ScopeStatus(scope="local", incarnation="i1", leader="s1", epoch=2, revision=7, nodes={"ready": 3}, version="0.1.0")
FIX = "start `remit controllers`"


def run_status(monkeypatch: pytest.MonkeyPatch, scope_status: ScopeStatus, *args: str) -> Result:
    def call_server(context: Any, operation: Any) -> ScopeStatus:
        del context, operation
        return scope_status

    monkeypatch.setattr(status, "call_server", call_server)
    env = {"REMIT_TOKEN": "token-of-a-member-unused"}
    return CliRunner().invoke(remit, ["status", "--server", "http://127.0.0.1:7420", *args], prog_name="remit", env=env)


def idle(lease: str) -> IdleLease:
    reason = f"no controllers hold the lease {lease}: it was released"
    return IdleLease(lease=lease, part="controllers", why=reason, cure=FIX)


def test_scope_with_all_leases_held_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_status(monkeypatch, HEALTHY)
    assert result.exit_code == 0, result.output
    assert "scope:        local at http://127.0.0.1:7420, Remit 0.1.0\n" in result.stdout
    assert "nodes:        ready 3\nreplicas:     none\nleases:       all held\n" in result.stdout


def test_released_replicas_are_printed_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scope_status = replace(HEALTHY, replicas={"serving": 3, "released": 6})
    assert "replicas:     serving 3, ended 6\n" in run_status(monkeypatch, scope_status).stdout
    assert json.loads(run_status(monkeypatch, scope_status, "-o", "json").stdout)["replicas"]["released"] == 6


def test_unheld_leases_are_warnings_with_one_fix_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    scope_status = ScopeStatus(scope="local", incarnation="i1", idle=(idle("workloads"), idle("repair")))
    result = run_status(monkeypatch, scope_status)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[-3:] == [
        "warning:      no controllers hold the lease workloads: it was released",
        "warning:      no controllers hold the lease repair: it was released",
        f"fix:          {FIX}",
    ]
    json_result = run_status(monkeypatch, scope_status, "-o", "json")
    assert json_result.exit_code == 1 and [lease["lease"] for lease in json.loads(json_result.stdout)["idle"]] == [
        "workloads",
        "repair",
    ]
