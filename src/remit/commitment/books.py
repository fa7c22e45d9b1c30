"""Committed in-memory state of a scope: rows, ledgers and topology counts. Decides nothing, no I/O.

`Books` hold what is committed. A `Draft` lies over them (or over another draft) while a batch is decided: it reads through
to the layer below, keeps copies of what it changes, and is either absorbed as a whole or discarded. Uncommitted changes are
therefore never visible, and loading at takeover uses the same code as normal operation: every stored row is put into a draft
over empty books.

Ledgers are sums of postings, and the rows define the postings, so no ledger is stored. draft.py defines what each row posts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from remit.commitment.selector_index import SelectorIndex, counts_replica
from remit.law.admission import Admission
from remit.law.charges import LimitUsage
from remit.law.fit import PeerIndex, Requirements, cached_static_misfit, owned_anti_affinity
from remit.law.ledgers import GrantLedger, NodeLedger
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.law.selectors import domain_of
from remit.law.shared_requirements import RequirementsInterner
from remit.law.timing import Timing
from remit.model.objects import dec_hook, key_of
from remit.model.records import Peer, PeerConfirmation, PolicyRevision, Replica

if TYPE_CHECKING:
    from remit.commitment.draft import Draft

GenerationKey = tuple[str, str, int]
"""Tenant, workload, generation number. All replicas of one generation have the same requirements."""

decode_replica = msgspec.json.Decoder(Replica, dec_hook=dec_hook).decode

AWAITED_NODE = "awaited/node/"
"""Key prefix of records that exist, after a restore, for each node that has not reported yet."""

_AWAITED_NODE_PREFIX = key_of("Summary", AWAITED_NODE)
_PEER_PREFIX = key_of("Peer", "")
_WORKLOAD_PREFIX = "workload/"
_GENERATION_PREFIX = "generation/"
_GENERATION_DEPTH = 3
"""Number of slashes in a generation key before its number."""

ELIGIBLE_CACHE_MAX = 1_024
"""Maximum size of the cache of eligible domains. When it is full it is cleared and filled again on demand."""

TIME_SAMPLE_MS = 250
PHASE_LIMIT_MS_MAX = max(wait.limit_ms for wait in PHASE_TIMEOUTS.values())

NOTES_MAX = 20_000
"""Maximum number of stored events and decisions. The oldest are deleted when new ones arrive."""


class DecisionTime(NamedTuple):
    """When a decision is made, on the authority's own clock, and when each lease was last renewed."""

    now_ms: int
    boot: str
    renewed_ms: Mapping[str, int]
    since_ms: int
    sequence: int
    incarnation: str
    timing: Timing = Timing()
    wall: str = ""
    """Wall clock, recorded for display. No decision depends on it."""

    def silent_ms(self, lease: str) -> int:
        """Return the time since the lease was last renewed. A new authority counts from its takeover."""
        return self.now_ms - self.renewed_ms.get(lease, self.since_ms)


class DomainCounts(dict[str, int]):
    """Counts by topology domain. A missing domain counts zero."""

    def __missing__(self, domain: str) -> int:
        return 0


class DomainCountsOverlay:
    """Counts by domain as seen by a draft: the committed counts plus the draft's changes."""

    __slots__ = ("base", "changes")

    def __init__(self, base: Mapping[str, int], changes: Mapping[str, int]) -> None:
        self.base, self.changes = base, changes

    def __getitem__(self, domain: str) -> int:
        return self.base.get(domain, 0) + self.changes.get(domain, 0)


