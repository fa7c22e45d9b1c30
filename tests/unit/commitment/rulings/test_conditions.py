"""Conditions of declared objects: every kind takes them, and rows without conditions stay as they were."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from remit.model import objects
from remit.model.claims import Apply, SetCondition
from remit.model.kinds.registry import BY_KIND, AnyObject
from remit.model.manifests.reader import read
from remit.model.metadata import Condition
from tests.properties.authority_world import OPERATOR, Scope, scope_test
from tests.properties.authority_world import tenant as tenant_of

READY = Condition(type="Ready", status="True", reason="Checked", observed_generation=1)
KINDS_OF_OPERATORS = sorted(set(objects.DECLARED) - {"Secret"})
"""Secrets are sealed by a server; the authority refuses the sample."""


def sample(kind: str) -> AnyObject:
    manifests = read(json.dumps(BY_KIND[kind].example).encode(), "sample.json")
    assert not manifests.problems
    return manifests.objects[0]


@pytest.mark.parametrize("kind", objects.DECLARED)
def test_row_without_conditions__has_no_trace_of_them(kind: str) -> None:
    obj = sample(kind)
    status = BY_KIND[kind].initial_status
    row = json.loads(objects.encode(replace(obj, status=status)))
    assert "conditions" not in row.get("status", {})
    assert objects.decode(objects.encode(obj)) == obj


@pytest.mark.parametrize("kind", KINDS_OF_OPERATORS)
def test_condition_is_stored__and_a_later_apply_keeps_it(kind: str) -> None:
    @scope_test
    async def conditions(scope: Scope) -> None:
        obj = sample(kind)
        if obj.metadata.tenant or getattr(obj.spec, "tenant", ""):
            await scope.must(OPERATOR, Apply(tenant_of("risk")))
        await scope.must(OPERATOR, Apply(obj))
        name = objects.key(obj)
        plain = scope.row(name)
        await scope.must(OPERATOR, SetCondition(kind, obj.metadata.name, READY, obj.metadata.tenant))
        stored = scope.row(name)
        assert stored["status"]["conditions"] == [
            {"type": "Ready", "status": "True", "reason": "Checked", "observedGeneration": 1}
        ]
        assert stored["spec"] == plain["spec"] and stored["metadata"] == plain["metadata"]
        labelled = replace(obj, metadata=replace(obj.metadata, labels={"tier": "gold"}))
        await scope.must(OPERATOR, Apply(labelled))
        assert scope.row(name)["status"]["conditions"] == stored["status"]["conditions"]

    conditions()
