"""`bench place`: kernel placements per second.

Drawn by fixed seeds; nothing is measured here.

The kernel alone: nothing is claimed or written.

In the time: to renew what is known of a class since it was last asked about, to choose the node, and its devices if any, and
to post the replica on the columns and among its peers. Not in the time: to build nodes, columns and classes, and a first round
in which every class is asked once. So the work is steady: before a class is asked again, all the others have been.

The same case on different numbers of nodes is measured in turns, and so are two yardsticks on the same nodes: growth and ratios
hold also on a machine that is quick now and slow later. The **plain loop** asks law/fit.py of every node, one by one, and takes
the best by the same score; **first fit** takes the first node that fits, however good. Both ask for resources and masks only,
and are what every row of the same nodes is compared to. Rates are by the wall; beside them stands what CPU time alone gives.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from remit.assembly import settle_process
from remit.bench.growth_chart import Line, draw
from remit.bench.report import Aim, Report, say
from remit.law.fit import NOBODY, Ask, misfit
from remit.law.ledgers import NodeLedger
from remit.law.requirements import make_ask
from remit.model.kinds import (
    Affinity,
    Device,
    DeviceAsk,
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
from remit.observation.node_columns import Columns, Left
from remit.observation.topology_counts import ColumnPeers
from remit.proposal.placement.class_scores import Class
from remit.proposal.placement.kernel import Kernel
from remit.world.clock import BootClock
from remit.world.randomness import SeededChance

ZONES: Final = ("eu-a", "eu-b", "eu-c")
CORES: Final = (32, 64, 96, 128)
GIB_A_CORE: Final = (3, 4, 6)
GPUS: Final = tuple(Device(name=f"gpu-{at}", kind="gpu", model="A10") for at in range(8))
LABELS: Final = {"disk": ("ssd", "hdd"), "arch": ("amd64", "arm64")}
MASKS: Final[tuple[dict[str, str], ...]] = (
    {},
    *({"disk": disk} for disk in LABELS["disk"]),
    *({"arch": arch} for arch in LABELS["arch"]),
    *({"disk": disk, "arch": arch} for disk in LABELS["disk"] for arch in LABELS["arch"]),
)
"""Node selectors: a class may stand on all nodes, on half, or on a quarter of them."""


class Feature(NamedTuple):
    """What every class asks for beyond resources and a mask."""

    name: str
    place: Callable[[str, dict[str, str]], Placement] = lambda app, mask: Placement(node_selector=mask)
    devices: tuple[DeviceAsk, ...] = ()
    room: float = 60
    """How many replicas a node has room for, on average and with some to spare."""
    share: float = 60
    """The most of one class for each node of the cluster."""


def _spread(app: str, mask: dict[str, str]) -> Placement:
    return Placement(node_selector=mask, topology_spread=(Spread(topology_key="zone", max_skew=1),))


def _near(app: str, mask: dict[str, str]) -> Placement:
    return Placement(node_selector=mask, affinity=(Affinity(topology_key="zone", label_selector={"app": app}),))


def _away(app: str, mask: dict[str, str]) -> Placement:
    return Placement(node_selector=mask, anti_affinity=(Affinity(topology_key="node", label_selector={"app": app}),))


RESOURCES: Final = Feature("resources")
FEATURES: Final = (
    RESOURCES,
    Feature("spread", _spread),
    Feature("affinity", _near, room=12),
    Feature("anti-affinity", _away, share=0.2),
    Feature("whole GPU", devices=(DeviceAsk(kind="gpu", count=1),), room=1.5),
    Feature("GPU share", devices=(DeviceAsk(kind="gpu", share="50m"),), room=25),
)
"""Spread is hard, with a skew of one over three zones; a class is near its own in a zone, or away from its own by node."""


class Cluster:
    """Nodes of mixed sizes in three zones, half of them with GPUs, all empty."""

    def __init__(self, nodes: int) -> None:
        lots = SeededChance(f"bench place/{nodes}")
        self.nodes = [_node(at, lots) for at in range(nodes)]
        self.columns = Columns(Left(node, dict(node.spec.capacity.pairs), {}) for node in self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


def _node(at: int, lots: SeededChance) -> Node:
    cores = lots.choice(CORES)
    return Node(
        metadata=Metadata(name=f"node-{at}", labels={key: lots.choice(values) for key, values in LABELS.items()}),
        spec=NodeSpec(
            region="eu",
            zone=lots.choice(ZONES),
            capacity=Amount({"cpu": 1_000 * cores, "memory": cores * lots.choice(GIB_A_CORE) << 30}),
            devices=GPUS if lots.below(2) else (),
        ),
        status=NodeStatus(health=NodeHealth.READY),
    )


def asks(classes: int, feature: Feature) -> list[Ask]:
    """The same for every number of nodes."""
    lots = SeededChance(f"bench place/{classes} classes")
    return [_ask(f"work-{at}", feature, lots) for at in range(classes)]


def _ask(app: str, feature: Feature, lots: SeededChance) -> Ask:
    asked = Amount({"cpu": 50 + 10 * lots.below(45), "memory": 64 + 16 * lots.below(60) << 20})
    template = Template(command=("serve",), resources=asked, devices=feature.devices)
    spec = WorkloadSpec(type="service", template=template, placement=feature.place(app, lots.choice(MASKS)))
    return make_ask("acme", app, {"app": app}, spec, ())


BY_CLASS: Final = "by class"
ONE_BY_ONE: Final = "one by one"
PLAIN_LOOP: Final = "plain loop"
FIRST_FIT: Final = "first fit"
RUN_MAX: Final = 100
"""Replicas of one class that are placed at once; fewer, where all classes would not find room for three rounds."""
SINGLES: Final = 50
"""Placements one by one between two looks at the clock."""
TURNS: Final = 5
YARDSTICK_SHARE: Final = 0.2
"""Of a case's time: the yardsticks are the same all the way."""

