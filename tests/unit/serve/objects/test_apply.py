"""Apply of many manifests: all validated first, ordered by dependency, answered one by one, and safe to retry."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from remit.model.claims import SetCondition
from remit.model.manifests.reader import read
from remit.model.metadata import Condition
from remit.model.roles import Role
from remit.serve.http.bodies import PROBLEMS_MAX, split_manifests, validate_manifests
from remit.serve.http.replies import ApiProblem
from remit.serve.objects.writes import apply_order
from tests.unit.serve.in_memory_server import Api, http_test, node, tenant, workload
from tests.unit.serve.role_actors import acquire_role, submit_accepted


def lines(*manifests: Any) -> bytes:
    return b"\n".join(json.dumps(manifest).encode() for manifest in manifests)


@http_test
async def test_manifests_may_precede_their_dependencies(api: Api) -> None:
    manifests = [workload("web"), tenant(), node("n1")]
    done = await api.must("POST", "/v1/apply", manifests)
    assert [(one["kind"], one["action"]) for one in done["results"]] == [
        ("Workload", "created"),
        ("Tenant", "created"),
        ("Node", "created"),
    ]
    assert done["results"][0]["generation"] == 1 and done["results"][0]["tenant"] == "acme"
    again = await api.must("POST", "/v1/apply", manifests)
    assert {one["action"] for one in again["results"]} == {"unchanged"}
    assert again["results"][0]["revision"] == done["results"][0]["revision"]
    changed = await api.must("POST", "/v1/apply", [workload("web", replicas=4), tenant(), node("n1")])
    assert [one["action"] for one in changed["results"]] == ["replaced", "unchanged", "unchanged"]
    assert changed["results"][0]["generation"] == 2


@http_test
async def test_manifests_may_be_array_lines_or_concatenated_documents(api: Api) -> None:
    for index, body in enumerate(
        (
            json.dumps([tenant("a0"), tenant("b0")]).encode(),
            lines(tenant("a1"), tenant("b1")),
            json.dumps(tenant("a2"), indent=2).encode() + b"\n" + json.dumps(tenant("b2"), indent=2).encode(),
            json.dumps(tenant("a3"), indent=2).encode(),
        )
    ):
        done = await api.must("POST", "/v1/apply", body, headers={"content-type": "application/x-ndjson"})
        expected = [f"a{index}", f"b{index}"] if index < 3 else ["a3"]
        assert [one["name"] for one in done["results"]] == expected


@http_test
async def test_one_invalid_manifest_prevents_whole_apply(api: Api) -> None:
    wrong = workload("web", replicas=-3)
    reply = await api.ask("POST", "/v1/apply", [tenant(), wrong, {"kind": "Nothing"}])
    assert (reply.status, reply.json["code"]) == (422, "invalid")
    problems = {(problem["manifest"], problem["field"]) for problem in reply.json["problems"]}
    assert (1, "spec.replicas") in problems and (2, "kind") in problems
    assert (await api.get("/v1/tenants/acme")).status == 404
    twice = await api.ask("POST", "/v1/apply", lines(tenant(), tenant()))
    assert (twice.status, twice.json["field"]) == (422, "metadata.name")
    key_twice = await api.ask("POST", "/v1/apply", b'[{"kind":"Tenant","kind":"Tenant"}]')
    assert (key_twice.status, key_twice.json["code"]) == (400, "malformed")


@http_test
async def test_refusals_of_authority_are_reported_per_manifest(api: Api) -> None:
    done = await api.must("POST", "/v1/apply", [workload("web", "nobody"), tenant()])
    first, second = done["results"]
    assert first["action"] == "refused" and first["problem"]["code"] and first["problem"]["cure"]
    assert second["action"] == "created"


@http_test
async def test_dry_run_of_apply_writes_nothing(api: Api) -> None:
    done = await api.must("POST", "/v1/apply?dryRun=true", [tenant(), workload("web")])
    assert [one["action"] for one in done["results"]] == ["created", "created"]
    assert (await api.get("/v1/tenants/acme")).status == 404


@http_test
async def test_if_unchanged_refuses_apply_after_any_change(api: Api) -> None:
    done = await api.must("POST", "/v1/apply", [tenant(), workload("web")])
    seen = done["revision"]
    fine = await api.must("POST", f"/v1/apply?ifUnchanged={seen}", [workload("web", replicas=2), workload("new")])
    assert [one["action"] for one in fine["results"]] == ["replaced", "created"]
    late = await api.ask("POST", f"/v1/apply?ifUnchanged={seen}", [tenant(weight=2), workload("web", replicas=3)])
    assert (late.status, late.json["code"]) == (412, "precondition")
    assert "weight" not in (await api.get("/v1/tenants/acme")).json["spec"]
    now = (await api.get("/v1/workloads")).json["metadata"]["revision"]
    await api.must("DELETE", "/v1/tenants/acme/workloads/new")
    gone = await api.ask("POST", f"/v1/apply?ifUnchanged={now}", [workload("new")])
    assert (gone.status, gone.json["code"]) == (412, "precondition")
    ahead = await api.ask("POST", "/v1/apply?ifUnchanged=99999", [tenant()])
    assert (ahead.status, ahead.json["field"]) == (400, "ifUnchanged")


@http_test
async def test_status_conditions_do_not_count_as_change(api: Api) -> None:
    seen = (await api.must("POST", "/v1/apply", [tenant(), workload("web")]))["revision"]
    ready_condition = Condition(type="Ready", status="False", reason="Creating", observed_generation=1)
    await submit_accepted(
        api, await acquire_role(api, Role.WORKLOADS), SetCondition("Workload", "web", ready_condition, "acme")
    )
    now = (await api.get("/v1/tenants/acme/workloads/web")).json
    assert now["metadata"]["revision"] > seen and now["status"]["conditions"]
    done = await api.must("POST", f"/v1/apply?ifUnchanged={seen}", [workload("web", replicas=2)])
    assert [one["action"] for one in done["results"]] == ["replaced"]


@http_test
async def test_retried_apply_under_same_id_does_not_undo_later_changes(api: Api) -> None:
    """The first answer was lost, and another client has changed the object since."""
    await api.must("POST", "/v1/apply", [tenant()])
    status = (await api.get("/v1/status")).json
    mine = {"Remit-Operation-Id": f"{status['incarnation']}.{status['window']}.batch"}
    first = await api.must("POST", "/v1/apply", [workload("web", replicas=2)], headers=mine)
    await api.must("PUT", "/v1/tenants/acme/workloads/web", workload("web", replicas=9))
    again = await api.must("POST", "/v1/apply", [workload("web", replicas=2)], headers=mine)
    assert again["results"][0]["revision"] == first["results"][0]["revision"]
    assert (await api.get("/v1/tenants/acme/workloads/web")).json["spec"]["replicas"] == 9


@http_test
async def test_apply_accepts_more_manifests_than_one_file_may_hold(api: Api) -> None:
    manifests = [tenant(), *(workload(f"w{i:04d}", labels={"pad": "x" * 60}) for i in range(4_000))]
    body = lines(*manifests)
    assert len(body) > 1 << 20
    done = await api.must("POST", "/v1/apply", body)
    assert len(done["results"]) == 4_001 and {one["action"] for one in done["results"]} == {"created"}


def test_owners_are_applied_before_owned_objects() -> None:
    config: dict[str, Any] = {
        "apiVersion": "remit/v1",
        "kind": "Config",
        "metadata": {"name": "c", "tenant": "acme", "owners": [{"kind": "Workload", "name": "web"}]},
        "spec": {"data": {"a": "b"}},
    }
    found = read(json.dumps([config, workload("web"), tenant()]).encode(), "x.json")
    assert not found.problems
    assert apply_order(found.objects) == [2, 1, 0]


def test_ownership_cycle_is_still_ordered() -> None:
    def config(name: str, owner: str) -> dict[str, Any]:
        meta = {"name": name, "tenant": "acme", "owners": [{"kind": "Config", "name": owner}]}
        return {"apiVersion": "remit/v1", "kind": "Config", "metadata": meta, "spec": {"data": {}}}

    found = read(json.dumps([config("a", "b"), config("b", "c"), config("c", "a")]).encode(), "x.json")
    assert sorted(apply_order(found.objects)) == [0, 1, 2]


BODY_BYTES = 16 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"1 " * 500_000,
        b'"' * 1_000_000,
        b"1\n" * (BODY_BYTES // 2),
        b"[" + b"[]," * (BODY_BYTES // 3 - 2) + b"[]]",
        b"[" + b"1," * (BODY_BYTES // 2 - 2) + b"1]",
        b"[" + b'{"a":[],"b":[]},' * 900_000 + b"1]",
        b'{"a":1}\r\n' * 1_500_000,
    ],
    ids=["separate numbers", "quotes", "lines", "lists", "numbers", "objects", "objects in lines"],
)
def test_too_many_manifests_are_refused_before_parsing(body: bytes) -> None:
    """The refusal takes no more time and memory than the first ten thousand manifests."""
    began_s = time.thread_time()
    with pytest.raises(ApiProblem) as error:
        split_manifests(body)
    assert (error.value.document.status, error.value.document.code) == (413, "too_large")
    assert time.thread_time() - began_s < 5


def test_number_of_reported_problems_is_limited() -> None:
    fields = ",".join(f'"x{i}":1' for i in range(150))
    body = "[" + ",".join(f'{{"kind":"Workload","metadata":{{"name":"A{i}"}},"spec":{{{fields}}}}}' for i in range(8_000)) + "]"
    began_s = time.thread_time()
    with pytest.raises(ApiProblem) as error:
        validate_manifests(body.encode())
    assert error.value.document.status == 422 and len(error.value.document.problems) == PROBLEMS_MAX
    assert time.thread_time() - began_s < 20


@pytest.mark.parametrize(
    "body", [b"[{},]", b"[{} {}]", b"[{}", b"[{}] {}", b"[,]", b"[{},,{}]", b" [{},]", b"{},{}", b"[", b"]"]
)
def test_malformed_array_is_refused(body: bytes) -> None:
    with pytest.raises(ApiProblem) as error:
        validate_manifests(body)
    assert (error.value.document.status, error.value.document.code) == (400, "malformed")


@pytest.mark.parametrize("between", [b"", b" ", b"\n", b"\r\n\r\n", b"\n \t"])
def test_separators_between_manifests_do_not_matter(between: bytes) -> None:
    made = [json.dumps(workload(f"w{i}"), indent=i % 3 or None).encode() for i in range(9)]
    apart, listed = between.join(made), b" [" + between + (b"," + between).join(made) + between + b"] "
    assert validate_manifests(apart) == validate_manifests(listed) == validate_manifests(b"[" + b",".join(made) + b"]")


@http_test
async def test_long_validation_yields_to_other_requests(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    large = [workload(f"a{i}") for i in range(1_500)]
    for i, one in enumerate(large):
        one["spec"]["template"]["env"] = {f"K{j}": f"{i}-{j}" for j in range(20)}  # every one is different
    order: list[str] = []

    async def ask(name: str, body: Any) -> None:
        reply = await api.ask("POST", "/v1/apply", body)
        assert reply.status == 200, reply.body[:300]
        order.append(name)

    other = workload("other")
    other["spec"]["template"]["env"] = {f"K{j}": "x" * 100 for j in range(200)}
    asking = asyncio.create_task(ask("large", large))
    await asyncio.sleep(0.05)
    await ask("other", [other])
    await asking
    assert order == ["other", "large"]
