"""Preemption: the fewest and cheapest victims for work that fits nowhere.

Only plans: the authority marks the victims and the agents drain them.

Preemption terminates: a victim always has a lower priority than its preemptor, and can itself only preempt work of still
lower priority. Priorities fall along every chain of preemptions, so chains are finite. Preemption is not wasted either: a
node is chosen only if the replica passes every filter there once the victims are gone, and the caller has checked quota
first.

Cheapest means: the highest priority among the victims is as low as possible; then the node with the fewest victims is taken.
On one node the lowest priorities go first, even if fewer victims of higher priority would be enough: those would preempt the
lower ones in turn, and more replicas would be evicted in total. Nodes are ranked over columns; only the best ones are
examined victim by victim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law.fit import Requirements
from remit.observation.node_columns import Bools, Columns, Ints
from remit.proposal.placement.devices import assign_devices, fits_devices

NODES_EXAMINED_MAX: Final = 128
"""Nodes examined in detail for each one requested, before the search stops for this cycle."""

FIRST_VICTIMS_MAX: Final = 32
"""How many candidates of a node are tried as the first victim if disruption limits forbid evicting all of them."""

VICTIMS_MAX: Final = 1_024
"""Victims in one claim, at most."""

_UNLIMITED: Final = np.iinfo(np.int64).max


class ReleasingCapacity(NamedTuple):
    """Capacity that is not free in the columns yet, by row."""

    rows: Ints
    amounts: Mapping[str, Ints]
    devices: Mapping[int, Sequence[Mapping[str, int]]]
    """Device shares by row."""


class VictimCandidates(NamedTuple):
    """Replicas that may be preempted, all with a priority below the preemptor's: node row, held resources, whether each is up,
    and its group (workload), because disruption limits apply to a group.
    """

    slots: Ints
    rows: Ints
    priority: Ints
    groups: Ints
    up: Bools
    amounts: Mapping[str, Ints]
    devices: Mapping[int, Mapping[str, int]]
    """Held devices by slot; most replicas hold none."""
    firm: ReleasingCapacity
    """Capacity of victims that in-flight claims have assigned to their preemptors. The preemptors are posted in the columns
    already, and the authority does not charge this capacity twice.
    """
    coming: ReleasingCapacity
    """Capacity that becomes free when all terminating replicas are gone. It cannot be claimed before that."""


class Eviction(NamedTuple):
    row: int
    victims: tuple[int, ...]
    """Replica slots."""
    devices: dict[str, int]


class PreemptionPlan(NamedTuple):
    """Result of a search: the evictions; how many victims the cheapest rejected node would have needed (`lacking`); and whether
    some replicas need no victims because enough capacity is becoming free (`coming`).
    """

    evictions: list[Eviction]
    lacking: int = 0
    coming: bool = False


class DisruptionAllowance:
    """Disruption budget by group: how many more replicas may be evicted, in total and among those that are up. `take` deducts
    from it.
    """

    def __init__(self, there: Ints, ups: Ints) -> None:
        self._there, self._ups = there, ups

    @classmethod
    def boundless(cls, groups: int) -> DisruptionAllowance:
        """An allowance without limits for this many groups."""
        return cls(np.full(groups, _UNLIMITED), np.full(groups, _UNLIMITED))

    def left(self, group: int) -> tuple[int, int]:
        return int(self._there[group]), int(self._ups[group])

    def lets(self, groups: Ints, up: Bools) -> Bools:
        """Whether one more replica of each of these groups may be evicted. If a group is below its minimum, none may, whether
        it is up or not.
        """
        return (self._there[groups] > 0) & ((self._ups[groups] > 0) | ~up)

    def lets_all(self, groups: Sequence[int], up: Sequence[bool]) -> bool:
        """Whether all of these may be evicted together."""
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


class _FreeCapacity(NamedTuple):
    """Free capacity including capacity that is not visible in the columns yet."""

    columns: Columns
    free: Mapping[str, Ints]
    leaving: ReleasingCapacity


def plan_evictions(
    ask: Requirements, columns: Columns, open_rows: Bools, found: VictimCandidates, spare: DisruptionAllowance, *, count: int, victims_max: int
) -> PreemptionPlan:
    """Plans evictions for up to `count` replicas with these requirements, on different nodes, with at most `victims_max`
    victims in all.

    Where terminating replicas will free enough, no further victims are taken, and that many of the `count` replicas wait
    instead.
    """
    room, later = _free_capacity(ask, columns, found.firm), _free_capacity(ask, columns, found.coming)
    enough = [row for row in _rows_with_enough(ask, later, open_rows, found.coming.rows) if _fits(ask, later, row, found, ())]
    count -= sum(_replicas_that_fit(ask, later, row, found, ()) for row in enough)
    coming = bool(enough)
    open_rows = open_rows.copy()
    open_rows[enough] = False
    ranked = _rank_rows(ask, room, open_rows, found, spare) if count > 0 else None
    if ranked is None:
        # Victims that are not enough now may be enough together with capacity that is becoming free.
        soon = count > 0 and len(found.coming.rows) > 0 and _rank_rows(ask, later, open_rows, found, spare) is not None
        return PreemptionPlan([], 0, coming or soon)
    plans: list[Eviction] = []
    lacking = looked = at = 0
    while at < len(ranked.rows) and len(plans) < count and looked < NODES_EXAMINED_MAX:
        # Examine rows of the same cost level, as many as the limit allows; then take those with the fewest victims first.
        end = min(int(np.searchsorted(ranked.levels, ranked.levels[at], side="right")), at + NODES_EXAMINED_MAX - looked)
        closely = sorted((least, nth) for nth in range(at, end) if (least := _victim_count(ask, room, ranked, nth, found, spare)))
        looked, at = looked + end - at, end
        for least, nth in closely:
            row, victims = ranked.rows[nth], _victims_on_row(ask, room, ranked, nth, found, spare) if len(plans) < count else None
            if not victims:
                continue  # earlier plans of this call used up the disruption budget
            made = _eviction(ask, room, row, found, victims) if len(victims) <= min(victims_max, VICTIMS_MAX) else None
            if made is None:
                lacking = min(lacking or least, least)
            else:
                spare.take(found.groups[victims].tolist(), found.up[victims].tolist())
                victims_max -= len(victims)
                plans.append(made)
                over = _replicas_that_fit(ask, room, row, found, victims) - 1
                count, coming = count - over, coming or over > 0
        looked = max(0, looked - 2 * len(plans))
    return PreemptionPlan(plans, lacking, coming)


def _free_capacity(ask: Requirements, columns: Columns, leaving: ReleasingCapacity) -> _FreeCapacity:
    free = {}
    for name, _ in ask.resources:
        column = columns.free.get(name)
        free[name] = np.zeros(len(columns), dtype=np.int64) if column is None else column.astype(np.int64)
        if len(leaving.rows):
            np.add.at(free[name], leaving.rows, leaving.amounts[name])
    return _FreeCapacity(columns, free, leaving)


def _rows_with_enough(ask: Requirements, room: _FreeCapacity, open_rows: Bools, rows: Ints) -> list[int]:
    """Those of these rows where the resources would be enough."""
    rows = np.unique(rows)
    will = open_rows[rows]
    for name, need in ask.resources:
        will = will & (room.free[name][rows] >= need)
    found: list[int] = rows[will].tolist()
    return found


class _RankedRows(NamedTuple):
    """Rows where evictions free enough, cheapest first: the candidates of each, the lowest possible victim priority level, and
    `sure`, the number of leading candidates that is known to be the minimum (0 if a detailed examination is needed).
    """

    rows: list[int]
    candidates: list[Ints]
    levels: Ints
    sure: list[int]


def _rank_rows(ask: Requirements, room: _FreeCapacity, open_rows: Bools, found: VictimCandidates, spare: DisruptionAllowance) -> _RankedRows | None:
    there = np.flatnonzero(open_rows[found.rows])
    # Replicas protected by disruption limits are excluded first; otherwise their rows could use up the examination limit.
    there = there[spare.lets(found.groups[there], found.up[there])]
    if not len(there):
        return None
    size = np.zeros(len(there))
    for name, need in ask.resources:
        size += found.amounts[name][there] / max(need, 1)
    # Within a row by ascending priority, then descending size, so that the first sufficient prefix is cheapest and shortest.
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
        # Lower bound: even if every victim were as large as the largest one, fewer would not be enough.
        largest = np.maximum(np.maximum.reduceat(held, starts), 1)
        np.maximum(least, -((free[starts] - need) // largest), out=least)
    first = np.minimum.reduceat(np.where(enough, np.arange(len(order)), _UNLIMITED), starts)
    can = first != _UNLIMITED
    if not can.any():
        return None
    starts, ends, first, least = starts[can], ends[can], first[can], least[can]
    levels, many = found.priority[order][first], first - starts + 1
    cost = np.lexsort((rows[starts], many, levels))
    sure = np.where((many == least) & (not (ask.whole_devices or ask.device_shares)), many, 0)[cost]
    begin_end = zip(starts[cost].tolist(), ends[cost].tolist(), strict=True)
    return _RankedRows(rows[starts][cost].tolist(), [order[a:b] for a, b in begin_end], levels[cost], sure.tolist())


def _victim_count(ask: Requirements, room: _FreeCapacity, ranked: _RankedRows, nth: int, found: VictimCandidates, spare: DisruptionAllowance) -> int:
    """Number of victims needed on this row; 0 if eviction is not enough there."""
    return ranked.sure[nth] or len(_victims_on_row(ask, room, ranked, nth, found, spare) or ())


def _victims_on_row(ask: Requirements, room: _FreeCapacity, ranked: _RankedRows, nth: int, found: VictimCandidates, spare: DisruptionAllowance) -> list[int] | None:
    """The victims on this row that disruption limits still allow; None if they are not enough."""
    candidates = ranked.candidates[nth]
    if ranked.sure[nth]:
        victims: list[int] = candidates[: ranked.sure[nth]].tolist()
        if spare.lets_all(found.groups[victims].tolist(), found.up[victims].tolist()):
            return victims
    return _select_victims(ask, room, ranked.rows[nth], found, candidates, spare)


def _select_victims(ask: Requirements, room: _FreeCapacity, row: int, found: VictimCandidates, at: Ints, spare: DisruptionAllowance) -> list[int] | None:
    """Selects victims among the candidates of one row: add candidates until the replica fits, then drop those that are not
    needed.
    """
    lowest: list[int] = at.tolist()
    taken = _take_until_fits(ask, room, row, found, lowest, spare)
    if taken is None:
        # Disruption limits stopped the search: of a group that may lose only a few, the lowest were taken first, and they were
        # too small or do not hold the requested devices. Retry with the largest first, then with each candidate first.
        sizes = {one: sum(int(found.amounts[name][one]) / max(need, 1) for name, need in ask.resources) for one in lowest}
        bounded = [one for one in lowest[1:FIRST_VICTIMS_MAX] if spare.left(int(found.groups[one]))[0] < len(lowest)]
        orders = (sorted(sizes, key=lambda one: (-sizes[one], one)), *([one, *lowest] for one in bounded))
        tried = (_take_until_fits(ask, room, row, found, list(dict.fromkeys(order)), spare) for order in orders)
        taken = next((one for one in tried if one is not None), None)
    if taken is None:
        return None
    # Drop the most expensive victims first; on ties the smallest, so that more of them can be dropped.
    dearest = sorted(enumerate(taken), key=lambda pair: (-int(found.priority[pair[1]]), -pair[0]))
    for _, one in dearest:
        rest = [other for other in taken if other != one]
        if _fits(ask, room, row, found, rest):
            taken = rest
    return taken


def _take_until_fits(ask: Requirements, room: _FreeCapacity, row: int, found: VictimCandidates, at: Sequence[int], spare: DisruptionAllowance) -> list[int] | None:
    """Takes candidates in order, as far as disruption limits allow, until the replica fits."""
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


def _eviction(ask: Requirements, room: _FreeCapacity, row: int, found: VictimCandidates, taken: Sequence[int]) -> Eviction | None:
    node = room.columns.nodes[row]
    chosen = assign_devices(ask, node.spec.devices, _device_usage(room, row, found, taken)) if node is not None else None
    return None if chosen is None else Eviction(row, tuple(int(found.slots[one]) for one in taken), chosen)


def _fits(ask: Requirements, room: _FreeCapacity, row: int, found: VictimCandidates, gone: Sequence[int]) -> bool:
    for name, need in ask.resources:
        if int(room.free[name][row]) + sum(int(found.amounts[name][one]) for one in gone) < need:
            return False
    node = room.columns.nodes[row]
    if node is None:
        return False
    return not (ask.whole_devices or ask.device_shares) or fits_devices(ask, node.spec.devices, _device_usage(room, row, found, gone))


def _replicas_that_fit(ask: Requirements, room: _FreeCapacity, row: int, found: VictimCandidates, gone: Sequence[int]) -> int:
    """How many such replicas fit on the row then, by resources; 1 if they request devices."""
    left = [
        (int(room.free[name][row]) + sum(int(found.amounts[name][one]) for one in gone)) // need
        for name, need in ask.resources
        if need
    ]
    return 1 if ask.whole_devices or ask.device_shares else min(left, default=1)


def _device_usage(room: _FreeCapacity, row: int, found: VictimCandidates, gone: Sequence[int]) -> dict[str, int]:
    used = dict(room.columns.used[row])
    theirs = [found.devices.get(int(found.slots[one]), {}) for one in gone]
    for devices in (*room.leaving.devices.get(row, ()), *theirs):
        for name, share in devices.items():
            used[name] = used.get(name, 0) - share
    return used
