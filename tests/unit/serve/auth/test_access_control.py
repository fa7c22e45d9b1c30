"""Access control over HTTP: every role with the real application and authority, which requests it may make and until when."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from remit.client.remote_store import RangeRequest, WatchRequest
from remit.client.rpc import EndpointCall
from remit.model.claims import Acquire, Actor, Operation, OperationID
from remit.model.objects import enc_hook
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import AssignmentsRequest, NodeHeartbeat, NodeState
from remit.serve.diagnostics.audit_log import AuditLog
from remit.world.interfaces import DiskFull
from tests.unit.serve.auth.user_tokens import ANN, BOB, EVE, LOU, create_users, token, wait_for_token
from tests.unit.serve.in_memory_server import TOKENS, Api, http_test, node, secret, tenant, workload

WORK, OTHER_WORK = "/v1/tenants/acme/workloads", "/v1/tenants/bolt/workloads"


def names(answer: Any) -> list[str]:
    return [one["metadata"]["name"] for one in answer["items"]]


@http_test
async def test_member_sees_own_tenant_and_gets_404_for_others(api: Api) -> None:
    await create_users(api)
    assert names((await api.get("/v1/workloads", token=ANN)).json) == ["of-acme"], "only her own tenant is listed"
    assert names((await api.get(WORK, token=ANN)).json) == ["of-acme"]
    for path in (
        OTHER_WORK,
        f"{OTHER_WORK}/of-bolt",
        f"{OTHER_WORK}?watch=true",
        f"{OTHER_WORK}/of-bolt/explain",
        "/v1/tenants/nobody/workloads",
    ):
        reply = await api.get(path, token=ANN)
        assert (reply.status, reply.json["code"]) == (404, "not_found"), path
    for method, path, body in (("POST", OTHER_WORK, workload("x", "bolt")), ("DELETE", f"{OTHER_WORK}/of-bolt", None)):
        assert (await api.ask(method, path, body, token=ANN)).status == 404
    crossed = await api.ask("POST", WORK, workload("x", "bolt"), token=ANN)
    assert (crossed.status, crossed.json["field"]) == (422, "metadata.tenant")
    many = await api.ask("POST", "/v1/apply", [workload("mine"), workload("theirs", "bolt")], token=ANN)
    assert (many.status, many.json["code"]) == (403, "tenant"), "nothing is applied or compared with existing objects"
    assert names((await api.get(WORK, token=ANN)).json) == ["of-acme"]
    assert (await api.ask("POST", "/v1/plan", [workload("of-bolt", "bolt")], token=ANN)).status == 403
    assert (await api.ask("POST", WORK, workload("mine"), token=ANN)).status == 201
    assert names((await api.get(OTHER_WORK, token=BOB)).json) == ["of-bolt"]


@http_test
async def test_cluster_objects_are_partly_readable_by_members_and_written_by_admins(api: Api) -> None:
    await create_users(api)
    for path in ("/v1/regions", "/v1/priorityclasses", "/v1/tenants/acme"):
        assert (await api.get(path, token=ANN)).status == 200, path
    for path in ("/v1/nodes", "/v1/tokens", "/v1/policies", "/v1/leases", "/v1/tenants", "/v1/top/nodes", "/v1/tenants/bolt"):
        assert (await api.get(path, token=ANN)).status in (403, 404), path
    assert (await api.get("/v1/tenants/bolt", token=ANN)).status == 404
    for method, path, body in (("POST", "/v1/tenants", tenant("mine")), ("POST", "/v1/nodes", node("n9"))):
        assert (await api.ask(method, path, body, token=ANN)).status == 403
    patch = {"content-type": "application/merge-patch+json"}
    more = await api.ask("PATCH", "/v1/tenants/acme", {"spec": {"weight": 9}}, headers=patch, token=ANN)
    assert more.status == 403
    own = await api.ask("POST", "/v1/tokens", token("more", "another-token-of-ann", "admin"), token=ANN)
    assert own.status == 403, "members cannot create tokens for themselves"
    assert (await api.get("/v1/account", token=ANN)).status == 403
    assert (await api.get("/v1/account?regarding=workload/bolt/of-bolt", token=ANN)).status == 403
    assert (await api.get("/v1/account?regarding=node/acme", token=ANN)).status == 403
    assert (await api.get("/v1/account?regarding=workload/acme/of-acme", token=ANN)).status == 200


@http_test
async def test_viewer_may_plan_but_change_nothing(api: Api) -> None:
    await create_users(api)
    await api.must("POST", "/v1/tenants/acme/secrets", secret("db", password="sesame"))
    for text in (LOU, EVE):
        assert (await api.get(WORK, token=text)).status == 200
        seen = await api.get("/v1/tenants/acme/secrets/db", token=text)
        assert seen.json["spec"]["data"] == {"password": ""}
        assert (await api.ask("POST", "/v1/plan", [workload("x")], token=text)).status == 200
        for method, path, body in (
            ("POST", WORK, workload("x")),
            ("DELETE", f"{WORK}/of-acme", None),
            ("PUT", f"{WORK}/x", workload("x")),
        ):
            refused = await api.ask(method, path, body, token=text)
            assert (refused.status, refused.json["code"]) == (403, "not_owner")
    assert (await api.get(OTHER_WORK, token=LOU)).status == 404 and (await api.get(OTHER_WORK, token=EVE)).status == 200


@http_test
async def test_api_and_component_routes_accept_only_their_own_tokens(api: Api) -> None:
    """A02."""
    await create_users(api)
    status = msgspec.json.encode(EndpointCall(), enc_hook=enc_hook)
    for text in (TOKENS["agent"], TOKENS["scheduler"], TOKENS["controllers"]):
        assert (await api.get("/v1/workloads", token=text)).status == 401
        assert (await api.ask("POST", "/v1/ask", status, token=text)).status == 200
    for text in (TOKENS["admin"], ANN, EVE):
        assert (await api.ask("POST", "/v1/ask", status, token=text)).status == 401
        assert (await api.ask("POST", "/v1/claims", {"operations": []}, token=text)).status == 401
    assert (await api.ask("POST", "/v1/claims", {"operations": []}, token=TOKENS["agent"])).status == 401


@http_test
async def test_agent_acts_only_for_its_own_nodes_and_reads_no_rows(api: Api) -> None:
    """A07."""
    status = (await api.get("/v1/status")).json

    def claim(nonce: str, lease: str, role: Role = Role.AGENT) -> bytes:
        operation = Operation(
            OperationID(f"{status['incarnation']}.{status['window']}.{nonce}"),
            Actor("m", role),
            Acquire(lease, Duration(60_000)),
        )
        return msgspec.json.encode(EndpointCall((operation,)), enc_hook=enc_hook)

    async def post_status(body: bytes, path: str = "/v1/ask") -> int:
        return (await api.ask("POST", path, body, token=TOKENS["agent"])).status

    assert await post_status(claim("1", "agent/n1")) == 200
    beat = NodeHeartbeat(Actor("m", Role.AGENT, "agent/n2", 1), NodeState("n2"))
    for wrong in (
        claim("2", "agent/n2"),
        claim("3", "scheduler", Role.SCHEDULER),
        msgspec.json.encode(EndpointCall(beats=(beat,)), enc_hook=enc_hook),
        msgspec.json.encode(EndpointCall(heard=True), enc_hook=enc_hook),
        msgspec.json.encode(RangeRequest("secret/")),
    ):
        assert await post_status(wrong) == 403, wrong
    for wrong in (msgspec.json.encode(AssignmentsRequest(("n1", "n2"))), msgspec.json.encode(WatchRequest(""))):
        assert await post_status(wrong, "/v1/follow") == 403


@http_test
async def test_revoked_token_gets_401_and_ends_open_watch(api: Api) -> None:
    """A03."""
    await create_users(api)
    messages, ended = watch(api, ANN)
    patch = {"content-type": "application/merge-patch+json"}
    await api.must("PATCH", "/v1/tokens/ann", {"spec": {"revoked": True}}, headers=patch)
    async with asyncio.timeout(5):
        await ended.wait()
    reply = await api.get(WORK, token=ANN)
    assert reply.status == 401 and "revoked" in reply.json["detail"]
    assert not any(message.get("more_body") is False for message in messages[1:] if message), (
        "the response is aborted and does not look complete"
    )
    again = await api.ask("PATCH", "/v1/tokens/ann", {"spec": {"revoked": None}}, headers=patch)
    assert again.status == 409


def watch(api: Api, token: str) -> tuple[list[Any], asyncio.Event]:
    """Messages sent to a watch with this token, and an event that is set when the watch ends."""
    messages: list[Any] = []
    ended = asyncio.Event()

    async def receive() -> Any:
        if not messages:
            messages.append(None)
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.Event().wait()
        return None

    async def send(message: Any) -> None:
        messages.append(message)

    headers = [(b"authorization", f"Bearer {token}".encode())]
    scope = {"type": "http", "method": "GET", "path": WORK, "raw_path": WORK.encode(), "query_string": b"watch=true"}
    watching = asyncio.ensure_future(api.app({**scope, "headers": headers}, receive, send))
    watching.add_done_callback(lambda _: ended.set())
    return messages, ended


@http_test
async def test_watch_ends_when_its_token_expires(api: Api) -> None:
    await create_users(api)
    ends = (datetime.now(UTC) + timedelta(seconds=2)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    await api.must("POST", "/v1/tokens", token("brief", "a-brief-token-of-ann", "member", tenant="acme", expires=ends))
    await wait_for_token(api, "a-brief-token-of-ann")
    messages, ended = watch(api, "a-brief-token-of-ann")
    async with asyncio.timeout(20):
        await ended.wait()
    assert len(messages) > 1, "it received something before"
    assert api.server.clock.wall() >= ends
    assert not any(message.get("more_body") is False for message in messages[1:] if message), "the response is aborted"


@http_test
async def test_expired_token_and_token_of_deleted_tenant_get_401(api: Api) -> None:
    await create_users(api)
    await api.must(
        "POST", "/v1/tokens", token("old", "an-old-token-of-ann", "member", tenant="acme", expires="2001-01-01T00:00:00Z")
    )
    await api.must("POST", "/v1/tokens", token("new", "a-new-token-of-eve", "viewer"))
    await wait_for_token(api, "a-new-token-of-eve")
    reply = await api.get(WORK, token="an-old-token-of-ann")
    assert reply.status == 401 and "expired" in reply.json["detail"]
    await api.must("DELETE", f"{OTHER_WORK}/of-bolt")
    await api.must("DELETE", "/v1/tenants/bolt")
    await wait_for_token(api, BOB, good=False)
    assert (await api.get("/v1/workloads", token=BOB)).status == 401


@http_test
async def test_audit_records_changes_and_refusals_without_tokens(api: Api) -> None:
    await create_users(api)
    await api.ask("POST", WORK, workload("mine"), token=ANN, headers={"Remit-Trace": "t-1"})
    await api.get(f"{OTHER_WORK}/of-bolt", token=ANN)
    for _ in range(5):
        await api.get(WORK, token="nobody's-token")
    api.server.audit.flush_counts(all_=True)
    items = (await api.must("GET", "/v1/audit?limit=1000"))["items"]
    made = next(one for one in items if one.get("trace") == "t-1")
    assert (made["subject"], made["role"], made["tenant"], made["action"], made["status"]) == (
        "ann",
        "member",
        "acme",
        "createWorkload",
        201,
    )
    assert made["target"] == f"POST {WORK}" and made["operation"]
    across = next(one for one in items if one["status"] == 404)
    assert (across["subject"], across["action"], across["code"]) == ("ann", "getWorkload", "not_found")
    strangers = [one for one in items if one["status"] == 401]
    assert sum(one.get("count", 1) for one in strangers) == 5 and len(strangers) == 2, "repeated refusals are counted"
    mine = (await api.get("/v1/audit", token=ANN)).json["items"]
    assert mine and all(one["tenant"] == "acme" for one in mine)
    assert not any("nobody's-token" in str(one) or ANN in str(one) for one in items)


@http_test
async def test_changes_are_refused_while_audit_log_cannot_be_written(api: Api) -> None:
    await create_users(api)
    api.server.audit = AuditLog(FullDisk(), api.server.clock)
    assert (await api.ask("POST", WORK, workload("one"), token=ANN)).status == 201, "the first failure is not known in advance"
    refused = await api.ask("POST", WORK, workload("two"), token=ANN)
    assert (refused.status, refused.json["code"]) == (503, "unavailable") and "audit" in refused.json["detail"]
    assert (await api.get(WORK, token=ANN)).status == 200, "reads are still answered"


class FullDisk:
    """A disk that is full."""

    def add(self, line: bytes) -> None:
        raise DiskFull("no room", "free some")

    def sync(self) -> None:
        return

    def read_backwards(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "bearer   ",
        "Basic YTpi",
        "Bearer eyJhbGciOiJub25lIn0.eyJyb2xlIjoiYWRtaW4ifQ.",
        "Bearer \x00",
        "Bearer " + "a" * 9_000,
    ],
)
def test_malformed_credentials_get_401(authorization: str) -> None:
    """A01: including what another system would accept, such as `alg: none`."""

    @http_test
    async def request(api: Api) -> None:
        reply = await api.get("/v1/workloads", token=None, headers={"authorization": authorization})
        assert (reply.status, reply.json["code"]) == (401, "unauthenticated")

    request()
