"""Simulated store service with faults: lost answers, lag, compaction.

The real store protocol over the simulated network, and the ways it may lie.

One `StoreService` is a scope's store: a `MemoryStore` that outlives every process. A process reaches it through a port of its
own, over the network, so a partition between a process and its store is a cut like any other. The service is told which faults
are on (`Trouble`); each keeps to the letter of the protocol, because a real store does just that:

    commit    applied, and the answer lost · lost now, and applied later if its guards still hold · slow · refused
    read      for authorities linearizable, always; for observers, who may ask any member, from a member that lags
    watch     events lost, late, repeated, or from a member that lags; the history compacted away under it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar, cast

from msgspec import Struct

from remit.simulate.world.event_loop import Handle, SimLoop, Unit, stream
from remit.simulate.world.network import Network
from remit.store.memory import MemoryStore, Snapshot
from remit.store.protocol import (
    Closed,
    Commit,
    Committed,
    Conflict,
    Corrupt,
    Event,
    Invalid,
    NoSpace,
    Page,
    Row,
    Store,
    StoreError,
    Unanswered,
    Unavailable,
    Watch,
)

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]

ANSWER_S_MAX: Final = 4.0
"""After so long without an answer a port gives a request up."""

_LATE_S: Final = 6.0


class Trouble(Struct):
    """Which faults are on. Chances are of each request or event."""

    lost_after: float = 0.0
    """Applied, then the answer is lost."""
    lost_before: float = 0.0
    """Lost, and never applied."""
    applied_late: float = 0.0
    """Told to be lost, and applied some seconds later."""
    slow_s: float = 0.0
    no_space: bool = False
    damaged: bool = False
    """A crash has damaged the store's own index: it serves nothing that it cannot vouch for."""
    away: bool = False
    """No leader, or no quorum: nothing is served."""
    lag_s: float = 0.0
    """How far behind the member is that observers read from."""
    events_lost: float = 0.0
    events_late: float = 0.0
    events_repeated: float = 0.0


class Sent(Struct, frozen=True):
    """Who sent a commit and when: on the sender's own clock, and by the world's."""

    process: str
    boot: str
    clock_ms: int
    rate: float
    at_s: float


class Witness(Protocol):
    """Who hears of every commit that was applied, in order."""

    def applied(self, scope: str, commit: Commit, revision: int, sent: Sent | None) -> None: ...

    def restored(self, scope: str, store: MemoryStore, backup: Snapshot) -> None: ...


