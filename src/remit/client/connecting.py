"""How does a component reach its scope's servers over HTTP? Wiring: one link, a client for each actor, and the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from remit.client.client import Client
from remit.client.http import HttpLink, Manners
from remit.client.remote import Remote
from remit.client.retry import RetryShape
from remit.client.rows import RemoteRows
from remit.client.wire import server_url
from remit.model.claims import Actor
from remit.world.promises import World
from remit.world.tls import Trust


@dataclass(frozen=True, slots=True)
class Connected:
    """`names` are the servers, each called by its address: a server that goes by that name too is found by its fellows' hints.

    `world` is the one that was given, with `link` in it: whom that does not reach by HTTP, it reaches as before. Close it, or
    leave it as a context.
    """

    link: HttpLink
    names: tuple[str, ...]
    world: World
    rows: RemoteRows
    """A scope's rows, to be read; a store that cannot be written."""

    def client_for(self, actor: Actor, *, shape: RetryShape = RetryShape()) -> Client:
        """Each asker has its own, with its own budget of retries; all share the connections."""
        return Client({name: Remote(self.link, name) for name in self.names}, actor, self.world, shape=shape)

    async def close(self) -> None:
        await self.link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def connect(
    servers: Sequence[str],
    token: str,
    world: World,
    *,
    trust: Trust = Trust(),
    tell: Callable[[str], None] | None = None,
) -> Connected:
    """Nothing is sent yet. `tell` hears, in words for people, of a server that does not know the token. Raises ValueError for
    what is no address or no token, with what to write instead; and `Unusable`.
    """
    if not servers:
        raise ValueError("name at least one server, as http://HOST:PORT")
    names = tuple(dict.fromkeys(server_url(server) for server in servers))
    link = HttpLink(
        {name: name for name in names}, token, beside=world.link, trust=trust, manners=Manners(world.clock, world.chance, tell)
    )
    return Connected(link, names, replace(world, link=link), RemoteRows(link, names))
