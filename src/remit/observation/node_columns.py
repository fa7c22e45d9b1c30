"""Columnar node snapshot that fit rules and scores work on.

No rules here: those are in fit.py.

A column has one entry a node. What is a number or a bool stands in it as such. What is a name (a region, a label's value, a
whole set of taints) stands there as an id, an index into its distinct values, so that a rule judges each distinct value once
and spreads the answers: `over` does that for the look-up tables of an `Requirements`. The id of what is absent is -1, and tables by
domain have one slot more than there are values, so that -1 finds "no domain" in the last.

A change touches its row, never the table: `put` says what a node is, `post` takes or gives back what a holder needs. A node
that is gone leaves a hole, a row that nothing fits, which the next new node fills. `since` tells which rows have changed, so
that whoever keeps answers about them renews only those. `freeze` is a copy that costs nothing until one of the two is written
to: then the arrays that are written to are copied, once.

Amounts are int64: model/resources.py refuses what would not fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from remit.law.fit import Requirements, DeviceModel, free_devices
from remit.law.selectors import LabelColumn, domain_of, match_columns
from remit.model.kinds import Node, NodeExpression, NodeHealth, Taint
from remit.observation.column_table import Changes, Names

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Pairs = Iterable[tuple[str, int]]
H = TypeVar("H", bound=Hashable)
_UNUSED: Final[Mapping[str, int]] = {}
_ROWS_MIN: Final = 16


class Left(NamedTuple):
    """A node and what is left of it: free amounts by resource (what is in no capacity is not looked at); thousandths used of
    each device, by its name.
    """

    node: Node
    free: Mapping[str, int]
    used: Mapping[str, int]


class Columns:
    """Nodes as a `fit.Site`: what they are, and what is left of them.

    `rows` finds the row of a node by its name; `nodes` has None in a hole. `resources` are the rows of `amounts` (what is
    left) and `capacity`, which `free` and `share` show by name, the latter as the share of it that one unit is.
    `used` is what is taken of each device of a row. `takes` is true of what is ready and open.
    """

    amounts: Ints
    capacity: Ints
    free: dict[str, Ints]
    share: dict[str, Floats]
    whole_devices: dict[DeviceModel, Ints]
    largest_shares: dict[DeviceModel, Ints]
    region: Ints
    zone: Ints
    pool: Ints
    taints: Ints
    ready: Bools
    open: Bools
    takes: Bools

    def __init__(self, left: Iterable[Left] = ()) -> None:
        self.nodes: list[Node | None] = []
        self.rows: dict[str, int] = {}
        self.used: list[Mapping[str, int]] = []
        self.resources: dict[str, int] = {}
        self._holes: list[int] = []
        self._places = {name: Names() for name in ("region", "zone", "pool", "taints")}
        self._labels: dict[str, tuple[Ints, Names]] = {}
        self._domains: dict[str, tuple[Ints, Names]] = {}
        self._whole: dict[DeviceModel, Ints] = {}
        self._room: dict[DeviceModel, Ints] = {}
        self._facts: dict[str, npt.NDArray[Any]] = {}
        self._amounts: Ints = np.zeros((0, 0), dtype=np.int64)
        self._capacity: Ints = self._amounts
        self._share: Floats = np.zeros((0, 0))
        self._own = {"amounts", "devices", "facts"}
        """Which groups of arrays are nobody else's, and so may be written to."""
        self.named = 0
        """How many names of places, taints and models there are: tables made `over` these columns hold as long as it does not
        grow, and so does what rests on which sorts of devices there are at all."""
        self.changed = Changes()
        """Rows of which something changed."""
        self.restood = Changes()
        """Rows that changed what they are, or whether they take work: answers that rest on no more than that hold no longer."""
        self._allocate(_ROWS_MIN)
        for one in left:
            row = self.put(one.node)
            taken = [(name, count - one.free.get(name, 0)) for name, count in one.node.spec.capacity]
            self.post(row, taken, one.used)

    def __len__(self) -> int:
        return len(self.nodes)

    # -- what a rule asks --------------------------------------------------------------------------------------------------

    @property
    def node_attributes(self) -> int:
        """Answers about whole columns are never remembered by what one node is; the object itself will do."""
        return id(self)

    @property
    def regions(self) -> list[str]:
        return self._places["region"].values

    @property
    def zones(self) -> list[str]:
        return self._places["zone"].values

    @property
    def pools(self) -> list[str]:
        return self._places["pool"].values

    @property
    def taint_sets(self) -> list[tuple[Taint, ...]]:
        return self._places["taints"].values

    def labelled(self, wanted: Sequence[NodeExpression]) -> Bools:
        return match_columns(wanted, {one.key: self.label(one.key) for one in wanted}, len(self))

    def label(self, key: str) -> LabelColumn:
        """The column of one label key, made when it is first asked for: nodes have many labels and rules name few."""
        if key not in self._labels:
            self._labels[key] = self._column(lambda node: node.metadata.labels.get(key))
        ids, names = self._labels[key]
        return LabelColumn(ids[: len(self)], names.values)

    def domain(self, key: str) -> tuple[Bools, Ints]:
        ids = self.domains(key).ids
        return ids >= 0, ids

    def domains(self, key: str) -> LabelColumn:
        """The column of a topology key: `node`, `region`, `zone` and `pool` are the node's own, any other is a label."""
        ids, names = self._domain(key)
        return LabelColumn(ids[: len(self)], names.values)

    def slots(self, key: str) -> Mapping[str, int]:
        """The id of each domain of a topology key, by its name."""
        return self._domain(key)[1].ids

    def _domain(self, key: str) -> tuple[Ints, Names]:
        if key in ("region", "zone", "pool"):
            return self._facts[key], self._places[key]
        if key not in self._domains:
            self._domains[key] = self._column(lambda node: domain_of(node, key) or None)
        return self._domains[key]

    # -- what is observed --------------------------------------------------------------------------------------------------

    def put(self, node: Node) -> int:
        """What a node is, from now on. What is posted on it stays posted: one that shrank may have less than nothing left."""
        name = node.metadata.name
        row = self.rows.get(name)
        self._write("facts", "amounts", "devices")
        if row is None:
            row = self.rows[name] = self._new_row()
        old = self.nodes[row]
        self.nodes[row] = node
        self._resize(row, node)
        self._show_devices(row)
        took = bool(self.takes[row])
        self.ready[row] = node.status.health is NodeHealth.READY
        self.open[row] = not (node.spec.unschedulable or node.spec.draining or node.metadata.deleting)
        self.takes[row] = self.ready[row] and self.open[row]
        if old is None or took != self.takes[row] or _standing(old) != _standing(node):
            self._stand(row, node)
        self.changed.add(row)
        return row

    def drop(self, name: str) -> None:
        """The node is gone, and whatever was posted on it."""
        self._write("facts", "amounts", "devices")
        row = self.rows.pop(name)
        self.nodes[row], self.used[row] = None, _UNUSED
        self.ready[row] = self.open[row] = self.takes[row] = False
        self.amounts[:, row] = self.capacity[:, row] = 0
        self._share[:, row] = 0
        self._show_devices(row)
        for name in self._places:
            self._facts[name][row] = -1
        for ids, _ in (*self._labels.values(), *self._domains.values()):
            ids[row] = -1
        self._holes.append(row)
        self.changed.add(row)
        self.restood.add(row)

    def post(self, row: int, pairs: Pairs, devices: Mapping[str, int] = _UNUSED, sign: int = 1) -> None:
        """Take what one holder needs (`sign` 1), or give it back (-1)."""
        if "amounts" not in self._own:
            self._write("amounts")
        for name, count in pairs:
            at = self.resources.get(name)
            if at is None:
                at = self._new_resource(name)
            self.amounts[at, row] -= sign * count
        if devices:
            self._write("devices")
            used = dict(self.used[row])
            for device, share in devices.items():
                used[device] = used.get(device, 0) + sign * share
            self.used[row] = {device: share for device, share in used.items() if share}
            self._show_devices(row)
        self.changed.add(row)

    def post_run(self, rows: Ints, counts: Ints, pairs: Pairs) -> None:
        """Take for so many equal holders on each of these rows, which are all different, and need no devices."""
        self._write("amounts")
        for name, count in pairs:
            at = self.resources.get(name)
            if at is None:
                at = self._new_resource(name)
            self.amounts[at, rows] -= counts * count
        self.changed.extend(rows)

    def freeze(self) -> Columns:
        """These columns as they are now; both may be written to from here on, and neither shows in the other."""
        twin = Columns.__new__(Columns)
        twin.__dict__.update(self.__dict__)
        twin._labels, twin._domains = self._labels.copy(), self._domains.copy()
        twin.changed, twin.restood = self.changed.frozen(), self.restood.frozen()
        self._own, twin._own = set(), set()
        return twin

    # -- arrays ------------------------------------------------------------------------------------------------------------

    def _write(self, *groups: str) -> None:
        for group in groups:
            if group in self._own:
                continue
            self._own.add(group)
            match group:
                case "amounts":
                    self._amounts = self._amounts.copy()
                    self.resources = self.resources.copy()
                case "devices":
                    self._whole = {model: column.copy() for model, column in self._whole.items()}
                    self._room = {model: column.copy() for model, column in self._room.items()}
                    self.used = self.used.copy()
                case _:
                    self._facts = {name: column.copy() for name, column in self._facts.items()}
                    self._labels = {key: (ids.copy(), names) for key, (ids, names) in self._labels.items()}
                    self._domains = {key: (ids.copy(), names) for key, (ids, names) in self._domains.items()}
                    self._capacity, self._share = self._capacity.copy(), self._share.copy()
                    self.nodes, self.rows, self._holes = self.nodes.copy(), self.rows.copy(), self._holes.copy()
            self._show()

    def _allocate(self, rows: int) -> None:
        """Room for so many rows; what is there stays."""

        def grown(column: npt.NDArray[Any] | None, kind: Any, fill: int = 0) -> npt.NDArray[Any]:
            made = np.full(rows, fill, dtype=kind)
            if column is not None:
                made[: len(column)] = column
            return made

        facts = self._facts
        self._facts = {
            **{name: grown(facts.get(name), np.int64, -1) for name in self._places},
            **{name: grown(facts.get(name), np.bool_) for name in ("ready", "open", "takes")},
        }
        more = (0, 0), (0, rows - self._amounts.shape[1])
        self._amounts, self._capacity = np.pad(self._amounts, more), np.pad(self._capacity, more)
        self._share = np.pad(self._share, more)
        self._whole = {model: grown(column, np.int64) for model, column in self._whole.items()}
        self._room = {model: grown(column, np.int64) for model, column in self._room.items()}
        for kept in (self._labels, self._domains):
            for key, (ids, names) in kept.items():
                kept[key] = grown(ids, np.int64, -1), names
        self._show()

    def _show(self) -> None:
        """The arrays have more room than there are rows: rules see as much of them as there are."""
        rows = len(self.nodes)
        self.amounts, self.capacity = self._amounts[:, :rows], self._capacity[:, :rows]
        self.free = {name: self.amounts[at] for name, at in self.resources.items()}
        self.share = {name: self._share[at, :rows] for name, at in self.resources.items()}
        self.whole_devices = {model: column[:rows] for model, column in self._whole.items()}
        self.largest_shares = {model: column[:rows] for model, column in self._room.items()}
        for name, column in self._facts.items():
            setattr(self, name, column[:rows])

    def _new_row(self) -> int:
        if self._holes:
            return self._holes.pop()
        row = len(self.nodes)
        self.nodes.append(None)
        self.used.append(_UNUSED)
        if row >= self._amounts.shape[1]:
            self._allocate(2 * (row + 1))
        else:
            self._show()
        return row

    def _new_resource(self, name: str) -> int:
        at = self.resources[name] = len(self.resources)
        self._amounts, self._capacity, self._share = (
            np.concatenate([lines, np.zeros((1, lines.shape[1]), dtype=lines.dtype)])
            for lines in (self._amounts, self._capacity, self._share)
        )
        self._show()
        return at

    def _resize(self, row: int, node: Node) -> None:
        capacity = dict(node.spec.capacity.pairs)
        for name in capacity:
            if name not in self.resources:
                self._new_resource(name)
        for name, at in self.resources.items():
            now = capacity.get(name, 0)
            self.amounts[at, row] += now - self.capacity[at, row]
            self.capacity[at, row] = now
            self._share[at, row] = 1 / now if now else 0

    def _show_devices(self, row: int) -> None:
        node = self.nodes[row]
        if not self._whole and (node is None or not node.spec.devices):
            return
        whole, room = free_devices(node.spec.devices, self.used[row]) if node is not None else ({}, {})
        new = [model for model in whole if model not in self._whole]
        for model in new:
            for columns in (self._whole, self._room):
                columns[model] = np.zeros(len(self._facts["ready"]), dtype=np.int64)
        if new:
            self._show()
            self.named += len(new)
        for model, column in self._whole.items():
            column[row], self._room[model][row] = whole.get(model, 0), room.get(model, 0)

    def _stand(self, row: int, node: Node) -> None:
        spec = node.spec
        for name, value in (("region", spec.region), ("zone", spec.zone), ("pool", spec.pool), ("taints", spec.taints)):
            self._facts[name][row] = self._places[name].id(value)
        self.named = sum(len(names.values) for names in self._places.values()) + len(self._whole)
        for key, (ids, names) in self._labels.items():
            ids[row] = names.id(node.metadata.labels.get(key))
        for key, (ids, names) in self._domains.items():
            ids[row] = names.id(domain_of(node, key) or None)
        self.restood.add(row)

    def _column(self, value: Any) -> tuple[Ints, Names]:
        names = Names()
        ids = np.full(len(self._facts["ready"]), -1, dtype=np.int64)
        ids[: len(self)] = [-1 if node is None else names.id(value(node)) for node in self.nodes]
        return ids, names


