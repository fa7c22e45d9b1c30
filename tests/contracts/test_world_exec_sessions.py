"""Contract of exec sessions beside a process; above all, none outlives its process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.world.interfaces import ExitStatus, NotStarted, ProcessHandle, Runner
from remit.world.process.exec_session import CommandOutput, ExecSession, PtySize
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


async def start_long_running(twin: RunnerTwin, runner: Runner, group: str) -> ProcessHandle:
    return await runner.start(twin.order(Program.RUNS)._replace(group=group))


async def rest(session: ExecSession) -> bytes:
    pieces = []
    while (output := await session.read()) is not None:
        pieces.append(output.data)
    return b"".join(pieces)


def test_input_is_echoed_and_end_of_input_ends_command(twin: RunnerTwin, group: str) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await start_long_running(twin, runner, group)
        session = await runner.start_exec(running, twin.order(Program.ECHOES))
        async with clock.timeout_ms(SOON_MS):
            await session.write(b"one")
            assert await session.read() == CommandOutput("stdout", b"one")
            await session.write(b"two")
            session.close_input()
            assert await rest(session) == b"two"
            assert await session.wait() == ExitStatus(code=0)
            await session.close()
        assert runner.is_alive(running), "the process continues after the session"
        await runner.stop(running, grace_ms=SOON_MS)

    twin.run(scenario())


def test_exit_code_of_command_is_returned(twin: RunnerTwin, group: str) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await start_long_running(twin, runner, group)
        async with clock.timeout_ms(SOON_MS):
            for program, code in ((Program.EXITS_3, 3), (Program.EXITS_0, 0)):
                session = await runner.start_exec(running, twin.order(program))
                assert await rest(session) == b""
                assert await session.wait() == ExitStatus(code=code)
                await session.write(b"nobody takes this")
                await session.close()
        await runner.stop(running, grace_ms=SOON_MS)

    twin.run(scenario())


@pytest.mark.parametrize("program", [Program.RUNS, Program.IGNORES])
def test_closing_session_kills_command(twin: RunnerTwin, group: str, program: Program) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await start_long_running(twin, runner, group)
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

    twin.run(scenario())


def test_command_ends_with_its_process(twin: RunnerTwin, group: str) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await start_long_running(twin, runner, group)
        session = await runner.start_exec(running, twin.order(Program.IGNORES))
        await clock.sleep_ms(600)
        async with clock.timeout_ms(SOON_MS), asyncio.TaskGroup() as tasks:
            tasks.create_task(runner.stop(running, grace_ms=60_000))
            assert await session.wait() == ExitStatus(signal=9)
            assert await rest(session) == b""
            await session.close()
        assert runner.live_groups() == ()

    twin.run(scenario())


def test_exec_beside_ended_process_is_refused(twin: RunnerTwin, group: str) -> None:
    async def scenario() -> None:
        runner = twin.runner()
        running = await start_long_running(twin, runner, group)
        await runner.stop(running, grace_ms=0)
        with pytest.raises(NotStarted):
            await runner.start_exec(running, twin.order(Program.EXITS_0))
        assert runner.live_groups() == ()

    twin.run(scenario())


def test_missing_program_is_not_started(twin: RunnerTwin, group: str) -> None:
    async def scenario() -> None:
        runner = twin.runner()
        running = await start_long_running(twin, runner, group)
        with pytest.raises(NotStarted):
            await runner.start_exec(running, twin.order(Program.MISSING))
        assert runner.is_alive(running)
        await runner.stop(running, grace_ms=0)

    twin.run(scenario())


def test_other_runner_of_machine_may_exec_in_process(twin: RunnerTwin, group: str) -> None:
    async def scenario() -> None:
        runner, clock = twin.runner(), twin.clock()
        running = await start_long_running(twin, runner, group)
        second = twin.runner()
        async with clock.timeout_ms(SOON_MS):
            session = await second.start_exec(ProcessHandle(*running), twin.order(Program.EXITS_3))
            assert await session.wait() == ExitStatus(code=3)
            await session.close()
        await runner.stop(running, grace_ms=0)

    twin.run(scenario())
