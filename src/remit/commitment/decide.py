"""`decide(draft, operation)`: checks shared by all claims, and dispatch to rulings. No I/O.

Each claim against the books, one after another. No I/O here: see authority.py.

`decide(draft, operation)` is pure in what is committed: it reads the books through the draft, and either writes what follows
into the draft or refuses and leaves the draft as it was. The checks that every claim shares come first, in this order: is there
such a claim, may this role make it, and does the asker hold its lease at the current epoch (the fence).
"""

from __future__ import annotations

from remit.commitment.draft import Draft
from remit.commitment.rulings import declarations, evidence, grants, leases, peer_scopes, placement, transitions
from remit.commitment.rulings.leases import claimant
from remit.commitment.rulings.registry import RULINGS, Ruling, refuse
from remit.model.claims import Acquire, Claim, Code, Operation, Refused

ROOMS = (declarations, grants, leases, transitions, evidence, placement, peer_scopes)
"""Where the rulings stand; importing them fills the register."""


def decide(draft: Draft, operation: Operation) -> int | Refused:
    """The number that an accepted claim is answered with, its changes written into the draft; or the refusal."""
    claim, actor = operation.claim, operation.actor
    ruling = RULINGS.get(type(claim))
    if ruling is None:
        return refuse(Code.INVALID, f"{type(claim).__name__} is not decided here")
    if actor.role not in ruling.roles:
        return refuse(Code.ROLE, f"{actor.role} may not {tag(type(claim))}; {', '.join(sorted(ruling.roles))} may")
    if not isinstance(claim, Acquire):
        fenced = claimant(draft, actor)
        if fenced is not None:
            return fenced
    return ruling.decide(draft, operation, claim)


def tag(claim: type[Claim]) -> str:
    """How a claim is called in the audit and on the wire."""
    return str(claim.__struct_config__.tag)


def rulings() -> dict[type[Claim], Ruling]:
    """Every claim that is decided here; `Abandon` is the outcomes' own affair."""
    return dict(RULINGS)
