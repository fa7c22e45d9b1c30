"""Lists: consistent across pages, and filtered exactly by selectors."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from remit.model.objects import KINDS, PLURALS
from remit.serve.http import app, streams
from remit.serve.http.replies import ApiProblem
from remit.serve.objects import reads
from remit.serve.objects.reads import SELECTOR_LENGTH_MAX, TERMS_MAX, parse_selector
from remit.store.memory import MemoryStore
from tests.unit.serve.in_memory_server import TOKEN, Api, api, http_test, node, tenant, workload

WORKLOADS = "/v1/tenants/acme/workloads"


def names(page: Any) -> list[str]:
    return [item["metadata"]["name"] for item in page["items"]]


@http_test
async def test_every_kind_can_be_listed(api: Api) -> None:
    for kind in KINDS:
        found = await api.must("GET", f"/v1/{PLURALS[kind]}")
        assert found["kind"] == f"{kind}List" and isinstance(found["items"], list)


@http_test
async def test_all_pages_show_state_of_first_page(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    for name in "abcde":
        await api.must("POST", WORKLOADS, workload(f"w-{name}", replicas=0))
    first = await api.must("GET", f"{WORKLOADS}?limit=2")
    await api.must("DELETE", f"{WORKLOADS}/w-d")
    await api.must("POST", WORKLOADS, workload("w-cc"))
    second = await api.must("GET", f"{WORKLOADS}?limit=2&continue={first['metadata']['continue']}")
    third = await api.must("GET", f"{WORKLOADS}?limit=2&continue={second['metadata']['continue']}")
    assert [*names(first), *names(second), *names(third)] == [f"w-{name}" for name in "abcde"]
    assert first["metadata"]["revision"] == second["metadata"]["revision"] == third["metadata"]["revision"]
    assert "continue" not in third["metadata"]
    assert names(await api.must("GET", WORKLOADS)) == ["w-a", "w-b", "w-c", "w-cc", "w-e"]


@http_test
async def test_page_of_compacted_state_gets_410(api: Api) -> None:
    for name in ("a", "b", "c"):
        await api.must("POST", "/v1/tenants", tenant(name))
    first = await api.must("GET", "/v1/tenants?limit=1")
    await api.must("POST", "/v1/tenants", tenant("d"))
    await api.store.compact(await api.store.revision())
    late = await api.get(f"/v1/tenants?limit=1&continue={first['metadata']['continue']}")
    assert (late.status, late.json["code"]) == (410, "compacted")
    assert "list again" in late.json["cure"]


@http_test
async def test_forged_continue_token_is_refused(api: Api) -> None:
    for token in ("x", "%00", "é", "W10", "bnVsbA"):
        reply = await api.get(f"/v1/tenants?continue={token}")
        assert (reply.status, reply.json["field"]) == (400, "continue"), token
    another = base64.urlsafe_b64encode(b'[5,"secret/acme/x"]').decode()
    reply = await api.get(f"/v1/tenants?continue={another}")
    assert (reply.status, reply.json["code"], reply.json["field"]) == (403, "not_owner", "continue")


@http_test
async def test_lists_by_tenant_and_of_all_tenants(api: Api) -> None:
    for name in ("acme", "bolt"):
        await api.must("POST", "/v1/tenants", tenant(name))
        await api.must("POST", f"/v1/tenants/{name}/workloads", workload(f"of-{name}", name))
    assert names(await api.must("GET", "/v1/workloads")) == ["of-acme", "of-bolt"]
    assert names(await api.must("GET", "/v1/tenants/bolt/workloads")) == ["of-bolt"]
    assert names(await api.must("GET", "/v1/tenants/nobody/workloads")) == []


@http_test
async def test_selectors_filter_by_labels_and_fields(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    await api.must("POST", WORKLOADS, workload("web", labels={"app": "web", "tier": "front"}, replicas=2))
    await api.must("POST", WORKLOADS, workload("db", labels={"app": "db"}))
    await api.must("POST", WORKLOADS, workload("bare", type="job"))
    await api.must("POST", "/v1/nodes", node("n1"))

    async def by(query: str, path: str = WORKLOADS) -> list[str]:
        return names(await api.must("GET", f"{path}?{query}"))

    assert await by("labelSelector=app=web") == ["web"]
    assert await by("labelSelector=app!=web") == ["bare", "db"]
    assert await by("labelSelector=app%20in%20(web,db),!tier") == ["db"]
    assert await by("labelSelector=app%20notin%20(web)") == ["bare", "db"]
    assert await by("labelSelector=tier") == ["web"]
    assert await by("fieldSelector=spec.type=job") == ["bare"]
    assert await by("fieldSelector=spec.type!=job,spec.replicas==2") == ["web"]
    assert await by("fieldSelector=metadata.name=db") == ["db"]
    assert await by("fieldSelector=metadata.labels.app=db") == ["db"]
    assert await by("fieldSelector=status.health=joining", "/v1/nodes") == ["n1"]  # the default, which is not stored
    assert await by("fieldSelector=spec.capacity.cpu=8", "/v1/nodes") == ["n1"]
    assert await by("fieldSelector=spec.unschedulable=false", "/v1/nodes") == ["n1"]
    assert await by("limit=1&labelSelector=app") == ["db"]


@http_test
async def test_huge_selector_is_refused_quickly(api: Api) -> None:
    """A33."""
    for text in (",".join(["a=b"] * 10_000), "a" * 40_000, "(" * 10_000, "a%20" * 10_000, "!" * 10_000):
        began = asyncio.get_running_loop().time()
        reply = await api.get(f"/v1/tenants?labelSelector={text}")
        assert (reply.status, reply.json["field"]) == (422, "labelSelector")
        assert asyncio.get_running_loop().time() - began < 0.1


@http_test
async def test_pages_with_selector_continue_where_they_stopped(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    for i in range(7):
        await api.must("POST", WORKLOADS, workload(f"w{i}", labels={"odd": str(i % 2)}))
    found, rest = list[str](), ""
    while True:
        page = await api.must("GET", f"{WORKLOADS}?labelSelector=odd=1&limit=2&continue={rest}")
        found += names(page)
        rest = page["metadata"].get("continue", "")
        if not rest:
            break
    assert found == ["w1", "w3", "w5"]


@pytest.mark.parametrize(
    ("labels", "fields", "text"),
    [
        ("app=web,", "", "invalid term"),
        (",", "", "invalid term"),
        ("app in web", "", "invalid term"),
        ("app in (a", "", "invalid term"),
        ("=x", "", "invalid term"),
        ("a=b=c", "", "invalid term"),
        (",".join(["a=b"] * (TERMS_MAX + 1)), "", "more than 64 terms"),
        ("a" * (SELECTOR_LENGTH_MAX + 1), "", "characters"),
        (" " * 4_000 + "!", "", "invalid term"),
        ("a" + " " * 4_000 + "x", "", "invalid term"),
        ("", "spec.replica=1", "no field"),
        ("", "spec=1", "single value"),
        ("", "spec.type.x=1", "has no fields"),
        ("", "metadata", "invalid term"),
        ("", "spec.type=" + "," * 100, "invalid term"),
    ],
)
def test_invalid_selector_gets_422(labels: str, fields: str, text: str) -> None:
    with pytest.raises(ApiProblem) as failure:
        parse_selector("Workload", labels, fields)
    problem = failure.value.document
    assert (problem.status, problem.code) == (422, "invalid")
    assert text in problem.detail and problem.cure and problem.field in ("labelSelector", "fieldSelector")


def test_misspelt_field_gets_suggestion() -> None:
    with pytest.raises(ApiProblem) as failure:
        parse_selector("Replica", "", "status.phases=pending")
    assert failure.value.document.cure == "did you mean phase?"


def test_list_scans_limited_rows_per_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selector that matches none of very many rows gets an empty page with a continue token."""
    monkeypatch.setattr("remit.serve.objects.reads.SCAN_ROWS_MAX", 3)
    monkeypatch.setattr("remit.serve.objects.reads._SCAN_ROWS", 3)

    async def main() -> None:
        async with api(MemoryStore()) as client:
            for i in range(5):
                await client.must("POST", "/v1/tenants", tenant(f"t{i}"))
            page = await client.must("GET", "/v1/tenants?fieldSelector=metadata.name=t4")
            assert page["items"] == [] and page["metadata"]["continue"]
            rest = page["metadata"]["continue"]
            page = await client.must("GET", f"/v1/tenants?fieldSelector=metadata.name=t4&continue={rest}")
            assert names(page) == ["t4"] and "continue" not in page["metadata"]

    asyncio.run(main())


