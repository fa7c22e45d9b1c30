"""Which processes does a benchmark run, and what did each cost? Children by their handles, CPU time from /proc. No aims."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process  # noqa: TID251 - children on pipes, which must not outlive us: no work
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from remit.world.clock import BootClock
from remit.world.procfs import member

START_MS_MAX: Final = 60_000
END_MS_MAX: Final = 20_000

CLOCK: Final = BootClock()


class PartFailed(Exception):
    """A process of the benchmark ended, or did not say what was awaited."""


class Part:
    """One process. It is told to end by SIGTERM or the end of its stdin, and is killed if it does not."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """What it has taken since it began, all its threads, and children that have ended."""
        found = member(self.pid)
        if found is None:
            raise self._failed("is gone")
        return found.cpu_ms / 1000

    async def line(self, within_ms: int = START_MS_MAX) -> str:
        """The next line that it writes on stdout."""
        if self._process.stdout is None:
            raise self._failed("has no stdout")
        try:
            async with CLOCK.timeout_ms(within_ms):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise self._failed(f"said nothing for {within_ms // 1000} s") from None
        if not line:
            raise self._failed("ended")
        return line.decode().rstrip("\n")

    def tell(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line.encode() + b"\n")

    async def end(self) -> None:
        process = self._process
        if process.returncode is None:
            process.terminate()
            try:
                async with CLOCK.timeout_ms(END_MS_MAX):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _failed(self, what: str) -> PartFailed:
        said = self._log.read_text(errors="replace").splitlines()[-5:] if self._log.exists() else []
        return PartFailed(f"{self.name} (process {self.pid}) {what}: {' / '.join(said) or 'it wrote nothing'}")


class Parts:
    """All processes of one run; `directory` has what each wrote on stderr."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.by_name: dict[str, Part] = {}

    async def start(self, name: str, *words: str, module: str = "remit.cli") -> Part:
        log = self._directory / f"{name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(  # noqa: TID251 - as above
                sys.executable, "-m", module, *words, stdin=PIPE, stdout=PIPE, stderr=errors
            )
        part = self.by_name[name] = Part(name, process, log)
        self._stack.push_async_callback(part.end)
        return part

    def cpu_s(self) -> dict[str, float]:
        return {name: part.cpu_s() for name, part in self.by_name.items()}


@asynccontextmanager
async def parts(directory: Path) -> AsyncIterator[Parts]:
    """Whatever happens, none of them is left."""
    async with AsyncExitStack() as stack:
        yield Parts(directory, stack)


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds between two looks; of one that began meanwhile, all."""
    return {name: after[name] - before.get(name, 0.0) for name in after}


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def micros(cpu: Mapping[str, float], count: int, prefix: str = "") -> dict[str, Any]:
    """CPU microseconds of each process for each of `count` things."""
    return {f"{prefix}{name}_us": seconds * 1e6 / max(1, count) for name, seconds in cpu.items()}
