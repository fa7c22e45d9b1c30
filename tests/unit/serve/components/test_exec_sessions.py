"""Is a command beside a replica asked for where it runs, passed on both ways, ended with its asker, and plainly refused?"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from remit.model.identity import token_digest
from remit.model.kinds import Node
from remit.model.objects import encode, key
from remit.model.policies import PolicyMatch, PolicyRule
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
    ExecStarted,
    TerminalSize,
    encode_frame,
)
from remit.observation.watch_cache import CachedRow
from remit.serve.components import replica_logs
from remit.serve.components.replica_logs import AgentConnections
from remit.world.net.rpc_client import SocketLink
from tests.unit.observation.row_fixtures import policy, ready, replica, tenant, work
from tests.unit.serve.in_memory_server import Api, Reply, _Gathered, _scope, api
from tests.unit.serve.watch_cache_fixtures import Told

SECRET = "what the agent told the server"
PATH = "/v1/tenants/t1/replicas/web-0/exec"
BEGIN = encode_frame(ExecFrameType.START, ExecStart(("id", ";$(id)")))
BEGUN = bytes((ExecFrameType.STARTED,)) + msgspec.json.encode(ExecStarted("web-0", 1, "n1"))
OVER = bytes((ExecFrameType.EXITED,)) + msgspec.json.encode(ExecExit(code=3))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def at(port: int) -> Node:
    node = ready("n1")
    return replace(node, spec=replace(node.spec, address="127.0.0.1", port=port))


class Agent:
    """Answers as an agent does: what it is fed comes back."""

    def __init__(self, *items: bytes, echoes: bool = False) -> None:
        self.items, self.echoes = items, echoes
        self.asked: list[ExecRequest] = []
        self.fed: asyncio.Queue[ExecInputRequest] = asyncio.Queue()
        self.windows: list[TerminalSize] = []
        self.left = asyncio.Event()

    async def request(self, body: bytes, /) -> bytes:
        self.fed.put_nowait(msgspec.json.decode(body, type=ExecInputRequest))
        return b""

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        self.asked.append(msgspec.json.decode(body, type=ExecRequest))
        try:
            for item in self.items:
                yield item
            while self.echoes:
                fed = await self.fed.get()
                assert (fed.token, fed.session) == (SECRET, self.asked[0].session)
                if fed.window is not None:
                    self.windows.append(fed.window)
                if fed.data:
                    yield bytes((ExecFrameType.STDOUT,)) + fed.data
                if fed.over:
                    yield OVER
                    return
        finally:
            self.left.set()


def parts(reply: Reply) -> list[ExecFrame]:
    assert reply.status == 200, reply
    return ExecFrameReader().feed(reply.body)


async def execute(asked: Api, *sent: bytes, path: str = PATH, **more: Any) -> Reply:
    return await asked.ask("POST", path, pieces=list(sent), headers={"content-type": MEDIA_TYPE}, **more)


def scene(agent: Agent, test: Callable[[Api], Coroutine[Any, Any, None]], phase: str = "serving", **status: Any) -> None:
    async def main() -> None:
        port = free_port()
        web = replica("web", 0, phase, "" if phase == "pending" else "n1", **status)
        told = Told(at(port), tenant("t1"), *work("web"), web)
        async with api() as asked, SocketLink({"agent": f"tcp:127.0.0.1:{port}"}).serve("agent", agent):
            asked.desk.agents = agents(told, asked)
            async with asyncio.timeout(20):
                await test(asked)

    asyncio.run(main())


def agents(told: Told, asked: Api) -> AgentConnections:
    return AgentConnections(told.board, asked.desk.clock, {"n1": SECRET})


def test_what_is_sent_reaches_the_command_in_its_order_and_what_it_says_comes_back() -> None:
    agent = Agent(BEGUN, bytes((ExecFrameType.STDERR,)) + b"err", echoes=True)

    async def test(asked: Api) -> None:
        begin = encode_frame(ExecFrameType.START, ExecStart(("cat", ";$(id)"), stdin=True))
        large = bytes(range(256)) * 400
        sent = (
            begin
            + encode_frame(ExecFrameType.INPUT, large)
            + encode_frame(ExecFrameType.TERMINAL_SIZE, TerminalSize(7, 8))
            + encode_frame(ExecFrameType.INPUT_END)
        )
        heard = parts(await execute(asked, sent[:3], sent[3:40], sent[40:]))
        assert [ExecFrameType(one.type) for one in heard[:2]] == [ExecFrameType.STARTED, ExecFrameType.STDERR]
        assert b"".join(one.body for one in heard if one.type == ExecFrameType.STDOUT) == large
        assert heard[-1] == ExecFrame(ExecFrameType.EXITED, OVER[1:])
        one = agent.asked[0]
        assert (one.token, one.key, one.uid, one.attempt) == (SECRET, "replica/t1/web-0", "uweb0", 2)
        assert one.begin.argv == ("cat", ";$(id)")
        assert agent.windows == [TerminalSize(7, 8)]

    scene(agent, test, attempt=2)


def test_the_end_of_the_body_is_the_end_of_its_input() -> None:
    agent = Agent(BEGUN, echoes=True)

    async def test(asked: Api) -> None:
        assert parts(await execute(asked, BEGIN))[-1] == ExecFrame(ExecFrameType.EXITED, OVER[1:])
        assert agent.left.is_set()

    scene(agent, test)


@pytest.mark.parametrize("phase", ["pending", "reserved", "bound", "draining", "stopping", "unknown", "failed", "released"])
def test_only_what_runs_is_entered(phase: str) -> None:
    agent = Agent(BEGUN, OVER)

    async def test(asked: Api) -> None:
        reply = await execute(asked, BEGIN)
        assert (reply.status, reply.json["code"]) == (409, "phase")
        assert phase in reply.json["detail"]
        assert agent.asked == []

    scene(agent, test, phase)


def test_another_attempt_than_the_one_that_runs_is_not_entered() -> None:
    agent = Agent(BEGUN, OVER)

    async def test(asked: Api) -> None:
        for attempt, status in ((1, 409), (3, 409), (2, 200)):
            reply = await execute(asked, encode_frame(ExecFrameType.START, ExecStart(("id",), attempt)))
            assert reply.status == status, attempt
        assert [one.attempt for one in agent.asked] == [2]
        assert (await execute(asked, BEGIN, path="/v1/tenants/t1/replicas/web-7/exec")).status == 404
        assert (await execute(asked, BEGIN, path="/v1/tenants/t2/replicas/web-0/exec")).status == 404

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
def test_what_is_no_session_is_refused_before_an_agent_hears_of_it(sent: bytes, status: int) -> None:
    agent = Agent(BEGUN, OVER)

    async def test(asked: Api) -> None:
        reply = await execute(asked, sent)
        assert reply.status == status, reply
        assert reply.json["cure"]
        assert agent.asked == []
        wrong = await asked.ask("POST", PATH, BEGIN)
        assert wrong.status == 415

    scene(agent, test)


@pytest.mark.parametrize(("code", "status"), [("gone", 409), ("overloaded", 429), ("not_started", 422), ("<b>", 409)])
def test_why_an_agent_has_begun_nothing_is_told_with_its_cure(code: str, status: int) -> None:
    refused = ExecRejected(code, "it is \x1b[31mnot\n there", "install it")
    agent = Agent(bytes((ExecFrameType.REFUSED,)) + msgspec.json.encode(refused))

    async def test(asked: Api) -> None:
        reply = await execute(asked, BEGIN)
        assert (reply.status, reply.json["detail"]) == (status, r"it is \x1b[31mnot\n there")
        assert reply.json["cure"] == "install it"
        assert "<" not in reply.json["code"]

    scene(agent, test)


def test_a_whole_command_in_quotes_is_written_down_nowhere() -> None:
    """The usual mistake: it is one word, and its password with it."""
    quoted = "mysql -phunter2 shop"
    refused = ExecRejected("not_started", f"{quoted} cannot be run (no such file or directory)", "name a program")
    agent = Agent(bytes((ExecFrameType.REFUSED,)) + msgspec.json.encode(refused))

    async def test(asked: Api) -> None:
        reply = await execute(asked, encode_frame(ExecFrameType.START, ExecStart((quoted,))))
        assert (reply.status, "mysql cannot be run" in reply.json["detail"]) == (422, True)
        began = recorded(asked, "execBegin")[0]
        assert began.detail.startswith('"mysql" and 1 argument, fingerprint ')
        assert not any("hunter2" in str(item) for item in asked.desk.audit.read(limit=100))

    scene(agent, test)


def test_a_tenant_has_only_so_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_logs, "TENANT_SESSIONS_MAX", 1)
    agent = Agent(BEGUN, echoes=True)

    async def test(asked: Api) -> None:
        with asked.desk.agents.session_slot("t1"):
            reply = await execute(asked, BEGIN)
            assert (reply.status, "retry-after" in reply.headers) == (429, True)
        assert parts(await execute(asked, BEGIN))

    scene(agent, test)


def test_an_agent_that_is_gone_is_told_plainly() -> None:
    async def main() -> None:
        async with api() as asked:
            told = Told(at(free_port()), tenant("t1"), *work("web"), replica("web", 0, "serving", "n1"))
            asked.desk.agents = agents(told, asked)
            reply = await execute(asked, BEGIN)
            assert (reply.status, reply.json["code"]) == (502, "unavailable")

    asyncio.run(main())


# -- who may, and what is written down of it -----------------------------------------------------------------------------------


async def hold(asked: Api, role: str, token: str, **more: Any) -> None:
    """Make this token good, for somebody of that role."""
    spec = {"role": role, "digest": token_digest(token), "expires": "2199-01-01T00:00:00Z", "subject": token, **more}
    thing = {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": token}, "spec": spec}
    await asked.must("PUT", f"/v1/tokens/{token}", thing)
    while asked.desk.watch_cache.get(f"token/{token}") is None or (await asked.get("/v1/status", token=token)).status == 503:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def recorded(asked: Api, action: str) -> list[Any]:
    return asked.desk.audit.read(limit=100, action=action)


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
def test_admins_and_the_tenants_members_may_and_nobody_else(role: str, tenant_of: str, status: int) -> None:
    agent = Agent(BEGUN, OVER)

    async def test(asked: Api) -> None:
        for name in ("t1", "t2"):
            spec = {"quota": {"cpu": "1"}}
            await asked.must(
                "POST", "/v1/tenants", {"apiVersion": "remit/v1", "kind": "Tenant", "metadata": {"name": name}, "spec": spec}
            )
        more = {"nodes": ["n1"]} if role == "agent" else {}
        await hold(asked, role, "somebody", tenant=tenant_of, **more)
        reply = await execute(asked, BEGIN, token="somebody")
        assert reply.status == status, reply
        assert len(agent.asked) == (status == 200)
        assert len(recorded(asked, "execBegin")) == (status == 200)
        refused = [item for item in asked.desk.audit.read(limit=100) if item.status == status and item.token == "somebody"]
        assert refused or status == 200

    scene(agent, test)


def test_what_a_command_is_told_is_not_written_down__only_whether_it_was_the_same() -> None:
    """Passwords are passed so; the audit is read by the whole tenant, and kept."""
    agent = Agent(BEGUN, OVER)

    async def test(asked: Api) -> None:
        for words in (
            ("psql", "--password=hunter2"),
            ("psql", "--password=hunter2"),
            ("psql", "--password=", "hunter2"),
            ("id",),
        ):
            assert (await execute(asked, encode_frame(ExecFrameType.START, ExecStart(words)))).status == 200
        *said, plain = sorted((item.detail for item in recorded(asked, "execBegin")), key=lambda one: "fingerprint" not in one)
        assert plain == '"id"'
        assert sorted(one.partition(",")[0] for one in said) == [
            '"psql" and 1 argument',
            '"psql" and 1 argument',
            '"psql" and 2 arguments',
        ]
        assert len({one.partition("fingerprint ")[2] for one in said}) == 2
        assert not any("hunter2" in str(item) for item in asked.desk.audit.read(limit=100))

    scene(agent, test)


def test_who_ran_what_where_is_written_down_before_it_begins_and_how_it_ended_after() -> None:
    async def test(asked: Api) -> None:
        class Looks(Agent):
            async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
                self.before = recorded(asked, "execBegin"), recorded(asked, "execEnd")
                async for item in super().stream(body):
                    yield item

        agent = Looks(BEGUN, echoes=True)
        port = free_port()
        told = Told(at(port), tenant("t1"), *work("web"), replica("web", 0, "serving", "n1"))
        asked.desk.agents = agents(told, asked)
        async with SocketLink({"agent": f"tcp:127.0.0.1:{port}"}).serve("agent", agent):
            begin = encode_frame(ExecFrameType.START, ExecStart(("sh", "-c", "\x1b[31m;$(id)\n"), stdin=True))
            parts(
                await execute(
                    asked, begin + encode_frame(ExecFrameType.INPUT, b"12345") + encode_frame(ExecFrameType.INPUT_END)
                )
            )
        (began,), ended = agent.before
        assert ended == []
        assert began.target == "replica/t1/web-0 attempt 1 on n1"
        mark = asked.desk.auth.keyring.sealing_keys.fingerprint(("sh", "-c", "\x1b[31m;$(id)\n"))
        assert began.detail == f'"sh" and 2 arguments, fingerprint {mark}'
        assert (began.role, began.subject != "") == ("admin", True)
        (after,) = recorded(asked, "execEnd")
        assert after.detail == "exit code 3; 5 bytes in, 5 out"
        assert after.trace == began.trace

    scene(Agent(), test)


def test_a_token_that_is_revoked_ends_what_its_holder_runs() -> None:
    agent = Agent(BEGUN, echoes=True)

    async def test(asked: Api) -> None:
        await hold(asked, "admin", "somebody")
        pieces: asyncio.Queue[bytes] = asyncio.Queue()
        pieces.put_nowait(encode_frame(ExecFrameType.START, ExecStart(("cat",), stdin=True)))

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await pieces.get(), "more_body": True}

        gathered = _Gathered([])
        headers = {"content-type": MEDIA_TYPE, "authorization": "Bearer somebody", "transfer-encoding": "chunked"}
        running = asyncio.ensure_future(asked.app(_scope("POST", PATH, headers), receive, gathered.send))
        while not gathered.body:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await hold(asked, "admin", "somebody", revoked=True)
        async with asyncio.timeout(10):
            await running
            await agent.left.wait()
        assert (await execute(asked, BEGIN, token="somebody")).status == 401

    scene(agent, test)


def test_a_policy_may_close_the_replicas_of_some_work() -> None:
    agent = Agent(BEGUN, OVER)

    async def test(asked: Api) -> None:
        board = asked.desk.watch_cache
        closed = PolicyRule(match=PolicyMatch(tenants=("t1",)), exec=False, reason="cards are handled here")
        for number, rules, status in ((1, (closed,), 403), (2, (), 200), (3, (PolicyRule(priority_max=9),), 200)):
            revision = policy(number, *rules)
            board._by_kind.setdefault("policyrevision", {})[key(revision)] = CachedRow(
                key(revision), encode(revision), number, 0
            )
            reply = await execute(asked, BEGIN)
            assert reply.status == status, reply
            if status == 403:
                assert "cards are handled here" in reply.json["detail"]
        board._by_kind.pop("policyrevision")

    scene(agent, test)
