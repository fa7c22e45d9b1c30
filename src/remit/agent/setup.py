"""Data directory layout and construction of agent and keeper on it. Light: the keeper process loads it.

Modules that only the agent needs are imported inside functions, so that the keeper does not load them. The layout:

    run/      private to agent and keeper: locks, keeper socket and journal, held lease epochs, their own logs
    logs/     output of replicas, one directory per node
    work/     one directory per attempt: its working directory, and inside a sandbox the only writable one
    cache/    fetched artifacts by digest and tenant, and root file systems unpacked from them

Processes that run as another user must reach their directory. So the root, `work` and the unpacked trees in `cache` are
passable (mode 711) and everything else is private. If a parent directory is closed to others, `work` is a symbolic link to a
place outside (world/process/isolation.py). The root and `logs` are marked with `hint_unrelated_subdirectories`, because the
contents of their subdirectories are unrelated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from remit.agent.keeper.keeper import Keeper
from remit.agent.keeper.log_retention import LogBounds, LogRetention
from remit.world.files.disk import hint_unrelated_subdirectories
from remit.world.files.log_files import FileLogFiles
from remit.world.interfaces import Disk, DiskError, World
from remit.world.process.isolation import make_reachable

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.agent.callbacks import CallbackService
    from remit.agent.preparation.preparer import Preparer, SecretAndConfigStep
    from remit.client.authority_client import AuthorityClient, RetriesExhausted
    from remit.law.timing import Timing
    from remit.model.kinds import Node
    from remit.world.files.secret_files import TmpfsSecretFiles

KEEPER: Final = "keeper"
"""The keeper's name on the agent's link."""

SOCKET_BYTES_MAX: Final = 107
"""Maximum length of a Unix socket path."""

CACHE_FILES: Final = "files"
CACHE_TREES: Final = "trees"
"""Subdirectories of the cache: files as fetched, and unpacked root file systems."""

PRIVATE, PASSABLE = 0o700, 0o711


class AgentDirectory(NamedTuple):
    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def work(self) -> Path:
        """The real directory. A process of another user could not reach it through a link below a closed directory."""
        return self._work_path.readlink() if self._work_path.is_symlink() else self._work_path

    @property
    def _work_path(self) -> Path:
        return self.root / "work"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def secrets(self) -> Path:
        """Fallback directory for secrets, on a machine without memory-backed storage (world/files/secret_files.py)."""
        return self.root / "vault"

    @property
    def socket(self) -> Path:
        return self.run / "keeper.sock"

    @property
    def keeper_lock(self) -> Path:
        return self.run / "keeper.lock"

    @property
    def agent_lock(self) -> Path:
        return self.run / "agent.lock"

    @property
    def keeper_pid(self) -> Path:
        """Process id of the keeper, for people and tools. Only the lock proves that it runs."""
        return self.run / "keeper.pid"

    @property
    def agent_pid(self) -> Path:
        return self.run / "agent.pid"

    @property
    def keeper_log(self) -> Path:
        return self.run / "keeper.log"

    @property
    def journal(self) -> Path:
        return self.run / "journal"

    @property
    def epochs(self) -> Path:
        return self.run / "epochs"

    @property
    def identity(self) -> Path:
        """Random identity of this data directory. Leases are held under the agent's name plus this, so that two directories
        with the same node name do not share a lease.
        """
        return self.run / "identity"

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses for a link, by name."""
        return {KEEPER: f"unix:{self.socket}"}

    def write_pid(self, disk: Disk, path: Path, pid: int) -> None:
        """Write a pid file, for people and tools. A full disk must not prevent the start, but then an old pid is removed:
        another process may have that number by now.
        """
        try:
            disk.write_atomically(path, f"{pid}\n".encode())
        except DiskError:
            with suppress(DiskError):
                disk.remove(path)

    def remove_work_link(self) -> None:
        """Remove an empty work directory outside the data directory, once nothing runs. The next start creates it again."""
        if self._work_path.is_symlink():
            with suppress(OSError):
                self.work.rmdir()
                self._work_path.unlink()

    def create(self) -> None:
        """Create all directories. Raises OSError and `DiskError`, and ValueError with the fix if the path is too long."""
        if len(str(self.socket).encode()) > SOCKET_BYTES_MAX:
            raise ValueError(f"{self.socket}: a Unix socket path has at most {SOCKET_BYTES_MAX} bytes; use a shorter --data")
        private = (self.run, self.logs, self.cache / CACHE_FILES)
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(PASSABLE)
        make_reachable(self._work_path)
        passable = (self.root, self.work, self.cache, self.cache / CACHE_TREES)
        for path, mode in (
            *((directory, PASSABLE) for directory in passable),
            *((directory, PRIVATE) for directory in private),
        ):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)
            if path in (self.root, self.logs):
                hint_unrelated_subdirectories(path)


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
    from remit.client.rpc import material_source, order_feed

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
        order_feed(world.link, world.randomness.shuffled(servers), callback_token),
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
    from remit.world.files.artifacts import FetchPermissions

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
