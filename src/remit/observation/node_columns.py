"""Columnar node snapshot that fit rules and scores work on.

The rules are in law/fit.py.

A column has one entry per node. Numbers and booleans are stored directly. Names (a region, a label value, a complete set of
taints) are stored as ids, which are indexes into the distinct values. A rule is evaluated once per distinct value and the
result is spread by id: `translate_requirements` prepares the look-up tables of `Requirements` for that. The id of an absent
value is -1, and tables by domain have one extra entry at the end, so that -1 selects "no domain".

A change touches one row: `put` sets a node's attributes, `post` takes or returns the amounts of a holder. A removed node
leaves a hole, a row that nothing fits, which the next new node reuses. `ChangeLog.since` returns the changed rows, so that
caches refresh only those. `freeze` returns a copy-on-write copy: arrays are copied once, when either side first writes to
them.

Amounts are int64; model/resources.py rejects values that do not fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from remit.law.fit import DeviceModel, Requirements, free_devices, is_open, is_ready
from remit.law.selectors import LabelColumn, domain_of, match_columns
from remit.model.kinds import Node, NodeExpression, Taint
from remit.observation.column_table import ChangeLog, NameInterner

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Pairs = Iterable[tuple[str, int]]
H = TypeVar("H", bound=Hashable)
_NO_DEVICES: Final[Mapping[str, int]] = {}
_ROWS_MIN: Final = 16


class NodeFree(NamedTuple):
    """A node with its free capacity: free amounts by resource (resources without capacity are ignored), and the used
    thousandths of each device by name.
    """

    node: Node
    free: Mapping[str, int]
    used: Mapping[str, int]


class NodeColumns:
    """Nodes as a `fit.NodeView` of columns: what they are, and their free capacity.

    `rows` maps a node's name to its row; `nodes` has None in a hole. `resources` maps a resource to its line in `amounts`
    (the free amounts) and `capacity`. `free` has the free amounts by resource name, `share` the reciprocal of the capacity.
    `used` has the used thousandths of each device of a row. `takes` is true for nodes that are ready and
    open.
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

    def __init__(self, nodes: Iterable[NodeFree] = ()) -> None:
        self.nodes: list[Node | None] = []
        self.rows: dict[str, int] = {}
        self.used: list[Mapping[str, int]] = []
        self.resources: dict[str, int] = {}
        self._holes: list[int] = []
        self._names = {name: NameInterner() for name in ("region", "zone", "pool", "taints")}
        self._labels: dict[str, tuple[Ints, NameInterner]] = {}
        self._domains: dict[str, tuple[Ints, NameInterner]] = {}
        self._whole_devices: dict[DeviceModel, Ints] = {}
        self._room: dict[DeviceModel, Ints] = {}
        self._attributes: dict[str, npt.NDArray[Any]] = {}
        self._amounts: Ints = np.zeros((0, 0), dtype=np.int64)
        self._capacity: Ints = self._amounts
        self._share: Floats = np.zeros((0, 0))
        self._owned_groups = {"amounts", "devices", "facts"}
        """Groups of arrays that no frozen copy shares, and that may therefore be written in place."""
        self.name_count = 0
        """Number of distinct names of places, taints and device models. Translated requirements, and results that depend on
        which device models exist, are valid as long as it does not grow.
        """
        self.changed = ChangeLog()
        """Rows with any change."""
        self.attributes_changed = ChangeLog()
        """Rows whose attributes changed, or that became open or closed for work. Results that depend only on these become
        invalid.
        """
        self._allocate(_ROWS_MIN)
        for node_free in nodes:
            row = self.put(node_free.node)
            taken = [(name, count - node_free.free.get(name, 0)) for name, count in node_free.node.spec.capacity]
            self.post(row, taken, node_free.used)

    def __len__(self) -> int:
        return len(self.nodes)

    # -- read by rules -------------------------------------------------------------------------------------------------------

    @property
    def node_attributes(self) -> int:
        """Cache key of the attributes. Results about columns are not cached by the attributes of one node, so the identity is
        enough.
        """
        return id(self)

    @property
    def regions(self) -> list[str]:
        return self._names["region"].values

    @property
    def zones(self) -> list[str]:
        return self._names["zone"].values

    @property
    def pools(self) -> list[str]:
        return self._names["pool"].values

    @property
    def taint_sets(self) -> list[tuple[Taint, ...]]:
        return self._names["taints"].values

    def labelled(self, expressions: Sequence[NodeExpression]) -> Bools:
        return match_columns(expressions, {term.key: self.label(term.key) for term in expressions}, len(self))

    def label(self, key: str) -> LabelColumn:
        """Return the column of one label key. It is built on first use: nodes have many labels and rules name few."""
        if key not in self._labels:
            self._labels[key] = self._column(lambda node: node.metadata.labels.get(key))
        ids, names = self._labels[key]
        return LabelColumn(ids[: len(self)], names.values)

    def domain(self, key: str) -> tuple[Bools, Ints]:
        ids = self.domains(key).ids
        return ids >= 0, ids

    def domains(self, key: str) -> LabelColumn:
        """Return the column of a topology key: `node`, `region`, `zone` and `pool` are built in, any other key is a label."""
        ids, names = self._domain(key)
        return LabelColumn(ids[: len(self)], names.values)

    def slots(self, key: str) -> Mapping[str, int]:
        """Return the id of each domain of a topology key, by name."""
        return self._domain(key)[1].ids

    def _domain(self, key: str) -> tuple[Ints, NameInterner]:
        if key in ("region", "zone", "pool"):
            return self._attributes[key], self._names[key]
        if key not in self._domains:
            self._domains[key] = self._column(lambda node: domain_of(node, key) or None)
        return self._domains[key]

    # -- updates -------------------------------------------------------------------------------------------------------------

    def put(self, node: Node) -> int:
        """Insert or update a node. Its postings stay, so a node that shrank may have negative free amounts."""
        name = node.metadata.name
        row = self.rows.get(name)
        self._make_writable("facts", "amounts", "devices")
        if row is None:
            row = self.rows[name] = self._new_row()
        old = self.nodes[row]
        self.nodes[row] = node
        self._set_capacity(row, node)
        self._refresh_devices(row)
        took = bool(self.takes[row])
        self.ready[row] = is_ready(node)
        self.open[row] = is_open(node)
        self.takes[row] = self.ready[row] and self.open[row]
        if old is None or took != self.takes[row] or _node_attributes(old) != _node_attributes(node):
            self._write_attributes(row, node)
        self.changed.add(row)
        return row

    def drop(self, name: str) -> None:
        """Remove a node and everything posted on it."""
        self._make_writable("facts", "amounts", "devices")
        row = self.rows.pop(name)
        self.nodes[row], self.used[row] = None, _NO_DEVICES
        self.ready[row] = self.open[row] = self.takes[row] = False
        self.amounts[:, row] = self.capacity[:, row] = 0
        self._share[:, row] = 0
        self._refresh_devices(row)
        for name in self._names:
            self._attributes[name][row] = -1
        for ids, _ in (*self._labels.values(), *self._domains.values()):
            ids[row] = -1
        self._holes.append(row)
        self.changed.add(row)
        self.attributes_changed.add(row)

    def post(self, row: int, pairs: Pairs, devices: Mapping[str, int] = _NO_DEVICES, sign: int = 1) -> None:
        """Take what one holder needs (`sign` 1), or return it (-1)."""
        if "amounts" not in self._owned_groups:
            self._make_writable("amounts")
        for name, count in pairs:
            at = self.resources.get(name)
            if at is None:
                at = self._new_resource(name)
            self.amounts[at, row] -= sign * count
        if devices:
            self._make_writable("devices")
            used = dict(self.used[row])
            for device, share in devices.items():
                used[device] = used.get(device, 0) + sign * share
            self.used[row] = {device: share for device, share in used.items() if share}
            self._refresh_devices(row)
        self.changed.add(row)

    def post_many(self, rows: Ints, counts: Ints, pairs: Pairs) -> None:
        """Take the needs of several equal holders on each of these rows. The rows are distinct and no devices are needed."""
        self._make_writable("amounts")
        for name, count in pairs:
            at = self.resources.get(name)
            if at is None:
                at = self._new_resource(name)
            self.amounts[at, rows] -= counts * count
        self.changed.extend(rows)

    def freeze(self) -> NodeColumns:
        """Return a copy of the columns. Both sides may be written afterwards without affecting the other."""
        copy = NodeColumns.__new__(NodeColumns)
        copy.__dict__.update(self.__dict__)
        copy._labels, copy._domains = self._labels.copy(), self._domains.copy()
        copy.changed, copy.attributes_changed = self.changed.fork(), self.attributes_changed.fork()
        self._owned_groups, copy._owned_groups = set(), set()
        return copy

    # -- arrays ------------------------------------------------------------------------------------------------------------

    def _make_writable(self, *groups: str) -> None:
        for group in groups:
            if group in self._owned_groups:
                continue
            self._owned_groups.add(group)
            match group:
                case "amounts":
                    self._amounts = self._amounts.copy()
                    self.resources = self.resources.copy()
                case "devices":
                    self._whole_devices = {model: column.copy() for model, column in self._whole_devices.items()}
                    self._room = {model: column.copy() for model, column in self._room.items()}
                    self.used = self.used.copy()
                case _:
                    self._attributes = {name: column.copy() for name, column in self._attributes.items()}
                    self._labels = {key: (ids.copy(), names) for key, (ids, names) in self._labels.items()}
                    self._domains = {key: (ids.copy(), names) for key, (ids, names) in self._domains.items()}
                    self._capacity, self._share = self._capacity.copy(), self._share.copy()
                    self.nodes, self.rows, self._holes = self.nodes.copy(), self.rows.copy(), self._holes.copy()
            self._refresh_views()

    def _allocate(self, rows: int) -> None:
        """Grow the arrays to this many rows, keeping their contents."""

        def grown(column: npt.NDArray[Any] | None, kind: Any, fill: int = 0) -> npt.NDArray[Any]:
            array = np.full(rows, fill, dtype=kind)
            if column is not None:
                array[: len(column)] = column
            return array

        facts = self._attributes
        self._attributes = {
            **{name: grown(facts.get(name), np.int64, -1) for name in self._names},
            **{name: grown(facts.get(name), np.bool_) for name in ("ready", "open", "takes")},
        }
        more = (0, 0), (0, rows - self._amounts.shape[1])
        self._amounts, self._capacity = np.pad(self._amounts, more), np.pad(self._capacity, more)
        self._share = np.pad(self._share, more)
        self._whole_devices = {model: grown(column, np.int64) for model, column in self._whole_devices.items()}
        self._room = {model: grown(column, np.int64) for model, column in self._room.items()}
        for columns in (self._labels, self._domains):
            for key, (ids, names) in columns.items():
                columns[key] = grown(ids, np.int64, -1), names
        self._refresh_views()

    def _refresh_views(self) -> None:
        """Update the public views. The arrays have spare rows; rules see only those in use."""
        rows = len(self.nodes)
        self.amounts, self.capacity = self._amounts[:, :rows], self._capacity[:, :rows]
        self.free = {name: self.amounts[at] for name, at in self.resources.items()}
        self.share = {name: self._share[at, :rows] for name, at in self.resources.items()}
        self.whole_devices = {model: column[:rows] for model, column in self._whole_devices.items()}
        self.largest_shares = {model: column[:rows] for model, column in self._room.items()}
        for name, column in self._attributes.items():
            setattr(self, name, column[:rows])

    def _new_row(self) -> int:
        if self._holes:
            return self._holes.pop()
        row = len(self.nodes)
        self.nodes.append(None)
        self.used.append(_NO_DEVICES)
        if row >= self._amounts.shape[1]:
            self._allocate(2 * (row + 1))
        else:
            self._refresh_views()
        return row

    def _new_resource(self, name: str) -> int:
        at = self.resources[name] = len(self.resources)
        self._amounts, self._capacity, self._share = (
            np.concatenate([lines, np.zeros((1, lines.shape[1]), dtype=lines.dtype)])
            for lines in (self._amounts, self._capacity, self._share)
        )
        self._refresh_views()
        return at

    def _set_capacity(self, row: int, node: Node) -> None:
        capacity = dict(node.spec.capacity.pairs)
        for name in capacity:
            if name not in self.resources:
                self._new_resource(name)
        for name, at in self.resources.items():
            now = capacity.get(name, 0)
            self.amounts[at, row] += now - self.capacity[at, row]
            self.capacity[at, row] = now
            self._share[at, row] = 1 / now if now else 0

    def _refresh_devices(self, row: int) -> None:
        node = self.nodes[row]
        if not self._whole_devices and (node is None or not node.spec.devices):
            return
        whole_devices, shares = free_devices(node.spec.devices, self.used[row]) if node is not None else ({}, {})
        new = [model for model in whole_devices if model not in self._whole_devices]
        for model in new:
            for columns in (self._whole_devices, self._room):
                columns[model] = np.zeros(len(self._attributes["ready"]), dtype=np.int64)
        if new:
            self._refresh_views()
            self.name_count += len(new)
        for model, column in self._whole_devices.items():
            column[row], self._room[model][row] = whole_devices.get(model, 0), shares.get(model, 0)

    def _write_attributes(self, row: int, node: Node) -> None:
        spec = node.spec
        for name, value in (("region", spec.region), ("zone", spec.zone), ("pool", spec.pool), ("taints", spec.taints)):
            self._attributes[name][row] = self._names[name].intern(value)
        self.name_count = sum(len(names.values) for names in self._names.values()) + len(self._whole_devices)
        for key, (ids, names) in self._labels.items():
            ids[row] = names.intern(node.metadata.labels.get(key))
        for key, (ids, names) in self._domains.items():
            ids[row] = names.intern(domain_of(node, key) or None)
        self.attributes_changed.add(row)

    def _column(self, value: Any) -> tuple[Ints, NameInterner]:
        names = NameInterner()
        ids = np.full(len(self._attributes["ready"]), -1, dtype=np.int64)
        ids[: len(self)] = [-1 if node is None else names.intern(value(node)) for node in self.nodes]
        return ids, names


