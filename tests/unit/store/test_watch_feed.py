"""Internals of the watch feed that the store contract cannot observe: folding, window, watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from remit.store import chain
from remit.store.protocol import HEAD, Head, Resync, RowChange, Span
from remit.store.watch_feed import EventFold, FeedLimits, Transaction, WatchFeed


def transaction(revision: int, *keys: str, head: Head | None = None) -> Transaction:
    changes = [RowChange(key, b"%d" % revision, revision) for key in keys]
    if head is not None:
        changes.append(RowChange(HEAD, chain.encode_head(head), revision))
    return Transaction(revision, changes)


async def no_replay(after: int) -> Sequence[Transaction]:
    raise AssertionError(f"unexpected replay after {after}")


def test_fold_keeps_last_change_of_each_key_in_order() -> None:
    fold = EventFold("k", 4)
    for number, keys in enumerate((("k1", "k2", "x"), ("k1",), ("k3", "x")), start=5):
        fold.add(transaction(number, *keys))
    event = fold.event()
    assert [(change.key, change.revision) for change in event.changes] == [("k2", 5), ("k1", 6), ("k3", 7)]
    assert (event.after, event.revision, event.superseded, event.elsewhere) == (4, 7, 1, 2)
    assert (event.span, event.head) == (None, None)


def test_fold_spans_consecutive_heads_only() -> None:
    heads = [Head("i", 1, sequence, "w", 1, "") for sequence in (7, 8, 10)]
    fold = EventFold("", 0)
    for number, head in enumerate(heads[:2], start=1):
        assert fold.can_add(transaction(number, "a", head=head))
        fold.add(transaction(number, "a", head=head))
    assert fold.event().span == Span(7, 8, 2)
    assert not fold.can_add(transaction(3, "a", head=heads[2]))
    assert not fold.can_add(transaction(3, "a", head=Head("other", 1, 9, "w", 1, "")))
    assert fold.can_add(transaction(3, "a"))


def test_feed_window_is_bounded_in_rows_bytes_and_transactions() -> None:
    feed = WatchFeed(0, FeedLimits(window_rows_max=8, window_bytes_max=1_000))
    for revision in range(1, 101):
        feed.publish([transaction(revision, "a", "b")])
        assert sum(len(one.changes) for one in feed.window) <= 10
    for revision in range(101, 200):
        feed.publish([transaction(revision)])
        assert len(feed.window) <= 11
    huge = Transaction(200, [RowChange("big", b"v" * 5_000, 200)])
    feed.publish([huge])
    assert feed.window == [huge]
    assert (feed.floor, feed.revision) == (199, 200)


def test_lagging_watcher_is_dropped_with_resync() -> None:
    async def run_test() -> None:
        feed = WatchFeed(0, FeedLimits(window_rows_max=4, pending_rows_max=4))
        watcher = feed.watch("", 0, no_replay)
        for revision in range(1, 30):
            feed.publish([transaction(revision, f"k{revision}")])
        assert len(feed._watchers) == 0
        try:
            await anext(watcher)
        except Resync as error:
            assert (error.seen, error.now <= 29) == (0, True)
        else:
            raise AssertionError("the watcher was not dropped")

    asyncio.run(run_test())


def test_commit_replayed_before_publish_is_delivered_once() -> None:
    """The log is read by another thread, and may be one commit ahead of the window."""

    async def run_test() -> None:
        feed = WatchFeed(5)
        past = [transaction(revision, "a") for revision in range(4, 8)]

        async def replay(after: int) -> Sequence[Transaction]:
            return [one for one in past if one.revision > after]

        watcher = feed.watch("", 3, replay)
        seen = [(await anext(watcher)).revision for _ in range(4)]
        waiting = asyncio.ensure_future(anext(watcher))
        await asyncio.sleep(0)
        feed.publish(past[2:])
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.publish([transaction(8, "a")])
        seen.append((await waiting).revision)
        assert seen == [4, 5, 6, 7, 8]

    asyncio.run(run_test())
