"""Versions logged but not yet indexed.

Memory only: file.py writes the log, upkeep.py the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge

from remit.store.keys import KeyOrder, distinct

Version = tuple[str, int]
"""A key and an id in the log."""


class Recent:
    """Versions that are not yet in `keys`: of each key the newest id, and apart, for the few, older ones.

    Plain integers in two dicts, because there are hundreds of thousands: a list for each key would cost more memory, and
    more time whenever Python collects its garbage.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.older: dict[str, list[int]] = {}
        self.count = 0
        self._order = KeyOrder()
        self._passing: KeyOrder | None = None
        """The keys of an indexing pass under way; they are in here until they are dropped."""

    def walk(self, start: str, end: str | None) -> Iterator[str]:
        """The keys in here, in order, and perhaps some that were here a moment ago."""
        if self._passing is None:
            return self._order.walk(start, end)
        return distinct(merge(self._passing.walk(start, end), self._order.walk(start, end)))

    def begin_pass(self) -> Iterator[str]:
        """Every key that is here now. Those that come later are kept apart, so that nothing is sorted anew at the end."""
        if self._passing is None:
            self._passing, self._order = self._order, KeyOrder()
        else:
            # An earlier pass failed: what it had left over goes first of all.
            self._passing.add(self._order.walk("", None))
            self._order = KeyOrder()
        return self._passing.walk("", None)

    def end_pass(self) -> None:
        self._passing = None

    def add(self, versions: Iterable[Version]) -> None:
        ids, fresh = self.ids, []
        for key, id_ in versions:
            old = ids.get(key)
            if old is None:
                fresh.append(key)
            else:
                self.older.setdefault(key, []).append(old)
                self.count += 1
            ids[key] = id_
        self.count += len(fresh)
        self._order.add(fresh)

    def newest(self, key: str, below: int) -> int:
        """The newest version with an id less than `below`; 0 if there is none in here."""
        id_ = self.ids.get(key, 0)
        if id_ < below:
            return id_
        return next((old for old in reversed(self.older.get(key, ())) if old < below), 0)

    def versions(self, keys: Iterable[str], below: int) -> list[Version]:
        found: list[Version] = []
        for key in keys:
            found += [(key, old) for old in self.older.get(key, ()) if old < below]
            id_ = self.ids.get(key)
            if id_ is not None and id_ < below:
                found.append((key, id_))
        return found

    def drop(self, keys: Iterable[str], below: int) -> None:
        """Let go of what `versions(keys, below)` answered, now that it is in `keys`. What came since stays."""
        for key in keys:
            if (olds := self.older.get(key)) is not None:
                kept = [old for old in olds if old >= below]
                self.count -= len(olds) - len(kept)
                if kept:
                    self.older[key] = kept
                else:
                    del self.older[key]
            newest = self.ids.get(key)
            if newest is None:
                continue
            if newest < below:
                del self.ids[key]
                self.count -= 1
            else:
                self._order.add((key,))
