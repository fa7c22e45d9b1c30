"""Exec sessions beside real work: user, cgroup, terminal and namespaces are those of the work, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from remit.world.clock import BootClock
from remit.world.interfaces import ExitStatus, Limits, NotStarted, ProcessHandle, ProcessSpec
from remit.world.process.exec_session import CommandOutput, ExecSession, ProcessExecSession, PtySize
from remit.world.process.runner import ProcessRunner
from tests.contracts.worlds import remove_groups

pytestmark = pytest.mark.smoke

ENV = {"PATH": os.defpath, "MODE": "live"}
FOREVER = ("/bin/sh", "-c", "while :; do sleep 0.1; done")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts work as another user")
MIB = 1 << 20

# Stands in for bubblewrap, which is not installed everywhere: the same namespaces, and two processes of its own.
LIKE_BWRAP = """#!/bin/sh
while [ "$1" != "--" ]; do [ "$1" = --setenv ] && export "$2=$3"; shift; done; shift
exec unshare --mount --pid --ipc --fork -- sh -c 'mount -t proc proc /proc; mount -t tmpfs tmpfs /mnt; "$@" & wait' sh "$@"
"""


class Work:
    def __init__(self, runner: ProcessRunner, running: ProcessHandle, order: ProcessSpec) -> None:
        self.runner, self.running, self.order = runner, running, order

    async def enter(self, *argv: str, window: PtySize | None = None, **more: Any) -> ExecSession:
        return await self.runner.start_exec(self.running, self.order._replace(argv=argv, **more), window=window)

    async def output(
        self, *argv: str, fed: bytes = b"", window: PtySize | None = None, **more: Any
    ) -> tuple[str, str, ExitStatus]:
        session = await self.enter(*argv, window=window, **more)
        try:
            await session.write(fed)
            session.close_input()
            outputs = {"stdout": b"", "stderr": b""}
            async with asyncio.timeout(20):
                while (output := await session.read()) is not None:
                    outputs[output.stream] += output.data
                return outputs["stdout"].decode(), outputs["stderr"].decode(), await session.wait()
        finally:
            await session.close()


@asynccontextmanager
async def running_work(place: Path, **more: Any) -> AsyncIterator[Work]:
    groups = f"remit-tests/{os.getpid()}-{place.name}"
    runner = ProcessRunner(BootClock(), parent=groups)
    order = ProcessSpec(FOREVER, ENV, directory=place, group="work.1")._replace(**more)
    running = await runner.start(order)
    try:
        yield Work(runner, running, order)
    finally:
        await runner.stop(running, grace_ms=0)
        assert runner.live_groups() == ()
        remove_groups(groups)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def require_cgroups(work: Work) -> None:
    if "memory" not in work.runner.isolation_support().controllers:
        pytest.skip(f"no cgroups here: {work.runner.isolation_support().reason}")


def test_streams_are_separate_and_arguments_are_not_parsed_by_shell(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_work(tmp_path) as work:
            out, err, ended = await work.output("sh", "-c", "pwd; echo $MODE; echo wrong >&2; exit 7")
            assert (out, err, ended) == (f"{tmp_path}\nlive\n", "wrong\n", ExitStatus(code=7))
            out, _, _ = await work.output("printf", "%s|", ";$(id)", "`id`", "a\nb", "")
            assert out == ";$(id)|`id`|a\nb||"
            data = os.urandom(3 * MIB)
            session = await work.enter("sha256sum")
            await session.write(data)
            session.close_input()
            output = await session.read()
            assert output is not None
            assert output.data.endswith(b"-\n")
            await session.close()

    run(scenario)


def test_environment_descriptors_and_signal_masks_are_not_inherited(tmp_path: Path) -> None:
    async def scenario() -> None:
        os.environ["REMIT_TESTS_SECRET"] = "ours"
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        try:
            async with running_work(tmp_path) as work:
                out, _, _ = await work.output(
                    "sh", "-c", "cat /proc/$$/environ | tr '\\0' '\\n'; ls /proc/$$/fd | tr '\\n' ' '"
                )
                assert sorted(out.splitlines()[:-1]) == sorted([*(f"{k}={v}" for k, v in ENV.items())])
                assert set(out.splitlines()[-1].split()) <= {"0", "1", "2", "3"}
                out, _, _ = await work.output("sh", "-c", "grep -E 'SigIgn|SigBlk' /proc/self/status")
                # Two signals belong to the C library: the parent of these tests may have them ignored, which cannot be changed.
                own = 1 << 31 | 1 << 32
                assert [int(mask, 16) & ~own for mask in re.findall(r"[0-9a-f]{16}", out)] == [0, 0]
        finally:
            del os.environ["REMIT_TESTS_SECRET"]
            os.close(reader)
            os.close(writer)

    run(scenario)


def test_terminal_can_be_resized_and_interrupted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_work(tmp_path) as work:
            session = await work.enter("sh", window=PtySize(30, 100))
            outputs = b""

            async def wait_for(text: bytes) -> None:
                nonlocal outputs
                async with asyncio.timeout(20):
                    while text not in outputs:
                        output = await session.read()
                        assert output is not None, outputs
                        outputs += output.data

            await session.write(b"test -t 0 && stty size\n")
            await wait_for(b"30 100")
            session.resize(PtySize(44, 120))
            await session.write(b"stty size\n")
            await wait_for(b"44 120")
            await session.write(b"sleep 100\n")
            await wait_for(b"sleep 100\r\n")
            await asyncio.sleep(0.3)
            await session.write(b"\x03")
            await session.write(b"echo it was $?\n")
            await wait_for(b"it was 130")
            session.close_input()  # like the key for end of input
            async with asyncio.timeout(20):
                assert (await session.wait()).code is not None
            await session.close()

    run(scenario)


def test_session_counts_against_work_limits_and_is_ended_separately(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_work(tmp_path, limits=Limits(memory_bytes=64 * MIB, pids=64)) as work:
            require_cgroups(work)
            session = await work.enter(
                "sh", "-c", "setsid sleep 300 & setsid sh -c 'setsid sleep 300 & sleep 300' & echo up; sleep 300"
            )
            assert await session.read() is not None
            await asyncio.sleep(0.2)
            assert work.runner.usage(work.running).pids >= 6
            await session.close()
            assert len(work.runner._members(work.running)) <= 2, "the work itself and its own child"
            assert work.runner.is_alive(work.running)
            greedy = "import time; held = bytearray(b'x') * (256 << 20); time.sleep(300)"
            _, _, ended = await work.output(shutil.which("python3") or "python3", "-c", greedy)
            assert ended == ExitStatus(signal=9), "a session over the work's limit is killed too"

    run(scenario)


def test_killed_background_process_holds_no_stream_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_work(tmp_path) as work:
            require_cgroups(work)
            session = await work.enter("sh", "-c", "sleep 300 & echo last words")
            async with asyncio.timeout(20):
                assert await session.wait() == ExitStatus(code=0)
                await session.kill_all()
                output = await session.read()
                assert output is not None
                assert output.data == b"last words\n"
                assert await session.read() is None
            await session.close()

    run(scenario)


def test_blocked_writer_is_released_when_session_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_work(tmp_path) as work:
            session = await work.enter("sleep", "300")
            async with asyncio.TaskGroup() as group, asyncio.timeout(20):
                feeding = group.create_task(session.write(bytes(10 * MIB)))
                await asyncio.sleep(0.2)
                assert not feeding.done()
                await session.close()

    run(scenario)


@as_root
def test_session_runs_as_work_user_who_owns_its_terminal(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Path("/")
        async with running_work(tmp_path, user="nobody", directory=place) as work:
            out, _, _ = await work.output("sh", "-c", "id -un; id -u; stat -c %U $(tty); echo x > $(tty)", window=PtySize())
            assert out.split()[::2] == ["nobody", "nobody"]
            with pytest.raises(NotStarted, match="directory"):
                await work.enter("true", directory=tmp_path / "no")

    run(scenario)


@as_root
def test_session_runs_in_sandbox_of_work_without_capabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bin" / "bwrap"
    stand_in.parent.mkdir()
    stand_in.write_text(LIKE_BWRAP)
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")

    async def scenario() -> None:
        async with running_work(
            tmp_path, sandbox="bwrap", argv=("sh", "-c", "echo inside > /mnt/mark; exec sleep 300")
        ) as work:
            async with asyncio.timeout(20):
                while True:
                    try:
                        out, _, ended = await work.output(
                            "sh", "-c", "cat /mnt/mark; echo $$; grep -E 'CapEff|CapBnd|NoNew' /proc/self/status; exit 5"
                        )
                        if out.startswith("inside"):
                            break
                    except NotStarted:  # the sandbox is still being created
                        pass
                    await asyncio.sleep(0.05)
            lines = out.split()
            assert ended == ExitStatus(code=5)
            assert int(lines[1]) < 1_000, "a pid of the sandbox's namespace"
            assert lines[3::2] == ["0" * 16, "0" * 16, "1"]
            assert not os.path.exists("/mnt/mark")  # noqa: PTH110, ASYNC240
            out, _, ended = await work.output("sh", "-c", "tty >&2; kill -9 $$", window=PtySize())
            assert ended == ExitStatus(signal=9)
            session = await work.enter("sh", "-c", "trap '' TERM; echo deaf; read line; exit 6")
            assert (await session.read() or CommandOutput("stderr", b"")).data == b"deaf\n"
            assert isinstance(session, ProcessExecSession)
            os.kill(session.pid, signal.SIGTERM)  # as the whole group gets it
            await session.write(b"go\n")
            assert await session.wait() == ExitStatus(code=6), "its own exit code is reported"
            await session.close()
            session = await work.enter("sh", "-c", "sleep 300 & sleep 300")
            await asyncio.sleep(0.2)
            await session.close()
            assert work.runner.is_alive(work.running)

    run(scenario)
