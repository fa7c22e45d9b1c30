"""Watch feed: shared window of recent transactions, folding for slow watchers.

The feed keeps a bounded **window** of recent transactions that all watchers share; a watcher is a position in it. A watcher
that keeps up gets one event per transaction, also when nothing under its prefix changed, so that its revision advances. A
slow one gets several folded into one event. When the window moves past a watcher, its unread transactions are folded for it
separately; that is bounded too, and a watcher beyond the bound is dropped with `Resync`. So a slow reader costs a bounded
amount of memory and delays no other. Older transactions are read from the backend's log (`Replay`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from remit.store.chain import decode_head
from remit.store.protocol import HEAD, Head, Resync, RowChange, Span, StoreClosed, StoreError, WatchEvent


class FeedLimits(NamedTuple):
    """Memory limits of a feed: for all watchers together (window), and for each one behind the window (pending)."""

    window_rows_max: int = 1 << 16
    window_bytes_max: int = 64 << 20
    pending_rows_max: int = 1 << 16
    pending_bytes_max: int = 64 << 20
    fold_after: int = 64
    """A watcher with more unread transactions than this gets them in one event."""


class Transaction:
    """One committed transaction as watchers see it: without the head row."""

    __slots__ = ("_by_prefix", "changes", "head", "revision", "size")

    def __init__(self, revision: int, changes: Iterable[RowChange]) -> None:
        self.revision = revision
        self.head: Head | None = None
        without_head: list[RowChange] = []
        size = 0
        for change in changes:
            key, value, _ = change
            if key == HEAD:
                self.head = None if value is None else decode_head(value)
            else:
                without_head.append(change)
                size += len(key) + len(value or b"")
        self.changes = tuple(without_head)
        self.size = size
        # Watchers share few prefixes, so each filter is computed once per transaction, not once per watcher.
        self._by_prefix: dict[str, tuple[RowChange, ...]] = {}

    def changes_under(self, prefix: str) -> tuple[RowChange, ...]:
        if not prefix:
            return self.changes
        matching = self._by_prefix.get(prefix)
        if matching is None:
            matching = tuple(change for change in self.changes if change.key.startswith(prefix))
            self._by_prefix[prefix] = matching
        return matching


class EventFold:
    """Folds consecutive transactions into one event: the last change of each key, and the number of dropped ones."""

    def __init__(self, prefix: str, after: int) -> None:
        self.prefix, self.after, self.revision = prefix, after, after
        self.changes: dict[str, RowChange] = {}
        self.size = self.superseded = self.elsewhere = 0
        self.span: Span | None = None
        self.head: Head | None = None

    def can_add(self, transaction: Transaction) -> bool:
        """Return whether the transaction follows the last one in this event without a gap in the chain.

        If transactions before and after a gap were merged into one event, `chain.gap` could not detect the gap.
        """
        old, new = self.head, transaction.head
        if old is None or new is None:
            return True
        return new.sequence == old.sequence + 1 and new.incarnation == old.incarnation

    def add(self, transaction: Transaction) -> None:
        matching = transaction.changes_under(self.prefix)
        self.elsewhere += len(transaction.changes) - len(matching)
        for change in matching:
            old = self.changes.pop(change.key, None)
            if old is not None:
                self.superseded += 1
                self.size -= _size(old)
            self.changes[change.key] = change
            self.size += _size(change)
        self.revision = transaction.revision
        if (head := transaction.head) is not None:
            first, rows = (self.span.first, self.span.rows) if self.span else (head.sequence, 0)
            self.span, self.head = Span(first, head.sequence, rows + head.count), head

    def event(self) -> WatchEvent:
        changes = tuple(self.changes.values())
        return WatchEvent(self.after, self.revision, changes, self.superseded, self.elsewhere, self.span, self.head)


Replay = Callable[[int], Awaitable[Sequence[Transaction]]]
"""Reads the next transactions after a revision from the backend's log, a bounded number at a time. Raises `Compacted`."""


