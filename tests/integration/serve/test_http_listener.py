"""Does a listener keep its bounds, and bring what it has taken to an end? On a real socket, with an application of one line."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from remit.world.interfaces import ListenFailed
from remit.world.net import http_server
from remit.world.net.connections import ALWAYS_ADMITTED, BoundSocket, ListenAddress
from remit.world.net.http_server import serve_http

pytestmark = pytest.mark.smoke

App = Callable[[Any, Any, Any], Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def said(send: Any, words: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(words)).encode())]})
    await send({"type": "http.response.body", "body": words})


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await said(send, b"hello")


@asynccontextmanager
async def listening(app: App, closing: Callable[[], None] = lambda: None, **more: Any) -> AsyncIterator[BoundSocket]:
    bound = BoundSocket(ListenAddress("127.0.0.1", 0))
    try:
        async with serve_http(app, bound, on_closing=closing, **more):
            yield bound
    finally:
        bound.close()


async def ask(bound: BoundSocket, words: bytes = GET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
    writer.write(words)
    return reader, writer


def test_one_connection_too_many_is_told_so() -> None:
    async def main() -> None:
        async with listening(hello, connections_max=2) as bound:
            held = [await ask(bound) for _ in range(2)]
            for reader, _ in held:
                assert b"200 OK" in await reader.readline()
            reader, writer = await ask(bound)
            words = await reader.read()
            assert words.startswith(b"HTTP/1.1 503") and b"retry-after" in words
            assert json.loads(words.partition(b"\r\n\r\n")[2])["code"] == "overloaded"
            writer.close()
            held[0][1].close()
            await asyncio.sleep(0.05)
            reader, writer = await ask(bound)
            assert b"200 OK" in await reader.readline()
            for _, open_ in (*held, (reader, writer)):
                open_.close()

    asyncio.run(main())


async def from_(address: str, bound: BoundSocket, words: bytes = GET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", bound.port, local_addr=(address, 0))
    writer.write(words)
    return reader, writer


def test_one_address_does_not_have_all_connections__and_those_of_it_that_say_nothing_go_first() -> None:
    """A34: another finds a place, however many the first one has; and is told of in the audit."""

    async def main() -> None:
        turned: list[tuple[str, int, str, str]] = []
        async with listening(hello, connections_max=200, on_rejected=lambda *why: turned.append(why)) as bound:
            held = []
            for _ in range(100):
                held.append(await from_("127.0.0.2", bound))
                assert b"200 OK" in await held[-1][0].readline()
            reader, writer = await from_("127.0.0.2", bound)
            words = await reader.read()
            assert words.startswith(b"HTTP/1.1 503") and b"from this address" in words
            assert turned == [("127.0.0.2", 503, "overloaded", "too many connections from this address")]
            held.append((reader, writer))
            for _ in range(40):
                held.append(await from_("127.0.0.3", bound))
                assert b"200 OK" in await held[-1][0].readline()
            silent = [await from_("127.0.0.4", bound, b"") for _ in range(ALWAYS_ADMITTED)]
            await asyncio.sleep(0.05)
            held.append(await from_("127.0.0.4", bound))
            assert b"200 OK" in await held[-1][0].readline()
            assert b"from this address" in await silent[0][0].read(), "the first of its own that said nothing"
            for _, open_ in (*held, *silent):
                open_.close()

    asyncio.run(main())


def test_what_was_taken_is_answered_before_it_ends() -> None:
    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await go_on.wait()
            await said(send, b"done")

        def closing() -> None:
            asyncio.get_running_loop().call_later(0.1, go_on.set)

        async with listening(slow, closing) as bound:
            reader, writer = await ask(bound)
            idle_reader, idle_writer = await ask(bound, b"")
            await begun.wait()
        words = await reader.read()
        assert words.endswith(b"done") and b"connection: close" in words
        assert await idle_reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await ask(bound)
        for open_ in (writer, idle_writer):
            open_.close()

    asyncio.run(main())


def test_what_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "DRAIN_S", 0.1)

    async def main() -> None:
        begun = asyncio.Event()

        async def stuck(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(5):
            async with listening(stuck) as bound:
                reader, writer = await ask(bound)
                await begun.wait()
            await reader.read()
        writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com", "", "127.0.0.1 "])
def test_nobody_listens_beyond_this_machine(host: str) -> None:
    """A06."""
    with pytest.raises(ListenFailed) as refused:
        BoundSocket(ListenAddress(host, 0))
    assert refused.value.cure


def test_a_port_has_one_listener() -> None:
    first = BoundSocket(ListenAddress("localhost", 0))
    try:
        with pytest.raises(ListenFailed, match="already in use"):
            BoundSocket(ListenAddress("127.0.0.1", first.port))
        with pytest.raises(ListenFailed):
            BoundSocket(ListenAddress("127.0.0.1", 70_000))
    finally:
        first.close()


def test_an_answer_after_another_on_one_connection() -> None:
    async def main() -> None:
        async with listening(hello) as bound:
            reader, writer = await ask(bound, GET * 3)
            words = b""
            while words.count(b"hello") < 3:
                words += await reader.read(65_536)
            assert words.count(b"date: ") == 3
            writer.close()

    asyncio.run(main())


def test_who_was_answered_and_asks_no_more_is_let_go__and_who_asks_again_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.5)

    async def main() -> None:
        async with listening(hello) as bound:
            quiet, busy = await ask(bound), await ask(bound)
            for _ in range(6):
                await asyncio.sleep(0.2)
                busy[1].write(GET)
            left = asyncio.create_task(busy[0].read())
            words = await asyncio.wait_for(quiet[0].read(), 5)
            assert words.startswith(b"HTTP/1.1 200 OK") and words.endswith(b"hello")
            assert (await asyncio.wait_for(left, 5)).count(b"HTTP/1.1 200 OK") == 7
            for _, writer in (quiet, busy):
                writer.close()

    asyncio.run(main())


def test_who_is_being_answered_is_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.2)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.8)
        await said(send, b"at last")

    async def main() -> None:
        async with listening(slow) as bound:
            reader, writer = await ask(bound, GET + GET)  # the second while the first is being answered
            words = await asyncio.wait_for(reader.read(), 10)
            assert words.count(b"at last") == 2
            writer.close()

    asyncio.run(main())


async def whole(scope: Any, receive: Any, send: Any) -> None:
    """Answers in one piece if it can, and else as any other."""
    name = scope["query_string"] or b"plain"
    headers = [(b"content-length", b"5"), *([(b"connection", b"close")] if name == b"last" else []), (b"x-name", name)]
    if name == b"forged":
        headers.append((b"x-forged", b"1\r\nx-second: 2"))
    if not scope["whole"](scope, 200, headers, b"whole"):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"parts"})


def test_an_answer_in_one_piece_is_as_one_in_two() -> None:
    async def main() -> None:
        async with listening(whole) as bound:
            reader, writer = await ask(bound, GET + GET.replace(b"GET /", b"HEAD /") + GET.replace(b"/ ", b"/?last "))
            words = await asyncio.wait_for(reader.read(), 5)
            first, head, last = words.split(b"HTTP/1.1 200 OK\r\n")[1:]
            assert first.endswith(b"\r\n\r\nwhole") and b"x-name: plain\r\n" in first and b"date: " in first
            assert head.endswith(b"\r\n\r\n") and b"content-length: 5\r\n" in head
            assert last.endswith(b"\r\n\r\nwhole") and last.count(b"connection: close\r\n") == 1
            writer.close()

    asyncio.run(main())


def test_who_asks_for_one_answer_gets_one() -> None:
    async def main() -> None:
        async with listening(whole) as bound:
            reader, writer = await ask(bound, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            words = await asyncio.wait_for(reader.read(), 5)
            assert words.endswith(b"\r\n\r\nwhole") and words.count(b"connection: close\r\n") == 1
            writer.close()

    asyncio.run(main())


def test_a_header_does_not_become_two() -> None:
    async def main() -> None:
        async with listening(whole) as bound:
            reader, writer = await ask(bound, GET.replace(b"/ ", b"/?forged "))
            words = await asyncio.wait_for(reader.read(), 5)
            assert b"x-second" not in words and b"whole" not in words
            writer.close()

    asyncio.run(main())


def test_what_is_not_waited_for_is_sent_to_nobody() -> None:
    """Whoever leaves before the answer is there does no harm."""
    heard: list[bool] = []

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        heard.append(scope["whole"](scope, 200, [(b"content-length", b"5")], b"whole"))

    async def main() -> None:
        async with listening(late) as bound:
            _, writer = await ask(bound)
            await asyncio.sleep(0.1)
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(0.5)
            reader, again = await ask(bound)
            assert b"200 OK" in await asyncio.wait_for(reader.readline(), 5)
            again.close()
        assert len(heard) == 2

    asyncio.run(main())


def test_what_was_answered_leaves_nothing_for_the_collector() -> None:
    """Whatever leads to itself stays until the collector comes by, and it stops everybody for as long as it looks."""

    async def main() -> int:
        async with listening(whole) as bound:
            reader, writer = await ask(bound)
            await reader.readuntil(b"whole")
            gc.collect()
            gc.disable()
            try:
                for _ in range(300):
                    writer.write(GET)
                    await reader.readuntil(b"whole")
                return gc.collect()
            finally:
                gc.enable()
                writer.close()

    assert asyncio.run(main()) < 300
