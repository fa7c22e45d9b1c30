"""Simulated process runner, host inventory, ports, probes.

The machine's own record of what ran and when goes to a `RunRecorder`; no report of an agent is used for it. A program is
described by its argument list:

    work RUN_MS CODE STOP_MS [NAME=NUMBER ...]

    RUN_MS       how long it runs; `-`: until it is stopped
    CODE         exit code
    STOP_MS      how long it takes to end after SIGTERM; `-`: it ignores SIGTERM and must be killed
    listen=PORT  accepts connections on this port
    ready=MS     probes succeed only after this long
    sick=MS      probes fail after this long
    memory=BYTES memory use once it is ready; above its limit it is killed (OOM)
    cpu=MILLI    CPU use
    echo=1       as a command inside a running process: writes back its input and exits at end of input
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from remit.simulate.world.event_loop import ExecutionUnit, SimLoop
from remit.world.interfaces import (
    Clock,
    ExitStatus,
    HostInventory,
    IsolationSupport,
    NoFreePorts,
    NotStarted,
    ProbeResult,
    ProcessHandle,
    ProcessSpec,
    Usage,
    WorldError,
    check_group_name,
    check_process_spec,
    check_start_deadline,
)
from remit.world.process.exec_session import CommandOutput, PtySize

SIGTERM: Final = 15
SIGKILL: Final = 9
PROGRAM: Final = "work"
USERS: Final = frozenset({"", "root", "nobody"})
"""Users that exist on every simulated machine."""
CONFINEMENT: Final = IsolationSupport("v2", ("cpu", "kill", "memory", "pids"), "", sandbox=True)


class SimProgram(NamedTuple):
    """A program and its behaviour. `runs_ms` None: runs until stopped. `stop_ms`: time to end after SIGTERM, None if it ignores
    SIGTERM.
    """

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
        options = [f"{name}={value}" for name, value in self._asdict().items() if name in _OPTIONS and value]
        return (PROGRAM, runs, str(self.code), "-" if self.stop_ms is None else str(self.stop_ms), *options)

    def is_healthy(self, age_ms: int) -> bool:
        """Whether probes succeed at this age."""
        return age_ms >= self.ready and (self.sick is None or age_ms < self.sick)


_OPTIONS: Final = ("listen", "ready", "sick", "memory", "cpu", "echo")
_USAGE: Final = f"use {PROGRAM} MS CODE STOP_MS"


def parse_program(argv: tuple[str, ...]) -> SimProgram:
    plain = tuple(argument for argument in argv if "=" not in argument)
    if not argv or plain[:1] != (PROGRAM,) or len(plain) > 4:
        raise NotStarted(f"no program {argv[0] if argv else '(none)'!r} on this machine", _USAGE)
    positional = [*plain[1:], *("0", "0", "0")[len(plain) - 1 :]]
    pairs = [argument.partition("=") for argument in argv if "=" in argument]
    numbers = [*(argument for argument in positional if argument != "-"), *(value for _, _, value in pairs)]
    known = all(name in _OPTIONS for name, _, _ in pairs)
    if positional[1] == "-" or not known or not all(argument.isascii() and argument.isdigit() for argument in numbers):
        raise NotStarted(f"invalid arguments {' '.join(argv)!r}", _USAGE)
    runs, code, stop = (None if argument == "-" else int(argument) for argument in positional)
    return SimProgram(runs, code or 0, stop)._replace(**{name: int(value) for name, _, value in pairs})


class ProgramRun(NamedTuple):
    """One process as the machine knows it. `ended` is set when it has ended; `starter` is the unit of its parent process."""

    running: ProcessHandle
    order: ProcessSpec
    program: SimProgram
    ended: asyncio.Future[ExitStatus]
    began_s: float = 0.0
    starter: ExecutionUnit | None = None


class RunRecorder(Protocol):
    """Receives the start, stop request and end of every process of all machines."""

    def program_started(self, machine: str, order: ProcessSpec, pid: int) -> None: ...

    def program_stop_requested(self, machine: str, pid: int, by: str) -> None: ...

    def program_ended(self, machine: str, pid: int) -> None: ...


class MachineProcesses:
    """All processes of one machine. They belong to the simulated kernel and continue when their starter has ended."""

    def __init__(self, loop: SimLoop, name: str, recorder: RunRecorder) -> None:
        self.runs: dict[int, ProgramRun] = {}
        self._loop = loop
        self._name = name
        self._recorder = recorder
        self._unit = loop.new_unit(f"{name}/kernel")
        self._pids = 100

    def start(self, order: ProcessSpec, starter: ExecutionUnit | None = None) -> ProcessHandle:
        program = parse_program(order.argv)
        if order.user not in USERS:
            raise NotStarted(f"user {order.user!r} does not exist on this machine", "create the user, or name another")
        if order.group and self.in_group(order.group) is not None:
            raise NotStarted(
                f"a process still runs in group {order.group}", "stop it first: a group runs one process at a time"
            )
        self._pids += 1
        running = ProcessHandle(self._pids, f"{self._loop.time():.6f}", f"{order.group}#{self._pids}" if order.group else "")
        run = ProgramRun(running, order, program, self._loop.create_future(), self._loop.time(), starter)
        self.runs[running.pid] = run
        self._recorder.program_started(self._name, order, running.pid)
        if program.runs_ms is not None:
            self._end_after(program.runs_ms, running, ExitStatus(code=program.code))
        if 0 < order.limits.memory_bytes < program.memory:
            self._end_after(max(1, program.ready), running, ExitStatus(signal=SIGKILL, oom=True))
        return running

    def in_group(self, group: str) -> ProgramRun | None:
        return next((run for run in self.runs.values() if run.order.group == group), None)

    def age_ms(self, run: ProgramRun) -> int:
        return int((self._loop.time() - run.began_s) * 1000)

    def starter_ended(self, unit: ExecutionUnit) -> None:
        """Kill the processes that are tied to their starter (`with_parent`)."""
        for run in tuple(self.runs.values()):
            if run.starter is unit and run.order.with_parent:
                self._end(run.running, ExitStatus(signal=SIGKILL))

    def terminate(self, running: ProcessHandle, by: str) -> None:
        run = self.find(running)
        if run is None:
            return
        self._recorder.program_stop_requested(self._name, running.pid, by)
        if run.program.stop_ms is not None:
            self._end_after(run.program.stop_ms, running, ExitStatus(signal=SIGTERM))

    def kill(self, running: ProcessHandle) -> None:
        self._end(running, ExitStatus(signal=SIGKILL))

    def find(self, running: ProcessHandle) -> ProgramRun | None:
        run = self.runs.get(running.pid)
        return run if run is not None and run.running == running else None

    def power_cut(self) -> None:
        """Kill all processes at once."""
        for run in tuple(self.runs.values()):
            self._end(run.running, ExitStatus(signal=SIGKILL))

    def _end_after(self, ms: int, running: ProcessHandle, ended: ExitStatus) -> None:
        self._loop.call_later(ms / 1000, self._end, running, ended, context=self._unit.context)

    def _end(self, running: ProcessHandle, ended: ExitStatus) -> None:
        run = self.find(running)
        if run is None:
            return
        del self.runs[running.pid]
        self._recorder.program_ended(self._name, running.pid)
        run.ended.set_result(ended)


class SimExecSession:
    """A command inside a running process: simulated counterpart of `world.process.exec_session.ExecSession`."""

    def __init__(self, program: SimProgram, run: ProgramRun) -> None:
        self._program = program
        self._loop = asyncio.get_running_loop()
        self._output: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        if program.runs_ms is not None and not program.echo:
            self._loop.call_later(program.runs_ms / 1000, self._end, ExitStatus(code=program.code))
        run.ended.add_done_callback(lambda _: self._end(ExitStatus(signal=SIGKILL)))

    async def read(self) -> CommandOutput | None:
        while not self._output:
            if self._ended.done():
                return None
            self._changed.clear()
            await self._changed.wait()
        return CommandOutput("stdout", self._output.popleft())

    async def write(self, data: bytes, /) -> None:
        if self._program.echo and data and not self._ended.done():
            self._output.append(data)
            self._changed.set()

    def close_input(self) -> None:
        if self._program.echo:
            self._end(ExitStatus(code=self._program.code))

    def resize(self, window: PtySize, /) -> None:
        """The window size has no effect on a simulated program."""

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._ended)

    async def kill_all(self) -> None:
        self._end(ExitStatus(signal=SIGKILL))

    async def close(self) -> None:
        await self.kill_all()
        self._output.clear()

    def _end(self, ended: ExitStatus) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)
            self._changed.set()


class SimRunner:
    """Runner of one process: simulated counterpart of `world.process.runner.ProcessRunner`. After the process was killed, its
    calls raise an error.
    """

    def __init__(self, processes: MachineProcesses, unit: ExecutionUnit, delay_s: Callable[[], float], clock: Clock) -> None:
        self._processes = processes
        self._clock = clock
        self._unit = unit
        self._delay_s = delay_s
        self._children: dict[ProcessHandle, ProgramRun] = {}
        """Its own children. As in Unix, only the parent of a process receives its exit status."""

    async def start(self, order: ProcessSpec, /) -> ProcessHandle:
        check_process_spec(order)
        await asyncio.sleep(self._delay_s())
        self._check_alive()
        check_start_deadline(order, self._clock.now_ms())
        running = self._processes.start(order, self._unit)
        self._children[running] = self._processes.runs[running.pid]
        return running

    async def wait(self, running: ProcessHandle, /) -> ExitStatus:
        own, run = self._children.get(running), self._processes.find(running)
        if own is not None:
            return await asyncio.shield(own.ended)
        return ExitStatus(oom=(await asyncio.shield(run.ended)).oom) if run is not None else ExitStatus()

    def is_alive(self, running: ProcessHandle, /) -> bool:
        return self._processes.find(running) is not None

    async def stop(self, running: ProcessHandle, /, *, grace_ms: int) -> None:
        self._check_alive()
        run = self._processes.find(running)
        if run is None:
            return
        self._processes.terminate(running, self._unit.name)
        try:
            async with asyncio.timeout(grace_ms / 1000):  # noqa: TID251 - a timer of the simulated kernel, not of a component
                await asyncio.shield(run.ended)
        except TimeoutError:
            self._check_alive()
            self._processes.kill(running)

    async def start_exec(
        self, running: ProcessHandle, order: ProcessSpec, /, *, window: PtySize | None = None
    ) -> SimExecSession:
        check_process_spec(order)
        await asyncio.sleep(self._delay_s())
        self._check_alive()
        run = self._processes.find(running)
        if run is None:
            raise NotStarted("the process has ended", "check that it runs, then try again")
        return SimExecSession(parse_program(order.argv), run)

    def usage(self, running: ProcessHandle, /) -> Usage:
        run = self._processes.find(running)
        if run is None:
            return Usage()
        age_ms = self._processes.age_ms(run)
        memory = run.program.memory if age_ms >= run.program.ready else 0
        return Usage(age_ms * run.program.cpu // 1000, memory, 1)

    def isolation_support(self) -> IsolationSupport:
        return CONFINEMENT

    def live_groups(self) -> tuple[str, ...]:
        return tuple(sorted({run.order.group for run in self._processes.runs.values() if run.order.group}))

    async def kill_group(self, group: str, /) -> None:
        check_group_name(group)
        await asyncio.sleep(self._delay_s())
        self._check_alive()
        run = self._processes.in_group(group)
        if run is not None:
            self._processes.terminate(run.running, self._unit.name)
            self._processes.kill(run.running)

    def _check_alive(self) -> None:
        if self._unit.dead:
            raise WorldError("this process was killed", "restart it")


CPU_MILLI: Final = 4_000
MEMORY_BYTES: Final = 8 << 30
PORTS: Final = range(20_000, 60_000)


class SimHost:
    """Simulated counterpart of `world.host.LocalHost`. All machines have the same CPU and memory."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock

    def inventory(self) -> HostInventory:
        return HostInventory(self._name, "simulated", self._clock.boot(), CPU_MILLI, MEMORY_BYTES)


