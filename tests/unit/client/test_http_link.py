"""HTTP link: distinguishes requests surely not received from those possibly received; streams lines unchanged."""

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
from tests.unit.client.fake_link import Wire as OtherLink
from tests.unit.client.raw_http import Cut, RawRequest, raw_server

TOKEN = "a-token"


class ManualBootClock(BootClock):
    """Advances only when a test sets `at_ms`."""

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
def test_error_before_processing_is_not_sent_with_server_cause(status: int) -> None:
    async def scene() -> None:
        async def handler(request: RawRequest) -> None:
            request.problem(status, "whatever", "cause from the server", cure="do this")

        async with raw_server(handler) as url:
            link = link_to(url)
            error = await failure(link)
            assert isinstance(error, NotSent)
            assert "cause from the server" in error.cause
            assert error.cure == "do this"
            with pytest.raises(NotSent, match="cause from the server"):
                await anext(link.stream("eu", b"{}"))
            await link.close()

    asyncio.run(scene())


def test_unauthorized_client_backs_off_and_logs_it() -> None:
    """A revoked component must not send many requests a second for ever."""

    async def scene() -> None:
        clock, sent_at_ms, logged, known = ManualBootClock(), list[int](), list[str](), False

        async def handler(request: RawRequest) -> None:
            sent_at_ms.append(clock.now_ms())
            if known:
                request.answer(200, {})
            else:
                request.problem(401, "unauthenticated", "the token was revoked", cure="join again")

        async with raw_server(handler) as url:
            link = HttpLink({"eu": url}, TOKEN, backoff=ServerBackoff(clock, SeededRandomness("1"), logged.append))
            for _ in range(3_000):
                error = await failure(link)
                assert "the token was revoked" in error.cause, "requests during the backoff fail with its cause"
                with pytest.raises(NotSent, match="revoked"):
                    await anext(link.stream("eu", b"{}"))
                clock.at_ms += 100
            pauses = [later - earlier for earlier, later in itertools.pairwise(sent_at_ms)]
            assert len(sent_at_ms) < 15, "of 6,000 in five minutes"
            assert pauses[0] <= 1_100
            assert all(30_000 <= pause <= 60_100 for pause in pauses[7:])
            assert len(logged) == len(sent_at_ms)
            assert logged[0].startswith(
                "eu returned 401: the token was revoked; join again; the server is contacted less and less often"
            )
            known = True
            clock.at_ms += 60_000
            await link.request("eu", b"{}")
            await link.request("eu", b"{}")
            known = False
            await failure(link)
            clock.at_ms += 1_000
            before = len(sent_at_ms)
            await failure(link)
            assert len(sent_at_ms) == before + 1, "a success resets the backoff"
            await link.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "internal_error"), (500, "fault"), (500, ""), (502, ""), (504, "timeout"), (503, "timeout"), (200 + 9, "")],
)
def test_error_of_possibly_processed_request_is_reply_lost(status: int, code: str) -> None:
    async def scene() -> None:
        async def handler(request: RawRequest) -> None:
            request.problem(status, code)

        async with raw_server(handler) as url:
            link = link_to(url)
            assert isinstance(await failure(link), ReplyLost)
            await link.close()

    asyncio.run(scene())


def test_retry_after_is_reported_to_caller() -> None:
    async def scene() -> None:
        async def handler(request: RawRequest) -> None:
            request.problem(429, "overloaded", "too much", retry_after=3)

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


def test_endpoint_maps_link_errors_to_not_leader_and_outcome_unknown() -> None:
    async def scene() -> None:
        async def handler(request: RawRequest) -> None:
            raise Cut

        async with raw_server(handler) as url:
            link = HttpLink({"eu": url, "us": "http://127.0.0.1:1"}, TOKEN)
            with pytest.raises(OutcomeUnknown):
                await EndpointStub(link, "eu").status()
            with pytest.raises(NotLeader):
                await EndpointStub(link, "us").status()
            await link.close()

    asyncio.run(scene())


