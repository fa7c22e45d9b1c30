"""Tests of how actions are described to people."""

from __future__ import annotations

import pytest

from remit.correction.framework.actions import describe_claim
from remit.model.claims import AnyClaim, Delete, Forget, Move, Spawn


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (Move("replica/t1/web-0", 7, "requeue"), "transition requeue of replica/t1/web-0"),
        (Spawn("t1", "web", 2, 3, 1), "creation of web-3 of tenant t1"),
        (Spawn("t1", "web", 2, 3, 4), "creation of web-3 to web-6 of tenant t1"),
        (Delete("Workload", "web", "t1"), "deletion of workload/t1/web"),
        (Forget("replica/t1/web-0", 7), "a Forget claim"),
    ],
)
def test_claim_is_described_by_operation_and_object(claim: AnyClaim, text: str) -> None:
    assert describe_claim(claim) == text
