"""Where is the best place for each of these? Equal replicas at once, or one by one, with the same result. It claims nothing.

Replicas that ask the same are a **class**. For each class the kernel keeps one number a node: its score, or -1 where the class
does not fit. After a placement the columns tell which rows have changed, and only those are scored anew, when the class is next
asked about. So a placement costs about the same on a thousand nodes and on fifty thousand.

**One by one** takes the node of the highest number, the first of equals. **A run** places many of one class, and must come to
the very same nodes. The numbers of one node, as it takes one replica after another, form a sequence; greedy always takes the
highest head. A head that is lower than what is behind it holds that back, and once it is taken, what it held back follows at
once: so greedy takes all items in the order of the lowest number up to and including themselves, then of the node, then of the
depth. That is a sort, not a loop.

Where replicas look at each other (spread, affinity, anti-affinity) a placement changes the answer elsewhere, but only by
topology domain. Nodes of the same domains form a group; within it the order is as before, and only which group is next is
found step by step (gates.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remit.law import fit
from remit.law.columns import Bools, Columns, Ints, Rows, over
from remit.law.fit import Ask, Index
from remit.law.peers import ColumnPeers
from remit.proposal.devices import choose
from remit.proposal.gates import GROUPS_MAX, SCALE, Gates, group
from remit.proposal.plugins import COUPLED, LAW, ROOM, STATIC, STEADY, Filter, PluginError, Score, applies, distinct, epoch_of
from remit.proposal.scores import DEFAULT, LEAST

NODE: Final = "node"
Numbers = npt.NDArray[np.int32]
_NEVER: Final = np.int32(-1)
_CELLS_MAX: Final = 1 << 22
"""How many numbers a run looks at in one go."""
WEIGHTS_MAX: Final = 2_000
"""Of all scores together: a number is of 32 bits, and soft spreading comes on top."""
CLASSES_CELLS_MAX: Final = 1 << 26
"""How many numbers are kept in all; the class that was not asked about for longest goes."""
_ALL: Final = slice(None)
_NOTHING: Final[Mapping[str, Any]] = {}
_ZERO: Final = np.asarray(0)
_SCALED: Final = np.asarray(float(SCALE * LEAST.weight))
RESOURCES: Final = next(one for one in LAW if one.check is fit.resources)


class Placed(NamedTuple):
    """A row for each replica that found a place; and the devices of each, if the class asks for any."""

    rows: list[int]
    devices: list[Mapping[str, int]]


class Class:
    """One shape of work, and what is known of it: which nodes fit, and how well."""

    __slots__ = (
        "ask", "base", "bias", "closed", "constant", "coupled", "epoch", "filters", "looked", "named", "over", "plain", "score",
        "scores", "seen", "static", "steady", "stood",
    )  # fmt: skip

    def __init__(self, base: Ask, ask: Ask, filters: Sequence[Filter], scores: Sequence[Score]) -> None:
        self.base, self.ask = base, ask
        applying = [one for one in filters if applies(one, ask)]
        self.filters = [one for one in applying if one.check not in STATIC and one.check not in COUPLED]
        self.scores = [one for one in scores if not one.static and applies(one, ask)]
        self.constant = [one for one in scores if one.static and applies(one, ask)]
        self.bias: Numbers | None = None
        """What the static scores add, if they tell nodes apart at all."""
        self.coupled = bool(ask.spread or ask.affinity or ask.anti or ask.prefer)
        self.steady = all(one.epoch is STEADY for one in self.scores)
        self.plain = self.filters == [RESOURCES] and self.scores == [LEAST] and bool(ask.resources)
        """As most are: asked for resources alone, and ranked by what is left of them."""
        self.over = ask
        self.looked: Any = None
        """What was last found out about it for the records: it is forgotten with the class. See decisions.py."""
        self.closed: Bools = np.zeros(0, dtype=np.bool_)
        self.named = self.seen = self.stood = self.epoch = -1
        self.static: Bools = np.zeros(0, dtype=np.bool_)
        self.score: Numbers = np.zeros(0, dtype=np.int32)


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
        if sum(score.weight for score in scores) > WEIGHTS_MAX:
            raise PluginError(scores[-1].name, f"the weights of all scores are more than {WEIGHTS_MAX} together")
        self.columns, self.peers = columns, peers
        self.all_filters = (*LAW, *filters)
        self.filters = tuple(one for one in self.all_filters if one.check not in (fit.ready, fit.accepting))
        self.scores = tuple(scores)
        self._classes: dict[Hashable, Class] = {}

    def known(self, key: Hashable, ask: Ask, pins: tuple[Any, ...] = ()) -> Class:
        """The class of that key. Another ask under the same key, by identity, makes what was known of it void."""
        found = self._classes.pop(key, None)
        if found is None or found.base is not ask:
            found = Class(ask, ask._replace(pins=pins) if pins else ask, self.filters, self.scores)
            for term in (*ask.spread, *ask.affinity, *ask.anti, *ask.prefer):
                self.peers.counts(term.of)  # from here on it is kept up
            while self._classes and (len(self._classes) + 1) * len(self.columns) > CLASSES_CELLS_MAX:
                del self._classes[next(iter(self._classes))]
        self._classes[key] = found
        return found

    def forget_all(self) -> None:
        """What filters or scores know beyond rows has changed."""
        self._classes.clear()

    # -- numbers -----------------------------------------------------------------------------------------------------------

    def refresh(self, one: Class) -> Numbers:
        """The class's number for every row, as of now."""
        columns = self.columns
        changed, rows = columns.changed, len(columns.nodes)
        if one.named != columns.named:
            one.over, one.named = over(one.ask, columns), columns.named
        if one.stood != columns.restood.count:
            self._restand(one, rows)
        epoch = 0 if one.steady else sum(epoch_of(score) for score in one.scores)
        if one.seen == changed.count and epoch == one.epoch:
            return one.score
        if len(one.score) < rows:
            one.score = np.concatenate([one.score, np.full(rows - len(one.score), _NEVER)])
        touched = changed.since(one.seen) if one.seen >= 0 and epoch == one.epoch else None
        if touched is None or 2 * len(touched) > rows:
            one.score = self._numbers(one, _ALL)
        else:
            one.score[touched] = self._numbers(one, touched)
        one.seen, one.epoch = changed.count, epoch
        return one.score

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
        one.stood = stood.count
        one.closed = ~(one.static & self.columns.takes)
        if one.constant:
            bias = self._total(one.constant, one.over, self.columns)
            one.bias = bias if len(bias) and bias.min() != bias.max() else None

    def _numbers(self, one: Class, rows: Any, spent: Mapping[str, Any] = _NOTHING) -> Numbers:
        """Of these rows, or of all, when so much more is `spent` there."""
        if one.plain:
            numbers, shut = self._plainly(one, rows, spent)
        else:
            site: Any = self.columns if rows is _ALL else Rows(self.columns, rows, spent)
            shut = one.closed[rows]
            for filter_ in one.filters:
                shut = shut | np.logical_not(self.checked(filter_, one.over, site))  # `~` would make -2 of a plain True
            numbers = self._total(one.scores, one.over, site)
        if one.bias is not None:
            numbers += one.bias[rows]
        np.putmask(numbers, shut, _NEVER)
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
        return total.astype(np.int32), shut

    def _total(self, scores: Sequence[Score], ask: Ask, site: Any) -> Numbers:
        total: Any = 0.0
        for at, score in enumerate(scores):
            part = self._scored(score, ask, site) * float(SCALE * score.weight)
            total = total + part if at else part
        made = np.asarray(total)
        numbers = made.astype(np.int32) if made.shape else np.full(len(site), int(made), dtype=np.int32)
        # Out of its range no score may make a place impossible, or an impossible one possible.
        return np.maximum(numbers, 0, out=numbers)

    def checked(self, filter_: Filter, ask: Ask, site: Any) -> Any:
        if not filter_.foreign:
            return filter_.check(ask, site, self.peers)
        try:
            found = np.broadcast_to(np.asarray(filter_.check(ask, site, self.peers), dtype=np.bool_), len(site))
        except Exception as error:  # whatever others' code does
            raise PluginError(filter_.name, f"it failed: {error}") from error
        return found

    def _scored(self, score: Score, ask: Ask, site: Any) -> Any:
        if not score.foreign:
            return score.score(ask, site)
        try:
            found = np.asarray(score.score(ask, site), dtype=np.float64)
        except Exception as error:
            raise PluginError(score.name, f"it failed: {error}") from error
        if found.shape not in ((), (len(site),)):
            raise PluginError(score.name, f"it answered {found.shape} for {len(site)} nodes")
        return np.clip(np.nan_to_num(found), 0.0, 1.0)

    # -- places ------------------------------------------------------------------------------------------------------------

    def place(self, one: Class) -> int:
        """The best row for one replica of the class; -1 if it fits nowhere. Nothing is posted."""
        numbers = self.refresh(one)
        shunners = self.peers.shunners(one.ask)
        if one.coupled or shunners:
            numbers = self._beside(one, shunners, numbers)
        if not len(numbers):
            return -1
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
        while len(placed.rows) < count:
            shunners = self.peers.shunners(one.ask)
            if one.coupled or shunners:
                self._run_beside(one, shunners, count, placed)
                return
            self.refresh(one)
            rows, _, _ = self._order(one, np.flatnonzero(one.score >= 0), count - len(placed.rows))
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
        numbers = self.refresh(one)
        shunners = self.peers.shunners(one.ask)
        if one.coupled or shunners:
            numbers = self._beside(one, shunners, numbers)
        rows = np.flatnonzero(numbers >= 0)
        rows = rows[_best(numbers[rows], count)]
        rows = rows[np.argsort(-numbers[rows], kind="stable")]
        site = Rows(self.columns, rows)
        parts = {score.name: self._total([score], one.over, site) // (SCALE // 1000) for score in (*one.scores, *one.constant)}
        return [
            (row, int(numbers[row]) // (SCALE // 1000), {name: int(part[at]) for name, part in parts.items()})
            for at, row in enumerate(rows.tolist())
        ]

    def name(self, row: int) -> str:
        node = self.columns.nodes[row]
        return "" if node is None else node.metadata.name

    def roomless(self, one: Class) -> Bools:
        """The rows that every filter passes but those about room."""
        self.refresh(one)
        found = ~one.closed
        shunners = self.peers.shunners(one.ask)
        if one.coupled or shunners:
            found = found & Gates(one.over, self.columns, self.peers, one.static, _ALL, shunners).open()
        for filter_ in one.filters:
            if filter_.check not in ROOM:
                found = found & self.checked(filter_, one.over, self.columns)
        return found

    def post(self, one: Class, row: int, devices: Mapping[str, int] = _NOTHING, sign: int = 1) -> None:
        """A replica of the class stands there from now on; or, with `sign` -1, no longer."""
        self.columns.post(row, one.ask.resources, devices, sign)
        self.peers.post(one.ask, row, sign)

    def _post(self, one: Class, rows: Ints, sign: int = 1) -> None:
        distinct_rows, counts = np.unique(rows, return_counts=True)
        counts *= sign
        self.columns.post_run(distinct_rows, counts, one.ask.resources)
        if self.peers.minds(one.ask) or one.ask.anti:
            for row, count in zip(distinct_rows.tolist(), counts.tolist(), strict=True):
                self.peers.post(one.ask, row, count)

    def _steps(self, one: Class, count: int, placed: Placed) -> None:
        asks_devices = bool(one.ask.whole or one.ask.shares)
        while len(placed.rows) < count and (row := self.place(one)) >= 0:
            devices = choose(one.ask, self.columns, row)
            self.post(one, row, devices)
            placed.rows.append(row)
            if asks_devices:
                placed.devices.append(devices)

    # -- beside others -----------------------------------------------------------------------------------------------------

    def _beside(self, one: Class, shunners: Sequence[Index], numbers: Numbers) -> Numbers:
        """The numbers with regard to who stands where."""
        gates = Gates(one.over, self.columns, self.peers, one.static, _ALL, shunners)
        return np.where(gates.open() & (numbers >= 0), numbers + gates.preferred(), _NEVER)

    def _run_beside(self, one: Class, shunners: Sequence[Index], count: int, placed: Placed) -> None:
        """As `run`, where placements close or open domains for each other: step by step, but over groups of like nodes."""
        alone = [term for term in one.over.anti if term.of.key == NODE]
        once = any(term.own for term in alone)
        self.refresh(one)
        fits = one.score >= 0
        # What keeps away from single nodes holds for the whole run, but for those that it takes itself: once each.
        nodes = [term.of for term in alone] + [index for index in shunners if index.key == NODE]
        if nodes:
            fits = fits & fit.away_from(nodes, self.columns, self.peers)
        gated = one.over._replace(anti=tuple(term for term in one.over.anti if term.of.key != NODE))
        wider = [index for index in shunners if index.key != NODE]
        groups = group(gated, self.columns, wider, np.flatnonzero(fits))
        if len(groups) > GROUPS_MAX:
            self._steps(one, count, placed)
            return
        heads = np.array([rows[0] for rows in groups], dtype=np.int64)
        gates = Gates(gated, self.columns, self.peers, one.static, heads, wider)
        left = count - len(placed.rows)
        lines = Lines([self._order(one, rows, left, once=once) for rows in groups])
        merged = lines.merge(gates, left)
        if merged:
            self._post(one, np.array(merged, dtype=np.int64))
            placed.rows.extend(merged)
        if len(merged) < left and lines.broken:
            self._run_beside(one, self.peers.shunners(one.ask), count, placed)

    # -- the order of a run ------------------------------------------------------------------------------------------------

    def _order(self, one: Class, rows: Ints, limit: int, *, once: bool = False) -> tuple[Ints, Numbers, bool]:
        """Greedy's order on these rows (ascending, and each fits), with the number of each item; at most `limit` of them.

        The last says if that is all. Else it is a beginning, and never empty: post it, and ask again.
        """
        whole = True
        numbers = one.score[rows]
        best = _best(numbers, limit)
        rows, numbers = rows[best], numbers[best]
        depth_max = 1 if once else self._depth_max(one, rows, limit)
        depth = min(depth_max, 2 * limit // max(len(rows), 1) + 1)
        while True:
            depth = max(1, min(depth, depth_max, _CELLS_MAX // max(len(rows), 1)))
            table = self._deep(one, rows, numbers, depth)
            lowest = np.minimum.accumulate(table, axis=1).ravel()
            items = np.flatnonzero(lowest >= 0)
            items = items[_best(lowest[items], limit)]
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


class Lines:
    """The orders of several groups, merged: which group's next item is the best that may be taken?"""

    def __init__(self, orders: Sequence[tuple[Ints, Numbers, bool]]) -> None:
        self._rows = [rows.tolist() for rows, _, _ in orders]
        self._numbers = [numbers.tolist() for _, numbers, _ in orders]
        self._whole = [whole for _, _, whole in orders]
        self._at = [0] * len(orders)
        self._heads = np.array([numbers[0] for numbers in self._numbers] or [], dtype=np.int64)
        self._firsts = np.array([rows[0] for rows in self._rows] or [], dtype=np.int64)
        self.broken = False
        """Did it end because an order was only a beginning?"""

    def merge(self, gates: Gates, limit: int) -> list[int]:
        placed: list[int] = []
        while len(placed) < limit and len(self._heads):
            numbers = np.where(gates.open() & (self._heads >= 0), self._heads + gates.preferred(), _NEVER)
            best = numbers.max()
            if best < 0:
                break
            equal = np.flatnonzero(numbers == best)
            at = int(equal[self._firsts[equal].argmin()])
            placed.append(int(self._firsts[at]))
            gates.placed(at)
            if not self._step(at):
                break
        return placed

    def _step(self, at: int) -> bool:
        self._at[at] = place = self._at[at] + 1
        if place < len(self._rows[at]):
            self._heads[at], self._firsts[at] = self._numbers[at][place], self._rows[at][place]
            return True
        self._heads[at] = -1
        self.broken = not self._whole[at]
        return not self.broken


def _best(numbers: Numbers, limit: int) -> Ints:
    """Where the `limit` highest are, the first of equals; in ascending order of place."""
    if len(numbers) <= limit:
        return np.arange(len(numbers))
    cut = np.partition(numbers, len(numbers) - limit)[len(numbers) - limit]
    above = numbers > cut
    equal = np.flatnonzero(numbers == cut)[: limit - int(above.sum())]
    above[equal] = True
    return np.flatnonzero(above)
