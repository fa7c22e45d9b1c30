"""Draws cluster shape and fault times from the seed.

Everything is drawn before the run starts. The effect of each fault is in kinds.py and node_faults.py.
"""

from __future__ import annotations

from math import ceil
from typing import Final, TypeVar

from msgspec.structs import replace

from remit.model.resources import parse_duration
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenarios import BOUNDS, FaultSpec, Injection, Scenario
from remit.simulate.world import random_streams
from remit.simulate.world.random_streams import Random

_SWARM_EVERY_S: Final = (20.0, 240.0)
_SMALL_BATCHES: Final = (1, 3, 16)
N = TypeVar("N", int, float)


def draw_shape(scenario: Scenario, seed: int) -> Scenario:
    """The cluster and load of this seed in a swarm scenario, drawn around the sizes of its file: some bugs show only at some
    sizes.
    """
    if not scenario.swarm:
        return scenario
    lots = random_streams.stream(random_streams.cluster_shape(random_streams.run_name(scenario.name, seed)))
    cluster, load = scenario.cluster, scenario.load

    def about(name: str, least: float = 0.5) -> int:
        part, _, field = name.partition(".")
        named = getattr(getattr(scenario, part), field)
        return _clamp(name, lots.randint(ceil(named * least), ceil(named * 1.5)))

    def few(name: str) -> int:
        return _clamp(f"cluster.{name}", 1 + lots.randrange(getattr(cluster, name) + 1))

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
            per_minute=_clamp("load.per_minute", load.per_minute * (0.75 + 0.75 * lots.random())),
            kinds=tuple(sorted(kinds)),
            standing_max=about("load.standing_max"),
            size=about("load.size"),
            quota=about("load.quota", 0.75),
            deletes=about("load.deletes", 0.0),
            operations=about("load.operations", 0.0),
        ),
    )


def _clamp(name: str, value: N) -> N:
    low, high = BOUNDS[name]
    return type(value)(min(max(value, low), high))


def draw_faults(scenario: Scenario, seed: int) -> tuple[Injection, ...]:
    """All faults of a run, ordered by time."""
    lots = random_streams.stream(random_streams.fault_schedule(random_streams.run_name(scenario.name, seed)))
    found: list[Injection] = []
    for line in (*scenario.faults, *_swarm_faults(scenario, lots)):
        for at_s in _fault_times(line, scenario.duration_s, lots):
            lasts_s = parse_duration(line.lasts) / 1000 * (0.5 + lots.random())
            lasts_s = min(lasts_s, max(0.0, scenario.duration_s - at_s))
            found.append(Injection(len(found), at_s, line.kind, lasts_s, line.size, line.where))
    return tuple(sorted(found, key=lambda one: (one.at_s, one.number)))


def _fault_times(line: FaultSpec, duration_s: float, lots: Random) -> list[float]:
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


def _swarm_faults(scenario: Scenario, lots: Random) -> list[FaultSpec]:
    """A few random kinds for this seed, each with its own rate. Many faults of few kinds find bugs that a few faults of all
    kinds do not.
    """
    if not scenario.swarm:
        return []
    able = [kind for kind in sorted(KINDS) if KINDS[kind].swarms and KINDS[kind].meets(scenario)]
    chosen = sorted(lots.sample(able, min(len(able), 1 + lots.randrange(scenario.swarm))))
    low_s, high_s = _SWARM_EVERY_S
    return [
        FaultSpec(kind, every=f"{low_s + (high_s - low_s) * lots.random():.1f}s", lasts=f"{1 + 40 * lots.random():.1f}s")
        for kind in chosen
    ]
