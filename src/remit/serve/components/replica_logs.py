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
from remit.model.problems import escaped, shown
from remit.model.records import Replica
from remit.model.wire.agent_messages import LogsOf
from remit.observation.watch_cache import Board
from remit.serve.http.connection_limits import Shares
from remit.serve.http.replies import Failure
from remit.world.interfaces import Clock, LinkError
from remit.world.net.rpc_client import SocketLink
from remit.world.net.tls import Secure

if TYPE_CHECKING:
    from remit.world.net.server_keys import TlsKeys

CONNECTIONS_MAX: Final = 256
"""Of all; of one tenant a part (shares.py)."""
TENANT_SESSIONS_MAX: Final = 32
ANSWER_MS: Final = 10_000
"""How long an agent may take to begin, and to go on with what is there already."""

PIECE_BYTES_MAX: Final = 1 << 20
"""An agent that sends more than this in one piece is none of ours."""

QUIET_MS: Final = 1_000
"""Who follows may hear nothing for long, since nothing is written; after so long it is taken to have begun."""

Stream = Literal["stdout", "stderr", "both"]
AGENT: Final = "agent"
_encode = msgspec.json.Encoder().encode


class Wanted(NamedTuple):
    """`attempt` None: the latest; `previous`: the one before it."""

    stream: Stream = "both"
    tail: int | None = None
    follow: bool = False
    attempt: int | None = None
    previous: bool = False


class Agents:
    """Those of a scope's nodes, as far as they can be asked. What each is asked for beside output is in execs.py."""

    def __init__(self, board: Board, clock: Clock, callbacks: Mapping[str, str], tls: TlsKeys | None = None) -> None:
        self.tls = tls
        self._board, self._clock, self._callbacks = board, clock, callbacks
        self._connections = Shares(CONNECTIONS_MAX)
        self._sessions: Counter[str] = Counter()

    def callback(self, node: Node) -> str:
        """What the node's agent wants to be shown by whoever asks it."""
        return self._callbacks.get(node.metadata.name, "")

    async def logs(self, asker: Principal, tenant: str, name: str, wanted: Wanted) -> AsyncGenerator[bytes, None]:
        """The pieces, once the agent has begun. Raises `Failure`."""
        replica = self.replica(tenant, name)
        node = self.node_of(replica)
        asked = LogsOf(
            token=self.callback(node),
            key=f"replica/{tenant}/{name}",
            uid=replica.metadata.uid,
            attempt=_attempt(replica, wanted),
            stream=wanted.stream,
            tail=wanted.tail,
            follow=wanted.follow,
        )
        pieces = self._pieces(asker, node, asked)
        await anext(pieces)  # nothing yet, but it has begun: from here on whoever closes it ends the connection
        return pieces

    def replica(self, tenant: str, name: str) -> Replica:
        replica: Replica | None = self._board.get(f"replica/{tenant}/{name}")
        if replica is None:
            why = f"there is no replica {shown(name)} of tenant {shown(tenant)}"
            raise Failure(404, "not_found", why, field="name", cure=f"list them: /v1/tenants/{tenant}/replicas")
        return replica

    def node_of(self, replica: Replica) -> Node:
        """Whose agent can be asked of it."""
        tenant, name = replica.metadata.tenant, replica.metadata.name
        if not replica.status.node:
            why = f"replica {name} is {replica.status.phase.value} and stands on no node, so it has written nothing yet"
            raise Failure(404, "not_found", why, cure=f"ask why: /v1/tenants/{tenant}/replicas/{name}/explain")
        node: Node | None = self._board.get(f"node/{replica.status.node}")
        if node is None:
            why = f"node {replica.status.node}, on which {name} ran, is not there any more"
            raise Failure(404, "not_found", why, cure="what was written there is on that machine, if that still exists")
        if not node.spec.port:
            why = f"the agent of node {node.metadata.name} does not say where it can be asked"
            raise Failure(404, "not_found", why, cure="run an agent there that does (remit agent), or look on that machine")
        return node

    async def _pieces(self, asker: Principal, node: Node, asked: LogsOf) -> AsyncGenerator[bytes, None]:
        """Nothing, once the agent has begun; then what it sends. If it does not begin, raises `Failure`."""
        link = link_to(node, self.tls)
        with self.connection(asker):
            items = link.stream(AGENT, _encode(asked))
            coming = asyncio.ensure_future(_next(items))
            try:
                await self._begun(node, coming, follow=asked.follow)
                yield b""
                while (piece := await coming) is not None:
                    coming = asyncio.ensure_future(_next(items))
                    if piece:
                        yield piece
                    if not asked.follow and not await self._came(coming, ANSWER_MS):
                        yield _broken_off(node, "it said nothing more")
                        return
            except LinkError as error:
                yield _broken_off(node, error.cause)
            finally:
                coming.cancel()
                await asyncio.wait((coming,))
                await items.aclose()
                await link.close()

    async def _begun(self, node: Node, coming: asyncio.Future[bytes | None], *, follow: bool) -> None:
        came = await self._came(coming, QUIET_MS if follow else ANSWER_MS)
        if came and isinstance(error := coming.exception(), LinkError):
            raise unanswered(node, error.cause) from error
        if not came and not follow:
            raise unanswered(node, f"it said nothing for {ANSWER_MS // 1_000} seconds")

    async def _came(self, coming: asyncio.Future[bytes | None], within_ms: int) -> bool:
        with suppress(TimeoutError):
            async with self._clock.timeout_ms(within_ms):
                await asyncio.wait((coming,))
        return coming.done()

    @contextmanager
    def connection(self, asker: Principal) -> Iterator[None]:
        if not self._connections.take(asker):
            why = f"{self._connections.held} read from agents already, and no more are taken of {asker.tenant or asker.subject}"
            raise Failure(429, "overloaded", why, cure="end one that is not needed", retry_after_ms=1_000)
        try:
            yield
        finally:
            self._connections.give_back(asker)

    @contextmanager
    def session(self, tenant: str) -> Iterator[None]:
        """One command more that runs beside a replica of a tenant."""
        if self._sessions[tenant] >= TENANT_SESSIONS_MAX:
            why = f"{TENANT_SESSIONS_MAX} commands run beside replicas of tenant {tenant} already"
            raise Failure(429, "overloaded", why, cure="end one that is not needed", retry_after_ms=5_000)
        self._sessions[tenant] += 1
        try:
            yield
        finally:
            self._sessions[tenant] -= 1
            if not self._sessions[tenant]:
                del self._sessions[tenant]


