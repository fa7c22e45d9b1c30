"""What does a played actor believe of its scope? Every object, decoded, by kind, phase, node and workload; no decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from remit.model.objects import decode
from remit.model.records import Phase, Replica
from remit.observation.following import MARKER, Follower, Sight
from remit.store.protocol import HEAD, Event, Head, Row, Store
from remit.world.promises import World

Concern = Callable[[str, Any, Any], bool]
"""Does this change of a key, from what it was to what it is, concern one?"""


class Seen(NamedTuple):
    thing: Any
    revision: int


@lru_cache(maxsize=20_000)
def _decoded(value: bytes) -> Any:
    """Every view decodes the same rows; objects are frozen, so one copy serves all."""
    return decode(value)


class View(Sight):
    """`rows` are objects by key; `replicas` the keys of replicas by phase. Subscribers hear which keys changed."""

    def __init__(
        self, store: Store, sure: Store, world: World, observed: Callable[[str, int], None], *, idle_ms: int = 10_000
    ) -> None:
        super().__init__(world.clock)
        self.rows: dict[str, Seen] = {}
        self._kinds: dict[str, dict[str, Seen]] = {}
        self.by_phase: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.by_node: dict[str, dict[str, None]] = {}
        self.by_workload: dict[tuple[str, str], dict[str, None]] = {}
        self._listed: tuple[Head, int, list[Row]] | None = None
        self._follower = Follower(store, sure, world, self, idle_ms=idle_ms)
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

    def kind(self, prefix: str) -> Iterator[tuple[str, Seen]]:
        """What there is of one kind: `kind/`, or `kind/tenant/`."""
        kind, _, rest = prefix.partition("/")
        found = self._kinds.get(f"{kind}/", {})
        return ((key, seen) for key, seen in found.items() if key.startswith(prefix)) if rest else iter(found.items())

    async def follow(self) -> None:
        await self._follower.follow()

    # -- the copy --------------------------------------------------------------------------------------------------------

    def begin(self, head: Head, revision: int) -> None:
        self._listed = head, revision, []

    def page(self, rows: Sequence[Row]) -> None:
        if self._listed is not None:
            self._listed[2].extend(rows)

    def end(self) -> None:
        if self._listed is None:
            return
        (head, revision, rows), self._listed = self._listed, None
        gone = self.rows.keys() - {row.key for row in rows}
        for key in sorted(gone):
            self._set(key, None, 0)
        for row in rows:
            known = self.rows.get(row.key)
            if known is None or known.revision != row.revision:
                self._set(row.key, row.value, row.revision)
        self.reached(head, revision)

    def apply(self, event: Event) -> None:
        for change in event.changes:
            self._set(change.key, change.value, change.revision)
        if event.head is not None:
            self.reached(event.head, event.revision)

    def reached(self, head: Head, revision: int) -> None:
        super().reached(head, revision)
        self._observed(head.incarnation, revision)
        told, self._told = self._told, {}
        for changes in told:
            changes.wake()

    def _set(self, key: str, value: bytes | None, revision: int) -> None:
        if key == MARKER:
            self.doubted(value)
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
