"""How are an agent and a keeper put together on a directory? Wiring only. What an agent alone needs, a keeper does not load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remit.agent.directory import KEEPER, Directory
from remit.agent.keeper import Keeper
from remit.agent.saying import LogBounds, Sayings
from remit.world.promises import World
from remit.world.spool import FileSpool

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.agent.answering import Answering
    from remit.agent.delivering import Delivering
    from remit.agent.preparing import Preparer
    from remit.client.client import Client, NoAnswer
    from remit.law.tempo import Tempo
    from remit.model.kinds import Node
    from remit.world.vault import FileVault


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
    from remit.agent.delivering import Delivering
    from remit.agent.hosting import Hosted
    from remit.agent.keeping import Keeping
    from remit.agent.work import Place
    from remit.client.material import material_source
    from remit.client.orders import order_feed

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
    from remit.world.vault import FileVault

    return FileVault(directory.root, directory.vault)


def _preparer(world: World, directory: Directory, lends: Lends, delivering: Delivering) -> Preparer:
    from remit.agent.artifacts import Artifacts, Roots
    from remit.agent.caching import Shelf
    from remit.agent.preparing import Preparer
    from remit.agent.volumes import Volumes
    from remit.world.carriage import Reach

    shelf = Shelf(world, directory.cache, Reach(lends.artifact_directories, lends.artifact_hosts), lends.cache_bytes)
    # What it reads comes last: as it is when it starts, and not before long fetches.
    steps = (Artifacts(world, shelf), Roots(world, shelf, lends.host_paths), Volumes(world, lends.host_paths), delivering)
    return Preparer(world, steps)


def answering(world: World, agent: Agent, token: str) -> Answering:
    """What this agent's work says, and commands beside it, for whoever shows the token: the callback that servers are told."""
    from remit.agent.answering import Answering
    from remit.agent.logs import Logs
    from remit.agent.sessions import Sessions

    return Answering(Logs(world, FileSpool(), token, agent.log_places), Sessions(world, token, agent.beside))
