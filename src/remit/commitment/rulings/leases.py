"""Leases: acquire, vacate and the fencing check; in-memory lease renewals and node heartbeats. The rulings are pure.

A lease has an epoch, which fences earlier holders, and a term, which lapses without renewal. Epoch and holder are stored.
Renewals are kept only in the authority's memory, so a new authority gives every lease a full term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from remit.commitment.books import Books
from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import ALL_ROLES, UNLEASED_ROLES, Coordination, refuse, ruling
from remit.commitment.rulings.transitions import agent_lease
from remit.model.claims import Acquire, Actor, Code, Operation, Refused, Vacate
from remit.model.metadata import RecordMetadata
from remit.model.objects import key_of
from remit.model.records import Lease, LeaseSpec
from remit.model.roles import Role
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeHeartbeatAge, NodeState

TTL_MS_MIN, TTL_MS_MAX = 100, 3_600_000
LEASES_MAX = 200_000
LEASE_EPOCH_RECORD = "*"
"""Name of a record that exists after a restore and is never held. It stores the epoch after which new leases start: they may
have existed before, at epochs that the backup does not know.
"""


def was_restored(draft: Draft) -> bool:
    """Return whether this scope was ever restored from a backup."""
    return draft.lookup(key_of("Lease", LEASE_EPOCH_RECORD)) is not None


def check_fence(draft: Draft, actor: Actor) -> Refused | None:
    """Refuse unless the actor holds its role's lease at the current epoch. This is the fence of every leased claim."""
    if actor.role in UNLEASED_ROLES:
        return None
    identity = (actor.name, actor.role, actor.lease, actor.epoch)
    try:
        return draft.fence_results[identity]
    except KeyError:
        refusal = draft.fence_results[identity] = _check_fence(draft, actor)
        return refusal


def _check_fence(draft: Draft, actor: Actor) -> Refused | None:
    if not _belongs_to_role(actor, actor.lease):
        return refuse(
            Code.STALE_EPOCH,
            f"actor.lease: {actor.lease!r} is not a lease of role {actor.role}; acquire {actor.role} or {actor.role}/NAME",
        )
    entry = draft.lookup(key_of("Lease", actor.lease))
    if entry is None:
        return refuse(Code.STALE_EPOCH, f"lease {actor.lease} does not exist; acquire it first")
    spec: LeaseSpec = entry[0].spec
    if spec.holder != actor.name or spec.epoch != actor.epoch:
        return refuse(
            Code.STALE_EPOCH,
            f"lease {actor.lease} is held by {spec.holder or 'no one'} at epoch {spec.epoch}, not by {actor.name} at epoch "
            f"{actor.epoch}; acquire it again",
        )
    if _has_lapsed(draft, actor.lease, spec):
        return refuse(
            Code.LEASE_EXPIRED,
            f"lease {actor.lease} of {actor.name} was not renewed for {spec.ttl} and lapsed; acquire it again",
        )
    return None


@ruling(Acquire, ALL_ROLES - UNLEASED_ROLES, Coordination.HARD, "one holder per lease and epoch")
def acquire(draft: Draft, operation: Operation, claim: Acquire) -> int | Refused:
    actor = operation.actor
    if not _belongs_to_role(actor, claim.lease) or len(claim.lease.encode()) > 253:
        return refuse(
            Code.NOT_OWNER,
            f"lease: {claim.lease} does not belong to role {actor.role}; acquire {actor.role} or {actor.role}/NAME",
        )
    if not 0 < len(actor.name) <= 253:  # stored in the row, so its length is limited
        return refuse(Code.INVALID, f"actor.name: has {len(actor.name)} characters; the holder of a lease needs 1 to 253")
    if not TTL_MS_MIN <= claim.ttl <= TTL_MS_MAX:
        return refuse(Code.INVALID, f"ttl: {claim.ttl} is out of range; use {TTL_MS_MIN} ms to {TTL_MS_MAX} ms")
    entry = draft.lookup(key_of("Lease", claim.lease))
    if entry is None and len(draft.books.by_kind.get("lease", ())) + len(draft.changes.objects) >= LEASES_MAX:
        return refuse(Code.LIMIT, f"the scope has reached its limit of {LEASES_MAX} leases; use an existing lease name")
    epoch_record = draft.lookup(key_of("Lease", LEASE_EPOCH_RECORD)) if entry is None else None
    spec = (
        entry[0].spec if entry is not None else LeaseSpec(epoch=epoch_record[0].spec.epoch if epoch_record is not None else 0)
    )
    if spec.holder not in ("", actor.name) and not _has_lapsed(draft, claim.lease, spec):
        return refuse(
            Code.LEASE_HELD,
            f"lease {claim.lease} is held by {spec.holder} at epoch {spec.epoch}; it is free when vacated or lapsed",
        )
    lease = LeaseSpec(holder=actor.name, epoch=spec.epoch + 1, ttl=claim.ttl)
    draft.put(Lease(metadata=RecordMetadata(name=claim.lease), spec=lease))
    draft.changes.renewed_ms[claim.lease] = draft.time.now_ms
    return lease.epoch


