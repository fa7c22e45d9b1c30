"""Frozen views built off the event loop, reused while nothing changes.

Explanations, capacity and plans need copies of all nodes and replicas. Building them takes long, so it runs in a thread of
its own. The event loop only copies the table of rows, and rows never change in place. One view is built at a time; it is
reused while nothing has changed, and dropped when unused for `VIEW_TTL_MS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from remit.observation.frozen_view import frozen_view
from remit.observation.scheduler_view import SchedulerView
from remit.observation.watch_cache import CachedRow, WatchCache
from remit.proposal.explain.pending import PlacementInputs
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, Score
from remit.serve.http.replies import ApiProblem, unavailable
from remit.store.protocol import HEAD, Head, Page, Row, Store
from remit.world.interfaces import Clock, Offload

T = TypeVar("T")

QUERIES_MAX: Final = 64
"""Queries that may be waiting or running."""

CATCH_UP_MS_MAX: Final = 5_000
_POLL_MS: Final = 5
VIEW_TTL_MS: Final = 5_000
"""How long an unused view is kept."""


class CachedRows(NamedTuple):
    """The rows of a watch cache at one revision. `changes` is the cache's change counter at that time."""

    head: Head
    revision: int
    rows: Mapping[str, CachedRow]
    changes: int = 0

    def get(self, key: str) -> Any:
        row = self.rows.get(key)
        return None if row is None else row.obj

    def kind(self, prefix: str) -> Iterator[CachedRow]:
        return (row for key, row in self.rows.items() if key.startswith(prefix))


class ViewSnapshot(NamedTuple):
    """One state of a scope: its rows, a view built from them, and the rules of placement at that time."""

    rows: CachedRows
    view: SchedulerView
    rules: PlacementInputs


class ViewSnapshots:
    """Builds snapshots and runs queries on them. `offload` must run in a thread of its own, not the store's."""

    def __init__(
        self,
        watch_cache: WatchCache,
        store: Store,
        clock: Clock,
        offload: Offload,
        *,
        filters: Iterable[Filter] = (),
        scores: Iterable[Score] = DEFAULT_SCORES,
    ) -> None:
        self.watch_cache, self.store, self.clock = watch_cache, store, clock
        self._offload = offload
        self._filters, self._scores = tuple(filters), tuple(scores)
        self._waiting = 0
        self._cached: _CachedView | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def rules(self) -> PlacementInputs:
        return PlacementInputs((self.clock.boot(), self.clock.now_ms()), self._filters, self._scores)

    @property
    def sequence(self) -> int:
        """Sequence of the latest batch in the watch cache."""
        return 0 if self.watch_cache.head is None else self.watch_cache.head.sequence

    async def query(self, work: Callable[[ViewSnapshot], T], *, age_ms: int = 0) -> T:
        """Run `work` on everything committed so far, or on a view up to `age_ms` old. `work` must leave the view unchanged.
        Raises `ApiProblem`.
        """
        with self._query_slot():
            rows = await self.current_rows()
            return await self._offload(lambda: work(ViewSnapshot(rows, self._view(rows, age_ms), self.rules())))

    async def query_private(self, work: Callable[[ViewSnapshot], T]) -> T:
        """As `query`, for work that changes its view: the view is private and not reused."""
        with self._query_slot():
            rows = await self.current_rows()
            return await self._offload(lambda: work(ViewSnapshot(rows, self._take_view(rows), self.rules())))

    async def offload(self, work: Callable[[], T]) -> T:
        """Run work that needs no view, in turn with the queries and in their thread."""
        with self._query_slot():
            return await self._offload(work)

    async def current_rows(self) -> CachedRows:
        """Return all rows, once the watch cache has everything committed before this call."""
        await self.wait_until_current()
        return self.cached_rows()

    async def wait_until_current(self) -> None:
        committed = await self.store.get(HEAD)
        revision, until_ms = 0 if committed is None else committed.revision, self.clock.now_ms() + CATCH_UP_MS_MAX
        while self.watch_cache.head is None or self.watch_cache.revision < revision:
            if self.clock.now_ms() >= until_ms:
                raise unavailable(
                    f"the watch cache is at revision {self.watch_cache.revision}, behind the committed revision {revision}"
                )
            await self.clock.sleep_ms(_POLL_MS)

    def cached_rows(self) -> CachedRows:
        """Return all rows as cached now, however old they are. Rows never change in place, so only the table is copied."""
        if self.watch_cache.head is None:
            raise unavailable("the watch cache is still loading")
        return CachedRows(
            self.watch_cache.head, self.watch_cache.revision, dict(self.watch_cache.rows), self.watch_cache.changes
        )

    @contextmanager
    def _query_slot(self) -> Iterator[None]:
        if self._waiting >= QUERIES_MAX:
            detail, cure = f"{self._waiting} diagnostic queries are waiting", "retry shortly"
            raise ApiProblem(429, "overloaded", detail, cure=cure, retry_after_ms=1_000)
        self._waiting += 1
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            yield
        finally:
            self._waiting -= 1
            self._expiry = asyncio.get_running_loop().call_later(VIEW_TTL_MS / 1_000, self._drop_view)

    def _drop_view(self) -> None:
        self._cached = None

    # -- in the other thread ---------------------------------------------------------------------------------------------

    def _view(self, rows: CachedRows, age_ms: int = 0) -> SchedulerView:
        """Return the kept view if nothing has changed since it was built, apart from the revision, or if it is recent enough.
        Otherwise build one.
        """
        cached = self._cached
        if cached is not None and cached.changes == rows.changes:
            cached.view.advance(rows.head, rows.revision)
        elif cached is None or cached.view.age_ms() >= age_ms:
            cached = self._cached = _CachedView(rows.changes, build_view(rows, self.clock))
        return cached.view

    def _take_view(self, rows: CachedRows) -> SchedulerView:
        view, self._cached = self._view(rows), None
        return view


class _CachedView(NamedTuple):
    """A view, and the change counter when it was built."""

    changes: int
    view: SchedulerView


def build_view(cached: CachedRows, clock: Clock) -> SchedulerView:
    by_kind: dict[str, list[Row]] = {}
    for row in cached.rows.values():
        by_kind.setdefault(row.key.partition("/")[0], []).append(Row(row.key, row.value, row.revision))

    def pages(prefix: str, after: str) -> Iterator[Page]:
        yield Page(tuple(sorted(by_kind.get(prefix.removesuffix("/"), ()))), cached.revision, more=False)

    return frozen_view(clock, cached.head, cached.revision, pages)
