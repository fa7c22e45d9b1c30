"""Decides operations on a draft that is discarded.

Claims decided on a draft that is thrown away: nothing is written, and nobody else hears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remit.commitment.authority import Authority
from remit.commitment.decide import decide
from remit.model.claims import Actor, AnyClaim, Apply, Code, Delete, Evidence, Operation, OperationID, Refused
from remit.model.objects import AnyObject, key, key_of


class Tried(NamedTuple):
    """`ruled` is the number that it would be answered with, or the refusal; `thing` is what would then stand there."""

    ruled: int | Refused
    thing: AnyObject | None = None


def tried(authority: Authority, actor: Actor, claims: Sequence[AnyClaim]) -> list[Tried]:
    """Each on top of those before it, as in one batch. It knows of nothing that is being written just now."""
    draft = authority.ground().draft()
    found: list[Tried] = []
    for claim in claims:
        try:
            ruled = decide(draft, Operation(OperationID(""), actor, claim, Evidence()))
        except Exception as fault:  # noqa: BLE001 - our own bug, whatever it is: the draft may be half written
            found.append(Tried(Refused(Code.FAULT, f"{type(fault).__name__}: {fault}")))
            draft = authority.ground().draft()
            continue
        name = _about(claim)
        stands = draft.thing(name) if name and not isinstance(ruled, Refused) else None
        found.append(Tried(ruled, None if stands is None else stands[0]))
    return found


def _about(claim: AnyClaim) -> str:
    match claim:
        case Apply():
            return key(claim.thing)
        case Delete():
            return key_of(claim.kind, claim.name, claim.tenant)
        case _:
            return ""
