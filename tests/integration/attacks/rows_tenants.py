"""Attacks across tenants and on reserved names: rows A15 to A21 of docs/faults.md. Contains no tests."""

from __future__ import annotations

import base64
import json

from tests.integration.attacks.attack_server import CANARY, Attacker, Outcome, attack
from tests.unit.serve.in_memory_server import node, secret, workload

MINE, OTHER = "/v1/tenants/acme/workloads", "/v1/tenants/bolt/workloads"
MERGE = "application/merge-patch+json"


@attack(404, "not_found")
def object_of_other_tenant(by: Attacker) -> list[Outcome]:
    """A15: every way to read or write an object of the other tenant, and missing objects: the answers are indistinguishable."""
    text, found = by.member(), []
    for path in (f"{OTHER}/web", "/v1/tenants/bolt/secrets/db", "/v1/tenants/bolt/replicas/web-0", f"{OTHER}/nobodys"):
        found += [by.get(path, text), by.get(f"{path}?pretty=1", text)]
    below = ("/web/explain", "?watch=true", "?labelSelector=a", "")
    found += [by.get(f"{OTHER}{rest}", text) for rest in below]
    found += [by.get(f"/v1/tenants/bolt/replicas/web-0/{description}", text) for description in ("logs", "explain")]
    found += [by.get("/v1/tenants/bolt", text), by.get("/v1/tenants/nobody", text)]
    found += [by.ask("DELETE", f"{OTHER}/web", None, text), by.ask("PUT", f"{OTHER}/web", workload("web", "bolt"), text)]
    found += [by.ask("PATCH", f"{OTHER}/web", {"spec": {"replicas": 9}}, text, Content_Type=MERGE)]
    found += [by.ask("POST", OTHER, workload("x", "bolt"), text)]
    assert by.target.admin("GET", f"{OTHER}/web")["spec"].get("replicas", 1) == 1
    return found


@attack(200, audited=())
def list_over_all_tenants(by: Attacker) -> list[Outcome]:
    """A15: a list over all tenants contains only one's own. Nothing is refused, so nothing is audited."""
    text = by.member()
    found = [by.get(path, text) for path in ("/v1/workloads", "/v1/secrets", "/v1/replicas", "/v1/top/replicas")]
    assert all(b"bolt" not in one.body for one in found)
    assert b"acme" in found[0].body
    return found


@attack(422, "invalid")
def body_with_other_tenant_than_path(by: Attacker) -> list[Outcome]:
    """A16: the body names bolt, the path acme; also with another name, another kind, and by a patch."""
    text = by.member()
    found = [by.ask("POST", MINE, workload("x", "bolt"), text), by.ask("PUT", f"{MINE}/x", workload("x", "bolt"), text)]
    found += [by.ask("PUT", f"{MINE}/x", workload("y"), text), by.ask("POST", MINE, secret("x", a="b"), text)]
    patch = {"metadata": {"tenant": "bolt"}}
    return [*found, by.ask("PATCH", f"{MINE}/web", patch, text, Content_Type=MERGE)]


@attack(403, "not_owner")
def continue_token_of_other_tenant(by: Attacker) -> list[Outcome]:
    """A17: a continue token of bolt's list, used as acme; and forged ones beyond the own tenant."""
    for name in ("p1", "p2"):
        by.target.server.ask("PUT", f"{OTHER}/{name}", workload(name, "bolt"))
    page = by.target.server.must("GET", f"{OTHER}?limit=1")["metadata"]["continue"]
    text, revision = by.member(), by.target.admin("GET", "/v1/status")["revision"]
    made_up = [_page(revision, key) for key in ("workload/bolt/a", "secret/bolt/", "token/", "workload/acm", "node/n1")]
    found = [by.get(f"{path}?continue={one}", text) for one in (page, *made_up) for path in (MINE, "/v1/workloads")]
    assert all(b"bolt" not in one.body for one in found)
    return found


@attack(400, "malformed")
def malformed_continue_token(by: Attacker) -> list[Outcome]:
    """A17: tokens of no list: truncated, with invalid numbers, or far too large."""
    text = by.member()
    broken = ["x", "AAAA", "%00", _page(0, "workload/acme/a"), _page(-1, "workload/acme/a"), _page(1, ""), "a" * 10_000]
    broken += [_page(1 << 63, "workload/acme/a"), _page(10**40, "workload/acme/a"), _page(1 << 62, "workload/acme/a")]
    return [by.get(f"{MINE}?continue={one}", text) for one in broken]


def _page(revision: int, key: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, key]).encode()).decode().rstrip("=")


