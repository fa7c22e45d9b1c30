"""Recomputes all ledgers from the rows and reports differences. Corrects nothing.

Operators run this check, and the demo prints its result. It shares no arithmetic with draft_replicas.py: the sums are computed
again from the rows of replicas and grants, so a posting that was forgotten or made twice shows as a difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from remit.commitment.books import Books
from remit.commitment.generations import generation_of
from remit.law.charges import attempt_key
from remit.law.ledgers import DEVICE_PREFIX
from remit.law.lifecycle import HOLDING_PHASES
from remit.model.kinds import Tenant
from remit.model.objects import key_of
from remit.model.records import Grant, GrantPhase, Phase, Replica
from remit.model.resources import WHOLE_DEVICE, Amount

Sums = dict[str, dict[str, int]]


def replicas(books: Books) -> Iterator[tuple[str, Replica]]:
    for name in books.replicas:
        entry = books.replica(name)
        if entry is not None:
            yield name, entry[0]


def _holding(books: Books) -> dict[str, tuple[Replica, dict[str, int], dict[str, int]]]:
    """Return every replica that holds capacity, with its resources on the node and its charge on its grants."""
    holding = {}
    for name, replica in replicas(books):
        requirements = books.requirements.of(generation_of(replica))
        if replica.status.phase in HOLDING_PHASES and requirements is not None:
            needs = {
                **dict(requirements.resources),
                **{DEVICE_PREFIX + d: share for d, share in replica.status.devices.items()},
            }
            holding[name] = (replica, needs, dict(requirements.charge.pairs))
    return holding


def _sums(books: Books) -> tuple[Sums, Sums]:
    """Return what the rows hold, by node and by grant. A reservation holds its need minus what its victims still hold."""
    nodes: Sums = defaultdict(lambda: defaultdict(int))
    grants: Sums = defaultdict(lambda: defaultdict(int))
    holding = _holding(books)
    for replica, needs, charge in holding.values():
        victims = replica.status.victims if replica.status.phase is Phase.RESERVED else {}
        victim_rows = [holding[v] for v, attempt in victims.items() if v in holding and attempt_key(holding[v][0]) == attempt]
        for name, count in needs.items():
            freed = sum(row[1].get(name, 0) for row in victim_rows)
            nodes[replica.status.node][name] += max(0, count - freed)
        for grant in replica.status.grants:
            for name, count in charge.items():
                freed = sum(row[2].get(name, 0) for row in victim_rows if grant in row[0].status.grants)
                grants[grant][name] += max(0, count - freed)
    return nodes, grants


def one_owner_per_device(books: Books) -> Iterator[str]:
    """No two replicas hold the same whole device of a node."""
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, (replica, _, _) in _holding(books).items():
        if replica.status.phase is not Phase.RESERVED:
            for device, share in replica.status.devices.items():
                if share == WHOLE_DEVICE:
                    owners[replica.status.node, device].append(name)
    for (node, device), names in sorted(owners.items()):
        if len(names) > 1:
            yield f"device {device} of node {node} is held by {len(names)} replicas: {', '.join(names)}"


def node_ledgers_balance(books: Books) -> Iterator[str]:
    """The free capacity in each node's ledger equals its capacity minus what the rows of its replicas hold."""
    nodes, _ = _sums(books)
    for name, ledger in sorted(books.nodes.items()):
        spec = ledger.node.spec
        capacity = {**dict(spec.capacity.pairs), **{DEVICE_PREFIX + d.name: WHOLE_DEVICE for d in spec.devices}}
        for resource in sorted({*capacity, *nodes[name], *ledger.free}):
            free = capacity.get(resource, 0) - nodes[name][resource]
            if ledger.free.get(resource, 0) != free:
                yield f"node {name}: {resource}: the ledger has {ledger.free.get(resource, 0)} free, the rows give {free}"