async def _next(items: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(items, None)


def link_to(node: Node, tls: TlsKeys | None = None) -> SocketLink:
    """A connection of its own to the agent of a node, by the name `AGENT`. It is the caller's to close. With `tls` it is to
    nobody but who has this node's certificate.
    """
    spec = node.spec
    host = f"[{spec.address}]" if ":" in spec.address else spec.address or "127.0.0.1"
    try:
        if tls is None:
            return SocketLink({AGENT: f"tcp:{host}:{spec.port}"}, bytes_max=PIECE_BYTES_MAX)
        secure = Secure(lambda bearer: acts_for(bearer, [node.metadata.name]), lambda: tls.calling)
        return SocketLink({AGENT: f"tls:{host}:{spec.port}"}, secure, bytes_max=PIECE_BYTES_MAX)
    except ValueError as error:
        raise unanswered(node, str(error)) from error


def _attempt(replica: Replica, wanted: Wanted) -> int:
    last, name = replica.status.attempt, replica.metadata.name
    if wanted.previous and wanted.attempt is not None:
        why = "attempt and previous are both given"
        raise Failure(400, "malformed", why, field="previous", cure="name an attempt, or ask for the previous one")
    attempt = last - 1 if wanted.previous else last if wanted.attempt is None else wanted.attempt
    if not 1 <= attempt <= last:
        why = f"replica {name} has had {last} attempt{'s' if last > 1 else ''}, and no number {attempt}"
        raise Failure(404, "not_found", why, field="previous" if wanted.previous else "attempt", cure=f"ask for 1 to {last}")
    return attempt


def unanswered(node: Node, why: str) -> Failure:
    name, health = node.metadata.name, node.status.health.value
    detail = f"the agent of node {name} does not answer: {escaped(why)}"
    cure = f"see whether it runs there (the node is {health}); what was written stays on that machine"
    return Failure(502, "unavailable", detail, cure=cure)


def _broken_off(node: Node, why: str) -> bytes:
    """The last line of what cannot be told to its end: the answer has begun, so its status says nothing of this."""
    return f"\n-- the agent of node {node.metadata.name} broke off: {escaped(why)} --\n".encode()
