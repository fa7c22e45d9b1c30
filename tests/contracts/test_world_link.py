"""Does a link keep its promises? Above all: is what nobody has heard never confused with what somebody may have?"""

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


class Shop:
    """Answers with its name and what was said; `heard` is all that came. A first word may tell it to do something else."""

    def __init__(self, clock: Clock, name: str = "") -> None:
        self.clock, self.name = clock, name
        self.heard: list[bytes] = []
        self.left: list[bytes] = []

    async def request(self, body: bytes, /) -> bytes:
        self.heard.append(body)
        word, _, rest = body.partition(b" ")
        if word == b"raise":
            raise ZeroDivisionError("planted")
        if word == b"sleep":
            await self.clock.sleep_ms(int(rest))
        return self.name.encode() + body

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        """`count N`, `raise N` (after N), `endless N` (after N it waits for ever)."""
        self.heard.append(body)
        word, _, rest = body.partition(b" ")
        try:
            for turn in range(int(rest)):
                yield b"%d" % turn
            if word == b"raise":
                raise ZeroDivisionError("planted")
            if word == b"endless":
                await self.clock.sleep_ms(3_600_000)
        finally:
            self.left.append(body)


async def soon(clock: Clock, holds: Callable[[], bool]) -> None:
    async with clock.timeout_ms(SOON_MS):
        while not holds():
            await clock.sleep_ms(5)


def test_a_request_is_answered_by_whom_it_was_sent_to(twin: LinkTwin) -> None:
    async def scene() -> None:
        first, second = Shop(twin.clock(), "first:"), Shop(twin.clock(), "second:")
        asker = twin.link("asker")
        async with twin.link("a").serve("a", first), twin.link("b").serve("b", second):
            assert await asker.request("a", b"one") == b"first:one"
            assert await asker.request("b", b"two") == b"second:two"
            assert await asker.request("a", b"") == b"first:"
        assert (first.heard, second.heard) == ([b"one", b""], [b"two"])

    twin.run(scene())


