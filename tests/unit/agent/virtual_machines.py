"""Fixture of the agent tests: a machine with simulated processes, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from remit.agent.attempts import AttemptId
from remit.agent.keeper.keeper import Keeper
from remit.agent.keeper.log_retention import LogRetention
from remit.agent.keeper.protocol import KeeperMessage, KeeperReply, ProcessRecord, ProcessTable, StartProcess, encode
from remit.world.interfaces import (
    DiskError,
    DiskFull,
    ExitStatus,
    IsolationSupport,
    NotStarted,
    ProcessHandle,
    ProcessSpec,
    Usage,
    World,
)
from remit.world.process.exec_session import ExecSession, PtySize
from tests.unit.world.virtual_world import VirtualClock, virtual_world

NODE = "n1"


class Machine:
    """Simulated processes, which outlive every keeper. `deaf`: they ignore SIGTERM; `stuck`: they cannot be ended at all."""

    def __init__(self) -> None:
        self.runs: dict[int, ProcessSpec] = {}
        self.ended: dict[int, ExitStatus] = {}
        self.signals: list[tuple[int, str]] = []
        self.deaf = self.stuck = False
        self.refuses = ""
        self.pids = 100
        self.children: dict[int, list[int]] = {}
        self._over: dict[int, asyncio.Event] = {}

    def begin(self, order: ProcessSpec) -> int:
        self.pids += 1
        self.runs[self.pids] = order
        self._over[self.pids] = asyncio.Event()
        return self.pids

    def end(self, pid: int, ended: ExitStatus) -> None:
        if self.runs.pop(pid, None) is not None:
            self.ended[pid] = ended
            self._over[pid].set()

    async def wait(self, pid: int) -> None:
        if pid in self.runs:
            await self._over[pid].wait()


class SimulatedRunner:
    """Process runner of one keeper. Only for its own children (`_mine`) does it learn the exit status."""

    def __init__(self, machine: Machine, clock: VirtualClock) -> None:
        self.machine, self._clock = machine, clock
        self._mine: set[int] = set()

    async def start(self, order: ProcessSpec, /) -> ProcessHandle:
        if self.machine.refuses:
            raise NotStarted(self.machine.refuses, "install it")
        if order.not_after_ms is not None and self._clock.now_ms() >= order.not_after_ms:
            raise NotStarted("too late", "order it anew")
        pid = self.machine.begin(order)
        self._mine.add(pid)
        return ProcessHandle(pid, f"virtual/{pid}", f"{order.group}#{pid}")

    async def wait(self, running: ProcessHandle, /) -> ExitStatus:
        await self.machine.wait(running.pid)
        return self.machine.ended[running.pid] if running.pid in self._mine else ExitStatus()

    def is_alive(self, running: ProcessHandle, /) -> bool:
        return running.pid in self.machine.runs and running.start_time == f"virtual/{running.pid}"

    async def stop(self, running: ProcessHandle, /, *, grace_ms: int) -> None:
        machine = self.machine
        if machine.stuck:
            raise NotStarted("it may not be ended", "run as root")
        for pid in (running.pid, *machine.children.get(running.pid, ())):
            if pid in machine.runs:
                machine.signals.append((pid, "term"))
                if machine.deaf:
                    await self._clock.sleep_ms(grace_ms)
                    machine.signals.append((pid, "kill"))
                machine.end(pid, ExitStatus(signal=9 if machine.deaf else 15))

    async def start_exec(self, running: ProcessHandle, order: ProcessSpec, /, *, window: PtySize | None = None) -> ExecSession:
        raise NotStarted("simulated processes have no exec sessions", "use a world with real processes")

    def usage(self, running: ProcessHandle, /) -> Usage:
        return Usage(1_000, 1 << 20, 1) if running.pid in self.machine.runs else Usage()

    def isolation_support(self) -> IsolationSupport:
        return IsolationSupport("none", (), "simulated", sandbox=False)

    def live_groups(self) -> tuple[str, ...]:
        return ()

    async def kill_group(self, group: str, /) -> None:
        for pid, order in tuple(self.machine.runs.items()):
            if order.group == group:
                self.machine.signals.append((pid, "clear"))
                self.machine.end(pid, ExitStatus(signal=9))


class UnsyncedDisk:
    """Disk that refuses durable appends."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        if durably:
            raise DiskError("the disk fails to sync", "mend it")
        self._disk.append(path, data, durably=durably)


class FullDisk:
    """Disk on which appends fail while it is `full`."""

    def __init__(self, disk: Any) -> None:
        self._disk, self.full = disk, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        if self.full:
            raise DiskFull("no room", "free space there")
        self._disk.append(path, data, durably=durably)


def world_on(machine: Machine) -> World:
    world = virtual_world()
    assert isinstance(world.clock, VirtualClock)
    return replace(world, runner=SimulatedRunner(machine, world.clock))


class KeeperClient:
    """Protocol client of one keeper, in the place of its agent."""

    def __init__(self, keeper: Keeper, world: World) -> None:
        self.keeper, self.world = keeper, world

    async def send(self, message: KeeperMessage) -> KeeperReply:
        return msgspec.json.decode(await self.keeper.request(encode(message)), type=KeeperReply)

    async def begin(self, copy: AttemptId, *, number: int = 0, fence_ms: int = 0, grace_ms: int = 500) -> ProcessRecord | None:
        return (await self.send(start_message(copy, number=number, fence_ms=fence_ms, grace_ms=grace_ms))).kept

    async def table(self) -> dict[AttemptId, ProcessRecord]:
        stream = self.keeper.stream(b"")
        try:
            table = msgspec.json.decode(await anext(stream), type=ProcessTable)
        finally:
            await stream.aclose()
        return {row.attempt_id: row for row in table.kept}

    async def until_ended(self, copy: AttemptId) -> ProcessRecord:
        while True:
            record = (await self.table())[copy]
            if not record.alive:
                return record
            await self.world.clock.sleep_ms(10)


def start_message(copy: AttemptId, *, number: int = 0, fence_ms: int = 0, grace_ms: int = 500) -> StartProcess:
    env = {"REMIT_NODE": NODE, "REMIT_SCOPE": "local", "REMIT_REPLICA": copy.key, "REMIT_UID": copy.uid,
           "REMIT_ATTEMPT": str(copy.number)}  # fmt: skip
    order = ProcessSpec(("work",), env, group=copy.file_name, with_parent=fence_ms > 0)
    return StartProcess(order, number, fence_ms, grace_ms, {"http": 8080})


@asynccontextmanager
async def running_keeper(
    machine: Machine,
    journal: Path,
    *,
    world: World | None = None,
    logs: LogRetention | None = None,
    rooms: Path | None = None,
    log: Callable[[str], None] = print,
) -> AsyncGenerator[KeeperClient, None]:
    """Run a keeper and kill it at the end; processes that are not fenced outlive it."""
    world = world_on(machine) if world is None else world
    keeper = Keeper(world, journal, logs, work_directory=rooms, log=log)
    task = asyncio.create_task(keeper.run())
    try:
        yield KeeperClient(keeper, world)
    finally:
        done = task.done()
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert not done or result is None, result
