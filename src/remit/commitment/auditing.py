"""What does the audit say of an operation? Who did what to which object; it is the outcome's record too. No I/O here."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from remit.commitment.decide import tag
from remit.commitment.outcomes import Entry
from remit.model.claims import CLAIMS, AnyClaim, Apply, Bind, Claim, Delete, Mark, Move, Operation, Refused, Reserve, Role
from remit.model.kinds import NodeHealth
from remit.model.objects import key, key_of


def deed_of(operation: Operation) -> tuple[str, str]:
    """What is asked, and of which object, as the audit calls them. Raises if this is no operation: what came over a wire was
    checked, but what was given by reference was checked by nobody, and its words are written where a successor must read them.
    """
    actor, evidence, claim = operation.actor, operation.evidence, operation.claim
    did, field = _NAMES[type(claim)]
    subject = getattr(claim, field) if field else _subject(claim)
    plain = type(operation.id) is type(operation.trace) is type(actor.name) is type(actor.lease) is type(subject) is str
    texts = plain or all(isinstance(one, str) for one in (operation.id, operation.trace, actor.name, actor.lease, subject))
    if not texts or not (type(evidence.revision) is type(evidence.age_ms) is type(actor.epoch) is int):
        raise TypeError("id, trace, actor and subject are text, and epoch, revision and age whole numbers")
    if type(actor.role) is not Role:
        raise TypeError(f"{actor.role!r} is no role")
    return did or _deed(claim), subject


def entry_of(operation: Operation, deed: tuple[str, str], taken: str, ruled: int | Refused) -> Entry:
    """One operation as the audit keeps it."""
    actor, evidence, (did, subject) = operation.actor, operation.evidence, deed
    number, code, detail = (
        (0, ruled.code.value, ruled.detail) if isinstance(ruled, Refused) else (ruled, "", _said(operation.claim))
    )
    entry = Entry(
        operation.id, taken, did, subject, actor.name, actor.role, actor.lease, actor.epoch,
        evidence.revision, evidence.age_ms, number, code, detail, operation.trace,
    )  # fmt: skip
    texts = len(operation.id) + len(subject) + len(actor.name) + len(actor.lease) + len(detail) + len(operation.trace)
    return entry if texts <= TEXT_MAX else _cut(entry)


def _said(claim: AnyClaim) -> str:
    """What an accepted claim says of its cause: how an attempt ended, how a node is, where work goes."""
    match claim:
        case Move(result=str(result), reason=str(reason)):
            return f"{result} {reason}".strip()
        case Mark(health=NodeHealth() as health, reason=str(reason)):
            return f"{health} {reason}".strip()
        case Bind(node=str(node)) | Reserve(node=str(node)):
            return f"to {node}"
        case _:
            return ""


TEXT_MAX: Final = 1024
"""More than an honest operation says of itself in all. The asker chooses these words, and no batch may outgrow its row: the
store would refuse it, and what says so would be as large again, and so for ever."""


def _cut(entry: Entry) -> Entry:
    """Each text cut to its share. An id that would lose anything is none: those have 128 characters at most."""
    most = TEXT_MAX // 2
    cut = {
        name: text[:most] + "…"
        for name in ("id", "did", "subject", "actor", "lease", "detail", "trace")
        if len(text := getattr(entry, name)) > most
    }
    return replace(entry, **cut)


def _deed(claim: AnyClaim) -> str:
    """What was asked, as the audit calls it: the claim, and for a move which one."""
    return f"move {claim.transition}" if isinstance(claim, Move) else tag(type(claim))


def _subject(claim: AnyClaim) -> str:
    """The object that a claim is about which names it in no field of its own."""
    if isinstance(claim, Apply):
        return key(claim.thing)
    return key_of(claim.kind, claim.name, claim.tenant) if isinstance(claim, Delete) else ""


_FIELDS: Final = ("replica", "name", "node", "lease", "workload", "operation", "holder", "peer")


def _names(claim: type[Claim]) -> tuple[str, str]:
    """What the audit calls a claim, and the field that names its object; empty where each claim must be looked at."""
    field = next((field for field in _FIELDS if field in claim.__struct_fields__), "")
    return ("" if claim is Move else tag(claim)), ("" if claim in (Apply, Delete) else field)


_NAMES: Final = {claim: _names(claim) for claim in CLAIMS}
