"""Simulated process runner, host inventory, ports, probes.

The machine's own record: no agent's word is taken for it.

A program is what its argument list says: `work 30000 0` runs for thirty seconds and exits with 0, `work - 0` runs until it is
asked to end, and a fourth word is how many ms it takes to end then (`-`: it does not listen, and has to be killed). Further
words, in any order: `listen=PORT` answers there; `ready=MS` answers well only so long after its start, and `sick=MS` no longer
after that; `memory=BYTES` is what it takes once it is ready (above its limit it is killed for that), and `cpu=MILLI`. With
`echo=1`, beside a run, it writes what it is fed, and ends with its code at the end of that.

As its programs' words say: see runners.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from remit.simulate.world.event_loop import SimLoop, Unit
from remit.world.interfaces import (
    Clock,
    Confinement,
    Ended,
    Equipment,
    NoPorts,
    NotStarted,
    Order,
    Probed,
    Running,
    Usage,
    WorldError,
    check_group,
    check_in_time,
    check_order,
)
from remit.world.process.exec_session import Said, Window

SIGTERM: Final = 15
SIGKILL: Final = 9
PROGRAM: Final = "work"
USERS: Final = frozenset({"", "root", "nobody"})
"""Who there is on every simulated machine."""
CONFINEMENT: Final = Confinement("v2", ("cpu", "kill", "memory", "pids"), "", sandbox=True)


class Program(NamedTuple):
    """`runs_ms` None: for ever. `stop_ms`: how long it takes to end when asked to; None if it does not listen."""

    runs_ms: int | None
    code: int = 0
    stop_ms: int | None = 0
    listen: int | None = None
    ready: int = 0
    sick: int | None = None
    memory: int = 0
    cpu: int = 0
    echo: int = 0

    def argv(self) -> tuple[str, ...]:
        runs = "-" if self.runs_ms is None else str(self.runs_ms)
        more = [f"{name}={value}" for name, value in self._asdict().items() if name in _WORDS and value]
        return (PROGRAM, runs, str(self.code), "-" if self.stop_ms is None else str(self.stop_ms), *more)

    def well(self, age_ms: int) -> bool:
        """Does it answer well at this age?"""
        return age_ms >= self.ready and (self.sick is None or age_ms < self.sick)


_WORDS: Final = ("listen", "ready", "sick", "memory", "cpu", "echo")
_USE: Final = f"use {PROGRAM} MS CODE STOP_MS"


def program_of(argv: tuple[str, ...]) -> Program:
    plain = tuple(word for word in argv if "=" not in word)
    if not argv or plain[:1] != (PROGRAM,) or len(plain) > 4:
        raise NotStarted(f"there is no program {argv[0] if argv else '(none)'!r} here", _USE)
    words = [*plain[1:], *("0", "0", "0")[len(plain) - 1 :]]
    pairs = [word.partition("=") for word in argv if "=" in word]
    numbers = [*(word for word in words if word != "-"), *(value for _, _, value in pairs)]
    known = all(name in _WORDS for name, _, _ in pairs)
    if words[1] == "-" or not known or not all(word.isascii() and word.isdigit() for word in numbers):
        raise NotStarted(f"there is no {' '.join(argv)!r} here", _USE)
    runs, code, stop = (None if word == "-" else int(word) for word in words)
    return Program(runs, code or 0, stop)._replace(**{name: int(value) for name, _, value in pairs})


class Run(NamedTuple):
    """One process as the machine knows it. `ended` is set when it is gone. `starter`: whose child it is."""

    running: Running
    order: Order
    program: Program
    ended: asyncio.Future[Ended]
    began_s: float = 0.0
    starter: Unit | None = None


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

    def start(self, order: Order, starter: Unit | None = None) -> Running:
        program = program_of(order.argv)
        if order.user not in USERS:
            raise NotStarted(f"there is no user {order.user!r} on this machine", "make that user, or name another")
        if order.group and self.inside(order.group) is not None:
            raise NotStarted(f"in the group {order.group} somebody still runs", "end that first: a name is run once at a time")
        self._pids += 1
        running = Running(self._pids, f"{self._loop.time():.6f}", f"{order.group}#{self._pids}" if order.group else "")
        run = Run(running, order, program, self._loop.create_future(), self._loop.time(), starter)
        self.runs[running.pid] = run
        self._recorder.started(self._name, order, running.pid)
        if program.runs_ms is not None:
            self._in(program.runs_ms, running, Ended(code=program.code))
        if 0 < order.limits.memory_bytes < program.memory:
            self._in(max(1, program.ready), running, Ended(signal=SIGKILL, oom=True))
        return running

    def inside(self, group: str) -> Run | None:
        return next((run for run in self.runs.values() if run.order.group == group), None)

    def age_ms(self, run: Run) -> int:
        return int((self._loop.time() - run.began_s) * 1000)

    def starter_ended(self, unit: Unit) -> None:
        """What is tied to its starter goes with it."""
        for run in tuple(self.runs.values()):
            if run.starter is unit and run.order.with_parent:
                self._end(run.running, Ended(signal=SIGKILL))

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


class SimSession:
    """A command beside a run: the twin of `world.entering.Entered`."""

    def __init__(self, program: Program, run: Run) -> None:
        self._program = program
        self._loop = asyncio.get_running_loop()
        self._said: deque[bytes] = deque()
        self._moved = asyncio.Event()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        if program.runs_ms is not None and not program.echo:
            self._loop.call_later(program.runs_ms / 1000, self._end, Ended(code=program.code))
        run.ended.add_done_callback(lambda _: self._end(Ended(signal=SIGKILL)))

    async def read(self) -> Said | None:
        while not self._said:
            if self._ended.done():
                return None
            self._moved.clear()
            await self._moved.wait()
        return Said("stdout", self._said.popleft())

    async def feed(self, data: bytes, /) -> None:
        if self._program.echo and data and not self._ended.done():
            self._said.append(data)
            self._moved.set()

    def end_input(self) -> None:
        if self._program.echo:
            self._end(Ended(code=self._program.code))

    def resize(self, window: Window, /) -> None:
        """Nothing here minds how large it is."""

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    async def end(self) -> None:
        self._end(Ended(signal=SIGKILL))

    async def close(self) -> None:
        await self.end()
        self._said.clear()

    def _end(self, ended: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)
            self._moved.set()


class SimRunner:
    """One process's hand on its machine: the twin of `world.runner.ProcessRunner`. A dead hand moves nothing."""

    def __init__(self, machinery: Machinery, unit: Unit, pause: Callable[[], float], clock: Clock) -> None:
        self._machinery = machinery
        self._clock = clock
        self._unit = unit
        self._pause = pause
        self._own: dict[Running, Run] = {}
        """Its children: only their parent learns how they ended."""

    async def start(self, order: Order, /) -> Running:
        check_order(order)
        await asyncio.sleep(self._pause())
        self._check_alive()
        check_in_time(order, self._clock.now_ms())
        running = self._machinery.start(order, self._unit)
        self._own[running] = self._machinery.runs[running.pid]
        return running

    async def wait(self, running: Running, /) -> Ended:
        own, run = self._own.get(running), self._machinery.find(running)
        if own is not None:
            return await asyncio.shield(own.ended)
        return Ended(oom=(await asyncio.shield(run.ended)).oom) if run is not None else Ended()

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

    async def enter(self, running: Running, order: Order, /, *, window: Window | None = None) -> SimSession:
        check_order(order)
        await asyncio.sleep(self._pause())
        self._check_alive()
        run = self._machinery.find(running)
        if run is None:
            raise NotStarted("what it is to run beside has ended", "look whether it runs, and ask again")
        return SimSession(program_of(order.argv), run)

    def usage(self, running: Running, /) -> Usage:
        run = self._machinery.find(running)
        if run is None:
            return Usage()
        age_ms = self._machinery.age_ms(run)
        memory = run.program.memory if age_ms >= run.program.ready else 0
        return Usage(age_ms * run.program.cpu // 1000, memory, 1)

    def confinement(self) -> Confinement:
        return CONFINEMENT

    def leftovers(self) -> tuple[str, ...]:
        return tuple(sorted({run.order.group for run in self._machinery.runs.values() if run.order.group}))

    async def clear(self, group: str, /) -> None:
        check_group(group)
        await asyncio.sleep(self._pause())
        self._check_alive()
        run = self._machinery.inside(group)
        if run is not None:
            self._machinery.terminate(run.running, self._unit.name)
            self._machinery.kill(run.running)

    def _check_alive(self) -> None:
        if self._unit.dead:
            raise WorldError("this process was killed", "start it anew")


CPU_MILLI: Final = 4_000
MEMORY_BYTES: Final = 8 << 30
PORTS: Final = range(20_000, 60_000)


class SimHost:
    """The twin of `world.machine.ThisHost`: every machine has the same."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock

    def equipment(self) -> Equipment:
        return Equipment(self._name, "simulated", self._clock.boot(), CPU_MILLI, MEMORY_BYTES)


class SimPorts:
    """The twin of `world.machine.KernelPorts`; one for all processes of a machine: one after another, and round again."""

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery
        self._next = 0

    async def free(self, count: int, /) -> list[int]:
        if count < 0:
            raise ValueError(f"{count} ports")
        taken = {run.program.listen for run in self._machinery.runs.values()}
        found: list[int] = []
        for _ in range(len(PORTS)):
            if len(found) == count:
                break
            port = PORTS[self._next % len(PORTS)]
            self._next += 1
            if port not in taken:
                found.append(port)
        if len(found) < count:
            raise NoPorts(f"{len(found)} of {count} ports were free", "ask for fewer at a time")
        return found


class SimProber:
    """The twin of `world.probes.SocketProber`. It reaches what listens on its own machine, whatever the host is called."""

    def __init__(self, machinery: Machinery, pause: Callable[[], float]) -> None:
        self._machinery, self._pause = machinery, pause

    async def http(self, host: str, port: int, path: str, /, *, timeout_ms: int) -> Probed:
        run = await self._reached(port)
        if run is None:
            return Probed(ok=False, detail=f"port {port} cannot be reached (connection refused)")
        well = run.program.well(self._machinery.age_ms(run))
        return Probed(well, "status 200 OK" if well else "status 503 Service Unavailable")

    async def tcp(self, host: str, port: int, /, *, timeout_ms: int) -> Probed:
        run = await self._reached(port)
        if run is None or not run.program.well(self._machinery.age_ms(run)):
            return Probed(ok=False, detail=f"port {port} cannot be reached (connection refused)")
        return Probed(ok=True, detail=f"port {port} takes connections")

    async def _reached(self, port: int) -> Run | None:
        await asyncio.sleep(self._pause())
        return next((run for run in self._machinery.runs.values() if run.program.listen == port), None)