_CLOCK = BootClock()


class Case(NamedTuple):
    classes: int
    mode: str
    feature: Feature


class Extent(NamedTuple):
    """Which cases are measured, each on how many nodes, and for how many seconds. The aimed ones come first."""

    cases: dict[Case, tuple[int, ...]]
    seconds: float


AIMED: Final = (Case(40, BY_CLASS, RESOURCES), Case(40, ONE_BY_ONE, RESOURCES), Case(400, ONE_BY_ONE, RESOURCES))
AIMS_PER_S: Final = (300_000, 60_000, 18_000)
AIM_NODES: Final = 5_000
GROWN_NODES: Final = 50_000
AIM_GROWN: Final = 0.5
_ALL: Final = tuple(
    Case(classes, mode, feature) for feature in FEATURES for classes in (40, 400) for mode in (BY_CLASS, ONE_BY_ONE)
)
_SMALL: Final = (1_000, AIM_NODES)
FULL: Final = Extent(dict.fromkeys((*AIMED, *_ALL), (*_SMALL, 10_000, GROWN_NODES)), 1.0)
_LOOKED_AT: Final = [case for case in (*AIMED, *_ALL) if case.classes == 40 or case.feature == RESOURCES]
QUICK: Final = Extent({**dict.fromkeys(_LOOKED_AT, _SMALL), AIMED[0]: (*_SMALL, GROWN_NODES)}, 0.2)


class Spent:
    """How many placements took how long."""

    def __init__(self) -> None:
        self.placements = self.ns = self.cpu_ns = 0
        self._began = 0, 0

    def begin(self) -> None:
        self._began = _CLOCK.now_ns(), _cpu_ns()

    def end(self, placements: int) -> None:
        self.placements += placements
        self.ns += _CLOCK.now_ns() - self._began[0]
        self.cpu_ns += _cpu_ns() - self._began[1]

    @property
    def per_s(self) -> float:
        return self.placements * 1e9 / max(self.ns, 1)

    @property
    def cpu_per_s(self) -> float:
        return self.placements * 1e9 / max(self.cpu_ns, 1)


