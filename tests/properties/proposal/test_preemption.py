"""Property: preemption is minimal and lawful, compared with every possible set of victims in small clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from remit.law.requirements import compile_requirements
from remit.model.kinds import Device, DeviceRequest, Node, NodeSpec
from remit.model.metadata import Metadata
from remit.observation.node_columns import NodeColumns, NodeFree
from remit.proposal.placement.preemption import (
    DisruptionAllowance,
    Eviction,
    ReleasingCapacity,
    VictimCandidates,
    plan_evictions,
)
from tests.properties.authority_world import amounts, workload
from tests.properties.effort import tries
from tests.unit.law.fit_oracle import devices_available


class Runner(NamedTuple):
    row: int
    priority: int
    group: int
    cpu: int
    memory: int
    gpu: str
    up: bool


class Cluster(NamedTuple):
    """Cores and gigabytes of each node, their free amounts, running replicas, and how many of each group must stay."""

    sizes: list[tuple[int, int]]
    free: list[tuple[int, int]]
    runners: list[Runner]
    least: list[int]
    need: tuple[int, int, int]
    open_rows: list[bool]


@st.composite
def clusters(draw: st.DrawFn, *, rich: bool = True) -> Cluster:
    """Without `rich`: only cores, and no disruption limits."""
    rows = draw(st.integers(1, 3))
    free = [(draw(st.integers(0, 2)), draw(st.integers(0, 2)) if rich else 0) for _ in range(rows)]
    runners, gpus = [], {(row, f"gpu-{i}") for row in range(rows) for i in range(2)}
    for _ in range(draw(st.integers(1, 7))):
        row = draw(st.integers(0, rows - 1))
        spare = sorted(name for at, name in gpus if at == row)
        gpu = draw(st.sampled_from(["", *spare])) if rich else ""
        gpus.discard((row, gpu))
        memory = draw(st.integers(0, 3)) if rich else 0
        up = draw(st.booleans())
        runners.append(Runner(row, draw(st.integers(0, 3)), draw(st.integers(0, 2)), draw(st.integers(1, 4)), memory, gpu, up))
    sizes = [
        (c + sum(r.cpu for r in runners if r.row == row), m + sum(r.memory for r in runners if r.row == row))
        for row, (c, m) in enumerate(free)
    ]
    least = [draw(st.integers(0, 2)) if rich else 0 for _ in range(3)]
    need = (draw(st.integers(1, 6)), draw(st.integers(0, 4)) if rich else 0, draw(st.integers(0, 2)) if rich else 0)
    return Cluster(sizes, free, runners, least, need, [draw(st.integers(0, 4)) > 0 for _ in range(rows)])


def planned(cluster: Cluster, count: int = 1, victims_max: int = 100) -> list[Eviction]:
    left, cpu, memory, gpus = [], *cluster.need
    for row, ((c, m), (free_c, free_m)) in enumerate(zip(cluster.sizes, cluster.free, strict=True)):
        devices = tuple(Device(name=f"gpu-{i}", kind="gpu", model="A10") for i in range(2))
        spec = NodeSpec(region="r", zone="z", capacity=amounts(cpu=str(c), memory=f"{m}Gi"), devices=devices)
        used = {r.gpu: 1000 for r in cluster.runners if r.row == row and r.gpu}
        left.append(
            NodeFree(Node(metadata=Metadata(name=f"n{row}"), spec=spec), {"cpu": 1000 * free_c, "memory": free_m << 30}, used)
        )
    asks = (DeviceRequest(kind="gpu", count=gpus),) if gpus else ()
    made = workload("w", str(cpu), devices=asks)
    resources = amounts(cpu=str(cpu), memory=f"{memory}Gi") if memory else amounts(cpu=str(cpu))
    spec_ = replace(made.spec, template=replace(made.spec.template, resources=resources))
    ask = compile_requirements("t", "w", {}, spec_, ())
    runners = cluster.runners
    none = np.zeros(0, dtype=np.int64)
    nothing = ReleasingCapacity(none, {"cpu": none, "memory": none}, {})
    found = VictimCandidates(
        slots=np.arange(len(runners)),
        rows=np.array([r.row for r in runners]),
        priority=np.array([r.priority for r in runners]),
        groups=np.array([r.group for r in runners]),
        up=np.array([r.up for r in runners]),
        amounts={"cpu": np.array([1000 * r.cpu for r in runners]), "memory": np.array([r.memory << 30 for r in runners])},
        devices={slot: {r.gpu: 1000} for slot, r in enumerate(runners) if r.gpu},
        assigned=nothing,
        releasing=nothing,
    )
    there, up = Counter(r.group for r in runners), Counter(r.group for r in runners if r.up)
    spare = DisruptionAllowance(
        *(np.array([count[group] - least for group, least in enumerate(cluster.least)]) for count in (there, up))
    )
    rows = np.array(cluster.open_rows)
    return plan_evictions(ask, NodeColumns(left), rows, found, spare, count=count, victims_max=victims_max).evictions


def would_do(cluster: Cluster, row: int, gone: tuple[int, ...]) -> bool:
    cpu, memory, gpus = cluster.need
    runners = [cluster.runners[one] for one in gone]
    used = {r.gpu: 1000 for slot, r in enumerate(cluster.runners) if r.row == row and r.gpu and slot not in gone}
    devices = [Device(name=f"gpu-{i}", kind="gpu", model="A10") for i in range(2)]
    return (
        cluster.free[row][0] + sum(r.cpu for r in runners) >= cpu
        and cluster.free[row][1] + sum(r.memory for r in runners) >= memory
        and devices_available([DeviceRequest(kind="gpu", count=gpus)] if gpus else [], devices, used)
    )


def is_lawful(cluster: Cluster, gone: tuple[int, ...]) -> bool:
    """Enough of each group stay, and stay ready; a group with too few loses none."""
    for group, least in enumerate(cluster.least):
        of = [slot for slot, r in enumerate(cluster.runners) if r.group == group]
        going = [slot for slot in of if slot in gone]
        ups = [slot for slot in of if cluster.runners[slot].up]
        if going and len(of) - len(going) < least:
            return False
        if any(slot in gone for slot in ups) and sum(slot not in gone for slot in ups) < least:
            return False
    return True


def possible_evictions(cluster: Cluster) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every row and every lawful set of victims that suffices there."""
    for row, is_open in enumerate(cluster.open_rows):
        there = [slot for slot, r in enumerate(cluster.runners) if r.row == row]
        for size in range(1, len(there) + 1) if is_open else ():
            for gone in combinations(there, size):
                if is_lawful(cluster, gone) and would_do(cluster, row, gone):
                    yield row, gone


