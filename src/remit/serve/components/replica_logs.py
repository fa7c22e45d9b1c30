"""Connections to agents; log streaming.

Logs are requested from the agent of the replica's node and relayed as they come. Each client has its own connection to the
agent, which ends with it; their number is limited. Data from an agent is bounded and never interpreted.
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
from remit.observation.watch_cache import WatchCache
from remit.serve.http.connection_limits import SharedLimit
from remit.serve.http.replies import ApiProblem
from remit.world.interfaces import Clock, LinkError
from remit.world.net.rpc_client import SocketLink
from remit.world.net.tls import LinkTls

if TYPE_CHECKING:
    from remit.world.net.server_keys import TlsKeys

CONNECTIONS_MAX: Final = 256
"""In all; a tenant gets a part of it (http/connection_limits.py)."""
TENANT_SESSIONS_MAX: Final = 32
AGENT_ANSWER_MS: Final = 10_000
"""How long an agent may take to start answering, and to send more of what is already written."""

CHUNK_BYTES_MAX: Final = 1 << 20
"""Largest message accepted from an agent."""

QUIET_MS: Final = 1_000
"""When following a log, silence is normal, so the stream counts as started after this time without an error."""

Stream = Literal["stdout", "stderr", "both"]
AGENT: Final = "agent"
_encode = msgspec.json.Encoder().encode


class LogOptions(NamedTuple):
    """Which part of a log to read. `attempt` None: the latest; `previous`: the one before it."""

    stream: Stream = "both"
    tail: int | None = None
    follow: bool = False
    attempt: int | None = None
    previous: bool = False


class AgentConnections:
    """Reaches the agents of a scope's nodes for logs; exec_sessions.py uses it for exec."""

    def __init__(self, watch_cache: WatchCache, clock: Clock, callbacks: Mapping[str, str], tls: TlsKeys | None = None) -> None:
        self.tls = tls
        self._watch_cache, self._clock, self._callbacks = watch_cache, clock, callbacks
        self._connections = SharedLimit(CONNECTIONS_MAX)
        self._sessions: Counter[str] = Counter()

    def callback_token(self, node: Node) -> str:
        """Return the token that a caller must present to the agent of this node."""
        return self._callbacks.get(node.metadata.name, "")

    async def logs(self, principal: Principal, tenant: str, name: str, options: LogOptions) -> AsyncGenerator[bytes, None]:
        """Return the chunks of a log once the agent has started to answer. Raises `ApiProblem`."""
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
        await anext(
            chunks
        )  # the first item is empty and marks the start: from here on closing the generator closes the connection
        return chunks

    def get_replica(self, tenant: str, name: str) -> Replica:
        replica: Replica | None = self._watch_cache.get(f"replica/{tenant}/{name}")
        if replica is None:
            detail = f"there is no replica {quoted(name)} in tenant {quoted(tenant)}"
            raise ApiProblem(404, "not_found", detail, field="name", cure=f"list the replicas: /v1/tenants/{tenant}/replicas")
        return replica

    def node_of(self, replica: Replica) -> Node:
        """Return the node whose agent has the replica's output. Raises `ApiProblem`."""
        tenant, name = replica.metadata.tenant, replica.metadata.name
        if not replica.status.node:
            detail = f"replica {name} is {replica.status.phase.value} and is not on a node, so it has no output to read"
            raise ApiProblem(404, "not_found", detail, cure=f"find out why: /v1/tenants/{tenant}/replicas/{name}/explain")
        node: Node | None = self._watch_cache.get(f"node/{replica.status.node}")
        if node is None:
            detail = f"node {replica.status.node}, where replica {name} ran, no longer exists"
            raise ApiProblem(404, "not_found", detail, cure="read the log files on that machine, if it still exists")
        if not node.spec.port:
            detail = f"the agent of node {node.metadata.name} has no callback port"
            raise ApiProblem(
                404,
                "not_found",
                detail,
                cure="start the agent with `remit agent`, which opens one, or read the log files on that machine",
            )
        return node

    async def _log_chunks(self, principal: Principal, node: Node, logs_request: LogsRequest) -> AsyncGenerator[bytes, None]:
        """Yield an empty item once the agent has started to answer, then what it sends. Raises `ApiProblem` if it does not
        start.
        """
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
                        yield _truncation_notice(node, "it stopped sending")
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
            raise agent_unreachable(node, f"no answer within {AGENT_ANSWER_MS // 1_000} seconds")

    async def _arrives_within(self, chunk: asyncio.Future[bytes | None], within_ms: int) -> bool:
        with suppress(TimeoutError):
            async with self._clock.timeout_ms(within_ms):
                await asyncio.wait((chunk,))
        return chunk.done()

    @contextmanager
    def connection_slot(self, principal: Principal) -> Iterator[None]:
        if not self._connections.acquire(principal):
            caller = f"tenant {principal.tenant}" if principal.tenant else principal.subject
            detail = f"{self._connections.held} connections to agents are open, and {caller} may open no more"
            raise ApiProblem(
                429, "overloaded", detail, cure="close a log or exec session that is not needed", retry_after_ms=1_000
            )
        try:
            yield
        finally:
            self._connections.release(principal)

    @contextmanager
    def session_slot(self, tenant: str) -> Iterator[None]:
        """Count one exec session of a tenant."""
        if self._sessions[tenant] >= TENANT_SESSIONS_MAX:
            detail = f"tenant {tenant} already has {TENANT_SESSIONS_MAX} exec sessions, which is the maximum"
            raise ApiProblem(429, "overloaded", detail, cure="close a session that is not needed", retry_after_ms=5_000)
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
    """Return a new connection to the agent of a node, which the caller must close. With `tls` the peer must present the
    certificate of this node.
    """
    spec = node.spec
    host = f"[{spec.address}]" if ":" in spec.address else spec.address or "127.0.0.1"
    try:
        if tls is None:
            return SocketLink({AGENT: f"tcp:{host}:{spec.port}"}, bytes_max=CHUNK_BYTES_MAX)
        secure = LinkTls(lambda bearer: acts_for(bearer, [node.metadata.name]), lambda: tls.client_context)
        return SocketLink({AGENT: f"tls:{host}:{spec.port}"}, secure, bytes_max=CHUNK_BYTES_MAX)
    except ValueError as error:
        raise agent_unreachable(node, str(error)) from error


