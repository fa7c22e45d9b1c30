"""Contract of every store (protocol.py), run on each backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from remit.store import chain
from remit.store.protocol import (
    HEAD,
    KEY_BYTES_MAX,
    PAGE_ROWS_MAX,
    ROWS_PER_COMMIT_MAX,
    VALUE_BYTES_MAX,
    Commit,
    Committed,
    Compacted,
    Conflict,
    Guard,
    Head,
    Invalid,
    Page,
    Resync,
    Row,
    Store,
    StoreClosed,
)
from remit.store.watch_feed import FeedLimits
from tests.contracts.stores import BACKENDS, Backend, delete, events_up_to, make_backend, next_event, open_store, put, run

Make = Callable[[], Backend]


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return make_backend(request, monkeypatch)


# Reading and writing


def test_answered_commit_is_read_back(make: Make) -> None:
    """F04: linearizable reads."""

    async def scenario() -> None:
        async with open_store(make) as store:
            assert await store.get("a") is None
            before = await store.revision()
            revision = await put(store, ("a", b"1"), ("b", b""))
            assert revision == before + 1 == await store.revision()
            assert await store.get("a") == Row("a", b"1", revision)
            assert await store.get("b") == Row("b", b"", revision)

    run(scenario())


def test_every_transaction_gets_next_revision_even_without_changes(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            first = await put(store, ("a", b"1"))
            watch = await store.watch("", after=first)
            answer = await store.commit(Commit(guards=(Guard("a", first),)))
            assert answer == Committed(first + 1)
            assert await put(store, ("a", b"1")) == first + 2
            bookmark, change = await events_up_to(watch, first + 2)
            assert (bookmark.changes, bookmark.elsewhere, len(change.changes)) == ((), 0, 1)
            replayed = await events_up_to(await store.watch("", after=first), first + 2)
            assert [event.revision for event in replayed] == [first + 1, first + 2]

    run(scenario())


def test_concurrent_commits_get_distinct_revisions(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            before = await store.revision()
            answers = await asyncio.gather(*(put(store, (f"k{n:03}", b"%d" % n)) for n in range(200)))
            assert sorted(answers) == list(range(before + 1, before + 201))
            page = await store.range("k")
            assert {row.key: row.revision for row in page.rows} == {f"k{n:03}": answers[n] for n in range(200)}

    run(scenario())


def test_concurrent_guarded_commits_have_one_winner(make: Make) -> None:
    """Twenty commits update one counter from the same revision: exactly one may win, whether or not they are batched."""

    async def scenario() -> None:
        async with open_store(make) as store:
            start = await put(store, ("counter", b"0"))
            commits = [Commit((Guard("counter", start),), (("counter", b"%d" % n), (f"won/{n}", b""))) for n in range(20)]
            answers = await asyncio.gather(*(store.commit(commit) for commit in commits))
            won = [n for n, answer in enumerate(answers) if isinstance(answer, Committed)]
            assert len(won) == 1
            assert [row.key for row in (await store.range("won/")).rows] == [f"won/{won[0]}"]
            found = {answer.found for answer in answers if isinstance(answer, Conflict)}
            assert found == {start + 1}

    run(scenario())


@pytest.mark.parametrize("expected", ["absent", "older", "newer"])
def test_failed_guard_applies_nothing(make: Make, expected: str) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            first = await put(store, ("a", b"1"))
            second = await put(store, ("a", b"2"), ("b", b"2"))
            wrong = {"absent": 0, "older": first, "newer": second + 1}[expected]
            commit = Commit((Guard("b", second), Guard("a", wrong)), (("c", b"3"),), ("b",))
            assert await store.commit(commit) == Conflict("a", wrong, second)
            assert await store.revision() == second
            assert await store.get("c") is None
            assert await store.get("b") == Row("b", b"2", second)

    run(scenario())


def test_commit_with_fulfilled_guards_is_applied(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            first = await put(store, ("a", b"1"))
            second = await put(store, ("b", b"1"))
            guards = (Guard("a", first), Guard("b", second), Guard("none", 0))
            third = await put(store, ("a", b"2"), ("none", b"n"), guards=guards)
            assert await store.get("none") == Row("none", b"n", third)
            assert await store.commit(Commit((Guard("none", 0),), (("z", b""),))) == Conflict("none", 0, third)
            assert await store.commit(Commit((Guard("gone", 7),), (("z", b""),))) == Conflict("gone", 7, 0)

    run(scenario())


def test_deleted_key_may_be_created_again(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            first = await put(store, ("a", b"1"), ("b", b"1"))
            deleted = await delete(store, "a")
            assert await store.get("a") is None
            assert await store.commit(Commit((Guard("a", deleted),), (("a", b"x"),))) == Conflict("a", deleted, 0)
            again = await put(store, ("a", b"2"), guards=(Guard("a", 0),))
            assert await store.get("a") == Row("a", b"2", again)
            seen = [
                [row.key for row in (await store.range("", revision=at)).rows if row.key != HEAD]
                for at in (first, deleted, again)
            ]
            assert seen == [["a", "b"], ["b"], ["a", "b"]]

    run(scenario())


def test_deleting_absent_key_counts_as_change(make: Make) -> None:
    """The writer's chain counts the rows of a batch; if the store counted fewer, watchers would see a gap."""

    async def scenario() -> None:
        async with open_store(make) as store:
            before = await store.revision()
            watch = await store.watch("", after=before)
            revision = await delete(store, "never")
            event = await next_event(watch)
            assert (event.revision, [change.value for change in event.changes]) == (revision, [None])

    run(scenario())