def _node_attributes(node: Node) -> tuple[object, ...]:
    """Return all attributes of a node, without its free capacity."""
    spec = node.spec
    return spec.region, spec.zone, spec.pool, spec.taints, node.metadata.labels


class SelectedRows:
    """Some rows of columns as a `fit.NodeView`, possibly repeated. `deducted` is subtracted from the free amounts of each."""

    def __init__(self, columns: NodeColumns, rows: Ints, deducted: Mapping[str, Any] = _NO_DEVICES) -> None:
        self.columns, self.rows, self.deducted = columns, rows, deducted
        self.free = _SelectedColumns(columns.free, rows, deducted)
        self.share: dict[str, Floats] = _SelectedColumns(columns.share, rows, _NO_DEVICES)
        self.whole_devices = _SelectedColumns(columns.whole_devices, rows, deducted)
        self.largest_shares = _SelectedColumns(columns.largest_shares, rows, _NO_DEVICES)

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        """Take the readiness and location columns at these rows, on first use."""
        if name not in ("takes", "ready", "open", "region", "zone", "pool", "taints"):
            raise AttributeError(name)
        column = getattr(self.columns, name).take(self.rows)
        self.__dict__[name] = column
        return column

    @property
    def node_attributes(self) -> int:
        return id(self)

    def labelled(self, expressions: Sequence[NodeExpression]) -> Bools:
        columns = {term.key: self.columns.label(term.key) for term in expressions}
        taken = {key: LabelColumn(column.ids.take(self.rows), column.values) for key, column in columns.items()}
        return match_columns(expressions, taken, len(self.rows))

    def domain(self, key: str) -> tuple[Bools, Ints]:
        ids = self.columns.domains(key).ids.take(self.rows)
        return ids >= 0, ids