class StoreService:
    """The store of one scope. `store` is replaced when an old backup is restored."""

    def __init__(self, loop: SimLoop, network: Network, scope: str, seed: str, witness: Witness) -> None:
        self.loop = loop
        self.network = network
        self.scope = scope
        self.name = f"store/{scope}"
        self.unit = loop.unit(self.name)
        self.store: Store = MemoryStore()
        self.trouble = Trouble()
        self._troubles: list[dict[str, float | bool]] = []
        self.lots = stream(f"{seed}/{self.name}")
        self.counts: dict[str, int] = {}
        self._witness = witness
        self._lagging: list[tuple[float, int]] = []
        self._watches: dict[SimWatch, None] = {}
        self._no_watch_until_s = 0.0

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def worsen(self, changes: dict[str, float | bool]) -> Callable[[], None]:
        """Add a trouble to those there are; of two alike the worse counts. Answers how to take this one back."""
        self._troubles.append(changes)
        self._add_up()

        def back() -> None:
            self._troubles = [one for one in self._troubles if one is not changes]
            self._add_up()

        return back

    def _add_up(self) -> None:
        worst: dict[str, float | bool] = {}
        for one in self._troubles:
            for name, value in one.items():
                worst[name] = max(value, worst.get(name, 0))
        lagged = self.trouble.lag_s
        self.trouble = Trouble(**worst)  # type: ignore[arg-type]
        if lagged and not self.trouble.lag_s:
            for watch in self._watches:
                watch.caught_up()

    def check(self, *, writing: bool) -> None:
        if self.trouble.damaged:
            raise Corrupt("the store's index does not match its rows; restore a backup")
        if self.trouble.away:
            raise Unavailable("the store has no leader just now; try again")
        if writing and self.trouble.no_space:
            self.count("no-space")
            raise NoSpace("the store is full; nothing was applied: free space there, or compact")

    def perform(self, work: Work[T], done: Callable[[T], None], failed: Callable[[StoreError], None]) -> None:
        """Do it, and tell. In memory that is one step."""
        try:
            result = at_once(work())
        except StoreError as error:
            failed(error)
            return
        done(result)

    async def apply(self, commit: Commit, sent: Sent) -> Committed | Conflict:
        self.check(writing=True)
        answer = await self.store.commit(commit)
        if isinstance(answer, Committed):
            self.applied(commit, answer.revision, sent)
        return answer

    def applied(self, commit: Commit, revision: int, sent: Sent | None) -> None:
        """Tell the witness, and remember when it was."""
        self._lagging.append((self.loop.time(), revision))
        if len(self._lagging) > 4_000:
            del self._lagging[:2_000]
        self._witness.applied(self.scope, commit, revision, sent)

    def lagging_revision(self) -> int:
        """Where a member stands that is `lag_s` behind; 0 if that is the present."""
        if not self.trouble.lag_s:
            return 0
        until_s = self.loop.time() - self.trouble.lag_s
        behind = [revision for at_s, revision in self._lagging if at_s <= until_s]
        return behind[-1] if behind else 0

    def break_watches(self, *, for_s: float = 0.0) -> None:
        """Whoever watches must ask again, and finds nobody to ask for a while."""
        self._no_watch_until_s = self.loop.time() + for_s
        watches, self._watches = self._watches, {}
        for watch in watches:
            watch.broke_off()

    def watched(self, watch: SimWatch) -> None:
        self._watches[watch] = None

    def unwatched(self, watch: SimWatch) -> None:
        self._watches.pop(watch, None)

    def check_watchable(self) -> None:
        self.check(writing=False)
        if self.loop.time() < self._no_watch_until_s:
            raise Unavailable("this member cannot be watched just now; try again")

    def restore(self, backup: Snapshot, incarnation: str) -> None:
        """Put an old backup in the store's place. Whoever writes to it must have been ended before."""
        old = cast(MemoryStore, self.store)
        self.store, _ = restored = MemoryStore.restore(backup, incarnation=incarnation, replacing=old)
        at_once(old.close())
        self._lagging.clear()
        self._witness.restored(self.scope, restored[0], backup)


