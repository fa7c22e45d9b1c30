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
from remit.observation.node_columns import Bools, Ints, NodeColumns
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
    assigned: ReleasingCapacity
    """Capacity of victims that in-flight claims have assigned to their preemptors. The preemptors are posted in the columns
    already, and the authority does not charge this capacity twice.
    """
    releasing: ReleasingCapacity
    """Capacity that becomes free when all terminating replicas are gone. It cannot be claimed before that."""


class Eviction(NamedTuple):
    row: int
    victims: tuple[int, ...]
    """Replica slots."""
    devices: dict[str, int]


class PreemptionPlan(NamedTuple):
    """Result of a search: the evictions; how many victims the cheapest rejected node would have needed (`victims_lacking`); and
    whether some replicas need no victims because enough capacity is becoming free (`capacity_coming`).
    """

    evictions: list[Eviction]
    victims_lacking: int = 0
    capacity_coming: bool = False


class DisruptionAllowance:
    """Disruption budget by group: how many more replicas may be evicted, in total and among those that are up. `take` deducts
    from it.
    """

    def __init__(self, total: Ints, up: Ints) -> None:
        self._total, self._up = total, up

    @classmethod
    def unlimited(cls, groups: int) -> DisruptionAllowance:
        """An allowance without limits for this many groups."""
        return cls(np.full(groups, _UNLIMITED), np.full(groups, _UNLIMITED))

    def remaining(self, group: int) -> tuple[int, int]:
        return int(self._total[group]), int(self._up[group])

    def allows(self, groups: Ints, up: Bools) -> Bools:
        """Whether one more replica of each of these groups may be evicted. If a group is below its minimum, none may, whether
        it is up or not.
        """
        return (self._total[groups] > 0) & ((self._up[groups] > 0) | ~up)

    def allows_all(self, groups: Sequence[int], up: Sequence[bool]) -> bool:
        """Whether all of these may be evicted together."""
        remaining: dict[int, tuple[int, int]] = {}
        for group, is_up in zip(groups, up, strict=True):
            total, running = remaining.get(group) or self.remaining(group)
            if total < 1 or (is_up and running < 1):
                return False
            remaining[group] = total - 1, running - is_up
        return True

    def take(self, groups: Sequence[int], up: Sequence[bool]) -> None:
        for group, is_up in zip(groups, up, strict=True):
            self._total[group] -= 1
            self._up[group] -= is_up


class _FreeCapacity(NamedTuple):
    """Free capacity including capacity that is not visible in the columns yet."""

    columns: NodeColumns
    free: Mapping[str, Ints]
    releasing: ReleasingCapacity


