"""Contract of links: a request that was not sent is never confused with one whose reply was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from remit.world.interfaces import Clock, LinkError, ListenFailed, NotSent, ReplyLost
from tests.contracts.worlds import LINKS, LinkTwin

SOON_MS = 10_000
"""Longer than anything here takes on a busy machine."""


@pytest.fixture(params=LINKS, ids=lambda twin: twin.__name__)
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> LinkTwin:
    make: type[LinkTwin] = request.param
    return make(tmp_path)


class EchoService:
    """Answers with its name and the body; `heard` has all requests. A first word selects other behaviour."""

    def __init__(self, clock: Clock, name: str = "") -> None:
        self.clock, self.name = clock, name
        self.requests: list[bytes] = []
        self.closed: list[bytes] = []

    async def request(self, body: bytes, /) -> bytes:
        self.requests.append(body)
        mode, _, rest = body.partition(b" ")
        if mode == b"raise":
            raise ZeroDivisionError("planted")
        if mode == b"sleep":
            await self.clock.sleep_ms(int(rest))
        return self.name.encode() + body

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        """`count N`, `raise N` (after N), `endless N` (after N it waits for ever)."""
        self.requests.append(body)
        mode, _, rest = body.partition(b" ")
        try:
            for turn in range(int(rest)):
                yield b"%d" % turn
            if mode == b"raise":
                raise ZeroDivisionError("planted")
            if mode == b"endless":
                await self.clock.sleep_ms(3_600_000)
        finally:
            self.closed.append(body)


async def wait_until(clock: Clock, holds: Callable[[], bool]) -> None:
    async with clock.timeout_ms(SOON_MS):
        while not holds():
            await clock.sleep_ms(5)


def test_request_is_answered_by_named_service(twin: LinkTwin) -> None:
    async def scenario() -> None:
        first, second = EchoService(twin.clock(), "first:"), EchoService(twin.clock(), "second:")
        client = twin.link("asker")
        async with twin.link("a").serve("a", first), twin.link("b").serve("b", second):
            assert await client.request("a", b"one") == b"first:one"
            assert await client.request("b", b"two") == b"second:two"
            assert await client.request("a", b"") == b"first:"
        assert (first.requests, second.requests) == ([b"one", b""], [b"two"])

    twin.run(scenario())


def test_bodies_of_any_size_arrive_whole(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client = twin.link("asker")
        async with twin.link("a").serve("a", EchoService(twin.clock())):
            for size in (1, 65_535, 3 << 20):
                body = bytes(turn % 251 for turn in range(1_000)) * (size // 1_000 + 1)
                assert await client.request("a", body) == body

    twin.run(scenario())


def test_concurrent_requests_get_own_answers_without_blocking(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client, answered = twin.link("asker"), list[bytes]()

        async def ask(body: bytes) -> None:
            assert await client.request("a", body) == body
            answered.append(body)

        bodies = [b"sleep 400", *(b"quick %d" % turn for turn in range(100)), b"sleep 0"]
        async with twin.link("a").serve("a", EchoService(twin.clock())), asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(ask(body))
        assert sorted(answered) == sorted(bodies)
        assert answered[-1] == b"sleep 400", "the slow request delayed the others"

    twin.run(scenario())


def test_service_may_call_other_services(twin: LinkTwin) -> None:
    async def scenario() -> None:
        class Forwarder(EchoService):
            async def request(self, body: bytes, /) -> bytes:
                return b"passed on: " + await own.request("b", body)

        own = twin.link("a")
        async with own.serve("a", Forwarder(twin.clock())), twin.link("b").serve("b", EchoService(twin.clock())):
            assert await twin.link("asker").request("a", b"x") == b"passed on: x"

    twin.run(scenario())


# ----------------------------------------------------------------------------------------------------------- no answer


def test_request_without_server_is_not_sent(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client = twin.link("asker")
        for _ in range(2):
            with pytest.raises(NotSent) as caught:
                await client.request("a", b"x")
            assert caught.value.cause
            assert caught.value.cure
            with pytest.raises(NotSent):
                await anext(client.stream("a", b"count 1"))

    twin.run(scenario())


def test_ended_service_is_not_reached_and_its_successor_is(twin: LinkTwin) -> None:
    async def scenario() -> None:
        clock, client = twin.clock(), twin.link("asker")
        for turn in range(3):
            service = EchoService(clock, f"{turn}:")
            async with twin.link("a").serve("a", service), clock.timeout_ms(SOON_MS):
                while not service.requests:
                    try:
                        assert await client.request("a", b"x") == b"%d:x" % turn
                    except LinkError:  # it may hold the previous connection and notice only now that it is closed
                        await clock.sleep_ms(5)
            requests = len(service.requests)
            for _ in range(10):
                with pytest.raises(LinkError) as caught:
                    await client.request("a", b"late")
                await clock.sleep_ms(20)
            assert isinstance(caught.value, NotSent)
            assert len(service.requests) == requests

    twin.run(scenario())


def test_raising_service_fails_only_that_call(twin: LinkTwin) -> None:
    async def scenario() -> None:
        service, client = EchoService(twin.clock()), twin.link("asker")
        async with twin.link("a").serve("a", service), asyncio.TaskGroup() as group:
            other = group.create_task(client.request("a", b"sleep 100"))
            await wait_until(twin.clock(), lambda: b"sleep 100" in service.requests)
            with pytest.raises(ReplyLost) as caught:
                await client.request("a", b"raise")
            assert caught.value.cause
            assert caught.value.cure
            assert await client.request("a", b"after") == b"after"
            assert await other == b"sleep 100"

    twin.run(scenario())


def test_request_in_progress_at_end_of_service_loses_reply(twin: LinkTwin) -> None:
    async def scenario() -> None:
        service, client = EchoService(twin.clock()), twin.link("asker")
        async with asyncio.TaskGroup() as group:
            async with twin.link("a").serve("a", service):
                task = group.create_task(outcome(client.request("a", b"sleep 3600000")))
                await wait_until(twin.clock(), lambda: bool(service.requests))
            assert isinstance(await task, ReplyLost)

    async def outcome(request: Coroutine[Any, Any, bytes]) -> bytes | LinkError:
        try:
            return await request
        except LinkError as error:
            return error

    twin.run(scenario())


def test_short_request_in_progress_is_answered_at_end_of_service(twin: LinkTwin) -> None:
    async def scenario() -> None:
        service, client = EchoService(twin.clock()), twin.link("asker")
        async with asyncio.TaskGroup() as group:
            async with twin.link("a").serve("a", service):
                task = group.create_task(client.request("a", b"sleep 100"))
                await wait_until(twin.clock(), lambda: bool(service.requests))
            assert await task == b"sleep 100"

    twin.run(scenario())


def test_cancelled_request_does_not_affect_others(twin: LinkTwin) -> None:
    async def scenario() -> None:
        clock, service, client = twin.clock(), EchoService(twin.clock()), twin.link("asker")
        async with twin.link("a").serve("a", service):
            for turn in range(20):
                with pytest.raises(TimeoutError):
                    async with clock.timeout_ms(turn):
                        await client.request("a", b"sleep 60")
                assert await client.request("a", b"after %d" % turn) == b"after %d" % turn
            assert b"sleep 60" in service.requests

    twin.run(scenario())


def test_name_can_be_served_only_once(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client = twin.link("asker")
        async with twin.link("a").serve("a", EchoService(twin.clock(), "first:")):
            with pytest.raises(ListenFailed) as caught:
                async with twin.link("a").serve("a", EchoService(twin.clock(), "second:")):
                    pytest.fail("the name is served twice")
            assert caught.value.cure
            assert await client.request("a", b"x") == b"first:x"

    twin.run(scenario())


def test_error_while_serving_passes_through(twin: LinkTwin) -> None:
    async def scenario() -> None:
        with pytest.raises(KeyError, match="mine"):
            async with twin.link("a").serve("a", EchoService(twin.clock())):
                raise KeyError("mine")

    twin.run(scenario())


# -------------------------------------------------------------------------------------------------------------- streams


def test_stream_is_ordered_complete_and_ends(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client, service = twin.link("asker"), EchoService(twin.clock())
        async with twin.link("a").serve("a", service):
            for count in (0, 1, 3_000):
                received = [item async for item in client.stream("a", b"count %d" % count)]
                assert received == [b"%d" % turn for turn in range(count)]
            await wait_until(twin.clock(), lambda: len(service.closed) == 3)

    twin.run(scenario())


def test_streams_and_requests_share_link(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client, done = twin.link("asker"), list[int]()

        async def read(count: int) -> None:
            received = [item async for item in client.stream("a", b"count %d" % count)]
            assert received == [b"%d" % turn for turn in range(count)]
            done.append(count)

        async with twin.link("a").serve("a", EchoService(twin.clock())), asyncio.TaskGroup() as group:
            for count in (500, 300, 100):
                group.create_task(read(count))
            for turn in range(50):
                assert await client.request("a", b"%d" % turn) == b"%d" % turn
        assert sorted(done) == [100, 300, 500]

    twin.run(scenario())


def test_leaving_stream_ends_it_at_server(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client, service = twin.link("asker"), EchoService(twin.clock())
        async with twin.link("a").serve("a", service):
            async with aclosing(client.stream("a", b"endless 3")) as items:
                assert [await anext(items) for _ in range(3)] == [b"0", b"1", b"2"]
                assert service.closed == []
            await wait_until(twin.clock(), lambda: service.closed == [b"endless 3"])
            assert await client.request("a", b"after") == b"after"

    twin.run(scenario())


def test_cancelled_reader_ends_stream(twin: LinkTwin) -> None:
    async def scenario() -> None:
        clock, client, service = twin.clock(), twin.link("asker"), EchoService(twin.clock())
        async with twin.link("a").serve("a", service):
            with pytest.raises(TimeoutError):
                async with clock.timeout_ms(100), aclosing(client.stream("a", b"endless 1")) as items:
                    async for item in items:
                        assert item == b"0"
            await wait_until(clock, lambda: service.closed == [b"endless 1"])

    twin.run(scenario())


def test_raising_stream_yields_items_then_error(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client, received = twin.link("asker"), list[bytes]()
        async with twin.link("a").serve("a", EchoService(twin.clock())):
            with pytest.raises(ReplyLost):
                async for item in client.stream("a", b"raise 3"):
                    received.append(item)
            assert received == [b"0", b"1", b"2"]
            assert await client.request("a", b"after") == b"after"

    twin.run(scenario())


def test_stream_of_ended_service_fails_instead_of_ending(twin: LinkTwin) -> None:
    async def scenario() -> None:
        client, service, received = twin.link("asker"), EchoService(twin.clock()), list[bytes]()

        async def read() -> None:
            with pytest.raises(ReplyLost):
                async for item in client.stream("a", b"endless 3"):
                    received.append(item)

        async with asyncio.TaskGroup() as group:
            async with twin.link("a").serve("a", service):
                reading = group.create_task(read())
                await wait_until(twin.clock(), lambda: len(received) == 3)
            await reading
        assert received == [b"0", b"1", b"2"]
        assert service.closed == [b"endless 3"]

    twin.run(scenario())
