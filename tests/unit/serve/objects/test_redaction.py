"""Does anybody learn what another tenant's work is called, by asking who must go for its own?"""

from __future__ import annotations

import json
from typing import Any

from remit.serve.objects.rendering import redact_other_tenants, render_object


def seen(value: Any, tenant: str = "bolt") -> Any:
    return json.loads(redact_other_tenants(json.dumps(value, separators=(",", ":")).encode(), tenant))


def test_those_who_must_go_have_names_only_among_their_own() -> None:
    mine = {"replica": "bolt/x-0", "workload": "x", "priority": 0}
    others = {"replica": "acme/zebra-0", "workload": "zebra", "priority": 7}
    told = seen({"items": [{"waits": {"preemption": {"victims": [mine, others]}}}]})
    hidden = {"replica": "another-tenants/2", "workload": "another-tenants/2", "priority": 7}
    assert told == {"items": [{"waits": {"preemption": {"victims": [mine, hidden]}}}]}
    assert seen(
        {"chosen": {"victims": ["replica/acme/zebra-0"]}, "victims": {"replica/bolt/x-0": True, "replica/b/y-0": False}}
    ) == {
        "chosen": {"victims": ["replica/another-tenants/1"]},
        "victims": {"replica/bolt/x-0": True, "replica/another-tenants/2": False},
    }
    assert seen({"reclaimable": {"victims": 3}}) == {"reclaimable": {"victims": 3}}


def test_a_tenant_whose_name_begins_alike_is_another() -> None:
    assert seen({"victims": ["bolt-2/x-0", "bolt/x-0"]}) == {"victims": ["another-tenants/1", "bolt/x-0"]}


def test_what_names_none_is_left_as_it_is() -> None:
    value = b'{"a": 1.50, "b":[ ]}'
    assert redact_other_tenants(value, "bolt") is value


def test_a_replica_and_a_decision_are_shown_without_names_of_others() -> None:
    replica = b'{"kind":"Replica","metadata":{"name":"x-0","tenant":"bolt"},"spec":{"workload":"x","index":0,"generation":1},'
    replica += b'"status":{"phase":"reserved","victims":{"replica/acme/zebra-0":"u.1","replica/bolt/y-0":"u.2"}}}'
    status = json.loads(render_object("Replica", replica, 5))["status"]
    assert status["victims"] == {"replica/another-tenants/1": "u.1", "replica/bolt/y-0": "u.2"}
