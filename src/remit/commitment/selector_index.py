"""Finds the (anti-)affinity and spread terms that select a replica, by label.

Values by index, found from either side. Nothing is counted here.

A tenant may have as many terms as workloads. Whoever is bound is looked up by its labels, and is not held against each term.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from remit.law.fit import Ask, Index, carried
from remit.law.selectors import selects

V = TypeVar("V")


class Indexes(Generic[V]):
    """One value an index; an index is also found by the first pair of its selector, which is never empty."""

    __slots__ = ("_by_pair", "values")

    def __init__(self) -> None:
        self.values: dict[Index, V] = {}
        self._by_pair: dict[tuple[str, tuple[str, str]], dict[Index, None]] = {}

    def __bool__(self) -> bool:
        return bool(self.values)

    def get(self, index: Index) -> V | None:
        return self.values.get(index)

    def put(self, index: Index, value: V) -> None:
        if index not in self.values:
            self._by_pair.setdefault((index.tenant, index.selector[0]), {})[index] = None
        self.values[index] = value

    def drop(self, index: Index) -> None:
        del self.values[index]
        pair = index.tenant, index.selector[0]
        del self._by_pair[pair][index]
        if not self._by_pair[pair]:
            del self._by_pair[pair]

    def clear(self) -> None:
        self.values.clear()
        self._by_pair.clear()

    def copy(self) -> Indexes[V]:
        other = Indexes[V]()
        other.values = self.values.copy()
        other._by_pair = {pair: indexes.copy() for pair, indexes in self._by_pair.items()}
        return other

    def picking(self, ask: Ask) -> list[Index]:
        """Those whose selector picks a replica with this ask."""
        if not self.values:
            return []
        tenant, labels, by_pair = ask.tenant, ask.labels, self._by_pair
        return [
            index
            for pair in labels.items()
            for index in by_pair.get((tenant, pair), ())
            if len(index.selector) == 1 or selects(index.selector, labels)
        ]

    def counting(self, ask: Ask) -> list[Index]:
        """Those in which a replica with this ask counts: see `picks`."""
        if not self.values:
            return []
        found = [index for index in self.picking(ask) if not index.carriers]
        if ask.anti:
            found += [index for index in dict.fromkeys(carried(ask)) if index in self.values]
        return found


def picks(index: Index, ask: Ask) -> bool:
    """Does a replica with this ask, of the index's tenant, count in the index?"""
    return index in carried(ask) if index.carriers else selects(index.selector, ask.labels)
