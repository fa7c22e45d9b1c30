"""Fragmentation-aware score and device choice.

A score, and the choice of a device.

It learns what comes: of which shapes (demand.py), what a partly free device is worth to them (prices.py), and what a node is
good for (potential.py). A place is as good as little is lost there:

    score = potential after - potential before - PRICE * the worth that a share spoils on its device - TIE * what stays free

A share goes to the device on which it spoils the least worth, then to the one with the least left. What asks for no devices is
scored too: it goes where it hurts those that do the least, and where there are no devices it spreads.

Between two calls of `renew` the score rests on the row alone; so whoever runs a kernel calls it between runs, not within one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from remit.law.fit import Ask, Devices
from remit.model.resources import WHOLE
from remit.observation.node_columns import Bools, Columns, Floats, Ints, Rows
from remit.proposal.placement.builtin_plugins import BALANCED, LEAST, MOST
from remit.proposal.placement.devices import Stock, choose_among
from remit.proposal.placement.fragmentation_model import CPU, MEMORY, WHOLE_ONLY, Demand, Potential, allows, worth
from remit.proposal.placement.plugins import Score

NAME: Final = "fragmentation"
PRICE: Final = 1e5
"""So much that it comes first, and the potential decides between places where as much worth is spoiled."""
TIE: Final = 0.1
RANGE: Final = float(1 << 23)
"""More than a replica can spoil on a node with dozens of devices: the score is 1 where nothing is lost, 0 where so much is."""
TARGETS_MAX: Final = 128
CELLS_MAX: Final = 1 << 22
"""Rows times shapes that are kept: on very many nodes, fewer shapes are looked at."""
WEIGHED_EVERY: Final = 500
"""Arrivals between two weighings; at first after every half of what has come, and on many nodes less often, for then all of
them are scored anew."""
PRICED_FROM: Final = 20
PRICED_EVERY_MAX: Final = 16_384
_BLOCK_CELLS: Final = 1 << 15
"""Rows times shapes that are looked at in one go: what fits into a processor's cache."""
_STEP: Final = 1_000_000
"""Worth that differs by less than one in so many does not differ."""
_NEVER: Final = np.iinfo(np.int64).max


