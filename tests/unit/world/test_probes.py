"""Probes: every answer gets a result, including none, endless ones and ones that are not HTTP."""

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
            pass  # the prober has read enough
        finally:
            writer.close()

    async with await asyncio.start_server(once, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def probe(answer: Answer, path: str = "/", timeout_ms: int = 5_000) -> ProbeResult:
    async def scenario() -> ProbeResult:
        async with listening(answer) as port:
            return await SocketProber(BootClock()).http("127.0.0.1", port, path, timeout_ms=timeout_ms)

    return asyncio.run(scenario())


def respond(text: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        await writer.drain()

    return answer


@pytest.mark.parametrize(
    ("text", "result"),
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
def test_answer_is_judged_by_status_line(text: bytes, result: ProbeResult) -> None:
    assert probe(respond(text)) == result


def test_endless_body_is_not_read() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    began_s = time.monotonic()
    assert probe(answer) == ProbeResult(ok=True, detail="status 200 OK")
    assert time.monotonic() - began_s < 20


def test_silent_or_dripping_server_is_given_up_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    for answer in (silent, dripping):
        began_s = time.monotonic()
        assert probe(answer, timeout_ms=150) == ProbeResult(ok=False, detail="no answer within 150 ms")
        assert time.monotonic() - began_s < 4.5


@pytest.mark.parametrize("path", ["x", "/a b", "/a\r\nX-Evil: 1", "/\0", ""])
def test_invalid_probe_path_is_not_sent(path: str) -> None:
    result = asyncio.run(SocketProber(BootClock()).http("127.0.0.1", 1, path, timeout_ms=100))
    assert result == ProbeResult(ok=False, detail="the probe path is invalid")


def test_probe_request_is_valid_http() -> None:
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

    assert probe(answer, "/healthz?deep=1").ok
    lines = requests[0].decode().split("\r\n")
    assert lines[0] == "GET /healthz?deep=1 HTTP/1.1"
    assert any(line.startswith("Host: 127.0.0.1:") for line in lines)
    assert "Connection: close" in lines
