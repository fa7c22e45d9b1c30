"""Claims over HTTP get verdicts, component routes answer and stream, and the status shows the state of the scope."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import msgspec

from remit.client.remote_store import RangeRequest, RowsPage, WatchRequest
from remit.client.rpc import EndpointCall, EndpointReply
from remit.model.claims import Acquire, Actor, AnyClaim, Apply, Operation, OperationID, encode_operation
from remit.model.kinds import Tenant, TenantSpec
from remit.model.metadata import Metadata
from remit.model.objects import dec_hook, enc_hook
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from tests.unit.serve.in_memory_server import TOKENS, Api, http_test, node, tenant


async def operation(api: Api, nonce: str, claim: AnyClaim, role: Role = Role.WORKLOADS) -> Operation:
    status = (await api.get("/v1/status")).json
    return Operation(OperationID(f"{status['incarnation']}.{status['window']}.{nonce}"), Actor("p", role), claim)


ACQUIRE = Acquire("workloads", Duration(60_000))
DECLARE = Apply(Tenant(metadata=Metadata(name="b"), spec=TenantSpec(quota=Amount())))


@http_test
async def test_each_claim_gets_verdict_and_retry_gets_same(api: Api) -> None:
    mine = [await operation(api, "1", ACQUIRE), await operation(api, "2", DECLARE)]
    body = {"operations": [json.loads(encode_operation(one)) for one in mine]}
    reply = await api.ask("POST", "/v1/claims", body, headers={"Remit-Trace": "t-7"})
    assert reply.status == 200
    first, second = reply.json["verdicts"]
    assert first["verdict"] == "accepted" and (second["verdict"], second["code"]) == ("refused", "stale_epoch")
    assert (await api.ask("POST", "/v1/claims", body)).json == reply.json  # the same ids get the same answers
    assert any(b"t-7" in row.value for row in (await api.store.range("batch/", limit=1_000)).rows)


@http_test
async def test_unreadable_claims_name_field(api: Api) -> None:
    wrong = await api.ask("POST", "/v1/claims", {"operations": [{"id": "x", "actor": {"name": "p", "role": "king"}}]})
    assert (wrong.status, wrong.json["code"]) == (422, "invalid")
    assert wrong.json["field"].startswith("operations") and wrong.json["cure"]
    more = await api.ask("POST", "/v1/claims", {"operations": [], "more": 1})
    assert more.status == 422


@http_test
async def test_component_route_answers_claims_and_row_ranges(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    operation_ = await operation(api, "1", ACQUIRE)
    body = msgspec.json.encode(EndpointCall((operation_,)), enc_hook=enc_hook)
    reply = msgspec.json.decode((await api.ask("POST", "/v1/ask", body)).body, type=EndpointReply, dec_hook=dec_hook)
    assert reply.verdicts is not None and len(reply.verdicts) == 1
    rows = msgspec.json.decode(
        (await api.ask("POST", "/v1/ask", msgspec.json.encode(RangeRequest("tenant/")))).body, type=RowsPage
    )
    assert [row[0] for row in rows.rows] == ["tenant/acme"]
    unread = await api.ask("POST", "/v1/ask", b"what?")
    assert unread.status == 200 and unread.json["failed"] == "unread"


@http_test
async def test_component_route_streams_until_server_shuts_down(api: Api) -> None:
    lines: list[bytes] = []
    sent, received = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, object]:
        if not sent.is_set():
            sent.set()
            return {"type": "http.request", "body": msgspec.json.encode(WatchRequest("tenant/")), "more_body": False}
        await asyncio.Event().wait()
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        lines.append(message.get("body", b""))
        if b"tenant/acme" in lines[-1]:
            received.set()

    headers = [(b"authorization", f"Bearer {TOKENS['controllers']}".encode()), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/follow", "raw_path": b"/v1/follow", "query_string": b""}
    following = asyncio.ensure_future(api.app({**scope, "headers": headers}, receive, send))
    await api.must("POST", "/v1/tenants", tenant())
    async with asyncio.timeout(5):
        await received.wait()
    api.server.streams.closing.set()
    async with asyncio.timeout(5):
        await following
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines if line)
    assert api.server.streams.count == 0


@http_test
async def test_status_shows_leader_epoch_and_nodes(api: Api) -> None:
    for name in ("n1", "n2"):
        await api.must("POST", "/v1/nodes", node(name))
    async with asyncio.timeout(5):
        while (await api.get("/v1/status")).json.get("nodes") != {"joining": 2}:  # noqa: ASYNC110 - the watch cache lags
            await asyncio.sleep(0.01)
    status = (await api.get("/v1/status")).json
    assert (status["scope"], status["leader"], status["epoch"]) == ("test", "server", 1)
    assert status["window"] >= 1 and status["version"] and status["revision"] > 0
