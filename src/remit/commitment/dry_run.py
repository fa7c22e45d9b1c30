"""Decides operations on a draft that is then discarded. Writes nothing and notifies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remit.commitment.authority import Authority
from remit.commitment.decide import decide
from remit.model.claims import Actor, AnyClaim, Apply, Code, Delete, Evidence, Operation, OperationID, Refused
from remit.model.kinds.registry import AnyObject
from remit.model.objects import key, key_of


class DryRunResult(NamedTuple):
    """Result of one claim. `result` is the number that would answer it, or the refusal; `obj` the resulting object."""

    result: int | Refused
    obj: AnyObject | None = None


def dry_run(authority: Authority, actor: Actor, claims: Sequence[AnyClaim]) -> list[DryRunResult]:
    """Decide each claim on top of those before it, as in one batch. A batch that is being written now is not seen."""
    draft = authority.batch_base().draft()
    results: list[DryRunResult] = []
    for claim in claims:
        try:
            result = decide(draft, Operation(OperationID(""), actor, claim, Evidence()))
        except Exception as error:  # noqa: BLE001 - any bug of ours: the draft may be half written
            results.append(DryRunResult(Refused(Code.INTERNAL_ERROR, f"{type(error).__name__}: {error}")))
            draft = authority.batch_base().draft()
            continue
        name = _subject_key(claim)
        obj = draft.lookup(name) if name and not isinstance(result, Refused) else None
        results.append(DryRunResult(result, None if obj is None else obj[0]))
    return results


def _subject_key(claim: AnyClaim) -> str:
    match claim:
        case Apply():
            return key(claim.thing)
        case Delete():
            return key_of(claim.kind, claim.name, claim.tenant)
        case _:
            return ""
