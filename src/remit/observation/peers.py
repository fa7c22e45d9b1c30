"""Who is where, as this view has it? Counts by topology domain, as the rules read them; what the rules are is in law/fit.py.

A count is made from whole columns when it is first asked for, and kept up from then on, by every replica that comes to hold
room or lets go of it, assumed ones included. When a node changes what it is, counts are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from remit.law.columns import Columns, Ints
from remit.law.fit import Ask, Index
from remit.law.labels import selects
from remit.law.peers import NODE, ColumnPeers
from remit.observation.shapes import Shapes

INDEXES_MAX: Final = 4_096
"""How many counts are kept up; the one that was made first goes first, and is made again if it is asked for."""

Spots = Callable[[npt.NDArray[np.intp]], Ints]
"""The rows on which replicas of these generations hold room, one entry each."""


class SeenPeers(ColumnPeers):
    """`fit.Peers` over the columns of a view. For asks made `over` those."""

    def __init__(self, columns: Columns, shapes: Shapes, spots: Spots) -> None:
        super().__init__(columns, {})
        self._shapes = shapes
        self._spots = spots
        self._stood = columns.restood.count
        self._of: dict[int, tuple[Index, ...]] = {}
        """By generation, which of the counts kept are to be moved with its replicas."""
        self._tenants: set[str] = set()

    @property
    def counted(self) -> Mapping[Index, Ints]:
        """The counts that are kept up: always the same mapping, empty while nobody has asked."""
        return self._counts

    def counts(self, index: Index) -> Ints:
        if self._stood != self._columns.restood.count:
            self.clear()
        if index not in self._counts:
            self._make(index)
        return super().counts(index)

    def total(self, index: Index) -> int:
        self.counts(index)
        return super().total(index)

    @property
    def shunned_epoch(self) -> int:
        return self._shapes.carried_epoch

    def shunners(self, ask: Ask) -> Sequence[Index]:
        return [index for index in self._shapes.carriers(ask.tenant) if selects(index.selector, ask.labels)]

    def move(self, generation: int, rows: Iterable[int], sign: int) -> None:
        """A replica of this generation came to hold room on each of these rows, or let go of it."""
        if not self._counts or self._shapes.tenant_of(generation) not in self._tenants:
            return
        found = self._of.get(generation)
        if found is None:
            shapes = self._shapes
            found = self._of[generation] = tuple(i for i in self._counts if shapes.counts_in(generation, i))
        for index in found:
            ids = self._columns.domains(index.key).ids
            counts = super().counts(index)
            for row in rows:
                self._totals[index] += sign
                if ids[row] >= 0:
                    counts[ids[row]] += sign
                    if index.key == NODE:
                        self._columns.changed.add(row)

    def clear(self) -> None:
        """Everything is counted anew when it is next asked for."""
        self._stood = self._columns.restood.count
        self._leave_all()
        self._totals.clear()
        self._of.clear()
        self._tenants.clear()

    def reshaped(self) -> None:
        """A generation came, went, or came to another shape."""
        self._of.clear()

    def _make(self, index: Index) -> None:
        if len(self._counts) >= INDEXES_MAX:
            first = next(iter(self._counts))
            self._leave(first)
            del self._totals[first]
        rows = self._spots(self._shapes.picked(index))
        ids = self._columns.domains(index.key).ids[rows]
        size = len(self._columns.slots(index.key))
        # One slot more, for "no domain", which counts nobody.
        self._enter(index, np.append(np.bincount(ids[ids >= 0], minlength=size), 0))
        self._totals[index] = len(rows)
        self._tenants.add(index.tenant)
        self._of.clear()