def test_response_cut_anywhere_after_send_is_reply_lost() -> None:
    async def scene() -> None:
        head = b"HTTP/1.1 200 x\r\nContent-Length: 5\r\n\r\n"
        cuts = [b"", head[:16], head, head + b"hal"]
        turns = iter(cuts)

        async def handler(request: RawRequest) -> None:
            request.writer.write(next(turns))
            raise Cut

        async with raw_server(handler) as url:
            link = link_to(url)
            for _ in cuts:
                assert isinstance(await failure(link), ReplyLost)
            await link.close()

    asyncio.run(scene())


def test_idle_connection_closed_by_server_is_replaced() -> None:
    async def scene() -> None:
        received: list[bytes] = []

        async def handler(request: RawRequest) -> None:
            received.append(request.body)
            request.answer(200, request.body)
            await request.writer.drain()
            if len(received) % 2:
                raise Cut  # after a whole answer that did not say so

        async with raw_server(handler) as url:
            link = link_to(url)
            for turn in range(20):
                assert await link.request("eu", b"%d" % turn) == b"%d" % turn
                await asyncio.sleep(0.01)
            assert received == [b"%d" % turn for turn in range(20)]
            await link.close()

    asyncio.run(scene())


def test_idle_connection_closed_while_loop_is_blocked_is_detected() -> None:
    """The kernel knows of the close, but the event loop had no chance to read it."""
    received: list[bytes] = []

    def answer_and_close(server: socket.socket) -> None:
        for _ in range(10):
            with server.accept()[0] as one:
                data = b""
                while not data.endswith(b"!"):
                    data += one.recv(4096)
                received.append(data.rpartition(b"\r\n")[2])
                one.sendall(b"HTTP/1.1 200 x\r\nContent-Length: 2\r\n\r\nok")
                time.sleep(http_transport.IDLE_CHECK_S / 2)

    async def scene(port: int) -> None:
        link = link_to(f"http://127.0.0.1:{port}")
        for turn in range(10):
            assert await link.request("eu", b"%d!" % turn) == b"ok"
            time.sleep(2 * http_transport.IDLE_CHECK_S)  # noqa: ASYNC251 - blocks the loop
        await link.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        thread = threading.Thread(target=answer_and_close, args=(server,), daemon=True)
        thread.start()
        asyncio.run(scene(server.getsockname()[1]))
        thread.join()
    assert received == [b"%d!" % turn for turn in range(10)]


def test_consecutive_requests_reuse_one_connection() -> None:
    async def scene() -> None:
        peers = set()

        async def handler(request: RawRequest) -> None:
            peers.add(request.writer.get_extra_info("peername"))
            request.answer(200, request.body)

        async with raw_server(handler) as url:
            link = link_to(url)
            for _ in range(20):
                assert await link.request("eu", b"{}") == b"{}"
            assert len(peers) == 1
            await link.close()

    asyncio.run(scene())


def test_request_carries_token_and_content_type() -> None:
    async def scene() -> None:
        seen: list[RawRequest] = []

        async def handler(request: RawRequest) -> None:
            seen.append(request)
            request.answer(200, b"{}")

        async with raw_server(handler) as url:
            link = link_to(url + "/")
            await link.request("eu", b"{}")
            assert [(one.method, one.path) for one in seen] == [("POST", "/v1/ask")]
            assert seen[0].headers["authorization"] == f"Bearer {TOKEN}"
            assert seen[0].headers["content-type"] == "application/json"
            assert "accept-encoding" not in seen[0].headers
            await link.close()

    asyncio.run(scene())


def test_redirect_is_not_followed() -> None:
    async def scene() -> None:
        sent_at_ms = []

        async def handler(request: RawRequest) -> None:
            sent_at_ms.append(request.path)
            request.answer(307, b"", Location="/elsewhere")

        async with raw_server(handler) as url:
            link = link_to(url)
            assert isinstance(await failure(link), NotSent)
            assert sent_at_ms == ["/v1/ask"]
            await link.close()

    asyncio.run(scene())


