"""Progress of workloads as the server returns it: one, a page, and what callers of one tenant see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
from msgspec.structs import replace

from remit.model.claims import Bind, Move, RecordDecision
from remit.model.metadata import RecordMetadata
from remit.model.records import Decision, DecisionSpec, Replica
from remit.model.roles import Role
from remit.model.wire.api_types import WorkloadLimit, WorkloadProgressItem
from remit.serve.diagnostics import workload_progress
from remit.serve.diagnostics.workload_progress import WorkloadProgressReader
from remit.serve.http.replies import ApiProblem
from tests.unit.observation.row_fixtures import replica, work
from tests.unit.serve.auth.user_tokens import token, wait_for_token
from tests.unit.serve.in_memory_server import Api, http_test, tenant, workload
from tests.unit.serve.role_actors import acquire_role, prepare, revision, submit_accepted
from tests.unit.serve.watch_cache_fixtures import CacheFixture, InlineOffload

T = TypeVar("T")


def reader(cache: CacheFixture) -> WorkloadProgressReader:
    return WorkloadProgressReader(cache.view_snapshots(), cache.offload)


def read(cache: CacheFixture, name: str) -> WorkloadProgressItem:
    return asyncio.run(reader(cache).read("t1", name))


# -- computed from the watch cache ---------------------------------------------------------------------------------------------


def test_progress_follows_changes_of_replicas() -> None:
    cache = CacheFixture(*work("web", replicas=2), replica("web", 0, "serving", "n1"), replica("web", 1))
    progress = reader(cache)

    def stages() -> dict[str, int]:
        return asyncio.run(progress.read("t1", "web")).stages

    assert stages() == {"queued": 1, "serving": 1}
    cache.apply(replica("web", 1, "starting", "n1"))
    assert stages() == {"starting": 1, "serving": 1}
    cache.apply(drop=["replica/t1/web-1"])
    assert stages() == {"serving": 1}
    cache.apply(replica("web", 0, "released"))
    assert stages() == {}
    cache.apply(drop=["replica/t1/web-0"])
    item = asyncio.run(progress.read("t1", "web"))
    assert (item.desired, item.stages, item.limit.code, item.cache_revision) == (2, {}, "missing", cache.revision)


def test_phase_that_limits_has_the_reason_of_one_of_its_replicas() -> None:
    waiting = replica("web", 1, "starting", "n1", reason="fetching 3 MiB")
    cache = CacheFixture(*work("web", replicas=3), replica("web", 0, "serving", "n1"), replica("web", 2, "starting"), waiting)
    assert read(cache, "web").limit == WorkloadLimit(code="starting", detail="fetching 3 MiB")


def test_finished_job_has_no_limit() -> None:
    ended = [replica("batch", 0, "released", result="ok"), replica("batch", 1, "finished", result="ok")]
    cache = CacheFixture(*work("batch", type_="job", replicas=2), *ended)
    item = read(cache, "batch")
    assert (item.ready, item.done, item.desired, item.stages, item.limit) == (2, 2, 2, {"done": 2}, WorkloadLimit())
    cache = CacheFixture(*work("batch", type_="job", replicas=2), *(replace_result(one, "failed") for one in ended))
    assert (read(cache, "batch").done, read(cache, "batch").stages) == (0, {"finished": 1})


def replace_result(one: Replica, result: str) -> Replica:
    return replace(one, status=replace(one.status, result=result))


def test_unknown_workload_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ApiProblem) as failure:
        read(CacheFixture(*work("web")), "wep")
    document = failure.value.document
    assert (document.status, document.code, document.cure) == (404, "not_found", "did you mean web?")


def test_page_ends_once_enough_replicas_were_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_progress, "REPLICAS_MAX", 3)
    names = ("a", "b", "c", "d")
    pending = [replica(name, index) for name in names for index in range(2)]
    pages = reader(CacheFixture(*(row for name in names for row in work(name, replicas=2)), *pending))

    async def list_all() -> list[list[str]]:
        found, after = [], ""
        while True:
            _, items, after = await pages.read_page("workload/t1/", after, 3)
            found.append([item.name for item in items])
            if not after:
                return found

    assert asyncio.run(list_all()) == [["a", "b"], ["c", "d"]]


class TimedOffload(InlineOffload):
    """Measures the CPU time of offloaded work."""

    spent_ms = 0.0

    async def _do(self, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        self.spent_ms += (time.process_time() - began) * 1_000
        return result


def test_large_page_leaves_the_event_loop_free() -> None:
    """The work on the event loop is to collect rows; it does not grow with what has to be decoded."""
    names = [f"w{number}" for number in range(100)]
    members = [replica(name, index, "pending" if index % 2 else "serving") for name in names for index in range(100)]
    cache = CacheFixture(*(row for name in names for row in work(name, replicas=100)), *members)
    decided = DecisionSpec(replicas={f"t1/{name}-1": "" for name in names}, verdict="waiting", reason="no_room")
    offload = TimedOffload()
    pages = WorkloadProgressReader(cache.view_snapshots(), offload)

    async def run() -> tuple[float, list[WorkloadProgressItem]]:
        await cache.store_only(Decision(metadata=RecordMetadata(name="d1", tenant="t1"), spec=decided))
        began = time.process_time()
        _, items, _ = await pages.read_page("workload/t1/", "", 500)
        return (time.process_time() - began) * 1_000, items

    total_ms, items = asyncio.run(run())
    assert len(items) == 100 and all(item.stages == {"queued": 50, "serving": 50} for item in items)
    assert total_ms - offload.spent_ms < 100, "milliseconds of CPU time on the event loop"


# -- routes --------------------------------------------------------------------------------------------------------------------


@http_test
async def test_route_reflects_the_preceding_write_and_the_latest_decision(api: Api) -> None:
    await prepare(api)
    path = "/v1/tenants/acme/workloads/web/progress"
    item = await api.must("GET", path)
    assert (item["tenant"], item["name"], item["desired"], item["stages"]) == ("acme", "web", 2, {"queued": 2})
    assert item["limit"] == {"code": "queued", "detail": "no placement attempt yet"}
    assert item["revision"] == await revision(api, "workload/acme/web") <= item["cacheRevision"]
    scheduler = await acquire_role(api, Role.SCHEDULER)
    refused = DecisionSpec(replicas={"acme/web-0": "", "acme/web-1": ""}, verdict="waiting", reason="no_room", detail="full")
    await submit_accepted(api, scheduler, RecordDecision("d1", "acme", refused))
    assert (await api.must("GET", path))["limit"] == {"code": "no_room", "detail": "full"}
    key = "replica/acme/web-0"
    await submit_accepted(api, scheduler, Bind(key, await revision(api, key), "n1", "tenant/acme"))
    bound = await api.must("GET", path)
    assert (bound["placed"], bound["stages"], bound["limit"]["code"]) == (1, {"queued": 1, "bound": 1}, "no_room")
    agent = await acquire_role(api, Role.AGENT, "agent/n1")
    await submit_accepted(api, agent, Move(key, await revision(api, key), "start", 1))
    assert (await api.must("GET", path))["stages"] == {"queued": 1, "starting": 1}
    unknown = await api.get("/v1/tenants/acme/workloads/wep/progress")
    assert (unknown.status, unknown.json["code"], unknown.json["cure"]) == (404, "not_found", "did you mean web?")


@http_test
async def test_list_is_paged_and_filtered_by_tenant(api: Api) -> None:
    made = [tenant("acme"), tenant("bolt"), *(workload(name, replicas=2) for name in ("a", "b", "c")), workload("d", "bolt")]
    await api.must("POST", "/v1/apply", made)
    page = await api.must("GET", "/v1/workloads/progress?tenant=acme&limit=2")
    assert page["kind"] == "WorkloadProgressList"
    assert [(item["name"], item["stages"]) for item in page["items"]] == [("a", {"queued": 2}), ("b", {"queued": 2})]
    rest = await api.must("GET", f"/v1/workloads/progress?tenant=acme&limit=2&continue={page['metadata']['continue']}")
    assert [item["name"] for item in rest["items"]] == ["c"] and not rest["metadata"].get("continue")
    everything = (await api.must("GET", "/v1/workloads/progress"))["items"]
    assert [(item["tenant"], item["name"]) for item in everything][-1] == ("bolt", "d") and len(everything) == 4
    assert (await api.get("/v1/workloads/progress?continue=x")).status == 400
    elsewhere = await api.get(f"/v1/workloads/progress?tenant=bolt&continue={page['metadata']['continue']}")
    assert elsewhere.status == 403


ANN = "a-token-of-ann-of-acme"


@http_test
async def test_callers_of_a_tenant_see_only_their_workloads(api: Api) -> None:
    await api.must("POST", "/v1/apply", [tenant("acme"), tenant("bolt"), workload("mine"), workload("theirs", "bolt")])
    await api.must("POST", "/v1/tokens", token("ann", ANN, "viewer", tenant="acme"))
    await wait_for_token(api, ANN)
    for path in ("/v1/workloads/progress", "/v1/workloads/progress?tenant=acme", "/v1/workloads/progress?tenant=bolt"):
        assert [item["name"] for item in (await api.must("GET", path, token=ANN))["items"]] == ["mine"], path
    assert (await api.get("/v1/tenants/acme/workloads/mine/progress", token=ANN)).status == 200
    assert (await api.get("/v1/tenants/bolt/workloads/theirs/progress", token=ANN)).status == 404
    assert (await api.get("/v1/workloads/progress", token="not-a-token-at-all")).status == 401
