"""`bench simulate`: simulated hours per minute.

The same scenario at three sizes, on two processes, beside a bare loop.

An hour counts only as far as it had 70 faults and 1,000 commits that decided something. The yardstick is the bare loop
with tasks that do nothing but sleep: the ratio says what Remit's code, the judge and the store cost on top of it. The beats are
ten and fifteen times the product's own, and an hour costs the less for it: every row names its beat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from remit.bench.report import Aim, Report, say
from remit.simulate.scenarios import Scenario, parse
from remit.simulate.seed_runner import Task, Totals, cpu_s, swarm
from remit.simulate.world.event_loop import SimLoop
from remit.world.clock import BootClock

PROCESSES: Final = 2
SLEEPERS: Final = 100

_CLOCK = BootClock()


class Size(NamedTuple):
    """A cluster to measure; `until_s` is how much of a run is simulated, and `seconds` for how long runs are begun."""

    nodes: int
    agents: int
    beat: str
    until_s: float
    seconds: float


SIZES: Final = (Size(10, 2, "30s", 3_600, 60), Size(100, 4, "20s", 3_600, 60), Size(1_000, 4, "20s", 900, 45))
QUICK: Final = (Size(10, 2, "30s", 3_600, 8), Size(100, 4, "20s", 900, 6), Size(1_000, 4, "20s", 240, 3))
"""No run is shorter than the first minutes, in which somebody comes to lead and every node is told of."""


class Measured(NamedTuple):
    size: Size
    totals: Totals
    seconds: float
    bare: float
    """Events of the bare loop a CPU-second, just before."""

    @property
    def hours_a_minute(self) -> float:
        return self.totals.counted_hours * 60 / self.seconds

    @property
    def events_a_cpu_s(self) -> float:
        return self.totals.events / self.totals.cpu_s if self.totals.cpu_s else 0.0


def measure(quick: bool) -> Report:
    found = []
    for size in QUICK if quick else SIZES:
        bare = bare_events_a_cpu_s(50_000 if quick else 200_000)
        say(f"{_named(size)}: runs are begun for {size.seconds:g} s on {PROCESSES} processes ...")
        found.append(_measured(size, bare))
    aims = [
        Aim(f"simulated hours a minute, {_named(found[0].size)}", "h/min", 100, found[0].hours_a_minute, "higher"),
        Aim("events a CPU-second, the least of all sizes", "1/s", 30_000, min(one.events_a_cpu_s for one in found), "higher"),
    ]
    return Report("simulate", [_row(one) for one in found], aims)


def _named(size: Size) -> str:
    return f"{size.nodes:,} nodes at a beat of {size.beat}"


def scenario(size: Size) -> Scenario:
    name = f"bench-{size.nodes}"
    plain = parse(name, f'include = ["_bench"]\nsummary = "{size.nodes} nodes, a small load and steady faults"')
    return replace(plain, cluster=replace(plain.cluster, nodes=size.nodes, agents=size.agents, beat=size.beat))


def _measured(size: Size, bare: float) -> Measured:
    totals = Totals()
    began_ms = _CLOCK.now_ms()
    one = scenario(size)

    def tasks() -> Iterator[Task]:
        seed = 0
        while seed < PROCESSES or _CLOCK.now_ms() - began_ms < size.seconds * 1000:
            seed += 1
            yield Task(one, seed, size.until_s)

    for done in swarm(tasks(), PROCESSES):
        totals.add(done.run, done.cpu_s)
        for violation in done.run.violations[:1]:
            say(f"  seed {done.run.seed} BROKE {violation}")
    return Measured(size, totals, (_CLOCK.now_ms() - began_ms) / 1000, bare)


def _row(one: Measured) -> dict[str, Any]:
    totals = one.totals
    return {
        "nodes": one.size.nodes,
        "beat": one.size.beat,
        "seeds": totals.seeds,
        "hours": totals.hours,
        "counted_hours": totals.counted_hours,
        "hours_a_minute": one.hours_a_minute,
        "hours_a_cpu_minute": totals.counted_hours * 60 / totals.cpu_s if totals.cpu_s else 0.0,
        "events_a_cpu_s": one.events_a_cpu_s,
        "bare_events_a_cpu_s": one.bare,
        "ratio": one.events_a_cpu_s / one.bare,
        "commits": totals.commits,
        "faults": totals.faults_all,
        "violations": totals.violations,
    }


def bare_events_a_cpu_s(events: int) -> float:
    """The loop alone: tasks that sleep, wake and sleep again."""
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
    del tasks  # nobody awaits them: they are ended with the loop
    return loop.events / spent_s
