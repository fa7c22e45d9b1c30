"""Shared timer: every entry expires once, soon after its time, and cancelled ones never."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from remit.world.clock import TICK_S, BootClock, SharedTimeout, SharedTimer
from tests.unit.world.virtual_world import VirtualLoop


class RecordingEntry:
    due_s = 0.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.expirations: list[float] = []

    def expired(self) -> None:
        self.expirations.append(self._loop.time())


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    try:
        yield made
    finally:
        made.close()


def test_entries_expire_at_their_time_and_cancelled_ones_never(loop: VirtualLoop) -> None:
    timer, start_s = SharedTimer(loop), loop.time()
    waits = {30.0: RecordingEntry(loop), 6.0: RecordingEntry(loop), 6.1: RecordingEntry(loop), 75.0: RecordingEntry(loop)}
    cancelled = RecordingEntry(loop)

    async def scenario() -> None:
        for for_s, one in waits.items():
            timer.schedule(one, for_s)
        timer.schedule(cancelled, 10.0)
        timer.cancel(cancelled)
        timer.cancel(cancelled)
        await asyncio.sleep(100)

    loop.run_until_complete(scenario())
    for for_s, one in waits.items():
        (expired_s,) = one.expirations
        assert start_s + for_s <= expired_s <= start_s + for_s + TICK_S
    assert cancelled.expirations == []


def test_rescheduled_entry_waits_anew(loop: VirtualLoop) -> None:
    timer, one, start_s = SharedTimer(loop), RecordingEntry(loop), loop.time()

    async def scenario() -> None:
        for _ in range(5):
            timer.schedule(one, 10.0)
            await asyncio.sleep(9)
        await asyncio.sleep(10)

    loop.run_until_complete(scenario())
    (expired_s,) = one.expirations
    assert expired_s == pytest.approx(start_s + 36 + 10, abs=TICK_S)


def test_entry_cancelled_by_another_at_expiry_does_not_expire(loop: VirtualLoop) -> None:
    timer, other = SharedTimer(loop), RecordingEntry(loop)

    class CancellingEntry(RecordingEntry):
        def expired(self) -> None:
            timer.cancel(other)
            timer.schedule(self, 10.0)
            super().expired()

    canceller = CancellingEntry(loop)

    async def scenario() -> None:
        timer.schedule(canceller, 10.0)
        timer.schedule(other, 10.0)
        await asyncio.sleep(25)

    loop.run_until_complete(scenario())
    assert (len(canceller.expirations), other.expirations) == (2, [])


def test_timer_is_idle_while_nothing_waits(loop: VirtualLoop) -> None:
    timer, checks = SharedTimer(loop), list[float]()
    original = timer._check_at

    def counted(at_s: float) -> None:
        checks.append(at_s)
        original(at_s)

    timer._check_at = counted  # type: ignore[method-assign]

    async def scenario() -> None:
        for _ in range(1_000):
            async with SharedTimeout(timer, 30.0):
                await asyncio.sleep(0.01)
        await asyncio.sleep(1_000)

    loop.run_until_complete(scenario())
    assert len(checks) == 1  # for the first entry; by then nothing waits


def test_body_over_timeout_is_cancelled_and_raises(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with BootClock().timeout_ms(30_000):
                await asyncio.sleep(60)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    loop.run_until_complete(scenario())


def test_outside_cancellation_is_no_timeout(loop: VirtualLoop) -> None:
    async def body() -> None:
        async with BootClock().timeout_ms(30_000):
            await asyncio.sleep(60)

    async def scenario() -> None:
        for late in (False, True):
            task = asyncio.create_task(body())
            await asyncio.sleep(30 if late else 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    loop.run_until_complete(scenario())


def test_other_error_in_body_passes_through(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        with pytest.raises(KeyError):
            async with BootClock().timeout_ms(30_000):
                raise KeyError

    loop.run_until_complete(scenario())


def test_one_clock_serves_successive_loops() -> None:
    clock = BootClock()

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with clock.timeout_ms(5_000):
                await asyncio.sleep(6)

    for _ in range(2):
        loop = VirtualLoop()
        try:
            loop.run_until_complete(scenario())
        finally:
            loop.close()
