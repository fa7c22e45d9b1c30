"""Dry run: claims are decided in sequence without any effect."""

from __future__ import annotations

from typing import Any

import pytest

from remit.commitment import dry_run as dry_run_module
from remit.commitment.decide import decide
from remit.commitment.dry_run import dry_run
from remit.model.claims import Apply, Code, Delete, Refused
from remit.model.kinds import Workload
from tests.properties.authority_world import OPERATOR, USER, Scope, scope_test, workload


@scope_test
async def test_dry_run_decides_in_sequence_and_changes_nothing(scope: Scope) -> None:
    authority = scope.lead.authority
    before = authority.head
    found = dry_run(authority, USER, [Apply(workload("w")), Apply(workload("w", replicas=2)), Delete("Workload", "w", "t1")])
    assert [one.result for one in found] == [1, 2, 1]
    assert isinstance(found[1].obj, Workload) and found[1].obj.metadata.generation == 2
    assert found[2].obj is None
    assert dry_run(authority, USER, [Apply(workload("w"))])[0].result == 1, "each dry run starts from the committed state"
    assert authority.head == before and await scope.store.get("workload/t1/w") is None
    refused = dry_run(authority, USER, [Delete("Workload", "w", "t1")])[0].result
    assert isinstance(refused, Refused) and refused.code is Code.NOT_FOUND


@scope_test
async def test_exception_while_deciding_is_fault_of_that_claim_only(scope: Scope) -> None:
    real = decide

    def broken(draft: Any, operation: Any) -> Any:
        ruled = real(draft, operation)
        if operation.claim.thing.metadata.name == "bad":
            raise KeyError("half written")
        return ruled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run_module, "decide", broken)
        found = dry_run(scope.lead.authority, OPERATOR, [Apply(workload("bad")), Apply(workload("good"))])
    first = found[0].result
    assert isinstance(first, Refused) and first.code is Code.INTERNAL_ERROR
    assert found[1].result == 1
