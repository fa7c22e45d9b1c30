"""What is left of every device, by row and place on the node? Kept up with the columns, row by row. Nothing is ranked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from remit.law.columns import Columns, Ints
from remit.law.fit import Model
from remit.law.growing import Names
from remit.model.kinds import Node
from remit.model.resources import WHOLE

_ROOM_MIN: Final = 16
_UNUSED: Final[Mapping[str, int]] = {}
_HOLE: Final[tuple[Node | None, Mapping[str, int]]] = None, _UNUSED


class Stock:
    """`left` has the thousandths that nobody uses, a line for each row and a column for each device in the order of the node's
    spec; `sort` has the id of the device's kind and model in `sorts`, and -1 where there is none. Both have lines to spare.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._seen = -1
        self._known: list[tuple[Node | None, Mapping[str, int]]] = []
        self.left: Ints = np.zeros((0, 0), dtype=np.int64)
        self.sort: Ints = np.full((0, 0), -1, dtype=np.int64)
        self._names = Names()

    @property
    def sorts(self) -> list[Model]:
        return self._names.values

    def follow(self) -> Ints | None:
        """Look at what changed; the rows of which anything did, devices or other amounts. None if nothing is known of which."""
        changed, rows = self._columns.changed, len(self._columns)
        if self._seen == changed.count:
            return np.zeros(0, dtype=np.int64)
        touched = changed.since(self._seen) if self._seen >= 0 else None
        self._seen = changed.count
        if rows > len(self.left):
            self._widen(max(2 * rows, _ROOM_MIN), self.left.shape[1])
        self._known += [_HOLE] * (rows - len(self._known))
        found = None if touched is None else np.unique(touched)
        for row in range(rows) if found is None else found.tolist():
            self._look(row)
        return found

    def _look(self, row: int) -> None:
        node, used = self._columns.nodes[row], self._columns.used[row]
        before = self._known[row]
        if node is before[0] and used is before[1]:
            return  # by far the most: somebody took cpu and memory
        self._known[row] = node, used
        devices = node.spec.devices if node is not None else ()
        if len(devices) > self.left.shape[1]:
            self._widen(len(self.left), len(devices))
        self.left[row], self.sort[row] = 0, -1
        for at, device in enumerate(devices):
            self.left[row, at] = max(WHOLE - used.get(device.name, 0), 0)
            self.sort[row, at] = self._names.id((device.kind, device.model))

    def _widen(self, rows: int, width: int) -> None:
        more = (0, rows - self.left.shape[0]), (0, width - self.left.shape[1])
        self.left = np.pad(self.left, more)
        self.sort = np.pad(self.sort, more, constant_values=-1)
