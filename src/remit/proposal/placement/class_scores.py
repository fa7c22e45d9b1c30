"""Scores of one class over all nodes, and top-k selection.

Holds the cached score of each node for one class; kernel.py computes and refreshes it. The functions below select and merge
numbers and know nothing about placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from remit.law import fit
from remit.law.fit import PeerIndex, Requirements
from remit.observation.node_columns import Bools, Ints
from remit.observation.topology_counts import NODE
from remit.proposal.placement.builtin_plugins import LEAST_ALLOCATED
from remit.proposal.placement.plugins import BUILTIN_FILTERS, PEER_CHECKS, STATIC_CHECKS, Filter, Score, applies, constant_epoch
from remit.proposal.placement.topology_gates import ScoreArray, TopologyGates, TopologyGroups

RESOURCES: Final = next(filter_ for filter_ in BUILTIN_FILTERS if filter_.check is fit.resources)


class WorkClass:
    """Cached placement state of one class of equal work: which nodes fit, and their scores."""

    __slots__ = (
        "anti_affinity_epoch",
        "attributes_seen",
        "changes_seen",
        "choose_devices",
        "closed",
        "column_requirements",
        "counted_in",
        "epoch",
        "excluded_in_domain",
        "excluded_on_node",
        "filters",
        "groups",
        "has_constant_epoch",
        "high_precision",
        "index_epoch",
        "names_version",
        "one_per_node",
        "other_filters",
        "requirements",
        "score",
        "scores",
        "source_requirements",
        "static",
        "static_bonus",
        "static_scores",
        "survey",
        "uses_domains",
        "uses_fast_path",
    )  # fmt: skip

    def __init__(
        self, base: Requirements, requirements: Requirements, filters: Sequence[Filter], scores: Sequence[Score]
    ) -> None:
        self.source_requirements, self.requirements = base, requirements
        applying = [filter_ for filter_ in filters if applies(filter_, requirements)]
        self.filters = [
            filter_ for filter_ in applying if filter_.check not in STATIC_CHECKS and filter_.check not in PEER_CHECKS
        ]
        self.static_bonus: ScoreArray | None = None
        """Sum of the static scores by row; None if it is the same for all nodes."""
        self.one_per_node = any(term.own for term in requirements.anti_affinity if term.peers.topology_key == NODE)
        """Whether anti-affinity allows at most one replica of the class on a node."""
        self.excluded_on_node: tuple[PeerIndex, ...] = ()
        """Indexes that must count zero replicas on the same node. It is a rule of the row, like free capacity."""
        self.excluded_in_domain: tuple[PeerIndex, ...] = ()
        """Indexes of other workloads' anti-affinity with this class, in domains wider than a node."""
        self.counted_in: tuple[PeerIndex, ...] = ()
        """Peer indexes in which a replica of this class is counted."""
        self.uses_domains = True
        self.groups: TopologyGroups | None = None
        """Nodes grouped by topology domain; None if no wider domain matters."""
        self.column_requirements = requirements
        self.survey: Any = None
        """Last survey of this class for decision records (proposals.py); it is dropped together with the class."""
        self.closed: Bools = np.zeros(0, dtype=np.bool_)
        self.names_version = self.changes_seen = self.attributes_seen = self.epoch = self.anti_affinity_epoch = (
            self.index_epoch
        ) = -1
        self.static: Bools = np.zeros(0, dtype=np.bool_)
        self.scores: list[Score] = []
        self.static_scores: list[Score] = []
        self.select_scores(scores)

    def select_scores(self, scores: Sequence[Score]) -> None:
        """Selects the scores that apply, which can change when device types are added. If it did change, all cached scores are
        dropped.
        """
        before = self.scores, self.static_scores
        selected = _selected_scores(scores, self.requirements)
        self.scores = [score for score in selected if not score.static]
        self.static_scores = [score for score in selected if score.static]
        if self.changes_seen >= 0 and before == (self.scores, self.static_scores):
            return
        self.changes_seen = self.attributes_seen = self.epoch = -1
        self.has_constant_epoch = all(score.epoch is constant_epoch for score in self.scores)
        self.high_precision = any(score.high_precision for score in self.scores)
        self.choose_devices = next((score.choose_devices for score in self.scores if score.choose_devices is not None), None)
        self.uses_fast_path = RESOURCES in self.filters and self.scores == [LEAST_ALLOCATED]
        """The common case: only the `resources` filter and the `least-allocated` score apply, so the kernel uses its fast path.
        """
        self.other_filters = [filter_ for filter_ in self.filters if not (self.uses_fast_path and filter_ is RESOURCES)]
        self.score: ScoreArray = np.zeros(0, dtype=np.int64 if self.high_precision else np.int32)

    @property
    def memory_bytes(self) -> int:
        """Memory used for the arrays by node."""
        total = self.score.nbytes + self.static.nbytes + self.closed.nbytes
        total += self.static_bonus.nbytes if self.static_bonus is not None else 0
        return total + (self.groups.memory_bytes if self.groups is not None else 0)