def plan_evictions(
    requirements: Requirements,
    columns: NodeColumns,
    open_rows: Bools,
    candidates: VictimCandidates,
    allowance: DisruptionAllowance,
    *,
    count: int,
    victims_max: int,
) -> PreemptionPlan:
    """Plans evictions for up to `count` replicas with these requirements, on different nodes, with at most `victims_max`
    victims in all.

    Where terminating replicas will free enough, no further victims are taken, and that many of the `count` replicas wait
    instead.
    """
    free_capacity, future_capacity = (
        _free_capacity(requirements, columns, candidates.assigned),
        _free_capacity(requirements, columns, candidates.releasing),
    )
    sufficient_rows = _rows_without_victims(requirements, future_capacity, open_rows, candidates)
    count -= sum(_replicas_that_fit(requirements, future_capacity, row, candidates, ()) for row in sufficient_rows)
    capacity_coming = bool(sufficient_rows)
    open_rows = open_rows.copy()
    open_rows[sufficient_rows] = False
    ranked = _rank_rows(requirements, free_capacity, open_rows, candidates, allowance) if count > 0 else None
    if ranked is None:
        # Victims that are not enough now may be enough together with capacity that is becoming free.
        coming_soon = (
            count > 0
            and len(candidates.releasing.rows) > 0
            and _rank_rows(requirements, future_capacity, open_rows, candidates, allowance) is not None
        )
        return PreemptionPlan([], 0, capacity_coming or coming_soon)
    plans: list[Eviction] = []
    victims_lacking = examined_count = at = 0
    while at < len(ranked.rows) and len(plans) < count and examined_count < NODES_EXAMINED_MAX:
        # Examine rows of the same cost level, as many as the limit allows; then take those with the fewest victims first.
        end = min(
            int(np.searchsorted(ranked.levels, ranked.levels[at], side="right")), at + NODES_EXAMINED_MAX - examined_count
        )
        examined = sorted(
            (victim_count, nth)
            for nth in range(at, end)
            if (victim_count := _victim_count(requirements, free_capacity, ranked, nth, candidates, allowance))
        )
        examined_count, at = examined_count + end - at, end
        for victim_count, nth in examined:
            row, victims = (
                ranked.rows[nth],
                _victims_on_row(requirements, free_capacity, ranked, nth, candidates, allowance)
                if len(plans) < count
                else None,
            )
            if not victims:
                continue  # earlier plans of this call used up the disruption budget
            eviction = (
                _eviction(requirements, free_capacity, row, candidates, victims)
                if len(victims) <= min(victims_max, VICTIMS_MAX)
                else None
            )
            if eviction is None:
                victims_lacking = min(victims_lacking or victim_count, victim_count)
            else:
                allowance.take(candidates.groups[victims].tolist(), candidates.up[victims].tolist())
                victims_max -= len(victims)
                plans.append(eviction)
                spare_replicas = _replicas_that_fit(requirements, free_capacity, row, candidates, victims) - 1
                count, capacity_coming = count - spare_replicas, capacity_coming or spare_replicas > 0
        examined_count = max(0, examined_count - 2 * len(plans))
    return PreemptionPlan(plans, victims_lacking, capacity_coming)


def _rows_without_victims(
    requirements: Requirements, future_capacity: _FreeCapacity, open_rows: Bools, candidates: VictimCandidates
) -> list[int]:
    """Those rows where terminating replicas will free enough, so that no victims are needed."""
    return [
        row
        for row in _rows_with_enough(requirements, future_capacity, open_rows, candidates.releasing.rows)
        if _fits(requirements, future_capacity, row, candidates, ())
    ]


def _free_capacity(requirements: Requirements, columns: NodeColumns, leaving: ReleasingCapacity) -> _FreeCapacity:
    free = {}
    for name, _ in requirements.resources:
        column = columns.free.get(name)
        free[name] = np.zeros(len(columns), dtype=np.int64) if column is None else column.astype(np.int64)
        if len(leaving.rows):
            np.add.at(free[name], leaving.rows, leaving.amounts[name])
    return _FreeCapacity(columns, free, leaving)


def _rows_with_enough(requirements: Requirements, free_capacity: _FreeCapacity, open_rows: Bools, rows: Ints) -> list[int]:
    """Those of these rows where the resources would be enough."""
    rows = np.unique(rows)
    is_enough = open_rows[rows]
    for name, need in requirements.resources:
        is_enough = is_enough & (free_capacity.free[name][rows] >= need)
    sufficient: list[int] = rows[is_enough].tolist()
    return sufficient


class _RankedRows(NamedTuple):
    """Rows where evictions free enough, cheapest first: the candidates of each, the lowest possible victim priority level, and
    `known_minimum`, the number of leading candidates that is known to be the minimum (0 if a detailed examination is needed).
    """

    rows: list[int]
    candidates: list[Ints]
    levels: Ints
    known_minimum: list[int]


