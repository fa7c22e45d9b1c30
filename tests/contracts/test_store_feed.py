"""Contract of `watch` on every store: watchers get everything, once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from remit.store import chain
from remit.store.protocol import HEAD, RowChange, Span, Watch, WatchEvent
from remit.store.watch_feed import FeedLimits
from tests.contracts.stores import (
    BACKENDS,
    Backend,
    Writer,
    delete,
    events_up_to,
    make_backend,
    next_event,
    open_store,
    put,
    run,
)

Make = Callable[[], Backend]


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return make_backend(request, monkeypatch)


def test_watcher_gets_each_transaction(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            start = await store.revision()
            watch = await store.watch("a/", after=start)
            first = await put(store, ("a/1", b"x"), ("b/1", b"x"), ("a/2", b"x"))
            assert await next_event(watch) == WatchEvent(
                start, first, (RowChange("a/1", b"x", first), RowChange("a/2", b"x", first)), 0, 1, None, None
            )
            second = await delete(store, "a/1")
            assert await next_event(watch) == WatchEvent(first, second, (RowChange("a/1", None, second),), 0, 0, None, None)

    run(scenario())


def test_waiting_watcher_is_woken_by_commit(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            watch = await store.watch("", after=await store.revision())
            waiting = asyncio.ensure_future(next_event(watch))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            revision = await put(store, ("a", b""))
            assert (await waiting).revision == revision

    run(scenario())


def test_watcher_without_matching_changes_still_advances(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            start = await store.revision()
            watch = await store.watch("quiet/", after=start)
            last = 0
            for n in range(5):
                last = await put(store, (f"loud/{n}", b""))
            events = await events_up_to(watch, last)
            assert [event.changes for event in events] == [()] * 5
            assert sum(event.elsewhere for event in events) == 5

    run(scenario())


def test_cancelled_wait_loses_no_event(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            start = await store.revision()
            watch = await store.watch("", after=start)
            for n in range(5):
                waiting = asyncio.ensure_future(next_event(watch))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                revision = await put(store, (f"{n}", b""))
                assert (await next_event(watch)).revision == revision

    run(scenario())


@pytest.mark.parametrize("window", [1, 3, 1_000])
@pytest.mark.parametrize("fold_after", [0, 2, 1_000])
def test_watch_from_past_has_no_gap_and_no_repeat(make: Make, window: int, fold_after: int) -> None:
    """F05, F06. The history exceeds the window and a page of the log, and writes continue while it is read."""
    bounds = FeedLimits(window_rows_max=window, fold_after=fold_after)

    async def scenario() -> None:
        async with open_store(make, bounds) as store:
            start = await store.revision()
            for n in range(40):
                await put(store, (f"k/{n % 7}", b"%d" % n), (f"other/{n}", b""))
            watch = await store.watch("k/", after=start)
            view, seen, counted = dict[str, bytes | None](), start, 0
            for n in range(40, 120):
                if n < 100:
                    await put(store, (f"k/{n % 7}", b"%d" % n), (f"other/{n}", b""))
                now = await store.revision()
                while seen < now and (n >= 100 or seen < now - 3):
                    event = await next_event(watch)
                    assert event.after == seen
                    seen = event.revision
                    counted += len(event.changes) + event.superseded
                    view.update((change.key, change.value) for change in event.changes)
            assert counted == 100
            assert view == {f"k/{n % 7}": b"%d" % n for n in range(93, 100)}

    run(scenario())


def test_watchers_share_value_bytes(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            start = await store.revision()
            watches = [await store.watch(prefix, after=start) for prefix in ("", "a", "a")]
            await put(store, ("a", b"some bytes"))
            values = [(await next_event(watch)).changes[0].value for watch in watches]
            assert values[0] is values[1] is values[2]

    run(scenario())


def test_closed_watch_ends_for_waiting_reader(make: Make) -> None:
    async def collect(watch: Watch) -> list[WatchEvent]:
        return [event async for event in watch]

    async def scenario() -> None:
        async with open_store(make) as store:
            watch = await store.watch("", after=await store.revision())
            waiting = asyncio.ensure_future(collect(watch))
            await put(store, ("a", b""))
            await asyncio.sleep(0.01)
            await watch.close()
            assert len(await asyncio.wait_for(waiting, 5)) == 1
            await watch.close()

    run(scenario())


# The writer's chain as seen by watchers


def test_head_is_no_change_but_describes_span(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            writer = await Writer.take_over(store, "w")
            seen = writer.place.head
            for prefix, elsewhere in (("", 0), ("a", 2), (HEAD, 3)):
                watch = await store.watch(prefix, after=await store.revision())
                assert await writer.write(("a", b"1"), ("b", b"1"), deletes=("c",))
                event = await next_event(watch)
                assert event.elsewhere == elsewhere
                assert len(event.changes) + elsewhere == 3
                assert event.span == Span(seen.sequence + 1, seen.sequence + 1, 3)
                assert event.head == writer.place.head
                assert chain.gap(seen, event) is None
                seen = writer.place.head

    run(scenario())


@pytest.mark.parametrize("prefix", ["", "k/", "k/1", "none/"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("window", [2, 30, 1_000])
def test_folded_events_account_for_every_row(make: Make, prefix: str, late: bool, window: int) -> None:
    """F05, F21. However a watcher lags, `chain.gap` finds every row of every batch accounted for."""
    bounds = FeedLimits(window_rows_max=window, fold_after=3)

    async def scenario() -> None:
        async with open_store(make, bounds) as store:
            writer = await Writer.take_over(store, "w")
            seen, start = writer.place.head, writer.place.revision
            early = await store.watch(prefix, after=start)
            for n in range(50):
                deletes = (f"k/{(n + 1) % 5}",) if n % 3 else ()
                assert await writer.write((f"k/{n % 5}", b"%d" % n), (f"other/{n}", b""), deletes=deletes)
            watch = await store.watch(prefix, after=start) if late else early
            events = await events_up_to(watch, writer.place.revision)
            assert len(events) < 50
            assert events[0].after == start
            for event in events:
                assert chain.gap(seen, event) is None
                assert event.head is not None
                assert event.span is not None
                assert event.span.last == event.head.sequence
                keys = [change.key for change in event.changes]
                assert len(set(keys)) == len(keys)
                assert all(key.startswith(prefix) for key in keys)
                seen = event.head
            assert seen == writer.place.head

    run(scenario())


def test_raw_write_among_batches_shows_as_gap(make: Make) -> None:
    """F05."""
    bounds = FeedLimits(fold_after=0)

    async def scenario() -> None:
        async with open_store(make, bounds) as store:
            writer = await Writer.take_over(store, "w")
            seen = writer.place.head
            watch = await store.watch("", after=writer.place.revision)
            assert await writer.write(("a", b"1"))
            await put(store, ("intruder", b""))
            event = (await events_up_to(watch, await store.revision()))[-1]
            assert "accounts for 2 rows of 1" in (chain.gap(seen, event) or "")

    run(scenario())


def test_break_in_chain_is_never_folded(make: Make) -> None:
    """A head that skips a sequence number cannot come from a correct writer: folding would hide it from `gap`."""
    bounds = FeedLimits(fold_after=0)

    async def scenario() -> None:
        async with open_store(make, bounds) as store:
            writer = await Writer.take_over(store, "w")
            seen = writer.place.head
            watch = await store.watch("", after=writer.place.revision)
            assert await writer.write(("a", b"1"))
            writer.place = chain.ChainPosition(chain.advance(writer.place.head, (), ()), writer.place.revision)
            assert await writer.write(("a", b"2"))
            first, second = await events_up_to(watch, writer.place.revision)
            assert chain.gap(seen, first) is None
            assert first.head is not None
            assert "expected" in (chain.gap(first.head, second) or "")

    run(scenario())
