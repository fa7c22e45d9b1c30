"""Bounded counters and histograms.

Plain counts, kept where the deed is done, and read by whoever reports. Nothing is reported here.

Whoever does the deed pays for an addition and no more. What counts are kept by comes from a closed set; where that cannot be
promised there is a bound, past which everything counts as `other`: no asker can make the memory, or the report, grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

OTHER: Final = "other"
KINDS_MAX: Final = 64

SECONDS: Final = (0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Of what should be quick."""
LONG_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Of what may have to wait for others."""
SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
FEW: Final = (1, 2, 3, 5, 10, 20, 50)


class Buckets:
    """How values are spread over buckets, each up to and including its bound; the last has no bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[float, int]]:
        """How many are not above each bound; the last of them is infinity."""
        found, count = [], 0
        for bound, some in zip((*self.bounds, float("inf")), self.counts, strict=True):
            count += some
            found.append((bound, count))
        return found


class Counts(dict[str, int]):
    """How often each of a few kinds happened. With `known`, any other kind counts as `other`; without, any beyond `most`."""

    def __init__(self, known: Iterable[str] = (), *, most: int = KINDS_MAX) -> None:
        super().__init__()
        self._known, self._most = frozenset(known), most

    def add(self, kind: str, by: int = 1) -> None:
        if kind not in self:
            kind = self.kind(kind)
        self[kind] = self.get(kind, 0) + by

    def kind(self, kind: str) -> str:
        """As what it counts."""
        taken = kind in self._known if self._known else kind in self or len(self) < self._most
        return kind if taken else OTHER


def largest(amounts: Mapping[str, float], most: int) -> dict[str, float]:
    """The `most` largest by their names; the rest in sum, as `other`."""
    order = sorted(amounts.items(), key=lambda one: (-one[1], one[0]))
    found = dict(order[:most])
    if len(order) > most:
        found[OTHER] = found.get(OTHER, 0) + sum(value for _, value in order[most:])
    return found
