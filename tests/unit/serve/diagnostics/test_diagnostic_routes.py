"""Is what is looked at over HTTP what was just written, and does a bad question get a good answer?"""

from __future__ import annotations

from typing import Any

from remit.model.claims import Accepted, Acquire, Actor, AnyClaim, Bind, Mark, Move, Role
from remit.model.kinds import NodeHealth
from remit.model.resources import Duration
from tests.unit.serve.in_memory_server import Api, node, story, tenant, workload

TTL = Duration(60_000)


async def acting(asked: Api, role: Role, lease: str = "") -> Actor:
    """Somebody who may act in this role."""
    name = lease or role.value
    verdict = await asked.desk.authority.client(Actor(name, role)).submit(Acquire(name, TTL))
    assert isinstance(verdict, Accepted), verdict
    return Actor(name, role, name, verdict.number)


async def must(asked: Api, actor: Actor, *claims: AnyClaim) -> None:
    for verdict in await asked.desk.authority.client(actor).submit_many(claims):
        assert isinstance(verdict, Accepted), verdict


async def revision(asked: Api, key: str) -> int:
    row = await asked.store.get(key)
    assert row is not None
    return row.revision


async def furnished(asked: Api) -> None:
    """A node that takes work, and a workload of which two replicas wait."""
    await asked.must("POST", "/v1/apply", [tenant(), node("n1"), workload("web", replicas=2)])
    nodes = await acting(asked, Role.NODES)
    await must(asked, nodes, Mark("n1", await revision(asked, "node/n1"), NodeHealth.READY))


@story
async def test_whoever_writes_and_then_asks_why__is_told_of_what_was_written(asked: Api) -> None:
    await furnished(asked)
    told = await asked.must("GET", "/v1/tenants/acme/workloads/web/explain?node=n1")
    assert told["stages"] == {"queued": 2} and told["limit"] == "queued"
    assert told["groups"][0]["waits"]["verdict"] == "now" and told["there"]["fits"]
    one = await asked.must("GET", "/v1/tenants/acme/replicas/web-0/explain")
    assert (one["phase"], one["waits"]["passage"]["fits"]) == ("pending", 1)


@story
async def test_a_plan__tells_what_the_apply_then_does_and_is_held_to_its_revision(asked: Api) -> None:
    await furnished(asked)
    wanted = [workload("web", replicas=4), workload("huge", template={"command": ["x"], "resources": {"cpu": "64"}})]
    plan = await asked.must("POST", "/v1/plan", wanted)
    web, huge = plan["items"]
    assert (web["action"], web["diff"]) == ("replace", [{"path": "spec.replicas", "before": 2, "after": 4}])
    assert (web["placement"]["wanted"], web["placement"]["placed"]) == (2, 2)
    assert huge["placement"]["waits"]["verdict"] == "never"
    assert (await asked.get("/v1/tenants/acme/workloads/web")).json["spec"]["replicas"] == 2
    done = await asked.must("POST", f"/v1/apply?ifUnchanged={plan['revision']}", wanted)
    assert [one["action"] for one in done["results"]] == ["replaced", "created"]
    again = await asked.ask("POST", f"/v1/apply?ifUnchanged={plan['revision']}", wanted)
    assert again.status == 412


@story
async def test_a_plan_of_what_is_new__tells_where_its_first_replicas_would_go_and_they_come_with_it(asked: Api) -> None:
    await furnished(asked)
    wanted = [workload("new", replicas=3)]
    (item,) = (await asked.must("POST", "/v1/plan", wanted))["items"]
    assert item["action"] == "create"
    assert (item["placement"]["wanted"], item["placement"]["placed"]) == (3, 3)
    tried = await asked.must("POST", "/v1/apply?dryRun=true", wanted)
    assert tried["results"][0]["action"] == "created"
    assert len((await asked.must("GET", "/v1/tenants/acme/replicas"))["items"]) == 2, "those of before"
    done = await asked.must("POST", "/v1/apply", wanted)
    assert [one["action"] for one in done["results"]] == ["created"]
    told = (await asked.must("GET", "/v1/tenants/acme/replicas"))["items"]
    assert [one["metadata"]["name"] for one in told] == ["new-0", "new-1", "new-2", "web-0", "web-1"]
    made = await asked.must("GET", "/v1/tenants/acme/workloads/new")
    assert {one["metadata"]["revision"] for one in told[:3]} == {made["metadata"]["revision"]}
    await asked.must("PUT", "/v1/tenants/acme/workloads/new", workload("new", replicas=5))
    assert len((await asked.must("GET", "/v1/tenants/acme/replicas"))["items"]) == 5, "more are the controller's to make"


