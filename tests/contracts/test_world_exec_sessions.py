"""Does a runner keep its promises of commands beside a run? Above all: does none of them outlive it?"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.world.interfaces import CommandOutput, ExecSession, ExitStatus, NotStarted, ProcessHandle, PtySize, Runner
from tests.contracts.worlds import RUNNERS, Program, RunnerTwin

SOON_MS = 10_000


@pytest.fixture(params=RUNNERS, ids=lambda twin: twin.__name__)
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> RunnerTwin:
    make: type[RunnerTwin] = request.param
    return make(tmp_path)


@pytest.fixture(params=["", "g.1"], ids=["alone", "grouped"])
def group(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def begun(twin: RunnerTwin, runner: Runner, group: str) -> ProcessHandle:
    return await runner.start(twin.order(Program.RUNS)._replace(group=group))


async def rest(session: ExecSession) -> bytes:
    told = []
    while (said := await session.read()) is not None:
        told.append(said.data)
    return b"".join(told)


def test_what_is_fed_comes_back_and_the_end_of_input_ends_it(twin: RunnerTwin, group: str) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await begun(twin, runner, group)
        session = await runner.start_exec(running, twin.order(Program.ECHOES))
        async with clock.timeout_ms(SOON_MS):
            await session.write(b"one")
            assert await session.read() == CommandOutput("stdout", b"one")
            await session.write(b"two")
            session.close_input()
            assert await rest(session) == b"two"
            assert await session.wait() == ExitStatus(code=0)
            await session.close()
        assert runner.is_alive(running), "who leaves a session leaves what it was beside"
        await runner.stop(running, grace_ms=SOON_MS)

    twin.run(scene())


def test_how_it_exited_is_told(twin: RunnerTwin, group: str) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await begun(twin, runner, group)
        async with clock.timeout_ms(SOON_MS):
            for program, code in ((Program.EXITS_3, 3), (Program.EXITS_0, 0)):
                session = await runner.start_exec(running, twin.order(program))
                assert await rest(session) == b""
                assert await session.wait() == ExitStatus(code=code)
                await session.write(b"nobody takes this")
                await session.close()
        await runner.stop(running, grace_ms=SOON_MS)

    twin.run(scene())


@pytest.mark.parametrize("program", [Program.RUNS, Program.IGNORES])
def test_closing_it_ends_it(twin: RunnerTwin, group: str, program: Program) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await begun(twin, runner, group)
        session = await runner.start_exec(running, twin.order(program), window=PtySize(30, 100))
        with pytest.raises(TimeoutError):
            async with clock.timeout_ms(200):
                await session.wait()
        session.resize(PtySize(10, 20))
        async with clock.timeout_ms(SOON_MS):
            await session.close()
            assert await session.wait() == ExitStatus(signal=9)
        assert runner.is_alive(running)
        await runner.stop(running, grace_ms=SOON_MS)

    twin.run(scene())


def test_it_ends_with_what_it_is_beside(twin: RunnerTwin, group: str) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await begun(twin, runner, group)
        session = await runner.start_exec(running, twin.order(Program.IGNORES))
        await clock.sleep_ms(600)
        async with clock.timeout_ms(SOON_MS), asyncio.TaskGroup() as tasks:
            tasks.create_task(runner.stop(running, grace_ms=60_000))
            assert await session.wait() == ExitStatus(signal=9)
            assert await rest(session) == b""
            await session.close()
        assert runner.live_groups() == ()

    twin.run(scene())


def test_beside_what_has_ended_nothing_begins(twin: RunnerTwin, group: str) -> None:
    async def scene() -> None:
        runner = twin.runner()
        running = await begun(twin, runner, group)
        await runner.stop(running, grace_ms=0)
        with pytest.raises(NotStarted):
            await runner.start_exec(running, twin.order(Program.EXITS_0))
        assert runner.live_groups() == ()

    twin.run(scene())


def test_a_program_that_is_not_there_is_not_started(twin: RunnerTwin, group: str) -> None:
    async def scene() -> None:
        runner = twin.runner()
        running = await begun(twin, runner, group)
        with pytest.raises(NotStarted):
            await runner.start_exec(running, twin.order(Program.MISSING))
        assert runner.is_alive(running)
        await runner.stop(running, grace_ms=0)

    twin.run(scene())


def test_another_of_the_same_machine_may_enter_what_the_first_has_started(twin: RunnerTwin, group: str) -> None:
    async def scene() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await begun(twin, runner, group)
        second = twin.runner()
        async with clock.timeout_ms(SOON_MS):
            session = await second.start_exec(ProcessHandle(*running), twin.order(Program.EXITS_3))
            assert await session.wait() == ExitStatus(code=3)
            await session.close()
        await runner.stop(running, grace_ms=0)

    twin.run(scene())
