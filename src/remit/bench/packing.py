"""`bench packing`: GPU allocation against published policies.

Remit's own placing next to six published policies, on the same arrivals.

Remit's row is the kernel that schedulers run, with its default scores, asked for one replica after another. The yardsticks see
the same pods in the same order on the same nodes, once for each seed. What is told of each policy is how many of all GPUs are
given out, in per cent, when the pods that came ask for 100 and for 130 per cent of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple, Protocol

from remit.bench.packing_baselines import YARDSTICKS, Course, Machine, Pod, Trace, course, read
from remit.bench.report import Aim, Report, say
from remit.law.fit import Ask
from remit.law.requirements import make_ask
from remit.model.kinds import Device, DeviceAsk, Node, NodeHealth, NodeSpec, NodeStatus, Template, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.resources import WHOLE, Amount
from remit.observation.node_columns import Columns, Left
from remit.observation.topology_counts import ColumnPeers
from remit.proposal.placement.builtin_plugins import DEFAULT
from remit.proposal.placement.fragmentation import Fragmentation
from remit.proposal.placement.kernel import Kernel
from remit.simulate.seed_runner import cpu_s

OURS: Final = "default"
POLICIES: Final = (*YARDSTICKS, OURS)
QUICK_POLICIES: Final = ("bestfit", "fgd", OURS)
QUICK_SEEDS: Final = 2
POINTS: Final = (100, 130)
"""Per cent of all GPUs that those who came ask for."""
SECONDS_MAX: Final = 180
AHEAD: Final = 0.01
PUBLISHED: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("default", "bestfit"): (93.1, 0.3),
    ("default", "fgd"): (95.3, 0.2),
}
"""By workload and policy: what was published at 130 per cent, and how far off a faithful yardstick may be."""


class Policy(Protocol):
    def place(self, sort: int) -> bool:
        """One more of this sort has come; was there a place for it?"""
        ...


class Outcome(NamedTuple):
    """Of one seed: per cent of all GPUs given out at each of the POINTS, and of the pods without GPUs those placed."""

    given: tuple[float, ...]
    others: float


def measure(
    directory: Path, workloads: Sequence[str], policies: Sequence[str], seeds: Sequence[int], quick: bool = False
) -> Report:
    seeds = seeds[:QUICK_SEEDS] if quick else seeds
    policies = policies or (QUICK_POLICIES if quick else POLICIES)
    traces = [read(directory, workload) for workload in dict.fromkeys(workloads)]
    rows = []
    for trace in traces:
        for policy in (one for one in POLICIES if one in policies):
            rows.append(_row(trace, policy, seeds))
            found = ", ".join(f"{rows[-1][f'alloc_pct_at_{point}']:.2f} % at {point} %" for point in POINTS)
            say(f"{trace.workload}: {policy} gives out {found} ({rows[-1]['seconds']:.0f} s) ...")
    return Report("packing", rows, _aims(rows))


def _row(trace: Trace, policy: str, seeds: Sequence[int]) -> dict[str, Any]:
    began = cpu_s()
    found = []
    for seed in seeds:
        arrivals = course(trace, seed)
        found.append(replay(trace, arrivals, Ours(trace, arrivals) if policy == OURS else YARDSTICKS[policy](trace, arrivals)))
    row: dict[str, Any] = {"policy": policy, "workload": trace.workload}
    for at, point in enumerate(POINTS):
        given = [one.given[at] for one in found]
        row[f"alloc_pct_at_{point}"] = fmean(given)
        row[f"alloc_pct_at_{point}_sd"] = row["sd"] = stdev(given) if len(given) > 1 else 0.0
    row["non_gpu_placed_pct"] = fmean(one.others for one in found)
    return {**row, "seeds": len(seeds), "seconds": cpu_s() - began}


def replay(trace: Trace, arrivals: Course, policy: Policy) -> Outcome:
    asked = given = others = placed = 0
    readings: list[tuple[float, float]] = []
    for sort in arrivals.coming:
        pod = trace.sorts[sort]
        found = policy.place(sort)
        asked += pod.asked
        given += pod.asked if found else 0
        others += not pod.gpus
        placed += found and not pod.gpus
        readings.append((100 * asked / trace.capacity, 100 * given / trace.capacity))
    return Outcome(tuple(_at(point, readings) for point in POINTS), 100 * placed / others if others else 100.0)


def _at(point: int, readings: Sequence[tuple[float, float]]) -> float:
    """The mean of all readings that are nearest to this point, as it was published; the last before it, if there are none."""
    near = [given for asked, given in readings if round(asked) == point]
    return fmean(near) if near else next((given for asked, given in reversed(readings) if asked < point), 0.0)


def _aims(rows: Sequence[dict[str, Any]]) -> list[Aim]:
    aims = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        by_policy = {row["policy"]: row for row in rows if row["workload"] == workload}
        ours = by_policy.pop(OURS, None)
        for point in POINTS:
            if ours is None or not by_policy:
                break
            key = f"alloc_pct_at_{point}"
            best = max(by_policy, key=lambda policy: float(by_policy[policy][key]))
            name = f"{workload}: {OURS} over the best other ({best}) at {point} %"
            aims.append(Aim(name, "points", AHEAD, ours[key] - by_policy[best][key], "higher"))
        for policy, row in by_policy.items():
            if (workload, policy) in PUBLISHED:
                published, off = PUBLISHED[workload, policy]
                name = f"{workload}: {policy} off the published {published} at 130 %"
                aims.append(Aim(name, "points", off, abs(row["alloc_pct_at_130"] - published), "lower"))
    return [*aims, Aim("the slowest policy on a workload", "s", SECONDS_MAX, max(row["seconds"] for row in rows), "lower")]


# ------------------------------------------------------------------------------------------------------------------ Remit's


class Ours:
    """The kernel with a scheduler's default scores. What comes is told to the score when it comes, as a scheduler does."""

    def __init__(self, trace: Trace, arrivals: Course) -> None:
        nodes = [_node(at, machine) for at, machine in enumerate(arrivals.machines)]
        self.columns = Columns(Left(node, dict(node.spec.capacity.pairs), {}) for node in nodes)
        self._asks = [_ask(at, pod) for at, pod in enumerate(trace.sorts)]
        self._fragmentation = Fragmentation(self.columns)
        scores = (*DEFAULT, self._fragmentation.score)
        self.kernel = Kernel(self.columns, ColumnPeers(self.columns, {}), scores=scores)

    def place(self, sort: int) -> bool:
        kernel, ask = self.kernel, self._asks[sort]
        self._fragmentation.arrived(ask)
        self._fragmentation.renew()
        one = kernel.known(sort, ask)
        row = kernel.place(one)
        if row < 0:
            return False
        kernel.post(one, row, kernel.choose(one, row))
        return True


def _node(at: int, machine: Machine) -> Node:
    devices = tuple(Device(name=f"gpu-{place}", kind="gpu", model=machine.model) for place in range(machine.gpus))
    capacity = Amount({"cpu": machine.cpu, "memory": machine.memory_mib << 20})
    spec = NodeSpec(region="trace", zone="trace", capacity=capacity, devices=devices)
    return Node(metadata=Metadata(name=f"node-{at}"), spec=spec, status=NodeStatus(health=NodeHealth.READY))


def _ask(at: int, pod: Pod) -> Ask:
    devices: tuple[DeviceAsk, ...] = ()
    if pod.gpus and pod.share < WHOLE:
        devices = (DeviceAsk(kind="gpu", share=f"{pod.share}m", models=pod.models),)
    elif pod.gpus:
        devices = (DeviceAsk(kind="gpu", count=pod.gpus, models=pod.models),)
    resources = Amount({"cpu": pod.cpu, "memory": pod.memory_mib << 20})
    template = Template(command=("serve",), resources=resources, devices=devices)
    return make_ask("trace", f"pod-{at}", {}, WorkloadSpec(type="service", template=template), ())
