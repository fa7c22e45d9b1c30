"""Does a runner keep its promises? Above all: does work outlive its starter, and is nothing touched that is not ours?"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from remit.world.interfaces import ExitStatus, Limits, NotStarted, ProcessHandle, Usage
from tests.contracts.worlds import RUNNERS, Program, RunnerTwin

SOON_MS = 10_000
MIB = 1 << 20
TERM, KILL = 15, 9


@pytest.fixture(params=RUNNERS, ids=lambda twin: twin.__name__)
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> RunnerTwin:
    make: type[RunnerTwin] = request.param
    return make(tmp_path)


@pytest.fixture
def grouping(twin: RunnerTwin) -> RunnerTwin:
    """One on whose machine work can be kept together. That is not so without root, or inside many a container."""
    found = twin.runner().isolation_support()
    if "memory" not in found.controllers:
        pytest.skip(f"cgroups here: {found.cgroups}; {found.reason}")
    return twin


@pytest.mark.parametrize(("program", "code"), [(Program.EXITS_0, 0), (Program.EXITS_3, 3)])
def test_how_it_exited_is_told_to_all_who_wait_also_late(twin: RunnerTwin, program: Program, code: int) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(program))
        async with clock.timeout_ms(SOON_MS), asyncio.TaskGroup() as group:
            waits = [group.create_task(runner.wait(running)) for _ in range(3)]
        assert [wait.result() for wait in waits] == [ExitStatus(code=code)] * 3
        assert not runner.is_alive(running)
        await clock.sleep_ms(50)
        assert await runner.wait(running) == ExitStatus(code=code)

    twin.run(scene())


def test_each_has_its_own_end(twin: RunnerTwin) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        forever = await runner.start(twin.order(Program.RUNS))
        short = [await runner.start(twin.order(one)) for one in (Program.EXITS_3, Program.EXITS_0) * 5]
        assert len({forever, *short}) == 11
        async with clock.timeout_ms(SOON_MS):
            ends = await asyncio.gather(*(runner.wait(running) for running in short))
        assert ends == [ExitStatus(code=3), ExitStatus(code=0)] * 5
        assert runner.is_alive(forever)
        await runner.stop(forever, grace_ms=SOON_MS)

    twin.run(scene())


def test_it_runs_until_it_is_stopped_and_the_signal_is_told(twin: RunnerTwin) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(Program.RUNS))
        with pytest.raises(TimeoutError):
            async with clock.timeout_ms(200):
                await runner.wait(running)
        assert runner.is_alive(running), "whoever stops waiting stops nothing else"
        began_ms = clock.now_ms()
        await runner.stop(running, grace_ms=60_000)
        assert clock.now_ms() - began_ms < 60_000
        assert not runner.is_alive(running)
        assert await runner.wait(running) == ExitStatus(signal=TERM)

    twin.run(scene())


def test_one_that_ignores_the_request_is_made_to_end_but_not_before_the_grace(twin: RunnerTwin) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(Program.IGNORES))
        await clock.sleep_ms(600)
        began_ms = clock.now_ms()
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(runner.stop(running, grace_ms=400))
            await clock.sleep_ms(200)
            assert runner.is_alive(running)
            async with clock.timeout_ms(SOON_MS):
                await stopping
        assert clock.now_ms() - began_ms >= 400
        assert not runner.is_alive(running)
        assert await runner.wait(running) == ExitStatus(signal=KILL)

    twin.run(scene())


@pytest.mark.parametrize("program", [Program.RUNS, Program.IGNORES])
def test_without_grace_it_ends_soon(twin: RunnerTwin, program: Program) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(program))
        async with clock.timeout_ms(SOON_MS):
            await runner.stop(running, grace_ms=0)
            ended = await runner.wait(running)
        assert ended in (ExitStatus(signal=TERM), ExitStatus(signal=KILL))

    twin.run(scene())


def test_to_stop_what_has_ended_is_nothing(twin: RunnerTwin) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(Program.EXITS_3))
        assert await runner.wait(running) == ExitStatus(code=3)
        began_ms = clock.now_ms()
        for _ in range(2):
            await runner.stop(running, grace_ms=3_600_000)
        assert clock.now_ms() - began_ms < SOON_MS
        assert await runner.wait(running) == ExitStatus(code=3)

    twin.run(scene())


def test_it_goes_on_when_its_starter_is_gone_and_another_takes_it_over(twin: RunnerTwin) -> None:
    async def scene() -> None:
        clock, starter = twin.clock(), twin.runner()
        pid, began, kept = await starter.start(twin.order(Program.RUNS))
        del starter
        gc.collect()
        await clock.sleep_ms(100)
        running = ProcessHandle(pid, began, kept)  # all that the second one has: what was written down
        second = twin.runner()
        assert second.is_alive(running)
        async with clock.timeout_ms(SOON_MS), asyncio.TaskGroup() as group:
            wait = group.create_task(second.wait(running))
            await clock.sleep_ms(100)
            assert not wait.done()
            await second.stop(running, grace_ms=60_000)
        # Whose child it was is the twin's affair; that it is gone is not.
        assert wait.result() in (ExitStatus(), ExitStatus(signal=TERM))
        assert not second.is_alive(running)

    twin.run(scene())


def test_a_pid_with_another_beginning_is_somebody_else(twin: RunnerTwin) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        mine = await runner.start(twin.order(Program.RUNS))
        earlier = ProcessHandle(mine.pid, mine.start_time + "0")
        assert not runner.is_alive(earlier)
        async with clock.timeout_ms(SOON_MS):
            await runner.stop(earlier, grace_ms=0)
            assert await runner.wait(earlier) == ExitStatus()
        await clock.sleep_ms(100)
        assert runner.is_alive(mine)
        await runner.stop(mine, grace_ms=SOON_MS)

    twin.run(scene())


def test_what_is_not_there_is_not_started_and_the_reader_learns_what_to_do(twin: RunnerTwin) -> None:
    async def scene() -> None:
        with pytest.raises(NotStarted) as caught:
            await twin.runner().start(twin.order(Program.MISSING))
        assert caught.value.cause
        assert caught.value.cure

    twin.run(scene())


def test_a_group_is_run_once_at_a_time_and_again_when_it_is_empty(grouping: RunnerTwin) -> None:
    async def scene() -> None:
        first, clock = grouping.runner(), grouping.clock()
        order = grouping.order(Program.RUNS)._replace(group="job-1.a_2")
        running = await first.start(order)
        assert running.group
        second = grouping.runner()
        assert second.live_groups() == ("job-1.a_2",)
        with pytest.raises(NotStarted, match="still runs"):
            await second.start(order)
        assert first.is_alive(running), "a refused start harms nobody"
        await second.stop(running, grace_ms=SOON_MS)
        assert await first.wait(running) == ExitStatus(signal=TERM)
        again = await second.start(order)
        assert again.group != running.group
        await first.stop(running, grace_ms=0)
        await clock.sleep_ms(50)
        assert second.is_alive(again), "the group of that name is another one by now"
        await second.stop(again, grace_ms=0)
        assert second.live_groups() == ()

    grouping.run(scene())


def test_a_group_is_cleared_by_its_name_alone(grouping: RunnerTwin) -> None:
    async def scene() -> None:
        runner, clock = grouping.runner(), grouping.clock()
        running = await runner.start(grouping.order(Program.IGNORES)._replace(group="orphan"))
        other = await runner.start(grouping.order(Program.RUNS)._replace(group="orphan-2"))
        async with clock.timeout_ms(SOON_MS):
            await grouping.runner().kill_group("orphan")
            await grouping.runner().kill_group("never-was")
        assert not runner.is_alive(running)
        assert runner.is_alive(other)
        assert await runner.wait(running) == ExitStatus(signal=KILL)
        await runner.stop(other, grace_ms=0)

    grouping.run(scene())


@pytest.mark.parametrize("group", [".hidden", "../up", "a/b", "a b", "x" * 201])
def test_a_name_that_is_no_file_name_is_our_own_mistake(twin: RunnerTwin, group: str) -> None:
    async def scene() -> None:
        runner = twin.runner()
        with pytest.raises(ValueError, match=r"group: .* is invalid"):
            await runner.start(twin.order(Program.RUNS)._replace(group=group))
        with pytest.raises(ValueError, match=r"group: .* is invalid"):
            await runner.kill_group(group)
        with pytest.raises(ValueError, match="set group"):
            await runner.start(twin.order(Program.RUNS)._replace(limits=Limits(pids=5)))

    twin.run(scene())


def test_one_that_takes_more_memory_than_it_may_is_killed_and_that_is_told(grouping: RunnerTwin) -> None:
    async def scene() -> None:
        runner, clock = grouping.runner(), grouping.clock()
        order = grouping.order(Program.TAKES_64_MIB)
        small = await runner.start(order._replace(group="small", limits=Limits(memory_bytes=24 * MIB)))
        large = await runner.start(order._replace(group="large", limits=Limits(memory_bytes=512 * MIB)))
        async with clock.timeout_ms(SOON_MS):
            assert await runner.wait(small) == ExitStatus(signal=KILL, oom=True)
            while runner.usage(large).memory_bytes < 64 * MIB:
                await clock.sleep_ms(50)
        assert runner.usage(small) == Usage()
        assert runner.usage(large).pids >= 1
        await runner.stop(large, grace_ms=0)
        assert not (await runner.wait(large)).oom
        assert runner.usage(large) == Usage()

    grouping.run(scene())


def test_an_unknown_user_is_refused(twin: RunnerTwin) -> None:
    async def scene() -> None:
        with pytest.raises(NotStarted, match="user 'no-such-user' does not exist"):
            await twin.runner().start(twin.order(Program.RUNS)._replace(user="no-such-user"))

    twin.run(scene())


def test_what_holds_work_back_is_told(twin: RunnerTwin) -> None:
    async def scene() -> None:
        found = twin.runner().isolation_support()
        assert (found.cgroups == "none") == (not found.controllers)
        assert {"memory", "pids", "cpu"} <= {*found.controllers} or found.reason

    twin.run(scene())
