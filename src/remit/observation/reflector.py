"""Reflector: list, watch, verify the chain, resync; diffs a relist against known rows.

List, then watch, and prove that nothing was missed; what the rows mean is the sink's affair.

A list may come from a member that lags: one that is older than what this observer has seen is refused. After a restart it has
seen nothing that it could compare with, so its first list is a linearizable one. A list comes in pages and is taken as a whole:
the sink learns where it begins and where it ends, and one that breaks off begins anew.

Compares its rows with what is known, by their revisions; it changes nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from remit.observation.cluster_objects import Things
from remit.observation.replica_table import Replicas
from remit.observation.shapes import Shapes
from remit.store import chain
from remit.store.protocol import HEAD, Change, Event, Head, Row, Store, StoreError, Unavailable
from remit.world.concurrency import one_failure
from remit.world.interfaces import Clock, World

MARKER: Final = "incarnation"
"""The row that says which incarnation the rows were last doubted for."""

_LOOKS: Final = 2
"""How often it is looked, in the time after which a silent watch is dead, whether anything came."""

_BLIND_PART: Final = 200
"""Whoever lists sees nothing new meanwhile. That nothing was missed is proved by every event, so it is listed again only for
what no proof would find, and for no more than this part of the time.
"""


class Part(NamedTuple):
    """Some of what is listed: what begins with `prefix`, past `after`."""

    prefix: str
    after: str = ""


EVERYTHING: Final = Part("allotment/"), Part("", "batch0")
"""But what every batch leaves behind, which grows with the run and which no observer reads: `batch0` is the next key after
every `batch/…`, and only allotments come before those."""


class Sight:
    """Where an observer stands: at which revision of which chain, and since when."""

    def __init__(self, clock: Clock) -> None:
        self.head: Head | None = None
        self.revision = 0
        self.seen_ms = 0
        self.size = 0
        """How many rows are known."""
        self._clock = clock
        self._doubted = ""

    def reached(self, head: Head, revision: int) -> None:
        self.head, self.revision, self.seen_ms = head, revision, self._clock.now_ms()

    def doubted(self, marker: bytes | None) -> None:
        """What the row `MARKER` says."""
        self._doubted = "" if marker is None else marker.decode()

    @property
    def sober(self) -> bool:
        """Has this incarnation doubted what its backup says? Until then its rows are a memory: nobody writes in its name."""
        return self.head is not None and self._doubted == self.head.incarnation

    def age_ms(self) -> int:
        return max(0, self._clock.now_ms() - self.seen_ms)


class Sink(Protocol):
    """Whoever keeps what is observed. It stands at `head` and `revision`, and moves on as it takes a list or an event."""

    @property
    def head(self) -> Head | None: ...
    @property
    def revision(self) -> int: ...

    @property
    def size(self) -> int:
        """How many rows are known."""
        ...

    def begin(self, head: Head, revision: int) -> None:
        """A list as of this revision begins; one that had begun before is void."""
        ...

    def page(self, rows: Sequence[Row]) -> None: ...

    def end(self) -> None:
        """That was the whole list: what was not in it is not there."""
        ...

    def apply(self, event: Event) -> None:
        """It follows from what was seen."""
        ...


class _Over(Exception):
    """This watch has lasted long enough, or has fallen silent."""


class Follower:
    """Feeds a sink. `sure` answers lists that are linearizable; `parts` are listed in their order, as of one revision."""

    def __init__(
        self, store: Store, sure: Store, world: World, sink: Sink, *, idle_ms: int = 10_000, parts: Sequence[Part] = EVERYTHING
    ) -> None:
        self._store = store
        self._sure = sure
        self._world = world
        self._sink = sink
        self._parts = tuple(parts)
        self._idle_ms = idle_ms
        """A scope beats. After so long without a word the watch is dead, whatever it looks like."""
        self._row_ms = 0.0
        """How long it took to list a row, the last time."""

    async def follow(self) -> None:
        """For ever: list, then watch. A watch that only broke is taken up where it was; whatever else happened, list anew."""
        listed = False
        while True:
            try:
                if not listed:
                    await self._list()
                    listed = True
                await self._watch()
                listed = False
            except Unavailable:
                await self._world.clock.sleep_ms(50 + self._world.chance.uniform_ms(500))
            except (StoreError, TimeoutError):
                listed = False
                await self._world.clock.sleep_ms(50 + self._world.chance.uniform_ms(500))

    async def _list(self) -> None:
        store, began_ms = self.lister(), self._world.clock.now_ms()
        page = await store.range(HEAD, limit=1)
        head = chain.decode_head(page.rows[0].value) if page.rows else None
        if head is None or not self._takes(head, page.revision):
            raise TimeoutError("the list is older than what was seen, or there is nothing yet")
        self._sink.begin(head, page.revision)
        for prefix, after in self._parts:
            while True:
                page = await store.range(prefix, after=after, revision=page.revision)
                self._sink.page(page.rows)
                if not page.more:
                    break
                after = page.rows[-1].key
        self._sink.end()
        self._row_ms = (self._world.clock.now_ms() - began_ms) / max(1, self._sink.size)

    def lister(self) -> Store:
        """Whom to ask for everything: somebody sure, as long as nothing has been seen."""
        return self._sure if self._sink.head is None else self._store

    def _takes(self, head: Head, revision: int) -> bool:
        """Is this list at least as new as what this observer has seen before?"""
        known = self._sink.head
        return revision >= self._sink.revision or (known is not None and head.incarnation != known.incarnation)

    async def _watch(self) -> None:
        """Until it is time to list anew, or what comes does not follow from what was seen."""
        watch = await self._store.watch("", after=self._sink.revision)
        try:
            with suppress(_Over), one_failure():
                async with asyncio.TaskGroup() as group:
                    looking = group.create_task(self._look(), name="look")
                    await self._read(aiter(watch))
                    looking.cancel()
        finally:
            await watch.close()

    async def _look(self) -> None:
        """Beside the reading, which is left alone until it is over: a watch that was interrupted cannot be read on."""
        began_ms, spread = self._world.clock.now_ms(), 1 + self._world.chance.uniform_ms(1_000) / 1_000
        silent = 0
        while silent < _LOOKS and (left_ms := began_ms + self._resync_ms(spread) - self._world.clock.now_ms()) > 0:
            before = self._sink.revision
            await self._world.clock.sleep_ms(min(left_ms, self._idle_ms // _LOOKS))
            silent = silent + 1 if self._sink.revision == before else 0
        raise _Over

    def _resync_ms(self, spread: float) -> int:
        """After how long to list anew: the longer, the longer that takes by now."""
        return int(spread * max(5 * self._idle_ms, _BLIND_PART * self._row_ms * max(1, self._sink.size)))

    async def _read(self, watch: AsyncIterator[Event]) -> None:
        """As long as each follows from what was seen."""
        async for event in watch:
            if event.revision <= self._sink.revision:
                continue  # said again
            if self._sink.head is None or chain.gap(self._sink.head, event) is not None:
                return
            self._sink.apply(event)


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
