"""Counts of replicas by topology domain, for spread and (anti-)affinity: committed, and as changed by a draft. Pure.

Counts are computed when a term is first needed and maintained from then on. The rules that read them are in law/fit.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

from remit.commitment.changes import Changes, GenerationKey, add_counts
from remit.commitment.draft_ledgers import DraftLedgers
from remit.commitment.generations import GENERATION_PREFIX, CommittedRequirements, DraftRequirements, parse_generation_key
from remit.law.fit import PeerIndex, Requirements, cached_static_misfit, owned_anti_affinity
from remit.law.ledgers import NodeLedger
from remit.law.selectors import domain_of, selects

ELIGIBLE_CACHE_MAX: Final = 1_024
"""Maximum size of the cache of eligible domains. When it is full it is cleared and filled again on demand."""


V = TypeVar("V")


class SelectorIndex(Generic[V]):
    """Maps (anti-)affinity and spread terms to values, and finds those that select a replica.

    A tenant may have as many terms as workloads. Each is indexed by the first label pair of its selector, which is never empty,
    so that a replica is compared only with terms that name one of its labels.
    """

    __slots__ = ("_by_pair", "values")

    def __init__(self) -> None:
        self.values: dict[PeerIndex, V] = {}
        self._by_pair: dict[tuple[str, tuple[str, str]], dict[PeerIndex, None]] = {}

    def __bool__(self) -> bool:
        return bool(self.values)

    def get(self, index: PeerIndex) -> V | None:
        return self.values.get(index)

    def put(self, index: PeerIndex, value: V) -> None:
        if index not in self.values:
            self._by_pair.setdefault((index.tenant, index.selector[0]), {})[index] = None
        self.values[index] = value

    def drop(self, index: PeerIndex) -> None:
        del self.values[index]
        pair = index.tenant, index.selector[0]
        del self._by_pair[pair][index]
        if not self._by_pair[pair]:
            del self._by_pair[pair]

    def clear(self) -> None:
        self.values.clear()
        self._by_pair.clear()

    def copy(self) -> SelectorIndex[V]:
        other = SelectorIndex[V]()
        other.values = self.values.copy()
        other._by_pair = {pair: indexes.copy() for pair, indexes in self._by_pair.items()}
        return other

    def selecting(self, requirements: Requirements) -> list[PeerIndex]:
        """Return the terms whose selector matches the labels of these requirements."""
        if not self.values:
            return []
        tenant, labels, by_pair = requirements.tenant, requirements.labels, self._by_pair
        return [
            index
            for pair in labels.items()
            for index in by_pair.get((tenant, pair), ())
            if len(index.selector) == 1 or selects(index.selector, labels)
        ]

    def counting(self, requirements: Requirements) -> list[PeerIndex]:
        """Return the terms that count a replica with these requirements (see `counts_replica`)."""
        if not self.values:
            return []
        counted = [index for index in self.selecting(requirements) if not index.owners]
        if requirements.anti_affinity:
            counted += [index for index in dict.fromkeys(owned_anti_affinity(requirements)) if index in self.values]
        return counted


def counts_replica(index: PeerIndex, requirements: Requirements) -> bool:
    """Return whether the term counts a replica with these requirements. The replica must be of the term's tenant."""
    return index in owned_anti_affinity(requirements) if index.owners else selects(index.selector, requirements.labels)


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


