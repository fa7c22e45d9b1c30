"""Reflector: list, watch, verify the chain, resync; diffs a relist against known rows.

The sink interprets the rows. Every event carries the hash chain, which proves that no event was missed.

A list may come from a store member that lags, so a list older than what this observer has already seen is rejected. After a
restart the observer has seen nothing to compare with, so its first list is linearizable. A list arrives in pages and is
applied as a unit: the sink gets its begin and end, and an interrupted list starts again.

`ListDiff` compares a relist with the known rows by their revisions; it changes nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from remit.model.kinds.registry import BY_PREFIX
from remit.observation.cluster_objects import ClusterObjects
from remit.observation.replica_table import ReplicaTable
from remit.observation.shapes import ShapeTable
from remit.store import chain
from remit.store.protocol import HEAD, Head, Row, RowChange, Store, StoreError, Unavailable, WatchEvent
from remit.world.concurrency import first_failure
from remit.world.interfaces import Clock, World

RESTORE_MARKER: Final = "incarnation"
"""Key of the row that names the incarnation for which the authority last marked restored rows as uncertain."""

_IDLE_CHECKS: Final = 2
"""How many times per idle timeout the watchdog checks whether anything arrived."""

_RESYNC_INTERVAL_FACTOR: Final = 200
"""Bounds the share of time spent listing. While listing, an observer sees nothing new. Every event proves that nothing was
missed, so a periodic relist only guards against errors that the proof cannot find, and may take at most 1/200 of the time.
"""


class ListRange(NamedTuple):
    """A range of keys to list: those with `prefix`, after the key `after`."""

    prefix: str
    after: str = ""


ALL_RANGES: Final = (*(ListRange(f"{prefix}/") for prefix in sorted(BY_PREFIX) if prefix < "batch"), ListRange("", "batch0"))
"""All keys except `batch/…`: their number only grows, and no observer reads them. Kinds whose keys sort before them have a
range each; `batch0` is the first key after every `batch/…`.
"""


class WatchPosition:
    """Position of an observer in the store: revision, chain head, and when it was reached."""

    def __init__(self, clock: Clock) -> None:
        self.head: Head | None = None
        self.revision = 0
        self.seen_ms = 0
        self.size = 0
        """Number of known rows."""
        self._clock = clock
        self._restore_marker = ""

    def advance(self, head: Head, revision: int) -> None:
        self.head, self.revision, self.seen_ms = head, revision, self._clock.now_ms()

    def set_restore_marker(self, marker: bytes | None) -> None:
        """Record the value of the row `RESTORE_MARKER`."""
        self._restore_marker = "" if marker is None else marker.decode()

    @property
    def is_current(self) -> bool:
        """Whether the authority of this incarnation has marked what a restored backup makes uncertain.

        Until then the rows describe the state at the time of the backup, and no component writes on their basis.
        """
        return self.head is not None and self._restore_marker == self.head.incarnation

    def age_ms(self) -> int:
        return max(0, self._clock.now_ms() - self.seen_ms)


class Sink(Protocol):
    """Receives the observed rows. It holds the current `head` and `revision`, which advance with every list and event."""

    @property
    def head(self) -> Head | None: ...
    @property
    def revision(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of known rows."""
        ...

    def begin_list(self, head: Head, revision: int) -> None:
        """Start a list as of this revision; discards an unfinished one."""
        ...

    def add_page(self, rows: Sequence[Row]) -> None: ...

    def end_list(self) -> None:
        """Finish the list: rows that were not in it no longer exist."""
        ...

    def apply(self, event: WatchEvent) -> None:
        """Apply an event that directly follows the current position."""
        ...


class _WatchEnded(Exception):
    """The watch is due for a relist, or received nothing for too long."""


