"""What only grows? Names and the ids that they were given, and which rows have changed, one after another. For columns.py."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

CHANGES_MAX: Final = 1 << 16
"""How many changes are remembered by row; whoever last looked before that looks at everything."""


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

    def __init__(self) -> None:
        self.count = 0
        self._rows = np.zeros(2 * CHANGES_MAX, dtype=np.int64)
        self._used = 0

    def add(self, row: int) -> None:
        if self._used == len(self._rows):
            self._forget()
        self._rows[self._used] = row
        self._used += 1
        self.count += 1

    def extend(self, rows: Ints) -> None:
        if len(rows) > CHANGES_MAX:
            # More than is remembered: whoever looked before looks at everything.
            self._used = 0
            self.count += len(rows)
            return
        if self._used + len(rows) > len(self._rows):
            self._forget()
        self._rows[self._used : self._used + len(rows)] = rows
        self._used += len(rows)
        self.count += len(rows)

    def since(self, count: int) -> Ints | None:
        """The rows that changed after the first `count` changes, some maybe more than once; None if that is forgotten."""
        back = self.count - count
        return None if back > self._used else self._rows[self._used - back : self._used]

    def _forget(self) -> None:
        kept = self._rows[self._used - CHANGES_MAX : self._used].copy()
        self._rows[:CHANGES_MAX] = kept
        self._used = CHANGES_MAX

    def frozen(self) -> Changes:
        """As many changes so far, of which none is remembered."""
        copy = Changes()
        copy.count = self.count
        return copy
