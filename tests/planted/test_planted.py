"""Every planted bug is detected by a check that it violates, and the same runs are clean without it."""

from __future__ import annotations

import pytest

from remit.simulate import coverage
from remit.simulate.checkers.registry import Violation
from remit.simulate.scenarios import names
from remit.simulate.simulation import simulate
from tests.planted.registry import BUGS, REQUIRED, Bug
from tests.planted.scenarios import TEXTS, world

ROWS = range(1, 46)
"""Rows of the fault table, FAULTS.md section 1."""

BUGS_MIN = 30
SEEDS_MAX = 12
"""A change elsewhere alters every run: a bug is tried with so many seeds, the last successful one first."""


def _violations(scenario: str, seed: int, bug: Bug | None = None) -> tuple[Violation, ...]:
    with pytest.MonkeyPatch.context() as patch:
        run_in = world(scenario, patch)
        if bug is not None:
            bug.plant(patch)
        return simulate(run_in, seed).violations


def _clean_runs() -> list[tuple[str, int]]:
    """Every scenario and first seed of a bug, once; standing runs are checked elsewhere."""
    return sorted({(bug.scenario, bug.seed) for bug in BUGS.values()} - set(coverage.suite_runs()))


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_planted_bug_is_detected_by_expected_check(bug: Bug) -> None:
    for seed in sorted(range(1, SEEDS_MAX + 1), key=lambda seed: (seed != bug.seed, seed)):
        found = _violations(bug.scenario, seed, bug)
        if found:
            detail = f"seed {seed} of {bug.scenario}: {found[0]}"
            assert {one.check for one in found} & set(bug.expects), f"detected by another check: {detail}"
            assert seed == bug.seed or not _violations(bug.scenario, seed), f"the run is not clean without the bug: {detail}"
            return
    pytest.fail(f"{bug.name} was not detected with {SEEDS_MAX} seeds of {bug.scenario}: {bug.what}")


@pytest.mark.parametrize(("scenario", "seed"), _clean_runs())
def test_run_without_planted_bug_is_clean(scenario: str, seed: int) -> None:
    found = _violations(scenario, seed)
    assert found == (), f"seed {seed} of {scenario}, with nothing planted: {found[0]}"


@pytest.mark.parametrize("name", REQUIRED.values(), ids=REQUIRED.keys())
def test_required_bug_is_planted(name: str) -> None:
    assert name in BUGS


def test_every_bug_has_description_rows_and_valid_seed() -> None:
    assert len(BUGS) >= BUGS_MIN
    for bug in BUGS.values():
        assert bug.what.endswith("."), bug.name
        assert bug.rows and set(bug.rows) <= set(ROWS), bug.name
        assert bug.expects and 1 <= bug.seed <= SEEDS_MAX and bug.scenario in (*TEXTS, *names()), bug.name


def test_every_scenario_is_used_by_a_bug() -> None:
    assert set(TEXTS) <= {bug.scenario for bug in BUGS.values()}