def _rank_rows(
    requirements: Requirements,
    free_capacity: _FreeCapacity,
    open_rows: Bools,
    candidates: VictimCandidates,
    allowance: DisruptionAllowance,
) -> _RankedRows | None:
    usable = np.flatnonzero(open_rows[candidates.rows])
    # Replicas protected by disruption limits are excluded first; otherwise their rows could use up the examination limit.
    usable = usable[allowance.allows(candidates.groups[usable], candidates.up[usable])]
    if not len(usable):
        return None
    size = np.zeros(len(usable))
    for name, need in requirements.resources:
        size += candidates.amounts[name][usable] / max(need, 1)
    # Within a row by ascending priority, then descending size, so that the first sufficient prefix is cheapest and shortest.
    order = usable[np.lexsort((candidates.slots[usable], -size, candidates.priority[usable], candidates.rows[usable]))]
    rows = candidates.rows[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    ends = np.r_[starts[1:], len(order)]
    enough = np.ones(len(order), dtype=np.bool_)
    lower_bound = np.zeros(len(starts), dtype=np.int64)
    for name, need in requirements.resources:
        held, free = candidates.amounts[name][order], free_capacity.free[name][rows]
        freed = np.cumsum(held)
        freed -= np.repeat((freed - held)[starts], ends - starts)
        enough &= free + freed >= need
        # Lower bound: even if every victim were as large as the largest one, fewer would not be enough.
        largest = np.maximum(np.maximum.reduceat(held, starts), 1)
        np.maximum(lower_bound, -((free[starts] - need) // largest), out=lower_bound)
    first = np.minimum.reduceat(np.where(enough, np.arange(len(order)), _UNLIMITED), starts)
    possible = first != _UNLIMITED
    if not possible.any():
        return None
    starts, ends, first, lower_bound = starts[possible], ends[possible], first[possible], lower_bound[possible]
    levels, victim_counts = candidates.priority[order][first], first - starts + 1
    cost = np.lexsort((rows[starts], victim_counts, levels))
    known_minimum = np.where(
        (victim_counts == lower_bound) & (not (requirements.whole_devices or requirements.device_shares)), victim_counts, 0
    )[cost]
    begin_end = zip(starts[cost].tolist(), ends[cost].tolist(), strict=True)
    return _RankedRows(rows[starts][cost].tolist(), [order[a:b] for a, b in begin_end], levels[cost], known_minimum.tolist())


def _victim_count(
    requirements: Requirements,
    free_capacity: _FreeCapacity,
    ranked: _RankedRows,
    nth: int,
    candidates: VictimCandidates,
    allowance: DisruptionAllowance,
) -> int:
    """Number of victims needed on this row; 0 if eviction is not enough there."""
    return ranked.known_minimum[nth] or len(
        _victims_on_row(requirements, free_capacity, ranked, nth, candidates, allowance) or ()
    )


def _victims_on_row(
    requirements: Requirements,
    free_capacity: _FreeCapacity,
    ranked: _RankedRows,
    nth: int,
    candidates: VictimCandidates,
    allowance: DisruptionAllowance,
) -> list[int] | None:
    """The victims on this row that disruption limits still allow; None if they are not enough."""
    row_candidates = ranked.candidates[nth]
    if ranked.known_minimum[nth]:
        victims: list[int] = row_candidates[: ranked.known_minimum[nth]].tolist()
        if allowance.allows_all(candidates.groups[victims].tolist(), candidates.up[victims].tolist()):
            return victims
    return _select_victims(requirements, free_capacity, ranked.rows[nth], candidates, row_candidates, allowance)


def _select_victims(
    requirements: Requirements,
    free_capacity: _FreeCapacity,
    row: int,
    candidates: VictimCandidates,
    at: Ints,
    allowance: DisruptionAllowance,
) -> list[int] | None:
    """Selects victims among the candidates of one row: add candidates until the replica fits, then drop those that are not
    needed.
    """
    lowest: list[int] = at.tolist()
    victims = _take_until_fits(requirements, free_capacity, row, candidates, lowest, allowance)
    if victims is None:
        # Disruption limits stopped the search: of a group that may lose only a few, the lowest were taken first, and they were
        # too small or do not hold the requested devices. Retry with the largest first, then with each candidate first.
        sizes = {
            index: sum(int(candidates.amounts[name][index]) / max(need, 1) for name, need in requirements.resources)
            for index in lowest
        }
        limited = [
            index
            for index in lowest[1:FIRST_VICTIMS_MAX]
            if allowance.remaining(int(candidates.groups[index]))[0] < len(lowest)
        ]
        orders = (sorted(sizes, key=lambda index: (-sizes[index], index)), *([index, *lowest] for index in limited))
        attempts = (
            _take_until_fits(requirements, free_capacity, row, candidates, list(dict.fromkeys(order)), allowance)
            for order in orders
        )
        victims = next((index for index in attempts if index is not None), None)
    if victims is None:
        return None
    # Drop the most expensive victims first; on ties the smallest, so that more of them can be dropped.
    by_cost = sorted(enumerate(victims), key=lambda pair: (-int(candidates.priority[pair[1]]), -pair[0]))
    for _, index in by_cost:
        others = [other for other in victims if other != index]
        if _fits(requirements, free_capacity, row, candidates, others):
            victims = others
    return victims


def _take_until_fits(
    requirements: Requirements,
    free_capacity: _FreeCapacity,
    row: int,
    candidates: VictimCandidates,
    at: Sequence[int],
    allowance: DisruptionAllowance,
) -> list[int] | None:
    """Takes candidates in order, as far as disruption limits allow, until the replica fits."""
    victims: list[int] = []
    remaining: dict[int, tuple[int, int]] = {}
    for index in at:
        group, up = int(candidates.groups[index]), bool(candidates.up[index])
        total, running = remaining.get(group) or allowance.remaining(group)
        if total > 0 and (running > 0 or not up):
            remaining[group] = total - 1, running - up
            victims.append(index)
            if _fits(requirements, free_capacity, row, candidates, victims):
                return victims
    return None


def _eviction(
    requirements: Requirements, free_capacity: _FreeCapacity, row: int, candidates: VictimCandidates, victims: Sequence[int]
) -> Eviction | None:
    node = free_capacity.columns.nodes[row]
    chosen = (
        assign_devices(requirements, node.spec.devices, _device_usage(free_capacity, row, candidates, victims))
        if node is not None
        else None
    )
    return None if chosen is None else Eviction(row, tuple(int(candidates.slots[index]) for index in victims), chosen)


def _fits(
    requirements: Requirements, free_capacity: _FreeCapacity, row: int, candidates: VictimCandidates, evicted: Sequence[int]
) -> bool:
    for name, need in requirements.resources:
        if int(free_capacity.free[name][row]) + sum(int(candidates.amounts[name][index]) for index in evicted) < need:
            return False
    node = free_capacity.columns.nodes[row]
    if node is None:
        return False
    return not (requirements.whole_devices or requirements.device_shares) or fits_devices(
        requirements, node.spec.devices, _device_usage(free_capacity, row, candidates, evicted)
    )


def _replicas_that_fit(
    requirements: Requirements, free_capacity: _FreeCapacity, row: int, candidates: VictimCandidates, evicted: Sequence[int]
) -> int:
    """How many replicas with these requirements fit on the row after the evictions, by resources; 1 if they request devices."""
    counts = [
        (int(free_capacity.free[name][row]) + sum(int(candidates.amounts[name][index]) for index in evicted)) // need
        for name, need in requirements.resources
        if need
    ]
    return 1 if requirements.whole_devices or requirements.device_shares else min(counts, default=1)


def _device_usage(
    free_capacity: _FreeCapacity, row: int, candidates: VictimCandidates, evicted: Sequence[int]
) -> dict[str, int]:
    used = dict(free_capacity.columns.used[row])
    evicted_devices = [candidates.devices.get(int(candidates.slots[index]), {}) for index in evicted]
    for devices in (*free_capacity.releasing.devices.get(row, ()), *evicted_devices):
        for name, share in devices.items():
            used[name] = used.get(name, 0) - share
    return used
