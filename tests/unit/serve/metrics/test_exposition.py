"""Does `/metrics` tell what happened, in both of Prometheus' forms, and never in more series than there are names for?"""

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
from tests.unit.serve.in_memory_server import TOKENS, Api, api, node, story, tenant, workload


async def scrape(asked: Api) -> dict[str, float]:
    answer = await asked.ask("GET", "/metrics")
    assert answer.status == 200
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in plain(answer.body.decode())
        for sample in family.samples
    }


@story
async def test_both_forms_are_told_and_every_series_is_in_the_table(asked: Api) -> None:
    await asked.ask("POST", "/v1/tenants", tenant())
    text = await asked.ask("GET", "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in plain(text.body.decode())}
    own = {name for name in names if name.startswith("remit_")}
    known = {name for metric in METRICS.values() for name in (metric.name, metric.former_name)}
    assert own and own <= {name.removesuffix("_total") for name in known} | known
    assert "process_resident_memory_bytes" in names
    told = await asked.ask("GET", "/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert told.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = openmetrics(told.body.decode())  # type: ignore[no-untyped-call]
    assert {family.name for family in families} >= {"remit_http_requests", "remit_replicas"}


@story
async def test_an_accept_header_that_nobody_understands_is_answered_with_plain_text(asked: Api) -> None:
    for odd in (
        "application/openmetrics-text;version=x.y",
        "text/plain;version=99999999999999999999.0",
        "\x7f;;;,,,",
        "*" * 4000,
    ):
        answer = await asked.ask("GET", "/metrics", headers={"accept": odd})
        assert answer.status == 200


@story
async def test_what_was_asked_and_decided_is_counted(asked: Api) -> None:
    before = await scrape(asked)
    await asked.ask("POST", "/v1/tenants", tenant())
    await asked.ask("POST", "/v1/tenants", tenant())  # there already
    await asked.ask("GET", "/v1/nodes")
    after = await scrape(asked)

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert more("remit_http_requests_total[('method', 'POST'), ('route', 'createTenant'), ('status_class', '2xx')]") == 1
    assert more("remit_http_requests_total[('method', 'POST'), ('route', 'createTenant'), ('status_class', '4xx')]") == 1
    assert more("remit_http_problems_total[('code', 'exists')]") == 1
    assert more("remit_refusals_total[('code', 'exists')]") == 1
    assert more("remit_operations_total[('did', 'apply'), ('operation', 'apply')]") == 1
    assert more("remit_objects[('kind', 'Tenant')]") == 1
    assert after["remit_authority_is_leader[]"] == 1
    assert after["remit_http_requests_in_flight[]"] == 1  # the scrape itself
    assert more("remit_authority_batch_size_count[]") == 2
    assert after["remit_http_request_duration_seconds_count[('route', 'createTenant')]"] == 2


@story
async def test_hostile_paths_tenants_methods_and_labels_make_no_new_series(asked: Api) -> None:
    """A36."""
    hostile = ['"} 1\nremit_made_up 1', "\x1b[31mred", "a" * 3_000, '{x="y"}', "tenant\nname", "ünï", "%2e%2e", "\\", '"']

    statuses: list[int] = []

    async def flood(times: int, begin: int) -> None:
        for number in range(begin, begin + times):
            odd = hostile[number % len(hostile)] + str(number)
            path = quote(odd, safe="")
            for method, where in (
                ("GET", f"/v1/{path}"),
                ("GET", f"/v1/tenants/{path}/workloads/{path}"),
                (f"X{number}"[:20], "/v1/nodes"),
                ("GET", f"/v1/nodes?{path}={path}"),
                ("PUT", f"/v1/tenants/{path}"),
            ):
                statuses.append((await asked.ask(method, where, {"kind": odd} if method == "PUT" else None)).status)
            named = {"remit-trace": f"t-{number}"}
            await asked.ask("POST", "/v1/tenants", tenant(f"flood-{number}"), headers=named)
            labels = {f"key-{number}": f"value-{number}"}
            await asked.ask("POST", f"/v1/tenants/flood-{number}/workloads", workload(f"w-{number}", f"flood-{number}", labels))

    await flood(30, 0)
    await scrape(asked)
    await asyncio.sleep(0.05)
    before = await scrape(asked)
    await flood(60, 30)
    await asyncio.sleep(0.05)
    after = await scrape(asked)
    assert set(after) == set(before)
    assert max(statuses) < 500
    assert after["process_resident_memory_bytes[]"] - before["process_resident_memory_bytes[]"] < 50 << 20
    assert not [name for name in after if "made_up" in name or "key-" in name or "x1b" in name]
    shown = {name for name in after if name.startswith("remit_tenant_quota_used_ratio")}
    assert len(shown) <= 3 * 20


def test_counts_past_their_bound_are_others() -> None:
    counts = BoundedCounter(keys_max=3)
    for number in range(100):
        counts.add(f"kind-{number}")
    assert len(counts) == 4 and counts[OTHER] == 97
    known = BoundedCounter(("a", "b"))
    for kind in ("a", "b", "c", "d"):
        known.add(kind)
    assert known == {"a": 1, "b": 1, OTHER: 2}
    assert largest_with_other({"a": 1, "b": 5, "c": 3}, 2) == {"b": 5, "c": 3, OTHER: 1}


def test_a_spread_counts_each_value_once_and_adds_up() -> None:
    spread = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        spread.add(value)
    assert spread.cumulative() == [(1, 2), (2, 3), (5, 4), (float("inf"), 5)]
    assert spread.sum == 14


def test_counting_a_request_costs_next_to_nothing() -> None:
    """In processor time, the best of several: a busy machine must not fail it."""
    import time

    requests, best = RequestMetrics(), 1e9
    for _ in range(7):
        began = time.process_time_ns()
        for _ in range(5_000):
            at = requests.begin()
            requests.end(at, "listNodes", "GET", 200)
        best = min(best, (time.process_time_ns() - began) / 5_000)
    assert best < 20_000, best  # ten times the aim: the interpreter may be instrumented, and the machine shared


def test_the_count_of_what_is_under_way_comes_back_to_nothing() -> None:
    async def main() -> None:
        async with api() as asked:
            for _ in range(20):
                await asked.ask("GET", "/v1/nodes")
                await asked.ask("GET", "/nowhere")
            assert asked.desk.telemetry.requests.in_flight == 0

    asyncio.run(main())


@story
async def test_prometheus_finds_nodes_and_what_serves(asked: Api) -> None:
    await asked.ask("POST", "/v1/nodes", node("n1", address="10.0.0.7"))
    await asked.ask("POST", "/v1/nodes", node("n2"))
    found = await asked.ask("GET", "/v1/sd/nodes?port=9999")
    assert found.status == 200 and found.headers["content-type"] == "application/json"
    (one,) = found.json  # of n2 nobody said where it is reached
    assert one["targets"] == ["10.0.0.7:9999"]
    assert one["labels"]["__meta_remit_node"] == "n1" and one["labels"]["__meta_remit_zone"] == "eu-a"
    assert (await asked.ask("GET", "/v1/sd/endpoints")).json == []
    ports = {"http": 31_000, "metrics": 31_001}
    item = EndpointItem(tenant="acme", service="web", replica="web-0", node="n1", host="fd00::7", ports=ports)
    asked.desk.endpoints._endpoints["replica/acme/web-0"] = item
    found = await asked.ask("GET", "/v1/sd/endpoints?port=metrics")
    assert [one["targets"] for one in found.json] == [["[fd00::7]:31001"]]
    assert found.json[0]["labels"]["__meta_remit_service"] == "web"
    assert len((await asked.ask("GET", "/v1/sd/endpoints?tenant=acme")).json) == 2
    assert (await asked.ask("GET", "/v1/sd/endpoints?tenant=other")).json == []
    assert (await asked.ask("GET", "/v1/sd/nodes?port=0")).status == 400


async def people(asked: Api) -> dict[str, str]:
    """A token of each sort of person."""
    await asked.must("POST", "/v1/tenants", tenant())
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
        await asked.must("POST", "/v1/tokens", token)
    return made


@story
async def test_who_may_look_at_metrics_and_who_may_take_a_copy(asked: Api) -> None:
    tokens: dict[str, str] = {**{str(role): token for role, token in TOKENS.items()}, **await people(asked)}
    for role, status in (("admin", 200), ("viewer", 200), ("member", 403), ("agent", 401), ("scheduler", 401)):
        for path in ("/metrics", "/v1/support", "/v1/sd/nodes"):
            assert (await asked.ask("GET", path, token=tokens[role])).status == status, (role, path)
    for path in ("/metrics", "/v1/support", "/v1/backup", "/v1/sd/nodes", "/v1/sd/endpoints"):
        assert (await asked.ask("GET", path, token="none-at-all")).status == 401
    refused = await asked.ask("GET", "/v1/backup", token=tokens["viewer"])
    assert refused.status == 403 and "admin" in refused.json["detail"]
    assert (await asked.ask("GET", "/v1/backup")).status == 501  # a store in memory makes no copies


@story
async def test_a_tenant_discovers_its_own_endpoints_alone(asked: Api) -> None:
    tokens = await people(asked)
    for name in ("acme", "other"):
        item = EndpointItem(tenant=name, service="web", replica="web-0", node="n1", host="10.0.0.7", ports={"http": 80})
        asked.desk.endpoints._endpoints[f"replica/{name}/web-0"] = item
    mine = await asked.ask("GET", "/v1/sd/endpoints", token=tokens["member"])
    assert [one["labels"]["__meta_remit_tenant"] for one in mine.json] == ["acme"]
    assert (await asked.ask("GET", "/v1/sd/endpoints?tenant=other", token=tokens["member"])).json == []
    assert len((await asked.ask("GET", "/v1/sd/endpoints")).json) == 2


@story
async def test_renamed_metric__exposed_with_the_same_value_under_its_former_name(asked: Api) -> None:
    await asked.ask("POST", "/v1/tenants", tenant())
    scraped = await scrape(asked)
    reported = [metric for metric in METRICS.values() if metric.former_name and f"{metric.name}[]" in scraped]
    assert {metric.former_name for metric in reported} >= {"remit_authority_leading", "remit_books_outcomes"}
    for metric in reported:
        assert scraped[f"{metric.former_name}[]"] == scraped[f"{metric.name}[]"]
