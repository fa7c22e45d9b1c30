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
    DecisionTime,
    DomainCounts,
    DomainCountsOverlay,
    GenerationKey,
    add_counts,
    decode_replica,
    eligible_domains,
    generation_of,
    generation_requirements,
    interner_for_policy,
)
from remit.commitment.selector_index import SelectorIndex, counts_replica
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
        "_anti_affinity_terms",
        "_changes",
        "_copied_grants",
        "_copied_nodes",
        "_decoded_replicas",
        "_policy_interner",
        "_requirements",
        "active",
        "books",
        "changed_workloads",
        "fence_results",
        "grants",
        "node_counts",
        "nodes",
        "notes",
        "objects",
        "policy",
        "population",
        "preemptors",
        "renewed_ms",
        "replicas",
        "reserved",
        "takeover",
        "time",
        "topology_changed",
        "uids_issued",
        "used",
    )  # fmt: skip

    def __init__(self, books: Books, time: DecisionTime, *, takeover: bool = False) -> None:
        self.books, self.time, self.takeover = books, time, takeover
        self.replicas: dict[str, Replica | None] = {}
        self.objects: dict[str, AnyObject | None] = {}
        self.notes: dict[str, AnyObject | None] = {}
        self.nodes: dict[str, NodeLedger | None] = {}
        self.grants: dict[str, GrantLedger | None] = {}
        self.preemptors: dict[str, str | None] = {}
        self.renewed_ms: dict[str, int] = {}
        self.node_counts: dict[GenerationKey, dict[str, int]] = {}
        self.population: dict[GenerationKey, int] = {}
        self.reserved: dict[GenerationKey, int] = {}
        self.active: dict[tuple[str, str], int] = {}
        self.used: LimitUsage = {}
        self.policy: PolicyRevision | None = None
        self.changed_workloads: dict[tuple[str, str], None] = {}
        """Workloads, by tenant and name, that were changed in this draft, or of which a generation was."""
        self.topology_changed = False
        self.uids_issued = 0
        self.fence_results: dict[tuple[str, str, str, int], Refused | None] = {}
        """Cached results of the fencing check. Valid while no object changes in this draft."""
        self._decoded_replicas: dict[str, tuple[Replica, int]] = {}
        """Decoded replicas of the books. A preemption reads the same ones repeatedly."""
        self._copied_nodes, self._copied_grants = set[str](), set[str]()
        self._requirements: dict[GenerationKey, Requirements | None] = {}
        self._policy_interner: tuple[PolicyRevision, RequirementsInterner] | None = None
        self._changes: SelectorIndex[dict[str, int]] = SelectorIndex()
        self._anti_affinity_terms: SelectorIndex[None] = SelectorIndex()

    def fork(self) -> Draft:
        """Return a draft that starts as a copy of this one. Writes to it do not affect this draft."""
        copy = Draft(self.books, self.time, takeover=self.takeover)
        for name in (*_ROW_FIELDS, *_COUNT_FIELDS):
            setattr(copy, name, getattr(self, name).copy())
        copy.node_counts = {generation: spots.copy() for generation, spots in self.node_counts.items()}
        copy._anti_affinity_terms, copy._policy_interner = self._anti_affinity_terms.copy(), self._policy_interner
        copy.policy, copy.changed_workloads = self.policy, self.changed_workloads.copy()
        copy.topology_changed, copy.uids_issued = self.topology_changed, self.uids_issued
        return copy

    def absorb(self, fork: Draft) -> None:
        """Take over the state of a fork of this draft."""
        copied = self._copied_nodes | fork._copied_nodes, self._copied_grants | fork._copied_grants
        for name in Draft.__slots__:
            setattr(self, name, getattr(fork, name))
        self._copied_nodes, self._copied_grants = copied

    def follow(self, time: DecisionTime) -> Draft:
        """Return a draft for the next batch, started before this one is absorbed."""
        following = self.fork()
        following.time, following.uids_issued = time, 0
        return following

    def subtract(self, previous: Draft) -> None:
        """Keep only the changes made since this draft began to `follow` another one, which is absorbed first."""
        for name in _ROW_FIELDS:
            own = getattr(self, name)
            for key_, value in getattr(previous, name).items():
                if own[key_] is value:
                    del own[key_]
        for name in _COUNT_FIELDS:
            add_counts(getattr(self, name), {key_: -count for key_, count in getattr(previous, name).items()})
        for generation, spots in previous.node_counts.items():
            add_counts(self.node_counts[generation], {node: -count for node, count in spots.items()})
            if not self.node_counts[generation]:
                del self.node_counts[generation]
        if self.policy is previous.policy:
            self.policy = None

    # -- reading ---------------------------------------------------------------------------------------------------------

    def replica(self, name: str) -> tuple[Replica, int] | None:
        if name in self.replicas:
            replica = self.replicas[name]
            return None if replica is None else (replica, -1)
        row = self.books.replicas.get(name)
        if row is None:
            return None
        decoded = self._decoded_replicas.get(name)
        if decoded is None or decoded[1] != row[0]:
            decoded = self._decoded_replicas[name] = decode_replica(row[1]), row[0]
        return decoded

    def lookup(self, name: str) -> tuple[Any, int] | None:
        if name in self.objects:
            obj = self.objects[name]
            return None if obj is None else (obj, -1)
        return self.books.objects.get(name)

    def node(self, name: str) -> NodeLedger | None:
        return self.nodes[name] if name in self.nodes else self.books.nodes.get(name)

    def grant(self, name: str) -> GrantLedger | None:
        return self.grants[name] if name in self.grants else self.books.grants.get(name)

    def preemptor_of(self, victim: str) -> str | None:
        return self.preemptors[victim] if victim in self.preemptors else self.books.preemptors.get(victim)

    def phase_age_ms(self, name: str) -> int:
        """Return how long a replica has been in its phase."""
        row = None if name in self.replicas else self.books.replicas.get(name)
        return 0 if row is None else self.books.phase_age_ms(row[0], self.time)

    def replica_count(self, generation: GenerationKey) -> int:
        return self.books.population.get(generation, 0) + self.population.get(generation, 0)

    def active_count(self, tenant: str, workload: str) -> int:
        return self.books.active.get((tenant, workload), 0) + self.active.get((tenant, workload), 0)

    def bound_count(self, generation: GenerationKey) -> int:
        change = sum(self.node_counts.get(generation, {}).values()) - self.reserved.get(generation, 0)
        return self.books.bound_count(generation) + change

    def iter_node_counts(self) -> Iterator[tuple[GenerationKey, str, int]]:
        yield from self.books.iter_node_counts()
        for generation, spots in self.node_counts.items():
            for name, count in spots.items():
                yield generation, name, count

    def current_policy(self) -> PolicyRevision | None:
        return self.policy if self.policy is not None else self.books.policy

    def keys(self, prefix: str) -> list[str]:
        present = dict.fromkeys(self.books.keys(prefix), True)
        present.update({name: obj is not None for name, obj in self.objects.items() if name.startswith(prefix)})
        return sorted(name for name in present if present[name])

    def all_nodes(self) -> Mapping[str, NodeLedger | None]:
        return {**self.books.nodes, **self.nodes}

    def requirements_of(self, generation: GenerationKey) -> Requirements | None:
        if self.policy is None and (not self.changed_workloads or generation[:2] not in self.changed_workloads):
            return self.books.requirements_of(generation)
        if generation not in self._requirements:
            self._requirements[generation] = generation_requirements(self, generation, self.current_interner())
        return self._requirements[generation]

    def current_interner(self) -> RequirementsInterner:
        if self.policy is None:
            return self.books.interner
        if self._policy_interner is None or self._policy_interner[0] is not self.policy:
            self._policy_interner = self.policy, interner_for_policy(self.policy)
        return self._policy_interner[1]

    # -- fit.Peers -------------------------------------------------------------------------------------------------------

    def counts(self, index: PeerIndex) -> DomainCountsOverlay:
        if self.topology_changed:
            # The counts of the books use the node labels from before this draft.
            return DomainCountsOverlay(DomainCounts(), self._recount(index))
        return DomainCountsOverlay(self.books.counts(index), self._changes_of(index))

    def total(self, index: PeerIndex) -> int:
        return self.books.total(index) + sum(self._changes_of(index).values())

    def min_count(self, requirements: Requirements, index: PeerIndex) -> int:
        counts = self.counts(index)
        return min((counts[domain] for domain in self.eligible(requirements, index.topology_key)), default=0)

    def eligible(self, requirements: Requirements, topology_key: str) -> tuple[str, ...]:
        if self.topology_changed or self.policy is not None or self.changed_workloads:
            return eligible_domains(requirements, self.all_nodes().values(), topology_key)
        return self.books.eligible(requirements, topology_key)

    def anti_affinity_owners(self, requirements: Requirements) -> Sequence[PeerIndex]:
        if not self._anti_affinity_terms.values and not self.books.anti_affinity_terms.values:
            return ()
        committed = self.books.anti_affinity_terms.selecting(requirements)
        return (
            committed + [index for index in self._anti_affinity_terms.selecting(requirements) if index not in committed]
            if self._anti_affinity_terms
            else committed
        )

    def _recount(self, index: PeerIndex) -> dict[str, int]:
        counts: dict[str, int] = {}
        for generation, name, count in self.iter_node_counts():
            requirements = self.requirements_of(generation) if generation[0] == index.tenant else None
            if requirements is not None and counts_replica(index, requirements):
                self._add_change(counts, index, name, count)
        return counts

    def _changes_of(self, index: PeerIndex) -> dict[str, int]:
        """Return this draft's changes to the counts of a term. Computed on first use and maintained since."""
        changes = self._changes.get(index)
        if changes is None:
            changes = {}
            self._changes.put(index, changes)
            for generation, counts in self.node_counts.items():
                # A generation that is deleted in this batch was counted by the books with its old requirements.
                requirements = (
                    (self.requirements_of(generation) or self.books.requirements_of(generation))
                    if generation[0] == index.tenant
                    else None
                )
                if requirements is not None and counts_replica(index, requirements):
                    for name, count in counts.items():
                        self._add_change(changes, index, name, count)
        return changes

    def _add_change(self, changes: dict[str, int], index: PeerIndex, node: str, count: int) -> None:
        ledger = self.node(node)
        if ledger is not None:
            domain = domain_of(ledger.node, index.topology_key)
            changes[domain] = changes.get(domain, 0) + count

    # -- writing ---------------------------------------------------------------------------------------------------------

    def put(self, obj: AnyObject) -> None:
        """Write one object of any kind, and post what follows from it to the ledgers."""
        name = key(obj)
        if isinstance(obj, Replica):
            entry = self.replica(name)
            self.put_replica(name, None if entry is None else entry[0], obj)
            return
        before = (self.lookup(name) or (None,))[0]
        self.objects[name] = obj
        post_charge_difference(self.used, before, obj)
        self.fence_results.clear()
        match obj:
            case Node():
                self._put_node(obj)
            case Tenant():
                for ledger, amount, tenant in ledgers_of(obj):
                    self._put_ledger(ledger, dict(amount.pairs), None, tenant)
            case Grant():
                self._put_grant(obj, before)
            case Generation() | Workload():
                self._mark_changed(obj)
            case PolicyRevision():
                latest = self.current_policy()
                if latest is None or obj.spec.number >= latest.spec.number:
                    self.policy = obj
                    self._requirements.clear()

    def delete(self, name: str) -> None:
        """Delete one object. The caller has checked that nothing depends on it."""
        if name.startswith("replica/"):
            entry = self.replica(name)
            if entry is not None:
                self.put_replica(name, entry[0], None)
            return
        found = self.lookup(name)
        if found is None:
            return
        self.objects[name] = None
        post_charge_difference(self.used, found[0], None)
        match found[0]:
            case Node() as node:
                self.nodes[node.metadata.name] = None
                self.topology_changed = True
            case Tenant() | Grant() as holder:
                if isinstance(holder, Grant):
                    self._post_burdens(holder, -1)
                for ledger, _, _ in ledgers_of(holder):
                    self.grants[ledger] = None
            case Generation() | Workload() as changed:
                self._mark_changed(changed)

    def put_note(self, obj: AnyObject) -> None:
        """Write an event or a decision. No decision depends on these, and the oldest are deleted when there are too many."""
        self.notes[key(obj)] = obj

    def new_uid(self) -> str:
        """Return an identifier unique over the whole life of this scope: incarnation, batch sequence, and a count within the
        batch.

        The incarnation is needed because a backup does not know ids issued after it was made: they could be issued again.
        """
        self.uids_issued += 1
        return f"{self.time.incarnation}-{self.time.sequence:x}-{self.uids_issued:x}"

    def _mark_changed(self, obj: Generation | Workload) -> None:
        name = obj.spec.workload if isinstance(obj, Generation) else obj.metadata.name
        self.changed_workloads[obj.metadata.tenant, name] = None
        self._requirements.clear()

    def bind(self, name: str, new: Replica, requirements: Requirements) -> None:
        """Do what `put_replica` does, faster, for a pending replica that is bound: no postings to reverse, no preemptor to
        serve.
        """
        status = new.status
        ledger = self.nodes[status.node] if status.node in self._copied_nodes else self._writable_node(status.node)
        if ledger is None:
            raise LookupError(f"{name}: node {status.node} of its binding is not in the books")
        self.replicas[name] = new
        ledger.post(node_charge(requirements, status.devices), 1)
        for grant in status.grants:
            self._charged_ledger(name, grant).draw(requirements.charge.pairs, 1)
        self._count_on_node(requirements, status.node, 1)

    def put_replica(self, name: str, old: Replica | None, new: Replica | None) -> None:
        """Write or delete a replica. The only place where the postings of a replica change."""
        before = old if old is not None and old.status.phase in HOLDING_PHASES else None
        after = new if new is not None and new.status.phase in HOLDING_PHASES else None
        unchanged = before is not None and after is not None and same_charge(before, after)
        preemptor = self.preemptor_of(name) if before is not None and after is None else None
        freed = self._freed_for_preemptor(preemptor, name) if preemptor is not None else None
        if before is not None and not unchanged:
            self._post(name, before, -1)
        self.replicas[name] = new
        if after is not None and not unchanged:
            self._post(name, after, 1)
        if freed is not None:
            self._transfer_freed(*freed)
        self._count(name, old, new)

    def put_same_hold(self, name: str, old: Replica, new: Replica) -> None:
        """Do what `put_replica` does, faster, for a replica whose postings stay exactly the same."""
        self.replicas[name] = new
        self._count(name, old, new)

    def retract(self, name: str, now: Replica, before: Replica) -> None:
        """Undo the writes to a replica that this draft had not changed before."""
        self.put_replica(name, now, before)
        del self.replicas[name]

    def _freed_for_preemptor(self, preemptor: str, victim: str) -> tuple[str, Replica, Pairs, list[Pairs]] | None:
        """Return the preemptor that receives what this victim holds, and how much of it."""
        entry = self.replica(preemptor)
        requirements = self.requirements_of(generation_of(entry[0])) if entry is not None else None
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
        ledger = self._writable_node(preemptor.status.node)
        if ledger is None:
            raise LookupError(f"{name}: node {preemptor.status.node} of its reservation is not in the books")
        ledger.adjust(pairs)
        for grant, charge in zip(preemptor.status.grants, charges, strict=True):
            if charge:
                self._charged_ledger(name, grant).draw(charge, 1)

    def _count(self, name: str, old: Replica | None, new: Replica | None) -> None:
        """Update everything that is counted per replica rather than by amount."""
        replica = old if old is not None else new
        if replica is None:
            return
        phase_before, phase_after = None if old is None else old.status.phase, None if new is None else new.status.phase
        if phase_before is None or phase_after is None:
            add_counts(self.population, {generation_of(replica): (phase_after is not None) - (phase_before is not None)})
        if active := (phase_after in ACTIVE_PHASES) - (phase_before in ACTIVE_PHASES):
            add_counts(self.active, {(replica.metadata.tenant, replica.spec.workload): active})
        if unsettled := (phase_after in NOT_WORKING_PHASES) - (phase_before in NOT_WORKING_PHASES):
            add_counts(self.reserved, {generation_of(replica): unsettled})
        if phase_before is Phase.RESERVED and old is not None:
            self._link_victims(name, old, -1)
        if phase_after is Phase.RESERVED and new is not None:
            self._link_victims(name, new, 1)

    def _link_victims(self, name: str, replica: Replica, sign: int) -> None:
        for victim, attempt in replica.status.victims.items():
            entry = self.replica(victim)
            if sign < 0 and self.preemptor_of(victim) == name:
                self.preemptors[victim] = None
            elif sign > 0 and entry is not None and still_holds(entry[0], attempt):
                # Otherwise it is a later attempt, or another replica of that name, which may have another preemptor by now.
                self.preemptors[victim] = name

    def _post(self, name: str, replica: Replica, sign: int) -> None:
        requirements = self.requirements_of(generation_of(replica))
        ledger = self._writable_node(replica.status.node)
        if requirements is None or ledger is None:
            raise LookupError(
                f"{name}: it holds capacity, but its generation or node {replica.status.node} is not in the books"
            )
        victims = list(self._holding_victims(replica.status).values()) if replica.status.victims else ()
        pairs, charges = replica_postings(replica.status, requirements, victims)
        ledger.post(pairs, sign)
        for grant, charge in zip(replica.status.grants, charges, strict=True):
            self._charged_ledger(name, grant).draw(charge, sign)
        self._count_on_node(requirements, replica.status.node, sign)

    def _charged_ledger(self, name: str, grant: str) -> GrantLedger:
        ledger = self._writable_grant(grant)
        if ledger is None:
            raise LookupError(f"{name}: grant {grant}, to which it is charged, is not in the books")
        return ledger

    def _holding_victims(self, status: ReplicaStatus) -> dict[str, tuple[ReplicaStatus, Requirements]]:
        """Return the victims of a reservation that still hold capacity, with their requirements."""
        victims = {}
        for victim, attempt in status.victims.items():
            entry = self.replica(victim)
            requirements = (
                self.requirements_of(generation_of(entry[0])) if entry is not None and still_holds(entry[0], attempt) else None
            )
            if entry is not None and requirements is not None:
                victims[victim] = entry[0].status, requirements
        return victims

    def _count_on_node(self, requirements: Requirements, node: str, sign: int) -> None:
        counts = self.node_counts.get(requirements.generation)
        if counts is None:
            counts = self.node_counts[requirements.generation] = {}
        counts[node] = counts.get(node, 0) + sign
        for index in owned_anti_affinity(requirements) if requirements.anti_affinity else ():
            self._anti_affinity_terms.put(index, None)
        for index in self._changes.counting(requirements) if self._changes else ():
            self._add_change(self._changes.values[index], index, node, sign)

    def _put_node(self, node: Node) -> None:
        old = self.node(node.metadata.name)
        new = NodeLedger(node) if old is None else old.with_node(node)
        self.nodes[node.metadata.name] = new
        self._copied_nodes.add(node.metadata.name)
        if old is None or old.node_attributes != new.node_attributes:
            self.topology_changed = True

    def _put_ledger(
        self, name: str, amount: Mapping[str, int], grant: Grant | None, tenant: str, deadline: int | None = None
    ) -> None:
        ledger = self._writable_grant(name)
        if ledger is None:
            self.grants[name] = GrantLedger(name, amount, grant, tenant, deadline)
            self._copied_grants.add(name)
        else:
            ledger.resize(amount)
            ledger.grant, ledger.deadline_ms = grant, deadline

    def _put_grant(self, grant: Grant, before: Any) -> None:
        if isinstance(before, Grant):
            self._post_burdens(before, -1)
        deadline = deadline_ms(grant, self.time.boot, self.time.now_ms, new_term=self.takeover)
        for ledger, amount, tenant in ledgers_of(grant):
            self._put_ledger(ledger, dict(amount.pairs), grant, tenant, deadline)
        self._post_burdens(grant, 1)

    def _post_burdens(self, grant: Grant, sign: int) -> None:
        for name, pairs in parent_charges(grant):
            ledger = self._writable_grant(name)
            if ledger is not None:
                ledger.grant_on(pairs, sign)

    def _writable_node(self, name: str) -> NodeLedger | None:
        """Return a ledger of this draft that may be posted to: a copy of the current one."""
        if name in self._copied_nodes:
            return self.nodes[name]
        ledger = self.nodes[name] if name in self.nodes else self.books.nodes.get(name)
        if ledger is not None:
            ledger = self.nodes[name] = ledger.copy()
            self._copied_nodes.add(name)
        return ledger

    def _writable_grant(self, name: str) -> GrantLedger | None:
        if name in self._copied_grants:
            return self.grants[name]
        ledger = self.grants[name] if name in self.grants else self.books.grants.get(name)
        if ledger is not None:
            ledger = self.grants[name] = ledger.copy()
            self._copied_grants.add(name)
        return ledger


_ROW_FIELDS, _COUNT_FIELDS = (
    ("replicas", "objects", "notes", "nodes", "grants", "preemptors", "renewed_ms"),
    ("population", "reserved", "active", "used"),
)