class Books:
    """Committed state. Replicas are kept as encoded bytes to save memory; the other objects, far fewer, are kept decoded."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[int, bytes]] = {}
        self.objects: dict[str, tuple[Any, int]] = {}
        self.by_kind: dict[str, dict[str, None]] = {}
        self.by_workload: dict[str, dict[str, None]] = {}
        """Generation keys by their prefix before the number. Every declaration looks up the generations of its workload."""
        self.awaited_nodes: set[str] = set()
        """Keys of the records of nodes that have not reported since a restore."""
        self.awaited_peers: set[str] = set()
        """Keys of the records of scopes that have not confirmed their holdings since a restore."""
        self.nodes: dict[str, NodeLedger] = {}
        self.grants: dict[str, GrantLedger] = {}
        self.node_counts: dict[GenerationKey, dict[str, int]] = {}
        """Replicas that hold capacity, by generation and node."""
        self.population: dict[GenerationKey, int] = {}
        """All replicas by generation, in whatever phase."""
        self.reserved: dict[GenerationKey, int] = {}
        """Replicas that hold capacity but do not work yet, by generation; a gang's minimum does not count them."""
        self.active: dict[tuple[str, str], int] = {}
        """Replicas that count towards the limit of their workload, by tenant and workload."""
        self.used: LimitUsage = {}
        """Declared amounts by tenant and limit."""
        self.preemptors: dict[str, str] = {}
        """By victim: the replica whose reservation receives what the victim frees."""
        self.commit_times: list[tuple[int, int]] = []
        """Samples of (revision, commit time on the authority's clock). A replica's row changes only with its phase, so they
        tell how long a phase has lasted.
        """
        self.notes: dict[str, None] = {}
        """Keys of stored events and decisions, oldest first."""
        self.loaded_revision = 0
        """Revision of the takeover load. When rows at or before it were written is not known."""
        self.policy: PolicyRevision | None = None
        self.requirements: dict[GenerationKey, Requirements] = {}
        self.interner = RequirementsInterner()
        self._domain_counts: SelectorIndex[DomainCounts] = SelectorIndex()
        self._eligible_domains: dict[tuple[Hashable, str], tuple[str, ...]] = {}
        self.anti_affinity_terms: SelectorIndex[int] = SelectorIndex()
        """Anti-affinity terms of placed replicas, which new replicas must respect, with the number of generations that have
        each.
        """
        self._generation_terms: dict[GenerationKey, tuple[PeerIndex, ...]] = {}
        """Anti-affinity terms of each generation that has placed replicas."""

    # -- reading ---------------------------------------------------------------------------------------------------------

    def replica(self, name: str) -> tuple[Replica, int] | None:
        row = self.replicas.get(name)
        return None if row is None else (decode_replica(row[1]), row[0])

    def lookup(self, name: str) -> tuple[Any, int] | None:
        return self.objects.get(name)

    def bound_count(self, generation: GenerationKey) -> int:
        """Return how many replicas of a generation are bound. Reservations hold capacity but are not bound yet."""
        return sum(self.node_counts.get(generation, {}).values()) - self.reserved.get(generation, 0)

    def iter_node_counts(self) -> Iterator[tuple[GenerationKey, str, int]]:
        """Yield how many replicas of each generation hold capacity on each node."""
        for generation, counts in self.node_counts.items():
            for name, count in counts.items():
                yield generation, name, count

    def current_policy(self) -> PolicyRevision | None:
        return self.policy

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys of objects with this prefix. Replicas are not included."""
        if prefix.startswith(_GENERATION_PREFIX) and prefix.endswith("/") and prefix.count("/") == _GENERATION_DEPTH:
            return sorted(self.by_workload.get(prefix, ()))
        return sorted(name for name in self.by_kind.get(prefix.split("/", 1)[0], ()) if name.startswith(prefix))

    def requirements_of(self, generation: GenerationKey) -> Requirements | None:
        requirements = self.requirements.get(generation)
        if requirements is None:
            requirements = generation_requirements(self, generation, self.interner)
            if requirements is not None:
                self.requirements[generation] = requirements
        return requirements

    def counts(self, index: PeerIndex) -> DomainCounts:
        """Return committed counts by domain. They are computed on first use and maintained since."""
        counts = self._domain_counts.get(index)
        if counts is None:
            counts = DomainCounts()
            for generation, by_node in self.node_counts.items():
                if self.is_counted(generation, index):
                    for name, count in by_node.items():
                        counts[domain_of(self.nodes[name].node, index.topology_key)] += count
            self._domain_counts.put(index, counts)
        return counts

    def total(self, index: PeerIndex) -> int:
        return sum(self.counts(index).values())

    def is_counted(self, generation: GenerationKey, index: PeerIndex) -> bool:
        requirements = self.requirements_of(generation) if generation[0] == index.tenant else None
        return requirements is not None and counts_replica(index, requirements)

    def eligible(self, requirements: Requirements, topology_key: str) -> tuple[str, ...]:
        """Return the domains with at least one node on which the replica is allowed, regardless of free capacity."""
        domains = self._eligible_domains.get((requirements.static_key, topology_key))
        if domains is None:
            if len(self._eligible_domains) >= ELIGIBLE_CACHE_MAX:
                self._eligible_domains.clear()
            domains = self._eligible_domains[requirements.static_key, topology_key] = eligible_domains(
                requirements, self.nodes.values(), topology_key
            )
        return domains

    def excess(self) -> Iterator[tuple[str, str]]:
        """Yield ledgers that exceed their amount after a legal reduction, with the excess. They must be drained."""
        for name, node in sorted(self.nodes.items()):
            if over := node.over():
                yield f"node/{name}", str(over)
        for name, grant in sorted(self.grants.items()):
            if over := grant.over():
                yield name, str(over)

    # -- absorbing -------------------------------------------------------------------------------------------------------

    def absorb(self, draft: Draft, revision: int, encoded: Mapping[str, bytes]) -> None:
        """Apply the changes of a draft, which were committed at `revision` as the given bytes."""
        self._sample_time(revision, draft.time.now_ms)
        replicas = self.replicas
        for name, replica in draft.replicas.items():
            if replica is None:
                replicas.pop(name, None)
            else:
                replicas[name] = (revision, encoded[name])
        for name, obj in draft.objects.items():
            kind = self.by_kind.setdefault(name.split("/", 1)[0], {})
            if obj is None:
                self.objects.pop(name, None)
                kind.pop(name, None)
            else:
                self.objects[name] = (obj, revision)
                kind[name] = None
            if name.startswith(_GENERATION_PREFIX):
                self._index_generation(name, present=obj is not None)
            elif name.startswith(_AWAITED_NODE_PREFIX):
                (self.awaited_nodes.discard if obj is None else self.awaited_nodes.add)(name)
            elif name.startswith(_PEER_PREFIX):
                awaited = isinstance(obj, Peer) and obj.spec.standing is PeerConfirmation.AWAITED
                (self.awaited_peers.add if awaited else self.awaited_peers.discard)(name)
        for name, note in draft.notes.items():
            self.notes.pop(name, None)
            if note is not None:
                self.notes[name] = None
        apply_changes(self.grants, draft.grants)
        apply_changes(self.preemptors, draft.preemptors)
        add_counts(self.population, draft.population)
        add_counts(self.reserved, draft.reserved)
        add_counts(self.active, draft.active)
        add_counts(self.used, draft.used)
        if draft.policy is not None:
            self.policy = draft.policy
            self.interner = interner_for_policy(draft.policy)
        if draft.policy is not None:
            self.requirements.clear()
        elif draft.changed_workloads:
            self._recompile_requirements(draft.objects)
        if draft.topology_changed:
            # Before the node counts are absorbed: those may lie on nodes that were just deleted. Domain counts are recomputed
            # on demand.
            self._domain_counts.clear()
        apply_changes(self.nodes, draft.nodes)
        self._absorb_node_counts(draft.node_counts)
        if draft.changed_workloads:
            self._refresh_terms(draft.objects)
        if draft.topology_changed or draft.policy is not None:
            self._eligible_domains.clear()

    def _index_generation(self, name: str, *, present: bool) -> None:
        prefix = name[: name.rindex("/") + 1]
        names = self.by_workload.setdefault(prefix, {})
        if present:
            names[name] = None
        else:
            names.pop(name, None)
            if not names:
                del self.by_workload[prefix]

    def _sample_time(self, revision: int, now_ms: int) -> None:
        """Record a sample now and then. Between samples a phase is reported slightly younger than it is, never older."""
        if not self.commit_times or now_ms - self.commit_times[-1][1] >= TIME_SAMPLE_MS:
            self.commit_times.append((revision, now_ms))
            while len(self.commit_times) > 1 and now_ms - self.commit_times[0][1] > 2 * PHASE_LIMIT_MS_MAX:
                del self.commit_times[0]

    def phase_age_ms(self, revision: int, time: DecisionTime) -> int:
        """Return how long a replica whose row is at `revision` has been in its phase, as far as this authority knows."""
        if revision <= self.loaded_revision:
            return time.now_ms - time.since_ms
        at = bisect_left(self.commit_times, (revision, 0))
        if at < len(self.commit_times) and (at == 0 or self.commit_times[at][0] == revision):
            return time.now_ms - self.commit_times[at][1]
        # The commit lies within one interval of the previous sample, otherwise it would have recorded one.
        return max(0, time.now_ms - self.commit_times[at - 1][1] - TIME_SAMPLE_MS)

    def _absorb_node_counts(self, changes: Mapping[GenerationKey, Mapping[str, int]]) -> None:
        for generation, changed in changes.items():
            counts = self.node_counts.get(generation)
            if counts is None:
                counts = self.node_counts[generation] = {}
                self._add_terms(generation)
            add_counts(counts, changed)
            requirements = self.requirements_of(generation) if self._domain_counts else None
            if requirements is None:
                self._domain_counts.clear()  # the generation was deleted with its last replica, so its terms are unknown
            for index in self._domain_counts.counting(requirements) if requirements is not None else ():
                domain_counts = self._domain_counts.values[index]
                for name, count in changed.items():
                    domain_counts[domain_of(self.nodes[name].node, index.topology_key)] += count
            if not counts:
                del self.node_counts[generation]
                self._remove_terms(generation)

    def _add_terms(self, generation: GenerationKey) -> None:
        requirements = self.requirements_of(generation)
        if requirements is not None and requirements.anti_affinity:
            terms = self._generation_terms[generation] = tuple(dict.fromkeys(owned_anti_affinity(requirements)))
            for index in terms:
                self.anti_affinity_terms.put(index, (self.anti_affinity_terms.get(index) or 0) + 1)

    def _remove_terms(self, generation: GenerationKey) -> None:
        for index in self._generation_terms.pop(generation, ()):
            count = self.anti_affinity_terms.values[index] - 1
            if count:
                self.anti_affinity_terms.put(index, count)
            else:
                self.anti_affinity_terms.drop(index)

    def _recompile_requirements(self, keys: Iterable[str]) -> None:
        """Discard compiled requirements of the workloads and generations among these keys.

        A generation that was written is compiled again at once while its row is at hand, because most are scheduled soon.
        """
        for name in keys:
            if name.startswith(_WORKLOAD_PREFIX):
                for row_key in self.by_workload.get(_GENERATION_PREFIX + name.removeprefix(_WORKLOAD_PREFIX) + "/", ()):
                    self.requirements.pop(parse_generation_key(row_key), None)
        for name in keys:
            if name.startswith(_GENERATION_PREFIX):
                generation = parse_generation_key(name)
                self.requirements.pop(generation, None)
                with suppress(ValueError):  # unsatisfiable requirements are reported when the replica is placed
                    self.requirements_of(generation)

    def _refresh_terms(self, keys: Iterable[str]) -> None:
        """Refresh the anti-affinity terms of the written generations that have placed replicas: the new row may have other
        terms.
        """
        for name in keys:
            if name.startswith(_GENERATION_PREFIX):
                generation = parse_generation_key(name)
                if generation in self.node_counts:
                    self._remove_terms(generation)
                    self._add_terms(generation)


def generation_of(replica: Replica) -> GenerationKey:
    return replica.metadata.tenant, replica.spec.workload, replica.spec.generation


def generation_key(generation: GenerationKey) -> str:
    return key_of("Generation", f"{generation[1]}/{generation[2]:08d}", generation[0])


def parse_generation_key(name: str) -> GenerationKey:
    """Parse a generation's key (the inverse of `generation_key`)."""
    _, tenant, rest = name.split("/", 2)
    workload, _, number = rest.rpartition("/")
    return tenant, workload, int(number)


