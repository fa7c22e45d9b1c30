"""Compares what an authority's books have derived with the same derived anew from their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remit.commitment.books import Books
from remit.commitment.changes import GenerationKey
from remit.commitment.generations import parse_generation_key
from remit.commitment.peer_counts import counts_replica
from remit.law.fit import PeerIndex, Requirements, cached_static_misfit, owned_anti_affinity, static_misfit
from remit.law.requirements import compile_requirements
from remit.law.selectors import domain_of

LOOKED_UP = ("regions", "zones", "pools", "allowed_regions", "allowed_zones", "allowed_pools", "tolerates", "untolerated_soft")
NOT_COMPARED = (*LOOKED_UP, "static_results", "static_key")
TOPOLOGY_KEYS = ("node", "zone", "region", "pool", "disk")


def compared(ask: Requirements) -> dict[str, Any]:
    """All fields of the requirements except lookup tables, which are compared by their answers."""
    return {name: value for name, value in ask._asdict().items() if name not in NOT_COMPARED}


def recompiled(books: Books) -> dict[GenerationKey, Requirements]:
    policy = books.current_policy()
    policies = () if policy is None else tuple(policy.spec.policies.values())
    in_force = (0, None) if policy is None else (policy.spec.number, policy.spec.deadline)
    found = {}
    for name in books.keys("generation/"):
        tenant, workload, number = parse_generation_key(name)
        row = books.objects[name][0].spec
        owner = books.objects.get(f"workload/{tenant}/{workload}")
        is_open = owner is not None and not owner[0].metadata.deleting
        found[tenant, workload, number] = compile_requirements(
            tenant, workload, row.labels, row.spec, policies, number, in_force, is_open
        )
    return found


def stale(books: Books) -> Iterator[str]:
    """Every cached answer of the books that differs from their rows. The books are made to cache some for the next call."""
    fresh = recompiled(books)
    for tenant, workload, _ in fresh:
        prefix = f"generation/{tenant}/{workload}/"
        if books.keys(prefix) != sorted(name for name in books.objects if name.startswith(prefix)):
            yield f"{prefix}: {books.keys(prefix)}"
    if sum(map(len, books.by_workload.values())) != len(fresh):
        yield f"{books.by_workload} has not {len(fresh)} generations"
    for generation, ask in fresh.items():
        kept = books.requirements.of(generation)
        if kept is None or compared(kept) != compared(ask):
            yield f"{generation} requires {kept}, not {ask}"
            continue
        for name, ledger in books.nodes.items():
            if cached_static_misfit(kept, ledger) != static_misfit(ask, ledger):
                yield f"{generation} on {name}: {cached_static_misfit(kept, ledger)}, not {static_misfit(ask, ledger)}"
        for key in TOPOLOGY_KEYS:
            nodes = [one.node for one in books.nodes.values() if static_misfit(ask, one) is None]
            domains = tuple(sorted({domain_of(node, key) for node in nodes} - {""}))
            if books.peers.eligible(kept, key) != domains:
                yield f"{generation} by {key}: {books.peers.eligible(kept, key)}, not {domains}"
    yield from _stale_counts(books, fresh)


def _stale_counts(books: Books, fresh: dict[GenerationKey, Requirements]) -> Iterator[str]:
    carriers: dict[PeerIndex, int] = {}
    for generation in books.peers.node_counts:
        for index in dict.fromkeys(owned_anti_affinity(fresh[generation])):
            carriers[index] = carriers.get(index, 0) + 1
    if books.peers.anti_affinity_terms.values != carriers:
        yield f"anti-affinity terms are {books.peers.anti_affinity_terms.values}, not {carriers}"
    for generation, ask in fresh.items():
        excluders = {
            index for index in carriers if index.tenant == ask.tenant and counts_replica(index._replace(owners=False), ask)
        }
        if set(books.peers.anti_affinity_terms.selecting(ask)) != excluders:
            yield f"{generation} is excluded by {books.peers.anti_affinity_terms.selecting(ask)}, not by {excluders}"
        for term in (*ask.spread, *ask.affinity, *ask.anti_affinity):
            books.peers.counts(term.peers)
    for index, tally in books.peers.domain_counts.values.items():
        counted: dict[str, int] = {}
        for generation, spots in books.peers.node_counts.items():
            if generation[0] == index.tenant and counts_replica(index, fresh[generation]):
                for name, count in spots.items():
                    domain = domain_of(books.nodes[name].node, index.topology_key)
                    counted[domain] = counted.get(domain, 0) + count
        if {domain: count for domain, count in tally.items() if count} != counted:
            yield f"{index} counts {dict(tally)}, not {counted}"
