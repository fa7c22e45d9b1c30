"""Builds the production world."""

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
    """Return the production implementations. `addresses` maps the names of peers to where they listen.

    The caller must close `offload` at the end.
    """
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
