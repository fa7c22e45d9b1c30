"""Does a link over HTTP know what nobody has heard from what somebody may have? And is nothing lost of what comes back?"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from contextlib import aclosing

import pytest

from remit.client import http_transport
from remit.client.endpoint import NotLeader, OutcomeUnknown, Overloaded
from remit.client.http_link import HttpLink, ServerBackoff
from remit.client.rpc import EndpointStub, RetryLater
from remit.world.clock import BootClock
from remit.world.interfaces import LinkError, ListenFailed, NotSent, ReplyLost
from remit.world.randomness import SeededRandomness
from tests.unit.client.raw_http import Cut, Said, raw_server
from tests.unit.client.test_rpc import Wire as OtherLink

TOKEN = "a-token"


class Hand(BootClock):
    """It goes on when it is told to."""

    at_ms = 1_000

    def now_ms(self) -> int:
        return self.at_ms


def link_to(url: str) -> HttpLink:
    return HttpLink({"eu": url}, TOKEN)


async def failure(link: HttpLink, body: bytes = b"{}") -> LinkError:
    with pytest.raises(LinkError) as caught:
        await link.request("eu", body)
    assert caught.value.cause
    assert caught.value.cure
    return caught.value


@pytest.mark.parametrize("status", [401, 403, 404, 405, 413, 415, 421, 429, 503])
def test_a_server_that_says_it_has_not_begun_is_unreached_in_its_own_words(status: int) -> None:
    async def scene() -> None:
        async def handler(said: Said) -> None:
            said.problem(status, "whatever", "these are its words", cure="do this")

        async with raw_server(handler) as url:
            link = link_to(url)
            error = await failure(link)
            assert isinstance(error, NotSent)
            assert "these are its words" in error.cause
            assert error.cure == "do this"
            with pytest.raises(NotSent, match="these are its words"):
                await anext(link.stream("eu", b"{}"))
            await link.close()

    asyncio.run(scene())


def test_a_server_that_does_not_know_the_token_is_left_alone_for_longer_and_longer__and_that_is_told() -> None:
    """A component that was turned out must not ask many times a second, for ever."""

    async def scene() -> None:
        clock, asked, told, known = Hand(), list[int](), list[str](), False

        async def handler(said: Said) -> None:
            asked.append(clock.now_ms())
            if known:
                said.answer(200, {})
            else:
                said.problem(401, "unauthenticated", "the token was revoked", cure="join again")

        async with raw_server(handler) as url:
            link = HttpLink({"eu": url}, TOKEN, backoff=ServerBackoff(clock, SeededRandomness("1"), told.append))
            for _ in range(3_000):
                error = await failure(link)
                assert "the token was revoked" in error.cause, "whoever asks meanwhile hears why"
                with pytest.raises(NotSent, match="revoked"):
                    await anext(link.stream("eu", b"{}"))
                clock.at_ms += 100
            pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]
            assert len(asked) < 15, "of 6,000 in five minutes"
            assert pauses[0] <= 1_100
            assert all(30_000 <= pause <= 60_100 for pause in pauses[7:])
            assert len(told) == len(asked)
            assert told[0].startswith(
                "eu returned 401: the token was revoked; join again; the server is contacted less and less often"
            )
            known = True
            clock.at_ms += 60_000
            await link.request("eu", b"{}")
            await link.request("eu", b"{}")
            known = False
            await failure(link)
            clock.at_ms += 1_000
            before = len(asked)
            await failure(link)
            assert len(asked) == before + 1, "who was known meanwhile begins anew"
            await link.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "internal_error"), (500, "fault"), (500, ""), (502, ""), (504, "timeout"), (503, "timeout"), (200 + 9, "")],
)
def test_a_server_that_may_have_begun_is_unheard(status: int, code: str) -> None:
    async def scene() -> None:
        async def handler(said: Said) -> None:
            said.problem(status, code)

        async with raw_server(handler) as url:
            link = link_to(url)
            assert isinstance(await failure(link), ReplyLost)
            await link.close()

    asyncio.run(scene())


def test_who_is_told_to_wait_knows_for_how_long() -> None:
    async def scene() -> None:
        async def handler(said: Said) -> None:
            said.problem(429, "overloaded", "too much", retry_after=3)

        async with raw_server(handler) as url:
            link = link_to(url)
            error = await failure(link)
            assert isinstance(error, RetryLater)
            assert error.retry_after_ms == 3_000
            with pytest.raises(Overloaded) as caught:
                await EndpointStub(link, "eu").status()
            assert caught.value.retry_after_ms == 3_000
            await link.close()

    asyncio.run(scene())


def test_an_endpoint_makes_of_them_turned_and_silence() -> None:
    async def scene() -> None:
        async def handler(said: Said) -> None:
            raise Cut

        async with raw_server(handler) as url:
            link = HttpLink({"eu": url, "us": "http://127.0.0.1:1"}, TOKEN)
            with pytest.raises(OutcomeUnknown):
                await EndpointStub(link, "eu").status()
            with pytest.raises(NotLeader):
                await EndpointStub(link, "us").status()
            await link.close()

    asyncio.run(scene())


def test_what_was_cut_off_after_it_was_sent_is_unheard_wherever_it_was_cut() -> None:
    async def scene() -> None:
        head = b"HTTP/1.1 200 x\r\nContent-Length: 5\r\n\r\n"
        cuts = [b"", head[:16], head, head + b"hal"]
        turns = iter(cuts)

        async def handler(said: Said) -> None:
            said.writer.write(next(turns))
            raise Cut

        async with raw_server(handler) as url:
            link = link_to(url)
            for _ in cuts:
                assert isinstance(await failure(link), ReplyLost)
            await link.close()

    asyncio.run(scene())


def test_a_connection_that_was_closed_while_idle_costs_nothing() -> None:
    async def scene() -> None:
        heard: list[bytes] = []

        async def handler(said: Said) -> None:
            heard.append(said.body)
            said.answer(200, said.body)
            await said.writer.drain()
            if len(heard) % 2:
                raise Cut  # after a whole answer that did not say so

        async with raw_server(handler) as url:
            link = link_to(url)
            for turn in range(20):
                assert await link.request("eu", b"%d" % turn) == b"%d" % turn
                await asyncio.sleep(0.01)
            assert heard == [b"%d" % turn for turn in range(20)]
            await link.close()

    asyncio.run(scene())


def test_a_connection_that_was_closed_while_the_loop_was_held_up_is_looked_at_first() -> None:
    """The system knows that it was closed; the event loop had no time to see it."""
    heard: list[bytes] = []

    def answer_and_close(server: socket.socket) -> None:
        for _ in range(10):
            with server.accept()[0] as one:
                data = b""
                while not data.endswith(b"!"):
                    data += one.recv(4096)
                heard.append(data.rpartition(b"\r\n")[2])
                one.sendall(b"HTTP/1.1 200 x\r\nContent-Length: 2\r\n\r\nok")
                time.sleep(http_transport.IDLE_CHECK_S / 2)

    async def scene(port: int) -> None:
        link = link_to(f"http://127.0.0.1:{port}")
        for turn in range(10):
            assert await link.request("eu", b"%d!" % turn) == b"ok"
            time.sleep(2 * http_transport.IDLE_CHECK_S)  # noqa: ASYNC251 - this holds it up
        await link.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        thread = threading.Thread(target=answer_and_close, args=(server,), daemon=True)
        thread.start()
        asyncio.run(scene(server.getsockname()[1]))
        thread.join()
    assert heard == [b"%d!" % turn for turn in range(10)]


def test_connections_are_kept_and_used_again() -> None:
    async def scene() -> None:
        peers = set()

        async def handler(said: Said) -> None:
            peers.add(said.writer.get_extra_info("peername"))
            said.answer(200, said.body)

        async with raw_server(handler) as url:
            link = link_to(url)
            for _ in range(20):
                assert await link.request("eu", b"{}") == b"{}"
            assert len(peers) == 1
            await link.close()

    asyncio.run(scene())


def test_every_request_carries_the_token_and_what_it_is() -> None:
    async def scene() -> None:
        seen: list[Said] = []

        async def handler(said: Said) -> None:
            seen.append(said)
            said.answer(200, b"{}")

        async with raw_server(handler) as url:
            link = link_to(url + "/")
            await link.request("eu", b"{}")
            assert [(one.method, one.path) for one in seen] == [("POST", "/v1/ask")]
            assert seen[0].headers["authorization"] == f"Bearer {TOKEN}"
            assert seen[0].headers["content-type"] == "application/json"
            assert "accept-encoding" not in seen[0].headers
            await link.close()

    asyncio.run(scene())


def test_a_redirect_is_not_followed() -> None:
    async def scene() -> None:
        asked = []

        async def handler(said: Said) -> None:
            asked.append(said.path)
            said.answer(307, b"", Location="/elsewhere")

        async with raw_server(handler) as url:
            link = link_to(url)
            assert isinstance(await failure(link), NotSent)
            assert asked == ["/v1/ask"]
            await link.close()

    asyncio.run(scene())


# -------------------------------------------------------------------------------------------------------------- streams


def test_lines_arrive_whole_however_long_and_however_they_are_cut_into_pieces() -> None:
    async def scene() -> None:
        long = b"x" * (40 << 20)

        async def handler(said: Said) -> None:
            said.begin()
            for piece in (b"on", b"e\ntwo\nthr", b"ee\n\n", b"\n", long[: 7 << 20]):
                said.piece(piece)
                await said.writer.drain()
            said.piece(long[7 << 20 :])
            said.piece(b"\nlast\n")
            said.end()

        async with raw_server(handler) as url:
            link = link_to(url)
            came = [line async for line in link.stream("eu", b"{}")]
            assert came[:3] == [b"one", b"two", b"three"]
            assert came[3] == long
            assert came[4:] == [b"last"]
            await link.close()

    asyncio.run(scene())


def test_a_line_without_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "LINE_BYTES_MAX", 1 << 20)

    async def scene() -> None:
        gone = asyncio.Event()

        async def handler(said: Said) -> None:
            said.begin()
            try:
                while True:
                    said.piece(b"x" * 65_536)
                    await said.writer.drain()
            finally:
                gone.set()

        async with raw_server(handler) as url:
            link = link_to(url)
            with pytest.raises(ReplyLost, match="1048576"):
                await anext(link.stream("eu", b"{}"))
            await asyncio.wait_for(gone.wait(), 10)
            await link.close()

    asyncio.run(scene())


@pytest.mark.parametrize("ends", [False, True], ids=["cut", "ended"])
def test_half_a_line_is_no_line(ends: bool) -> None:
    async def scene() -> None:
        async def handler(said: Said) -> None:
            said.begin()
            said.piece(b"whole\nhal")
            if ends:
                said.end()
            else:
                await said.writer.drain()
                raise Cut

        async with raw_server(handler) as url:
            link = link_to(url)
            async with aclosing(link.stream("eu", b"{}")) as lines:
                assert await anext(lines) == b"whole"
                with pytest.raises(ReplyLost):
                    await anext(lines)
            await link.close()

    asyncio.run(scene())


def test_a_reader_that_takes_nothing_holds_up_the_writer_and_not_the_memory() -> None:
    async def scene() -> None:
        sent = 0

        async def handler(said: Said) -> None:
            nonlocal sent
            said.begin()
            while True:
                said.piece(b"x" * 65_535 + b"\n")
                await said.writer.drain()
                sent += 65_536

        async with raw_server(handler) as url:
            link = link_to(url)
            async with aclosing(link.stream("eu", b"{}")) as lines:
                await anext(lines)
                await asyncio.sleep(0.3)
                before = sent
                await asyncio.sleep(0.3)
                assert sent == before < 32 << 20
            await link.close()

    asyncio.run(scene())


def test_whoever_is_cancelled_has_closed_the_connection() -> None:
    async def scene() -> None:
        gone = asyncio.Event()

        async def handler(said: Said) -> None:
            if await said.reader.read(1) == b"":
                gone.set()
            raise Cut

        async with raw_server(handler) as url:
            link = link_to(url)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await link.request("eu", b"{}")
            await asyncio.wait_for(gone.wait(), 10)
            await link.close()

    asyncio.run(scene())


# ---------------------------------------------------------------------------------------------------------------- names


def test_any_other_name_is_reached_by_the_link_beside() -> None:
    class Echo:
        async def request(self, body: bytes, /) -> bytes:
            return b"beside:" + body

        async def stream(self, body: bytes, /):  # type: ignore[no-untyped-def]
            yield body

    async def scene() -> None:
        link = HttpLink({"eu": "http://127.0.0.1:1"}, TOKEN, fallback=OtherLink(Echo()))
        assert await link.request("keeper", b"x") == b"beside:x"
        assert [item async for item in link.stream("keeper", b"y")] == [b"y"]
        async with link.serve("keeper", Echo()):
            pass
        with pytest.raises(ListenFailed):
            async with link.serve("eu", Echo()):
                pytest.fail("nothing is served over HTTP here")
        await link.close()

    asyncio.run(scene())


def test_a_name_that_nobody_knows_is_unreached() -> None:
    async def scene() -> None:
        with pytest.raises(NotSent, match="no address is configured for us"):
            await link_to("http://127.0.0.1:1").request("us", b"{}")

    asyncio.run(scene())


def test_a_closed_link_reaches_nobody() -> None:
    async def scene() -> None:
        link = link_to("http://127.0.0.1:1")
        await link.close()
        assert isinstance(await failure(link), NotSent)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:7420", "ftp://x:1", "http://", "http://x:port", "http://x:1?a=b", "http://[::1"]
)
def test_what_is_no_address_is_told_with_its_cure(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        link_to(url)


@pytest.mark.parametrize("token", ["", "two words", "line\nline", "ümlaut"])
def test_what_is_no_token_is_told_and_not_repeated(token: str) -> None:
    with pytest.raises(ValueError, match="the token must be") as caught:
        HttpLink({}, token)
    assert not token or token not in str(caught.value)
