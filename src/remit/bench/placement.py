"""`bench place`: kernel placements per second.

Measures the scheduler's kernel alone: nothing is claimed or written. Nodes and workloads are drawn with fixed seeds.

Included in the time: updating the cached state of a class since its last use, choosing the node and its devices, and posting
the replica to the node columns and peer counts. Not included: building nodes, columns and classes, and a first round in
which every class is used once. The load is steady: between two uses of a class, all others are used.

Different numbers of nodes, and two baselines on the same nodes, are measured alternately, so that growth and ratios hold
even on a machine whose speed varies. The **plain loop** evaluates law/fit.py for every node and takes the best by the same
score; **first fit** takes the first node that fits. Both request resources and node selectors only, and each row is compared
with the plain loop on the same nodes. Rates are by wall-clock time; the rate by CPU time is given beside them.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from remit.assembly import tune_interpreter
from remit.bench.growth_chart import ChartLine, draw
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.law.fit import NO_PEERS, Requirements, misfit
from remit.law.ledgers import NodeLedger
from remit.law.requirements import compile_requirements
from remit.model.kinds import (
    Affinity,
    Device,
    DeviceRequest,
    Node,
    NodeHealth,
    NodeSpec,
    NodeStatus,
    Placement,
    Spread,
    Template,
    WorkloadSpec,
)
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.node_columns import NodeColumns, NodeFree
from remit.observation.topology_counts import ColumnPeerCounts
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel
from remit.world.clock import BootClock
from remit.world.randomness import SeededRandomness

ZONES: Final = ("eu-a", "eu-b", "eu-c")
CORES: Final = (32, 64, 96, 128)
GIB_PER_CORE: Final = (3, 4, 6)
GPUS: Final = tuple(Device(name=f"gpu-{at}", kind="gpu", model="A10") for at in range(8))
LABELS: Final = {"disk": ("ssd", "hdd"), "arch": ("amd64", "arm64")}
NODE_SELECTORS: Final[tuple[dict[str, str], ...]] = (
    {},
    *({"disk": disk} for disk in LABELS["disk"]),
    *({"arch": arch} for arch in LABELS["arch"]),
    *({"disk": disk, "arch": arch} for disk in LABELS["disk"] for arch in LABELS["arch"]),
)
"""Node selectors: a class may run on all nodes, on half, or on a quarter of them."""


class PlacementFeature(NamedTuple):
    """A placement feature to measure: what every class requests in addition to resources and a node selector."""

    name: str
    place: Callable[[str, dict[str, str]], Placement] = lambda app, mask: Placement(node_selector=mask)
    devices: tuple[DeviceRequest, ...] = ()
    capacity: float = 60
    """How many replicas fit on a node, on average and with a margin."""
    class_limit: float = 60
    """Maximum number of replicas of one class per node of the cluster."""


def _spread(app: str, mask: dict[str, str]) -> Placement:
    return Placement(node_selector=mask, topology_spread=(Spread(topology_key="zone", max_skew=1),))


def _affinity(app: str, mask: dict[str, str]) -> Placement:
    return Placement(node_selector=mask, affinity=(Affinity(topology_key="zone", label_selector={"app": app}),))


def _anti_affinity(app: str, mask: dict[str, str]) -> Placement:
    return Placement(node_selector=mask, anti_affinity=(Affinity(topology_key="node", label_selector={"app": app}),))


RESOURCES: Final = PlacementFeature("resources")
FEATURES: Final = (
    RESOURCES,
    PlacementFeature("spread", _spread),
    PlacementFeature("affinity", _affinity, capacity=12),
    PlacementFeature("anti-affinity", _anti_affinity, class_limit=0.2),
    PlacementFeature("whole GPU", devices=(DeviceRequest(kind="gpu", count=1),), capacity=1.5),
    PlacementFeature("GPU share", devices=(DeviceRequest(kind="gpu", share="50m"),), capacity=25),
)
"""Spread is a hard constraint with a skew of one over three zones. Affinity is to the class's own replicas in a zone;
anti-affinity is to them on a node.
"""


class SyntheticCluster:
    """Nodes of mixed sizes in three zones, half of them with GPUs, all empty."""

    def __init__(self, nodes: int) -> None:
        rng = SeededRandomness(f"bench place/{nodes}")
        self.nodes = [_node(index, rng) for index in range(nodes)]
        self.columns = NodeColumns(NodeFree(node, dict(node.spec.capacity.pairs), {}) for node in self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


def _node(index: int, rng: SeededRandomness) -> Node:
    cores = rng.choice(CORES)
    return Node(
        metadata=Metadata(name=f"node-{index}", labels={key: rng.choice(values) for key, values in LABELS.items()}),
        spec=NodeSpec(
            region="eu",
            zone=rng.choice(ZONES),
            capacity=Amount({"cpu": 1_000 * cores, "memory": cores * rng.choice(GIB_PER_CORE) << 30}),
            devices=GPUS if rng.randrange(2) else (),
        ),
        status=NodeStatus(health=NodeHealth.READY),
    )


def class_requirements(count: int, feature: PlacementFeature) -> list[Requirements]:
    """Return the requirements of the classes: the same for every number of nodes."""
    rng = SeededRandomness(f"bench place/{count} classes")
    return [_requirements(f"work-{index}", feature, rng) for index in range(count)]


def _requirements(app: str, feature: PlacementFeature, rng: SeededRandomness) -> Requirements:
    resources = Amount({"cpu": 50 + 10 * rng.randrange(45), "memory": 64 + 16 * rng.randrange(60) << 20})
    template = Template(command=("serve",), resources=resources, devices=feature.devices)
    spec = WorkloadSpec(type="service", template=template, placement=feature.place(app, rng.choice(NODE_SELECTORS)))
    return compile_requirements("acme", app, {"app": app}, spec, ())


BY_CLASS: Final = "by class"
ONE_BY_ONE: Final = "one by one"
PLAIN_LOOP: Final = "plain loop"
FIRST_FIT: Final = "first fit"
RUN_MAX: Final = 100
"""Replicas of one class placed at once; fewer if three rounds of all classes would not fit."""
SINGLES_PER_STEP: Final = 50
"""Single placements between two readings of the clock."""
ROUNDS: Final = 5
BASELINE_TIME_SHARE: Final = 0.2
"""Time for a baseline, as a share of the time of a case: their rate varies little."""

_CLOCK = BootClock()


class PlacementCase(NamedTuple):
    classes: int
    mode: str
    feature: PlacementFeature


class PlacementPlan(NamedTuple):
    """Which cases are measured, on which numbers of nodes, and for how many seconds each. Cases with a goal come first."""

    cases: dict[PlacementCase, tuple[int, ...]]
    seconds: float


AIMED_CASES: Final = (
    PlacementCase(40, BY_CLASS, RESOURCES),
    PlacementCase(40, ONE_BY_ONE, RESOURCES),
    PlacementCase(400, ONE_BY_ONE, RESOURCES),
)
AIMS_PER_S: Final = (300_000, 60_000, 18_000)
AIM_NODES: Final = 5_000
LARGE_NODES: Final = 50_000
AIM_LARGE_RATIO: Final = 0.5
_ALL_CASES: Final = tuple(
    PlacementCase(classes, mode, feature) for feature in FEATURES for classes in (40, 400) for mode in (BY_CLASS, ONE_BY_ONE)
)
_SMALL_SIZES: Final = (1_000, AIM_NODES)
FULL: Final = PlacementPlan(dict.fromkeys((*AIMED_CASES, *_ALL_CASES), (*_SMALL_SIZES, 10_000, LARGE_NODES)), 1.0)
_QUICK_CASES: Final = [case for case in (*AIMED_CASES, *_ALL_CASES) if case.classes == 40 or case.feature == RESOURCES]
QUICK: Final = PlacementPlan({**dict.fromkeys(_QUICK_CASES, _SMALL_SIZES), AIMED_CASES[0]: (*_SMALL_SIZES, LARGE_NODES)}, 0.2)


class TimeSpent:
    """Number of placements and the time they took."""

    def __init__(self) -> None:
        self.placements = self.ns = self.cpu_ns = 0
        self._started = 0, 0

    def start(self) -> None:
        self._started = _CLOCK.now_ns(), _cpu_ns()

    def stop(self, placements: int) -> None:
        self.placements += placements
        self.ns += _CLOCK.now_ns() - self._started[0]
        self.cpu_ns += _cpu_ns() - self._started[1]

    @property
    def per_s(self) -> float:
        return self.placements * 1e9 / max(self.ns, 1)

    @property
    def cpu_per_s(self) -> float:
        return self.placements * 1e9 / max(self.cpu_ns, 1)


def _cpu_ns() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return round((used.ru_utime + used.ru_stime) * 1e9)


def measure(quick: bool, plot: Path | None) -> BenchReport:
    extent = QUICK if quick else FULL
    clusters: dict[int, SyntheticCluster] = {}
    for nodes in sorted({nodes for sizes in extent.cases.values() for nodes in sizes}):
        print_progress(f"building {nodes:,} nodes ...")
        clusters[nodes] = SyntheticCluster(nodes)
    loops = {nodes: baseline_loops(cluster) for nodes, cluster in clusters.items()}
    tune_interpreter()
    runs: dict[tuple[int, PlacementCase], KernelRun] = {}
    for case, sizes in extent.cases.items():
        print_progress(
            f"{case.feature.name}, {case.classes} classes, {case.mode}: {', '.join(f'{nodes:,}' for nodes in sizes)} nodes ..."
        )
        case_runs = {nodes: KernelRun(case, clusters[nodes]) for nodes in sizes}
        for _ in range(ROUNDS):
            for nodes, run in case_runs.items():
                run.measure(extent.seconds / ROUNDS)
                if case == AIMED_CASES[0]:
                    for loop in loops[nodes]:
                        loop.measure(extent.seconds / ROUNDS * BASELINE_TIME_SHARE)
        for nodes, run in case_runs.items():
            run.release()
            runs[nodes, case] = run
    rows = _rows(runs, loops)
    if plot is not None:
        plot.write_text(placement_chart(rows))
        print_progress(f"wrote the chart of time per placement to {plot}")
    return BenchReport("place", rows, _aims({index: run.spent.per_s for index, run in runs.items()}))


def _aims(per_s: dict[tuple[int, PlacementCase], float]) -> list[BenchAim]:
    rates = [
        BenchAim(f"{case.mode}, {AIM_NODES:,} nodes, {case.classes} classes", "1/s", aim, per_s[AIM_NODES, case], "higher")
        for case, aim in zip(AIMED_CASES, AIMS_PER_S, strict=True)
    ]
    grown = per_s[LARGE_NODES, AIMED_CASES[0]] / per_s[AIM_NODES, AIMED_CASES[0]]
    name = f"{AIMED_CASES[0].mode} at {LARGE_NODES:,} nodes, of the rate at {AIM_NODES:,}"
    return [*rates, BenchAim(name, "", AIM_LARGE_RATIO, grown, "higher")]


# --------------------------------------------------------------------------------------------------------------- the kernel


class KernelRun:
    """One case on one cluster. When the capacity is used up, it restarts on the empty cluster."""

    def __init__(self, case: PlacementCase, cluster: SyntheticCluster) -> None:
        self._case, self._cluster = case, cluster
        self._requirements = class_requirements(case.classes, case.feature)
        capacity = int(len(cluster) * min(case.feature.capacity, case.feature.class_limit * case.classes))
        self.batch = max(min(RUN_MAX, capacity // (3 * case.classes)), 1) if case.mode == BY_CLASS else 1
        # Complete rounds only: every class is used equally often.
        self._capacity = capacity // (self.batch * case.classes) * self.batch * case.classes
        self.spent = TimeSpent()
        self.class_bytes = 0
        self._reset()

    def _reset(self) -> None:
        columns = self._cluster.columns.freeze()
        self._kernel = Kernel(columns, ColumnPeerCounts(columns, {}))
        classes = [self._kernel.class_for(index, ask) for index, ask in enumerate(self._requirements)]
        self._next_class = cycle(classes)
        self._remaining = self._capacity
        self.class_bytes = 0
        self._step(len(classes))
        self.class_bytes = sum(class_.memory_bytes for class_ in classes) // len(classes)

    def _step(self, turns: int) -> int:
        """Place replicas of the next `turns` classes. Returns the number of placements."""
        place_replicas = self._place_batch if self._case.mode == BY_CLASS else self._place_one
        for class_ in islice(self._next_class, turns):
            place_replicas(class_)
        self._remaining -= turns * self.batch
        return turns * self.batch

    def _place_batch(self, class_: WorkClass) -> None:
        placed = len(self._kernel.place_run(class_, self.batch).rows)
        if placed != self.batch:
            raise RuntimeError(f"only {placed} of {self.batch} replicas were placed; the benchmark's cluster is too small")

    def _place_one(self, class_: WorkClass) -> None:
        kernel = self._kernel
        row = kernel.best_row(class_)
        if row < 0:
            raise RuntimeError("a replica was not placed; the benchmark's cluster is too small")
        if class_.requirements.devices:
            kernel.post(class_, row, kernel.choose_devices(class_, row))
        else:
            kernel.post(class_, row)

    def measure(self, seconds: float) -> None:
        turns = 1 if self._case.mode == BY_CLASS else SINGLES_PER_STEP
        until_ns = self.spent.ns + seconds * 1e9
        while self.spent.ns < until_ns:
            if self._remaining < turns * self.batch:  # not enough capacity left for one step
                self._reset()
            self.spent.start()
            self.spent.stop(self._step(turns))

    def release(self) -> None:
        """Release the kernel and keep the result: hundreds of classes on many nodes take much memory."""
        del self._kernel, self._next_class, self._requirements


# -------------------------------------------------------------------------------------------------------------- the baselines


class BaselineLoop:
    """Loops over the nodes in plain Python, on the authority's node ledgers, which cache the static part of the fit."""

    def __init__(self, ledgers: Sequence[NodeLedger], *, first_fit: bool) -> None:
        self._ledgers = ledgers
        self._shares = [{name: 1 / count for name, count in ledger.node.spec.capacity} for ledger in ledgers]
        self._next_class = cycle(class_requirements(40, RESOURCES))
        self._place = self._first_fit if first_fit else self._best_fit
        self.spent = TimeSpent()

    def measure(self, seconds: float) -> None:
        until_ns = self.spent.ns + seconds * 1e9
        while self.spent.ns < until_ns:
            ask = next(self._next_class)
            self.spent.start()
            row = self._place(ask)
            if row < 0:
                raise RuntimeError("the loop placed no replica; the benchmark's cluster is too small")
            self._ledgers[row].post(ask.resources, 1)
            self.spent.stop(1)

    def _best_fit(self, ask: Requirements) -> int:
        best, best_row = -1.0, -1
        for row, ledger in enumerate(self._ledgers):
            if misfit(ask, ledger, NO_PEERS) is None:
                free, share = ledger.free, self._shares[row]
                score = sum((free[name] - need) * share[name] for name, need in ask.resources) / len(ask.resources)
                if score > best:
                    best, best_row = score, row
        return best_row

    def _first_fit(self, ask: Requirements) -> int:
        return next((row for row, ledger in enumerate(self._ledgers) if misfit(ask, ledger, NO_PEERS) is None), -1)


