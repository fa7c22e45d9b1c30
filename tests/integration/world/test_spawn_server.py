"""The spawn server starts processes in their cgroups, also when it is killed, stopped, late, or not permitted to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from remit.world.clock import BootClock
from remit.world.interfaces import ExitStatus, NotStarted, ProcessSpec
from remit.world.process import spawn_server
from remit.world.process.cgroup_discovery import find_cgroups
from remit.world.process.runner import ProcessRunner
from remit.world.process.spawn_server import SpawnServer
from tests.contracts.worlds import remove_groups

ENV = {"PATH": os.defpath}


@pytest.fixture
def parent() -> Iterator[str]:
    name = f"remit-tests/{os.getpid()}"
    if find_cgroups(name).name == "none":
        pytest.skip("no cgroups here")
    yield name
    remove_groups(name)


def run(scenario: Callable[[ProcessRunner], Coroutine[Any, Any, None]], parent: str) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario(ProcessRunner(BootClock(), parent=parent))

    asyncio.run(bounded())


def order(script: str, group: str = "one", **more: Any) -> ProcessSpec:
    return ProcessSpec(("/bin/sh", "-c", script), ENV, group=group, **more)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def spawn_server_of(one: ProcessRunner) -> SpawnServer:
    assert one._spawn_server is not None
    return one._spawn_server


@pytest.mark.smoke
def test_process_starts_as_child_in_all_its_cgroups(parent: str, tmp_path: Path) -> None:
    async def scenario(one: ProcessRunner) -> None:
        running = await one.start(order("cat /proc/$$/cgroup; echo $PPID", stdout=tmp_path / "out"))
        assert await one.wait(running) == ExitStatus(code=0)
        *groups, above = (tmp_path / "out").read_text().splitlines()
        assert int(above) == os.getpid()
        inside = [line for line in groups if line.endswith(f"{parent}/one")]
        assert len(inside) == len(find_cgroups(parent).directories("one"))
        await one.stop(running, grace_ms=0)

    run(scenario, parent)


def test_process_gets_signals_ignored_by_spawn_server(parent: str) -> None:
    async def scenario(one: ProcessRunner) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            running = await one.start(order("exec sleep 600"))
            os.kill(running.pid, number)
            assert await one.wait(running) == ExitStatus(signal=number)
            await one.stop(running, grace_ms=0)

    run(scenario, parent)


def test_killed_spawn_server_is_replaced_and_ends_no_process(parent: str) -> None:
    async def scenario(one: ProcessRunner) -> None:
        first = await one.start(order("exec sleep 600"))
        killed = spawn_server_of(one).pid
        os.kill(killed, signal.SIGKILL)
        await asyncio.sleep(0.2)
        second = await one.start(order("exit 3", "two"))
        assert spawn_server_of(one).pid not in (0, killed)
        assert await one.wait(second) == ExitStatus(code=3)
        assert one.is_alive(first)
        await one.stop(first, grace_ms=0)

    run(scenario, parent)


def test_unresponsive_spawn_server_starts_nothing_later(parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn_server, "ANSWER_S_MAX", 0.3)

    async def scenario(one: ProcessRunner) -> None:
        assert await one.wait(await one.start(order("exit 0"))) == ExitStatus(code=0)
        stopped = spawn_server_of(one).pid
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(NotStarted):
            await one.start(order(f"touch {tmp_path}/ran", "two"))
        assert not exists(stopped), "a stopped server could continue and start it later"
        assert not (tmp_path / "ran").exists()
        assert await one.wait(await one.start(order("exit 0", "two"))) == ExitStatus(code=0)

    run(scenario, parent)


def test_start_after_deadline_is_refused(parent: str, tmp_path: Path) -> None:
    """The deadline was ahead at the request, and has passed when a stopped spawn server continues."""

    async def scenario(one: ProcessRunner) -> None:
        assert await one.wait(await one.start(order("exit 0"))) == ExitStatus(code=0)
        os.kill(spawn_server_of(one).pid, signal.SIGSTOP)
        late = order(f"touch {tmp_path}/ran", "two", not_after_ms=BootClock().now_ms() + 200)
        async with asyncio.TaskGroup() as group:
            start = group.create_task(_refused(one, late))
            await asyncio.sleep(0.4)
            os.kill(spawn_server_of(one).pid, signal.SIGCONT)
        assert "deadline" in start.result()
        assert not (tmp_path / "ran").exists()

    run(scenario, parent)


async def _refused(one: ProcessRunner, late: ProcessSpec) -> str:
    with pytest.raises(NotStarted) as caught:
        await one.start(late)
    return caught.value.cause


def test_cancelled_start_leaves_no_process(parent: str, tmp_path: Path) -> None:
    async def scenario(one: ProcessRunner) -> None:
        assert await one.wait(await one.start(order("exit 0"))) == ExitStatus(code=0)
        os.kill(spawn_server_of(one).pid, signal.SIGSTOP)
        task = asyncio.create_task(one.start(order(f"touch {tmp_path}/ran; sleep 600", "two")))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.live_groups() == ()
        assert not (tmp_path / "ran").exists()

    run(scenario, parent)


UNUSABLE = """
import os, socket, struct
heard = socket.socket(fileno=0)
while True:
    _, told, _, _ = heard.recvmsg(1, 1024)
    fds = struct.unpack(f"{len(told[0][2]) // 4}i", told[0][2])
    os.write(fds[1], b"clone 38\\n")
    for fd in fds:
        os.close(fd)
