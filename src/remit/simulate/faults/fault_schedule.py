"""Draws cluster shape and fault times from the seed.

Everything is drawn before the run starts. The effect of each fault is in kinds.py and node_faults.py.
"""

from __future__ import annotations

from math import ceil
from typing import Final, TypeVar

from msgspec.structs import replace

from remit.model.resources import parse_duration
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenario_types import FaultSpec, Injection, Scenario
from remit.simulate.scenarios import BOUNDS
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
    rng = random_streams.stream(random_streams.cluster_shape(random_streams.run_name(scenario.name, seed)))
    cluster, load = scenario.cluster, scenario.load

    def draw_around(name: str, low_factor: float = 0.5) -> int:
        part, _, field = name.partition(".")
        size = getattr(getattr(scenario, part), field)
        return _clamp(name, rng.randint(ceil(size * low_factor), ceil(size * 1.5)))

    def draw_count(name: str) -> int:
        return _clamp(f"cluster.{name}", 1 + rng.randrange(getattr(cluster, name) + 1))

    small = rng.choice(_SMALL_BATCHES) if rng.random() < 0.3 else cluster.batch
    kinds = rng.sample(load.kinds, rng.randint(ceil(len(load.kinds) / 2), len(load.kinds)))
    return replace(
        scenario,
        cluster=replace(
            cluster,
            servers=draw_count("servers"),
            agents=draw_count("agents"),
            schedulers=draw_count("schedulers"),
            controllers=draw_count("controllers"),
            nodes=draw_around("cluster.nodes"),
            batch=min(small, cluster.batch),
        ),
        load=replace(
            load,
            per_minute=_clamp("load.per_minute", load.per_minute * (0.75 + 0.75 * rng.random())),
            kinds=tuple(sorted(kinds)),
            standing_max=draw_around("load.standing_max"),
            size=draw_around("load.size"),
            quota=draw_around("load.quota", 0.75),
            deletes=draw_around("load.deletes", 0.0),
            operations=draw_around("load.operations", 0.0),
        ),
    )


def _clamp(name: str, value: N) -> N:
    low, high = BOUNDS[name]
    return type(value)(min(max(value, low), high))


def draw_faults(scenario: Scenario, seed: int) -> tuple[Injection, ...]:
    """All faults of a run, ordered by time."""
    rng = random_streams.stream(random_streams.fault_schedule(random_streams.run_name(scenario.name, seed)))
    injections: list[Injection] = []
    for line in (*scenario.faults, *_swarm_faults(scenario, rng)):
        for at_s in _fault_times(line, scenario.duration_s, rng):
            lasts_s = parse_duration(line.lasts) / 1000 * (0.5 + rng.random())
            lasts_s = min(lasts_s, max(0.0, scenario.duration_s - at_s))
            injections.append(Injection(len(injections), at_s, line.kind, lasts_s, line.size, line.where))
    return tuple(sorted(injections, key=lambda injection: (injection.at_s, injection.number)))


def _fault_times(line: FaultSpec, duration_s: float, rng: Random) -> list[float]:
    if line.at:
        at_s = parse_duration(line.at) / 1000
        return [at_s] if at_s < duration_s else []
    mean_s = max(parse_duration(line.every) / 1000, 0.1)
    times: list[float] = []
    at_s = rng.expovariate(1 / mean_s)
    while at_s < duration_s:
        times.append(at_s)
        at_s += rng.expovariate(1 / mean_s)
    return times


def _swarm_faults(scenario: Scenario, rng: Random) -> list[FaultSpec]:
    """A few random kinds for this seed, each with its own rate. Many faults of few kinds find bugs that a few faults of all
    kinds do not.
    """
    if not scenario.swarm:
        return []
    candidates = [kind for kind in sorted(KINDS) if KINDS[kind].swarms and KINDS[kind].is_supported_by(scenario)]
    chosen = sorted(rng.sample(candidates, min(len(candidates), 1 + rng.randrange(scenario.swarm))))
    low_s, high_s = _SWARM_EVERY_S
    return [
        FaultSpec(kind, every=f"{low_s + (high_s - low_s) * rng.random():.1f}s", lasts=f"{1 + 40 * rng.random():.1f}s")
        for kind in chosen
    ]
