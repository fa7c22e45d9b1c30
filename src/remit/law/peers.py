"""Who is where, counted by topology domain, over columns? No rules here: those are in fit.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from remit.law.columns import Bools, Columns, Ints
from remit.law.fit import STATIC, Ask, Index, carried, mask
from remit.law.labels import domain_of, selects

NODE: Final = "node"
"""The topology key of which every node is a domain of its own."""
_Picks = tuple[str, tuple[str, str] | None]
_NOBODY: Final[Mapping[str, int]] = {}


class ColumnPeers:
    """Who is where, as `fit.Peers` over columns, from how many are in each domain by its name. For asks made `over` those."""

    def __init__(self, columns: Columns, counted: Mapping[Index, Mapping[str, int]]) -> None:
        self._columns = columns
        self._counted = counted
        self._counts: dict[Index, Ints] = {}
        self._totals = {index: sum(by_domain.values()) for index, by_domain in counted.items()}
        self._carried: dict[_Picks, list[Index]] = {}
        self._carriers = self._minded = 0
        self._asked: dict[_Picks, list[Index]] = {}
        self._possible: tuple[Ask, int, Bools] | None = None
        for index in counted:
            self._note(index)

    def counts(self, index: Index) -> Ints:
        """By the id of the domain. Domains in which there is no node (any more) count in the total alone."""
        slots = self._columns.slots(index.key)
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

    def least(self, ask: Ask, index: Index) -> int:
        known, ids = self._columns.domain(index.key)
        found = self.counts(index)[ids[known & self._where(ask)]]
        return int(found.min()) if found.size else 0

    def total(self, index: Index) -> int:
        return self._totals.get(index, 0)

    def shunners(self, ask: Ask) -> Sequence[Index]:
        return _picking(self._carried, ask)

    @property
    def shunned_epoch(self) -> int:
        """Another number whenever other indexes of carriers are known: then who shuns whom may be another."""
        return self._carriers

    @property
    def minded_epoch(self) -> int:
        """Another number whenever other indexes are counted: then what a replica counts in may be another."""
        return self._minded

    def minds(self, ask: Ask) -> tuple[Index, ...]:
        """The indexes, of those that were ever asked about, in which a replica with this ask counts; and what it carries."""
        return (*(index for index in _picking(self._asked, ask) if not index.carriers), *dict.fromkeys(carried(ask)))

    def post(self, ask: Ask, row: int, count: int = 1) -> None:
        """So many replicas with this ask stand on that row from now on; or, below zero, no longer."""
        self.post_in(self.minds(ask), row, count)

    def post_in(self, indexes: Iterable[Index], row: int, count: int) -> None:
        """As `post`, for what is in these indexes."""
        node = self._columns.nodes[row]
        if node is None:
            return
        for index in indexes:
            domain = domain_of(node, index.key)
            if domain:
                self.add(index, domain, count)

    def post_run(self, indexes: Iterable[Index], rows: Ints, counts: Ints) -> None:
        """So many on each of these rows, which are all different."""
        for index in indexes:
            _, ids = self._columns.domain(index.key)
            at = ids[rows]
            known = at >= 0
            by_domain = self._kept(index, int(counts[known].sum()))
            np.add.at(by_domain, at[known], counts[known])
            if index.key == NODE:
                self._columns.changed.extend(rows)

    def add(self, index: Index, domain: str, count: int = 1) -> None:
        """So many more are there, or fewer: a run of placements moves the counts and keeps the columns."""
        counts = self._kept(index, count)
        if (slot := self._columns.slots(index.key).get(domain)) is not None:
            counts[slot] += count
            if index.key == NODE and (row := self._columns.rows.get(domain)) is not None:
                self._columns.changed.add(row)  # who keeps answers by row may keep this one with them

    def _kept(self, index: Index, more: int) -> Ints:
        """Its counts, when so many more are in the total."""
        if index not in self._totals:
            self._note(index)
        self._totals[index] = self.total(index) + more
        return self.counts(index)

    def _enter(self, index: Index, counts: Ints) -> None:
        """From now on it is counted."""
        self._counts[index] = counts
        self._asked.setdefault(_picks(index), []).append(index)
        self._minded += 1

    def _leave(self, index: Index) -> None:
        del self._counts[index]
        self._asked[_picks(index)].remove(index)
        self._minded += 1

    def _leave_all(self) -> None:
        self._counts.clear()
        self._asked.clear()
        self._minded += 1

    def _note(self, index: Index) -> None:
        if index.carriers:
            self._carried.setdefault(_picks(index), []).append(index)
            self._carriers += 1

    def _where(self, ask: Ask) -> Bools:
        """Where it could be placed at all. Kept for the last ask only, by identity: an ask that holds arrays has no equal."""
        kept, stood = self._possible, self._columns.restood.count
        if kept is None or kept[0] is not ask or kept[1] != stood:
            kept = self._possible = ask, stood, mask(ask, self._columns, self, STATIC)
        return kept[2]


def _picks(index: Index) -> _Picks:
    """What a replica must at least have, to be picked: looked up by that, an index is not asked whether it picks strangers."""
    return index.tenant, index.selector[0] if index.selector else None


def _picking(indexes: Mapping[_Picks, Sequence[Index]], ask: Ask) -> list[Index]:
    keys: list[tuple[str, str] | None] = [None, *ask.labels.items()]
    return [index for key in keys for index in indexes.get((ask.tenant, key), ()) if selects(index.selector, ask.labels)]
