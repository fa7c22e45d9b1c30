"""Authority behind a Unix socket (`-m`), and the recording endpoint.

It listens at the endpoint; the wire and the retries are the product's.

Each reply is stamped with the epoch of the authority that gave it, so that one can tell the dead from the living.

The real authority on a real SQLite store, behind a Unix socket.

    python -m remit.demo.authority_process DATA SOCKET

It says on stdout, in one JSON line, where it took over or why it could not. It ends when its stdin does, so it never outlives
whoever started it; being killed is the other way, and needs no cleaning up.
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

from remit.assembly import embedded
from remit.client.endpoint import Overloaded, Status
from remit.client.rpc import Answering, Remote
from remit.commitment.authority import Authority
from remit.model.claims import Actor, Operation, OperationID, Verdict
from remit.model.wire.agent_messages import Beat, Heard, NodeState
from remit.store.protocol import StoreError
from remit.world.interfaces import Clock, Link, Service, WorldError
from remit.world.net.rpc_client import SocketLink
from remit.world.production import production

AUTHORITY: Final = "authority"
CANNOT_MS_MAX: Final = 2_000
"""How long the authority may say that it cannot write, and why, before the demo ends with that reason."""

_STAMP_BYTES: Final = 8


class DemoFailed(Exception):
    """Something that the demo shows did not hold, or could not be shown. The text says what to do next."""


def address_of(socket: Path) -> dict[str, str]:
    return {AUTHORITY: f"unix:{socket.absolute()}"}


class Stamping:
    """Answers for an authority, with its epoch before each reply. Satisfies `world.promises.Service`."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._answering = Answering(authority)

    async def request(self, body: bytes, /) -> bytes:
        epoch = self._authority.head.epoch
        return epoch.to_bytes(_STAMP_BYTES) + await self._answering.request(body)

    def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        return self._answering.stream(body)


class _Stamped:
    """A link for one call, which reads the stamp off its reply. Satisfies `world.promises.Link`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.epoch = 0

    async def request(self, to: str, body: bytes, /) -> bytes:
        reply = await self._link.request(to, body)
        self.epoch = int.from_bytes(reply[:_STAMP_BYTES])
        return reply[_STAMP_BYTES:]

    def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        return self._link.stream(to, body)

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        return self._link.serve(at, service)


class Listener(Protocol):
    """Who wants to know what was asked of an endpoint and answered, and when."""

    def sent(self, operations: Sequence[Operation]) -> None: ...

    def answered(self, ids: Sequence[OperationID], verdicts: Sequence[Verdict], epoch: int) -> None: ...


class Watched:
    """The demo's authority, asked over a connection of one's own. Satisfies `client.endpoint.Endpoint`."""

    def __init__(self, socket: Path, listener: Listener, clock: Clock) -> None:
        self._link = SocketLink(address_of(socket))
        self._listener = listener
        self._clock = clock
        self._cannot_since_ms: int | None = None

    async def ask(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        stamped = _Stamped(self._link)
        self._listener.sent(operations)
        try:
            verdicts = await Remote(stamped, AUTHORITY).ask(operations)
        except Overloaded as error:
            self._end_if_it_cannot(error)
            raise
        self._cannot_since_ms = None
        self._listener.answered([operation.id for operation in operations], verdicts, stamped.epoch)
        return verdicts

    async def status(self) -> Status:
        try:
            return await Remote(_Stamped(self._link), AUTHORITY).status()
        except Overloaded as error:
            self._end_if_it_cannot(error)
            raise

    async def renew(self, actor: Actor, /) -> bool:
        return await Remote(_Stamped(self._link), AUTHORITY).renew(actor)

    async def beat(self, beats: Sequence[Beat], /) -> Sequence[bool]:
        return await Remote(_Stamped(self._link), AUTHORITY).beat(beats)

    async def heard(self) -> Heard:
        return await Remote(_Stamped(self._link), AUTHORITY).heard()

    async def states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await Remote(_Stamped(self._link), AUTHORITY).states(nodes)

    def _end_if_it_cannot(self, error: Overloaded) -> None:
        """A client has good reason to wait a minute for a disk with room. Whoever watches the demo has none."""
        if not error.why:
            return
        now_ms = self._clock.now_ms()
        if self._cannot_since_ms is None:
            self._cannot_since_ms = now_ms
        if now_ms - self._cannot_since_ms >= CANNOT_MS_MAX:
            raise DemoFailed(f"the authority cannot go on: {error.why}; or name another directory with --data") from error


class Ready(msgspec.Struct, omit_defaults=True):
    """The first line on stdout: where the chain stood at the takeover, or what `failed`."""

    pid: int
    epoch: int = 0
    sequence: int = 0
    revision: int = 0
    replicas: int = 0
    failed: str = ""


async def serve(data: Path, socket: Path) -> None:
    world = production(address_of(socket))
    try:
        async with embedded(data, world) as authority, asyncio.TaskGroup() as group:
            running = group.create_task(authority.run())
            async with world.link.serve(AUTHORITY, Stamping(authority)):
                head = authority.head
                revision, replicas = await authority.store.revision(), len(authority.books.replicas)
                say(Ready(os.getpid(), head.epoch, head.sequence, revision, replicas))
                await until_stdin_ends()
            running.cancel()
    finally:
        await world.offload.close()


async def until_stdin_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def say(ready: Ready) -> None:
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    data, socket = (Path(argument) for argument in sys.argv[1:3])
    try:
        asyncio.run(serve(data, socket))
    except (StoreError, WorldError) as error:
        say(Ready(os.getpid(), failed=str(error)))
        return 1
    except ExceptionGroup as group:
        found = group.subgroup((StoreError, WorldError))
        if found is None:
            raise
        say(Ready(os.getpid(), failed=str(found.exceptions[0])))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
