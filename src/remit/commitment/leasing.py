"""Who may act in a role? Leases: an epoch that fences, a term that lapses. Pure; renewals are in the authority's memory."""

from __future__ import annotations

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings import EVERYONE, UNLEASED, Coordination, refuse, ruling
from remit.model.claims import Acquire, Actor, Code, Operation, Refused, Vacate
from remit.model.fields import Stamp
from remit.model.objects import key_of
from remit.model.records import Lease, LeaseSpec

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
