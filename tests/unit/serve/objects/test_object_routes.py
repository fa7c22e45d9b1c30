"""Object routes: objects are read back as declared, written once, and only at the expected revision."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.unit.serve.in_memory_server import Api, http_test, node, secret, tenant, workload

WORKLOADS = "/v1/tenants/acme/workloads"


@http_test
async def test_created_object_is_read_back_with_revision(api: Api) -> None:
    made = await api.ask("POST", "/v1/tenants", tenant())
    assert made.status == 201
    assert made.headers["location"] == "/v1/tenants/acme"
    found = await api.get("/v1/tenants/acme")
    assert found.status == 200 and found.body == made.body
    assert found.headers["etag"] == f'"{found.json["metadata"]["revision"]}"'
    assert found.json["apiVersion"] == "remit/v1" and found.json["spec"]["quota"]["cpu"] == "100"


@http_test
async def test_creating_existing_object_gets_409(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    again = await api.ask("POST", "/v1/tenants", tenant())
    assert (again.status, again.json["code"]) == (409, "exists")
    assert again.headers["content-type"] == "application/problem+json"


@http_test
async def test_put_creates_and_replaces_at_expected_revision(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    made = await api.ask("PUT", f"{WORKLOADS}/web", workload("web"))
    assert made.status == 201
    seen = made.headers["etag"]
    bigger = await api.ask("PUT", f"{WORKLOADS}/web", workload("web", replicas=3), headers={"If-Match": seen})
    assert (bigger.status, bigger.json["spec"]["replicas"], bigger.json["metadata"]["generation"]) == (200, 3, 2)
    late = await api.ask("PUT", f"{WORKLOADS}/web", workload("web", replicas=9), headers={"If-Match": seen})
    assert (late.status, late.json["code"]) == (412, "revision")
    assert (await api.get(f"{WORKLOADS}/web")).json["spec"]["replicas"] == 3
    taken = await api.ask("PUT", f"{WORKLOADS}/web", workload("web"), headers={"If-None-Match": "*"})
    assert (taken.status, taken.json["code"]) == (412, "exists")
    missing = await api.ask("PUT", f"{WORKLOADS}/other", workload("other"), headers={"If-Match": "*"})
    assert missing.status == 412
    gone = await api.ask("PUT", f"{WORKLOADS}/other", workload("other"), headers={"If-Match": '"7"'})
    assert (gone.status, gone.json["code"]) == (412, "not_found")


@http_test
async def test_patch_changes_named_fields_and_null_removes(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant(weight=5))
    patched = await patch(api, "/v1/tenants/acme", {"metadata": {"labels": {"team": "a"}}, "spec": {"weight": None}})
    assert patched.status == 200
    assert patched.json["metadata"]["labels"] == {"team": "a"}
    assert "weight" not in patched.json["spec"] and patched.json["spec"]["quota"]["cpu"] == "100"
    wrong = await patch(api, "/v1/tenants/acme", {"spec": {"weight": 0}})
    assert (wrong.status, wrong.json["code"], wrong.json["field"]) == (422, "invalid", "spec.weight")
    renamed = await patch(api, "/v1/tenants/acme", {"metadata": {"name": "other"}})
    assert (renamed.status, renamed.json["field"]) == (422, "metadata.name")
    status_patch = await patch(api, "/v1/tenants/acme", {"status": {"phase": "x"}})
    assert status_patch.status == 422


@http_test
async def test_concurrent_patches_are_all_applied(api: Api) -> None:
    """Each reads, merges and submits; a slower one reads again."""
    await api.must("POST", "/v1/tenants", tenant())
    done = await asyncio.gather(*(patch(api, "/v1/tenants/acme", {"metadata": {"labels": {f"l{i}": "x"}}}) for i in range(6)))
    assert [reply.status for reply in done] == [200] * 6
    assert len((await api.get("/v1/tenants/acme")).json["metadata"]["labels"]) == 6


@http_test
async def test_patch_with_revision_is_not_retried(api: Api) -> None:
    made = await api.ask("POST", "/v1/tenants", tenant())
    await patch(api, "/v1/tenants/acme", {"spec": {"weight": 2}})
    late = await patch(api, "/v1/tenants/acme", {"spec": {"weight": 3}}, **{"If-Match": made.headers["etag"]})
    assert (late.status, late.json["code"]) == (412, "revision")


async def patch(api: Api, path: str, change: Any, **headers: str) -> Any:
    return await api.ask("PATCH", path, change, headers={"content-type": "application/merge-patch+json", **headers})


@http_test
async def test_delete_removes_or_marks_object(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", WORKLOADS, workload("web", replicas=0))
    await api.must("POST", WORKLOADS, workload("busy"))
    held = workload("held", replicas=0)
    held["metadata"]["finalizers"] = ["mine/hold"]
    await api.must("POST", WORKLOADS, held)
    in_use = await api.ask("DELETE", "/v1/tenants/acme")
    assert (in_use.status, in_use.json["code"]) == (409, "in_use")
    gone = await api.ask("DELETE", f"{WORKLOADS}/web")
    assert (gone.status, gone.json["action"]) == (200, "deleted")
    for name in ("held", "busy"):  # held by a finalizer, and by the replica that was created with it
        marked = await api.ask("DELETE", f"{WORKLOADS}/{name}")
        assert (marked.status, marked.json["action"]) == (202, "marked")
    assert (await api.get(f"{WORKLOADS}/web")).status == 404
    for name in ("held", "busy"):
        assert (await api.get(f"{WORKLOADS}/{name}")).json["metadata"]["deleting"] is True
    again = await api.ask("DELETE", f"{WORKLOADS}/web")
    assert (again.status, again.json["code"]) == (404, "not_found")


@http_test
async def test_dry_run_predicts_result_and_writes_nothing(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    before = await api.store.revision()
    made = await api.ask("POST", f"{WORKLOADS}?dryRun=true", workload("web"))
    assert made.status == 200 and made.json["metadata"]["generation"] == 1
    wrong = await api.ask("POST", "/v1/tenants/nobody/workloads?dryRun=true", workload("web", "nobody"))
    assert wrong.status in (404, 409, 422)
    changed = await api.ask(
        "PATCH",
        "/v1/tenants/acme?dryRun=true",
        {"spec": {"weight": 4}},
        headers={"content-type": "application/merge-patch+json"},
    )
    assert changed.json["spec"]["weight"] == 4
    gone = await api.ask("DELETE", "/v1/tenants/acme?dryRun=true")
    assert gone.json["action"] == "deleted"
    assert (await api.get(f"{WORKLOADS}/web")).status == 404
    keys = [row.key for row in (await api.store.range("", limit=100)).rows if row.revision > before]
    assert all(key == "head" or key.startswith("batch/") for key in keys)  # only heartbeats of the authority


@http_test
async def test_retry_under_operation_id_gets_same_answer_and_acts_once(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    status = (await api.get("/v1/status")).json
    mine = {"Remit-Operation-Id": f"{status['incarnation']}.{status['window']}.mine"}
    first = await api.ask("POST", WORKLOADS, workload("web"), headers=mine)
    again = await api.ask("POST", WORKLOADS, workload("web"), headers=mine)
    assert (first.status, again.status) == (201, 201) and first.body == again.body
    assert again.headers["remit-operation-id"] == mine["Remit-Operation-Id"]
    other = await api.ask("POST", WORKLOADS, workload("other"), headers=mine)
    assert (other.status, other.json["code"]) == (409, "operation_mismatch")
    old = await api.ask("POST", WORKLOADS, workload("x"), headers={"Remit-Operation-Id": "gone.1.x"})
    assert (old.status, old.json["code"]) == (409, "operation_expired")
    bad = await api.ask("POST", WORKLOADS, workload("x"), headers={"Remit-Operation-Id": "nonsense"})
    assert (bad.status, bad.json["field"]) == (400, "Remit-Operation-Id")


@http_test
async def test_retried_patch_is_found_by_operation_id(api: Api) -> None:
    """The first answer was lost, and others have written since: the same id does not patch twice."""
    await api.must("POST", "/v1/tenants", tenant())
    status = (await api.get("/v1/status")).json
    mine = {"Remit-Operation-Id": f"{status['incarnation']}.{status['window']}.p"}
    first = await patch(api, "/v1/tenants/acme", {"spec": {"weight": 2}}, **mine)
    await patch(api, "/v1/tenants/acme", {"spec": {"weight": 7}})
    again = await patch(api, "/v1/tenants/acme", {"spec": {"weight": 2}}, **mine)
    assert again.status == 200 and again.body == first.body
    assert (await api.get("/v1/tenants/acme")).json["spec"]["weight"] == 7


@http_test
async def test_other_patch_under_used_id_gets_409(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", "/v1/tenants", tenant("other"))
    status = (await api.get("/v1/status")).json
    mine = {"Remit-Operation-Id": f"{status['incarnation']}.{status['window']}.q"}
    await patch(api, "/v1/tenants/acme", {"spec": {"weight": 2}}, **mine)
    for path, weight in (("/v1/tenants/acme", 3), ("/v1/tenants/other", 2)):
        other = await patch(api, path, {"spec": {"weight": weight}}, **mine)
        assert (other.status, other.json["code"]) == (409, "operation_mismatch")
    assert (await patch(api, "/v1/tenants/acme", {"spec": {"weight": 2}}, **mine)).status == 200


@http_test
async def test_no_answer_or_watch_shows_secret_values(api: Api) -> None:
    """A21."""
    await api.must("POST", "/v1/tenants", tenant())
    path = "/v1/tenants/acme/secrets"
    async with api.watch(f"{path}?watch=true") as watched:
        await watched.until("bookmark")
        answers = [
            await api.ask("POST", path, secret("db", password="hunter2")),
            await api.get(f"{path}/db"),
            await api.get(path),
            await api.get("/v1/secrets"),
            await api.ask("PUT", f"{path}/db?dryRun=true", secret("db", password="hunter2", user="hunter2")),
            await patch(api, f"{path}/db", {"spec": {"data": {"more": "hunter2"}}}),
        ]
        seen = [await watched.until("changed", "db"), await watched.until("changed", "db")]
    assert all(reply.status < 300 for reply in answers)
    assert all("hunter2" not in text for text in [*(reply.body.decode() for reply in answers), json.dumps(seen)])
    assert answers[1].json["spec"]["data"] == {"password": ""}
    async with api.watch(f"{path}?watch=true&after=1") as watched:
        line = await watched.until("changed", "db")
    assert line["object"]["spec"]["data"] == {"password": ""}  # in its first version: past values are redacted too
    row = await api.store.get("secret/acme/db")
    assert row is not None and b"hunter2" not in row.value


@http_test
async def test_body_must_agree_with_path(api: Api) -> None:
    """A16."""
    await api.must("POST", "/v1/tenants", tenant())
    for path, body, field in (
        (f"{WORKLOADS}/api", workload("web"), "metadata.name"),
        ("/v1/tenants/other/workloads/web", workload("web"), "metadata.tenant"),
        ("/v1/tenants/acme/configs/web", workload("web"), "kind"),
    ):
        reply = await api.ask("PUT", path, body)
        assert (reply.status, reply.json["code"], reply.json["field"]) == (422, "invalid", field)
        assert reply.json["cure"]


@http_test
async def test_all_validation_problems_are_reported_at_once(api: Api) -> None:
    wrong = workload("web", replicas=-1, replicaz=3)
    wrong["metadata"]["name"] = "NOT A NAME"
    reply = await api.ask("POST", WORKLOADS, wrong)
    assert (reply.status, reply.json["code"]) == (422, "invalid")
    fields = {problem["field"] for problem in reply.json["problems"]}
    assert {"metadata.name", "spec.replicas", "spec.replicaz"} <= fields
    assert "did you mean" in next(p["cure"] for p in reply.json["problems"] if p["field"] == "spec.replicaz")


@http_test
async def test_default_node_health_is_shown(api: Api) -> None:
    await api.must("POST", "/v1/nodes", node("n1"))
    assert (await api.get("/v1/nodes/n1")).json["status"]["health"] == "joining"


@http_test
async def test_name_with_slash_is_found(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", WORKLOADS, workload("web"))
    made = await api.get("/v1/tenants/acme/generations/web%2F00000001")
    assert made.status == 200 and made.json["spec"]["workload"] == "web"


@http_test
async def test_internal_records_are_read_only(api: Api) -> None:
    reply = await api.ask("POST", "/v1/leases", {})
    assert (reply.status, reply.json["code"]) == (405, "method")
    assert reply.headers["allow"] == "GET, HEAD"
