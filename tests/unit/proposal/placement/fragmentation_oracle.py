"""Reference implementation of the fragmentation score: its formulas in plain loops over nodes and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from remit.law.fit import DeviceRequirement, Requirements
from remit.model.kinds import Device, NodeHealth
from remit.model.resources import WHOLE_DEVICE
from remit.observation.node_columns import NodeFree
from remit.proposal.placement.fragmentation_model import DeviceShape, FrequentShape

WHOLE_ONLY = [0.0] * WHOLE_DEVICE + [1.0]


class ReferenceScore:
    """Weights computed once for these nodes; `worths` gives the worth of each share of a device, by kind."""

    def __init__(
        self, popular: Sequence[FrequentShape], worths: Mapping[str, Sequence[float]], nodes: Sequence[NodeFree]
    ) -> None:
        kinds = {device.kind for one in nodes for device in one.node.spec.devices}
        self.popular = [one for one in popular if one.shape.kind in kinds]
        self.worths = worths
        open_nodes = [one for one in nodes if _takes(one)]
        arrivals = max(sum(one.arrivals for one in self.popular), 1.0)
        self.scarce, self.part = [], []
        for at, one in enumerate(self.popular):
            capacity_units = (
                sum(device.kind == one.shape.kind for left in open_nodes for device in left.node.spec.devices) * WHOLE_DEVICE
            )
            capacity = sum(self.capacity(at, left) for left in open_nodes)
            self.scarce.append(one.arrivals / arrivals / (capacity / max(capacity_units, WHOLE_DEVICE) + 0.01))
            self.part.append(one.arrivals / arrivals * self.worth_of(one))
        self.part = [3_000 * part / max(sum(self.part), 1e-12) for part in self.part]
        self.cpu_max = max([1, *(dict(one.node.spec.capacity.pairs).get("cpu", 0) for one in nodes)])
        self.free_max = max([1, *(len(one.node.spec.devices) * WHOLE_DEVICE for one in nodes)])

    def worth(self, kind: str, level: int) -> float:
        return float(self.worths.get(kind, WHOLE_ONLY)[level])

    def worth_of(self, one: FrequentShape) -> float:
        return one.shape.number * self.worth(one.shape.kind, one.shape.share)

    def reach(self, one: FrequentShape, left: NodeFree) -> float:
        cpu, memory = (max(left.free.get(name, 0), 0) for name in ("cpu", "memory"))
        return min(cpu / max(one.shape.cpu, 1), memory / max(one.memory, 1))

    def capacity(self, at: int, left: NodeFree) -> float:
        one, reach = self.popular[at], self.reach(self.popular[at], left)
        if reach < 1:
            return 0.0
        shape = one.shape
        units = sum(_left(device, left) // shape.share for device in left.node.spec.devices if _allowed(shape, device))
        return shape.number * shape.share * min(floor(units / shape.number), reach)

    def potential(self, left: NodeFree) -> float:
        total = 0.0
        for at, one in enumerate(self.popular):
            total += self.scarce[at] * self.capacity(at, left)
            devices = [device for device in left.node.spec.devices if device.kind == one.shape.kind]
            worth = sum(self.worth(device.kind, _left(device, left)) for device in devices)
            total += self.part[at] * min(worth, self.worth_of(one) * self.reach(one, left))
        return total

    def chosen(self, ask: Requirements, left: NodeFree) -> tuple[dict[str, int], float]:
        """The devices that are assigned, and the worth that shares destroy."""
        taken: dict[str, int] = {}
        spoiled = 0.0
        for one in ask.device_shares:
            found = []
            for place, device in enumerate(left.node.spec.devices):
                level = _left(device, left)
                if _allowed(one, device) and level >= one.amount:
                    lost = self.worth(one.kind, level) - self.worth(one.kind, level - one.amount)
                    found.append((round(lost, 6), level, place, lost))
            _, _, place, lost = min(found)
            taken[left.node.spec.devices[place].name] = one.amount
            spoiled += lost
        for one in ask.whole_devices:
            free = [
                device for device in left.node.spec.devices if _left(device, left) == WHOLE_DEVICE and _allowed(one, device)
            ]
            free = [device for device in free if device.name not in taken]
            taken.update({device.name: WHOLE_DEVICE for device in free[: one.amount]})
        return taken, spoiled

    def gain(self, ask: Requirements, left: NodeFree) -> float:
        taken, spoiled = self.chosen(ask, left)
        needs = dict(ask.resources)
        free = {name: left.free.get(name, 0) - needs.get(name, 0) for name in ("cpu", "memory")}
        used = {name: left.used.get(name, 0) + taken.get(name, 0) for name in {*left.used, *taken}}
        after = NodeFree(left.node, free, used)
        gain = self.potential(after) - self.potential(left) - 1e5 * spoiled
        stays = max(free["cpu"], 0) / self.cpu_max
        if not left.node.spec.devices:
            return gain + 0.1 * stays
        return gain - 0.1 * (stays + sum(_left(device, after) for device in left.node.spec.devices) / self.free_max)


def _left(device: Device, left: NodeFree) -> int:
    return max(WHOLE_DEVICE - left.used.get(device.name, 0), 0)


def _allowed(one: DeviceRequirement | DeviceShape, device: Device) -> bool:
    return device.kind == one.kind and (not one.models or device.model in one.models)


def _takes(left: NodeFree) -> bool:
    spec = left.node.spec
    return left.node.status.health is NodeHealth.READY and not spec.unschedulable and not spec.draining