class StorePort:
    """One process's way to a store: satisfies `store.protocol.Store`. An `observer` may be served by a member that lags."""

    def __init__(
        self, service: StoreService, process: str, unit: Unit, sent: Callable[[], Sent], *, observer: bool = False
    ) -> None:
        self._service = service
        self._process = process
        self._unit = unit
        self._sent = sent
        self._observer = observer
        self._closed = False
        self._watches: dict[SimWatch, None] = {}

    async def get(self, key: str) -> Row | None:
        return await self._read(lambda store, lag: _row_at(store, key, lag) if lag else store.get(key))

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        async def read(store: Store, lag: int) -> Page:
            if lag and revision > lag:
                raise _not_been(revision, lag)
            return await store.range(prefix, after=after, limit=limit, revision=revision or lag)

        return await self._read(read)

    async def revision(self) -> int:
        async def read(store: Store, lag: int) -> int:
            return lag or await store.revision()

        return await self._read(read)

    async def compact(self, revision: int) -> None:
        service = self._service

        async def work() -> None:
            service.check(writing=False)  # a store that is full is compacted to be cured
            await service.store.compact(revision)

        await self._call(work, writing=True)

    async def close(self) -> None:
        """The process's own end of it; the store goes on."""
        self._closed = True
        for watch in self._watches:
            watch.end(Closed("this store was closed"))

    async def commit(self, commit: Commit) -> Committed | Conflict:
        service, trouble, lots = self._service, self._service.trouble, self._service.lots
        sent = self._sent()
        drawn = lots.random()
        self._check_open()
        arrives = service.network.reaches(self._process, service.name)
        if arrives and trouble.applied_late and drawn < trouble.applied_late:
            service.count("applied-late")
            delay_s = 0.2 + _LATE_S * lots.random()
            service.loop.call_later(delay_s, self._apply_late, commit, sent, context=service.unit.context)
            await asyncio.sleep(0.05 + 0.3 * lots.random())
            raise Unanswered("the store did not answer in time")
        if trouble.lost_before and drawn < trouble.applied_late + trouble.lost_before:
            service.count("lost-before")
            await asyncio.sleep(0.2 + lots.random())
            raise Unanswered("the store did not answer in time")
        lose = bool(trouble.lost_after) and lots.random() < trouble.lost_after
        return await self._call(lambda: service.apply(commit, sent), lose=lose, writing=True)

    def _apply_late(self, commit: Commit, sent: Sent) -> None:
        service = self._service
        service.perform(lambda: service.apply(commit, sent), lambda _: None, lambda _: service.count("applied-late-refused"))

    async def watch(self, prefix: str, *, after: int) -> Watch:
        lagging = self._service.lagging_revision() if self._observer else 0
        if lagging and after > lagging:
            # A member that has not got so far yet: it cannot say what follows.
            await self._call(_nothing)
            raise _not_been(after, lagging)
        service = self._service

        async def work() -> Watch:
            service.check_watchable()
            return await service.store.watch(prefix, after=after)

        real = await self._call(work)
        lag_s = service.trouble.lag_s if lagging else 0.0
        watch = SimWatch(service, self._process, self._unit, real, lag_s=lag_s)
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

    async def _call(self, work: Work[T], *, lose: bool = False, writing: bool = False) -> T:
        """There and back. What is lost on the way is `Unanswered` if it may have changed something, else `Unavailable`."""
        self._check_open()
        service = self._service
        answer: asyncio.Future[T] = service.loop.create_future()
        service.network.send(self._process, service.name, service.unit, self._serve, _Asked(work, answer, lose))
        patience = service.loop.call_later(ANSWER_S_MAX, _expire, answer, writing)
        try:
            return await answer
        finally:
            patience.cancel()

    def _check_open(self) -> None:
        if self._unit.dead:
            raise Closed("this process was killed")
        if self._closed:
            raise Closed("this store was closed")

    def _serve(self, asked: _Asked) -> None:
        """At the store, perhaps after it has been slow. A connection to a store does not say a thing twice."""
        service = self._service
        if asked.begun:
            return
        asked.begun = True
        if service.trouble.slow_s and not asked.answer.done():
            service.count("slow")
            delay_s = service.trouble.slow_s * service.lots.random()
            service.loop.call_later(delay_s, self._work, asked, context=service.unit.context)
            return
        self._work(asked)

    def _work(self, asked: _Asked) -> None:
        service, answer = self._service, asked.answer

        def done(result: object) -> None:
            if asked.lose:
                service.count("lost-after")
                return
            service.network.send(service.name, self._process, self._unit, _answer, answer, result)

        def failed(error: StoreError) -> None:
            service.network.send(service.name, self._process, self._unit, _fail, answer, error)

        service.perform(asked.work, done, failed)


class _Asked(Struct):
    """One request on its way to the store, however often the network brings it."""

    work: Work[Any]
    answer: asyncio.Future[Any]
    lose: bool
    begun: bool = False


