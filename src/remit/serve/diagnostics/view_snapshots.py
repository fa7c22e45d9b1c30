"""Frozen views built off the event loop, reused while nothing changes.

A view of the board's rows at one revision, made and asked in another thread.

Explanations, capacity and plans try things on copies of all nodes and replicas. That takes a while, so none of it is done
between two requests on the event loop: there only the table of rows is copied, and rows never change in place. One at a time is
made, and used again as long as nothing has changed; what nobody asks for is let go of after a few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from remit.observation.frozen_view import still
from remit.observation.scheduler_view import View
from remit.observation.watch_cache import Board, Kept
from remit.proposal.explain.pending import PlacementInputs
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.plugins import Filter, Score
from remit.serve.http.replies import ApiProblem, unavailable
from remit.store.protocol import HEAD, Head, Page, Row, Store
from remit.world.interfaces import Clock, Offload

T = TypeVar("T")

QUERIES_MAX: Final = 64
"""How many may wait for their turn."""

CATCH_UP_MS_MAX: Final = 5_000
_POLL_MS: Final = 5
VIEW_TTL_MS: Final = 5_000
"""For how long one is kept that nobody asks for."""


class CachedRows(NamedTuple):
    """The rows of a board at one revision, and how many changes had been seen then."""

    head: Head
    revision: int
    rows: Mapping[str, Kept]
    changes: int = 0

    def get(self, key: str) -> Any:
        row = self.rows.get(key)
        return None if row is None else row.thing

    def kind(self, prefix: str) -> Iterator[Kept]:
        return (row for key, row in self.rows.items() if key.startswith(prefix))


class ViewSnapshot(NamedTuple):
    """One state of a scope, for whoever looks: its rows, a view made of them, and by what placing is steered now."""

    rows: CachedRows
    view: View
    rules: PlacementInputs


class ViewSnapshots:
    """`offload` must be a thread of its own, not the store's."""

    def __init__(
        self,
        watch_cache: Board,
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
        """Of the last batch that is seen."""
        return 0 if self.watch_cache.head is None else self.watch_cache.head.sequence

    async def query(self, work: Callable[[ViewSnapshot], T], *, age_ms: int = 0) -> T:
        """What `work` finds in what is committed now; or was, so long ago. It leaves the view as it was. Raises `ApiProblem`."""
        with self._query_slot():
            rows = await self.current_rows()
            return await self._offload(lambda: work(ViewSnapshot(rows, self._view(rows, age_ms), self.rules())))

    async def query_private(self, work: Callable[[ViewSnapshot], T]) -> T:
        """As `ask`, for work that changes the view that it is given: nobody else gets that one."""
        with self._query_slot():
            rows = await self.current_rows()
            return await self._offload(lambda: work(ViewSnapshot(rows, self._take_view(rows), self.rules())))

    async def offload(self, work: Callable[[], T]) -> T:
        """In the same thread, in its turn, for work that needs no view."""
        with self._query_slot():
            return await self._offload(work)

    async def current_rows(self) -> CachedRows:
        """All rows, once the board shows whatever was committed before this was asked."""
        await self.wait_until_current()
        return self.cached_rows()

    async def wait_until_current(self) -> None:
        committed = await self.store.get(HEAD)
        revision, until_ms = 0 if committed is None else committed.revision, self.clock.now_ms() + CATCH_UP_MS_MAX
        while self.watch_cache.head is None or self.watch_cache.revision < revision:
            if self.clock.now_ms() >= until_ms:
                raise unavailable(f"what is seen here is of revision {self.watch_cache.revision}, and {revision} is committed")
            await self.clock.sleep_ms(_POLL_MS)

    def cached_rows(self) -> CachedRows:
        """All rows as they are seen now, however old that is. They never change in place, so only the table is copied."""
        if self.watch_cache.head is None:
            raise unavailable("nothing of this scope has been read here yet")
        return CachedRows(self.watch_cache.head, self.watch_cache.revision, dict(self.watch_cache.rows), self.watch_cache.changes)

    @contextmanager
    def _query_slot(self) -> Iterator[None]:
        if self._waiting >= QUERIES_MAX:
            detail, cure = f"{self._waiting} wait to look already", "ask again a little later"
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

    def _view(self, rows: CachedRows, age_ms: int = 0) -> View:
        """The one that is kept, if nothing has changed since it was made; only the revision may have moved on."""
        cached = self._cached
        if cached is not None and cached.changes == rows.changes:
            cached.view.reached(rows.head, rows.revision)
        elif cached is None or cached.view.age_ms() >= age_ms:
            cached = self._cached = _CachedView(rows.changes, build_view(rows, self.clock))
        return cached.view

    def _take_view(self, rows: CachedRows) -> View:
        view, self._cached = self._view(rows), None
        return view


class _CachedView(NamedTuple):
    """A view, and how many changes had been seen when it was made."""

    changes: int
    view: View


def build_view(cached: CachedRows, clock: Clock) -> View:
    by_kind: dict[str, list[Row]] = {}
    for row in cached.rows.values():
        by_kind.setdefault(row.key.partition("/")[0], []).append(Row(row.key, row.value, row.revision))

    def pages(prefix: str, after: str) -> Iterator[Page]:
        yield Page(tuple(sorted(by_kind.get(prefix.removesuffix("/"), ()))), cached.revision, more=False)

    return still(clock, cached.head, cached.revision, pages)
