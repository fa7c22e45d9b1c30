"""Non-replica rows of the scheduler view, and the changes that a scheduler reacts to.

Covers nodes, tenants, grants, priority classes, policies, workloads and generations. Changes are collected until the
scheduler takes them; proposal/ decides what to do about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from remit.law.fit import takes_new_work
from remit.law.ledgers import ledgers_of
from remit.model.kinds import Node, Override, PriorityClass, Tenant
from remit.model.kinds.registry import DEFINITIONS
from remit.model.objects import dec_hook
from remit.model.records import Grant, PolicyRevision, Summary
from remit.observation.hints import PREFIX, Hints
from remit.observation.node_columns import NodeColumns
from remit.observation.postings import QuotaLedgers
from remit.observation.shapes import ShapeTable
from remit.observation.topology_counts import ViewPeerCounts
from remit.store.protocol import Corrupt, RowChange

UnblockKey = tuple[str | int, ...]
"""An event that may end a wait: `("room", row)`, `("node", row)`, `("quota", ledger)`, `("grant", ledger)`, `("policy",)`,
`("priority",)`, `("peers", tenant)`, `("workload", tenant, name)`, `("hinted", workload)`, or `("domains",)`: a node was
removed or changed its attributes, so that there may be fewer domains to spread over.
"""


class ViewChanges:
    """Changes since they were last taken, each once, in order of first occurrence. `version` counts the applied and
    assumed changes of the view's whole life.

    `reset`: the view was listed from nothing, and earlier slots are invalid. `no_longer_pending` are slots that stopped
    being pending or now belong to another replica; process them before `pending`, since a slot may be in both. `ready` are
    reservations whose victims have gone.
    """

    __slots__ = ("no_longer_pending", "pending", "ready", "reset", "unblock_events", "version")

    def __init__(self, *, reset: bool = False) -> None:
        self.reset = reset
        self.pending: dict[int, None] = {}
        self.no_longer_pending: dict[int, None] = {}
        self.ready: dict[int, None] = {}
        self.unblock_events: dict[UnblockKey, None] = {}
        self.version = 0

    def take(self) -> ViewChanges:
        """Return the collected changes and start collecting anew."""
        taken = ViewChanges(reset=self.reset)
        taken.pending, taken.no_longer_pending = self.pending, self.no_longer_pending
        taken.ready, taken.unblock_events = self.ready, self.unblock_events
        self._clear()
        return taken

    def restart(self) -> None:
        """Discard changes of earlier slots, which are invalid after a list from nothing."""
        self._clear()
        self.reset = True

    def _clear(self) -> None:
        self.reset = False
        self.pending, self.no_longer_pending, self.ready, self.unblock_events = {}, {}, {}, {}

    def __bool__(self) -> bool:
        return bool(self.reset or self.pending or self.no_longer_pending or self.ready or self.unblock_events)

    def add_pending(self, slot: int) -> None:
        self.pending[slot] = None

    def remove_pending(self, slot: int) -> None:
        self.pending.pop(slot, None)
        self.no_longer_pending[slot] = None


_VIEWED: Final = tuple(definition for definition in DEFINITIONS if definition.scheduler_view)
VIEWED_PREFIXES: Final = tuple(f"{definition.prefix}/" for definition in _VIEWED)
"""Key prefixes of these rows, in the order in which they are listed."""

_UNDECODED_KINDS: Final = ("Workload", "Generation")
"""Kinds of which the view keeps columns; `ShapeTable` decodes only the fields that it needs."""

_DECODERS: Final[Mapping[str, Any]] = {
    definition.prefix: msgspec.json.Decoder(definition.struct, dec_hook=dec_hook).decode
    for definition in _VIEWED
    if definition.kind not in _UNDECODED_KINDS
}


class AffectedHolds(NamedTuple):
    """Nodes, ledgers and generations that an event removes or rewrites: holds on them must be released first.

    The authority removes nothing that is in use and never rewrites a generation that has replicas. But an assumed binding
    may use it, and a list that spans a deletion and re-creation may show a generation with a new content.
    """

    rows: frozenset[int]
    ledgers: frozenset[str]
    rewritten: frozenset[int]


class ClusterObjects:
    """Rows of every kind except replicas. Kinds with few rows are stored as decoded objects with their revisions."""

    def __init__(self, columns: NodeColumns, shapes: ShapeTable, quota_ledgers: QuotaLedgers, peers: ViewPeerCounts) -> None:
        self.classes: dict[str, PriorityClass] = {}
        self.overrides: dict[str, Override] = {}
        self.hints = Hints()
        self.revisions: dict[str, int] = {}
        """Revisions by key, except of workloads and generations, which have revision columns of their own."""
        self._columns, self._shapes, self._quota_ledgers, self._peers = columns, shapes, quota_ledgers, peers

    def is_relevant(self, key: str) -> bool:
        return key.startswith(VIEWED_PREFIXES)

    def affected_by(self, changes: Sequence[RowChange]) -> AffectedHolds:
        rows, ledgers, rewritten = set[int](), set[str](), set[int]()
        for key, value, _ in changes:
            kind, _, path = key.partition("/")
            if kind == "generation":
                generation = self.find_generation(path) if value is not None else None
                rewritten.update(() if generation is None else (generation,))
            elif value is None and kind == "node" and path in self._columns.rows:
                rows.add(self._columns.rows[path])
            elif value is None and (owner := self._ledger_owner(kind, path)) is not None:
                ledgers.update(name for name, _, _ in ledgers_of(owner))
        return AffectedHolds(frozenset(rows), frozenset(ledgers), frozenset(rewritten))

    def apply(self, changes: Sequence[RowChange], view_changes: ViewChanges) -> None:
        """Apply all changes of one event. Rows are added before the rows that refer to them, and removed after."""
        by_kind: dict[str, list[RowChange]] = {}
        for change in changes:
            by_kind.setdefault(change.key.partition("/")[0], []).append(change)
        for change in by_kind.get("node", ()):
            self._apply_node(change, view_changes)
        for change in by_kind.get("priorityclass", ()):
            self._apply_class(change, view_changes)
        self._apply_ledgers([*by_kind.get("tenant", ()), *by_kind.get("grant", ())], view_changes)
        for change in by_kind.get("policyrevision", ()):
            self._apply_policy(change, view_changes)
        for change in by_kind.get("workload", ()):
            self._apply_workload(change, view_changes)
        for change in by_kind.get("generation", ()):
            self._apply_generation(change)
        if "generation" in by_kind:
            self._peers.on_reshaped()
        for change in by_kind.get("override", ()):
            self._apply_override(change)
        for change in by_kind.get("summary", ()):
            self._apply_summary(change, view_changes)

    def _decode(self, kind: str, change: RowChange) -> Any:
        try:
            obj = _DECODERS[kind](change.value)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"row {change.key} does not decode ({error}); restore a backup") from None
        self.revisions[change.key] = change.revision
        return obj

    def _is_deletion(self, change: RowChange) -> bool:
        if change.value is None:
            self.revisions.pop(change.key, None)
        return change.value is None

    def _apply_node(self, change: RowChange, view_changes: ViewChanges) -> None:
        name, columns = change.key.partition("/")[2], self._columns
        if self._is_deletion(change):
            if name in columns.rows:
                columns.drop(name)
                view_changes.unblock_events["domains",] = None
            return
        node: Node = self._decode("node", change)
        old = columns.nodes[columns.rows[name]] if name in columns.rows else None
        row = columns.put(node)
        if old is None or _may_fit_more(old, node):
            view_changes.unblock_events["node", row] = None
        if old is not None and _node_attributes(old) != _node_attributes(node):
            view_changes.unblock_events["domains",] = None

    def _apply_class(self, change: RowChange, view_changes: ViewChanges) -> None:
        name = change.key.partition("/")[2]
        if self._is_deletion(change):
            self.classes.pop(name, None)
        else:
            self.classes[name] = self._decode("priorityclass", change)
        view_changes.unblock_events["priority",] = None

    def _apply_override(self, change: RowChange) -> None:
        """Store an override even if it has expired: the reader knows the time and filters."""
        name = change.key.partition("/")[2]
        if self._is_deletion(change):
            self.overrides.pop(name, None)
        else:
            self.overrides[name] = self._decode("override", change)

    def _apply_summary(self, change: RowChange, view_changes: ViewChanges) -> None:
        name = change.key.partition("/")[2]
        summary: Summary | None = None if self._is_deletion(change) else self._decode("summary", change)
        if name.startswith(PREFIX):
            view_changes.unblock_events.update({("hinted", work): None for work in self.hints.put(name, summary)})

    def _apply_ledgers(self, changes: Sequence[RowChange], view_changes: ViewChanges) -> None:
        puts, removed = list[Tenant | Grant](), list[Tenant | Grant]()
        for change in changes:
            kind, _, path = change.key.partition("/")
            if self._is_deletion(change):
                owner = self._ledger_owner(kind, path)
                removed += [] if owner is None else [owner]
            else:
                puts.append(self._decode(kind, change))
        if changes:
            self._quota_ledgers.apply(puts, removed)
        for obj in puts:
            if isinstance(obj, Grant):
                view_changes.unblock_events[self._quota_ledgers.ledger_kind(obj.metadata.name), obj.metadata.name] = None

    def _ledger_owner(self, kind: str, name: str) -> Tenant | Grant | None:
        if kind == "tenant":
            return self._quota_ledgers.tenants.get(name)
        return self._quota_ledgers.grants.get(name) if kind == "grant" else None

    def _apply_policy(self, change: RowChange, view_changes: ViewChanges) -> None:
        """Apply a policy revision. The one with the highest number is in force; older ones are not needed here."""
        if self._is_deletion(change):
            return
        policy: PolicyRevision = self._decode("policyrevision", change)
        known = self._shapes.policy
        if known is None or policy.spec.number >= known.spec.number:
            self._shapes.put_policy(policy)
            view_changes.unblock_events["policy",] = None

    def _apply_workload(self, change: RowChange, view_changes: ViewChanges) -> None:
        path, shapes = change.key.partition("/")[2], self._shapes
        owner = shapes.workloads.ids.get(path)
        before = None if owner is None else shapes.workloads.at.state[owner]
        if change.value is None:
            shapes.drop_workload(path)
        else:
            owner = shapes.put_workload(path, change.value, change.revision)
            if shapes.workloads.at.state[owner] == before:
                return
        tenant, _, name = path.partition("/")
        view_changes.unblock_events["workload", tenant, name] = None

    def _apply_generation(self, change: RowChange) -> None:
        path = change.key.partition("/")[2]
        if change.value is None:
            self._shapes.drop_generation(path)
            return
        if self.find_generation(path) is not None:
            self._peers.clear()
        self._shapes.put_generation(path, change.value, change.revision)

    def find_generation(self, path: str) -> int | None:
        """Return a generation's id by `tenant/workload/number`."""
        name, _, number = path.rpartition("/")
        owner = self._shapes.workloads.ids.get(name)
        return None if owner is None else self._shapes.ids.get(owner << 32 | int(number))


def _may_fit_more(old: Node, new: Node) -> bool:
    """Whether something may fit the new node that did not fit the old one."""
    changed = not takes_new_work(old) or old.spec != new.spec or old.metadata.labels != new.metadata.labels
    return changed and takes_new_work(new)


def _node_attributes(node: Node) -> tuple[object, ...]:
    """Return the attributes that decide which replicas could be placed on a node, and its domains."""
    spec = node.spec
    return spec.region, spec.zone, spec.pool, spec.taints, node.metadata.labels
