"""Contract of process runners: processes outlive their starter, and no unrelated process is touched."""

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
def grouping_twin(twin: RunnerTwin) -> RunnerTwin:
    """A twin on whose machine cgroups work, which is not so without root or inside many containers."""
    found = twin.runner().isolation_support()
    if "memory" not in found.controllers:
        pytest.skip(f"cgroups here: {found.cgroups}; {found.reason}")
    return twin


@pytest.mark.parametrize(("program", "code"), [(Program.EXITS_0, 0), (Program.EXITS_3, 3)])
def test_exit_code_is_returned_to_all_waiters_also_late(twin: RunnerTwin, program: Program, code: int) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(program))
        async with clock.timeout_ms(SOON_MS), asyncio.TaskGroup() as group:
            waits = [group.create_task(runner.wait(running)) for _ in range(3)]
        assert [wait.result() for wait in waits] == [ExitStatus(code=code)] * 3
        assert not runner.is_alive(running)
        await clock.sleep_ms(50)
        assert await runner.wait(running) == ExitStatus(code=code)

    twin.run(scenario())


def test_each_process_has_own_exit_status(twin: RunnerTwin) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        forever = await runner.start(twin.order(Program.RUNS))
        short = [await runner.start(twin.order(one)) for one in (Program.EXITS_3, Program.EXITS_0) * 5]
        assert len({forever, *short}) == 11
        async with clock.timeout_ms(SOON_MS):
            ends = await asyncio.gather(*(runner.wait(running) for running in short))
        assert ends == [ExitStatus(code=3), ExitStatus(code=0)] * 5
        assert runner.is_alive(forever)
        await runner.stop(forever, grace_ms=SOON_MS)

    twin.run(scenario())


def test_process_runs_until_stopped_and_reports_signal(twin: RunnerTwin) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(Program.RUNS))
        with pytest.raises(TimeoutError):
            async with clock.timeout_ms(200):
                await runner.wait(running)
        assert runner.is_alive(running), "a cancelled wait does not stop the process"
        began_ms = clock.now_ms()
        await runner.stop(running, grace_ms=60_000)
        assert clock.now_ms() - began_ms < 60_000
        assert not runner.is_alive(running)
        assert await runner.wait(running) == ExitStatus(signal=TERM)

    twin.run(scenario())


def test_process_ignoring_term_is_killed_after_grace(twin: RunnerTwin) -> None:
    async def scenario() -> None:
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

    twin.run(scenario())


@pytest.mark.parametrize("program", [Program.RUNS, Program.IGNORES])
def test_process_ends_soon_without_grace(twin: RunnerTwin, program: Program) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(program))
        async with clock.timeout_ms(SOON_MS):
            await runner.stop(running, grace_ms=0)
            ended = await runner.wait(running)
        assert ended in (ExitStatus(signal=TERM), ExitStatus(signal=KILL))

    twin.run(scenario())


def test_stopping_ended_process_has_no_effect(twin: RunnerTwin) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await runner.start(twin.order(Program.EXITS_3))
        assert await runner.wait(running) == ExitStatus(code=3)
        began_ms = clock.now_ms()
        for _ in range(2):
            await runner.stop(running, grace_ms=3_600_000)
        assert clock.now_ms() - began_ms < SOON_MS
        assert await runner.wait(running) == ExitStatus(code=3)

    twin.run(scenario())


def test_process_outlives_runner_and_another_takes_over(twin: RunnerTwin) -> None:
    async def scenario() -> None:
        clock, starter = twin.clock(), twin.runner()
        pid, began, kept = await starter.start(twin.order(Program.RUNS))
        del starter
        gc.collect()
        await clock.sleep_ms(100)
        running = ProcessHandle(pid, began, kept)  # the second runner has only the recorded handle
        second = twin.runner()
        assert second.is_alive(running)
        async with clock.timeout_ms(SOON_MS), asyncio.TaskGroup() as group:
            wait = group.create_task(second.wait(running))
            await clock.sleep_ms(100)
            assert not wait.done()
            await second.stop(running, grace_ms=60_000)
        # The exit status depends on the parent; that the process has ended does not.
        assert wait.result() in (ExitStatus(), ExitStatus(signal=TERM))
        assert not second.is_alive(running)

    twin.run(scenario())


