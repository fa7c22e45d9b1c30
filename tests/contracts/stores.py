"""The stores under contract, and how each is created, backed up and restored. Contains no tests."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import pytest

from remit.simulate.world.event_loop import CURRENT_UNIT, SimLoop
from remit.simulate.world.network import Network, NetworkConditions
from remit.simulate.world.store import CommitOrigin, StorePort, StoreService, run_sync
from remit.store import chain
from remit.store.chain import RestoreReport
from remit.store.memory import MemoryBackup, MemoryStore
from remit.store.protocol import Commit, CommitOutcomeUnknown, Committed, Conflict, Guard, Page, Row, Store, Watch, WatchEvent
from remit.store.sqlite.backup import restore
from remit.store.sqlite.store import SqliteStore
from remit.store.watch_feed import FeedLimits

T = TypeVar("T")
WAIT_S_MAX = 20.0
SIMULATED_S_MAX = 3_600.0


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one test's event loop; a hanging test fails with the place where it hung."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, WAIT_S_MAX)

    return asyncio.run(bounded())


def run_simulated(work: Coroutine[Any, Any, T]) -> T:
    """The same in a simulated world, where the caller is a process of its own."""
    loop = SimLoop.seeded("contract")
    results, failed = list[T](), list[BaseException]()

    async def scenario() -> None:
        try:
            results.append(await work)
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            failed.append(error)
        loop.stop()

    loop.spawn(scenario(), name="story", unit=loop.new_unit("asker"))
    try:
        loop.run(SIMULATED_S_MAX)
    finally:
        loop.finish()
    if failed:
        raise failed[0]
    assert not loop.failures, loop.failures
    return results[0]


class OneThread:
    """The production form of `Offload`: one dedicated thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown()


class Backend(Protocol):
    """Operations of a store that the suite needs beyond `Store`."""

    name: str

    async def open(self, bounds: FeedLimits = ...) -> Store: ...

    async def backup(self, store: Store) -> object: ...

    async def restore(self, store: Store, backup: object, incarnation: str) -> tuple[Store, RestoreReport]:
        """Close `store` and return the one that replaces it."""
        ...

    async def close(self) -> None: ...


class MemoryBackend:
    name = "memory"

    def __init__(self) -> None:
        self._stores: list[MemoryStore] = []

    async def open(self, bounds: FeedLimits = FeedLimits()) -> Store:
        self._stores.append(MemoryStore(bounds))
        return self._stores[-1]

    async def backup(self, store: Store) -> object:
        assert isinstance(store, MemoryStore)
        return await store.backup()

    async def restore(self, store: Store, backup: object, incarnation: str) -> tuple[Store, RestoreReport]:
        assert isinstance(store, MemoryStore)
        assert isinstance(backup, MemoryBackup)
        await store.close()
        return MemoryStore.restore(backup, incarnation=incarnation, replacing=store)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


class SqliteBackend:
    name = "sqlite"

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="remit-store-")
        self._thread = OneThread()
        self._stores: list[SqliteStore] = []
        self.directory = Path(self._place.name)

    async def open(self, bounds: FeedLimits = FeedLimits()) -> Store:
        return await self.open_in(self.directory / f"store-{len(self._stores)}", bounds)

    async def open_in(self, directory: Path, bounds: FeedLimits = FeedLimits()) -> SqliteStore:
        store = await SqliteStore.open(directory, offload=self._thread, holder="opener", incarnation="first", limits=bounds)
        self._stores.append(store)
        return store

    async def backup(self, store: Store) -> object:
        assert isinstance(store, SqliteStore)
        path = self.directory / "backup.sqlite"
        await store.backup(path)
        return path

    async def restore(self, store: Store, backup: object, incarnation: str) -> tuple[Store, RestoreReport]:
        assert isinstance(store, SqliteStore)
        assert isinstance(backup, Path)
        await store.close()
        directory = self.directory / f"store-{self._stores.index(store)}"
        restored = await self._thread(lambda: restore(backup, directory, incarnation=incarnation))
        return await self.open_in(directory), restored

    async def close(self) -> None:
        try:
            for store in self._stores:
                await store.close()
        finally:
            self._thread.close()
            self._place.cleanup()


