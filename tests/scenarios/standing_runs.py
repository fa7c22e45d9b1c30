"""Standing runs: each scenario once and in full, computed by two processes for all tests that inspect them.

Those tests run in one process, without workers, so the runs are computed once.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import NamedTuple

from remit.simulate import coverage
from remit.simulate.scenarios import load
from remit.simulate.simulation import RunResult, simulate


class StandingRun(NamedTuple):
    run: RunResult
    cpu_s: float


def simulate_timed(one: tuple[str, int]) -> StandingRun:
    name, seed = one
    before = os.times()
    run = simulate(load(name), seed)
    after = os.times()
    return StandingRun(run, after.user + after.system - before.user - before.system)


@cache
def simulate_all(some: tuple[tuple[str, int], ...]) -> dict[tuple[str, int], StandingRun]:
    """These runs, by scenario and seed."""
    with ProcessPoolExecutor(2) as pool:
        return dict(zip(some, pool.map(simulate_timed, some), strict=True))


@cache
def simulate_beginnings(until_s: float) -> dict[str, RunResult]:
    """Beginnings of the standing runs, by scenario."""
    with ProcessPoolExecutor(2) as pool:
        return {
            run.scenario: run
            for run in pool.map(simulate_beginning, ((name, seed, until_s) for name, seed in coverage.suite_runs()))
        }


def simulate_beginning(one: tuple[str, int, float]) -> RunResult:
    name, seed, until_s = one
    return simulate(load(name), seed, until_s=until_s)


def standing() -> dict[str, StandingRun]:
    """The standing run of every scenario, by its name."""
    return {name: one for (name, _), one in simulate_all(coverage.suite_runs()).items()}


@cache
def all_runs() -> tuple[RunResult, ...]:
    """The standing runs, and further ones until every mark is reached or the supply ends."""
    found = [one.run for one in standing().values()]
    for more in coverage.further_runs():
        if not coverage.missing_marks(found):
            break
        found += [one.run for one in simulate_all(more).values()]
    return tuple(found)