@story
async def test_a_plan_of_what_would_be_refused__says_so_and_refuses_what_cannot_be_read(asked: Api) -> None:
    plan = await asked.must("POST", "/v1/plan", [workload("web", "nobody")])
    problem = plan["items"][0]["problem"]
    assert (plan["items"][0]["action"], problem["code"]) == ("refused", "not_found") and problem["cure"]
    wrong = await asked.ask("POST", "/v1/plan", [workload("web", replicas=-1), workload("api", oops=1)])
    assert wrong.status == 422 and {one["manifest"] for one in wrong.json["problems"]} == {0, 1}


@story
async def test_capacity__takes_one_workload_and_nothing_else(asked: Api) -> None:
    await furnished(asked)
    assert (await asked.must("POST", "/v1/capacity", workload("more")))["hard"]["replicas"] == 8
    for body, code, word in ((tenant(), 422, "Tenant"), ([workload("a"), workload("b")], 422, "2 manifests"), (b"{", 400, "")):
        refused = await asked.ask("POST", "/v1/capacity", body)
        assert refused.status == code and word in refused.json["detail"] and refused.json["cure"]
    assert (await asked.ask("POST", "/v1/capacity?count=0", workload("more"))).json["field"] == "count"


async def bound(asked: Api) -> Actor:
    """web-0 serves on n1, as far as the rows say."""
    await furnished(asked)
    scheduler = await acting(asked, Role.SCHEDULER)
    key = "replica/acme/web-0"
    await must(asked, scheduler, Bind(key, await revision(asked, key), "n1", "tenant/acme"))
    agent = await acting(asked, Role.AGENT, "agent/n1")
    for transition in ("start", "run", "ready"):
        await must(asked, agent, Move(key, await revision(asked, key), transition, 1))
    await must(asked, await acting(asked, Role.ENDPOINTS), Move(key, await revision(asked, key), "serve"))
    return agent


@story
async def test_endpoints_are_listed_and_watched(asked: Api) -> None:
    agent = await bound(asked)
    told = await asked.must("GET", "/v1/tenants/acme/endpoints/web?limit=1000")
    assert [one["replica"] for one in told["items"]] == ["web-0"] and told["kind"] == "EndpointList"
    assert (await asked.must("GET", "/v1/tenants/acme/endpoints/api"))["items"] == []
    async with asked.watch(f"/v1/endpoints?watch=true&after={told['metadata']['revision']}") as watch:
        await must(asked, agent, Move("replica/acme/web-0", await revision(asked, "replica/acme/web-0"), "unready", 1))
        line = await watch.until("deleted")
        assert line["object"]["replica"] == "web-0"
        assert (await watch.until("bookmark"))["revision"] >= line["revision"]


@story
async def test_the_account_of_a_replica__tells_who_moved_it(asked: Api) -> None:
    await bound(asked)
    told = (await asked.must("GET", "/v1/account?regarding=replica/acme/web-0"))["items"]
    assert [(one["reason"], one["source"]) for one in told] == [
        ("Bind", "scheduler"),
        ("Start", "agent/n1"),
        ("Run", "agent/n1"),
        ("Ready", "agent/n1"),
        ("Serve", "endpoints"),
    ]
    assert all(one["at"] for one in told)
    assert len((await asked.must("GET", "/v1/account?limit=2"))["items"]) == 2
    async with asked.watch("/v1/account?watch=true&regarding=tenant/late") as watch:
        await asked.must("POST", "/v1/tenants", tenant("late"))
        assert (await watch.until("changed"))["object"]["reason"] == "Apply"


@story
async def test_output_of_what_cannot_be_asked__is_a_problem_with_a_cure(asked: Api) -> None:
    await furnished(asked)
    answers: dict[str, Any] = {
        "/v1/tenants/acme/replicas/web-0/logs": 404,
        "/v1/tenants/acme/replicas/web-9/logs?follow=true": 404,
        "/v1/tenants/acme/replicas/web-0/logs?stream=stdlog": 400,
        "/v1/tenants/acme/replicas/web-0/logs?tail=-1": 400,
        "/v1/tenants/acme/replicas/web-0/logs?lines=5": 400,
    }
    for path, status in answers.items():
        refused = await asked.get(path)
        assert refused.status == status and refused.json["cure"], path


@story
async def test_use__is_told_of_nodes_that_have_said_nothing_yet(asked: Api) -> None:
    await bound(asked)
    (one,) = (await asked.must("GET", "/v1/top/nodes"))["items"]
    assert (one["node"], one["capacity"]["cpuMilli"], one["requests"]["cpuMilli"]) == ("n1", 8_000, 1_000)
    assert one["replicas"] == 1 and one.get("ageMs") is None
    assert (await asked.must("GET", "/v1/top/replicas?tenant=acme"))["items"] == []
