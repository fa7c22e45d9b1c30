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

from remit.law.fit import PeerIndex, Requirements, owned_anti_affinity
from remit.observation.node_columns import Bools, Ints, NodeColumns
from remit.observation.topology_counts import ColumnPeerCounts

GROUPS_MAX: Final = 256
"""With more groups than this, a step over groups costs as much as a step over nodes."""

PREFER_WEIGHT: Final = 2
SCALE: Final = 1_000_000
"""Integer value of a score of 1. High-precision classes use HIGH_PRECISION_FACTOR times as much."""
HIGH_PRECISION_FACTOR: Final = 1 << 20
ScoreArray = npt.NDArray[np.signedinteger[Any]]
"""Scores by row: 32-bit integers, 64-bit for high-precision classes."""
_UNFIT: Final = np.int32(-1)


class _DomainCount:
    """Replicas in each domain of one index, seen from the gates, with the effect of the run's own placements."""

    __slots__ = ("_columns", "_eligible", "_index", "_peers", "_static", "counts", "gate_domains", "has_domain", "own", "total")

    def __init__(
        self, index: PeerIndex, own: int, columns: NodeColumns, peers: ColumnPeerCounts, static: Bools, rows: Any
    ) -> None:
        self._index, self._columns, self._peers, self._static = index, columns, peers, static
        self.gate_domains = columns.domains(index.topology_key).ids[rows]
        self.has_domain: Bools = self.gate_domains >= 0
        self.own = own
        self.counts: Ints = np.zeros(0, dtype=np.int64)
        self.total = 0
        self._eligible: Ints | None = None

    def load(self, copy: bool) -> None:
        """Loads the current counts; `ours` makes a copy that placements may modify."""
        counts = self._peers.counts(self._index)
        self.counts = counts.copy() if copy else counts
        self.total = self._peers.total(self._index)

    @property
    def eligible(self) -> Ints:
        """Domains in which the replica could run at all, regardless of free capacity."""
        if self._eligible is None:
            has_domain, ids = self._columns.domain(self._index.topology_key)
            is_eligible = np.zeros(len(self.counts), dtype=np.bool_)
            is_eligible[ids[has_domain & self._static]] = True
            self._eligible = np.flatnonzero(is_eligible)
        return self._eligible

    def at_gates(self) -> Ints:
        counts: Ints = self.counts[self.gate_domains]
        return counts

    def least(self) -> int:
        return int(self.counts[self.eligible].min()) if len(self.eligible) else 0

    def most(self) -> int:
        return int(self.counts[self.eligible].max()) if len(self.eligible) else 0

    def placed(self, gate: int) -> None:
        if self.own and self.has_domain[gate]:
            self.counts[self.gate_domains[gate]] += 1
            self.total += 1


class TopologyGates:
    """One gate per row; a row may represent all rows in the same domains. Call `load` before reading.

    Valid until a node's attributes change or another workload's anti-affinity starts to match this class.
    """

    def __init__(
        self,
        requirements: Requirements,
        columns: NodeColumns,
        peers: ColumnPeerCounts,
        static: Bools,
        rows: Any,
        shunners: Sequence[PeerIndex],
        fine: bool = False,
    ) -> None:
        def count(of: PeerIndex, own: int) -> _DomainCount:
            return _DomainCount(of, own, columns, peers, static, rows)

        owned = owned_anti_affinity(requirements)
        self._gates = len(columns.ready[rows])
        self._high_precision = fine
        self._spread = [(count(term.peers, term.own), term.max_skew) for term in requirements.spread]
        self._affinity = [count(term.peers, term.own) for term in requirements.affinity]
        self._anti_affinity = [count(term.peers, term.own) for term in requirements.anti_affinity] + [
            count(i, int(i in owned)) for i in shunners
        ]
        self._prefer = [count(term.peers, term.own) for term in requirements.preferred_spread]
        self._counts = [*(count_ for count_, _ in self._spread), *self._affinity, *self._anti_affinity, *self._prefer]

    def load(self, ours: bool = False) -> None:
        """Loads the current counts; with `ours`, copies that `placed` may modify."""
        for count in self._counts:
            count.load(ours)

    def open(self) -> Bools:
        """Rows allowed by the rules `spread`, `affinity`, `anti_affinity` and `symmetric_anti_affinity` with current counts."""
        is_open = np.ones(self._gates, dtype=np.bool_)
        for count, skew in self._spread:
            is_open &= count.has_domain & (count.at_gates() + (count.own - count.least()) <= skew)
        for count in self._affinity:
            if not (count.own and count.total == 0):
                is_open &= count.has_domain & (count.at_gates() > 0)
            else:
                is_open &= count.has_domain
        for count in self._anti_affinity:
            is_open &= ~count.has_domain | (count.at_gates() == 0)
        return is_open

    def spread_bonus(self) -> ScoreArray | int:
        """Bonus of soft topology spread: highest in the domain with the fewest replicas."""
        if not self._prefer:
            return 0
        total = np.zeros(self._gates)
        for count in self._prefer:
            least = count.least()
            total += np.where(count.has_domain, 1.0 - (count.at_gates() - least) / (1.0 + max(count.most() - least, 0)), 0.0)
        total *= SCALE * PREFER_WEIGHT / len(self._prefer)
        bonus = np.maximum(total, 0).astype(np.int32)
        return bonus * np.int64(HIGH_PRECISION_FACTOR) if self._high_precision else bonus

    def placed(self, gate: int) -> None:
        """Counts one more replica behind this gate."""
        for count in self._counts:
            count.placed(gate)


