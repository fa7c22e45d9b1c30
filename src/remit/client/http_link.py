"""`Link` over HTTP between components and servers, and how a component connects.

A link: what is said is serve/components/component_rpc.py's, retrying is client.py's.

A request is one POST, a stream is one POST whose answer is lines. Nobody is served here: that is what serve/ is for.

A server that does not know the token (401) is left alone for a while that doubles, whoever asks meanwhile: a component whose
token was revoked would else ask many times a second, for ever, and from every machine that was turned out.

Wiring: one link, a client for each actor, and the rows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

from remit.client.authority_client import Client
from remit.client.http_transport import Answered, Wire, server_url
from remit.client.remote_store import RemoteRows
from remit.client.retry import RetryShape
from remit.client.rpc import Remote, ToldToWait
from remit.model.claims import Actor
from remit.world.interfaces import Chance, Clock, Link, LinkError, NotServed, Service, Unheard, Unreached, World
from remit.world.net.tls import Trust

ASK: Final = "/v1/ask"
FOLLOW: Final = "/v1/follow"

NOT_BEGUN: Final = frozenset({301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 406, 411, 413, 414, 415, 421, 429, 431, 503})
"""With these a server says that it has not begun."""

UNKNOWN: Final = 401
SHUNNED_MS: Final = 1_000
SHUNNED_MS_MAX: Final = 60_000
"""For so long, at first and at most, a server that does not know the token is not asked again."""

BEGUN: Final = frozenset({"timeout", "fault"})
"""Codes that say otherwise, whatever the status."""


class Shunned(NamedTuple):
    """By a server, so often in a row; and until when it is left alone, with what it said."""

    times: int
    until_ms: int
    said: str
    cure: str


class Manners:
    """Whom not to ask again so soon. `tell` is for people, and hears of every answer that says so."""

    def __init__(self, clock: Clock, chance: Chance, tell: Callable[[str], None] | None = None) -> None:
        self._clock, self._chance, self._tell = clock, chance, tell
        self._shunned: dict[str, Shunned] = {}

    def check(self, to: str) -> None:
        """Raises `Unreached` while it is left alone: nothing was asked."""
        found = self._shunned.get(to)
        if found is not None and self._clock.now_ms() < found.until_ms:
            raise Unreached(found.said, found.cure)

    def known(self, to: str) -> None:
        self._shunned.pop(to, None)

    def turned_out(self, to: str, error: LinkError) -> None:
        times = self._shunned[to].times + 1 if to in self._shunned else 1
        pause_ms = min(SHUNNED_MS_MAX, SHUNNED_MS << min(times - 1, 20))
        until_ms = self._clock.now_ms() + pause_ms // 2 + self._chance.uniform_ms(pause_ms // 2)
        self._shunned[to] = Shunned(times, until_ms, error.cause, error.cure)
        if self._tell is not None:
            self._tell(f"{error}; it is asked less and less often, once a minute in the end")


class HttpLink:
    """A name in `urls` is reached by HTTP; any other `beside` this, by another link. Satisfies `world.promises.Link`."""

    def __init__(
        self,
        urls: Mapping[str, str],
        token: str,
        *,
        beside: Link | None = None,
        trust: Trust = Trust(),
        manners: Manners | None = None,
    ) -> None:
        self._urls = {name: server_url(url) for name, url in urls.items()}
        self._wire = Wire(token, trust)
        self._beside, self._manners = beside, manners

    def show(self, trust: Trust) -> None:
        self._wire.show(trust)
        if self._manners is not None:
            for name in self._urls:
                self._manners.known(name)

    async def close(self) -> None:
        """End every connection; what `beside` holds is its own affair."""
        await self._wire.close()

    async def request(self, to: str, body: bytes, /) -> bytes:
        url = self._urls.get(to)
        if url is None:
            return await self._other(to).request(to, body)
        if self._manners is not None:
            self._manners.check(to)
        answer = await self._wire.call("POST", url + ASK, body)
        self._heed(to, answer.status)
        if answer.status != 200:
            raise self._failed(to, answer)
        return answer.body

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        url = self._urls.get(to)
        if url is None:
            async with aclosing(self._other(to).stream(to, body)) as items:
                async for item in items:
                    yield item
            return
        if self._manners is not None:
            self._manners.check(to)
        async with self._wire.opened("POST", url + FOLLOW, body) as reply:
            self._heed(to, reply.status)
            if reply.status != 200:
                raise self._failed(to, await reply.whole())
            async with aclosing(reply.lines()) as lines:
                async for line in lines:
                    yield line

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        if self._beside is not None and at not in self._urls:
            return self._beside.serve(at, service)
        return _not_served(at)

    def _heed(self, to: str, status: int) -> None:
        if status != UNKNOWN and self._manners is not None:
            self._manners.known(to)

    def _failed(self, to: str, answer: Answered) -> LinkError:
        failure = _failure(to, answer)
        if answer.status == UNKNOWN and self._manners is not None:
            self._manners.turned_out(to, failure)
        return failure

    def _other(self, to: str) -> Link:
        if self._beside is None:
            raise Unreached(f"no address is known for {to}", "add it to the servers of this process")
        return self._beside


@asynccontextmanager
async def _not_served(at: str) -> AsyncGenerator[None, None]:
    raise NotServed(f"nothing is answered at {at} over a link that only asks", "serve it by `remit server`")
    yield  # type: ignore[unreachable]  # it makes this a context


def _failure(to: str, answer: Answered) -> LinkError:
    problem = answer.problem()
    said = f"{to} said {answer.status}: {problem.detail or problem.title or problem.code or 'no more'}"
    if answer.status not in NOT_BEGUN or problem.code in BEGUN:
        return Unheard(said, problem.cure or "see what it says of that, then ask again")
    cure = problem.cure or ("give the token that this server knows" if answer.status == UNKNOWN else "ask again later")
    if answer.status in (429, 503):
        return ToldToWait(said, cure, answer.retry_after_ms())
    return Unreached(said, cure)


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
