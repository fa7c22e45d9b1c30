"""Where may the next one stand, seen who stands where? The coupled rules of law/fit.py over groups of nodes, step by step.

A placement moves a count in one domain of each topology key. Nodes that are in the same domains of all the keys that matter
are a group: the gates of all its nodes are open or shut together. So a run over a thousand nodes in three zones looks at three
gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from remit.law.columns import Bools, Columns, Ints
from remit.law.fit import Ask, Index, carried
from remit.law.peers import ColumnPeers

GROUPS_MAX: Final = 256
"""With more of them than that, a step over groups costs as much as one over nodes."""

PREFER_WEIGHT: Final = 2
SCALE: Final = 1_000_000


class _Count:
    """How many there are in each domain of one index, at the gates, and how our own placements move it."""

    __slots__ = ("_columns", "_eligible", "_of", "_static", "at", "counts", "known", "own", "total")

    def __init__(self, of: Index, own: int, columns: Columns, peers: ColumnPeers, static: Bools, rows: Any) -> None:
        self._of, self._columns, self._static = of, columns, static
        self.at = columns.domains(of.key).ids[rows]
        self.known: Bools = self.at >= 0
        self.counts: Ints = peers.counts(of).copy()
        self.total = peers.total(of)
        self.own = own
        self._eligible: Ints | None = None

    @property
    def eligible(self) -> Ints:
        """The domains in which the replica could stand at all, whatever is left of their nodes."""
        if self._eligible is None:
            known, ids = self._columns.domain(self._of.key)
            there = np.zeros(len(self.counts), dtype=np.bool_)
            there[ids[known & self._static]] = True
            self._eligible = np.flatnonzero(there)
        return self._eligible

    def here(self) -> Ints:
        found: Ints = self.counts[self.at]
        return found

    def least(self) -> int:
        return int(self.counts[self.eligible].min()) if len(self.eligible) else 0

    def most(self) -> int:
        return int(self.counts[self.eligible].max()) if len(self.eligible) else 0

    def placed(self, gate: int) -> None:
        if self.own and self.known[gate]:
            self.counts[self.at[gate]] += 1
            self.total += 1


class Gates:
    """One gate for each of these rows; a row may stand for all that are in the same domains."""

    def __init__(
        self, ask: Ask, columns: Columns, peers: ColumnPeers, static: Bools, rows: Any, shunners: Sequence[Index]
    ) -> None:
        def count(of: Index, own: int) -> _Count:
            return _Count(of, own, columns, peers, static, rows)

        ours = carried(ask)
        self._gates = len(columns.ready[rows])
        self._spread = [(count(term.of, term.own), term.skew) for term in ask.spread]
        self._near = [count(term.of, term.own) for term in ask.affinity]
        self._away = [count(term.of, term.own) for term in ask.anti] + [count(i, int(i in ours)) for i in shunners]
        self._prefer = [count(term.of, term.own) for term in ask.prefer]

    def open(self) -> Bools:
        """The same as the rules `spread`, `affinity`, `anti_affinity` and `shunned` say of these rows now."""
        found = np.ones(self._gates, dtype=np.bool_)
        for one, skew in self._spread:
            found &= one.known & (one.here() + (one.own - one.least()) <= skew)
        for one in self._near:
            if not (one.own and one.total == 0):
                found &= one.known & (one.here() > 0)
            else:
                found &= one.known
        for one in self._away:
            found &= ~one.known | (one.here() == 0)
        return found

    def preferred(self) -> npt.NDArray[np.int32] | int:
        """What soft spreading adds to the numbers: the most where the fewest are."""
        if not self._prefer:
            return 0
        total = np.zeros(self._gates)
        for one in self._prefer:
            least = one.least()
            total += np.where(one.known, 1.0 - (one.here() - least) / (1.0 + max(one.most() - least, 0)), 0.0)
        total *= SCALE * PREFER_WEIGHT / len(self._prefer)
        return np.maximum(total, 0).astype(np.int32)

    def placed(self, gate: int) -> None:
        """One more stands behind this gate."""
        for one, _ in self._spread:
            one.placed(gate)
        for one in (*self._near, *self._away, *self._prefer):
            one.placed(gate)


def group(ask: Ask, columns: Columns, shunners: Sequence[Index], rows: Ints) -> list[Ints]:
    """These rows (ascending) by the domains that matter; more than GROUPS_MAX of them are not told apart any further."""
    terms = (*ask.spread, *ask.affinity, *ask.anti, *ask.prefer)
    codes = np.zeros(len(rows), dtype=np.int64)
    for key in dict.fromkeys((*(term.of.key for term in terms), *(index.key for index in shunners))):
        _, codes = np.unique(codes, return_inverse=True)
        codes = codes * (len(columns.slots(key)) + 1) + columns.domains(key).ids[rows] + 1
    values, codes = np.unique(codes, return_inverse=True)
    if len(values) > GROUPS_MAX:
        return [rows[:1]] * (GROUPS_MAX + 1)
    return [rows[codes == value] for value in range(len(values))]
