"""Decides operations on a draft that is then discarded. Writes nothing and notifies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remit.commitment.authority import Authority
from remit.commitment.decide import decide
from remit.model.claims import Actor, AnyClaim, Apply, Code, Delete, Evidence, Operation, OperationID, Refused
from remit.model.objects import AnyObject, key, key_of


class DryRunResult(NamedTuple):
    """Result of one claim. `ruled` is the number that would answer it, or the refusal; `thing` the resulting object."""

    result: int | Refused
    obj: AnyObject | None = None


def dry_run(authority: Authority, actor: Actor, claims: Sequence[AnyClaim]) -> list[DryRunResult]:
    """Decide each claim on top of those before it, as in one batch. A batch that is being written now is not seen."""
    draft = authority.batch_base().draft()
    found: list[DryRunResult] = []
    for claim in claims:
        try:
            ruled = decide(draft, Operation(OperationID(""), actor, claim, Evidence()))
        except Exception as fault:  # noqa: BLE001 - any bug of ours: the draft may be half written
            found.append(DryRunResult(Refused(Code.FAULT, f"{type(fault).__name__}: {fault}")))
            draft = authority.batch_base().draft()
            continue
        name = _subject_key(claim)
        stands = draft.lookup(name) if name and not isinstance(ruled, Refused) else None
        found.append(DryRunResult(ruled, None if stands is None else stands[0]))
    return found


def _subject_key(claim: AnyClaim) -> str:
    match claim:
        case Apply():
            return key(claim.thing)
        case Delete():
            return key_of(claim.kind, claim.name, claim.tenant)
        case _:
            return ""
