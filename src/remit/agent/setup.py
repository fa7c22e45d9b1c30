"""Data directory layout and construction of agent and keeper on it. Light: the keeper process loads it.

Places in its one directory; what is in them is not known here.

    run/      for the two processes alone: locks, the keeper's socket and journal, which leases were held, their own logs
    logs/     what work says, a directory a node
    work/     a directory a copy: where it begins, and with a sandbox the only place that it can change
    cache/    files from elsewhere, by digest and tenant; and roots that were unpacked of them

Work that runs as a user of its own must reach its directory, so one may pass through the root, `work` and the roots in
`cache`; no more is open. Where a directory above is closed, `work` is a link (world/process/isolation.py). What each of them
holds, and each node's logs, has nothing to do with the others: a file system that can keeps them apart.

Wiring only. What an agent alone needs, a keeper does not load.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from remit.agent.keeper.keeper import Keeper
from remit.agent.keeper.log_retention import LogBounds, Sayings
from remit.world.files.disk import keep_apart
from remit.world.files.log_files import FileSpool
from remit.world.interfaces import Disk, DiskError, World
from remit.world.process.isolation import open_rooms

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.agent.callbacks import Answering
    from remit.agent.preparation import Delivering, Preparer
    from remit.client.authority_client import Client, NoAnswer
    from remit.law.timing import Tempo
    from remit.model.kinds import Node
    from remit.world.files.secret_files import FileVault

KEEPER: Final = "keeper"
"""What a keeper is called on its agent's link."""

SOCKET_BYTES_MAX: Final = 107
"""The longest path of a Unix socket."""

FILES: Final = "files"
TREES: Final = "trees"
"""What is in the cache: files as they came, and roots unpacked."""

PRIVATE, PASSABLE = 0o700, 0o711


class Directory(NamedTuple):
    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def work(self) -> Path:
        """Where it truly is: work of another user could not come there by a link below what is closed to it."""
        return self._work.readlink() if self._work.is_symlink() else self._work

    @property
    def _work(self) -> Path:
        return self.root / "work"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def vault(self) -> Path:
        """What work reads and no disk should keep, on a machine that has no memory for it (world/files/secret_files.py)."""
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
        """The number of the keeper's process, for people and tools: the lock is what counts."""
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
        """What tells this directory from any other of the same name: a lease is held by a name and this."""
        return self.run / "identity"

    @property
    def addresses(self) -> dict[str, str]:
        """For a link: whom it reaches, and where."""
        return {KEEPER: f"unix:{self.socket}"}

    def tell_pid(self, disk: Disk, path: Path, pid: int) -> None:
        """Who runs here, for people and tools. On a full disk nobody is told, and that is no reason not to run: but no number
        of an earlier one may stay there, since somebody else may have that by now.
        """
        try:
            disk.write_atomically(path, f"{pid}\n".encode())
        except DiskError:
            with suppress(DiskError):
                disk.remove(path)

    def tidy(self) -> None:
        """When nothing runs any more: a place elsewhere that is empty goes, and is made again at the next start."""
        if self._work.is_symlink():
            with suppress(OSError):
                self.work.rmdir()
                self._work.unlink()

    def make(self) -> None:
        """All of it. Raises OSError and `DiskError`; and ValueError for a path that is too long, with the cure."""
        if len(str(self.socket).encode()) > SOCKET_BYTES_MAX:
            raise ValueError(f"{self.socket} has more than {SOCKET_BYTES_MAX} bytes, which no socket may; use a shorter --data")
        private = (self.run, self.logs, self.cache / FILES)
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(PASSABLE)
        open_rooms(self._work)
        passable = (self.root, self.work, self.cache, self.cache / TREES)
        for place, mode in (*((one, PASSABLE) for one in passable), *((one, PRIVATE) for one in private)):
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(mode)
            if place in (self.root, self.logs):
                keep_apart(place)


def _unsaid(*words: object, **fields: object) -> None:
    """Nobody listens."""


