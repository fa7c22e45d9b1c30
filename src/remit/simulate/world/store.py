"""Simulated store service with faults: lost answers, lag, compaction.

One `StoreService` is the store of a scope: a `MemoryStore` that outlives every process. A process reaches it through its own
`StorePort` over the simulated network, so a partition between a process and its store is a cut path like any other.
`StoreFaults` holds the active faults. Each of them is allowed by the store protocol, because a real store behaves like
this too:

    commit    applied but the answer is lost; reported lost and applied later if its guards still hold; slow; rejected
    read      linearizable for authorities; observers may read from a member that lags
    watch     events lost, late or repeated; served by a member that lags; its history compacted
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar, cast

from msgspec import Struct

from remit.simulate.world import random_streams
from remit.simulate.world.event_loop import ExecutionUnit, Handle, SimLoop
from remit.simulate.world.network import Network
from remit.store.memory import MemoryBackup, MemoryStore
from remit.store.protocol import (
    Commit,
    CommitOutcomeUnknown,
    Committed,
    Conflict,
    Corrupt,
    Invalid,
    NoSpace,
    Page,
    Row,
    Store,
    StoreClosed,
    StoreError,
    Unavailable,
    Watch,
    WatchEvent,
)

T = TypeVar("T")
StoreCall = Callable[[], Coroutine[Any, Any, T]]

ANSWER_S_MAX: Final = 4.0
"""A request without an answer fails after this time."""

_LATE_S_MAX: Final = 6.0


class StoreFaults(Struct):
    """Active faults of one store. Probabilities are per request or event."""

    lost_after: float = 0.0
    """Commits are applied and the answer is lost."""
    lost_before: float = 0.0
    """Commits are lost and never applied."""
    applied_late: float = 0.0
    """Commits are reported lost and applied some seconds later."""
    slow_s: float = 0.0
    no_space: bool = False
    damaged: bool = False
    """A crash has corrupted the index of the store: it refuses all requests, because it cannot verify its rows."""
    away: bool = False
    """No leader or no quorum: all requests fail."""
    lag_s: float = 0.0
    """How far the member that observers read from is behind."""
    events_lost: float = 0.0
    events_late: float = 0.0
    events_repeated: float = 0.0


class CommitOrigin(Struct, frozen=True):
    """Which process sent a commit, and when: on its own clock and in virtual time."""

    process: str
    boot: str
    clock_ms: int
    rate: float
    at_s: float


class CommitObserver(Protocol):
    """Receives every applied commit, in order."""

    def commit_applied(self, scope: str, commit: Commit, revision: int, origin: CommitOrigin | None) -> None: ...

    def store_restored(self, scope: str, store: MemoryStore, backup: MemoryBackup) -> None: ...


class StoreService:
    """The store of one scope. `store` is replaced when a backup is restored."""

    def __init__(self, loop: SimLoop, network: Network, scope: str, seed: str, observer: CommitObserver) -> None:
        self.loop = loop
        self.network = network
        self.scope = scope
        self.name = f"store/{scope}"
        self.unit = loop.new_unit(self.name)
        self.store: Store = MemoryStore()
        self.faults = StoreFaults()
        self._active_faults: list[dict[str, float | bool]] = []
        self.rng = random_streams.stream(random_streams.store(seed, self.name))
        self.counts: dict[str, int] = {}
        self._observer = observer
        self._commit_times: list[tuple[float, int]] = []
        self._watches: dict[SimWatch, None] = {}
        self._no_watch_until_s = 0.0

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def degrade(self, changes: dict[str, float | bool]) -> Callable[[], None]:
        """Activate faults in addition to those there are; for each field the worst active value applies. Returns a function
        that undoes this.
        """
        self._active_faults.append(changes)
        self._apply_worst()

        def undo() -> None:
            self._active_faults = [change for change in self._active_faults if change is not changes]
            self._apply_worst()

        return undo

    def _apply_worst(self) -> None:
        worst: dict[str, float | bool] = {}
        for change in self._active_faults:
            for name, value in change.items():
                worst[name] = max(value, worst.get(name, 0))
        was_lagging = self.faults.lag_s
        self.faults = StoreFaults(**worst)  # type: ignore[arg-type]
        if was_lagging and not self.faults.lag_s:
            for watch in self._watches:
                watch.deliver_delayed()

    def check(self, *, writing: bool) -> None:
        if self.faults.damaged:
            raise Corrupt("the index of the store does not match its rows; restore a backup")
        if self.faults.away:
            raise Unavailable("the store has no leader; try again")
        if writing and self.faults.no_space:
            self.count("no-space")
            raise NoSpace("the store is full and nothing was applied; free space there, or compact it")

    def perform(self, work: StoreCall[T], done: Callable[[T], None], failed: Callable[[StoreError], None]) -> None:
        """Run a request and call `done` or `failed`. On a store in memory this takes one step."""
        try:
            result = run_sync(work())
        except StoreError as error:
            failed(error)
            return
        done(result)

    async def apply(self, commit: Commit, origin: CommitOrigin) -> Committed | Conflict:
        self.check(writing=True)
        answer = await self.store.commit(commit)
        if isinstance(answer, Committed):
            self.record_commit(commit, answer.revision, origin)
        return answer

    def record_commit(self, commit: Commit, revision: int, origin: CommitOrigin | None) -> None:
        """Pass an applied commit to the observer, and record its time for lagging members."""
        self._commit_times.append((self.loop.time(), revision))
        if len(self._commit_times) > 4_000:
            del self._commit_times[:2_000]
        self._observer.commit_applied(self.scope, commit, revision, origin)

    def lagging_revision(self) -> int:
        """The revision of a member that is `lag_s` behind; 0 means the latest."""
        if not self.faults.lag_s:
            return 0
        until_s = self.loop.time() - self.faults.lag_s
        behind = [revision for at_s, revision in self._commit_times if at_s <= until_s]
        return behind[-1] if behind else 0

    def break_watches(self, *, for_s: float = 0.0) -> None:
        """Break all watches; new ones are refused for `for_s` seconds."""
        self._no_watch_until_s = self.loop.time() + for_s
        watches, self._watches = self._watches, {}
        for watch in watches:
            watch.abort()

    def add_watch(self, watch: SimWatch) -> None:
        self._watches[watch] = None

    def remove_watch(self, watch: SimWatch) -> None:
        self._watches.pop(watch, None)

    def check_watchable(self) -> None:
        self.check(writing=False)
        if self.loop.time() < self._no_watch_until_s:
            raise Unavailable("this member accepts no watches at the moment; try again")

    def restore(self, backup: MemoryBackup, incarnation: str) -> None:
        """Replace the store with a backup. The servers that write to it must have been stopped before."""
        old = cast(MemoryStore, self.store)
        self.store, _ = restored = MemoryStore.restore(backup, incarnation=incarnation, replacing=old)
        run_sync(old.close())
        self._commit_times.clear()
        self._observer.store_restored(self.scope, restored[0], backup)


class StorePort:
    """Access of one process to a store; implements `store.protocol.Store`. An `observer` may read from a member that lags."""

    def __init__(
        self,
        service: StoreService,
        process: str,
        unit: ExecutionUnit,
        origin: Callable[[], CommitOrigin],
        *,
        observer: bool = False,
    ) -> None:
        self._service = service
        self._process = process
        self._unit = unit
        self._origin = origin
        self._observer = observer
        self._closed = False
        self._watches: dict[SimWatch, None] = {}

    async def get(self, key: str) -> Row | None:
        return await self._read(lambda store, lag: _row_at(store, key, lag) if lag else store.get(key))

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        async def read(store: Store, lag: int) -> Page:
            if lag and revision > lag:
                raise _future_revision(revision, lag)
            return await store.range(prefix, after=after, limit=limit, revision=revision or lag)

        return await self._read(read)

    async def revision(self) -> int:
        async def read(store: Store, lag: int) -> int:
            return lag or await store.revision()

        return await self._read(read)

    async def compact(self, revision: int) -> None:
        service = self._service

        async def work() -> None:
            service.check(writing=False)  # not as a write: compacting is how a full store gets space
            await service.store.compact(revision)

        await self._call(work, writing=True)

    async def close(self) -> None:
        """Close this process's access; the store itself continues."""
        self._closed = True
        for watch in self._watches:
            watch.end(StoreClosed("this store was closed"))

    async def commit(self, commit: Commit) -> Committed | Conflict:
        service, faults, rng = self._service, self._service.faults, self._service.rng
        origin = self._origin()
        drawn = rng.random()
        self._check_open()
        reachable = service.network.reaches(self._process, service.name)
        if reachable and faults.applied_late and drawn < faults.applied_late:
            service.count("applied-late")
            delay_s = 0.2 + _LATE_S_MAX * rng.random()
            service.loop.call_later(delay_s, self._apply_late, commit, origin, context=service.unit.context)
            await asyncio.sleep(0.05 + 0.3 * rng.random())
            raise CommitOutcomeUnknown("the store did not answer in time")
        if faults.lost_before and drawn < faults.applied_late + faults.lost_before:
            service.count("lost-before")
            await asyncio.sleep(0.2 + rng.random())
            raise CommitOutcomeUnknown("the store did not answer in time")
        lose = bool(faults.lost_after) and rng.random() < faults.lost_after
        return await self._call(lambda: service.apply(commit, origin), lose=lose, writing=True)

    def _apply_late(self, commit: Commit, origin: CommitOrigin) -> None:
        service = self._service
        service.perform(lambda: service.apply(commit, origin), lambda _: None, lambda _: service.count("applied-late-refused"))

    async def watch(self, prefix: str, *, after: int) -> Watch:
        lagging = self._service.lagging_revision() if self._observer else 0
        if lagging and after > lagging:
            # The lagging member has not reached this revision, so it cannot know what follows.
            await self._call(_no_operation)
            raise _future_revision(after, lagging)
        service = self._service

        async def work() -> Watch:
            service.check_watchable()
            return await service.store.watch(prefix, after=after)

        source = await self._call(work)
        lag_s = service.faults.lag_s if lagging else 0.0
        watch = SimWatch(service, self._process, self._unit, source, lag_s=lag_s)
        self._watches[watch] = None
        return watch

    async def _read(self, read: Callable[[Store, int], Coroutine[Any, Any, T]]) -> T:
        service = self._service

        async def work() -> T:
            service.check(writing=False)
            lag = service.lagging_revision() if self._observer else 0
            if lag:
                service.count("stale-read")
            return await read(service.store, lag)

        return await self._call(work)

    async def _call(self, work: StoreCall[T], *, lose: bool = False, writing: bool = False) -> T:
        """Send a request and await the answer. If a message is lost, a write raises `CommitOutcomeUnknown` and a read
        `Unavailable`.
        """
        self._check_open()
        service = self._service
        answer: asyncio.Future[T] = service.loop.create_future()
        service.network.send(self._process, service.name, service.unit, self._serve, _StoreRequest(work, answer, lose))
        timer = service.loop.call_later(ANSWER_S_MAX, _time_out, answer, writing)
        try:
            return await answer
        finally:
            timer.cancel()

    def _check_open(self) -> None:
        if self._unit.dead:
            raise StoreClosed("this process was killed")
        if self._closed:
            raise StoreClosed("this store was closed")

    def _serve(self, request: _StoreRequest) -> None:
        """Runs at the store, after a delay if the store is slow. A repeated message is ignored, as a connection to a real store
        would do.
        """
        service = self._service
        if request.started:
            return
        request.started = True
        if service.faults.slow_s and not request.answer.done():
            service.count("slow")
            delay_s = service.faults.slow_s * service.rng.random()
            service.loop.call_later(delay_s, self._work, request, context=service.unit.context)
            return
        self._work(request)

    def _work(self, request: _StoreRequest) -> None:
        service, answer = self._service, request.answer

        def done(result: object) -> None:
            if request.lose:
                service.count("lost-after")
                return
            service.network.send(service.name, self._process, self._unit, _answer, answer, result)

        def failed(error: StoreError) -> None:
            service.network.send(service.name, self._process, self._unit, _fail, answer, error)

        service.perform(request.work, done, failed)


