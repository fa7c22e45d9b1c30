"""How do many nodes look as one `Site`, a column for each thing that a rule asks of them? No rules here: those are in fit.py.

A column has one entry a node, in the order given. What is a number or a bool stands in it as such. What is a name (a region,
a label's value, a whole set of taints) stands there as an id, an index into its distinct values, so that a rule judges each
distinct value once and spreads the answers: `over` does that for the look-up tables of an `Ask`. The id of what is absent is
-1, and tables by domain have one slot more than there are values, so that -1 finds "no domain" in the last.

Amounts are int64: model/quantity.py refuses what would not fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from remit.law.fit import STATIC, Ask, Index, Model, devices_left, mask
from remit.law.labels import LabelColumn, match_columns, selects
from remit.model.kinds import Node, NodeExpression, NodeHealth

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
H = TypeVar("H", bound=Hashable)
_NOBODY: Final[Mapping[str, int]] = {}


class Left(NamedTuple):
    """A node and what is left of it: free amounts by resource (what is in no capacity is not looked at); thousandths used of
    each device, by its name.
    """

    node: Node
    free: Mapping[str, int]
    used: Mapping[str, int]


class Columns:
    """Nodes as a `fit.Site`. What is left of one may be renewed in place; when it changes what it is, make new columns."""

    free: Mapping[str, Ints]
    whole: Mapping[Model, Ints]
    room: Mapping[Model, Ints]

    def __init__(self, left: Sequence[Left]) -> None:
        self.nodes = tuple(one.node for one in left)
        specs = [node.spec for node in self.nodes]
        devices = [devices_left(one.node.spec.devices, one.used) for one in left]
        # Capacity names the columns: a resource that nobody has left now must have one to be freed into.
        self.free = _by_name([one.free for one in left], (name for spec in specs for name, _ in spec.capacity))
        self.whole = _by_name([whole for whole, _ in devices], (model for whole, _ in devices for model in whole))
        self.room = _by_name([room for _, room in devices], self.whole)
        self.ready = np.array([_ready(node) for node in self.nodes], dtype=np.bool_)
        self.open = np.array([_open(node) for node in self.nodes], dtype=np.bool_)
        self.region, self.regions = _ids(spec.region for spec in specs)
        self.zone, self.zones = _ids(spec.zone for spec in specs)
        self.pool, self.pools = _ids(spec.pool for spec in specs)
        self.taints, self.taint_sets = _ids(spec.taints for spec in specs)
        self._labels: dict[str, LabelColumn] = {}
        self._domains: dict[str, LabelColumn] = {
            "region": LabelColumn(self.region, self.regions),
            "zone": LabelColumn(self.zone, self.zones),
            "pool": LabelColumn(self.pool, self.pools),
        }
        self._slots: dict[str, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def standing(self) -> int:
        """Answers about whole columns are never remembered by what one node is; the object itself will do."""
        return id(self)

    def labelled(self, wanted: Sequence[NodeExpression]) -> Bools:
        return match_columns(wanted, {one.key: self.label(one.key) for one in wanted}, len(self))

    def label(self, key: str) -> LabelColumn:
        """The column of one label key, made when it is first asked for: nodes have many labels and rules name few."""
        if key not in self._labels:
            self._labels[key] = LabelColumn(*_ids(node.metadata.labels.get(key) for node in self.nodes))
        return self._labels[key]

    def domain(self, key: str) -> tuple[Bools, Ints]:
        ids = self.domains(key).ids
        return ids >= 0, ids

    def domains(self, key: str) -> LabelColumn:
        """The column of a topology key: `node`, `region`, `zone` and `pool` are the node's own, any other is a label."""
        if key not in self._domains:
            named = (n.metadata.name if key == "node" else n.metadata.labels.get(key) for n in self.nodes)
            self._domains[key] = LabelColumn(*_ids(name or None for name in named))
        return self._domains[key]

    def slots(self, key: str) -> Mapping[str, int]:
        """The id of each domain of a topology key, by its name."""
        if key not in self._slots:
            self._slots[key] = {value: slot for slot, value in enumerate(self.domains(key).values)}
        return self._slots[key]

    def renew(self, row: int, left: Left) -> None:
        """Write anew what is left of one node, and whether it is ready and open. Its labels, taints and place stay."""
        whole, room = devices_left(left.node.spec.devices, left.used)
        for name, column in self.free.items():
            column[row] = left.free.get(name, 0)
        for model, column in self.whole.items():
            column[row] = whole.get(model, 0)
            self.room[model][row] = room.get(model, 0)
        self.ready[row], self.open[row] = _ready(left.node), _open(left.node)