class Lends(NamedTuple):
    """What of the machine work may have: directories of `file:` artifacts, hosts that are not public, directories to mount."""

    artifact_directories: tuple[Path, ...] = ()
    artifact_hosts: tuple[str, ...] = ()
    host_paths: tuple[Path, ...] = ()
    cache_bytes: int = 10 << 30
    hidden: tuple[Path, ...] = ()
    """What a sandbox shows nothing of, beside the agent's own directory."""
    user: str = ""
    """As whom work runs that names nobody; empty: as the agent does."""


def keeper(world: World, directory: Directory, bounds: LogBounds, tell: Callable[[str], None]) -> Keeper:
    """The caller serves it as `KEEPER`, and runs it."""
    sayings = Sayings(world, FileSpool(), directory.logs, bounds)
    return Keeper(world, directory.journal, sayings, rooms=directory.work, tell=tell)


def agent(
    world: World,
    client: Client,
    servers: Sequence[str],
    directory: Directory,
    nodes: Sequence[Node],
    *,
    name: str,
    scope: str,
    tempo: Tempo,
    sandbox: bool,
    callback: str = "",
    lends: Lends | None = None,
    revive: Callable[[], Awaitable[None]] | None,
    tell: Callable[..., None],
    failed: Callable[[NoAnswer], None] | None = None,
    note: Callable[..., None] = _unsaid,
) -> Agent:
    """`name` is who holds the nodes' leases: no other agent's. `servers` are names on the world's link. The caller runs it."""
    from remit.agent.agent import Agent
    from remit.agent.hosted_node import Hosted
    from remit.agent.keeper.protocol import Keeping
    from remit.agent.preparation import Delivering
    from remit.agent.run_spec import Place
    from remit.client.rpc import material_source, order_feed

    lends = lends or Lends()
    kept = vault(directory)
    if not kept.in_memory:
        tell(f"there is no /dev/shm to keep secrets in: those of running work lie on disk, in {directory.vault}")
    delivering = Delivering(world, material_source(world.link, world.chance.shuffled(servers), world.clock), kept)
    names = [node.metadata.name for node in nodes]
    root, rooms = directory.root.absolute(), directory.work.absolute()
    hidden = (root, *(() if root in rooms.parents else (rooms,)), *lends.hidden)
    places = [Place(one, scope, directory.logs / one, directory.work, sandbox, hidden=hidden, user=lends.user) for one in names]
    made = Agent(
        world,
        client,
        order_feed(world.link, world.chance.shuffled(servers), callback),
        Keeping(world.link, KEEPER, world.clock),
        [Hosted(node, place) for node, place in zip(nodes, places, strict=True)],
        name=name,
        tempo=tempo,
        preparer=_preparer(world, directory, lends, delivering),
        epochs=directory.epochs,
        revive=revive,
        failed=failed,
        tell=tell,
        note=note,
    )
    delivering.speaks = made.actor
    return made


def vault(directory: Directory) -> FileVault:
    """Of the work of this directory's agent."""
    from remit.world.files.secret_files import FileVault

    return FileVault(directory.root, directory.vault)


def _preparer(world: World, directory: Directory, lends: Lends, delivering: Delivering) -> Preparer:
    from remit.agent.artifacts import Artifacts, Roots, Shelf
    from remit.agent.preparation import Preparer
    from remit.agent.volumes import Volumes
    from remit.world.files.artifacts import Reach

    shelf = Shelf(world, directory.cache, Reach(lends.artifact_directories, lends.artifact_hosts), lends.cache_bytes)
    # What it reads comes last: as it is when it starts, and not before long fetches.
    steps = (Artifacts(world, shelf), Roots(world, shelf, lends.host_paths), Volumes(world, lends.host_paths), delivering)
    return Preparer(world, steps)


def answering(world: World, agent: Agent, token: str) -> Answering:
    """What this agent's work says, and commands beside it, for whoever shows the token: the callback that servers are told."""
    from remit.agent.callbacks import Answering, Logs, Sessions

    return Answering(Logs(world, FileSpool(), token, agent.log_places), Sessions(world, token, agent.beside))