def interner_for_policy(policy: PolicyRevision | None) -> RequirementsInterner:
    if policy is None:
        return RequirementsInterner()
    spec = policy.spec
    return RequirementsInterner(
        tuple(spec.policies.values()), (spec.number, spec.deadline), Admission(spec.policies, spec.number)
    )


def generation_requirements(
    books: Books | Draft, generation: GenerationKey, interner: RequirementsInterner
) -> Requirements | None:
    """Compile the requirements of a generation's replicas from the objects in these books."""
    row = books.lookup(generation_key(generation))
    if row is None:
        return None
    spec = row[0].spec
    owner = books.lookup(key_of("Workload", generation[1], generation[0]))
    is_deleting = owner is None or owner[0].metadata.deleting
    return interner.compile(generation[0], generation[1], spec.labels, spec.spec, generation[2], not is_deleting)


def eligible_domains(requirements: Requirements, nodes: Iterable[NodeLedger | None], topology_key: str) -> tuple[str, ...]:
    names = {}
    for ledger in nodes:
        if ledger is not None and cached_static_misfit(requirements, ledger) is None:
            has_domain, domain = ledger.domain(topology_key)
            if has_domain:
                names[domain] = True
    return tuple(sorted(names))


def apply_changes(into: dict[Any, Any], changes: Mapping[Any, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            into.pop(name, None)
        else:
            into[name] = value


def add_counts(into: dict[Any, int], changes: Mapping[Any, int]) -> None:
    for name, count in changes.items():
        total = into.get(name, 0) + count
        if total:
            into[name] = total
        else:
            into.pop(name, None)