def _cpu_ns() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return round((used.ru_utime + used.ru_stime) * 1e9)


def measure(quick: bool, plot: Path | None) -> Report:
    extent = QUICK if quick else FULL
    clusters: dict[int, Cluster] = {}
    for nodes in sorted({nodes for sizes in extent.cases.values() for nodes in sizes}):
        say(f"{nodes:,} nodes are built ...")
        clusters[nodes] = Cluster(nodes)
    loops = {nodes: yardsticks(cluster) for nodes, cluster in clusters.items()}
    settle_process()
    found: dict[tuple[int, Case], Placing] = {}
    for case, sizes in extent.cases.items():
        say(f"{case.feature.name}, {case.classes} classes, {case.mode}: {', '.join(f'{nodes:,}' for nodes in sizes)} nodes ...")
        placing = {nodes: Placing(case, clusters[nodes]) for nodes in sizes}
        for _ in range(TURNS):
            for nodes, one in placing.items():
                one.go(extent.seconds / TURNS)
                if case == AIMED[0]:
                    for loop in loops[nodes]:
                        loop.go(extent.seconds / TURNS * YARDSTICK_SHARE)
        for nodes, one in placing.items():
            one.done()
            found[nodes, case] = one
    rows = _rows(found, loops)
    if plot is not None:
        plot.write_text(drawn(rows))
        say(f"{plot} shows the growth")
    return Report("place", rows, _aims({at: one.spent.per_s for at, one in found.items()}))


def _aims(per_s: dict[tuple[int, Case], float]) -> list[Aim]:
    rates = [
        Aim(f"{case.mode}, {AIM_NODES:,} nodes, {case.classes} classes", "1/s", aim, per_s[AIM_NODES, case], "higher")
        for case, aim in zip(AIMED, AIMS_PER_S, strict=True)
    ]
    grown = per_s[GROWN_NODES, AIMED[0]] / per_s[AIM_NODES, AIMED[0]]
    name = f"{AIMED[0].mode} at {GROWN_NODES:,} nodes, of the rate at {AIM_NODES:,}"
    return [*rates, Aim(name, "", AIM_GROWN, grown, "higher")]


# --------------------------------------------------------------------------------------------------------------- the kernel


