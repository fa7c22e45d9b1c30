"""Fragmentation-aware score and device choice.

The score learns which shapes of device requests arrive, what a partly free device is worth to them, and what a node is good
for (all in fragmentation_model.py). A node is rated by how little is lost there:

    score = potential after - potential before - PRICE * worth lost on the shared device - TIE * capacity that stays free

A share goes to the device where it destroys the least worth, then to the one with the least free. Work without device
requests is scored too: it goes where it harms work with device requests the least, and is spread over nodes without devices.

Between two calls of `renew` the score depends on the row alone. Call `renew` between runs of the kernel, never within one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from remit.law.fit import Requirements, DeviceRequirement
from remit.model.resources import WHOLE_DEVICE
from remit.observation.node_columns import Bools, Columns, Floats, Ints, Rows
from remit.proposal.placement.builtin_plugins import BALANCED, LEAST_ALLOCATED, MOST_ALLOCATED
from remit.proposal.placement.devices import FreeDeviceShares, assign_devices
from remit.proposal.placement.fragmentation_model import CPU, MEMORY, WHOLE_ONLY, Demand, Potential, accepts_device, worth
from remit.proposal.placement.plugins import Score

NAME: Final = "fragmentation"
PRICE: Final = 1e5
"""Large enough that lost worth is compared first; the potential decides between nodes where equally much is lost."""
TIE: Final = 0.1
RANGE: Final = float(1 << 23)
"""More than one replica can lose on a node with dozens of devices; maps losses to scores from 1 (no loss) down to 0."""
SHAPES_WEIGHED_MAX: Final = 128
CELLS_MAX: Final = 1 << 22
"""Rows times shapes to keep; on very many nodes fewer shapes are considered."""
WEIGH_INTERVAL: Final = 500
"""Arrivals between two recalculations of the weights. At first after half as many again; on many nodes less often, since all
nodes must be scored again.
"""
PRICE_ARRIVALS_MIN: Final = 20
PRICE_INTERVAL_MAX: Final = 16_384
_BLOCK_CELLS: Final = 1 << 15
"""Rows times shapes processed at once, so that a block fits into the processor's cache."""
_STEP: Final = 1_000_000
"""Worth is rounded to this many steps; smaller differences are ignored."""
_UNFIT: Final = np.iinfo(np.int64).max


