"""`/metrics` in both Prometheus formats: complete, and with a bounded number of series."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from urllib.parse import quote

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from remit.model.counters import OTHER, BoundedCounter, Histogram, largest_with_other
from remit.model.wire.api_types import EndpointItem
from remit.serve.http.request_telemetry import RequestMetrics
from remit.serve.metrics.exposition import METRICS
from tests.unit.serve.in_memory_server import TOKENS, Api, api, http_test, node, tenant, workload


async def scrape(client: Api) -> dict[str, float]:
    answer = await client.ask("GET", "/metrics")
    assert answer.status == 200
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in plain(answer.body.decode())
        for sample in family.samples
    }


@http_test
async def test_both_formats_are_served_with_documented_metrics_only(client: Api) -> None:
    await client.ask("POST", "/v1/tenants", tenant())
    text = await client.ask("GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in plain(text.body.decode())}
    own = {name for name in names if name.startswith("remit_")}
    assert own and own <= {name.removesuffix("_total") for name in METRICS} | set(METRICS)
    assert "process_resident_memory_bytes" in names
    reply = await client.ask(
        "GET", "/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    )
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = openmetrics(reply.body.decode())  # type: ignore[no-untyped-call]
    assert {family.name for family in families} >= {"remit_http_requests", "remit_replicas"}


@http_test
async def test_unknown_accept_header_gets_plain_text(client: Api) -> None:
    for strange in (
        "application/openmetrics-text;version=x.y",
        "text/plain;version=99999999999999999999.0",
        "\x7f;;;,,,",
        "*" * 4000,
    ):
        answer = await client.ask("GET", "/metrics", headers={"accept": strange})
        assert answer.status == 200


@http_test
async def test_requests_and_decisions_are_counted(client: Api) -> None:
    before = await scrape(client)
    await client.ask("POST", "/v1/tenants", tenant())
    await client.ask("POST", "/v1/tenants", tenant())  # exists already
    await client.ask("GET", "/v1/nodes")
    after = await scrape(client)

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert more("remit_http_requests_total[('method', 'POST'), ('route', 'createTenant'), ('status_class', '2xx')]") == 1
    assert more("remit_http_requests_total[('method', 'POST'), ('route', 'createTenant'), ('status_class', '4xx')]") == 1
    assert more("remit_http_problems_total[('code', 'exists')]") == 1
    assert more("remit_refusals_total[('code', 'exists')]") == 1
    assert more("remit_operations_total[('did', 'apply')]") == 1
    assert more("remit_objects[('kind', 'Tenant')]") == 1
    assert after["remit_authority_leading[]"] == 1
    assert after["remit_http_requests_in_flight[]"] == 1  # the scrape itself
    assert more("remit_authority_batch_size_count[]") == 2
    assert after["remit_http_request_duration_seconds_count[('route', 'createTenant')]"] == 2


@http_test
async def test_hostile_paths_tenants_methods_and_labels_create_no_series(client: Api) -> None:
    """A36."""
    hostile = ['"} 1\nremit_made_up 1', "\x1b[31mred", "a" * 3_000, '{x="y"}', "tenant\nname", "ünï", "%2e%2e", "\\", '"']

    statuses: list[int] = []

    async def flood(times: int, begin: int) -> None:
        for number in range(begin, begin + times):
            strange = hostile[number % len(hostile)] + str(number)
            path = quote(strange, safe="")
            for method, where in (
                ("GET", f"/v1/{path}"),
                ("GET", f"/v1/tenants/{path}/workloads/{path}"),
                (f"X{number}"[:20], "/v1/nodes"),
                ("GET", f"/v1/nodes?{path}={path}"),
                ("PUT", f"/v1/tenants/{path}"),
            ):
                statuses.append((await client.ask(method, where, {"kind": strange} if method == "PUT" else None)).status)
            headers = {"remit-trace": f"t-{number}"}
            await client.ask("POST", "/v1/tenants", tenant(f"flood-{number}"), headers=headers)
            labels = {f"key-{number}": f"value-{number}"}
            await client.ask(
                "POST", f"/v1/tenants/flood-{number}/workloads", workload(f"w-{number}", f"flood-{number}", labels)
            )

    await flood(30, 0)
    await scrape(client)
    await asyncio.sleep(0.05)
    before = await scrape(client)
    await flood(60, 30)
    await asyncio.sleep(0.05)
    after = await scrape(client)
    assert set(after) == set(before)
    assert max(statuses) < 500
    assert after["process_resident_memory_bytes[]"] - before["process_resident_memory_bytes[]"] < 50 << 20
    assert not [name for name in after if "made_up" in name or "key-" in name or "x1b" in name]
    shown = {name for name in after if name.startswith("remit_tenant_quota_used_ratio")}
    assert len(shown) <= 3 * 20


def test_counter_beyond_key_limit_counts_as_other() -> None:
    counts = BoundedCounter(keys_max=3)
    for number in range(100):
        counts.add(f"kind-{number}")
    assert len(counts) == 4 and counts[OTHER] == 97
    known = BoundedCounter(("a", "b"))
    for kind in ("a", "b", "c", "d"):
        known.add(kind)
    assert known == {"a": 1, "b": 1, OTHER: 2}
    assert largest_with_other({"a": 1, "b": 5, "c": 3}, 2) == {"b": 5, "c": 3, OTHER: 1}


def test_histogram_counts_each_value_once() -> None:
    spread = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        spread.add(value)
    assert spread.cumulative() == [(1, 2), (2, 3), (5, 4), (float("inf"), 5)]
    assert spread.sum == 14


def test_counting_request_takes_microseconds() -> None:
    """In processor time, the best of several runs, so that a busy machine does not fail it."""
    import time

    requests, best = RequestMetrics(), 1e9
    for _ in range(7):
        began = time.process_time_ns()
        for _ in range(5_000):
            at = requests.begin()
            requests.end(at, "listNodes", "GET", 200)
        best = min(best, (time.process_time_ns() - began) / 5_000)
    assert best < 20_000, best  # ten times the goal: the interpreter may be instrumented and the machine shared


def test_requests_in_flight_return_to_zero() -> None:
    async def main() -> None:
        async with api() as client:
            for _ in range(20):
                await client.ask("GET", "/v1/nodes")
                await client.ask("GET", "/nowhere")
            assert client.server.request_metrics.in_flight == 0

    asyncio.run(main())


@http_test
async def test_service_discovery_lists_nodes_and_endpoints(client: Api) -> None:
    await client.ask("POST", "/v1/nodes", node("n1", address="10.0.0.7"))
    await client.ask("POST", "/v1/nodes", node("n2"))
    found = await client.ask("GET", "/v1/sd/nodes?port=9999")
    assert found.status == 200 and found.headers["content-type"] == "application/json"
    (one,) = found.json  # n2 has no address
    assert one["targets"] == ["10.0.0.7:9999"]
    assert one["labels"]["__meta_remit_node"] == "n1" and one["labels"]["__meta_remit_zone"] == "eu-a"
    assert (await client.ask("GET", "/v1/sd/endpoints")).json == []
    ports = {"http": 31_000, "metrics": 31_001}
    item = EndpointItem(tenant="acme", service="web", replica="web-0", node="n1", host="fd00::7", ports=ports)
    client.server.endpoints._endpoints["replica/acme/web-0"] = item
    found = await client.ask("GET", "/v1/sd/endpoints?port=metrics")
    assert [one["targets"] for one in found.json] == [["[fd00::7]:31001"]]
    assert found.json[0]["labels"]["__meta_remit_service"] == "web"
    assert len((await client.ask("GET", "/v1/sd/endpoints?tenant=acme")).json) == 2
    assert (await client.ask("GET", "/v1/sd/endpoints?tenant=other")).json == []
    assert (await client.ask("GET", "/v1/sd/nodes?port=0")).status == 400


async def create_users(client: Api) -> dict[str, str]:
    """A token of each role for people."""
    await client.must("POST", "/v1/tenants", tenant())
    made = {"admin": TOKENS["admin"], "viewer": "a-token-of-a-viewer", "member": "a-token-of-a-member"}
    for role, of in (("viewer", ""), ("member", "acme")):
        spec = {
            "role": role,
            "digest": sha256(made[role].encode()).hexdigest(),
            "expires": "2099-01-01T00:00:00.000Z",
            "subject": role,
        }
        if of:
            spec["tenant"] = of
        token = {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": role}, "spec": spec}
        await client.must("POST", "/v1/tokens", token)
    return made


@http_test
async def test_metrics_support_and_backup_require_their_roles(client: Api) -> None:
    tokens: dict[str, str] = {**{str(role): token for role, token in TOKENS.items()}, **await create_users(client)}
    for role, status in (("admin", 200), ("viewer", 200), ("member", 403), ("agent", 401), ("scheduler", 401)):
        for path in ("/metrics", "/v1/support", "/v1/sd/nodes"):
            assert (await client.ask("GET", path, token=tokens[role])).status == status, (role, path)
    for path in ("/metrics", "/v1/support", "/v1/backup", "/v1/sd/nodes", "/v1/sd/endpoints"):
        assert (await client.ask("GET", path, token="none-at-all")).status == 401
    refused = await client.ask("GET", "/v1/backup", token=tokens["viewer"])
    assert refused.status == 403 and "admin" in refused.json["detail"]
    assert (await client.ask("GET", "/v1/backup")).status == 501  # an in-memory store cannot be backed up


@http_test
async def test_tenant_discovers_only_its_own_endpoints(client: Api) -> None:
    tokens = await create_users(client)
    for name in ("acme", "other"):
        item = EndpointItem(tenant=name, service="web", replica="web-0", node="n1", host="10.0.0.7", ports={"http": 80})
        client.server.endpoints._endpoints[f"replica/{name}/web-0"] = item
    own = await client.ask("GET", "/v1/sd/endpoints", token=tokens["member"])
    assert [one["labels"]["__meta_remit_tenant"] for one in own.json] == ["acme"]
    assert (await client.ask("GET", "/v1/sd/endpoints?tenant=other", token=tokens["member"])).json == []
    assert len((await client.ask("GET", "/v1/sd/endpoints")).json) == 2
