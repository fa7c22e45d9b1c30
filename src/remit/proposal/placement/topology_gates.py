"""Spread and affinity checks per group of nodes during a run of placements.

The coupled rules of law/fit.py over groups of nodes, step by step.

A placement moves a count in one domain of each topology key. Nodes that are in the same domains of all the keys that matter
are a group: the gates of all its nodes are open or shut together. So a run over a thousand nodes in three zones looks at three
gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remit.law.fit import Ask, Index, carried
from remit.observation.node_columns import Bools, Columns, Ints
from remit.observation.topology_counts import ColumnPeers

GROUPS_MAX: Final = 256
"""With more of them than that, a step over groups costs as much as one over nodes."""

PREFER_WEIGHT: Final = 2
SCALE: Final = 1_000_000
"""What a score of 1 is in numbers; FINE times as much in those of a class that some score ranks finely."""
FINE: Final = 1 << 20
Numbers = npt.NDArray[np.signedinteger[Any]]
"""Of 32 bits; of 64 where they are fine."""
_NEVER: Final = np.int32(-1)


class _Count:
    """How many there are in each domain of one index, at the gates, and how our own placements move it."""

    __slots__ = ("_columns", "_eligible", "_of", "_peers", "_static", "at", "counts", "known", "own", "total")

    def __init__(self, of: Index, own: int, columns: Columns, peers: ColumnPeers, static: Bools, rows: Any) -> None:
        self._of, self._columns, self._peers, self._static = of, columns, peers, static
        self.at = columns.domains(of.key).ids[rows]
        self.known: Bools = self.at >= 0
        self.own = own
        self.counts: Ints = np.zeros(0, dtype=np.int64)
        self.total = 0
        self._eligible: Ints | None = None

    def look(self, ours: bool) -> None:
        """As it is now; to be moved, it must be `ours`."""
        counts = self._peers.counts(self._of)
        self.counts = counts.copy() if ours else counts
        self.total = self._peers.total(self._of)

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
    """One gate for each of these rows; a row may stand for all that are in the same domains. `look` before you pass.

    Good as long as no node of the columns is another, and nobody new shuns this class.
    """

    def __init__(
        self,
        ask: Ask,
        columns: Columns,
        peers: ColumnPeers,
        static: Bools,
        rows: Any,
        shunners: Sequence[Index],
        fine: bool = False,
    ) -> None:
        def count(of: Index, own: int) -> _Count:
            return _Count(of, own, columns, peers, static, rows)

        ours = carried(ask)
        self._gates = len(columns.ready[rows])
        self._fine = fine
        self._spread = [(count(term.of, term.own), term.skew) for term in ask.spread]
        self._near = [count(term.of, term.own) for term in ask.affinity]
        self._away = [count(term.of, term.own) for term in ask.anti] + [count(i, int(i in ours)) for i in shunners]
        self._prefer = [count(term.of, term.own) for term in ask.prefer]
        self._counts = [*(one for one, _ in self._spread), *self._near, *self._away, *self._prefer]

    def look(self, ours: bool = False) -> None:
        """See who stands where now; `ours` is what our own placements will move."""
        for one in self._counts:
            one.look(ours)

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

    def preferred(self) -> Numbers | int:
        """What soft spreading adds to the numbers: the most where the fewest are."""
        if not self._prefer:
            return 0
        total = np.zeros(self._gates)
        for one in self._prefer:
            least = one.least()
            total += np.where(one.known, 1.0 - (one.here() - least) / (1.0 + max(one.most() - least, 0)), 0.0)
        total *= SCALE * PREFER_WEIGHT / len(self._prefer)
        found = np.maximum(total, 0).astype(np.int32)
        return found * np.int64(FINE) if self._fine else found

    def placed(self, gate: int) -> None:
        """One more stands behind this gate."""
        for one in self._counts:
            one.placed(gate)


class Order(NamedTuple):
    """All rows, sorted by the domains that matter: those of the same domains are together, on a shelf, in ascending order."""

    rows: Ints
    at: Ints
    """Where in the order each row is."""
    starts: Ints
    ends: Ints

    @property
    def heads(self) -> Ints:
        found: Ints = self.rows[self.starts]
        return found


class Shelves:
    """The numbers of one class in such an order: what is on one shelf is open or shut together.

    Without an order, since there are too many domains, each row has a gate of its own.
    """

    __slots__ = ("gates", "numbers", "order")

    def __init__(self, order: Order | None, gates: Gates, numbers: Numbers) -> None:
        self.order, self.gates = order, gates
        self.renew(numbers)

    def __len__(self) -> int:
        return len(self.order.starts) if self.order is not None else 0

    @property
    def held_bytes(self) -> int:
        """Without the order, which many classes share, and without an order none."""
        return self.numbers.nbytes if self.order is not None else 0

    def renew(self, numbers: Numbers) -> None:
        """The numbers of all rows are others."""
        self.numbers = numbers if self.order is None else numbers[self.order.rows]

    def put(self, rows: Ints, numbers: Numbers) -> None:
        if self.order is not None:
            self.numbers[self.order.at[rows]] = numbers

    def best(self) -> int:
        """The row of the highest number where it may stand now, the first of equals; -1 if there is none."""
        order = self.order
        self.gates.look()
        heads = self.numbers if order is None else np.maximum.reduceat(self.numbers, order.starts)
        numbers = np.where(self.gates.open() & (heads >= 0), heads + self.gates.preferred(), _NEVER)
        at = int(numbers.argmax())
        if numbers[at] < 0:
            return -1
        if order is None:
            return at
        firsts = []
        for one in np.flatnonzero(numbers == numbers[at]):
            rows, inside = self.shelf(int(one), order)
            firsts.append(int(rows[inside.argmax()]))
        return min(firsts)

    def open(self) -> Bools:
        """For each row: is its gate open now?"""
        self.gates.look()
        found: Bools = self._out(self.gates.open())
        return found

    def by_row(self) -> Numbers:
        """The number of each row with regard to who stands where now."""
        self.gates.look()
        inside, more = self._out(self.gates.open()), self.gates.preferred()
        own = self._out(self.numbers, shelved=False)
        found: Numbers = np.where(inside & (own >= 0), own + (more if isinstance(more, int) else self._out(more)), _NEVER)
        return found

    def _out(self, values: npt.NDArray[Any], shelved: bool = True) -> npt.NDArray[Any]:
        """What is known by shelf, or in the order of shelves, by row."""
        order = self.order
        if order is None:
            return values
        found = np.empty(len(order.rows), dtype=values.dtype)
        found[order.rows] = np.repeat(values, order.ends - order.starts) if shelved else values
        return found

    def shelf(self, number: int, order: Order) -> tuple[Ints, Numbers]:
        """Which rows are on it, ascending, and their numbers."""
        inside = slice(order.starts[number], order.ends[number])
        return order.rows[inside], self.numbers[inside]


def minds_others(ask: Ask) -> bool:
    """Does it look at who stands where, so that one placement changes what the next one may do?"""
    return bool(ask.spread or ask.affinity or ask.anti or ask.prefer)


def keys_of(ask: Ask, shunners: Sequence[Index]) -> tuple[str, ...]:
    """The topology keys that matter."""
    terms = (*ask.spread, *ask.affinity, *ask.anti, *ask.prefer)
    return tuple(sorted({*(term.of.key for term in terms), *(index.key for index in shunners)}))


def sort(keys: Sequence[str], columns: Columns) -> Order | None:
    """By the domains of these keys; None if they make more than GROUPS_MAX shelves."""
    codes = np.zeros(len(columns), dtype=np.int64)
    for key in keys:
        codes = codes * (len(columns.slots(key)) + 1) + columns.domains(key).ids + 1
        if len(codes) and codes.max() > GROUPS_MAX:
            values, codes = np.unique(codes, return_inverse=True)
            if len(values) > GROUPS_MAX:
                return None
    rows = np.argsort(codes.astype(np.int16), kind="stable")  # small numbers are sorted faster
    at = np.empty(len(codes), dtype=np.int64)
    at[rows] = np.arange(len(codes))
    sizes = np.bincount(codes)
    ends = np.cumsum(sizes)[sizes > 0]
    return Order(rows, at, ends - sizes[sizes > 0], ends)