def over(ask: Ask, columns: Columns) -> Ask:
    """The same ask with its look-up tables keyed by the ids of these columns."""
    return ask._replace(
        regions=_table(ask.regions, columns.regions),
        zones=_table(ask.zones, columns.zones),
        pools=_table(ask.pools, columns.pools),
        allowed_regions=_table(ask.allowed_regions, columns.regions),
        allowed_zones=_table(ask.allowed_zones, columns.zones),
        allowed_pools=_table(ask.allowed_pools, columns.pools),
        tolerates=_table(ask.tolerates, columns.taint_sets),
    )


class ColumnPeers:
    """Who is where, as `fit.Peers` over columns, from how many are in each domain by its name. For asks made `over` those."""

    def __init__(self, columns: Columns, counted: Mapping[Index, Mapping[str, int]]) -> None:
        self._columns = columns
        self._counted = counted
        self._counts: dict[Index, Ints] = {}
        self._totals = {index: sum(by_domain.values()) for index, by_domain in counted.items()}
        self._carried: dict[str, list[Index]] = {}
        self._possible: tuple[Ask, Bools] | None = None
        for index in counted:
            if index.carriers:
                self._carried.setdefault(index.tenant, []).append(index)

    def counts(self, index: Index) -> Ints:
        """By the id of the domain. Domains in which there is no node (any more) count in the total alone."""
        if index not in self._counts:
            slots = self._columns.slots(index.key)
            self._counts[index] = made = np.zeros(len(slots) + 1, dtype=np.int64)
            for domain, count in self._counted.get(index, _NOBODY).items():
                if domain in slots:
                    made[slots[domain]] = count
        return self._counts[index]

    def least(self, ask: Ask, index: Index) -> int:
        known, ids = self._columns.domain(index.key)
        found = self.counts(index)[ids[known & self._where(ask)]]
        return int(found.min()) if found.size else 0

    def total(self, index: Index) -> int:
        return self._totals.get(index, 0)

    def shunners(self, ask: Ask) -> Sequence[Index]:
        return [index for index in self._carried.get(ask.tenant, ()) if selects(index.selector, ask.labels)]

    def add(self, index: Index, domain: str, count: int = 1) -> None:
        """So many more are there, or fewer: a run of placements moves the counts and keeps the columns."""
        counts = self.counts(index)
        if index.carriers and index not in self._carried.setdefault(index.tenant, []):
            self._carried[index.tenant].append(index)
        self._totals[index] = self.total(index) + count
        if (slot := self._columns.slots(index.key).get(domain)) is not None:
            counts[slot] += count

    def _where(self, ask: Ask) -> Bools:
        """Where it could be placed at all. Kept for the last ask only, by identity: an ask that holds arrays has no equal."""
        if self._possible is None or self._possible[0] is not ask:
            self._possible = ask, mask(ask, self._columns, self, STATIC)
        return self._possible[1]


def _ready(node: Node) -> bool:
    return node.status.health is NodeHealth.READY


def _open(node: Node) -> bool:
    return not (node.spec.unschedulable or node.spec.draining)


def _by_name(rows: Sequence[Mapping[H, int]], names: Iterable[H]) -> dict[H, Ints]:
    """A column for each name; a row without it has none of it."""
    return {name: np.array([row.get(name, 0) for row in rows], dtype=np.int64) for name in dict.fromkeys(names)}


def _ids(values: Iterable[H | None]) -> tuple[Ints, list[H]]:
    """Ids into the distinct values, in the order of their first appearance; -1 for None."""
    seen: dict[H, int] = {}
    ids = [-1 if value is None else seen.setdefault(value, len(seen)) for value in values]
    return np.array(ids, dtype=np.int64), list(seen)


def _table(answers: Mapping[H, bool], values: Sequence[H]) -> Bools:
    return np.array([answers[value] for value in values], dtype=np.bool_)
