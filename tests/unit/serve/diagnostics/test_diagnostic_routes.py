"""Diagnostic routes show what was just written, and invalid queries get an answer with a fix."""

from __future__ import annotations

from typing import Any

from remit.model.claims import Actor, Bind, Move
from remit.model.roles import Role
from tests.unit.serve.in_memory_server import Api, http_test, tenant, workload
from tests.unit.serve.role_actors import acquire_role, prepare, revision, submit_accepted


@http_test
async def test_explain_reflects_immediately_preceding_write(api: Api) -> None:
    await prepare(api)
    answer = await api.must("GET", "/v1/tenants/acme/workloads/web/explain?node=n1")
    assert answer["stages"] == {"queued": 2} and answer["limit"] == "queued"
    assert answer["groups"][0]["waits"]["verdict"] == "now" and answer["there"]["fits"]
    one = await api.must("GET", "/v1/tenants/acme/replicas/web-0/explain")
    assert (one["phase"], one["waits"]["passage"]["fits"]) == ("pending", 1)


@http_test
async def test_plan_predicts_apply_and_apply_is_bound_to_its_revision(api: Api) -> None:
    await prepare(api)
    manifests = [workload("web", replicas=4), workload("huge", template={"command": ["x"], "resources": {"cpu": "64"}})]
    plan = await api.must("POST", "/v1/plan", manifests)
    web, huge = plan["items"]
    assert (web["action"], web["diff"]) == ("replace", [{"path": "spec.replicas", "before": 2, "after": 4}])
    assert (web["placement"]["wanted"], web["placement"]["placed"]) == (2, 2)
    assert huge["placement"]["waits"]["verdict"] == "never"
    assert (await api.get("/v1/tenants/acme/workloads/web")).json["spec"]["replicas"] == 2
    done = await api.must("POST", f"/v1/apply?ifUnchanged={plan['revision']}", manifests)
    assert [one["action"] for one in done["results"]] == ["replaced", "created"]
    again = await api.ask("POST", f"/v1/apply?ifUnchanged={plan['revision']}", manifests)
    assert again.status == 412


@http_test
async def test_plan_of_new_workload_predicts_places_of_its_first_replicas(api: Api) -> None:
    await prepare(api)
    manifests = [workload("new", replicas=3)]
    (item,) = (await api.must("POST", "/v1/plan", manifests))["items"]
    assert item["action"] == "create"
    assert (item["placement"]["wanted"], item["placement"]["placed"]) == (3, 3)
    tried = await api.must("POST", "/v1/apply?dryRun=true", manifests)
    assert tried["results"][0]["action"] == "created"
    assert len((await api.must("GET", "/v1/tenants/acme/replicas"))["items"]) == 2, "only the earlier replicas"
    done = await api.must("POST", "/v1/apply", manifests)
    assert [one["action"] for one in done["results"]] == ["created"]
    answer = (await api.must("GET", "/v1/tenants/acme/replicas"))["items"]
    assert [one["metadata"]["name"] for one in answer] == ["new-0", "new-1", "new-2", "web-0", "web-1"]
    made = await api.must("GET", "/v1/tenants/acme/workloads/new")
    assert {one["metadata"]["revision"] for one in answer[:3]} == {made["metadata"]["revision"]}
    await api.must("PUT", "/v1/tenants/acme/workloads/new", workload("new", replicas=5))
    assert len((await api.must("GET", "/v1/tenants/acme/replicas"))["items"]) == 5, "the controller creates the others later"


@http_test
async def test_plan_reports_refusals_per_item_and_rejects_unreadable_manifests(api: Api) -> None:
    plan = await api.must("POST", "/v1/plan", [workload("web", "nobody")])
    problem = plan["items"][0]["problem"]
    assert (plan["items"][0]["action"], problem["code"]) == ("refused", "not_found") and problem["cure"]
    wrong = await api.ask("POST", "/v1/plan", [workload("web", replicas=-1), workload("api", oops=1)])
    assert wrong.status == 422 and {one["manifest"] for one in wrong.json["problems"]} == {0, 1}


