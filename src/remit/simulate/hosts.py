"""What does a simulated machine have, and how does its work answer? As its programs' words say: see runners.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from remit.simulate.runners import Machinery, Run
from remit.world.promises import Clock, Equipment, NoPorts, Probed

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
