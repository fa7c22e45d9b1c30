"""Columnar tables, shared value pools, interned names and row change logs.

Generic containers without scheduling semantics, used by the scheduler view and node_columns.py.

A decoded object per record would cost about a kilobyte each. Complete columns are read as NumPy arrays. Single cells are
accessed through `at`, which has a memoryview of each column: reading or writing one number there takes a third of the time
NumPy needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

V = TypeVar("V", bound=Hashable)
NONE: Final = -1
_ROWS_MIN: Final = 64


class Cells:
    """One memoryview per column."""

    def __getattr__(self, name: str) -> memoryview[int]:
        raise AttributeError(name)


class Table:
    """Records by slot. A released slot is reused; until then its cells contain `NONE`."""

    columns: ClassVar[Mapping[str, Any]]

    def __init__(self) -> None:
        self.at = Cells()
        self._free: list[int] = []
        self._size = 0
        self._rows = 0
        self._grow(_ROWS_MIN)

    def __len__(self) -> int:
        return self._size - len(self._free)

    @property
    def size(self) -> int:
        """One more than the highest slot ever used."""
        return self._size

    def allocate(self) -> int:
        """Return an unused slot."""
        if self._free:
            return self._free.pop()
        if self._size == self._rows:
            self._grow(2 * self._rows)
        self._size += 1
        return self._size - 1

    def release(self, slot: int) -> None:
        for name in self.columns:
            getattr(self.at, name)[slot] = NONE
        self._free.append(slot)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return the cells of all slots up to `size`; unused slots contain `NONE`."""
        column: npt.NDArray[Any] = getattr(self, name)
        return column[: self._size]

    def _grow(self, rows: int) -> None:
        for name, kind in self.columns.items():
            column = np.full(rows, NONE, dtype=kind)
            if self._size:
                column[: self._size] = getattr(self, name)[: self._size]
            setattr(self, name, column)
            setattr(self.at, name, column.data)
        self._rows = rows


class Pool(Generic[V]):
    """Reference-counted pool of shared values. The id of a value without references is reused."""

    def __init__(self) -> None:
        self.values: list[V | None] = []
        self.ids: dict[V, int] = {}
        self._counts: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> V:
        value = self.values[number]
        if value is None:
            raise LookupError(f"pool value {number} has no references")
        return value

    def acquire(self, value: V) -> int:
        """Return the id of a value and add a reference to it."""
        existing = self.ids.get(value)
        if existing is not None:
            self._counts[existing] += 1
            return existing
        if self._free:
            number = self._free.pop()
            self.values[number], self._counts[number] = value, 1
        else:
            number = len(self.values)
            self.values.append(value)
            self._counts.append(1)
        self.ids[value] = number
        return number

    def release(self, number: int) -> None:
        """Remove a reference."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self.ids[self[number]]
            self.values[number] = None
            self._free.append(number)


Ints = npt.NDArray[np.int64]

CHANGES_MAX: Final = 1 << 16
"""Number of changes remembered by row; readers that fall further behind must check all rows."""
_LOG_ROWS_MIN: Final = 16


class NameInterner:
    """Distinct values and their ids, in order of first appearance. Append-only: an assigned id never changes."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.ids: dict[Any, int] = {}

    def intern(self, value: Hashable | None) -> int:
        if value is None:
            return -1
        number = self.ids.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class ChangeLog:
    """Log of changed rows. `count` is the total number of changes since the beginning."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._rows: Ints = np.zeros(_LOG_ROWS_MIN, dtype=np.int64)
        self._used = 0

    def add(self, row: int) -> None:
        if self._used == len(self._rows):
            self._make_space(1)
        self._rows[self._used] = row
        self._used += 1
        self.count += 1

    def extend(self, rows: Ints) -> None:
        more = len(rows)
        self.count += more
        if more > CHANGES_MAX:
            self._used = 0  # an incomplete list would look complete
            return
        if self._used + more > len(self._rows):
            self._make_space(more)
        self._rows[self._used : self._used + more] = rows
        self._used += more

    def since(self, count: int) -> Ints | None:
        """Return the rows that changed after the first `count` changes, possibly repeated; None if they are no longer
        remembered.
        """
        back = self.count - count
        return None if back > self._used else self._rows[self._used - back : self._used]

    def _make_space(self, more: int) -> None:
        """Make space for `more` entries, at most CHANGES_MAX, keeping up to CHANGES_MAX old ones."""
        retained = self._rows[max(self._used - CHANGES_MAX, 0) : self._used]
        self._rows = np.zeros(min(2 * (len(retained) + more), 2 * CHANGES_MAX), dtype=np.int64)
        self._rows[: len(retained)] = retained
        self._used = len(retained)

    def fork(self) -> ChangeLog:
        """Return an empty log that continues the count."""
        return ChangeLog(self.count)
