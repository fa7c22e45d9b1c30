"""Leases: acquire, vacate, fencing check; in-memory renewals and node heartbeats.

Leases: an epoch that fences, a term that lapses. Pure; renewals are in the authority's memory.

In its memory alone: a new authority gives every lease a full term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from remit.commitment.books import Books
from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import EVERYONE, UNLEASED, Coordination, refuse, ruling
from remit.commitment.rulings.transitions import agent_lease
from remit.model.claims import Acquire, Actor, Code, Operation, Refused, Role, Vacate
from remit.model.metadata import Stamp
from remit.model.objects import key_of
from remit.model.records import Lease, LeaseSpec
from remit.model.wire.agent_messages import Beat, Heard, NodeHeard, NodeState

TTL_MS_MIN, TTL_MS_MAX = 100, 3_600_000
LEASES_MAX = 200_000
ANY_LEASE = "*"
"""After a restore this one, which nobody holds, keeps the epoch that leases begin after which are not there yet: they may have
been there before, at epochs that the backup does not know."""


def restored(draft: Draft) -> bool:
    """Has this scope ever been put back to a backup?"""
    return draft.thing(key_of("Lease", ANY_LEASE)) is not None


def claimant(draft: Draft, actor: Actor) -> Refused | None:
    """Does the actor hold its role's lease at the current epoch? This is the fence that every leased claim passes."""
    if actor.role in UNLEASED:
        return None
    who = (actor.name, actor.role, actor.lease, actor.epoch)
    try:
        return draft.fenced[who]
    except KeyError:
        fenced = draft.fenced[who] = _claimant(draft, actor)
        return fenced


def _claimant(draft: Draft, actor: Actor) -> Refused | None:
    if not _of_role(actor, actor.lease):
        return refuse(
            Code.STALE_EPOCH, f"{actor.name} names no lease of role {actor.role}; acquire {actor.role} or {actor.role}/…"
        )
    found = draft.thing(key_of("Lease", actor.lease))
    if found is None:
        return refuse(Code.STALE_EPOCH, f"there is no lease {actor.lease}; acquire it")
    spec: LeaseSpec = found[0].spec
    if spec.holder != actor.name or spec.epoch != actor.epoch:
        return refuse(Code.STALE_EPOCH, f"lease {actor.lease} is at epoch {spec.epoch}, held by {spec.holder or 'nobody'}")
    if _lapsed(draft, actor.lease, spec):
        return refuse(Code.LEASE_EXPIRED, f"lease {actor.lease} was not renewed for {spec.ttl}")
    return None


@ruling(Acquire, EVERYONE - UNLEASED, Coordination.HARD, "one holder per lease and epoch")
def acquire(draft: Draft, operation: Operation, claim: Acquire) -> int | Refused:
    actor = operation.actor
    if not _of_role(actor, claim.lease) or len(claim.lease.encode()) > 253:
        return refuse(Code.NOT_OWNER, f"lease {claim.lease} is not one of role {actor.role}")
    if not 0 < len(actor.name) <= 253:  # it stands in the row, not in the key
        return refuse(Code.INVALID, f"actor.name: has {len(actor.name)} characters; 1 to 253 for who holds a lease")
    if not TTL_MS_MIN <= claim.ttl <= TTL_MS_MAX:
        return refuse(Code.INVALID, f"ttl: between {TTL_MS_MIN} ms and {TTL_MS_MAX} ms")
    found = draft.thing(key_of("Lease", claim.lease))
    if found is None and len(draft.books.by_kind.get("lease", ())) + len(draft.things) >= LEASES_MAX:
        return refuse(Code.LIMIT, f"there are {LEASES_MAX} leases already")
    first = draft.thing(key_of("Lease", ANY_LEASE)) if found is None else None
    spec = found[0].spec if found is not None else LeaseSpec(epoch=first[0].spec.epoch if first is not None else 0)
    if spec.holder not in ("", actor.name) and not _lapsed(draft, claim.lease, spec):
        return refuse(Code.LEASE_HELD, f"lease {claim.lease} is held by {spec.holder} at epoch {spec.epoch}")
    taken = LeaseSpec(holder=actor.name, epoch=spec.epoch + 1, ttl=claim.ttl)
    draft.put(Lease(metadata=Stamp(name=claim.lease), spec=taken))
    draft.heard[claim.lease] = draft.moment.now_ms
    return taken.epoch


