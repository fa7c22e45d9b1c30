"""Preemption: fewest and cheapest victims.

The fewest and cheapest victims for work that fits nowhere; nothing is drained here.

It ends: a victim always has a lower priority than who takes its room, and what is preempted can itself only preempt what is
lower still. So along every chain of preemptions the priority falls, and there are finitely many of them. It is never in vain
either: the node is one where, without its victims, every filter is passed, and the caller has made sure of quota first.

Cheapest means: the highest priority among the victims is as low as can be, and then the node is one where they are fewest. On
a node the lowest go first, even if fewer of higher priority would do: those would in turn push out the low ones, and more would
go in all. Nodes are ranked over whole columns; only the best are looked at closely, victim by victim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law.fit import Ask
from remit.observation.node_columns import Bools, Columns, Ints
from remit.proposal.placement.devices import choose_among, fits_devices

LOOK_AT: Final = 128
"""How many nodes are looked at closely for each that is wanted, before it is given up for now."""

TURNS_MAX: Final = 32
"""With how many of a node's candidates it is begun, in turn, if their groups may not lose them all."""

VICTIMS_MAX: Final = 1_024
"""How many victims one claim may name."""

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
    """How many more may go, by group: in all, and of those that are up. What a plan takes is taken off."""

    def __init__(self, there: Ints, ups: Ints) -> None:
        self._there, self._ups = there, ups

    @classmethod
    def boundless(cls, groups: int) -> Spare:
        """So many groups that may lose everybody."""
        return cls(np.full(groups, _FAR), np.full(groups, _FAR))

    def left(self, group: int) -> tuple[int, int]:
        return int(self._there[group]), int(self._ups[group])

    def lets(self, groups: Ints, up: Bools) -> Bools:
        """May one more of each of these go? Of a group that has too few already nobody may, up or not."""
        return (self._there[groups] > 0) & ((self._ups[groups] > 0) | ~up)

    def lets_all(self, groups: Sequence[int], up: Sequence[bool]) -> bool:
        """May they all go together?"""
        left: dict[int, tuple[int, int]] = {}
        for group, is_up in zip(groups, up, strict=True):
            there, ups = left.get(group) or self.left(group)
            if there < 1 or (is_up and ups < 1):
                return False
            left[group] = there - 1, ups - is_up
        return True

    def take(self, groups: Sequence[int], up: Sequence[bool]) -> None:
        for group, is_up in zip(groups, up, strict=True):
            self._there[group] -= 1
            self._ups[group] -= is_up


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
    enough = [row for row in _with_enough(ask, later, open_rows, found.coming.rows) if _fits(ask, later, row, found, ())]
    count -= sum(_times(ask, later, row, found, ()) for row in enough)
    coming = bool(enough)
    open_rows = open_rows.copy()
    open_rows[enough] = False
    ranked = _ranked(ask, room, open_rows, found, spare) if count > 0 else None
    if ranked is None:
        # With what is coming, victims may do that do not yet.
        soon = count > 0 and len(found.coming.rows) > 0 and _ranked(ask, later, open_rows, found, spare) is not None
        return Outlook([], 0, coming or soon)
    plans: list[Eviction] = []
    lacking = looked = at = 0
    while at < len(ranked.rows) and len(plans) < count and looked < LOOK_AT:
        # Of the rows that cost the same priority, as many as may be looked at; then the fewest victims first.
        end = min(int(np.searchsorted(ranked.levels, ranked.levels[at], side="right")), at + LOOK_AT - looked)
        closely = sorted((least, nth) for nth in range(at, end) if (least := _least(ask, room, ranked, nth, found, spare)))
        looked, at = looked + end - at, end
        for least, nth in closely:
            row, victims = ranked.rows[nth], _looked(ask, room, ranked, nth, found, spare) if len(plans) < count else None
            if not victims:
                continue  # those before it have used up what may go
            made = _eviction(ask, room, row, found, victims) if len(victims) <= min(victims_max, VICTIMS_MAX) else None
            if made is None:
                lacking = min(lacking or least, least)
            else:
                spare.take(found.groups[victims].tolist(), found.up[victims].tolist())
                victims_max -= len(victims)
                plans.append(made)
                over = _times(ask, room, row, found, victims) - 1
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


def _with_enough(ask: Ask, room: _Room, open_rows: Bools, rows: Ints) -> list[int]:
    """Those of these rows where the amounts would do."""
    rows = np.unique(rows)
    will = open_rows[rows]
    for name, need in ask.resources:
        will = will & (room.free[name][rows] >= need)
    found: list[int] = rows[will].tolist()
    return found


