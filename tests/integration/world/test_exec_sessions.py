"""What is a command beside real work like? Its user, cgroup, terminal and namespaces are the work's; nothing of it is left."""

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
from remit.world.interfaces import (
    CommandOutput,
    ExecSession,
    ExitStatus,
    Limits,
    NotStarted,
    ProcessHandle,
    ProcessSpec,
    PtySize,
)
from remit.world.process.exec_session import ProcessExecSession
from remit.world.process.runner import ProcessRunner
from tests.contracts.worlds import remove_groups

pytestmark = pytest.mark.smoke

ENV = {"PATH": os.defpath, "MODE": "live"}
FOREVER = ("/bin/sh", "-c", "while :; do sleep 0.1; done")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts work as another user")
MIB = 1 << 20

# Stands in for bubblewrap, which is not everywhere where tests run: the same namespaces, and the same two processes of its own.
LIKE_BWRAP = """#!/bin/sh
while [ "$1" != "--" ]; do [ "$1" = --setenv ] && export "$2=$3"; shift; done; shift
exec unshare --mount --pid --ipc --fork -- sh -c 'mount -t proc proc /proc; mount -t tmpfs tmpfs /mnt; "$@" & wait' sh "$@"
"""


class Work:
    def __init__(self, runner: ProcessRunner, running: ProcessHandle, order: ProcessSpec) -> None:
        self.runner, self.running, self.order = runner, running, order

    async def enter(self, *argv: str, window: PtySize | None = None, **more: Any) -> ExecSession:
        return await self.runner.start_exec(self.running, self.order._replace(argv=argv, **more), window=window)

    async def said(
        self, *argv: str, fed: bytes = b"", window: PtySize | None = None, **more: Any
    ) -> tuple[str, str, ExitStatus]:
        session = await self.enter(*argv, window=window, **more)
        try:
            await session.write(fed)
            session.close_input()
            told = {"stdout": b"", "stderr": b""}
            async with asyncio.timeout(20):
                while (said := await session.read()) is not None:
                    told[said.stream] += said.data
                return told["stdout"].decode(), told["stderr"].decode(), await session.wait()
        finally:
            await session.close()


@asynccontextmanager
async def working(place: Path, **more: Any) -> AsyncIterator[Work]:
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


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


def grouped(work: Work) -> None:
    if "memory" not in work.runner.isolation_support().controllers:
        pytest.skip(f"no cgroups here: {work.runner.isolation_support().reason}")


def test_its_streams_are_apart_and_its_words_are_never_read_by_a_shell(tmp_path: Path) -> None:
    async def scene() -> None:
        async with working(tmp_path) as work:
            out, err, ended = await work.said("sh", "-c", "pwd; echo $MODE; echo wrong >&2; exit 7")
            assert (out, err, ended) == (f"{tmp_path}\nlive\n", "wrong\n", ExitStatus(code=7))
            out, _, _ = await work.said("printf", "%s|", ";$(id)", "`id`", "a\nb", "")
            assert out == ";$(id)|`id`|a\nb||"
            data = os.urandom(3 * MIB)
            session = await work.enter("sha256sum")
            await session.write(data)
            session.close_input()
            said = await session.read()
            assert said is not None
            assert said.data.endswith(b"-\n")
            await session.close()

    play(scene)


def test_nothing_of_ours_is_inherited(tmp_path: Path) -> None:
    async def scene() -> None:
        os.environ["REMIT_TESTS_SECRET"] = "ours"
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        try:
            async with working(tmp_path) as work:
                out, _, _ = await work.said("sh", "-c", "cat /proc/$$/environ | tr '\\0' '\\n'; ls /proc/$$/fd | tr '\\n' ' '")
                assert sorted(out.splitlines()[:-1]) == sorted([*(f"{k}={v}" for k, v in ENV.items())])
                assert set(out.splitlines()[-1].split()) <= {"0", "1", "2", "3"}
                out, _, _ = await work.said("sh", "-c", "grep -E 'SigIgn|SigBlk' /proc/self/status")
                # Two are the C library's own: whoever started these tests may have them ignored, and nobody can change that.
                own = 1 << 31 | 1 << 32
                assert [int(mask, 16) & ~own for mask in re.findall(r"[0-9a-f]{16}", out)] == [0, 0]
        finally:
            del os.environ["REMIT_TESTS_SECRET"]
            os.close(reader)
            os.close(writer)

    play(scene)


