"""Spread and affinity checks per group of nodes during a run of placements.

Implements the rules of law/fit.py that depend on other replicas, incrementally and over groups of nodes.

A placement changes a count in one domain of each topology key. Nodes in the same domains of all relevant keys form a group,
and the rules give the same result on all nodes of a group. A run over a thousand nodes in three zones thus checks three
gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remit.law.fit import Requirements, PeerIndex, owned_anti_affinity
from remit.observation.node_columns import Bools, Columns, Ints
from remit.observation.topology_counts import ColumnPeers

GROUPS_MAX: Final = 256
"""With more groups than this, a step over groups costs as much as a step over nodes."""

PREFER_WEIGHT: Final = 2
SCALE: Final = 1_000_000
"""Integer value of a score of 1. High-precision classes use FINE times as much."""
HIGH_PRECISION_FACTOR: Final = 1 << 20
ScoreArray = npt.NDArray[np.signedinteger[Any]]
"""Scores by row: 32-bit integers, 64-bit for high-precision classes."""
_UNFIT: Final = np.int32(-1)


class _DomainCount:
    """Replicas in each domain of one index, seen from the gates, with the effect of the run's own placements."""

    __slots__ = ("_columns", "_eligible", "_of", "_peers", "_static", "at", "counts", "known", "own", "total")

    def __init__(self, of: PeerIndex, own: int, columns: Columns, peers: ColumnPeers, static: Bools, rows: Any) -> None:
        self._of, self._columns, self._peers, self._static = of, columns, peers, static
        self.at = columns.domains(of.topology_key).ids[rows]
        self.known: Bools = self.at >= 0
        self.own = own
        self.counts: Ints = np.zeros(0, dtype=np.int64)
        self.total = 0
        self._eligible: Ints | None = None

    def look(self, ours: bool) -> None:
        """Loads the current counts; `ours` makes a copy that placements may modify."""
        counts = self._peers.counts(self._of)
        self.counts = counts.copy() if ours else counts
        self.total = self._peers.total(self._of)

    @property
    def eligible(self) -> Ints:
        """Domains in which the replica could run at all, regardless of free capacity."""
        if self._eligible is None:
            known, ids = self._columns.domain(self._of.topology_key)
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


class TopologyGates:
    """One gate per row; a row may represent all rows in the same domains. Call `look` before reading.

    Valid until a node's attributes change or another workload's anti-affinity starts to match this class.
    """

    def __init__(
        self,
        ask: Requirements,
        columns: Columns,
        peers: ColumnPeers,
        static: Bools,
        rows: Any,
        shunners: Sequence[PeerIndex],
        fine: bool = False,
    ) -> None:
        def count(of: PeerIndex, own: int) -> _DomainCount:
            return _DomainCount(of, own, columns, peers, static, rows)

        ours = owned_anti_affinity(ask)
        self._gates = len(columns.ready[rows])
        self._fine = fine
        self._spread = [(count(term.peers, term.own), term.max_skew) for term in ask.spread]
        self._near = [count(term.peers, term.own) for term in ask.affinity]
        self._away = [count(term.peers, term.own) for term in ask.anti_affinity] + [count(i, int(i in ours)) for i in shunners]
        self._prefer = [count(term.peers, term.own) for term in ask.preferred_spread]
        self._counts = [*(one for one, _ in self._spread), *self._near, *self._away, *self._prefer]

    def look(self, ours: bool = False) -> None:
        """Loads the current counts; with `ours`, copies that `placed` may modify."""
        for one in self._counts:
            one.look(ours)

    def open(self) -> Bools:
        """Rows allowed by the rules `spread`, `affinity`, `anti_affinity` and `shunned` with the current counts."""
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

    def preferred(self) -> ScoreArray | int:
        """Bonus of soft topology spread: highest in the domain with the fewest replicas."""
        if not self._prefer:
            return 0
        total = np.zeros(self._gates)
        for one in self._prefer:
            least = one.least()
            total += np.where(one.known, 1.0 - (one.here() - least) / (1.0 + max(one.most() - least, 0)), 0.0)
        total *= SCALE * PREFER_WEIGHT / len(self._prefer)
        found = np.maximum(total, 0).astype(np.int32)
        return found * np.int64(HIGH_PRECISION_FACTOR) if self._fine else found

    def placed(self, gate: int) -> None:
        """Counts one more replica behind this gate."""
        for one in self._counts:
            one.placed(gate)


