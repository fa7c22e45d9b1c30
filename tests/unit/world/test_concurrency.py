"""Does the one thread keep its promises where only a real thread could break them?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from remit.world.concurrency import ThreadOffload
from remit.world.interfaces import OffloadClosed


def test_the_loop_goes_on_while_work_blocks() -> None:
    async def scene() -> None:
        offload, gate = ThreadOffload(), threading.Event()
        wait = offload(lambda: gate.wait(30))
        await asyncio.sleep(0.01)
        gate.set()
        assert await wait
        await offload.close()

    asyncio.run(scene())


def test_queued_work_of_a_cancelled_waiter_still_runs_in_its_turn() -> None:
    """asyncio.wrap_future would have taken it out of the queue."""

    told: list[Mapping[str, Any]] = []

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        offload, gate, done = ThreadOffload(), threading.Event(), list[str]()
        blocked = offload(lambda: gate.wait(30))
        queued = asyncio.ensure_future(offload(lambda: done.append("commit")))
        queued.cancel()
        gate.set()
        await blocked
        await offload(lambda: done.append("read"))
        assert done == ["commit", "read"]
        await offload.close()

    asyncio.run(scene())
    assert not told


def test_all_work_is_on_one_thread_that_is_not_ours() -> None:
    async def scene() -> None:
        offload, gate, names = ThreadOffload("store"), threading.Event(), list[str]()

        def work() -> None:
            gate.wait(30)
            names.append(threading.current_thread().name)

        waits = [offload(work) for _ in range(20)]
        gate.set()
        for wait in waits:
            await wait
        assert len(names) == 20
        assert set(names) == {"store_0"}
        await offload.close()

    asyncio.run(scene())


def test_closing_waits_for_work_that_is_still_blocked() -> None:
    async def scene() -> None:
        offload, gate, done = ThreadOffload(), threading.Event(), list[str]()

        def work() -> None:
            gate.wait(30)
            done.append("work")

        wait = offload(work)
        asyncio.get_running_loop().call_later(0.02, gate.set)
        await offload.close()
        assert done == ["work"]
        await wait

    asyncio.run(scene())


def test_a_failure_that_nobody_waits_for_is_told_to_the_loop() -> None:
    told: list[Mapping[str, Any]] = []

    def fail() -> None:
        gate.wait(30)
        raise OSError("disk gone")

    gate = threading.Event()

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        offload = ThreadOffload()
        asyncio.ensure_future(offload(fail)).cancel()
        gate.set()
        await offload.close()

    asyncio.run(scene())
    assert [str(context["exception"]) for context in told] == ["disk gone"]


def test_stop_iteration_arrives_as_an_error_and_ends_nothing() -> None:
    async def scene() -> None:
        offload = ThreadOffload()
        with pytest.raises(RuntimeError, match="StopIteration"):
            await offload(lambda: next(iter(())))
        await offload.close()

    asyncio.run(scene())


def test_work_outlives_its_loop() -> None:
    offload, gate, done = ThreadOffload(), threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(30)
        done.set()

    async def leave() -> None:
        asyncio.ensure_future(offload(work)).cancel()

    asyncio.run(leave())
    gate.set()
    assert done.wait(30)
    asyncio.run(offload.close())
    with pytest.raises(OffloadClosed):
        asyncio.run(leave())


def test_two_may_close_at_once() -> None:
    async def scene() -> None:
        offload = ThreadOffload()
        await offload(lambda: None)
        await asyncio.gather(offload.close(), offload.close())

    asyncio.run(scene())
