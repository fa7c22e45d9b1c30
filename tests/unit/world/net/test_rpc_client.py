"""Is everything that goes over a socket bounded, and does whatever comes over one do no harm?"""

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


class Shop:
    def __init__(self) -> None:
        self.made = 0
        self.gate = asyncio.Event()
        self.begun = 0

    async def request(self, body: bytes, /) -> bytes:
        self.begun += 1
        if body == b"wait":
            await self.gate.wait()
        if body == b"large":
            return bytes(BODY_BYTES_MAX + 1)
        return body

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        while True:
            self.made += 1
            yield bytes(int(body))


def link_in(place: Path) -> SocketLink:
    return SocketLink({"a": f"unix:{place}/a"})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - of another's affairs one hears nothing
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
def test_addresses_on_this_machine_are_read(text: str, found: RpcAddress) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("tcp:10.0.0.1:80", "tcp:0.0.0.0:80", "tcp:example.org:80", "tcp:localhost:80", "tcp::80"),
        *("tcp:127.0.0.1:0", "tcp:127.0.0.1:65536", "tcp:127.0.0.1:", "tcp:127.0.0.1:-1", "tcp:127.0.0.1:८०"),
        *("", "unix:", "unix:relative", "http://127.0.0.1:80"),
    ],
)
def test_any_other_address_is_refused_with_a_cure(text: str) -> None:
    with pytest.raises(ValueError, match=r"unix:/path or tcp:127\.0\.0\.1:port"):
        SocketLink({"a": text})


def test_a_name_without_an_address_reaches_nobody(tmp_path: Path) -> None:
    async def scene() -> None:
        with pytest.raises(NotSent, match="no address is configured for b"):
            await link_in(tmp_path).request("b", b"x")

    asyncio.run(scene())