def _selected_scores(scores: Sequence[Score], requirements: Requirements) -> list[Score]:
    """Return the scores that apply, without those that another of them replaces."""
    applying = [score for score in scores if applies(score, requirements)]
    replaced = {name for score in applying for name in score.replaces}
    return [score for score in applying if score.name not in replaced]


_SAMPLE: Final = 1_024
_RANK_MIN: Final = 8


def top_k_fitting(numbers: ScoreArray, limit: int) -> Ints:
    """Positions of the `limit` highest numbers that are not negative, lower positions first on ties; in ascending order."""
    floor = 0
    if len(numbers) > _SAMPLE + 16 * limit:
        # Most rows are far below the cutoff. A sample estimates it; if the estimate is too high, all rows are examined.
        stride = len(numbers) // _SAMPLE + 1
        sample = numbers[::stride]
        cutoff = len(sample) - (2 * limit // stride + _RANK_MIN)
        floor = max(int(np.partition(sample, cutoff)[cutoff]), 0)
    positions = np.flatnonzero(numbers >= floor)
    if floor and len(positions) < limit:
        positions = np.flatnonzero(numbers >= 0)
    return positions[top_k(numbers[positions], limit)]


def top_k(numbers: ScoreArray, limit: int) -> Ints:
    """Positions of the `limit` highest numbers, lower positions first on ties; in ascending order."""
    if len(numbers) <= limit:
        return np.arange(len(numbers))
    cutoff = np.partition(numbers, len(numbers) - limit)[len(numbers) - limit]
    above = numbers > cutoff
    equal = np.flatnonzero(numbers == cutoff)[: limit - int(above.sum())]
    above[equal] = True
    return np.flatnonzero(above)


class GroupMerge:
    """Merges the sorted placements of several node groups: repeatedly takes the best item of a group whose gate is open."""

    def __init__(self, orders: Sequence[tuple[Ints, ScoreArray, bool]]) -> None:
        self._rows = [rows.tolist() for rows, _, _ in orders]
        self._scores = [numbers.tolist() for _, numbers, _ in orders]
        self._complete = [complete for _, _, complete in orders]
        self._positions = [0] * len(orders)
        self._heads = np.array([numbers[0] if numbers else -1 for numbers in self._scores], dtype=np.int64)
        self._head_rows = np.array([rows[0] if rows else -1 for rows in self._rows], dtype=np.int64)
        self.truncated = False
        """Whether the merge stopped because the list of a group was truncated and is used up."""

    def merge(self, gates: TopologyGates, limit: int) -> list[int]:
        placed: list[int] = []
        while len(placed) < limit and len(self._heads):
            numbers = np.where(gates.open() & (self._heads >= 0), self._heads + gates.spread_bonus(), -1)
            best = numbers.max()
            if best < 0:
                break
            equal = np.flatnonzero(numbers == best)
            at = int(equal[self._head_rows[equal].argmin()])
            placed.append(int(self._head_rows[at]))
            gates.placed(at)
            if not self._advance(at):
                break
        return placed

    def _advance(self, at: int) -> bool:
        self._positions[at] = position = self._positions[at] + 1
        if position < len(self._rows[at]):
            self._heads[at], self._head_rows[at] = self._scores[at][position], self._rows[at][position]
            return True
        self._heads[at] = -1
        self.truncated = not self._complete[at]
        return not self.truncated
