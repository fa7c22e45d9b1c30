"""Is every answer judged, also one that never comes, never ends, or is no HTTP at all?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from remit.world.clock import BootClock
from remit.world.host import HEAD_BYTES_MAX, SocketProber
from remit.world.interfaces import ProbeResult

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[int]:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except ConnectionError:
            pass  # the prober has heard enough
        finally:
            writer.close()

    async with await asyncio.start_server(once, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def probed(answer: Answer, path: str = "/", timeout_ms: int = 5_000) -> ProbeResult:
    async def scene() -> ProbeResult:
        async with listening(answer) as port:
            return await SocketProber(BootClock()).http("127.0.0.1", port, path, timeout_ms=timeout_ms)

    return asyncio.run(scene())


def saying(text: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        await writer.drain()

    return answer


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", ProbeResult(ok=True, detail="status 200 OK")),
        (b"HTTP/1.0 204\r\n\r\n", ProbeResult(ok=True, detail="status 204")),
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n", ProbeResult(ok=True, detail="status 302 Found")),
        (b"HTTP/1.1 400 Bad\r\n\r\n", ProbeResult(ok=False, detail="status 400 Bad")),
        (b"HTTP/1.1 503 \x1b[31mred\r\n\r\n", ProbeResult(ok=False, detail="status 503 ?[31mred")),
        (b"HTTP/1.1 199 X\r\n\r\n", ProbeResult(ok=False, detail="status 199 X")),
        (b"SSH-2.0-OpenSSH\r\n", ProbeResult(ok=False, detail="the answer is not HTTP")),
        (b"HTTP/1.1 20", ProbeResult(ok=False, detail="the answer is not HTTP")),
        (b"", ProbeResult(ok=False, detail="the connection was closed without an answer")),
        (b"x" * (4 * HEAD_BYTES_MAX), ProbeResult(ok=False, detail="the answer is not HTTP")),
    ],
)
def test_an_answer_is_judged_by_its_first_line(text: bytes, told: ProbeResult) -> None:
    assert probed(saying(text)) == told


def test_a_body_without_an_end_is_not_read() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    began_s = time.monotonic()
    assert probed(answer) == ProbeResult(ok=True, detail="status 200 OK")
    assert time.monotonic() - began_s < 20


def test_one_that_says_nothing_or_drips_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    for answer in (silent, drips):
        began_s = time.monotonic()
        assert probed(answer, timeout_ms=150) == ProbeResult(ok=False, detail="no answer within 150 ms")
        assert time.monotonic() - began_s < 4.5


@pytest.mark.parametrize("path", ["x", "/a b", "/a\r\nX-Evil: 1", "/\0", ""])
def test_a_path_that_would_say_more_than_a_path_is_not_asked(path: str) -> None:
    told = asyncio.run(SocketProber(BootClock()).http("127.0.0.1", 1, path, timeout_ms=100))
    assert told == ProbeResult(ok=False, detail="the probe path is invalid")


def test_the_question_is_one_that_servers_take() -> None:
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

    assert probed(answer, "/healthz?deep=1").ok
    lines = heard[0].decode().split("\r\n")
    assert lines[0] == "GET /healthz?deep=1 HTTP/1.1"
    assert any(line.startswith("Host: 127.0.0.1:") for line in lines)
    assert "Connection: close" in lines