class Fragmentation:
    """For the kernel of these columns, which takes its `score`."""

    def __init__(self, columns: Columns, demand: Demand | None = None) -> None:
        self._columns = columns
        self.demand = Demand() if demand is None else demand
        self._stock = Stock(columns)
        self._worths: dict[str, Floats] = {}
        self._epoch = 0
        self._weigh_at = self._price_at = 0
        self._moved_at = 0
        self._sorts = -1
        """How many sorts of devices there were at the last weighing, and for how many rows there is room in what is kept."""
        self._rows = 0
        self._ranks: dict[tuple[str, int], Ints] = {}
        self._masks: dict[tuple[str, tuple[str, ...]], Bools] = {}
        self.score = Score(
            NAME,
            self._score,
            applies=lambda ask: bool(columns.whole),
            epoch=self._epoch_now,
            instead_of=(LEAST.name, MOST.name, BALANCED.name),
            fine=True,
            choose=self._choose,
        )

    # -- learning ----------------------------------------------------------------------------------------------------------

    def arrived(self, ask: Ask, count: int = 1) -> None:
        """So many replicas with this ask came. It counts from the next `renew`."""
        self.demand.arrived(ask, count)

    def renew(self) -> None:
        """Weigh anew if enough has come or moved. Only between runs: within one, what was scored before would not hold."""
        if not self._columns.whole:
            return
        came, every = self.demand.arrivals, max(WEIGHED_EVERY, 2 * len(self._columns) // 5)
        priced = came >= max(self._price_at, PRICED_FROM)
        if came < self._weigh_at and not priced and self._columns.changed.count - self._moved_at < 2 * every:
            return
        if priced:
            self._worths = {kind: worth(sizes) for kind, sizes in self.demand.shares().items()}
            self._price_at = came + min(came // 2, PRICED_EVERY_MAX)
        if came >= self._weigh_at:
            self._weigh_at = came + min(came // 2 + 1, every)
        self._weigh()

    def _weigh(self) -> None:
        """From here on everything counts anew, and every node is scored anew."""
        columns, stock = self._columns, self._stock
        stock.follow()
        kinds = {kind for kind, _ in stock.sorts}
        popular = self.demand.popular(min(TARGETS_MAX, CELLS_MAX // max(len(columns), 1)))
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
        self._free_max = max(float(self._devices.max(initial=0)) * WHOLE, 1.0)
        self._moved_at = columns.changed.count
        self._epoch += 1

    def _left_in_all(self, rows: Ints) -> tuple[Floats, dict[str, int]]:
        """On these rows: capacity by shape, and devices by kind."""
        capacity = np.zeros(len(self._potential))
        for some in self._blocks(rows):
            capacity += self._potential.capacity(*self._amounts(some), self._room[some]).sum(axis=0)
        counts = np.bincount(self._stock.sort[rows].ravel() + 1, minlength=self._sorts + 1)[1:].tolist()
        devices: dict[str, int] = {}
        for (kind, _), count in zip(self._stock.sorts, counts, strict=True):
            devices[kind] = devices.get(kind, 0) + count
        return capacity, devices

    # -- what is kept by row -----------------------------------------------------------------------------------------------

    def _epoch_now(self) -> int:
        self._follow()
        return self._epoch

    def _follow(self) -> None:
        """Look at what changed. A new sort of device, or more rows than there is room for, is a reason to weigh anew."""
        touched = self._stock.follow()
        if touched is None or len(self._stock.sorts) != self._sorts or len(self._stock.left) != self._rows:
            self._weigh()
        elif len(touched):
            self._count(touched)
            self._value(touched)

    def _count(self, rows: Ints) -> None:
        """What the devices of these rows have room for, and what they are worth."""
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

    def _score(self, ask: Ask, site: Any) -> Floats:
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

    def _gain(self, ask: Ask, needs: Mapping[str, int], rows: Ints, cpu: Floats, memory: Floats, anew: bool) -> Floats:
        """What comes of it on these rows with so much cpu and memory left. It is below zero, but for what breaks ties."""
        room, worth_, free = self._room[rows], self._worth[rows], self._free[rows]
        before = self._potential.of(cpu, memory, room, worth_) if anew else self._base[rows]
        spoiled = self._take(ask, rows, room, worth_, free) if ask.whole or ask.shares else 0.0
        cpu = np.maximum(cpu - needs.get(CPU, 0), 0.0)
        memory = np.maximum(memory - needs.get(MEMORY, 0), 0.0)
        gain = self._potential.of(cpu, memory, room, worth_) - before
        gain -= PRICE * spoiled
        stays = cpu / self._cpu_max
        gain -= TIE * np.where(self._devices[rows] > 0, stays + free / self._free_max, -stays)
        return gain

    def _take(self, ask: Ask, rows: Ints, room: Floats, worth_: Floats, free: Floats) -> Floats:
        """Take the ask's devices off what these rows have room for, are worth and have left; answers what shares spoil."""
        potential, spoiled = self._potential, np.zeros(len(rows))
        left, sort = self._stock.left[rows], self._stock.sort[rows]
        lines = np.arange(len(rows))
        for one in ask.shares:
            at = np.where(self._mask(one)[sort], self._rank(one)[left], _NEVER).argmin(axis=1)
            level, of = left[lines, at], sort[lines, at]
            after = np.maximum(level - one.amount, 0)
            lost = potential.worths[of, level] - potential.worths[of, after]
            room -= potential.units_of(level, of)
            room += potential.units_of(after, of)
            worth_[:, potential.kinds.index(one.kind)] -= lost
            spoiled += lost
            free -= one.amount
        for one in (one for one in ask.whole if one.amount):
            there = self._mask(one)[sort] & (left == WHOLE)
            taken = there & (there.cumsum(axis=1) <= one.amount)
            left[taken] = 0  # so that another part of the ask does not take them again
            for of in np.unique(sort[taken]).tolist():
                room -= potential.units[WHOLE] * potential.allowed[of] * (taken & (sort == of)).sum(axis=1)[:, None]
            count = taken.sum(axis=1)
            worth_[:, potential.kinds.index(one.kind)] -= count
            free -= count * WHOLE
        return spoiled

    def _mask(self, one: Devices) -> Bools:
        """By sort of device, and last where there is none: will it do?"""
        key = one.kind, one.models
        if key not in self._masks:
            self._masks[key] = np.array([*(allows(*key, sort) for sort in self._stock.sorts), False], dtype=np.bool_)
        return self._masks[key]

    # -- choosing ----------------------------------------------------------------------------------------------------------

    def _rank(self, one: Devices) -> Ints:
        """By what is left of a device: how bad is it to take this share from it? Worth that is spoiled counts most."""
        key = one.kind, one.amount
        if key not in self._ranks:
            worths, level = self._worths.get(one.kind, WHOLE_ONLY), np.arange(WHOLE + 1)
            lost = np.round((worths - worths[np.maximum(level - one.amount, 0)]) * _STEP).astype(np.int64)
            self._ranks[key] = np.where(level >= one.amount, lost * (WHOLE + 1) + level, _NEVER)
        return self._ranks[key]

    def _choose(self, ask: Ask, row: int) -> dict[str, int]:
        """As the score supposes."""
        node = self._columns.nodes[row]
        if node is None or not (ask.whole or ask.shares):
            return {}
        used = self._columns.used[row]
        return choose_among(ask, node.spec.devices, used, lambda one, left: int(self._rank(one)[left])) or {}


def _free(site: Any, name: str) -> Floats:
    """What is left of it; nothing, where more was taken than there is."""
    return np.asarray(np.maximum(site.free.get(name, 0), np.zeros(len(site))))
