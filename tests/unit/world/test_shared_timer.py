"""Is everybody told whose time is over, once, soon, and nobody else?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from remit.world.clock import TICK_S, BootClock, SharedTimeout, SharedTimer
from tests.unit.world.virtual_world import VirtualLoop


class One:
    due_s = 0.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.told: list[float] = []

    def expired(self) -> None:
        self.told.append(self._loop.time())


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    try:
        yield made
    finally:
        made.close()


def test_each_is_told_when_its_time_is_over_and_those_let_go_never(loop: VirtualLoop) -> None:
    patience, start_s = SharedTimer(loop), loop.time()
    waits = {30.0: One(loop), 6.0: One(loop), 6.1: One(loop), 75.0: One(loop)}
    gone = One(loop)

    async def scene() -> None:
        for for_s, one in waits.items():
            patience.schedule(one, for_s)
        patience.schedule(gone, 10.0)
        patience.cancel(gone)
        patience.cancel(gone)
        await asyncio.sleep(100)

    loop.run_until_complete(scene())
    for for_s, one in waits.items():
        (told_s,) = one.told
        assert start_s + for_s <= told_s <= start_s + for_s + TICK_S
    assert gone.told == []


def test_whoever_is_kept_again_waits_anew(loop: VirtualLoop) -> None:
    patience, one, start_s = SharedTimer(loop), One(loop), loop.time()

    async def scene() -> None:
        for _ in range(5):
            patience.schedule(one, 10.0)
            await asyncio.sleep(9)
        await asyncio.sleep(10)

    loop.run_until_complete(scene())
    (told_s,) = one.told
    assert told_s == pytest.approx(start_s + 36 + 10, abs=TICK_S)


def test_one_that_another_lets_go_at_that_moment_is_not_told(loop: VirtualLoop) -> None:
    patience, other = SharedTimer(loop), One(loop)

    class Jealous(One):
        def expired(self) -> None:
            patience.cancel(other)
            patience.schedule(self, 10.0)
            super().expired()

    jealous = Jealous(loop)

    async def scene() -> None:
        patience.schedule(jealous, 10.0)
        patience.schedule(other, 10.0)
        await asyncio.sleep(25)

    loop.run_until_complete(scene())
    assert (len(jealous.told), other.told) == (2, [])


def test_nothing_ticks_while_nobody_waits(loop: VirtualLoop) -> None:
    patience, looks = SharedTimer(loop), list[float]()
    look_at = patience._check_at

    def counted(at_s: float) -> None:
        looks.append(at_s)
        look_at(at_s)

    patience._check_at = counted  # type: ignore[method-assign]

    async def scene() -> None:
        for _ in range(1_000):
            async with SharedTimeout(patience, 30.0):
                await asyncio.sleep(0.01)
        await asyncio.sleep(1_000)

    loop.run_until_complete(scene())
    assert len(looks) == 1  # for the first; when it comes there is nobody


def test_a_body_that_takes_too_long_is_cancelled_and_raises(loop: VirtualLoop) -> None:
    async def scene() -> None:
        with pytest.raises(TimeoutError):
            async with BootClock().timeout_ms(30_000):
                await asyncio.sleep(60)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    loop.run_until_complete(scene())


def test_a_cancellation_from_outside_is_no_timeout(loop: VirtualLoop) -> None:
    async def body() -> None:
        async with BootClock().timeout_ms(30_000):
            await asyncio.sleep(60)

    async def scene() -> None:
        for late in (False, True):
            task = asyncio.create_task(body())
            await asyncio.sleep(30 if late else 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    loop.run_until_complete(scene())


def test_what_fails_by_itself_fails_as_it_did(loop: VirtualLoop) -> None:
    async def scene() -> None:
        with pytest.raises(KeyError):
            async with BootClock().timeout_ms(30_000):
                raise KeyError

    loop.run_until_complete(scene())


def test_one_clock_serves_one_loop_after_another() -> None:
    clock = BootClock()

    async def scene() -> None:
        with pytest.raises(TimeoutError):
            async with clock.timeout_ms(5_000):
                await asyncio.sleep(6)

    for _ in range(2):
        loop = VirtualLoop()
        try:
            loop.run_until_complete(scene())
        finally:
            loop.close()
