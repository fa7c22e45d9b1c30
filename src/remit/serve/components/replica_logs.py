"""Connections to agents; log streaming.

Asked of the agent of its node and passed on as it comes; nothing that an agent says is followed.

Each asker has a connection of its own to the agent, which ends with it; there are only so many.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from remit.law.certificate_identity import acts_for
from remit.model.identity import Principal
from remit.model.kinds import Node
from remit.model.problems import escaped, quoted
from remit.model.records import Replica
from remit.model.wire.agent_messages import LogsRequest
from remit.observation.watch_cache import Board
from remit.serve.http.connection_limits import SharedLimit
from remit.serve.http.replies import ApiProblem
from remit.world.interfaces import Clock, LinkError
from remit.world.net.rpc_client import SocketLink
from remit.world.net.tls import Secure

if TYPE_CHECKING:
    from remit.world.net.server_keys import TlsKeys

CONNECTIONS_MAX: Final = 256
"""Of all; of one tenant a part (shares.py)."""
TENANT_SESSIONS_MAX: Final = 32
AGENT_ANSWER_MS: Final = 10_000
"""How long an agent may take to begin, and to go on with what is there already."""

CHUNK_BYTES_MAX: Final = 1 << 20
"""An agent that sends more than this in one piece is none of ours."""

QUIET_MS: Final = 1_000
"""Who follows may hear nothing for long, since nothing is written; after so long it is taken to have begun."""

Stream = Literal["stdout", "stderr", "both"]
AGENT: Final = "agent"
_encode = msgspec.json.Encoder().encode


class LogOptions(NamedTuple):
    """`attempt` None: the latest; `previous`: the one before it."""

    stream: Stream = "both"
    tail: int | None = None
    follow: bool = False
    attempt: int | None = None
    previous: bool = False


class AgentConnections:
    """Those of a scope's nodes, as far as they can be asked. What each is asked for beside output is in execs.py."""

    def __init__(self, watch_cache: Board, clock: Clock, callbacks: Mapping[str, str], tls: TlsKeys | None = None) -> None:
        self.tls = tls
        self._watch_cache, self._clock, self._callbacks = watch_cache, clock, callbacks
        self._connections = SharedLimit(CONNECTIONS_MAX)
        self._sessions: Counter[str] = Counter()

    def callback_token(self, node: Node) -> str:
        """What the node's agent wants to be shown by whoever asks it."""
        return self._callbacks.get(node.metadata.name, "")

    async def logs(self, principal: Principal, tenant: str, name: str, options: LogOptions) -> AsyncGenerator[bytes, None]:
        """The pieces, once the agent has begun. Raises `ApiProblem`."""
        replica = self.get_replica(tenant, name)
        node = self.node_of(replica)
        logs_request = LogsRequest(
            token=self.callback_token(node),
            key=f"replica/{tenant}/{name}",
            uid=replica.metadata.uid,
            attempt=_resolve_attempt(replica, options),
            stream=options.stream,
            tail=options.tail,
            follow=options.follow,
        )
        chunks = self._log_chunks(principal, node, logs_request)
        await anext(chunks)  # nothing yet, but it has begun: from here on whoever closes it ends the connection
        return chunks

    def get_replica(self, tenant: str, name: str) -> Replica:
        replica: Replica | None = self._watch_cache.get(f"replica/{tenant}/{name}")
        if replica is None:
            detail = f"there is no replica {quoted(name)} of tenant {quoted(tenant)}"
            raise ApiProblem(404, "not_found", detail, field="name", cure=f"list them: /v1/tenants/{tenant}/replicas")
        return replica

    def node_of(self, replica: Replica) -> Node:
        """Whose agent can be asked of it."""
        tenant, name = replica.metadata.tenant, replica.metadata.name
        if not replica.status.node:
            detail = f"replica {name} is {replica.status.phase.value} and stands on no node, so it has written nothing yet"
            raise ApiProblem(404, "not_found", detail, cure=f"ask why: /v1/tenants/{tenant}/replicas/{name}/explain")
        node: Node | None = self._watch_cache.get(f"node/{replica.status.node}")
        if node is None:
            detail = f"node {replica.status.node}, on which {name} ran, is not there any more"
            raise ApiProblem(404, "not_found", detail, cure="what was written there is on that machine, if that still exists")
        if not node.spec.port:
            detail = f"the agent of node {node.metadata.name} does not say where it can be asked"
            raise ApiProblem(404, "not_found", detail, cure="run an agent there that does (remit agent), or look on that machine")
        return node

    async def _log_chunks(self, principal: Principal, node: Node, logs_request: LogsRequest) -> AsyncGenerator[bytes, None]:
        """Nothing, once the agent has begun; then what it sends. If it does not begin, raises `ApiProblem`."""
        link = agent_link(node, self.tls)
        with self.connection_slot(principal):
            items = link.stream(AGENT, _encode(logs_request))
            next_chunk = asyncio.ensure_future(_next_or_none(items))
            try:
                await self._wait_for_start(node, next_chunk, follow=logs_request.follow)
                yield b""
                while (chunk := await next_chunk) is not None:
                    next_chunk = asyncio.ensure_future(_next_or_none(items))
                    if chunk:
                        yield chunk
                    if not logs_request.follow and not await self._arrives_within(next_chunk, AGENT_ANSWER_MS):
                        yield _truncation_notice(node, "it said nothing more")
                        return
            except LinkError as error:
                yield _truncation_notice(node, error.cause)
            finally:
                next_chunk.cancel()
                await asyncio.wait((next_chunk,))
                await items.aclose()
                await link.close()

    async def _wait_for_start(self, node: Node, first_chunk: asyncio.Future[bytes | None], *, follow: bool) -> None:
        arrived = await self._arrives_within(first_chunk, QUIET_MS if follow else AGENT_ANSWER_MS)
        if arrived and isinstance(error := first_chunk.exception(), LinkError):
            raise agent_unreachable(node, error.cause) from error
        if not arrived and not follow:
            raise agent_unreachable(node, f"it said nothing for {AGENT_ANSWER_MS // 1_000} seconds")

    async def _arrives_within(self, chunk: asyncio.Future[bytes | None], within_ms: int) -> bool:
        with suppress(TimeoutError):
            async with self._clock.timeout_ms(within_ms):
                await asyncio.wait((chunk,))
        return chunk.done()

    @contextmanager
    def connection_slot(self, principal: Principal) -> Iterator[None]:
        if not self._connections.acquire(principal):
            detail = f"{self._connections.held} read from agents already, and no more are taken of {principal.tenant or principal.subject}"
            raise ApiProblem(429, "overloaded", detail, cure="end one that is not needed", retry_after_ms=1_000)
        try:
            yield
        finally:
            self._connections.release(principal)

    @contextmanager
    def session_slot(self, tenant: str) -> Iterator[None]:
        """One command more that runs beside a replica of a tenant."""
        if self._sessions[tenant] >= TENANT_SESSIONS_MAX:
            detail = f"{TENANT_SESSIONS_MAX} commands run beside replicas of tenant {tenant} already"
            raise ApiProblem(429, "overloaded", detail, cure="end one that is not needed", retry_after_ms=5_000)
        self._sessions[tenant] += 1
        try:
            yield
        finally:
            self._sessions[tenant] -= 1
            if not self._sessions[tenant]:
                del self._sessions[tenant]


