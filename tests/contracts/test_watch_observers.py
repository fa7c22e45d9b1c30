"""A scheduler view on every store ends up equal to a fresh list, even after missed events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from remit.model.kinds.registry import AnyObject
from remit.model.objects import encode, key
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
    make_backend,
    open_store,
    run,
    run_simulated,
)
from tests.unit.observation.row_fixtures import ready, replica, tenant, work

Make = Callable[[], Backend]
IDLE_MS = 400
STORE_FAULTS: list[dict[str, float | bool]] = [
    {"events_lost": 0.5},
    {"events_late": 0.5, "events_repeated": 0.5},
    {"events_repeated": 0.8},
    {"lag_s": 2.0},
    {"lag_s": 0.5, "events_lost": 0.3},
    {},
]


class LoopClock:
    """The time of the running loop, real or simulated."""

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
    return make_backend(request, monkeypatch)


def make_world() -> World:
    class MinimalWorld:
        clock = LoopClock()
        randomness = SeededRandomness("views")

    return MinimalWorld()  # type: ignore[return-value]


@asynccontextmanager
async def reflected_view(store: Store, sure: Store | None = None) -> AsyncIterator[SchedulerView]:
    world = make_world()
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


async def wait_until(holds: Callable[[], bool], seconds: float = 15) -> None:
    for _ in range(int(seconds / 0.02)):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


async def assert_catches_up(view: SchedulerView, writer: Writer) -> None:
    """Within bounded time the view reaches the chain's head and equals a fresh list."""
    await wait_until(lambda: view.head == writer.place.head)
    assert not list(recompute(view)), list(recompute(view))
    fresh = SchedulerView(LoopClock())
    world = make_world()
    task = asyncio.get_running_loop().create_task(Reflector(writer.store, writer.store, world, fresh, ranges=LIST_RANGES).run())
    await wait_until(lambda: fresh.head is not None)
    task.cancel()
    await asyncio.wait({task})
    found = list(compare(view, fresh))
    assert not found, "\n".join(found)


async def write_objects(writer: Writer, *objects: AnyObject, deletes: tuple[str, ...] = ()) -> None:
    assert await writer.write(*((key(obj), encode(obj)) for obj in objects), deletes=deletes)


async def prepare(store: Store) -> Writer:
    writer = await Writer.take_over(store, "a")
    assert await writer.write((RESTORE_MARKER, b"first"))
    await write_objects(writer, ready("n1"), ready("n2"), tenant("t1"), *work("a"), replica("a"), replica("a", 1))
    return writer


def test_view_follows_commits(make: Make) -> None:
    async def scenario() -> None:
        async with open_store(make) as store:
            writer = await prepare(store)
            async with reflected_view(store) as view:
                await assert_catches_up(view, writer)
                assert view.is_current
                await write_objects(writer, replica("a", phase="bound", on="n1"))
                await write_objects(writer, replica("a", 1, phase="bound", on="n2"), deletes=("replica/t1/a-0",))
                await assert_catches_up(view, writer)
                assert int(view.columns.free["cpu"][view.columns.rows["n2"]]) == 3000
                assert view.age_ms() < 15_000

    run(scenario())


def test_view_behind_compaction_relists_and_keeps_assumptions(make: Make) -> None:
    """F05 F07."""

    async def scenario() -> None:
        async with open_store(make) as store:
            writer = await prepare(store)
            async with reflected_view(store) as view:
                await assert_catches_up(view, writer)
                before = view.replicas.slots["replica/t1/a-1"]
                view.holds.assume(before, view.columns.rows["n2"], {}, ("tenant/t1",))
                for round_ in range(30):
                    await write_objects(writer, replica("a", phase="pending", attempt=round_ + 2))
                await store.compact(await store.revision())
                await write_objects(writer, replica("a", phase="bound", on="n1", attempt=40))
                await assert_catches_up(view, writer)
                assert view.replicas.slots["replica/t1/a-1"] == before
                assert list(view.assumed) == [before]

    run(scenario())


def test_silent_watch_is_replaced_by_list(make: Make) -> None:
    """F05: a watch without events or heartbeats is given up; events it kept back are found by a list."""

    async def scenario() -> None:
        async with open_store(make) as store:
            writer = await prepare(store)
            silent_store = SilentWatchStore(store)
            async with reflected_view(silent_store, store) as view:
                await assert_catches_up(view, writer)
                await write_objects(writer, replica("a", phase="bound", on="n1"))
                await assert_catches_up(view, writer)
                assert silent_store.watches > 1

    run(scenario())


def test_list_older_than_view_is_refused(make: Make) -> None:
    """F04: and so is an interrupted one."""

    async def scenario() -> None:
        async with open_store(make) as store:
            writer = await prepare(store)
            stale = StaleListStore(store)
            async with reflected_view(stale, store) as view:
                await assert_catches_up(view, writer)
                await write_objects(writer, replica("a", phase="bound", on="n1"))
                await assert_catches_up(view, writer)
                stale.at = view.revision - 1
                await asyncio.sleep(IDLE_MS * 4 / 1000)
                assert stale.list_calls > 0
                assert view.head == writer.place.head
                stale.at = 0
                await write_objects(writer, replica("a", phase="released", on="n1", grants=()))
                await assert_catches_up(view, writer)

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_view_recovers_from_faulty_store(seed: int) -> None:
    """F04 F05 F06 F07 F21: lagging members, lost, late and repeated events, broken watches, compaction."""

    async def scenario() -> None:
        backend, rng = SimulatedBackend(), SeededRandomness(f"lies {seed}")
        store = await backend.open()
        service = next(iter(backend._services.values()))
        observer = StorePort(
            service,
            "asker",
            CURRENT_UNIT.get(),
            lambda: CommitOrigin("asker", "boot", 0, 1.0, service.loop.time()),
            observer=True,
        )
        writer = await prepare(store)
        async with reflected_view(observer, store) as view:
            for round_ in range(40):
                back = service.degrade(rng.choice(STORE_FAULTS))
                at = rng.choice(["n1", "n2"])
                await write_objects(writer, replica("a", phase="bound", on=at, attempt=round_), ready(at, f"{4 + round_ % 3}"))
                await asyncio.sleep(rng.jitter_ms(700) / 1000)
                assert not list(recompute(view))
                await write_objects(writer, replica("a", attempt=round_ + 1), *work(f"b{round_}"), replica(f"b{round_}"))
                if rng.randrange(4) == 0:
                    service.break_watches()
                if rng.randrange(4) == 0:
                    await store.compact(await store.revision())
                back()
            await write_objects(writer, replica("a", phase="bound", on="n1", attempt=99))
            await assert_catches_up(view, writer)

    run_simulated(scenario())


class SilentWatchStore(LosingStore):
    """A store whose watches yield nothing."""

    watches = 0

    async def watch(self, prefix: str, *, after: int) -> Watch:
        self.watches += 1
        return SilentWatch()


class SilentWatch:
    def __aiter__(self) -> SilentWatch:
        return self

    async def __anext__(self) -> WatchEvent:
        await asyncio.Event().wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        """Nothing is open."""


class StaleListStore(LosingStore):
    """Lists an older revision while `at` is set and fails every other page."""

    at = 0
    list_calls = 0

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        if self.at:
            self.list_calls += 1
            if self.list_calls % 2:
                raise Unavailable("broke off")
        return await self.store.range(prefix, after=after, limit=limit, revision=revision or self.at)