def _resolve_attempt(replica: Replica, options: LogOptions) -> int:
    latest, name = replica.status.attempt, replica.metadata.name
    if options.previous and options.attempt is not None:
        detail = "previous: cannot be combined with attempt"
        raise ApiProblem(400, "malformed", detail, field="previous", cure="use one of the two")
    attempt = latest - 1 if options.previous else latest if options.attempt is None else options.attempt
    if not 1 <= attempt <= latest:
        detail = f"replica {name} has {latest} attempt{'s' if latest > 1 else ''}; there is no attempt {attempt}"
        raise ApiProblem(
            404,
            "not_found",
            detail,
            field="previous" if options.previous else "attempt",
            cure=f"choose an attempt from 1 to {latest}",
        )
    return attempt


def agent_unreachable(node: Node, reason: str) -> ApiProblem:
    name, health = node.metadata.name, node.status.health.value
    detail = f"the agent of node {name} is unreachable: {escaped(reason)}"
    cure = f"check that the agent runs there (node health: {health}); the logs stay on that machine"
    return ApiProblem(502, "unavailable", detail, cure=cure)


def _truncation_notice(node: Node, reason: str) -> bytes:
    """Return the last line of a log that was cut off. The response has started, so its status cannot report the error."""
    return f"\n-- log cut off by an error of the agent of node {node.metadata.name}: {escaped(reason)} --\n".encode()
