"""Where do the standing runs come from? Each scenario once and whole, over two processes, for all tests that look at them.

Those tests are run in one process, without workers, so the runs are made once.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import NamedTuple

from remit.simulate import coverage
from remit.simulate.scenarios import load
from remit.simulate.simulation import RunResult, simulate


class Standing(NamedTuple):
    run: RunResult
    cpu_s: float


def performed(one: tuple[str, int]) -> Standing:
    name, seed = one
    before = os.times()
    run = simulate(load(name), seed)
    after = os.times()
    return Standing(run, after.user + after.system - before.user - before.system)


@cache
def performed_together(some: tuple[tuple[str, int], ...]) -> dict[tuple[str, int], Standing]:
    """These runs, by scenario and seed."""
    with ProcessPoolExecutor(2) as pool:
        return dict(zip(some, pool.map(performed, some), strict=True))


@cache
def begun_together(until_s: float) -> dict[str, RunResult]:
    """How the standing runs begin, by scenario."""
    with ProcessPoolExecutor(2) as pool:
        return {run.scenario: run for run in pool.map(begun, ((name, seed, until_s) for name, seed in coverage.suite_runs()))}


def begun(one: tuple[str, int, float]) -> RunResult:
    name, seed, until_s = one
    return simulate(load(name), seed, until_s=until_s)


def standing() -> dict[str, Standing]:
    """The standing run of every scenario, by its name."""
    return {name: one for (name, _), one in performed_together(coverage.suite_runs()).items()}


@cache
def runs() -> tuple[RunResult, ...]:
    """Those, and as many more as it takes to reach every mark, or to give up."""
    found = [one.run for one in standing().values()]
    for more in coverage.further_runs():
        if not coverage.missing_marks(found):
            break
        found += [one.run for one in performed_together(more).values()]
    return tuple(found)
