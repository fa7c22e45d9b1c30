"""Scheduler view: nodes, replicas, shapes and ledgers, with assumed bindings.

Nodes, replicas, shapes and ledgers as the rows have them. It writes nothing.

Every sum here is posted as the authority posts it (law/charges.py, law/ledgers.py), so that at one revision both have the same
left on every node and every grant. What a scheduler has proposed and not yet seen committed it may *assume*: that is posted
as if it had been bound, and taken back when the truth arrives, when the scheduler says so, or when no word comes in time.

An event is applied whole. Of the replicas that it changes, what they held is given back by the old rows before any other row
changes: then the rest of it may come in any order, and folded ones need no order at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remit.law.charges import replica_postings, node_charge
from remit.law.fit import Requirements
from remit.law.ledgers import DEVICE_PREFIX, GrantLedger
from remit.model.records import Phase, PolicyRevision
from remit.observation.cluster_objects import KINDS, News, Things
from remit.observation.column_table import NONE
from remit.observation.node_columns import Columns, Ints
from remit.observation.postings import Accounts, Postings
from remit.observation.reflector import MARKER, Listing, Part, Sight
from remit.observation.replica_table import BOUND, HOLDING, NUMBER, PENDING, RESERVED, Held, Lean, Replicas, decode_lean
from remit.observation.shapes import Shapes
from remit.observation.topology_counts import SeenPeers
from remit.store.protocol import Change, Corrupt, Event, Head, Row
from remit.world.interfaces import Clock

PARTS: Final = (Part(MARKER), *(Part(f"{kind}/") for kind in KINDS), Part("replica/"))
"""What a view is listed from, in an order in which everything finds what it stands on."""

ASSUMED_MS_MAX: Final = 30_000
"""An assumption that nothing confirmed by then is dropped: the claim was lost, or its answer was."""

_REPLICA: Final = "replica/"
_NO_DEVICES: Final[Mapping[str, int]] = {}


class Assumed(NamedTuple):
    """A replica taken for bound that is not yet seen to be."""

    row: int
    devices: Mapping[str, int]
    grants: tuple[str, ...]
    generation: int
    at_ms: int


class Lessened(NamedTuple):
    """What a reservation has posted while its victims still hold: less than it needs."""

    row: int
    resources: tuple[tuple[str, int], ...]
    devices: Mapping[str, int]
    grants: tuple[str, ...]
    charges: Sequence[tuple[tuple[str, int], ...]]


class View(Sight):
    """The sink of a `Follower` over `PARTS`. `version` counts what was applied or assumed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.version = 0
        self._wakes: list[asyncio.Event] = []
        self._clear()

    def _clear(self) -> None:
        """As if nothing had ever been seen."""
        self.head, self.revision = None, 0
        self.doubted(None)
        self.columns, self.replicas, self.shapes = Columns(), Replicas(), Shapes()
        self.accounts = Accounts(self._clock.boot())
        self.peers = SeenPeers(self.columns, self.shapes, self._spots)
        self.things = Things(self.columns, self.shapes, self.accounts, self.peers)
        self.assumed: dict[int, Assumed] = {}
        self._postings = Postings(self.columns, self.accounts, self.peers, self.shapes)
        self._lessened: dict[int, Lessened] = {}
        self._patrons: dict[str, dict[int, None]] = {}
        """By the key of a replica: the reservations that name it as a victim."""
        self._unsettled: dict[int, None] = {}
        """Reservations of which it must be found out what they post."""
        self._listing: Listing | None = None
        self._stands: Ints | None = None
        """How many of each generation are bound, if nothing has changed since."""
        self._news = News(anew=True)

    # -- reading ---------------------------------------------------------------------------------------------------------

    @property
    def ledgers(self) -> dict[str, GrantLedger]:
        """Of every tenant's quota and emergency quota, and of every grant."""
        return self.accounts.ledgers

    @property
    def policy(self) -> PolicyRevision | None:
        """The one in force."""
        return self.shapes.policy

    def ask(self, slot: int) -> Requirements:
        """What the replica in this slot needs."""
        return self.shapes.ask(self.shapes.at.shape[self.replicas.at.generation[slot]])

    def take_news(self) -> News:
        news, self._news = self._news, News()
        return news

    def subscribe(self) -> asyncio.Event:
        """Set after every event that was applied; whoever waits for it clears it."""
        wake = asyncio.Event()
        self._wakes.append(wake)
        return wake

    def unsubscribe(self, wake: asyncio.Event) -> None:
        self._wakes.remove(wake)

    def _spots(self, generations: npt.NDArray[np.intp]) -> Ints:
        """Where replicas of these generations hold room, or are assumed to; see peers.py."""
        node, of = self.replicas.column("node"), self.replicas.column("generation")
        picked = np.zeros(max(self.shapes.size, 1), dtype=np.bool_)
        picked[generations] = True
        rows = node[(node >= 0) & picked[of]].astype(np.int64)
        assumed = [one.row for one in self.assumed.values() if picked[one.generation]]
        return np.concatenate([rows, np.array(assumed, dtype=np.int64)]) if assumed else rows

    # -- what is assumed ---------------------------------------------------------------------------------------------------

    def assume(self, slot: int, row: int, devices: Mapping[str, int], grants: tuple[str, ...]) -> None:
        """Take a pending replica for bound to this row, with these devices, charged to these ledgers."""
        if self.replicas.at.phase[slot] != PENDING or slot in self.assumed:
            raise ValueError(f"slot {slot} does not wait for a node, or is assumed to have one")
        one = Assumed(row, dict(devices), grants, self.replicas.at.generation[slot], self._clock.now_ms())
        self.assumed[slot] = one
        self._move(one, 1)
        self._settle()

    def assume_run(self, placed: Iterable[tuple[int, int, Mapping[str, int]]], grants: tuple[str, ...]) -> None:
        """As `assume`, for many at once: slot, row and devices of each."""
        now_ms, generations = self._clock.now_ms(), self.replicas.at.generation
        for slot, row, devices in placed:
            one = self.assumed[slot] = Assumed(row, devices, grants, generations[slot], now_ms)
            self._move(one, 1)
        self._settle()

    def vacated(self, slot: int) -> bool:
        """Have all the victims of this reservation gone?"""
        victims = self.replicas.victims.get(slot, {})
        return all(self._copy(victim, copy) is None for victim, copy in victims.items())

    def standing(self, generation: int) -> int:
        """How many of a generation are bound, or assumed to be; a reservation is not bound yet."""
        stands = self._stands
        if stands is None:
            are = np.isin(self.replicas.column("phase"), BOUND)
            stands = self._stands = np.bincount(self.replicas.column("generation")[are], minlength=1)
        bound = int(stands[generation]) if generation < len(stands) else 0
        return bound + sum(1 for one in self.assumed.values() if one.generation == generation)

    def owed(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Of each reservation whose victims still hold: its row, and how much less than it needs is posted for it there."""
        for slot, one in self._lessened.items():
            due = dict(node_charge(self.ask(slot), self.replicas.held(slot).devices))
            for name, count in (*one.resources, *((DEVICE_PREFIX + device, share) for device, share in one.devices.items())):
                due[name] -= count
            yield one.row, due

    def forget(self, slot: int) -> bool:
        """Take an assumption back; False if there is none (any more)."""
        one = self.assumed.pop(slot, None)
        if one is None:
            return False
        self._move(one, -1)
        self._settle()
        return True

    def expire(self, now_ms: int) -> list[int]:
        """Drop what was assumed too long ago. Those replicas wait again, and the news say so."""
        old = [slot for slot, one in self.assumed.items() if now_ms - one.at_ms >= ASSUMED_MS_MAX]
        for slot in old:
            self.forget(slot)
            self._news.waits(slot)
        return old

    def _move(self, one: Assumed, sign: int) -> None:
        self._postings.hold(one.generation, one.row, one.grants, sign)
        if one.devices:
            self.columns.post(one.row, (), one.devices, sign)

    # -- the sink ----------------------------------------------------------------------------------------------------------

    def begin(self, head: Head, revision: int) -> None:
        """Over what is known already the list is compared row by row, and what differs is applied at its end. If nothing is
        known, or another incarnation's rows are, it is taken as it comes: nothing from before is trusted, or kept for it.
        """
        if self.head is None or self.head.incarnation != head.incarnation:
            self._clear()
            self.version += 1
        self._listing = Listing(self.things, self.shapes, self.replicas, head, revision, compared=self.head is not None)

    def page(self, rows: Sequence[Row]) -> None:
        listing = self._listing
        if listing is None:
            raise ValueError("no list has begun")
        if listing.compared:
            listing.compare(rows)
            return
        things, kept = list[Change](), self.replicas
        replicas = [row for row in rows if row.key.startswith(_REPLICA)]
        for key, value, revision in rows if len(replicas) < len(rows) else ():
            if key == MARKER:
                self.doubted(value)
            elif not key.startswith(_REPLICA):
                (listing.grants if key.startswith("grant/") else things).append(Change(key, value, revision))
        if things:
            self.things.change(things, self._news)
        for key, value, revision in replicas:
            lean, slot = self._decode(key, value), kept.add(key)
            kept.name(slot, lean, self._generation(key, lean))
            kept.write(slot, lean, revision, self._row(key, lean))

    def end(self) -> None:
        listing, self._listing, self._stands = self._listing, None, None
        if listing is None:
            raise ValueError("no list has begun")
        if listing.compared:
            self._change(listing.changes())
        else:
            self.things.change(listing.grants, self._news)
            for slot in self.replicas.victims:
                if self.replicas.at.phase[slot] == RESERVED:
                    self._post_later(slot)
            self._postings.hold_all(self.replicas, self._unsettled)
            self._settle()
            news = News(anew=True)
            news.pending.update(dict.fromkeys(self.replicas.pending()))
            news.ready.update(self._news.ready)
            self._news, self.shapes.rekeyed = news, []
        self.reached(listing.head, listing.revision)

    def apply(self, event: Event) -> None:
        self._change(event.changes)
        if event.head is not None:
            self.reached(event.head, event.revision)

    def reached(self, head: Head, revision: int) -> None:
        super().reached(head, revision)
        self.size = len(self.replicas.slots) + len(self.things.revisions) + 2 * len(self.shapes.workloads.ids)
        for wake in self._wakes:
            wake.set()

    # -- changes -----------------------------------------------------------------------------------------------------------

    def _change(self, changes: Iterable[Change]) -> None:
        self._stands = None
        replicas, things = list[Change](), list[Change]()
        for change in changes:
            (replicas if change[0].startswith(_REPLICA) else things).append(change)
        things = [change for change in things if change.key == MARKER or self.things.concerns(change.key)]
        if things:
            slots = self.replicas.slots
            for change in replicas:
                slot = slots.get(change.key)
                if slot is not None:
                    self._lift(slot)
            self._change_things(things)
        for key, value, revision in replicas:
            if value is None:
                self._remove(key)
            else:
                self._write(key, self._decode(key, value), revision)
        self._settle()

    def _change_things(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.key == MARKER:
                self.doubted(change.value)
        self._postings.flush()
        moved = self.things.moved(changes)
        for slot, one in list(self.assumed.items()):
            if one.row in moved.rows or one.generation in moved.rewritten or not moved.ledgers.isdisjoint(one.grants):
                # What it stands on is going, and so will its claim.
                self.forget(slot)
                self._news.waits(slot)
        lifted = self._lift_all(moved.rewritten) if moved.rewritten else []
        self._postings.flush()
        self.things.change(changes, self._news)
        for slot, row in lifted:
            self.replicas.at.node[slot] = row
            self._take(slot, row, self._grants(slot))
        self._tell_reshaped()

    def _lift_all(self, generations: Iterable[int]) -> list[tuple[int, int]]:
        """Give back what replicas of these generations hold, and say where."""
        node, of = self.replicas.column("node"), self.replicas.column("generation")
        slots: list[int] = np.flatnonzero((node >= 0) & np.isin(of, list(generations))).tolist()
        found = [(slot, self.replicas.at.node[slot]) for slot in slots]
        for slot in slots:
            self._lift(slot)
        return found

    def _tell_reshaped(self) -> None:
        """Who waits and came to another shape is to be queued anew."""
        rekeyed, self.shapes.rekeyed = self.shapes.rekeyed, []
        if rekeyed:
            waits = self.replicas.column("phase") == PENDING
            for slot in np.flatnonzero(waits & np.isin(self.replicas.column("generation"), rekeyed)).tolist():
                self._news.no_longer_waits(slot)
                self._news.waits(slot)

    def _write(self, key: str, lean: Lean, revision: int) -> None:
        """One replica as its row says. What it holds is given back and taken anew only if it is not the same."""
        kept, news, number = self.replicas, self._news, NUMBER[lean.status.phase]
        slot, before, still = kept.slots.get(key), NONE, False
        row = self._row(key, lean) if HOLDING[number] else NONE
        if slot is None:
            slot = kept.add(key)
            kept.name(slot, lean, self._generation(key, lean))
        else:
            before = kept.at.phase[slot]
            if kept.at.uid[slot] != hash(lean.metadata.uid):  # another of that name
                self._lift(slot)
                kept.name(slot, lean, self._generation(key, lean))
            else:
                still = row != NONE and self._still(slot, lean, row, before)
                if not still and (before != PENDING or self.assumed):
                    self._lift(slot)
        kept.write(slot, lean, revision, row)
        if row != NONE and not still:
            self._take(slot, row, lean.status.grants)
        if self._patrons and not still and key in self._patrons:
            self._unsettled.update(self._patrons[key])
        if before == PENDING:
            news.pending.pop(slot, None)
            news.settled[slot] = None
        if number == PENDING:
            news.pending[slot] = None

    def _still(self, slot: int, lean: Lean, row: int, before: int) -> bool:
        """Does it hold the very room that is posted for it, seen or assumed? An assumption that came true is used up here."""
        kept, status = self.replicas, lean.status
        if status.phase is Phase.RESERVED or before == RESERVED:
            return False
        if self.assumed and (one := self.assumed.get(slot)) is not None:
            same = one.row == row and one.grants == status.grants and one.devices == (status.devices or _NO_DEVICES)
            if same:
                del self.assumed[slot]
            return same
        if kept.at.node[slot] != row or kept.devices.get(slot, _NO_DEVICES) != (status.devices or _NO_DEVICES):
            return False
        grants = kept.at.grants[slot]
        return grants != NONE and kept.charged[grants] == status.grants

    def _remove(self, key: str) -> None:
        slot = self.replicas.slots.get(key)
        if slot is None:
            return
        self._lift(slot)
        if self.replicas.at.phase[slot] == PENDING:
            self._news.no_longer_waits(slot)
        if self._patrons and key in self._patrons:
            self._unsettled.update(self._patrons[key])
        self._unsettled.pop(slot, None)
        self._news.ready.pop(slot, None)
        self.replicas.remove(slot)

    @staticmethod
    def _decode(key: str, value: bytes) -> Lean:
        try:
            return decode_lean(value)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"row {key} does not decode ({error}); restore a backup") from None

    def _row(self, key: str, lean: Lean) -> int:
        """Where a replica holds room, if its phase is one that does."""
        if not HOLDING[NUMBER[lean.status.phase]]:
            return NONE
        row = self.columns.rows.get(lean.status.node)
        if row is None:
            raise Corrupt(f"{key} holds room on {lean.status.node}, which is not there; restore a backup")
        return row

    def _generation(self, key: str, lean: Lean) -> int:
        tenant = key.split("/", 2)[1]
        found = self.shapes.find(tenant, lean.spec.workload, lean.spec.generation)
        if found is None:
            raise Corrupt(f"{key} is of a generation that is not there; restore a backup")
        return found

    # -- what is held ------------------------------------------------------------------------------------------------------

    def _take(self, slot: int, row: int, grants: tuple[str, ...]) -> None:
        """Post what the replica in this slot holds; a reservation's turn comes when everybody's rows have been read."""
        at = self.replicas.at
        if at.phase[slot] == RESERVED:
            if slot in self.replicas.victims:
                self._post_later(slot)
                return
            self._news.ready[slot] = None
        self._postings.hold(at.generation[slot], row, grants, 1)
        if slot in self.replicas.devices:
            self.columns.post(row, (), self.replicas.devices[slot])

    def _post_later(self, slot: int) -> None:
        for victim in self.replicas.victims[slot]:
            self._patrons.setdefault(victim, {})[slot] = None
        self._unsettled[slot] = None
        self._postings.spot(self.replicas.at.generation[slot], self.replicas.at.node[slot], 1)

    def _lift(self, slot: int) -> None:
        """Give back whatever is posted for it, seen or assumed."""
        if self.assumed and (one := self.assumed.pop(slot, None)) is not None:
            self._move(one, -1)
        at = self.replicas.at
        row = at.node[slot]
        if row == NONE:
            return
        at.node[slot] = NONE
        generation = at.generation[slot]
        if slot in self._lessened or slot in self._unsettled:
            self._unsettled.pop(slot, None)
            self._lessen(slot)
            self._unpatron(slot)
            self._postings.spot(generation, row, -1)
            return
        self._postings.hold(generation, row, self._grants(slot), -1)
        if slot in self.replicas.devices:
            self.columns.post(row, (), self.replicas.devices[slot], -1)

    def _grants(self, slot: int) -> tuple[str, ...]:
        number = self.replicas.at.grants[slot]
        return self.replicas.charged[number] if number != NONE else ()

    def _unpatron(self, slot: int) -> None:
        for victim in self.replicas.victims.get(slot, ()):
            of = self._patrons.get(victim, {})
            of.pop(slot, None)
            if not of:
                self._patrons.pop(victim, None)

    def _lessen(self, slot: int) -> None:
        """Take back what a reservation has posted."""
        one = self._lessened.pop(slot, None)
        if one is not None:
            self.columns.post(one.row, one.resources, one.devices, -1)
            self.accounts.draw_each(one.grants, one.charges, -1)
            self._postings.freed[one.row] = None

    def _reserve(self, slot: int) -> None:
        """Post what a reservation needs less what its victims still hold."""
        self._lessen(slot)
        held = self.replicas.held(slot)
        there = [found for victim, copy in held.victims.items() if (found := self._copy(victim, copy)) is not None]
        pairs, charges = replica_postings(held, self.ask(slot), there)
        row = self.replicas.at.node[slot]
        devices = {name.removeprefix(DEVICE_PREFIX): share for name, share in pairs if name.startswith(DEVICE_PREFIX)} if held.devices else {}
        resources = tuple(pair for pair in pairs if not pair[0].startswith(DEVICE_PREFIX)) if devices else pairs
        self.columns.post(row, resources, devices)
        self.accounts.draw_each(held.grants, charges, 1)
        self._lessened[slot] = Lessened(row, resources, devices, held.grants, charges)
        if not there:
            self._news.ready[slot] = None

    def _copy(self, victim: str, copy: str) -> tuple[Held, Requirements] | None:
        """A replica, by its key, and what it asks for; None unless this very copy of it still holds its room."""
        slot = self.replicas.slots.get(victim)
        if slot is None or self.replicas.at.node[slot] == NONE or not self.replicas.is_copy(slot, copy):
            return None
        return self.replicas.held(slot), self.ask(slot)

    def _settle(self) -> None:
        """Everything is posted, and told."""
        postings = self._postings
        postings.flush()
        if self._unsettled:
            for slot in list(self._unsettled):
                if self.replicas.at.phase[slot] == RESERVED:
                    self._reserve(slot)
            self._unsettled.clear()
        cures = self._news.cures
        if postings.freed:
            cures.update({("room", row): None for row in postings.freed})
            postings.freed = {}
        if self.accounts.freed:
            cures.update({(self.accounts.kind(name), name): None for name in self.accounts.freed})
            self.accounts.freed = {}
        if postings.met:
            cures.update({("peers", tenant): None for tenant in postings.met})
            postings.met = {}
        self.version += 1
