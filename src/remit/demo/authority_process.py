"""Program of the race demo: an authority behind a Unix socket; and the endpoint that records its calls.

    python -m remit.demo.authority_process DATA SOCKET

Serves the real authority on a real SQLite store. The first line on stdout is a JSON object: where the authority took over,
or why it could not. The process exits at the end of its stdin, so it never outlives its parent; it may also be killed at any
time and needs no cleanup.

Protocol and retries are the product's own. Each reply is prefixed with the epoch of the authority that sent it, so that the
demo can tell the killed process from its successor.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Protocol

import msgspec

from remit.assembly import embedded_authority
from remit.client.endpoint import AuthorityStatus, Overloaded
from remit.client.rpc import EndpointService, EndpointStub
from remit.commitment.authority import Authority
from remit.model.claims import Actor, Operation, OperationID, Verdict
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.store.protocol import StoreError
from remit.world.interfaces import Clock, Link, Service, WorldError
from remit.world.net.rpc_client import SocketLink
from remit.world.production import production

AUTHORITY: Final = "authority"
UNWRITABLE_MS_MAX: Final = 2_000
"""How long the authority may report that it cannot write before the demo ends with that reason."""

_EPOCH_BYTES: Final = 8


class DemoFailed(Exception):
    """A property that the demo demonstrates did not hold, or could not be demonstrated. The message says what to do next."""


def address_of(socket: Path) -> dict[str, str]:
    return {AUTHORITY: f"unix:{socket.absolute()}"}


class EpochStampingService:
    """Prefixes each reply of an authority with its epoch. Implements `world.interfaces.Service`."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._service = EndpointService(authority)

    async def request(self, body: bytes, /) -> bytes:
        epoch = self._authority.head.epoch
        return epoch.to_bytes(_EPOCH_BYTES) + await self._service.request(body)

    def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        return self._service.stream(body)


class _EpochStampedLink:
    """A link for one call that strips the epoch prefix from the reply. Implements `world.interfaces.Link`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.epoch = 0

    async def request(self, to: str, body: bytes, /) -> bytes:
        reply = await self._link.request(to, body)
        self.epoch = int.from_bytes(reply[:_EPOCH_BYTES])
        return reply[_EPOCH_BYTES:]

    def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        return self._link.stream(to, body)

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return self._link.serve(at, service)


class OperationListener(Protocol):
    """Receives the operations sent to an endpoint and their verdicts."""

    def sent(self, operations: Sequence[Operation]) -> None: ...

    def answered(self, ids: Sequence[OperationID], verdicts: Sequence[Verdict], epoch: int) -> None: ...


class RecordingEndpoint:
    """Endpoint of the demo's authority over its own connection, which reports every call to a listener. Implements
    `client.endpoint.Endpoint`.
    """

    def __init__(self, socket: Path, listener: OperationListener, clock: Clock) -> None:
        self._link = SocketLink(address_of(socket))
        self._listener = listener
        self._clock = clock
        self._unwritable_since_ms: int | None = None

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        stamped = _EpochStampedLink(self._link)
        self._listener.sent(operations)
        try:
            verdicts = await EndpointStub(stamped, AUTHORITY).submit(operations)
        except Overloaded as error:
            self._fail_if_unwritable(error)
            raise
        self._unwritable_since_ms = None
        self._listener.answered([operation.id for operation in operations], verdicts, stamped.epoch)
        return verdicts

    async def status(self) -> AuthorityStatus:
        try:
            return await EndpointStub(_EpochStampedLink(self._link), AUTHORITY).status()
        except Overloaded as error:
            self._fail_if_unwritable(error)
            raise

    async def renew(self, actor: Actor, /) -> bool:
        return await EndpointStub(_EpochStampedLink(self._link), AUTHORITY).renew(actor)

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        return await EndpointStub(_EpochStampedLink(self._link), AUTHORITY).heartbeat(beats)

    async def heartbeat_ages(self) -> HeartbeatReport:
        return await EndpointStub(_EpochStampedLink(self._link), AUTHORITY).heartbeat_ages()

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await EndpointStub(_EpochStampedLink(self._link), AUTHORITY).node_states(nodes)

    def _fail_if_unwritable(self, error: Overloaded) -> None:
        """Ends the demo if the authority has been unable to write for UNWRITABLE_MS_MAX.

        A client would rightly wait longer for disk space; the audience of a demo should see the reason soon.
        """
        if not error.reason:
            return
        now_ms = self._clock.now_ms()
        if self._unwritable_since_ms is None:
            self._unwritable_since_ms = now_ms
        if now_ms - self._unwritable_since_ms >= UNWRITABLE_MS_MAX:
            raise DemoFailed(f"the authority cannot write: {error.reason}; or choose another directory with --data") from error


class AuthorityReady(msgspec.Struct, omit_defaults=True):
    """First line on stdout: the position of the chain at the takeover, or the error in `failed`."""

    pid: int
    epoch: int = 0
    sequence: int = 0
    revision: int = 0
    replicas: int = 0
    failed: str = ""


async def serve(data: Path, socket: Path) -> None:
    world = production(address_of(socket))
    try:
        async with embedded_authority(data, world) as authority, asyncio.TaskGroup() as group:
            running = group.create_task(authority.run())
            async with world.link.serve(AUTHORITY, EpochStampingService(authority)):
                head = authority.head
                revision, replicas = await authority.store.revision(), len(authority.books.replicas)
                print_ready(AuthorityReady(os.getpid(), head.epoch, head.sequence, revision, replicas))
                await until_stdin_ends()
            running.cancel()
    finally:
        await world.offload.close()


async def until_stdin_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def print_ready(ready: AuthorityReady) -> None:
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    data, socket = (Path(argument) for argument in sys.argv[1:3])
    try:
        asyncio.run(serve(data, socket))
    except (StoreError, WorldError) as error:
        print_ready(AuthorityReady(os.getpid(), failed=str(error)))
        return 1
    except ExceptionGroup as group:
        expected = group.subgroup((StoreError, WorldError))
        if expected is None:
            raise
        print_ready(AuthorityReady(os.getpid(), failed=str(expected.exceptions[0])))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
