"""Process runner: processes start as specified, in a group that ends as a whole, and outlive the process that started them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remit.world.clock import BootClock
from remit.world.interfaces import ExitStatus, NotStarted, ProcessHandle, ProcessSpec
from remit.world.process import runner as module
from remit.world.process.runner import ProcessRunner

ENV = {"PATH": os.defpath}


def shell(script: str, **env: str) -> ProcessSpec:
    return ProcessSpec(("/bin/sh", "-c", script), {**ENV, **env})


def runner() -> ProcessRunner:
    return ProcessRunner(BootClock())


async def text(path: Path) -> str:
    async with asyncio.timeout(10):
        while not (path.exists() and path.read_text().endswith("\n")):  # noqa: ASYNC110, ASYNC240 - no event to wait for
            await asyncio.sleep(0.01)
    return path.read_text()  # noqa: ASYNC240


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def has_exited(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


REPORTER = """
import json, os, sys
from pathlib import Path
print(json.dumps([os.getcwd(), Path("/proc/self/environ").read_text(), sys.argv[1:]]), file=open("told", "w"))
"""


def test_process_gets_arguments_directory_and_only_its_environment(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, arguments = runner(), ["a b; $(c)", "", "*"]
        running = await one.start(ProcessSpec((sys.executable, "-c", REPORTER, *arguments), {"B": "2"}, tmp_path))
        assert await one.wait(running) == ExitStatus(code=0)

    asyncio.run(scenario())
    assert json.loads((tmp_path / "told").read_text()) == [str(tmp_path), "B=2\0", ["a b; $(c)", "", "*"]]


def test_process_streams_are_dev_null(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = runner()
        script = f"cat > {tmp_path}/in; told=$(readlink /proc/$$/fd/1 /proc/$$/fd/2); echo $told > {tmp_path}/out"
        assert await one.wait(await one.start(shell(script))) == ExitStatus(code=0)
        assert (tmp_path / "in").read_bytes() == b""
        assert (tmp_path / "out").read_text().split() == ["/dev/null", "/dev/null"]

    asyncio.run(scenario())


@pytest.mark.parametrize("leader", ["wait", "exit 0"])
def test_stop_ends_whole_group_even_after_leader_exited(tmp_path: Path, leader: str) -> None:
    async def scenario() -> None:
        one = runner()
        script = f"(trap '' TERM; while :; do sleep 0.05; done) & echo $! > {tmp_path}/child; {leader}"
        running = await one.start(shell(script))
        child = int(await text(tmp_path / "child"))
        await asyncio.sleep(0.2)
        if leader == "exit 0":
            assert await one.wait(running) == ExitStatus(code=0)
            assert not one.is_alive(running)
        assert os.getpgid(child) == running.pid == os.getsid(child)
        assert not has_exited(child)
        await one.stop(running, grace_ms=200)
        assert has_exited(child)

    asyncio.run(scenario())


def test_pid_of_dead_leader_is_kept_until_group_is_empty(tmp_path: Path) -> None:
    """Otherwise the pid could be reused by an unrelated process, whose group would then be killed."""

    async def scenario() -> None:
        one = runner()
        running = await one.start(shell("sleep 600 & exit 0"))
        assert await one.wait(running) == ExitStatus(code=0)
        assert exists(running.pid)
        await one.stop(running, grace_ms=10_000)
        assert not exists(running.pid)

    asyncio.run(scenario())


def test_unwaited_process_is_reaped_by_next_start() -> None:
    async def scenario() -> None:
        one = runner()
        first = await one.start(shell("exit 3"))
        async with asyncio.timeout(10):
            while one.is_alive(first):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert exists(first.pid)
        second = await one.start(shell("exit 0"))
        assert not exists(first.pid)
        assert [await one.wait(first), await one.wait(second)] == [ExitStatus(code=3), ExitStatus(code=0)]

    asyncio.run(scenario())


def test_number_of_remembered_exit_statuses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXIT_STATUSES_MAX", 2)

    async def scenario() -> None:
        one = runner()
        started = []
        for code in range(4):
            started.append(await one.start(shell(f"exit {code}")))
            assert await one.wait(started[-1]) == ExitStatus(code=code)
        assert [await one.wait(running) for running in started] == [
            ExitStatus(),
            ExitStatus(),
            ExitStatus(code=2),
            ExitStatus(code=3),
        ]

    asyncio.run(scenario())


def test_process_killed_from_outside_reports_signal() -> None:
    async def scenario() -> None:
        one = runner()
        running = await one.start(shell("sleep 600"))
        os.kill(running.pid, signal.SIGABRT)
        assert await one.wait(running) == ExitStatus(signal=signal.SIGABRT)
        await one.stop(running, grace_ms=0)  # its child processes

    asyncio.run(scenario())


STARTER = """
import asyncio, sys
from remit.world.production import production
from remit.world.interfaces import ProcessSpec

