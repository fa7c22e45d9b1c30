"""Which are the best, and which of several orders goes on? Sorting and merging of numbers; what they mean is in kernel.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from remit.law.columns import Ints
from remit.proposal.gates import Gates, Numbers

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