def _standing(node: Node) -> tuple[object, ...]:
    """All that a node is, apart from what is left of it."""
    spec = node.spec
    return spec.region, spec.zone, spec.pool, spec.taints, node.metadata.labels


class Rows:
    """Some rows of columns as a `fit.Site`, each maybe several times; `spent` is taken off what is left of each."""

    def __init__(self, columns: Columns, rows: Ints, spent: Mapping[str, Any] = _UNUSED) -> None:
        self.columns, self.rows, self.spent = columns, rows, spent
        self.free = _Taken(columns.free, rows, spent)
        self.share: dict[str, Floats] = _Taken(columns.share, rows, _UNUSED)
        self.whole_devices = _Taken(columns.whole_devices, rows, spent)
        self.largest_shares = _Taken(columns.largest_shares, rows, _UNUSED)

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        """Whether they take work, and where they are: taken when it is first asked for."""
        if name not in ("takes", "ready", "open", "region", "zone", "pool", "taints"):
            raise AttributeError(name)
        found = getattr(self.columns, name).take(self.rows)
        self.__dict__[name] = found
        return found

    @property
    def node_attributes(self) -> int:
        return id(self)

    def labelled(self, wanted: Sequence[NodeExpression]) -> Bools:
        columns = {one.key: self.columns.label(one.key) for one in wanted}
        taken = {key: LabelColumn(column.ids.take(self.rows), column.values) for key, column in columns.items()}
        return match_columns(wanted, taken, len(self.rows))

    def domain(self, key: str) -> tuple[Bools, Ints]:
        ids = self.columns.domains(key).ids.take(self.rows)
        return ids >= 0, ids


