"""Which keys come next? Keys in memory, in order, cheap to add to. Values and versions are kept elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from heapq import merge

_FRESH_KEYS_MAX = 1 << 11
_RUN_KEYS_MAX = 1 << 16
"""Longer runs are not merged: one such merge would take many milliseconds, and a walk can bear some more runs."""


class KeyOrder:
    """Sorted runs of geometric size: adding is amortised logarithmic, and a walk merges a handful of runs.

    One sorted list would move half of itself for every new key. A key may stand in two runs; a walk shows it once. Keys are
    not taken out one by one: `reset` does it for all.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._fresh: list[str] = []
        self._runs: tuple[list[str], ...] = ()
        self.reset(keys)

    def reset(self, keys: Iterable[str]) -> None:
        run = sorted(keys)
        self._fresh = []
        self._runs = (run,) if run else ()

    def add(self, keys: Iterable[str]) -> None:
        self._fresh.extend(keys)
        # Sorted as they come: left for the next walk, one huge sort would hold up whoever walks.
        if len(self._fresh) >= _FRESH_KEYS_MAX:
            self._settle()

    def walk(self, start: str, end: str | None) -> Iterator[str]:
        """Keys from `start` up to but not including `end`. What is added during the walk is not in it."""
        self._settle()
        parts: list[list[str]] = []
        for run in self._runs:
            low = bisect_left(run, start)
            if low < len(run):
                parts.append(run)
        return _merged(parts, start, end)

    def _settle(self) -> None:
        if not self._fresh:
            return
        run = sorted(self._fresh)
        self._fresh = []
        runs = list(self._runs)
        while runs and len(runs[-1]) <= 2 * len(run) and len(runs[-1]) + len(run) <= _RUN_KEYS_MAX:
            # Sorting two sorted runs is one merge for timsort. A new list each time: a walk under way keeps its own.
            run = sorted(runs.pop() + run)
        self._runs = (*runs, run)


def _merged(runs: list[list[str]], start: str, end: str | None) -> Iterator[str]:
    for key in distinct(merge(*(_tail(run, start) for run in runs))):
        if end is not None and key >= end:
            return
        yield key


def distinct(keys: Iterable[str]) -> Iterator[str]:
    """Keys that come in order, each once."""
    last: str | None = None
    for key in keys:
        if key != last:
            last = key
            yield key


def _tail(run: list[str], start: str) -> Iterator[str]:
    for index in range(bisect_left(run, start), len(run)):
        yield run[index]
