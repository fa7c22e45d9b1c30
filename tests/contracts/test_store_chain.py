"""Contract of every store for the writer's chain: a deposed writer is fenced, and a lost answer is settled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import pytest

from remit.store import chain
from remit.store.protocol import (
    CommitOutcomeUnknown,
    Committed,
    Conflict,
    Corrupt,
    Head,
    NoSpace,
    ReadOnly,
    StoreClosed,
    StoreError,
    Unavailable,
)
from tests.contracts.stores import BACKENDS, Backend, LosingStore, Writer, make_backend, open_store, run

Make = Callable[[], Backend]


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return make_backend(request, monkeypatch)


def test_takeover_raises_epoch_and_keeps_incarnation(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            first = await chain.raise_epoch(store, "one", "first")
            second = await chain.raise_epoch(store, "two", "ignored")
            assert second.head.epoch == first.head.epoch + 1
            assert second.head.sequence == first.head.sequence + 1
            assert (second.head.incarnation, second.head.holder) == (first.head.incarnation, "two")
            assert await chain.read_position(store) == second

    run(scenario())


def test_deposed_writer_cannot_write(make: Make) -> None:
    """F15, F16."""

    async def scenario() -> None:
        async with open_store(make) as store:
            old = await Writer.take_over(store, "old")
            assert await old.write(("a", b"old"))
            new = await Writer.take_over(store, "new")
            assert not await old.write(("a", b"late"))
            assert await new.write(("a", b"new"))
            assert not await old.write(("b", b"late"))
            row = await store.get("a")
            assert row is not None
            assert row.value == b"new"
            assert await store.get("b") is None

    run(scenario())


def test_concurrent_takeovers_get_distinct_epochs_and_last_one_holds(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            places = await asyncio.gather(*(chain.raise_epoch(store, f"w{n}", "first") for n in range(8)))
            epochs = sorted(place.head.epoch for place in places)
            assert epochs == list(range(epochs[0], epochs[0] + 8))
            writers = [Writer(store, place) for place in places]
            wrote = [await writer.write((writer.place.head.holder, b"")) for writer in writers]
            assert wrote.count(True) == 1
            assert writers[wrote.index(True)].place.head.epoch == epochs[-1]

    run(scenario())


@pytest.mark.parametrize("fates", [["landed"], ["lost"], ["lost", "landed", "lost"]])
def test_takeover_with_lost_answers_is_one_epoch(make: Make, fates: list[str]) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            losing = LosingStore(store)
            losing.fates = list(fates)
            before = await chain.read_position(store)
            place = await chain.raise_epoch(losing, "w", "first")
            assert await chain.read_position(store) == place
            assert place.head.epoch == (before.head.epoch if before else 0) + 1, (
                "one takeover must raise the epoch once, however often its answer is lost"
            )
            assert await Writer(store, place).write(("a", b""))

    run(scenario())


@pytest.mark.parametrize(
    "error", [NoSpace("full"), ReadOnly("sealed"), StoreClosed("closed"), Unavailable("away"), Corrupt("hurt")]
)
@pytest.mark.parametrize("call", ["get", "commit"])
def test_takeover_and_settle_retry_only_after_unknown_outcome(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: StoreError, call: str
) -> None:
    """F11: a takeover must report that the store cannot be written; endless retries would hide it."""

    async def scenario() -> None:
        async with open_store(make) as store:
            losing = LosingStore(store)
            place = await chain.raise_epoch(store, "w", "first")
            calls = 0

            async def failing(_asked: object) -> NoReturn:
                nonlocal calls
                calls += 1
                raise error if calls > 2 or call == "get" else CommitOutcomeUnknown("lost")

            monkeypatch.setattr(losing, call, failing)
            with pytest.raises(type(error), match=str(error)):
                await chain.raise_epoch(losing, "w", "first")
            assert calls == (1 if call == "get" else 3)
            if call == "commit":
                with pytest.raises(type(error), match=str(error)):
                    await chain.settle(losing, place, chain.advance(place.head, (), ()))
            assert await chain.read_position(store) == place

    run(scenario())


async def lose_one(losing: LosingStore, fate: str) -> tuple[Writer, Head]:
    writer = await Writer.take_over(losing, "w")
    pairs = (("a", b"lost?"),)
    head = chain.advance(writer.place.head, pairs, ())
    losing.fates = [fate]
    try:
        await losing.commit(chain.batch(writer.place, head, pairs))
    except CommitOutcomeUnknown:
        return writer, head
    raise AssertionError("the answer was not lost")


@pytest.mark.parametrize("more", [[], ["lost"], ["landed"], ["lost", "landed"]])
def test_settle_finds_landed_batch(make: Make, more: list[str]) -> None:
    """F01."""

    async def scenario() -> None:
        async with open_store(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "landed")
            losing.fates = list(more)
            place = await chain.settle(losing, writer.place, lost)
            assert isinstance(place, chain.ChainPosition)
            assert place.head == lost
            assert await store.get("a") is not None
            assert await Writer(store, place).write(("b", b""))

    run(scenario())


@pytest.mark.parametrize("more", [[], ["lost"], ["landed"], ["lost", "landed"]])
def test_settle_finds_batch_that_never_landed(make: Make, more: list[str]) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "lost")
            losing.fates = list(more)
            place = await chain.settle(losing, writer.place, lost)
            assert isinstance(place, chain.ChainPosition)
            assert place.head != lost
            assert place.head.sequence == lost.sequence
            assert await store.get("a") is None
            assert await Writer(store, place).write(("b", b""))

    run(scenario())


def test_settle_fences_late_batch(make: Make) -> None:
    """F01."""

    async def scenario() -> None:
        async with open_store(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "late")
            place = await chain.settle(losing, writer.place, lost)
            assert isinstance(place, chain.ChainPosition)
            answer = await store.commit(losing.late[0])
            assert isinstance(answer, Conflict)
            assert await store.get("a") is None
            assert await Writer(store, place).write(("a", b"decided again"))

    run(scenario())


def test_settle_racing_with_late_batch_is_consistent(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "late")
            answer, place = await asyncio.gather(store.commit(losing.late[0]), chain.settle(losing, writer.place, lost))
            assert isinstance(place, chain.ChainPosition)
            landed = isinstance(answer, Committed)
            assert (place.head == lost) is landed
            assert (await store.get("a") is not None) is landed

    run(scenario())


def test_settle_of_deposed_writer_is_fenced_out(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "late")
            other = await chain.raise_epoch(store, "other", "first")
            assert await chain.settle(losing, writer.place, lost) == chain.FencedOut(other.head)
            assert isinstance(await store.commit(losing.late[0]), Conflict)

    run(scenario())
