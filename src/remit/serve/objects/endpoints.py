"""Service endpoints: list and watch.

One index for all watches: the current endpoints, and a log of the latest changes, each encoded once. A watch is a position
in that log. A watch that asks for forgotten changes, or falls behind them, must list again.
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
from remit.observation.watch_cache import WatchCache
from remit.serve.http.streams import BookmarkLine, HeartbeatLine, ResyncLine, json_line
from remit.world.interfaces import Clock

CHANGES_MAX: Final = 20_000
"""Changes kept in the log."""

LINES_PER_CHUNK: Final = 1_000
"""Changes sent at once."""

HEARTBEAT_MS: Final = 5_000
KIND: Final = "EndpointList"


class EndpointChange(Struct, frozen=True):
    """One line of a watch: a replica serves, or its address changed (`changed`); or it no longer serves (`deleted`)."""

    type: Literal["changed", "deleted"]
    revision: int
    object: EndpointItem


class _LoggedChange(NamedTuple):
    revision: int
    tenant: str
    service: str
    line: bytes


class EndpointIndex:
    """The endpoints of a scope. Satisfies `observation.watch_cache.CacheListener`."""

    def __init__(self, watch_cache: WatchCache, clock: Clock) -> None:
        self._watch_cache, self._clock = watch_cache, clock
        self._endpoints: dict[str, EndpointItem] = {}
        self._touched: dict[str, None] = {}
        self._changes: deque[_LoggedChange] = deque()
        self._forgotten_revision = watch_cache.revision
        """Changes up to this revision are no longer in the log."""
        self._dropped = 0
        """Changes dropped from the log so far: the position of its first entry."""
        self._incarnation = _incarnation(watch_cache)
        self._changed = asyncio.Event()
        for key in watch_cache.by_phase[Phase.SERVING]:
            self._update(key)
        self._changes.clear()
        watch_cache.subscribe(self)

    # -- updates -----------------------------------------------------------------------------------------------------------

    def on_change(self, key: str, old: Any, new: Any) -> None:
        if isinstance(old, Replica) or isinstance(new, Replica):
            if key in self._endpoints or (new is not None and new.status.phase is Phase.SERVING):
                self._touched[key] = None
        elif key.startswith("node/") and _location(old) != _location(new):
            self._touched.update(dict.fromkeys(self._watch_cache.by_node.get(key.removeprefix("node/"), ())))

    def on_commit(self) -> None:
        restored = _incarnation(self._watch_cache) != self._incarnation
        if restored:
            # The changes between the two incarnations are unknown, and revisions may have gone back.
            self._incarnation, self._forgotten_revision = _incarnation(self._watch_cache), self._watch_cache.revision
            self._dropped += len(self._changes) + 1
            self._changes.clear()
        touched, self._touched = self._touched, {}
        before = self._dropped + len(self._changes)
        for key in touched:
            self._update(key)
        while len(self._changes) > CHANGES_MAX:
            self._forgotten_revision = self._changes.popleft().revision
            self._dropped += 1
        if self._dropped + len(self._changes) != before or restored:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _update(self, key: str) -> None:
        old, new = self._endpoints.get(key), self._endpoint(key)
        if old == new:
            return
        if new is None:
            self._endpoints.pop(key, None)
        else:
            self._endpoints[key] = new
        endpoint = new or old
        if endpoint is not None:
            change = EndpointChange("deleted" if new is None else "changed", self._watch_cache.revision, endpoint)
            self._changes.append(
                _LoggedChange(self._watch_cache.revision, endpoint.tenant, endpoint.service, json_line(change))
            )

    def _endpoint(self, key: str) -> EndpointItem | None:
        replica: Replica | None = self._watch_cache.get(key)
        if replica is None or replica.status.phase is not Phase.SERVING:
            return None
        meta, status = replica.metadata, replica.status
        node: Node | None = self._watch_cache.get(f"node/{status.node}")
        region, zone, host = _location(node)
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

    # -- reads -------------------------------------------------------------------------------------------------------------

    def list_endpoints(self, tenant: str = "", service: str = "") -> ListOf[EndpointItem]:
        """Return all endpoints, ordered by tenant, service and replica."""
        endpoints = [
            endpoint for endpoint in self._endpoints.values() if _matches(endpoint.tenant, endpoint.service, tenant, service)
        ]
        endpoints.sort(key=lambda endpoint: (endpoint.tenant, endpoint.service, endpoint.replica))
        return ListOf(kind=KIND, metadata=ListMeta(revision=self._watch_cache.revision), items=endpoints)

    async def watch(self, after: int | None, tenant: str = "", service: str = "") -> AsyncGenerator[bytes, None]:
        """Yield changes after revision `after`, or from now on, until the client must list again."""
        after = self._watch_cache.revision if after is None else after
        if after < self._forgotten_revision:
            yield json_line(ResyncLine("compacted"))
            return
        position = self._dropped + next(
            (n for n, change in enumerate(self._changes) if change.revision > after), len(self._changes)
        )
        incarnation = self._incarnation
        while self._incarnation == incarnation and position >= self._dropped:
            changed, revision, end = self._changed, self._watch_cache.revision, self._dropped + len(self._changes)
            lines = b"".join(self._lines_from(position, tenant, service))
            position = min(position + LINES_PER_CHUNK, end)
            if lines:
                yield lines if position < end else lines + json_line(BookmarkLine(revision))
            elif position == end and not await self._wait(changed):
                yield json_line(HeartbeatLine(self._watch_cache.revision))
        yield json_line(ResyncLine("restored" if self._incarnation != incarnation else "lagging"))

    def _lines_from(self, position: int, tenant: str, service: str) -> Iterator[bytes]:
        for index in range(position - self._dropped, min(position - self._dropped + LINES_PER_CHUNK, len(self._changes))):
            change = self._changes[index]
            if _matches(change.tenant, change.service, tenant, service):
                yield change.line

    async def _wait(self, changed: asyncio.Event) -> bool:
        with suppress(TimeoutError):
            async with self._clock.timeout_ms(HEARTBEAT_MS):
                await changed.wait()
        return changed.is_set()


def _incarnation(watch_cache: WatchCache) -> str:
    return "" if watch_cache.head is None else watch_cache.head.incarnation


def _location(node: Node | None) -> tuple[str, str, str]:
    return ("", "", "") if node is None else (node.spec.region, node.spec.zone, node.spec.address)


def _matches(tenant: str, service: str, tenant_filter: str, service_filter: str) -> bool:
    return (not tenant_filter or tenant == tenant_filter) and (not service_filter or service == service_filter)