class Reflector:
    """Feeds a sink by list and watch, like client-go's reflector. `linearizable` serves the first list; `ranges` are the
    key ranges, listed in order as of one revision.
    """

    def __init__(
        self,
        store: Store,
        linearizable: Store,
        world: World,
        sink: Sink,
        *,
        idle_ms: int = 10_000,
        ranges: Sequence[ListRange] = ALL_RANGES,
    ) -> None:
        self._store = store
        self._linearizable = linearizable
        self._world = world
        self._sink = sink
        self._ranges = tuple(ranges)
        self._idle_ms = idle_ms
        """The scope commits at every heartbeat. After this long without an event the watch is dead, even if the connection
        looks open.
        """
        self._row_ms = 0.0
        """Time the last list took per row."""

    async def run(self) -> None:
        """List, then watch, for ever. A watch that only lost its connection is resumed; after any other failure everything is
        relisted.
        """
        listed = False
        while True:
            try:
                if not listed:
                    await self._list()
                    listed = True
                await self._watch()
                listed = False
            except Unavailable:
                await self._world.clock.sleep_ms(50 + self._world.randomness.jitter_ms(500))
            except (StoreError, TimeoutError):
                listed = False
                await self._world.clock.sleep_ms(50 + self._world.randomness.jitter_ms(500))

    async def _list(self) -> None:
        store, began_ms = self.list_store(), self._world.clock.now_ms()
        page = await store.range(HEAD, limit=1)
        head = chain.decode_head(page.rows[0].value) if page.rows else None
        if head is None or not self._is_new_enough(head, page.revision):
            raise TimeoutError("the list is older than what was already seen, or the store is still empty")
        self._sink.begin_list(head, page.revision)
        for prefix, after in self._ranges:
            while True:
                # Every page is read as of the revision of the head, so that the list is one state and the watch continues it.
                page = await store.range(prefix, after=after, revision=page.revision)
                self._sink.add_page(page.rows)
                if not page.more:
                    break
                after = page.rows[-1].key
        self._sink.end_list()
        self._row_ms = (self._world.clock.now_ms() - began_ms) / max(1, self._sink.size)

    def list_store(self) -> Store:
        """Return the store to list from: the linearizable one as long as nothing has been seen."""
        return self._linearizable if self._sink.head is None else self._store

    def _is_new_enough(self, head: Head, revision: int) -> bool:
        """Whether a list is at least as new as what this observer has seen before."""
        known = self._sink.head
        return revision >= self._sink.revision or (known is not None and head.incarnation != known.incarnation)

    async def _watch(self) -> None:
        """Apply events until it is time to relist, or an event does not follow from the previous one."""
        watch = await self._store.watch("", after=self._sink.revision)
        try:
            with suppress(_WatchEnded), first_failure():
                async with asyncio.TaskGroup() as group:
                    watchdog = group.create_task(self._watchdog(), name="look")
                    await self._apply_events(aiter(watch))
                    watchdog.cancel()
        finally:
            await watch.close()

    async def _watchdog(self) -> None:
        """End the watch on silence or when a relist is due. Runs beside the reader and never interrupts it in between, because
        an interrupted watch cannot be continued.
        """
        # Each watch draws its own factor, so that observers that started together do not all relist together.
        began_ms, spread = self._world.clock.now_ms(), 1 + self._world.randomness.jitter_ms(1_000) / 1_000
        silent = 0
        while silent < _IDLE_CHECKS and (remaining_ms := began_ms + self._resync_ms(spread) - self._world.clock.now_ms()) > 0:
            before = self._sink.revision
            await self._world.clock.sleep_ms(min(remaining_ms, self._idle_ms // _IDLE_CHECKS))
            silent = silent + 1 if self._sink.revision == before else 0
        raise _WatchEnded

    def _resync_ms(self, spread: float) -> int:
        """Time until the next relist; grows with the time a list takes."""
        return int(spread * max(5 * self._idle_ms, _RESYNC_INTERVAL_FACTOR * self._row_ms * max(1, self._sink.size)))

    async def _apply_events(self, watch: AsyncIterator[WatchEvent]) -> None:
        """Apply events as long as each follows from the previous one."""
        async for event in watch:
            if event.revision <= self._sink.revision:
                continue  # a repeated event
            if self._sink.head is None or chain.gap(self._sink.head, event) is not None:
                return
            self._sink.apply(event)


class ListDiff:
    """One list being received. If `has_baseline`, only rows that differ from the known ones are kept, and known rows missing
    from the list count as deleted.
    """

    def __init__(
        self,
        objects: ClusterObjects,
        shapes: ShapeTable,
        replicas: ReplicaTable,
        head: Head,
        revision: int,
        *,
        has_baseline: bool,
    ) -> None:
        self.head, self.revision, self.has_baseline = head, revision, has_baseline
        self.grants: list[RowChange] = []
        """Grants of a list into an empty view. They are applied last, because a grant may be listed before its parent."""
        self._objects, self._shapes, self._replicas = objects, shapes, replicas
        self._changed_rows: list[RowChange] = []
        self._listed_keys: set[str] = set()
        self._slots = np.zeros(replicas.size, dtype=np.bool_)
        self._owners = np.zeros(shapes.workloads.size, dtype=np.bool_)
        self._generations = np.zeros(shapes.size, dtype=np.bool_)

    def compare(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if self._known_revision(row.key) != row.revision:
                self._changed_rows.append(RowChange(*row))

    def _known_revision(self, key: str) -> int | None:
        """Return the known revision of a row and mark the row as still existing."""
        kind, _, path = key.partition("/")
        if kind == "replica":
            return self._mark(self._slots, self._replicas.slots.get(key), self._replicas.at.revision)
        if kind == "generation":
            return self._mark(self._generations, self._objects.find_generation(path), self._shapes.at.revision)
        if kind == "workload":
            workloads = self._shapes.workloads
            return self._mark(self._owners, workloads.ids.get(path), workloads.at.revision)
        self._listed_keys.add(key)
        return self._objects.revisions.get(key)

    @staticmethod
    def _mark(marks: npt.NDArray[np.bool_], slot: int | None, revisions: memoryview[int]) -> int | None:
        if slot is None:
            return None
        marks[slot] = True
        return revisions[slot]

    def changes(self) -> list[RowChange]:
        """Return all changes that turn the known rows into the listed ones."""
        return [*self._changed_rows, *(RowChange(key, None, self.revision) for key in self._missing_keys())]

    def _missing_keys(self) -> Iterator[str]:
        yield from (key for key in self._objects.revisions if key not in self._listed_keys)
        if RESTORE_MARKER not in self._listed_keys:
            yield RESTORE_MARKER
        shapes, names = self._shapes, self._shapes.workloads.names
        for generation in _unmarked(self._generations, shapes.column("revision")):
            yield f"generation/{names[shapes.at.workload[generation]]}/{shapes.at.number[generation]:08d}"
        for owner in _unmarked(self._owners, shapes.workloads.column("revision")):
            yield f"workload/{names[owner]}"
        for slot in _unmarked(self._slots, self._replicas.column("revision")):
            yield self._replicas.keys[slot]


def _unmarked(marks: npt.NDArray[np.bool_], revisions: npt.NDArray[np.int64]) -> list[int]:
    slots: list[int] = np.flatnonzero((revisions >= 0) & ~marks).tolist()
    return slots
