"""Preparation of an attempt before its start: step framework, secret and config delivery.

Preparation runs between the committed `start` and the start by the keeper, as part of the phase `starting`; heartbeats
report its progress. The attempt's directory is assembled under a temporary name and renamed when complete. So it exists with
all its contents or not at all, even if the agent is killed meanwhile. Templates without inputs skip preparation. The spec of
the process is built in run_spec.py.

Secrets and configs are fetched at each start, so a start gets their current content. Files are stored in memory
(world/files/secret_files.py) and mounted or linked into the attempt's directory; variables are passed in the process spec.
Neither is written to disk, to the keeper's journal or into a command: `$(NAME)` does not expand secret variables. While a
secret or config is missing, the attempt waits and reports what it waits for.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple, Protocol

from remit.agent.attempts import AttemptId
from remit.agent.run_spec import NO_INPUTS, RESERVED_PREFIX, ROOTFS_HOME, NodeSettings, PreparedInputs, is_sandboxed, user_of
from remit.client.rpc import MaterialSource
from remit.model.claims import Actor
from remit.model.kinds import Mount, Template
from remit.model.metadata import ENV_NAME
from remit.model.records import GenerationSpec, Replica
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest
from remit.world.files.secret_files import SecretFiles
from remit.world.interfaces import BindMount, DiskError, LinkError, World, WorldError

INCOMPLETE_SUFFIX: Final = ".making"
"""Suffix of a directory that is not complete yet. No attempt has such a name."""

OnProgress = Callable[[str], None]
"""Reports progress, as a short phrase for people. May be called at any rate."""


class NotPrepared(WorldError):
    """An input of the workload is not available on this node, so it is not started."""


class PreparationProgress:
    """Progress of the preparation of one attempt. It is done when `inputs` or `failure` is set."""

    __slots__ = ("failure", "inputs", "message", "restarts", "task")

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = restarts
        """The restart within the attempt that it is for; 0 is the first start."""
        self.message = "preparing its inputs"
        self.inputs: PreparedInputs | None = None
        self.failure = ""
        """Why it cannot be started, with the fix."""
        self.task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        return self.inputs is not None or bool(self.failure)

    def report(self, message: str) -> None:
        self.message = message


class PreparationContext(NamedTuple):
    """The attempt that a step prepares. `is_new`: the directory is new and has only the contents of earlier steps. Otherwise it
    existed before, with all inputs and everything the process changed.
    """

    settings: NodeSettings
    attempt: AttemptId
    replica: Replica
    generation: GenerationSpec
    is_new: bool
    is_running: bool = False
    """The process already runs; the inputs are for probes and exec sessions beside it."""

    @property
    def template(self) -> Template:
        return self.generation.spec.template

    @property
    def user(self) -> str:
        """The user that the process runs as and that owns its files."""
        return user_of(self.template, self.settings, self.replica.metadata.tenant)


class PreparationStep(Protocol):
    """Prepares one kind of input."""

    def applies_to(self, template: Template, /) -> bool: ...

    async def prepare(self, context: PreparationContext, directory: Path, on_progress: OnProgress, /) -> PreparedInputs:
        """Put the input into `directory`, or return what the process spec needs. May be cancelled at any time and called again,
        after a restart of the agent, the process, or both. Raises `WorldError`, which is reported as the reason.
        """
        ...

    def forget(self, attempt: AttemptId, /) -> None:
        """Release what is held for an attempt that has ended or is no longer needed."""
        ...

    def retain_only(self, known: Collection[str], /) -> None:
        """Release what is held for all attempts but these, given by file name. Called once at startup, because an agent that
        was killed could not release it.
        """
        ...


class Preparer:
    """Runs the preparation steps in order."""

    def __init__(self, world: World, steps: Sequence[PreparationStep]) -> None:
        self._world, self._steps = world, tuple(steps)

    async def prepare(
        self,
        settings: NodeSettings,
        attempt: AttemptId,
        replica: Replica,
        generation: GenerationSpec,
        progress: PreparationProgress,
        *,
        is_running: bool = False,
    ) -> None:
        """Prepare an attempt. Raises only on cancellation; the outcome is stored in `progress`."""
        directory = settings.attempt_directory(attempt)
        temporary = directory.with_name(directory.name + INCOMPLETE_SUFFIX)
        try:
            is_new = not await self._world.offload(lambda: self._world.disk.exists(directory))
            if is_new:
                await self._world.offload(lambda: self._recreate(temporary))
            context, inputs = PreparationContext(settings, attempt, replica, generation, is_new, is_running), NO_INPUTS
            for step in self._steps:
                if step.applies_to(context.template):
                    inputs = inputs.merged_with(
                        await step.prepare(context, temporary if is_new else directory, progress.report)
                    )
            if is_new:
                await self._world.artifacts.publish(temporary, directory)
            progress.message, progress.inputs = "", inputs
        except WorldError as error:
            progress.message, progress.failure = "", f"{error.cause}; {error.cure}"
            await self._world.offload(lambda: self._world.disk.remove_tree(temporary))

    def forget(self, attempt: AttemptId) -> None:
        for step in self._steps:
            step.forget(attempt)

    async def remove_orphans(self, works: Sequence[Path], known: Collection[str]) -> None:
        """Remove directories of attempts that the keeper does not know: the agent that should have removed them was killed."""
        disk, offload = self._world.disk, self._world.offload
        for work in dict.fromkeys(works):
            with suppress(DiskError):
                for name in await offload(partial(disk.list, work)):
                    if name not in known:
                        await offload(partial(disk.remove_tree, work / name))
        for step in self._steps:
            step.retain_only(known)

    async def abandon(self, settings: NodeSettings, attempt: AttemptId) -> None:
        """Remove everything prepared for an attempt that was not started."""
        self.forget(attempt)
        directory = settings.attempt_directory(attempt)
        with suppress(DiskError):
            for path in (directory.with_name(directory.name + INCOMPLETE_SUFFIX), directory):
                await self._world.offload(partial(self._world.disk.remove_tree, path))

    def _recreate(self, directory: Path) -> None:
        self._world.disk.remove_tree(directory)
        self._world.disk.make_directory(directory, durably=False)


MATERIAL_WAIT_MS: Final = 300_000
"""How long missing secrets and configs are waited for. Then the attempt fails, and the next one may be placed on another node.
"""

MATERIAL_POLL_MS: Final = 250
MATERIAL_POLL_MS_MAX: Final = 5_000
NO_DELIVERY: Final = "no server delivers its secrets and configs"


class DeliveredData(NamedTuple):
    """Secrets and configs of one attempt: files by path, variables, and secret variables separately."""

    files: dict[PurePosixPath, bytes]
    env: dict[str, str]
    secret_env: dict[str, str]

    def __repr__(self) -> str:
        return f"DeliveredData({len(self.files)} files, {len(self.env) + len(self.secret_env)} variables)"


class SecretAndConfigStep:
    """Delivers secrets and configs. Implements `PreparationStep`.

    `actor_for`, set by the builder, returns the actor for requests about a node, or None while its lease is not held.
    """

    def __init__(self, world: World, source: MaterialSource, secret_files: SecretFiles) -> None:
        self._world, self._source, self._secret_files = world, source, secret_files
        self.actor_for: Callable[[str], Actor | None] = lambda _: None
        self._stored: set[str] = set()
        """File names of attempts that may have secret files. There is nothing to remove for any other."""

    def applies_to(self, template: Template, /) -> bool:
        return bool(template.secrets or template.configs)

    async def prepare(self, context: PreparationContext, directory: Path, on_progress: OnProgress, /) -> PreparedInputs:
        template, name = context.template, context.attempt.file_name
        delivered = plan_delivery(template, await self._fetch_material(context, on_progress))
        if not delivered.files:
            return PreparedInputs(env=delivered.env, secret_env=delivered.secret_env)
        if not (context.is_running and self._secret_files.has(name)):  # a running process keeps the files it was started with
            self._stored.add(name)
            await self._world.offload(partial(self._secret_files.put, name, delivered.files, context.user))
        mounts = await self._expose(context, directory, self._secret_files.path_of(name))
        return PreparedInputs(delivered.env, mounts, secret_env=delivered.secret_env)

    def forget(self, attempt: AttemptId, /) -> None:
        if attempt.file_name in self._stored:
            self._stored.discard(attempt.file_name)
            with suppress(DiskError):  # the next agent retries
                self._secret_files.remove(attempt.file_name)

    def retain_only(self, known: Collection[str], /) -> None:
        for name in self._secret_files.names():
            self._stored.add(name)
            if name not in known:
                with suppress(DiskError):
                    self._secret_files.remove(name)

    async def _fetch_material(self, context: PreparationContext, on_progress: OnProgress) -> SecretMaterial:
        """Fetch secrets and configs, and wait until all are available. Raises `NotPrepared`."""
        until_ms, pause_ms, clock = self._world.clock.now_ms() + MATERIAL_WAIT_MS, MATERIAL_POLL_MS, self._world.clock
        on_progress("fetching its secrets and configs")
        while True:
            actor = self.actor_for(context.settings.node)
            if actor is None:
                reason, cure = NO_DELIVERY, "nothing to do: it is retried once the node's lease is held"
            else:
                try:
                    material = await self._source(
                        SecretMaterialRequest(actor, context.attempt.key, context.attempt.uid, context.attempt.number)
                    )
                    if not material.failed:
                        return material
                    reason, cure = material.why, material.cure
                except LinkError as error:
                    reason, cure = f"{NO_DELIVERY} ({error.cause})", error.cure
            if clock.now_ms() >= until_ms:
                raise NotPrepared(reason, cure)
            on_progress(f"waiting another {(until_ms - clock.now_ms()) // 1000} s: {reason}; {cure}")
            await clock.sleep_ms(pause_ms)
            pause_ms = min(2 * pause_ms, MATERIAL_POLL_MS_MAX)

    async def _expose(self, context: PreparationContext, directory: Path, secret_directory: Path) -> tuple[BindMount, ...]:
        """Make the files visible to the process, by mounts in a sandbox and by links otherwise."""
        template, artifacts = context.template, self._world.artifacts
        mounts: list[BindMount] = []
        for path in outermost_paths(template):
            if path.is_absolute():
                mounts.append(BindMount(secret_directory / _path_in_secrets(path), Path(path)))
            elif is_sandboxed(template, context.settings):
                home = ROOTFS_HOME if template.rootfs is not None else context.settings.attempt_directory(context.attempt)
                if context.is_new:
                    await artifacts.make_directory(directory / path, below=directory, user=context.user)
                mounts.append(BindMount(secret_directory / path, home / path))
            elif context.is_new:
                await artifacts.symlink(directory / path, secret_directory / path, below=directory)
        return tuple(mounts)


def plan_delivery(template: Template, material: SecretMaterial) -> DeliveredData:
    """Return which content goes where. Raises `NotPrepared` with the names of what is wrong, never with a value."""
    delivered = DeliveredData({}, {}, {})
    for kind, mounts, contents in (
        ("secret", template.secrets, material.secrets),
        ("config", template.configs, material.configs),
    ):
        for mount in mounts:
            if mount.name not in contents:
                raise NotPrepared(f"the server did not send {kind} {mount.name}", "run server and agent at the same version")
            if mount.path:
                _add_files(delivered.files, kind, mount, contents[mount.name])
            else:
                env = delivered.secret_env if kind == "secret" else delivered.env
                env.update(_checked_variables(kind, mount, contents[mount.name]))
    return delivered


def _add_files(files: dict[PurePosixPath, bytes], kind: str, mount: Mount, data: Mapping[str, str]) -> None:
    for key, value in data.items():
        path = _path_in_secrets(PurePosixPath(mount.path)) / key
        if path in files or any(other in files for other in path.parents) or any(path in other.parents for other in files):
            raise NotPrepared(f"{kind} {mount.name}: another file is already at {path}", "give one of them a different path")
        files[path] = value.encode()


def _checked_variables(kind: str, mount: Mount, data: Mapping[str, str]) -> dict[str, str]:
    for key in data:
        if not re.search(ENV_NAME, key) or key.startswith(RESERVED_PREFIX):
            cure = "use keys that are valid variable names, select keys with keys:, or set a path"
            raise NotPrepared(f"{kind} {mount.name}: key {key} is not a valid variable name", cure)
    return dict(data)


def outermost_paths(template: Template) -> Iterator[PurePosixPath]:
    """Yield the mount directories, without those inside another one."""
    paths = sorted({PurePosixPath(other.path) for other in (*template.secrets, *template.configs) if other.path})
    for path in paths:
        if not any(other in path.parents for other in paths):
            yield path


def _path_in_secrets(path: PurePosixPath) -> PurePosixPath:
    """Return the path in the attempt's secret directory. Absolute paths get a subtree of their own."""
    return PurePosixPath(".root", *path.parts[1:]) if path.is_absolute() else path
