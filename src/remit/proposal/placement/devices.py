"""Device assignment and free device shares per node.

Chooses the devices named in a bind; law/fit.py has already decided that enough are free. Scores are computed elsewhere
(fragmentation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from remit.law.fit import NO_PEERS, DeviceModel, DeviceRequirement, Requirements, free_devices
from remit.law.fit import devices as fit_whole_devices
from remit.law.fit import shares as fit_shares
from remit.model.kinds import Device, Node
from remit.model.resources import WHOLE_DEVICE
from remit.observation.column_table import NameInterner
from remit.observation.node_columns import Ints, NodeColumns


def choose_devices(requirements: Requirements, columns: NodeColumns, row: int) -> dict[str, int]:
    """Thousandths by device name for a row on which the requirements fit."""
    node = columns.nodes[row]
    if node is None or not (requirements.whole_devices or requirements.device_shares):
        return {}
    return assign_devices(requirements, node.spec.devices, columns.used[row]) or {}


class _FreeDevices(NamedTuple):
    """The subset of a `NodeView` that the device rules read."""

    whole_devices: Mapping[DeviceModel, int]
    largest_shares: Mapping[DeviceModel, int]


def fits_devices(requirements: Requirements, devices: Sequence[Device], used: Mapping[str, int]) -> bool:
    """Applies the device rules of law/fit.py to these devices, of which `used` is taken."""
    site = cast(Any, _FreeDevices(*free_devices(devices, used)))
    return bool(fit_whole_devices(requirements, site, NO_PEERS)) and bool(fit_shares(requirements, site, NO_PEERS))


class DeclaredDevices:
    """The devices that each node declares, taken or not, as columns for the device rules of law/fit.py.

    It separates nodes that have too few devices from nodes whose devices are in use. Updated by `refresh`, which reads only
    the nodes that were replaced since.
    """

    def __init__(self, columns: NodeColumns) -> None:
        self._columns = columns
        self._changes_seen = -1
        self._nodes: list[Node | None] = []
        self.whole_devices: dict[DeviceModel, Ints] = {}
        self.largest_shares: dict[DeviceModel, Ints] = {}

    def refresh(self) -> None:
        nodes, changed = self._columns.nodes, self._columns.changed
        touched = changed.since(self._changes_seen) if self._changes_seen >= 0 else None
        if (added := len(nodes) - len(self._nodes)) > 0:
            self._nodes += [None] * added
            for columns in (self.whole_devices, self.largest_shares):
                for model, column in columns.items():
                    columns[model] = np.concatenate([column, np.zeros(added, dtype=np.int64)])
        for row in range(len(nodes)) if touched is None else np.unique(touched).tolist():
            if nodes[row] is not self._nodes[row]:
                self._set_node(row, nodes[row])
        self._changes_seen = changed.count

    def _set_node(self, row: int, node: Node | None) -> None:
        self._nodes[row] = node
        declared = free_devices(node.spec.devices if node is not None else (), {})
        for columns, amounts in zip((self.whole_devices, self.largest_shares), declared, strict=True):
            for model in amounts:
                if model not in columns:
                    columns[model] = np.zeros(len(self._nodes), dtype=np.int64)
            for model, column in columns.items():
                column[row] = amounts.get(model, 0)


DeviceCost = Callable[[DeviceRequirement, int], int]
"""Cost of taking a share from a device with this much free; the lowest cost wins."""


def tightest(requirement: DeviceRequirement, free: int) -> int:
    return free


def assign_devices(
    requirements: Requirements, devices: Sequence[Device], used: Mapping[str, int], cost: DeviceCost = tightest
) -> dict[str, int] | None:
    """Assigns devices to the requirements; None if that is not possible.

    Shares go to the device with the lowest `cost` (by default the one with the least free), the first one on ties. Whole
    devices are matched so that every requirement gets its own.
    """
    chosen: dict[str, int] = {}
    for requirement in requirements.device_shares:
        name = _cheapest_device(requirement, devices, used, chosen, cost)
        if name is None:
            return None
        chosen[name] = requirement.amount
    return chosen if _match_whole_devices(requirements.whole_devices, devices, used, chosen) else None


def _cheapest_device(
    requirement: DeviceRequirement,
    devices: Sequence[Device],
    used: Mapping[str, int],
    chosen: Mapping[str, int],
    cost: DeviceCost,
) -> str | None:
    best, lowest = None, 0
    for device in devices:
        if (
            device.kind != requirement.kind
            or (requirement.models and device.model not in requirement.models)
            or device.name in chosen
        ):
            continue
        free = WHOLE_DEVICE - used.get(device.name, 0)
        if free >= requirement.amount and (best is None or cost(requirement, free) < lowest):
            best, lowest = device.name, cost(requirement, free)
    return best


def _match_whole_devices(
    wholes: Sequence[DeviceRequirement], devices: Sequence[Device], used: Mapping[str, int], chosen: dict[str, int]
) -> bool:
    """Matches each requested whole device to a free one (bipartite matching by augmenting paths): if requirements overlap in
    the models they accept, an earlier choice may be moved.
    """
    requested = [requirement for requirement in wholes for _ in range(requirement.amount)]
    free = [device for device in devices if not used.get(device.name, 0) and device.name not in chosen]
    owner: dict[str, int] = {}

    def find(index: int, tried: set[str]) -> bool:
        requirement = requested[index]
        for device in free:
            if (
                device.kind != requirement.kind
                or (requirement.models and device.model not in requirement.models)
                or device.name in tried
            ):
                continue
            tried.add(device.name)
            if device.name not in owner or find(owner[device.name], tried):
                owner[device.name] = index
                return True
        return False

    if not all(find(index, set()) for index in range(len(requested))):
        return False
    chosen.update(dict.fromkeys(owner, WHOLE_DEVICE))
    return True


_ROWS_MIN: Final = 16
_UNUSED: Final[Mapping[str, int]] = {}
_NO_NODE: Final[tuple[Node | None, Mapping[str, int]]] = None, _UNUSED


class FreeDeviceShares:
    """Free shares of every device, updated incrementally from the node columns.

    `free` has the free thousandths: one line per row and one column per device, in the order of the node's spec.
    `device_type` has the id of the device's kind and model in `device_types`, -1 where there is no device. Both arrays are
    over-allocated.
    """

    def __init__(self, columns: NodeColumns) -> None:
        self._columns = columns
        self._changes_seen = -1
        self._known: list[tuple[Node | None, Mapping[str, int]]] = []
        self.free: Ints = np.zeros((0, 0), dtype=np.int64)
        self.device_type: Ints = np.full((0, 0), -1, dtype=np.int64)
        self._names = NameInterner()

    @property
    def device_types(self) -> list[DeviceModel]:
        return self._names.values

    def update(self) -> Ints | None:
        """Processes changed rows. Returns the rows with any change, in devices or otherwise; None if all rows were rebuilt."""
        changed, rows = self._columns.changed, len(self._columns)
        if self._changes_seen == changed.count:
            return np.zeros(0, dtype=np.int64)
        touched = changed.since(self._changes_seen) if self._changes_seen >= 0 else None
        self._changes_seen = changed.count
        if rows > len(self.free):
            self._widen(max(2 * rows, _ROWS_MIN), self.free.shape[1])
        self._known += [_NO_NODE] * (rows - len(self._known))
        updated = None if touched is None else np.unique(touched)
        for row in range(rows) if updated is None else updated.tolist():
            self._update_row(row)
        return updated

    def _update_row(self, row: int) -> None:
        node, used = self._columns.nodes[row], self._columns.used[row]
        previous = self._known[row]
        if node is previous[0] and used is previous[1]:
            return  # the common case: only cpu or memory changed
        self._known[row] = node, used
        devices = node.spec.devices if node is not None else ()
        if len(devices) > self.free.shape[1]:
            self._widen(len(self.free), len(devices))
        self.free[row], self.device_type[row] = 0, -1
        for at, device in enumerate(devices):
            self.free[row, at] = max(WHOLE_DEVICE - used.get(device.name, 0), 0)
            self.device_type[row, at] = self._names.intern((device.kind, device.model))

    def _widen(self, rows: int, width: int) -> None:
        more = (0, rows - self.free.shape[0]), (0, width - self.free.shape[1])
        self.free = np.pad(self.free, more)
        self.device_type = np.pad(self.device_type, more, constant_values=-1)
