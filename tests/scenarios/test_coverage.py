"""Coverage of the standing runs: every refusal, kind of fault and transition is reached, or named as missing."""

from __future__ import annotations

from collections import Counter

from remit.law.lifecycle import TRANSITIONS
from remit.simulate import coverage
from remit.simulate.scenarios import names
from tests.scenarios.standing_runs import all_runs

UNREACHABLE_MAX = 3
"""The present number; it may only shrink."""


def test_standing_runs_reach_every_refusal_fault_and_transition() -> None:
    missed = coverage.missing_marks(all_runs())
    assert not missed, "no standing run reaches: " + "; ".join(missed)


def test_unreachable_marks_are_not_reached() -> None:
    assert coverage.UNREACHABLE.keys() <= set(coverage.all_marks())
    assert len(coverage.UNREACHABLE) <= UNREACHABLE_MAX
    wrong = sorted(coverage.UNREACHABLE.keys() & coverage.reached_marks(all_runs()))
    assert not wrong, f"reached, so remove them from the list: {wrong}"


def test_no_standing_run_has_violations() -> None:
    broken = [f"remit simulate {run.scenario} --seed {run.seed}: {run.violations[0]}" for run in all_runs() if run.violations]
    assert not broken, "\n".join(broken)


def test_no_runs_reach_no_marks() -> None:
    assert len(coverage.missing_marks([])) == len(list(coverage.all_marks())) - len(coverage.UNREACHABLE)


def test_transitions_are_distinguishable_in_runs() -> None:
    assert coverage.indistinguishable_transitions() == []
    assert max(Counter(coverage.all_marks()).values()) == 1
    assert sum(mark.startswith("transition ") for mark in coverage.all_marks()) == len(TRANSITIONS)


def test_search_list_names_existing_scenarios() -> None:
    assert set(coverage.SEARCH_SCENARIOS) <= set(names())