class CommittedPeerCounts:
    """Counts over the committed replicas. `nodes` are the node ledgers of the books."""

    def __init__(self, nodes: Mapping[str, NodeLedger], requirements: CommittedRequirements) -> None:
        self._nodes, self._requirements = nodes, requirements
        self.node_counts: dict[GenerationKey, dict[str, int]] = {}
        """Replicas that hold capacity, by generation and node."""
        self.anti_affinity_terms: SelectorIndex[int] = SelectorIndex()
        """Anti-affinity terms of placed replicas, which new replicas must respect, with the number of generations that have
        each.
        """
        self.domain_counts: SelectorIndex[DomainCounts] = SelectorIndex()
        self._eligible: dict[tuple[Hashable, str], tuple[str, ...]] = {}
        self._generation_terms: dict[GenerationKey, tuple[PeerIndex, ...]] = {}
        """Anti-affinity terms of each generation that has placed replicas."""

    def iter_node_counts(self) -> Iterator[tuple[GenerationKey, str, int]]:
        """Yield how many replicas of each generation hold capacity on each node."""
        for generation, counts in self.node_counts.items():
            for name, count in counts.items():
                yield generation, name, count

    def counts(self, index: PeerIndex) -> DomainCounts:
        counts = self.domain_counts.get(index)
        if counts is None:
            counts = DomainCounts()
            for generation, by_node in self.node_counts.items():
                if self._is_counted(generation, index):
                    for name, count in by_node.items():
                        counts[domain_of(self._nodes[name].node, index.topology_key)] += count
            self.domain_counts.put(index, counts)
        return counts

    def total(self, index: PeerIndex) -> int:
        return sum(self.counts(index).values())

    def eligible(self, requirements: Requirements, topology_key: str) -> tuple[str, ...]:
        """Return the domains with at least one node on which the replica is allowed, regardless of free capacity."""
        domains = self._eligible.get((requirements.static_key, topology_key))
        if domains is None:
            if len(self._eligible) >= ELIGIBLE_CACHE_MAX:
                self._eligible.clear()
            domains = self._eligible[requirements.static_key, topology_key] = eligible_domains(
                requirements, self._nodes.values(), topology_key
            )
        return domains

    def clear_domain_counts(self) -> None:
        """Discard all counts by domain, after nodes changed their attributes."""
        self.domain_counts.clear()

    def clear_eligible(self) -> None:
        """Discard the eligible domains, after nodes changed their attributes or the policy changed."""
        self._eligible.clear()

    def absorb(self, changes: Mapping[GenerationKey, Mapping[str, int]]) -> None:
        for generation, changed in changes.items():
            counts = self.node_counts.get(generation)
            if counts is None:
                counts = self.node_counts[generation] = {}
                self._add_terms(generation)
            add_counts(counts, changed)
            requirements = self._requirements.of(generation) if self.domain_counts else None
            if requirements is None:
                self.domain_counts.clear()  # the generation was deleted with its last replica, so its terms are unknown
            for index in self.domain_counts.counting(requirements) if requirements is not None else ():
                domain_counts = self.domain_counts.values[index]
                for name, count in changed.items():
                    domain_counts[domain_of(self._nodes[name].node, index.topology_key)] += count
            if not counts:
                del self.node_counts[generation]
                self._remove_terms(generation)

    def refresh_terms(self, keys: Iterable[str]) -> None:
        """Refresh the anti-affinity terms of the generations among these keys: the new row may have other terms."""
        for name in keys:
            if name.startswith(GENERATION_PREFIX):
                generation = parse_generation_key(name)
                if generation in self.node_counts:
                    self._remove_terms(generation)
                    self._add_terms(generation)

    def _is_counted(self, generation: GenerationKey, index: PeerIndex) -> bool:
        requirements = self._requirements.of(generation) if generation[0] == index.tenant else None
        return requirements is not None and counts_replica(index, requirements)

    def _add_terms(self, generation: GenerationKey) -> None:
        requirements = self._requirements.of(generation)
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


