"""Builds the production world.

Put together here; what each part does is beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from remit.world.clock import BootClock
from remit.world.concurrency import ThreadOffload
from remit.world.files.artifacts import FileCarrier
from remit.world.files.disk import FileDisk
from remit.world.host import KernelPorts, SocketProber, ThisHost
from remit.world.interfaces import World
from remit.world.net.rpc_client import SocketLink
from remit.world.process.runner import ProcessRunner
from remit.world.randomness import RandomIds, seeded_by_the_system


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
