"""`bench packing`: GPU allocation against published policies.

Remit's row is the scheduler's kernel with its default scores, placing one replica after another. The baselines get the same
pods in the same order on the same nodes, once per seed. The result of a policy is the percentage of GPUs allocated when the
pods that have arrived request 100 and 130 per cent of all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple, Protocol

from remit.bench.packing_baselines import BASELINES, ArrivalOrder, PodTrace, TraceNode, TracePod, draw_arrivals, read_trace
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.law.fit import Requirements
from remit.law.requirements import compile_requirements
from remit.model.kinds import Device, DeviceRequest, Node, NodeHealth, NodeSpec, NodeStatus, Template, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.resources import WHOLE_DEVICE, Amount
from remit.observation.node_columns import NodeColumns, NodeFree
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.fragmentation import Fragmentation
from remit.proposal.placement.kernel import Kernel
from remit.simulate.seed_runner import cpu_s

REMIT_POLICY: Final = "default"
POLICIES: Final = (*BASELINES, REMIT_POLICY)
QUICK_POLICIES: Final = ("bestfit", "fgd", REMIT_POLICY)
QUICK_SEEDS: Final = 2
POINTS: Final = (100, 130)
"""Requested GPUs as a percentage of all GPUs, at which allocation is read."""
SECONDS_MAX: Final = 180
LEAD_POINTS: Final = 0.01
PUBLISHED: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("default", "bestfit"): (93.1, 0.3),
    ("default", "fgd"): (95.3, 0.2),
}
"""Published allocation at 130 per cent by workload and policy, and by how much a correct baseline may differ."""


class PackingPolicy(Protocol):
    def place(self, pod_type: int) -> bool:
        """Place one more pod of this type. Returns whether it fit."""
        ...


class PackingOutcome(NamedTuple):
    """Result of one seed: percentage of GPUs allocated at each of the POINTS, and percentage of non-GPU pods placed."""

    allocated_pct: tuple[float, ...]
    non_gpu_placed_pct: float


def measure(
    directory: Path, workloads: Sequence[str], policies: Sequence[str], seeds: Sequence[int], quick: bool = False
) -> BenchReport:
    seeds = seeds[:QUICK_SEEDS] if quick else seeds
    policies = policies or (QUICK_POLICIES if quick else POLICIES)
    traces = [read_trace(directory, workload) for workload in dict.fromkeys(workloads)]
    rows = []
    for trace in traces:
        for policy in (name for name in POLICIES if name in policies):
            rows.append(_row(trace, policy, seeds))
            summary = ", ".join(f"{rows[-1][f'alloc_pct_at_{point}']:.2f} % at {point} %" for point in POINTS)
            print_progress(f"{trace.workload}: {policy} allocates {summary} ({rows[-1]['seconds']:.0f} s) ...")
    return BenchReport("packing", rows, _aims(rows))


def _row(trace: PodTrace, policy: str, seeds: Sequence[int]) -> dict[str, Any]:
    started_s = cpu_s()
    outcomes = []
    for seed in seeds:
        arrivals = draw_arrivals(trace, seed)
        outcomes.append(
            replay(
                trace, arrivals, RemitPolicy(trace, arrivals) if policy == REMIT_POLICY else BASELINES[policy](trace, arrivals)
            )
        )
    row: dict[str, Any] = {"policy": policy, "workload": trace.workload}
    for index, point in enumerate(POINTS):
        allocated = [outcome.allocated_pct[index] for outcome in outcomes]
        row[f"alloc_pct_at_{point}"] = fmean(allocated)
        row[f"alloc_pct_at_{point}_sd"] = row["sd"] = stdev(allocated) if len(allocated) > 1 else 0.0
    row["non_gpu_placed_pct"] = fmean(outcome.non_gpu_placed_pct for outcome in outcomes)
    return {**row, "seeds": len(seeds), "seconds": cpu_s() - started_s}


def replay(trace: PodTrace, arrivals: ArrivalOrder, policy: PackingPolicy) -> PackingOutcome:
    requested = allocated = non_gpu = non_gpu_placed = 0
    readings: list[tuple[float, float]] = []
    for pod_type in arrivals.arrivals:
        pod = trace.pod_types[pod_type]
        placed_now = policy.place(pod_type)
        requested += pod.gpu_request
        allocated += pod.gpu_request if placed_now else 0
        non_gpu += not pod.gpus
        non_gpu_placed += placed_now and not pod.gpus
        readings.append((100 * requested / trace.capacity, 100 * allocated / trace.capacity))
    return PackingOutcome(
        tuple(_reading_at(point, readings) for point in POINTS), 100 * non_gpu_placed / non_gpu if non_gpu else 100.0
    )


def _reading_at(point: int, readings: Sequence[tuple[float, float]]) -> float:
    """Return the mean of the readings that round to this point, as published; without any, the last reading before it."""
    near = [allocated for requested, allocated in readings if round(requested) == point]
    return fmean(near) if near else next((allocated for requested, allocated in reversed(readings) if requested < point), 0.0)


def _aims(rows: Sequence[dict[str, Any]]) -> list[BenchAim]:
    aims = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        by_policy = {row["policy"]: row for row in rows if row["workload"] == workload}
        ours = by_policy.pop(REMIT_POLICY, None)
        for point in POINTS:
            if ours is None or not by_policy:
                break
            key = f"alloc_pct_at_{point}"
            best = max(by_policy, key=lambda policy: float(by_policy[policy][key]))
            name = f"{workload}: {REMIT_POLICY} over the best other ({best}) at {point} %"
            aims.append(BenchAim(name, "points", LEAD_POINTS, ours[key] - by_policy[best][key], "higher"))
        for policy, row in by_policy.items():
            if (workload, policy) in PUBLISHED:
                published, off = PUBLISHED[workload, policy]
                name = f"{workload}: {policy} off the published {published} at 130 %"
                aims.append(BenchAim(name, "points", off, abs(row["alloc_pct_at_130"] - published), "lower"))
    return [*aims, BenchAim("the slowest policy on a workload", "s", SECONDS_MAX, max(row["seconds"] for row in rows), "lower")]


# ------------------------------------------------------------------------------------------------------------------ Remit's


class RemitPolicy:
    """The kernel with a scheduler's default scores. Arriving pods are reported to the fragmentation score."""

    def __init__(self, trace: PodTrace, arrivals: ArrivalOrder) -> None:
        nodes = [_node(index, machine) for index, machine in enumerate(arrivals.nodes)]
        self.columns = NodeColumns(NodeFree(node, dict(node.spec.capacity.pairs), {}) for node in nodes)
        self._requirements = [_requirements(index, pod) for index, pod in enumerate(trace.pod_types)]
        self._fragmentation = Fragmentation(self.columns)
        scores = (*DEFAULT_SCORES, self._fragmentation.score)
        self.kernel = Kernel(self.columns, ColumnPeerCounts(self.columns, {}), scores=scores)

    def place(self, pod_type: int) -> bool:
        kernel, requirements = self.kernel, self._requirements[pod_type]
        self._fragmentation.arrived(requirements)
        self._fragmentation.update_weights()
        class_ = kernel.class_for(pod_type, requirements)
        row = kernel.best_row(class_)
        if row < 0:
            return False
        kernel.post(class_, row, kernel.choose_devices(class_, row))
        return True


def _node(index: int, machine: TraceNode) -> Node:
    devices = tuple(Device(name=f"gpu-{number}", kind="gpu", model=machine.model) for number in range(machine.gpus))
    capacity = Amount({"cpu": machine.cpu, "memory": machine.memory_mib << 20})
    spec = NodeSpec(region="trace", zone="trace", capacity=capacity, devices=devices)
    return Node(metadata=Metadata(name=f"node-{index}"), spec=spec, status=NodeStatus(health=NodeHealth.READY))


def _requirements(index: int, pod: TracePod) -> Requirements:
    devices: tuple[DeviceRequest, ...] = ()
    if pod.gpus and pod.share < WHOLE_DEVICE:
        devices = (DeviceRequest(kind="gpu", share=f"{pod.share}m", models=pod.models),)
    elif pod.gpus:
        devices = (DeviceRequest(kind="gpu", count=pod.gpus, models=pod.models),)
    resources = Amount({"cpu": pod.cpu, "memory": pod.memory_mib << 20})
    template = Template(command=("serve",), resources=resources, devices=devices)
    return compile_requirements("trace", f"pod-{index}", {}, WorkloadSpec(type="service", template=template), ())
