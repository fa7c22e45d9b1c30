"""What does the demo see of what is asked and answered? It listens at the endpoint; the wire and the retries are the product's.

Each reply is stamped with the epoch of the authority that gave it, so that one can tell the dead from the living.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Protocol

from remit.client.endpoint import Overloaded, Status
from remit.client.remote import Answering, Remote
from remit.commitment.authority import Authority
from remit.model.beats import Beat, Heard, NodeState
from remit.model.claims import Actor, Operation, OperationID, Verdict
from remit.world.link import SocketLink
from remit.world.promises import Clock, Link, Service

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
