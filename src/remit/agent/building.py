"""How are an agent and a keeper put together on a directory? Wiring only. What an agent alone needs, a keeper does not load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from remit.agent.directory import KEEPER, Directory
from remit.agent.keeper import Keeper
from remit.agent.saying import LogBounds, Sayings
from remit.world.promises import World
from remit.world.spool import FileSpool

if TYPE_CHECKING:
    from remit.agent.agent import Agent
    from remit.agent.logs import Logs
    from remit.client.client import Client, NoAnswer
    from remit.law.tempo import Tempo
    from remit.model.kinds import Node


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
    revive: Callable[[], Awaitable[None]] | None,
    tell: Callable[[str], None],
    failed: Callable[[NoAnswer], None] | None = None,
) -> Agent:
    """`name` is who holds the nodes' leases: no other agent's. `servers` are names on the world's link. The caller runs it."""
    from remit.agent.agent import Agent
    from remit.agent.hosting import Hosted
    from remit.agent.keeping import Keeping
    from remit.agent.work import Place
    from remit.client.orders import order_feed

    names = [node.metadata.name for node in nodes]
    places = [Place(one, scope, directory.logs / one, directory.work, sandbox) for one in names]
    return Agent(
        world,
        client,
        order_feed(world.link, world.chance.shuffled(servers)),
        Keeping(world.link, KEEPER, world.clock),
        [Hosted(node, place) for node, place in zip(nodes, places, strict=True)],
        name=name,
        tempo=tempo,
        epochs=directory.epochs,
        revive=revive,
        failed=failed,
        tell=tell,
    )


def logs(world: World, agent: Agent, token: str) -> Logs:
    """What this agent's work says, for whoever has the token."""
    from remit.agent.logs import Logs

    return Logs(world, FileSpool(), token, agent.log_places)