@http_test
async def test_capacity_accepts_exactly_one_workload(api: Api) -> None:
    await prepare(api)
    assert (await api.must("POST", "/v1/capacity", workload("more")))["hard"]["replicas"] == 8
    for body, code, text in ((tenant(), 422, "Tenant"), ([workload("a"), workload("b")], 422, "2 manifests"), (b"{", 400, "")):
        refused = await api.ask("POST", "/v1/capacity", body)
        assert refused.status == code and text in refused.json["detail"] and refused.json["cure"]
    assert (await api.ask("POST", "/v1/capacity?count=0", workload("more"))).json["field"] == "count"


async def bound(api: Api) -> Actor:
    """Move web-0 to ready on n1, as far as rows show."""
    await prepare(api)
    scheduler = await acquire_role(api, Role.SCHEDULER)
    key = "replica/acme/web-0"
    await submit_accepted(api, scheduler, Bind(key, await revision(api, key), "n1", "tenant/acme"))
    agent = await acquire_role(api, Role.AGENT, "agent/n1")
    for transition in ("start", "run", "ready"):
        await submit_accepted(api, agent, Move(key, await revision(api, key), transition, 1))
    await submit_accepted(api, await acquire_role(api, Role.ENDPOINTS), Move(key, await revision(api, key), "serve"))
    return agent


@http_test
async def test_endpoints_are_listed_and_watched(api: Api) -> None:
    agent = await bound(api)
    answer = await api.must("GET", "/v1/tenants/acme/endpoints/web?limit=1000")
    assert [one["replica"] for one in answer["items"]] == ["web-0"] and answer["kind"] == "EndpointList"
    assert (await api.must("GET", "/v1/tenants/acme/endpoints/api"))["items"] == []
    async with api.watch(f"/v1/endpoints?watch=true&after={answer['metadata']['revision']}") as watch:
        await submit_accepted(api, agent, Move("replica/acme/web-0", await revision(api, "replica/acme/web-0"), "unready", 1))
        line = await watch.until("deleted")
        assert line["object"]["replica"] == "web-0"
        assert (await watch.until("bookmark"))["revision"] >= line["revision"]


@http_test
async def test_account_of_replica_names_source_of_each_transition(api: Api) -> None:
    await bound(api)
    answer = (await api.must("GET", "/v1/account?regarding=replica/acme/web-0"))["items"]
    assert [(one["reason"], one["source"]) for one in answer] == [
        ("Bound", "scheduler"),
        ("Starting", "agent/n1"),
        ("Running", "agent/n1"),
        ("Ready", "agent/n1"),
        ("AddedToEndpoints", "endpoints"),
    ]
    assert all(one["at"] for one in answer)
    assert len((await api.must("GET", "/v1/account?limit=2"))["items"]) == 2
    async with api.watch("/v1/account?watch=true&regarding=tenant/late") as watch:
        await api.must("POST", "/v1/tenants", tenant("late"))
        assert (await watch.until("changed"))["object"]["reason"] == "Applied"


@http_test
async def test_logs_of_unstarted_replica_and_invalid_options_get_problem_with_fix(api: Api) -> None:
    await prepare(api)
    answers: dict[str, Any] = {
        "/v1/tenants/acme/replicas/web-0/logs": 404,
        "/v1/tenants/acme/replicas/web-9/logs?follow=true": 404,
        "/v1/tenants/acme/replicas/web-0/logs?stream=stdlog": 400,
        "/v1/tenants/acme/replicas/web-0/logs?tail=-1": 400,
        "/v1/tenants/acme/replicas/web-0/logs?lines=5": 400,
    }
    for path, status in answers.items():
        refused = await api.get(path)
        assert refused.status == status and refused.json["cure"], path


@http_test
async def test_usage_lists_nodes_without_reports(api: Api) -> None:
    await bound(api)
    (one,) = (await api.must("GET", "/v1/top/nodes"))["items"]
    assert (one["node"], one["capacity"]["cpuMilli"], one["requests"]["cpuMilli"]) == ("n1", 8_000, 1_000)
    assert one["replicas"] == 1 and one.get("ageMs") is None
    assert (await api.must("GET", "/v1/top/replicas?tenant=acme"))["items"] == []