# -------------------------------------------------------------------------------------------------------------- streams


def test_stream_reassembles_lines_from_any_chunks() -> None:
    async def scene() -> None:
        long = b"x" * (40 << 20)

        async def handler(request: RawRequest) -> None:
            request.begin()
            for piece in (b"on", b"e\ntwo\nthr", b"ee\n\n", b"\n", long[: 7 << 20]):
                request.chunk(piece)
                await request.writer.drain()
            request.chunk(long[7 << 20 :])
            request.chunk(b"\nlast\n")
            request.end()

        async with raw_server(handler) as url:
            link = link_to(url)
            came = [line async for line in link.stream("eu", b"{}")]
            assert came[:3] == [b"one", b"two", b"three"]
            assert came[3] == long
            assert came[4:] == [b"last"]
            await link.close()

    asyncio.run(scene())


def test_endless_line_is_aborted_at_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "LINE_BYTES_MAX", 1 << 20)

    async def scene() -> None:
        gone = asyncio.Event()

        async def handler(request: RawRequest) -> None:
            request.begin()
            try:
                while True:
                    request.chunk(b"x" * 65_536)
                    await request.writer.drain()
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
def test_incomplete_last_line_is_reply_lost(ends: bool) -> None:
    async def scene() -> None:
        async def handler(request: RawRequest) -> None:
            request.begin()
            request.chunk(b"whole\nhal")
            if ends:
                request.end()
            else:
                await request.writer.drain()
                raise Cut

        async with raw_server(handler) as url:
            link = link_to(url)
            async with aclosing(link.stream("eu", b"{}")) as lines:
                assert await anext(lines) == b"whole"
                with pytest.raises(ReplyLost):
                    await anext(lines)
            await link.close()

    asyncio.run(scene())


def test_slow_reader_applies_backpressure_to_server() -> None:
    async def scene() -> None:
        sent = 0

        async def handler(request: RawRequest) -> None:
            nonlocal sent
            request.begin()
            while True:
                request.chunk(b"x" * 65_535 + b"\n")
                await request.writer.drain()
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


def test_cancelled_request_closes_connection() -> None:
    async def scene() -> None:
        gone = asyncio.Event()

        async def handler(request: RawRequest) -> None:
            if await request.reader.read(1) == b"":
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


def test_unknown_name_goes_to_fallback_link() -> None:
    class Echo:
        async def request(self, body: bytes, /) -> bytes:
            return b"fallback:" + body

        async def stream(self, body: bytes, /):  # type: ignore[no-untyped-def]
            yield body

    async def scene() -> None:
        link = HttpLink({"eu": "http://127.0.0.1:1"}, TOKEN, fallback=OtherLink(Echo()))
        assert await link.request("keeper", b"x") == b"fallback:x"
        assert [item async for item in link.stream("keeper", b"y")] == [b"y"]
        async with link.serve("keeper", Echo()):
            pass
        with pytest.raises(ListenFailed):
            async with link.serve("eu", Echo()):
                pytest.fail("nothing is served over HTTP here")
        await link.close()

    asyncio.run(scene())


def test_name_without_address_is_not_sent() -> None:
    async def scene() -> None:
        with pytest.raises(NotSent, match="no address is configured for us"):
            await link_to("http://127.0.0.1:1").request("us", b"{}")

    asyncio.run(scene())


def test_closed_link_sends_nothing() -> None:
    async def scene() -> None:
        link = link_to("http://127.0.0.1:1")
        await link.close()
        assert isinstance(await failure(link), NotSent)

    asyncio.run(scene())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:7420", "ftp://x:1", "http://", "http://x:port", "http://x:1?a=b", "http://[::1"]
)
def test_invalid_address_is_refused_with_cure(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        link_to(url)


@pytest.mark.parametrize("token", ["", "two words", "line\nline", "ümlaut"])
def test_invalid_token_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(ValueError, match="the token must be") as caught:
        HttpLink({}, token)
    assert not token or token not in str(caught.value)
