"""Hostile or mistaken requests get a clear problem and never a 500: tokens, sizes, syntax, rates and timeouts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from remit.client.endpoint import Overloaded
from remit.serve import server_context as at_desk
from remit.serve.http import app as module
from remit.serve.http import fair_queue
from remit.serve.http.bodies import merge_patch, nesting_depth, parse_strict_json
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_context import RequestContext
from remit.serve.http.route_table import ROUTES
from remit.serve.http.routes import OBJECT_BYTES_MAX, Route
from remit.serve.server_context import ServerContext
from tests.unit.serve.in_memory_server import Api, api, http_test, tenant, workload


@http_test
async def test_requests_without_valid_token_get_401_everywhere(api: Api) -> None:
    """A01."""
    for path in ("/v1/tenants", "/v1/nothing", "/", "/v1/tenants/acme/secrets/db"):
        for token in (None, "wrong", " ", "é"):
            reply = await api.get(path, token=token)
            assert (reply.status, reply.json["code"]) == (401, "unauthenticated"), (path, token)
            assert reply.headers["www-authenticate"].startswith("Bearer")
    basic = await api.get("/v1/tenants", token=None, headers={"authorization": "Basic a-token-of-a-test"})
    assert basic.status == 401
    assert (await api.get("/healthz", token=None)).status == 200
    assert (await api.get("/readyz", token=None)).status == 200


@http_test
async def test_unknown_path_or_method_gets_suggestion(api: Api) -> None:
    reply = await api.get("/v1/workload")
    assert (reply.status, reply.json["code"], reply.json["cure"]) == (404, "no_such_path", "did you mean workloads?")
    for path in ("/", "//", "/v1", "/v1/", "/v1/tenants/", "/v1/workloads/web", "/v1/tenants/a/b/c/d", "/v2/tenants"):
        assert (await api.get(path)).json["code"] == "no_such_path", path
    assert (await api.get("/" + "a/" * 4_000)).status == 404
    wrong = await api.ask("DELETE", "/v1/tenants")
    assert (wrong.status, wrong.json["code"], wrong.headers["allow"]) == (405, "method", "GET, POST, HEAD")
    head = await api.ask("HEAD", "/v1/tenants")
    assert head.status == 200


@http_test
async def test_unknown_query_parameter_is_refused_with_suggestion(api: Api) -> None:
    reply = await api.get("/v1/tenants?labelselector=a")
    assert (reply.status, reply.json["field"], reply.json["cure"]) == (400, "labelselector", "did you mean labelSelector?")
    for query, field in (
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("watch=perhaps", "watch"),
        ("limit=1&limit=2", "limit"),
    ):
        reply = await api.get(f"/v1/tenants?{query}")
        assert (reply.status, reply.json["code"], reply.json["field"]) == (400, "malformed", field)
    assert (await api.get("/v1/tenants?" + "a" * 60_000)).status == 414
    assert (await api.get("/v1/tenants?%ff=1")).status == 400
    assert (await api.get("/v1/tenants?" + "&".join(f"a{i}=1" for i in range(100)))).status == 400


@http_test
async def test_oversized_body_gets_413_with_or_without_length(api: Api) -> None:
    """A23."""
    large = b" " * (OBJECT_BYTES_MAX + 1)
    announced = await api.ask("POST", "/v1/tenants", large)
    assert (announced.status, announced.json["code"], announced.headers["connection"]) == (413, "too_large", "close")
    chunked = await api.ask("POST", "/v1/tenants", pieces=[b"x" * 65_536] * 17 + [b""])
    assert (chunked.status, chunked.json["code"], chunked.headers["connection"]) == (413, "too_large", "close")
    on_get = await api.ask("GET", "/v1/tenants", b"{}")
    assert on_get.status == 413
    false_length = await api.ask("POST", "/v1/tenants", b"{}", headers={"content-length": "9" * 40})
    assert false_length.status == 413


@http_test
async def test_compressed_or_non_json_body_is_refused(api: Api) -> None:
    """A22 and A23: no YAML is parsed here, and nothing is decompressed."""
    zipped = await api.ask("POST", "/v1/tenants", b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (zipped.status, zipped.json["code"]) == (413, "too_large")
    strange = await api.ask("POST", "/v1/tenants", b"{}", headers={"content-encoding": "rot13"})
    assert (strange.status, strange.json["code"]) == (415, "media_type")
    form = await api.ask("POST", "/v1/tenants", b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    assert form.status == 415 and "application/json" in form.json["cure"]
    patch = await api.ask("PATCH", "/v1/tenants/a", b"{}")
    assert (patch.status, patch.headers["accept-patch"]) == (415, "application/merge-patch+json")


HOSTILE = [
    b"", b"   ", b"{", b"[", b"null", b"1", b'"x"', b"{}", b"[]", b"[[]]", b"{]", b'{"a":}', b"nul", b"\xff\xfe", b"\x00",
    b'{"kind":"Tenant","kind":"Tenant"}', b'{"a":{"b":1,"b":2}}', b"[" * 100_000, b'{"a":' * 70 + b"1" + b"}" * 70,
    b"[" * 65 + b"]" * 65, b'{"a":1e999}', b'{"a":NaN}', b'{"a":' + b"9" * 5_000 + b"}", b'"\\ud800"', b'{"\\ud800":1}',
    b"--- \nkind: Tenant", b"kind: Tenant", b'{"apiVersion":"remit/v1"}', b'{"kind":"Lease"}', b'{"kind":1}',
    b'{"metadata":[]}', '{"kind":"\u202e"}'.encode(),
    b'{"kind":"Tenant","metadata":{"name":"' + b"a" * 10_000 + b'"}}', b"\xef\xbb\xbf{}",
]  # fmt: skip


@http_test
async def test_hostile_bodies_get_problem_on_every_route(api: Api) -> None:
    """A24, A25, A26 and A28, on every route that parses a body."""
    await api.must("POST", "/v1/tenants", tenant())
    merge = {"content-type": "application/merge-patch+json"}
    for body in HOSTILE:
        replies = [
            await api.ask("POST", "/v1/tenants", body),
            await api.ask("PUT", "/v1/tenants/acme", body),
            await api.ask("PATCH", "/v1/tenants/acme", body, headers=merge),
            await api.ask("POST", "/v1/apply", body),
            await api.ask("POST", "/v1/claims", body),
            await api.ask("POST", "/v1/follow", body),
        ]
        for reply in replies:
            changed_nothing = reply.status == 200 and body in (b"{}", b'{"apiVersion":"remit/v1"}') and reply is replies[2]
            assert 400 <= reply.status < 500 or changed_nothing, (body[:40], reply.status, reply.body[:200])
            if not changed_nothing:
                assert reply.json["code"] and reply.json["detail"] and reply.json["cure"], (body[:40], reply.body)
        component_reply = await api.ask("POST", "/v1/ask", body)
        assert component_reply.status == 200 and component_reply.json


@http_test
async def test_duplicate_keys_depth_and_syntax_errors_are_distinguished(api: Api) -> None:
    twice = await api.ask("POST", "/v1/tenants", b'{"kind":"Tenant","spec":{"a":1,"a":2}}')
    assert (twice.status, twice.json["code"], twice.json["field"]) == (400, "malformed", "a")
    deep = await api.ask("POST", "/v1/tenants", b"[" * 65 + b"]" * 65)
    assert (deep.status, deep.json["code"]) == (400, "too_deep")
    half = await api.ask("POST", "/v1/tenants", b'{"kind": "Tenant",\n "spec": }')
    assert (half.status, half.json["code"]) == (400, "malformed") and "line 2" in half.json["detail"]


@http_test
async def test_trace_id_is_propagated_or_generated(api: Api) -> None:
    mine = await api.ask("POST", "/v1/tenants", tenant(), headers={"Remit-Trace": "from-a-browser/1"})
    assert mine.headers["remit-trace"] == "from-a-browser/1"
    rows = (await api.store.range("batch/", limit=1_000)).rows
    assert any(b"from-a-browser/1" in row.value for row in rows), "the authority's record lacks the trace"
    made = await api.get("/v1/nothing")
    assert len(made.headers["remit-trace"]) >= 8
    for bad in ("", "a b", "x" * 129, "\x7f"):
        reply = await api.get("/v1/tenants", headers={"Remit-Trace": bad})
        assert (reply.status, reply.json["field"]) == (400, "Remit-Trace")


@http_test
async def test_request_for_other_host_gets_421(api: Api) -> None:
    """A40: DNS rebinding to this address. It is refused before authentication."""
    for host in ("evil.example", "evil.example:7420", "10.0.0.1", "localhost.evil.example", "[::2]:80", ""):
        reply = await api.get("/v1/tenants", headers={"Host": host}, token=None)
        assert (reply.status, reply.json["code"]) == (421, "misdirected"), host
    for host in ("127.0.0.1:7420", "localhost", "LOCALHOST:1", "[::1]:7420", "127.0.0.2"):
        assert (await api.get("/v1/tenants", headers={"Host": host})).status == 200, host


@http_test
async def test_cross_site_write_is_refused(api: Api) -> None:
    """A39: even with a valid token."""
    local_host = {"Host": "127.0.0.1:7420"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[", ""):
        reply = await api.ask("POST", "/v1/tenants", tenant(), headers={**local_host, "Origin": origin})
        assert (reply.status, reply.json["code"]) == (403, "cross_site"), origin
    own = await api.ask("POST", "/v1/tenants", tenant(), headers={**local_host, "Origin": "http://127.0.0.1:7420"})
    assert own.status == 201
    assert (await api.get("/v1/tenants", headers={**local_host, "Origin": "https://evil.example"})).status == 200


def test_total_size_of_bodies_in_flight_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 1_000)

    async def main() -> None:
        async with api() as client:
            large = await client.ask("POST", "/v1/tenants", b" " * 1_001)
            assert (large.status, large.json["code"]) == (429, "overloaded")
            assert client.app.bodies.held == 0
            assert (await client.ask("POST", "/v1/tenants", tenant())).status == 201
            assert client.app.bodies.held == 0

    asyncio.run(main())


@http_test
async def test_malformed_conditional_headers_are_refused(api: Api) -> None:
    for name, value in (("If-Match", "abc"), ("If-Match", '"0"'), ("If-Match", ""), ("If-None-Match", '"5"')):
        reply = await api.ask("PUT", "/v1/tenants/acme", tenant(), headers={name: value})
        assert (reply.status, reply.json["field"]) == (400, name), (name, value)


def test_internal_error_gets_500_logs_one_line_and_server_continues() -> None:
    async def broken(client: RequestContext, server: ServerContext) -> Any:
        raise KeyError("no such thing")

    async def main() -> None:
        async with api(routes=(*ROUTES, Route("GET", "/v1/broken", "broken", "Breaks.", broken))) as client:
            reply = await client.get("/v1/broken", headers={"Remit-Trace": "t1"})
            assert (reply.status, reply.json["code"], reply.headers["remit-trace"]) == (500, "fault", "t1")
            assert "no such thing" not in reply.body.decode()
            assert client.internal_errors == ["GET /v1/broken: KeyError('no such thing')"]
            client.internal_errors.clear()
            assert (await client.get("/v1/tenants")).status == 200

    asyncio.run(main())


def test_flood_waits_in_fair_queue_while_health_and_components_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "SEATS", 2)
    monkeypatch.setattr(fair_queue, "FLOW_WAITING_MAX", 3)
    release = asyncio.Event()
    in_flight: list[int] = []

    async def slow(client: RequestContext, server: ServerContext) -> Any:
        in_flight.append(1)
        await release.wait()
        return PlainTextResponse("done")

    async def main() -> None:
        async with api(routes=(*ROUTES, Route("GET", "/v1/slow", "slow", "Lasts.", slow))) as client:
            flood = [asyncio.ensure_future(client.get("/v1/slow")) for _ in range(6)]
            await asyncio.sleep(0.05)
            assert len(in_flight) == 2 and [one.done() for one in flood] == [False] * 5 + [True]
            refused = flood[5].result()
            assert (refused.status, refused.json["code"]) == (429, "throttled")
            assert (await client.get("/readyz")).status == 200
            component_reply = await client.ask("POST", "/v1/ask", b'{"type":"call"}')
            assert component_reply.status == 200 and component_reply.json["status"]["scope"] == "test"
            flood[4].cancel()  # a client that disconnects while waiting takes no seat
            release.set()
            assert [(await one).status for one in flood[:4]] == [200] * 4
            assert (await client.get("/v1/tenants")).status == 200

    asyncio.run(main())


def test_slow_request_gets_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_MS_MAX", 50)

    async def slow(client: RequestContext, server: ServerContext) -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        async with api(routes=(*ROUTES, Route("GET", "/v1/slow", "slow", "Lasts.", slow))) as client:
            reply = await client.get("/v1/slow")
            assert (reply.status, reply.json["code"]) == (504, "timeout")

    asyncio.run(main())


def test_missing_body_gets_408_and_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_MS_MAX", 50)

    async def main() -> None:
        async with api() as client:
            reply = await client.ask("POST", "/v1/tenants", pieces=[])
            assert (reply.status, reply.json["code"]) == (408, "timeout") and "nothing was done" in reply.json["cure"]

    asyncio.run(main())


class StuckAuthority:
    """An authority that cannot write: its disk is full and it refuses at once, or it never answers."""

    def __init__(self, leading: Any, *, silent: bool) -> None:
        self._leading, self._silent, self.calls = leading, silent, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leading, name)

    async def submit(self, operations: Any, /) -> Any:
        self.calls += 1
        if self._silent:
            await asyncio.Event().wait()
        raise Overloaded(50, "no room to write; nothing was applied: free space there")


@pytest.mark.parametrize("silent", [False, True])
def test_write_gets_answer_in_time_while_authority_is_stuck(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """L14: within ten seconds, of which the authority has eight; here a tenth of that."""
    assert at_desk.AUTHORITY_DEADLINE_MS <= 8_000 < 10_000
    monkeypatch.setattr(at_desk, "AUTHORITY_DEADLINE_MS", 800)
    monkeypatch.setattr(at_desk, "AUTHORITY_RETRY_MS", 200)

    async def main() -> None:
        async with api() as client:
            leads = client.server.standby.leading
            stuck = StuckAuthority(leads, silent=silent)
            client.server.standby.leading = stuck  # type: ignore[assignment]
            began = asyncio.get_running_loop().time()
            reply = await client.ask("POST", "/v1/tenants", tenant())
            client.server.standby.leading = leads
            assert asyncio.get_running_loop().time() - began < 1.2
            assert reply.status in (503, 504), reply
            assert stuck.calls >= 2, "the claim was retried while time was left"

    asyncio.run(main())


def test_server_without_authority_gets_503() -> None:
    async def main() -> None:
        async with api(lead=False) as client:
            ready = await client.get("/readyz")
            assert (ready.status, ready.json["code"]) == (503, "unavailable") and "authority" in ready.json["detail"]
            assert int(ready.headers["retry-after"]) >= 1
            assert (await client.get("/healthz")).status == 200
            # Before the tokens have been read no caller can be authenticated, so none is refused for that.
            for method, path, body in (("GET", "/v1/status", None), ("POST", "/v1/tenants", tenant())):
                reply_ = await client.ask(method, path, body)
                assert (reply_.status, reply_.json["code"]) == (503, "unavailable") and "retry-after" in reply_.headers

    asyncio.run(main())


def test_merge_patch_follows_rfc_7396_appendix() -> None:
    """The examples of its appendix."""
    for target, patch, result in (
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ):
        assert merge_patch(target, patch) == result


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max((depth(one) for one in inside), default=0)


@given(values)
def test_strict_json_parser_agrees_with_json_and_counts_depth(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert nesting_depth(text) == depth(value)
    assert parse_strict_json(text) == value


@given(st.binary(max_size=200))
def test_arbitrary_bytes_parse_or_get_400(body: bytes) -> None:
    try:
        parse_strict_json(body)
    except ApiProblem as failure:
        assert failure.document.status == 400 and failure.document.cure


def test_workload_of_unknown_tenant_is_refused() -> None:
    async def main() -> None:
        async with api() as client:
            reply = await client.ask("POST", "/v1/tenants/nobody/workloads", workload("web", "nobody"))
            assert 400 <= reply.status < 500 and reply.json["cure"]

    asyncio.run(main())