class _StoreRequest(Struct):
    """One request to the store. The network may deliver it more than once."""

    work: StoreCall[Any]
    answer: asyncio.Future[Any]
    lose: bool
    started: bool = False


class SimWatch:
    """A watch as its client receives it: events in order, except for injected faults."""

    def __init__(self, service: StoreService, process: str, unit: ExecutionUnit, source: Watch, *, lag_s: float) -> None:
        self._service, self._process, self._unit, self._source, self._lag_s = service, process, unit, source, lag_s
        self._arrived: list[WatchEvent | StoreError] = []
        self._waiting: asyncio.Future[None] | None = None
        self._not_before_s = 0.0
        self._delayed: list[tuple[Handle, WatchEvent | StoreError]] = []
        self._closed = False
        loop = service.loop
        self._pump_task = service.unit.context.run(loop.create_task, self._pump(), name=f"watch by {process}")
        service.add_watch(self)

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._arrived and not self._closed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._closed:
            raise StopAsyncIteration
        item = self._arrived[0]
        if isinstance(item, StoreError):
            raise item  # it stays in the list, so that every later step raises it too
        del self._arrived[0]
        return item

    async def close(self) -> None:
        self._closed = True
        self._wake()
        self._service.remove_watch(self)
        self._pump_task.cancel()
        await self._source.close()

    def end(self, error: StoreError) -> None:
        """End the watch at this side at once; pending events are dropped."""
        self._pump_task.cancel()
        self._service.remove_watch(self)
        self._arrived[:] = [error]
        self._wake()

    def abort(self) -> None:
        self._pump_task.cancel()
        self._send(Unavailable("the watch broke; watch again after the last revision received"))

    async def _pump(self) -> None:
        try:
            async for event in self._source:
                if self._unit.dead:
                    break
                self._send(event)
        except StoreError as error:
            self._send(error)
        finally:
            await self._source.close()

    def _send(self, item: WatchEvent | StoreError) -> None:
        service, faults, rng = self._service, self._service.faults, self._service.rng
        late_s = self._lag_s
        if faults.events_lost and rng.random() < faults.events_lost:
            service.count("event-lost")
            return
        if faults.events_late and rng.random() < faults.events_late:
            service.count("event-late")
            late_s += 3.0 * rng.random()
        # A stream keeps the order: a late event delays the events behind it.
        at_s = max(service.loop.time() + late_s + service.network.delay_s(), self._not_before_s)
        self._not_before_s = at_s
        self._arrive_at(at_s, item)
        if faults.events_repeated and rng.random() < faults.events_repeated:
            service.count("event-repeated")
            self._arrive_at(at_s + 0.5 * rng.random(), item)

    def _arrive_at(self, at_s: float, item: WatchEvent | StoreError) -> None:
        """Schedule the delivery. Over a cut path the event is lost; the client detects the gap at the next event."""
        service = self._service
        if not service.network.reaches(service.name, self._process):
            return
        handle = service.loop.call_at(at_s, self._arrive, item, context=self._unit.context)
        if self._lag_s:
            self._delayed.append((handle, item))

    def deliver_delayed(self) -> None:
        """The member no longer lags: deliver all delayed events now, in order."""
        self._lag_s, self._not_before_s = 0.0, 0.0
        delayed, self._delayed = self._delayed, []
        for handle, item in delayed:
            if handle.when_s > self._service.loop.time() and not handle.cancelled():
                handle.cancel()
                self._service.loop.call_soon(self._arrive, item, context=self._unit.context)

    def _arrive(self, item: WatchEvent | StoreError) -> None:
        text = f"event {item.revision}" if isinstance(item, WatchEvent) else f"{type(item).__name__} {item}"
        self._service.loop.add_to_digest(text.encode())
        self._arrived.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits and return its result. A request to a store in memory is one step."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("a request to the store in memory waited")


async def _row_at(store: Store, key: str, revision: int) -> Row | None:
    page = await store.range(key, limit=1, revision=revision)
    return page.rows[0] if page.rows and page.rows[0].key == key else None


def _future_revision(revision: int, lag: int) -> Invalid:
    return Invalid(f"revision {revision} does not exist yet; this member is at {lag}")


async def _no_operation() -> None:
    return


def _time_out(answer: asyncio.Future[Any], writing: bool) -> None:
    lost = "the store did not answer in time"
    _fail(answer, CommitOutcomeUnknown(lost) if writing else Unavailable(f"{lost}; nothing was changed"))


def _answer(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any], error: StoreError) -> None:
    if not answer.done():
        answer.set_exception(error)
