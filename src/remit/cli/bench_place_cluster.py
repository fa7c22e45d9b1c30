"""Which nodes and which work does `remit bench place` measure on? Drawn by fixed seeds; nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from remit.law.asks import make_ask
from remit.law.columns import Columns, Left
from remit.law.fit import Ask
from remit.model.fields import Metadata
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
from remit.model.resources import Amount
from remit.world.chance import SeededChance

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
