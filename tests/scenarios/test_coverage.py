"""Do the standing runs reach every refusal, every kind of fault and every transition? What they miss is named."""

from __future__ import annotations

from collections import Counter

from remit.law.lifecycle import TRANSITIONS
from remit.simulate import coverage
from remit.simulate.scenarios import names
from tests.scenarios.standing_runs import runs

UNREACHABLE_MAX = 3
"""As many as there are. It only shrinks."""


def test_every_refusal_fault_and_transition_is_reached() -> None:
    missed = coverage.missing_marks(runs())
    assert not missed, "no standing run reaches: " + "; ".join(missed)


def test_what_is_said_to_be_unreachable_is_not_reached() -> None:
    assert coverage.UNREACHABLE.keys() <= set(coverage.all_marks())
    assert len(coverage.UNREACHABLE) <= UNREACHABLE_MAX
    wrong = sorted(coverage.UNREACHABLE.keys() & coverage.reached_marks(runs()))
    assert not wrong, f"they are reached, so take them off the list: {wrong}"


def test_every_standing_run_holds() -> None:
    broken = [f"remit simulate {run.scenario} --seed {run.seed}: {run.violations[0]}" for run in runs() if run.violations]
    assert not broken, "\n".join(broken)


def test_a_run_without_anything_reaches_nothing() -> None:
    assert len(coverage.missing_marks([])) == len(list(coverage.all_marks())) - len(coverage.UNREACHABLE)


def test_no_two_transitions_look_the_same_to_a_run() -> None:
    assert coverage.indistinguishable_transitions() == []
    assert max(Counter(coverage.all_marks()).values()) == 1
    assert sum(mark.startswith("transition ") for mark in coverage.all_marks()) == len(TRANSITIONS)


def test_seekers_are_scenarios_that_exist() -> None:
    assert set(coverage.SEARCH_SCENARIOS) <= set(names())
