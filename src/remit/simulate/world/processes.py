"""Simulated machines and processes: start, freeze, kill.

A process is a main function that may be started many times on one machine. Each start has a new execution unit and a new
`World`, as a real process has new memory. Clock, disk and running programs belong to the machine and survive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from remit.simulate.world import random_streams
from remit.simulate.world.clock import SeededIds, SimClock, SimOffload
from remit.simulate.world.disk import ArtifactSources, SimArtifactFetcher, SimDisk
from remit.simulate.world.event_loop import ExecutionUnit, SimLoop
from remit.simulate.world.network import Network, SimLink
from remit.simulate.world.runner import MachineProcesses, RunRecorder, SimHost, SimPorts, SimProber, SimRunner
from remit.simulate.world.store import CommitOrigin, StorePort, StoreService
from remit.world.interfaces import World
from remit.world.randomness import SeededRandomness

ProcessMain = Callable[["SimProcess"], Coroutine[Any, Any, None]]


class SimMachine:
    """A simulated machine. Its clock, disk and running programs outlive the processes that run on it."""

    def __init__(self, loop: SimLoop, name: str, recorder: RunRecorder, *, start_ms: int, rate: float) -> None:
        self.name = name
        self.clock = SimClock(loop, name, start_ms=start_ms, rate=rate)
        self.disk = SimDisk()
        self.processes = MachineProcesses(loop, name, recorder)
        self.ports = SimPorts(self.processes)
        self.artifact_sources = ArtifactSources()
        self.pipes: dict[str, int] = {}
        """State that processes of this machine share without a network. A power cut clears it."""
        self.slow_start_s = 0.0
        """Added to the start time of every program on this machine."""
        self.slow_disk_ms = 0
        """Added to the duration of offloaded work, such as disk writes."""


class SimProcess:
    """A named process that may be started many times on one machine. Each start has a new unit and a new world."""

    def __init__(self, loop: SimLoop, network: Network, name: str, machine: SimMachine, seed: str, main: ProcessMain) -> None:
        self.loop = loop
        self.network = network
        self.name = name
        self.machine = machine
        self.main = main
        self.starts = 0
        self.unit: ExecutionUnit = loop.new_unit(name)
        self.unit.dead = True
        self.world: World
        self.on_end: Callable[[SimProcess, BaseException | None], None] | None = None
        self.on_unresponsive: Callable[[SimProcess], None] | None = None
        """Called when it is killed or frozen: the requests that it waits for count as abandoned."""
        self._seed = seed

    @property
    def alive(self) -> bool:
        return not self.unit.dead

    def start(self) -> None:
        if self.alive:
            return
        self.prepare_start()
        self.loop.spawn(self._run(), name=self.name, unit=self.unit)

    def prepare_start(self) -> None:
        """Create the unit and the world of the next start without running `main`."""
        self.starts += 1
        self.unit = self.loop.new_unit(f"{self.name}#{self.starts}")
        self.world = self._new_world()

    async def _run(self) -> None:
        failure: BaseException | None = None
        try:
            await self.main(self)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - any exception ends this process and is passed to on_end
            failure = error
        self.kill()
        if self.on_end is not None:
            self.on_end(self, failure)

    def kill(self) -> None:
        """Stop it as `kill -9` does: no callback or `finally` block runs, but messages already sent still arrive."""
        if self.alive:
            unit = self.unit
            self.loop.kill(unit)
            self.network.reset_connections(unit)
            self.machine.processes.starter_ended(unit)
            self._notify_unresponsive()

    def freeze(self) -> None:
        self.loop.freeze(self.unit)
        self._notify_unresponsive()

    def _notify_unresponsive(self) -> None:
        if self.on_unresponsive is not None:
            self.on_unresponsive(self)

    def thaw(self) -> None:
        self.loop.thaw(self.unit)

    def port(self, service: StoreService, *, observer: bool = False) -> StorePort:
        return StorePort(service, self.name, self.unit, self._commit_origin, observer=observer)

    def _commit_origin(self) -> CommitOrigin:
        clock = self.machine.clock
        return CommitOrigin(self.name, clock.boot(), clock.now_ms(), clock.rate, self.loop.time())

    def _new_world(self) -> World:
        seed = random_streams.process_start(self._seed, self.name, self.starts)
        unit, randomness, machine = self.unit, SeededRandomness(seed), self.machine
        return World(
            clock=self.machine.clock,
            randomness=randomness,
            ids=SeededIds(random_streams.process_ids(seed)),
            disk=self.machine.disk.mount(lambda: not unit.dead),
            offload=SimOffload(lambda: 1 + machine.slow_disk_ms, lambda: not unit.dead),
            link=SimLink(self.network, self.name, unit),
            runner=SimRunner(machine.processes, unit, lambda: 0.005 + machine.slow_start_s, machine.clock),
            host=SimHost(self.machine.name, self.machine.clock),
            ports=self.machine.ports,
            prober=SimProber(self.machine.processes, lambda: 0.002),
            artifacts=SimArtifactFetcher(self.machine.disk, machine.artifact_sources, lambda: not unit.dead),
        )
