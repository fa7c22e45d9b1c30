"""Uncommitted changes of one batch over the books. The only code that posts to ledgers. No I/O.

`put` reverses the postings of the old row and posts those of the new one:

- A replica in a holding phase posts its resources and devices on its node, and its charge on each of its grants.
- A reservation that waits for victims posts, per ledger, its need minus what the victims still hold. So no sum exceeds its
  limit, and no other replica can take what the victims free.
- An issued grant posts its outstanding amount on its parent, and a budget's shares on the tenants' emergency quota.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remit.commitment.books import (
    Books,
    GenerationKey,
    Moment,
    Overlay,
    Tally,
    add,
    asks_under,
    compile_ask,
    decode_replica,
    domains,
    generation_of,
)
from remit.commitment.selector_index import Indexes, picks
from remit.law.charges import (
    ACTIVE_PHASES,
    NOT_WORKING_PHASES,
    LimitUsage,
    Pairs,
    freed_by_victim,
    node_charge,
    post_charge_difference,
    replica_postings,
    same_charge,
    still_holds,
)
from remit.law.fit import PeerIndex, Requirements, owned_anti_affinity
from remit.law.ledgers import GrantLedger, NodeLedger, deadline_ms, ledgers_of, parent_charges
from remit.law.lifecycle import HOLDING_PHASES
from remit.law.selectors import domain_of
from remit.law.shared_requirements import RequirementsInterner
from remit.model.claims import Refused
from remit.model.kinds import Node, Tenant, Workload
from remit.model.objects import AnyObject, key
from remit.model.records import Generation, Grant, Phase, PolicyRevision, Replica, ReplicaStatus


class Draft:
    """Changes of a batch that is being decided, over the books. Satisfies `fit.PeerCounts`.

    Entries in the draft's own dictionaries hide those of the books; None means deleted. Ledgers are copied on first write. A
    `fork` starts with everything in this draft, and is either discarded or taken over by `absorb`.
    """

    __slots__ = (
        "_asked", "_asks", "_carried", "_moved", "_my_grants", "_my_nodes", "_read", "active", "books", "born", "fenced",
        "grants", "heard", "moment", "nodes", "notes", "patrons", "policy", "population", "relabelled", "replicas", "reserved",
        "reshaped", "spots", "takeover", "things", "used",
    )  # fmt: skip

    def __init__(self, books: Books, moment: Moment, *, takeover: bool = False) -> None:
        self.books, self.moment, self.takeover = books, moment, takeover
        self.replicas: dict[str, Replica | None] = {}
        self.things: dict[str, AnyObject | None] = {}
        self.notes: dict[str, AnyObject | None] = {}
        self.nodes: dict[str, NodeLedger | None] = {}
        self.grants: dict[str, GrantLedger | None] = {}
        self.patrons: dict[str, str | None] = {}
        self.heard: dict[str, int] = {}
        self.spots: dict[GenerationKey, dict[str, int]] = {}
        self.population: dict[GenerationKey, int] = {}
        self.reserved: dict[GenerationKey, int] = {}
        self.active: dict[tuple[str, str], int] = {}
        self.used: LimitUsage = {}
        self.policy: PolicyRevision | None = None
        self.reshaped: dict[tuple[str, str], None] = {}
        """Workloads, by tenant and name, that were changed in this draft, or of which a generation was."""
        self.relabelled = False
        self.born = 0
        self.fenced: dict[tuple[str, str, str, int], Refused | None] = {}
        """Cached results of the fencing check. Valid while no object changes in this draft."""
        self._read: dict[str, tuple[Replica, int]] = {}
        """Decoded replicas of the books. A preemption reads the same ones repeatedly."""
        self._my_nodes, self._my_grants = set[str](), set[str]()
        self._asks: dict[GenerationKey, Requirements | None] = {}
        self._asked: tuple[PolicyRevision, RequirementsInterner] | None = None
        self._moved: Indexes[dict[str, int]] = Indexes()
        self._carried: Indexes[None] = Indexes()

    def fork(self) -> Draft:
        """Return a draft that starts as a copy of this one. Writes to it do not affect this draft."""
        trial = Draft(self.books, self.moment, takeover=self.takeover)
        for name in (*_KEPT, *_COUNTED):
            setattr(trial, name, getattr(self, name).copy())
        trial.spots = {generation: spots.copy() for generation, spots in self.spots.items()}
        trial._carried, trial._asked = self._carried.copy(), self._asked
        trial.policy, trial.reshaped = self.policy, self.reshaped.copy()
        trial.relabelled, trial.born = self.relabelled, self.born
        return trial

    def absorb(self, trial: Draft) -> None:
        """Take over the state of a fork of this draft."""
        mine = self._my_nodes | trial._my_nodes, self._my_grants | trial._my_grants
        for name in Draft.__slots__:
            setattr(self, name, getattr(trial, name))
        self._my_nodes, self._my_grants = mine

    def follow(self, moment: Moment) -> Draft:
        """Return a draft for the next batch, started before this one is absorbed."""
        after = self.fork()
        after.moment, after.born = moment, 0
        return after

    def subtract(self, before: Draft) -> None:
        """Keep only the changes made since this draft began to `follow` another one, which is absorbed first."""
        for name in _KEPT:
            mine = getattr(self, name)
            for key_, value in getattr(before, name).items():
                if mine[key_] is value:
                    del mine[key_]
        for name in _COUNTED:
            add(getattr(self, name), {key_: -count for key_, count in getattr(before, name).items()})
        for generation, spots in before.spots.items():
            add(self.spots[generation], {node: -count for node, count in spots.items()})
            if not self.spots[generation]:
                del self.spots[generation]
        if self.policy is before.policy:
            self.policy = None

    # -- reading ---------------------------------------------------------------------------------------------------------

    def replica(self, name: str) -> tuple[Replica, int] | None:
        if name in self.replicas:
            replica = self.replicas[name]
            return None if replica is None else (replica, -1)
        kept = self.books.replicas.get(name)
        if kept is None:
            return None
        read = self._read.get(name)
        if read is None or read[1] != kept[0]:
            read = self._read[name] = decode_replica(kept[1]), kept[0]
        return read

    def thing(self, name: str) -> tuple[Any, int] | None:
        if name in self.things:
            thing = self.things[name]
            return None if thing is None else (thing, -1)
        return self.books.things.get(name)

    def node(self, name: str) -> NodeLedger | None:
        return self.nodes[name] if name in self.nodes else self.books.nodes.get(name)

    def grant(self, name: str) -> GrantLedger | None:
        return self.grants[name] if name in self.grants else self.books.grants.get(name)

    def patron(self, victim: str) -> str | None:
        return self.patrons[victim] if victim in self.patrons else self.books.patrons.get(victim)

    def waiting_ms(self, name: str) -> int:
        """Return how long a replica has been in its phase."""
        kept = None if name in self.replicas else self.books.replicas.get(name)
        return 0 if kept is None else self.books.waiting_ms(kept[0], self.moment)

    def alike(self, generation: GenerationKey) -> int:
        return self.books.population.get(generation, 0) + self.population.get(generation, 0)

    def members(self, tenant: str, workload: str) -> int:
        return self.books.active.get((tenant, workload), 0) + self.active.get((tenant, workload), 0)

    def held(self, generation: GenerationKey) -> int:
        moved = sum(self.spots.get(generation, {}).values()) - self.reserved.get(generation, 0)
        return self.books.held(generation) + moved

    def places(self) -> Iterator[tuple[GenerationKey, str, int]]:
        yield from self.books.places()
        for generation, spots in self.spots.items():
            for name, count in spots.items():
                yield generation, name, count

    def in_force(self) -> PolicyRevision | None:
        return self.policy if self.policy is not None else self.books.policy

    def keys(self, prefix: str) -> list[str]:
        there = dict.fromkeys(self.books.keys(prefix), True)
        there.update({name: thing is not None for name, thing in self.things.items() if name.startswith(prefix)})
        return sorted(name for name in there if there[name])

    def all_nodes(self) -> Mapping[str, NodeLedger | None]:
        return {**self.books.nodes, **self.nodes}

    def ask(self, generation: GenerationKey) -> Requirements | None:
        if self.policy is None and (not self.reshaped or generation[:2] not in self.reshaped):
            return self.books.ask(generation)
        if generation not in self._asks:
            self._asks[generation] = compile_ask(self, generation, self.asks_now())
        return self._asks[generation]

    def asks_now(self) -> RequirementsInterner:
        if self.policy is None:
            return self.books.asked
        if self._asked is None or self._asked[0] is not self.policy:
            self._asked = self.policy, asks_under(self.policy)
        return self._asked[1]

    # -- fit.Peers -------------------------------------------------------------------------------------------------------

    def counts(self, index: PeerIndex) -> Overlay:
        if self.relabelled:
            # The counts of the books use the node labels from before this draft.
            return Overlay(Tally(), self._recount(index))
        return Overlay(self.books.counts(index), self._moves(index))

    def total(self, index: PeerIndex) -> int:
        return self.books.total(index) + sum(self._moves(index).values())

    def min_count(self, ask: Requirements, index: PeerIndex) -> int:
        counts = self.counts(index)
        return min((counts[domain] for domain in self.eligible(ask, index.topology_key)), default=0)

    def eligible(self, ask: Requirements, topology_key: str) -> tuple[str, ...]:
        if self.relabelled or self.policy is not None or self.reshaped:
            return domains(ask, self.all_nodes().values(), topology_key)
        return self.books.eligible(ask, topology_key)

    def anti_affinity_owners(self, ask: Requirements) -> Sequence[PeerIndex]:
        if not self._carried.values and not self.books.carriers.values:
            return ()
        below = self.books.carriers.picking(ask)
        return below + [index for index in self._carried.picking(ask) if index not in below] if self._carried else below

    def _recount(self, index: PeerIndex) -> dict[str, int]:
        counted: dict[str, int] = {}
        for generation, name, count in self.places():
            ask = self.ask(generation) if generation[0] == index.tenant else None
            if ask is not None and picks(index, ask):
                self._move(counted, index, name, count)
        return counted

    def _moves(self, index: PeerIndex) -> dict[str, int]:
        """Return this draft's changes to the counts of a term. Computed on first use and maintained since."""
        moved = self._moved.get(index)
        if moved is None:
            moved = {}
            self._moved.put(index, moved)
            for generation, spots in self.spots.items():
                # A generation that is deleted in this batch was counted by the books with its old requirements.
                ask = (self.ask(generation) or self.books.ask(generation)) if generation[0] == index.tenant else None
                if ask is not None and picks(index, ask):
                    for name, count in spots.items():
                        self._move(moved, index, name, count)
        return moved

    def _move(self, moved: dict[str, int], index: PeerIndex, node: str, count: int) -> None:
        ledger = self.node(node)
        if ledger is not None:
            domain = domain_of(ledger.node, index.topology_key)
            moved[domain] = moved.get(domain, 0) + count

    # -- writing ---------------------------------------------------------------------------------------------------------

    def put(self, thing: AnyObject) -> None:
        """Write one object of any kind, and post what follows from it to the ledgers."""
        name = key(thing)
        if isinstance(thing, Replica):
            found = self.replica(name)
            self.put_replica(name, None if found is None else found[0], thing)
            return
        before = (self.thing(name) or (None,))[0]
        self.things[name] = thing
        post_charge_difference(self.used, before, thing)
        self.fenced.clear()
        match thing:
            case Node():
                self._put_node(thing)
            case Tenant():
                for ledger, amount, tenant in ledgers_of(thing):
                    self._put_ledger(ledger, dict(amount.pairs), None, tenant)
            case Grant():
                self._put_grant(thing, before)
            case Generation() | Workload():
                self._reshape(thing)
            case PolicyRevision():
                latest = self.in_force()
                if latest is None or thing.spec.number >= latest.spec.number:
                    self.policy = thing
                    self._asks.clear()

    def drop(self, name: str) -> None:
        """Delete one object. The caller has checked that nothing depends on it."""
        if name.startswith("replica/"):
            found = self.replica(name)
            if found is not None:
                self.put_replica(name, found[0], None)
            return
        found_thing = self.thing(name)
        if found_thing is None:
            return
        self.things[name] = None
        post_charge_difference(self.used, found_thing[0], None)
        match found_thing[0]:
            case Node() as node:
                self.nodes[node.metadata.name] = None
                self.relabelled = True
            case Tenant() | Grant() as opened:
                if isinstance(opened, Grant):
                    self._burden(opened, -1)
                for ledger, _, _ in ledgers_of(opened):
                    self.grants[ledger] = None
            case Generation() | Workload() as shaping:
                self._reshape(shaping)

    def note(self, thing: AnyObject) -> None:
        """Write an event or a decision. No decision depends on these, and the oldest are deleted when there are too many."""
        self.notes[key(thing)] = thing

    def uid(self) -> str:
        """Return an identifier unique over the whole life of this scope: incarnation, batch sequence, and a count within the
        batch.

        The incarnation is needed because a backup does not know ids issued after it was made: they could be issued again.
        """
        self.born += 1
        return f"{self.moment.incarnation}-{self.moment.sequence:x}-{self.born:x}"

    def _reshape(self, thing: Generation | Workload) -> None:
        name = thing.spec.workload if isinstance(thing, Generation) else thing.metadata.name
        self.reshaped[thing.metadata.tenant, name] = None
        self._asks.clear()

    def bind(self, name: str, new: Replica, ask: Requirements) -> None:
        """Do what `put_replica` does, faster, for a pending replica that is bound: no postings to reverse, no preemptor to
        serve.
        """
        status = new.status
        ledger = self.nodes[status.node] if status.node in self._my_nodes else self._own_node(status.node)
        if ledger is None:
            raise LookupError(f"{name}: node {status.node} of its binding is not in the books")
        self.replicas[name] = new
        ledger.post(node_charge(ask, status.devices), 1)
        for grant in status.grants:
            self._charged(name, grant).draw(ask.charge.pairs, 1)
        self._spot(ask, status.node, 1)

    def put_replica(self, name: str, old: Replica | None, new: Replica | None) -> None:
        """Write or delete a replica. The only place where the postings of a replica change."""
        before = old if old is not None and old.status.phase in HOLDING_PHASES else None
        after = new if new is not None and new.status.phase in HOLDING_PHASES else None
        still = before is not None and after is not None and same_charge(before, after)
        patron = self.patron(name) if before is not None and after is None else None
        owed = self._owed(patron, name) if patron is not None else None
        if before is not None and not still:
            self._post(name, before, -1)
        self.replicas[name] = new
        if after is not None and not still:
            self._post(name, after, 1)
        if owed is not None:
            self._hand_over(*owed)
        self._count(name, old, new)

    def settle(self, name: str, old: Replica, new: Replica) -> None:
        """Do what `put_replica` does, faster, for a replica whose postings stay exactly the same."""
        self.replicas[name] = new
        self._count(name, old, new)

    def retract(self, name: str, now: Replica, before: Replica) -> None:
        """Undo the writes to a replica that this draft had not changed before."""
        self.put_replica(name, now, before)
        del self.replicas[name]

    def _owed(self, patron: str, victim: str) -> tuple[str, Replica, Pairs, list[Pairs]] | None:
        """Return the preemptor that receives what this victim holds, and how much of it."""
        found = self.replica(patron)
        ask = self.ask(generation_of(found[0])) if found is not None else None
        if found is None or ask is None:
            return None
        there = self._victims(found[0].status)
        gone = there.pop(victim, None)
        return None if gone is None else (patron, found[0], *freed_by_victim(found[0].status, ask, gone, list(there.values())))

    def _hand_over(self, name: str, patron: Replica, pairs: Pairs, charges: Sequence[Pairs]) -> None:
        ledger = self._own_node(patron.status.node)
        if ledger is None:
            raise LookupError(f"{name}: node {patron.status.node} of its reservation is not in the books")
        ledger.adjust(pairs)
        for grant, charge in zip(patron.status.grants, charges, strict=True):
            if charge:
                self._charged(name, grant).draw(charge, 1)

    def _count(self, name: str, old: Replica | None, new: Replica | None) -> None:
        """Update everything that is counted per replica rather than by amount."""
        replica = old if old is not None else new
        if replica is None:
            return
        was, now = None if old is None else old.status.phase, None if new is None else new.status.phase
        if was is None or now is None:
            add(self.population, {generation_of(replica): (now is not None) - (was is not None)})
        if active := (now in ACTIVE_PHASES) - (was in ACTIVE_PHASES):
            add(self.active, {(replica.metadata.tenant, replica.spec.workload): active})
        if unsettled := (now in NOT_WORKING_PHASES) - (was in NOT_WORKING_PHASES):
            add(self.reserved, {generation_of(replica): unsettled})
        if was is Phase.RESERVED and old is not None:
            self._count_reserved(name, old, -1)
        if now is Phase.RESERVED and new is not None:
            self._count_reserved(name, new, 1)

    def _count_reserved(self, name: str, replica: Replica, sign: int) -> None:
        for victim, copy in replica.status.victims.items():
            found = self.replica(victim)
            if sign < 0 and self.patron(victim) == name:
                self.patrons[victim] = None
            elif sign > 0 and found is not None and still_holds(found[0], copy):
                # Otherwise it is a later attempt, or another replica of that name, which may have another preemptor by now.
                self.patrons[victim] = name

    def _post(self, name: str, replica: Replica, sign: int) -> None:
        ask = self.ask(generation_of(replica))
        ledger = self._own_node(replica.status.node)
        if ask is None or ledger is None:
            raise LookupError(
                f"{name}: it holds capacity, but its generation or node {replica.status.node} is not in the books"
            )
        victims = list(self._victims(replica.status).values()) if replica.status.victims else ()
        pairs, charges = replica_postings(replica.status, ask, victims)
        ledger.post(pairs, sign)
        for grant, charge in zip(replica.status.grants, charges, strict=True):
            self._charged(name, grant).draw(charge, sign)
        self._spot(ask, replica.status.node, sign)

    def _charged(self, name: str, grant: str) -> GrantLedger:
        own = self._own_grant(grant)
        if own is None:
            raise LookupError(f"{name}: grant {grant}, to which it is charged, is not in the books")
        return own

    def _victims(self, status: ReplicaStatus) -> dict[str, tuple[ReplicaStatus, Requirements]]:
        """Return the victims of a reservation that still hold capacity, with their requirements."""
        there = {}
        for victim, copy in status.victims.items():
            found = self.replica(victim)
            ask = self.ask(generation_of(found[0])) if found is not None and still_holds(found[0], copy) else None
            if found is not None and ask is not None:
                there[victim] = found[0].status, ask
        return there

    def _spot(self, ask: Requirements, node: str, sign: int) -> None:
        spots = self.spots.get(ask.generation)
        if spots is None:
            spots = self.spots[ask.generation] = {}
        spots[node] = spots.get(node, 0) + sign
        for index in owned_anti_affinity(ask) if ask.anti_affinity else ():
            self._carried.put(index, None)
        for index in self._moved.counting(ask) if self._moved else ():
            self._move(self._moved.values[index], index, node, sign)

    def _put_node(self, node: Node) -> None:
        old = self.node(node.metadata.name)
        new = NodeLedger(node) if old is None else old.with_node(node)
        self.nodes[node.metadata.name] = new
        self._my_nodes.add(node.metadata.name)
        if old is None or old.node_attributes != new.node_attributes:
            self.relabelled = True

    def _put_ledger(
        self, name: str, amount: Mapping[str, int], grant: Grant | None, tenant: str, deadline: int | None = None
    ) -> None:
        ledger = self._own_grant(name)
        if ledger is None:
            self.grants[name] = GrantLedger(name, amount, grant, tenant, deadline)
            self._my_grants.add(name)
        else:
            ledger.resize(amount)
            ledger.grant, ledger.deadline_ms = grant, deadline

    def _put_grant(self, grant: Grant, before: Any) -> None:
        if isinstance(before, Grant):
            self._burden(before, -1)
        deadline = deadline_ms(grant, self.moment.boot, self.moment.now_ms, new_term=self.takeover)
        for ledger, amount, tenant in ledgers_of(grant):
            self._put_ledger(ledger, dict(amount.pairs), grant, tenant, deadline)
        self._burden(grant, 1)

    def _burden(self, grant: Grant, sign: int) -> None:
        for name, pairs in parent_charges(grant):
            ledger = self._own_grant(name)
            if ledger is not None:
                ledger.grant_on(pairs, sign)

    def _own_node(self, name: str) -> NodeLedger | None:
        """Return a ledger of this draft that may be posted to: a copy of the current one."""
        if name in self._my_nodes:
            return self.nodes[name]
        ledger = self.nodes[name] if name in self.nodes else self.books.nodes.get(name)
        if ledger is not None:
            ledger = self.nodes[name] = ledger.copy()
            self._my_nodes.add(name)
        return ledger

    def _own_grant(self, name: str) -> GrantLedger | None:
        if name in self._my_grants:
            return self.grants[name]
        ledger = self.grants[name] if name in self.grants else self.books.grants.get(name)
        if ledger is not None:
            ledger = self.grants[name] = ledger.copy()
            self._my_grants.add(name)
        return ledger


_KEPT, _COUNTED = (
    ("replicas", "things", "notes", "nodes", "grants", "patrons", "heard"),
    ("population", "reserved", "active", "used"),
)
