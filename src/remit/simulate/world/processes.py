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
from remit.world.randomness import SeededChance

ProcessMain = Callable[["SimProcess"], Coroutine[Any, Any, None]]


class SimMachine:
    """A simulated machine. Its clock, disk and running programs outlive the processes that run on it."""

    def __init__(self, loop: SimLoop, name: str, recorder: RunRecorder, *, start_ms: int, rate: float) -> None:
        self.name = name
        self.clock = SimClock(loop, name, start_ms=start_ms, rate=rate)
        self.disk = SimDisk()
        self.machinery = MachineProcesses(loop, name, recorder)
        self.ports = SimPorts(self.machinery)
        self.depot = ArtifactSources()
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
        self.unit: ExecutionUnit = loop.unit(name)
        self.unit.dead = True
        self.world: World
        self.on_end: Callable[[SimProcess, BaseException | None], None] | None = None
        self.on_silence: Callable[[SimProcess], None] | None = None
        """Called when it is killed or frozen: the requests that it waits for count as abandoned."""
        self._seed = seed

    @property
    def alive(self) -> bool:
        return not self.unit.dead

    def start(self) -> None:
        if self.alive:
            return
        self.come_to_life()
        self.loop.spawn(self._run(), name=self.name, unit=self.unit)

    def come_to_life(self) -> None:
        """Create the unit and the world of the next start without running `main`."""
        self.starts += 1
        self.unit = self.loop.unit(f"{self.name}#{self.starts}")
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
            self.network.died(unit)
            self.machine.machinery.starter_ended(unit)
            self._silenced()

    def freeze(self) -> None:
        self.loop.freeze(self.unit)
        self._silenced()

    def _silenced(self) -> None:
        if self.on_silence is not None:
            self.on_silence(self)

    def thaw(self) -> None:
        self.loop.thaw(self.unit)

    def port(self, service: StoreService, *, observer: bool = False) -> StorePort:
        return StorePort(service, self.name, self.unit, self._sent, observer=observer)

    def _sent(self) -> CommitOrigin:
        clock = self.machine.clock
        return CommitOrigin(self.name, clock.boot(), clock.now_ms(), clock.rate, self.loop.time())

    def _new_world(self) -> World:
        seed = random_streams.process_start(self._seed, self.name, self.starts)
        unit, chance, machine = self.unit, SeededChance(seed), self.machine
        return World(
            clock=self.machine.clock,
            chance=chance,
            ids=SeededIds(random_streams.process_ids(seed)),
            disk=self.machine.disk.mount(lambda: not unit.dead),
            offload=SimOffload(lambda: 1 + machine.slow_disk_ms, lambda: not unit.dead),
            link=SimLink(self.network, self.name, unit),
            runner=SimRunner(machine.machinery, unit, lambda: 0.005 + machine.slow_start_s, machine.clock),
            host=SimHost(self.machine.name, self.machine.clock),
            ports=self.machine.ports,
            prober=SimProber(self.machine.machinery, lambda: 0.002),
            carrier=SimArtifactFetcher(self.machine.disk, machine.depot, lambda: not unit.dead),
        )
