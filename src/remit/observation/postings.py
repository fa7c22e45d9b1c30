"""Quota and grant ledgers of the view, and batched postings to ledgers and columns.

The ledgers are kept as the authority keeps them, from its rows. Nothing is granted and no row is decoded here.

Postings are grouped by shape. A batch binds about a thousand replicas of a few shapes: posting one after another costs a
microsecond per amount, posting by shape a few array operations in all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from remit.law.ledgers import GrantLedger, ledgers_of, parent_charges
from remit.model.kinds import Tenant
from remit.model.records import Grant
from remit.observation.column_table import NONE
from remit.observation.node_columns import NodeColumns
from remit.observation.replica_table import ReplicaTable
from remit.observation.shapes import PlacementSpec, ShapeTable
from remit.observation.topology_counts import ViewPeerCounts
from remit.store.protocol import Corrupt

Pairs = Iterable[tuple[str, int]]


class QuotaLedgers:
    """Tenants and grants by name, and their ledgers. `freed` are the ledgers whose free amount grew since the
    scheduler last took this list.
    """

    def __init__(self, boot: str) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.grants: dict[str, Grant] = {}
        self.slices: dict[str, dict[str, None]] = {}
        """Grants of a tenant's quota that this scope holds from another scope, by tenant."""
        self.ledgers: dict[str, GrantLedger] = {}
        self.freed: dict[str, None] = {}
        self._boot = boot

    def apply(self, puts: Sequence[Tenant | Grant], removed: Sequence[Tenant | Grant]) -> None:
        """Apply all tenants and grants that one event changed. The order within the event does not matter."""
        changed = (*puts, *removed)
        old = [self.grants[name] for obj in changed if isinstance(obj, Grant) and (name := obj.metadata.name) in self.grants]
        names = dict.fromkeys(name for obj in (*changed, *old) for name in self._affected_ledgers(obj))
        free_before = {name: dict(self.ledgers[name].free) for name in names if name in self.ledgers}
        for grant in old:
            self._post_to_parents(grant, -1)
        for obj in removed:
            self._drop(obj)
        for obj in puts:
            self._put(obj)
        for obj in puts:
            if isinstance(obj, Grant):
                self._post_to_parents(obj, 1)
        for name, before in free_before.items():
            ledger = self.ledgers.get(name)
            if ledger is not None and any(count > before.get(resource, 0) for resource, count in ledger.free.items()):
                self.freed[name] = None

    def draw(self, names: Iterable[str], pairs: Pairs, times: int) -> None:
        """Charge these ledgers for `times` equal holders; a negative number returns the charge."""
        charge = [(resource, count * times) for resource, count in pairs]
        for name in names:
            ledger = self.ledgers.get(name)
            if ledger is None:
                raise Corrupt(f"replicas are charged to ledger {name}, which does not exist; restore a backup")
            ledger.draw(charge, 1)
            if times < 0:
                self.freed[name] = None

    def draw_each(self, names: Iterable[str], charges: Iterable[Pairs], sign: int) -> None:
        """Charge each ledger its own amounts, as for a reservation."""
        for name, charge in zip(names, charges, strict=True):
            self.draw((name,), charge, sign)

    def ledger_kind(self, name: str) -> str:
        """Return "quota" for a ledger of quota, else "grant"."""
        ledger = self.ledgers.get(name)
        return "quota" if ledger is None or ledger.grant is None or ledger.grant.spec.purpose == "quota" else "grant"

    def _affected_ledgers(self, obj: Tenant | Grant) -> Iterable[str]:
        yield from (name for name, _, _ in ledgers_of(obj))
        if isinstance(obj, Grant):
            yield from (name for name, _ in parent_charges(obj))

    def _put(self, obj: Tenant | Grant) -> None:
        grant = obj if isinstance(obj, Grant) else None
        if isinstance(obj, Grant):
            if (before := self.grants.get(obj.metadata.name)) is not None:
                self._index_slice(before, present=False)
            self.grants[obj.metadata.name] = obj
            self._index_slice(obj, present=True)
        else:
            self.tenants[obj.metadata.name] = obj
        deadline = self._deadline(grant)
        for name, amount, tenant in ledgers_of(obj):
            ledger = self.ledgers.get(name)
            if ledger is None:
                self.ledgers[name] = GrantLedger(name, dict(amount.pairs), grant, tenant, deadline)
                self.freed[name] = None
            else:
                ledger.resize(dict(amount.pairs))
                ledger.grant, ledger.deadline_ms = grant, deadline

    def _drop(self, obj: Tenant | Grant) -> None:
        objects: dict[str, Tenant] | dict[str, Grant] = self.grants if isinstance(obj, Grant) else self.tenants
        before = objects.pop(obj.metadata.name, None)
        if isinstance(before, Grant):
            self._index_slice(before, present=False)
        for name, _, _ in ledgers_of(obj):
            self.ledgers.pop(name, None)

    def _index_slice(self, grant: Grant, *, present: bool) -> None:
        slices = self.slices.setdefault(grant.spec.tenant, {})
        slices.pop(grant.metadata.name, None)
        if present and grant.spec.issuer and grant.spec.purpose == "quota":
            slices[grant.metadata.name] = None

    def _post_to_parents(self, grant: Grant, sign: int) -> None:
        for name, pairs in parent_charges(grant):
            ledger = self.ledgers.get(name)
            if ledger is not None:
                ledger.grant_on(pairs, sign)

    def _deadline(self, grant: Grant | None) -> int | None:
        """Return the grant's deadline on this machine's clock; None if it was set in another boot, when only the authority can
        evaluate it.
        """
        deadline = None if grant is None else grant.status.deadline
        return deadline.at_ms if deadline is not None and deadline.boot == self._boot else None


