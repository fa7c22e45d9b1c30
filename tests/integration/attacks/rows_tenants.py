"""Can one tenant reach another's, or what is reserved? Rows A15 to A21 of docs/faults.md. No test is in here."""

from __future__ import annotations

import base64
import json

from tests.integration.attacks.attack_server import CANARY, Intruder, Refusal, attack
from tests.unit.serve.in_memory_server import node, secret, workload

MINE, OTHERS = "/v1/tenants/acme/workloads", "/v1/tenants/bolt/workloads"
MERGE = "application/merge-patch+json"


@attack(404, "not_found")
def anothers_object_by_its_name(by: Intruder) -> list[Refusal]:
    """A15: every way to read or write one thing of the other tenant, and things that nobody has: nothing tells them apart."""
    text, found = by.member(), []
    for path in (f"{OTHERS}/web", "/v1/tenants/bolt/secrets/db", "/v1/tenants/bolt/replicas/web-0", f"{OTHERS}/nobodys"):
        found += [by.get(path, text), by.get(f"{path}?pretty=1", text)]
    below = ("/web/explain", "?watch=true", "?labelSelector=a", "")
    found += [by.get(f"{OTHERS}{rest}", text) for rest in below]
    found += [by.get(f"/v1/tenants/bolt/replicas/web-0/{what}", text) for what in ("logs", "explain")]
    found += [by.get("/v1/tenants/bolt", text), by.get("/v1/tenants/nobody", text)]
    found += [by.ask("DELETE", f"{OTHERS}/web", None, text), by.ask("PUT", f"{OTHERS}/web", workload("web", "bolt"), text)]
    found += [by.ask("PATCH", f"{OTHERS}/web", {"spec": {"replicas": 9}}, text, Content_Type=MERGE)]
    found += [by.ask("POST", OTHERS, workload("x", "bolt"), text)]
    assert by.stage.admin("GET", f"{OTHERS}/web")["spec"].get("replicas", 1) == 1
    return found


@attack(200, noted=())
def what_is_listed_for_all(by: Intruder) -> list[Refusal]:
    """A15: a list of all tenants' has one's own alone. Nothing is refused, so nothing is written down."""
    text = by.member()
    found = [by.get(path, text) for path in ("/v1/workloads", "/v1/secrets", "/v1/replicas", "/v1/top/replicas")]
    assert all(b"bolt" not in one.body for one in found)
    assert b"acme" in found[0].body
    return found


@attack(422, "invalid")
def a_body_of_another_tenant_than_the_path(by: Intruder) -> list[Refusal]:
    """A16: the body says bolt, the path says acme; also with another name, another kind, and by a patch."""
    text = by.member()
    found = [by.ask("POST", MINE, workload("x", "bolt"), text), by.ask("PUT", f"{MINE}/x", workload("x", "bolt"), text)]
    found += [by.ask("PUT", f"{MINE}/x", workload("y"), text), by.ask("POST", MINE, secret("x", a="b"), text)]
    patch = {"metadata": {"tenant": "bolt"}}
    return [*found, by.ask("PATCH", f"{MINE}/web", patch, text, Content_Type=MERGE)]


@attack(403, "not_owner")
def anothers_page(by: Intruder) -> list[Refusal]:
    """A17: a page of bolt's list, as acme's; and one that was made up, beyond one's own."""
    for name in ("p1", "p2"):
        by.stage.server.ask("PUT", f"{OTHERS}/{name}", workload(name, "bolt"))
    page = by.stage.server.must("GET", f"{OTHERS}?limit=1")["metadata"]["continue"]
    text, revision = by.member(), by.stage.admin("GET", "/v1/status")["revision"]
    made_up = [_page(revision, key) for key in ("workload/bolt/a", "secret/bolt/", "token/", "workload/acm", "node/n1")]
    found = [by.get(f"{path}?continue={one}", text) for one in (page, *made_up) for path in (MINE, "/v1/workloads")]
    assert all(b"bolt" not in one.body for one in found)
    return found