def fits_already(cluster: Cluster) -> bool:
    return any(would_do(cluster, row, ()) for row, is_open in enumerate(cluster.open_rows) if is_open)


@tries(150, 300)
@given(clusters())
def test_no_victim_is_superfluous_or_protected(cluster: Cluster) -> None:
    for one in planned(cluster, count=3):
        assert cluster.open_rows[one.row]
        assert one.victims
        assert would_do(cluster, one.row, one.victims)
        for victim in one.victims:
            assert cluster.runners[victim].row == one.row
            assert not would_do(cluster, one.row, tuple(v for v in one.victims if v != victim)), f"{victim} is superfluous"
    gone = tuple(victim for one in planned(cluster, count=3) for victim in one.victims)
    assert len(set(gone)) == len(gone)
    assert is_lawful(cluster, gone)


@tries(150, 300)
@given(clusters(rich=False))
def test_preemption_prefers_lowest_priorities_then_fewest_victims(cluster: Cluster) -> None:
    if fits_already(cluster):
        return
    found = planned(cluster)
    costs = [(max(cluster.runners[one].priority for one in gone), len(gone)) for _, gone in possible_evictions(cluster)]
    assert len(found) == min(len(costs), 1)
    if found:
        cost = max(cluster.runners[victim].priority for victim in found[0].victims), len(found[0].victims)
        assert cost == min(costs)


@tries(150, 300)
@given(clusters(rich=False), st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_preemption_within_disruption_limits_is_found_if_possible(cluster: Cluster, least: list[int]) -> None:
    cluster = cluster._replace(least=least)
    if not fits_already(cluster):
        assert bool(planned(cluster)) == any(True for _ in possible_evictions(cluster))


@settings(max_examples=100)
@given(clusters(), st.integers(0, 4))
def test_preemption_respects_maximum_number_of_victims(cluster: Cluster, most: int) -> None:
    assert sum(len(one.victims) for one in planned(cluster, count=3, victims_max=most)) <= most