class SimulatedBackend:
    """A port over the simulated network to a store in memory, without faults. Needs a simulated loop: `run_simulated`."""

    name = "simulated"

    def __init__(self) -> None:
        self._loop = cast(SimLoop, asyncio.get_running_loop())
        self._network = Network(self._loop, "contract", NetworkConditions(delay_s=(0.001, 0.001)))
        self._services: dict[StorePort, StoreService] = {}

    async def open(self, bounds: FeedLimits = FeedLimits()) -> Store:
        service = StoreService(self._loop, self._network, f"scope{len(self._services)}", "contract", self)
        service.store = MemoryStore(bounds)
        return self._port(service)

    def _port(self, service: StoreService) -> StorePort:
        port = StorePort(service, "asker", CURRENT_UNIT.get(), lambda: CommitOrigin("asker", "boot", 0, 1.0, self._loop.time()))
        self._services[port] = service
        return port

    async def backup(self, store: Store) -> object:
        assert isinstance(store, StorePort)
        return run_sync(cast(MemoryStore, self._services[store].store).backup())

    async def restore(self, store: Store, backup: object, incarnation: str) -> tuple[Store, RestoreReport]:
        assert isinstance(store, StorePort)
        assert isinstance(backup, MemoryBackup)
        await store.close()
        service = self._services[store]
        _, restored = MemoryStore.restore(backup, incarnation=incarnation, replacing=cast(MemoryStore, service.store))
        service.restore(backup, incarnation)
        return self._port(service), restored

    async def close(self) -> None:
        for port in self._services:
            await port.close()

    def commit_applied(self, scope: str, commit: Commit, revision: int, sent: CommitOrigin | None) -> None:
        """Nothing is checked here."""

    def store_restored(self, scope: str, store: MemoryStore, backup: MemoryBackup) -> None:
        """Nothing is checked here."""


BACKENDS: dict[str, Callable[[], Backend]] = {"memory": MemoryBackend, "sqlite": SqliteBackend, "simulated": SimulatedBackend}

NOT_SIMULATED: Final = (
    "test_raw_write_among_batches_shows_as_gap",
    "test_slow_watcher",
    "test_compaction_under_watcher_reading_history",
    "test_folded_events_account_for_every_row",
)
"""Contracts of watchers that read late, by test name prefix: what they have not read has already left a simulated store."""


def make_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Backend]:
    """Factory of the backend under test; a simulated one runs in its own kind of loop."""
    if request.param == SimulatedBackend.name:
        if request.node.name.startswith(NOT_SIMULATED):
            pytest.skip("what a watcher has not read yet lies at its own end of the simulated network, not at the store")
        monkeypatch.setattr(request.module, "run", run_simulated)
    return BACKENDS[request.param]


@asynccontextmanager
async def open_store(make: Callable[[], Backend], bounds: FeedLimits = FeedLimits()) -> AsyncIterator[Store]:
    backend = make()
    try:
        yield await backend.open(bounds)
    finally:
        await backend.close()


async def put(store: Store, *pairs: tuple[str, bytes], guards: tuple[Guard, ...] = ()) -> int:
    answer = await store.commit(Commit(guards=guards, puts=pairs))
    assert isinstance(answer, Committed), answer
    return answer.revision


async def delete(store: Store, *keys: str) -> int:
    answer = await store.commit(Commit(deletes=keys))
    assert isinstance(answer, Committed), answer
    return answer.revision


async def next_event(watch: Watch) -> WatchEvent:
    return await asyncio.wait_for(anext(aiter(watch)), WAIT_S_MAX / 2)


async def events_up_to(watch: Watch, revision: int) -> list[WatchEvent]:
    """Every event until one reaches `revision`; together they must cover every revision once."""
    events = [await next_event(watch)]
    while events[-1].revision < revision:
        event = await next_event(watch)
        assert event.after == events[-1].revision, "a gap or a repeated event"
        events.append(event)
    assert events[-1].revision == revision
    return events


class Writer:
    """A writer of the chain like an authority: it takes over, then writes batch after batch."""

    def __init__(self, store: Store, place: chain.ChainPosition) -> None:
        self.store, self.place = store, place

    @classmethod
    async def take_over(cls, store: Store, holder: str) -> Writer:
        return cls(store, await chain.raise_epoch(store, holder, "first"))

    async def write(self, *pairs: tuple[str, bytes], deletes: tuple[str, ...] = ()) -> bool:
        head = chain.advance(self.place.head, pairs, deletes)
        answer = await self.store.commit(chain.batch(self.place, head, pairs, deletes))
        if isinstance(answer, Conflict):
            return False
        self.place = chain.ChainPosition(head, answer.revision)
        return True


class LosingStore:
    """Loses answers of commits on request: after they landed, without landing, or until they land late."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fates: list[str] = []
        self.late: list[Commit] = []

    async def commit(self, commit: Commit) -> Committed | Conflict:
        fate = self.fates.pop(0) if self.fates else "answered"
        if fate == "answered":
            return await self.store.commit(commit)
        if fate == "landed":
            await self.store.commit(commit)
        elif fate == "late":
            self.late.append(commit)
        raise CommitOutcomeUnknown(f"{fate}: the answer was lost")

    async def get(self, key: str) -> Row | None:
        return await self.store.get(key)

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        return await self.store.range(prefix, after=after, limit=limit, revision=revision)

    async def watch(self, prefix: str, *, after: int) -> Watch:
        return await self.store.watch(prefix, after=after)

    async def compact(self, revision: int) -> None:
        await self.store.compact(revision)

    async def revision(self) -> int:
        return await self.store.revision()

    async def close(self) -> None:
        await self.store.close()
