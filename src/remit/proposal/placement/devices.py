"""Device assignment and free device shares per node.

Chooses the devices named in a bind; law/fit.py has already decided that enough are free. Scores are computed elsewhere
(fragmentation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from remit.law.fit import NO_PEERS, Requirements, DeviceRequirement, DeviceModel, free_devices
from remit.law.fit import devices as fit_whole
from remit.law.fit import shares as fit_shares
from remit.model.kinds import Device, Node
from remit.model.resources import WHOLE_DEVICE
from remit.observation.column_table import Names
from remit.observation.node_columns import Columns, Ints


def choose_devices(ask: Requirements, columns: Columns, row: int) -> dict[str, int]:
    """Thousandths by device name for a row on which the requirements fit."""
    node = columns.nodes[row]
    if node is None or not (ask.whole_devices or ask.device_shares):
        return {}
    return assign_devices(ask, node.spec.devices, columns.used[row]) or {}


class _FreeDevices(NamedTuple):
    """The subset of a `Site` that the device rules read."""

    whole: Mapping[DeviceModel, int]
    room: Mapping[DeviceModel, int]


def fits_devices(ask: Requirements, devices: Sequence[Device], used: Mapping[str, int]) -> bool:
    """Applies the device rules of law/fit.py to these devices, of which `used` is taken."""
    site = cast(Any, _FreeDevices(*free_devices(devices, used)))
    return bool(fit_whole(ask, site, NO_PEERS)) and bool(fit_shares(ask, site, NO_PEERS))


DeviceCost = Callable[[DeviceRequirement, int], int]
"""Cost of taking a share from a device with this much free; the lowest cost wins."""


def tightest(one: DeviceRequirement, left: int) -> int:
    return left


def assign_devices(ask: Requirements, devices: Sequence[Device], used: Mapping[str, int], rank: DeviceCost = tightest) -> dict[str, int] | None:
    """Assigns devices to the requirements; None if that is not possible.

    Shares go to the device with the lowest `rank` (by default the one with the least free), the first one on ties. Whole
    devices are matched so that every requirement gets its own.
    """
    chosen: dict[str, int] = {}
    for one in ask.device_shares:
        name = _cheapest_device(one, devices, used, chosen, rank)
        if name is None:
            return None
        chosen[name] = one.amount
    return chosen if _match_whole_devices(ask.whole_devices, devices, used, chosen) else None


def _cheapest_device(
    one: DeviceRequirement, devices: Sequence[Device], used: Mapping[str, int], chosen: Mapping[str, int], rank: DeviceCost
) -> str | None:
    found, lowest = None, 0
    for device in devices:
        if device.kind != one.kind or (one.models and device.model not in one.models) or device.name in chosen:
            continue
        left = WHOLE_DEVICE - used.get(device.name, 0)
        if left >= one.amount and (found is None or rank(one, left) < lowest):
            found, lowest = device.name, rank(one, left)
    return found


def _match_whole_devices(wholes: Sequence[DeviceRequirement], devices: Sequence[Device], used: Mapping[str, int], chosen: dict[str, int]) -> bool:
    """Matches each requested whole device to a free one (bipartite matching by augmenting paths): if requirements overlap in
    the models they accept, an earlier choice may be moved.
    """
    wanted = [one for one in wholes for _ in range(one.amount)]
    free = [device for device in devices if not used.get(device.name, 0) and device.name not in chosen]
    owner: dict[str, int] = {}

    def find(want: int, tried: set[str]) -> bool:
        one = wanted[want]
        for device in free:
            if device.kind != one.kind or (one.models and device.model not in one.models) or device.name in tried:
                continue
            tried.add(device.name)
            if device.name not in owner or find(owner[device.name], tried):
                owner[device.name] = want
                return True
        return False

    if not all(find(want, set()) for want in range(len(wanted))):
        return False
    chosen.update(dict.fromkeys(owner, WHOLE_DEVICE))
    return True


_ROWS_MIN: Final = 16
_UNUSED: Final[Mapping[str, int]] = {}
_NO_NODE: Final[tuple[Node | None, Mapping[str, int]]] = None, _UNUSED


class FreeDeviceShares:
    """Free shares of every device, updated incrementally from the node columns.

    `left` has the free thousandths: one line per row and one column per device, in the order of the node's spec. `sort` has
    the id of the device's kind and model in `sorts`, -1 where there is no device. Both arrays are over-allocated.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._seen = -1
        self._known: list[tuple[Node | None, Mapping[str, int]]] = []
        self.left: Ints = np.zeros((0, 0), dtype=np.int64)
        self.sort: Ints = np.full((0, 0), -1, dtype=np.int64)
        self._names = Names()

    @property
    def sorts(self) -> list[DeviceModel]:
        return self._names.values

    def follow(self) -> Ints | None:
        """Processes changed rows. Returns the rows with any change (devices or other resources); None if all rows were rebuilt.
        """
        changed, rows = self._columns.changed, len(self._columns)
        if self._seen == changed.count:
            return np.zeros(0, dtype=np.int64)
        touched = changed.since(self._seen) if self._seen >= 0 else None
        self._seen = changed.count
        if rows > len(self.left):
            self._widen(max(2 * rows, _ROWS_MIN), self.left.shape[1])
        self._known += [_NO_NODE] * (rows - len(self._known))
        found = None if touched is None else np.unique(touched)
        for row in range(rows) if found is None else found.tolist():
            self._look(row)
        return found

    def _look(self, row: int) -> None:
        node, used = self._columns.nodes[row], self._columns.used[row]
        before = self._known[row]
        if node is before[0] and used is before[1]:
            return  # the common case: only cpu or memory changed
        self._known[row] = node, used
        devices = node.spec.devices if node is not None else ()
        if len(devices) > self.left.shape[1]:
            self._widen(len(self.left), len(devices))
        self.left[row], self.sort[row] = 0, -1
        for at, device in enumerate(devices):
            self.left[row, at] = max(WHOLE_DEVICE - used.get(device.name, 0), 0)
            self.sort[row, at] = self._names.id((device.kind, device.model))

    def _widen(self, rows: int, width: int) -> None:
        more = (0, rows - self.left.shape[0]), (0, width - self.left.shape[1])
        self.left = np.pad(self.left, more)
        self.sort = np.pad(self.sort, more, constant_values=-1)
