"""Answers of a hostile agent are bounded, never followed, and reported as 502. A13 and A29."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from remit.model.wire.exec_frames import MEDIA_TYPE, ExecExit, ExecFrameReader, ExecFrameType, ExecStart, encode_frame
from remit.serve.components import exec_sessions, replica_logs
from remit.world.net.frames import BODY_BYTES_MAX, FrameKind, pack_frame
from tests.unit.observation.row_fixtures import replica, tenant, work
from tests.unit.serve import in_memory_server as asking
from tests.unit.serve.components.agent_connections import STARTED_FRAME, agents, at, free_port
from tests.unit.serve.in_memory_server import Api, Reply, api
from tests.unit.serve.watch_cache_fixtures import CacheFixture

pytestmark = pytest.mark.smoke

MIB: Final = 1 << 20
GROWTH_MIB_MAX: Final = 50

Answers = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Coroutine[Any, Any, None]]


async def _tag(reader: asyncio.StreamReader) -> int:
    """The tag of the first call."""
    length, _, tag = struct.unpack(">IBQ", await reader.readexactly(13))
    await reader.readexactly(length)
    return int(tag)


async def send_redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{trap}/\r\nContent-Length: 0\r\n\r\n".encode())


async def send_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(bytes(range(256)) * 64)


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    await asyncio.sleep(30)


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    await _tag(reader)


async def announce_huge_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(struct.pack(">IBQ", 0xFFFFFFFF, FrameKind.ITEM, await _tag(reader)))
    await asyncio.sleep(30)


async def send_huge_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(pack_frame(FrameKind.ITEM, await _tag(reader), bytes(BODY_BYTES_MAX)))
    await writer.drain()


async def answer_other_calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    tag = await _tag(reader)
    for other in range(1_000):
        writer.write(pack_frame(FrameKind.ITEM, tag + 1 + other, b"not for you"))
    writer.write(pack_frame(FrameKind.BROKEN, tag))


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(pack_frame(FrameKind.REFUSED, await _tag(reader)))


HOSTILE: Final[list[Answers]] = [
    send_redirect, send_garbage, stay_silent, hang_up, announce_huge_frame, send_huge_frame, answer_other_calls, refuse,
]  # fmt: skip


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    """Endless, ignoring flow control."""
    tag = await _tag(reader)
    piece = pack_frame(FrameKind.ITEM, tag, bytes((ExecFrameType.STDOUT,)) + b"x" * 65_536)
    writer.write(pack_frame(FrameKind.ITEM, tag, STARTED_FRAME))
    with suppress(OSError):
        for _ in range(20_000):
            writer.write(piece)
            await writer.drain()


@asynccontextmanager
async def server_with_agent(answers: Answers, trap: int = 0) -> AsyncIterator[Api]:
    """A server whose only node has such an agent."""

    conversations: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await answers(reader, writer, trap)
                await writer.drain()
                await asyncio.sleep(0.05)
        finally:
            writer.transport.abort()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversations.add(asyncio.create_task(converse(reader, writer)))

    port = free_port()
    listener = await asyncio.start_server(begin, "127.0.0.1", port)
    cache = CacheFixture(at(port), tenant("t1"), *work("web"), replica("web", 0, "serving", "n1"))
    try:
        async with api() as client, asyncio.timeout(30):
            client.server.agents = agents(cache, client)
            yield client
    finally:
        listener.close()
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)
        await asyncio.sleep(0)


async def request_output(client: Api, resource: str) -> Reply:
    if resource == "logs":
        return await client.get("/v1/tenants/t1/replicas/web-0/logs")
    begin = encode_frame(ExecFrameType.START, ExecStart(("id",)))
    return await client.ask("POST", "/v1/tenants/t1/replicas/web-0/exec", pieces=[begin], headers={"content-type": MEDIA_TYPE})


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096 / MIB


@pytest.mark.parametrize("resource", ["logs", "exec"])
@pytest.mark.parametrize("answers", HOSTILE, ids=lambda one: one.__name__)
def test_row_13_invalid_agent_answer_gets_502(answers: Answers, resource: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_logs, "AGENT_ANSWER_MS", 500)
    monkeypatch.setattr(exec_sessions, "AGENT_ANSWER_MS", 500)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as trap:
            trap.setblocking(False)
            async with server_with_agent(answers, trap.getsockname()[1]) as client:
                before = rss_mib()
                reply = await request_output(client, resource)
                assert (reply.status, reply.json["code"]) == (502, "unavailable"), reply
                assert reply.json["cure"]
                assert rss_mib() - before < GROWTH_MIB_MAX
            with pytest.raises(BlockingIOError):
                trap.accept()  # nothing has connected to the trap

    asyncio.run(scenario())


@pytest.mark.parametrize("resource", ["logs", "exec"])
def test_row_13_endless_stream_is_cut_off(resource: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with server_with_agent(flood) as client:
            before, send, seen = rss_mib(), asking._Gathered.send, list[float]()

            async def slowly(self: asking._Gathered, message: Any) -> None:
                await send(self, message)
                if len(self.body) == 2:  # the client stops reading, and everything would have to be buffered
                    await asyncio.sleep(1)
                    seen.append(rss_mib() - before)

            monkeypatch.setattr(asking._Gathered, "send", slowly)
            reply = await request_output(client, resource)
            assert seen[0] < GROWTH_MIB_MAX
            assert reply.status == 200
            ended = {
                "logs": b"log cut off by an error of the agent of node n1",
                "exec": b"the agent of node n1 ended the session",
            }
            assert ended[resource] in reply.body[-400:]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "item",
    [
        b"",
        b"\x00",
        b"\xff" * 100,
        bytes((ExecFrameType.START,)) + b"{}",
        bytes((ExecFrameType.REFUSED,)) + b"\xff",
        bytes((ExecFrameType.EXITED,)) + b"[[",
    ],
    ids=repr,
)
def test_row_13_garbage_during_session_ends_it(item: bytes) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
        tag = await _tag(reader)
        for one in (STARTED_FRAME, bytes((ExecFrameType.STDOUT,)) + b"so far", item):
            writer.write(pack_frame(FrameKind.ITEM, tag, one))
        await asyncio.sleep(5)

    async def scenario() -> None:
        async with server_with_agent(answers) as client:
            frames = ExecFrameReader().feed((await request_output(client, "exec")).body)
            assert [part.body for part in frames if part.type == ExecFrameType.STDOUT] == [b"so far"]
            assert frames[-1].type == ExecFrameType.EXITED
            exit_ = msgspec.json.decode(frames[-1].body, type=ExecExit)
            assert (exit_.code, exit_.signal) == (None, None)
            assert "the agent of node n1 ended the session" in exit_.why

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc%2fpasswd", "%2e%2e%2fx", "..%5cx", "web-0%00", "web-0%2f..", "%2fetc%2fpasswd", "web-0%0a"]
)
@pytest.mark.parametrize("resource", ["logs", "exec"])
def test_row_29_replica_name_is_never_path(name: str, resource: str) -> None:
    async def scenario() -> None:
        async with server_with_agent(hang_up) as client:
            path = f"/v1/tenants/t1/replicas/{name}/{resource}"
            begin = encode_frame(ExecFrameType.START, ExecStart(("id",)))
            if resource == "logs":
                reply = await client.get(path)
            else:
                reply = await client.ask("POST", path, pieces=[begin], headers={"content-type": MEDIA_TYPE})
            assert reply.status == 404, reply

    asyncio.run(scenario())
