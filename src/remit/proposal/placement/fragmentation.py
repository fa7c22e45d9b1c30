"""Fragmentation-aware score and device choice.

The score learns which shapes of device requests arrive, what a partly free device is worth to them, and what the free
capacity of a node is worth to them (all in fragmentation_model.py). A node is rated by how little is lost there:

    score = potential after - potential before - PRICE * worth lost on the shared device - TIE * capacity that stays free

A share goes to the device where it destroys the least worth, then to the one with the least free. Work without device
requests is scored too: it goes where it harms work with device requests the least, and is spread over nodes without devices.

Between two calls of `update_weights` the score depends on the row alone. Call `update_weights` between runs of the kernel,
never within one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from remit.law.fit import DeviceRequirement, Requirements
from remit.model.resources import WHOLE_DEVICE
from remit.observation.node_columns import Bools, Floats, Ints, NodeColumns, SelectedRows
from remit.proposal.placement.builtin_plugins import BALANCED, LEAST_ALLOCATED, MOST_ALLOCATED
from remit.proposal.placement.devices import FreeDeviceShares, assign_devices
from remit.proposal.placement.fragmentation_model import CPU, MEMORY, WHOLE_ONLY, Demand, Potential, accepts_device, worth
from remit.proposal.placement.plugins import Score

NAME: Final = "fragmentation"
PRICE: Final = 1e5
"""Large enough that lost worth is compared first; the potential decides between nodes where equally much is lost."""
TIE: Final = 0.1
RANGE: Final = float(1 << 23)
"""Exceeds the largest loss of one replica on a node with dozens of devices. Maps losses to scores from 1 (no loss) to 0."""
SHAPES_WEIGHED_MAX: Final = 128
CELLS_MAX: Final = 1 << 22
"""Maximum number of rows times shapes in memory. With very many nodes, fewer shapes are considered."""
WEIGH_INTERVAL: Final = 500
"""Arrivals between two recalculations of the weights. The first ones come sooner, whenever arrivals have grown by half. With
many nodes the interval is longer, because all nodes must be scored again.
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

    def __init__(self, columns: NodeColumns, demand: Demand | None = None) -> None:
        self._columns = columns
        self.demand = Demand() if demand is None else demand
        self._device_shares = FreeDeviceShares(columns)
        self._worths: dict[str, Floats] = {}
        self._epoch = 0
        self._weigh_at = self._price_at = 0
        self._changes_weighed = 0
        self._device_types = -1
        """Number of device types at the last recalculation; `_rows` is the number of rows that the arrays have space for."""
        self._rows = 0
        self._share_costs: dict[tuple[str, int], Ints] = {}
        self._masks: dict[tuple[str, tuple[str, ...]], Bools] = {}
        self.score = Score(
            NAME,
            self._score,
            applies=lambda requirements: bool(columns.whole_devices),
            epoch=self._current_epoch,
            replaces=(LEAST_ALLOCATED.name, MOST_ALLOCATED.name, BALANCED.name),
            high_precision=True,
            choose_devices=self._choose_devices,
        )

    # -- learning ----------------------------------------------------------------------------------------------------------

    def arrived(self, requirements: Requirements, count: int = 1) -> None:
        """Counts arriving replicas with these requirements. Takes effect at the next `update_weights`."""
        self.demand.arrived(requirements, count)

    def update_weights(self) -> None:
        """Recalculates the weights if enough has arrived or changed. Call only between runs: scores computed before become
        invalid.
        """
        if not self._columns.whole_devices:
            return
        came, every = self.demand.arrivals, max(WEIGH_INTERVAL, 2 * len(self._columns) // 5)
        priced = came >= max(self._price_at, PRICE_ARRIVALS_MIN)
        if came < self._weigh_at and not priced and self._columns.changed.count - self._changes_weighed < 2 * every:
            return
        if priced:
            self._worths = {kind: worth(sizes) for kind, sizes in self.demand.shares().items()}
            self._price_at = came + min(came // 2, PRICE_INTERVAL_MAX)
        if came >= self._weigh_at:
            self._weigh_at = came + min(came // 2 + 1, every)
        self._rebuild()

    def _rebuild(self) -> None:
        """Rebuilds all arrays and weights. The epoch changes, so the kernel scores every node again."""
        columns, shares = self._columns, self._device_shares
        shares.update()
        kinds = {kind for kind, _ in shares.device_types}
        frequent = self.demand.frequent_shapes(min(SHAPES_WEIGHED_MAX, CELLS_MAX // max(len(columns), 1)))
        self._potential = Potential(
            [shape_count for shape_count in frequent if shape_count.shape.kind in kinds], shares.device_types, self._worths
        )
        self._device_types, self._rows = len(shares.device_types), len(shares.free)
        self._share_costs, self._masks = {}, {}
        self._room = np.zeros((self._rows, len(self._potential)))
        self._worth = np.zeros((self._rows, len(self._potential.kinds)))
        self._base, self._free = np.zeros(self._rows), np.zeros(self._rows)
        self._devices = np.zeros(self._rows, dtype=np.int64)
        rows = np.arange(len(columns))
        self._update_devices(rows)
        self._potential.weigh(*self._cluster_totals(rows[columns.takes]))
        self._update_base(rows)
        capacity = columns.capacity[columns.resources[CPU]] if CPU in columns.resources else self._devices
        self._cpu_max = max(float(capacity.max(initial=0)), 1.0)
        self._free_max = max(float(self._devices.max(initial=0)) * WHOLE_DEVICE, 1.0)
        self._changes_weighed = columns.changed.count
        self._epoch += 1

    def _cluster_totals(self, rows: Ints) -> tuple[Floats, dict[str, int]]:
        """Over these rows: free capacity by shape, and the number of devices by kind."""
        capacity = np.zeros(len(self._potential))
        for block in self._blocks(rows):
            capacity += self._potential.capacity(*self._amounts(block), self._room[block]).sum(axis=0)
        counts = np.bincount(self._device_shares.device_type[rows].ravel() + 1, minlength=self._device_types + 1)[1:].tolist()
        devices: dict[str, int] = {}
        for (kind, _), count in zip(self._device_shares.device_types, counts, strict=True):
            devices[kind] = devices.get(kind, 0) + count
        return capacity, devices

    # -- data by row -------------------------------------------------------------------------------------------------------

    def _current_epoch(self) -> int:
        self._update_rows()
        return self._epoch

    def _update_rows(self) -> None:
        """Processes changed rows. A new device type, or more rows than the arrays can hold, causes a full recalculation."""
        touched = self._device_shares.update()
        if (
            touched is None
            or len(self._device_shares.device_types) != self._device_types
            or len(self._device_shares.free) != self._rows
        ):
            self._rebuild()
        elif len(touched):
            self._update_devices(touched)
            self._update_base(touched)

    def _update_devices(self, rows: Ints) -> None:
        """Updates free device capacity and worth of these rows."""
        for block in self._blocks(rows, self._device_shares.free.shape[1]):
            free, device_type = self._device_shares.free[block], self._device_shares.device_type[block]
            self._room[block] = self._potential.room(free, device_type)
            self._worth[block] = self._potential.worth(free, device_type)
            self._free[block] = free.sum(axis=1)
            self._devices[block] = (device_type >= 0).sum(axis=1)

    def _update_base(self, rows: Ints) -> None:
        for block in self._blocks(rows):
            self._base[block] = self._potential.of(*self._amounts(block), self._room[block], self._worth[block])

    def _amounts(self, rows: Ints) -> tuple[Floats, Floats]:
        site = SelectedRows(self._columns, rows)
        return _free(site, CPU), _free(site, MEMORY)

    def _blocks(self, rows: Ints, queues: int = 1) -> Iterator[Ints]:
        step = max(_BLOCK_CELLS // max(len(self._potential) * queues, 1), 1)
        return (rows[at : at + step] for at in range(0, len(rows), step))

    # -- scoring -----------------------------------------------------------------------------------------------------------

    def _score(self, requirements: Requirements, site: Any) -> Floats:
        self._update_rows()
        rows = np.arange(len(self._columns)) if site is self._columns else site.rows
        needs = {name: int(count) for name, count in requirements.resources}
        cpu, memory = _free(site, CPU), _free(site, MEMORY)
        after_deduction = site is not self._columns and bool(site.deducted)
        gains = np.empty(len(rows))
        step = max(_BLOCK_CELLS // max(len(self._potential), 1), 1)
        for at in range(0, len(rows), step):
            block = slice(at, at + step)
            gains[block] = self._gain(requirements, needs, rows[block], cpu[block], memory[block], after_deduction)
        return np.clip(1.0 + (gains - 1.0) / RANGE, 0.0, 1.0)

    def _gain(
        self,
        requirements: Requirements,
        needs: Mapping[str, int],
        rows: Ints,
        cpu: Floats,
        memory: Floats,
        after_deduction: bool,
    ) -> Floats:
        """Score difference on these rows, given their free cpu and memory. It is negative, apart from the tie breaker."""
        room, worth_, free = self._room[rows], self._worth[rows], self._free[rows]
        before = self._potential.of(cpu, memory, room, worth_) if after_deduction else self._base[rows]
        spoiled = (
            self._take_devices(requirements, rows, room, worth_, free)
            if requirements.whole_devices or requirements.device_shares
            else 0.0
        )
        cpu = np.maximum(cpu - needs.get(CPU, 0), 0.0)
        memory = np.maximum(memory - needs.get(MEMORY, 0), 0.0)
        gain = self._potential.of(cpu, memory, room, worth_) - before
        gain -= PRICE * spoiled
        stays = cpu / self._cpu_max
        gain -= TIE * np.where(self._devices[rows] > 0, stays + free / self._free_max, -stays)
        return gain

    def _take_devices(self, requirements: Requirements, rows: Ints, room: Floats, worth_: Floats, free: Floats) -> Floats:
        """Subtracts the requested devices from the free capacity, worth and free share of these rows; returns the worth lost to
        shares.
        """
        potential, spoiled = self._potential, np.zeros(len(rows))
        free_shares, device_type = self._device_shares.free[rows], self._device_shares.device_type[rows]
        queues = np.arange(len(rows))
        for requirement in requirements.device_shares:
            at = np.where(self._mask(requirement)[device_type], self._share_cost(requirement)[free_shares], _UNFIT).argmin(
                axis=1
            )
            level, of = free_shares[queues, at], device_type[queues, at]
            after = np.maximum(level - requirement.amount, 0)
            lost = potential.worths[of, level] - potential.worths[of, after]
            room -= potential.units_of(level, of)
            room += potential.units_of(after, of)
            worth_[:, potential.kinds.index(requirement.kind)] -= lost
            spoiled += lost
            free -= requirement.amount
        for requirement in (requirement for requirement in requirements.whole_devices if requirement.amount):
            available = self._mask(requirement)[device_type] & (free_shares == WHOLE_DEVICE)
            taken = available & (available.cumsum(axis=1) <= requirement.amount)
            free_shares[taken] = 0  # so that another device requirement does not take them again
            for of in np.unique(device_type[taken]).tolist():
                room -= (
                    potential.units[WHOLE_DEVICE] * potential.allowed[of] * (taken & (device_type == of)).sum(axis=1)[:, None]
                )
            count = taken.sum(axis=1)
            worth_[:, potential.kinds.index(requirement.kind)] -= count
            free -= count * WHOLE_DEVICE
        return spoiled

    def _mask(self, requirement: DeviceRequirement) -> Bools:
        """By device type, whether it satisfies the requirement; the last entry, for no device, is False."""
        key = requirement.kind, requirement.models
        if key not in self._masks:
            self._masks[key] = np.array(
                [*(accepts_device(*key, device_type) for device_type in self._device_shares.device_types), False],
                dtype=np.bool_,
            )
        return self._masks[key]

    # -- choosing devices --------------------------------------------------------------------------------------------------

    def _share_cost(self, requirement: DeviceRequirement) -> Ints:
        """Return the cost of taking this share from a device, indexed by the free share of the device. A smaller loss of worth
        always costs less; at equal loss, the device with the smaller free share does.
        """
        key = requirement.kind, requirement.amount
        if key not in self._share_costs:
            worths, level = self._worths.get(requirement.kind, WHOLE_ONLY), np.arange(WHOLE_DEVICE + 1)
            lost = np.round((worths - worths[np.maximum(level - requirement.amount, 0)]) * _STEP).astype(np.int64)
            self._share_costs[key] = np.where(level >= requirement.amount, lost * (WHOLE_DEVICE + 1) + level, _UNFIT)
        return self._share_costs[key]

    def _choose_devices(self, requirements: Requirements, row: int) -> dict[str, int]:
        """The device assignment that the score assumes."""
        node = self._columns.nodes[row]
        if node is None or not (requirements.whole_devices or requirements.device_shares):
            return {}
        used = self._columns.used[row]
        return (
            assign_devices(
                requirements, node.spec.devices, used, lambda requirement, free: int(self._share_cost(requirement)[free])
            )
            or {}
        )


def _free(site: Any, name: str) -> Floats:
    """Free amount of a resource by row; 0 where more is used than exists."""
    return np.asarray(np.maximum(site.free.get(name, 0), np.zeros(len(site))))
