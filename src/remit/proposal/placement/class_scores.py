"""Scores of one class over all nodes, and top-k selection.

Holds the cached score of each node for one class; kernel.py computes and refreshes it. The functions below select and merge
numbers and know nothing about placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from remit.law import fit
from remit.law.fit import Requirements, PeerIndex
from remit.observation.node_columns import Bools, Ints
from remit.observation.topology_counts import NODE
from remit.proposal.placement.builtin_plugins import LEAST_ALLOCATED
from remit.proposal.placement.plugins import PEER_CHECKS, BUILTIN_FILTERS, STATIC_CHECKS, constant_epoch, Filter, Score, applies
from remit.proposal.placement.topology_gates import TopologyGates, ScoreArray, TopologyGroups

RESOURCES: Final = next(one for one in BUILTIN_FILTERS if one.check is fit.resources)


class WorkClass:
    """Cached placement state of one class of equal work: which nodes fit, and their scores."""

    __slots__ = (
        "alone", "ask", "base", "bias", "choose", "closed", "constant", "epoch", "filters", "fine", "gated", "looked", "minded",
        "minds", "named", "once", "over", "plain", "rest", "score", "scores", "seen", "shelves", "shunned",
        "static", "steady", "stood", "wider",
    )  # fmt: skip

    def __init__(self, base: Requirements, ask: Requirements, filters: Sequence[Filter], scores: Sequence[Score]) -> None:
        self.base, self.ask = base, ask
        applying = [one for one in filters if applies(one, ask)]
        self.filters = [one for one in applying if one.check not in STATIC_CHECKS and one.check not in PEER_CHECKS]
        self.bias: ScoreArray | None = None
        """Sum of the static scores by row; None if it is the same for all nodes."""
        self.once = any(term.own for term in ask.anti_affinity if term.peers.topology_key == NODE)
        """Whether anti-affinity allows at most one replica of the class on a node."""
        self.alone: tuple[PeerIndex, ...] = ()
        """Indexes that must count zero replicas on the same node. It is a rule of the row, like free capacity."""
        self.wider: tuple[PeerIndex, ...] = ()
        """Indexes of other workloads' anti-affinity with this class, in domains wider than a node."""
        self.minds: tuple[PeerIndex, ...] = ()
        """Peer indexes in which a replica of this class is counted."""
        self.gated = True
        self.shelves: TopologyGroups | None = None
        """Nodes grouped by topology domain; None if no wider domain matters."""
        self.over = ask
        self.looked: Any = None
        """Last survey of this class for decision records (proposals.py); it is dropped together with the class."""
        self.closed: Bools = np.zeros(0, dtype=np.bool_)
        self.named = self.seen = self.stood = self.epoch = self.shunned = self.minded = -1
        self.static: Bools = np.zeros(0, dtype=np.bool_)
        self.scores: list[Score] = []
        self.constant: list[Score] = []
        self.rank(scores)

    def rank(self, scores: Sequence[Score]) -> None:
        """Selects the scores that apply, which can change when device types are added. If it did change, all cached scores are
        dropped.
        """
        before = self.scores, self.constant
        applying = [one for one in scores if applies(one, self.ask)]
        blurred = {name for one in applying for name in one.instead_of}
        ranking = [one for one in applying if one.name not in blurred]
        self.scores = [one for one in ranking if not one.static]
        self.constant = [one for one in ranking if one.static]
        if self.seen >= 0 and before == (self.scores, self.constant):
            return
        self.seen = self.stood = self.epoch = -1
        self.steady = all(one.epoch is constant_epoch for one in self.scores)
        self.fine = any(one.fine for one in self.scores)
        self.choose = next((one.choose for one in self.scores if one.choose is not None), None)
        self.plain = RESOURCES in self.filters and self.scores == [LEAST_ALLOCATED]
        """The common case: only the `resources` filter and the `least-allocated` score apply, so the kernel uses its fast path.
        """
        self.rest = [one for one in self.filters if not (self.plain and one is RESOURCES)]
        self.score: ScoreArray = np.zeros(0, dtype=np.int64 if self.fine else np.int32)

    @property
    def held_bytes(self) -> int:
        """Memory used for the arrays by node."""
        found = self.score.nbytes + self.static.nbytes + self.closed.nbytes
        found += self.bias.nbytes if self.bias is not None else 0
        return found + (self.shelves.held_bytes if self.shelves is not None else 0)


_SAMPLE: Final = 1_024
_RANK_MIN: Final = 8


def top_k_fitting(numbers: ScoreArray, limit: int) -> Ints:
    """Positions of the `limit` highest numbers that are not negative, lower positions first on ties; in ascending order."""
    floor = 0
    if len(numbers) > _SAMPLE + 16 * limit:
        # Most rows are far below the cutoff. A sample estimates it; if the estimate is too high, all rows are examined.
        stride = len(numbers) // _SAMPLE + 1
        sample = numbers[::stride]
        rank = len(sample) - (2 * limit // stride + _RANK_MIN)
        floor = max(int(np.partition(sample, rank)[rank]), 0)
    found = np.flatnonzero(numbers >= floor)
    if floor and len(found) < limit:
        found = np.flatnonzero(numbers >= 0)
    return found[top_k(numbers[found], limit)]


def top_k(numbers: ScoreArray, limit: int) -> Ints:
    """Positions of the `limit` highest numbers, lower positions first on ties; in ascending order."""
    if len(numbers) <= limit:
        return np.arange(len(numbers))
    cut = np.partition(numbers, len(numbers) - limit)[len(numbers) - limit]
    above = numbers > cut
    equal = np.flatnonzero(numbers == cut)[: limit - int(above.sum())]
    above[equal] = True
    return np.flatnonzero(above)


class GroupMerge:
    """Merges the sorted placements of several node groups: repeatedly takes the best next item of a group whose gate is open.
    """

    def __init__(self, orders: Sequence[tuple[Ints, ScoreArray, bool]]) -> None:
        self._rows = [rows.tolist() for rows, _, _ in orders]
        self._numbers = [numbers.tolist() for _, numbers, _ in orders]
        self._whole = [whole for _, _, whole in orders]
        self._at = [0] * len(orders)
        self._heads = np.array([numbers[0] if numbers else -1 for numbers in self._numbers], dtype=np.int64)
        self._firsts = np.array([rows[0] if rows else -1 for rows in self._rows], dtype=np.int64)
        self.broken = False
        """Whether the merge stopped because the list of a group was truncated and is used up."""

    def merge(self, gates: TopologyGates, limit: int) -> list[int]:
        placed: list[int] = []
        while len(placed) < limit and len(self._heads):
            numbers = np.where(gates.open() & (self._heads >= 0), self._heads + gates.preferred(), -1)
            best = numbers.max()
            if best < 0:
                break
            equal = np.flatnonzero(numbers == best)
            at = int(equal[self._firsts[equal].argmin()])
            placed.append(int(self._firsts[at]))
            gates.placed(at)
            if not self._step(at):
                break
        return placed

    def _step(self, at: int) -> bool:
        self._at[at] = place = self._at[at] + 1
        if place < len(self._rows[at]):
            self._heads[at], self._firsts[at] = self._numbers[at][place], self._rows[at][place]
            return True
        self._heads[at] = -1
        self.broken = not self._whole[at]
        return not self.broken
