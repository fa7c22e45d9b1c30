"""Index of (anti-)affinity and spread terms by label, to find those that select a replica.

A tenant may have as many terms as workloads. Looking up the replica's labels avoids comparing the replica with every term.
Counts per term are kept by the caller.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from remit.law.fit import PeerIndex, Requirements, owned_anti_affinity
from remit.law.selectors import selects

V = TypeVar("V")


class SelectorIndex(Generic[V]):
    """Maps terms to values. Each term is also indexed by the first label pair of its selector, which is never empty."""

    __slots__ = ("_by_pair", "values")

    def __init__(self) -> None:
        self.values: dict[PeerIndex, V] = {}
        self._by_pair: dict[tuple[str, tuple[str, str]], dict[PeerIndex, None]] = {}

    def __bool__(self) -> bool:
        return bool(self.values)

    def get(self, index: PeerIndex) -> V | None:
        return self.values.get(index)

    def put(self, index: PeerIndex, value: V) -> None:
        if index not in self.values:
            self._by_pair.setdefault((index.tenant, index.selector[0]), {})[index] = None
        self.values[index] = value

    def drop(self, index: PeerIndex) -> None:
        del self.values[index]
        pair = index.tenant, index.selector[0]
        del self._by_pair[pair][index]
        if not self._by_pair[pair]:
            del self._by_pair[pair]

    def clear(self) -> None:
        self.values.clear()
        self._by_pair.clear()

    def copy(self) -> SelectorIndex[V]:
        other = SelectorIndex[V]()
        other.values = self.values.copy()
        other._by_pair = {pair: indexes.copy() for pair, indexes in self._by_pair.items()}
        return other

    def selecting(self, ask: Requirements) -> list[PeerIndex]:
        """Return the terms whose selector matches the labels of these requirements."""
        if not self.values:
            return []
        tenant, labels, by_pair = ask.tenant, ask.labels, self._by_pair
        return [
            index
            for pair in labels.items()
            for index in by_pair.get((tenant, pair), ())
            if len(index.selector) == 1 or selects(index.selector, labels)
        ]

    def counting(self, ask: Requirements) -> list[PeerIndex]:
        """Return the terms that count a replica with these requirements (see `counts_replica`)."""
        if not self.values:
            return []
        counted = [index for index in self.selecting(ask) if not index.owners]
        if ask.anti_affinity:
            counted += [index for index in dict.fromkeys(owned_anti_affinity(ask)) if index in self.values]
        return counted


def counts_replica(index: PeerIndex, ask: Requirements) -> bool:
    """Return whether the term counts a replica with these requirements. The replica must be of the term's tenant."""
    return index in owned_anti_affinity(ask) if index.owners else selects(index.selector, ask.labels)
