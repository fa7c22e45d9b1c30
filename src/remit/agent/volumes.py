"""Preparation step: scratch and host-path volumes, with size enforcement.

Scratch volumes are directories inside the attempt's own directory. Host paths are directories of the machine that the agent
was started with permission to share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from remit.agent.assignments import Assignments
from remit.agent.attempts import SCRATCH_FULL, AttemptId
from remit.agent.hosted_node import HostedNode
from remit.agent.keeper.protocol import KeeperClient
from remit.agent.preparation import NotPrepared, PreparationContext, OnProgress
from remit.agent.run_spec import ROOTFS_HOME, NO_INPUTS, NodeSettings, PreparedInputs, is_sandboxed
from remit.law.timing import Timing
from remit.model.artifacts import HostPath, Volume
from remit.model.kinds import Template
from remit.world.interfaces import LinkError, BindMount, World

VOLUMES_DIRECTORY: Final = ".volumes"
"""Directory inside an attempt's directory for scratch volumes that are mounted at an absolute path."""


CHECK_HEARTBEATS: Final = 5
"""Interval between two checks of scratch volume sizes, in heartbeat intervals."""


class VolumeStep:
    """Implements `preparation.Step`. `lent` are the host directories that workloads may mount, if a policy permits it too."""

    def __init__(self, world: World, host_paths: tuple[Path, ...]) -> None:
        self._world, self._host_paths = world, host_paths

    def applies_to(self, template: Template, /) -> bool:
        return bool(template.volumes)

    async def prepare(self, subject: PreparationContext, room: Path, tell: OnProgress, /) -> PreparedInputs:
        prepared = NO_INPUTS
        for volume in subject.template.volumes:
            if volume.host is None:
                prepared = prepared.merged_with(await self._prepare_scratch(subject, volume, room))
            else:
                prepared = prepared.merged_with(await self._mount_host_path(subject, volume, volume.host, room))
        return prepared

    def forget(self, copy: AttemptId, /) -> None:
        pass

    def retain_only(self, known: Collection[str], /) -> None:
        pass

    async def _prepare_scratch(self, subject: PreparationContext, volume: Volume, room: Path) -> PreparedInputs:
        inside = scratch_path(volume)
        if subject.is_new:
            await self._world.artifacts.make_directory(room / inside, below=room, user=subject.user)
        if not PurePosixPath(volume.path).is_absolute():
            return NO_INPUTS
        there = subject.settings.attempt_directory(subject.attempt) / inside
        return PreparedInputs(mounts=(BindMount(there, Path(volume.path), writable=True),))

    async def _mount_host_path(self, subject: PreparationContext, volume: Volume, host: HostPath, room: Path) -> PreparedInputs:
        found = await self._world.artifacts.resolve_allowed(Path(host.path), self._host_paths)
        if found is None:
            cure = "start the agent with --host-path for that directory, or use a permitted one"
            raise NotPrepared(f"host path {host.path} is not permitted on this node", cure)
        path = PurePosixPath(volume.path)
        if is_sandboxed(subject.template, subject.settings):
            home = ROOTFS_HOME if subject.template.rootfs is not None else subject.settings.attempt_directory(subject.attempt)
            if subject.is_new and not path.is_absolute():
                await self._world.artifacts.make_directory(room / path, below=room, user=subject.user)
            return PreparedInputs(mounts=(BindMount(found, home / path, writable=not host.read_only),))
        if host.read_only:
            cure = "set readOnly: false, or restrict the workload to nodes with bubblewrap"
            raise NotPrepared(f"host path {host.path} cannot be mounted read-only without a sandbox", cure)
        if subject.is_new:
            await self._world.artifacts.symlink(room / path, found, below=room)
        return NO_INPUTS


def scratch_path(volume: Volume) -> PurePosixPath:
    """Return the location of a scratch volume in the attempt's directory."""
    path = PurePosixPath(volume.path)
    return PurePosixPath(VOLUMES_DIRECTORY) / volume.name if path.is_absolute() else path


async def enforce_scratch_limits(world: World, keeping: KeeperClient, orders: Assignments, sites: Mapping[str, HostedNode], tempo: Timing) -> None:
    """Stop processes that exceed the size of a scratch volume, until cancelled."""
    while True:
        await world.clock.sleep_ms(CHECK_HEARTBEATS * tempo.heartbeat_ms)
        for site in tuple(sites.values()):
            for copy in tuple(site.reconciler.preparations):
                kept, order = site.records.get(copy), orders.get(copy.key)
                generation = None if order is None else orders.spec_of(order.replica)
                if kept is None or not kept.alive or generation is None:
                    continue
                template = generation.spec.template
                if await _exceeds_scratch_limit(world, site.settings, copy, template):
                    with suppress(LinkError):
                        await keeping.stop(copy, int(template.stop_grace), SCRATCH_FULL)


async def _exceeds_scratch_limit(world: World, place: NodeSettings, copy: AttemptId, template: Template) -> bool:
    """Return whether any scratch volume of the attempt exceeds its size."""
    room = place.attempt_directory(copy)
    for one in template.volumes:
        most = one.scratch.bytes_max if one.scratch is not None else 0
        if most and await world.artifacts.size(room / scratch_path(one)) > most:
            return True
    return False
