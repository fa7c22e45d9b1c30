"""What is what is left of a node good for? Weights of the shapes that come, and a potential over columns. It keeps no nodes.

    room[t]     how many of shape t the node's devices have room for
    reach[t]    how many of t its cpu and memory would do for, by fractions
    capacity[t] = 0 if reach[t] < 1, else number[t] * share[t] * min(room[t], reach[t]), in thousandths of devices
    scarce[t]   = popularity[t] / (capacity[t] of the whole cluster, as a share of all its devices, + 0.01)
    potential   = sum of scarce[t] * capacity[t]  +  BALANCE * sum of part[t] * min(worth, worth[t] * reach[t])

`worth` is that of all devices of the node by prices.py, `worth[t]` that of what one of t takes, and `part[t]` is how much of
all that comes, by worth, is of shape t. docs/packing.md says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from remit.law.columns import Floats, Ints
from remit.law.fit import Model
from remit.model.resources import WHOLE
from remit.proposal.demand import Popular
from remit.proposal.prices import worth

BALANCE: Final = 3e3
"""What one whole device counts that cpu and memory can feed, next to its thousand thousandths of capacity."""
SCARCE_MIN: Final = 0.01
WHOLE_ONLY: Final = worth({})


class Potential:
    """A column for each shape. Those for several devices are first; whatever is said of a sort of device has one line more than
    there are `sorts`, for where there is no device.
    """

    def __init__(self, popular: Sequence[Popular], sorts: Sequence[Model], worths: Mapping[str, Floats]) -> None:
        popular = sorted(popular, key=lambda one: one.shape.number == 1)
        shapes = [one.shape for one in popular]
        self.kinds = list(dict.fromkeys(kind for kind, _ in sorts)) or [""]
        self._kind = np.array([self.kinds.index(shape.kind) for shape in shapes], dtype=np.int64)
        self._kind_of = np.array([*(self.kinds.index(kind) for kind, _ in sorts), -1], dtype=np.int64)
        self._several = sum(shape.number > 1 for shape in shapes)
        self._number = np.array([shape.number for shape in shapes[: self._several]], dtype=np.float64)
        self._cpu = np.array([max(shape.cpu, 1) for shape in shapes], dtype=np.float64)
        self._memory = np.array([max(one.memory, 1.0) for one in popular])
        self._size = np.array([shape.number * shape.share for shape in shapes], dtype=np.float64)
        share = np.array([shape.share for shape in shapes], dtype=np.int64)
        self.units = (np.arange(WHOLE + 1)[:, None] // share).astype(np.float64)
        """How many of each share a device has room for of which so much is left."""
        allowed = [[allows(shape.kind, shape.models, sort) for shape in shapes] for sort in sorts]
        self.allowed = np.array([*allowed, [False] * len(shapes)], dtype=np.float64)
        self._choosy = not all(all(line) for line in allowed)
        """Is there a shape that some sort of device will not do for?"""
        self.worths = np.array([*(worths.get(kind, WHOLE_ONLY) for kind, _ in sorts), np.zeros(WHOLE + 1)])
        """Of one device, by its sort and what is left of it."""
        counts = np.array([one.arrivals for one in popular], dtype=np.float64)
        self._popularity = counts / max(float(counts.sum()), 1.0)
        self._worth = np.array(
            [shape.number * worths.get(shape.kind, WHOLE_ONLY)[shape.share] for shape in shapes], dtype=np.float64
        )
        part = self._popularity * self._worth
        self._part = BALANCE * part / max(float(part.sum()), 1e-12)
        self._weight = np.zeros(len(shapes))

    def __len__(self) -> int:
        return len(self._size)

    def weigh(self, capacity: Floats, devices: Mapping[str, int]) -> None:
        """Make scarce what little is left for: `capacity` by shape, and how many `devices` of each kind there are in all."""
        whole = np.array([max(devices.get(kind, 0), 1) * WHOLE for kind in self.kinds], dtype=np.float64)
        self._weight = self._size * self._popularity / (capacity / whole[self._kind] + SCARCE_MIN)

    def units_of(self, left: Ints, sort: Ints) -> Floats:
        """How many shares, or whole devices, of each shape a device has room for of which so much is left."""
        found: Floats = self.units.take(left, axis=0)
        if self._choosy:
            found *= self.allowed.take(sort, axis=0)
        return found

    def room(self, left: Ints, sort: Ints) -> Floats:
        """As `units_of`, of all devices of a line."""
        return np.asarray(self.units_of(left, sort).sum(axis=1))

    def worth(self, left: Ints, sort: Ints) -> Floats:
        """What the devices of each line are worth, by kind."""
        each = self.worths[sort, left]
        if len(self.kinds) == 1:
            return np.asarray(each.sum(axis=1, keepdims=True))
        kind = self._kind_of[sort]
        return np.stack([np.where(kind == at, each, 0.0).sum(axis=1) for at in range(len(self.kinds))], axis=1)

    def capacity(self, cpu: Floats, memory: Floats, room: Floats) -> Floats:
        """In thousandths of devices, by line and shape."""
        found = self._fits(self._reach(cpu, memory), room)
        found *= self._size
        return found

    def of(self, cpu: Floats, memory: Floats, room: Floats, worth: Floats) -> Floats:
        """The potential of each line. It rests on that line alone, to the last bit, whichever others are looked at with it."""
        reach = self._reach(cpu, memory)
        total = self._fits(reach, room)
        total *= self._weight
        reach *= self._worth
        np.minimum(reach, worth if len(self.kinds) == 1 else worth[:, self._kind], out=reach)
        reach *= self._part
        total += reach
        return np.asarray(total.sum(axis=1))

    def _reach(self, cpu: Floats, memory: Floats) -> Floats:
        reach: Floats = np.minimum(cpu[:, None] / self._cpu, memory[:, None] / self._memory)
        return reach

    def _fits(self, reach: Floats, room: Floats) -> Floats:
        fits: Floats = room.copy()
        if self._several:
            fits[:, : self._several] = np.floor(fits[:, : self._several] / self._number)
        np.minimum(fits, reach, out=fits)
        fits *= reach >= 1.0
        return fits


def allows(kind: str, models: Sequence[str], sort: Model) -> bool:
    return sort[0] == kind and (not models or sort[1] in models)
