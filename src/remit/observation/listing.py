"""What has changed since, by a list? Compares its rows with what is known, by their revisions; it changes nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from remit.observation.following import MARKER
from remit.observation.replicas import Replicas
from remit.observation.shapes import Shapes
from remit.observation.things import Things
from remit.store.protocol import Change, Head, Row


class Listing:
    """One list on its way in. If it is `compared`, only what differs is kept; what is known and was not in it is gone."""

    def __init__(
        self, things: Things, shapes: Shapes, replicas: Replicas, head: Head, revision: int, *, compared: bool
    ) -> None:
        self.head, self.revision, self.compared = head, revision, compared
        self.grants: list[Change] = []
        """Of a list that is not compared: a grant may be told before the one that it was carved out of."""
        self._things, self._shapes, self._replicas = things, shapes, replicas
        self._differ: list[Change] = []
        self._there: set[str] = set()
        self._slots = np.zeros(replicas.size, dtype=np.bool_)
        self._owners = np.zeros(shapes.workloads.size, dtype=np.bool_)
        self._generations = np.zeros(shapes.size, dtype=np.bool_)

    def compare(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if self._known(row.key) != row.revision:
                self._differ.append(Change(*row))

    def _known(self, key: str) -> int | None:
        """At which revision it is known; it is marked as still there."""
        kind, _, path = key.partition("/")
        if kind == "replica":
            return self._mark(self._slots, self._replicas.slots.get(key), self._replicas.at.revision)
        if kind == "generation":
            return self._mark(self._generations, self._things.generation(path), self._shapes.at.revision)
        if kind == "workload":
            workloads = self._shapes.workloads
            return self._mark(self._owners, workloads.ids.get(path), workloads.at.revision)
        self._there.add(key)
        return self._things.revisions.get(key)

    @staticmethod
    def _mark(marks: npt.NDArray[np.bool_], place: int | None, revisions: memoryview[int]) -> int | None:
        if place is None:
            return None
        marks[place] = True
        return revisions[place]

    def changes(self) -> list[Change]:
        """All that must be applied for what is known to become what was listed."""
        return [*self._differ, *(Change(key, None, self.revision) for key in self._gone())]

    def _gone(self) -> Iterator[str]:
        yield from (key for key in self._things.revisions if key not in self._there)
        if MARKER not in self._there:
            yield MARKER
        shapes, names = self._shapes, self._shapes.workloads.names
        for generation in _unmarked(self._generations, shapes.column("revision")):
            yield f"generation/{names[shapes.at.workload[generation]]}/{shapes.at.number[generation]:08d}"
        for owner in _unmarked(self._owners, shapes.workloads.column("revision")):
            yield f"workload/{names[owner]}"
        for slot in _unmarked(self._slots, self._replicas.column("revision")):
            yield self._replicas.keys[slot]


def _unmarked(marks: npt.NDArray[np.bool_], revisions: npt.NDArray[np.int64]) -> list[int]:
    found: list[int] = np.flatnonzero((revisions >= 0) & ~marks).tolist()
    return found