class Fragmentation:
    """Keeps the data behind the score for one set of columns. Pass its `score` to their kernel."""

    def __init__(self, columns: Columns, demand: Demand | None = None) -> None:
        self._columns = columns
        self.demand = Demand() if demand is None else demand
        self._stock = FreeDeviceShares(columns)
        self._worths: dict[str, Floats] = {}
        self._epoch = 0
        self._weigh_at = self._price_at = 0
        self._moved_at = 0
        self._sorts = -1
        """Number of device types at the last recalculation; `_rows` is the number of rows that the arrays have space for."""
        self._rows = 0
        self._ranks: dict[tuple[str, int], Ints] = {}
        self._masks: dict[tuple[str, tuple[str, ...]], Bools] = {}
        self.score = Score(
            NAME,
            self._score,
            applies=lambda ask: bool(columns.whole_devices),
            epoch=self._epoch_now,
            instead_of=(LEAST_ALLOCATED.name, MOST_ALLOCATED.name, BALANCED.name),
            fine=True,
            choose=self._choose,
        )

    # -- learning ----------------------------------------------------------------------------------------------------------

    def arrived(self, ask: Requirements, count: int = 1) -> None:
        """Counts arriving replicas with these requirements. Takes effect at the next `renew`."""
        self.demand.arrived(ask, count)

    def renew(self) -> None:
        """Recalculates the weights if enough has arrived or changed. Call only between runs: scores computed before become
        invalid.
        """
        if not self._columns.whole_devices:
            return
        came, every = self.demand.arrivals, max(WEIGH_INTERVAL, 2 * len(self._columns) // 5)
        priced = came >= max(self._price_at, PRICE_ARRIVALS_MIN)
        if came < self._weigh_at and not priced and self._columns.changed.count - self._moved_at < 2 * every:
            return
        if priced:
            self._worths = {kind: worth(sizes) for kind, sizes in self.demand.shares().items()}
            self._price_at = came + min(came // 2, PRICE_INTERVAL_MAX)
        if came >= self._weigh_at:
            self._weigh_at = came + min(came // 2 + 1, every)
        self._weigh()

    def _weigh(self) -> None:
        """Rebuilds all arrays and weights. The epoch changes, so the kernel scores every node again."""
        columns, stock = self._columns, self._stock
        stock.follow()
        kinds = {kind for kind, _ in stock.sorts}
        popular = self.demand.popular(min(SHAPES_WEIGHED_MAX, CELLS_MAX // max(len(columns), 1)))
        self._potential = Potential([one for one in popular if one.shape.kind in kinds], stock.sorts, self._worths)
        self._sorts, self._rows = len(stock.sorts), len(stock.left)
        self._ranks, self._masks = {}, {}
        self._room = np.zeros((self._rows, len(self._potential)))
        self._worth = np.zeros((self._rows, len(self._potential.kinds)))
        self._base, self._free = np.zeros(self._rows), np.zeros(self._rows)
        self._devices = np.zeros(self._rows, dtype=np.int64)
        rows = np.arange(len(columns))
        self._count(rows)
        self._potential.weigh(*self._left_in_all(rows[columns.takes]))
        self._value(rows)
        capacity = columns.capacity[columns.resources[CPU]] if CPU in columns.resources else self._devices
        self._cpu_max = max(float(capacity.max(initial=0)), 1.0)
        self._free_max = max(float(self._devices.max(initial=0)) * WHOLE_DEVICE, 1.0)
        self._moved_at = columns.changed.count
        self._epoch += 1

    def _left_in_all(self, rows: Ints) -> tuple[Floats, dict[str, int]]:
        """Over these rows: free capacity by shape, and the number of devices by kind."""
        capacity = np.zeros(len(self._potential))
        for some in self._blocks(rows):
            capacity += self._potential.capacity(*self._amounts(some), self._room[some]).sum(axis=0)
        counts = np.bincount(self._stock.sort[rows].ravel() + 1, minlength=self._sorts + 1)[1:].tolist()
        devices: dict[str, int] = {}
        for (kind, _), count in zip(self._stock.sorts, counts, strict=True):
            devices[kind] = devices.get(kind, 0) + count
        return capacity, devices

    # -- data by row -------------------------------------------------------------------------------------------------------

    def _epoch_now(self) -> int:
        self._follow()
        return self._epoch

    def _follow(self) -> None:
        """Processes changed rows. A new device type, or more rows than the arrays can hold, causes a full recalculation."""
        touched = self._stock.follow()
        if touched is None or len(self._stock.sorts) != self._sorts or len(self._stock.left) != self._rows:
            self._weigh()
        elif len(touched):
            self._count(touched)
            self._value(touched)

    def _count(self, rows: Ints) -> None:
        """Updates free device capacity and worth of these rows."""
        for some in self._blocks(rows, self._stock.left.shape[1]):
            left, sort = self._stock.left[some], self._stock.sort[some]
            self._room[some] = self._potential.room(left, sort)
            self._worth[some] = self._potential.worth(left, sort)
            self._free[some] = left.sum(axis=1)
            self._devices[some] = (sort >= 0).sum(axis=1)

    def _value(self, rows: Ints) -> None:
        for some in self._blocks(rows):
            self._base[some] = self._potential.of(*self._amounts(some), self._room[some], self._worth[some])

    def _amounts(self, rows: Ints) -> tuple[Floats, Floats]:
        site = Rows(self._columns, rows)
        return _free(site, CPU), _free(site, MEMORY)

    def _blocks(self, rows: Ints, lines: int = 1) -> Iterator[Ints]:
        step = max(_BLOCK_CELLS // max(len(self._potential) * lines, 1), 1)
        return (rows[at : at + step] for at in range(0, len(rows), step))

    # -- scoring -----------------------------------------------------------------------------------------------------------

    def _score(self, ask: Requirements, site: Any) -> Floats:
        self._follow()
        rows = np.arange(len(self._columns)) if site is self._columns else site.rows
        needs = {name: int(count) for name, count in ask.resources}
        cpu, memory = _free(site, CPU), _free(site, MEMORY)
        anew = site is not self._columns and bool(site.spent)
        found = np.empty(len(rows))
        step = max(_BLOCK_CELLS // max(len(self._potential), 1), 1)
        for at in range(0, len(rows), step):
            some = slice(at, at + step)
            found[some] = self._gain(ask, needs, rows[some], cpu[some], memory[some], anew)
        return np.clip(1.0 + (found - 1.0) / RANGE, 0.0, 1.0)

    def _gain(self, ask: Requirements, needs: Mapping[str, int], rows: Ints, cpu: Floats, memory: Floats, anew: bool) -> Floats:
        """Score difference on these rows, given their free cpu and memory. It is negative, apart from the tie breaker."""
        room, worth_, free = self._room[rows], self._worth[rows], self._free[rows]
        before = self._potential.of(cpu, memory, room, worth_) if anew else self._base[rows]
        spoiled = self._take(ask, rows, room, worth_, free) if ask.whole_devices or ask.device_shares else 0.0
        cpu = np.maximum(cpu - needs.get(CPU, 0), 0.0)
        memory = np.maximum(memory - needs.get(MEMORY, 0), 0.0)
        gain = self._potential.of(cpu, memory, room, worth_) - before
        gain -= PRICE * spoiled
        stays = cpu / self._cpu_max
        gain -= TIE * np.where(self._devices[rows] > 0, stays + free / self._free_max, -stays)
        return gain

    def _take(self, ask: Requirements, rows: Ints, room: Floats, worth_: Floats, free: Floats) -> Floats:
        """Subtracts the requested devices from the free capacity, worth and free share of these rows; returns the worth lost to
        shares.
        """
        potential, spoiled = self._potential, np.zeros(len(rows))
        left, sort = self._stock.left[rows], self._stock.sort[rows]
        lines = np.arange(len(rows))
        for one in ask.device_shares:
            at = np.where(self._mask(one)[sort], self._rank(one)[left], _UNFIT).argmin(axis=1)
            level, of = left[lines, at], sort[lines, at]
            after = np.maximum(level - one.amount, 0)
            lost = potential.worths[of, level] - potential.worths[of, after]
            room -= potential.units_of(level, of)
            room += potential.units_of(after, of)
            worth_[:, potential.kinds.index(one.kind)] -= lost
            spoiled += lost
            free -= one.amount
        for one in (one for one in ask.whole_devices if one.amount):
            there = self._mask(one)[sort] & (left == WHOLE_DEVICE)
            taken = there & (there.cumsum(axis=1) <= one.amount)
            left[taken] = 0  # so that another device requirement does not take them again
            for of in np.unique(sort[taken]).tolist():
                room -= potential.units[WHOLE_DEVICE] * potential.allowed[of] * (taken & (sort == of)).sum(axis=1)[:, None]
            count = taken.sum(axis=1)
            worth_[:, potential.kinds.index(one.kind)] -= count
            free -= count * WHOLE_DEVICE
        return spoiled

    def _mask(self, one: DeviceRequirement) -> Bools:
        """By device type, whether it satisfies the requirement; the last entry, for no device, is False."""
        key = one.kind, one.models
        if key not in self._masks:
            self._masks[key] = np.array([*(accepts_device(*key, sort) for sort in self._stock.sorts), False], dtype=np.bool_)
        return self._masks[key]

    # -- choosing devices --------------------------------------------------------------------------------------------------

    def _rank(self, one: DeviceRequirement) -> Ints:
        """By free share of a device, the cost of taking this share from it. Lost worth is compared first."""
        key = one.kind, one.amount
        if key not in self._ranks:
            worths, level = self._worths.get(one.kind, WHOLE_ONLY), np.arange(WHOLE_DEVICE + 1)
            lost = np.round((worths - worths[np.maximum(level - one.amount, 0)]) * _STEP).astype(np.int64)
            self._ranks[key] = np.where(level >= one.amount, lost * (WHOLE_DEVICE + 1) + level, _UNFIT)
        return self._ranks[key]

    def _choose(self, ask: Requirements, row: int) -> dict[str, int]:
        """The device assignment that the score assumes."""
        node = self._columns.nodes[row]
        if node is None or not (ask.whole_devices or ask.device_shares):
            return {}
        used = self._columns.used[row]
        return assign_devices(ask, node.spec.devices, used, lambda one, left: int(self._rank(one)[left])) or {}


def _free(site: Any, name: str) -> Floats:
    """Free amount of a resource by row; 0 where more is used than exists."""
    return np.asarray(np.maximum(site.free.get(name, 0), np.zeros(len(site))))