class DraftPeerCounts:
    """Counts of the books with the changes of a draft. Implements `fit.PeerCounts`."""

    __slots__ = ("_anti_affinity_terms", "_by_domain", "_changes", "_committed", "_committed_requirements", "_ledgers",
                 "_requirements")  # fmt: skip

    def __init__(
        self,
        committed: CommittedPeerCounts,
        committed_requirements: CommittedRequirements,
        changes: Changes,
        ledgers: DraftLedgers,
        requirements: DraftRequirements,
    ) -> None:
        self._committed, self._committed_requirements = committed, committed_requirements
        self._changes, self._ledgers, self._requirements = changes, ledgers, requirements
        self._by_domain: SelectorIndex[dict[str, int]] = SelectorIndex()
        """Changes of the draft by term and domain, computed on first use and maintained since."""
        self._anti_affinity_terms: SelectorIndex[None] = SelectorIndex()
        """Anti-affinity terms of the replicas that the draft placed."""

    def counts(self, index: PeerIndex) -> DomainCountsOverlay:
        if self._changes.topology_changed:
            # The counts of the books use the node labels from before this draft.
            return DomainCountsOverlay(DomainCounts(), self._recount(index))
        return DomainCountsOverlay(self._committed.counts(index), self._changes_of(index))

    def total(self, index: PeerIndex) -> int:
        return self._committed.total(index) + sum(self._changes_of(index).values())

    def min_count(self, requirements: Requirements, index: PeerIndex) -> int:
        counts = self.counts(index)
        return min((counts[domain] for domain in self.eligible(requirements, index.topology_key)), default=0)

    def eligible(self, requirements: Requirements, topology_key: str) -> tuple[str, ...]:
        changes = self._changes
        if changes.topology_changed or changes.policy is not None or changes.changed_workloads:
            return eligible_domains(requirements, self._ledgers.all_nodes().values(), topology_key)
        return self._committed.eligible(requirements, topology_key)

    def anti_affinity_owners(self, requirements: Requirements) -> Sequence[PeerIndex]:
        own, committed = self._anti_affinity_terms, self._committed.anti_affinity_terms
        if not own.values and not committed.values:
            return ()
        owners = committed.selecting(requirements)
        return owners + [index for index in own.selecting(requirements) if index not in owners] if own else owners

    def add(self, requirements: Requirements, node: str, sign: int) -> None:
        """Count one more replica on a node, or one less."""
        node_counts = self._changes.node_counts
        counts = node_counts.get(requirements.generation)
        if counts is None:
            counts = node_counts[requirements.generation] = {}
        counts[node] = counts.get(node, 0) + sign
        for index in owned_anti_affinity(requirements) if requirements.anti_affinity else ():
            self._anti_affinity_terms.put(index, None)
        for index in self._by_domain.counting(requirements) if self._by_domain else ():
            self._add_change(self._by_domain.values[index], index, node, sign)

    def copy_terms(self, other: DraftPeerCounts) -> None:
        self._anti_affinity_terms = other._anti_affinity_terms.copy()

    def replace_with(self, fork: DraftPeerCounts) -> None:
        self._by_domain, self._anti_affinity_terms = fork._by_domain, fork._anti_affinity_terms

    def _recount(self, index: PeerIndex) -> dict[str, int]:
        counts: dict[str, int] = {}
        for generation, name, count in self._iter_node_counts():
            requirements = self._requirements.of(generation) if generation[0] == index.tenant else None
            if requirements is not None and counts_replica(index, requirements):
                self._add_change(counts, index, name, count)
        return counts

    def _iter_node_counts(self) -> Iterator[tuple[GenerationKey, str, int]]:
        yield from self._committed.iter_node_counts()
        for generation, counts in self._changes.node_counts.items():
            for name, count in counts.items():
                yield generation, name, count

    def _changes_of(self, index: PeerIndex) -> dict[str, int]:
        changes = self._by_domain.get(index)
        if changes is None:
            changes = {}
            self._by_domain.put(index, changes)
            for generation, counts in self._changes.node_counts.items():
                # A generation that is deleted in this batch was counted by the books with its old requirements.
                requirements = (
                    (self._requirements.of(generation) or self._committed_requirements.of(generation))
                    if generation[0] == index.tenant
                    else None
                )
                if requirements is not None and counts_replica(index, requirements):
                    for name, count in counts.items():
                        self._add_change(changes, index, name, count)
        return changes

    def _add_change(self, changes: dict[str, int], index: PeerIndex, node: str, count: int) -> None:
        ledger = self._ledgers.node(node)
        if ledger is not None:
            domain = domain_of(ledger.node, index.topology_key)
            changes[domain] = changes.get(domain, 0) + count


def eligible_domains(requirements: Requirements, nodes: Iterable[NodeLedger | None], topology_key: str) -> tuple[str, ...]:
    names = {}
    for ledger in nodes:
        if ledger is not None and cached_static_misfit(requirements, ledger) is None:
            has_domain, domain = ledger.domain(topology_key)
            if has_domain:
                names[domain] = True
    return tuple(sorted(names))
