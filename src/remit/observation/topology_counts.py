"""Replica counts per topology domain, for spread and (anti-)affinity.

The rules that read these counts are in law/fit.py.

A count is built from complete columns when it is first needed and updated from then on, by every replica that takes or
releases capacity, including assumed bindings. Counts are rebuilt when a node's attributes change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from remit.law.fit import STATIC_RULES, PeerIndex, Requirements, mask, owned_anti_affinity
from remit.law.selectors import domain_of, selects
from remit.observation.node_columns import Bools, Ints, NodeColumns
from remit.observation.shapes import ShapeTable

NODE: Final = "node"
"""The topology key for which every node is its own domain."""
_LookupKey = tuple[str, tuple[str, str] | None]
_NO_COUNTS: Final[Mapping[str, int]] = {}


class ColumnPeerCounts:
    """`fit.PeerCounts` over columns, initialized from counts by domain name. For requirements translated to these columns."""

    def __init__(self, columns: NodeColumns, counted: Mapping[PeerIndex, Mapping[str, int]]) -> None:
        self._columns = columns
        self._counted = counted
        self._counts: dict[PeerIndex, Ints] = {}
        self._totals = {index: sum(by_domain.values()) for index, by_domain in counted.items()}
        self._anti_affinity: dict[_LookupKey, list[PeerIndex]] = {}
        self._anti_affinity_epoch = self._indexes_epoch = 0
        self._tracked: dict[_LookupKey, list[PeerIndex]] = {}
        self._feasible: tuple[Requirements, int, Bools] | None = None
        for index in counted:
            self._add_anti_affinity(index)

    def counts(self, index: PeerIndex) -> Ints:
        """Return the counts by domain id. Domains without a node count only in the total."""
        slots = self._columns.slots(index.topology_key)
        counts = self._counts.get(index)
        if counts is None:
            counts = np.zeros(len(slots) + 1, dtype=np.int64)
            self._track(index, counts)
            for domain, count in self._counted.get(index, _NO_COUNTS).items():
                if domain in slots:
                    counts[slots[domain]] = count
        elif len(counts) <= len(slots):
            # New domains: each gets an entry, and "no domain" stays last with a count of zero.
            self._counts[index] = counts = np.concatenate([counts[:-1], np.zeros(len(slots) + 2 - len(counts), dtype=np.int64)])
        return counts

    def min_count(self, requirements: Requirements, index: PeerIndex) -> int:
        known, ids = self._columns.domain(index.topology_key)
        counts = self.counts(index)[ids[known & self._feasible_rows(requirements)]]
        return int(counts.min()) if counts.size else 0

    def total(self, index: PeerIndex) -> int:
        return self._totals.get(index, 0)

    def anti_affinity_owners(self, requirements: Requirements) -> Sequence[PeerIndex]:
        return _matching_indexes(self._anti_affinity, requirements)

    @property
    def anti_affinity_epoch(self) -> int:
        """Changes whenever the set of anti-affinity indexes changes; cached owners are then invalid."""
        return self._anti_affinity_epoch

    @property
    def indexes_epoch(self) -> int:
        """Changes whenever the set of counted indexes changes; cached results of `indexes_of` are then invalid."""
        return self._indexes_epoch

    def indexes_of(self, requirements: Requirements) -> tuple[PeerIndex, ...]:
        """Return the tracked indexes in which a replica with these requirements counts, and its own anti-affinity indexes."""
        return (
            *(index for index in _matching_indexes(self._tracked, requirements) if not index.owners),
            *dict.fromkeys(owned_anti_affinity(requirements)),
        )

    def post(self, requirements: Requirements, row: int, count: int = 1) -> None:
        """Add `count` replicas with these requirements on a row; a negative count removes them."""
        self.post_in(self.indexes_of(requirements), row, count)

    def post_in(self, indexes: Iterable[PeerIndex], row: int, count: int) -> None:
        """Like `post`, for given indexes."""
        node = self._columns.nodes[row]
        if node is None:
            return
        for index in indexes:
            domain = domain_of(node, index.topology_key)
            if domain:
                self.add(index, domain, count)

    def post_many(self, indexes: Iterable[PeerIndex], rows: Ints, counts: Ints) -> None:
        """Add replicas on several distinct rows, `counts` on each."""
        for index in indexes:
            _, ids = self._columns.domain(index.topology_key)
            at = ids[rows]
            known = at >= 0
            by_domain = self._add_to_total(index, int(counts[known].sum()))
            np.add.at(by_domain, at[known], counts[known])
            if index.topology_key == NODE:
                self._columns.changed.extend(rows)

    def add(self, index: PeerIndex, domain: str, count: int = 1) -> None:
        """Add to the count of one domain."""
        counts = self._add_to_total(index, count)
        if (slot := self._columns.slots(index.topology_key).get(domain)) is not None:
            counts[slot] += count
            if index.topology_key == NODE and (row := self._columns.rows.get(domain)) is not None:
                self._columns.changed.add(row)  # cached results per row may depend on this count

    def _add_to_total(self, index: PeerIndex, more: int) -> Ints:
        """Add to the total of an index and return its counts."""
        if index not in self._totals:
            self._add_anti_affinity(index)
        self._totals[index] = self.total(index) + more
        return self.counts(index)

    def _track(self, index: PeerIndex, counts: Ints) -> None:
        """Start tracking an index."""
        self._counts[index] = counts
        self._tracked.setdefault(_lookup_key(index), []).append(index)
        self._indexes_epoch += 1

    def _untrack(self, index: PeerIndex) -> None:
        del self._counts[index]
        self._tracked[_lookup_key(index)].remove(index)
        self._indexes_epoch += 1

    def _untrack_all(self) -> None:
        self._counts.clear()
        self._tracked.clear()
        self._indexes_epoch += 1

    def _add_anti_affinity(self, index: PeerIndex) -> None:
        if index.owners:
            self._anti_affinity.setdefault(_lookup_key(index), []).append(index)
            self._anti_affinity_epoch += 1

    def _feasible_rows(self, requirements: Requirements) -> Bools:
        """Return the rows on which the replica could be placed, ignoring counts and free capacity.

        Cached for the last requirements only, compared by identity, because requirements that contain arrays cannot be
        compared.
        """
        cached, version = self._feasible, self._columns.attributes_changed.count
        if cached is None or cached[0] is not requirements or cached[1] != version:
            cached = self._feasible = requirements, version, mask(requirements, self._columns, self, STATIC_RULES)
        return cached[2]


def _lookup_key(index: PeerIndex) -> _LookupKey:
    """Return the tenant and first label pair of an index. Looking indexes up by it avoids testing unrelated selectors."""
    return index.tenant, index.selector[0] if index.selector else None


def _matching_indexes(indexes: Mapping[_LookupKey, Sequence[PeerIndex]], requirements: Requirements) -> list[PeerIndex]:
    keys: list[tuple[str, str] | None] = [None, *requirements.labels.items()]
    return [
        index
        for key in keys
        for index in indexes.get((requirements.tenant, key), ())
        if selects(index.selector, requirements.labels)
    ]


INDEXES_MAX: Final = 4_096
"""Maximum number of tracked indexes. The oldest is dropped first, and rebuilt when it is needed again."""

RowsHolding = Callable[[npt.NDArray[np.intp]], Ints]
"""Returns the nodes, as rows of the columns, on which replicas of these generations hold capacity: one entry per replica."""


class ViewPeerCounts(ColumnPeerCounts):
    """`fit.PeerCounts` over the columns of a view. For requirements translated to these columns."""

    def __init__(self, columns: NodeColumns, shapes: ShapeTable, rows_holding: RowsHolding) -> None:
        super().__init__(columns, {})
        self._shapes = shapes
        self._rows_holding = rows_holding
        self._attributes_version = columns.attributes_changed.count
        self._indexes: dict[int, tuple[PeerIndex, ...]] = {}
        """The tracked indexes in which replicas of a generation count, by generation."""
        self._tenants: set[str] = set()

    @property
    def counted(self) -> Mapping[PeerIndex, Ints]:
        """The tracked counts: always the same mapping object, empty until a count is first needed."""
        return self._counts

    def counts(self, index: PeerIndex) -> Ints:
        if self._attributes_version != self._columns.attributes_changed.count:
            self.clear()
        if index not in self._counts:
            self._build(index)
        return super().counts(index)

    def total(self, index: PeerIndex) -> int:
        self.counts(index)
        return super().total(index)

    @property
    def anti_affinity_epoch(self) -> int:
        return self._shapes.anti_affinity_epoch

    def anti_affinity_owners(self, requirements: Requirements) -> Sequence[PeerIndex]:
        return [
            index
            for index in self._shapes.anti_affinity_of(requirements.tenant)
            if selects(index.selector, requirements.labels)
        ]

    def move(self, generation: int, rows: Iterable[int], sign: int) -> None:
        """Count replicas of a generation that took capacity on these rows (`sign` 1), or released it (-1)."""
        if not self._counts or self._shapes.tenant_of(generation) not in self._tenants:
            return
        indexes = self._indexes.get(generation)
        if indexes is None:
            shapes = self._shapes
            indexes = self._indexes[generation] = tuple(i for i in self._counts if shapes.counts_in(generation, i))
        for index in indexes:
            ids = self._columns.domains(index.topology_key).ids
            counts = super().counts(index)
            for row in rows:
                self._totals[index] += sign
                if ids[row] >= 0:
                    counts[ids[row]] += sign
                    if index.topology_key == NODE:
                        self._columns.changed.add(row)

    def clear(self) -> None:
        """Drop all counts; each is rebuilt when it is next needed."""
        self._attributes_version = self._columns.attributes_changed.count
        self._untrack_all()
        self._totals.clear()
        self._indexes.clear()
        self._tenants.clear()

    def on_reshaped(self) -> None:
        """Reset the cached indexes per generation, after a generation was added, removed or moved to another shape."""
        self._indexes.clear()

    def _build(self, index: PeerIndex) -> None:
        if len(self._counts) >= INDEXES_MAX:
            first = next(iter(self._counts))
            self._untrack(first)
            del self._totals[first]
        rows = self._rows_holding(self._shapes.generations_in(index))
        ids = self._columns.domains(index.topology_key).ids[rows]
        size = len(self._columns.slots(index.topology_key))
        # One extra entry for "no domain", which stays zero.
        self._track(index, np.append(np.bincount(ids[ids >= 0], minlength=size), 0))
        self._totals[index] = len(rows)
        self._tenants.add(index.tenant)
        self._indexes.clear()
