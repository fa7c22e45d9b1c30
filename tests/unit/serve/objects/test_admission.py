"""Admission over HTTP: reserved labels, policies, limits, request rates and invalid numbers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from remit.model.identity import token_digest
from remit.model.wire.exec_frames import MEDIA_TYPE, ExecFrameType, ExecStart, encode_frame
from remit.serve.http import fair_queue
from remit.serve.http.fair_queue import Rate
from tests.unit.serve.in_memory_server import Api, http_test, tenant, workload

WORKLOADS = "/v1/tenants/acme/workloads"
NUMBERS = (b"NaN", b"Infinity", b"1e999", b"-1", b"9223372036854775808", b"9" * 5_000)


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "remit/v1", "kind": "Policy", "metadata": {"name": "p"}, "spec": {"rules": list(rules)}}


def rank(name: str, value: int) -> dict[str, Any]:
    return {"apiVersion": "remit/v1", "kind": "PriorityClass", "metadata": {"name": name}, "spec": {"value": value}}


@http_test
async def test_reserved_label_or_priority_gets_403_on_every_route(api: Api) -> None:
    """A19."""
    await api.must("POST", "/v1/tenants", tenant())
    marked = workload("w", labels={"remit/dedicated": "system"})
    for method, path, body in (
        ("POST", WORKLOADS, marked),
        ("PUT", f"{WORKLOADS}/w", marked),
        ("POST", "/v1/apply", [marked]),
        ("POST", "/v1/priorityclasses", rank("urgent", 1_999_999_999)),
        ("POST", WORKLOADS, {**marked, "spec": {}}),
    ):
        reply = await api.ask(method, path, body)
        assert (reply.status, reply.json["code"]) == (403, "reserved"), (path, reply.json)
        assert reply.json["field"] and reply.json["cure"]
    assert (await api.get(f"{WORKLOADS}/w")).status == 404


@http_test
async def test_policy_refusal_names_field_reason_and_allowed_values(api: Api) -> None:
    """A19: a class that is above what policy allows its author."""
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", "/v1/priorityclasses", rank("vip", 500))
    rule = {"match": {"tenants": ["acme"]}, "priorityMax": 10, "allow": {"regions": ["eu"]}, "reason": "as agreed; so it is"}
    await api.must("POST", "/v1/policies", policy(rule))
    high = await api.ask("POST", WORKLOADS, workload("w", priorityClass="vip"))
    assert (high.status, high.json["code"], high.json["field"]) == (403, "policy", "spec.priorityClass")
    assert "as agreed" in high.json["detail"] and "at most 10" in high.json["detail"]
    assert high.json["cure"] == "choose a lower class, or ask an operator for a policy rule with a higher priorityMax"
    away = await api.ask("POST", WORKLOADS, workload("w", placement={"regions": ["us"]}))
    assert (away.status, away.json["field"]) == (403, "spec.placement.regions") and "allows eu" in away.json["detail"]
    assert away.json["cure"] == "choose one of these"
    await api.must("POST", WORKLOADS, workload("w"))


@http_test
async def test_policy_defaults_do_not_interfere_with_patch_and_apply(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", "/v1/priorityclasses", rank("vip", 500))
    await api.must("POST", "/v1/policies", policy({"priorityClass": "vip", "defaults": {"stopGrace": "5s"}}))
    made = await api.must("POST", WORKLOADS, workload("w"))
    (condition,) = made["status"]["conditions"]
    assert condition["type"] == "ByPolicy" and "priorityClass vip by policy p" in condition["message"]
    merge = {"content-type": "application/merge-patch+json"}
    patched = await api.must("PATCH", f"{WORKLOADS}/w", {"spec": {"replicas": 2}}, headers=merge)
    assert patched["metadata"]["generation"] == 2 and "priorityClass" not in patched["spec"]
    again = await api.must("POST", "/v1/apply", [workload("w", replicas=2)])
    assert again["results"][0]["action"] == "unchanged"
    kept = await api.must("GET", "/v1/tenants/acme/generations/w%2F00000002")
    assert kept["spec"]["spec"]["priorityClass"] == "vip"


@http_test
async def test_owner_in_other_tenant_is_refused(api: Api) -> None:
    """A18."""
    for name in ("acme", "other"):
        await api.must("POST", "/v1/tenants", tenant(name))
    other_workload = await api.must("POST", "/v1/tenants/other/workloads", workload("boss", "other"))
    for owner in (
        {"kind": "Workload", "name": "boss", "uid": other_workload["metadata"]["uid"]},
        {"kind": "Tenant", "name": "other"},
        {"kind": "Policy", "name": "p"},
    ):
        body = workload("w")
        body["metadata"]["owners"] = [owner]
        reply = await api.ask("POST", WORKLOADS, body)
        assert (reply.status, reply.json["code"], reply.json["field"]) == (422, "invalid", "metadata.owners"), reply.json


@http_test
async def test_body_with_other_tenant_than_path_is_refused(api: Api) -> None:
    """A16."""
    for name in ("acme", "other"):
        await api.must("POST", "/v1/tenants", tenant(name))
    for method, path in (("POST", WORKLOADS), ("PUT", f"{WORKLOADS}/w")):
        reply = await api.ask(method, path, workload("w", "other"))
        assert (reply.status, reply.json["field"]) == (422, "metadata.tenant")
    assert (await api.get("/v1/tenants/other/workloads/w")).status == 404


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12].decode())
def test_unrepresentable_number_gets_422_on_every_route(number: bytes) -> None:
    """A25: on every route, and for every kind of number."""

    @http_test
    async def scenario(api: Api) -> None:
        await api.must("POST", "/v1/tenants", tenant())
        head = b'{"apiVersion":"remit/v1","kind":"Workload","metadata":{"name":"w","tenant":"acme"},"spec":{"type":"service",'
        bodies = (
            head + b'"replicas":' + number + b',"template":{"command":["x"]}}}',
            head + b'"template":{"command":["x"],"resources":{"cpu":' + number + b"}}}}",
        )
        merge = {"content-type": "application/merge-patch+json"}
        replies = [await api.ask("POST", WORKLOADS, body) for body in bodies]
        replies += [await api.ask("POST", "/v1/apply", b"[" + body + b"]") for body in bodies]
        replies.append(await api.ask("PATCH", "/v1/tenants/acme", b'{"spec":{"weight":' + number + b"}}", headers=merge))
        for reply in replies:
            assert (reply.status, reply.json["code"]) == (422, "invalid"), reply.json
            assert reply.json["detail"] and reply.json["cure"]

    scenario()


@http_test
async def test_ten_thousand_terms_and_hostile_patterns_are_refused_quickly(api: Api) -> None:
    """A33: patterns are Remit's own, and the input of each is bounded."""
    await api.must("POST", "/v1/tenants", tenant())
    many = {f"k{at}": "v" for at in range(10_000)}
    hostile = ("a" * 50_000 + "!", "a-" * 20_000, "a." * 20_000 + "/", "-" * 50_000, "a/" * 20_000)
    bodies = [workload("w", placement={"nodeSelector": many}), workload("w", labels=many)]
    bodies += [workload("w", labels={text: "v"}) for text in hostile]
    bodies += [workload("w", labels={"k": text}) for text in hostile]
    bodies += [workload(text) for text in hostile]
    for body in bodies:
        began = time.process_time()
        reply = await api.ask("POST", WORKLOADS, body)
        took_s = time.process_time() - began
        assert reply.status == 422, reply.json
        assert took_s < 3, f"{took_s} s for {str(body)[:60]}"


