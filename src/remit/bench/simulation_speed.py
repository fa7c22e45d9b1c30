"""`bench simulate`: simulated hours per minute.

Runs the same scenario at three sizes on two processes. An hour counts in full only if it had 70 faults and 1,000 commits
that decided a claim. The baseline is the bare event loop with tasks that only sleep: the ratio shows the cost of Remit's
code, the judge and the store. Heartbeat intervals are ten and fifteen times the default, which makes an hour cheaper, so
every row names its interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.simulate.scenario_types import Scenario
from remit.simulate.scenarios import parse
from remit.simulate.seed_runner import RunTotals, SeedTask, cpu_s, run_seeds
from remit.simulate.world.event_loop import SimLoop
from remit.world.clock import BootClock

PROCESSES: Final = 2
SLEEPERS: Final = 100

_CLOCK = BootClock()


class SimulationSize(NamedTuple):
    """A cluster to measure. `until_s` is the simulated time of a run; new runs are started for `seconds` of real time."""

    nodes: int
    agents: int
    heartbeat: str
    until_s: float
    seconds: float


SIZES: Final = (
    SimulationSize(10, 2, "30s", 3_600, 60),
    SimulationSize(100, 4, "20s", 3_600, 60),
    SimulationSize(1_000, 4, "20s", 900, 45),
)
QUICK: Final = (
    SimulationSize(10, 2, "30s", 3_600, 8),
    SimulationSize(100, 4, "20s", 900, 6),
    SimulationSize(1_000, 4, "20s", 240, 3),
)
"""No run is shorter than the first minutes, in which a leader is elected and all nodes are registered."""


class SpeedMeasurement(NamedTuple):
    size: SimulationSize
    totals: RunTotals
    seconds: float
    bare_events_per_cpu_s: float
    """Events per CPU second of the bare loop, measured just before."""

    @property
    def hours_per_minute(self) -> float:
        return self.totals.counted_hours * 60 / self.seconds

    @property
    def events_per_cpu_s(self) -> float:
        return self.totals.events / self.totals.cpu_s if self.totals.cpu_s else 0.0


def measure(quick: bool) -> BenchReport:
    measurements = []
    for size in QUICK if quick else SIZES:
        bare = bare_loop_events_per_cpu_s(50_000 if quick else 200_000)
        print_progress(f"{_size_text(size)}: starting runs for {size.seconds:g} s on {PROCESSES} processes ...")
        measurements.append(_measure_size(size, bare))
    aims = [
        BenchAim(
            f"simulated hours a minute, {_size_text(measurements[0].size)}",
            "h/min",
            100,
            measurements[0].hours_per_minute,
            "higher",
        ),
        BenchAim(
            "events per CPU-second, lowest of all sizes",
            "1/s",
            30_000,
            min(measurement.events_per_cpu_s for measurement in measurements),
            "higher",
        ),
    ]
    return BenchReport("simulate", [_row(measurement) for measurement in measurements], aims)


def _size_text(size: SimulationSize) -> str:
    return f"{size.nodes:,} nodes at a beat of {size.heartbeat}"


def scenario(size: SimulationSize) -> Scenario:
    name = f"bench-{size.nodes}"
    plain = parse(name, f'include = ["_bench"]\nsummary = "{size.nodes} nodes, a small load and steady faults"')
    return replace(plain, cluster=replace(plain.cluster, nodes=size.nodes, agents=size.agents, beat=size.heartbeat))


def _measure_size(size: SimulationSize, bare: float) -> SpeedMeasurement:
    totals = RunTotals()
    started_ms = _CLOCK.now_ms()
    scenario_ = scenario(size)

    def tasks() -> Iterator[SeedTask]:
        seed = 0
        while seed < PROCESSES or _CLOCK.now_ms() - started_ms < size.seconds * 1000:
            seed += 1
            yield SeedTask(scenario_, seed, size.until_s)

    for done in run_seeds(tasks(), PROCESSES):
        totals.add(done.run, done.cpu_s)
        for violation in done.run.violations[:1]:
            print_progress(f"  seed {done.run.seed} VIOLATED {violation}")
    return SpeedMeasurement(size, totals, (_CLOCK.now_ms() - started_ms) / 1000, bare)


def _row(measurement: SpeedMeasurement) -> dict[str, Any]:
    totals = measurement.totals
    return {
        "nodes": measurement.size.nodes,
        "beat": measurement.size.heartbeat,
        "seeds": totals.seeds,
        "hours": totals.hours,
        "counted_hours": totals.counted_hours,
        "hours_a_minute": measurement.hours_per_minute,
        "hours_a_cpu_minute": totals.counted_hours * 60 / totals.cpu_s if totals.cpu_s else 0.0,
        "events_a_cpu_s": measurement.events_per_cpu_s,
        "bare_events_a_cpu_s": measurement.bare_events_per_cpu_s,
        "ratio": measurement.events_per_cpu_s / measurement.bare_events_per_cpu_s,
        "commits": totals.commits,
        "faults": totals.faults_all,
        "violations": totals.violations,
    }


def bare_loop_events_per_cpu_s(events: int) -> float:
    """Measure the event loop alone, with tasks that sleep and wake."""
    loop = SimLoop.seeded("bare")

    async def sleeper(number: int) -> None:
        while True:
            await asyncio.sleep(1 + number / SLEEPERS)
            if loop.events >= events:
                loop.stop()

    tasks = [loop.create_task(sleeper(number), name=f"sleeper {number}") for number in range(SLEEPERS)]
    began_s = cpu_s()
    loop.run(float(events))
    spent_s = max(cpu_s() - began_s, 0.001)
    loop.finish()
    del tasks  # unfinished tasks: the loop has closed them
    return loop.events / spent_s
