"""Fault kinds: each causes harm, is undone completely when it ends, and chooses its victim independently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from remit.simulate.checkers.reference.rows import phase_of
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenario_types import Injection
from remit.simulate.scenarios import parse
from remit.simulate.simulation import Simulation
from remit.simulate.world.network import NetworkConditions
from remit.simulate.world.random_streams import stream
from remit.simulate.world.store import StoreFaults

AT_S, DURATION_S = 12.0, 16.0
SETTLES_S = 6.0
"""Time after which faults that end by themselves have ended."""

TEXT = """
summary = "s"
duration = "16s"
heal = "1m"
[cluster]
scopes = {scopes}
nodes = {nodes}
agents = {nodes}
store = "{store}"
plugin = true
[load]
per_minute = 20
"""

LASTING = {"drift", "wall-jump", "backup", "restore"}
"""Faults that are never undone: clocks keep their values, and backups and restores stay."""


class Trial:
    """A tiny cluster with one plan of faults; it is stopped where the test inspects it."""

    def __init__(
        self, *plan: Injection, seed: int = 1, scopes: str = '["local"]', store: str = "memory", nodes: int = 2
    ) -> None:
        scenario = parse("trial", TEXT.format(scopes=scopes, store=store, nodes=nodes))
        self.sim = Simulation(scenario, seed, plan=plan, trace=True)
        root = self.sim.loop.root.context
        for one in plan:
            root.run(self.sim.loop.call_at, one.at_s, self.sim._inject, one)
        root.run(self.sim.loop.call_soon, self.sim.cluster.start)

    def run(self, until_s: float) -> None:
        self.sim.loop.run(until_s)
        assert not self.sim.judge.violations, self.sim.judge.violations

    def traces(self) -> dict[str, Any]:
        """All temporary effects of faults that differ from a calm cluster."""
        sim, found = self.sim, dict[str, Any]()
        for (source, target), way in sim.network._paths.items():
            if way.cuts or way.clogs or abs(way.slow_s) > 1e-9 or way.held:
                found[f"way {source} > {target}"] = way
        if any(sim._reservation_callbacks.values()):
            found["somebody waits for a reservation"] = True
        if sim.cluster.plugin.broken:
            found["plugin"] = True
        if sim.network.conditions != NetworkConditions():
            found["weather"] = sim.network.conditions
        for scope, store in sim.cluster.stores.items():
            if store.faults != StoreFaults():
                found[f"trouble of {scope}"] = store.faults
            if store._no_watch_until_s > sim.loop.time():
                found[f"no watch of {scope}"] = store._no_watch_until_s
        for process in sim.cluster.processes.values():
            if not process.alive or process.unit.frozen:
                found[process.name] = "frozen" if process.alive else "dead"
            machine = process.machine
            if machine.disk.full or machine.disk.failing or machine.disk.not_syncing or machine.slow_disk_ms:
                found[f"disk of {machine.name}"] = True
            if abs(machine.slow_start_s) > 1e-9:
                found[f"starts on {machine.name}"] = machine.slow_start_s
        return found

    def marks(self) -> dict[str, Any]:
        """Values that a fault may change permanently."""
        sim = self.sim
        found: dict[str, Any] = {f"starts of {name}": process.starts for name, process in sim.cluster.processes.items()}
        for name, machine in sim.cluster.machines.items():
            found[f"clock of {name}"] = (machine.clock.rate, machine.clock.wall_offset_ms, machine.clock.boot())
        for scope, store in sim.cluster.stores.items():
            found[f"store of {scope}"] = (id(store.store), store._no_watch_until_s)
            found[f"cuts of {scope}"] = getattr(store, "_power_cuts", 0)
        found["backups"] = [list(remaining) for remaining in sim._backups.values()]
        return found

    def end(self) -> None:
        self.sim.loop.finish()
        self.sim.cluster.end()


@pytest.fixture
def trials() -> Iterator[list[Trial]]:
    trials: list[Trial] = []
    yield trials
    for trial in trials:
        trial.end()


def trial_of(kind: str, lasts_s: float, trials: list[Trial]) -> Trial:
    scopes = '["local"]' if KINDS[kind].scopes_min == 1 else '["global", "east", "west"]'
    plan = [Injection(0, AT_S, kind, lasts_s)]
    if kind in ("restore", "damage"):
        plan.insert(0, Injection(1, AT_S - 1, "backup", 0.0))
    nodes = 3 if kind == "silent-zone" else 2
    trial = Trial(*plan, scopes=scopes, store=KINDS[kind].store or "memory", nodes=nodes)
    trials.append(trial)
    return trial


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_fault_causes_harm_and_is_undone_when_all_faults_end(kind: str, trials: list[Trial]) -> None:
    trial = trial_of(kind, 1_000.0, trials)
    trial.run(AT_S - 0.000_1)
    assert trial.traces() == {}
    before = trial.marks()
    trial.run(AT_S + 0.000_1)
    assert trial.sim.faults[kind] == 1
    assert trial.traces() or trial.marks() != before, "the fault had no effect"
    trial.run(DURATION_S)
    trial.sim._heal_all()
    trial.run(DURATION_S + SETTLES_S)
    assert trial.traces() == {}
    if kind not in LASTING:
        after = trial.marks()
        assert {name: (rate, offset) for name, (rate, offset, _) in _clocks(after).items()} == {
            name: (rate, offset) for name, (rate, offset, _) in _clocks(before).items()
        }


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_fault_ends_by_itself_after_its_duration(kind: str, trials: list[Trial]) -> None:
    trial = trial_of(kind, 2.0, trials)
    trial.run(AT_S + 2.0 + SETTLES_S)
    assert trial.traces() == {}


def _clocks(marks: dict[str, Any]) -> dict[str, tuple[float, int, str]]:
    return {name: value for name, value in marks.items() if name.startswith("clock of ")}


@pytest.mark.parametrize("lasts_s", [0.0, 0.1, 0.7, 1_000.0])
def test_swizzle_clog_undone_early_leaves_no_path_clogged(lasts_s: float, trials: list[Trial]) -> None:
    """Including paths that were to be clogged later, and no message stays held back."""
    for seed in range(3):
        trial = Trial(*(Injection(n, 3.0 + n / 10, "swizzle-clog", lasts_s) for n in range(4)), seed=seed)
        trials.append(trial)
        trial.run(4.0)
        trial.sim._heal_all()
        trial.run(8.0)
        assert trial.traces() == {}


def test_swizzle_clog_clogs_and_unclogs_paths_one_by_one(trials: list[Trial]) -> None:
    trial = Trial(Injection(0, 4.0, "swizzle-clog", 8.0))
    trials.append(trial)
    seen: list[list[str]] = []
    for tick in range(400, 1_250):
        trial.run(tick / 100)
        now = sorted(trial.traces())
        if not seen or seen[-1] != now:
            seen.append(now)
    sizes = [len(now) for now in seen]
    most = max(sizes)
    assert most >= 3
    assert sizes == [*range(sizes[0], most), *range(most, -1, -1)]
    assert sizes[0] in (0, 1)


PLAN = (
    Injection(0, 4.0, "kill-agent", 100.0),
    Injection(1, 5.0, "isolate", 3.0),
    Injection(2, 6.0, "kill-server", 100.0),
    Injection(3, 7.0, "cut-one-way", 3.0),
    Injection(4, 8.0, "swizzle-clog", 0.9),
    Injection(5, 9.0, "slow-links", 3.0),
    Injection(6, 10.0, "kill-scheduler", 100.0),
    Injection(7, 11.0, "all-silent", 3.0),
)


def recorded_harm(trials: list[Trial], plan: tuple[Injection, ...]) -> list[tuple[int, str]]:
    """Recorded harm with the second in which it happened."""
    trial = Trial(*plan)
    trials.append(trial)
    trial.run(13.0)
    found = []
    for line in trial.sim.lines or ():
        at_s, what = float(line.split(maxsplit=1)[0]), line.split(maxsplit=1)[1]
        if what.startswith(("cut ", "clogged ", "slowed ")) or what.endswith((" was killed", " stands still")):
            found.append((int(at_s), f"{at_s} {what}"))
    return found


def test_removing_one_fault_changes_no_other_victim(trials: list[Trial]) -> None:
    full_plan_harm = recorded_harm(trials, PLAN)
    assert {second for second, _ in full_plan_harm} == {int(one.at_s) for one in PLAN}
    for left_out in PLAN:
        remaining = recorded_harm(trials, tuple(one for one in PLAN if one is not left_out))
        assert remaining == [line for line in full_plan_harm if line[0] != int(left_out.at_s)]


@pytest.mark.parametrize("kind", ["kill-agent", "kill-server", "freeze"])
def test_process_already_dead_does_not_change_chosen_victim(kind: str, trials: list[Trial]) -> None:
    for seed in range(10):
        trial = Trial(scopes='["local"]')
        trials.append(trial)
        processes = trial.sim.all_processes("")
        one = Injection(0, 0.0, kind, 1.0)

        def victim(dead: str = "", one: Injection = one, trial: Trial = trial, seed: int = seed) -> str:
            for process in trial.sim.all_processes(""):
                process.kill()
                process.prepare_start()
                if process.name == dead:
                    process.kill()
            KINDS[kind].inject(trial.sim, stream(f"{seed}"), one)
            hit = [each for each in trial.sim.all_processes("") if (each.unit.frozen or not each.alive) and each.name != dead]
            assert len(hit) == 1
            return hit[0].name

        chosen = victim()
        for process in processes:
            if process.name != chosen:
                assert victim(process.name) == chosen


def test_process_frozen_by_two_faults_thaws_with_the_longer(trials: list[Trial]) -> None:
    plan = (Injection(0, 12.0, "freeze-leader", 4.0), Injection(1, 12.5, "freeze-leader", 1.0))
    trial = Trial(*plan)
    trials.append(trial)
    trial.run(12.75)
    (victim,) = trial.traces()
    for at_s, frozen in ((14.0, True), (15.9, True), (16.1, False)):
        trial.run(at_s)
        assert (victim in trial.traces()) is frozen, at_s


def test_kill_reserving_waits_for_next_reservation(trials: list[Trial]) -> None:
    trial = Trial(Injection(0, 12.0, "kill-reserving", 1_000.0))
    trials.append(trial)
    history = trial.sim.judge.history("local")
    for tick in range(120, 2_000):
        trial.run(tick / 10)
        reserved = any(phase_of(one) == "reserved" for one in history.kind("replica").values())
        dead = "scheduler-local-1" in trial.traces()
        assert dead is reserved
        if dead:
            break
    else:
        pytest.fail("no reservation was made")
    assert "somebody waits for a reservation" not in trial.traces()
    trial.sim._heal_all()
    assert trial.traces() == {}


def test_scope_names_are_not_matched_by_prefix(trials: list[Trial]) -> None:
    trial = Trial(scopes='["global", "r1", "r10"]')
    trials.append(trial)
    assert {process.name for process in trial.sim.processes("server", "r1")} == {"server-r1-1", "server-r1-2"}
    assert len(trial.sim.processes("server", "")) == 6


def test_lagging_member_moves_only_observers_of_its_store(trials: list[Trial]) -> None:
    for seed in range(8):
        trial = Trial(Injection(0, 10.0, "lagging-member", 5.0), seed=seed, scopes='["global", "east", "west"]')
        trials.append(trial)
        trial.run(9.999)
        watches = {scope: dict(store._watches) for scope, store in trial.sim.cluster.stores.items()}
        assert all(watches.values())
        trial.run(10.000_1)
        for scope, store in trial.sim.cluster.stores.items():
            remaining = watches[scope].keys() & store._watches.keys()
            assert bool(remaining) is not bool(store.faults.lag_s)