def test_a_body_over_the_bound_is_not_sent_and_such_a_reply_is_not_either(tmp_path: Path) -> None:
    async def scene() -> None:
        shop, asker = Shop(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", shop):
            with pytest.raises(ValueError, match="bytes"):
                await asker.request("a", bytes(BODY_BYTES_MAX + 1))
            assert shop.begun == 0
            with pytest.raises(ReplyLost):
                await asker.request("a", b"large")
            assert len(await asker.request("a", bytes(BODY_BYTES_MAX))) == BODY_BYTES_MAX

    asyncio.run(scene())


@pytest.mark.parametrize("size", [0, 1_000, 3 * WINDOW_BYTES])
def test_a_slow_reader_holds_the_sender_up(tmp_path: Path, size: int) -> None:
    """Else the sender's memory fills at the speed of the sender."""

    async def scene() -> None:
        shop, asker = Shop(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", shop), aclosing(asker.stream("a", b"%d" % size)) as items:
            assert len(await anext(items)) == size
            before = -1
            while before != shop.made:
                before = shop.made
                await asyncio.sleep(0.1)
            assert shop.made * (size + 64) <= WINDOW_BYTES + 2 * (size + 64)
            for _ in range(2 * before):
                await anext(items)
            assert shop.made > before, "it never went on"
            assert await asker.request("a", b"meanwhile") == b"meanwhile"

    asyncio.run(scene())


def test_calls_over_the_bound_are_refused_before_they_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_MAX", 5)

    async def scene() -> None:
        shop, asker = Shop(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", shop), asyncio.TaskGroup() as group:
            waiting = [group.create_task(asker.request("a", b"wait")) for _ in range(5)]
            await until(lambda: shop.begun == 5)
            with pytest.raises(NotSent, match="at its limit"):
                await asker.request("a", b"one too many")
            assert shop.begun == 5
            shop.gate.set()
            await asyncio.gather(*waiting)
            await until(lambda: len(asyncio.all_tasks()) <= 4)
            assert await asker.request("a", b"after") == b"after"

    asyncio.run(scene())


def test_bytes_over_the_bound_are_refused_before_they_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_BYTES_MAX", 10)

    async def scene() -> None:
        asker = link_in(tmp_path)
        async with link_in(tmp_path).serve("a", Shop()):
            with pytest.raises(NotSent):
                await asker.request("a", b"x" * 11)
            for _ in range(5):
                assert await asker.request("a", b"x" * 10) == b"x" * 10

    asyncio.run(scene())


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
def test_whoever_does_not_speak_this_is_dropped_and_others_are_not(tmp_path: Path, hostile: bytes) -> None:
    async def scene() -> None:
        shop, asker = Shop(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", shop), asyncio.TaskGroup() as group:
            other = group.create_task(asker.request("a", b"wait"))
            await until(lambda: shop.begun == 1)
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "a"))
            writer.write(hostile)
            writer.write_eof()
            try:
                async with asyncio.timeout(10):
                    await reader.read()
            except ConnectionResetError:
                pass
            writer.close()
            shop.gate.set()
            assert await other == b"wait"

    asyncio.run(scene())


def test_an_answerer_that_does_not_speak_this_is_no_answer(tmp_path: Path) -> None:
    async def scene() -> None:
        def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\xff" * 100)
            writer.close()

        server = await asyncio.start_unix_server(babble, str(tmp_path / "a"))
        asker = link_in(tmp_path)
        for turn in (asker.request("a", b"x"), anext(asker.stream("a", b"x"))):
            with pytest.raises(ReplyLost):
                await turn
        server.close()

    asyncio.run(scene())


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


def test_a_killed_answerer_may_have_heard_what_was_under_way_and_has_not_heard_what_comes_after(tmp_path: Path) -> None:
    """The line between the two failures, where it is drawn by the system and not by a farewell of the other side."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", SERVER, f"unix:{tmp_path}/a"]

    async def scene(server: subprocess.Popen[str]) -> None:
        assert server.stdout is not None
        asker, came = link_in(tmp_path), list[bytes]()

        async def ask() -> None:
            with pytest.raises(ReplyLost, match="a did not answer"):
                await asker.request("a", b"x")

        async def read() -> None:
            with pytest.raises(ReplyLost):
                async for item in asker.stream("a", b"x"):
                    came.append(item)

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for work in (ask(), read()):
                group.create_task(work)
            await until(lambda: came == [b"one"])
            assert server.stdout.readline() == "heard\n"
            server.kill()
        server.wait()  # a dying process closes one socket after another, and may still let one in
        with pytest.raises(NotSent, match="connection refused"):
            await asker.request("a", b"x")

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"
        asyncio.run(scene(server))


def test_a_socket_that_a_killed_process_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    async def scene() -> None:
        server = await asyncio.start_unix_server(lambda _, writer: writer.close(), str(tmp_path / "a"))
        server.close()
        assert (tmp_path / "a").is_socket()
        asker = link_in(tmp_path)
        with pytest.raises(NotSent):
            await asker.request("a", b"x")
        async with link_in(tmp_path).serve("a", Shop()):
            assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
            assert await asker.request("a", b"x") == b"x"
        assert not (tmp_path / "a").exists()

    asyncio.run(scene())


def test_where_one_cannot_listen_is_told_with_a_cure(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "a").write_text("a file of somebody's")
        for place in (tmp_path, tmp_path / "no", tmp_path / ("x" * 120)):
            with pytest.raises(ListenFailed, match="use another address"):
                async with link_in(place).serve("a", Shop()):
                    pytest.fail("it serves")
        assert (tmp_path / "a").read_text() == "a file of somebody's"

    asyncio.run(scene())


def test_nothing_is_left_running_after_serving(tmp_path: Path) -> None:
    async def scene() -> None:
        shop, asker = Shop(), link_in(tmp_path)
        async with link_in(tmp_path).serve("a", shop):
            await asker.request("a", b"x")
            await anext(asker.stream("a", b"1"))
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    asyncio.run(scene())


def test_serving_may_itself_be_cancelled_and_leaves_nothing(tmp_path: Path) -> None:
    async def serve(begun: asyncio.Event) -> None:
        async with link_in(tmp_path).serve("a", Shop()):
            begun.set()
            await asyncio.Event().wait()

    async def scene() -> None:
        begun, asker = asyncio.Event(), link_in(tmp_path)
        serving = asyncio.ensure_future(serve(begun))
        await begun.wait()
        under_way = asyncio.ensure_future(swallowed(asker.request("a", b"wait")))
        await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.sleep(0.05)
        serving.cancel()  # impatient: not even the second that requests under way are given
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert isinstance(await under_way, ReplyLost)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert not (tmp_path / "a").exists()

    async def swallowed(request: Coroutine[Any, Any, bytes]) -> bytes | Exception:
        try:
            return await request
        except ReplyLost as error:
            return error

    asyncio.run(scene())
