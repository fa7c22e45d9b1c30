"""Postings of replicas in the scheduler view: committed holds, assumed bindings, reservations that wait for victims.

Every sum is posted with the same functions as the authority's (law/charges.py, law/ledgers.py). Rows are applied in
scheduler_view.py; nothing is decoded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remit.law.charges import node_charge, replica_postings
from remit.law.fit import Requirements
from remit.law.ledgers import DEVICE_PREFIX
from remit.model.records import Phase
from remit.observation.cluster_objects import ViewChanges
from remit.observation.column_table import NONE
from remit.observation.node_columns import Ints, NodeColumns
from remit.observation.postings import PostingBatch, QuotaLedgers
from remit.observation.replica_table import BOUND_PHASES, PENDING, RESERVED, ReplicaFields, ReplicaHold, ReplicaTable
from remit.observation.shapes import ShapeTable
from remit.observation.topology_counts import ViewPeerCounts
from remit.world.interfaces import Clock

ASSUMED_MS_MAX: Final = 30_000
"""An assumed binding that is not confirmed within this time is dropped: the claim or its answer was lost."""

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


def rows_holding(
    replicas: ReplicaTable, shapes: ShapeTable, assumed: Mapping[int, AssumedBinding], generations: npt.NDArray[np.intp]
) -> Ints:
    """Return the rows on which replicas of these generations hold capacity, or are assumed to; see topology_counts.py."""
    node, generation_of = replicas.column("node"), replicas.column("generation")
    selected = np.zeros(max(shapes.size, 1), dtype=np.bool_)
    selected[generations] = True
    rows = node[(node >= 0) & selected[generation_of]].astype(np.int64)
    assumed_rows = [binding.row for binding in assumed.values() if selected[binding.generation]]
    return np.concatenate([rows, np.array(assumed_rows, dtype=np.int64)]) if assumed_rows else rows


class Reservations:
    """Reservations with victims. Each posts what it needs less what its victims still hold.

    Their amounts are computed last, after all rows of an event are applied: the victims may be among them.
    """

    def __init__(
        self,
        columns: NodeColumns,
        replicas: ReplicaTable,
        shapes: ShapeTable,
        quota_ledgers: QuotaLedgers,
        postings: PostingBatch,
    ) -> None:
        self._columns, self._replicas, self._shapes = columns, replicas, shapes
        self._quota_ledgers, self._postings = quota_ledgers, postings
        self._posted: dict[int, ReducedReservation] = {}
        self._by_victim: dict[str, dict[int, None]] = {}
        """Reservations that name a replica as a victim, by the key of the replica."""
        self.deferred: dict[int, None] = {}
        """Reservations whose amounts must be computed again."""

    def victims_gone(self, slot: int) -> bool:
        """Whether no victim of this reservation holds capacity any more."""
        victims = self._replicas.victims.get(slot, {})
        return all(self._victim_hold(victim, attempt) is None for victim, attempt in victims.items())

    def reduced_amounts(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield, for each reservation with remaining victims, its row and how much less than it needs is posted there."""
        for slot, reservation in self._posted.items():
            missing = dict(node_charge(self._requirements_of(slot), self._replicas.hold_of(slot).devices))
            for name, count in (
                *reservation.resources,
                *((DEVICE_PREFIX + device, share) for device, share in reservation.devices.items()),
            ):
                missing[name] -= count
            yield reservation.row, missing

    def defer(self, slot: int) -> None:
        """Count a reservation, and compute its amounts when all rows of the event are applied."""
        for victim in self._replicas.victims[slot]:
            self._by_victim.setdefault(victim, {})[slot] = None
        self.deferred[slot] = None
        self._postings.count_only(self._replicas.at.generation[slot], self._replicas.at.node[slot], 1)

    def release(self, slot: int, row: int) -> bool:
        """Take back a reservation; False if this slot has none with victims."""
        if slot not in self._posted and slot not in self.deferred:
            return False
        self.deferred.pop(slot, None)
        self._unpost(slot)
        for victim in self._replicas.victims.get(slot, ()):
            slots = self._by_victim.get(victim, {})
            slots.pop(slot, None)
            if not slots:
                self._by_victim.pop(victim, None)
        self._postings.count_only(self._replicas.at.generation[slot], row, -1)
        return True

    def on_victim_change(self, key: str) -> None:
        """Compute the amounts of the reservations again that name this replica as a victim."""
        if self._by_victim and key in self._by_victim:
            self.deferred.update(self._by_victim[key])

    def post_deferred(self) -> Iterator[int]:
        """Post the amounts of all deferred reservations. Yields those without remaining victims."""
        for slot in list(self.deferred):
            if self._replicas.at.phase[slot] == RESERVED and self._post(slot):
                yield slot
        self.deferred.clear()

    def _post(self, slot: int) -> bool:
        """Post one reservation. Returns whether its victims are gone."""
        self._unpost(slot)
        hold = self._replicas.hold_of(slot)
        victim_holds = [
            victim_hold
            for victim, attempt in hold.victims.items()
            if (victim_hold := self._victim_hold(victim, attempt)) is not None
        ]
        pairs, charges = replica_postings(hold, self._requirements_of(slot), victim_holds)
        row = self._replicas.at.node[slot]
        devices = (
            {name.removeprefix(DEVICE_PREFIX): share for name, share in pairs if name.startswith(DEVICE_PREFIX)}
            if hold.devices
            else {}
        )
        resources = tuple(pair for pair in pairs if not pair[0].startswith(DEVICE_PREFIX)) if devices else pairs
        self._columns.post(row, resources, devices)
        self._quota_ledgers.draw_each(hold.grants, charges, 1)
        self._posted[slot] = ReducedReservation(row, resources, devices, hold.grants, charges)
        return not victim_holds

    def _unpost(self, slot: int) -> None:
        reservation = self._posted.pop(slot, None)
        if reservation is not None:
            self._columns.post(reservation.row, reservation.resources, reservation.devices, -1)
            self._quota_ledgers.draw_each(reservation.grants, reservation.charges, -1)
            self._postings.freed_rows[reservation.row] = None

    def _victim_hold(self, victim: str, attempt: str) -> tuple[ReplicaHold, Requirements] | None:
        """Return the hold and requirements of a victim by key; None unless this very attempt still holds its capacity."""
        slot = self._replicas.slots.get(victim)
        if slot is None or self._replicas.at.node[slot] == NONE or not self._replicas.is_attempt(slot, attempt):
            return None
        return self._replicas.hold_of(slot), self._requirements_of(slot)

    def _requirements_of(self, slot: int) -> Requirements:
        return self._shapes.requirements_of(self._shapes.at.shape[self._replicas.at.generation[slot]])


