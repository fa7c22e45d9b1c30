"""Does the offload of a simulated process keep its promises, in the loop's time, and stop with its process?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from remit.simulate.world.clock import SimOffload
from tests.contracts import test_world as promised
from tests.unit.world.virtual_world import run_virtually

PROMISES: list[Callable[[Any], None]] = [
    promised.test_work_runs_in_the_order_of_the_calls_whoever_awaits_first,
    promised.test_results_and_exceptions_pass_through,
    promised.test_work_is_done_though_its_waiter_is_cancelled,
    promised.test_closing_waits_for_the_work_and_takes_no_more,
]


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1000)


class Process:
    def __init__(self, delay_ms: int = 5) -> None:
        self.alive = True
        self.offload = SimOffload(lambda: delay_ms, lambda: self.alive)


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(scene())


@pytest.mark.parametrize("delay_ms", [0, 3])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda test: test.__name__.removeprefix("test_"))
def test_the_simulated_offload_keeps_the_promise(promise: Callable[[Any], None], delay_ms: int) -> None:
    def world() -> SimpleNamespace:
        return SimpleNamespace(offload=SimOffload(lambda: delay_ms, lambda: True))

    promise(SimpleNamespace(world=world, run=run_virtually))


def test_each_piece_takes_its_delay_after_the_one_before_it() -> None:
    async def scene() -> None:
        delays, began_ms, done = iter([10, 0, 7]), now_ms(), list[int]()
        offload = SimOffload(lambda: next(delays), lambda: True)
        waits = [offload(lambda: done.append(now_ms() - began_ms)) for _ in range(3)]
        await asyncio.gather(*waits)
        assert done == [10, 10, 17]

    play(scene)


def test_work_of_a_cancelled_waiter_still_runs_in_its_turn() -> None:
    async def scene() -> None:
        offload, done = Process().offload, list[str]()
        first = asyncio.ensure_future(offload(lambda: done.append("first")))
        second = asyncio.ensure_future(offload(lambda: done.append("second")))
        first.cancel()
        second.cancel()
        await offload(lambda: done.append("third"))
        assert done == ["first", "second", "third"]

    play(scene)


def test_nothing_runs_after_the_process_was_killed() -> None:
    async def scene() -> None:
        process, done = Process(), list[str]()
        first, second = (process.offload(lambda name=name: done.append(name)) for name in ("first", "second"))  # type: ignore[misc]
        await first
        process.alive = False
        with pytest.raises(asyncio.CancelledError):
            await second
        with pytest.raises(asyncio.CancelledError):
            await process.offload(lambda: done.append("third"))
        await process.offload.close()
        assert done == ["first"]

    play(scene)


def test_closing_ends_though_the_process_is_killed_meanwhile() -> None:
    async def scene() -> None:
        process, done = Process(), list[str]()
        wait = asyncio.ensure_future(process.offload(lambda: done.append("never")))
        closing = asyncio.create_task(process.offload.close())
        await asyncio.sleep(0)
        process.alive = False
        await closing
        assert wait.cancelled()
        assert not done

    play(scene)


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_kills_its_own_process_is_not_answered(fails: bool) -> None:
    async def scene() -> None:
        process, done = Process(), list[str]()

        def die() -> None:
            process.alive = False
            if fails:
                raise OSError("the power went")

        wait, after = process.offload(die), process.offload(lambda: done.append("after"))
        for one in (wait, after):
            with pytest.raises(asyncio.CancelledError):
                await one
        assert not done

    play(scene)


def test_a_failure_that_nobody_waits_for_is_told_to_the_loop() -> None:
    told: list[Mapping[str, Any]] = []

    def fail() -> None:
        raise OSError("disk gone")

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        process = Process()
        asyncio.ensure_future(process.offload(fail)).cancel()
        await process.offload.close()

    play(scene)
    assert [str(context["exception"]) for context in told] == ["disk gone"]


def test_stop_iteration_arrives_as_an_error_and_ends_nothing() -> None:
    async def scene() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await Process().offload(lambda: next(iter(())))

    play(scene)


def test_two_may_close_at_once_and_again() -> None:
    async def scene() -> None:
        process, done = Process(), list[str]()
        wait = process.offload(lambda: done.append("work"))
        await asyncio.gather(process.offload.close(), process.offload.close())
        assert done == ["work"]
        await wait
        await process.offload.close()

    play(scene)


def test_no_delay_is_negative() -> None:
    async def scene() -> None:
        with pytest.raises(ValueError, match="returned -5"):
            await Process(-5).offload(lambda: None)

    play(scene)
