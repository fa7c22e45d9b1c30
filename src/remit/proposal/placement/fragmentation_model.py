"""Model behind the fragmentation score: observed demand, share prices, node potential.

Counts by shape that fade, of work that asks for devices. Nothing is placed here.

Prices from the shares that are asked for; nothing is placed here.

A device with 190 thousandths free is worth nothing if nobody asks for less than 220, however much is free of it; one with 680
may be worth two thirds of a whole one. Which it is depends on what comes, and on what can be packed together.

Let `count[s]` shares of size `s` come. A *pattern* is a multiset of sizes that one device has room for. The fewest devices that
all of them need, patterns taken by fractions, are a linear programme: least sum of `x[P]`, where each size is covered. Its dual
says what one share of each size costs, in devices: no pattern is worth more than the device it fills, and what comes is worth
all the devices it needs. What is free on a device is then worth the dearest multiset that fits into it (a knapsack).

There are as many patterns as there are ways to fill a device, so none is listed: the simplex method begins with patterns of one
size each, and as long as some pattern is worth more than a device, the knapsack finds it and it enters the basis.

Weights of the shapes that come, and a potential over columns. It keeps no nodes.

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
from typing import Final, NamedTuple

import numpy as np

from remit.law.fit import Ask, Model
from remit.model.resources import WHOLE
from remit.observation.node_columns import Floats, Ints

CPU: Final = "cpu"
MEMORY: Final = "memory"
FADES_AT: Final = 32_768
"""When so many arrivals are remembered, they are made to count as half as many: what comes now outweighs what came long ago."""
SHAPES_MAX: Final = 4_096
COVERED: Final = 0.99
"""Of all arrivals: the rarest shapes are left out of account."""


class Shape(NamedTuple):
    """So many devices of a kind and of any of these models, so much of each, and the cpu that goes with them. Memory is not in
    it: that differs from one to the next, and its mean will do.
    """

    kind: str
    models: tuple[str, ...]
    number: int
    share: int
    """In thousandths of a device; WHOLE, unless it is one share."""
    cpu: int


class Popular(NamedTuple):
    shape: Shape
    arrivals: float
    memory: float
    """Its mean."""


class Demand:
    """`arrivals` is how many replicas came in all, whatever they ask for."""

    def __init__(self) -> None:
        self.arrivals = 0
        self._counts: dict[Shape, float] = {}
        self._memory: dict[Shape, float] = {}
        self._total = 0.0

    def arrived(self, ask: Ask, count: int = 1) -> None:
        """So many replicas with this ask have come, wherever they will be placed, if at all."""
        self.arrivals += count
        if not (ask.whole or ask.shares):
            return
        needs = dict(ask.resources)
        cpu, memory = needs.get(CPU, 0), needs.get(MEMORY, 0)
        for shape in shapes_of(ask, cpu):
            self._counts[shape] = self._counts.get(shape, 0.0) + count
            self._memory[shape] = self._memory.get(shape, 0.0) + count * memory
            self._total += count
        if self._total > FADES_AT:
            self._fade(0.5 * FADES_AT / self._total)
        if len(self._counts) > SHAPES_MAX:
            self._keep(SHAPES_MAX // 2)

    def popular(self, most: int) -> list[Popular]:
        """The shapes that come most often, at most so many, and no more than cover nearly all arrivals."""
        found, covered = [], 0.0
        for shape in sorted(self._counts, key=lambda shape: (-self._counts[shape], shape))[:most]:
            if covered >= COVERED * self._total:
                break
            count = self._counts[shape]
            covered += count
            found.append(Popular(shape, count, self._memory[shape] / count))
        return found

    def shares(self) -> dict[str, dict[int, float]]:
        """How many shares of which size came, by kind of device; a kind of which no share came has none."""
        found: dict[str, dict[int, float]] = {}
        for shape, count in self._counts.items():
            sizes = found.setdefault(shape.kind, {})
            if shape.share < WHOLE:
                sizes[shape.share] = sizes.get(shape.share, 0.0) + count
        return found

    def _fade(self, factor: float) -> None:
        for kept in (self._counts, self._memory):
            for shape in kept:
                kept[shape] *= factor
        self._total *= factor

    def _keep(self, most: int) -> None:
        """The most popular, and of equals the latest, so that what is new has a chance."""
        latest = reversed(list(self._counts))
        kept = sorted(latest, key=lambda shape: -self._counts[shape])[:most]
        self._counts = {shape: self._counts[shape] for shape in reversed(kept)}
        self._memory = {shape: self._memory[shape] for shape in self._counts}
        self._total = sum(self._counts.values())


def shapes_of(ask: Ask, cpu: int) -> list[Shape]:
    """One for each part of the ask that is about devices; most have one. Whoever meets one meets the cpu of the whole ask."""
    parts = [Shape(one.kind, one.models, one.amount, WHOLE, cpu) for one in ask.whole if one.amount > 0]
    return parts + [Shape(one.kind, one.models, 1, one.amount, cpu) for one in ask.shares]


LEVELS: Final = 100
"""How finely a device is looked at. Sizes are rounded up and what is free down, so a price never promises too much."""
UNIT: Final = WHOLE // LEVELS
SIZES_MAX: Final = 32
"""How many sizes have a price of their own: those that take up most. The others are worth what else fits in their place."""
_PIVOTS_MAX: Final = 128
_ENOUGH: Final = 1e-7
_TINY: Final = 1e-9


def worth(counts: Mapping[int, float]) -> Floats:
    """For 0 to WHOLE thousandths free, the worth of the device in whole ones; `counts` says how many shares of which size come.

    If none do, only a whole device is worth anything.
    """
    by_level: dict[int, float] = {}
    for size, count in counts.items():
        if 0 < size < WHOLE and count > 0:
            level = -(-size // UNIT)
            by_level[level] = by_level.get(level, 0.0) + count
    largest = sorted(by_level, key=lambda level: (-level * by_level[level], level))[:SIZES_MAX]
    sizes = sorted(largest)
    values = np.zeros(LEVELS + 1)
    if sizes:
        values[:] = best_fill(sizes, dual_prices(sizes, [by_level[size] for size in sizes]))[0]
        if values[LEVELS] > 1.0:
            values /= values[LEVELS]  # a basis that was left before it was the best asks too much
    values[LEVELS] = 1.0
    return values[np.arange(WHOLE + 1) // UNIT]


def best_fill(sizes: Sequence[int], prices: Sequence[float], room: int = LEVELS) -> tuple[list[float], list[int]]:
    """For each level up to `room`: the dearest multiset of sizes that fits, and the place of one of them in `sizes`; -1 where
    leaving one level idle is as good.
    """
    items = [(size, price, at) for at, (size, price) in enumerate(zip(sizes, prices, strict=True)) if price > _TINY]
    values, picks = [0.0] * (room + 1), [-1] * (room + 1)
    for level in range(1, room + 1):
        most, pick = values[level - 1], -1
        for size, price, at in items:
            if size > level:
                break
            found = values[level - size] + price
            if found > most + _TINY:
                most, pick = found, at
        values[level], picks[level] = most, pick
    return values, picks


def dual_prices(sizes: Sequence[int], counts: Sequence[float]) -> list[float]:
    """What one share of each of these ascending sizes, in levels, costs, when so many of each come."""
    demand = np.array(counts, dtype=np.float64)
    inverse = np.diag([1.0 / (LEVELS // size) for size in sizes])
    """Of the basis: one column a pattern."""
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
    return [max(float(one), 0.0) for one in prices]


def _entering(sizes: Sequence[int], prices: Floats) -> tuple[Floats | None, float]:
    """A column that makes it cheaper, and what it costs; none if these are the prices."""
    column = np.zeros(len(sizes))
    lowest = int(prices.argmin())
    if prices[lowest] < -_TINY:
        column[lowest] = -1.0  # one too many of a size costs nothing
        return column, 0.0
    values, picks = best_fill(sizes, prices.tolist())
    if values[LEVELS] <= 1.0 + _ENOUGH:
        return None, 0.0
    level = LEVELS
    while level:
        pick = picks[level]
        if pick >= 0:
            column[pick] += 1.0
        level -= sizes[pick] if pick >= 0 else 1
    return column, 1.0


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