class Holds:
    """Posts and releases what replicas hold, committed or assumed. Nothing is visible until `finish`."""

    def __init__(
        self,
        columns: NodeColumns,
        replicas: ReplicaTable,
        shapes: ShapeTable,
        quota_ledgers: QuotaLedgers,
        peers: ViewPeerCounts,
        assumed: dict[int, AssumedBinding],
        changes: ViewChanges,
        clock: Clock,
    ) -> None:
        self._columns, self._replicas, self._quota_ledgers = columns, replicas, quota_ledgers
        self._assumed, self._changes, self._clock = assumed, changes, clock
        self._postings = PostingBatch(columns, quota_ledgers, peers, shapes)
        self.reservations = Reservations(columns, replicas, shapes, quota_ledgers, self._postings)
        self._bound_counts: Ints | None = None
        """Bound replicas per generation; None after a change."""

    # -- assumed bindings -------------------------------------------------------------------------------------------------

    def assume(self, slot: int, row: int, devices: Mapping[str, int], grants: tuple[str, ...]) -> None:
        """Assume that a pending replica is bound to this row, with these devices, charged to these ledgers."""
        if self._replicas.at.phase[slot] != PENDING or slot in self._assumed:
            raise ValueError(f"slot {slot} is not pending, or is already assumed to be bound")
        self.assume_many([(slot, row, dict(devices))], grants)

    def assume_many(self, placed: Iterable[tuple[int, int, Mapping[str, int]]], grants: tuple[str, ...]) -> None:
        """Like `assume`, for several replicas: slot, row and devices of each."""
        now_ms, generations = self._clock.now_ms(), self._replicas.at.generation
        for slot, row, devices in placed:
            binding = self._assumed[slot] = AssumedBinding(row, devices, grants, generations[slot], now_ms)
            self._post_assumed(binding, 1)
        self.finish()

    def forget(self, slot: int) -> bool:
        """Take back an assumed binding; False if there is none."""
        binding = self._assumed.pop(slot, None)
        if binding is None:
            return False
        self._post_assumed(binding, -1)
        self.finish()
        return True

    def expire_assumed(self, now_ms: int) -> list[int]:
        """Drop bindings that were assumed too long ago, and record their replicas as pending again in the view's changes."""
        expired = [slot for slot, binding in self._assumed.items() if now_ms - binding.at_ms >= ASSUMED_MS_MAX]
        for slot in expired:
            self.forget(slot)
            self._changes.add_pending(slot)
        return expired

    def bound_count(self, generation: int) -> int:
        """Return how many replicas of a generation are bound, or assumed to be. Reservations do not count."""
        counts = self._bound_counts
        if counts is None:
            is_bound = np.isin(self._replicas.column("phase"), BOUND_PHASES)
            counts = self._bound_counts = np.bincount(self._replicas.column("generation")[is_bound], minlength=1)
        bound = int(counts[generation]) if generation < len(counts) else 0
        return bound + sum(1 for binding in self._assumed.values() if binding.generation == generation)

    def clear_bound_counts(self) -> None:
        self._bound_counts = None

    def _post_assumed(self, binding: AssumedBinding, sign: int) -> None:
        self._postings.post(binding.generation, binding.row, binding.grants, sign)
        if binding.devices:
            self._columns.post(binding.row, (), binding.devices, sign)

    # -- committed holds --------------------------------------------------------------------------------------------------

    def post(self, slot: int, row: int, grants: tuple[str, ...]) -> None:
        """Post the hold of the replica in this slot. Reservations with victims are posted at the end of the event."""
        replicas, at = self._replicas, self._replicas.at
        if at.phase[slot] == RESERVED:
            if slot in replicas.victims:
                self.reservations.defer(slot)
                return
            self._changes.ready[slot] = None
        self._postings.post(at.generation[slot], row, grants, 1)
        if slot in replicas.devices:
            self._columns.post(row, (), replicas.devices[slot])

    def post_all(self) -> None:
        """Post the holds of all replicas, after a list into an empty view."""
        for slot in self._replicas.victims:
            if self._replicas.at.phase[slot] == RESERVED:
                self.reservations.defer(slot)
        self._postings.post_all(self._replicas, self.reservations.deferred)
        self.finish()

    def release(self, slot: int) -> None:
        """Take back everything posted for the replica, committed or assumed."""
        if self._assumed and (binding := self._assumed.pop(slot, None)) is not None:
            self._post_assumed(binding, -1)
        at = self._replicas.at
        row = at.node[slot]
        if row == NONE:
            return
        at.node[slot] = NONE
        if self.reservations.release(slot, row):
            return
        self._postings.post(at.generation[slot], row, self._grants(slot), -1)
        if slot in self._replicas.devices:
            self._columns.post(row, (), self._replicas.devices[slot], -1)

    def release_generations(self, generations: Iterable[int]) -> list[tuple[int, int]]:
        """Release the holds of replicas of these generations; return the slots and rows, to be posted again."""
        node, generation_of = self._replicas.column("node"), self._replicas.column("generation")
        slots: list[int] = np.flatnonzero((node >= 0) & np.isin(generation_of, list(generations))).tolist()
        released = [(slot, self._replicas.at.node[slot]) for slot in slots]
        for slot in slots:
            self.release(slot)
        return released

    def post_again(self, released: Iterable[tuple[int, int]]) -> None:
        for slot, row in released:
            self._replicas.at.node[slot] = row
            self.post(slot, row, self._grants(slot))

    def keeps(self, slot: int, fields: ReplicaFields, row: int, before: int) -> bool:
        """Whether the replica keeps exactly the hold posted or assumed for it. Consumes an assumption that came true."""
        replicas, status = self._replicas, fields.status
        if status.phase is Phase.RESERVED or before == RESERVED:
            return False
        if self._assumed and (binding := self._assumed.get(slot)) is not None:
            same = binding.row == row and binding.grants == status.grants and binding.devices == (status.devices or _NO_DEVICES)
            if same:
                del self._assumed[slot]
            return same
        if replicas.at.node[slot] != row or replicas.devices.get(slot, _NO_DEVICES) != (status.devices or _NO_DEVICES):
            return False
        grants = replicas.at.grants[slot]
        return grants != NONE and replicas.ledger_sets[grants] == status.grants

    def flush(self) -> None:
        """Post what was collected. Nodes, ledgers and generations may be removed after this."""
        self._postings.flush()

    def finish(self) -> None:
        """Post all outstanding amounts and record what they unblock."""
        postings, changes = self._postings, self._changes
        postings.flush()
        if self.reservations.deferred:
            changes.ready.update(dict.fromkeys(self.reservations.post_deferred()))
        if postings.freed_rows:
            changes.unblock_events.update({("room", row): None for row in postings.freed_rows})
            postings.freed_rows = {}
        if self._quota_ledgers.freed:
            ledger_kind = self._quota_ledgers.ledger_kind
            changes.unblock_events.update({(ledger_kind(name), name): None for name in self._quota_ledgers.freed})
            self._quota_ledgers.freed = {}
        if postings.moved_tenants:
            changes.unblock_events.update({("peers", tenant): None for tenant in postings.moved_tenants})
            postings.moved_tenants = {}
        changes.version += 1

    def _grants(self, slot: int) -> tuple[str, ...]:
        number = self._replicas.at.grants[slot]
        return self._replicas.ledger_sets[number] if number != NONE else ()