def baseline_loops(cluster: SyntheticCluster) -> tuple[BaselineLoop, BaselineLoop]:
    """Return the plain loop and first fit, each with its own ledgers."""
    ledgers = [NodeLedger(node) for node in cluster.nodes]
    return BaselineLoop(ledgers, first_fit=False), BaselineLoop([ledger.copy() for ledger in ledgers], first_fit=True)


# --------------------------------------------------------------------------------------------------------------- the report


def _rows(
    runs: dict[tuple[int, PlacementCase], KernelRun], loops: dict[int, tuple[BaselineLoop, BaselineLoop]]
) -> list[dict[str, Any]]:
    rows = []
    for (nodes, case), run in sorted(runs.items(), key=lambda pair: (_ALL_CASES.index(pair[0][1]), pair[0][0])):
        row = _row(nodes, case, case.mode, run.spent, loops[nodes][0].spent)
        rows.append({**row, "run": run.batch, "class_bytes": run.class_bytes})
    for index, mode in enumerate((PLAIN_LOOP, FIRST_FIT)):
        rows += [_row(nodes, AIMED_CASES[0], mode, pair_[index].spent, pair_[0].spent) for nodes, pair_ in loops.items()]
    return rows


def _row(nodes: int, case: PlacementCase, mode: str, spent: TimeSpent, plain: TimeSpent) -> dict[str, Any]:
    return {
        "nodes": nodes,
        "classes": case.classes,
        "mode": mode,
        "features": case.feature.name,
        "placements": spent.placements,
        "seconds": spent.ns / 1e9,
        "per_s": spent.per_s,
        "cpu_per_s": spent.cpu_per_s,
        "ratio": spent.per_s / plain.per_s,
    }


CHART_LINES: Final = {
    PLAIN_LOOP: (40, PLAIN_LOOP, "resources"),
    FIRST_FIT: (40, FIRST_FIT, "resources"),
    "one by one, whole GPUs": (40, ONE_BY_ONE, "whole GPU"),
    "one by one, spread": (40, ONE_BY_ONE, "spread"),
    "one by one, anti-affinity": (40, ONE_BY_ONE, "anti-affinity"),
    "one by one, 400 classes": (400, ONE_BY_ONE, "resources"),
    "one by one, 40 classes": (40, ONE_BY_ONE, "resources"),
    "by class, spread": (40, BY_CLASS, "spread"),
    "by class, 400 classes": (400, BY_CLASS, "resources"),
    "by class, 40 classes": (40, BY_CLASS, "resources"),
}
"""The lines of the chart. Unless named otherwise: 40 classes, resources and node selectors only."""


def placement_chart(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        ChartLine(
            name,
            [
                (row["nodes"], 1e6 / row["per_s"])
                for row in rows
                if (row["classes"], row["mode"], row["features"]) == key and row["per_s"]
            ],
        )
        for name, key in CHART_LINES.items()
    ]
    return draw("Time for one placement", "nodes", "microseconds", [line for line in lines if line.points])