class WatchFeed:
    """The window (`floor`, `revision`] and its watchers. No method awaits while it changes the state."""

    def __init__(self, revision: int, limits: FeedLimits = FeedLimits()) -> None:
        self.limits = limits
        self.floor = self.revision = revision
        self.window: list[Transaction] = []
        self._rows = self._bytes = 0
        # A dict, not a set: watchers are woken in the order of their arrival, which keeps simulations deterministic.
        self._watchers: dict[FeedWatcher, None] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._closed = False

    def publish(self, transactions: Sequence[Transaction]) -> None:
        """Add committed transactions, whose revisions follow without a gap."""
        for transaction in transactions:
            self.window.append(transaction)
            self._rows += len(transaction.changes)
            self._bytes += transaction.size
            self.revision = transaction.revision
        self._evict()
        self.wake()

    def watch(self, prefix: str, after: int, replay: Replay) -> FeedWatcher:
        if self._closed:
            raise StoreClosed("the store is closed")
        watcher = FeedWatcher(self, prefix, after, replay)
        self._watchers[watcher] = None
        return watcher

    def remove(self, watcher: FeedWatcher) -> None:
        self._watchers.pop(watcher, None)

    def close(self) -> None:
        self._closed = True
        for watcher in tuple(self._watchers):
            watcher.end(StoreClosed("the store is closed"))
        self.window.clear()
        self.floor = self.revision
        self.wake()

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _evict(self) -> None:
        """Shrink the window once it is 25 % too large: checking all watchers after every transaction would cost too much."""
        rows_max, bytes_max = self.limits.window_rows_max, self.limits.window_bytes_max
        if self._rows <= rows_max * 5 // 4 and self._bytes <= bytes_max * 5 // 4 and len(self.window) <= rows_max * 5 // 4:
            return
        gone = 0
        # Keep the newest even if it is too large, or one huge transaction would push every watcher out of the window.
        while gone < len(self.window) - 1 and (
            self._rows > rows_max or self._bytes > bytes_max or len(self.window) - gone > rows_max
        ):
            self._rows -= len(self.window[gone].changes)
            self._bytes -= self.window[gone].size
            gone += 1
        if not gone:
            return
        for watcher in tuple(self._watchers):
            watcher.fall_behind(gone)
        self.floor = self.window[gone - 1].revision
        del self.window[:gone]


class FeedWatcher:
    """Position of one watcher. It reads the backend's log up to the window first (not `joined`), then the window."""

    def __init__(self, feed: WatchFeed, prefix: str, after: int, replay: Replay) -> None:
        self._feed, self._prefix, self._replay = feed, prefix, replay
        self._seen = after
        self._replayed: deque[Transaction] = deque()
        self._joined = after >= feed.floor
        self._fold: EventFold | None = None
        self._error: StoreError | None = None
        self._closed = False

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        while True:
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            event = self._next_replayed() if not self._joined else self._next_live()
            if event is not None:
                return event
            if self._joined:
                await self._feed.wait()
            else:
                await self._read_log()

    async def close(self) -> None:
        self._closed = True
        self._release()
        self._feed.wake()

    def end(self, error: StoreError) -> None:
        """Make all later steps raise `error`, and drop pending events."""
        if self._error is None:
            self._error = error
        self._release()

    def fall_behind(self, gone: int) -> None:
        """The first `gone` transactions leave the window: fold those that were not read, or drop the watcher."""
        feed = self._feed
        if not self._joined:
            return
        unread = feed.window[max(0, self._seen - feed.floor) : gone]
        if not unread:
            return
        fold = self._fold or EventFold(self._prefix, self._seen)
        for transaction in unread:
            if not fold.can_add(transaction):
                self.end(Resync(fold.after, feed.revision))
                return
            fold.add(transaction)
            if len(fold.changes) > feed.limits.pending_rows_max or fold.size > feed.limits.pending_bytes_max:
                self.end(Resync(fold.after, feed.revision))
                return
        self._fold, self._seen = fold, fold.revision

    def _next_live(self) -> WatchEvent | None:
        feed = self._feed
        index = self._seen - feed.floor
        pending = len(feed.window) - index
        fold, self._fold = self._fold, None
        if fold is None:
            # Negative if the log already showed a commit that is about to be published.
            if pending <= 0:
                return None
            fold = EventFold(self._prefix, self._seen)
            take = 1 if pending <= feed.limits.fold_after else pending
        else:
            take = pending
        for transaction in feed.window[index : index + take]:
            if not fold.can_add(transaction):
                break
            fold.add(transaction)
        self._seen = fold.revision
        return fold.event()

    def _next_replayed(self) -> WatchEvent | None:
        if not self._replayed:
            # No await between this check of the floor and the first read of the window, so nothing is missed or repeated.
            if self._seen >= self._feed.floor:
                self._joined = True
                return self._next_live()
            return None
        fold = EventFold(self._prefix, self._seen)
        take = 1 if len(self._replayed) <= self._feed.limits.fold_after else len(self._replayed)
        while take and fold.can_add(self._replayed[0]):
            fold.add(self._replayed.popleft())
            take -= 1
        self._seen = fold.revision
        return fold.event()

    async def _read_log(self) -> None:
        try:
            self._replayed.extend(await self._replay(self._seen))
        except StoreError as error:
            self.end(error)

    def _release(self) -> None:
        self._feed.remove(self)
        self._replayed.clear()
        self._fold = None


def _size(change: RowChange) -> int:
    return len(change.key) + len(change.value or b"")
