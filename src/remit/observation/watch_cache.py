"""Watch cache: all rows of a scope by key, with indexes and change listeners.

Serves controllers and the API server, like an informer's store. It takes no decisions and writes nothing.

Rows are stored as the received bytes and decoded on access, because a scope has many more replicas than are looked at in a
second. Recently decoded objects are cached and shared, which is safe because objects are frozen.

A list is applied as a unit. While its pages arrive the cache stays as it was; at the end every row that differs, or is
missing from the list, is reported as an ordinary change. Listeners therefore need not know that a relist happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from remit.model.kinds.registry import DEFINITIONS
from remit.model.objects import decode_cached
from remit.model.records import Phase, Replica
from remit.observation.reflector import RESTORE_MARKER, WatchPosition
from remit.store.protocol import HEAD, Head, Row, WatchEvent
from remit.world.interfaces import Clock

_IGNORED_PREFIXES: Final = ("batch/", *(f"{definition.prefix}/" for definition in DEFINITIONS if definition.note))
"""Rows whose number only grows, and on which no reader of the cache bases a decision."""
_UNDECODED_PREFIX: Final = "generation/"
"""Generations come with every workload and are looked up rather than followed, so listeners get the undecoded `CachedRow`."""

PhaseAndResult = tuple[Phase, str]
_WITHOUT_RESULT: Final[dict[Phase, PhaseAndResult]] = {phase: (phase, "") for phase in Phase}
"""Shared by all replicas that have not ended."""


class CachedRow(Struct, gc=False):
    """One row; replaced by a new instance when its value changes. All indexes share the string object `key`, to save memory.

    `listed` is the number of the last list that contained the row; only the cache sets it.
    """

    key: str
    value: bytes
    revision: int
    listed: int

    @property
    def obj(self) -> Any:
        return decode_cached(self.value)


class CacheListener(Protocol):
    """Receives changes of a cache: `on_change` for each changed row, then `on_commit` once after all changes of one commit.

    A listener of one node gets `on_commit` only after a change of that node, or after `notify_on_commit`.
    """

    def on_change(self, key: str, old: Any, new: Any) -> None:
        """Handle one changed row. `old` is None for a new row, `new` is None for a deleted one."""
        ...

    def on_commit(self) -> None: ...


class WatchCache(WatchPosition):
    """Rows by key in order of arrival; the keys of replicas also by phase, by node, and by tenant and workload."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.rows: dict[str, CachedRow] = {}
        self.by_phase: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.by_node: dict[str, dict[str, None]] = {}
        self.by_workload: dict[tuple[str, str], dict[str, PhaseAndResult]] = {}
        """Phase and result of each replica, so that replicas can be counted without decoding their rows."""
        self._by_kind: dict[str, dict[str, CachedRow]] = {}
        """Rows of every kind except replicas, which have their own indexes."""
        self.changes = 0
        """Number of changes applied so far."""
        self._list_position: tuple[Head, int] | None = None
        self._list_number = 0
        self._listed_rows: list[Row] = []
        self._listeners: list[CacheListener] = []
        self._node_listeners: dict[str, list[CacheListener]] = {}
        self._awaiting_commit: dict[CacheListener, None] = {}

    def subscribe(self, listener: CacheListener, node: str = "") -> None:
        """Call the listener for all further changes, or only for those of one node and its replicas.

        There may be very many listeners of single nodes; a change concerns at most two of them.
        """
        (self._node_listeners.setdefault(node, []) if node else self._listeners).append(listener)

    def unsubscribe(self, listener: CacheListener, node: str = "") -> None:
        """Stop calling the listener."""
        listeners = self._node_listeners.get(node, []) if node else self._listeners
        listeners.remove(listener)
        self._awaiting_commit.pop(listener, None)
        if node and not listeners:
            del self._node_listeners[node]

    def notify_on_commit(self, listener: CacheListener) -> None:
        """Call the listener's `on_commit` at the next commit even if nothing of its node changes. The cache is known to be
        fresh then.
        """
        self._awaiting_commit[listener] = None

    # -- reading ---------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Any:
        row = self.rows.get(key)
        return None if row is None else decode_cached(row.value)

    def of_kind(self, prefix: str) -> Iterator[tuple[str, CachedRow]]:
        """Iterate over the rows of a prefix: `kind/`, or `kind/tenant/`."""
        kind, _, rest = prefix.partition("/")
        rows = self._by_kind.get(kind, {})
        if kind == "replica":
            rows = {key: self.rows[key] for keys in self.by_phase.values() for key in keys}
        return ((key, row) for key, row in rows.items() if key.startswith(prefix)) if rest else iter(rows.items())

    def count_by_kind(self) -> dict[str, int]:
        """Return the number of rows of each kind, by the first part of their keys."""
        return {"replica": sum(map(len, self.by_phase.values())), **{kind: len(rows) for kind, rows in self._by_kind.items()}}

    def replicas_of(self, tenant: str, workload: str) -> list[CachedRow]:
        """Return the replicas of a workload."""
        return [self.rows[key] for key in self.by_workload.get((tenant, workload), ())]

    def replicas_on(self, node: str) -> list[CachedRow]:
        """Return the replicas whose status names a node: those bound to it, and released ones that ran there last."""
        return [self.rows[key] for key in self.by_node.get(node, ())]

    # -- sink of the reflector -------------------------------------------------------------------------------------------

    def begin_list(self, head: Head, revision: int) -> None:
        self._list_position, self._listed_rows = (head, revision), []
        self._list_number += 1

    def add_page(self, rows: Sequence[Row]) -> None:
        for row in rows:
            known = self.rows.get(row.key)
            if known is None or known.revision != row.revision:
                self._listed_rows.append(row)
            if known is not None:
                known.listed = self._list_number

    def end_list(self) -> None:
        if self._list_position is None:
            return
        (head, revision), self._list_position = self._list_position, None
        new, self._listed_rows = self._listed_rows, []
        for key in [key for key, cached in self.rows.items() if cached.listed != self._list_number]:
            self._set(key, None, 0)
        if not any(row.key == RESTORE_MARKER for row in new):
            self.set_restore_marker(None)
        for row in new:
            self._set(row.key, row.value, row.revision)
        self.advance(head, revision)

    def apply(self, event: WatchEvent) -> None:
        for change in event.changes:
            self._set(change.key, change.value, change.revision)
        if event.head is not None:
            self.advance(event.head, event.revision)

    def advance(self, head: Head, revision: int) -> None:
        super().advance(head, revision)
        self.size = len(self.rows)
        awaiting, self._awaiting_commit = self._awaiting_commit, {}
        for listener in dict.fromkeys((*self._listeners, *awaiting)):
            listener.on_commit()

    def _set(self, key: str, value: bytes | None, revision: int) -> None:
        if key == RESTORE_MARKER:
            self.set_restore_marker(value)
        if key in (HEAD, RESTORE_MARKER) or key.startswith(_IGNORED_PREFIXES):
            return
        row = self.rows.get(key)
        undecoded = key.startswith(_UNDECODED_PREFIX)
        old = row if row is None or undecoded else row.obj
        if row is not None:
            key = row.key
            self._unindex(key, old)
        if value is None:
            self.rows.pop(key, None)
            new = None
        else:
            row = self.rows[key] = CachedRow(key, value, revision, self._list_number)
            new = row if undecoded else row.obj
            self._index(row, new)
        self._notify(key, old, new)

    def _notify(self, key: str, old: Any, new: Any) -> None:
        self.changes += 1
        for listener in self._listeners:
            listener.on_change(key, old, new)
        if self._node_listeners:
            old_node, new_node = _node_of(key, old), _node_of(key, new)
            for node in (new_node,) if old_node == new_node else (old_node, new_node):
                for listener in self._node_listeners.get(node, ()):
                    listener.on_change(key, old, new)
                    self._awaiting_commit[listener] = None

    def _index(self, row: CachedRow, obj: Any) -> None:
        if not isinstance(obj, Replica):
            self._by_kind.setdefault(row.key.partition("/")[0], {})[row.key] = row
            return
        status = obj.status
        self.by_phase[status.phase][row.key] = None
        self.by_node.setdefault(status.node, {})[row.key] = None
        entry = (status.phase, status.result) if status.result else _WITHOUT_RESULT[status.phase]
        self.by_workload.setdefault((obj.metadata.tenant, obj.spec.workload), {})[row.key] = entry

    def _unindex(self, key: str, obj: Any) -> None:
        if not isinstance(obj, Replica):
            self._by_kind.get(key.partition("/")[0], {}).pop(key, None)
            return
        self.by_phase[obj.status.phase].pop(key, None)
        _remove_from_index(self.by_node, obj.status.node, key)
        _remove_from_index(self.by_workload, (obj.metadata.tenant, obj.spec.workload), key)


def _node_of(key: str, obj: Any) -> str:
    if isinstance(obj, Replica):
        return obj.status.node
    return key.removeprefix("node/") if key.startswith("node/") else ""


def _remove_from_index(index: dict[Any, dict[str, Any]], entry: Any, key: str) -> None:
    """Remove a key from an index. Empty entries are deleted, because names come and go for as long as a scope lives."""
    keys = index.get(entry)
    if keys is not None:
        keys.pop(key, None)
        if not keys:
            del index[entry]
