"""Versions logged but not yet indexed, in memory.

database_file.py writes the log, maintenance.py the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge

from remit.store.keys import KeyOrder, distinct

Version = tuple[str, int]
"""A key and the id of its row in the log."""


class RecentIndex:
    """Versions that are not in table `keys` yet: the newest id of each key, and separately, for a few keys, the older ones.

    Plain integers in two dicts, because there are hundreds of thousands: a list per key would use more memory, and make
    garbage collections slower.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.older_ids: dict[str, list[int]] = {}
        self.count = 0
        self._order = KeyOrder()
        self._pass_keys: KeyOrder | None = None
        """Keys of the running index pass. They stay here until they are dropped."""

    def walk(self, start: str, end: str | None) -> Iterator[str]:
        """Yield the keys in order, possibly including some that have just been dropped."""
        if self._pass_keys is None:
            return self._order.walk(start, end)
        return distinct(merge(self._pass_keys.walk(start, end), self._order.walk(start, end)))

    def begin_pass(self) -> Iterator[str]:
        """Start an index pass over all current keys. Later keys are kept separately, so that nothing is sorted again at the
        end.
        """
        if self._pass_keys is None:
            self._pass_keys, self._order = self._order, KeyOrder()
        else:
            # An earlier pass failed: its remaining keys are part of this one.
            self._pass_keys.add(self._order.walk("", None))
            self._order = KeyOrder()
        return self._pass_keys.walk("", None)

    def end_pass(self) -> None:
        self._pass_keys = None

    def add(self, versions: Iterable[Version]) -> None:
        ids, new_keys = self.ids, []
        for key, id_ in versions:
            old = ids.get(key)
            if old is None:
                new_keys.append(key)
            else:
                self.older_ids.setdefault(key, []).append(old)
                self.count += 1
            ids[key] = id_
        self.count += len(new_keys)
        self._order.add(new_keys)

    def newest(self, key: str, below: int) -> int:
        """Return the newest version with an id less than `below`; 0 if there is none here."""
        id_ = self.ids.get(key, 0)
        if id_ < below:
            return id_
        return next((old for old in reversed(self.older_ids.get(key, ())) if old < below), 0)

    def versions(self, keys: Iterable[str], below: int) -> list[Version]:
        versions: list[Version] = []
        for key in keys:
            versions += [(key, old) for old in self.older_ids.get(key, ()) if old < below]
            id_ = self.ids.get(key)
            if id_ is not None and id_ < below:
                versions.append((key, id_))
        return versions

    def drop(self, keys: Iterable[str], below: int) -> None:
        """Drop what `versions(keys, below)` returned, once it is in table `keys`. Newer versions stay."""
        for key in keys:
            if (olds := self.older_ids.get(key)) is not None:
                remaining = [old for old in olds if old >= below]
                self.count -= len(olds) - len(remaining)
                if remaining:
                    self.older_ids[key] = remaining
                else:
                    del self.older_ids[key]
            newest = self.ids.get(key)
            if newest is None:
                continue
            if newest < below:
                del self.ids[key]
                self.count -= 1
            else:
                self._order.add((key,))
