"""Small watch caches with rows that an authority might have written, and the views a server builds of them. No tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from remit.model.kinds.registry import AnyObject
from remit.model.objects import encode, key
from remit.observation.watch_cache import WatchCache
from remit.proposal.explain.pending import PlacementInputs
from remit.serve.diagnostics.view_snapshots import CachedRows, ViewSnapshot, ViewSnapshots, build_view
from remit.store.memory import MemoryStore
from remit.store.protocol import Commit, Head, Row, RowChange, WatchEvent
from tests.properties.authority_world import FakeClock

T = TypeVar("T")
HEAD_1 = Head("one", 1, 1, "a", 0, "")


class InlineOffload:
    """Runs offloaded work inline."""

    def __init__(self) -> None:
        self.call_count = 0

    async def _do(self, work: Callable[[], T]) -> T:
        self.call_count += 1
        return work()

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._do(work)

    async def close(self) -> None:
        pass


class CacheFixture:
    """A watch cache and a store that receive the same commits."""

    def __init__(self, *objects: AnyObject) -> None:
        self.clock = FakeClock()
        self.board = WatchCache(self.clock)
        self.store = MemoryStore()
        self.offload = InlineOffload()
        self.revision = 1
        self.board.begin_list(HEAD_1, 1)
        self.board.add_page([Row(key(obj), encode(obj), 1) for obj in objects])
        self.board.end_list()

    def apply(self, *objects: AnyObject, drop: Iterable[str] = ()) -> None:
        self.revision += 1
        changes = [RowChange(key(obj), encode(obj), self.revision) for obj in objects]
        changes += [RowChange(name, None, self.revision) for name in drop]
        self.board.apply(WatchEvent(self.revision - 1, self.revision, tuple(changes), 0, 0, None, HEAD_1))

    async def store_only(self, *objects: AnyObject, raw: Iterable[tuple[str, bytes]] = ()) -> None:
        """Write to the store alone: rows that the watch cache does not have."""
        await self.store.commit(Commit(puts=[*((key(obj), encode(obj)) for obj in objects), *raw]))

    def view_snapshots(self) -> ViewSnapshots:
        return ViewSnapshots(self.board, self.store, self.clock, self.offload)

    def view_snapshot(self) -> ViewSnapshot:
        seen = CachedRows(HEAD_1, self.board.revision, dict(self.board.rows))
        return ViewSnapshot(seen, build_view(seen, self.clock), PlacementInputs((self.clock.boot(), self.clock.now_ms())))
