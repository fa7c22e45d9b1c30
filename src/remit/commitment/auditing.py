"""What does the audit say of an operation? Who did what to which object; it is the outcome's record too. No I/O here."""

from __future__ import annotations

from typing import Final

from remit.commitment.decide import tag
from remit.commitment.outcomes import Entry
from remit.model.claims import CLAIMS, AnyClaim, Apply, Delete, Move, Operation, Refused
from remit.model.objects import key, key_of


def entry_of(operation: Operation, taken: str, ruled: int | Refused) -> Entry:
    """One operation as the audit keeps it."""
    actor, evidence, claim = operation.actor, operation.evidence, operation.claim
    number, code, detail = (0, ruled.code.value, ruled.detail) if isinstance(ruled, Refused) else (ruled, "", "")
    return Entry(
        operation.id, taken, _deed(claim), _subject(claim), actor.name, actor.role, actor.lease, actor.epoch,
        evidence.revision, evidence.age_ms, number, code, detail, operation.trace,
    )  # fmt: skip


_TAGS: Final = {claim: tag(claim) for claim in CLAIMS}


def _deed(claim: AnyClaim) -> str:
    """What was asked, as the audit calls it: the claim, and for a move which one."""
    return f"move {claim.transition}" if type(claim) is Move else _TAGS[type(claim)]


def _subject(claim: AnyClaim) -> str:
    """The object that the claim is about, by the field that names it."""
    if type(claim) is Apply:
        return key(claim.thing)
    if type(claim) is Delete:
        return key_of(claim.kind, claim.name, claim.tenant)
    field = _SUBJECTS[type(claim)]
    return str(getattr(claim, field)) if field else ""


_SUBJECTS: Final = {
    claim: next(
        (f for f in ("replica", "name", "node", "lease", "workload", "operation", "holder") if f in claim.__struct_fields__), ""
    )
    for claim in CLAIMS
}
