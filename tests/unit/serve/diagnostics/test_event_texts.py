"""Tests of the texts of events."""

from __future__ import annotations

import pytest

from remit.commitment.decide import tag
from remit.law.lifecycle import TRANSITIONS
from remit.model.claims import CLAIMS
from remit.serve.diagnostics.event_texts import (
    CLAIM_EVENTS,
    TRANSITION_EVENTS,
    accepted_message,
    event_text,
    refused_message,
)
from remit.serve.diagnostics.history import UNLISTED_OPERATIONS


def test_every_transition_and_claim_type_has_a_text() -> None:
    transitions = {transition.name for transition in TRANSITIONS}
    assert set(TRANSITION_EVENTS) == transitions
    assert set(CLAIM_EVENTS) == {tag(claim) for claim in CLAIMS} - transitions


def test_operations_that_are_not_listed_are_claim_types() -> None:
    assert {tag(claim) for claim in CLAIMS} >= UNLISTED_OPERATIONS


def test_event_reasons_are_camel_case_words() -> None:
    for text in (*TRANSITION_EVENTS.values(), *CLAIM_EVENTS.values()):
        assert text.reason.isalnum() and text.reason[0].isupper() and text.message and text.request


@pytest.mark.parametrize(
    ("verb", "cause", "reason", "message"),
    [
        ("bind", "to n3", "Bound", "bound to n3"),
        ("reserve", "on n3", "CapacityReserved", "capacity reserved on n3"),
        ("crash", "exit 7", "Failed", "exit 7"),
        ("settle", "", "Released", "released after it finished"),
        ("doubt", "node n7 sends no heartbeats", "NodeUnreachable", "node n7 sends no heartbeats"),
        ("mark", "suspect: no heartbeat for 15s", "HealthChanged", "suspect: no heartbeat for 15s"),
        ("from-another-version", "", "FromAnotherVersion", "from-another-version accepted"),
    ],
)
def test_accepted_operation_states_what_happened(verb: str, cause: str, reason: str, message: str) -> None:
    text = event_text(verb)
    assert (text.reason, accepted_message(text, cause)) == (reason, message)


def test_refused_operation_states_the_request() -> None:
    assert refused_message(event_text("lose"), "n7 answers") == "request to declare the replica lost refused: n7 answers"
    assert refused_message(event_text("renew"), "") == "request to renew the grant refused"