@ruling(
    Vacate,
    ALL_ROLES - UNLEASED_ROLES,
    Coordination.SOFT,
    "concurrent changes of a lease merge: the one at the higher epoch wins",
)
def vacate(draft: Draft, operation: Operation, claim: Vacate) -> int | Refused:
    entry = draft.lookup(key_of("Lease", claim.lease))
    actor = operation.actor
    if entry is None or (entry[0].spec.holder, entry[0].spec.epoch, claim.lease) != (actor.name, actor.epoch, actor.lease):
        return refuse(
            Code.STALE_EPOCH, f"lease {claim.lease} is not held by {actor.name} at epoch {actor.epoch}; nothing to vacate"
        )
    draft.put(replace(entry[0], spec=replace(entry[0].spec, holder="")))
    return actor.epoch


def _belongs_to_role(actor: Actor, lease: str) -> bool:
    return lease == actor.role or (lease.startswith(f"{actor.role}/") and len(lease) > len(actor.role) + 1)


def _has_lapsed(draft: Draft, lease: str, spec: LeaseSpec) -> bool:
    renewed_ms = draft.changes.renewed_ms.get(lease)
    silent_ms = draft.time.silent_ms(lease) if renewed_ms is None else draft.time.now_ms - renewed_ms
    return silent_ms > spec.ttl


_AGENT_PREFIX: Final = f"{Role.AGENT}/"


class LeaseRenewals:
    """Last renewal of each lease and last reported state of each node, in memory only.

    States are kept only for nodes whose agent holds its lease, so there are at most as many states as leases.
    """

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self.renewed_ms: dict[str, int] = {}
        self._role_leases: dict[str, None] = {}
        """Leases in `at_ms` that do not belong to agents. These are few."""
        self._node_states: dict[str, NodeState] = {}

    def record_renewal(self, actor: Actor, received_ms: int) -> None:
        lease = actor.lease
        if received_ms >= self.renewed_ms.get(lease, 0):
            self.renewed_ms[lease] = received_ms
        if not lease.startswith(_AGENT_PREFIX):
            self._role_leases[lease] = None

    def record_acquired(self, acquired_ms: Mapping[str, int]) -> None:
        """Record leases that were acquired at these times."""
        for lease in acquired_ms:
            if not lease.startswith(_AGENT_PREFIX):
                self._role_leases[lease] = None
        self.renewed_ms.update(acquired_ms)

    def renewal_ages(self, books: Books, now_ms: int) -> tuple[int, dict[str, int]]:
        """Return how long this authority has received renewals, and the time since the last renewal of each held lease of a
        role.

        A lease that was not renewed in all that time is left out. Agent leases are left out too.
        """
        held = {lease: books.objects.get(key_of("Lease", lease)) for lease in self._role_leases}
        since = {lease: self.renewed_ms[lease] for lease, row in held.items() if row is not None and row[0].spec.holder}
        return now_ms - self.since_ms, {lease: now_ms - renewed_ms for lease, renewed_ms in since.items()}

    def record_state(self, heartbeat: NodeHeartbeat) -> None:
        if heartbeat.actor.lease == agent_lease(heartbeat.state.node):
            self._node_states[heartbeat.state.node] = heartbeat.state

    def heartbeat_report(self, incarnation: str, now_ms: int) -> HeartbeatReport:
        """Report the time since the last heartbeat of each node, also of nodes whose lease has lapsed."""
        nodes = dict[str, NodeHeartbeatAge]()
        for lease, renewed_ms in self.renewed_ms.items():
            role, _, node = lease.partition("/")
            if role == Role.AGENT and node:
                state = self._node_states.get(node)
                nodes[node] = NodeHeartbeatAge(max(0, now_ms - renewed_ms), "" if state is None else state.settled)
        return HeartbeatReport(incarnation, now_ms - self.since_ms, nodes)

    def node_states(self, nodes: Sequence[str]) -> list[NodeState]:
        return [self._node_states[node] for node in nodes or sorted(self._node_states) if node in self._node_states]
