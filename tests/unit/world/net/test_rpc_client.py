"""RPC over sockets: everything is bounded, and malformed or hostile peers do no harm."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from remit.world.interfaces import ListenFailed, NotSent, ReplyLost
from remit.world.net import rpc_server
from remit.world.net.frames import BODY_BYTES_MAX, WINDOW_BYTES, FrameKind, RpcAddress, pack_frame, parse_address
from remit.world.net.rpc_client import SocketLink


class EchoService:
    def __init__(self) -> None:
        self.yielded = 0
        self.gate = asyncio.Event()
        self.started = 0

    async def request(self, body: bytes, /) -> bytes:
        self.started += 1
        if body == b"wait":
            await self.gate.wait()
        if body == b"large":
            return bytes(BODY_BYTES_MAX + 1)
        return body

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        while True:
            self.yielded += 1
            yield bytes(int(body))


def link_in(place: Path) -> SocketLink:
    return SocketLink({"a": f"unix:{place}/a"})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("unix:/run/remit/a", RpcAddress(path="/run/remit/a")),
        ("tcp:127.0.0.1:80", RpcAddress(host="127.0.0.1", port=80)),
        ("tcp:127.9.9.9:65535", RpcAddress(host="127.9.9.9", port=65535)),
        ("tcp:[::1]:80", RpcAddress(host="::1", port=80)),
    ],
)
def test_local_addresses_are_parsed(text: str, found: RpcAddress) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("tcp:10.0.0.1:80", "tcp:0.0.0.0:80", "tcp:example.org:80", "tcp:localhost:80", "tcp::80"),
        *("tcp:127.0.0.1:0", "tcp:127.0.0.1:65536", "tcp:127.0.0.1:", "tcp:127.0.0.1:-1", "tcp:127.0.0.1:८०"),
        *("", "unix:", "unix:relative", "http://127.0.0.1:80"),
    ],
)
def test_other_addresses_are_refused_with_fix(text: str) -> None:
    with pytest.raises(ValueError, match=r"unix:/path or tcp:127\.0\.0\.1:port"):
        SocketLink({"a": text})


def test_name_without_address_is_not_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(NotSent, match="no address is configured for b"):
            await link_in(tmp_path).request("b", b"x")

    asyncio.run(scenario())


def test_oversized_request_or_reply_is_not_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        service, client = EchoService(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", service):
            with pytest.raises(ValueError, match="bytes"):
                await client.request("a", bytes(BODY_BYTES_MAX + 1))
            assert service.started == 0
            with pytest.raises(ReplyLost):
                await client.request("a", b"large")
            assert len(await client.request("a", bytes(BODY_BYTES_MAX))) == BODY_BYTES_MAX

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [0, 1_000, 3 * WINDOW_BYTES])
def test_slow_reader_applies_backpressure_to_sender(tmp_path: Path, size: int) -> None:
    """Otherwise the sender's memory would fill at its own speed."""

    async def scenario() -> None:
        service, client = EchoService(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", service), aclosing(client.stream("a", b"%d" % size)) as items:
            assert len(await anext(items)) == size
            before = -1
            while before != service.yielded:
                before = service.yielded
                await asyncio.sleep(0.1)
            assert service.yielded * (size + 64) <= WINDOW_BYTES + 2 * (size + 64)
            for _ in range(2 * before):
                await anext(items)
            assert service.yielded > before, "the stream must continue"
            assert await client.request("a", b"meanwhile") == b"meanwhile"

    asyncio.run(scenario())


def test_calls_over_limit_are_refused_before_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_MAX", 5)

    async def scenario() -> None:
        service, client = EchoService(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", service), asyncio.TaskGroup() as group:
            waiting = [group.create_task(client.request("a", b"wait")) for _ in range(5)]
            await until(lambda: service.started == 5)
            with pytest.raises(NotSent, match="at its limit"):
                await client.request("a", b"one too many")
            assert service.started == 5
            service.gate.set()
            await asyncio.gather(*waiting)
            await until(lambda: len(asyncio.all_tasks()) <= 4)
            assert await client.request("a", b"after") == b"after"

    asyncio.run(scenario())


def test_request_bytes_over_limit_are_refused_before_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_BYTES_MAX", 10)

    async def scenario() -> None:
        client = link_in(tmp_path)
        async with link_in(tmp_path).serve("a", EchoService()):
            with pytest.raises(NotSent):
                await client.request("a", b"x" * 11)
            for _ in range(5):
                assert await client.request("a", b"x" * 10) == b"x" * 10

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 9,
        bytes(range(130, 194)),
        struct.pack(">IBQ", BODY_BYTES_MAX + 1, FrameKind.REQUEST, 1),
        struct.pack(">IBQ", 0, 99, 1),
        pack_frame(FrameKind.TAKEN, 1, b"xyz"),
        pack_frame(FrameKind.STREAM, 1, b"0") * 2,
        pack_frame(FrameKind.REPLY, 1, b"x"),
    ],
)
def test_malformed_frames_close_only_their_connection(tmp_path: Path, hostile: bytes) -> None:
    async def scenario() -> None:
        service, client = EchoService(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", service), asyncio.TaskGroup() as group:
            other = group.create_task(client.request("a", b"wait"))
            await until(lambda: service.started == 1)
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "a"))
            writer.write(hostile)
            writer.write_eof()
            try:
                async with asyncio.timeout(10):
                    await reader.read()
            except ConnectionResetError:
                pass
            writer.close()
            service.gate.set()
            assert await other == b"wait"

    asyncio.run(scenario())