def one_binding(books: Books) -> Iterator[str]:
    """A replica names a node and grants exactly while it holds capacity, and that node exists."""
    for name, replica in replicas(books):
        bound = replica.status.phase in HOLDING_PHASES
        if bound != bool(replica.status.grants) or (bound and replica.status.node not in books.nodes):
            yield (
                f"{name}: phase {replica.status.phase}, node {replica.status.node or 'none'}, charged to "
                f"{replica.status.grants}"
            )


def grants_cover(books: Books) -> Iterator[str]:
    """The amounts used and granted on in each grant's ledger equal the sums over the rows of replicas and grants."""
    _, drawn = _sums(books)
    granted_on: Sums = defaultdict(lambda: defaultdict(int))
    for grant in _issued(books):
        outstanding_amount = dict(grant.spec.amount - grant.status.returned)
        for resource, count in outstanding_amount.items():
            granted_on[grant.spec.parent][resource] += count
        if grant.status.phase is not GrantPhase.CLOSED or outstanding_amount:
            for tenant, share in grant.spec.shares.items():
                for resource, count in share:
                    granted_on[f"tenant/{tenant}/emergency"][resource] += count
    for name, ledger in sorted(books.grants.items()):
        for resource in sorted({*ledger.free, *drawn[name], *granted_on[name]}):
            used, granted = ledger.used.get(resource, 0), ledger.granted_on.get(resource, 0)
            if (used, granted) != (drawn[name][resource], granted_on[name][resource]):
                rows = f"{drawn[name][resource]} and {granted_on[name][resource]}"
                yield f"{name}: {resource}: the ledger has {used} used and {granted} granted on; the rows give {rows}"


def quota_covers(books: Books) -> Iterator[str]:
    """Each tenant's ledgers have the quota and emergency quota of its row, and every quota slice is part of a quota."""
    for name in books.keys("tenant/"):
        tenant: Tenant = books.objects[name][0]
        limits = {"": tenant.spec.quota, "/emergency": tenant.spec.emergency_quota}
        for suffix, declared in limits.items():
            ledger = books.grants.get(f"tenant/{tenant.metadata.name}{suffix}")
            if ledger is None or Amount(ledger.amount) != declared:
                checked = "no ledger" if ledger is None else str(Amount(ledger.amount))
                yield f"{name}{suffix}: the row declares {declared}, the ledger has {checked}"
    for grant in _issued(books):
        parent = books.objects.get(key_of("Grant", grant.spec.parent))
        is_slice = parent is not None and (parent[0].spec.purpose, parent[0].spec.tenant) == ("quota", grant.spec.tenant)
        if grant.spec.purpose == "quota" and grant.spec.parent != f"tenant/{grant.spec.tenant}" and not is_slice:
            yield (
                f"grant/{grant.metadata.name}: a quota slice whose parent is {grant.spec.parent or 'missing'}, not quota of "
                "its tenant"
            )


def _issued(books: Books) -> Iterator[Grant]:
    """Yield the grants made by this scope. Copies of grants held from other scopes charge no ledger here."""
    for name in books.keys("grant/"):
        grant: Grant = books.objects[name][0]
        if not grant.spec.issuer:
            yield grant


CHECKS: Final[dict[str, Callable[[Books], Iterator[str]]]] = {
    "one-owner-per-device": one_owner_per_device,
    "node-ledgers-balance": node_ledgers_balance,
    "one-binding": one_binding,
    "grants-cover": grants_cover,
    "quota-covers": quota_covers,
}
"""Checks by invariant. Ledgers above their limit after a legal reduction are listed by `Books.excess` instead."""


def violations(books: Books) -> dict[str, list[str]]:
    """Return all violations by invariant. Every list is empty if the books balance."""
    return {name: list(check(books)) for name, check in CHECKS.items()}


def statement(name: str) -> str:
    """Return what a check verifies, in one sentence."""
    return (CHECKS[name].__doc__ or "").splitlines()[0]
