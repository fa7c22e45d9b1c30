"""Do many runs over several processes come to an end, whatever one of them does, and is their sum right?"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from remit.simulate.scenario_types import Scenario
from remit.simulate.seed_runner import RUN_LOST_CHECK, RunTotals, SeedResult, SeedTask, counted_s, run_seeds
from tests.unit.simulate.fake_runs import broken, perform, perform_but_die, perform_but_hang, pretended

SCENARIO = Scenario("pretended", "nothing is run")


def tasks(count: int) -> list[SeedTask]:
    return [SeedTask(SCENARIO, seed) for seed in range(1, count + 1)]


def by_seed(done: Iterator[SeedResult]) -> dict[int, SeedResult]:
    return {one.run.seed: one for one in done}


def test_every_task_is_done_once_and_no_worker_is_left() -> None:
    found = list(run_seeds(tasks(7), 2, perform=perform))
    assert sorted(one.run.seed for one in found) == [1, 2, 3, 4, 5, 6, 7]
    assert all(one.task.seed == one.run.seed and one.cpu_s >= 0 for one in found)
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_costs_its_own_run_only() -> None:
    found = by_seed(run_seeds(tasks(6), 2, perform=perform_but_die))
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    (violation,) = found.pop(3).run.violations
    assert violation.check == RUN_LOST_CHECK
    assert violation.why == "the worker process ended with exit code -9"
    assert not any(one.run.violations for one in found.values())


def test_a_run_that_hangs_is_ended_and_told() -> None:
    found = by_seed(run_seeds(tasks(4), 2, perform=perform_but_hang, run_s_max=3))
    assert sorted(found) == [1, 2, 3, 4]
    assert [violation.why for violation in found[2].run.violations] == ["the run did not end within 3 s"]
    assert not multiprocessing.active_children()


def test_whoever_stops_listening_leaves_no_worker_behind() -> None:
    def endless() -> Iterator[SeedTask]:
        seed = 0
        while True:
            seed += 1
            yield SeedTask(SCENARIO, seed)

    swarming = run_seeds(endless(), 2, perform=perform)
    next(swarming)
    assert len(multiprocessing.active_children()) == 2
    swarming.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("simulated_s", "faults", "decided", "counted"),
    [
        (3600.0, 70, 1_000, 3600.0),
        (3600.0, 700, 10_000, 3600.0),  # an hour is not more than an hour
        (3600.0, 35, 1_000, 1800.0),
        (3600.0, 70, 250, 900.0),
        (1800.0, 35, 500, 1800.0),
        (3600.0, 0, 1_000, 0.0),
    ],
)
def test_an_hour_counts_as_far_as_it_had_something_in_it(simulated_s: float, faults: int, decided: int, counted: float) -> None:
    assert counted_s(pretended(1, simulated_s=simulated_s, faults={"loss": faults}, decided=decided)) == pytest.approx(counted)


def test_what_could_not_be_done_is_no_fault() -> None:
    run = pretended(1, faults={"loss": 7}, missed={"restore": 700})
    totals = RunTotals()
    totals.add(run)
    assert totals.faults == {"loss": 7}
    assert counted_s(run) == pytest.approx(360.0)


def test_the_sum_of_runs() -> None:
    totals = RunTotals()
    totals.add(pretended(1, faults={"loss": 70, "drift": 2}), cpu_s=1.5)
    totals.add(pretended(2, broken(), broken("other"), simulated_s=1800.0, unknown=("x",)), cpu_s=0.5)
    assert (totals.seeds, totals.failing, totals.violations, totals.unknown) == (2, 1, 2, 1)
    assert totals.hours == pytest.approx(1.5)
    assert totals.counted_hours == pytest.approx(1.5)
    assert totals.faults == {"loss": 140, "drift": 2}
    assert totals.faults_all == 142
    assert (totals.commits, totals.events, totals.cpu_s) == (4_000, 20, 2.0)
    assert totals.per_million_commits == pytest.approx(500.0)
    assert RunTotals().per_million_commits == 0.0
