"""Every built-in scenario holds its invariants, injects the faults it names, and is quick enough to try."""

from __future__ import annotations

import pytest

from remit.simulate.faults.fault_schedule import draw_faults
from remit.simulate.scenarios import load, names
from tests.scenarios.standing_runs import standing

CPU_S_MAX = 10.0
ROWS = range(1, 46)


@pytest.mark.parametrize("name", names())
def test_scenario_holds_under_every_fault_it_names(name: str) -> None:
    scenario, (run, cpu_s) = load(name), standing()[name]
    assert not run.violations, "\n".join([*map(str, run.violations), run.story, f"remit simulate {name} --seed {run.seed}"])
    assert run.simulated_s == pytest.approx(scenario.duration_s + scenario.heal_s)
    assert run.decided > 0
    planned: dict[str, int] = {}
    for fault in draw_faults(scenario, run.seed):
        planned[fault.kind] = planned.get(fault.kind, 0) + 1
    struck = {kind: run.faults.get(kind, 0) + run.missed.get(kind, 0) for kind in {**run.faults, **run.missed}}
    assert struck == planned
    missing = sorted({line.kind for line in scenario.faults} - set(run.faults))
    assert not missing, f"it names {missing}, none of which occurred with seed {run.seed}"
    assert cpu_s < CPU_S_MAX


@pytest.mark.parametrize("name", names())
def test_covered_rows_exist_in_fault_table(name: str) -> None:
    covers = load(name).covers
    assert list(covers) == sorted(set(covers))
    assert all(row in ROWS for row in covers)
