"""Nodes rejected by each filter, and the nearest fit.

Which filter refused how many, and which node came closest. Nothing is placed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law import fit
from remit.model.claims import Code
from remit.model.kinds import Node
from remit.observation.node_columns import Bools, Ints, Rows
from remit.proposal.placement.class_scores import Class
from remit.proposal.placement.devices import fits_devices
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.plugins import ROOM, Cure, Filter, applies

_NONE: Ints = np.zeros(1, dtype=np.int64)
"""Of a device that no node has."""
_DECLARED: Final = frozenset((Cure.NODE, Cure.POLICY, Cure.WORKLOAD))
"""Cures that are done by people: nothing that ends by itself is among them."""


class Step(NamedTuple):
    filter: Filter
    refused: int


class Funnel(NamedTuple):
    """Each node is counted once, at the first filter that refuses it: the refused and those that fit add up to all."""

    nodes: int
    steps: tuple[Step, ...]
    fits: int

    @property
    def dominant(self) -> Step | None:
        """The filter that the nodes met which came furthest: the one to look at first."""
        return self.steps[-1] if self.steps else None

    @property
    def reason(self) -> Code:
        return self.dominant.filter.code if self.dominant is not None else Code.NO_ROOM

    def cures(self) -> tuple[Cure, ...]:
        """Whatever may let one of the refused nodes pass; that a node comes may always help."""
        found = dict.fromkeys(cure for step in self.steps for cure in step.filter.cures)
        return tuple(dict.fromkeys((*found, Cure.NODE)))

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple((step.filter.name, step.refused) for step in self.steps)


def funnel(kernel: Kernel, one: Class) -> Funnel:
    kernel.refresh(one)
    columns = kernel.columns
    left: Bools = columns.region >= 0  # holes are no nodes
    nodes = int(left.sum())
    steps = []
    for filter_ in kernel.all_filters:
        if not applies(filter_, one.ask):
            continue
        passed = np.asarray(kernel.checked(filter_, one.over, columns))  # one for each, or one for all
        refused = int(np.count_nonzero(left & ~passed))
        if refused:
            steps.append(Step(filter_, refused))
            left = left & passed
    return Funnel(nodes, tuple(steps), int(left.sum()))


def refused_only_by(kernel: Kernel, one: Class, rows: Ints, some: Sequence[Filter]) -> bool:
    """Is one of these rows refused by some of these filters, and by no other?"""
    site = Rows(kernel.columns, rows)
    refused = np.zeros(len(rows), dtype=np.bool_)
    for filter_ in some:
        refused |= np.logical_not(kernel.checked(filter_, one.over, site))
    for filter_ in kernel.all_filters if refused.any() else ():
        if filter_ not in some and applies(filter_, one.ask):
            refused &= kernel.checked(filter_, one.over, site)
    return bool(refused.any())


class Near(NamedTuple):
    """The closest node: what refuses it, and what it is short of, by resource or by kind of device."""

    row: int
    refused: tuple[Filter, ...]
    lacks: dict[str, int]


def nearest(kernel: Kernel, one: Class) -> Near | None:
    """Refused by the fewest filters; of those that only lack room, the one that lacks the least of what is asked."""
    kernel.refresh(one)
    columns = kernel.columns
    there = columns.region >= 0
    if not there.any():
        return None
    refusals = np.zeros(len(there), dtype=np.int64)
    for filter_ in kernel.all_filters:
        if applies(filter_, one.ask):
            passed = kernel.checked(filter_, one.over, columns)
            refusals += np.where(passed, 0, 1 if filter_.check in ROOM else 100)
    short = np.zeros(len(there))
    for name, need in one.ask.resources:
        if need:
            free = columns.free.get(name)
            short += (np.maximum(need - free, 0) if free is not None else need) / need
    for part in one.ask.whole:
        count = sum(columns.whole.get((part.kind, model), _NONE) for model in part.models or (fit.ANY,))
        short += np.maximum(part.amount - count, 0) / max(part.amount, 1)
    for part in one.ask.shares:
        most = [columns.room.get((part.kind, model), _NONE) for model in part.models or (fit.ANY,)]
        short += np.maximum(part.amount - np.maximum.reduce(np.broadcast_arrays(*most)), 0) / max(part.amount, 1)
    refusals = np.where(there, refusals, np.iinfo(np.int64).max)
    row = int(np.lexsort((np.arange(len(there)), short, refusals))[0])
    site = Rows(columns, np.array([row]))
    refused = tuple(
        filter_
        for filter_ in kernel.all_filters
        if applies(filter_, one.ask) and not np.all(kernel.checked(filter_, one.over, site))
    )
    return Near(row, refused, lacks(kernel, one, row))


def lacks(kernel: Kernel, one: Class, row: int) -> dict[str, int]:
    """What this node is short of: amounts, and whole devices or thousandths of one by kind."""
    columns, found = kernel.columns, dict[str, int]()
    for name, need in one.ask.resources:
        free = int(columns.free[name][row]) if name in columns.free else 0
        if free < need:
            found[name] = need - free
    for part in one.ask.whole:
        there = sum(_at(columns.whole, (part.kind, model), row) for model in part.models or (fit.ANY,))
        if there < part.amount:
            found[part.kind] = part.amount - there
    for part in one.ask.shares:
        room = max(_at(columns.room, (part.kind, model), row) for model in part.models or (fit.ANY,))
        if room < part.amount:
            found[f"{part.kind} share"] = part.amount - room
    return found


def ever(kernel: Kernel, one: Class) -> bool:
    """Would it fit on some node that is there, were that empty, healthy and open? If not, waiting alone helps nothing.

    Others' filters count where a node or the work itself would have to become another, as their cures say: one that passes when
    room comes back, or with time, is worth waiting for.
    """
    kernel.refresh(one)
    columns = kernel.columns
    could = one.static.copy()
    for filter_ in kernel.all_filters:
        if filter_.foreign and _DECLARED.issuperset(filter_.cures) and applies(filter_, one.ask):
            could &= kernel.checked(filter_, one.over, columns)
    for name, need in one.ask.resources:
        at = columns.resources.get(name)
        could &= columns.capacity[at] >= need if at is not None else np.zeros(len(could), dtype=np.bool_)
    rows = np.flatnonzero(could)
    if not (one.ask.whole or one.ask.shares):
        return bool(len(rows))
    return any(_empty_fits(one, columns.nodes[row]) for row in rows.tolist())


def _empty_fits(one: Class, node: Node | None) -> bool:
    return node is not None and fits_devices(one.ask, node.spec.devices, {})


def _at(columns: Mapping[fit.Model, Ints], model: fit.Model, row: int) -> int:
    column = columns.get(model)
    return 0 if column is None else int(column[row])
