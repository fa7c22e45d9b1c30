"""Seed runner: many runs over several processes end whatever one of them does, and totals are correct."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from remit.simulate.scenarios import Scenario
from remit.simulate.seed_runner import RUN_LOST_CHECK, RunTotals, SeedResult, SeedTask, counted_s, run_seeds
from tests.unit.simulate.fake_runs import fake_result, perform, perform_and_die, perform_and_hang, violation

SCENARIO = Scenario("pretended", "nothing is run")


def tasks(count: int) -> list[SeedTask]:
    return [SeedTask(SCENARIO, seed) for seed in range(1, count + 1)]


def by_seed(done: Iterator[SeedResult]) -> dict[int, SeedResult]:
    return {one.run.seed: one for one in done}


def test_every_seed_runs_once_and_workers_end() -> None:
    found = list(run_seeds(tasks(7), 2, perform=perform))
    assert sorted(one.run.seed for one in found) == [1, 2, 3, 4, 5, 6, 7]
    assert all(one.task.seed == one.run.seed and one.cpu_s >= 0 for one in found)
    assert not multiprocessing.active_children()


def test_dying_worker_loses_only_its_own_run() -> None:
    found = by_seed(run_seeds(tasks(6), 2, perform=perform_and_die))
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    (violation,) = found.pop(3).run.violations
    assert violation.check == RUN_LOST_CHECK
    assert violation.why == "the worker process ended with exit code -9"
    assert not any(one.run.violations for one in found.values())


def test_hanging_run_is_ended_and_reported() -> None:
    found = by_seed(run_seeds(tasks(4), 2, perform=perform_and_hang, run_s_max=3))
    assert sorted(found) == [1, 2, 3, 4]
    assert [violation.why for violation in found[2].run.violations] == ["the run did not end within 3 s"]
    assert not multiprocessing.active_children()


def test_closed_iterator_ends_workers() -> None:
    def endless() -> Iterator[SeedTask]:
        seed = 0
        while True:
            seed += 1
            yield SeedTask(SCENARIO, seed)

    results = run_seeds(endless(), 2, perform=perform)
    next(results)
    assert len(multiprocessing.active_children()) == 2
    results.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("simulated_s", "faults", "decided", "counted"),
    [
        (3600.0, 70, 1_000, 3600.0),
        (3600.0, 700, 10_000, 3600.0),  # an hour counts at most as an hour
        (3600.0, 35, 1_000, 1800.0),
        (3600.0, 70, 250, 900.0),
        (1800.0, 35, 500, 1800.0),
        (3600.0, 0, 1_000, 0.0),
    ],
)
def test_counted_time_is_limited_by_faults_and_decisions(simulated_s: float, faults: int, decided: int, counted: float) -> None:
    assert counted_s(fake_result(1, simulated_s=simulated_s, faults={"loss": faults}, decided=decided)) == pytest.approx(
        counted
    )


def test_missed_faults_are_not_counted() -> None:
    run = fake_result(1, faults={"loss": 7}, missed={"restore": 700})
    totals = RunTotals()
    totals.add(run)
    assert totals.faults == {"loss": 7}
    assert counted_s(run) == pytest.approx(360.0)


def test_totals_sum_over_runs() -> None:
    totals = RunTotals()
    totals.add(fake_result(1, faults={"loss": 70, "drift": 2}), cpu_s=1.5)
    totals.add(fake_result(2, violation(), violation("other"), simulated_s=1800.0, unknown=("x",)), cpu_s=0.5)
    assert (totals.seeds, totals.failing, totals.violations, totals.unknown) == (2, 1, 2, 1)
    assert totals.hours == pytest.approx(1.5)
    assert totals.counted_hours == pytest.approx(1.5)
    assert totals.faults == {"loss": 140, "drift": 2}
    assert totals.faults_all == 142
    assert (totals.commits, totals.events, totals.cpu_s) == (4_000, 20, 2.0)
    assert totals.per_million_commits == pytest.approx(500.0)
    assert RunTotals().per_million_commits == 0.0
