"""Non-replica rows of the scheduler view, and the changes a scheduler must hear of.

Gathered until it is taken; what is done about it is decided in proposal/.

Nodes, tenants, grants, classes, policies, workloads, generations. No replica is known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from remit.law.ledgers import ledgers_of
from remit.model.kinds import Node, NodeHealth, Override, PriorityClass, Tenant
from remit.model.objects import dec_hook
from remit.model.records import Grant, PolicyRevision, Summary
from remit.observation.hints import PREFIX, Hints
from remit.observation.node_columns import Columns
from remit.observation.postings import Accounts
from remit.observation.shapes import Shapes
from remit.observation.topology_counts import SeenPeers
from remit.store.protocol import Change, Corrupt

Cure = tuple[str | int, ...]
"""What may end a wait: `("room", row)`, `("node", row)`, `("quota", ledger)`, `("grant", ledger)`, `("policy",)`,
`("priority",)`, `("peers", tenant)`, `("workload", tenant, name)`, or `("domains",)`: a node went or is another, so that there
may be fewer domains to spread over."""


class News:
    """What happened since somebody last took it, each thing once, in the order in which it first happened.

    `anew`: everything was listed from nothing, and slots from before mean nothing. `settled` are slots that stopped waiting for
    a node, or are no longer the same; they are to be read before `pending`, which wait now: one may be in both. `ready` are
    reservations whose victims have gone.
    """

    __slots__ = ("anew", "cures", "pending", "ready", "settled")

    def __init__(self, *, anew: bool = False) -> None:
        self.anew = anew
        self.pending: dict[int, None] = {}
        self.settled: dict[int, None] = {}
        self.ready: dict[int, None] = {}
        self.cures: dict[Cure, None] = {}

    def __bool__(self) -> bool:
        return bool(self.anew or self.pending or self.settled or self.ready or self.cures)

    def waits(self, slot: int) -> None:
        self.pending[slot] = None

    def no_longer_waits(self, slot: int) -> None:
        self.pending.pop(slot, None)
        self.settled[slot] = None


_DECODERS: Final[Mapping[str, Any]] = {
    kind.__name__.lower(): msgspec.json.Decoder(kind, dec_hook=dec_hook).decode
    for kind in (Node, Override, PriorityClass, Summary, Tenant, PolicyRevision, Grant)
}
KINDS: Final = ("node", "override", "priorityclass", "summary", "tenant", "policyrevision", "workload", "generation", "grant")
"""Of each, the rows in the order in which they are listed. A kind that is added needs its line in `change`."""


class Moved(NamedTuple):
    """What is about to go, or may change in amount: whoever holds any of it has to let go first.

    The authority lets nothing go that somebody holds, and writes no generation anew while replicas are of it. But somebody may
    be assumed to hold it, and a list that spans a deletion may show a generation with a new content.
    """

    rows: frozenset[int]
    ledgers: frozenset[str]
    rewritten: frozenset[int]


class Things:
    """Rows of every kind but replicas. Those of which there are few are kept as objects, with their revisions."""

    def __init__(self, columns: Columns, shapes: Shapes, accounts: Accounts, peers: SeenPeers) -> None:
        self.classes: dict[str, PriorityClass] = {}
        self.overrides: dict[str, Override] = {}
        self.hints = Hints()
        self.revisions: dict[str, int] = {}
        """By key, of all but workloads and generations, which have their own columns."""
        self._columns, self._shapes, self._accounts, self._peers = columns, shapes, accounts, peers

    def concerns(self, key: str) -> bool:
        return key.partition("/")[0] in KINDS

    def moved(self, changes: Sequence[Change]) -> Moved:
        rows, ledgers, rewritten = set[int](), set[str](), set[int]()
        for key, value, _ in changes:
            kind, _, path = key.partition("/")
            if kind == "generation":
                generation = self.generation(path) if value is not None else None
                rewritten.update(() if generation is None else (generation,))
            elif value is None and kind == "node" and path in self._columns.rows:
                rows.add(self._columns.rows[path])
            elif value is None and (opened := self._opened(kind, path)) is not None:
                ledgers.update(name for name, _, _ in ledgers_of(opened))
        return Moved(frozenset(rows), frozenset(ledgers), frozenset(rewritten))

    def change(self, changes: Sequence[Change], news: News) -> None:
        """All of one event. What is made comes before what stands on it, and what goes, after."""
        by_kind: dict[str, list[Change]] = {}
        for change in changes:
            by_kind.setdefault(change.key.partition("/")[0], []).append(change)
        for change in by_kind.get("node", ()):
            self._node(change, news)
        for change in by_kind.get("priorityclass", ()):
            self._class(change, news)
        self._charge([*by_kind.get("tenant", ()), *by_kind.get("grant", ())], news)
        for change in by_kind.get("policyrevision", ()):
            self._policy(change, news)
        for change in by_kind.get("workload", ()):
            self._workload(change, news)
        for change in by_kind.get("generation", ()):
            self._keep(change)
        if "generation" in by_kind:
            self._peers.reshaped()
        for change in by_kind.get("override", ()):
            self._override(change)
        for change in by_kind.get("summary", ()):
            self._summary(change, news)

    def _decode(self, kind: str, change: Change) -> Any:
        try:
            thing = _DECODERS[kind](change.value)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"row {change.key} does not decode ({error}); restore a backup") from None
        self.revisions[change.key] = change.revision
        return thing

    def _gone(self, change: Change) -> bool:
        if change.value is None:
            self.revisions.pop(change.key, None)
        return change.value is None

    def _node(self, change: Change, news: News) -> None:
        name, columns = change.key.partition("/")[2], self._columns
        if self._gone(change):
            if name in columns.rows:
                columns.drop(name)
                news.cures["domains",] = None
            return
        node: Node = self._decode("node", change)
        old = columns.nodes[columns.rows[name]] if name in columns.rows else None
        row = columns.put(node)
        if old is None or _better(old, node):
            news.cures["node", row] = None
        if old is not None and _stands(old) != _stands(node):
            news.cures["domains",] = None

    def _class(self, change: Change, news: News) -> None:
        name = change.key.partition("/")[2]
        if self._gone(change):
            self.classes.pop(name, None)
        else:
            self.classes[name] = self._decode("priorityclass", change)
        news.cures["priority",] = None

    def _override(self, change: Change) -> None:
        """Kept, whether or not its time has passed: who asks what is in force knows the time."""
        name = change.key.partition("/")[2]
        if self._gone(change):
            self.overrides.pop(name, None)
        else:
            self.overrides[name] = self._decode("override", change)

    def _summary(self, change: Change, news: News) -> None:
        name = change.key.partition("/")[2]
        summary: Summary | None = None if self._gone(change) else self._decode("summary", change)
        if name.startswith(PREFIX):
            news.cures.update({("hinted", work): None for work in self.hints.put(name, summary)})

    def _charge(self, changes: Sequence[Change], news: News) -> None:
        puts, gone = list[Tenant | Grant](), list[Tenant | Grant]()
        for change in changes:
            kind, _, path = change.key.partition("/")
            if self._gone(change):
                opened = self._opened(kind, path)
                gone += [] if opened is None else [opened]
            else:
                puts.append(self._decode(kind, change))
        if changes:
            self._accounts.change(puts, gone)
        for thing in puts:
            if isinstance(thing, Grant):
                news.cures[self._accounts.kind(thing.metadata.name), thing.metadata.name] = None

    def _opened(self, kind: str, name: str) -> Tenant | Grant | None:
        if kind == "tenant":
            return self._accounts.tenants.get(name)
        return self._accounts.grants.get(name) if kind == "grant" else None

    def _policy(self, change: Change, news: News) -> None:
        """The highest number is in force; older ones are kept for rollback, and nobody here asks for them."""
        if self._gone(change):
            return
        policy: PolicyRevision = self._decode("policyrevision", change)
        known = self._shapes.policy
        if known is None or policy.spec.number >= known.spec.number:
            self._shapes.put_policy(policy)
            news.cures["policy",] = None

    def _workload(self, change: Change, news: News) -> None:
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
        news.cures["workload", tenant, name] = None

    def _keep(self, change: Change) -> None:
        path = change.key.partition("/")[2]
        if change.value is None:
            self._shapes.drop(path)
            return
        if self.generation(path) is not None:
            self._peers.clear()
        self._shapes.put(path, change.value, change.revision)

    def generation(self, path: str) -> int | None:
        """By `tenant/workload/number`."""
        name, _, number = path.rpartition("/")
        owner = self._shapes.workloads.ids.get(name)
        return None if owner is None else self._shapes.ids.get(owner << 32 | int(number))


def _better(old: Node, new: Node) -> bool:
    """Might something fit it now that did not before?"""

    def takes(node: Node) -> bool:
        shut = node.spec.unschedulable or node.spec.draining or node.metadata.deleting
        return node.status.health is NodeHealth.READY and not shut

    return takes(new) and (not takes(old) or old.spec != new.spec or old.metadata.labels != new.metadata.labels)


def _stands(node: Node) -> tuple[object, ...]:
    """What says who could be placed there at all, and in which domains it is."""
    spec = node.spec
    return spec.region, spec.zone, spec.pool, spec.taints, node.metadata.labels
