"""Who is where, counted by topology domain, over columns? No rules here: those are in fit.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from remit.law.columns import Bools, Columns, Ints, domain_of
from remit.law.fit import STATIC, Ask, Index, carried, mask
from remit.law.labels import selects

NODE: Final = "node"
"""The topology key of which every node is a domain of its own."""
_NOBODY: Final[Mapping[str, int]] = {}


class ColumnPeers:
    """Who is where, as `fit.Peers` over columns, from how many are in each domain by its name. For asks made `over` those."""

    def __init__(self, columns: Columns, counted: Mapping[Index, Mapping[str, int]]) -> None:
        self._columns = columns
        self._counted = counted
        self._counts: dict[Index, Ints] = {}
        self._totals = {index: sum(by_domain.values()) for index, by_domain in counted.items()}
        self._carried: dict[str, list[Index]] = {}
        self.carriers = 0
        """How many indexes of carriers there are: who shuns whom holds as long as it does not grow."""
        self._picked: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[int, list[Index]]] = {}
        self._possible: tuple[Ask, int, Bools] | None = None
        for index in counted:
            self._note(index)

    def counts(self, index: Index) -> Ints:
        """By the id of the domain. Domains in which there is no node (any more) count in the total alone."""
        slots = self._columns.slots(index.key)
        found = self._counts.get(index)
        if found is None:
            self._counts[index] = found = np.zeros(len(slots) + 1, dtype=np.int64)
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
        return [index for index in self._carried.get(ask.tenant, ()) if selects(index.selector, ask.labels)]

    def minds(self, ask: Ask) -> list[Index]:
        """The indexes, of those that were ever asked about, in which a replica with this ask counts."""
        key = ask.tenant, tuple(sorted(ask.labels.items()))
        known, found = self._picked.get(key, (-1, []))
        if known != len(self._counts):
            own = carried(ask)
            found = [
                index
                for index in self._counts
                if index.tenant == ask.tenant and (index in own if index.carriers else selects(index.selector, ask.labels))
            ]
            self._picked[key] = len(self._counts), found
        return found

    def post(self, ask: Ask, row: int, count: int = 1) -> None:
        """So many replicas with this ask stand on that row from now on; or, below zero, no longer."""
        node = self._columns.nodes[row]
        if node is None or not (self._counts or ask.anti):
            return
        for index in dict.fromkeys((*self.minds(ask), *carried(ask))):
            domain = domain_of(node, index.key)
            if domain:
                self.add(index, domain, count)

    def add(self, index: Index, domain: str, count: int = 1) -> None:
        """So many more are there, or fewer: a run of placements moves the counts and keeps the columns."""
        counts = self.counts(index)
        if index not in self._totals:
            self._note(index)
        self._totals[index] = self.total(index) + count
        if (slot := self._columns.slots(index.key).get(domain)) is not None:
            counts[slot] += count
            if index.key == NODE and (row := self._columns.rows.get(domain)) is not None:
                self._columns.changed.add(row)  # who keeps answers by row may keep this one with them

    def _note(self, index: Index) -> None:
        if index.carriers:
            self._carried.setdefault(index.tenant, []).append(index)
            self.carriers += 1

    def _where(self, ask: Ask) -> Bools:
        """Where it could be placed at all. Kept for the last ask only, by identity: an ask that holds arrays has no equal."""
        kept, stood = self._possible, self._columns.restood.count
        if kept is None or kept[0] is not ask or kept[1] != stood:
            kept = self._possible = ask, stood, mask(ask, self._columns, self, STATIC)
        return kept[2]