@attack(422, "invalid")
def owner_in_other_tenant(by: Attacker) -> list[Outcome]:
    """A18: owned by another tenant's workload, by that tenant, or by a node."""
    text = by.member()
    found = []
    for owner in (
        {"kind": "Workload", "name": "web", "tenant": "bolt"},
        {"kind": "Tenant", "name": "bolt"},
        {"kind": "Node", "name": "n2"},
    ):
        made = workload("owned")
        made["metadata"]["owners"] = [owner]
        found.append(by.ask("POST", MINE, made, text))
    return found


@attack(403, "reserved")
def reserved_names(by: Attacker) -> list[Outcome]:
    """A19: labels, annotations, finalizers and priorities reserved to Remit; by members and by admins."""
    text, root = by.member(), by.target.server.token
    wrong = [workload(f"w{number}") for number in range(3)]
    for made, field, value in zip(
        wrong, ("labels", "annotations", "finalizers"), ({"remit/system": "yes"}, {"remit/x": "y"}, ["remit/hold"]), strict=True
    ):
        made["metadata"][field] = value
    found = [by.ask("POST", MINE, one, text) for one in wrong]
    urgent = {"apiVersion": "remit/v1", "kind": "PriorityClass", "metadata": {"name": "top"}, "spec": {"value": 2_000_000_000}}
    labelled = node("n7")
    labelled["metadata"]["labels"] = {"remit/zone": "x"}
    return [*found, by.ask("POST", "/v1/priorityclasses", urgent, root), by.ask("POST", "/v1/nodes", labelled, root)]


@attack(403, "policy")
def priority_class_not_allowed(by: Attacker) -> list[Outcome]:
    """A19: a member raises the priority of its work, in every way to declare work."""
    text, name = by.member(), f"c-{by.name}"
    urgent = {"apiVersion": "remit/v1", "kind": "PriorityClass", "metadata": {"name": name}, "spec": {"value": 1_000}}
    by.target.admin("POST", "/v1/priorityclasses", urgent)
    made, plain = workload(f"urgent-{by.name}"), workload(f"plain-{by.name}")
    made["spec"]["priorityClass"] = name
    assert by.ask("POST", MINE, plain, text).status == 201
    plain["spec"]["priorityClass"] = name
    place, merge = f"{MINE}/{plain['metadata']['name']}", {"Content_Type": "application/merge-patch+json"}
    found = [by.ask("POST", MINE, made, text), by.ask("PUT", place, plain, text)]
    return [*found, by.ask("PATCH", place, {"spec": {"priorityClass": name}}, text, **merge)]


@attack(403)
def confused_deputy(by: Attacker) -> list[Outcome]:
    """A20: requests through the authority, a plan or a controller are judged as the requester's."""
    text, other_work = by.member(), workload("web", "bolt")
    until = {"scope": {"tenant": "bolt"}, "effect": {"pauseExpansion": {}}, "ttl": "1h", "reason": "x", "author": "x"}
    override = {"apiVersion": "remit/v1", "kind": "Override", "metadata": {"name": "x"}, "spec": until}
    found = [by.ask("POST", "/v1/apply", [other_work], text), by.ask("POST", "/v1/apply", [workload("mine"), other_work], text)]
    found += [by.ask("POST", "/v1/plan", [other_work], text), by.ask("POST", "/v1/capacity", [other_work], text)]
    found += [by.ask("POST", "/v1/overrides", override, text), by.ask("POST", "/v1/secrets/rotate", None, text)]
    found += [by.ask("POST", "/v1/nodes", node("mine"), text), by.get("/v1/account?regarding=workload/bolt/web", text)]
    assert by.target.server.ask("GET", f"{MINE}/mine").status == 404, "no part of a batch may be applied"
    return [
        *found,
        by.get("/v1/support", text),
        by.get("/v1/backup", text),
        by.get("/v1/nodes", text),
        by.get("/v1/tokens", text),
    ]


@attack(200)
def dump_of_everything(by: Attacker) -> list[Outcome]:
    """A21: what a server shows of itself and its objects contains no secret, not even for an admin."""
    root = by.target.server.token
    paths = ("/v1/support", "/v1/secrets", "/v1/tenants/acme/secrets/db", "/v1/audit", "/v1/account", "/metrics", "/v1/tokens")
    found = [by.get(path, root) for path in paths]
    found.append(by.ask("POST", "/v1/plan", [secret("db", password=CANARY + "2")], root))
    for one in found:
        text_ = one.body.decode()
        assert CANARY not in text_
        assert root not in text_
        assert not any(text in text_ for text in by.target.tokens.values())
    for file in sorted(by.target.server.data.rglob("*")):
        if file.is_file() and file.name not in ("token", "seal.keys"):
            assert CANARY.encode() not in file.read_bytes(), f"{file.name} has the secret in plain text"
    return found