@pytest.mark.parametrize("selector", ["", "&labelSelector=!none"])
def test_page_ends_at_byte_limit_and_rest_follows(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "PAGE_BYTES_MAX", 5_000)
    monkeypatch.setattr(reads, "_FIRST_ROWS", 3)

    async def main() -> None:
        async with api() as client:
            await client.must("POST", "/v1/tenants", tenant())
            made = [f"w{i:02d}" for i in range(40)]
            for name in made:
                await client.must("POST", WORKLOADS, workload(name, labels={"long": "x" * 60}))
            seen, pages, rest = list[str](), 0, ""
            while True:
                page = await client.must("GET", f"{WORKLOADS}?limit=1000{selector}{rest}")
                seen += names(page)
                pages += 1
                assert len(json.dumps(page)) < 12_000
                if "continue" not in page["metadata"]:
                    break
                rest = f"&continue={page['metadata']['continue']}"
            assert seen == made and pages > 2

    asyncio.run(main())


class LargeListClient:
    """Requests a large list and keeps what it receives; without `takes` it blocks at the first piece."""

    def __init__(self, *, reads_all: bool = True) -> None:
        self.sent, self.cut, self.stuck = list[Any](), False, asyncio.Event()
        self._reads_all = reads_all

    async def list(self, api: Api) -> None:
        await api.must("POST", "/v1/tenants", tenant())
        for i in range(80):
            await api.must("POST", WORKLOADS, workload(f"w{i:02d}", labels={f"k{j}": "x" * 60 for j in range(12)}))
        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        client = {"type": "http", "method": "GET", "path": WORKLOADS, "raw_path": WORKLOADS.encode(), "headers": headers}
        await api.app({**client, "query_string": b"limit=1000", "abort": self._abort}, self._receive, self._send)

    def _abort(self) -> None:
        self.cut = True

    async def _receive(self) -> dict[str, Any]:
        if self.sent:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not self._reads_all:
            self.stuck.set()
            await asyncio.Event().wait()


@http_test
async def test_large_reply_is_sent_in_pieces(api: Api) -> None:
    listener = LargeListClient()
    await listener.list(api)
    start, *pieces = listener.sent
    body = b"".join(piece["body"] for piece in pieces)
    assert len(pieces) > 1 and [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert max(len(piece["body"]) for piece in pieces) <= streams.LARGE_BYTES
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body)
    assert len(json.loads(body)["items"]) == 80
    assert api.app.large_replies.held == 0 and not listener.cut


@http_test
async def test_unread_large_replies_cause_429_until_aborted(api: Api) -> None:
    api.app.large_replies.limit = 100_000
    listener = LargeListClient(reads_all=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "SEND_MS_MAX", 300)
        listening = asyncio.ensure_future(listener.list(api))
        await listener.stuck.wait()
        refused = await api.get(f"{WORKLOADS}?limit=1000")
        assert (refused.status, refused.json["code"]) == (429, "overloaded") and "retry" in refused.json["cure"]
        assert (await api.get(f"{WORKLOADS}?limit=2")).status == 200, "small replies are still sent"
        async with asyncio.timeout(5):
            await listening
    assert listener.cut, "a client that does not read is disconnected"
    assert (await api.get(f"{WORKLOADS}?limit=1000")).status == 200
