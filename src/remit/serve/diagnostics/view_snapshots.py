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
from remit.proposal.explain.pending import Rules
from remit.proposal.placement.builtin_plugins import DEFAULT
from remit.proposal.placement.plugins import Filter, Score
from remit.serve.http.replies import Failure, unavailable
from remit.store.protocol import HEAD, Head, Page, Row, Store
from remit.world.interfaces import Clock, Offload

T = TypeVar("T")

WAITING_MAX: Final = 64
"""How many may wait for their turn."""

CATCH_UP_MS_MAX: Final = 5_000
_LOOK_MS: Final = 5
KEPT_MS: Final = 5_000
"""For how long one is kept that nobody asks for."""


class Seen(NamedTuple):
    """The rows of a board at one revision, and how many changes had been seen then."""

    head: Head
    revision: int
    rows: Mapping[str, Kept]
    changes: int = 0

    def get(self, key: str) -> Any:
        kept = self.rows.get(key)
        return None if kept is None else kept.thing

    def kind(self, prefix: str) -> Iterator[Kept]:
        return (kept for key, kept in self.rows.items() if key.startswith(prefix))


class Look(NamedTuple):
    """One state of a scope, for whoever looks: its rows, a view made of them, and by what placing is steered now."""

    seen: Seen
    view: View
    rules: Rules


class Looking:
    """`offload` must be a thread of its own, not the store's."""

    def __init__(
        self,
        board: Board,
        store: Store,
        clock: Clock,
        offload: Offload,
        *,
        filters: Iterable[Filter] = (),
        scores: Iterable[Score] = DEFAULT,
    ) -> None:
        self.board, self.store, self.clock = board, store, clock
        self._offload = offload
        self._filters, self._scores = tuple(filters), tuple(scores)
        self._waiting = 0
        self._known: _Known | None = None
        self._forgetting: asyncio.TimerHandle | None = None

    def rules(self) -> Rules:
        return Rules((self.clock.boot(), self.clock.now_ms()), self._filters, self._scores)

    @property
    def sequence(self) -> int:
        """Of the last batch that is seen."""
        return 0 if self.board.head is None else self.board.head.sequence

    async def ask(self, work: Callable[[Look], T], *, age_ms: int = 0) -> T:
        """What `work` finds in what is committed now; or was, so long ago. It leaves the view as it was. Raises `Failure`."""
        with self._place():
            seen = await self.seen()
            return await self._offload(lambda: work(Look(seen, self._view(seen, age_ms), self.rules())))

    async def spoil(self, work: Callable[[Look], T]) -> T:
        """As `ask`, for work that changes the view that it is given: nobody else gets that one."""
        with self._place():
            seen = await self.seen()
            return await self._offload(lambda: work(Look(seen, self._own_view(seen), self.rules())))

    async def elsewhere(self, work: Callable[[], T]) -> T:
        """In the same thread, in its turn, for work that needs no view."""
        with self._place():
            return await self._offload(work)

    async def seen(self) -> Seen:
        """All rows, once the board shows whatever was committed before this was asked."""
        await self.caught_up()
        return self.now()

    async def caught_up(self) -> None:
        committed = await self.store.get(HEAD)
        at, until_ms = 0 if committed is None else committed.revision, self.clock.now_ms() + CATCH_UP_MS_MAX
        while self.board.head is None or self.board.revision < at:
            if self.clock.now_ms() >= until_ms:
                raise unavailable(f"what is seen here is of revision {self.board.revision}, and {at} is committed")
            await self.clock.sleep_ms(_LOOK_MS)

    def now(self) -> Seen:
        """All rows as they are seen now, however old that is. They never change in place, so only the table is copied."""
        if self.board.head is None:
            raise unavailable("nothing of this scope has been read here yet")
        return Seen(self.board.head, self.board.revision, dict(self.board.rows), self.board.changes)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._waiting >= WAITING_MAX:
            why, cure = f"{self._waiting} wait to look already", "ask again a little later"
            raise Failure(429, "overloaded", why, cure=cure, retry_after_ms=1_000)
        self._waiting += 1
        if self._forgetting is not None:
            self._forgetting.cancel()
        try:
            yield
        finally:
            self._waiting -= 1
            self._forgetting = asyncio.get_running_loop().call_later(KEPT_MS / 1_000, self._forget)

    def _forget(self) -> None:
        self._known = None

    # -- in the other thread ---------------------------------------------------------------------------------------------

    def _view(self, seen: Seen, age_ms: int = 0) -> View:
        """The one that is kept, if nothing has changed since it was made; only the revision may have moved on."""
        known = self._known
        if known is not None and known.changes == seen.changes:
            known.view.reached(seen.head, seen.revision)
        elif known is None or known.view.age_ms() >= age_ms:
            known = self._known = _Known(seen.changes, view_of(seen, self.clock))
        return known.view

    def _own_view(self, seen: Seen) -> View:
        view, self._known = self._view(seen), None
        return view


class _Known(NamedTuple):
    """A view, and how many changes had been seen when it was made."""

    changes: int
    view: View


def view_of(seen: Seen, clock: Clock) -> View:
    by_kind: dict[str, list[Row]] = {}
    for kept in seen.rows.values():
        by_kind.setdefault(kept.key.partition("/")[0], []).append(Row(kept.key, kept.value, kept.revision))

    def pages(prefix: str, after: str) -> Iterator[Page]:
        yield Page(tuple(sorted(by_kind.get(prefix.removesuffix("/"), ()))), seen.revision, more=False)

    return still(clock, seen.head, seen.revision, pages)