class SimPorts:
    """Simulated counterpart of `world.host.KernelPorts`, shared by all processes of a machine. Ports are handed out round
    robin.
    """

    def __init__(self, processes: MachineProcesses) -> None:
        self._processes = processes
        self._next = 0

    async def find_free(self, count: int, /) -> list[int]:
        if count < 0:
            raise ValueError(f"count must be 0 or more, not {count}")
        taken = {run.program.listen for run in self._processes.runs.values()}
        ports: list[int] = []
        for _ in range(len(PORTS)):
            if len(ports) == count:
                break
            port = PORTS[self._next % len(PORTS)]
            self._next += 1
            if port not in taken:
                ports.append(port)
        if len(ports) < count:
            raise NoFreePorts(f"only {len(ports)} of {count} ports are free", "request fewer ports at a time")
        return ports


class SimProber:
    """Simulated counterpart of `world.host.SocketProber`. It reaches programs of its own machine; the host name is ignored."""

    def __init__(self, processes: MachineProcesses, delay_s: Callable[[], float]) -> None:
        self._processes, self._delay_s = processes, delay_s

    async def http(self, host: str, port: int, path: str, /, *, timeout_ms: int) -> ProbeResult:
        run = await self._listening_program(port)
        if run is None:
            return ProbeResult(ok=False, detail=f"port {port} cannot be reached (connection refused)")
        healthy = run.program.is_healthy(self._processes.age_ms(run))
        return ProbeResult(healthy, "status 200 OK" if healthy else "status 503 Service Unavailable")

    async def tcp(self, host: str, port: int, /, *, timeout_ms: int) -> ProbeResult:
        run = await self._listening_program(port)
        if run is None or not run.program.is_healthy(self._processes.age_ms(run)):
            return ProbeResult(ok=False, detail=f"port {port} cannot be reached (connection refused)")
        return ProbeResult(ok=True, detail=f"port {port} accepts connections")

    async def _listening_program(self, port: int) -> ProgramRun | None:
        await asyncio.sleep(self._delay_s())
        return next((run for run in self._processes.runs.values() if run.program.listen == port), None)
