"""Model behind the fragmentation score: observed demand, share prices, node potential.

Pure calculations; nothing is placed here. docs/packing.md explains the choices.

**Demand.** Decaying counts of the device shapes that arrive.

**Prices.** A device with 190 thousandths free is worth nothing if no request is smaller than 220; one with 680 free may be
worth two thirds of a whole device. It depends on the sizes that arrive and on which of them can be packed together.

Let `count[s]` shares of size `s` arrive. A *pattern* is a multiset of sizes that fits on one device. The smallest number of
devices for all of them, with fractional patterns, is a linear program: minimise the sum of `x[P]` so that each size is
covered. Its dual gives the price of one share of each size, in devices: no pattern is worth more than the device it fills,
and all arrivals together are worth all devices they need. The free part of a device is then worth the most valuable multiset
that fits into it (a knapsack).

The number of patterns is exponential, so they are not enumerated: the simplex method starts with patterns of one size each,
and while some pattern is worth more than a device, the knapsack finds it and it enters the basis (column generation).

**Potential.** Value of a node's free capacity to the shapes that arrive:

    room[t]     how many of shape t the node's free devices can hold
    reach[t]    how many of t its free cpu and memory are enough for, as a fraction
    capacity[t] = 0 if reach[t] < 1, else number[t] * share[t] * min(room[t], reach[t]), in thousandths of devices
    scarce[t]   = popularity[t] / (capacity[t] of the whole cluster, as a share of all its devices, + 0.01)
    potential   = sum of scarce[t] * capacity[t]  +  BALANCE * sum of part[t] * min(worth, worth[t] * reach[t])

`worth` is the price of all free device shares of the node, `worth[t]` the price of one request of shape t, and `part[t]` the
fraction of all arrivals, by worth, that has shape t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law.fit import DeviceModel, Requirements
from remit.model.resources import WHOLE_DEVICE
from remit.observation.node_columns import Floats, Ints

CPU: Final = "cpu"
MEMORY: Final = "memory"
DECAY_AT: Final = 32_768
"""When this many arrivals are counted, all counts are halved, so that recent arrivals outweigh old ones."""
SHAPES_MAX: Final = 4_096
COVERED: Final = 0.99
"""Fraction of all arrivals to consider; the rarest shapes beyond it are ignored."""


class DeviceShape(NamedTuple):
    """A device request: number and share of devices of a kind and of any of these models, and the cpu requested with them.

    Memory is not part of the shape because it varies; its mean is used.
    """

    kind: str
    models: tuple[str, ...]
    number: int
    share: int
    """In thousandths of a device: WHOLE for whole devices, less for one share."""
    cpu: int


class FrequentShape(NamedTuple):
    shape: DeviceShape
    arrivals: float
    memory: float
    """Mean memory of its requests."""


class Demand:
    """Decaying counts of requested shapes. `arrivals` counts all replicas, including those without device requests."""

    def __init__(self) -> None:
        self.arrivals = 0
        self._counts: dict[DeviceShape, float] = {}
        self._memory: dict[DeviceShape, float] = {}
        self._total = 0.0

    def arrived(self, requirements: Requirements, count: int = 1) -> None:
        """Counts arriving replicas with these requirements, whether or not they are placed later."""
        self.arrivals += count
        if not (requirements.whole_devices or requirements.device_shares):
            return
        needs = dict(requirements.resources)
        cpu, memory = needs.get(CPU, 0), needs.get(MEMORY, 0)
        for shape in shapes_of(requirements, cpu):
            self._counts[shape] = self._counts.get(shape, 0.0) + count
            self._memory[shape] = self._memory.get(shape, 0.0) + count * memory
            self._total += count
        if self._total > DECAY_AT:
            self._decay(0.5 * DECAY_AT / self._total)
        if len(self._counts) > SHAPES_MAX:
            self._keep_most_frequent(SHAPES_MAX // 2)

    def frequent_shapes(self, most: int) -> list[FrequentShape]:
        """The most frequent shapes: at most `most`, and no more than needed to cover nearly all arrivals."""
        frequent, covered = [], 0.0
        for shape in sorted(self._counts, key=lambda shape: (-self._counts[shape], shape))[:most]:
            if covered >= COVERED * self._total:
                break
            count = self._counts[shape]
            covered += count
            frequent.append(FrequentShape(shape, count, self._memory[shape] / count))
        return frequent

    def shares(self) -> dict[str, dict[int, float]]:
        """Counts of requested shares by device kind and size; empty for a kind of which only whole devices were requested."""
        counts: dict[str, dict[int, float]] = {}
        for shape, count in self._counts.items():
            sizes = counts.setdefault(shape.kind, {})
            if shape.share < WHOLE_DEVICE:
                sizes[shape.share] = sizes.get(shape.share, 0.0) + count
        return counts

    def _decay(self, factor: float) -> None:
        for counts in (self._counts, self._memory):
            for shape in counts:
                counts[shape] *= factor
        self._total *= factor

    def _keep_most_frequent(self, most: int) -> None:
        """Keeps the most frequent shapes, on ties the latest, so that new shapes are not dropped at once."""
        latest = reversed(list(self._counts))
        kept = sorted(latest, key=lambda shape: -self._counts[shape])[:most]
        self._counts = {shape: self._counts[shape] for shape in reversed(kept)}
        self._memory = {shape: self._memory[shape] for shape in self._counts}
        self._total = sum(self._counts.values())


def shapes_of(requirements: Requirements, cpu: int) -> list[DeviceShape]:
    """One shape for each device requirement (most have one), each with the cpu of the whole request."""
    parts = [
        DeviceShape(requirement.kind, requirement.models, requirement.amount, WHOLE_DEVICE, cpu)
        for requirement in requirements.whole_devices
        if requirement.amount > 0
    ]
    return parts + [
        DeviceShape(requirement.kind, requirement.models, 1, requirement.amount, cpu)
        for requirement in requirements.device_shares
    ]


LEVELS: Final = 100
"""Resolution of a device. Sizes are rounded up and free shares down, so a price never overestimates."""
UNIT: Final = WHOLE_DEVICE // LEVELS
SIZES_MAX: Final = 32
"""Number of sizes with a price of their own: those that use the most capacity. Others are valued by what else fits in their
place.
"""
_PIVOTS_MAX: Final = 128
_OPTIMAL: Final = 1e-7
_TINY: Final = 1e-9


def worth(counts: Mapping[int, float]) -> Floats:
    """Worth of a device with 0 to WHOLE thousandths free, in whole devices; `counts` is the number of requested shares by size.

    If no shares are requested, only a completely free device has worth.
    """
    by_level: dict[int, float] = {}
    for size, count in counts.items():
        if 0 < size < WHOLE_DEVICE and count > 0:
            level = -(-size // UNIT)
            by_level[level] = by_level.get(level, 0.0) + count
    largest = sorted(by_level, key=lambda level: (-level * by_level[level], level))[:SIZES_MAX]
    sizes = sorted(largest)
    values = np.zeros(LEVELS + 1)
    if sizes:
        values[:] = best_fill(sizes, dual_prices(sizes, [by_level[size] for size in sizes]))[0]
        if values[LEVELS] > 1.0:
            values /= values[LEVELS]  # the simplex method may stop before the optimum, at prices that are too high
    values[LEVELS] = 1.0
    return values[np.arange(WHOLE_DEVICE + 1) // UNIT]


def best_fill(sizes: Sequence[int], prices: Sequence[float], room: int = LEVELS) -> tuple[list[float], list[int]]:
    """For each level up to `room`: the value of the most valuable multiset of sizes that fits, and the position in `sizes` of
    one of them; -1 where leaving one level idle is equally good.
    """
    items = [(size, price, at) for at, (size, price) in enumerate(zip(sizes, prices, strict=True)) if price > _TINY]
    values, picks = [0.0] * (room + 1), [-1] * (room + 1)
    for level in range(1, room + 1):
        most, pick = values[level - 1], -1
        for size, price, at in items:
            if size > level:
                break
            value = values[level - size] + price
            if value > most + _TINY:
                most, pick = value, at
        values[level], picks[level] = most, pick
    return values, picks


def dual_prices(sizes: Sequence[int], counts: Sequence[float]) -> list[float]:
    """Price of one share of each of these ascending sizes (in levels), when `counts` of each are requested."""
    demand = np.array(counts, dtype=np.float64)
    inverse = np.diag([1.0 / (LEVELS // size) for size in sizes])
    """Inverse of the basis matrix, in which each column is a pattern."""
    cost = np.ones(len(sizes))
    prices: Floats = cost @ inverse
    for _ in range(_PIVOTS_MAX):
        entering, price = _entering(sizes, prices)
        if entering is None:
            break
        along = inverse @ entering
        share = np.full(len(sizes), np.inf)
        np.divide(inverse @ demand, along, out=share, where=along > _TINY)
        leaving = int(share.argmin())
        if not np.isfinite(share[leaving]):
            break
        row = inverse[leaving] / along[leaving]
        inverse -= np.outer(along, row)
        inverse[leaving] = row
        cost[leaving] = price
        prices = cost @ inverse
    return [max(float(value), 0.0) for value in prices]


def _entering(sizes: Sequence[int], prices: Floats) -> tuple[Floats | None, float]:
    """A column that lowers the cost, and its own cost; None if the prices are optimal."""
    column = np.zeros(len(sizes))
    lowest = int(prices.argmin())
    if prices[lowest] < -_TINY:
        column[lowest] = -1.0  # a surplus of a size costs nothing
        return column, 0.0
    values, picks = best_fill(sizes, prices.tolist())
    if values[LEVELS] <= 1.0 + _OPTIMAL:
        return None, 0.0
    level = LEVELS
    while level:
        pick = picks[level]
        if pick >= 0:
            column[pick] += 1.0
        level -= sizes[pick] if pick >= 0 else 1
    return column, 1.0


BALANCE: Final = 3e3
"""Weight of one whole device that cpu and memory can support, relative to its 1,000 thousandths of capacity."""
SCARCE_MIN: Final = 0.01
WHOLE_ONLY: Final = worth({})


class Potential:
    """Potential of nodes: one column for each shape, those for several devices first.

    Arrays by device type have one entry more than `device_types`, for positions without a device.
    """

    def __init__(
        self, frequent: Sequence[FrequentShape], device_types: Sequence[DeviceModel], worths: Mapping[str, Floats]
    ) -> None:
        frequent = sorted(frequent, key=lambda entry: entry.shape.number == 1)
        shapes = [entry.shape for entry in frequent]
        self.kinds = list(dict.fromkeys(kind for kind, _ in device_types)) or [""]
        self._kind = np.array([self.kinds.index(shape.kind) for shape in shapes], dtype=np.int64)
        self._kind_of = np.array([*(self.kinds.index(kind) for kind, _ in device_types), -1], dtype=np.int64)
        self._several = sum(shape.number > 1 for shape in shapes)
        self._number = np.array([shape.number for shape in shapes[: self._several]], dtype=np.float64)
        self._cpu = np.array([max(shape.cpu, 1) for shape in shapes], dtype=np.float64)
        self._memory = np.array([max(entry.memory, 1.0) for entry in frequent])
        self._size = np.array([shape.number * shape.share for shape in shapes], dtype=np.float64)
        share = np.array([shape.share for shape in shapes], dtype=np.int64)
        self.units = (np.arange(WHOLE_DEVICE + 1)[:, None] // share).astype(np.float64)
        """How many requests of each shape fit on a device, by its free share."""
        allowed = [[accepts_device(shape.kind, shape.models, device_type) for shape in shapes] for device_type in device_types]
        self.allowed = np.array([*allowed, [False] * len(shapes)], dtype=np.float64)
        self._has_exclusions = not all(all(queue) for queue in allowed)
        """Whether some shape does not accept some device type."""
        self.worths = np.array([*(worths.get(kind, WHOLE_ONLY) for kind, _ in device_types), np.zeros(WHOLE_DEVICE + 1)])
        """Worth of one device, by its type and free share."""
        counts = np.array([entry.arrivals for entry in frequent], dtype=np.float64)
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
        """Sets the weight of each shape by scarcity: `capacity` is the free capacity by shape, `devices` the number of devices
        by kind.
        """
        total_shares = np.array([max(devices.get(kind, 0), 1) * WHOLE_DEVICE for kind in self.kinds], dtype=np.float64)
        self._weight = self._size * self._popularity / (capacity / total_shares[self._kind] + SCARCE_MIN)

    def units_of(self, free: Ints, device_type: Ints) -> Floats:
        """How many shares, or whole devices, of each shape fit on a device with this much free."""
        units: Floats = self.units.take(free, axis=0)
        if self._has_exclusions:
            units *= self.allowed.take(device_type, axis=0)
        return units

    def room(self, free: Ints, device_type: Ints) -> Floats:
        """Like `units_of`, summed over all devices of a row."""
        return np.asarray(self.units_of(free, device_type).sum(axis=1))

    def worth(self, free: Ints, device_type: Ints) -> Floats:
        """Worth of the devices of each row, by kind."""
        each = self.worths[device_type, free]
        if len(self.kinds) == 1:
            return np.asarray(each.sum(axis=1, keepdims=True))
        kind = self._kind_of[device_type]
        return np.stack([np.where(kind == at, each, 0.0).sum(axis=1) for at in range(len(self.kinds))], axis=1)

    def capacity(self, cpu: Floats, memory: Floats, room: Floats) -> Floats:
        """Capacity in thousandths of devices, by row and shape."""
        capacity = self._fits(self._reach(cpu, memory), room)
        capacity *= self._size
        return capacity

    def of(self, cpu: Floats, memory: Floats, room: Floats, worth: Floats) -> Floats:
        """Potential of each row. It depends on that row alone, to the last bit, so that incremental and full scoring agree."""
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


def accepts_device(kind: str, models: Sequence[str], device_type: DeviceModel) -> bool:
    return device_type[0] == kind and (not models or device_type[1] in models)
