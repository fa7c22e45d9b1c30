"""Scheduler view: nodes, replicas, shapes and ledgers, with assumed bindings.

The view is built from committed rows and writes nothing.

At one revision the view and the authority have the same free capacity on every node and grant. A scheduler may *assume* a
binding that it has proposed and not yet seen committed (holds.py): it is posted like a real one, and taken back when the
committed row arrives, when the scheduler forgets it, or after a timeout.

An event is applied as a unit. The holds of all replicas it changes are released according to their old rows before any other
row changes. The remaining changes may then be applied in any order, also those of merged events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from remit.law.fit import Requirements
from remit.observation.cluster_objects import VIEWED_PREFIXES, ClusterObjects, ViewChanges
from remit.observation.column_table import NONE
from remit.observation.holds import AssumedBinding, Holds, rows_holding
from remit.observation.node_columns import NodeColumns
from remit.observation.postings import QuotaLedgers
from remit.observation.reflector import RESTORE_MARKER, ListDiff, ListRange, WatchPosition
from remit.observation.replica_table import (
    HOLDS_CAPACITY,
    PENDING,
    PHASE_NUMBERS,
    ReplicaFields,
    ReplicaTable,
    decode_replica_fields,
)
from remit.observation.shapes import ShapeTable
from remit.observation.topology_counts import ViewPeerCounts
from remit.store.protocol import Corrupt, Head, Row, RowChange, WatchEvent
from remit.world.interfaces import Clock

LIST_RANGES: Final = (ListRange(RESTORE_MARKER), *map(ListRange, VIEWED_PREFIXES), ListRange("replica/"))
"""The key ranges a view lists, in dependency order: every row comes after the rows it refers to."""

_REPLICA: Final = "replica/"


class SchedulerView(WatchPosition):
    """Sink of a reflector over `LIST_RANGES`. Bindings are assumed and forgotten through `holds`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.changes = ViewChanges()
        self._wakeups: list[asyncio.Event] = []
        self._reset()

    def _reset(self) -> None:
        """Reset all state, as if nothing had been seen."""
        self.head, self.revision = None, 0
        self.set_restore_marker(None)
        self.columns, self.replicas, self.shapes = NodeColumns(), ReplicaTable(), ShapeTable()
        self.quota_ledgers = QuotaLedgers(self._clock.boot())
        self.assumed: dict[int, AssumedBinding] = {}
        self.peers = ViewPeerCounts(self.columns, self.shapes, partial(rows_holding, self.replicas, self.shapes, self.assumed))
        self.objects = ClusterObjects(self.columns, self.shapes, self.quota_ledgers, self.peers)
        self.holds = Holds(
            self.columns, self.replicas, self.shapes, self.quota_ledgers, self.peers, self.assumed, self.changes, self._clock
        )
        self._listing: ListDiff | None = None
        self.changes.restart()

    # -- reading ---------------------------------------------------------------------------------------------------------

    def requirements_of(self, slot: int) -> Requirements:
        """Return the requirements of the replica in this slot."""
        return self.shapes.requirements_of(self.shapes.at.shape[self.replicas.at.generation[slot]])

    def subscribe(self) -> asyncio.Event:
        """Return an event that is set after every applied event; the waiter clears it."""
        wake = asyncio.Event()
        self._wakeups.append(wake)
        return wake

    def unsubscribe(self, wake: asyncio.Event) -> None:
        self._wakeups.remove(wake)

    # -- sink of the reflector ---------------------------------------------------------------------------------------------

    def begin_list(self, head: Head, revision: int) -> None:
        """Start a list. With known rows of the same incarnation, the list is compared row by row and the differences are
        applied at its end.

        If nothing is known, or only rows of another incarnation, the view is reset and rows are applied as they arrive.
        """
        if self.head is None or self.head.incarnation != head.incarnation:
            self._reset()
            self.changes.version += 1
        self._listing = ListDiff(self.objects, self.shapes, self.replicas, head, revision, has_baseline=self.head is not None)

    def add_page(self, rows: Sequence[Row]) -> None:
        listing = self._listing
        if listing is None:
            raise ValueError("page received before a list began")
        if listing.has_baseline:
            listing.compare(rows)
            return
        objects, table = list[RowChange](), self.replicas
        replicas = [row for row in rows if row.key.startswith(_REPLICA)]
        for key, value, revision in rows if len(replicas) < len(rows) else ():
            if key == RESTORE_MARKER:
                self.set_restore_marker(value)
            elif not key.startswith(_REPLICA):
                (listing.grants if key.startswith("grant/") else objects).append(RowChange(key, value, revision))
        if objects:
            self.objects.apply(objects, self.changes)
        for key, value, revision in replicas:
            fields, slot = self._decode(key, value), table.add(key)
            table.set_identity(slot, fields, self._generation_of(key, fields))
            table.set_status(slot, fields, revision, self._row_of(key, fields))

    def end_list(self) -> None:
        listing, self._listing = self._listing, None
        self.holds.clear_bound_counts()
        if listing is None:
            raise ValueError("list ended before it began")
        if listing.has_baseline:
            self._apply_changes(listing.changes())
        else:
            self.objects.apply(listing.grants, self.changes)
            self.holds.post_all()
            ready = self.changes.ready
            self.changes.restart()
            self.changes.pending.update(dict.fromkeys(self.replicas.pending()))
            self.changes.ready.update(ready)
            self.shapes.reshaped = []
        self.advance(listing.head, listing.revision)

    def apply(self, event: WatchEvent) -> None:
        self._apply_changes(event.changes)
        if event.head is not None:
            self.advance(event.head, event.revision)

    def advance(self, head: Head, revision: int) -> None:
        super().advance(head, revision)
        self.size = len(self.replicas.slots) + len(self.objects.revisions) + 2 * len(self.shapes.workloads.ids)
        for wake in self._wakeups:
            wake.set()

    # -- changes -----------------------------------------------------------------------------------------------------------

    def _apply_changes(self, changes: Iterable[RowChange]) -> None:
        self.holds.clear_bound_counts()
        replicas, objects = list[RowChange](), list[RowChange]()
        for change in changes:
            (replicas if change[0].startswith(_REPLICA) else objects).append(change)
        objects = [change for change in objects if change.key == RESTORE_MARKER or self.objects.is_relevant(change.key)]
        if objects:
            slots = self.replicas.slots
            for change in replicas:
                slot = slots.get(change.key)
                if slot is not None:
                    self.holds.release(slot)
            self._apply_objects(objects)
        for key, value, revision in replicas:
            if value is None:
                self._remove_replica(key)
            else:
                self._put_replica(key, self._decode(key, value), revision)
        self.holds.finish()

    def _apply_objects(self, changes: Sequence[RowChange]) -> None:
        for change in changes:
            if change.key == RESTORE_MARKER:
                self.set_restore_marker(change.value)
        self.holds.flush()
        affected = self.objects.affected_by(changes)
        for slot, binding in list(self.assumed.items()):
            if (
                binding.row in affected.rows
                or binding.generation in affected.rewritten
                or not affected.ledgers.isdisjoint(binding.grants)
            ):
                # Its node, generation or ledger is going away, so its claim will be refused.
                self.holds.forget(slot)
                self.changes.add_pending(slot)
        released = self.holds.release_generations(affected.rewritten) if affected.rewritten else []
        self.holds.flush()
        self.objects.apply(changes, self.changes)
        self.holds.post_again(released)
        self._requeue_reshaped()

    def _requeue_reshaped(self) -> None:
        """Report pending replicas whose generation changed its shape as removed and pending again, so that they are queued
        anew.
        """
        reshaped, self.shapes.reshaped = self.shapes.reshaped, []
        if reshaped:
            is_pending = self.replicas.column("phase") == PENDING
            for slot in np.flatnonzero(is_pending & np.isin(self.replicas.column("generation"), reshaped)).tolist():
                self.changes.remove_pending(slot)
                self.changes.add_pending(slot)

    def _put_replica(self, key: str, fields: ReplicaFields, revision: int) -> None:
        """Apply one replica row. Its hold is released and posted again only if it changed."""
        table, changes, number = self.replicas, self.changes, PHASE_NUMBERS[fields.status.phase]
        slot, before, keeps_hold = table.slots.get(key), NONE, False
        row = self._row_of(key, fields) if HOLDS_CAPACITY[number] else NONE
        if slot is None:
            slot = table.add(key)
            table.set_identity(slot, fields, self._generation_of(key, fields))
        else:
            before = table.at.phase[slot]
            if table.at.uid[slot] != hash(fields.metadata.uid):  # another replica of the same name
                self.holds.release(slot)
                table.set_identity(slot, fields, self._generation_of(key, fields))
            else:
                keeps_hold = row != NONE and self.holds.keeps(slot, fields, row, before)
                if not keeps_hold and (before != PENDING or self.assumed):
                    self.holds.release(slot)
        table.set_status(slot, fields, revision, row)
        if row != NONE and not keeps_hold:
            self.holds.post(slot, row, fields.status.grants)
        if not keeps_hold:
            self.holds.reservations.on_victim_change(key)
        if before == PENDING:
            changes.pending.pop(slot, None)
            changes.no_longer_pending[slot] = None
        if number == PENDING:
            changes.pending[slot] = None

    def _remove_replica(self, key: str) -> None:
        slot = self.replicas.slots.get(key)
        if slot is None:
            return
        self.holds.release(slot)
        if self.replicas.at.phase[slot] == PENDING:
            self.changes.remove_pending(slot)
        self.holds.reservations.on_victim_change(key)
        self.holds.reservations.deferred.pop(slot, None)
        self.changes.ready.pop(slot, None)
        self.replicas.remove(slot)

    @staticmethod
    def _decode(key: str, value: bytes) -> ReplicaFields:
        try:
            return decode_replica_fields(value)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"row {key} does not decode ({error}); restore a backup") from None

    def _row_of(self, key: str, fields: ReplicaFields) -> int:
        """Return the row on which a replica holds capacity; `NONE` if its phase holds none."""
        if not HOLDS_CAPACITY[PHASE_NUMBERS[fields.status.phase]]:
            return NONE
        row = self.columns.rows.get(fields.status.node)
        if row is None:
            raise Corrupt(f"{key} holds capacity on node {fields.status.node}, which does not exist; restore a backup")
        return row

    def _generation_of(self, key: str, fields: ReplicaFields) -> int:
        tenant = key.split("/", 2)[1]
        generation = self.shapes.find(tenant, fields.spec.workload, fields.spec.generation)
        if generation is None:
            raise Corrupt(f"{key} belongs to a generation that does not exist; restore a backup")
        return generation
