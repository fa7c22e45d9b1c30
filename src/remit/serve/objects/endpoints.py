"""Service endpoints: list and watch.

As the board shows it, listed and watched; nothing is decided.

One book for all watchers: it keeps what serves now and the last changes of that, each encoded once. A watcher is a place in
those changes; one that asks for what the book has forgotten, or falls behind it, has to list anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct

from remit.model.kinds import Node
from remit.model.records import Phase, Replica
from remit.model.wire.api_types import EndpointItem, ListMeta, ListOf
from remit.observation.watch_cache import Board
from remit.serve.http.streams import Bookmark, Heartbeat, Resync, line
from remit.world.interfaces import Clock

CHANGES_MAX: Final = 20_000
"""How many changes are remembered."""

LINES_MAX: Final = 1_000
"""How many are sent at once."""

HEARTBEAT_MS: Final = 5_000
KIND: Final = "EndpointList"


class EndpointChange(Struct, frozen=True):
    """One line of a watch: it serves, or is reached elsewhere (`changed`); or it serves no more (`deleted`)."""

    type: Literal["changed", "deleted"]
    revision: int
    object: EndpointItem


class _Noted(NamedTuple):
    revision: int
    tenant: str
    service: str
    line: bytes


class Endpoints:
    """Satisfies `board.Listener`."""

    def __init__(self, board: Board, clock: Clock) -> None:
        self._board, self._clock = board, clock
        self._served: dict[str, EndpointItem] = {}
        self._touched: dict[str, None] = {}
        self._noted: deque[_Noted] = deque()
        self._forgotten = board.revision
        """Changes up to this revision are not remembered."""
        self._dropped = 0
        """How many changes were remembered once and are not any more: what the first of the rest is counted from."""
        self._incarnation = _incarnation(board)
        self._came = asyncio.Event()
        for key in board.by_phase[Phase.SERVING]:
            self._note(key)
        self._noted.clear()
        board.subscribe(self)

    # -- hearing ---------------------------------------------------------------------------------------------------------

    def changed(self, key: str, old: Any, new: Any) -> None:
        if isinstance(old, Replica) or isinstance(new, Replica):
            if key in self._served or (new is not None and new.status.phase is Phase.SERVING):
                self._touched[key] = None
        elif key.startswith("node/") and _place(old) != _place(new):
            self._touched.update(dict.fromkeys(self._board.by_node.get(key.removeprefix("node/"), ())))

    def reached(self) -> None:
        restored = _incarnation(self._board) != self._incarnation
        if restored:
            # What happened between the two is not known, and revisions may have gone back.
            self._incarnation, self._forgotten = _incarnation(self._board), self._board.revision
            self._dropped += len(self._noted) + 1
            self._noted.clear()
        touched, self._touched = self._touched, {}
        before = self._dropped + len(self._noted)
        for key in touched:
            self._note(key)
        while len(self._noted) > CHANGES_MAX:
            self._forgotten = self._noted.popleft().revision
            self._dropped += 1
        if self._dropped + len(self._noted) != before or restored:
            came, self._came = self._came, asyncio.Event()
            came.set()

    def _note(self, key: str) -> None:
        before, now = self._served.get(key), self._found(key)
        if before == now:
            return
        if now is None:
            self._served.pop(key, None)
        else:
            self._served[key] = now
        told = now or before
        if told is not None:
            change = EndpointChange("deleted" if now is None else "changed", self._board.revision, told)
            self._noted.append(_Noted(self._board.revision, told.tenant, told.service, line(change)))

    def _found(self, key: str) -> EndpointItem | None:
        replica: Replica | None = self._board.get(key)
        if replica is None or replica.status.phase is not Phase.SERVING:
            return None
        meta, status = replica.metadata, replica.status
        node: Node | None = self._board.get(f"node/{status.node}")
        region, zone, host = _place(node)
        return EndpointItem(
            tenant=meta.tenant,
            service=replica.spec.workload,
            replica=meta.name,
            node=status.node,
            region=region,
            zone=zone,
            host=host,
            ports=dict(status.ports),
        )

    # -- telling ---------------------------------------------------------------------------------------------------------

    def listed(self, tenant: str = "", service: str = "") -> ListOf[EndpointItem]:
        """All of them, in order of name."""
        found = [one for one in self._served.values() if _meant(one.tenant, one.service, tenant, service)]
        found.sort(key=lambda one: (one.tenant, one.service, one.replica))
        return ListOf(kind=KIND, metadata=ListMeta(revision=self._board.revision), items=found)

    async def watched(self, after: int | None, tenant: str = "", service: str = "") -> AsyncGenerator[bytes, None]:
        """Every change past revision `after`, or from now on; then what comes, until it has to be listed anew."""
        after = self._board.revision if after is None else after
        if after < self._forgotten:
            yield line(Resync("compacted"))
            return
        at = self._dropped + next((n for n, one in enumerate(self._noted) if one.revision > after), len(self._noted))
        incarnation = self._incarnation
        while self._incarnation == incarnation and at >= self._dropped:
            came, revision, end = self._came, self._board.revision, self._dropped + len(self._noted)
            some = b"".join(self._since(at, tenant, service))
            at = min(at + LINES_MAX, end)
            if some:
                yield some if at < end else some + line(Bookmark(revision))
            elif at == end and not await self._woken(came):
                yield line(Heartbeat(self._board.revision))
        yield line(Resync("restored" if self._incarnation != incarnation else "lagging"))

    def _since(self, at: int, tenant: str, service: str) -> Iterator[bytes]:
        for number in range(at - self._dropped, min(at - self._dropped + LINES_MAX, len(self._noted))):
            one = self._noted[number]
            if _meant(one.tenant, one.service, tenant, service):
                yield one.line

    async def _woken(self, came: asyncio.Event) -> bool:
        with suppress(TimeoutError):
            async with self._clock.timeout_ms(HEARTBEAT_MS):
                await came.wait()
        return came.is_set()


def _incarnation(board: Board) -> str:
    return "" if board.head is None else board.head.incarnation


def _place(node: Node | None) -> tuple[str, str, str]:
    return ("", "", "") if node is None else (node.spec.region, node.spec.zone, node.spec.address)


def _meant(tenant: str, service: str, wanted: str, of: str) -> bool:
    return (not wanted or tenant == wanted) and (not of or service == of)
