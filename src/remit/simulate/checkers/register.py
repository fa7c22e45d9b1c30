"""Which promise of docs/faults.md is judged by which checks? Names alone; what is not judged yet has its reason here."""

from __future__ import annotations

from typing import Final

from remit.simulate.checkers import judge
from remit.simulate.checkers.liveness import LOOKS
from remit.simulate.checkers.promise import PROMISES

BESIDE: Final[dict[str, str]] = {
    "acknowledged_is_in_history": "S2",
    "one_answer_per_operation": "S2",
    "an_id_stands_for_one_payload": "S2",
    "grants_are_in_one_hand": "S4",
    "tenants_use_no_more_than_their_quota": "S4",
    "one_copy_at_a_time": "S8",
    "ended_work_runs_no_more": "S8",
    "intervals_are_disjoint": "S8",
    "observers_never_go_back": "S10",
    "runs_only_what_was_ordered": "S14",
    "cited_evidence_was_true": "S16",
    "what_is_ordered_is_not_stopped": "S20",
    "what_was_seen_is_on_record": "S22",
    "views_show_what_stands": "S23",
    "claims_fit_what_was_seen": "S26",
    "work_is_bound_soon": "L1",
    "writes_cease": "L10",
    "refusals_back_off": "L10",
    "calls_are_answered": "L14",
}
"""What is asked neither of every commit nor at every look: of answers, of processes, of views, and as a run ends."""

NOT_YET: Final[dict[str, str]] = {
    "S11": "schedules",
    "S19": "two versions of the format side by side",
    "S21": "identities",
    "L9": "schedules",
    "L11": "the API server",
    "L12": "the API server",
}
"""What a promise needs before it can be judged."""

PAGES: Final = (*judge.CHECKED_BY, judge)
"""Importing them fills the registers."""


def judged() -> dict[str, list[str]]:
    """By promise, the names of its checks in order."""
    found: dict[str, list[str]] = {}
    named = [(one.property, name) for name, one in PROMISES.items()]
    named += [(property_, name) for name, (property_, _) in LOOKS.items()]
    for property_, name in sorted([*named, *((property_, name) for name, property_ in BESIDE.items())]):
        found.setdefault(property_, []).append(name)
    return found