@ruling(Vacate, EVERYONE - UNLEASED, Coordination.SOFT, "of two words on a lease the one at the higher epoch stands")
def vacate(draft: Draft, operation: Operation, claim: Vacate) -> int | Refused:
    found = draft.thing(key_of("Lease", claim.lease))
    actor = operation.actor
    if found is None or (found[0].spec.holder, found[0].spec.epoch, claim.lease) != (actor.name, actor.epoch, actor.lease):
        return refuse(Code.STALE_EPOCH, f"{actor.name} does not hold lease {claim.lease} at epoch {actor.epoch}")
    draft.put(replace(found[0], spec=replace(found[0].spec, holder="")))
    return actor.epoch


def _of_role(actor: Actor, lease: str) -> bool:
    return lease == actor.role or (lease.startswith(f"{actor.role}/") and len(lease) > len(actor.role) + 1)


def _lapsed(draft: Draft, lease: str, spec: LeaseSpec) -> bool:
    heard = draft.heard.get(lease)
    silent = draft.moment.silent_ms(lease) if heard is None else draft.moment.now_ms - heard
    return silent > spec.ttl


_AGENT: Final = f"{Role.AGENT}/"


class Hearing:
    """`at_ms` says when each lease was last renewed, on the authority's clock; `states` what nodes last said of themselves:
    of those alone that hold a lease, so there are no more than of these.
    """

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self.at_ms: dict[str, int] = {}
        self._roles: dict[str, None] = {}
        """The leases among them that are not agents': these are few."""
        self._states: dict[str, NodeState] = {}

    def renewed(self, actor: Actor, received_ms: int) -> None:
        lease = actor.lease
        if received_ms >= self.at_ms.get(lease, 0):
            self.at_ms[lease] = received_ms
        if not lease.startswith(_AGENT):
            self._roles[lease] = None

    def took(self, at_ms: Mapping[str, int]) -> None:
        """Leases were taken, or renewed, at these times."""
        for lease in at_ms:
            if not lease.startswith(_AGENT):
                self._roles[lease] = None
        self.at_ms.update(at_ms)

    def silences(self, books: Books, now_ms: int) -> tuple[int, dict[str, int]]:
        """For how long this authority has listened; and of each lease of a role that somebody holds, for how long it was not
        renewed. One of which nothing was heard in all that time is not named.
        """
        held = {lease: books.things.get(key_of("Lease", lease)) for lease in self._roles}
        since = {lease: self.at_ms[lease] for lease, row in held.items() if row is not None and row[0].spec.holder}
        return now_ms - self.since_ms, {lease: now_ms - at_ms for lease, at_ms in since.items()}

    def told(self, beat: Beat) -> None:
        if beat.actor.lease == agent_lease(beat.state.node):
            self._states[beat.state.node] = beat.state

    def heard(self, incarnation: str, now_ms: int) -> Heard:
        """For how long nothing was heard of each node; also of one whose lease has lapsed."""
        nodes = dict[str, NodeHeard]()
        for lease, at_ms in self.at_ms.items():
            role, _, node = lease.partition("/")
            if role == Role.AGENT and node:
                state = self._states.get(node)
                nodes[node] = NodeHeard(max(0, now_ms - at_ms), "" if state is None else state.settled)
        return Heard(incarnation, now_ms - self.since_ms, nodes)

    def states(self, nodes: Sequence[str]) -> list[NodeState]:
        return [self._states[node] for node in nodes or sorted(self._states) if node in self._states]
