"""Does the judge notice? Every planted bug is caught by the promise that it breaks; without it the same runs are clean."""

from __future__ import annotations

import pytest

from remit.simulate import coverage
from remit.simulate.checkers.registry import Violation
from remit.simulate.scenarios import names
from remit.simulate.simulation import simulate
from tests.planted.registry import BUGS, REQUIRED, Bug
from tests.planted.scenarios import TEXTS, world

ROWS = range(1, 46)
"""Of the table of faults, FAULTS.md section 1."""

BUGS_MIN = 30
SEEDS_MAX = 12
"""A change elsewhere moves every run: a bug is looked for in so many, first in the one in which it was last seen."""


def _found(scenario: str, seed: int, bug: Bug | None = None) -> tuple[Violation, ...]:
    with pytest.MonkeyPatch.context() as patch:
        run_in = world(scenario, patch)
        if bug is not None:
            bug.plant(patch)
        return simulate(run_in, seed).violations


def _clean_runs() -> list[tuple[str, int]]:
    """Every scenario and seed that some bug is looked for in first, each once; that standing runs hold is tested with them."""
    return sorted({(bug.scenario, bug.seed) for bug in BUGS.values()} - set(coverage.suite_runs()))


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_by_the_promise_that_it_breaks(bug: Bug) -> None:
    for seed in sorted(range(1, SEEDS_MAX + 1), key=lambda seed: (seed != bug.seed, seed)):
        found = _found(bug.scenario, seed, bug)
        if found:
            told = f"seed {seed} of {bug.scenario}: {found[0]}"
            assert {one.check for one in found} & set(bug.expects), f"caught by another promise: {told}"
            assert seed == bug.seed or not _found(bug.scenario, seed), f"the run is not clean without it: {told}"
            return
    pytest.fail(f"{bug.name} was not noticed in {SEEDS_MAX} seeds of {bug.scenario}: {bug.what}")


@pytest.mark.parametrize(("scenario", "seed"), _clean_runs())
def test_the_same_run_without_a_bug_is_clean(scenario: str, seed: int) -> None:
    found = _found(scenario, seed)
    assert found == (), f"seed {seed} of {scenario}, and nothing was planted: {found[0]}"


@pytest.mark.parametrize("name", REQUIRED.values(), ids=REQUIRED.keys())
def test_what_must_be_planted_is(name: str) -> None:
    assert name in BUGS


def test_every_bug_says_what_it_changes_and_where_it_belongs() -> None:
    assert len(BUGS) >= BUGS_MIN
    for bug in BUGS.values():
        assert bug.what.endswith("."), bug.name
        assert bug.rows and set(bug.rows) <= set(ROWS), bug.name
        assert bug.expects and 1 <= bug.seed <= SEEDS_MAX and bug.scenario in (*TEXTS, *names()), bug.name


def test_no_scenario_is_kept_for_nothing() -> None:
    assert set(TEXTS) <= {bug.scenario for bug in BUGS.values()}