@attack(400, "malformed")
def a_page_that_is_none(by: Intruder) -> list[Refusal]:
    """A17: no page of any list: torn, of numbers that are none, or far too large."""
    text = by.member()
    broken = ["x", "AAAA", "%00", _page(0, "workload/acme/a"), _page(-1, "workload/acme/a"), _page(1, ""), "a" * 10_000]
    broken += [_page(1 << 63, "workload/acme/a"), _page(10**40, "workload/acme/a"), _page(1 << 62, "workload/acme/a")]
    return [by.get(f"{MINE}?continue={one}", text) for one in broken]


def _page(revision: int, key: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, key]).encode()).decode().rstrip("=")


@attack(422, "invalid")
def an_owner_in_another_tenant(by: Intruder) -> list[Refusal]:
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
def what_is_reserved(by: Intruder) -> list[Refusal]:
    """A19: labels, annotations, finalizers and priorities of Remit's own; by members, and by admins too."""
    text, root = by.member(), by.stage.server.token
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
def a_class_that_nobody_granted(by: Intruder) -> list[Refusal]:
    """A19: a member makes its own work more urgent than others', in every way in which work is declared."""
    text, name = by.member(), f"c-{by.name}"
    urgent = {"apiVersion": "remit/v1", "kind": "PriorityClass", "metadata": {"name": name}, "spec": {"value": 1_000}}
    by.stage.admin("POST", "/v1/priorityclasses", urgent)
    made, plain = workload(f"urgent-{by.name}"), workload(f"plain-{by.name}")
    made["spec"]["priorityClass"] = name
    assert by.ask("POST", MINE, plain, text).status == 201
    plain["spec"]["priorityClass"] = name
    place, merge = f"{MINE}/{plain['metadata']['name']}", {"Content_Type": "application/merge-patch+json"}
    found = [by.ask("POST", MINE, made, text), by.ask("PUT", place, plain, text)]
    return [*found, by.ask("PATCH", place, {"spec": {"priorityClass": name}}, text, **merge)]


@attack(403)
def a_deputy_asked_to_touch_anothers(by: Intruder) -> list[Refusal]:
    """A20: what is asked of the authority, a plan or a controller is judged as its requester."""
    text, theirs = by.member(), workload("web", "bolt")
    until = {"scope": {"tenant": "bolt"}, "effect": {"pauseExpansion": {}}, "ttl": "1h", "reason": "x", "author": "x"}
    override = {"apiVersion": "remit/v1", "kind": "Override", "metadata": {"name": "x"}, "spec": until}
    found = [by.ask("POST", "/v1/apply", [theirs], text), by.ask("POST", "/v1/apply", [workload("mine"), theirs], text)]
    found += [by.ask("POST", "/v1/plan", [theirs], text), by.ask("POST", "/v1/capacity", [theirs], text)]
    found += [by.ask("POST", "/v1/overrides", override, text), by.ask("POST", "/v1/secrets/rotate", None, text)]
    found += [by.ask("POST", "/v1/nodes", node("mine"), text), by.get("/v1/account?regarding=workload/bolt/web", text)]
    assert by.stage.server.ask("GET", f"{MINE}/mine").status == 404, "nothing of a batch is applied"
    return [
        *found,
        by.get("/v1/support", text),
        by.get("/v1/backup", text),
        by.get("/v1/nodes", text),
        by.get("/v1/tokens", text),
    ]


@attack(200)
def a_dump_of_everything(by: Intruder) -> list[Refusal]:
    """A21: what a server tells of itself and of its objects has no secret in it, not even for an admin."""
    root = by.stage.server.token
    paths = ("/v1/support", "/v1/secrets", "/v1/tenants/acme/secrets/db", "/v1/audit", "/v1/account", "/metrics", "/v1/tokens")
    found = [by.get(path, root) for path in paths]
    found.append(by.ask("POST", "/v1/plan", [secret("db", password=CANARY + "2")], root))
    for one in found:
        told = one.body.decode()
        assert CANARY not in told
        assert root not in told
        assert not any(text in told for text in by.stage.tokens.values())
    for file in sorted(by.stage.server.data.rglob("*")):
        if file.is_file() and file.name not in ("token", "seal.keys"):
            assert CANARY.encode() not in file.read_bytes(), f"{file.name} has it in the clear"
    return found
