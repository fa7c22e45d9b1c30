"""Replica rows as a draft changes them. The only code that posts replicas to ledgers. No I/O.

A write reverses the postings of the old row and posts those of the new one:

- A replica in a holding phase posts its resources and devices on its node, and its charge on each of its grants.
- A reservation that waits for victims posts, per ledger, its need minus what the victims still hold. So no sum exceeds its
  limit, and no other replica can take what the victims free.
"""

from __future__ import annotations

from collections.abc import Sequence

from remit.commitment.books import Books, DecisionTime, decode_replica
from remit.commitment.changes import Changes, GenerationKey, add_counts
from remit.commitment.draft_ledgers import DraftLedgers
from remit.commitment.generations import DraftRequirements, generation_of
from remit.commitment.peer_counts import DraftPeerCounts
from remit.law.charges import (
    ACTIVE_PHASES,
    NOT_WORKING_PHASES,
    Pairs,
    freed_by_victim,
    node_charge,
    replica_postings,
    same_charge,
    still_holds,
)
from remit.law.fit import Requirements
from remit.law.lifecycle import HOLDING_PHASES
from remit.model.records import Phase, Replica, ReplicaStatus


class DraftReplicas:
    """Replicas of the books, hidden by those that the draft has written. Every write also updates ledgers and counts."""

    __slots__ = ("_books", "_changes", "_decoded", "_ledgers", "_peers", "_requirements")

    def __init__(
        self, books: Books, changes: Changes, ledgers: DraftLedgers, requirements: DraftRequirements, peers: DraftPeerCounts
    ) -> None:
        self._books, self._changes = books, changes
        self._ledgers, self._requirements, self._peers = ledgers, requirements, peers
        self._decoded: dict[str, tuple[Replica, int]] = {}
        """Decoded replicas of the books. A preemption reads the same ones repeatedly."""

    # -- reading ---------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> tuple[Replica, int] | None:
        """Return a replica and its revision, which is -1 if the draft has written it."""
        if name in self._changes.replicas:
            replica = self._changes.replicas[name]
            return None if replica is None else (replica, -1)
        row = self._books.replicas.get(name)
        if row is None:
            return None
        decoded = self._decoded.get(name)
        if decoded is None or decoded[1] != row[0]:
            decoded = self._decoded[name] = decode_replica(row[1]), row[0]
        return decoded

    def phase_age_ms(self, name: str, time: DecisionTime) -> int:
        """Return how long a replica has been in its phase."""
        row = None if name in self._changes.replicas else self._books.replicas.get(name)
        return 0 if row is None else self._books.phase_age_ms(row[0], time)

    def count(self, generation: GenerationKey) -> int:
        return self._books.population.get(generation, 0) + self._changes.population.get(generation, 0)

    def active_count(self, tenant: str, workload: str) -> int:
        """Return how many replicas count towards the limit of a workload."""
        return self._books.active.get((tenant, workload), 0) + self._changes.active.get((tenant, workload), 0)

    def bound_count(self, generation: GenerationKey) -> int:
        """Return how many replicas of a generation are bound. Reservations hold capacity but are not bound yet."""
        holders = sum(self._books.peers.node_counts.get(generation, {}).values())
        holders += sum(self._changes.node_counts.get(generation, {}).values())
        return holders - self._books.reserved.get(generation, 0) - self._changes.reserved.get(generation, 0)

    # -- writing ---------------------------------------------------------------------------------------------------------

    def put(self, name: str, old: Replica | None, new: Replica | None) -> None:
        """Write or delete a replica."""
        before = old if old is not None and old.status.phase in HOLDING_PHASES else None
        after = new if new is not None and new.status.phase in HOLDING_PHASES else None
        unchanged = before is not None and after is not None and self._is_same_charge(before, after)
        preemptor = self._preemptor_of(name) if before is not None and after is None else None
        freed = self._freed_for_preemptor(preemptor, name) if preemptor is not None else None
        if before is not None and not unchanged:
            self._post(name, before, -1)
        self._changes.replicas[name] = new
        if after is not None and not unchanged:
            self._post(name, after, 1)
        if freed is not None:
            self._transfer_freed(*freed)
        self._count(name, old, new)

    def bind(self, name: str, new: Replica, requirements: Requirements) -> None:
        """Do what `put` does, faster, for a pending replica that is bound: it has no postings to reverse and no preemptor."""
        status = new.status
        ledger = self._ledgers.node_of(name, status.node)
        self._changes.replicas[name] = new
        ledger.post(node_charge(requirements, status.devices), 1)
        for grant in status.grants:
            self._ledgers.grant_of(name, grant).draw(requirements.charge.pairs, 1)
        self._peers.add(requirements, status.node, 1)

    def withdraw(self, name: str, replica: Replica) -> None:
        """Take back the postings of a replica, to decide as if it were gone. `restore` must follow; the row stays."""
        self._post(name, replica, -1)

    def restore(self, name: str, replica: Replica) -> None:
        self._post(name, replica, 1)

    def _is_same_charge(self, before: Replica, after: Replica) -> bool:
        if after.status.phase is Phase.RESERVED or self._holding_victims(before.status):
            return False  # a reservation posts less than its need while victims hold capacity
        return same_charge(before, after)

    def _preemptor_of(self, victim: str) -> str | None:
        preemptors = self._changes.preemptors
        return preemptors[victim] if victim in preemptors else self._books.preemptors.get(victim)

    def _freed_for_preemptor(self, preemptor: str, victim: str) -> tuple[str, Replica, Pairs, list[Pairs]] | None:
        """Return the preemptor that receives what this victim holds, and how much of it."""
        entry = self.get(preemptor)
        requirements = self._requirements.of(generation_of(entry[0])) if entry is not None else None
        if entry is None or requirements is None:
            return None
        victims = self._holding_victims(entry[0].status)
        victim_hold = victims.pop(victim, None)
        return (
            None
            if victim_hold is None
            else (preemptor, entry[0], *freed_by_victim(entry[0].status, requirements, victim_hold, list(victims.values())))
        )

    def _transfer_freed(self, name: str, preemptor: Replica, pairs: Pairs, charges: Sequence[Pairs]) -> None:
        self._ledgers.node_of(name, preemptor.status.node).adjust(pairs)
        for grant, charge in zip(preemptor.status.grants, charges, strict=True):
            if charge:
                self._ledgers.grant_of(name, grant).draw(charge, 1)

    def _count(self, name: str, old: Replica | None, new: Replica | None) -> None:
        """Update everything that is counted per replica rather than by amount."""
        replica = old if old is not None else new
        if replica is None:
            return
        changes = self._changes
        phase_before, phase_after = None if old is None else old.status.phase, None if new is None else new.status.phase
        if phase_before is None or phase_after is None:
            add_counts(changes.population, {generation_of(replica): (phase_after is not None) - (phase_before is not None)})
        if active := (phase_after in ACTIVE_PHASES) - (phase_before in ACTIVE_PHASES):
            add_counts(changes.active, {(replica.metadata.tenant, replica.spec.workload): active})
        if unsettled := (phase_after in NOT_WORKING_PHASES) - (phase_before in NOT_WORKING_PHASES):
            add_counts(changes.reserved, {generation_of(replica): unsettled})
        if phase_before is Phase.RESERVED and old is not None:
            self._link_victims(name, old, -1)
        if phase_after is Phase.RESERVED and new is not None:
            self._link_victims(name, new, 1)

    def _link_victims(self, name: str, replica: Replica, sign: int) -> None:
        for victim, attempt in replica.status.victims.items():
            entry = self.get(victim)
            if sign < 0 and self._preemptor_of(victim) == name:
                self._changes.preemptors[victim] = None
            elif sign > 0 and entry is not None and still_holds(entry[0], attempt):
                # Otherwise it is a later attempt, or another replica of that name, which may have another preemptor by now.
                self._changes.preemptors[victim] = name

    def _post(self, name: str, replica: Replica, sign: int) -> None:
        status = replica.status
        requirements = self._requirements.of(generation_of(replica))
        if requirements is None:
            raise LookupError(f"{name}: it holds capacity, but its generation is not in the books")
        ledger = self._ledgers.node_of(name, status.node)
        victims = list(self._holding_victims(status).values()) if status.victims else ()
        pairs, charges = replica_postings(status, requirements, victims)
        ledger.post(pairs, sign)
        for grant, charge in zip(status.grants, charges, strict=True):
            self._ledgers.grant_of(name, grant).draw(charge, sign)
        self._peers.add(requirements, status.node, sign)

    def _holding_victims(self, status: ReplicaStatus) -> dict[str, tuple[ReplicaStatus, Requirements]]:
        """Return the victims of a reservation that still hold capacity, with their requirements."""
        victims = {}
        for victim, attempt in status.victims.items():
            entry = self.get(victim)
            requirements = (
                self._requirements.of(generation_of(entry[0])) if entry is not None and still_holds(entry[0], attempt) else None
            )
            if entry is not None and requirements is not None:
                victims[victim] = entry[0].status, requirements
        return victims
