"""HTTP listener: limits on connections, and complete answers at shutdown. A real socket with minimal applications."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from remit.world.interfaces import ListenFailed
from remit.world.net import http_server
from remit.world.net.connections import ALWAYS_ADMITTED, BoundSocket, ListenAddress
from tests.integration.serve.http_listener import GET, ask, listening, respond

pytestmark = pytest.mark.smoke


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await respond(send, b"hello")


def test_connection_over_limit_gets_503() -> None:
    async def main() -> None:
        async with listening(hello, connections_max=2) as bound:
            held = [await ask(bound) for _ in range(2)]
            for reader, _ in held:
                assert b"200 OK" in await reader.readline()
            reader, writer = await ask(bound)
            data = await reader.read()
            assert data.startswith(b"HTTP/1.1 503") and b"retry-after" in data
            assert json.loads(data.partition(b"\r\n\r\n")[2])["code"] == "overloaded"
            writer.close()
            held[0][1].close()
            await asyncio.sleep(0.05)
            reader, writer = await ask(bound)
            assert b"200 OK" in await reader.readline()
            for _, open_ in (*held, (reader, writer)):
                open_.close()

    asyncio.run(main())


async def ask_from(address: str, bound: BoundSocket, data: bytes = GET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", bound.port, local_addr=(address, 0))
    writer.write(data)
    return reader, writer


def test_one_address_cannot_take_all_connections_and_its_idle_ones_close_first() -> None:
    """A34: other addresses get connections, however many the first one has; rejections are reported for the audit."""

    async def main() -> None:
        rejected: list[tuple[str, int, str, str]] = []
        async with listening(hello, connections_max=200, on_rejected=lambda *why: rejected.append(why)) as bound:
            held = []
            for _ in range(100):
                held.append(await ask_from("127.0.0.2", bound))
                assert b"200 OK" in await held[-1][0].readline()
            reader, writer = await ask_from("127.0.0.2", bound)
            data = await reader.read()
            assert data.startswith(b"HTTP/1.1 503") and b"from this address" in data
            assert rejected == [("127.0.0.2", 503, "overloaded", "too many connections from this address")]
            held.append((reader, writer))
            for _ in range(40):
                held.append(await ask_from("127.0.0.3", bound))
                assert b"200 OK" in await held[-1][0].readline()
            silent = [await ask_from("127.0.0.4", bound, b"") for _ in range(ALWAYS_ADMITTED)]
            await asyncio.sleep(0.05)
            held.append(await ask_from("127.0.0.4", bound))
            assert b"200 OK" in await held[-1][0].readline()
            assert b"from this address" in await silent[0][0].read(), "the oldest idle connection of that address is closed"
            for _, open_ in (*held, *silent):
                open_.close()

    asyncio.run(main())


def test_request_in_progress_is_answered_before_shutdown() -> None:
    async def main() -> None:
        started, release = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            started.set()
            await release.wait()
            await respond(send, b"done")

        def closing() -> None:
            asyncio.get_running_loop().call_later(0.1, release.set)

        async with listening(slow, closing) as bound:
            reader, writer = await ask(bound)
            idle_reader, idle_writer = await ask(bound, b"")
            await started.wait()
        data = await reader.read()
        assert data.endswith(b"done") and b"connection: close" in data
        assert await idle_reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await ask(bound)
        for open_ in (writer, idle_writer):
            open_.close()

    asyncio.run(main())


def test_stuck_request_is_ended_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "DRAIN_S", 0.1)

    async def main() -> None:
        started = asyncio.Event()

        async def stuck(scope: Any, receive: Any, send: Any) -> None:
            started.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(5):
            async with listening(stuck) as bound:
                reader, writer = await ask(bound)
                await started.wait()
            assert b"200 OK" not in await reader.read()
        writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com", "", "127.0.0.1 "])
def test_listening_beyond_loopback_without_tls_is_refused(host: str) -> None:
    """A06."""
    with pytest.raises(ListenFailed) as refused:
        BoundSocket(ListenAddress(host, 0))
    assert refused.value.cure


def test_port_has_only_one_listener() -> None:
    first = BoundSocket(ListenAddress("localhost", 0))
    try:
        with pytest.raises(ListenFailed, match="already in use"):
            BoundSocket(ListenAddress("127.0.0.1", first.port))
        with pytest.raises(ListenFailed):
            BoundSocket(ListenAddress("127.0.0.1", 70_000))
    finally:
        first.close()


def test_connection_serves_successive_requests() -> None:
    async def main() -> None:
        async with listening(hello) as bound:
            reader, writer = await ask(bound, GET * 3)
            data = b""
            while data.count(b"hello") < 3:
                data += await reader.read(65_536)
            assert data.count(b"date: ") == 3
            writer.close()

    asyncio.run(main())


def test_idle_keep_alive_connection_is_closed_and_active_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.5)

    async def main() -> None:
        async with listening(hello) as bound:
            quiet, busy = await ask(bound), await ask(bound)
            for _ in range(6):
                await asyncio.sleep(0.2)
                busy[1].write(GET)
            left = asyncio.create_task(busy[0].read())
            data = await asyncio.wait_for(quiet[0].read(), 5)
            assert data.startswith(b"HTTP/1.1 200 OK") and data.endswith(b"hello")
            assert (await asyncio.wait_for(left, 5)).count(b"HTTP/1.1 200 OK") == 7
            for _, writer in (quiet, busy):
                writer.close()

    asyncio.run(main())


def test_connection_with_request_in_progress_is_not_closed_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.2)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.8)
        await respond(send, b"at last")

    async def main() -> None:
        async with listening(slow) as bound:
            reader, writer = await ask(bound, GET + GET)  # the second arrives while the first is being answered
            data = await asyncio.wait_for(reader.read(), 10)
            assert data.count(b"at last") == 2
            writer.close()

    asyncio.run(main())


async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
    """Answers in a single write if possible, otherwise as usual."""
    name = scope["query_string"] or b"plain"
    headers = [(b"content-length", b"5"), *([(b"connection", b"close")] if name == b"last" else []), (b"x-name", name)]
    if name == b"forged":
        headers.append((b"x-forged", b"1\r\nx-second: 2"))
    if not scope["whole"](scope, 200, headers, b"whole"):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"parts"})


def test_single_write_answer_equals_normal_answer() -> None:
    async def main() -> None:
        async with listening(answer_at_once) as bound:
            reader, writer = await ask(bound, GET + GET.replace(b"GET /", b"HEAD /") + GET.replace(b"/ ", b"/?last "))
            data = await asyncio.wait_for(reader.read(), 5)
            first, head, last = data.split(b"HTTP/1.1 200 OK\r\n")[1:]
            assert first.endswith(b"\r\n\r\nwhole") and b"x-name: plain\r\n" in first and b"date: " in first
            assert head.endswith(b"\r\n\r\n") and b"content-length: 5\r\n" in head
            assert last.endswith(b"\r\n\r\nwhole") and last.count(b"connection: close\r\n") == 1
            writer.close()

    asyncio.run(main())


def test_connection_close_request_gets_one_answer() -> None:
    async def main() -> None:
        async with listening(answer_at_once) as bound:
            reader, writer = await ask(bound, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            data = await asyncio.wait_for(reader.read(), 5)
            assert data.endswith(b"\r\n\r\nwhole") and data.count(b"connection: close\r\n") == 1
            writer.close()

    asyncio.run(main())


def test_header_value_with_newline_cannot_inject_header() -> None:
    async def main() -> None:
        async with listening(answer_at_once) as bound:
            reader, writer = await ask(bound, GET.replace(b"/ ", b"/?forged "))
            data = await asyncio.wait_for(reader.read(), 5)
            assert b"x-second" not in data and b"whole" not in data
            writer.close()

    asyncio.run(main())


def test_answer_after_disconnect_is_dropped() -> None:
    """A client that leaves before its answer does no harm."""
    results: list[bool] = []

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        results.append(scope["whole"](scope, 200, [(b"content-length", b"5")], b"whole"))

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
        assert len(results) == 2

    asyncio.run(main())


def test_answered_requests_leave_no_reference_cycles() -> None:
    """Cycles stay until the garbage collector runs, which stops everything meanwhile."""

    async def main() -> int:
        async with listening(answer_at_once) as bound:
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
