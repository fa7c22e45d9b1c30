"""Shrinking: a failing run is reduced by running candidates, and saved as a replay file with its violation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from remit.simulate.checkers.judge import EVENT_CHECKS
from remit.simulate.checkers.liveness_checks import LIVENESS_CHECKS
from remit.simulate.checkers.registry import CHECKS
from remit.simulate.faults.fault_schedule import draw_faults
from remit.simulate.scenario_types import Injection, Replay, Scenario
from remit.simulate.scenarios import BadScenario, load, names
from remit.simulate.shrink import NotReproduced, read_replay, save, shrink
from remit.simulate.simulation import PROCESS_ENDED_CHECK, RunResult
from tests.unit.simulate.fake_runs import fake_result, violation

SCENARIO = Scenario("pre tended/x", "nothing is run", duration="5m", heal="3m")
PLAN = tuple(Injection(number, 3.0 * number, "loss" if number % 2 else "kill-leader", 8.0) for number in range(40))


class FakeSimulation:
    """Fails at `at_s` if these faults are in the plan and last long enough."""

    def __init__(
        self, *needed: int, at_s: float = 100.0, lasts_s: float = 0.0, check: str = "fenced_replica_has_one_process"
    ) -> None:
        self.needed, self.at_s, self.lasts_s, self.check = set(needed), at_s, lasts_s, check
        self.plans: list[tuple[int, ...]] = []

    def __call__(
        self, scenario: Scenario, seed: int, *, plan: tuple[Injection, ...] | None = None, until_s: float | None = None
    ) -> RunResult:
        plan = PLAN if plan is None else plan
        until_s = scenario.duration_s + scenario.heal_s if until_s is None else until_s
        self.plans.append(tuple(one.number for one in plan))
        present = {one.number for one in plan if one.lasts_s >= self.lasts_s and one.at_s < until_s}
        at_s = self.at_s if self.at_s < scenario.duration_s else scenario.duration_s + 30.0
        if self.needed <= present and until_s > at_s:
            return fake_result(seed, violation(self.check, at_s), plan=plan, effective_scenario=scenario, simulated_s=at_s)
        # When one of the needed faults is missing another check fails, which must not be taken for the same violation.
        other = (violation("another"),) if self.needed & present else ()
        return fake_result(seed, *other, plan=plan, effective_scenario=scenario, simulated_s=until_s)


def run_shrink(simulation: FakeSimulation, **bounds: Any) -> Any:
    return shrink(simulation(SCENARIO, 7), simulate=simulation, **bounds)


def test_only_necessary_faults_are_left() -> None:
    simulation = FakeSimulation(5, 28)
    found = run_shrink(simulation)
    assert [one.number for one in found.replay.plan] == [5, 28]
    assert [one.lasts_s for one in found.replay.plan] == [0.0, 0.0]
    assert found.replay.until_s == pytest.approx(100.002)
    assert found.replay.violation == "fenced_replica_has_one_process"
    assert found.replay.seed == 7
    assert found.complete
    assert found.runs == len(simulation.plans) - 1 < 80


def test_run_failing_without_faults_is_recognised_at_once() -> None:
    found = run_shrink(FakeSimulation())
    assert found.replay.plan == ()
    assert found.runs == 2


def test_fault_durations_are_kept_as_long_as_necessary() -> None:
    found = run_shrink(FakeSimulation(5, lasts_s=3.0))
    assert [one.lasts_s for one in found.replay.plan] == [4.0]


def test_liveness_failure_gets_shorter_fault_phase() -> None:
    found = run_shrink(FakeSimulation(5, at_s=320.0))
    assert found.replay.scenario.duration_s == pytest.approx(24.0)
    assert found.replay.until_s == pytest.approx(54.002)


def test_result_is_last_failing_candidate() -> None:
    simulation = FakeSimulation(5, 28)
    found = run_shrink(simulation)
    again = simulation(found.replay.scenario, 7, plan=found.replay.plan, until_s=found.replay.until_s)
    assert [violation.check for violation in again.violations] == ["fenced_replica_has_one_process"]
    assert found.run == again


def test_search_is_bounded_and_result_still_fails() -> None:
    simulation = FakeSimulation(5, 28)
    found = run_shrink(simulation, runs_max=6)
    assert not found.complete
    assert found.runs == 6
    assert {5, 28} <= {one.number for one in found.replay.plan}
    assert len(found.replay.plan) < len(PLAN)
    assert not run_shrink(simulation, cpu_s_max=0.0).complete


def test_each_smaller_replay_is_reported_as_it_is_found() -> None:
    simulation, reported = FakeSimulation(5, 28), list[tuple[int, int]]()
    found = run_shrink(simulation, on_smaller=lambda replay: reported.append((len(simulation.plans), len(replay.plan))))
    assert reported[0] == (1, len(PLAN))
    assert [faults for _, faults in reported] == sorted((faults for _, faults in reported), reverse=True)
    assert reported[-1][1] == len(found.replay.plan) == 2


def test_interrupted_search_returns_best_so_far() -> None:
    simulation = FakeSimulation(5, 28)

    def interrupted_simulation(*plans: Any, **more: Any) -> RunResult:
        if len(simulation.plans) > 8:
            raise KeyboardInterrupt
        return simulation(*plans, **more)

    found = shrink(simulation(SCENARIO, 7), simulate=interrupted_simulation)
    assert found.interrupted
    assert not found.complete
    assert {5, 28} <= {one.number for one in found.replay.plan}
    assert len(found.replay.plan) < len(PLAN)


def test_failure_that_does_not_repeat_raises_not_reproduced() -> None:
    first = FakeSimulation()(SCENARIO, 7)
    with pytest.raises(NotReproduced, match="seed 7 of pretended did not violate fenced_replica_has_one_process again"):
        shrink(first, simulate=FakeSimulation(1_000))


def test_replay_file_round_trip(tmp_path: Path) -> None:
    replay = run_shrink(FakeSimulation(5, 28), revision="abc").replay
    path = save(replay, tmp_path)
    assert path.name == "remit-replay-pre-tended-x-7.json"
    assert read_replay(path) == replay
    assert replay.revision == "abc"
    assert replay.kept["key"] == "replica/acme/web-0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": (Injection(0, 1.0, "meteor", 1.0),)}, "plan[0].kind: there is no fault 'meteor'; available are "),
        ({"plan": (Injection(0, -1.0, "loss", 1.0),)}, "plan[0].at_s: must be from 0 to 300"),
        ({"plan": (Injection(0, 1.0, "loss", 1e300),)}, "plan[0].lasts_s: must be from 0 to 300"),
        ({"plan": (PLAN[0], Injection(0, 1.0, "loss", 1.0, -2.0))}, "plan[1].size: must be from 0"),
        ({"plan": (Injection(0, 1.0, "loss", 1.0, 1e300),)}, "plan[0].size: must be from 0 (drawn at random) to 1000000"),
        ({"plan": (Injection(-1, 1.0, "loss", 1.0),)}, "plan[0].number: must be from 0"),
        (
            {"plan": (Injection(0, 1.0, "loss", 1.0, where="mars"),)},
            "plan[0].where: there is no scope 'mars'; available are local",
        ),
        ({"plan": (Injection(0, 1.0, "loss", 1.0, 5.0),)}, "plan[0].size: must be a share from 0 to 1, not 5"),
        ({"plan": (Injection(0, 1.0, "cut-node", 1.0, 1.0),)}, "plan[0].size: cut-node has no size; remove it"),
        ({"plan": (Injection(0, 1.0, "loss", 1.0, where="local"),)}, "plan[0].where: loss affects all scopes at once"),
        ({"plan": (Injection(0, 1.0, "cut-scopes", 1.0),)}, "plan[0].kind: cut-scopes needs 2 or more"),
        ({"plan": (PLAN[3], PLAN[5], PLAN[3])}, "plan[2].number: 3 is used twice"),
        (
            {"violation": "fenced_replica_has_one_proces"},
            "no check 'fenced_replica_has_one_proces', the closest is fenced_replica_has_one_process;",
        ),
        ({"violation": "S8"}, "violation: there is no check 'S8'"),
        ({"seed": -1}, "seed: must be from 0 to 9223372036854775807"),
        ({"until_s": 0.0}, "until_s: must be more than 0"),
        ({"until_s": -5.0}, "until_s: must be more than 0"),
        ({"until_s": 1e300}, "until_s: must be more than 0 and at most 480, the end of the scenario"),
        ({"scenario": replace(SCENARIO, heal="soon")}, "scenario: heal: not a duration"),
    ],
)
def test_invalid_replay_is_refused_with_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(msgspec.json.encode(replace(Replay(SCENARIO, 1, 10.0, PLAN), **change)))
    with pytest.raises(BadScenario) as refused:
        read_replay(path)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", names())
def test_every_drawn_plan_can_be_replayed(name: str, tmp_path: Path) -> None:
    scenario = load(name)
    for seed in range(1, 6):
        replay = Replay(scenario, seed, scenario.duration_s, draw_faults(scenario, seed))
        assert read_replay(save(replay, tmp_path)) == replay


@pytest.mark.parametrize("check", ["", PROCESS_ENDED_CHECK, *CHECKS, *LIVENESS_CHECKS, *EVENT_CHECKS])
def test_every_check_is_valid_in_replay(check: str, tmp_path: Path) -> None:
    assert read_replay(save(Replay(SCENARIO, 1, 10.0, (), check), tmp_path)).violation == check


@pytest.mark.parametrize("text", [b"", b"[]", b'{"seed": 1}', b"\xff\xfe", b'{"scenario": 3}'])
def test_non_replay_file_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(BadScenario, match="not a replay"):
        read_replay(path)
