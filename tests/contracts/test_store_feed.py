"""Does every store tell its watchers everything, once and in order? The part of the contract that is about `watch`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from remit.store import chain
from remit.store.protocol import HEAD, RowChange, Span, Watch, WatchEvent
from remit.store.watch_feed import FeedLimits
from tests.contracts.stores import BACKENDS, Backend, Writer, delete, events_up_to, made, next_event, opened, put, run

Make = Callable[[], Backend]


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return made(request, monkeypatch)


def test_a_watcher_that_keeps_up_hears_each_transaction(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            start = await store.revision()
            watch = await store.watch("a/", after=start)
            first = await put(store, ("a/1", b"x"), ("b/1", b"x"), ("a/2", b"x"))
            assert await next_event(watch) == WatchEvent(
                start, first, (RowChange("a/1", b"x", first), RowChange("a/2", b"x", first)), 0, 1, None, None
            )
            second = await delete(store, "a/1")
            assert await next_event(watch) == WatchEvent(first, second, (RowChange("a/1", None, second),), 0, 0, None, None)

    run(story())


def test_a_watcher_waits_and_is_woken(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            watch = await store.watch("", after=await store.revision())
            waiting = asyncio.ensure_future(next_event(watch))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            revision = await put(store, ("a", b""))
            assert (await waiting).revision == revision

    run(story())


def test_a_quiet_watcher_still_moves_on(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            start = await store.revision()
            watch = await store.watch("quiet/", after=start)
            last = 0
            for n in range(5):
                last = await put(store, (f"loud/{n}", b""))
            events = await events_up_to(watch, last)
            assert [event.changes for event in events] == [()] * 5
            assert sum(event.elsewhere for event in events) == 5

    run(story())


def test_a_wait_that_is_cancelled_loses_nothing(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
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

    run(story())


@pytest.mark.parametrize("window", [1, 3, 1_000])
@pytest.mark.parametrize("fold_after", [0, 2, 1_000])
def test_from_the_past_into_the_present__no_gap_and_nothing_twice(make: Make, window: int, fold_after: int) -> None:
    """F05, F06. The history is longer than the window and than a page of the log, and writes go on while it is read."""
    bounds = FeedLimits(window_rows_max=window, fold_after=fold_after)

    async def story() -> None:
        async with opened(make, bounds) as store:
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

    run(story())


def test_watchers_share_the_bytes(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            start = await store.revision()
            watches = [await store.watch(prefix, after=start) for prefix in ("", "a", "a")]
            await put(store, ("a", b"some bytes"))
            values = [(await next_event(watch)).changes[0].value for watch in watches]
            assert values[0] is values[1] is values[2]

    run(story())


def test_a_closed_watch_ends_also_for_one_who_waits(make: Make) -> None:
    async def collect(watch: Watch) -> list[WatchEvent]:
        return [event async for event in watch]

    async def story() -> None:
        async with opened(make) as store:
            watch = await store.watch("", after=await store.revision())
            waiting = asyncio.ensure_future(collect(watch))
            await put(store, ("a", b""))
            await asyncio.sleep(0.01)
            await watch.close()
            assert len(await asyncio.wait_for(waiting, 5)) == 1
            await watch.close()

    run(story())


# The writer's chain, as its watchers see it


def test_the_head_is_no_change__it_tells_the_span(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            writer = await Writer.seize(store, "w")
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

    run(story())


@pytest.mark.parametrize("prefix", ["", "k/", "k/1", "none/"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("window", [2, 30, 1_000])
def test_what_is_folded_is_counted(make: Make, prefix: str, late: bool, window: int) -> None:
    """F05, F21. However a watcher comes to lag, `chain.gap` finds that every row of every batch is accounted for."""
    bounds = FeedLimits(window_rows_max=window, fold_after=3)

    async def story() -> None:
        async with opened(make, bounds) as store:
            writer = await Writer.seize(store, "w")
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

    run(story())


def test_a_raw_write_among_batches_shows_as_a_gap(make: Make) -> None:
    """F05."""
    bounds = FeedLimits(fold_after=0)

    async def story() -> None:
        async with opened(make, bounds) as store:
            writer = await Writer.seize(store, "w")
            seen = writer.place.head
            watch = await store.watch("", after=writer.place.revision)
            assert await writer.write(("a", b"1"))
            await put(store, ("intruder", b""))
            event = (await events_up_to(watch, await store.revision()))[-1]
            assert "accounts for 2 rows of 1" in (chain.gap(seen, event) or "")

    run(story())


def test_a_break_in_the_chain_is_never_folded_over(make: Make) -> None:
    """A head that skips a sequence cannot come from a sound writer: a fold across it would hide it from `gap`."""
    bounds = FeedLimits(fold_after=0)

    async def story() -> None:
        async with opened(make, bounds) as store:
            writer = await Writer.seize(store, "w")
            seen = writer.place.head
            watch = await store.watch("", after=writer.place.revision)
            assert await writer.write(("a", b"1"))
            writer.place = chain.ChainPosition(chain.advance(writer.place.head, (), ()), writer.place.revision)
            assert await writer.write(("a", b"2"))
            first, second = await events_up_to(watch, writer.place.revision)
            assert chain.gap(seen, first) is None
            assert first.head is not None
            assert "expected" in (chain.gap(first.head, second) or "")

    run(story())
