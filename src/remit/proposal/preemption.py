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


class Leaving(NamedTuple):
    """Room that does not show yet: on which row, and how much."""

    rows: Ints
    amounts: Mapping[str, Ints]
    devices: Mapping[int, Sequence[Mapping[str, int]]]
    """By row."""


class Candidates(NamedTuple):
    """Replicas that might yield, all of them below the priority that asks: where each is, what it holds, if it is up, and of
    which group it is, for a group may not lose too many.
    """

    slots: Ints
    rows: Ints
    priority: Ints
    groups: Ints
    up: Bools
    amounts: Mapping[str, Ints]
    devices: Mapping[int, Mapping[str, int]]
    """By slot; few hold any."""
    firm: Leaving
    """What victims of claims under way give to who is to have it, and is posted against already: the authority counts it so."""
    coming: Leaving
    """What will be left over when everybody has gone who goes already. It cannot be claimed before."""


class Eviction(NamedTuple):
    row: int
    victims: tuple[int, ...]
    """Slots."""
    devices: dict[str, int]


class Outlook(NamedTuple):
    """Who makes room where; how many victims the cheapest place that was too dear would have cost; and whether some need
    nobody's, for enough is coming.
    """

    evictions: list[Eviction]
    lacking: int = 0
    coming: bool = False


class Spare:
    """How many more of each group may go: in all, and of those that are up. What a plan takes is taken off."""

    def __init__(self, allowed: Callable[[int], tuple[int, int]]) -> None:
        self._allowed = allowed
        self._left: dict[int, tuple[int, int]] = {}

    def left(self, group: int) -> tuple[int, int]:
        if group not in self._left:
            self._left[group] = self._allowed(group)
        return self._left[group]

    def lets(self, group: int, up: bool) -> bool:
        """May one more go? Of a group that has too few already nobody may, up or not."""
        there, ups = self.left(group)
        return there > 0 and (ups > 0 or not up)

    def take(self, group: int, up: bool) -> None:
        there, ups = self.left(group)
        self._left[group] = there - 1, ups - up

    def copy(self) -> Spare:
        made = Spare(self._allowed)
        made._left = dict(self._left)
        return made


class _Room(NamedTuple):
    """What is free, with what does not show yet."""

    columns: Columns
    free: Mapping[str, Ints]
    leaving: Leaving


def plan(
    ask: Ask, columns: Columns, open_rows: Bools, found: Candidates, spare: Spare, *, count: int, victims_max: int
) -> Outlook:
    """Places for up to `count` replicas with this ask, on different nodes, at the cost of at most `victims_max` in all.

    Where the room will do as soon as those have gone who go already, nobody else has to: so many of the `count` wait for it.
    """
    room, later = _room(ask, columns, found.firm), _room(ask, columns, found.coming)
    enough = [row for row in np.unique(found.coming.rows).tolist() if open_rows[row] and _fits(ask, later, row, found, ())]
    count -= sum(_times(ask, later, row, found, ()) for row in enough)
    coming = bool(enough)
    open_rows = open_rows.copy()
    open_rows[enough] = False
    ranked = _ranked(ask, room, open_rows, found, spare) if count > 0 else None
    if ranked is None:
        # With what is coming, victims may do that do not yet.
        soon = count > 0 and len(found.coming.rows) > 0 and _ranked(ask, later, open_rows, found, spare) is not None
        return Outlook([], 0, coming or soon)
    rows, starts, ends, levels, order = ranked

    def look(row: int) -> list[int] | None:
        return _closely(ask, room, int(rows[row]), found, order[starts[row] : ends[row]], spare)

    plans: list[Eviction] = []
    lacking = looked = at = 0
    while at < len(rows) and len(plans) < count and looked < LOOK_AT:
        # Of the rows that cost the same priority, as many as may be looked at; then the fewest victims first.
        end = min(int(np.searchsorted(levels, levels[at], side="right")), at + LOOK_AT - looked)
        closely = sorted((len(victims), row) for row in range(at, end) if (victims := look(row)) is not None)
        looked, at = looked + end - at, end
        for victims_at_least, row in closely:
            victims = look(row) if len(plans) < count else None
            if not victims:
                continue  # those before it have used up what may go
            made = _eviction(ask, room, int(rows[row]), found, victims) if len(victims) <= victims_max else None
            if made is None:
                lacking = min(lacking or victims_at_least, victims_at_least)
            else:
                for victim in victims:
                    spare.take(int(found.groups[victim]), bool(found.up[victim]))
                victims_max -= len(victims)
                plans.append(made)
                over = _times(ask, room, int(rows[row]), found, victims) - 1
                count, coming = count - over, coming or over > 0
        looked = max(0, looked - 2 * len(plans))
    return Outlook(plans, lacking, coming)


def _room(ask: Ask, columns: Columns, leaving: Leaving) -> _Room:
    free = {}
    for name, _ in ask.resources:
        column = columns.free.get(name)
        free[name] = np.zeros(len(columns), dtype=np.int64) if column is None else column.astype(np.int64)
        if len(leaving.rows):
            np.add.at(free[name], leaving.rows, leaving.amounts[name])
    return _Room(columns, free, leaving)


