"""Does hostile or mistaken input earn a clear problem, and never a 500? Who may ask, how much, and in which words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from remit.client.endpoint import Overloaded
from remit.serve import authority_access
from remit.serve.http import app as module
from remit.serve.http import fair_queue
from remit.serve.http.bodies import merge_patch, nesting_depth, parse_strict_json
from remit.serve.http.replies import ApiProblem
from remit.serve.http.route_table import ROUTES
from remit.serve.http.routes import OBJECT_BYTES_MAX, RequestContext, Route
from remit.serve.server_context import ServerContext
from tests.unit.serve.in_memory_server import Api, api, story, tenant, workload


@story
async def test_nobody_without_the_token_learns_anything(api: Api) -> None:
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


@story
async def test_a_path_or_method_that_is_none_says_what_there_is(api: Api) -> None:
    reply = await api.get("/v1/workload")
    assert (reply.status, reply.json["code"], reply.json["cure"]) == (404, "no_such_path", "did you mean workloads?")
    for path in ("/", "//", "/v1", "/v1/", "/v1/tenants/", "/v1/workloads/web", "/v1/tenants/a/b/c/d", "/v2/tenants"):
        assert (await api.get(path)).json["code"] == "no_such_path", path
    assert (await api.get("/" + "a/" * 4_000)).status == 404
    wrong = await api.ask("DELETE", "/v1/tenants")
    assert (wrong.status, wrong.json["code"], wrong.headers["allow"]) == (405, "method", "GET, POST, HEAD")
    head = await api.ask("HEAD", "/v1/tenants")
    assert head.status == 200


@story
async def test_a_query_that_is_not_known_is_refused_with_a_guess(api: Api) -> None:
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


@story
async def test_a_body_is_bounded_announced_or_not(api: Api) -> None:
    """A23."""
    large = b" " * (OBJECT_BYTES_MAX + 1)
    announced = await api.ask("POST", "/v1/tenants", large)
    assert (announced.status, announced.json["code"], announced.headers["connection"]) == (413, "too_large", "close")
    chunked = await api.ask("POST", "/v1/tenants", pieces=[b"x" * 65_536] * 17 + [b""])
    assert (chunked.status, chunked.json["code"], chunked.headers["connection"]) == (413, "too_large", "close")
    on_get = await api.ask("GET", "/v1/tenants", b"{}")
    assert on_get.status == 413
    lying = await api.ask("POST", "/v1/tenants", b"{}", headers={"content-length": "9" * 40})
    assert lying.status == 413


@story
async def test_a_body_is_uncompressed_json(api: Api) -> None:
    """A22 and A23: no YAML is read here, and nothing that inflates."""
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


@story
async def test_hostile_bodies_earn_a_problem_everywhere(api: Api) -> None:
    """A24, A25, A26 and A28, at every door that reads."""
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
        door = await api.ask("POST", "/v1/ask", body)
        assert door.status == 200 and door.json


@story
async def test_duplicates_and_depth_are_told_apart(api: Api) -> None:
    twice = await api.ask("POST", "/v1/tenants", b'{"kind":"Tenant","spec":{"a":1,"a":2}}')
    assert (twice.status, twice.json["code"], twice.json["field"]) == (400, "malformed", "a")
    deep = await api.ask("POST", "/v1/tenants", b"[" * 65 + b"]" * 65)
    assert (deep.status, deep.json["code"]) == (400, "too_deep")
    half = await api.ask("POST", "/v1/tenants", b'{"kind": "Tenant",\n "spec": }')
    assert (half.status, half.json["code"]) == (400, "malformed") and "line 2" in half.json["detail"]


@story
async def test_a_trace_is_kept_or_made(api: Api) -> None:
    mine = await api.ask("POST", "/v1/tenants", tenant(), headers={"Remit-Trace": "from-a-browser/1"})
    assert mine.headers["remit-trace"] == "from-a-browser/1"
    rows = (await api.store.range("batch/", limit=1_000)).rows
    assert any(b"from-a-browser/1" in row.value for row in rows), "the authority's record does not know it"
    made = await api.get("/v1/nothing")
    assert len(made.headers["remit-trace"]) >= 8
    for bad in ("", "a b", "x" * 129, "\x7f"):
        reply = await api.get("/v1/tenants", headers={"Remit-Trace": bad})
        assert (reply.status, reply.json["field"]) == (400, "Remit-Trace")


@story
async def test_what_was_meant_for_another_host_is_turned_away(api: Api) -> None:
    """A40: a page whose name was made to point here. It is told so before it is asked for a token."""
    for host in ("evil.example", "evil.example:7420", "10.0.0.1", "localhost.evil.example", "[::2]:80", ""):
        reply = await api.get("/v1/tenants", headers={"Host": host}, token=None)
        assert (reply.status, reply.json["code"]) == (421, "misdirected"), host
    for host in ("127.0.0.1:7420", "localhost", "LOCALHOST:1", "[::1]:7420", "127.0.0.2"):
        assert (await api.get("/v1/tenants", headers={"Host": host})).status == 200, host


@story
async def test_a_page_from_elsewhere_writes_nothing(api: Api) -> None:
    """A39: even if it knew the token."""
    here = {"Host": "127.0.0.1:7420"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[", ""):
        reply = await api.ask("POST", "/v1/tenants", tenant(), headers={**here, "Origin": origin})
        assert (reply.status, reply.json["code"]) == (403, "cross_site"), origin
    own = await api.ask("POST", "/v1/tenants", tenant(), headers={**here, "Origin": "http://127.0.0.1:7420"})
    assert own.status == 201
    assert (await api.get("/v1/tenants", headers={**here, "Origin": "https://evil.example"})).status == 200


def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODIES_BYTES_MAX", 1_000)

    async def main() -> None:
        async with api() as asked:
            large = await asked.ask("POST", "/v1/tenants", b" " * 1_001)
            assert (large.status, large.json["code"]) == (429, "overloaded")
            assert asked.app.bodies.held == 0
            assert (await asked.ask("POST", "/v1/tenants", tenant())).status == 201
            assert asked.app.bodies.held == 0

    asyncio.run(main())


@story
async def test_headers_that_cannot_be_meant_are_refused(api: Api) -> None:
    for name, value in (("If-Match", "abc"), ("If-Match", '"0"'), ("If-Match", ""), ("If-None-Match", '"5"')):
        reply = await api.ask("PUT", "/v1/tenants/acme", tenant(), headers={name: value})
        assert (reply.status, reply.json["field"]) == (400, name), (name, value)


def test_our_own_bug_is_told_in_one_line_and_ends_one_request() -> None:
    async def broken(asked: RequestContext, desk: ServerContext) -> Any:
        raise KeyError("no such thing")

    async def main() -> None:
        async with api(routes=(*ROUTES, Route("GET", "/v1/broken", "broken", "Breaks.", broken))) as asked:
            reply = await asked.get("/v1/broken", headers={"Remit-Trace": "t1"})
            assert (reply.status, reply.json["code"], reply.headers["remit-trace"]) == (500, "internal_error", "t1")
            assert "no such thing" not in reply.body.decode()
            assert asked.complaints == ["GET /v1/broken: KeyError('no such thing')"]
            asked.complaints.clear()
            assert (await asked.get("/v1/tenants")).status == 200

    asyncio.run(main())


def test_a_flood_waits_in_turn_and_what_keeps_a_scope_alive_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "SEATS", 2)
    monkeypatch.setattr(fair_queue, "FLOW_WAITING_MAX", 3)
    go_on = asyncio.Event()
    under_way: list[int] = []

    async def slow(asked: RequestContext, desk: ServerContext) -> Any:
        under_way.append(1)
        await go_on.wait()
        return PlainTextResponse("done")

    async def main() -> None:
        async with api(routes=(*ROUTES, Route("GET", "/v1/slow", "slow", "Lasts.", slow))) as asked:
            flood = [asyncio.ensure_future(asked.get("/v1/slow")) for _ in range(6)]
            await asyncio.sleep(0.05)
            assert len(under_way) == 2 and [one.done() for one in flood] == [False] * 5 + [True]
            turned = flood[5].result()
            assert (turned.status, turned.json["code"]) == (429, "throttled")
            assert (await asked.get("/readyz")).status == 200
            door = await asked.ask("POST", "/v1/ask", b'{"type":"call"}')
            assert door.status == 200 and door.json["status"]["scope"] == "test"
            flood[4].cancel()  # one who leaves while waiting takes nobody's turn with it
            go_on.set()
            assert [(await one).status for one in flood[:4]] == [200] * 4
            assert (await asked.get("/v1/tenants")).status == 200

    asyncio.run(main())


def test_a_request_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_MS_MAX", 50)

    async def slow(asked: RequestContext, desk: ServerContext) -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        async with api(routes=(*ROUTES, Route("GET", "/v1/slow", "slow", "Lasts.", slow))) as asked:
            reply = await asked.get("/v1/slow")
            assert (reply.status, reply.json["code"]) == (504, "timeout")

    asyncio.run(main())


def test_a_body_that_does_not_come_is_told_so__nothing_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_MS_MAX", 50)

    async def main() -> None:
        async with api() as asked:
            reply = await asked.ask("POST", "/v1/tenants", pieces=[])
            assert (reply.status, reply.json["code"]) == (408, "timeout") and "nothing was done" in reply.json["cure"]

    asyncio.run(main())


class Stuck:
    """An authority that writes nothing: its disk is full, and says so at once; or says nothing."""

    def __init__(self, leading: Any, *, silent: bool) -> None:
        self._leading, self._silent, self.asked = leading, silent, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leading, name)

    async def submit(self, operations: Any, /) -> Any:
        self.asked += 1
        if self._silent:
            await asyncio.Event().wait()
        raise Overloaded(50, "no room to write; nothing was applied: free space there")


@pytest.mark.parametrize("silent", [False, True])
def test_while_nothing_can_be_written_every_call_is_answered_in_time(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """L14: within ten seconds, of which the authority has eight; here a tenth of that."""
    assert authority_access.DEADLINE_MS <= 8_000 < 10_000
    monkeypatch.setattr(authority_access, "DEADLINE_MS", 800)
    monkeypatch.setattr(authority_access, "RETRY_MS", 200)

    async def main() -> None:
        async with api() as asked:
            leads = asked.desk.authority.standby.leading
            stuck = Stuck(leads, silent=silent)
            asked.desk.authority.standby.leading = stuck  # type: ignore[assignment]
            began = asyncio.get_running_loop().time()
            reply = await asked.ask("POST", "/v1/tenants", tenant())
            asked.desk.authority.standby.leading = leads
            assert asyncio.get_running_loop().time() - began < 1.2
            assert reply.status in (503, 504), reply
            assert stuck.asked >= 2, "it was asked again while there was time"

    asyncio.run(main())


def test_without_an_authority_nothing_is_promised() -> None:
    async def main() -> None:
        async with api(lead=False) as asked:
            ready = await asked.get("/readyz")
            assert (ready.status, ready.json["code"]) == (503, "unavailable") and "authority" in ready.json["detail"]
            assert int(ready.headers["retry-after"]) >= 1
            assert (await asked.get("/healthz")).status == 200
            # Who asks is not known before the tokens have been read: nobody is refused for that.
            for method, path, body in (("GET", "/v1/status", None), ("POST", "/v1/tenants", tenant())):
                told = await asked.ask(method, path, body)
                assert (told.status, told.json["code"]) == (503, "unavailable") and "retry-after" in told.headers

    asyncio.run(main())


def test_what_is_merged_follows_rfc_7396() -> None:
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
def test_what_is_json_is_read_as_it_is(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert nesting_depth(text) == depth(value)
    assert parse_strict_json(text) == value


@given(st.binary(max_size=200))
def test_whatever_the_bytes_the_answer_is_a_value_or_a_failure(body: bytes) -> None:
    try:
        parse_strict_json(body)
    except ApiProblem as failure:
        assert failure.document.status == 400 and failure.document.cure


def test_workloads_of_a_tenant_that_is_not_there_are_refused() -> None:
    async def main() -> None:
        async with api() as asked:
            reply = await asked.ask("POST", "/v1/tenants/nobody/workloads", workload("web", "nobody"))
            assert 400 <= reply.status < 500 and reply.json["cure"]

    asyncio.run(main())