def test_a_terminal_has_a_size_that_changes_and_keys_that_interrupt(tmp_path: Path) -> None:
    async def scene() -> None:
        async with working(tmp_path) as work:
            session = await work.enter("sh", window=PtySize(30, 100))
            told = b""

            async def until(word: bytes) -> None:
                nonlocal told
                async with asyncio.timeout(20):
                    while word not in told:
                        said = await session.read()
                        assert said is not None, told
                        told += said.data

            await session.write(b"test -t 0 && stty size\n")
            await until(b"30 100")
            session.resize(PtySize(44, 120))
            await session.write(b"stty size\n")
            await until(b"44 120")
            await session.write(b"sleep 100\n")
            await until(b"sleep 100\r\n")
            await asyncio.sleep(0.3)
            await session.write(b"\x03")
            await session.write(b"echo it was $?\n")
            await until(b"it was 130")
            session.close_input()  # as the key for that does
            async with asyncio.timeout(20):
                assert (await session.wait()).code is not None
            await session.close()

    play(scene)


def test_it_counts_against_the_limits_of_the_work_and_is_ended_apart_from_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with working(tmp_path, limits=Limits(memory_bytes=64 * MIB, pids=64)) as work:
            grouped(work)
            session = await work.enter(
                "sh", "-c", "setsid sleep 300 & setsid sh -c 'setsid sleep 300 & sleep 300' & echo up; sleep 300"
            )
            assert await session.read() is not None
            await asyncio.sleep(0.2)
            assert work.runner.usage(work.running).pids >= 6
            await session.close()
            assert len(work.runner._members(work.running)) <= 2, "the work itself, and its own child"
            assert work.runner.is_alive(work.running)
            greedy = "import time; held = bytearray(b'x') * (256 << 20); time.sleep(300)"
            _, _, ended = await work.said(shutil.which("python3") or "python3", "-c", greedy)
            assert ended == ExitStatus(signal=9), "what is over the work's limit is killed, in a session too"

    play(scene)


def test_what_a_command_leaves_behind_holds_no_stream_open_once_it_is_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        async with working(tmp_path) as work:
            grouped(work)
            session = await work.enter("sh", "-c", "sleep 300 & echo last words")
            async with asyncio.timeout(20):
                assert await session.wait() == ExitStatus(code=0)
                await session.kill_all()
                said = await session.read()
                assert said is not None
                assert said.data == b"last words\n"
                assert await session.read() is None
            await session.close()

    play(scene)


def test_a_feeder_whose_command_never_reads_is_let_go_when_it_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async with working(tmp_path) as work:
            session = await work.enter("sleep", "300")
            async with asyncio.TaskGroup() as group, asyncio.timeout(20):
                feeding = group.create_task(session.write(bytes(10 * MIB)))
                await asyncio.sleep(0.2)
                assert not feeding.done()
                await session.close()

    play(scene)


@as_root
def test_it_is_the_works_user_who_runs_it_and_owns_its_terminal(tmp_path: Path) -> None:
    async def scene() -> None:
        place = Path("/")
        async with working(tmp_path, user="nobody", directory=place) as work:
            out, _, _ = await work.said("sh", "-c", "id -un; id -u; stat -c %U $(tty); echo x > $(tty)", window=PtySize())
            assert out.split()[::2] == ["nobody", "nobody"]
            with pytest.raises(NotStarted, match="directory"):
                await work.enter("true", directory=tmp_path / "no")

    play(scene)


@as_root
def test_it_is_in_the_sandbox_of_the_work_and_has_no_rights_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bin" / "bwrap"
    stand_in.parent.mkdir()
    stand_in.write_text(LIKE_BWRAP)
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")

    async def scene() -> None:
        async with working(tmp_path, sandbox="bwrap", argv=("sh", "-c", "echo inside > /mnt/mark; exec sleep 300")) as work:
            async with asyncio.timeout(20):
                while True:
                    try:
                        out, _, ended = await work.said(
                            "sh", "-c", "cat /mnt/mark; echo $$; grep -E 'CapEff|CapBnd|NoNew' /proc/self/status; exit 5"
                        )
                        if out.startswith("inside"):
                            break
                    except NotStarted:  # its sandbox is only just being made
                        pass
                    await asyncio.sleep(0.05)
            lines = out.split()
            assert ended == ExitStatus(code=5)
            assert int(lines[1]) < 1_000, "a number of the sandbox's own space"
            assert lines[3::2] == ["0" * 16, "0" * 16, "1"]
            assert not os.path.exists("/mnt/mark")  # noqa: PTH110, ASYNC240
            out, _, ended = await work.said("sh", "-c", "tty >&2; kill -9 $$", window=PtySize())
            assert ended == ExitStatus(signal=9)
            session = await work.enter("sh", "-c", "trap '' TERM; echo deaf; read line; exit 6")
            assert (await session.read() or CommandOutput("stderr", b"")).data == b"deaf\n"
            assert isinstance(session, ProcessExecSession)
            os.kill(session.pid, signal.SIGTERM)  # as all of the run is told
            await session.write(b"go\n")
            assert await session.wait() == ExitStatus(code=6), "told by its own end"
            await session.close()
            session = await work.enter("sh", "-c", "sleep 300 & sleep 300")
            await asyncio.sleep(0.2)
            await session.close()
            assert work.runner.is_alive(work.running)

    play(scene)