class Placing:
    """One case on one cluster, under way. When the room is used up, it begins again on the empty cluster."""

    def __init__(self, case: Case, cluster: Cluster) -> None:
        self._case, self._cluster = case, cluster
        self._asks = asks(case.classes, case.feature)
        room = int(len(cluster) * min(case.feature.room, case.feature.share * case.classes))
        self.run = max(min(RUN_MAX, room // (3 * case.classes)), 1) if case.mode == BY_CLASS else 1
        self._room = room // (self.run * case.classes) * self.run * case.classes  # whole rounds: no class is asked more often
        self.spent = Spent()
        self.class_bytes = 0
        self._begin()

    def _begin(self) -> None:
        columns = self._cluster.columns.freeze()
        self._kernel = Kernel(columns, ColumnPeers(columns, {}))
        classes = [self._kernel.known(at, ask) for at, ask in enumerate(self._asks)]
        self._next = cycle(classes)
        self._left = self._room
        self.class_bytes = 0
        self._step(len(classes))
        self.class_bytes = sum(one.held_bytes for one in classes) // len(classes)

    def _step(self, turns: int) -> int:
        """Ask so many classes, one after another."""
        place = self._at_once if self._case.mode == BY_CLASS else self._singly
        for one in islice(self._next, turns):
            place(one)
        self._left -= turns * self.run
        return turns * self.run

    def _at_once(self, one: Class) -> None:
        placed = len(self._kernel.run(one, self.run).rows)
        if placed != self.run:
            raise RuntimeError(f"only {placed} of {self.run} found a place")

    def _singly(self, one: Class) -> None:
        kernel = self._kernel
        row = kernel.place(one)
        if row < 0:
            raise RuntimeError("one found no place")
        if one.ask.devices:
            kernel.post(one, row, kernel.choose(one, row))
        else:
            kernel.post(one, row)

    def go(self, seconds: float) -> None:
        turns = 1 if self._case.mode == BY_CLASS else SINGLES
        until_ns = self.spent.ns + seconds * 1e9
        while self.spent.ns < until_ns:
            if self._left < turns * self.run:  # not enough for a look
                self._begin()
            self.spent.begin()
            self.spent.end(self._step(turns))

    def done(self) -> None:
        """What was measured stays; what it was measured on goes: hundreds of classes on many nodes are large."""
        del self._kernel, self._next, self._asks


# ----------------------------------------------------------------------------------------------------------- the yardsticks


class Loop:
    """Node by node in plain Python, over the authority's own ledgers, which remember what a node is to an ask."""

    def __init__(self, sites: Sequence[NodeLedger], *, first: bool) -> None:
        self._sites = sites
        self._shares = [{name: 1 / count for name, count in site.node.spec.capacity} for site in sites]
        self._next = cycle(asks(40, RESOURCES))
        self._place = self._first if first else self._best
        self.spent = Spent()

    def go(self, seconds: float) -> None:
        until_ns = self.spent.ns + seconds * 1e9
        while self.spent.ns < until_ns:
            ask = next(self._next)
            self.spent.begin()
            row = self._place(ask)
            if row < 0:
                raise RuntimeError("the loop found no place")
            self._sites[row].post(ask.resources, 1)
            self.spent.end(1)

    def _best(self, ask: Ask) -> int:
        best, found = -1.0, -1
        for row, site in enumerate(self._sites):
            if misfit(ask, site, NOBODY) is None:
                free, share = site.free, self._shares[row]
                score = sum((free[name] - need) * share[name] for name, need in ask.resources) / len(ask.resources)
                if score > best:
                    best, found = score, row
        return found

    def _first(self, ask: Ask) -> int:
        return next((row for row, site in enumerate(self._sites) if misfit(ask, site, NOBODY) is None), -1)


def yardsticks(cluster: Cluster) -> tuple[Loop, Loop]:
    """The plain loop, and first fit; each on ledgers of its own."""
    sites = [NodeLedger(node) for node in cluster.nodes]
    return Loop(sites, first=False), Loop([site.copy() for site in sites], first=True)


# --------------------------------------------------------------------------------------------------------------- the report


def _rows(found: dict[tuple[int, Case], Placing], loops: dict[int, tuple[Loop, Loop]]) -> list[dict[str, Any]]:
    rows = []
    for (nodes, case), one in sorted(found.items(), key=lambda pair: (_ALL.index(pair[0][1]), pair[0][0])):
        row = _row(nodes, case, case.mode, one.spent, loops[nodes][0].spent)
        rows.append({**row, "run": one.run, "class_bytes": one.class_bytes})
    for at, mode in enumerate((PLAIN_LOOP, FIRST_FIT)):
        rows += [_row(nodes, AIMED[0], mode, both[at].spent, both[0].spent) for nodes, both in loops.items()]
    return rows


def _row(nodes: int, case: Case, mode: str, spent: Spent, plain: Spent) -> dict[str, Any]:
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


SHOWN: Final = {
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
"""The lines of the picture: what is not said is 40 classes, and resources and masks alone."""


def drawn(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        Line(
            name,
            [
                (row["nodes"], 1e6 / row["per_s"])
                for row in rows
                if (row["classes"], row["mode"], row["features"]) == wanted and row["per_s"]
            ],
        )
        for name, wanted in SHOWN.items()
    ]
    return draw("Time for one placement", "nodes", "microseconds", [line for line in lines if line.points])
