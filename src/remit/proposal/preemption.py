"""Who should make room? The fewest and cheapest victims for work that fits nowhere; nothing is drained here.

It ends: a victim always has a lower priority than who takes its room, and what is preempted can itself only preempt what is
lower still. So along every chain of preemptions the priority falls, and there are finitely many of them. It is never in vain
either: the node is one where, without its victims, every filter is passed, and the caller has made sure of quota first.

Cheapest means: the highest priority among the victims is as low as can be, and then they are as few as can be. Nodes are ranked
by that over whole columns; only the best are looked at closely, victim by victim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law.columns import Bools, Columns, Ints
from remit.law.fit import Ask
from remit.proposal.devices import choose_among, fits_devices

LOOK_AT: Final = 128
"""How many nodes are looked at closely for each that is wanted, before it is given up for now."""

_FAR: Final = np.iinfo(np.int64).max


class Candidates(NamedTuple):
    """Replicas that might yield, all of them below the priority that asks: where each is, what it holds, and of which group
    it is, for a group may not lose too many.
    """

    slots: Ints
    rows: Ints
    priority: Ints
    groups: Ints
    amounts: Mapping[str, Ints]
    devices: Mapping[int, Mapping[str, int]]
    """By slot; few hold any."""


class Eviction(NamedTuple):
    row: int
    victims: tuple[int, ...]
    """Slots."""
    devices: dict[str, int]


class Spare:
    """How many more of each group may go. What a plan takes is taken off."""

    def __init__(self, allowed: Callable[[int], int]) -> None:
        self._allowed = allowed
        self._left: dict[int, int] = {}

    def left(self, group: int) -> int:
        if group not in self._left:
            self._left[group] = self._allowed(group)
        return self._left[group]

    def take(self, group: int, count: int = 1) -> None:
        self._left[group] = self.left(group) - count


def plan(
    ask: Ask, columns: Columns, open_rows: Bools, found: Candidates, spare: Spare, *, count: int, victims_max: int
) -> list[Eviction]:
    """Places for up to `count` replicas with this ask, on different nodes, at the cost of at most `victims_max` in all."""
    ranked = _ranked(ask, columns, open_rows, found)
    if ranked is None:
        return []
    rows, starts, ends, order = ranked
    plans: list[Eviction] = []
    looked = 0
    for at in range(len(rows)):
        if len(plans) == count or looked >= LOOK_AT + 2 * len(plans):
            break
        looked += 1
        one = _closely(ask, columns, int(rows[at]), found, order[starts[at] : ends[at]], spare)
        if one is None or len(one.victims) > victims_max:
            continue
        victims_max -= len(one.victims)
        for slot in order[starts[at] : ends[at]]:
            if int(found.slots[slot]) in one.victims:
                spare.take(int(found.groups[slot]))
        plans.append(one)
    return plans


def _ranked(ask: Ask, columns: Columns, open_rows: Bools, found: Candidates) -> tuple[Ints, Ints, Ints, Ints] | None:
    """Rows where the room would do, cheapest first, with where the candidates of each begin and end in an order of them all."""
    there = np.flatnonzero(open_rows[found.rows])
    if not len(there):
        return None
    size = np.zeros(len(there))
    for name, need in ask.resources:
        size += found.amounts[name][there] / max(need, 1) if name in found.amounts else 0
    # Within a row the lowest first, and of equals the largest: so that the first few that do are the cheapest and fewest.
    order = there[np.lexsort((found.slots[there], -size, found.priority[there], found.rows[there]))]
    rows = found.rows[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    enough = np.ones(len(order), dtype=np.bool_)
    for name, need in ask.resources:
        held = found.amounts.get(name, np.zeros(len(found.rows), dtype=np.int64))[order]
        freed = np.cumsum(held)
        before = (freed - held)[starts]
        freed -= np.repeat(before, np.diff(np.r_[starts, len(order)]))
        enough &= columns.free.get(name, np.zeros(len(columns), dtype=np.int64))[rows] + freed >= need
    first = np.minimum.reduceat(np.where(enough, np.arange(len(order)), _FAR), starts)
    can = first != _FAR
    if not can.any():
        return None
    ends = np.r_[starts[1:], len(order)]
    starts, ends, first = starts[can], ends[can], first[can]
    cost = np.lexsort((rows[starts], first - starts, found.priority[order][first]))
    return rows[starts][cost], starts[cost], ends[cost], order


def _closely(ask: Ask, columns: Columns, row: int, found: Candidates, at: Ints, spare: Spare) -> Eviction | None:
    """Which of these candidates of one row, and which devices: take until it fits, then spare whoever need not go."""
    taken: list[int] = []
    groups: dict[int, int] = {}
    for one in at.tolist():
        group = int(found.groups[one])
        if spare.left(group) <= groups.get(group, 0):
            continue
        taken.append(one)
        groups[group] = groups.get(group, 0) + 1
        if _fits(ask, columns, row, found, taken):
            break
    else:
        return None
    # The dearest first: whom it spares is the best spared.
    for one in sorted(taken, key=lambda one: (-int(found.priority[one]), one)):
        rest = [other for other in taken if other != one]
        if _fits(ask, columns, row, found, rest):
            taken = rest
    node = columns.nodes[row]
    chosen = choose_among(ask, node.spec.devices, _used(columns, row, found, taken)) if node is not None else None
    return None if chosen is None else Eviction(row, tuple(int(found.slots[one]) for one in taken), chosen)


def _fits(ask: Ask, columns: Columns, row: int, found: Candidates, gone: Sequence[int]) -> bool:
    for name, need in ask.resources:
        column = columns.free.get(name)
        freed = sum(int(found.amounts[name][one]) for one in gone) if name in found.amounts else 0
        if (0 if column is None else int(column[row])) + freed < need:
            return False
    node = columns.nodes[row]
    if node is None:
        return False
    return not (ask.whole or ask.shares) or fits_devices(ask, node.spec.devices, _used(columns, row, found, gone))


def _used(columns: Columns, row: int, found: Candidates, gone: Sequence[int]) -> dict[str, int]:
    used = dict(columns.used[row])
    for one in gone:
        for name, share in found.devices.get(int(found.slots[one]), {}).items():
            used[name] = used.get(name, 0) - share
    return used
