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
from remit.law.fit import Requirements, PeerIndex
from remit.observation.node_columns import Bools, Columns, Ints, Rows, over
from remit.observation.topology_counts import NODE, ColumnPeers
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES, LEAST_ALLOCATED
from remit.proposal.placement.class_scores import WorkClass, GroupMerge, top_k, top_k_fitting
from remit.proposal.placement.devices import choose_devices
from remit.proposal.placement.plugins import (
    BUILTIN_FILTERS,
    CAPACITY_CHECKS,
    Filter,
    PluginError,
    Score,
    check_weight_sum,
    check_unique_names,
    epoch_of,
    without_identity,
)
from remit.proposal.placement.topology_gates import HIGH_PRECISION_FACTOR, SCALE, TopologyGates, ScoreArray, GroupOrder, TopologyGroups, topology_keys, group_rows

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
        columns: Columns,
        peers: ColumnPeers,
        *,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT_SCORES,
    ) -> None:
        check_unique_names((*BUILTIN_FILTERS, *filters))
        check_unique_names(scores)
        check_weight_sum(scores)
        self.columns, self.peers = columns, peers
        self.all_filters = (*BUILTIN_FILTERS, *filters)
        self.filters = tuple(one for one in self.all_filters if one.check not in (fit.ready, fit.accepting))
        self.scores = tuple(scores)
        self._classes: dict[Hashable, WorkClass] = {}
        self._orders: dict[tuple[str, ...], tuple[int, GroupOrder | None]] = {}
        """Row groups by topology keys, shared by classes with the same keys. The size is bounded by the combinations of keys in
        use.
        """

    def known(self, key: Hashable, ask: Requirements, **steered: Any) -> WorkClass:
        """Returns the cached class of this key, created on first use.

        A different requirements object under the same key (compared by identity) replaces the class. `steered` are fields of
        the requirements set by overrides or hints rather than by the workload.
        """
        found = self._classes.pop(key, None)
        if found is None or found.base is not ask:
            found = WorkClass(ask, ask._replace(**steered) if steered else ask, self.filters, self.scores)
            for term in (*ask.spread, *ask.affinity, *ask.anti_affinity, *ask.preferred_spread):
                self.peers.counts(term.peers)  # registers the index, so that its counts are maintained from now on
            while self._classes and (len(self._classes) + 1) * len(self.columns) > CLASSES_CELLS_MAX >> found.fine:
                del self._classes[next(iter(self._classes))]
        self._classes[key] = found
        return found

    def forget_all(self) -> None:
        """Drops all classes, because data of filters or scores other than the rows has changed."""
        self._classes.clear()

    # -- scores ------------------------------------------------------------------------------------------------------------

    def refresh(self, one: WorkClass) -> ScoreArray:
        """Brings the scores of the class up to date and returns them by row. Rules about domains wider than a node are not
        applied: see `numbers`.
        """
        columns = self.columns
        changed, rows = columns.changed, len(columns.nodes)
        if one.named != columns.named:
            one.over, one.named, one.shelves = over(one.ask, columns), columns.named, None
            one.rank(self.scores)
        standing = one.stood == columns.restood.count
        if not standing:
            self._restand(one, rows)
        if one.shunned != self.peers.shunned_epoch:
            self._shun(one)
        epoch = 0 if one.steady else sum(epoch_of(score) for score in one.scores)
        if one.seen != changed.count or epoch != one.epoch:
            if len(one.score) < rows:
                one.score = np.concatenate([one.score, np.full(rows - len(one.score), _UNFIT)])
            touched = changed.since(one.seen) if one.seen >= 0 and epoch == one.epoch else None
            if touched is None or 2 * len(touched) > rows:
                one.score = self._numbers(one, _ALL)
                if one.shelves is not None:
                    one.shelves.renew(one.score)
            else:
                if standing and len(touched) > _MANY_ROWS:
                    touched = touched[~one.closed[touched]]  # the other rows stay at -1
                one.score[touched] = numbers = self._numbers(one, touched)
                if one.shelves is not None:
                    one.shelves.put(touched, numbers)
            one.seen, one.epoch = changed.count, epoch
        if one.gated and one.shelves is None:
            one.shelves = self._shelve(one)
        return one.score

    def _shelve(self, one: WorkClass) -> TopologyGroups:
        ask = one.over._replace(anti_affinity=tuple(term for term in one.over.anti_affinity if term.peers.topology_key != NODE))
        keys = topology_keys(ask, one.wider)
        stood, order = self._orders.get(keys, (-1, None))
        if stood != self.columns.restood.count:
            order = group_rows(keys, self.columns)
            self._orders[keys] = self.columns.restood.count, order
        heads = _ALL if order is None else order.heads
        return TopologyGroups(order, TopologyGates(ask, self.columns, self.peers, one.static, heads, one.wider, one.fine), one.score)

    def _shun(self, one: WorkClass) -> None:
        """Updates the anti-affinity indexes in both directions: of this class, and of other workloads against it."""
        shunners = self.peers.anti_affinity_owners(one.ask)
        alone = [term.peers for term in one.ask.anti_affinity if term.peers.topology_key == NODE] + [index for index in shunners if index.topology_key == NODE]
        wider = tuple(index for index in shunners if index.topology_key != NODE)
        if one.alone != (found := tuple(dict.fromkeys(alone))):
            one.alone, one.seen = found, -1
        if one.wider != wider:
            one.wider, one.shelves = wider, None
        ask = one.ask
        one.gated = bool(ask.spread or ask.affinity or ask.preferred_spread or wider or any(term.peers.topology_key != NODE for term in ask.anti_affinity))
        one.shunned = self.peers.shunned_epoch

    def _restand(self, one: WorkClass, rows: int) -> None:
        stood = self.columns.restood
        if len(one.static) < rows:
            one.static = np.concatenate([one.static, np.zeros(rows - len(one.static), dtype=np.bool_)])
        touched = stood.since(one.stood) if one.stood >= 0 else None
        site = self.columns if touched is None else Rows(self.columns, touched)
        found = fit.mask(one.over, site, self.peers, fit.STATIC_RULES)
        if touched is None:
            one.static = np.broadcast_to(found, rows).copy()
        else:
            one.static[touched] = found
        one.stood, one.shelves = stood.count, None
        one.closed = ~(one.static & self.columns.takes)
        if one.constant:
            bias = self._total(one.constant, one.over, self.columns, one.fine)
            found = bias if len(bias) and bias.min() != bias.max() else None
            if (found is None) != (one.bias is None):
                one.seen = -1  # the total changes even on rows that did not
            one.bias = found

    def _numbers(self, one: WorkClass, rows: Any, spent: Mapping[str, Any] = _NOTHING) -> ScoreArray:
        """Scores of these rows, or of all, after `spent` more is used on each of them."""
        bare = one.plain and not one.rest and not one.alone
        site: Any = self.columns if bare or rows is _ALL else Rows(self.columns, rows, spent)
        numbers, shut = self._plainly(one, rows, spent) if one.plain else (None, one.closed[rows])
        for filter_ in one.rest:
            shut = shut | np.logical_not(self.checked(filter_, one.over, site))  # `~` would turn a plain True into -2
        if one.alone:
            shut = shut | np.logical_not(fit.clear_of(one.alone, site, self.peers))
        if numbers is None:
            numbers = self._where_open(one, rows, spent, shut)
        if one.bias is not None:
            numbers += one.bias[rows]
        if rows is _ALL:
            numbers |= -shut.view(np.int8)  # -1 has all bits set: the fastest way to mark unfit rows in a full array
        else:
            np.copyto(numbers, _UNFIT, where=shut)
        return numbers

    def _plainly(self, one: WorkClass, rows: Any, spent: Mapping[str, Any]) -> tuple[ScoreArray, Bools]:
        """Same result as the rule `resources` and the score `least_allocated`, computed directly: this is the hot path."""
        columns, shut = self.columns, one.closed[rows]
        total: Any = None
        for name, need in one.over.resources:
            free = columns.free.get(name)
            if free is None:
                return np.zeros(len(shut), dtype=np.int32), np.ones(len(shut), dtype=np.bool_)
            left = free[rows] - need
            if spent:
                left -= spent[name]
            shut = shut | (left < _ZERO)
            part = left * columns.share[name][rows]
            total = part if total is None else np.add(total, part, out=total)
        if len(one.over.resources) > 1:
            total /= len(one.over.resources)
        total *= _SCALED
        # Negative totals do not fit anyway, and a very large request would overflow the integer type.
        return np.maximum(total, _ZERO, out=total).astype(np.int32), shut

    def _where_open(self, one: WorkClass, rows: Any, spent: Mapping[str, Any], shut: Bools) -> ScoreArray:
        """Scores can be expensive, so they are computed only for rows where the class fits."""
        numbers: ScoreArray = np.zeros(len(shut), dtype=one.score.dtype)
        at = np.flatnonzero(~shut)
        if len(at):
            left = {name: count[at] for name, count in spent.items()}
            site = Rows(self.columns, at if rows is _ALL else rows[at], left)
            numbers[at] = self._total(one.scores, one.over, site, one.fine)
        return numbers

    def _total(self, scores: Sequence[Score], ask: Requirements, site: Any, fine: bool = False) -> ScoreArray:
        total: Any = 0.0
        for at, score in enumerate(scores):
            part = self._scored(score, ask, site) * float((SCALE * HIGH_PRECISION_FACTOR if fine else SCALE) * score.weight)
            total = total + part if at else part
        made, kind = np.asarray(total), np.int64 if fine else np.int32
        numbers: ScoreArray = made.astype(kind) if made.shape else np.full(len(site), int(made), dtype=kind)
        # A score outside its range must not make an eligible node ineligible, or the reverse.
        return np.maximum(numbers, 0, out=numbers)

    def checked(self, filter_: Filter, ask: Requirements, site: Any) -> Any:
        if not filter_.foreign:
            return filter_.check(ask, site, self.peers)
        try:
            found = np.asarray(filter_.check(without_identity(ask), site, self.peers))
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            raise PluginError(filter_.name, f"check() raised {error!r}") from error
        if found.dtype != np.bool_ or found.shape not in ((), (len(site),)):
            raise PluginError(
                filter_.name, f"check() returned {found.dtype} of shape {found.shape}; expected a bool for each of {len(site)} nodes"
            )
        return found

    def _scored(self, score: Score, ask: Requirements, site: Any) -> Any:
        if not score.foreign:
            return score.score(ask, site)
        try:
            found = np.asarray(score.score(without_identity(ask), site))
        except (Exception, SystemExit) as error:
            raise PluginError(score.name, f"score() raised {error!r}") from error
        if found.dtype.kind not in "fiub" or found.shape not in ((), (len(site),)):
            raise PluginError(
                score.name, f"score() returned {found.dtype} of shape {found.shape}; expected a number for each of {len(site)} nodes"
            )
        # NaN ranks a node last; it does not make it ineligible.
        return np.clip(np.nan_to_num(found.astype(np.float64), nan=0.0), 0.0, 1.0)

    # -- placement ---------------------------------------------------------------------------------------------------------

    def numbers(self, one: WorkClass) -> ScoreArray:
        """Scores by row with all rules applied, including spread and affinity; negative where the class does not fit."""
        numbers = self.refresh(one)
        return numbers if one.shelves is None else one.shelves.by_row()

    def place(self, one: WorkClass) -> int:
        """The best row for one replica of the class; -1 if it fits nowhere. Posts nothing."""
        numbers = self.refresh(one)
        if not len(numbers):
            return -1
        if one.shelves is not None:
            return one.shelves.best()
        row = int(numbers.argmax())
        return row if numbers[row] >= 0 else -1

    def run(self, one: WorkClass, count: int) -> Placements:
        """Places and posts `count` replicas of the class in order, or as many as fit. If a plug-in fails, all postings are
        undone.
        """
        placed = Placements([], [])
        try:
            self._run(one, count, placed)
        except PluginError:
            self.undo(one, placed)
            raise
        return placed

    def _run(self, one: WorkClass, count: int, placed: Placements) -> None:
        """Fills `placed` step by step, as placements are posted."""
        if one.ask.whole_devices or one.ask.device_shares:
            self._steps(one, count, placed)
            return
        while (left := count - len(placed.rows)) > 0:
            numbers = self.refresh(one)
            if one.shelves is not None:
                self._run_beside(one, one.shelves, count, placed)
                return
            rows, _, _ = self._order(one, ahead := top_k_fitting(numbers, left), numbers[ahead], left)
            if not len(rows):
                return
            self._post(one, rows)
            placed.rows.extend(rows.tolist())

    def undo(self, one: WorkClass, placed: Placements) -> None:
        """Reverts the postings of a run."""
        if placed.devices:
            for row, devices in zip(placed.rows, placed.devices, strict=True):
                self.post(one, row, devices, -1)
        elif placed.rows:
            self._post(one, np.array(placed.rows, dtype=np.int64), -1)

    def best(self, one: WorkClass, count: int) -> list[tuple[int, int, dict[str, int]]]:
        """The best rows, with the total of each in thousandths and the contribution of each score."""
        numbers = self.numbers(one)
        unit = SCALE // 1000 * (HIGH_PRECISION_FACTOR if one.fine else 1)
        rows = np.flatnonzero(numbers >= 0)
        rows = rows[top_k(numbers[rows], count)]
        rows = rows[np.argsort(-numbers[rows], kind="stable")]
        site = Rows(self.columns, rows)
        told = (*one.scores, *(one.constant if one.bias is not None else ()))
        parts = {score.name: self._total([score], one.over, site) // (SCALE // 1000) for score in told}
        return [
            (row, int(numbers[row]) // unit, {name: int(part[at]) for name, part in parts.items()})
            for at, row in enumerate(rows.tolist())
        ]

    def choose(self, one: WorkClass, row: int) -> dict[str, int]:
        """Devices by name, in thousandths, that a replica of the class gets on a row where it fits."""
        return choose_devices(one.ask, self.columns, row) if one.choose is None else one.choose(one.ask, row)

    def name(self, row: int) -> str:
        node = self.columns.nodes[row]
        return "" if node is None else node.metadata.name

    def roomless(self, one: WorkClass) -> Bools:
        """Rows that pass every filter except those about free capacity; preemption could free that."""
        self.refresh(one)
        found = ~one.closed
        if one.shelves is not None:
            found = found & one.shelves.open()
        if one.alone:
            found = found & fit.clear_of(one.alone, self.columns, self.peers)
        for filter_ in one.filters:
            if filter_.check not in CAPACITY_CHECKS:
                found = found & self.checked(filter_, one.over, self.columns)
        return found

    def post(self, one: WorkClass, row: int, devices: Mapping[str, int] = _NOTHING, sign: int = 1) -> None:
        """Posts one replica of the class on a row; `sign` -1 removes it."""
        self.columns.post(row, one.ask.resources, devices, sign)
        if indexes := self._minds(one):
            self.peers.post_in(indexes, row, sign)

    def _post(self, one: WorkClass, rows: Ints, sign: int = 1) -> None:
        distinct_rows, counts = np.unique(rows, return_counts=True)
        counts *= sign
        self.columns.post_run(distinct_rows, counts, one.ask.resources)
        if indexes := self._minds(one):
            self.peers.post_run(indexes, distinct_rows, counts)

    def _minds(self, one: WorkClass) -> tuple[PeerIndex, ...]:
        if one.minded != self.peers.minded_epoch:
            one.minds, one.minded = self.peers.minds(one.ask), self.peers.minded_epoch
        return one.minds

    def _steps(self, one: WorkClass, count: int, placed: Placements) -> None:
        asks_devices = bool(one.ask.whole_devices or one.ask.device_shares)
        while len(placed.rows) < count and (row := self.place(one)) >= 0:
            devices = self.choose(one, row)
            self.post(one, row, devices)
            placed.rows.append(row)
            if asks_devices:
                placed.devices.append(devices)

    # -- placement by topology group -------------------------------------------------------------------------------------

    def _run_beside(self, one: WorkClass, shelves: TopologyGroups, count: int, placed: Placements) -> None:
        """Like `_run` for rules on topology domains: places step by step, but over groups of nodes instead of single nodes."""
        if shelves.order is None:
            self._steps(one, count, placed)
            return
        left = count - len(placed.rows)
        orders = []
        for number in range(len(shelves)):
            rows, numbers = shelves.shelf(number, shelves.order)
            ahead = top_k_fitting(numbers, left)
            orders.append(self._order(one, rows[ahead], numbers[ahead], left))
        shelves.gates.look(ours=True)
        lines = GroupMerge(orders)
        merged = lines.merge(shelves.gates, left)
        if merged:
            self._post(one, np.array(merged, dtype=np.int64))
            placed.rows.extend(merged)
        if len(merged) < left and lines.broken:
            self._run(one, count, placed)

    # -- the order of a run ------------------------------------------------------------------------------------------------

    def _order(self, one: WorkClass, rows: Ints, numbers: ScoreArray, limit: int) -> tuple[Ints, ScoreArray, bool]:
        """Greedy order over these candidate rows, with the score of each item; at most `limit` items.

        The last value is False if the order was truncated. It is then a non-empty prefix: post it and call again.
        """
        whole = True
        depth_max = 1 if one.once else self._depth_max(one, rows, limit)
        depth = min(depth_max, 2 * limit // max(len(rows), 1) + 1)
        while True:
            depth = max(1, min(depth, depth_max, _CELLS_MAX // max(len(rows), 1)))
            table = self._deep(one, rows, numbers, depth)
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
                    items, whole = items[: ends[0] + 1], False
            return rows[items // depth], table.ravel()[items], whole

    def _depth_max(self, one: WorkClass, rows: Ints, limit: int) -> int:
        depths = [int((self.columns.free[name][rows] // need).max()) for name, need in one.ask.resources if need and len(rows)]
        return max(1, min([limit, *depths]))

    def _deep(self, one: WorkClass, rows: Ints, numbers: ScoreArray, depth: int) -> ScoreArray:
        """Scores of each row as it takes one replica after another; -1 from the depth at which it is full."""
        if depth == 1:
            return numbers[:, None]
        behind = np.tile(np.arange(1, depth), len(rows))
        spent = {name: need * behind for name, need in one.ask.resources}
        again = np.repeat(rows, depth - 1)
        more = self._numbers(one, again, spent)
        return np.concatenate([numbers[:, None], more.reshape(len(rows), depth - 1)], axis=1)
