"""Does an observer end up with what stands, on every store, whatever it missed on the way?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from remit.model.objects import AnyObject, encode, key
from remit.observation.frozen_view import compare, recompute
from remit.observation.reflector import RESTORE_MARKER, Reflector
from remit.observation.scheduler_view import LIST_RANGES, SchedulerView
from remit.simulate.world.event_loop import CURRENT_UNIT
from remit.simulate.world.store import CommitOrigin, StorePort
from remit.store.protocol import Page, Store, Unavailable, Watch, WatchEvent
from remit.world.interfaces import World
from remit.world.randomness import SeededRandomness
from tests.contracts.stores import (
    BACKENDS,
    Backend,
    LosingStore,
    SimulatedBackend,
    Writer,
    made,
    opened,
    run,
    run_simulated,
)
from tests.unit.observation.row_fixtures import ready, replica, tenant, work

Make = Callable[[], Backend]
IDLE_MS = 400
TROUBLES: list[dict[str, float | bool]] = [
    {"events_lost": 0.5},
    {"events_late": 0.5, "events_repeated": 0.5},
    {"events_repeated": 0.8},
    {"lag_s": 2.0},
    {"lag_s": 0.5, "events_lost": 0.3},
    {},
]


class LoopClock:
    """Time as the running loop has it, real or simulated."""

    def now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def boot(self) -> str:
        return "boot"

    def wall(self) -> str:
        return ""

    async def sleep_ms(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    def timeout_ms(self, ms: int) -> asyncio.Timeout:
        return asyncio.timeout(ms / 1000)


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return made(request, monkeypatch)


def a_world() -> World:
    class Little:
        clock = LoopClock()
        randomness = SeededRandomness("views")

    return Little()  # type: ignore[return-value]


@asynccontextmanager
async def followed(store: Store, sure: Store | None = None) -> AsyncIterator[SchedulerView]:
    world = a_world()
    view = SchedulerView(world.clock)
    task = asyncio.get_running_loop().create_task(
        Reflector(store, sure or store, world, view, idle_ms=IDLE_MS, ranges=LIST_RANGES).run()
    )
    try:
        yield view
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(holds: Callable[[], bool], seconds: float = 15) -> None:
    for _ in range(int(seconds / 0.02)):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


async def reaches(view: SchedulerView, writer: Writer) -> None:
    """Within a bounded time it stands where the chain does, and shows what a list would."""
    await until(lambda: view.head == writer.place.head)
    assert not list(recompute(view)), list(recompute(view))
    fresh = SchedulerView(LoopClock())
    world = a_world()
    task = asyncio.get_running_loop().create_task(Reflector(writer.store, writer.store, world, fresh, ranges=LIST_RANGES).run())
    await until(lambda: fresh.head is not None)
    task.cancel()
    await asyncio.wait({task})
    found = list(compare(view, fresh))
    assert not found, "\n".join(found)


async def wrote(writer: Writer, *things: AnyObject, deletes: tuple[str, ...] = ()) -> None:
    assert await writer.write(*((key(thing), encode(thing)) for thing in things), deletes=deletes)


async def furnished(store: Store) -> Writer:
    writer = await Writer.seize(store, "a")
    assert await writer.write((RESTORE_MARKER, b"first"))
    await wrote(writer, ready("n1"), ready("n2"), tenant("t1"), *work("a"), replica("a"), replica("a", 1))
    return writer


def test_a_view_follows_what_is_written(make: Make) -> None:
    async def story() -> None:
        async with opened(make) as store:
            writer = await furnished(store)
            async with followed(store) as view:
                await reaches(view, writer)
                assert view.is_current
                await wrote(writer, replica("a", phase="bound", on="n1"))
                await wrote(writer, replica("a", 1, phase="bound", on="n2"), deletes=("replica/t1/a-0",))
                await reaches(view, writer)
                assert int(view.columns.free["cpu"][view.columns.rows["n2"]]) == 3000
                assert view.age_ms() < 15_000

    run(story())


def test_a_view_that_fell_behind_and_was_compacted_lists_anew(make: Make) -> None:
    """F05 F07."""

    async def story() -> None:
        async with opened(make) as store:
            writer = await furnished(store)
            async with followed(store) as view:
                await reaches(view, writer)
                before = view.replicas.slots["replica/t1/a-1"]
                view.holds.assume(before, view.columns.rows["n2"], {}, ("tenant/t1",))
                for round_ in range(30):
                    await wrote(writer, replica("a", phase="pending", attempt=round_ + 2))
                await store.compact(await store.revision())
                await wrote(writer, replica("a", phase="bound", on="n1", attempt=40))
                await reaches(view, writer)
                assert view.replicas.slots["replica/t1/a-1"] == before
                assert list(view.assumed) == [before]

    run(story())


def test_a_silent_watch_is_dead(make: Make) -> None:
    """F05: a watch that says nothing any more is not believed; what it kept back is found by a list."""

    async def story() -> None:
        async with opened(make) as store:
            writer = await furnished(store)
            deaf = Deaf(store)
            async with followed(deaf, store) as view:
                await reaches(view, writer)
                await wrote(writer, replica("a", phase="bound", on="n1"))
                await reaches(view, writer)
                assert deaf.watches > 1

    run(story())


def test_a_list_that_is_older_than_what_was_seen_is_refused(make: Make) -> None:
    """F04: and so is one that breaks off."""

    async def story() -> None:
        async with opened(make) as store:
            writer = await furnished(store)
            stale = Stale(store)
            async with followed(stale, store) as view:
                await reaches(view, writer)
                await wrote(writer, replica("a", phase="bound", on="n1"))
                await reaches(view, writer)
                stale.at = view.revision - 1
                await asyncio.sleep(IDLE_MS * 4 / 1000)
                assert stale.asked > 0
                assert view.head == writer.place.head
                stale.at = 0
                await wrote(writer, replica("a", phase="released", on="n1", grants=()))
                await reaches(view, writer)

    run(story())


@pytest.mark.parametrize("seed", range(5))
def test_a_view_of_a_store_that_lies_shows_what_stands_once_it_is_well(seed: int) -> None:
    """F04 F05 F06 F07 F21: members that lag, events lost, late and said again, watches that break, compaction."""

    async def story() -> None:
        backend, lots = SimulatedBackend(), SeededRandomness(f"lies {seed}")
        store = await backend.open()
        service = next(iter(backend._services.values()))
        observer = StorePort(
            service,
            "asker",
            CURRENT_UNIT.get(),
            lambda: CommitOrigin("asker", "boot", 0, 1.0, service.loop.time()),
            observer=True,
        )
        writer = await furnished(store)
        async with followed(observer, store) as view:
            for round_ in range(40):
                back = service.degrade(lots.choice(TROUBLES))
                at = lots.choice(["n1", "n2"])
                await wrote(writer, replica("a", phase="bound", on=at, attempt=round_), ready(at, f"{4 + round_ % 3}"))
                await asyncio.sleep(lots.jitter_ms(700) / 1000)
                assert not list(recompute(view))
                await wrote(writer, replica("a", attempt=round_ + 1), *work(f"b{round_}"), replica(f"b{round_}"))
                if lots.randrange(4) == 0:
                    service.break_watches()
                if lots.randrange(4) == 0:
                    await store.compact(await store.revision())
                back()
            await wrote(writer, replica("a", phase="bound", on="n1", attempt=99))
            await reaches(view, writer)

    run_simulated(story())


class Deaf(LosingStore):
    """Its watches say nothing."""

    watches = 0

    async def watch(self, prefix: str, *, after: int) -> Watch:
        self.watches += 1
        return Silence()


class Silence:
    def __aiter__(self) -> Silence:
        return self

    async def __anext__(self) -> WatchEvent:
        await asyncio.Event().wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        """Nothing was open."""


class Stale(LosingStore):
    """Lists as of an older revision, while told to, and breaks off every other page; its watches end at once then."""

    at = 0
    asked = 0

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        if self.at:
            self.asked += 1
            if self.asked % 2:
                raise Unavailable("broke off")
        return await self.store.range(prefix, after=after, limit=limit, revision=revision or self.at)