class GroupOrder(NamedTuple):
    """All rows sorted by their domains: rows of one group are adjacent, in ascending order."""

    rows: Ints
    at: Ints
    """Position of each row in the order."""
    starts: Ints
    ends: Ints

    @property
    def heads(self) -> Ints:
        found: Ints = self.rows[self.starts]
        return found


class TopologyGroups:
    """Scores of one class, arranged by topology group. All rows of a group are open or closed together.

    If there are too many domains to group by, `order` is None and each row has its own gate.
    """

    __slots__ = ("gates", "numbers", "order")

    def __init__(self, order: GroupOrder | None, gates: TopologyGates, numbers: ScoreArray) -> None:
        self.order, self.gates = order, gates
        self.renew(numbers)

    def __len__(self) -> int:
        return len(self.order.starts) if self.order is not None else 0

    @property
    def held_bytes(self) -> int:
        """Memory of the score array; the order is shared by classes, and without an order the scores belong to the class."""
        return self.numbers.nbytes if self.order is not None else 0

    def renew(self, numbers: ScoreArray) -> None:
        """Replaces the scores of all rows."""
        self.numbers = numbers if self.order is None else numbers[self.order.rows]

    def put(self, rows: Ints, numbers: ScoreArray) -> None:
        if self.order is not None:
            self.numbers[self.order.at[rows]] = numbers

    def best(self) -> int:
        """The row with the highest score among open rows, the first one on ties; -1 if there is none."""
        order = self.order
        self.gates.look()
        heads = self.numbers if order is None else np.maximum.reduceat(self.numbers, order.starts)
        numbers = np.where(self.gates.open() & (heads >= 0), heads + self.gates.preferred(), _UNFIT)
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
        """Whether the gate of each row is open now."""
        self.gates.look()
        found: Bools = self._out(self.gates.open())
        return found

    def by_row(self) -> ScoreArray:
        """Scores by row with the gates applied: -1 where closed, plus the soft spread bonus."""
        self.gates.look()
        inside, more = self._out(self.gates.open()), self.gates.preferred()
        own = self._out(self.numbers, shelved=False)
        found: ScoreArray = np.where(inside & (own >= 0), own + (more if isinstance(more, int) else self._out(more)), _UNFIT)
        return found

    def _out(self, values: npt.NDArray[Any], shelved: bool = True) -> npt.NDArray[Any]:
        """Converts values by group, or in group order, to values by row."""
        order = self.order
        if order is None:
            return values
        found = np.empty(len(order.rows), dtype=values.dtype)
        found[order.rows] = np.repeat(values, order.ends - order.starts) if shelved else values
        return found

    def shelf(self, number: int, order: GroupOrder) -> tuple[Ints, ScoreArray]:
        """The rows of a group, ascending, and their scores."""
        inside = slice(order.starts[number], order.ends[number])
        return order.rows[inside], self.numbers[inside]


def depends_on_peers(ask: Requirements) -> bool:
    """Whether one placement can change where the next one may go."""
    return bool(ask.spread or ask.affinity or ask.anti_affinity or ask.preferred_spread)


def topology_keys(ask: Requirements, shunners: Sequence[PeerIndex]) -> tuple[str, ...]:
    """The topology keys that these rules use."""
    terms = (*ask.spread, *ask.affinity, *ask.anti_affinity, *ask.preferred_spread)
    return tuple(sorted({*(term.peers.topology_key for term in terms), *(index.topology_key for index in shunners)}))


def group_rows(keys: Sequence[str], columns: Columns) -> GroupOrder | None:
    """Groups rows by the domains of these keys; None if that makes more than GROUPS_MAX groups."""
    codes = np.zeros(len(columns), dtype=np.int64)
    for key in keys:
        codes = codes * (len(columns.slots(key)) + 1) + columns.domains(key).ids + 1
        if len(codes) and codes.max() > GROUPS_MAX:
            values, codes = np.unique(codes, return_inverse=True)
            if len(values) > GROUPS_MAX:
                return None
    rows = np.argsort(codes.astype(np.int16), kind="stable")  # numpy sorts small integer types faster
    at = np.empty(len(codes), dtype=np.int64)
    at[rows] = np.arange(len(codes))
    sizes = np.bincount(codes)
    ends = np.cumsum(sizes)[sizes > 0]
    return GroupOrder(rows, at, ends - sizes[sizes > 0], ends)