async def main():
    script = "trap 'sleep 0.2; exit' TERM; while :; do sleep 0.05; done"
    running = await production().runner.start(ProcessSpec(("/bin/sh", "-c", script)))
    print(running.pid, running.start_time, flush=True)
    if sys.argv[1] == "hang":
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["return", "hang"])
def test_process_outlives_its_starter_and_is_stopped_by_another(end: str) -> None:
    """The second runner has only the recorded handle."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", STARTER, end], stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        pid, began = starter.stdout.readline().split()
        if end == "hang":
            starter.kill()
        starter.wait()
    running = ProcessHandle(int(pid), began)

    async def scenario() -> None:
        one = runner()
        await asyncio.sleep(0.2)
        assert one.is_alive(running)
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            wait = group.create_task(one.wait(running))
            await asyncio.sleep(0.1)
            assert not wait.done()
            began_s = time.monotonic()
            await one.stop(running, grace_ms=9_000)
            assert time.monotonic() - began_s > 0.15, "stop must wait for the end"
        assert wait.result() == ExitStatus()
        assert not one.is_alive(running)

    asyncio.run(scenario())


def test_other_boot_or_start_time_is_another_process() -> None:
    async def scenario() -> None:
        one = runner()
        running = await one.start(shell("sleep 600"))
        boot, _, ticks = running.start_time.rpartition("/")
        assert boot == BootClock().boot()
        for began in (f"another-boot/{ticks}", f"{boot}/{int(ticks) - 1}"):
            assert not one.is_alive(ProcessHandle(running.pid, began))
            assert await one.wait(ProcessHandle(running.pid, began)) == ExitStatus()
            await one.stop(ProcessHandle(running.pid, began), grace_ms=0)
        await asyncio.sleep(0.05)
        assert one.is_alive(running)
        await one.stop(running, grace_ms=0)

    asyncio.run(scenario())


def test_start_failure_reports_cause_and_fix(tmp_path: Path) -> None:
    plain, garbled = tmp_path / "plain", tmp_path / "garbled"
    plain.write_text("#!/bin/sh\n")
    garbled.write_bytes(b"\x00\x01\x02")
    garbled.chmod(0o755)
    failures = [
        (ProcessSpec(("no-such-program",), ENV), "no-such-program cannot be run", "install it"),
        (ProcessSpec((str(plain),)), "permission denied", "make it executable"),
        (ProcessSpec((str(garbled),)), "exec format error", "built for this machine"),
        (ProcessSpec(("/bin/sh",), {}, tmp_path / "no"), f"directory {tmp_path}/no cannot be entered", "create it"),
        (ProcessSpec(("/bin/sh", "a\0b")), "null", "correct the command"),
        (ProcessSpec(("/bin/sh", "x" * (1 << 22))), "argument list too long", "shorter"),
    ]

    async def scenario() -> None:
        one = runner()
        for order, cause, cure in failures:
            with pytest.raises(NotStarted) as caught:
                await one.start(order)
            assert cause in caught.value.cause
            assert cure in caught.value.cure

    asyncio.run(scenario())
