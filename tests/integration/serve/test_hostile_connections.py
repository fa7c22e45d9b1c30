"""Is nothing that a stranger sends on one connection taken without bound, or for something else? Over a real socket."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

import pytest

from remit.world.net import connections, http_server
from remit.world.net.connections import BoundSocket
from tests.integration.serve.test_http_listener import GET, ask, listening, said

pytestmark = pytest.mark.smoke

POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
MUCH = b"a" * 300_000


async def patient(scope: Any, receive: Any, send: Any) -> None:
    """Answers once it has all of the body: with its size, and the names of the headers."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    names = b",".join(name for name, _ in scope["headers"])
    hosts = b",".join(value for name, value in scope["headers"] if name == b"host")
    await said(send, b"%d bytes, %b, of %b" % (size, names, hosts))


async def slow(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.5)
    await said(send, b"at last")


async def heard(bound: BoundSocket, *words: bytes, wait_s: float = 10) -> bytes:
    """All that is answered until the connection is closed."""
    reader, writer = await ask(bound, words[0])
    found, reading = b"", asyncio.create_task(reader.read())
    with suppress(ConnectionError):
        for more in words[1:]:
            await asyncio.sleep(0.05)
            writer.write(more)
            await writer.drain()
    with suppress(ConnectionError):
        found = await asyncio.wait_for(reading, wait_s)
    writer.close()
    return found


def play(app: Any, *words: bytes) -> bytes:
    async def main() -> bytes:
        async with listening(app) as bound:
            return await heard(bound, *words)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "words",
    [
        (POST + b"0\r\nX: ", MUCH, MUCH),
        (POST + b"0\r\n", *[b"X: y\r\n" * 5_000] * 4),
        (POST + b"5;", MUCH, MUCH),
        (POST + b"3\r\nabc\r\n0", MUCH, MUCH),
    ],
    ids=["one trailer", "many trailers", "a chunk's extension", "a chunk's size"],
)
def test_what_stands_beside_a_body_is_bounded(words: tuple[bytes, ...]) -> None:
    found = play(patient, *words)
    assert found.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) and b"cure" in found


def test_what_is_bounded_costs_little() -> None:
    """Ten thousand pieces of one trailer, each of which would be put together with all before it."""

    async def main() -> float:
        async with listening(patient) as bound:
            began = resource.getrusage(resource.RUSAGE_SELF)
            await heard(bound, POST + b"0\r\nX: ", *[b"a" * 4_000] * 100)
            ended = resource.getrusage(resource.RUSAGE_SELF)
            return ended.ru_utime - began.ru_utime

    assert asyncio.run(main()) < 5


def test_a_body_in_very_small_chunks_is_read() -> None:
    last = b"0\r\n\r\n" + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    found = play(patient, POST, *[b"1\r\na\r\n" * 10_000] * 5, last)
    assert b"50000 bytes" in found and found.count(b"200 OK") == 2


def test_a_trailer_is_no_header() -> None:
    found = play(
        patient, POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"1\r\na\r\n0\r\nAuthorization: x\r\n\r\n"
    )
    assert b"200 OK" in found and b"1 bytes" in found and b"authorization" not in found


def test_of_very_many_requests_at_once_some_are_answered_and_the_asker_told() -> None:
    found = play(patient, GET * 5_000)
    assert 2 <= found.count(b"200 OK") <= http_server.PIPELINED_MAX + 2
    assert found.count(b"connection: close") == 1 and b"connection: close" in found.rpartition(b"HTTP/1.1 200 OK")[2]


@pytest.mark.parametrize(
    "behind", [MUCH, b"\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + MUCH], ids=["much", "no HTTP", "a head"]
)
def test_an_answer_does_not_fail_for_what_comes_behind_its_request(behind: bytes) -> None:
    found = play(slow, GET, behind)
    assert found.count(b"HTTP/1.1 ") == 1 and found.endswith(b"at last") and b"connection: close" in found


@pytest.mark.parametrize("together", [True, False])
def test_a_body_is_no_request(together: bool) -> None:
    inner = GET.replace(b"GET /", b"GET /inner")
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(inner)
    found = play(patient, head + inner) if together else play(patient, head, inner)
    assert found.count(b"HTTP/1.1 ") == 1 and found.startswith(b"HTTP/1.1 400") and b"Upgrade" in found


def test_who_would_change_the_protocol_is_answered_and_told_that_it_ends_there() -> None:
    found = play(patient, GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n") + GET)
    assert found.count(b"200 OK") == 1 and b"connection: close" in found


def test_blank_lines_after_an_answer_are_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.5)
    found = play(patient, GET, b"\r\n", b"\r\n")
    assert found.count(b"200 OK") == 1  # and it was closed, or this would not have come to its end


def test_who_says_that_it_has_said_all_is_answered() -> None:
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
def test_broken_chunks_are_told(chunks: bytes) -> None:
    found = play(patient, POST, chunks)
    assert found.startswith(b"HTTP/1.1 400") and b"malformed" in found


def test_a_host_in_the_first_line_counts() -> None:
    closes = b"\r\nConnection: close\r\n\r\n"
    found = play(patient, GET.replace(b"GET /", b"GET http://evil.example:81/a").replace(b"\r\n\r\n", closes))
    assert found.endswith(b"of evil.example:81")


def test_who_leaves_is_noticed_although_another_request_waits_behind() -> None:
    left = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def main() -> None:
        async with listening(endless) as bound:
            reader, writer = await ask(bound, GET + GET)
            await asyncio.wait_for(reader.readuntil(b"begun"), 5)
            writer.transport.abort()
            await asyncio.wait_for(left.wait(), 10)
        assert left.is_set()

    asyncio.run(main())


def test_what_is_let_pass_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_BYTES", 1 << 20)
    monkeypatch.setattr(connections, "LINGER_S", 60.0)

    async def main() -> int:
        async with listening(patient) as bound:
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
