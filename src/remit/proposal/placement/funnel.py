"""Nodes rejected by each filter, and the node nearest to fitting.

Used for decision records and explanations. Nothing is placed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law import fit
from remit.model.claims import Code
from remit.model.kinds import Node
from remit.observation.node_columns import Bools, Ints, Rows
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.devices import fits_devices
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import CAPACITY_CHECKS, UnblockEvent, Filter, applies

_NO_DEVICES: Ints = np.zeros(1, dtype=np.int64)
"""Column of a device type that no node has."""
_DECLARATION_EVENTS: Final = frozenset((UnblockEvent.NODE, UnblockEvent.POLICY, UnblockEvent.WORKLOAD))
"""Events caused by a declaration. A rejection that only these can end does not go away by waiting."""


class FunnelStep(NamedTuple):
    filter: Filter
    refused: int


class Funnel(NamedTuple):
    """Each node is counted at the first filter that rejects it, so rejected and fitting nodes add up to `nodes`."""

    nodes: int
    steps: tuple[FunnelStep, ...]
    fits: int

    @property
    def dominant(self) -> FunnelStep | None:
        """The last filter that rejected nodes, which the nodes that got furthest failed: the one to look at first."""
        return self.steps[-1] if self.steps else None

    @property
    def reason(self) -> Code:
        return self.dominant.filter.code if self.dominant is not None else Code.NO_ROOM

    def cures(self) -> tuple[UnblockEvent, ...]:
        """Events after which a rejected node may pass. A new node can always help."""
        found = dict.fromkeys(cure for step in self.steps for cure in step.filter.cures)
        return tuple(dict.fromkeys((*found, UnblockEvent.NODE)))

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple((step.filter.name, step.refused) for step in self.steps)


def funnel(kernel: Kernel, one: WorkClass) -> Funnel:
    kernel.refresh(one)
    columns = kernel.columns
    left: Bools = columns.region >= 0  # rows without a node
    nodes = int(left.sum())
    steps = []
    for filter_ in kernel.all_filters:
        if not applies(filter_, one.ask):
            continue
        passed = np.asarray(kernel.checked(filter_, one.over, columns))  # one value per row, or a single value for all
        refused = int(np.count_nonzero(left & ~passed))
        if refused:
            steps.append(FunnelStep(filter_, refused))
            left = left & passed
    return Funnel(nodes, tuple(steps), int(left.sum()))


def refused_only_by(kernel: Kernel, one: WorkClass, rows: Ints, some: Sequence[Filter]) -> bool:
    """Whether at least one of these rows is rejected by some of these filters and by no other filter."""
    site = Rows(kernel.columns, rows)
    refused = np.zeros(len(rows), dtype=np.bool_)
    for filter_ in some:
        refused |= np.logical_not(kernel.checked(filter_, one.over, site))
    for filter_ in kernel.all_filters if refused.any() else ():
        if filter_ not in some and applies(filter_, one.ask):
            refused &= kernel.checked(filter_, one.over, site)
    return bool(refused.any())


class NearestFit(NamedTuple):
    """The node nearest to fitting: the filters that reject it, and what it lacks by resource or device kind."""

    row: int
    refused: tuple[Filter, ...]
    lacks: dict[str, int]


def nearest_fit(kernel: Kernel, one: WorkClass) -> NearestFit | None:
    """The node rejected by the fewest filters; among nodes that lack only capacity, the one with the smallest relative
    shortage.
    """
    kernel.refresh(one)
    columns = kernel.columns
    there = columns.region >= 0
    if not there.any():
        return None
    refusals = np.zeros(len(there), dtype=np.int64)
    for filter_ in kernel.all_filters:
        if applies(filter_, one.ask):
            passed = kernel.checked(filter_, one.over, columns)
            refusals += np.where(passed, 0, 1 if filter_.check in CAPACITY_CHECKS else 100)
    short = np.zeros(len(there))
    for name, need in one.ask.resources:
        if need:
            free = columns.free.get(name)
            short += (np.maximum(need - free, 0) if free is not None else need) / need
    for part in one.ask.whole_devices:
        count = sum(columns.whole_devices.get((part.kind, model), _NO_DEVICES) for model in part.models or (fit.ANY_MODEL,))
        short += np.maximum(part.amount - count, 0) / max(part.amount, 1)
    for part in one.ask.device_shares:
        most = [columns.largest_shares.get((part.kind, model), _NO_DEVICES) for model in part.models or (fit.ANY_MODEL,)]
        short += np.maximum(part.amount - np.maximum.reduce(np.broadcast_arrays(*most)), 0) / max(part.amount, 1)
    refusals = np.where(there, refusals, np.iinfo(np.int64).max)
    row = int(np.lexsort((np.arange(len(there)), short, refusals))[0])
    site = Rows(columns, np.array([row]))
    refused = tuple(
        filter_
        for filter_ in kernel.all_filters
        if applies(filter_, one.ask) and not np.all(kernel.checked(filter_, one.over, site))
    )
    return NearestFit(row, refused, missing_capacity(kernel, one, row))


def missing_capacity(kernel: Kernel, one: WorkClass, row: int) -> dict[str, int]:
    """What this node lacks: resource amounts, and by device kind whole devices or thousandths of one."""
    columns, found = kernel.columns, dict[str, int]()
    for name, need in one.ask.resources:
        free = int(columns.free[name][row]) if name in columns.free else 0
        if free < need:
            found[name] = need - free
    for part in one.ask.whole_devices:
        there = sum(_at(columns.whole_devices, (part.kind, model), row) for model in part.models or (fit.ANY_MODEL,))
        if there < part.amount:
            found[part.kind] = part.amount - there
    for part in one.ask.device_shares:
        room = max(_at(columns.largest_shares, (part.kind, model), row) for model in part.models or (fit.ANY_MODEL,))
        if room < part.amount:
            found[f"{part.kind} share"] = part.amount - room
    return found


def could_ever_fit(kernel: Kernel, one: WorkClass) -> bool:
    """Whether the class would fit on some existing node if that node were empty, ready and schedulable. If not, waiting does
    not help.

    A third-party filter counts only if all of its unblock events are declarations (node, policy or workload must change). A
    filter that can pass when capacity is released, or with time, is worth waiting for.
    """
    kernel.refresh(one)
    columns = kernel.columns
    could = one.static.copy()
    for filter_ in kernel.all_filters:
        if filter_.foreign and _DECLARATION_EVENTS.issuperset(filter_.cures) and applies(filter_, one.ask):
            could &= kernel.checked(filter_, one.over, columns)
    for name, need in one.ask.resources:
        at = columns.resources.get(name)
        could &= columns.capacity[at] >= need if at is not None else np.zeros(len(could), dtype=np.bool_)
    rows = np.flatnonzero(could)
    if not (one.ask.whole_devices or one.ask.device_shares):
        return bool(len(rows))
    return any(_empty_fits(one, columns.nodes[row]) for row in rows.tolist())


def _empty_fits(one: WorkClass, node: Node | None) -> bool:
    return node is not None and fits_devices(one.ask, node.spec.devices, {})


def _at(columns: Mapping[fit.DeviceModel, Ints], model: fit.DeviceModel, row: int) -> int:
    column = columns.get(model)
    return 0 if column is None else int(column[row])
