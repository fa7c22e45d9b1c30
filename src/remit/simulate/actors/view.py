"""What does an actor believe of its scope? A local copy by list and watch, which proves that it missed nothing, or lists anew.

A list may come from a member that lags: one that is older than what this observer has seen is refused. After a restart it has
seen nothing that it could compare with, so its first list is a linearizable one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from remit.model.objects import decode
from remit.model.records import Phase, Replica
from remit.store import chain
from remit.store.protocol import HEAD, Event, Head, Row, Store, StoreError, Unavailable
from remit.world.promises import World

_PAST_BATCHES: Final = "batch0"
"""The next key after every `batch/…`; only allotments come before those."""

MARKER: Final = "incarnation"
"""The row that says which incarnation the rows were last doubted for."""

_LOOKS: Final = 2
"""How often it is looked, in the time after which a silent watch is dead, whether anything came."""

Concern = Callable[[str, Any, Any], bool]
"""Does this change of a key, from what it was to what it is, concern one?"""


class Seen(NamedTuple):
    thing: Any
    revision: int


@lru_cache(maxsize=20_000)
def _decoded(value: bytes) -> Any:
    """Every view decodes the same rows; objects are frozen, so one copy serves all."""
    return decode(value)


class View:
    """`rows` are objects by key; `replicas` the keys of replicas by phase. Subscribers hear which keys changed."""

    def __init__(
        self, store: Store, sure: Store, world: World, observed: Callable[[str, int], None], *, idle_ms: int = 10_000
    ) -> None:
        self.rows: dict[str, Seen] = {}
        self._kinds: dict[str, dict[str, Seen]] = {}
        self.by_phase: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.by_node: dict[str, dict[str, None]] = {}
        self.by_workload: dict[tuple[str, str], dict[str, None]] = {}
        self.head: Head | None = None
        self.revision = 0
        self._doubted = ""
        self.seen_ms = 0
        self._store = store
        self._sure = sure
        self._world = world
        self._idle_ms = idle_ms
        """A scope beats. After so long without a word the watch is dead, whatever it looks like."""
        self._observed = observed
        self._subscribers: list[Changes] = []
        self._nodes: dict[str, list[Changes]] = {}
        """Those who hear only of one node's replicas: there may be very many, and each change concerns at most two."""
        self._told: dict[Changes, None] = {}

    def subscribe(self, concerns: Concern, node: str = "") -> Changes:
        """Hear of those keys that concern one, judged by what each was and what it is; or of the replicas on one node."""
        changes = Changes(self, concerns)
        (self._nodes.setdefault(node, []) if node else self._subscribers).append(changes)
        return changes

    def remind(self, changes: Changes) -> None:
        """Wake it at the next word from the scope: then what is seen is fresh."""
        self._told[changes] = None

    def get(self, key: str) -> Any:
        seen = self.rows.get(key)
        return None if seen is None else seen.thing

    @property
    def sober(self) -> bool:
        """Has this incarnation doubted what its backup says? Until then its rows are a memory: nobody writes in its name."""
        return self.head is not None and self._doubted == self.head.incarnation

    def age_ms(self) -> int:
        return max(0, self._world.clock.now_ms() - self.seen_ms)

    def kind(self, prefix: str) -> Iterator[tuple[str, Seen]]:
        """What there is of one kind: `kind/`, or `kind/tenant/`."""
        kind, _, rest = prefix.partition("/")
        found = self._kinds.get(f"{kind}/", {})
        return ((key, seen) for key, seen in found.items() if key.startswith(prefix)) if rest else iter(found.items())

    # -- following -------------------------------------------------------------------------------------------------------

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
        store, rows = self.lister(), list[Row]()
        page = await store.range("", limit=1)
        # Everything but what every batch leaves behind, which grows with the run and which nobody here reads.
        for prefix, after in (("allotment/", ""), ("", _PAST_BATCHES)):
            while True:
                page = await store.range(prefix, after=after, revision=page.revision)
                rows += page.rows
                if not page.more:
                    break
                after = page.rows[-1].key
        head = next((chain.decode_head(row.value) for row in rows if row.key == HEAD), None)
        if head is None or not self._takes(head, page.revision):
            raise TimeoutError("the list is older than what was seen, or there is nothing yet")
        self._replace(rows, head, page.revision)

    def lister(self) -> Store:
        """Whom to ask for everything: somebody sure, as long as nothing has been seen."""
        return self._sure if self.head is None else self._store

    def _takes(self, head: Head, revision: int) -> bool:
        """Is this list at least as new as what this observer has seen before?"""
        known = self.head
        return revision >= self.revision or (known is not None and head.incarnation != known.incarnation)

    async def _watch(self) -> None:
        """Until it is time to list anew, or what comes does not follow from what was seen."""
        watch = await self._store.watch("", after=self.revision)
        resync_ms = 5 * self._idle_ms
        until_ms = self._world.clock.now_ms() + resync_ms + self._world.chance.uniform_ms(resync_ms)
        silent = 0
        try:
            while (left_ms := until_ms - self._world.clock.now_ms()) > 0:
                before = self.revision
                try:
                    async with self._world.clock.timeout_ms(min(left_ms, self._idle_ms // _LOOKS)):
                        await self._read(aiter(watch))
                except TimeoutError:
                    silent = silent + 1 if self.revision == before else 0
                    if silent < _LOOKS:
                        continue
                return
        finally:
            await watch.close()

    async def _read(self, watch: AsyncIterator[Event]) -> None:
        """As long as each follows from what was seen."""
        async for event in watch:
            if event.revision <= self.revision:
                continue  # said again
            if self.head is None or chain.gap(self.head, event) is not None:
                return
            self._apply(event)

    # -- the copy --------------------------------------------------------------------------------------------------------

    def _replace(self, rows: list[Row], head: Head, revision: int) -> None:
        gone = self.rows.keys() - {row.key for row in rows}
        for key in sorted(gone):
            self._set(key, None, 0)
        for row in rows:
            known = self.rows.get(row.key)
            if known is None or known.revision != row.revision:
                self._set(row.key, row.value, row.revision)
        self._reached(head, revision)

    def _apply(self, event: Event) -> None:
        for change in event.changes:
            self._set(change.key, change.value, change.revision)
        if event.head is not None:
            self._reached(event.head, event.revision)

    def _reached(self, head: Head, revision: int) -> None:
        self.head, self.revision, self.seen_ms = head, revision, self._world.clock.now_ms()
        self._observed(head.incarnation, revision)
        told, self._told = self._told, {}
        for changes in told:
            changes.wake()

    def _set(self, key: str, value: bytes | None, revision: int) -> None:
        if key == MARKER:
            self._doubted = "" if value is None else value.decode()
        if key in (HEAD, MARKER) or key.startswith(("batch/", "event/", "decision/")):
            return
        old = self.rows.get(key)
        if old is not None and isinstance(old.thing, Replica):
            self._unlist(key, old.thing)
        kind = self._kinds.setdefault(key[: key.find("/") + 1], {})
        thing: Any = None
        if value is None:
            self.rows.pop(key, None)
            kind.pop(key, None)
        else:
            thing = _decoded(value)
            self.rows[key] = kind[key] = Seen(thing, revision)
            if isinstance(thing, Replica):
                self._enlist(key, thing)
        self._tell(key, None if old is None else old.thing, thing)

    def _tell(self, key: str, old: Any, new: Any) -> None:
        for changes in self._subscribers:
            if changes.concerns(key, old, new):
                changes.keys[key] = None
                self._told[changes] = None
        if self._nodes:
            for name in dict.fromkeys(one.status.node for one in (old, new) if isinstance(one, Replica)):
                for changes in self._nodes.get(name, ()):
                    changes.keys[key] = None
                    self._told[changes] = None

    def _enlist(self, key: str, replica: Replica) -> None:
        self.by_phase[replica.status.phase][key] = None
        self.by_node.setdefault(replica.status.node, {})[key] = None
        self.by_workload.setdefault((replica.metadata.tenant, replica.spec.workload), {})[key] = None

    def _unlist(self, key: str, replica: Replica) -> None:
        self.by_phase[replica.status.phase].pop(key, None)
        self.by_node.get(replica.status.node, {}).pop(key, None)
        self.by_workload.get((replica.metadata.tenant, replica.spec.workload), {}).pop(key, None)


class Changes:
    """What changed since its owner last looked."""

    def __init__(self, view: View, concerns: Concern) -> None:
        self.concerns = concerns
        self.keys: dict[str, None] = dict.fromkeys(view.rows)
        self._event = asyncio.Event()

    def wake(self) -> None:
        if self.keys:
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> list[str]:
        self._event.clear()
        keys, self.keys = self.keys, {}
        return list(keys)