def test_pid_with_other_start_time_is_other_process(twin: RunnerTwin) -> None:
    async def scenario() -> None:
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

    twin.run(scenario())


def test_missing_program_is_not_started_with_cause_and_fix(twin: RunnerTwin) -> None:
    async def scenario() -> None:
        with pytest.raises(NotStarted) as caught:
            await twin.runner().start(twin.order(Program.MISSING))
        assert caught.value.cause
        assert caught.value.cure

    twin.run(scenario())


def test_group_runs_once_at_a_time_and_again_when_empty(grouping_twin: RunnerTwin) -> None:
    async def scenario() -> None:
        first, clock = grouping_twin.runner(), grouping_twin.clock()
        order = grouping_twin.order(Program.RUNS)._replace(group="job-1.a_2")
        running = await first.start(order)
        assert running.group
        second = grouping_twin.runner()
        assert second.live_groups() == ("job-1.a_2",)
        with pytest.raises(NotStarted, match="still runs"):
            await second.start(order)
        assert first.is_alive(running), "a refused start has no effect"
        await second.stop(running, grace_ms=SOON_MS)
        assert await first.wait(running) == ExitStatus(signal=TERM)
        again = await second.start(order)
        assert again.group != running.group
        await first.stop(running, grace_ms=0)
        await clock.sleep_ms(50)
        assert second.is_alive(again), "the name now belongs to another group"
        await second.stop(again, grace_ms=0)
        assert second.live_groups() == ()

    grouping_twin.run(scenario())


def test_group_is_killed_by_name(grouping_twin: RunnerTwin) -> None:
    async def scenario() -> None:
        runner, clock = grouping_twin.runner(), grouping_twin.clock()
        running = await runner.start(grouping_twin.order(Program.IGNORES)._replace(group="orphan"))
        other = await runner.start(grouping_twin.order(Program.RUNS)._replace(group="orphan-2"))
        async with clock.timeout_ms(SOON_MS):
            await grouping_twin.runner().kill_group("orphan")
            await grouping_twin.runner().kill_group("never-was")
        assert not runner.is_alive(running)
        assert runner.is_alive(other)
        assert await runner.wait(running) == ExitStatus(signal=KILL)
        await runner.stop(other, grace_ms=0)

    grouping_twin.run(scenario())


@pytest.mark.parametrize("group", [".hidden", "../up", "a/b", "a b", "x" * 201])
def test_invalid_group_name_raises(twin: RunnerTwin, group: str) -> None:
    async def scenario() -> None:
        runner = twin.runner()
        with pytest.raises(ValueError, match=r"group: .* is invalid"):
            await runner.start(twin.order(Program.RUNS)._replace(group=group))
        with pytest.raises(ValueError, match=r"group: .* is invalid"):
            await runner.kill_group(group)
        with pytest.raises(ValueError, match="set group"):
            await runner.start(twin.order(Program.RUNS)._replace(limits=Limits(pids=5)))

    twin.run(scenario())


def test_process_over_memory_limit_is_killed_and_reported(grouping_twin: RunnerTwin) -> None:
    async def scenario() -> None:
        runner, clock = grouping_twin.runner(), grouping_twin.clock()
        order = grouping_twin.order(Program.TAKES_64_MIB)
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

    grouping_twin.run(scenario())


def test_unknown_user_is_refused(twin: RunnerTwin) -> None:
    async def scenario() -> None:
        with pytest.raises(NotStarted, match="user 'no-such-user' does not exist"):
            await twin.runner().start(twin.order(Program.RUNS)._replace(user="no-such-user"))

    twin.run(scenario())


def test_missing_controllers_are_reported_with_reason(twin: RunnerTwin) -> None:
    async def scenario() -> None:
        found = twin.runner().isolation_support()
        assert (found.cgroups == "none") == (not found.controllers)
        assert {"memory", "pids", "cpu"} <= {*found.controllers} or found.reason

    twin.run(scenario())
