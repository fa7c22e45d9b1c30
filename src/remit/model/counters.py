"""Bounded counters and histograms.

Components count in place, at the cost of one addition; metrics and reports read the counts later. Counters are keyed by a
closed set of names where possible. Otherwise their number is bounded, and further keys count as `other`, so that no caller
can make the memory or the report grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

OTHER: Final = "other"
COUNTER_KEYS_MAX: Final = 64

SECONDS_BUCKETS: Final = (0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bucket bounds for operations that should be fast."""
LONG_SECONDS_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Bucket bounds for operations that may wait for other components."""
SIZE_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
SMALL_COUNT_BUCKETS: Final = (1, 2, 3, 5, 10, 20, 50)


class Histogram:
    """Counts of values by bucket. Each bucket includes its upper bound; the last bucket has no bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[float, int]]:
        """Returns, for each bound, the number of values at or below it; the last bound is infinity."""
        result, total = [], 0
        for bound, in_bucket in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += in_bucket
            result.append((bound, total))
        return result


class BoundedCounter(dict[str, int]):
    """Counts by key. With `known`, any other key counts as `other`; without, any key beyond the first `keys_max`."""

    def __init__(self, known: Iterable[str] = (), *, keys_max: int = COUNTER_KEYS_MAX) -> None:
        super().__init__()
        self._known, self._most = frozenset(known), keys_max

    def add(self, key: str, by: int = 1) -> None:
        if key not in self:
            key = self.key_for(key)
        self[key] = self.get(key, 0) + by

    def key_for(self, key: str) -> str:
        """Returns the key under which this one is counted: itself, or `other`."""
        accepted = key in self._known if self._known else key in self or len(self) < self._most
        return key if accepted else OTHER


def largest_with_other(amounts: Mapping[str, float], most: int) -> dict[str, float]:
    """Returns the `most` largest amounts by name, and the sum of the rest as `other`."""
    order = sorted(amounts.items(), key=lambda item: (-item[1], item[0]))
    result = dict(order[:most])
    if len(order) > most:
        result[OTHER] = result.get(OTHER, 0) + sum(value for _, value in order[most:])
    return result
