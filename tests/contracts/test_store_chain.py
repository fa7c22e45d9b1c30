"""Is a deposed writer fenced, and is a lost answer settled, on every store? The contract as the writer's chain needs it."""

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
from tests.contracts.stores import BACKENDS, Backend, LosingStore, Writer, made, opened, run

Make = Callable[[], Backend]


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return made(request, monkeypatch)


def test_seize_raises_the_epoch_and_keeps_the_incarnation(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            first = await chain.raise_epoch(store, "one", "first")
            second = await chain.raise_epoch(store, "two", "ignored")
            assert second.head.epoch == first.head.epoch + 1
            assert second.head.sequence == first.head.sequence + 1
            assert (second.head.incarnation, second.head.holder) == (first.head.incarnation, "two")
            assert await chain.read_position(store) == second

    run(story())


def test_two_writers__the_older_writes_nothing_more(make: Make) -> None:
    """F15, F16."""

    async def story() -> None:
        async with opened(make) as store:
            old = await Writer.seize(store, "old")
            assert await old.write(("a", b"old"))
            new = await Writer.seize(store, "new")
            assert not await old.write(("a", b"late"))
            assert await new.write(("a", b"new"))
            assert not await old.write(("b", b"late"))
            row = await store.get("a")
            assert row is not None
            assert row.value == b"new"
            assert await store.get("b") is None

    run(story())


def test_many_seize_at_once__epochs_differ_and_the_last_one_stands(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            places = await asyncio.gather(*(chain.raise_epoch(store, f"w{n}", "first") for n in range(8)))
            epochs = sorted(place.head.epoch for place in places)
            assert epochs == list(range(epochs[0], epochs[0] + 8))
            writers = [Writer(store, place) for place in places]
            wrote = [await writer.write((writer.place.head.holder, b"")) for writer in writers]
            assert wrote.count(True) == 1
            assert writers[wrote.index(True)].place.head.epoch == epochs[-1]

    run(story())


@pytest.mark.parametrize("fates", [["landed"], ["lost"], ["lost", "landed", "lost"]])
def test_seize_with_lost_answers(make: Make, fates: list[str]) -> None:
    async def story() -> None:
        async with opened(make) as store:
            losing = LosingStore(store)
            losing.fates = list(fates)
            before = await chain.read_position(store)
            place = await chain.raise_epoch(losing, "w", "first")
            assert await chain.read_position(store) == place
            assert place.head.epoch == (before.head.epoch if before else 0) + 1, (
                "one takeover is one epoch, however often its answer was lost"
            )
            assert await Writer(store, place).write(("a", b""))

    run(story())


@pytest.mark.parametrize(
    "error", [NoSpace("full"), ReadOnly("sealed"), StoreClosed("closed"), Unavailable("away"), Corrupt("hurt")]
)
@pytest.mark.parametrize("call", ["get", "commit"])
def test_seize_and_settle_ask_again_after_a_lost_answer_only(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: StoreError, call: str
) -> None:
    """F11: whoever takes over must hear that the store cannot be written; asking for ever would hide it."""

    async def story() -> None:
        async with opened(make) as store:
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

    run(story())


async def lose_one(losing: LosingStore, fate: str) -> tuple[Writer, Head]:
    writer = await Writer.seize(losing, "w")
    pairs = (("a", b"lost?"),)
    head = chain.advance(writer.place.head, pairs, ())
    losing.fates = [fate]
    try:
        await losing.commit(chain.batch(writer.place, head, pairs))
    except CommitOutcomeUnknown:
        return writer, head
    raise AssertionError("the answer was not lost")


@pytest.mark.parametrize("more", [[], ["lost"], ["landed"], ["lost", "landed"]])
def test_settle__the_lost_batch_had_landed(make: Make, more: list[str]) -> None:
    """F01."""

    async def story() -> None:
        async with opened(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "landed")
            losing.fates = list(more)
            place = await chain.settle(losing, writer.place, lost)
            assert isinstance(place, chain.ChainPosition)
            assert place.head == lost
            assert await store.get("a") is not None
            assert await Writer(store, place).write(("b", b""))

    run(story())


@pytest.mark.parametrize("more", [[], ["lost"], ["landed"], ["lost", "landed"]])
def test_settle__the_lost_batch_never_lands(make: Make, more: list[str]) -> None:
    async def story() -> None:
        async with opened(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "lost")
            losing.fates = list(more)
            place = await chain.settle(losing, writer.place, lost)
            assert isinstance(place, chain.ChainPosition)
            assert place.head != lost
            assert place.head.sequence == lost.sequence
            assert await store.get("a") is None
            assert await Writer(store, place).write(("b", b""))

    run(story())


def test_settle__the_lost_batch_arrives_after_it_and_is_refused(make: Make) -> None:
    """F01."""

    async def story() -> None:
        async with opened(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "late")
            place = await chain.settle(losing, writer.place, lost)
            assert isinstance(place, chain.ChainPosition)
            answer = await store.commit(losing.late[0])
            assert isinstance(answer, Conflict)
            assert await store.get("a") is None
            assert await Writer(store, place).write(("a", b"decided again"))

    run(story())


def test_settle__the_late_batch_and_the_empty_one_race(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "late")
            answer, place = await asyncio.gather(store.commit(losing.late[0]), chain.settle(losing, writer.place, lost))
            assert isinstance(place, chain.ChainPosition)
            landed = isinstance(answer, Committed)
            assert (place.head == lost) is landed
            assert (await store.get("a") is not None) is landed

    run(story())


def test_settle__deposed_meanwhile(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            losing = LosingStore(store)
            writer, lost = await lose_one(losing, "late")
            other = await chain.raise_epoch(store, "other", "first")
            assert await chain.settle(losing, writer.place, lost) == chain.FencedOut(other.head)
            assert isinstance(await store.commit(losing.late[0]), Conflict)

    run(story())