def test_malformed_reply_loses_reply(tmp_path: Path) -> None:
    async def scenario() -> None:
        def send_garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\xff" * 100)
            writer.close()

        server = await asyncio.start_unix_server(send_garbage, str(tmp_path / "a"))
        client = link_in(tmp_path)
        for call in (client.request("a", b"x"), anext(client.stream("a", b"x"))):
            with pytest.raises(ReplyLost):
                await call
        server.close()

    asyncio.run(scenario())


SERVER = """
import asyncio, sys
from remit.world.net.rpc_client import SocketLink

class Shop:
    async def request(self, body):
        print("heard", flush=True)
        await asyncio.Event().wait()

    async def stream(self, body):
        yield b"one"
        await asyncio.Event().wait()

async def main():
    async with SocketLink({"a": sys.argv[1]}).serve("a", Shop()):
        print("serves", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_killed_server_loses_replies_in_flight_and_later_calls_are_not_sent(tmp_path: Path) -> None:
    """The boundary between the two errors is set by the operating system, without a farewell message."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", SERVER, f"unix:{tmp_path}/a"]

    async def scenario(server: subprocess.Popen[str]) -> None:
        assert server.stdout is not None
        client, received = link_in(tmp_path), list[bytes]()

        async def ask() -> None:
            with pytest.raises(ReplyLost, match="a did not answer"):
                await client.request("a", b"x")

        async def read() -> None:
            with pytest.raises(ReplyLost):
                async for item in client.stream("a", b"x"):
                    received.append(item)

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for work in (ask(), read()):
                group.create_task(work)
            await until(lambda: received == [b"one"])
            assert server.stdout.readline() == "heard\n"
            server.kill()
        server.wait()  # a dying process closes its sockets one after another and may still accept a connection
        with pytest.raises(NotSent, match="connection refused"):
            await client.request("a", b"x")

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"
        asyncio.run(scenario(server))


def test_socket_file_of_killed_process_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = await asyncio.start_unix_server(lambda _, writer: writer.close(), str(tmp_path / "a"))
        server.close()
        assert (tmp_path / "a").is_socket()
        client = link_in(tmp_path)
        with pytest.raises(NotSent):
            await client.request("a", b"x")
        async with link_in(tmp_path).serve("a", EchoService()):
            assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
            assert await client.request("a", b"x") == b"x"
        assert not (tmp_path / "a").exists()

    asyncio.run(scenario())


def test_failure_to_listen_is_reported_with_fix(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "a").write_text("a file of somebody's")
        for place in (tmp_path, tmp_path / "no", tmp_path / ("x" * 120)):
            with pytest.raises(ListenFailed, match="use another address"):
                async with link_in(place).serve("a", EchoService()):
                    pytest.fail("it must not listen")
        assert (tmp_path / "a").read_text() == "a file of somebody's"

    asyncio.run(scenario())


def test_no_task_is_left_after_serving(tmp_path: Path) -> None:
    async def scenario() -> None:
        service, client = EchoService(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", service):
            await client.request("a", b"x")
            await anext(client.stream("a", b"1"))
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert not (tmp_path / "a").exists()

    asyncio.run(scenario())


def test_cancelled_serving_leaves_nothing(tmp_path: Path) -> None:
    async def serve(started: asyncio.Event) -> None:
        async with link_in(tmp_path).serve("a", EchoService()):
            started.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        started, client = asyncio.Event(), link_in(tmp_path)
        serving = asyncio.ensure_future(serve(started))
        await started.wait()
        in_flight = asyncio.ensure_future(result_or_error(client.request("a", b"wait")))
        await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.sleep(0.05)
        serving.cancel()  # the second cancellation skips the grace period of requests in flight
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert isinstance(await in_flight, ReplyLost)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert not (tmp_path / "a").exists()

    async def result_or_error(request: Coroutine[Any, Any, bytes]) -> bytes | Exception:
        try:
            return await request
        except ReplyLost as error:
            return error

    asyncio.run(scenario())
