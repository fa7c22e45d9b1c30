"""Hostile input on a single connection is bounded and never misinterpreted. Over a real socket."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

import pytest

from remit.world.net import connections, http_server
from remit.world.net.connections import BoundSocket
from tests.integration.serve.http_listener import GET, ask, listening, respond

pytestmark = pytest.mark.smoke

POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
MUCH = b"a" * 300_000


async def echo_size(scope: Any, receive: Any, send: Any) -> None:
    """Answers after the whole body, with its size and the header names."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    names = b",".join(name for name, _ in scope["headers"])
    hosts = b",".join(value for name, value in scope["headers"] if name == b"host")
    await respond(send, b"%d bytes, %b, of %b" % (size, names, hosts))


async def slow(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.5)
    await respond(send, b"at last")


async def exchange(bound: BoundSocket, *pieces: bytes, wait_s: float = 10) -> bytes:
    """Send the pieces and return everything until the connection is closed."""
    reader, writer = await ask(bound, pieces[0])
    found, reading = b"", asyncio.create_task(reader.read())
    with suppress(ConnectionError):
        for more in pieces[1:]:
            await asyncio.sleep(0.05)
            writer.write(more)
            await writer.drain()
    with suppress(ConnectionError):
        found = await asyncio.wait_for(reading, wait_s)
    writer.close()
    return found


def run_app(app: Any, *pieces: bytes) -> bytes:
    async def main() -> bytes:
        async with listening(app) as bound:
            return await exchange(bound, *pieces)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "pieces",
    [
        (POST + b"0\r\nX: ", MUCH, MUCH),
        (POST + b"0\r\n", *[b"X: y\r\n" * 5_000] * 4),
        (POST + b"5;", MUCH, MUCH),
        (POST + b"3\r\nabc\r\n0", MUCH, MUCH),
    ],
    ids=["one trailer", "many trailers", "chunk extension", "chunk size"],
)
def test_trailers_and_chunk_metadata_are_bounded(pieces: tuple[bytes, ...]) -> None:
    found = run_app(echo_size, *pieces)
    assert found.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) and b"cure" in found


def test_refusing_oversized_trailer_costs_little_cpu() -> None:
    """Ten thousand pieces of one trailer, each of which a naive parser would concatenate with all before it."""

    async def main() -> float:
        async with listening(echo_size) as bound:
            began = resource.getrusage(resource.RUSAGE_SELF)
            await exchange(bound, POST + b"0\r\nX: ", *[b"a" * 4_000] * 100)
            ended = resource.getrusage(resource.RUSAGE_SELF)
            return ended.ru_utime - began.ru_utime

    assert asyncio.run(main()) < 5


def test_body_in_tiny_chunks_is_read() -> None:
    last = b"0\r\n\r\n" + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    found = run_app(echo_size, POST, *[b"1\r\na\r\n" * 10_000] * 5, last)
    assert b"50000 bytes" in found and found.count(b"200 OK") == 2


def test_trailer_is_not_treated_as_header() -> None:
    found = run_app(
        echo_size, POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"1\r\na\r\n0\r\nAuthorization: x\r\n\r\n"
    )
    assert b"200 OK" in found and b"1 bytes" in found and b"authorization" not in found


def test_pipelined_requests_over_limit_are_cut_with_connection_close() -> None:
    found = run_app(echo_size, GET * 5_000)
    assert 2 <= found.count(b"200 OK") <= http_server.PIPELINED_MAX + 2
    assert found.count(b"connection: close") == 1 and b"connection: close" in found.rpartition(b"HTTP/1.1 200 OK")[2]


@pytest.mark.parametrize(
    "behind", [MUCH, b"\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + MUCH], ids=["long data", "not HTTP", "unfinished head"]
)
def test_answer_survives_data_behind_its_request(behind: bytes) -> None:
    found = run_app(slow, GET, behind)
    assert found.count(b"HTTP/1.1 ") == 1 and found.endswith(b"at last") and b"connection: close" in found


@pytest.mark.parametrize("together", [True, False])
def test_body_is_not_parsed_as_request(together: bool) -> None:
    inner = GET.replace(b"GET /", b"GET /inner")
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(inner)
    found = run_app(echo_size, head + inner) if together else run_app(echo_size, head, inner)
    assert found.count(b"HTTP/1.1 ") == 1 and found.startswith(b"HTTP/1.1 400") and b"Upgrade" in found


def test_upgrade_request_is_answered_and_connection_closed() -> None:
    found = run_app(echo_size, GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n") + GET)
    assert found.count(b"200 OK") == 1 and b"connection: close" in found


def test_blank_lines_after_answer_are_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.5)
    found = run_app(echo_size, GET, b"\r\n", b"\r\n")
    assert found.count(b"200 OK") == 1  # the connection was closed, or this would not end


def test_half_closed_connection_still_gets_answer() -> None:
    async def main() -> bytes:
        async with listening(slow) as bound:
            reader, writer = await ask(bound)
            writer.write_eof()
            found = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return found

    found = asyncio.run(main())
    assert found.endswith(b"at last") and b"connection: close" in found


@pytest.mark.parametrize("chunks", [b"zz\r\nabc\r\n", b"3\r\nabcde\r\n", b"F" * 17 + b"\r\n"])
def test_malformed_chunks_get_400(chunks: bytes) -> None:
    found = run_app(echo_size, POST, chunks)
    assert found.startswith(b"HTTP/1.1 400") and b"malformed" in found


def test_host_in_request_line_takes_precedence() -> None:
    closes = b"\r\nConnection: close\r\n\r\n"
    found = run_app(echo_size, GET.replace(b"GET /", b"GET http://evil.example:81/a").replace(b"\r\n\r\n", closes))
    assert found.endswith(b"of evil.example:81")


def test_disconnect_is_noticed_with_pipelined_request_behind() -> None:
    disconnected = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()

    async def main() -> None:
        async with listening(endless) as bound:
            reader, writer = await ask(bound, GET + GET)
            await asyncio.wait_for(reader.readuntil(b"begun"), 5)
            writer.transport.abort()
            await asyncio.wait_for(disconnected.wait(), 10)
        assert disconnected.is_set()

    asyncio.run(main())


def test_lingering_reads_after_refusal_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_BYTES", 1 << 20)
    monkeypatch.setattr(connections, "LINGER_S", 60.0)

    async def main() -> int:
        async with listening(echo_size) as bound:
            _, writer = await ask(bound, POST + b"0\r\nX: ")
            sent = 0
            with suppress(ConnectionError):
                while sent < 1 << 30:
                    writer.write(MUCH)
                    await writer.drain()
                    sent += len(MUCH)
            writer.close()
            return sent

    assert asyncio.run(main()) < 1 << 27
