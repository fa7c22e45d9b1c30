"""`Link` over HTTP between components and servers, and how a component connects.

A request is one POST; a stream is one POST whose response is read line by line. The message types are in
serve/components/component_rpc.py and retries in authority_client.py. This link cannot serve: that is the job of serve/.

After a server rejects the token (401), the link sends it nothing for a backoff period that doubles. Otherwise a component
with a revoked token would send many requests per second, for ever, from every machine that was removed from the cluster.

`connect` builds one link, a client for each actor, and the remote store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

from remit.client.authority_client import AuthorityClient
from remit.client.http_transport import HttpResponse, HttpTransport, server_url
from remit.client.remote_store import RemoteStore
from remit.client.retry import RetryPolicy
from remit.client.rpc import EndpointStub, RetryLater
from remit.model.claims import Actor
from remit.world.interfaces import Clock, Link, LinkError, ListenFailed, NotSent, Randomness, ReplyLost, Service, World
from remit.world.net.tls import Trust

REQUEST_PATH: Final = "/v1/ask"
STREAM_PATH: Final = "/v1/follow"

NOT_STARTED: Final = frozenset({301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 406, 411, 413, 414, 415, 421, 429, 431, 503})
"""Statuses with which a server reports that it did not start the request."""

UNAUTHORIZED: Final = 401
REJECTION_BACKOFF_MS: Final = 1_000
REJECTION_BACKOFF_MS_MAX: Final = 60_000
"""Initial and maximum backoff for a server that rejects the token."""

MAYBE_STARTED: Final = frozenset({"timeout", "fault"})
"""Problem codes which mean that the request may have been started, even with a status in `NOT_STARTED`."""


class ServerRejection(NamedTuple):
    """Rejections by one server: how many in a row, until when it is not contacted, and the error of the last one."""

    times: int
    until_ms: int
    message: str
    cure: str


class ServerBackoff:
    """Backoff for servers that reject the token. `log` reports each rejection for operators."""

    def __init__(self, clock: Clock, randomness: Randomness, log: Callable[[str], None] | None = None) -> None:
        self._clock, self._randomness, self._log = clock, randomness, log
        self._rejections: dict[str, ServerRejection] = {}

    def check(self, to: str) -> None:
        """Raise `NotSent` while the server is in backoff: no request is sent."""
        rejection = self._rejections.get(to)
        if rejection is not None and self._clock.now_ms() < rejection.until_ms:
            raise NotSent(rejection.message, rejection.cure)

    def on_accepted(self, to: str) -> None:
        self._rejections.pop(to, None)

    def on_rejected(self, to: str, error: LinkError) -> None:
        times = self._rejections[to].times + 1 if to in self._rejections else 1
        pause_ms = min(REJECTION_BACKOFF_MS_MAX, REJECTION_BACKOFF_MS << min(times - 1, 20))
        until_ms = self._clock.now_ms() + pause_ms // 2 + self._randomness.jitter_ms(pause_ms // 2)
        self._rejections[to] = ServerRejection(times, until_ms, error.cause, error.cure)
        if self._log is not None:
            self._log(f"{error}; the server is contacted less and less often, down to once a minute")


class HttpLink:
    """Reaches names in `urls` over HTTP, and all other names over the link `fallback`. Implements `world.interfaces.Link`."""

    def __init__(
        self,
        urls: Mapping[str, str],
        token: str,
        *,
        fallback: Link | None = None,
        trust: Trust = Trust(),
        backoff: ServerBackoff | None = None,
    ) -> None:
        self._urls = {name: server_url(url) for name, url in urls.items()}
        self._transport = HttpTransport(token, trust)
        self._fallback, self._backoff = fallback, backoff

    def use_certificate(self, trust: Trust) -> None:
        self._transport.use_certificate(trust)
        if self._backoff is not None:
            for name in self._urls:
                self._backoff.on_accepted(name)

    async def close(self) -> None:
        """Close every HTTP connection. The fallback link is not closed."""
        await self._transport.close()

    async def request(self, to: str, body: bytes, /) -> bytes:
        url = self._urls.get(to)
        if url is None:
            return await self._fallback_for(to).request(to, body)
        if self._backoff is not None:
            self._backoff.check(to)
        response = await self._transport.call("POST", url + REQUEST_PATH, body)
        self._note_status(to, response.status)
        if response.status != 200:
            raise self._rejected(to, response)
        return response.body

    async def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        url = self._urls.get(to)
        if url is None:
            async with aclosing(self._fallback_for(to).stream(to, body)) as items:
                async for item in items:
                    yield item
            return
        if self._backoff is not None:
            self._backoff.check(to)
        async with self._transport.open_stream("POST", url + STREAM_PATH, body) as response:
            self._note_status(to, response.status)
            if response.status != 200:
                raise self._rejected(to, await response.read_all())
            async with aclosing(response.lines()) as lines:
                async for line in lines:
                    yield line

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        if self._fallback is not None and at not in self._urls:
            return self._fallback.serve(at, service)
        return _not_served(at)

    def _note_status(self, to: str, status: int) -> None:
        if status != UNAUTHORIZED and self._backoff is not None:
            self._backoff.on_accepted(to)

    def _rejected(self, to: str, response: HttpResponse) -> LinkError:
        failure = _error_from_response(to, response)
        if response.status == UNAUTHORIZED and self._backoff is not None:
            self._backoff.on_rejected(to, failure)
        return failure

    def _fallback_for(self, to: str) -> Link:
        if self._fallback is None:
            raise NotSent(f"no address is configured for {to}", "add it to the servers of this process")
        return self._fallback


@asynccontextmanager
async def _not_served(at: str) -> AsyncGenerator[None, None]:
    raise ListenFailed(f"cannot serve {at} over an HTTP client link", "serve it with `remit server`")
    yield  # type: ignore[unreachable] # the yield makes this a context manager


def _error_from_response(to: str, response: HttpResponse) -> LinkError:
    problem = response.problem()
    message = f"{to} returned {response.status}: {problem.detail or problem.title or problem.code or 'no details'}"
    if response.status not in NOT_STARTED or problem.code in MAYBE_STARTED:
        return ReplyLost(message, problem.cure or "check the server's log, then retry")
    cure = problem.cure or ("use a token that this server accepts" if response.status == UNAUTHORIZED else "retry later")
    if response.status in (429, 503):
        return RetryLater(message, cure, response.retry_after_ms())
    return NotSent(message, cure)


@dataclass(frozen=True, slots=True)
class ScopeConnection:
    """How a component reaches a scope. `names` are the servers, each named by its address, so that leader hints of servers that
    use their address as name can be followed.

    `world` is the given one with `link` in it. Names without an HTTP address are reached as before. Close it, or use it
    as a context manager.
    """

    link: HttpLink
    names: tuple[str, ...]
    world: World
    store: RemoteStore
    """A read-only store over the scope's rows."""

    def client_for(self, actor: Actor, *, policy: RetryPolicy = RetryPolicy()) -> AuthorityClient:
        """Return a client for one actor, with its own retry budget; all clients share the connections."""
        return AuthorityClient({name: EndpointStub(self.link, name) for name in self.names}, actor, self.world, policy=policy)

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
    log: Callable[[str], None] | None = None,
) -> ScopeConnection:
    """Build the connection to a scope; sends nothing yet. `log` reports servers that reject the token.

    Raises ValueError for an invalid address or token, with the expected form, and `TlsFileError` for unreadable TLS files.
    """
    if not servers:
        raise ValueError("no server given; name at least one as http://HOST:PORT")
    names = tuple(dict.fromkeys(server_url(server) for server in servers))
    link = HttpLink(
        {name: name for name in names},
        token,
        fallback=world.link,
        trust=trust,
        backoff=ServerBackoff(world.clock, world.randomness, log),
    )
    return ScopeConnection(link, names, replace(world, link=link), RemoteStore(link, names))
