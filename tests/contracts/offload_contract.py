"""Contract of `world.offload`: one function for each promise, run on every world and on the simulated offload alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pytest

from remit.world.interfaces import OffloadClosed, World
from tests.contracts.worlds import WorldTwin, run_in


def offloaded_work_runs_in_call_order(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        done: list[int] = []
        waits = [world.offload(lambda turn=turn: done.append(turn)) for turn in range(200)]  # type: ignore[misc]
        for wait in reversed(waits):
            await wait
        assert done == list(range(200))

    run_in(twin, scenario)


def offload_passes_results_and_exceptions(twin: WorldTwin) -> None:
    def fail() -> None:
        raise KeyError("mine")

    async def scenario(world: World) -> None:
        assert await world.offload(lambda: 42) == 42
        with pytest.raises(KeyError, match="mine"):
            await world.offload(fail)
        assert await world.offload(lambda: "still there") == "still there"

    run_in(twin, scenario)


def offloaded_work_of_cancelled_waiter_still_runs(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        done: list[str] = []

        async def wait() -> None:
            await world.offload(lambda: done.append("first"))
            await world.offload(lambda: done.append("second"))

        waiter = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await world.offload(lambda: done.append("third"))
        assert done[0] == "first"
        assert done[-1] == "third"

    run_in(twin, scenario)


def offload_close_waits_for_work_and_refuses_more(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        done: list[int] = []
        wait = world.offload(lambda: done.append(1))
        await world.offload.close()
        assert done == [1]
        await wait
        with pytest.raises(OffloadClosed):
            await world.offload(lambda: done.append(2))
        await world.offload.close()
        assert done == [1]

    run_in(twin, scenario)


OFFLOAD_CONTRACT: Final[tuple[Callable[[Any], None], ...]] = (
    offloaded_work_runs_in_call_order,
    offload_passes_results_and_exceptions,
    offloaded_work_of_cancelled_waiter_still_runs,
    offload_close_waits_for_work_and_refuses_more,
)