class _Taken(dict[Any, Any]):
    """Columns at some rows, each taken when it is first asked for."""

    def __init__(self, columns: Mapping[Any, Any], rows: Ints, spent: Mapping[Any, Any]) -> None:
        self._columns, self._rows, self._spent = columns, rows, spent

    def __missing__(self, name: Any) -> Any:
        taken = self._columns[name][self._rows]
        if name in self._spent:
            taken -= self._spent[name]
        self[name] = taken
        return taken

    def get(self, name: Any, default: Any = 0) -> Any:
        return self[name] if name in self._columns else default

    def __iter__(self) -> Iterator[Any]:
        return iter(self._columns)


def over(ask: Requirements, columns: Columns) -> Requirements:
    """The same ask with its look-up tables keyed by the ids of these columns."""
    return ask._replace(
        # An array of no dimension is what NumPy would make of an int at each use.
        resources=cast(Any, tuple((name, np.asarray(count)) for name, count in ask.resources)),
        regions=_table(ask.regions, columns.regions),
        zones=_table(ask.zones, columns.zones),
        pools=_table(ask.pools, columns.pools),
        allowed_regions=_table(ask.allowed_regions, columns.regions),
        allowed_zones=_table(ask.allowed_zones, columns.zones),
        allowed_pools=_table(ask.allowed_pools, columns.pools),
        tolerates=_table(ask.tolerates, columns.taint_sets),
        untolerated_soft=_table(ask.untolerated_soft, columns.taint_sets),
    )


def _table(answers: Mapping[H, bool], values: Sequence[H]) -> Bools:
    """By id; -1, the id of a hole, finds the last, which is False."""
    return np.array([*(answers[value] for value in values), False], dtype=np.bool_)