@http_test
async def test_limit_refusal_names_figure_and_field(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant(limits={"workloads": 1}))
    await api.must("POST", WORKLOADS, workload("a"))
    reply = await api.ask("POST", WORKLOADS, workload("b"))
    assert (reply.status, reply.json["code"]) == (409, "limit")
    assert "uses 1 of 1 workloads" in reply.json["detail"] and "spec.limits.workloads" in reply.json["detail"]


def test_flood_is_refused_before_body_is_parsed_and_connection_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A35, F41: the header and the wording; the complete test is tests/integration/serve/test_flood.py."""
    monkeypatch.setattr(fair_queue, "flow_of", lambda *_: ("tenant acme", "acme"))
    monkeypatch.setattr(fair_queue, "tenant_rate", lambda *_: Rate(1, 3))

    @http_test
    async def scenario(api: Api) -> None:
        replies = [await api.ask("POST", WORKLOADS, b"{") for _ in range(4)]
        assert [reply.status for reply in replies] == [400, 400, 400, 429]
        last = replies[-1]
        assert last.json["code"] == "throttled" and "1 requests per second" in last.json["detail"] and last.json["cure"]
        assert int(last.headers["retry-after"]) >= 1
        assert last.headers.get("connection") != "close", "a small body is read, so the connection stays usable"
        assert (await api.get("/v1/tenants")).status == 200, "a cheap read costs nothing"
        chunked = await api.ask("POST", WORKLOADS, pieces=[b"{" * 50_000])
        assert chunked.status == 429
        large = await api.ask("POST", WORKLOADS, b"{" * 100_000)
        assert large.status == 429 and large.headers["connection"] == "close"

    scenario()


@pytest.mark.parametrize(("method", "resource"), [("GET", "logs"), ("GET", "logs?follow=true"), ("POST", "exec")])
def test_logs_and_exec_count_against_request_rate(method: str, resource: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A35: otherwise a loop over logs by a viewer would occupy the server, its audit log and the agents."""
    monkeypatch.setattr(fair_queue, "flow_of", lambda *_: ("tenant acme", "acme"))
    monkeypatch.setattr(fair_queue, "tenant_rate", lambda *_: Rate(1, 10))

    @http_test
    async def scenario(api: Api) -> None:
        begin = encode_frame(ExecFrameType.START, ExecStart(("id",))) if method == "POST" else None
        headers = {"Content-Type": MEDIA_TYPE} if method == "POST" else {}
        path = f"/v1/tenants/acme/replicas/none/{resource}"
        replies = [await api.ask(method, path, begin, headers=headers) for _ in range(3)]
        assert [reply.status for reply in replies] == [404, 404, 429]
        assert replies[-1].json["code"] == "throttled" and int(replies[-1].headers["retry-after"]) >= 1

    scenario()


