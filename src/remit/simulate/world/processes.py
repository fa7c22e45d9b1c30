"""Simulated machines and processes: start, freeze, kill.

Machines, and what is started, frozen and killed on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from remit.simulate.world.clock import SeededIds, SimClock, SimOffload
from remit.simulate.world.disk import Depot, SimCarrier, SimDisk
from remit.simulate.world.event_loop import SimLoop, Unit
from remit.simulate.world.network import Network, SimLink
from remit.simulate.world.runner import Machinery, Recorder, SimHost, SimPorts, SimProber, SimRunner
from remit.simulate.world.store import Sent, StorePort, StoreService
from remit.world.interfaces import World
from remit.world.randomness import SeededChance

Main = Callable[["Process"], Coroutine[Any, Any, None]]


class Machine:
    """Its clock, its disk and what runs on it outlive every process."""

    def __init__(self, loop: SimLoop, name: str, recorder: Recorder, *, start_ms: int, rate: float) -> None:
        self.name = name
        self.clock = SimClock(loop, name, start_ms=start_ms, rate=rate)
        self.disk = SimDisk()
        self.machinery = Machinery(loop, name, recorder)
        self.ports = SimPorts(self.machinery)
        self.depot = Depot()
        self.pipes: dict[str, int] = {}
        """What processes of this machine tell each other without a network."""
        self.slow_start_s = 0.0
        """By so much longer a program takes to start."""
        self.slow_disk_ms = 0
        """By so much longer blocking work takes."""


class Process:
    """A program with a name, started again and again on one machine. Each start is a new unit, and a new world."""

    def __init__(self, loop: SimLoop, network: Network, name: str, machine: Machine, seed: str, main: Main) -> None:
        self.loop = loop
        self.network = network
        self.name = name
        self.machine = machine
        self.main = main
        self.starts = 0
        self.unit: Unit = loop.unit(name)
        self.unit.dead = True
        self.world: World
        self.on_end: Callable[[Process, BaseException | None], None] | None = None
        self.on_silence: Callable[[Process], None] | None = None
        """It was killed or frozen: what it waits for is nobody's any more."""
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
        """A new unit and a new world; nothing runs in it yet."""
        self.starts += 1
        self.unit = self.loop.unit(f"{self.name}#{self.starts}")
        self.world = self._new_world()

    async def _run(self) -> None:
        failure: BaseException | None = None
        try:
            await self.main(self)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it has ended this process, and is told
            failure = error
        self.kill()
        if self.on_end is not None:
            self.on_end(self, failure)

    def kill(self) -> None:
        """As by `kill -9`: nothing of it happens any more; what is under way on the network still arrives."""
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

    def _sent(self) -> Sent:
        clock = self.machine.clock
        return Sent(self.name, clock.boot(), clock.now_ms(), clock.rate, self.loop.time())

    def _new_world(self) -> World:
        seed = f"{self._seed}/{self.name}#{self.starts}"
        unit, chance, machine = self.unit, SeededChance(seed), self.machine
        return World(
            clock=self.machine.clock,
            chance=chance,
            ids=SeededIds(f"{seed}/ids"),
            disk=self.machine.disk.mount(lambda: not unit.dead),
            offload=SimOffload(lambda: 1 + machine.slow_disk_ms, lambda: not unit.dead),
            link=SimLink(self.network, self.name, unit),
            runner=SimRunner(machine.machinery, unit, lambda: 0.005 + machine.slow_start_s, machine.clock),
            host=SimHost(self.machine.name, self.machine.clock),
            ports=self.machine.ports,
            prober=SimProber(self.machine.machinery, lambda: 0.002),
            carrier=SimCarrier(self.machine.disk, machine.depot, lambda: not unit.dead),
        )