async def _next_or_none(items: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(items, None)


def agent_link(node: Node, tls: TlsKeys | None = None) -> SocketLink:
    """A connection of its own to the agent of a node, by the name `AGENT`. It is the caller's to close. With `tls` it is to
    nobody but who has this node's certificate.
    """
    spec = node.spec
    host = f"[{spec.address}]" if ":" in spec.address else spec.address or "127.0.0.1"
    try:
        if tls is None:
            return SocketLink({AGENT: f"tcp:{host}:{spec.port}"}, bytes_max=CHUNK_BYTES_MAX)
        secure = Secure(lambda bearer: acts_for(bearer, [node.metadata.name]), lambda: tls.calling)
        return SocketLink({AGENT: f"tls:{host}:{spec.port}"}, secure, bytes_max=CHUNK_BYTES_MAX)
    except ValueError as error:
        raise agent_unreachable(node, str(error)) from error


def _resolve_attempt(replica: Replica, options: LogOptions) -> int:
    latest, name = replica.status.attempt, replica.metadata.name
    if options.previous and options.attempt is not None:
        detail = "attempt and previous are both given"
        raise ApiProblem(400, "malformed", detail, field="previous", cure="name an attempt, or ask for the previous one")
    attempt = latest - 1 if options.previous else latest if options.attempt is None else options.attempt
    if not 1 <= attempt <= latest:
        detail = f"replica {name} has had {latest} attempt{'s' if latest > 1 else ''}, and no number {attempt}"
        raise ApiProblem(404, "not_found", detail, field="previous" if options.previous else "attempt", cure=f"ask for 1 to {latest}")
    return attempt


def agent_unreachable(node: Node, reason: str) -> ApiProblem:
    name, health = node.metadata.name, node.status.health.value
    detail = f"the agent of node {name} does not answer: {escaped(reason)}"
    cure = f"see whether it runs there (the node is {health}); what was written stays on that machine"
    return ApiProblem(502, "unavailable", detail, cure=cure)


def _truncation_notice(node: Node, reason: str) -> bytes:
    """The last line of what cannot be told to its end: the answer has begun, so its status says nothing of this."""
    return f"\n-- the agent of node {node.metadata.name} broke off: {escaped(reason)} --\n".encode()
