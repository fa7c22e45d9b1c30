"""Preparation step: scratch and host-path volumes, with size enforcement.

Scratch volumes are directories inside the attempt's own directory. Host paths are directories of the machine that the agent
was started with permission to share.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from remit.agent.attempts import SCRATCH_FULL, AttemptId
from remit.agent.keeper.protocol import KeeperClient
from remit.agent.preparation.preparer import NotPrepared, OnProgress, PreparationContext
from remit.agent.run_spec import NO_INPUTS, ROOTFS_HOME, NodeSettings, PreparedInputs, is_sandboxed
from remit.agent.runtime import AgentRuntime
from remit.model.artifacts import HostPath, Volume
from remit.model.kinds import Template
from remit.world.interfaces import BindMount, LinkError, World

VOLUMES_DIRECTORY: Final = ".volumes"
"""Directory inside an attempt's directory for scratch volumes that are mounted at an absolute path."""


CHECK_HEARTBEATS: Final = 5
"""Interval between two checks of scratch volume sizes, in heartbeat intervals."""


class VolumeStep:
    """Implements `PreparationStep`. `host_paths` are the directories that workloads may mount, if a policy permits it too."""

    def __init__(self, world: World, host_paths: tuple[Path, ...]) -> None:
        self._world, self._host_paths = world, host_paths

    def applies_to(self, template: Template, /) -> bool:
        return bool(template.volumes)

    async def prepare(self, context: PreparationContext, directory: Path, on_progress: OnProgress, /) -> PreparedInputs:
        inputs = NO_INPUTS
        for volume in context.template.volumes:
            if volume.host is None:
                inputs = inputs.merged_with(await self._prepare_scratch(context, volume, directory))
            else:
                inputs = inputs.merged_with(await self._mount_host_path(context, volume, volume.host, directory))
        return inputs

    def forget(self, attempt: AttemptId, /) -> None:
        pass

    def retain_only(self, known: Collection[str], /) -> None:
        pass

    async def _prepare_scratch(self, context: PreparationContext, volume: Volume, directory: Path) -> PreparedInputs:
        relative = scratch_path(volume)
        if context.is_new:
            await self._world.artifacts.make_directory(directory / relative, below=directory, user=context.user)
        if not PurePosixPath(volume.path).is_absolute():
            return NO_INPUTS
        host_directory = context.settings.attempt_directory(context.attempt) / relative
        return PreparedInputs(mounts=(BindMount(host_directory, Path(volume.path), writable=True),))

    async def _mount_host_path(
        self, context: PreparationContext, volume: Volume, host_path: HostPath, directory: Path
    ) -> PreparedInputs:
        source = await self._world.artifacts.resolve_allowed(Path(host_path.path), self._host_paths)
        if source is None:
            cure = "start the agent with --host-path for that directory, or use a permitted one"
            raise NotPrepared(f"host path {host_path.path} is not permitted on this node", cure)
        path = PurePosixPath(volume.path)
        if is_sandboxed(context.template, context.settings):
            home = ROOTFS_HOME if context.template.rootfs is not None else context.settings.attempt_directory(context.attempt)
            if context.is_new and not path.is_absolute():
                await self._world.artifacts.make_directory(directory / path, below=directory, user=context.user)
            return PreparedInputs(mounts=(BindMount(source, home / path, writable=not host_path.read_only),))
        if host_path.read_only:
            cure = "set readOnly: false, or restrict the workload to nodes with bubblewrap"
            raise NotPrepared(f"host path {host_path.path} cannot be mounted read-only without a sandbox", cure)
        if context.is_new:
            await self._world.artifacts.symlink(directory / path, source, below=directory)
        return NO_INPUTS


def scratch_path(volume: Volume) -> PurePosixPath:
    """Return the location of a scratch volume in the attempt's directory."""
    path = PurePosixPath(volume.path)
    return PurePosixPath(VOLUMES_DIRECTORY) / volume.name if path.is_absolute() else path


async def enforce_scratch_limits(runtime: AgentRuntime, keeper: KeeperClient) -> None:
    """Stop processes that exceed the size of a scratch volume, until cancelled."""
    world, assignments = runtime.world, runtime.assignments
    while True:
        await world.clock.sleep_ms(CHECK_HEARTBEATS * runtime.timing.heartbeat_ms)
        for hosted in tuple(runtime.nodes.values()):
            for attempt in tuple(hosted.reconciler.preparations):
                record, assignment = hosted.records.get(attempt), assignments.get(attempt.key)
                generation = None if assignment is None else assignments.spec_of(assignment.replica)
                if record is None or not record.alive or generation is None:
                    continue
                template = generation.spec.template
                if await _exceeds_scratch_limit(world, hosted.settings, attempt, template):
                    with suppress(LinkError):
                        await keeper.stop(attempt, int(template.stop_grace), SCRATCH_FULL)


async def _exceeds_scratch_limit(world: World, settings: NodeSettings, attempt: AttemptId, template: Template) -> bool:
    """Return whether any scratch volume of the attempt exceeds its size."""
    directory = settings.attempt_directory(attempt)
    for volume in template.volumes:
        limit = volume.scratch.bytes_max if volume.scratch is not None else 0
        if limit and await world.artifacts.size(directory / scratch_path(volume)) > limit:
            return True
    return False
