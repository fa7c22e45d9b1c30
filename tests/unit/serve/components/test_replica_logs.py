"""Replica logs: output is passed on from the agent that has it, and every failure names its cause and fix."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from remit.model.identity import Principal
from remit.model.kinds import Node
from remit.model.wire.agent_messages import LogsRequest
from remit.serve.components import replica_logs
from remit.serve.components.replica_logs import AgentConnections, LogOptions
from remit.serve.http.replies import ApiProblem
from remit.world.net.rpc_client import SocketLink
from tests.unit.observation.row_fixtures import ready, replica, tenant, work
from tests.unit.serve.watch_cache_fixtures import CacheFixture

TOKEN = "a token"
ANN = Principal("ann", "ann", "member", "t1")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def at(port: int, host: str = "127.0.0.1") -> Node:
    node = ready("n1")
    return replace(node, spec=replace(node.spec, address=host, port=port))


def agents(port: int, host: str = "127.0.0.1", **status: Any) -> AgentConnections:
    web = replica("web", 0, "serving", "n1", **status)
    cluster = CacheFixture(
        at(port, host), tenant("t1"), *work("web"), web, replica("web", 1), replica("web", 2, "released", "gone")
    )
    return AgentConnections(cluster.board, cluster.clock, {"n1": TOKEN})


class Agent:
    """Answers as an agent does."""

    def __init__(self, *pieces: bytes, ends: bool = True, fails: bool = False) -> None:
        self.pieces, self.ends, self.fails = pieces, ends, fails
        self.requests: list[LogsRequest] = []
        self.closed = asyncio.Event()

    async def request(self, body: bytes, /) -> bytes:
        raise NotImplementedError

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        self.requests.append(msgspec.json.decode(body, type=LogsRequest))
        try:
            for piece in self.pieces:
                yield piece
            if self.fails:
                raise RuntimeError("no such file")
            if not self.ends:
                await asyncio.sleep(60)
        finally:
            self.closed.set()


async def read(agent: Agent | None, options: LogOptions = LogOptions(), name: str = "web-0", **status: Any) -> list[bytes]:
    port = free_port()
    found = agents(port, **status)
    if agent is None:
        return [piece async for piece in await found.logs(ANN, "t1", name, options)]
    async with SocketLink({"agent": f"tcp:127.0.0.1:{port}"}).serve("agent", agent):
        return [piece async for piece in await found.logs(ANN, "t1", name, options)]


def failed(*args: Any, **more: Any) -> Any:
    with pytest.raises(ApiProblem) as failure:
        asyncio.run(read(*args, **more))
    return failure.value.document


def test_log_pieces_pass_through_and_request_names_attempt() -> None:
    agent = Agent(b"one\n", b"", b"\xfftwo\n")
    assert asyncio.run(read(agent, LogOptions("stdout", tail=7), attempt=3)) == [b"one\n", b"\xfftwo\n"]
    assert agent.requests == [LogsRequest(TOKEN, "replica/t1/web-0", "uweb0", 3, "stdout", 7, False)]


def test_empty_log_is_empty_response() -> None:
    assert asyncio.run(read(Agent())) == []


def test_previous_attempt_and_attempt_by_number_are_requested() -> None:
    agent = Agent(b"x")
    asyncio.run(read(agent, LogOptions(previous=True), attempt=3))
    asyncio.run(read(agent, LogOptions(attempt=1), attempt=3))
    assert [one.attempt for one in agent.requests] == [2, 1]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (LogOptions(previous=True), 404, "no attempt 0"),
        (LogOptions(attempt=2), 404, "no attempt 2"),
        (LogOptions(attempt=1, previous=True), 400, "cannot be combined"),
    ],
)
def test_nonexistent_attempt_is_refused_with_fix(options: LogOptions, code: int, text: str) -> None:
    document = failed(Agent(b"x"), options)
    assert document.status == code and text in document.detail and document.cure


@pytest.mark.parametrize(("name", "text"), [("web-9", "no replica"), ("web-1", "not on a node"), ("web-2", "no longer exists")])
def test_replica_without_log_gets_404_with_fix(name: str, text: str) -> None:
    document = failed(Agent(b"x"), name=name)
    assert (document.status, document.code) == (404, "not_found") and text in document.detail and document.cure


def test_agent_without_callback_port_gets_404() -> None:
    async def ask() -> Any:
        return await agents(0).logs(ANN, "t1", "web-0", LogOptions())

    with pytest.raises(ApiProblem) as failure:
        asyncio.run(ask())
    assert failure.value.document.status == 404 and "has no callback port" in failure.value.document.detail


def test_unreachable_agent_gets_502_with_fix() -> None:
    document = failed(None)
    assert (document.status, document.code) == (502, "unavailable")
    assert "node n1" in document.detail and "node health: ready" in document.cure


def test_agent_on_other_host_is_not_contacted() -> None:
    async def ask() -> Any:
        return await agents(80, "192.0.2.1").logs(ANN, "t1", "web-0", LogOptions())

    with pytest.raises(ApiProblem) as failure:
        asyncio.run(ask())
    assert failure.value.document.status == 502 and "not a loopback address" in failure.value.document.detail


def test_silent_agent_is_given_up_after_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_logs, "AGENT_ANSWER_MS", 50)
    assert failed(Agent(ends=False)).status == 502
    (first, last) = asyncio.run(read(Agent(b"one\n", ends=False)))
    assert first == b"one\n" and b"cut off by an error of the agent of node n1: it stopped sending" in last


def test_agent_error_is_reported_in_last_line_or_as_502() -> None:
    assert failed(Agent(fails=True)).status == 502
    *pieces, last = asyncio.run(read(Agent(b"one\n", fails=True)))
    assert pieces == [b"one\n"] and last.startswith(b"\n-- log cut off by an error of the agent of node n1")


def test_closed_follow_request_releases_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_logs, "QUIET_MS", 20)

    async def leave(agent: Agent, *, at_once: bool) -> None:
        port = free_port()
        found = agents(port)
        async with SocketLink({"agent": f"tcp:127.0.0.1:{port}"}).serve("agent", agent):
            pieces = await found.logs(ANN, "t1", "web-0", LogOptions(follow=True))
            assert found._connections.held == 1
            if not at_once:
                assert await anext(pieces) == b"one\n"
            await pieces.aclose()
            await asyncio.wait_for(agent.closed.wait(), 5)
            assert found._connections.held == 0

    async def both() -> None:
        await leave(Agent(b"one\n", ends=False), at_once=False)
        await leave(Agent(ends=False), at_once=True)

    asyncio.run(both())


def test_too_many_concurrent_log_requests_get_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_logs, "CONNECTIONS_MAX", 0)
    assert failed(Agent(b"x")).status == 429
