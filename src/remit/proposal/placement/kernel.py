"""Placement kernel: best node for each replica of a class, with incremental rescoring.

Places equal replicas in bulk or one by one, with identical results. It makes no claims.

Replicas with equal requirements form a **class**. For each class the kernel keeps one number per node: its score, or -1
where the class does not fit. The columns record which rows changed since; only those rows are scored again when the class is
used next. The cost of a placement is therefore about the same on a thousand nodes and on fifty thousand.

**One by one** takes the node with the highest number, the first one on ties. **A run** places many replicas of one class and
must choose the same nodes in the same order. The scores of one node, as it takes one replica after another, form a sequence,
and greedy placement always takes the highest head of all sequences. A head that is lower than the items behind it delays
them; once it is taken they follow immediately. Greedy therefore takes all items in descending order of the minimum of their
sequence up to and including themselves, then by node, then by depth. That is one sort instead of a loop.

Where replicas depend on each other (spread, affinity, anti-affinity), a placement changes the result on other nodes, but
only by topology domain. Nodes with the same domains form a group; the order within a group is as above, and only the choice
of the next group is made step by step (topology_gates.py). If the domain is the node itself, the rule is checked per row,
like free capacity.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from remit.law import fit
from remit.law.fit import PeerIndex, Requirements
from remit.observation.node_columns import Bools, Ints, NodeColumns, SelectedRows, translate_requirements
from remit.observation.topology_counts import NODE, ColumnPeerCounts
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, LEAST_ALLOCATED
from remit.proposal.placement.class_scores import GroupMerge, WorkClass, top_k, top_k_fitting
from remit.proposal.placement.devices import DeclaredDevices, choose_devices
from remit.proposal.placement.plugins import (
    BUILTIN_FILTERS,
    CAPACITY_CHECKS,
    Filter,
    PluginError,
    Score,
    check_unique_names,
    check_weight_sum,
    epoch_of,
    without_identity,
)
from remit.proposal.placement.topology_gates import (
    HIGH_PRECISION_FACTOR,
    SCALE,
    GroupOrder,
    ScoreArray,
    TopologyGates,
    TopologyGroups,
    group_rows,
    topology_keys,
)

_UNFIT: Final = np.asarray(-1, dtype=np.int32)
_CELLS_MAX: Final = 1 << 22
"""Scores computed in one step of a run; bounds the memory of its table."""
CLASSES_CELLS_MAX: Final = 1 << 26
"""Scores cached in all, in 32-bit cells; a 64-bit score counts twice. The class unused for longest is evicted."""
_MANY_ROWS: Final = 512
"""From this many changed rows on, rows where the class cannot run are filtered out before scoring."""
_ALL: Final = slice(None)
_NOTHING: Final[Mapping[str, Any]] = {}
_ZERO: Final = np.asarray(0)
_SCALED: Final = np.asarray(float(SCALE * LEAST_ALLOCATED.weight))


class Placements(NamedTuple):
    """A row for each replica that was placed, and the devices of each if the class requests any."""

    rows: list[int]
    devices: list[Mapping[str, int]]


class Kernel:
    """Places replicas on columns and peer counts that the view keeps current; placements are posted to both."""

    def __init__(
        self,
        columns: NodeColumns,
        peers: ColumnPeerCounts,
        *,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT_SCORES,
    ) -> None:
        check_unique_names((*BUILTIN_FILTERS, *filters))
        check_unique_names(scores)
        check_weight_sum(scores)
        self.columns, self.peers = columns, peers
        self.declared_devices = DeclaredDevices(columns)
        self.all_filters = (*BUILTIN_FILTERS, *filters)
        self.filters = tuple(filter_ for filter_ in self.all_filters if filter_.check not in (fit.ready, fit.accepting))
        self.scores = tuple(scores)
        self._classes: dict[Hashable, WorkClass] = {}
        self._group_orders: dict[tuple[str, ...], tuple[int, GroupOrder | None]] = {}
        """Row groups by topology keys, shared by classes with the same keys. The size is bounded by the combinations of keys in
        use.
        """

    def class_for(self, key: Hashable, requirements: Requirements, **overridden: Any) -> WorkClass:
        """Returns the cached class of this key, created on first use.

        A different requirements object under the same key (compared by identity) replaces the class. `overridden` are fields of
        the requirements set by overrides or hints rather than by the workload.
        """
        work_class = self._classes.pop(key, None)  # inserted again below: the dictionary is in order of last use
        if work_class is None or work_class.source_requirements is not requirements:
            work_class = WorkClass(
                requirements, requirements._replace(**overridden) if overridden else requirements, self.filters, self.scores
            )
            for term in (
                *requirements.spread,
                *requirements.affinity,
                *requirements.anti_affinity,
                *requirements.preferred_spread,
            ):
                self.peers.counts(term.peers)  # registers the index, so that its counts are maintained from now on
            while (
                self._classes and (len(self._classes) + 1) * len(self.columns) > CLASSES_CELLS_MAX >> work_class.high_precision
            ):
                del self._classes[next(iter(self._classes))]
        self._classes[key] = work_class
        return work_class

    def forget_all(self) -> None:
        """Drops all classes, because data of filters or scores other than the rows has changed."""
        self._classes.clear()

    # -- scores ------------------------------------------------------------------------------------------------------------

    def refresh(self, work_class: WorkClass) -> ScoreArray:
        """Brings the scores of the class up to date and returns them by row. Rules about domains wider than a node are not
        applied: see `row_scores`.
        """
        columns = self.columns
        changed, rows = columns.changed, len(columns.nodes)
        if work_class.names_version != columns.name_count:
            work_class.column_requirements, work_class.names_version, work_class.groups = (
                translate_requirements(work_class.requirements, columns),
                columns.name_count,
                None,
            )
            work_class.select_scores(self.scores)
        attributes_current = work_class.attributes_seen == columns.attributes_changed.count
        if not attributes_current:
            self._update_static(work_class, rows)
        if work_class.anti_affinity_epoch != self.peers.anti_affinity_epoch:
            self._update_anti_affinity(work_class)
        epoch = 0 if work_class.has_constant_epoch else sum(epoch_of(score) for score in work_class.scores)
        if work_class.changes_seen != changed.count or epoch != work_class.epoch:
            if len(work_class.score) < rows:
                work_class.score = np.concatenate([work_class.score, np.full(rows - len(work_class.score), _UNFIT)])
            touched = (
                changed.since(work_class.changes_seen) if work_class.changes_seen >= 0 and epoch == work_class.epoch else None
            )
            if touched is None or 2 * len(touched) > rows:
                work_class.score = self._score_rows(work_class, _ALL)
                if work_class.groups is not None:
                    work_class.groups.replace_scores(work_class.score)
            else:
                if attributes_current and len(touched) > _MANY_ROWS:
                    touched = touched[~work_class.closed[touched]]  # the other rows stay at -1
                work_class.score[touched] = numbers = self._score_rows(work_class, touched)
                if work_class.groups is not None:
                    work_class.groups.update_scores(touched, numbers)
            work_class.changes_seen, work_class.epoch = changed.count, epoch
        if work_class.uses_domains and work_class.groups is None:
            work_class.groups = self._group_rows(work_class)
        return work_class.score

    def _group_rows(self, work_class: WorkClass) -> TopologyGroups:
        requirements = work_class.column_requirements._replace(
            anti_affinity=tuple(
                term for term in work_class.column_requirements.anti_affinity if term.peers.topology_key != NODE
            )
        )
        keys = topology_keys(requirements, work_class.excluded_in_domain)
        version, order = self._group_orders.get(keys, (-1, None))
        if version != self.columns.attributes_changed.count:
            order = group_rows(keys, self.columns)
            self._group_orders[keys] = self.columns.attributes_changed.count, order
        heads = _ALL if order is None else order.heads
        return TopologyGroups(
            order,
            TopologyGates(
                requirements,
                self.columns,
                self.peers,
                work_class.static,
                heads,
                work_class.excluded_in_domain,
                work_class.high_precision,
            ),
            work_class.score,
        )

    def _update_anti_affinity(self, work_class: WorkClass) -> None:
        """Updates the anti-affinity indexes in both directions: of this class, and of other workloads against it."""
        owners = self.peers.anti_affinity_owners(work_class.requirements)
        indexes = [term.peers for term in work_class.requirements.anti_affinity if term.peers.topology_key == NODE] + [
            index for index in owners if index.topology_key == NODE
        ]
        in_domain = tuple(index for index in owners if index.topology_key != NODE)
        if work_class.excluded_on_node != (on_node := tuple(dict.fromkeys(indexes))):
            work_class.excluded_on_node, work_class.changes_seen = on_node, -1
        if work_class.excluded_in_domain != in_domain:
            work_class.excluded_in_domain, work_class.groups = in_domain, None
        requirements = work_class.requirements
        work_class.uses_domains = bool(
            requirements.spread
            or requirements.affinity
            or requirements.preferred_spread
            or in_domain
            or any(term.peers.topology_key != NODE for term in requirements.anti_affinity)
        )
        work_class.anti_affinity_epoch = self.peers.anti_affinity_epoch

    def _update_static(self, work_class: WorkClass, rows: int) -> None:
        changes = self.columns.attributes_changed
        if len(work_class.static) < rows:
            work_class.static = np.concatenate([work_class.static, np.zeros(rows - len(work_class.static), dtype=np.bool_)])
        touched = changes.since(work_class.attributes_seen) if work_class.attributes_seen >= 0 else None
        site = self.columns if touched is None else SelectedRows(self.columns, touched)
        allowed = fit.mask(work_class.column_requirements, site, self.peers, fit.STATIC_RULES)
        if touched is None:
            work_class.static = np.broadcast_to(allowed, rows).copy()
        else:
            work_class.static[touched] = allowed
        work_class.attributes_seen, work_class.groups = changes.count, None
        work_class.closed = ~(work_class.static & self.columns.takes)
        if work_class.static_scores:
            bias = self._weighted_sum(
                work_class.static_scores, work_class.column_requirements, self.columns, work_class.high_precision
            )
            allowed = bias if len(bias) and bias.min() != bias.max() else None
            if (allowed is None) != (work_class.static_bonus is None):
                work_class.changes_seen = -1  # the total changes even on rows that did not
            work_class.static_bonus = allowed

    def _score_rows(self, work_class: WorkClass, rows: Any, spent: Mapping[str, Any] = _NOTHING) -> ScoreArray:
        """Scores of these rows, or of all, after `spent` more is used on each of them."""
        bare = work_class.uses_fast_path and not work_class.other_filters and not work_class.excluded_on_node
        site: Any = self.columns if bare or rows is _ALL else SelectedRows(self.columns, rows, spent)
        numbers, shut = (
            self._score_fast(work_class, rows, spent) if work_class.uses_fast_path else (None, work_class.closed[rows])
        )
        for filter_ in work_class.other_filters:
            shut = shut | np.logical_not(
                self.check(filter_, work_class.column_requirements, site)
            )  # `~` would turn a plain True into -2
        if work_class.excluded_on_node:
            shut = shut | np.logical_not(fit.clear_of(work_class.excluded_on_node, site, self.peers))
        if numbers is None:
            numbers = self._score_open_rows(work_class, rows, spent, shut)
        if work_class.static_bonus is not None:
            numbers += work_class.static_bonus[rows]
        if rows is _ALL:
            numbers |= -shut.view(np.int8)  # -1 has all bits set: the fastest way to mark unfit rows in a full array
        else:
            np.copyto(numbers, _UNFIT, where=shut)
        return numbers

    def _score_fast(self, work_class: WorkClass, rows: Any, spent: Mapping[str, Any]) -> tuple[ScoreArray, Bools]:
        """Same result as the rule `resources` and the score `least_allocated`, computed directly: this is the hot path."""
        columns, shut = self.columns, work_class.closed[rows]
        total: Any = None
        for name, need in work_class.column_requirements.resources:
            free = columns.free.get(name)
            if free is None:
                return np.zeros(len(shut), dtype=np.int32), np.ones(len(shut), dtype=np.bool_)
            remaining = free[rows] - need
            if spent:
                remaining -= spent[name]
            shut = shut | (remaining < _ZERO)
            part = remaining * columns.share[name][rows]
            total = part if total is None else np.add(total, part, out=total)
        if len(work_class.column_requirements.resources) > 1:
            total /= len(work_class.column_requirements.resources)
        total *= _SCALED
        # Negative totals do not fit anyway, and a very large request would overflow the integer type.
        return np.maximum(total, _ZERO, out=total).astype(np.int32), shut

    def _score_open_rows(self, work_class: WorkClass, rows: Any, spent: Mapping[str, Any], shut: Bools) -> ScoreArray:
        """Scores can be expensive, so they are computed only for rows where the class fits."""
        numbers: ScoreArray = np.zeros(len(shut), dtype=work_class.score.dtype)
        at = np.flatnonzero(~shut)
        if len(at):
            spent_open = {name: count[at] for name, count in spent.items()}
            site = SelectedRows(self.columns, at if rows is _ALL else rows[at], spent_open)
            numbers[at] = self._weighted_sum(work_class.scores, work_class.column_requirements, site, work_class.high_precision)
        return numbers

    def _weighted_sum(
        self, scores: Sequence[Score], requirements: Requirements, site: Any, high_precision: bool = False
    ) -> ScoreArray:
        total: Any = 0.0
        for at, score in enumerate(scores):
            part = self._score(score, requirements, site) * float(
                (SCALE * HIGH_PRECISION_FACTOR if high_precision else SCALE) * score.weight
            )
            total = total + part if at else part
        array, kind = np.asarray(total), np.int64 if high_precision else np.int32
        numbers: ScoreArray = array.astype(kind) if array.shape else np.full(len(site), int(array), dtype=kind)
        # A score outside its range must not make an eligible node ineligible, or the reverse.
        return np.maximum(numbers, 0, out=numbers)

    def check(self, filter_: Filter, requirements: Requirements, site: Any) -> Any:
        if not filter_.third_party:
            return filter_.check(requirements, site, self.peers)
        try:
            passed = np.asarray(filter_.check(without_identity(requirements), site, self.peers))
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            raise PluginError(filter_.name, f"check() raised {error!r}") from error
        if passed.dtype != np.bool_ or passed.shape not in ((), (len(site),)):
            raise PluginError(
                filter_.name,
                f"check() returned {passed.dtype} of shape {passed.shape}; expected a bool for each of {len(site)} nodes",
            )
        return passed

    def _score(self, score: Score, requirements: Requirements, site: Any) -> Any:
        if not score.third_party:
            return score.score(requirements, site)
        try:
            values = np.asarray(score.score(without_identity(requirements), site))
        except (Exception, SystemExit) as error:
            raise PluginError(score.name, f"score() raised {error!r}") from error
        if values.dtype.kind not in "fiub" or values.shape not in ((), (len(site),)):
            raise PluginError(
                score.name,
                f"score() returned {values.dtype} of shape {values.shape}; expected a number for each of {len(site)} nodes",
            )
        # NaN ranks a node last; it does not make it ineligible.
        return np.clip(np.nan_to_num(values.astype(np.float64), nan=0.0), 0.0, 1.0)

    # -- placement ---------------------------------------------------------------------------------------------------------

    def row_scores(self, work_class: WorkClass) -> ScoreArray:
        """Scores by row with all rules applied, including spread and affinity; negative where the class does not fit."""
        numbers = self.refresh(work_class)
        return numbers if work_class.groups is None else work_class.groups.row_scores()

    def best_row(self, work_class: WorkClass) -> int:
        """The best row for one replica of the class; -1 if it fits nowhere. Posts nothing."""
        numbers = self.refresh(work_class)
        if not len(numbers):
            return -1
        if work_class.groups is not None:
            return work_class.groups.best_row()
        row = int(numbers.argmax())
        return row if numbers[row] >= 0 else -1

    def place_run(self, work_class: WorkClass, count: int) -> Placements:
        """Places and posts `count` replicas of the class in order, or as many as fit. If a plug-in fails, all postings are
        undone.
        """
        placed = Placements([], [])
        try:
            self._place_run(work_class, count, placed)
        except PluginError:
            self.undo(work_class, placed)
            raise
        return placed

    def _place_run(self, work_class: WorkClass, count: int, placed: Placements) -> None:
        """Fills `placed` step by step, as placements are posted."""
        if work_class.requirements.whole_devices or work_class.requirements.device_shares:
            self._place_one_by_one(work_class, count, placed)
            return
        while (remaining := count - len(placed.rows)) > 0:  # again, if the order was truncated to bound its memory
            numbers = self.refresh(work_class)
            if work_class.groups is not None:
                self._place_by_group(work_class, work_class.groups, count, placed)
                return
            rows, _, _ = self._greedy_order(
                work_class, candidates := top_k_fitting(numbers, remaining), numbers[candidates], remaining
            )
            if not len(rows):
                return
            self._post_run(work_class, rows)
            placed.rows.extend(rows.tolist())

    def undo(self, work_class: WorkClass, placed: Placements) -> None:
        """Reverts the postings of a run."""
        if placed.devices:
            for row, devices in zip(placed.rows, placed.devices, strict=True):
                self.post(work_class, row, devices, -1)
        elif placed.rows:
            self._post_run(work_class, np.array(placed.rows, dtype=np.int64), -1)

    def top_rows(self, work_class: WorkClass, count: int) -> list[tuple[int, int, dict[str, int]]]:
        """The best rows, with the total of each in thousandths and the contribution of each score, and of soft spreading."""
        numbers = self.row_scores(work_class)
        unit = SCALE // 1000 * (HIGH_PRECISION_FACTOR if work_class.high_precision else 1)
        rows = np.flatnonzero(numbers >= 0)
        rows = rows[top_k(numbers[rows], count)]
        rows = rows[np.argsort(-numbers[rows], kind="stable")]
        site = SelectedRows(self.columns, rows)
        contributing = (*work_class.scores, *(work_class.static_scores if work_class.static_bonus is not None else ()))
        parts = {
            score.name: self._weighted_sum([score], work_class.column_requirements, site) // (SCALE // 1000)
            for score in contributing
        }
        if work_class.requirements.preferred_spread:
            parts.setdefault("spread", (numbers[rows] - work_class.score[rows]) // unit)
        return [
            (row, int(numbers[row]) // unit, {name: int(part[at]) for name, part in parts.items()})
            for at, row in enumerate(rows.tolist())
        ]

    def choose_devices(self, work_class: WorkClass, row: int) -> dict[str, int]:
        """Devices by name, in thousandths, that a replica of the class gets on a row where it fits."""
        return (
            choose_devices(work_class.requirements, self.columns, row)
            if work_class.choose_devices is None
            else work_class.choose_devices(work_class.requirements, row)
        )

    def node_name(self, row: int) -> str:
        node = self.columns.nodes[row]
        return "" if node is None else node.metadata.name

    def without_capacity_check(self, work_class: WorkClass) -> Bools:
        """Rows that pass every filter except those about free capacity; preemption could free that."""
        self.refresh(work_class)
        passed = ~work_class.closed
        if work_class.groups is not None:
            passed = passed & work_class.groups.open()
        if work_class.excluded_on_node:
            passed = passed & fit.clear_of(work_class.excluded_on_node, self.columns, self.peers)
        for filter_ in work_class.filters:
            if filter_.check not in CAPACITY_CHECKS:
                passed = passed & self.check(filter_, work_class.column_requirements, self.columns)
        return passed

    def post(self, work_class: WorkClass, row: int, devices: Mapping[str, int] = _NOTHING, sign: int = 1) -> None:
        """Posts one replica of the class on a row; `sign` -1 removes it."""
        self.columns.post(row, work_class.requirements.resources, devices, sign)
        if indexes := self._counted_in(work_class):
            self.peers.post_in(indexes, row, sign)

    def _post_run(self, work_class: WorkClass, rows: Ints, sign: int = 1) -> None:
        distinct_rows, counts = np.unique(rows, return_counts=True)
        counts *= sign
        self.columns.post_many(distinct_rows, counts, work_class.requirements.resources)
        if indexes := self._counted_in(work_class):
            self.peers.post_many(indexes, distinct_rows, counts)

    def _counted_in(self, work_class: WorkClass) -> tuple[PeerIndex, ...]:
        if work_class.index_epoch != self.peers.indexes_epoch:
            work_class.counted_in, work_class.index_epoch = (
                self.peers.indexes_of(work_class.requirements),
                self.peers.indexes_epoch,
            )
        return work_class.counted_in

    def _place_one_by_one(self, work_class: WorkClass, count: int, placed: Placements) -> None:
        asks_devices = bool(work_class.requirements.whole_devices or work_class.requirements.device_shares)
        while len(placed.rows) < count and (row := self.best_row(work_class)) >= 0:
            devices = self.choose_devices(work_class, row)
            self.post(work_class, row, devices)
            placed.rows.append(row)
            if asks_devices:
                placed.devices.append(devices)

    # -- placement by topology group -------------------------------------------------------------------------------------

    def _place_by_group(self, work_class: WorkClass, groups: TopologyGroups, count: int, placed: Placements) -> None:
        """Like `_place_run` for rules on topology domains: step by step, but over groups of nodes instead of single nodes."""
        if groups.order is None:
            self._place_one_by_one(work_class, count, placed)
            return
        remaining = count - len(placed.rows)
        orders = []
        for number in range(len(groups)):
            rows, numbers = groups.group(number, groups.order)
            candidates = top_k_fitting(numbers, remaining)
            orders.append(self._greedy_order(work_class, rows[candidates], numbers[candidates], remaining))
        groups.gates.load(ours=True)
        queues = GroupMerge(orders)
        merged = queues.merge(groups.gates, remaining)
        if merged:
            self._post_run(work_class, np.array(merged, dtype=np.int64))
            placed.rows.extend(merged)
        if len(merged) < remaining and queues.truncated:
            self._place_run(work_class, count, placed)

    # -- the order of a run ------------------------------------------------------------------------------------------------

    def _greedy_order(
        self, work_class: WorkClass, rows: Ints, numbers: ScoreArray, limit: int
    ) -> tuple[Ints, ScoreArray, bool]:
        """Greedy order over these candidate rows, with the score of each item; at most `limit` items.

        The last value is False if the order was truncated. It is then a non-empty prefix: post it and call again.
        """
        complete = True
        depth_max = 1 if work_class.one_per_node else self._depth_max(work_class, rows, limit)
        # Start at twice the average depth per row: computing every row to its full depth would mostly be wasted.
        depth = min(depth_max, 2 * limit // max(len(rows), 1) + 1)
        while True:
            depth = max(1, min(depth, depth_max, _CELLS_MAX // max(len(rows), 1)))
            table = self._scores_by_depth(work_class, rows, numbers, depth)
            lowest = np.minimum.accumulate(table, axis=1).ravel()
            items = np.flatnonzero(lowest >= 0)
            items = items[top_k(lowest[items], limit)]
            items = items[np.argsort(-lowest[items], kind="stable")]
            if depth < depth_max:
                # The last depth of a row was taken, so deeper items of that row may come next and were not computed.
                ends = np.flatnonzero(items % depth == depth - 1)
                if len(ends) and ends[0] + 1 < len(items):
                    if 2 * depth * len(rows) <= _CELLS_MAX:
                        depth *= 2
                        continue
                    items, complete = items[: ends[0] + 1], False
            return rows[items // depth], table.ravel()[items], complete

    def _depth_max(self, work_class: WorkClass, rows: Ints, limit: int) -> int:
        depths = [
            int((self.columns.free[name][rows] // need).max())
            for name, need in work_class.requirements.resources
            if need and len(rows)
        ]
        return max(1, min([limit, *depths]))

    def _scores_by_depth(self, work_class: WorkClass, rows: Ints, numbers: ScoreArray, depth: int) -> ScoreArray:
        """Returns for each row (a node) its scores for the first to the `depth`-th further replica; -1 once none fits."""
        if depth == 1:
            return numbers[:, None]
        taken = np.tile(np.arange(1, depth), len(rows))
        spent = {name: need * taken for name, need in work_class.requirements.resources}
        repeated_rows = np.repeat(rows, depth - 1)
        more = self._score_rows(work_class, repeated_rows, spent)
        return np.concatenate([numbers[:, None], more.reshape(len(rows), depth - 1)], axis=1)
