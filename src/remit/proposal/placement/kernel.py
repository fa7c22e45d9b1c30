"""Placement kernel: best node for each replica of a class, with incremental rescoring.

Equal replicas at once, or one by one, with the same result. It claims nothing.

Replicas that ask the same are a **class**. For each class the kernel keeps one number a node: its score, or -1 where the class
does not fit. After a placement the columns tell which rows have changed, and only those are scored anew, when the class is next
asked about. So a placement costs about the same on a thousand nodes and on fifty thousand.

**One by one** takes the node of the highest number, the first of equals. **A run** places many of one class, and must come to
the very same nodes. The numbers of one node, as it takes one replica after another, form a sequence; greedy always takes the
highest head. A head that is lower than what is behind it holds that back, and once it is taken, what it held back follows at
once: so greedy takes all items in the order of the lowest number up to and including themselves, then of the node, then of the
depth. That is a sort, not a loop.

Where replicas look at each other (spread, affinity, anti-affinity) a placement changes the answer elsewhere, but only by
topology domain. Nodes of the same domains are on one shelf; there the order is as before, and only which shelf is next is
found step by step (gates.py). Where the domain is the node itself, it is a matter of the row, like what is left of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from remit.law import fit
from remit.law.fit import Ask, Index
from remit.observation.node_columns import Bools, Columns, Ints, Rows, over
from remit.observation.topology_counts import NODE, ColumnPeers
from remit.proposal.placement.builtin_plugins import DEFAULT, LEAST
from remit.proposal.placement.class_scores import Class, Lines, best, leading
from remit.proposal.placement.devices import choose
from remit.proposal.placement.plugins import (
    LAW,
    ROOM,
    Filter,
    PluginError,
    Score,
    bounded,
    distinct,
    epoch_of,
    for_others,
)
from remit.proposal.placement.topology_gates import FINE, SCALE, Gates, Numbers, Order, Shelves, keys_of, sort

_NEVER: Final = np.asarray(-1, dtype=np.int32)
_CELLS_MAX: Final = 1 << 22
"""How many numbers a run looks at in one go."""
CLASSES_CELLS_MAX: Final = 1 << 26
"""How many numbers are kept in all, or half as many fine ones; the class that was not asked about for longest goes."""
_MANY: Final = 512
"""Of so many rows it pays to look only at those where the class may stand at all."""
_ALL: Final = slice(None)
_NOTHING: Final[Mapping[str, Any]] = {}
_ZERO: Final = np.asarray(0)
_SCALED: Final = np.asarray(float(SCALE * LEAST.weight))


class Placed(NamedTuple):
    """A row for each replica that found a place; and the devices of each, if the class asks for any."""

    rows: list[int]
    devices: list[Mapping[str, int]]


class Kernel:
    """Works on columns and peers that somebody else keeps up with the world; what it places it posts there."""

    def __init__(
        self,
        columns: Columns,
        peers: ColumnPeers,
        *,
        filters: Sequence[Filter] = (),
        scores: Sequence[Score] = DEFAULT,
    ) -> None:
        distinct((*LAW, *filters))
        distinct(scores)
        bounded(scores)
        self.columns, self.peers = columns, peers
        self.all_filters = (*LAW, *filters)
        self.filters = tuple(one for one in self.all_filters if one.check not in (fit.ready, fit.accepting))
        self.scores = tuple(scores)
        self._classes: dict[Hashable, Class] = {}
        self._orders: dict[tuple[str, ...], tuple[int, Order | None]] = {}
        """By topology keys; classes that mind the same share one. There are as many as combinations of keys are asked for."""

    def known(self, key: Hashable, ask: Ask, **steered: Any) -> Class:
        """The class of that key. Another ask under the same key, by identity, makes what was known of it void; `steered` are
        fields of it that are not its own.
        """
        found = self._classes.pop(key, None)
        if found is None or found.base is not ask:
            found = Class(ask, ask._replace(**steered) if steered else ask, self.filters, self.scores)
            for term in (*ask.spread, *ask.affinity, *ask.anti, *ask.prefer):
                self.peers.counts(term.of)  # from here on it is kept up
            while self._classes and (len(self._classes) + 1) * len(self.columns) > CLASSES_CELLS_MAX >> found.fine:
                del self._classes[next(iter(self._classes))]
        self._classes[key] = found
        return found

    def forget_all(self) -> None:
        """What filters or scores know beyond rows has changed."""
        self._classes.clear()

    # -- numbers -----------------------------------------------------------------------------------------------------------

    def refresh(self, one: Class) -> Numbers:
        """The class's number for every row, as of now; only who stands in wider domains is not regarded."""
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
                one.score = np.concatenate([one.score, np.full(rows - len(one.score), _NEVER)])
            touched = changed.since(one.seen) if one.seen >= 0 and epoch == one.epoch else None
            if touched is None or 2 * len(touched) > rows:
                one.score = self._numbers(one, _ALL)
                if one.shelves is not None:
                    one.shelves.renew(one.score)
            else:
                if standing and len(touched) > _MANY:
                    touched = touched[~one.closed[touched]]  # the others stay at -1
                one.score[touched] = numbers = self._numbers(one, touched)
                if one.shelves is not None:
                    one.shelves.put(touched, numbers)
            one.seen, one.epoch = changed.count, epoch
        if one.gated and one.shelves is None:
            one.shelves = self._shelve(one)
        return one.score

    def _shelve(self, one: Class) -> Shelves:
        ask = one.over._replace(anti=tuple(term for term in one.over.anti if term.of.key != NODE))
        keys = keys_of(ask, one.wider)
        stood, order = self._orders.get(keys, (-1, None))
        if stood != self.columns.restood.count:
            order = sort(keys, self.columns)
            self._orders[keys] = self.columns.restood.count, order
        heads = _ALL if order is None else order.heads
        return Shelves(order, Gates(ask, self.columns, self.peers, one.static, heads, one.wider, one.fine), one.score)

    def _shun(self, one: Class) -> None:
        """Whom it keeps away from, and who from it."""
        shunners = self.peers.shunners(one.ask)
        alone = [term.of for term in one.ask.anti if term.of.key == NODE] + [index for index in shunners if index.key == NODE]
        wider = tuple(index for index in shunners if index.key != NODE)
        if one.alone != (found := tuple(dict.fromkeys(alone))):
            one.alone, one.seen = found, -1
        if one.wider != wider:
            one.wider, one.shelves = wider, None
        ask = one.ask
        one.gated = bool(ask.spread or ask.affinity or ask.prefer or wider or any(term.of.key != NODE for term in ask.anti))
        one.shunned = self.peers.shunned_epoch

    def _restand(self, one: Class, rows: int) -> None:
        stood = self.columns.restood
        if len(one.static) < rows:
            one.static = np.concatenate([one.static, np.zeros(rows - len(one.static), dtype=np.bool_)])
        touched = stood.since(one.stood) if one.stood >= 0 else None
        site = self.columns if touched is None else Rows(self.columns, touched)
        found = fit.mask(one.over, site, self.peers, fit.STATIC)
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
                one.seen = -1  # what it adds where nothing changed is another all the same
            one.bias = found

    def _numbers(self, one: Class, rows: Any, spent: Mapping[str, Any] = _NOTHING) -> Numbers:
        """Of these rows, or of all, when so much more is `spent` there."""
        bare = one.plain and not one.rest and not one.alone
        site: Any = self.columns if bare or rows is _ALL else Rows(self.columns, rows, spent)
        numbers, shut = self._plainly(one, rows, spent) if one.plain else (None, one.closed[rows])
        for filter_ in one.rest:
            shut = shut | np.logical_not(self.checked(filter_, one.over, site))  # `~` would make -2 of a plain True
        if one.alone:
            shut = shut | np.logical_not(fit.away_from(one.alone, site, self.peers))
        if numbers is None:
            numbers = self._where_open(one, rows, spent, shut)
        if one.bias is not None:
            numbers += one.bias[rows]
        if rows is _ALL:
            numbers |= -shut.view(np.int8)  # -1 is all ones: by far the quickest where what fits is mixed with what does not
        else:
            np.copyto(numbers, _NEVER, where=shut)
        return numbers

    def _plainly(self, one: Class, rows: Any, spent: Mapping[str, Any]) -> tuple[Numbers, Bools]:
        """The same as the rule `resources` and the score `least_allocated` say, without a detour: this is where time goes."""
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
        # Where it is negative nothing fits; and a number far below zero, of a huge ask, is none that an integer can hold.
        return np.maximum(total, _ZERO, out=total).astype(np.int32), shut

    def _where_open(self, one: Class, rows: Any, spent: Mapping[str, Any], shut: Bools) -> Numbers:
        """Scores may be dear: they are asked only about the rows where the class fits."""
        numbers: Numbers = np.zeros(len(shut), dtype=one.score.dtype)
        at = np.flatnonzero(~shut)
        if len(at):
            left = {name: count[at] for name, count in spent.items()}
            site = Rows(self.columns, at if rows is _ALL else rows[at], left)
            numbers[at] = self._total(one.scores, one.over, site, one.fine)
        return numbers

    def _total(self, scores: Sequence[Score], ask: Ask, site: Any, fine: bool = False) -> Numbers:
        total: Any = 0.0
        for at, score in enumerate(scores):
            part = self._scored(score, ask, site) * float((SCALE * FINE if fine else SCALE) * score.weight)
            total = total + part if at else part
        made, kind = np.asarray(total), np.int64 if fine else np.int32
        numbers: Numbers = made.astype(kind) if made.shape else np.full(len(site), int(made), dtype=kind)
        # Out of its range no score may make a place impossible, or an impossible one possible.
        return np.maximum(numbers, 0, out=numbers)

    def checked(self, filter_: Filter, ask: Ask, site: Any) -> Any:
        if not filter_.foreign:
            return filter_.check(ask, site, self.peers)
        try:
            found = np.asarray(filter_.check(for_others(ask), site, self.peers))
        except (Exception, SystemExit) as error:  # whatever others' code does
            raise PluginError(filter_.name, f"it failed: {error!r}") from error
        if found.dtype != np.bool_ or found.shape not in ((), (len(site),)):
            raise PluginError(
                filter_.name, f"it answered {found.dtype} of shape {found.shape}, not a bool for each of {len(site)} nodes"
            )
        return found

    def _scored(self, score: Score, ask: Ask, site: Any) -> Any:
        if not score.foreign:
            return score.score(ask, site)
        try:
            found = np.asarray(score.score(for_others(ask), site))
        except (Exception, SystemExit) as error:
            raise PluginError(score.name, f"it failed: {error!r}") from error
        if found.dtype.kind not in "fiub" or found.shape not in ((), (len(site),)):
            raise PluginError(
                score.name, f"it answered {found.dtype} of shape {found.shape}, not a number for each of {len(site)} nodes"
            )
        # What is no number at all is the worst place, not an impossible one.
        return np.clip(np.nan_to_num(found.astype(np.float64), nan=0.0), 0.0, 1.0)

    # -- places ------------------------------------------------------------------------------------------------------------

    def numbers(self, one: Class) -> Numbers:
        """The class's number for every row, also with regard to who stands where; below zero where it does not fit."""
        numbers = self.refresh(one)
        return numbers if one.shelves is None else one.shelves.by_row()

    def place(self, one: Class) -> int:
        """The best row for one replica of the class; -1 if it fits nowhere. Nothing is posted."""
        numbers = self.refresh(one)
        if not len(numbers):
            return -1
        if one.shelves is not None:
            return one.shelves.best()
        row = int(numbers.argmax())
        return row if numbers[row] >= 0 else -1

    def run(self, one: Class, count: int) -> Placed:
        """Places for so many replicas of the class, in their order, and posted; fewer, if that is all that fit. If a plug-in
        fails on the way, nothing is.
        """
        placed = Placed([], [])
        try:
            self._run(one, count, placed)
        except PluginError:
            self.undo(one, placed)
            raise
        return placed

    def _run(self, one: Class, count: int, placed: Placed) -> None:
        """Into `placed`, step by step as it is posted."""
        if one.ask.whole or one.ask.shares:
            self._steps(one, count, placed)
            return
        while (left := count - len(placed.rows)) > 0:
            numbers = self.refresh(one)
            if one.shelves is not None:
                self._run_beside(one, one.shelves, count, placed)
                return
            rows, _, _ = self._order(one, ahead := leading(numbers, left), numbers[ahead], left)
            if not len(rows):
                return
            self._post(one, rows)
            placed.rows.extend(rows.tolist())

    def undo(self, one: Class, placed: Placed) -> None:
        """Take a run's postings back."""
        if placed.devices:
            for row, devices in zip(placed.rows, placed.devices, strict=True):
                self.post(one, row, devices, -1)
        elif placed.rows:
            self._post(one, np.array(placed.rows, dtype=np.int64), -1)

    def best(self, one: Class, count: int) -> list[tuple[int, int, dict[str, int]]]:
        """The rows that are ahead, the total of each in thousandths, and what each plug-in gave it."""
        numbers = self.numbers(one)
        unit = SCALE // 1000 * (FINE if one.fine else 1)
        rows = np.flatnonzero(numbers >= 0)
        rows = rows[best(numbers[rows], count)]
        rows = rows[np.argsort(-numbers[rows], kind="stable")]
        site = Rows(self.columns, rows)
        told = (*one.scores, *(one.constant if one.bias is not None else ()))
        parts = {score.name: self._total([score], one.over, site) // (SCALE // 1000) for score in told}
        return [
            (row, int(numbers[row]) // unit, {name: int(part[at]) for name, part in parts.items()})
            for at, row in enumerate(rows.tolist())
        ]

    def choose(self, one: Class, row: int) -> dict[str, int]:
        """Which devices, in thousandths by name, a replica of the class gets on a row where it fits."""
        return choose(one.ask, self.columns, row) if one.choose is None else one.choose(one.ask, row)

    def name(self, row: int) -> str:
        node = self.columns.nodes[row]
        return "" if node is None else node.metadata.name

    def roomless(self, one: Class) -> Bools:
        """The rows that every filter passes but those about room."""
        self.refresh(one)
        found = ~one.closed
        if one.shelves is not None:
            found = found & one.shelves.open()
        if one.alone:
            found = found & fit.away_from(one.alone, self.columns, self.peers)
        for filter_ in one.filters:
            if filter_.check not in ROOM:
                found = found & self.checked(filter_, one.over, self.columns)
        return found

    def post(self, one: Class, row: int, devices: Mapping[str, int] = _NOTHING, sign: int = 1) -> None:
        """A replica of the class stands there from now on; or, with `sign` -1, no longer."""
        self.columns.post(row, one.ask.resources, devices, sign)
        if indexes := self._minds(one):
            self.peers.post_in(indexes, row, sign)

    def _post(self, one: Class, rows: Ints, sign: int = 1) -> None:
        distinct_rows, counts = np.unique(rows, return_counts=True)
        counts *= sign
        self.columns.post_run(distinct_rows, counts, one.ask.resources)
        if indexes := self._minds(one):
            self.peers.post_run(indexes, distinct_rows, counts)

    def _minds(self, one: Class) -> tuple[Index, ...]:
        if one.minded != self.peers.minded_epoch:
            one.minds, one.minded = self.peers.minds(one.ask), self.peers.minded_epoch
        return one.minds

    def _steps(self, one: Class, count: int, placed: Placed) -> None:
        asks_devices = bool(one.ask.whole or one.ask.shares)
        while len(placed.rows) < count and (row := self.place(one)) >= 0:
            devices = self.choose(one, row)
            self.post(one, row, devices)
            placed.rows.append(row)
            if asks_devices:
                placed.devices.append(devices)

    # -- beside others -----------------------------------------------------------------------------------------------------

    def _run_beside(self, one: Class, shelves: Shelves, count: int, placed: Placed) -> None:
        """As `run`, where placements close or open domains for each other: step by step, but over shelves of like nodes."""
        if shelves.order is None:
            self._steps(one, count, placed)
            return
        left = count - len(placed.rows)
        orders = []
        for number in range(len(shelves)):
            rows, numbers = shelves.shelf(number, shelves.order)
            ahead = leading(numbers, left)
            orders.append(self._order(one, rows[ahead], numbers[ahead], left))
        shelves.gates.look(ours=True)
        lines = Lines(orders)
        merged = lines.merge(shelves.gates, left)
        if merged:
            self._post(one, np.array(merged, dtype=np.int64))
            placed.rows.extend(merged)
        if len(merged) < left and lines.broken:
            self._run(one, count, placed)

    # -- the order of a run ------------------------------------------------------------------------------------------------

    def _order(self, one: Class, rows: Ints, numbers: Numbers, limit: int) -> tuple[Ints, Numbers, bool]:
        """Greedy's order on these `leading` rows and numbers, with the number of each item; at most `limit` of them.

        The last says if that is all. Else it is a beginning, and never empty: post it, and ask again.
        """
        whole = True
        depth_max = 1 if one.once else self._depth_max(one, rows, limit)
        depth = min(depth_max, 2 * limit // max(len(rows), 1) + 1)
        while True:
            depth = max(1, min(depth, depth_max, _CELLS_MAX // max(len(rows), 1)))
            table = self._deep(one, rows, numbers, depth)
            lowest = np.minimum.accumulate(table, axis=1).ravel()
            items = np.flatnonzero(lowest >= 0)
            items = items[best(lowest[items], limit)]
            items = items[np.argsort(-lowest[items], kind="stable")]
            if depth < depth_max:
                # Behind the last item that was looked at there may be more, and they would come next.
                ends = np.flatnonzero(items % depth == depth - 1)
                if len(ends) and ends[0] + 1 < len(items):
                    if 2 * depth * len(rows) <= _CELLS_MAX:
                        depth *= 2
                        continue
                    items, whole = items[: ends[0] + 1], False
            return rows[items // depth], table.ravel()[items], whole

    def _depth_max(self, one: Class, rows: Ints, limit: int) -> int:
        depths = [int((self.columns.free[name][rows] // need).max()) for name, need in one.ask.resources if need and len(rows)]
        return max(1, min([limit, *depths]))

    def _deep(self, one: Class, rows: Ints, numbers: Numbers, depth: int) -> Numbers:
        """The numbers of each row as it takes one replica after another; -1 from where it is full."""
        if depth == 1:
            return numbers[:, None]
        behind = np.tile(np.arange(1, depth), len(rows))
        spent = {name: need * behind for name, need in one.ask.resources}
        again = np.repeat(rows, depth - 1)
        more = self._numbers(one, again, spent)
        return np.concatenate([numbers[:, None], more.reshape(len(rows), depth - 1)], axis=1)