def same_amounts(a: Mapping[str, int], b: Mapping[str, int]) -> bool:
    """Whether two amounts are equal; absent names count as zero."""
    return all(a.get(name, 0) == b.get(name, 0) for name in (*a, *b))


_ARRAY_ROWS_MIN: Final = 8
"""Below this number of rows, array operations cost more than they save."""


class PostingBatch:
    """Collects postings of replicas. Nothing is visible until `flush`."""

    def __init__(self, columns: NodeColumns, quota_ledgers: QuotaLedgers, peers: ViewPeerCounts, shapes: ShapeTable) -> None:
        self._columns, self._quota_ledgers, self._peers, self._shapes = columns, quota_ledgers, peers, shapes
        self._counted = peers.counted
        self._taken: dict[tuple[PlacementSpec, tuple[str, ...]], list[int]] = {}
        self._released: dict[tuple[PlacementSpec, tuple[str, ...]], list[int]] = {}
        self._count_changes: dict[tuple[int, int], list[int]] = {}
        self.freed_rows: dict[int, None] = {}
        """Rows on which capacity was released, since it was last taken."""
        self.moved_tenants: dict[str, None] = {}
        """Tenants whose counted replicas came or went."""

    def post(self, generation: int, row: int, grants: tuple[str, ...], sign: int) -> None:
        """Post one replica of a generation, without its devices."""
        batch = self._taken if sign > 0 else self._released
        key = (self._shapes.placement_of(generation), grants)
        rows = batch.get(key)
        if rows is None:
            batch[key] = [row]
        else:
            rows.append(row)
        if self._counted:
            self._count_changes.setdefault((generation, sign), []).append(row)

    def count_only(self, generation: int, row: int, sign: int) -> None:
        """Count a replica without posting amounts, for reservations, which hold other amounts than their spec."""
        if self._counted:
            self._count_changes.setdefault((generation, sign), []).append(row)

    def post_all(self, replicas: ReplicaTable, later: Collection[int]) -> None:
        """Post all holds at once, except those in `later`. Used after a list into an empty view."""
        node, shapes = replicas.column("node"), self._shapes
        slots = np.flatnonzero((node >= 0) & ~np.isin(np.arange(len(node)), list(later)))
        rows, generations = node[slots].astype(np.int64), replicas.column("generation")[slots]
        placement_ids, grants = shapes.column("placement")[generations], replicas.column("grants")[slots]
        for number in np.unique(placement_ids).tolist():
            selected, placement = placement_ids == number, shapes.placements[number]
            if placement is None:
                raise LookupError(f"placement spec {number} was released")
            unique, counts = np.unique(rows[selected], return_counts=True)
            self._columns.post_many(unique, counts, placement.resources)
            for charged, times in zip(*np.unique(grants[selected], return_counts=True), strict=True):
                if charged != NONE:
                    self._quota_ledgers.draw(replicas.ledger_sets[int(charged)], placement.charge, int(times))
        for slot, devices in replicas.devices.items():
            if slot not in later and node[slot] >= 0:
                self._columns.post(int(node[slot]), (), devices)

    def flush(self) -> None:
        for batch, sign in ((self._taken, 1), (self._released, -1)):
            if batch:
                for (placement, grants), rows in batch.items():
                    self._post_rows(placement, rows, sign)
                    self._quota_ledgers.draw(grants, placement.charge, sign * len(rows))
                batch.clear()
        if self._count_changes:
            for (generation, sign), rows in self._count_changes.items():
                self._peers.move(generation, rows, sign)
                self.moved_tenants[self._shapes.tenant_of(generation)] = None
            self._count_changes = {}

    def _post_rows(self, placement: PlacementSpec, rows: list[int], sign: int) -> None:
        if sign < 0:
            self.freed_rows.update(dict.fromkeys(rows))
        if len(rows) < _ARRAY_ROWS_MIN:
            for row in rows:
                self._columns.post(row, placement.resources, sign=sign)
        else:
            unique, counts = np.unique(np.array(rows, dtype=np.int64), return_counts=True)
            self._columns.post_many(unique, counts * sign, placement.resources)
