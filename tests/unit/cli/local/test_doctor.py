"""Tests of the output of `remit doctor`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from remit.cli.main import remit
from remit.world import host_checks
from remit.world.host_checks import HostCheck, State


@pytest.mark.parametrize(
    ("states", "end"),
    [
        (["ok", "ok"], "all checks passed"),
        (["ok", "warn"], "Remit runs here, with 1 warning"),
        (["warn", "warn"], "Remit runs here, with 2 warnings"),
        (["fail", "warn"], "1 check failed; Remit does not run here until it is fixed"),
        (["fail", "fail"], "2 checks failed; Remit does not run here until they are fixed"),
    ],
)
def test_last_line_counts_failures_or_warnings(monkeypatch: pytest.MonkeyPatch, states: list[State], end: str) -> None:
    checks = [HostCheck(f"check {number}", state, "result") for number, state in enumerate(states)]
    monkeypatch.setattr(host_checks, "run_host_checks", lambda data, port: checks)
    result = CliRunner().invoke(remit, ["doctor"], prog_name="remit")
    assert result.stdout.splitlines()[-1] == end
    assert result.exit_code == ("fail" in states)