class _SelectedColumns(dict[Any, Any]):
    """Columns at some rows, each taken on first use."""

    def __init__(self, columns: Mapping[Any, Any], rows: Ints, deducted: Mapping[Any, Any]) -> None:
        self._columns, self._rows, self._deducted = columns, rows, deducted

    def __missing__(self, name: Any) -> Any:
        taken = self._columns[name][self._rows]
        if name in self._deducted:
            taken -= self._deducted[name]
        self[name] = taken
        return taken

    def get(self, name: Any, default: Any = 0) -> Any:
        return self[name] if name in self._columns else default

    def __iter__(self) -> Iterator[Any]:
        return iter(self._columns)


def translate_requirements(requirements: Requirements, columns: NodeColumns) -> Requirements:
    """Return the same requirements with look-up tables keyed by the ids of these columns."""
    return requirements._replace(
        # A zero-dimensional array avoids the conversion of an int at each use.
        resources=cast(Any, tuple((name, np.asarray(count)) for name, count in requirements.resources)),
        regions=_table(requirements.regions, columns.regions),
        zones=_table(requirements.zones, columns.zones),
        pools=_table(requirements.pools, columns.pools),
        allowed_regions=_table(requirements.allowed_regions, columns.regions),
        allowed_zones=_table(requirements.allowed_zones, columns.zones),
        allowed_pools=_table(requirements.allowed_pools, columns.pools),
        tolerates=_table(requirements.tolerates, columns.taint_sets),
        untolerated_soft=_table(requirements.untolerated_soft, columns.taint_sets),
    )


def _table(answers: Mapping[H, bool], values: Sequence[H]) -> Bools:
    """Return the answers by id. The id -1 of a hole selects the last entry, which is False."""
    return np.array([*(answers[value] for value in values), False], dtype=np.bool_)
