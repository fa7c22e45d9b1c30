"""What runs on a simulated machine, and since when? The machine's own record: no agent's word is taken for it.

A program is what its argument list says: `work 30000 0` runs for thirty seconds and exits with 0, `work - 0` runs until it is
asked to end, and a fourth word is how many ms it takes to end then (`-`: it does not listen, and has to be killed).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from remit.simulate.loop import SimLoop, Unit
from remit.world.promises import Ended, NotStarted, Order, Running, WorldError

SIGTERM: Final = 15
SIGKILL: Final = 9
PROGRAM: Final = "work"


class Program(NamedTuple):
    """`runs_ms` None: for ever. `stop_ms`: how long it takes to end when asked to; None if it does not listen."""

    runs_ms: int | None
    code: int = 0
    stop_ms: int | None = 0

    def argv(self) -> tuple[str, ...]:
        runs = "-" if self.runs_ms is None else str(self.runs_ms)
        return (PROGRAM, runs, str(self.code), "-" if self.stop_ms is None else str(self.stop_ms))


def program_of(argv: tuple[str, ...]) -> Program:
    if not argv or argv[0] != PROGRAM or len(argv) > 4:
        raise NotStarted(f"there is no program {argv[0] if argv else '(none)'!r} here", f"use {PROGRAM} MS CODE STOP_MS")
    words = [*argv[1:], *("0", "0", "0")[len(argv) - 1 :]]
    if words[1] == "-" or not all(word == "-" or (word.isascii() and word.isdigit()) for word in words):
        raise NotStarted(f"there is no {' '.join(argv)!r} here", f"use {PROGRAM} MS CODE STOP_MS")
    runs, code, stop = (None if word == "-" else int(word) for word in words)
    return Program(runs, code or 0, stop)


class Run(NamedTuple):
    """One process as the machine knows it. `ended` is set when it is gone."""

    running: Running
    order: Order
    program: Program
    ended: asyncio.Future[Ended]


class Recorder(Protocol):
    """Who writes down what ran when. What was told to end, by another process of its machine, is killed if it does not."""

    def started(self, machine: str, order: Order, pid: int) -> None: ...

    def told_to_end(self, machine: str, pid: int, by: str) -> None: ...

    def ended(self, machine: str, pid: int) -> None: ...


class Machinery:
    """All that runs on one machine. It is the kernel's, and goes on when those who started it are gone."""

    def __init__(self, loop: SimLoop, name: str, recorder: Recorder) -> None:
        self.runs: dict[int, Run] = {}
        self._loop = loop
        self._name = name
        self._recorder = recorder
        self._unit = loop.unit(f"{name}/kernel")
        self._pids = 100

    def start(self, order: Order) -> Running:
        program = program_of(order.argv)
        self._pids += 1
        running = Running(self._pids, f"{self._loop.time():.6f}")
        self.runs[running.pid] = Run(running, order, program, self._loop.create_future())
        self._recorder.started(self._name, order, running.pid)
        if program.runs_ms is not None:
            self._in(program.runs_ms, running, Ended(code=program.code))
        return running

    def terminate(self, running: Running, by: str) -> None:
        run = self.find(running)
        if run is None:
            return
        self._recorder.told_to_end(self._name, running.pid, by)
        if run.program.stop_ms is not None:
            self._in(run.program.stop_ms, running, Ended(signal=SIGTERM))

    def kill(self, running: Running) -> None:
        self._end(running, Ended(signal=SIGKILL))

    def find(self, running: Running) -> Run | None:
        run = self.runs.get(running.pid)
        return run if run is not None and run.running == running else None

    def power_cut(self) -> None:
        """Everything ends at once."""
        for run in tuple(self.runs.values()):
            self._end(run.running, Ended(signal=SIGKILL))

    def _in(self, ms: int, running: Running, ended: Ended) -> None:
        self._loop.call_later(ms / 1000, self._end, running, ended, context=self._unit.context)

    def _end(self, running: Running, ended: Ended) -> None:
        run = self.find(running)
        if run is None:
            return
        del self.runs[running.pid]
        self._recorder.ended(self._name, running.pid)
        run.ended.set_result(ended)


class SimRunner:
    """One process's hand on its machine: the twin of `world.runner.ProcessRunner`. A dead hand moves nothing."""

    def __init__(self, machinery: Machinery, unit: Unit, pause: Callable[[], float]) -> None:
        self._machinery = machinery
        self._unit = unit
        self._pause = pause
        self._own: dict[Running, Run] = {}
        """Its children: only their parent learns how they ended."""

    async def start(self, order: Order, /) -> Running:
        await asyncio.sleep(self._pause())
        self._check_alive()
        running = self._machinery.start(order)
        self._own[running] = self._machinery.runs[running.pid]
        return running

    async def wait(self, running: Running, /) -> Ended:
        own, run = self._own.get(running), self._machinery.find(running)
        if own is not None:
            return await asyncio.shield(own.ended)
        if run is not None:
            await asyncio.shield(run.ended)
        return Ended()

    def alive(self, running: Running, /) -> bool:
        return self._machinery.find(running) is not None

    async def stop(self, running: Running, /, *, grace_ms: int) -> None:
        self._check_alive()
        run = self._machinery.find(running)
        if run is None:
            return
        self._machinery.terminate(running, self._unit.name)
        try:
            async with asyncio.timeout(grace_ms / 1000):  # noqa: TID251 - the kernel's own time
                await asyncio.shield(run.ended)
        except TimeoutError:
            self._check_alive()
            self._machinery.kill(running)

    def _check_alive(self) -> None:
        if self._unit.dead:
            raise WorldError("this process was killed", "start it anew")
