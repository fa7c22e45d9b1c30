"""Columnar tables, shared value pools, interned names and row change logs.

In columns of numbers that grow together, and values that many share. No meaning here.

A decoded object a record would cost a kilobyte each. Whole columns are read as arrays; single cells through `at`, which has a
memoryview of each column: reading or writing one number there costs a third of what NumPy takes for it.

Names and the ids that they were given, and which rows have changed, one after another. For columns.py.
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
    """One memoryview a column."""

    def __getattr__(self, name: str) -> memoryview[int]:
        raise AttributeError(name)


class Table:
    """Records by slot. A slot that was given up is used again; until then its cells have `NONE` in them."""

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

    def slot(self) -> int:
        """A slot that nobody has."""
        if self._free:
            return self._free.pop()
        if self._size == self._rows:
            self._grow(2 * self._rows)
        self._size += 1
        return self._size - 1

    def give_up(self, slot: int) -> None:
        for name in self.columns:
            getattr(self.at, name)[slot] = NONE
        self._free.append(slot)

    def column(self, name: str) -> npt.NDArray[Any]:
        """As many cells as there are slots in use; holes among them have `NONE`."""
        found: npt.NDArray[Any] = getattr(self, name)
        return found[: self._size]

    def _grow(self, rows: int) -> None:
        for name, kind in self.columns.items():
            made = np.full(rows, NONE, dtype=kind)
            if self._size:
                made[: self._size] = getattr(self, name)[: self._size]
            setattr(self, name, made)
            setattr(self.at, name, made.data)
        self._rows = rows


class Pool(Generic[V]):
    """Values that many share, each kept once and counted. An id is used again once nobody has its value."""

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
            raise LookupError(f"nobody has value {number}")
        return value

    def take(self, value: V) -> int:
        """Its id, for one more who has it."""
        found = self.ids.get(value)
        if found is not None:
            self._counts[found] += 1
            return found
        if self._free:
            number = self._free.pop()
            self.values[number], self._counts[number] = value, 1
        else:
            number = len(self.values)
            self.values.append(value)
            self._counts.append(1)
        self.ids[value] = number
        return number

    def drop(self, number: int) -> None:
        """One fewer has it."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self.ids[self[number]]
            self.values[number] = None
            self._free.append(number)


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
