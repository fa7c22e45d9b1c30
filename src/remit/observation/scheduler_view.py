"""Scheduler view: nodes, replicas, shapes and ledgers, with assumed bindings.

The view is built from committed rows and writes nothing.

Every sum is posted with the same functions as the authority's (law/charges.py, law/ledgers.py), so that at one revision both
have the same free capacity on every node and grant. A scheduler may *assume* a binding that it has proposed and not yet seen
committed: it is posted like a real one, and taken back when the committed row arrives, when the scheduler forgets it, or after
a timeout.

An event is applied as a unit. The holds of all replicas it changes are released according to their old rows before any other
row changes. The remaining changes may then be applied in any order, also those of merged events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remit.law.charges import node_charge, replica_postings
from remit.law.fit import Requirements
from remit.law.ledgers import DEVICE_PREFIX, GrantLedger
from remit.model.records import Phase, PolicyRevision
from remit.observation.cluster_objects import VIEWED_PREFIXES, ClusterObjects, ViewChanges
from remit.observation.column_table import NONE
from remit.observation.node_columns import Ints, NodeColumns
from remit.observation.postings import PostingBatch, QuotaLedgers
from remit.observation.reflector import RESTORE_MARKER, ListDiff, ListRange, WatchPosition
from remit.observation.replica_table import (
    BOUND_PHASES,
    HOLDS_CAPACITY,
    PENDING,
    PHASE_NUMBERS,
    RESERVED,
    ReplicaFields,
    ReplicaHold,
    ReplicaTable,
    decode_replica_fields,
)
from remit.observation.shapes import ShapeTable
from remit.observation.topology_counts import ViewPeerCounts
from remit.store.protocol import Corrupt, Head, Row, RowChange, WatchEvent
from remit.world.interfaces import Clock

LIST_RANGES: Final = (ListRange(RESTORE_MARKER), *map(ListRange, VIEWED_PREFIXES), ListRange("replica/"))
"""The key ranges a view lists, in dependency order: every row comes after the rows it refers to."""

ASSUMED_MS_MAX: Final = 30_000
"""An assumed binding that is not confirmed within this time is dropped: the claim or its answer was lost."""

_REPLICA: Final = "replica/"
_NO_DEVICES: Final[Mapping[str, int]] = {}


class AssumedBinding(NamedTuple):
    """A pending replica that is assumed to be bound."""

    row: int
    devices: Mapping[str, int]
    grants: tuple[str, ...]
    generation: int
    at_ms: int


class ReducedReservation(NamedTuple):
    """The amounts posted for a reservation while its victims still hold capacity: less than it needs."""

    row: int
    resources: tuple[tuple[str, int], ...]
    devices: Mapping[str, int]
    grants: tuple[str, ...]
    charges: Sequence[tuple[tuple[str, int], ...]]


class SchedulerView(WatchPosition):
    """Sink of a reflector over `LIST_RANGES`. `version` counts applied and assumed changes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.version = 0
        self._wakeups: list[asyncio.Event] = []
        self._reset()

    def _reset(self) -> None:
        """Reset all state, as if nothing had been seen."""
        self.head, self.revision = None, 0
        self.set_restore_marker(None)
        self.columns, self.replicas, self.shapes = NodeColumns(), ReplicaTable(), ShapeTable()
        self.quota_ledgers = QuotaLedgers(self._clock.boot())
        self.peers = ViewPeerCounts(self.columns, self.shapes, self._rows_holding)
        self.objects = ClusterObjects(self.columns, self.shapes, self.quota_ledgers, self.peers)
        self.assumed: dict[int, AssumedBinding] = {}
        self._postings = PostingBatch(self.columns, self.quota_ledgers, self.peers, self.shapes)
        self._reduced: dict[int, ReducedReservation] = {}
        self._reservations_by_victim: dict[str, dict[int, None]] = {}
        """Reservations that name a replica as a victim, by the key of the replica."""
        self._unposted: dict[int, None] = {}
        """Reservations whose amounts must be computed again."""
        self._listing: ListDiff | None = None
        self._bound_counts: Ints | None = None
        """Bound replicas per generation; None after a change."""
        self._changes = ViewChanges(reset=True)

    # -- reading ---------------------------------------------------------------------------------------------------------

    @property
    def ledgers(self) -> dict[str, GrantLedger]:
        """Ledgers of every tenant's quota and emergency quota, and of every grant."""
        return self.quota_ledgers.ledgers

    @property
    def policy(self) -> PolicyRevision | None:
        """The policy revision in force."""
        return self.shapes.policy

    def requirements_of(self, slot: int) -> Requirements:
        """Return the requirements of the replica in this slot."""
        return self.shapes.requirements_of(self.shapes.at.shape[self.replicas.at.generation[slot]])

    def take_changes(self) -> ViewChanges:
        changes, self._changes = self._changes, ViewChanges()
        return changes

    def subscribe(self) -> asyncio.Event:
        """Return an event that is set after every applied event; the waiter clears it."""
        wake = asyncio.Event()
        self._wakeups.append(wake)
        return wake

    def unsubscribe(self, wake: asyncio.Event) -> None:
        self._wakeups.remove(wake)

    def _rows_holding(self, generations: npt.NDArray[np.intp]) -> Ints:
        """Return the rows on which replicas of these generations hold capacity, or are assumed to; see topology_counts.py."""
        node, generation_of = self.replicas.column("node"), self.replicas.column("generation")
        selected = np.zeros(max(self.shapes.size, 1), dtype=np.bool_)
        selected[generations] = True
        rows = node[(node >= 0) & selected[generation_of]].astype(np.int64)
        assumed = [binding.row for binding in self.assumed.values() if selected[binding.generation]]
        return np.concatenate([rows, np.array(assumed, dtype=np.int64)]) if assumed else rows

    # -- assumed bindings -------------------------------------------------------------------------------------------------

    def assume(self, slot: int, row: int, devices: Mapping[str, int], grants: tuple[str, ...]) -> None:
        """Assume that a pending replica is bound to this row, with these devices, charged to these ledgers."""
        if self.replicas.at.phase[slot] != PENDING or slot in self.assumed:
            raise ValueError(f"slot {slot} is not pending, or is already assumed to be bound")
        binding = AssumedBinding(row, dict(devices), grants, self.replicas.at.generation[slot], self._clock.now_ms())
        self.assumed[slot] = binding
        self._post_assumed(binding, 1)
        self._finish_posting()

    def assume_many(self, placed: Iterable[tuple[int, int, Mapping[str, int]]], grants: tuple[str, ...]) -> None:
        """Like `assume`, for several replicas: slot, row and devices of each."""
        now_ms, generations = self._clock.now_ms(), self.replicas.at.generation
        for slot, row, devices in placed:
            binding = self.assumed[slot] = AssumedBinding(row, devices, grants, generations[slot], now_ms)
            self._post_assumed(binding, 1)
        self._finish_posting()

    def victims_gone(self, slot: int) -> bool:
        """Whether no victim of this reservation holds capacity any more."""
        victims = self.replicas.victims.get(slot, {})
        return all(self._victim_hold(victim, attempt) is None for victim, attempt in victims.items())

    def bound_count(self, generation: int) -> int:
        """Return how many replicas of a generation are bound, or assumed to be. Reservations do not count."""
        counts = self._bound_counts
        if counts is None:
            is_bound = np.isin(self.replicas.column("phase"), BOUND_PHASES)
            counts = self._bound_counts = np.bincount(self.replicas.column("generation")[is_bound], minlength=1)
        bound = int(counts[generation]) if generation < len(counts) else 0
        return bound + sum(1 for binding in self.assumed.values() if binding.generation == generation)

    def reduced_amounts(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield, for each reservation with remaining victims, its row and how much less than it needs is posted there."""
        for slot, reservation in self._reduced.items():
            missing = dict(node_charge(self.requirements_of(slot), self.replicas.hold_of(slot).devices))
            for name, count in (
                *reservation.resources,
                *((DEVICE_PREFIX + device, share) for device, share in reservation.devices.items()),
            ):
                missing[name] -= count
            yield reservation.row, missing

    def forget(self, slot: int) -> bool:
        """Take back an assumed binding; False if there is none."""
        binding = self.assumed.pop(slot, None)
        if binding is None:
            return False
        self._post_assumed(binding, -1)
        self._finish_posting()
        return True

    def expire_assumed(self, now_ms: int) -> list[int]:
        """Drop bindings that were assumed too long ago. Their replicas become pending again in the recorded changes."""
        expired = [slot for slot, binding in self.assumed.items() if now_ms - binding.at_ms >= ASSUMED_MS_MAX]
        for slot in expired:
            self.forget(slot)
            self._changes.add_pending(slot)
        return expired

    def _post_assumed(self, binding: AssumedBinding, sign: int) -> None:
        self._postings.post(binding.generation, binding.row, binding.grants, sign)
        if binding.devices:
            self.columns.post(binding.row, (), binding.devices, sign)

    # -- sink of the reflector ---------------------------------------------------------------------------------------------

    def begin_list(self, head: Head, revision: int) -> None:
        """Start a list. With known rows of the same incarnation, the list is compared row by row and the differences are
        applied at its end.

        If nothing is known, or only rows of another incarnation, the view is reset and rows are applied as they arrive.
        """
        if self.head is None or self.head.incarnation != head.incarnation:
            self._reset()
            self.version += 1
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
            self.objects.apply(objects, self._changes)
        for key, value, revision in replicas:
            fields, slot = self._decode(key, value), table.add(key)
            table.set_identity(slot, fields, self._generation_of(key, fields))
            table.set_status(slot, fields, revision, self._row_of(key, fields))

    def end_list(self) -> None:
        listing, self._listing, self._bound_counts = self._listing, None, None
        if listing is None:
            raise ValueError("list ended before it began")
        if listing.has_baseline:
            self._apply_changes(listing.changes())
        else:
            self.objects.apply(listing.grants, self._changes)
            for slot in self.replicas.victims:
                if self.replicas.at.phase[slot] == RESERVED:
                    self._defer_reservation(slot)
            self._postings.post_all(self.replicas, self._unposted)
            self._finish_posting()
            changes = ViewChanges(reset=True)
            changes.pending.update(dict.fromkeys(self.replicas.pending()))
            changes.ready.update(self._changes.ready)
            self._changes, self.shapes.reshaped = changes, []
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
        self._bound_counts = None
        replicas, objects = list[RowChange](), list[RowChange]()
        for change in changes:
            (replicas if change[0].startswith(_REPLICA) else objects).append(change)
        objects = [change for change in objects if change.key == RESTORE_MARKER or self.objects.is_relevant(change.key)]
        if objects:
            slots = self.replicas.slots
            for change in replicas:
                slot = slots.get(change.key)
                if slot is not None:
                    self._release(slot)
            self._apply_objects(objects)
        for key, value, revision in replicas:
            if value is None:
                self._remove_replica(key)
            else:
                self._put_replica(key, self._decode(key, value), revision)
        self._finish_posting()

    def _apply_objects(self, changes: Sequence[RowChange]) -> None:
        for change in changes:
            if change.key == RESTORE_MARKER:
                self.set_restore_marker(change.value)
        self._postings.flush()
        affected = self.objects.affected_by(changes)
        for slot, binding in list(self.assumed.items()):
            if (
                binding.row in affected.rows
                or binding.generation in affected.rewritten
                or not affected.ledgers.isdisjoint(binding.grants)
            ):
                # Its node, generation or ledger is going away, so its claim will be refused.
                self.forget(slot)
                self._changes.add_pending(slot)
        released = self._release_generations(affected.rewritten) if affected.rewritten else []
        self._postings.flush()
        self.objects.apply(changes, self._changes)
        for slot, row in released:
            self.replicas.at.node[slot] = row
            self._post_hold(slot, row, self._grants(slot))
        self._requeue_reshaped()

    def _release_generations(self, generations: Iterable[int]) -> list[tuple[int, int]]:
        """Release the holds of replicas of these generations; return the slots and rows."""
        node, generation_of = self.replicas.column("node"), self.replicas.column("generation")
        slots: list[int] = np.flatnonzero((node >= 0) & np.isin(generation_of, list(generations))).tolist()
        released = [(slot, self.replicas.at.node[slot]) for slot in slots]
        for slot in slots:
            self._release(slot)
        return released

    def _requeue_reshaped(self) -> None:
        """Report pending replicas whose generation changed its shape as removed and pending again, so that they are queued
        anew.
        """
        reshaped, self.shapes.reshaped = self.shapes.reshaped, []
        if reshaped:
            is_pending = self.replicas.column("phase") == PENDING
            for slot in np.flatnonzero(is_pending & np.isin(self.replicas.column("generation"), reshaped)).tolist():
                self._changes.remove_pending(slot)
                self._changes.add_pending(slot)

    def _put_replica(self, key: str, fields: ReplicaFields, revision: int) -> None:
        """Apply one replica row. Its hold is released and posted again only if it changed."""
        table, changes, number = self.replicas, self._changes, PHASE_NUMBERS[fields.status.phase]
        slot, before, keeps_hold = table.slots.get(key), NONE, False
        row = self._row_of(key, fields) if HOLDS_CAPACITY[number] else NONE
        if slot is None:
            slot = table.add(key)
            table.set_identity(slot, fields, self._generation_of(key, fields))
        else:
            before = table.at.phase[slot]
            if table.at.uid[slot] != hash(fields.metadata.uid):  # another replica of the same name
                self._release(slot)
                table.set_identity(slot, fields, self._generation_of(key, fields))
            else:
                keeps_hold = row != NONE and self._keeps_hold(slot, fields, row, before)
                if not keeps_hold and (before != PENDING or self.assumed):
                    self._release(slot)
        table.set_status(slot, fields, revision, row)
        if row != NONE and not keeps_hold:
            self._post_hold(slot, row, fields.status.grants)
        if self._reservations_by_victim and not keeps_hold and key in self._reservations_by_victim:
            self._unposted.update(self._reservations_by_victim[key])
        if before == PENDING:
            changes.pending.pop(slot, None)
            changes.no_longer_pending[slot] = None
        if number == PENDING:
            changes.pending[slot] = None

    def _keeps_hold(self, slot: int, fields: ReplicaFields, row: int, before: int) -> bool:
        """Whether the replica keeps exactly the hold posted or assumed for it. Consumes an assumption that came true."""
        table, status = self.replicas, fields.status
        if status.phase is Phase.RESERVED or before == RESERVED:
            return False
        if self.assumed and (binding := self.assumed.get(slot)) is not None:
            same = binding.row == row and binding.grants == status.grants and binding.devices == (status.devices or _NO_DEVICES)
            if same:
                del self.assumed[slot]
            return same
        if table.at.node[slot] != row or table.devices.get(slot, _NO_DEVICES) != (status.devices or _NO_DEVICES):
            return False
        grants = table.at.grants[slot]
        return grants != NONE and table.ledger_sets[grants] == status.grants

    def _remove_replica(self, key: str) -> None:
        slot = self.replicas.slots.get(key)
        if slot is None:
            return
        self._release(slot)
        if self.replicas.at.phase[slot] == PENDING:
            self._changes.remove_pending(slot)
        if self._reservations_by_victim and key in self._reservations_by_victim:
            self._unposted.update(self._reservations_by_victim[key])
        self._unposted.pop(slot, None)
        self._changes.ready.pop(slot, None)
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

    # -- holds -------------------------------------------------------------------------------------------------------------

    def _post_hold(self, slot: int, row: int, grants: tuple[str, ...]) -> None:
        """Post the hold of the replica in this slot. Reservations with victims are posted last, after all rows of the event are
        applied.
        """
        at = self.replicas.at
        if at.phase[slot] == RESERVED:
            if slot in self.replicas.victims:
                self._defer_reservation(slot)
                return
            self._changes.ready[slot] = None
        self._postings.post(at.generation[slot], row, grants, 1)
        if slot in self.replicas.devices:
            self.columns.post(row, (), self.replicas.devices[slot])

    def _defer_reservation(self, slot: int) -> None:
        for victim in self.replicas.victims[slot]:
            self._reservations_by_victim.setdefault(victim, {})[slot] = None
        self._unposted[slot] = None
        self._postings.count_only(self.replicas.at.generation[slot], self.replicas.at.node[slot], 1)

    def _release(self, slot: int) -> None:
        """Take back everything posted for the replica, committed or assumed."""
        if self.assumed and (binding := self.assumed.pop(slot, None)) is not None:
            self._post_assumed(binding, -1)
        at = self.replicas.at
        row = at.node[slot]
        if row == NONE:
            return
        at.node[slot] = NONE
        generation = at.generation[slot]
        if slot in self._reduced or slot in self._unposted:
            self._unposted.pop(slot, None)
            self._unpost_reservation(slot)
            self._unlink_victims(slot)
            self._postings.count_only(generation, row, -1)
            return
        self._postings.post(generation, row, self._grants(slot), -1)
        if slot in self.replicas.devices:
            self.columns.post(row, (), self.replicas.devices[slot], -1)

    def _grants(self, slot: int) -> tuple[str, ...]:
        number = self.replicas.at.grants[slot]
        return self.replicas.ledger_sets[number] if number != NONE else ()

    def _unlink_victims(self, slot: int) -> None:
        for victim in self.replicas.victims.get(slot, ()):
            reservations = self._reservations_by_victim.get(victim, {})
            reservations.pop(slot, None)
            if not reservations:
                self._reservations_by_victim.pop(victim, None)

    def _unpost_reservation(self, slot: int) -> None:
        """Take back what a reservation has posted."""
        reservation = self._reduced.pop(slot, None)
        if reservation is not None:
            self.columns.post(reservation.row, reservation.resources, reservation.devices, -1)
            self.quota_ledgers.draw_each(reservation.grants, reservation.charges, -1)
            self._postings.freed_rows[reservation.row] = None

    def _post_reservation(self, slot: int) -> None:
        """Post what a reservation needs, less what its victims still hold."""
        self._unpost_reservation(slot)
        hold = self.replicas.hold_of(slot)
        victim_holds = [
            victim_hold
            for victim, attempt in hold.victims.items()
            if (victim_hold := self._victim_hold(victim, attempt)) is not None
        ]
        pairs, charges = replica_postings(hold, self.requirements_of(slot), victim_holds)
        row = self.replicas.at.node[slot]
        devices = (
            {name.removeprefix(DEVICE_PREFIX): share for name, share in pairs if name.startswith(DEVICE_PREFIX)}
            if hold.devices
            else {}
        )
        resources = tuple(pair for pair in pairs if not pair[0].startswith(DEVICE_PREFIX)) if devices else pairs
        self.columns.post(row, resources, devices)
        self.quota_ledgers.draw_each(hold.grants, charges, 1)
        self._reduced[slot] = ReducedReservation(row, resources, devices, hold.grants, charges)
        if not victim_holds:
            self._changes.ready[slot] = None

    def _victim_hold(self, victim: str, attempt: str) -> tuple[ReplicaHold, Requirements] | None:
        """Return the hold and requirements of a victim by key; None unless this very attempt still holds its capacity."""
        slot = self.replicas.slots.get(victim)
        if slot is None or self.replicas.at.node[slot] == NONE or not self.replicas.is_attempt(slot, attempt):
            return None
        return self.replicas.hold_of(slot), self.requirements_of(slot)

    def _finish_posting(self) -> None:
        """Post all outstanding amounts and record what they unblock."""
        postings = self._postings
        postings.flush()
        if self._unposted:
            for slot in list(self._unposted):
                if self.replicas.at.phase[slot] == RESERVED:
                    self._post_reservation(slot)
            self._unposted.clear()
        unblock_events = self._changes.unblock_events
        if postings.freed_rows:
            unblock_events.update({("room", row): None for row in postings.freed_rows})
            postings.freed_rows = {}
        if self.quota_ledgers.freed:
            unblock_events.update({(self.quota_ledgers.ledger_kind(name), name): None for name in self.quota_ledgers.freed})
            self.quota_ledgers.freed = {}
        if postings.moved_tenants:
            unblock_events.update({("peers", tenant): None for tenant in postings.moved_tenants})
            postings.moved_tenants = {}
        self.version += 1
