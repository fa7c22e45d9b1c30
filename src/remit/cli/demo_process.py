"""How is the authority's process started, killed and stopped? One child, by its handle; what it serves is not known here."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process  # noqa: TID251 - a child on two pipes, which must not outlive us: no work
from pathlib import Path
from typing import Final

import msgspec

from remit.cli.demo_endpoint import DemoFailed
from remit.cli.demo_server import Ready
from remit.world.promises import Clock

START_MS_MAX: Final = 30_000
STOP_MS_MAX: Final = 10_000
LOG_LINES: Final = 5


class Served:
    """Made by `start`, which returns once the authority has taken over and listens."""

    def __init__(self, process: Process, ready: Ready) -> None:
        self._process = process
        self.ready = ready

    @classmethod
    async def start(cls, data: Path, socket: Path, clock: Clock) -> Served:
        log = socket.with_suffix(".log")
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(  # noqa: TID251 - as above
                sys.executable, "-m", "remit.cli.demo_server", str(data), str(socket), stdin=PIPE, stdout=PIPE, stderr=errors
            )
        try:
            ready = await _ready(process, log, clock)
        except BaseException:
            await _end(process)
            raise
        return cls(process, ready)

    def kill(self) -> None:
        """SIGKILL: the process gets no chance to finish, flush or say goodbye."""
        self._process.kill()

    async def gone(self) -> None:
        await self._process.wait()

    async def stop(self, clock: Clock) -> None:
        """Let it finish what it has begun and close its store."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with clock.timeout_ms(STOP_MS_MAX):
                code = await self._process.wait()
        except TimeoutError:
            raise DemoFailed(f"process {self._process.pid} did not stop; see what the machine is busy with") from None
        finally:
            await _end(self._process)
        if code:
            raise DemoFailed(f"process {self._process.pid} stopped with exit code {code}; please report it")

    async def end(self) -> None:
        """However things went: leave no process behind."""
        await _end(self._process)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _ready(process: Process, log: Path, clock: Clock) -> Ready:
    if process.stdout is None:
        raise DemoFailed("the authority's process has no stdout; please report it")
    try:
        async with clock.timeout_ms(START_MS_MAX):
            line = await process.stdout.readline()
    except TimeoutError:
        raise DemoFailed(f"no authority after {START_MS_MAX // 1000} s; try again on a quieter machine") from None
    if not line:
        raise DemoFailed(f"the authority's process ended at once: {_last_words(log)}; mend that, then try again")
    ready = msgspec.json.decode(line, type=Ready)
    if ready.failed:
        raise DemoFailed(f"the authority could not take over: {ready.failed}")
    return ready


def _last_words(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").split("\n")[-LOG_LINES:]).strip(" /") or "it said nothing"
