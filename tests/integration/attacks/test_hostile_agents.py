"""Is what a hostile agent answers a server bounded, never followed, and told as a 502? A13 and A29."""

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
from tests.unit.serve.components.test_exec_sessions import STARTED_FRAME, agents, at, free_port
from tests.unit.serve.in_memory_server import Api, Reply, api
from tests.unit.serve.watch_cache_fixtures import CacheFixture

pytestmark = pytest.mark.smoke

MIB: Final = 1 << 20
GROWTH_MIB_MAX: Final = 50

Answers = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Coroutine[Any, Any, None]]


async def _tag(reader: asyncio.StreamReader) -> int:
    """Of the first call: the asker's name for it."""
    length, _, tag = struct.unpack(">IBQ", await reader.readexactly(13))
    await reader.readexactly(length)
    return int(tag)


async def redirects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{trap}/\r\nContent-Length: 0\r\n\r\n".encode())


async def talks_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(bytes(range(256)) * 64)


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    await asyncio.sleep(30)


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    await _tag(reader)


async def announces_too_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(struct.pack(">IBQ", 0xFFFFFFFF, FrameKind.ITEM, await _tag(reader)))
    await asyncio.sleep(30)


async def sends_a_huge_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(pack_frame(FrameKind.ITEM, await _tag(reader), bytes(BODY_BYTES_MAX)))
    await writer.drain()


async def answers_another_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    tag = await _tag(reader)
    for other in range(1_000):
        writer.write(pack_frame(FrameKind.ITEM, tag + 1 + other, b"not for you"))
    writer.write(pack_frame(FrameKind.BROKEN, tag))


async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    writer.write(pack_frame(FrameKind.REFUSED, await _tag(reader)))


HOSTILE: Final[list[Answers]] = [
    redirects, talks_nonsense, says_nothing, hangs_up, announces_too_much, sends_a_huge_frame, answers_another_call, refuses,
]  # fmt: skip


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
    """Endless, and heedless of how much was taken."""
    tag = await _tag(reader)
    piece = pack_frame(FrameKind.ITEM, tag, bytes((ExecFrameType.STDOUT,)) + b"x" * 65_536)
    writer.write(pack_frame(FrameKind.ITEM, tag, STARTED_FRAME))
    with suppress(OSError):
        for _ in range(20_000):
            writer.write(piece)
            await writer.drain()


@asynccontextmanager
async def served(answers: Answers, trap: int = 0) -> AsyncIterator[Api]:
    """A server whose one node has such an agent."""

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
    told = CacheFixture(at(port), tenant("t1"), *work("web"), replica("web", 0, "serving", "n1"))
    try:
        async with api() as asked, asyncio.timeout(30):
            asked.server.agents = agents(told, asked)
            yield asked
    finally:
        listener.close()
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)
        await asyncio.sleep(0)


async def asked_for(asked: Api, what: str) -> Reply:
    if what == "logs":
        return await asked.get("/v1/tenants/t1/replicas/web-0/logs")
    begin = encode_frame(ExecFrameType.START, ExecStart(("id",)))
    return await asked.ask("POST", "/v1/tenants/t1/replicas/web-0/exec", pieces=[begin], headers={"content-type": MEDIA_TYPE})


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096 / MIB


@pytest.mark.parametrize("what", ["logs", "exec"])
@pytest.mark.parametrize("answers", HOSTILE, ids=lambda one: one.__name__)
def test_row_13__what_no_agent_of_ours_would_answer_is_a_502(
    answers: Answers, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_logs, "AGENT_ANSWER_MS", 500)
    monkeypatch.setattr(exec_sessions, "AGENT_ANSWER_MS", 500)

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as trap:
            trap.setblocking(False)
            async with served(answers, trap.getsockname()[1]) as asked:
                before = rss_mib()
                reply = await asked_for(asked, what)
                assert (reply.status, reply.json["code"]) == (502, "unavailable"), reply
                assert reply.json["cure"]
                assert rss_mib() - before < GROWTH_MIB_MAX
            with pytest.raises(BlockingIOError):
                trap.accept()  # nobody has followed it there

    asyncio.run(scene())


@pytest.mark.parametrize("what", ["logs", "exec"])
def test_row_13__an_endless_stream_that_does_not_wait_is_broken_off(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with served(floods) as asked:
            before, send, seen = rss_mib(), asking._Gathered.send, list[float]()

            async def slowly(self: asking._Gathered, message: Any) -> None:
                await send(self, message)
                if len(self.body) == 2:  # it does not take the rest for a while, in which all that comes would have to be kept
                    await asyncio.sleep(1)
                    seen.append(rss_mib() - before)

            monkeypatch.setattr(asking._Gathered, "send", slowly)
            reply = await asked_for(asked, what)
            assert seen[0] < GROWTH_MIB_MAX
            assert reply.status == 200
            ended = {
                "logs": b"log cut off by an error of the agent of node n1",
                "exec": b"the agent of node n1 ended the session",
            }
            assert ended[what] in reply.body[-400:]

    asyncio.run(scene())


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
def test_row_13__in_the_middle_of_a_session_nonsense_ends_it(item: bytes) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trap: int) -> None:
        tag = await _tag(reader)
        for one in (STARTED_FRAME, bytes((ExecFrameType.STDOUT,)) + b"so far", item):
            writer.write(pack_frame(FrameKind.ITEM, tag, one))
        await asyncio.sleep(5)

    async def scene() -> None:
        async with served(answers) as asked:
            parts = ExecFrameReader().feed((await asked_for(asked, "exec")).body)
            assert [part.body for part in parts if part.type == ExecFrameType.STDOUT] == [b"so far"]
            assert parts[-1].type == ExecFrameType.EXITED
            over = msgspec.json.decode(parts[-1].body, type=ExecExit)
            assert (over.code, over.signal) == (None, None)
            assert "the agent of node n1 ended the session" in over.why

    asyncio.run(scene())


@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc%2fpasswd", "%2e%2e%2fx", "..%5cx", "web-0%00", "web-0%2f..", "%2fetc%2fpasswd", "web-0%0a"]
)
@pytest.mark.parametrize("what", ["logs", "exec"])
def test_row_29__a_name_is_never_a_path(name: str, what: str) -> None:
    async def scene() -> None:
        async with served(hangs_up) as asked:
            path = f"/v1/tenants/t1/replicas/{name}/{what}"
            begin = encode_frame(ExecFrameType.START, ExecStart(("id",)))
            if what == "logs":
                reply = await asked.get(path)
            else:
                reply = await asked.ask("POST", path, pieces=[begin], headers={"content-type": MEDIA_TYPE})
            assert reply.status == 404, reply

    asyncio.run(scene())