def test_chunked_body_costs_as_much_as_announced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A35: otherwise a flood would omit the length."""
    monkeypatch.setattr(fair_queue, "flow_of", lambda *_: ("tenant acme", "acme"))
    monkeypatch.setattr(fair_queue, "tenant_rate", lambda *_: Rate(1, 20))

    @http_test
    async def scenario(api: Api) -> None:
        many = b"[" + b" " * 200_000 + b"]"
        assert (await api.ask("POST", "/v1/apply", pieces=[many])).status == 422
        assert (await api.ask("POST", "/v1/apply", b"[]")).status == 429

    scenario()


@http_test
async def test_creating_many_replicas_is_charged_to_tenants_rate(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant(limits={"requestsPerSecond": 1, "requestsBurst": 50}))
    member = "a-token-of-ann-of-acme"
    spec = {
        "role": "member",
        "digest": token_digest(member),
        "expires": "2999-01-01T00:00:00Z",
        "subject": "ann",
        "tenant": "acme",
    }
    await api.must("POST", "/v1/tokens", {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": "ann"}, "spec": spec})
    async with asyncio.timeout(10):
        while (await api.get(WORKLOADS, token=member)).status == 401:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
    assert (await api.ask("POST", WORKLOADS, workload("few", replicas=5), token=member)).status == 201
    tried = await api.ask("POST", f"{WORKLOADS}?dryRun=true", workload("many", replicas=5_000), token=member)
    assert tried.status == 200, "a dry run creates none"
    assert (await api.ask("POST", WORKLOADS, workload("many", replicas=5_000), token=member)).status == 201
    reply = await api.ask("POST", WORKLOADS, workload("next"), token=member)
    assert (reply.status, reply.json["code"]) == (429, "throttled") and int(reply.headers["retry-after"]) > 20
