"""Decides one operation: checks shared by all claims, then the ruling of the claim's type. Pure, no I/O (see authority.py).

`decide(draft, operation)` reads the books through the draft. It either writes the resulting changes into the draft, or
refuses and leaves the draft unchanged. The shared checks run in this order: the claim type is known, the role may make this
claim, and the actor holds its lease at the current epoch (the fence).
"""

from __future__ import annotations

from remit.commitment.draft import Draft
from remit.commitment.rulings import declarations, evidence, grants, leases, peer_scopes, placement, policies, transitions
from remit.commitment.rulings.leases import check_fence
from remit.commitment.rulings.registry import RULINGS, Ruling, refuse
from remit.model.claims import Acquire, Claim, Code, Operation, Refused

RULING_MODULES = (declarations, policies, grants, leases, transitions, evidence, placement, peer_scopes)
"""Modules that define rulings. Importing them fills the registry."""


def decide(draft: Draft, operation: Operation) -> int | Refused:
    """Return the number that answers an accepted claim, with its changes written into the draft; or the refusal."""
    claim, actor = operation.claim, operation.actor
    ruling = RULINGS.get(type(claim))
    if ruling is None:
        return refuse(
            Code.INVALID, f"claim: {type(claim).__name__} has no ruling; use one of the claims listed in docs/operations.md"
        )
    if actor.role not in ruling.roles:
        return refuse(
            Code.ROLE, f"role {actor.role} may not {tag(type(claim))}; allowed roles: {', '.join(sorted(ruling.roles))}"
        )
    if not isinstance(claim, Acquire):
        fenced = check_fence(draft, actor)
        if fenced is not None:
            return fenced
    return ruling.decide(draft, operation, claim)


def tag(claim: type[Claim]) -> str:
    """Return the name of a claim type in audit entries and on the wire."""
    return str(claim.__struct_config__.tag)


def rulings() -> dict[type[Claim], Ruling]:
    """Return the ruling of every claim type decided here. `Abandon` has none: it is decided with the outcomes (batch.py)."""
    return dict(RULINGS)
