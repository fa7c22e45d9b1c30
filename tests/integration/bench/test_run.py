"""The benchmark of running work measures real jobs in its documented format."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from remit.bench import run
from remit.bench.run import AUDIT_NAMES, RunSizes
from remit.cli.main import remit


@pytest.mark.smoke
def test_run_benchmark_runs_every_job_and_orders_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "QUICK", RunSizes(jobs=12, idle=3, forks=3))
    result = CliRunner().invoke(remit, ["bench", "run", "--quick", "--json"], prog_name="remit")
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert list(found) == ["bench", "revision", "machine", "rows", "aims"]
    assert [(aim["aim"], aim["better"]) for aim in found["aims"][:2]] == [(300, "higher"), (15, "lower")]
    load = next(row for row in found["rows"] if row["row"] == "load" and row["sandbox"] == "none")
    assert load["jobs"] == 12
    assert load["per_s"] == pytest.approx(load["of_yardstick"] * load["yardstick_per_s"]) == found["aims"][0]["value"]
    idle = next(row for row in found["rows"] if row["row"] == "idle" and row["sandbox"] == "none")
    assert idle["jobs"] == 3
    # A job may end before `running` is reported: on a busy machine all three did.
    steps = ("answered", "start", *(step for step in AUDIT_NAMES if step != "running" or "running_p50_ms" in idle), "told")
    assert all(idle[f"{step}_p50_ms"] > 0 for step in steps), "every step must have a duration"
    order = [idle[f"{step}_p50_ms"] for step in ("bound", "starting", "start")]
    assert order == sorted(order), "no process starts before its start is committed"
    assert idle["start_p50_ms"] == found["aims"][1]["value"]
