"""How hard does Hypothesis try? `make test` is steady and bounded; `make soak` looks further, with fresh seeds."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.statistics import collector
from hypothesis.utils.dynamicvariables import DynamicVariable

# No deadline and no too_slow: both measure the machine, and a shared one is sometimes slow.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
# No database: a run is then what its seed says, and the printed seed replays it.
settings.register_profile(
    "soak",
    deadline=None,
    derandomize=False,
    database=None,
    max_examples=150,
    stateful_step_count=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

SOAK_COUNTERS = os.environ.get("REMIT_SOAK_COUNTERS", "")
"""A file to which counts are appended, one JSON object a line: machines (runs), steps, examples; tests may add theirs."""


def pytest_configure() -> None:
    if SOAK_COUNTERS:
        _count_machines()


def _count_machines() -> None:
    """Count runs and steps where Hypothesis takes them. Its invariants are checked once at the start and after each step."""
    start, check = RuleBasedStateMachine.__init__, RuleBasedStateMachine.check_invariants

    @functools.wraps(start)
    def counted_start(self: RuleBasedStateMachine) -> None:
        _counts.update(machines=1, steps=-1)
        start(self)

    @functools.wraps(check)
    def counted_check(self: RuleBasedStateMachine, *arguments: Any) -> None:
        _counts.update(steps=1)
        check(self, *arguments)

    machine: Any = RuleBasedStateMachine
    machine.__init__, machine.check_invariants = counted_start, counted_check


_counts: Counter[str] = Counter()


@pytest.hookimpl(wrapper=True, trylast=True)  # innermost: Hypothesis's own wrapper has set its collector by then
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Count examples, then write down what this test came to: a later crash loses at most one test's counts."""
    if not SOAK_COUNTERS:
        return (yield)
    statistics_of: DynamicVariable[Any] = collector
    note = statistics_of.value

    def counted_note(statistics: Any) -> None:
        for phase in statistics.values():
            if isinstance(phase, dict):
                _counts.update(examples=len(phase.get("test-cases", ())))
        if note is not None:
            note(statistics)

    try:
        with statistics_of.with_value(counted_note):
            return (yield)
    finally:
        with Path(SOAK_COUNTERS).open("a") as file:
            file.write(json.dumps(dict(_counts)) + "\n")
        _counts.clear()
