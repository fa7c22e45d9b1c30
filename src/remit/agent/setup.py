"""Construction of agent and keeper on a data directory. Light: the keeper process loads it.

Modules that only the agent needs are imported inside functions, so that the keeper does not load them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remit.agent.directory import KEEPER, AgentDirectory
from remit.agent.keeper.keeper import Keeper
from remit.agent.keeper.log_retention import LogBounds, LogRetention
from remit.world.files.log_files import FileLogFiles
from remit.world.interfaces import World

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.agent.callbacks import CallbackService
    from remit.agent.preparation.preparer import Preparer, SecretAndConfigStep
    from remit.client.authority_client import AuthorityClient, RetriesExhausted
    from remit.law.timing import Timing
    from remit.model.kinds import Node
    from remit.world.files.secret_files import TmpfsSecretFiles


def _discard(*args: object, **fields: object) -> None:
    """Discard a log line."""


class HostPermissions(NamedTuple):
    """Permissions of workloads on this machine: directories for `file:` artifacts, non-public artifact hosts, host paths to
    mount.
    """

    artifact_directories: tuple[Path, ...] = ()
    artifact_hosts: tuple[str, ...] = ()
    host_paths: tuple[Path, ...] = ()
    cache_bytes: int = 10 << 30
    hidden_paths: tuple[Path, ...] = ()
    """Paths that sandboxes hide, in addition to the agent's own directory."""
    user: str = ""
    """Default user for workloads that name none; empty: the agent's user."""


def build_keeper(world: World, directory: AgentDirectory, bounds: LogBounds, log: Callable[[str], None]) -> Keeper:
    """Build a keeper. The caller serves it under the name `KEEPER` and runs it."""
    log_retention = LogRetention(world, FileLogFiles(), directory.logs, bounds)
    return Keeper(world, directory.journal, log_retention, work_directory=directory.work, log=log)


def build_agent(
    world: World,
    client: AuthorityClient,
    servers: Sequence[str],
    directory: AgentDirectory,
    nodes: Sequence[Node],
    *,
    name: str,
    scope: str,
    timing: Timing,
    sandbox: bool,
    callback_token: str = "",
    permissions: HostPermissions | None = None,
    launch_keeper: Callable[[], Awaitable[None]] | None,
    log: Callable[..., None],
    on_failure: Callable[[RetriesExhausted], None] | None = None,
    log_debug: Callable[..., None] = _discard,
) -> Agent:
    """Build an agent. The caller runs it. `name` is the lease holder and must be unique; `servers` are names on the world's
    link.
    """
    from remit.agent.agent import Agent
    from remit.agent.hosted_node import HostedNodeSpec
    from remit.agent.keeper.protocol import KeeperClient
    from remit.agent.preparation.preparer import SecretAndConfigStep
    from remit.agent.run_spec import NodeSettings
    from remit.client.rpc import assignment_source, material_source

    permissions = permissions or HostPermissions()
    secret_files = build_secret_files(directory)
    if not secret_files.in_memory:
        log(f"no /dev/shm on this machine: secrets of running replicas are stored on disk, in {directory.secrets}")
    secret_step = SecretAndConfigStep(
        world, material_source(world.link, world.randomness.shuffled(servers), world.clock), secret_files
    )
    names = [node.metadata.name for node in nodes]
    root, work = directory.root.absolute(), directory.work.absolute()
    hidden = (root, *(() if root in work.parents else (work,)), *permissions.hidden_paths)
    settings = [
        NodeSettings(
            node_name, scope, directory.logs / node_name, directory.work, sandbox, hidden_paths=hidden, user=permissions.user
        )
        for node_name in names
    ]
    agent = Agent(
        world,
        client,
        assignment_source(world.link, world.randomness.shuffled(servers), callback_token),
        KeeperClient(world.link, KEEPER, world.clock),
        [HostedNodeSpec(node, node_settings) for node, node_settings in zip(nodes, settings, strict=True)],
        name=name,
        timing=timing,
        preparer=_build_preparer(world, directory, permissions, secret_step),
        epochs=directory.epochs,
        launch_keeper=launch_keeper,
        on_failure=on_failure,
        log=log,
        log_debug=log_debug,
    )
    secret_step.actor_for = agent.actor
    return agent


def build_secret_files(directory: AgentDirectory) -> TmpfsSecretFiles:
    """Secret files of the workloads of this directory's agent."""
    from remit.world.files.secret_files import TmpfsSecretFiles

    return TmpfsSecretFiles(directory.root, directory.secrets)


def _build_preparer(
    world: World, directory: AgentDirectory, permissions: HostPermissions, secret_step: SecretAndConfigStep
) -> Preparer:
    from remit.agent.preparation.artifacts import ArtifactCache, ArtifactStep, RootfsStep
    from remit.agent.preparation.preparer import Preparer
    from remit.agent.preparation.volumes import VolumeStep
    from remit.world.interfaces import FetchPermissions

    cache = ArtifactCache(
        world,
        directory.cache,
        FetchPermissions(permissions.artifact_directories, permissions.artifact_hosts),
        permissions.cache_bytes,
    )
    # Secrets and configs come last, so that they are current at the start and not as old as a long fetch.
    steps = (
        ArtifactStep(world, cache),
        RootfsStep(world, cache, permissions.host_paths),
        VolumeStep(world, permissions.host_paths),
        secret_step,
    )
    return Preparer(world, steps)


def build_callbacks(world: World, agent: Agent, token: str) -> CallbackService:
    """Build the callback service for logs and exec. `token` is the callback token that the agent announces to servers."""
    from remit.agent.callbacks import CallbackService, ExecService, LogService

    return CallbackService(
        LogService(world, FileLogFiles(), token, agent.log_directories), ExecService(world, token, agent.running_attempt)
    )