def _ranked(
    ask: Ask, room: _Room, open_rows: Bools, found: Candidates, spare: Spare
) -> tuple[Ints, Ints, Ints, Ints, Ints] | None:
    """Rows where the room would do, cheapest first, with where the candidates of each begin and end in an order of them all,
    and the priority that each costs at least.
    """
    there = np.flatnonzero(open_rows[found.rows])
    # Whoever must not go is not counted on: else his rows might be all that is looked at.
    groups, at = np.unique(found.groups[there], return_inverse=True)
    lets = np.array([[spare.lets(group, up) for up in (False, True)] for group in groups.tolist()], dtype=np.bool_)
    there = there[lets[at, found.up[there].astype(np.int64)]] if len(there) else there
    if not len(there):
        return None
    size = np.zeros(len(there))
    for name, need in ask.resources:
        size += found.amounts[name][there] / max(need, 1)
    # Within a row the lowest first, and of equals the largest: so that the first few that do are the cheapest and fewest.
    order = there[np.lexsort((found.slots[there], -size, found.priority[there], found.rows[there]))]
    rows = found.rows[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    enough = np.ones(len(order), dtype=np.bool_)
    for name, need in ask.resources:
        held = found.amounts[name][order]
        freed = np.cumsum(held)
        before = (freed - held)[starts]
        freed -= np.repeat(before, np.diff(np.r_[starts, len(order)]))
        enough &= room.free[name][rows] + freed >= need
    first = np.minimum.reduceat(np.where(enough, np.arange(len(order)), _FAR), starts)
    can = first != _FAR
    if not can.any():
        return None
    ends = np.r_[starts[1:], len(order)]
    starts, ends, first = starts[can], ends[can], first[can]
    levels = found.priority[order][first]
    cost = np.lexsort((rows[starts], first - starts, levels))
    return rows[starts][cost], starts[cost], ends[cost], levels[cost], order


def _closely(ask: Ask, room: _Room, row: int, found: Candidates, at: Ints, spare: Spare) -> list[int] | None:
    """Which of these candidates of one row: take until it fits, then spare whoever need not go."""
    taken = _enough(ask, room, row, found, at.tolist(), spare)
    if taken is None:
        # Of a group that may lose few the lowest went first, and were too small. Once more, with the largest first.
        sizes = {one: sum(int(found.amounts[name][one]) / max(need, 1) for name, need in ask.resources) for one in at.tolist()}
        taken = _enough(ask, room, row, found, sorted(sizes, key=lambda one: (-sizes[one], one)), spare)
    if taken is None:
        return None
    # The dearest first, for whom it spares is the best spared; of equals the smallest, so that more of them are.
    dearest = sorted(enumerate(taken), key=lambda pair: (-int(found.priority[pair[1]]), -pair[0]))
    for _, one in dearest:
        rest = [other for other in taken if other != one]
        if _fits(ask, room, row, found, rest):
            taken = rest
    return taken


def _enough(ask: Ask, room: _Room, row: int, found: Candidates, at: Sequence[int], spare: Spare) -> list[int] | None:
    """One after another, as far as their groups may lose them, until it fits."""
    taken: list[int] = []
    left = spare.copy()
    for one in at:
        group, up = int(found.groups[one]), bool(found.up[one])
        if left.lets(group, up):
            left.take(group, up)
            taken.append(one)
            if _fits(ask, room, row, found, taken):
                return taken
    return None


def _eviction(ask: Ask, room: _Room, row: int, found: Candidates, taken: Sequence[int]) -> Eviction | None:
    node = room.columns.nodes[row]
    chosen = choose_among(ask, node.spec.devices, _used(room, row, found, taken)) if node is not None else None
    return None if chosen is None else Eviction(row, tuple(int(found.slots[one]) for one in taken), chosen)


def _fits(ask: Ask, room: _Room, row: int, found: Candidates, gone: Sequence[int]) -> bool:
    for name, need in ask.resources:
        if int(room.free[name][row]) + sum(int(found.amounts[name][one]) for one in gone) < need:
            return False
    node = room.columns.nodes[row]
    if node is None:
        return False
    return not (ask.whole or ask.shares) or fits_devices(ask, node.spec.devices, _used(room, row, found, gone))


def _times(ask: Ask, room: _Room, row: int, found: Candidates, gone: Sequence[int]) -> int:
    """How many of them there is room for then, by amounts; one, if they want devices."""
    left = [
        (int(room.free[name][row]) + sum(int(found.amounts[name][one]) for one in gone)) // need
        for name, need in ask.resources
        if need
    ]
    return 1 if ask.whole or ask.shares else min(left, default=1)


def _used(room: _Room, row: int, found: Candidates, gone: Sequence[int]) -> dict[str, int]:
    used = dict(room.columns.used[row])
    theirs = [found.devices.get(int(found.slots[one]), {}) for one in gone]
    for devices in (*room.leaving.devices.get(row, ()), *theirs):
        for name, share in devices.items():
            used[name] = used.get(name, 0) - share
    return used
