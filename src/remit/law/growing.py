"""What only grows? Names and the ids that they were given, and which rows have changed, one after another. For columns.py."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

CHANGES_MAX: Final = 1 << 16
"""How many changes are remembered by row; whoever last looked before that looks at everything."""
_ROOM_MIN: Final = 16


class Names:
    """Distinct values and their ids, in the order of their first appearance. Grows, and never changes what it has said."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.ids: dict[Any, int] = {}

    def id(self, value: Hashable | None) -> int:
        if value is None:
            return -1
        found = self.ids.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


class Changes:
    """Which rows changed, one after another. `count` says how many changes there were since the beginning."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._rows: Ints = np.zeros(_ROOM_MIN, dtype=np.int64)
        self._used = 0

    def add(self, row: int) -> None:
        if self._used == len(self._rows):
            self._make_room(1)
        self._rows[self._used] = row
        self._used += 1
        self.count += 1

    def extend(self, rows: Ints) -> None:
        more = len(rows)
        self.count += more
        if more > CHANGES_MAX:
            self._used = 0  # a part of them would pass for all
            return
        if self._used + more > len(self._rows):
            self._make_room(more)
        self._rows[self._used : self._used + more] = rows
        self._used += more

    def since(self, count: int) -> Ints | None:
        """The rows that changed after the first `count` changes, some maybe more than once; None if that is forgotten."""
        back = self.count - count
        return None if back > self._used else self._rows[self._used - back : self._used]

    def _make_room(self, more: int) -> None:
        """For so many more, at most CHANGES_MAX; as many as that are kept of the old."""
        kept = self._rows[max(self._used - CHANGES_MAX, 0) : self._used]
        self._rows = np.zeros(min(2 * (len(kept) + more), 2 * CHANGES_MAX), dtype=np.int64)
        self._rows[: len(kept)] = kept
        self._used = len(kept)

    def frozen(self) -> Changes:
        """Goes on counting from here, and remembers nothing from before."""
        return Changes(self.count)
