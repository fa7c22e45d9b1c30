"""Watch cache: all rows of a scope by key, with indexes and change listeners.

Every object, for whoever corrects; it is told what changed. No decisions, no writing.

Rows are kept as the bytes that came, with a few words beside them to find them by, and decoded when somebody looks: a scope
has many more replicas than anybody looks at in a second. What was decoded last is kept for a while, and shared: objects are
frozen.

A list is taken as a whole. While its pages come the board stays as it was; at the end everything that it says otherwise, or
says no more, is a change like any other. So whoever listens need not know that there was a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from remit.model.objects import decode_cached
from remit.model.records import Phase, Replica
from remit.observation.reflector import MARKER, Sight
from remit.store.protocol import HEAD, Event, Head, Row
from remit.world.interfaces import Clock

_UNSEEN: Final = ("batch/", "event/", "decision/")
"""What grows with the run, and what nobody decides by."""
_UNREAD: Final = "generation/"
"""What comes with every workload, and is looked up rather than heard of: listeners are told of the `Kept`, unread."""


class Kept(Struct, gc=False):
    """One row; another one when its value changes. `key` is the one text of that name here: every index holds it, none a copy.
    Only the board sets `listed`: in which list it stood last.
    """

    key: str
    value: bytes
    revision: int
    listed: int

    @property
    def thing(self) -> Any:
        return decode_cached(self.value)


class Listener(Protocol):
    """Who hears of a board. It is told each change as it is noted, and then that all of one commit have been. Those of one node
    hear of that only after a change of theirs, or if they asked for it.
    """

    def changed(self, key: str, old: Any, new: Any) -> None:
        """None stands for what was not there, or is not there any more."""
        ...

    def reached(self) -> None: ...


class Board(Sight):
    """`rows` by key, in the order in which they came; the keys of replicas also by phase, node, and tenant with workload."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.rows: dict[str, Kept] = {}
        self.by_phase: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.by_node: dict[str, dict[str, None]] = {}
        self.by_workload: dict[tuple[str, str], dict[str, None]] = {}
        self._kinds: dict[str, dict[str, Kept]] = {}
        """But replicas, which have indexes of their own."""
        self.changes = 0
        """How many have been noted."""
        self._listed: tuple[Head, int] | None = None
        self._lists = 0
        self._new: list[Row] = []
        self._listeners: list[Listener] = []
        self._at_node: dict[str, list[Listener]] = {}
        self._told: dict[Listener, None] = {}

    def subscribe(self, listener: Listener, node: str = "") -> None:
        """Hear of everything from now on; or only of one node and the replicas on it: there may be very many such listeners,
        and each change concerns at most two of them.
        """
        (self._at_node.setdefault(node, []) if node else self._listeners).append(listener)

    def unsubscribe(self, listener: Listener, node: str = "") -> None:
        """Hear no more of it."""
        listeners = self._at_node.get(node, []) if node else self._listeners
        listeners.remove(listener)
        self._told.pop(listener, None)
        if node and not listeners:
            del self._at_node[node]

    def remind(self, listener: Listener) -> None:
        """Let it know at the next word from the scope: then what is seen is fresh."""
        self._told[listener] = None

    # -- looking ---------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Any:
        kept = self.rows.get(key)
        return None if kept is None else decode_cached(kept.value)

    def kind(self, prefix: str) -> Iterator[tuple[str, Kept]]:
        """What there is of one kind: `kind/`, or `kind/tenant/`."""
        kind, _, rest = prefix.partition("/")
        found = self._kinds.get(kind, {})
        if kind == "replica":
            found = {key: self.rows[key] for keys in self.by_phase.values() for key in keys}
        return ((key, kept) for key, kept in found.items() if key.startswith(prefix)) if rest else iter(found.items())

    def counts(self) -> dict[str, int]:
        """How much there is of each kind, by the word that its keys begin with."""
        return {"replica": sum(map(len, self.by_phase.values())), **{kind: len(found) for kind, found in self._kinds.items()}}

    def of(self, tenant: str, workload: str) -> list[Kept]:
        """The replicas of a workload."""
        return [self.rows[key] for key in self.by_workload.get((tenant, workload), ())]

    def on(self, node: str) -> list[Kept]:
        """The replicas that name a node: those that are there, and those that were released there last."""
        return [self.rows[key] for key in self.by_node.get(node, ())]

    # -- the copy --------------------------------------------------------------------------------------------------------

    def begin(self, head: Head, revision: int) -> None:
        self._listed, self._new = (head, revision), []
        self._lists += 1

    def page(self, rows: Sequence[Row]) -> None:
        for row in rows:
            known = self.rows.get(row.key)
            if known is None or known.revision != row.revision:
                self._new.append(row)
            if known is not None:
                known.listed = self._lists

    def end(self) -> None:
        if self._listed is None:
            return
        (head, revision), self._listed = self._listed, None
        new, self._new = self._new, []
        for key in [key for key, kept in self.rows.items() if kept.listed != self._lists]:
            self._set(key, None, 0)
        if not any(row.key == MARKER for row in new):
            self.doubted(None)
        for row in new:
            self._set(row.key, row.value, row.revision)
        self.reached(head, revision)

    def apply(self, event: Event) -> None:
        for change in event.changes:
            self._set(change.key, change.value, change.revision)
        if event.head is not None:
            self.reached(event.head, event.revision)

    def reached(self, head: Head, revision: int) -> None:
        super().reached(head, revision)
        self.size = len(self.rows)
        told, self._told = self._told, {}
        for listener in dict.fromkeys((*self._listeners, *told)):
            listener.reached()

    def _set(self, key: str, value: bytes | None, revision: int) -> None:
        if key == MARKER:
            self.doubted(value)
        if key in (HEAD, MARKER) or key.startswith(_UNSEEN):
            return
        kept = self.rows.get(key)
        unread = key.startswith(_UNREAD)
        old = kept if kept is None or unread else kept.thing
        if kept is not None:
            key = kept.key
            self._unlist(key, old)
        if value is None:
            self.rows.pop(key, None)
            new = None
        else:
            kept = self.rows[key] = Kept(key, value, revision, self._lists)
            new = kept if unread else kept.thing
            self._enlist(kept, new)
        self._tell(key, old, new)

    def _tell(self, key: str, old: Any, new: Any) -> None:
        self.changes += 1
        for listener in self._listeners:
            listener.changed(key, old, new)
        if self._at_node:
            for name in dict.fromkeys(_node_of(key, one) for one in (old, new) if one is not None):
                for listener in self._at_node.get(name, ()):
                    listener.changed(key, old, new)
                    self._told[listener] = None

    def _enlist(self, kept: Kept, thing: Any) -> None:
        if not isinstance(thing, Replica):
            self._kinds.setdefault(kept.key.partition("/")[0], {})[kept.key] = kept
            return
        self.by_phase[thing.status.phase][kept.key] = None
        self.by_node.setdefault(thing.status.node, {})[kept.key] = None
        self.by_workload.setdefault((thing.metadata.tenant, thing.spec.workload), {})[kept.key] = None

    def _unlist(self, key: str, thing: Any) -> None:
        if not isinstance(thing, Replica):
            self._kinds.get(key.partition("/")[0], {}).pop(key, None)
            return
        self.by_phase[thing.status.phase].pop(key, None)
        _forget(self.by_node, thing.status.node, key)
        _forget(self.by_workload, (thing.metadata.tenant, thing.spec.workload), key)


def _node_of(key: str, thing: Any) -> str:
    if isinstance(thing, Replica):
        return thing.status.node
    return key.removeprefix("node/") if key.startswith("node/") else ""


def _forget(index: dict[Any, dict[str, None]], at: Any, key: str) -> None:
    """An entry that is empty goes: names come and go for as long as a scope lives."""
    inside = index.get(at)
    if inside is not None:
        inside.pop(key, None)
        if not inside:
            del index[at]
