"""Is it printed how a scope stands, and who should act and does not?"""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

import remit.cli.commands.status as status
from remit.cli.main import remit
from remit.model.wire.api_types import IdleLease, ScopeStatus

WELL = ScopeStatus(scope="local", incarnation="i1", leader="s1", epoch=2, revision=7, nodes={"ready": 3}, version="0.1.0")
CURE = "start `remit controllers`"


def asked(monkeypatch: pytest.MonkeyPatch, stands: ScopeStatus, *words: str) -> Result:
    def ask(reach: Any, doing: Any) -> ScopeStatus:
        del reach, doing
        return stands

    monkeypatch.setattr(status, "ask", ask)
    env = {"REMIT_TOKEN": "a-members-token-that-nobody-reads"}
    return CliRunner().invoke(remit, ["status", "--server", "http://127.0.0.1:7420", *words], prog_name="remit", env=env)


def idle(lease: str) -> IdleLease:
    why = f"nobody holds the lease {lease}: it was given back"
    return IdleLease(lease=lease, part="controllers", why=why, cure=CURE)


def test_a_scope_in_which_everybody_acts_is_told_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    done = asked(monkeypatch, WELL)
    assert done.exit_code == 0, done.output
    assert "scope:        local at http://127.0.0.1:7420, Remit 0.1.0\n" in done.stdout
    assert "nodes:        ready 3\nreplicas:     none\nacting:       nobody is known to be missing\n" in done.stdout


def test_that_nobody_acts_is_said_for_each_lease__with_one_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    stands = ScopeStatus(scope="local", incarnation="i1", idle=(idle("workloads"), idle("repair")))
    done = asked(monkeypatch, stands)
    assert done.exit_code == 1, done.output
    lines = done.stdout.splitlines()
    assert lines[-3:] == [
        "nobody acts:  nobody holds the lease workloads: it was given back",
        "nobody acts:  nobody holds the lease repair: it was given back",
        f"cure:         {CURE}",
    ]
    written = asked(monkeypatch, stands, "-o", "json")
    assert written.exit_code == 1 and [one["lease"] for one in json.loads(written.stdout)["idle"]] == ["workloads", "repair"]
