"""Exec sessions: reach the agent of the replica, pass data both ways, end with the client, and are refused with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from remit.model.identity import token_digest
from remit.model.kinds import PolicyMatch, PolicyRule
from remit.model.objects import encode, key
from remit.model.wire.agent_messages import ExecInputRequest, ExecRequest
from remit.model.wire.exec_frames import (
    FRAME_BYTES_MAX,
    MEDIA_TYPE,
    ExecExit,
    ExecFrame,
    ExecFrameReader,
    ExecFrameType,
    ExecRejected,
    ExecStart,
    TerminalSize,
    encode_frame,
)
from remit.observation.watch_cache import CachedRow
from remit.serve.components import replica_logs
from remit.world.net.rpc_client import SocketLink
from tests.unit.observation.row_fixtures import policy, replica, tenant, work
from tests.unit.serve.components.agent_connections import SECRET, STARTED_FRAME, agents, at, free_port
from tests.unit.serve.in_memory_server import Api, Reply, _Gathered, _scope, api
from tests.unit.serve.watch_cache_fixtures import CacheFixture

PATH = "/v1/tenants/t1/replicas/web-0/exec"
START_FRAME = encode_frame(ExecFrameType.START, ExecStart(("id", ";$(id)")))
EXITED_FRAME = bytes((ExecFrameType.EXITED,)) + msgspec.json.encode(ExecExit(code=3))


class Agent:
    """Answers as an agent does: input is echoed."""

    def __init__(self, *items: bytes, echoes: bool = False) -> None:
        self.items, self.echoes = items, echoes
        self.requests: list[ExecRequest] = []
        self.inputs: asyncio.Queue[ExecInputRequest] = asyncio.Queue()
        self.windows: list[TerminalSize] = []
        self.closed = asyncio.Event()

    async def request(self, body: bytes, /) -> bytes:
        self.inputs.put_nowait(msgspec.json.decode(body, type=ExecInputRequest))
        return b""

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        self.requests.append(msgspec.json.decode(body, type=ExecRequest))
        try:
            for item in self.items:
                yield item
            while self.echoes:
                inputs = await self.inputs.get()
                assert (inputs.token, inputs.session) == (SECRET, self.requests[0].session)
                if inputs.window is not None:
                    self.windows.append(inputs.window)
                if inputs.data:
                    yield bytes((ExecFrameType.STDOUT,)) + inputs.data
                if inputs.over:
                    yield EXITED_FRAME
                    return
        finally:
            self.closed.set()


def frames(reply: Reply) -> list[ExecFrame]:
    assert reply.status == 200, reply
    return ExecFrameReader().feed(reply.body)


async def exec_request(client: Api, *sent: bytes, path: str = PATH, **more: Any) -> Reply:
    return await client.ask("POST", path, pieces=list(sent), headers={"content-type": MEDIA_TYPE}, **more)


def scene(agent: Agent, test: Callable[[Api], Coroutine[Any, Any, None]], phase: str = "serving", **status: Any) -> None:
    async def main() -> None:
        port = free_port()
        web = replica("web", 0, phase, "" if phase == "pending" else "n1", **status)
        cluster = CacheFixture(at(port), tenant("t1"), *work("web"), web)
        async with api() as client, SocketLink({"agent": f"tcp:127.0.0.1:{port}"}).serve("agent", agent):
            client.server.agents = agents(cluster, client)
            async with asyncio.timeout(20):
                await test(client)

    asyncio.run(main())


def test_input_reaches_command_in_order_and_output_comes_back() -> None:
    agent = Agent(STARTED_FRAME, bytes((ExecFrameType.STDERR,)) + b"err", echoes=True)

    async def test(client: Api) -> None:
        begin = encode_frame(ExecFrameType.START, ExecStart(("cat", ";$(id)"), stdin=True))
        large = bytes(range(256)) * 400
        sent = (
            begin
            + encode_frame(ExecFrameType.INPUT, large)
            + encode_frame(ExecFrameType.TERMINAL_SIZE, TerminalSize(7, 8))
            + encode_frame(ExecFrameType.INPUT_END)
        )
        received = frames(await exec_request(client, sent[:3], sent[3:40], sent[40:]))
        assert [ExecFrameType(one.type) for one in received[:2]] == [ExecFrameType.STARTED, ExecFrameType.STDERR]
        assert b"".join(one.body for one in received if one.type == ExecFrameType.STDOUT) == large
        assert received[-1] == ExecFrame(ExecFrameType.EXITED, EXITED_FRAME[1:])
        one = agent.requests[0]
        assert (one.token, one.key, one.uid, one.attempt) == (SECRET, "replica/t1/web-0", "uweb0", 2)
        assert one.begin.argv == ("cat", ";$(id)")
        assert agent.windows == [TerminalSize(7, 8)]

    scene(agent, test, attempt=2)


def test_end_of_request_body_ends_input() -> None:
    agent = Agent(STARTED_FRAME, echoes=True)

    async def test(client: Api) -> None:
        assert frames(await exec_request(client, START_FRAME))[-1] == ExecFrame(ExecFrameType.EXITED, EXITED_FRAME[1:])
        assert agent.closed.is_set()

    scene(agent, test)


@pytest.mark.parametrize("phase", ["pending", "reserved", "bound", "draining", "stopping", "unknown", "failed", "released"])
def test_exec_is_refused_unless_replica_is_running(phase: str) -> None:
    agent = Agent(STARTED_FRAME, EXITED_FRAME)

    async def test(client: Api) -> None:
        reply = await exec_request(client, START_FRAME)
        assert (reply.status, reply.json["code"]) == (409, "phase")
        assert phase in reply.json["detail"]
        assert agent.requests == []

    scene(agent, test, phase)


def test_exec_of_other_attempt_is_refused() -> None:
    agent = Agent(STARTED_FRAME, EXITED_FRAME)

    async def test(client: Api) -> None:
        for attempt, status in ((1, 409), (3, 409), (2, 200)):
            reply = await exec_request(client, encode_frame(ExecFrameType.START, ExecStart(("id",), attempt)))
            assert reply.status == status, attempt
        assert [one.attempt for one in agent.requests] == [2]
        assert (await exec_request(client, START_FRAME, path="/v1/tenants/t1/replicas/web-7/exec")).status == 404
        assert (await exec_request(client, START_FRAME, path="/v1/tenants/t2/replicas/web-0/exec")).status == 404

    scene(agent, test, attempt=2)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", 400),
        (b"{}", 400),
        (encode_frame(ExecFrameType.INPUT, b"x"), 400),
        (encode_frame(ExecFrameType.START, b"{"), 422),
        (encode_frame(ExecFrameType.START, b'{"argv": []}'), 422),
        (encode_frame(ExecFrameType.START, b'{"argv": ["a\\u0000"]}'), 422),
        (b"\x01" + (FRAME_BYTES_MAX + 1).to_bytes(4), 400),
        (b"\xff" * 4_000, 400),
    ],
    ids=repr,
)
def test_malformed_session_is_refused_before_agent_is_contacted(sent: bytes, status: int) -> None:
    agent = Agent(STARTED_FRAME, EXITED_FRAME)

    async def test(client: Api) -> None:
        reply = await exec_request(client, sent)
        assert reply.status == status, reply
        assert reply.json["cure"]
        assert agent.requests == []
        wrong = await client.ask("POST", PATH, START_FRAME)
        assert wrong.status == 415

    scene(agent, test)


@pytest.mark.parametrize(("code", "status"), [("gone", 409), ("overloaded", 429), ("not_started", 422), ("<b>", 409)])
def test_agents_refusal_is_returned_with_code_and_fix(code: str, status: int) -> None:
    refused = ExecRejected(code, "it is \x1b[31mnot\n there", "install it")
    agent = Agent(bytes((ExecFrameType.REFUSED,)) + msgspec.json.encode(refused))

    async def test(client: Api) -> None:
        reply = await exec_request(client, START_FRAME)
        assert (reply.status, reply.json["detail"]) == (status, r"it is \x1b[31mnot\n there")
        assert reply.json["cure"] == "install it"
        assert "<" not in reply.json["code"]

    scene(agent, test)


def test_quoted_command_line_is_not_audited_in_full() -> None:
    """A usual mistake: the whole command is one argument, with its password."""
    quoted = "mysql -phunter2 shop"
    refused = ExecRejected("not_started", f"{quoted} cannot be run (no such file or directory)", "name a program")
    agent = Agent(bytes((ExecFrameType.REFUSED,)) + msgspec.json.encode(refused))

    async def test(client: Api) -> None:
        reply = await exec_request(client, encode_frame(ExecFrameType.START, ExecStart((quoted,))))
        assert (reply.status, "mysql cannot be run" in reply.json["detail"]) == (422, True)
        began = recorded(client, "execBegin")[0]
        assert began.detail.startswith('"mysql" and 1 argument, fingerprint ')
        assert not any("hunter2" in str(item) for item in client.server.audit.read(limit=100))

    scene(agent, test)


def test_concurrent_sessions_per_tenant_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_logs, "TENANT_SESSIONS_MAX", 1)
    agent = Agent(STARTED_FRAME, echoes=True)

    async def test(client: Api) -> None:
        with client.server.agents.session_slot("t1"):
            reply = await exec_request(client, START_FRAME)
            assert (reply.status, "retry-after" in reply.headers) == (429, True)
        assert frames(await exec_request(client, START_FRAME))

    scene(agent, test)


def test_unreachable_agent_gets_502() -> None:
    async def main() -> None:
        async with api() as client:
            cluster = CacheFixture(at(free_port()), tenant("t1"), *work("web"), replica("web", 0, "serving", "n1"))
            client.server.agents = agents(cluster, client)
            reply = await exec_request(client, START_FRAME)
            assert (reply.status, reply.json["code"]) == (502, "unavailable")

    asyncio.run(main())


# -- access and audit ----------------------------------------------------------------------------------------------------------


async def create_token(client: Api, role: str, token: str, **more: Any) -> None:
    """Create or update this token with a role and wait until it is valid."""
    spec = {"role": role, "digest": token_digest(token), "expires": "2199-01-01T00:00:00Z", "subject": token, **more}
    obj = {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": token}, "spec": spec}
    await client.must("PUT", f"/v1/tokens/{token}", obj)
    cache = client.server.watch_cache
    while cache.get(f"token/{token}") is None or (await client.get("/v1/status", token=token)).status == 503:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def recorded(client: Api, action: str) -> list[Any]:
    return client.server.audit.read(limit=100, action=action)


@pytest.mark.parametrize(
    ("role", "tenant_of", "status"),
    [
        ("admin", "", 200),
        ("member", "t1", 200),
        ("viewer", "t1", 403),
        ("viewer", "", 403),
        ("member", "t2", 404),
        ("viewer", "t2", 404),
        ("agent", "", 401),
        ("scheduler", "", 401),
    ],
)
def test_exec_is_allowed_to_admins_and_members_of_tenant_only(role: str, tenant_of: str, status: int) -> None:
    agent = Agent(STARTED_FRAME, EXITED_FRAME)

    async def test(client: Api) -> None:
        for name in ("t1", "t2"):
            spec = {"quota": {"cpu": "1"}}
            await client.must(
                "POST", "/v1/tenants", {"apiVersion": "remit/v1", "kind": "Tenant", "metadata": {"name": name}, "spec": spec}
            )
        more = {"nodes": ["n1"]} if role == "agent" else {}
        await create_token(client, role, "somebody", tenant=tenant_of, **more)
        reply = await exec_request(client, START_FRAME, token="somebody")
        assert reply.status == status, reply
        assert len(agent.requests) == (status == 200)
        assert len(recorded(client, "execBegin")) == (status == 200)
        refused = [item for item in client.server.audit.read(limit=100) if item.status == status and item.token == "somebody"]
        assert refused or status == 200

    scene(agent, test)


def test_arguments_are_audited_as_fingerprint_only() -> None:
    """Passwords are passed as arguments; the audit log is read by the whole tenant and retained."""
    agent = Agent(STARTED_FRAME, EXITED_FRAME)

    async def test(client: Api) -> None:
        for argv in (
            ("psql", "--password=hunter2"),
            ("psql", "--password=hunter2"),
            ("psql", "--password=", "hunter2"),
            ("id",),
        ):
            assert (await exec_request(client, encode_frame(ExecFrameType.START, ExecStart(argv)))).status == 200
        *details, plain = sorted(
            (item.detail for item in recorded(client, "execBegin")), key=lambda one: "fingerprint" not in one
        )
        assert plain == '"id"'
        assert sorted(one.partition(",")[0] for one in details) == [
            '"psql" and 1 argument',
            '"psql" and 1 argument',
            '"psql" and 2 arguments',
        ]
        assert len({one.partition("fingerprint ")[2] for one in details}) == 2
        assert not any("hunter2" in str(item) for item in client.server.audit.read(limit=100))

    scene(agent, test)


def test_exec_is_audited_before_start_and_after_exit() -> None:
    async def test(client: Api) -> None:
        class RecordsAudit(Agent):
            async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
                self.before = recorded(client, "execBegin"), recorded(client, "execEnd")
                async for item in super().stream(body):
                    yield item

        agent = RecordsAudit(STARTED_FRAME, echoes=True)
        port = free_port()
        cluster = CacheFixture(at(port), tenant("t1"), *work("web"), replica("web", 0, "serving", "n1"))
        client.server.agents = agents(cluster, client)
        async with SocketLink({"agent": f"tcp:127.0.0.1:{port}"}).serve("agent", agent):
            begin = encode_frame(ExecFrameType.START, ExecStart(("sh", "-c", "\x1b[31m;$(id)\n"), stdin=True))
            frames(
                await exec_request(
                    client, begin + encode_frame(ExecFrameType.INPUT, b"12345") + encode_frame(ExecFrameType.INPUT_END)
                )
            )
        (began,), ended = agent.before
        assert ended == []
        assert began.target == "replica/t1/web-0 attempt 1 on n1"
        mark = client.server.auth.keyring.sealing_keys.fingerprint(("sh", "-c", "\x1b[31m;$(id)\n"))
        assert began.detail == f'"sh" and 2 arguments, fingerprint {mark}'
        assert (began.role, began.subject != "") == ("admin", True)
        (after,) = recorded(client, "execEnd")
        assert after.detail == "exit code 3; 5 bytes in, 5 out"
        assert after.trace == began.trace

    scene(Agent(), test)


def test_revoked_token_ends_running_session() -> None:
    agent = Agent(STARTED_FRAME, echoes=True)

    async def test(client: Api) -> None:
        await create_token(client, "admin", "somebody")
        pieces: asyncio.Queue[bytes] = asyncio.Queue()
        pieces.put_nowait(encode_frame(ExecFrameType.START, ExecStart(("cat",), stdin=True)))

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await pieces.get(), "more_body": True}

        gathered = _Gathered([])
        headers = {"content-type": MEDIA_TYPE, "authorization": "Bearer somebody", "transfer-encoding": "chunked"}
        running = asyncio.ensure_future(client.app(_scope("POST", PATH, headers), receive, gathered.send))
        while not gathered.body:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await create_token(client, "admin", "somebody", revoked=True)
        async with asyncio.timeout(10):
            await running
            await agent.closed.wait()
        assert (await exec_request(client, START_FRAME, token="somebody")).status == 401

    scene(agent, test)


def test_policy_may_forbid_exec() -> None:
    agent = Agent(STARTED_FRAME, EXITED_FRAME)

    async def test(client: Api) -> None:
        cache = client.server.watch_cache
        closed = PolicyRule(match=PolicyMatch(tenants=("t1",)), exec=False, reason="cards are handled here")
        for number, rules, status in ((1, (closed,), 403), (2, (), 200), (3, (PolicyRule(priority_max=9),), 200)):
            revision = policy(number, *rules)
            cache._by_kind.setdefault("policyrevision", {})[key(revision)] = CachedRow(
                key(revision), encode(revision), number, 0
            )
            reply = await exec_request(client, START_FRAME)
            assert reply.status == status, reply
            if status == 403:
                assert "cards are handled here" in reply.json["detail"]
        cache._by_kind.pop("policyrevision")

    scene(agent, test)
