"""Builds the production implementations of all operating system interfaces (interfaces.py)."""

from __future__ import annotations

from collections.abc import Mapping

from remit.world.clock import BootClock
from remit.world.concurrency import ThreadOffload
from remit.world.files.artifacts import FileArtifactFetcher
from remit.world.files.disk import FileDisk
from remit.world.host import KernelPorts, LocalHost, SocketProber
from remit.world.interfaces import World
from remit.world.net.rpc_client import SocketLink
from remit.world.process.runner import ProcessRunner
from remit.world.randomness import RandomIds, system_seeded


def production(addresses: Mapping[str, str] | None = None) -> World:
    """Return the production implementations. `addresses` maps the names of peers to their listen addresses.

    The caller must close `offload` at the end.
    """
    clock = BootClock()
    return World(
        clock=clock,
        randomness=system_seeded(),
        ids=RandomIds(),
        disk=FileDisk(),
        offload=ThreadOffload(),
        link=SocketLink(addresses or {}),
        runner=ProcessRunner(clock),
        host=LocalHost(clock),
        ports=KernelPorts(clock),
        prober=SocketProber(clock),
        artifacts=FileArtifactFetcher(),
    )
