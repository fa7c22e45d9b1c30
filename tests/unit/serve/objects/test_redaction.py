"""Redaction: names of other tenants' work do not appear in explanations of preemption."""

from __future__ import annotations

import json
from typing import Any

from remit.serve.objects.rendering import redact_other_tenants, render_object


def redacted(value: Any, tenant: str = "bolt") -> Any:
    return json.loads(redact_other_tenants(json.dumps(value, separators=(",", ":")).encode(), tenant))


def test_victims_of_other_tenants_are_anonymous() -> None:
    mine = {"replica": "bolt/x-0", "workload": "x", "priority": 0}
    others = {"replica": "acme/zebra-0", "workload": "zebra", "priority": 7}
    shown = redacted({"items": [{"waits": {"preemption": {"victims": [mine, others]}}}]})
    hidden = {"replica": "another-tenants/2", "workload": "another-tenants/2", "priority": 7}
    assert shown == {"items": [{"waits": {"preemption": {"victims": [mine, hidden]}}}]}
    assert redacted(
        {"chosen": {"victims": ["replica/acme/zebra-0"]}, "victims": {"replica/bolt/x-0": True, "replica/b/y-0": False}}
    ) == {
        "chosen": {"victims": ["replica/another-tenants/1"]},
        "victims": {"replica/bolt/x-0": True, "replica/another-tenants/2": False},
    }
    assert redacted({"reclaimable": {"victims": 3}}) == {"reclaimable": {"victims": 3}}


def test_tenant_with_same_prefix_is_another_tenant() -> None:
    assert redacted({"victims": ["bolt-2/x-0", "bolt/x-0"]}) == {"victims": ["another-tenants/1", "bolt/x-0"]}


def test_value_without_names_is_returned_unchanged() -> None:
    value = b'{"a": 1.50, "b":[ ]}'
    assert redact_other_tenants(value, "bolt") is value


def test_replica_victims_of_other_tenants_are_anonymous() -> None:
    replica = b'{"kind":"Replica","metadata":{"name":"x-0","tenant":"bolt"},"spec":{"workload":"x","index":0,"generation":1},'
    replica += b'"status":{"phase":"reserved","victims":{"replica/acme/zebra-0":"u.1","replica/bolt/y-0":"u.2"}}}'
    status = json.loads(render_object("Replica", replica, 5))["status"]
    assert status["victims"] == {"replica/another-tenants/1": "u.1", "replica/bolt/y-0": "u.2"}