class _Ranked(NamedTuple):
    """Rows where the room would do, cheapest first: the candidates of each, the priority that it costs at least, and how many
    of the first candidates are the fewest that do; 0, if that takes a closer look.
    """

    rows: list[int]
    candidates: list[Ints]
    levels: Ints
    sure: list[int]


def _ranked(ask: Ask, room: _Room, open_rows: Bools, found: Candidates, spare: Spare) -> _Ranked | None:
    there = np.flatnonzero(open_rows[found.rows])
    # Whoever must not go is not counted on: else his rows might be all that is looked at.
    there = there[spare.lets(found.groups[there], found.up[there])]
    if not len(there):
        return None
    size = np.zeros(len(there))
    for name, need in ask.resources:
        size += found.amounts[name][there] / max(need, 1)
    # Within a row the lowest first, and of equals the largest: so that the first few that do are the cheapest and fewest.
    order = there[np.lexsort((found.slots[there], -size, found.priority[there], found.rows[there]))]
    rows = found.rows[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    ends = np.r_[starts[1:], len(order)]
    enough = np.ones(len(order), dtype=np.bool_)
    least = np.zeros(len(starts), dtype=np.int64)
    for name, need in ask.resources:
        held, free = found.amounts[name][order], room.free[name][rows]
        freed = np.cumsum(held)
        freed -= np.repeat((freed - held)[starts], ends - starts)
        enough &= free + freed >= need
        # With the largest of them as often as it takes, fewer would not do.
        largest = np.maximum(np.maximum.reduceat(held, starts), 1)
        np.maximum(least, -((free[starts] - need) // largest), out=least)
    first = np.minimum.reduceat(np.where(enough, np.arange(len(order)), _FAR), starts)
    can = first != _FAR
    if not can.any():
        return None
    starts, ends, first, least = starts[can], ends[can], first[can], least[can]
    levels, many = found.priority[order][first], first - starts + 1
    cost = np.lexsort((rows[starts], many, levels))
    sure = np.where((many == least) & (not (ask.whole or ask.shares)), many, 0)[cost]
    begin_end = zip(starts[cost].tolist(), ends[cost].tolist(), strict=True)
    return _Ranked(rows[starts][cost].tolist(), [order[a:b] for a, b in begin_end], levels[cost], sure.tolist())


def _least(ask: Ask, room: _Room, ranked: _Ranked, nth: int, found: Candidates, spare: Spare) -> int:
    """How many would have to go there; 0 if it does not do."""
    return ranked.sure[nth] or len(_looked(ask, room, ranked, nth, found, spare) or ())


def _looked(ask: Ask, room: _Room, ranked: _Ranked, nth: int, found: Candidates, spare: Spare) -> list[int] | None:
    """Who would have to go there, as far as groups may lose them now."""
    candidates = ranked.candidates[nth]
    if ranked.sure[nth]:
        victims: list[int] = candidates[: ranked.sure[nth]].tolist()
        if spare.lets_all(found.groups[victims].tolist(), found.up[victims].tolist()):
            return victims
    return _closely(ask, room, ranked.rows[nth], found, candidates, spare)


def _closely(ask: Ask, room: _Room, row: int, found: Candidates, at: Ints, spare: Spare) -> list[int] | None:
    """Which of these candidates of one row: take until it fits, then spare whoever need not go."""
    lowest: list[int] = at.tolist()
    taken = _enough(ask, room, row, found, lowest, spare)
    if taken is None:
        # Of a group that may lose few the lowest went first, and were too small, or do not hold what is asked for. Once more,
        # with the largest first; then with each of them in turn.
        sizes = {one: sum(int(found.amounts[name][one]) / max(need, 1) for name, need in ask.resources) for one in lowest}
        bounded = [one for one in lowest[1:TURNS_MAX] if spare.left(int(found.groups[one]))[0] < len(lowest)]
        orders = (sorted(sizes, key=lambda one: (-sizes[one], one)), *([one, *lowest] for one in bounded))
        tried = (_enough(ask, room, row, found, list(dict.fromkeys(order)), spare) for order in orders)
        taken = next((one for one in tried if one is not None), None)
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
    left: dict[int, tuple[int, int]] = {}
    for one in at:
        group, up = int(found.groups[one]), bool(found.up[one])
        there, ups = left.get(group) or spare.left(group)
        if there > 0 and (ups > 0 or not up):
            left[group] = there - 1, ups - up
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
