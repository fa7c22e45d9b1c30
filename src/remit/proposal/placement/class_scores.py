"""Scores of one class over all nodes, and top-k selection.

A number for every node, and what it rests on. The kernel keeps it up: see kernel.py.

Sorting and merging of numbers; what they mean is in kernel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from remit.law import fit
from remit.law.fit import Ask, Index
from remit.observation.node_columns import Bools, Ints
from remit.observation.topology_counts import NODE
from remit.proposal.placement.builtin_plugins import LEAST
from remit.proposal.placement.plugins import COUPLED, LAW, STATIC, STEADY, Filter, Score, applies
from remit.proposal.placement.topology_gates import Gates, Numbers, Shelves

RESOURCES: Final = next(one for one in LAW if one.check is fit.resources)


class Class:
    """One shape of work, and what is known of it: which nodes fit, and how well."""

    __slots__ = (
        "alone", "ask", "base", "bias", "choose", "closed", "constant", "epoch", "filters", "fine", "gated", "looked", "minded",
        "minds", "named", "once", "over", "plain", "rest", "score", "scores", "seen", "shelves", "shunned",
        "static", "steady", "stood", "wider",
    )  # fmt: skip

    def __init__(self, base: Ask, ask: Ask, filters: Sequence[Filter], scores: Sequence[Score]) -> None:
        self.base, self.ask = base, ask
        applying = [one for one in filters if applies(one, ask)]
        self.filters = [one for one in applying if one.check not in STATIC and one.check not in COUPLED]
        self.bias: Numbers | None = None
        """What the static scores add, if they tell nodes apart at all."""
        self.once = any(term.own for term in ask.anti if term.of.key == NODE)
        """Does it keep away from its like on the same node?"""
        self.alone: tuple[Index, ...] = ()
        """Of whom must there be nobody on the same node? A rule of the row, as what is left of it."""
        self.wider: tuple[Index, ...] = ()
        """Who else shuns it, in wider domains."""
        self.minds: tuple[Index, ...] = ()
        """Where it counts."""
        self.gated = True
        self.shelves: Shelves | None = None
        """Where wider domains matter."""
        self.over = ask
        self.looked: Any = None
        """What was last found out about it for the records: it is forgotten with the class. See decisions.py."""
        self.closed: Bools = np.zeros(0, dtype=np.bool_)
        self.named = self.seen = self.stood = self.epoch = self.shunned = self.minded = -1
        self.static: Bools = np.zeros(0, dtype=np.bool_)
        self.scores: list[Score] = []
        self.constant: list[Score] = []
        self.rank(scores)

    def rank(self, scores: Sequence[Score]) -> None:
        """Which of these apply may change with the sorts of devices that there are; then nothing is known any more."""
        before = self.scores, self.constant
        applying = [one for one in scores if applies(one, self.ask)]
        blurred = {name for one in applying for name in one.instead_of}
        ranking = [one for one in applying if one.name not in blurred]
        self.scores = [one for one in ranking if not one.static]
        self.constant = [one for one in ranking if one.static]
        if self.seen >= 0 and before == (self.scores, self.constant):
            return
        self.seen = self.stood = self.epoch = -1
        self.steady = all(one.epoch is STEADY for one in self.scores)
        self.fine = any(one.fine for one in self.scores)
        self.choose = next((one.choose for one in self.scores if one.choose is not None), None)
        self.plain = RESOURCES in self.filters and self.scores == [LEAST]
        """As most are: ranked by what is left of the resources asked for."""
        self.rest = [one for one in self.filters if not (self.plain and one is RESOURCES)]
        self.score: Numbers = np.zeros(0, dtype=np.int64 if self.fine else np.int32)

    @property
    def held_bytes(self) -> int:
        """What is kept of it by node."""
        found = self.score.nbytes + self.static.nbytes + self.closed.nbytes
        found += self.bias.nbytes if self.bias is not None else 0
        return found + (self.shelves.held_bytes if self.shelves is not None else 0)


_SAMPLE: Final = 1_024
_RANK_MIN: Final = 8


def leading(numbers: Numbers, limit: int) -> Ints:
    """Where the `limit` highest are of those that fit, the first of equals; in ascending order of place."""
    floor = 0
    if len(numbers) > _SAMPLE + 16 * limit:
        # Most are out of question. A sample tells about where the line is; if it was too high, all are looked at.
        stride = len(numbers) // _SAMPLE + 1
        sample = numbers[::stride]
        rank = len(sample) - (2 * limit // stride + _RANK_MIN)
        floor = max(int(np.partition(sample, rank)[rank]), 0)
    found = np.flatnonzero(numbers >= floor)
    if floor and len(found) < limit:
        found = np.flatnonzero(numbers >= 0)
    return found[best(numbers[found], limit)]


def best(numbers: Numbers, limit: int) -> Ints:
    """Where the `limit` highest are, the first of equals; in ascending order of place."""
    if len(numbers) <= limit:
        return np.arange(len(numbers))
    cut = np.partition(numbers, len(numbers) - limit)[len(numbers) - limit]
    above = numbers > cut
    equal = np.flatnonzero(numbers == cut)[: limit - int(above.sum())]
    above[equal] = True
    return np.flatnonzero(above)


class Lines:
    """The orders of several groups, merged: which group's next item is the best that may be taken?"""

    def __init__(self, orders: Sequence[tuple[Ints, Numbers, bool]]) -> None:
        self._rows = [rows.tolist() for rows, _, _ in orders]
        self._numbers = [numbers.tolist() for _, numbers, _ in orders]
        self._whole = [whole for _, _, whole in orders]
        self._at = [0] * len(orders)
        self._heads = np.array([numbers[0] if numbers else -1 for numbers in self._numbers], dtype=np.int64)
        self._firsts = np.array([rows[0] if rows else -1 for rows in self._rows], dtype=np.int64)
        self.broken = False
        """Did it end because an order was only a beginning?"""

    def merge(self, gates: Gates, limit: int) -> list[int]:
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
