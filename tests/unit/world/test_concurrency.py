"""Thread offload: keeps its contract under real threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from remit.world.concurrency import ThreadOffload
from remit.world.interfaces import OffloadClosed


def test_loop_runs_while_work_blocks() -> None:
    async def scenario() -> None:
        offload, gate = ThreadOffload(), threading.Event()
        wait = offload(lambda: gate.wait(30))
        await asyncio.sleep(0.01)
        gate.set()
        assert await wait
        await offload.close()

    asyncio.run(scenario())


def test_queued_work_of_cancelled_waiter_still_runs_in_order() -> None:
    """asyncio.wrap_future would have removed it from the queue."""

    contexts: list[Mapping[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        offload, gate, done = ThreadOffload(), threading.Event(), list[str]()
        blocked = offload(lambda: gate.wait(30))
        queued = asyncio.ensure_future(offload(lambda: done.append("commit")))
        queued.cancel()
        gate.set()
        await blocked
        await offload(lambda: done.append("read"))
        assert done == ["commit", "read"]
        await offload.close()

    asyncio.run(scenario())
    assert not contexts


def test_all_work_runs_on_one_separate_thread() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_close_waits_for_blocked_work() -> None:
    async def scenario() -> None:
        offload, gate, done = ThreadOffload(), threading.Event(), list[str]()

        def work() -> None:
            gate.wait(30)
            done.append("work")

        wait = offload(work)
        asyncio.get_running_loop().call_later(0.02, gate.set)
        await offload.close()
        assert done == ["work"]
        await wait

    asyncio.run(scenario())


def test_failure_without_waiter_is_reported_to_loop() -> None:
    contexts: list[Mapping[str, Any]] = []

    def fail() -> None:
        gate.wait(30)
        raise OSError("disk gone")

    gate = threading.Event()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        offload = ThreadOffload()
        asyncio.ensure_future(offload(fail)).cancel()
        gate.set()
        await offload.close()

    asyncio.run(scenario())
    assert [str(context["exception"]) for context in contexts] == ["disk gone"]


def test_stop_iteration_is_raised_as_runtime_error() -> None:
    async def scenario() -> None:
        offload = ThreadOffload()
        with pytest.raises(RuntimeError, match="StopIteration"):
            await offload(lambda: next(iter(())))
        await offload.close()

    asyncio.run(scenario())


def test_work_outlives_event_loop() -> None:
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


def test_close_may_be_called_concurrently() -> None:
    async def scenario() -> None:
        offload, done = ThreadOffload(), list[str]()
        wait = offload(lambda: done.append("work"))
        await asyncio.gather(offload.close(), offload.close())
        assert done == ["work"]
        await wait
        with pytest.raises(OffloadClosed):
            await offload(lambda: done.append("late"))

    asyncio.run(scenario())
