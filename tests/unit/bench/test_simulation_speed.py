"""Simulation benchmark: scenarios, baseline loop, report."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from remit.bench import simulation_speed
from remit.bench.simulation_speed import QUICK, SIZES, SimulationSize, bare_loop_events_per_cpu_s, scenario
from remit.cli.main import remit
from remit.simulate.faults.fault_schedule import draw_faults
from remit.simulate.seed_runner import FAULTS_PER_HOUR_MIN


@pytest.mark.parametrize("size", [*SIZES, *QUICK], ids=str)
def test_every_size_has_enough_faults_to_count(size: SimulationSize) -> None:
    found = scenario(size)
    assert (found.cluster.nodes, found.cluster.agents, found.cluster.beat) == (size.nodes, size.agents, size.heartbeat)
    hours = found.duration_s / 3600
    for seed in range(1, 6):
        assert len(draw_faults(found, seed)) >= FAULTS_PER_HOUR_MIN * hours * 0.8
    assert sum(len(draw_faults(found, seed)) for seed in range(1, 21)) / 20 >= FAULTS_PER_HOUR_MIN


def test_bare_loop_reports_measured_rate() -> None:
    assert bare_loop_events_per_cpu_s(20_000) > 1_000


def test_json_report_is_one_line_and_missed_aim_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_speed, "QUICK", (SimulationSize(4, 2, "20s", 60.0, 0.0),))
    result = CliRunner().invoke(remit, ["bench", "simulate", "--quick", "--json"], prog_name="remit")
    assert result.exit_code == 1, "a minute without binds scores zero, so an aim is missed"
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert list(found) == ["bench", "revision", "machine", "rows", "aims"]
    assert [aim["aim"] for aim in found["aims"]] == [100, 30_000]
    (row,) = found["rows"]
    assert (row["nodes"], row["beat"], row["seeds"]) == (4, "20s", 2)
    assert found["aims"][0]["name"] == "simulated hours a minute, 4 nodes at a beat of 20s"
    assert row["events_a_cpu_s"] == pytest.approx(row["ratio"] * row["bare_events_a_cpu_s"])
    assert row["hours"] == pytest.approx(2 / 60)


def test_table_shows_every_heartbeat_and_is_not_wrapped_in_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_speed, "QUICK", (SimulationSize(4, 2, "20s", 60.0, 0.0),))
    result = CliRunner().invoke(remit, ["bench", "simulate", "--quick"], prog_name="remit")
    cells = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in result.stdout.splitlines()]
    pairs = [row for row in cells if len(row) == 2]
    assert pairs[:3] == [["nodes", "4"], ["beat", "20s"], ["seeds", "2"]], "many figures: one line each"
    assert "4 nodes at a beat of 20s" in result.stdout
