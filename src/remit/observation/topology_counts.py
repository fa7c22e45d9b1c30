"""Replica counts per topology domain, for spread and (anti-)affinity.

No rules here: those are in fit.py.

Counts by topology domain, as the rules read them; what the rules are is in law/fit.py.

A count is made from whole columns when it is first asked for, and kept up from then on, by every replica that comes to hold
room or lets go of it, assumed ones included. When a node changes what it is, counts are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from remit.law.fit import STATIC_RULES, Requirements, PeerIndex, owned_anti_affinity, mask
from remit.law.selectors import domain_of, selects
from remit.observation.node_columns import Bools, Columns, Ints
from remit.observation.shapes import Shapes

NODE: Final = "node"
"""The topology key of which every node is a domain of its own."""
_Picks = tuple[str, tuple[str, str] | None]
_NOBODY: Final[Mapping[str, int]] = {}


class ColumnPeers:
    """Who is where, as `fit.Peers` over columns, from how many are in each domain by its name. For asks made `over` those."""

    def __init__(self, columns: Columns, counted: Mapping[PeerIndex, Mapping[str, int]]) -> None:
        self._columns = columns
        self._counted = counted
        self._counts: dict[PeerIndex, Ints] = {}
        self._totals = {index: sum(by_domain.values()) for index, by_domain in counted.items()}
        self._carried: dict[_Picks, list[PeerIndex]] = {}
        self._carriers = self._minded = 0
        self._asked: dict[_Picks, list[PeerIndex]] = {}
        self._possible: tuple[Requirements, int, Bools] | None = None
        for index in counted:
            self._note(index)

    def counts(self, index: PeerIndex) -> Ints:
        """By the id of the domain. Domains in which there is no node (any more) count in the total alone."""
        slots = self._columns.slots(index.topology_key)
        found = self._counts.get(index)
        if found is None:
            found = np.zeros(len(slots) + 1, dtype=np.int64)
            self._enter(index, found)
            for domain, count in self._counted.get(index, _NOBODY).items():
                if domain in slots:
                    found[slots[domain]] = count
        elif len(found) <= len(slots):
            # New domains: each gets its slot, and "no domain" stays last, where it counts nobody.
            self._counts[index] = found = np.concatenate([found[:-1], np.zeros(len(slots) + 2 - len(found), dtype=np.int64)])
        return found

    def min_count(self, ask: Requirements, index: PeerIndex) -> int:
        known, ids = self._columns.domain(index.topology_key)
        found = self.counts(index)[ids[known & self._where(ask)]]
        return int(found.min()) if found.size else 0

    def total(self, index: PeerIndex) -> int:
        return self._totals.get(index, 0)

    def anti_affinity_owners(self, ask: Requirements) -> Sequence[PeerIndex]:
        return _picking(self._carried, ask)

    @property
    def shunned_epoch(self) -> int:
        """Another number whenever other indexes of carriers are known: then who shuns whom may be another."""
        return self._carriers

    @property
    def minded_epoch(self) -> int:
        """Another number whenever other indexes are counted: then what a replica counts in may be another."""
        return self._minded

    def minds(self, ask: Requirements) -> tuple[PeerIndex, ...]:
        """The indexes, of those that were ever asked about, in which a replica with this ask counts; and what it carries."""
        return (*(index for index in _picking(self._asked, ask) if not index.owners), *dict.fromkeys(owned_anti_affinity(ask)))

    def post(self, ask: Requirements, row: int, count: int = 1) -> None:
        """So many replicas with this ask stand on that row from now on; or, below zero, no longer."""
        self.post_in(self.minds(ask), row, count)

    def post_in(self, indexes: Iterable[PeerIndex], row: int, count: int) -> None:
        """As `post`, for what is in these indexes."""
        node = self._columns.nodes[row]
        if node is None:
            return
        for index in indexes:
            domain = domain_of(node, index.topology_key)
            if domain:
                self.add(index, domain, count)

    def post_run(self, indexes: Iterable[PeerIndex], rows: Ints, counts: Ints) -> None:
        """So many on each of these rows, which are all different."""
        for index in indexes:
            _, ids = self._columns.domain(index.topology_key)
            at = ids[rows]
            known = at >= 0
            by_domain = self._kept(index, int(counts[known].sum()))
            np.add.at(by_domain, at[known], counts[known])
            if index.topology_key == NODE:
                self._columns.changed.extend(rows)

    def add(self, index: PeerIndex, domain: str, count: int = 1) -> None:
        """So many more are there, or fewer: a run of placements moves the counts and keeps the columns."""
        counts = self._kept(index, count)
        if (slot := self._columns.slots(index.topology_key).get(domain)) is not None:
            counts[slot] += count
            if index.topology_key == NODE and (row := self._columns.rows.get(domain)) is not None:
                self._columns.changed.add(row)  # who keeps answers by row may keep this one with them

    def _kept(self, index: PeerIndex, more: int) -> Ints:
        """Its counts, when so many more are in the total."""
        if index not in self._totals:
            self._note(index)
        self._totals[index] = self.total(index) + more
        return self.counts(index)

    def _enter(self, index: PeerIndex, counts: Ints) -> None:
        """From now on it is counted."""
        self._counts[index] = counts
        self._asked.setdefault(_picks(index), []).append(index)
        self._minded += 1

    def _leave(self, index: PeerIndex) -> None:
        del self._counts[index]
        self._asked[_picks(index)].remove(index)
        self._minded += 1

    def _leave_all(self) -> None:
        self._counts.clear()
        self._asked.clear()
        self._minded += 1

    def _note(self, index: PeerIndex) -> None:
        if index.owners:
            self._carried.setdefault(_picks(index), []).append(index)
            self._carriers += 1

    def _where(self, ask: Requirements) -> Bools:
        """Where it could be placed at all. Kept for the last ask only, by identity: an ask that holds arrays has no equal."""
        kept, stood = self._possible, self._columns.restood.count
        if kept is None or kept[0] is not ask or kept[1] != stood:
            kept = self._possible = ask, stood, mask(ask, self._columns, self, STATIC_RULES)
        return kept[2]


def _picks(index: PeerIndex) -> _Picks:
    """What a replica must at least have, to be picked: looked up by that, an index is not asked whether it picks strangers."""
    return index.tenant, index.selector[0] if index.selector else None


def _picking(indexes: Mapping[_Picks, Sequence[PeerIndex]], ask: Requirements) -> list[PeerIndex]:
    keys: list[tuple[str, str] | None] = [None, *ask.labels.items()]
    return [index for key in keys for index in indexes.get((ask.tenant, key), ()) if selects(index.selector, ask.labels)]


INDEXES_MAX: Final = 4_096
"""How many counts are kept up; the one that was made first goes first, and is made again if it is asked for."""

Spots = Callable[[npt.NDArray[np.intp]], Ints]
"""The rows on which replicas of these generations hold room, one entry each."""


class SeenPeers(ColumnPeers):
    """`fit.Peers` over the columns of a view. For asks made `over` those."""

    def __init__(self, columns: Columns, shapes: Shapes, spots: Spots) -> None:
        super().__init__(columns, {})
        self._shapes = shapes
        self._spots = spots
        self._stood = columns.restood.count
        self._of: dict[int, tuple[PeerIndex, ...]] = {}
        """By generation, which of the counts kept are to be moved with its replicas."""
        self._tenants: set[str] = set()

    @property
    def counted(self) -> Mapping[PeerIndex, Ints]:
        """The counts that are kept up: always the same mapping, empty while nobody has asked."""
        return self._counts

    def counts(self, index: PeerIndex) -> Ints:
        if self._stood != self._columns.restood.count:
            self.clear()
        if index not in self._counts:
            self._make(index)
        return super().counts(index)

    def total(self, index: PeerIndex) -> int:
        self.counts(index)
        return super().total(index)

    @property
    def shunned_epoch(self) -> int:
        return self._shapes.carried_epoch

    def anti_affinity_owners(self, ask: Requirements) -> Sequence[PeerIndex]:
        return [index for index in self._shapes.carriers(ask.tenant) if selects(index.selector, ask.labels)]

    def move(self, generation: int, rows: Iterable[int], sign: int) -> None:
        """A replica of this generation came to hold room on each of these rows, or let go of it."""
        if not self._counts or self._shapes.tenant_of(generation) not in self._tenants:
            return
        found = self._of.get(generation)
        if found is None:
            shapes = self._shapes
            found = self._of[generation] = tuple(i for i in self._counts if shapes.counts_in(generation, i))
        for index in found:
            ids = self._columns.domains(index.topology_key).ids
            counts = super().counts(index)
            for row in rows:
                self._totals[index] += sign
                if ids[row] >= 0:
                    counts[ids[row]] += sign
                    if index.topology_key == NODE:
                        self._columns.changed.add(row)

    def clear(self) -> None:
        """Everything is counted anew when it is next asked for."""
        self._stood = self._columns.restood.count
        self._leave_all()
        self._totals.clear()
        self._of.clear()
        self._tenants.clear()

    def reshaped(self) -> None:
        """A generation came, went, or came to another shape."""
        self._of.clear()

    def _make(self, index: PeerIndex) -> None:
        if len(self._counts) >= INDEXES_MAX:
            first = next(iter(self._counts))
            self._leave(first)
            del self._totals[first]
        rows = self._spots(self._shapes.picked(index))
        ids = self._columns.domains(index.topology_key).ids[rows]
        size = len(self._columns.slots(index.topology_key))
        # One slot more, for "no domain", which counts nobody.
        self._enter(index, np.append(np.bincount(ids[ids >= 0], minlength=size), 0))
        self._totals[index] = len(rows)
        self._tenants.add(index.tenant)
        self._of.clear()
