"""Mergeable evidence: events, decisions, summaries, conditions. They merge in any order. Pure."""

from __future__ import annotations

import re

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import ALL_ROLES, Coordination, refuse, ruling
from remit.model.claims import Code, Operation, RecordDecision, RecordEvent, Refused, Report, SetCondition
from remit.model.metadata import DNS_LABEL, Condition, RecordMetadata
from remit.model.objects import key_of
from remit.model.records import Decision, Event, Summary

CONDITIONS_MAX = 32
SUMMARIES_MAX = 10_000
NAME_BYTES_MAX = 240
"""Two names and a kind fit into one key."""


@ruling(RecordEvent, ALL_ROLES, Coordination.SOFT, "events are a set: the same name is the same event")
def record_event(draft: Draft, operation: Operation, claim: RecordEvent) -> int | Refused:
    refusal = _check_name(claim.name)
    if refusal is not None:
        return refusal
    draft.put_note(Event(metadata=RecordMetadata(name=claim.name), spec=claim.event))
    return 0


@ruling(
    RecordDecision,
    ALL_ROLES,
    Coordination.BOUNDED,
    "decisions are a set of evidence about choices; no later decision depends on them",
)
def record_decision(draft: Draft, operation: Operation, claim: RecordDecision) -> int | Refused:
    refusal = _check_name(claim.name)
    if refusal is not None:
        return refusal
    if re.fullmatch(DNS_LABEL, claim.tenant) is None:
        return refuse(Code.INVALID, f"tenant: {claim.tenant!r} is not a DNS label")
    draft.put_note(Decision(metadata=RecordMetadata(name=claim.name, tenant=claim.tenant), spec=claim.decision))
    return 0


@ruling(Report, ALL_ROLES, Coordination.SOFT, "of two summaries of one holder the higher (epoch, sequence) wins")
def report_summary(draft: Draft, operation: Operation, claim: Report) -> int | Refused:
    refusal = _check_name(claim.name)
    if refusal is not None:
        return refusal
    if claim.name.startswith(AWAITED_NODE):
        return refuse(
            Code.NOT_OWNER,
            f"name: {claim.name} is reserved for the authority's record of nodes awaited after a restore; use another name",
        )
    entry = draft.lookup(key_of("Summary", claim.name))
    before = None if entry is None else entry[0]
    after = Summary(metadata=RecordMetadata(name=claim.name), spec=claim.summary)
    if before is None and len(draft.keys("summary/")) >= SUMMARIES_MAX:
        return refuse(Code.LIMIT, f"the scope has reached its limit of {SUMMARIES_MAX} summaries")
    merged = after if before is None else merge_summaries(before, after)
    if merged is not before:
        draft.put(merged)
    return merged.spec.sequence


@ruling(SetCondition, ALL_ROLES, Coordination.SOFT, "of two conditions of one type the later (generation, transition) wins")
def set_condition(draft: Draft, operation: Operation, claim: SetCondition) -> int | Refused:
    entry = draft.lookup(key_of(claim.kind, claim.name, claim.tenant))
    if entry is None or not hasattr(entry[0], "status") or not hasattr(entry[0].status, "conditions"):
        return refuse(Code.NOT_FOUND, f"{claim.kind} {claim.name} does not exist, or its kind has no conditions")
    obj = entry[0]
    known = {condition.type for condition in obj.status.conditions}
    if len(known) >= CONDITIONS_MAX and claim.condition.type not in known:
        return refuse(
            Code.LIMIT,
            f"{claim.kind} {claim.name} has reached its limit of {CONDITIONS_MAX} condition types; reuse one of them",
        )
    merged = merge_conditions(obj.status.conditions, (claim.condition,))
    if merged != obj.status.conditions:
        draft.put(replace(obj, status=replace(obj.status, conditions=merged)))
    return 0


def _check_name(name: str) -> Refused | None:
    """Refuse a name that cannot be part of a key."""
    size = len(name.encode())
    return None if 0 < size <= NAME_BYTES_MAX else refuse(Code.INVALID, f"name: has {size} bytes; use 1 to {NAME_BYTES_MAX}")


def merge_summaries(first: Summary, second: Summary) -> Summary:
    """Return the newer summary. Commutative, associative and idempotent: ties, which a correct holder never creates, go to the
    larger text.
    """

    def rank(summary: Summary) -> tuple[int, int, str]:
        spec = summary.spec
        return spec.epoch, spec.sequence, f"{spec.used} {sorted(spec.counts.items())} {spec.holder}"

    return second if rank(second) > rank(first) else first


def merge_conditions(first: tuple[Condition, ...], second: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Merge conditions by type: the later one wins, and the latest are kept if there are too many. The result is sorted by
    type, so it does not depend on the order of arrival.
    """

    def rank(c: Condition) -> tuple[int, str, str, str, str]:
        return c.observed_generation, c.last_transition, c.status, c.reason, c.message

    merged: dict[str, Condition] = {}
    for condition in (*first, *second):
        before = merged.get(condition.type)
        if before is None or rank(condition) > rank(before):
            merged[condition.type] = condition
    types = sorted(merged, key=lambda type_: (rank(merged[type_]), type_))[-CONDITIONS_MAX:]
    return tuple(merged[type_] for type_ in sorted(types))