class GroupOrder(NamedTuple):
    """All rows sorted by their domains: rows of one group are adjacent, in ascending order."""

    rows: Ints
    position: Ints
    """Position of each row in the order."""
    starts: Ints
    ends: Ints

    @property
    def heads(self) -> Ints:
        heads: Ints = self.rows[self.starts]
        return heads


class TopologyGroups:
    """Scores of one class, arranged by topology group. All rows of a group are open or closed together.

    If there are too many domains to group by, `order` is None and each row has its own gate.
    """

    __slots__ = ("gates", "order", "scores")

    def __init__(self, order: GroupOrder | None, gates: TopologyGates, numbers: ScoreArray) -> None:
        self.order, self.gates = order, gates
        self.replace_scores(numbers)

    def __len__(self) -> int:
        return len(self.order.starts) if self.order is not None else 0

    @property
    def memory_bytes(self) -> int:
        """Memory of the score array; the order is shared by classes, and without an order the scores belong to the class."""
        return self.scores.nbytes if self.order is not None else 0

    def replace_scores(self, numbers: ScoreArray) -> None:
        """Replaces the scores of all rows."""
        self.scores = numbers if self.order is None else numbers[self.order.rows]

    def update_scores(self, rows: Ints, numbers: ScoreArray) -> None:
        if self.order is not None:
            self.scores[self.order.position[rows]] = numbers

    def best_row(self) -> int:
        """The row with the highest score among open rows, the first one on ties; -1 if there is none."""
        order = self.order
        self.gates.load()
        best_scores = self.scores if order is None else np.maximum.reduceat(self.scores, order.starts)
        numbers = np.where(self.gates.open() & (best_scores >= 0), best_scores + self.gates.spread_bonus(), _UNFIT)
        at = int(numbers.argmax())
        if numbers[at] < 0:
            return -1
        if order is None:
            return at
        firsts = []
        for number in np.flatnonzero(numbers == numbers[at]):
            rows, inside = self.group(int(number), order)
            firsts.append(int(rows[inside.argmax()]))
        return min(firsts)

    def open(self) -> Bools:
        """Whether the gate of each row is open now."""
        self.gates.load()
        is_open: Bools = self._to_rows(self.gates.open())
        return is_open

    def row_scores(self) -> ScoreArray:
        """Scores by row with the gates applied: -1 where closed, plus the soft spread bonus."""
        self.gates.load()
        is_open, bonus = self._to_rows(self.gates.open()), self.gates.spread_bonus()
        own = self._to_rows(self.scores, by_group=False)
        scores: ScoreArray = np.where(
            is_open & (own >= 0), own + (bonus if isinstance(bonus, int) else self._to_rows(bonus)), _UNFIT
        )
        return scores

    def _to_rows(self, values: npt.NDArray[Any], by_group: bool = True) -> npt.NDArray[Any]:
        """Converts values by group, or in group order, to values by row."""
        order = self.order
        if order is None:
            return values
        by_row = np.empty(len(order.rows), dtype=values.dtype)
        by_row[order.rows] = np.repeat(values, order.ends - order.starts) if by_group else values
        return by_row

    def group(self, number: int, order: GroupOrder) -> tuple[Ints, ScoreArray]:
        """The rows of a group, ascending, and their scores."""
        inside = slice(order.starts[number], order.ends[number])
        return order.rows[inside], self.scores[inside]


def depends_on_peers(requirements: Requirements) -> bool:
    """Whether one placement can change where the next one may go."""
    return bool(requirements.spread or requirements.affinity or requirements.anti_affinity or requirements.preferred_spread)


def topology_keys(requirements: Requirements, shunners: Sequence[PeerIndex]) -> tuple[str, ...]:
    """The topology keys that these rules use."""
    terms = (*requirements.spread, *requirements.affinity, *requirements.anti_affinity, *requirements.preferred_spread)
    return tuple(sorted({*(term.peers.topology_key for term in terms), *(index.topology_key for index in shunners)}))


def group_rows(keys: Sequence[str], columns: NodeColumns) -> GroupOrder | None:
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