class SimWatch:
    """A watch as its far end gets it: events in order, unless a fault says otherwise."""

    def __init__(self, service: StoreService, process: str, unit: Unit, real: Watch, *, lag_s: float) -> None:
        self._service, self._process, self._unit, self._real, self._lag_s = service, process, unit, real, lag_s
        self._arrived: list[Event | StoreError] = []
        self._waiting: asyncio.Future[None] | None = None
        self._not_before_s = 0.0
        self._owed: list[tuple[Handle, Event | StoreError]] = []
        self._closed = False
        loop = service.loop
        self._pump_task = service.unit.context.run(loop.create_task, self._pump(), name=f"watch by {process}")
        service.watched(self)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._arrived and not self._closed:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._closed:
            raise StopAsyncIteration
        item = self._arrived[0]
        if isinstance(item, StoreError):
            raise item  # and so does every later step
        del self._arrived[0]
        return item

    async def close(self) -> None:
        self._closed = True
        self._wake()
        self._service.unwatched(self)
        self._pump_task.cancel()
        await self._real.close()

    def end(self, error: StoreError) -> None:
        """At this end, at once: what was pending is let go."""
        self._pump_task.cancel()
        self._service.unwatched(self)
        self._arrived[:] = [error]
        self._wake()

    def broke_off(self) -> None:
        self._pump_task.cancel()
        self._send(Unavailable("the watch broke; watch again from where you were"))

    async def _pump(self) -> None:
        try:
            async for event in self._real:
                if self._unit.dead:
                    break
                self._send(event)
        except StoreError as error:
            self._send(error)
        finally:
            await self._real.close()

    def _send(self, item: Event | StoreError) -> None:
        service, trouble, lots = self._service, self._service.trouble, self._service.lots
        late_s = self._lag_s
        if trouble.events_lost and lots.random() < trouble.events_lost:
            service.count("event-lost")
            return
        if trouble.events_late and lots.random() < trouble.events_late:
            service.count("event-late")
            late_s += 3.0 * lots.random()
        # In order, as a stream is: one that is late holds up those behind it.
        at_s = max(service.loop.time() + late_s + service.network.delay_s(), self._not_before_s)
        self._not_before_s = at_s
        self._arrive_at(at_s, item)
        if trouble.events_repeated and lots.random() < trouble.events_repeated:
            service.count("event-repeated")
            self._arrive_at(at_s + 0.5 * lots.random(), item)

    def _arrive_at(self, at_s: float, item: Event | StoreError) -> None:
        """A cut way loses what is sent, and so tears the stream: the gap shows at the next event that gets through."""
        service = self._service
        if not service.network.reaches(service.name, self._process):
            return
        handle = service.loop.call_at(at_s, self._arrive, item, context=self._unit.context)
        if self._lag_s:
            self._owed.append((handle, item))

    def caught_up(self) -> None:
        """The member behind it lags no more: what it still owed arrives at once, in order."""
        self._lag_s, self._not_before_s = 0.0, 0.0
        owed, self._owed = self._owed, []
        for handle, item in owed:
            if handle.when_s > self._service.loop.time() and not handle.cancelled():
                handle.cancel()
                self._service.loop.call_soon(self._arrive, item, context=self._unit.context)

    def _arrive(self, item: Event | StoreError) -> None:
        said = f"event {item.revision}" if isinstance(item, Event) else f"{type(item).__name__} {item}"
        self._service.loop.note(said.encode())
        self._arrived.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not wait: each request to a store in memory is one step."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("a store in memory waited")


async def _row_at(store: Store, key: str, revision: int) -> Row | None:
    page = await store.range(key, limit=1, revision=revision)
    return page.rows[0] if page.rows and page.rows[0].key == key else None


def _not_been(revision: int, lag: int) -> Invalid:
    return Invalid(f"revision {revision} has not been yet; this member stands at {lag}")


async def _nothing() -> None:
    return


def _expire(answer: asyncio.Future[Any], writing: bool) -> None:
    lost = "the store did not answer in time"
    _fail(answer, Unanswered(lost) if writing else Unavailable(f"{lost}; nothing was changed"))


def _answer(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any], error: StoreError) -> None:
    if not answer.done():
        answer.set_exception(error)
