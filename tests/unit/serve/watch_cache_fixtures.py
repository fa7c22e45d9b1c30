"""Small boards of things that an authority might have written, and what a server makes of them. No test is in here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from remit.model.objects import AnyObject, encode, key
from remit.observation.watch_cache import WatchCache
from remit.proposal.explain.pending import PlacementInputs
from remit.serve.diagnostics.view_snapshots import CachedRows, ViewSnapshot, ViewSnapshots, build_view
from remit.store.memory import MemoryStore
from remit.store.protocol import Commit, Head, Row, RowChange, WatchEvent
from tests.properties.authority_world import FakeClock

T = TypeVar("T")
HEAD_1 = Head("one", 1, 1, "a", 0, "")


class Here:
    """An offload that does it at once."""

    def __init__(self) -> None:
        self.asked = 0

    async def _do(self, work: Callable[[], T]) -> T:
        self.asked += 1
        return work()

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._do(work)

    async def close(self) -> None:
        pass


class Told:
    """A board and a store that are told the same, commit by commit."""

    def __init__(self, *things: AnyObject) -> None:
        self.clock = FakeClock()
        self.board = WatchCache(self.clock)
        self.store = MemoryStore()
        self.offload = Here()
        self.revision = 1
        self.board.begin_list(HEAD_1, 1)
        self.board.add_page([Row(key(thing), encode(thing), 1) for thing in things])
        self.board.end_list()

    def tell(self, *things: AnyObject, drop: Iterable[str] = ()) -> None:
        self.revision += 1
        changes = [RowChange(key(thing), encode(thing), self.revision) for thing in things]
        changes += [RowChange(name, None, self.revision) for name in drop]
        self.board.apply(WatchEvent(self.revision - 1, self.revision, tuple(changes), 0, 0, None, HEAD_1))

    async def keep(self, *things: AnyObject, raw: Iterable[tuple[str, bytes]] = ()) -> None:
        """In the store alone: what a board does not show."""
        await self.store.commit(Commit(puts=[*((key(thing), encode(thing)) for thing in things), *raw]))

    def looking(self) -> ViewSnapshots:
        return ViewSnapshots(self.board, self.store, self.clock, self.offload)

    def look(self) -> ViewSnapshot:
        seen = CachedRows(HEAD_1, self.board.revision, dict(self.board.rows))
        return ViewSnapshot(seen, build_view(seen, self.clock), PlacementInputs((self.clock.boot(), self.clock.now_ms())))