"""


def test_fallback_joins_cgroup_after_start(parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spawn_server_main.py").write_text(UNUSABLE)
    monkeypatch.setattr(spawn_server, "PROGRAM", tmp_path / "spawn_server_main.py")

    async def scenario(one: ProcessRunner) -> None:
        running = await one.start(order("cat /proc/$$/cgroup", stdout=tmp_path / "out"))
        assert one._spawn_server is None
        assert await one.wait(running) == ExitStatus(code=0)
        assert f"{parent}/one" in (tmp_path / "out").read_text()
        assert await one.wait(await one.start(order("exit 4", "two"))) == ExitStatus(code=4)

    run(scenario, parent)


def test_start_failure_reports_cause_and_fix(parent: str, tmp_path: Path) -> None:
    garbled = tmp_path / "garbled"
    garbled.write_bytes(b"\x00\x01\x02")
    garbled.chmod(0o755)
    failures = [
        (ProcessSpec(("no-such-program",), ENV, group="one"), "no-such-program cannot be run", "install it"),
        (ProcessSpec((str(garbled),), group="one"), "exec format error", "built for this machine"),
        (
            ProcessSpec(("/bin/sh",), {}, tmp_path / "no", group="one"),
            f"directory {tmp_path}/no cannot be entered",
            "create it",
        ),
        (ProcessSpec(("/bin/sh", "a\0b"), group="one"), "null", "correct the command"),
        (ProcessSpec(("/bin/sh", "x" * (1 << 22)), group="one"), "argument list too long", "shorter"),
    ]

    async def scenario(one: ProcessRunner) -> None:
        for specification, cause, cure in failures:
            with pytest.raises(NotStarted) as caught:
                await one.start(specification)
            assert (cause in caught.value.cause, cure in caught.value.cure) == (True, True), caught.value
        assert one.live_groups() == ()

    run(scenario, parent)


def test_spawn_server_ends_with_its_parent() -> None:
    async def scenario() -> int:
        one = SpawnServer()
        one._start_server()
        pid = one.pid
        del one
        return pid

    pid = asyncio.run(scenario())
    assert os.waitpid(pid, 0)[1] == 0


def test_program_is_searched_in_path_like_shell(parent: str, tmp_path: Path) -> None:
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "greet").write_text("#!/bin/sh\nexit 5\n")
    (tmp_path / "second" / "greet").chmod(0o755)

    async def scenario(one: ProcessRunner) -> None:
        path = f"/absent:{tmp_path}/first:{tmp_path}/second"
        running = await one.start(ProcessSpec(("greet",), {"PATH": path}, group="one"))
        assert await one.wait(running) == ExitStatus(code=5)
        relative = await one.start(ProcessSpec(("greet",), {"PATH": "/absent:second"}, group="two", directory=tmp_path))
        assert await one.wait(relative) == ExitStatus(code=5)
        with pytest.raises(NotStarted, match="permission denied"):
            await one.start(ProcessSpec(("greet",), {"PATH": f"{tmp_path}/first:/absent"}, group="three"))
        with pytest.raises(NotStarted, match="no such file"):
            await one.start(ProcessSpec(("greet",), {"PATH": "/absent:/gone"}, group="four"))

    run(scenario, parent)