@pytest.mark.parametrize(
    "commit",
    [
        Commit(puts=(("a", b""), ("a", b""))),
        Commit(puts=(("a", b""),), deletes=("a",)),
        Commit(deletes=("a", "a")),
        Commit(puts=(("", b""),)),
        Commit(deletes=("",)),
        Commit(guards=(Guard("", 0),)),
        Commit(guards=(Guard("a", -1),)),
        Commit(puts=(("k" * (KEY_BYTES_MAX + 1), b""),)),
        Commit(puts=(("é" * (KEY_BYTES_MAX // 2 + 1), b""),)),
        Commit(puts=(("\ud800", b""),)),
        Commit(puts=(("a", b"v" * (VALUE_BYTES_MAX + 1)),)),
        Commit(puts=tuple((f"{n}", b"") for n in range(ROWS_PER_COMMIT_MAX + 1))),
        Commit(puts=((HEAD, b"no head"),)),
        Commit(deletes=(HEAD,)),
    ],
    ids=lambda commit: f"{len(commit.puts)} puts, {len(commit.deletes)} deletes",
)
def test_invalid_commit_applies_nothing(make: Make, commit: Commit) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            before = await store.revision()
            with pytest.raises(Invalid):
                await store.commit(commit)
            assert await store.revision() == before

    run(scenario())


def test_largest_allowed_commit_is_accepted(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            big = b"v" * VALUE_BYTES_MAX
            rows = [("k" * KEY_BYTES_MAX, big)]
            rows += [(f"many/{n}", b"") for n in range(ROWS_PER_COMMIT_MAX - 1)]
            revision = await put(store, *rows)
            assert await store.get("k" * KEY_BYTES_MAX) == Row("k" * KEY_BYTES_MAX, big, revision)
            page = await store.range("many/", limit=PAGE_ROWS_MAX)
            assert (len(page.rows), page.more) == (PAGE_ROWS_MAX, True)

    run(scenario())


def test_invalid_queries_are_refused(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            now = await put(store, ("a", b""))
            for limit in (0, -1, PAGE_ROWS_MAX + 1):
                with pytest.raises(Invalid):
                    await store.range("", limit=limit)
            for revision in (now + 1, -1):
                with pytest.raises(Invalid):
                    await store.range("", revision=revision)
                with pytest.raises(Invalid):
                    await store.watch("", after=revision)
                with pytest.raises(Invalid):
                    await store.compact(revision)
            with pytest.raises(Invalid):
                await store.get("")

    run(scenario())


# Ranges

ODD_KEYS = [
    "a",
    "a\0",
    "a\0b",
    "a/",
    "a/b",
    "a0",
    "aa",
    "b",
    "é",
    "\ud7ff",
    "\ue000",
    "\uffff",
    "\U0001f600",
    "\U0010ffff",
    "\U0010ffffz",
]


def test_ranges_are_in_key_order_and_exact_at_edges(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            await put(store, *((key, key.encode()) for key in reversed(ODD_KEYS)))
            for prefix in ["", "a", "a\0", "a/", "b", "\ud7ff", "\U0010ffff", "z", "\U0001f600"]:
                for after in ["", "a", "a/b", "b", "\uffff", "\U0010ffff"]:
                    page = await store.range(prefix, after=after)
                    found = [row.key for row in page.rows if row.key != HEAD]
                    assert found == sorted(key for key in ODD_KEYS if key.startswith(prefix) and key > after)

    run(scenario())


async def read_pages(store: Store, prefix: str, limit: int) -> list[Page]:
    pages = [await store.range(prefix, limit=limit)]
    while pages[-1].more:
        await put(store, (f"{prefix}{pages[-1].rows[-1].key[-3:]}x", b"late"), (pages[0].rows[0].key, b"late"))
        await delete(store, f"{prefix}199")
        pages.append(await store.range(prefix, after=pages[-1].rows[-1].key, limit=limit, revision=pages[0].revision))
    return pages


@pytest.mark.parametrize("limit", [1, 7, 50, 200, 201])
def test_pages_show_one_state_while_writes_continue(make: Make, limit: int) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            rows = [(f"p/{n:03}", b"%d" % n) for n in range(200)]
            revision = await put(store, *rows)
            pages = await read_pages(store, "p/", limit)
            assert {page.revision for page in pages} == {revision}
            assert [row for page in pages for row in page.rows] == [Row(key, value, revision) for key, value in rows]
            assert all(len(page.rows) == limit for page in pages[:-1])

    run(scenario())


def test_exactly_full_page_has_no_more(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            await put(store, *((f"p/{n}", b"") for n in range(5)))
            await delete(store, "p/4")
            assert (await store.range("p/", limit=4)).more is False
            assert (await store.range("p/", limit=3)).more is True
            assert await store.range("none/") == Page((), await store.revision(), more=False)

    run(scenario())


def test_page_skips_many_deleted_keys(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            await put(store, *((f"p/{n:02}", b"") for n in range(30)))
            await delete(store, *(f"p/{n:02}" for n in range(25)))
            for limit in (1, 2, 5, 6):
                page = await store.range("p/", limit=limit)
                assert [row.key for row in page.rows] == [f"p/{n}" for n in range(25, 30)][:limit]
                assert page.more is (limit < 5)

    run(scenario())


# Compaction


def test_compaction_keeps_current_rows_and_refuses_past(make: Make) -> None:
    """F07."""

    async def scenario() -> None:
        async with open_store(make) as store:
            first = await put(store, ("a", b"1"), ("b", b"1"), ("c", b"1"))
            second = await put(store, ("a", b"2"))
            third = await delete(store, "b")
            last = await put(store, ("a", b"3"))
            await store.compact(third)
            for refused in (first, second):
                with pytest.raises(Compacted) as caught:
                    await store.range("", revision=refused)
                assert (caught.value.revision, caught.value.oldest) == (refused, third)
                with pytest.raises(Compacted):
                    await store.watch("", after=refused)
            at_third = [row for row in (await store.range("", revision=third)).rows if row.key != HEAD]
            assert at_third == [Row("a", b"2", second), Row("c", b"1", first)]
            assert [event.revision for event in await events_up_to(await store.watch("", after=third), last)] == [last]
            await store.compact(second)  # already compacted: no effect
            await store.compact(last)
            assert [row.key for row in (await store.range("")).rows if row.key != HEAD] == ["a", "c"]
            assert await put(store, ("b", b"new"), guards=(Guard("b", 0),)) == last + 1

    run(scenario())


def test_compaction_under_watcher_reading_history(make: Make) -> None:
    """F07."""
    bounds = FeedLimits(window_rows_max=4)

    async def scenario() -> None:
        async with open_store(make, bounds) as store:
            start = await put(store, ("a", b"0"))
            behind = await store.watch("", after=start)
            for n in range(20):
                await put(store, ("a", b"%d" % n))
            past = await store.watch("", after=start)
            now = await store.revision()
            await store.compact(now)
            with pytest.raises(Compacted):
                await next_event(past)
            with pytest.raises(Compacted):
                await next_event(past)
            # This watcher was open all along: its missing events are queued, so it needs no history.
            assert (await events_up_to(behind, now))[-1].revision == now

    run(scenario())


# Closing


def test_closed_store_refuses_every_call(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            revision = await put(store, ("a", b""))
            watch = await store.watch("", after=revision)
            waiting = asyncio.ensure_future(next_event(watch))
            await asyncio.sleep(0)
            await store.close()
            await store.close()
            for question in (
                store.get("a"),
                store.range(""),
                store.commit(Commit(puts=(("a", b""),))),
                store.watch("", after=revision),
                store.compact(revision),
                store.revision(),
                waiting,
                next_event(watch),
            ):
                with pytest.raises(StoreClosed):
                    await question

    run(scenario())


def test_commits_in_flight_at_close_are_answered(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            waiting = [asyncio.ensure_future(put(store, (f"k{n}", b""))) for n in range(50)]
            await asyncio.sleep(0)
            await store.close()
            answers = await asyncio.gather(*waiting)
            assert sorted(answers) == list(range(answers[0], answers[0] + 50))

    run(scenario())


# Backup and restore


def test_restore_creates_incarnation_and_lists_lost_changes(make: Make) -> None:
    """F10."""

    async def scenario() -> None:
        backend = make()
        try:
            store = await backend.open()
            place = await chain.raise_epoch(store, "writer", "first")
            kept = await put(store, ("a", b"1"), ("b", b"1"), ("gone", b"1"))
            backup = await backend.backup(store)
            lost = await put(store, ("a", b"2"), ("c", b"2"))
            await delete(store, "gone")
            await store.compact(lost + 1)
            deposed = await chain.raise_epoch(store, "later", "first")
            new, restored = await backend.restore(store, backup, "second")
            assert (restored.backup_revision, restored.backup_head) == (kept, place.head)
            assert restored.replaced is not None
            assert (restored.replaced.revision, restored.replaced.head) == (deposed.revision, deposed.head)
            assert (restored.replaced.changed, restored.replaced.changed_count) == (("a", "c", "gone"), 3)
            await assert_restored(new, restored.head, deposed, place.head, kept)
            await new.close()
        finally:
            await backend.close()

    run(scenario())


async def assert_restored(store: Store, restored_head: Head, deposed: chain.ChainPosition, backed_up: Head, kept: int) -> None:
    rows = [row for row in (await store.range("")).rows if row.key != HEAD]
    assert rows == [Row("a", b"1", kept), Row("b", b"1", kept), Row("gone", b"1", kept)]
    assert (restored_head.incarnation, restored_head.holder, restored_head.count) == ("second", "restore", 0)
    assert restored_head.epoch > deposed.head.epoch
    assert restored_head.sequence == backed_up.sequence + 1
    now = await store.revision()
    assert now > deposed.revision, "a revision must not be reused"
    with pytest.raises(Compacted):
        await store.watch("", after=deposed.revision)
    stale = await store.commit(chain.batch(deposed, chain.advance(deposed.head, (), ()), ()))
    assert isinstance(stale, Conflict)
    watch = await store.watch("", after=now)
    await chain.raise_epoch(store, "next", "ignored")
    event = await next_event(watch)
    assert event.head is not None
    assert event.head.incarnation == "second"
    assert "restored" in (chain.gap(backed_up, event) or "")


def test_backup_may_be_repeated_while_writes_continue(make: Make) -> None:
    async def scenario() -> None:
        backend = make()
        try:
            store = await backend.open()
            await put(store, ("a", b"1"))
            await backend.backup(store)
            second = await put(store, ("a", b"2"))
            backup = await backend.backup(store)
            await put(store, ("a", b"3"))
            new, restored = await backend.restore(store, backup, "second")
            assert restored.backup_revision == second
            assert await new.get("a") == Row("a", b"2", second)
            third = await put(new, ("a", b"4"), guards=(Guard("a", second),))
            assert third > restored.revision
            await new.close()
        finally:
            await backend.close()

    run(scenario())


def test_slow_watcher_gets_resync(make: Make) -> None:
    """F05."""
    bounds = FeedLimits(window_rows_max=8, pending_rows_max=16, fold_after=4)

    async def scenario() -> None:
        async with open_store(make, bounds) as store:
            start = await store.revision()
            slow, quiet = await store.watch("k/", after=start), await store.watch("q/", after=start)
            for n in range(100):
                await put(store, (f"k/{n}", b""))
            now = await store.revision()
            with pytest.raises(Resync) as caught:
                await next_event(slow)
            assert caught.value.seen == start
            with pytest.raises(Resync):
                await next_event(slow)
            event = await next_event(quiet)
            assert (event.after, event.revision, event.changes, event.elsewhere) == (start, now, (), 100)

    run(scenario())


def test_slow_watcher_of_large_values_gets_resync(make: Make) -> None:
    bounds = FeedLimits(window_bytes_max=4_000, pending_bytes_max=8_000)

    async def scenario() -> None:
        async with open_store(make, bounds) as store:
            start = await store.revision()
            many, one = await store.watch("k/", after=start), await store.watch("one", after=start)
            for n in range(30):
                await put(store, (f"k/{n}", b"v" * 1_000), ("one", b"v" * 1_000))
            with pytest.raises(Resync):
                await next_event(many)
            event = await next_event(one)
            assert (len(event.changes), event.superseded, event.elsewhere) == (1, 29, 30)

    run(scenario())
