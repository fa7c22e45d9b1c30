"""Simulated offload: keeps the contract of the interface in the loop's time, and stops with its process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from remit.simulate.world.clock import SimOffload
from tests.contracts.offload_contract import OFFLOAD_CONTRACT
from tests.unit.world.virtual_world import run_virtually


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1000)


class Process:
    def __init__(self, delay_ms: int = 5) -> None:
        self.alive = True
        self.offload = SimOffload(lambda: delay_ms, lambda: self.alive)


def run_in(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(scenario())


@pytest.mark.parametrize("delay_ms", [0, 3])
@pytest.mark.parametrize("promise", OFFLOAD_CONTRACT, ids=lambda promise: promise.__name__)
def test_simulated_offload_keeps_contract(promise: Callable[[Any], None], delay_ms: int) -> None:
    def world() -> SimpleNamespace:
        return SimpleNamespace(offload=SimOffload(lambda: delay_ms, lambda: True))

    promise(SimpleNamespace(world=world, run=run_virtually))


def test_work_items_take_their_delays_in_sequence() -> None:
    async def scenario() -> None:
        delays, began_ms, done = iter([10, 0, 7]), now_ms(), list[int]()
        offload = SimOffload(lambda: next(delays), lambda: True)
        waits = [offload(lambda: done.append(now_ms() - began_ms)) for _ in range(3)]
        await asyncio.gather(*waits)
        assert done == [10, 10, 17]

    run_in(scenario)


def test_work_of_cancelled_waiter_still_runs_in_order() -> None:
    async def scenario() -> None:
        offload, done = Process().offload, list[str]()
        first = asyncio.ensure_future(offload(lambda: done.append("first")))
        second = asyncio.ensure_future(offload(lambda: done.append("second")))
        first.cancel()
        second.cancel()
        await offload(lambda: done.append("third"))
        assert done == ["first", "second", "third"]

    run_in(scenario)


def test_nothing_runs_after_process_was_killed() -> None:
    async def scenario() -> None:
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

    run_in(scenario)


def test_close_ends_when_process_is_killed_meanwhile() -> None:
    async def scenario() -> None:
        process, done = Process(), list[str]()
        wait = asyncio.ensure_future(process.offload(lambda: done.append("never")))
        closing = asyncio.create_task(process.offload.close())
        await asyncio.sleep(0)
        process.alive = False
        await closing
        assert wait.cancelled()
        assert not done

    run_in(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_kills_its_process_is_not_answered(fails: bool) -> None:
    async def scenario() -> None:
        process, done = Process(), list[str]()

        def kill_process() -> None:
            process.alive = False
            if fails:
                raise OSError("the power went")

        wait, after = process.offload(kill_process), process.offload(lambda: done.append("after"))
        for one in (wait, after):
            with pytest.raises(asyncio.CancelledError):
                await one
        assert not done

    run_in(scenario)


def test_failure_without_waiter_is_reported_to_loop() -> None:
    contexts: list[Mapping[str, Any]] = []

    def fail() -> None:
        raise OSError("disk gone")

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        process = Process()
        asyncio.ensure_future(process.offload(fail)).cancel()
        await process.offload.close()

    run_in(scenario)
    assert [str(context["exception"]) for context in contexts] == ["disk gone"]


def test_stop_iteration_is_raised_as_runtime_error() -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await Process().offload(lambda: next(iter(())))

    run_in(scenario)


def test_close_may_be_called_concurrently_and_again() -> None:
    async def scenario() -> None:
        process, done = Process(), list[str]()
        wait = process.offload(lambda: done.append("work"))
        await asyncio.gather(process.offload.close(), process.offload.close())
        assert done == ["work"]
        await wait
        await process.offload.close()

    run_in(scenario)


def test_negative_delay_raises() -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="returned -5"):
            await Process(-5).offload(lambda: None)

    run_in(scenario)
