"""Draws cluster shape and fault times from the seed.

The shape of a swarm, and when faults come; what each does is faults.py.
"""

from __future__ import annotations

from math import ceil
from typing import Final, TypeVar

from msgspec.structs import replace

from remit.model.resources import parse_duration
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenarios import BOUNDS, FaultLine, Injection, Scenario
from remit.simulate.world.event_loop import Lots, stream

_SWARM_EVERY_S: Final = (20.0, 240.0)
_SMALL_BATCHES: Final = (1, 3, 16)
N = TypeVar("N", int, float)


def shaped(scenario: Scenario, seed: int) -> Scenario:
    """The cluster and the load of this seed, around those that a swarm names: what never fails at one size may at another."""
    if not scenario.swarm:
        return scenario
    lots = stream(f"{scenario.name}/{seed}/shape")
    cluster, load = scenario.cluster, scenario.load

    def about(name: str, least: float = 0.5) -> int:
        part, _, field = name.partition(".")
        named = getattr(getattr(scenario, part), field)
        return _within(name, lots.randint(ceil(named * least), ceil(named * 1.5)))

    def few(name: str) -> int:
        return _within(f"cluster.{name}", 1 + lots.randrange(getattr(cluster, name) + 1))

    small = lots.choice(_SMALL_BATCHES) if lots.random() < 0.3 else cluster.batch
    kinds = lots.sample(load.kinds, lots.randint(ceil(len(load.kinds) / 2), len(load.kinds)))
    return replace(
        scenario,
        cluster=replace(
            cluster,
            servers=few("servers"),
            agents=few("agents"),
            schedulers=few("schedulers"),
            controllers=few("controllers"),
            nodes=about("cluster.nodes"),
            batch=min(small, cluster.batch),
        ),
        load=replace(
            load,
            per_minute=_within("load.per_minute", load.per_minute * (0.75 + 0.75 * lots.random())),
            kinds=tuple(sorted(kinds)),
            standing_max=about("load.standing_max"),
            size=about("load.size"),
            quota=about("load.quota", 0.75),
            deletes=about("load.deletes", 0.0),
            operations=about("load.operations", 0.0),
        ),
    )


def _within(name: str, value: N) -> N:
    low, high = BOUNDS[name]
    return type(value)(min(max(value, low), high))


def draw(scenario: Scenario, seed: int) -> tuple[Injection, ...]:
    """Every fault of this run, in the order of time."""
    lots = stream(f"{scenario.name}/{seed}/plan")
    found: list[Injection] = []
    for line in (*scenario.faults, *_swarmed(scenario, lots)):
        for at_s in _moments(line, scenario.duration_s, lots):
            lasts_s = parse_duration(line.lasts) / 1000 * (0.5 + lots.random())
            lasts_s = min(lasts_s, max(0.0, scenario.duration_s - at_s))
            found.append(Injection(len(found), at_s, line.kind, lasts_s, line.size, line.where))
    return tuple(sorted(found, key=lambda one: (one.at_s, one.number)))


def _moments(line: FaultLine, duration_s: float, lots: Lots) -> list[float]:
    if line.at:
        at_s = parse_duration(line.at) / 1000
        return [at_s] if at_s < duration_s else []
    mean_s = max(parse_duration(line.every) / 1000, 0.1)
    moments: list[float] = []
    at_s = lots.expovariate(1 / mean_s)
    while at_s < duration_s:
        moments.append(at_s)
        at_s += lots.expovariate(1 / mean_s)
    return moments


def _swarmed(scenario: Scenario, lots: Lots) -> list[FaultLine]:
    """A few kinds for this seed, each at a rate of its own: many faults of few kinds find what a little of all does not."""
    if not scenario.swarm:
        return []
    able = [kind for kind in sorted(KINDS) if KINDS[kind].swarms and KINDS[kind].meets(scenario)]
    chosen = sorted(lots.sample(able, min(len(able), 1 + lots.randrange(scenario.swarm))))
    low_s, high_s = _SWARM_EVERY_S
    return [
        FaultLine(kind, every=f"{low_s + (high_s - low_s) * lots.random():.1f}s", lasts=f"{1 + 40 * lots.random():.1f}s")
        for kind in chosen
    ]