def test_bodies_arrive_whole_however_large(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker = twin.link("asker")
        async with twin.link("a").serve("a", Shop(twin.clock())):
            for size in (1, 65_535, 3 << 20):
                body = bytes(turn % 251 for turn in range(1_000)) * (size // 1_000 + 1)
                assert await asker.request("a", body) == body

    twin.run(scene())


def test_requests_at_once_get_each_its_own_answer_in_its_own_time(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker, answered = twin.link("asker"), list[bytes]()

        async def ask(body: bytes) -> None:
            assert await asker.request("a", body) == body
            answered.append(body)

        bodies = [b"sleep 400", *(b"quick %d" % turn for turn in range(100)), b"sleep 0"]
        async with twin.link("a").serve("a", Shop(twin.clock())), asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(ask(body))
        assert sorted(answered) == sorted(bodies)
        assert answered[-1] == b"sleep 400", "the slow one held up the others"

    twin.run(scene())


def test_a_service_may_ask_others_and_itself_be_asked(twin: LinkTwin) -> None:
    async def scene() -> None:
        class Between(Shop):
            async def request(self, body: bytes, /) -> bytes:
                return b"passed on: " + await own.request("b", body)

        own = twin.link("a")
        async with own.serve("a", Between(twin.clock())), twin.link("b").serve("b", Shop(twin.clock())):
            assert await twin.link("asker").request("a", b"x") == b"passed on: x"

    twin.run(scene())


# ----------------------------------------------------------------------------------------------------------- no answer


def test_where_nobody_serves_nobody_is_reached(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker = twin.link("asker")
        for _ in range(2):
            with pytest.raises(NotSent) as caught:
                await asker.request("a", b"x")
            assert caught.value.cause
            assert caught.value.cure
            with pytest.raises(NotSent):
                await anext(asker.stream("a", b"count 1"))

    twin.run(scene())


def test_a_service_that_ended_is_reached_no_more_and_one_in_its_place_is(twin: LinkTwin) -> None:
    async def scene() -> None:
        clock, asker = twin.clock(), twin.link("asker")
        for turn in range(3):
            shop = Shop(clock, f"{turn}:")
            async with twin.link("a").serve("a", shop), clock.timeout_ms(SOON_MS):
                while not shop.heard:
                    try:
                        assert await asker.request("a", b"x") == b"%d:x" % turn
                    except LinkError:  # it may hold on to the one before, and notice only now that it is gone
                        await clock.sleep_ms(5)
            heard = len(shop.heard)
            for _ in range(10):
                with pytest.raises(LinkError) as caught:
                    await asker.request("a", b"late")
                await clock.sleep_ms(20)
            assert isinstance(caught.value, NotSent)
            assert len(shop.heard) == heard

    twin.run(scene())


def test_a_service_that_raises_breaks_off_that_call_and_no_other(twin: LinkTwin) -> None:
    async def scene() -> None:
        shop, asker = Shop(twin.clock()), twin.link("asker")
        async with twin.link("a").serve("a", shop), asyncio.TaskGroup() as group:
            other = group.create_task(asker.request("a", b"sleep 100"))
            await soon(twin.clock(), lambda: b"sleep 100" in shop.heard)
            with pytest.raises(ReplyLost) as caught:
                await asker.request("a", b"raise")
            assert caught.value.cause
            assert caught.value.cure
            assert await asker.request("a", b"after") == b"after"
            assert await other == b"sleep 100"

    twin.run(scene())


def test_what_was_begun_when_the_service_ended_is_unheard_and_never_unreached(twin: LinkTwin) -> None:
    async def scene() -> None:
        shop, asker = Shop(twin.clock()), twin.link("asker")
        async with asyncio.TaskGroup() as group:
            async with twin.link("a").serve("a", shop):
                task = group.create_task(asked(asker.request("a", b"sleep 3600000")))
                await soon(twin.clock(), lambda: bool(shop.heard))
            assert isinstance(await task, ReplyLost)

    async def asked(request: Coroutine[Any, Any, bytes]) -> bytes | LinkError:
        try:
            return await request
        except LinkError as error:
            return error

    twin.run(scene())


def test_a_short_request_under_way_is_still_answered_when_the_service_ends(twin: LinkTwin) -> None:
    async def scene() -> None:
        shop, asker = Shop(twin.clock()), twin.link("asker")
        async with asyncio.TaskGroup() as group:
            async with twin.link("a").serve("a", shop):
                task = group.create_task(asker.request("a", b"sleep 100"))
                await soon(twin.clock(), lambda: bool(shop.heard))
            assert await task == b"sleep 100"

    twin.run(scene())


def test_a_cancelled_request_disturbs_no_other(twin: LinkTwin) -> None:
    async def scene() -> None:
        clock, shop, asker = twin.clock(), Shop(twin.clock()), twin.link("asker")
        async with twin.link("a").serve("a", shop):
            for turn in range(20):
                with pytest.raises(TimeoutError):
                    async with clock.timeout_ms(turn):
                        await asker.request("a", b"sleep 60")
                assert await asker.request("a", b"after %d" % turn) == b"after %d" % turn
            assert b"sleep 60" in shop.heard

    twin.run(scene())


def test_one_name_is_served_once_at_a_time(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker = twin.link("asker")
        async with twin.link("a").serve("a", Shop(twin.clock(), "first:")):
            with pytest.raises(ListenFailed) as caught:
                async with twin.link("a").serve("a", Shop(twin.clock(), "second:")):
                    pytest.fail("two serve one name")
            assert caught.value.cure
            assert await asker.request("a", b"x") == b"first:x"

    twin.run(scene())


def test_what_fails_while_serving_passes_through_as_it_is(twin: LinkTwin) -> None:
    async def scene() -> None:
        with pytest.raises(KeyError, match="mine"):
            async with twin.link("a").serve("a", Shop(twin.clock())):
                raise KeyError("mine")

    twin.run(scene())


# -------------------------------------------------------------------------------------------------------------- streams


def test_a_stream_comes_in_order_without_a_gap_and_ends(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker, shop = twin.link("asker"), Shop(twin.clock())
        async with twin.link("a").serve("a", shop):
            for count in (0, 1, 3_000):
                came = [item async for item in asker.stream("a", b"count %d" % count)]
                assert came == [b"%d" % turn for turn in range(count)]
            await soon(twin.clock(), lambda: len(shop.left) == 3)

    twin.run(scene())


def test_streams_and_requests_share_a_link(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker, done = twin.link("asker"), list[int]()

        async def read(count: int) -> None:
            came = [item async for item in asker.stream("a", b"count %d" % count)]
            assert came == [b"%d" % turn for turn in range(count)]
            done.append(count)

        async with twin.link("a").serve("a", Shop(twin.clock())), asyncio.TaskGroup() as group:
            for count in (500, 300, 100):
                group.create_task(read(count))
            for turn in range(50):
                assert await asker.request("a", b"%d" % turn) == b"%d" % turn
        assert sorted(done) == [100, 300, 500]

    twin.run(scene())


def test_whoever_leaves_a_stream_ends_it_at_the_far_side_too(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker, shop = twin.link("asker"), Shop(twin.clock())
        async with twin.link("a").serve("a", shop):
            async with aclosing(asker.stream("a", b"endless 3")) as items:
                assert [await anext(items) for _ in range(3)] == [b"0", b"1", b"2"]
                assert shop.left == []
            await soon(twin.clock(), lambda: shop.left == [b"endless 3"])
            assert await asker.request("a", b"after") == b"after"

    twin.run(scene())


def test_a_reader_that_is_cancelled_has_left(twin: LinkTwin) -> None:
    async def scene() -> None:
        clock, asker, shop = twin.clock(), twin.link("asker"), Shop(twin.clock())
        async with twin.link("a").serve("a", shop):
            with pytest.raises(TimeoutError):
                async with clock.timeout_ms(100), aclosing(asker.stream("a", b"endless 1")) as items:
                    async for item in items:
                        assert item == b"0"
            await soon(clock, lambda: shop.left == [b"endless 1"])

    twin.run(scene())


def test_a_stream_that_raises_gives_what_came_before_and_no_end(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker, came = twin.link("asker"), list[bytes]()
        async with twin.link("a").serve("a", Shop(twin.clock())):
            with pytest.raises(ReplyLost):
                async for item in asker.stream("a", b"raise 3"):
                    came.append(item)
            assert came == [b"0", b"1", b"2"]
            assert await asker.request("a", b"after") == b"after"

    twin.run(scene())


def test_a_stream_whose_service_ends_is_broken_off_and_does_not_seem_whole(twin: LinkTwin) -> None:
    async def scene() -> None:
        asker, shop, came = twin.link("asker"), Shop(twin.clock()), list[bytes]()

        async def read() -> None:
            with pytest.raises(ReplyLost):
                async for item in asker.stream("a", b"endless 3"):
                    came.append(item)

        async with asyncio.TaskGroup() as group:
            async with twin.link("a").serve("a", shop):
                reading = group.create_task(read())
                await soon(twin.clock(), lambda: len(came) == 3)
            await reading
        assert came == [b"0", b"1", b"2"]
        assert shop.left == [b"endless 3"]

    twin.run(scene())
