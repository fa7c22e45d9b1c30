"""Which world do real processes get? Put together here; what each part does is beside it."""

from __future__ import annotations

from collections.abc import Mapping

from remit.world.carrier import FileCarrier
from remit.world.chance import seeded_by_the_system
from remit.world.clock import BootClock
from remit.world.disk import FileDisk
from remit.world.ids import RandomIds
from remit.world.link import SocketLink
from remit.world.machine import KernelPorts, ThisHost
from remit.world.offload import ThreadOffload
from remit.world.probes import SocketProber
from remit.world.promises import World
from remit.world.runner import ProcessRunner


def production(addresses: Mapping[str, str] | None = None) -> World:
    """Whoever calls this closes `offload` at the end. `addresses`: where the processes that are spoken to listen, by name."""
    clock = BootClock()
    return World(
        clock=clock,
        chance=seeded_by_the_system(),
        ids=RandomIds(),
        disk=FileDisk(),
        offload=ThreadOffload(),
        link=SocketLink(addresses or {}),
        runner=ProcessRunner(clock),
        host=ThisHost(clock),
        ports=KernelPorts(clock),
        prober=SocketProber(clock),
        carrier=FileCarrier(),
    )
