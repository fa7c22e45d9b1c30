"""Deterministic asyncio event loop with virtual time; seeded random streams.

Streams by name, each from the run's seed. The only randomness in this room.

An event loop of virtual time, where one seed is one order. No fault is injected here.

Every callback belongs to a **process** (by its context), and four rules make a run repeatable and still adversarial:

1. Time is a number. When nothing is ready it jumps to the next timer, so an hour of waiting costs nothing.
2. Among processes that have something ready a seeded lot chooses; within one process callbacks run in the order in which they
   were scheduled, as asyncio promises. Anything else would try orders that no real process can have.
3. A dead process runs nothing any more: what was scheduled is dropped, its tasks are never resumed, and so no `finally` of
   theirs runs while the world exists. A frozen one keeps what comes due until it is thawed; its clock goes on.
4. Nothing depends on an address: tasks and futures are hashed by a counter, so that sets of them have the same order in every
   run (`asyncio.TaskGroup` cancels in the order of a set).

Threads, executors and real sleeping are refused. If nothing is ready and no timer is left, everybody waits for somebody: that
is a `Deadlock`, and it says who waits for what. If somebody is always ready, so that time cannot go on, that is a `Spin`, and
it says who.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from hashlib import sha256
from heapq import heappop, heappush
from random import Random as Lots  # noqa: TID251 - the simulator is where chance is made
from types import AsyncGeneratorType
from typing import Any, Final, cast

__all__ = ["Lots", "stream"]


def stream(*names: object) -> Lots:
    """A stream of its own for these names: a text seed goes through SHA-512, so near names are far apart."""
    return Lots("/".join(map(str, names)))  # noqa: S311 - no secret is drawn from it


_DIGEST_EVERY: Final = 2_048
_CLOSES_MAX: Final = 1_000
_SPIN_EVENTS: Final = 500_000
"""At one moment. A crowd that wakes at once is some thousands; whoever asks for this many would ask for ever."""
_event = struct.Struct("<dI").pack

CURRENT: contextvars.ContextVar[Unit] = contextvars.ContextVar("process")


class Deadlock(Exception):
    """Nothing is ready and no timer is left."""


class Spin(Exception):
    """Something is always ready, so time stands still."""


class Unit:
    """What lives and dies together: the callbacks of one process. `process.py` builds a process around it."""

    __slots__ = ("context", "dead", "frozen", "name", "number", "queued", "ready")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ready: deque[Handle] = deque()
        self.queued = False
        """Is it in the loop's list of those with something ready?"""
        self.dead = False
        self.frozen = 0
        """How many hold it still at once: it goes on when the last one lets go."""
        self.context = contextvars.copy_context()
        self.context.run(CURRENT.set, self)


class Handle:
    """One callback to come. As much of `asyncio.Handle` as asyncio asks of one."""

    __slots__ = ("args", "callback", "cancelled_", "context", "unit", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context, unit: Unit
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context
        self.unit = unit
        self.cancelled_ = False
        self.when_s = 0.0

    def cancel(self) -> None:
        self.cancelled_ = True
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.cancelled_

    def when(self) -> float:
        return self.when_s


class CountedTask(asyncio.Task[Any]):
    """Hashed by its number: the same in every run."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: SimLoop, unit: Unit, **more: Any) -> None:
        self.number = loop.count()
        self.unit = unit
        super().__init__(coro, loop=loop, **more)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self.number


class CountedFuture(asyncio.Future[Any]):
    __slots__ = ("number",)

    def __hash__(self) -> int:
        try:
            return self.number
        except AttributeError:
            self.number: int = cast(SimLoop, self.get_loop()).count()
            return self.number


class SimLoop(asyncio.AbstractEventLoop):
    """Made for one run: `run` until the virtual time `until_s` or until `stop`; `finish` ends everything that is left."""

    def __init__(self, seed: str) -> None:
        self.events = 0
        self._events_max = _SPIN_EVENTS
        """How many there may be by the end of this moment."""
        self.failures: list[tuple[Unit, BaseException | None, str]] = []
        """What nobody caught: by which process, and what."""
        self.on_failure: Callable[[Unit, BaseException | None, str], None] | None = None
        self._now_s = 0.0
        self._numbers = 0
        self._timers: list[tuple[float, int, Handle]] = []
        self._runnable: list[Unit] = []
        self._lots = stream(f"{seed}/order").random
        self._stopping = False
        self._closed = False
        self._hash = sha256()
        self._unhashed: list[bytes] = []
        self._buried: list[CountedTask] = []
        self._spawned: dict[CountedTask, None] = {}
        self._units: list[Unit] = []
        self.root = self.unit("world")

    @classmethod
    def seeded(cls, seed: str) -> SimLoop:
        """A new one. What it does not offer (sockets, signals, subprocesses) raises NotImplementedError."""
        return cls(seed)

    # -- processes -------------------------------------------------------------------------------------------------------

    def unit(self, name: str) -> Unit:
        unit = Unit(name, len(self._units))
        self._units.append(unit)
        return unit

    def kill(self, unit: Unit) -> None:
        """Nothing of it runs from here on. Its tasks are kept, so that nothing of them is cleaned up either."""
        unit.dead = True
        self._buried += self._tasks_of(unit)  # first: what is ready may be all that holds a task
        unit.ready.clear()

    def freeze(self, unit: Unit) -> None:
        unit.frozen += 1

    def thaw(self, unit: Unit) -> None:
        unit.frozen -= 1
        self._queue(unit)

    def waits(self, unit: Unit | None = None) -> str:
        """Who waits for what: a line for each task that has not ended."""
        return "\n".join(
            f"  {task.unit.name}: {task.get_name()} waits at {_where(task)}"
            for task in sorted(self._tasks(), key=_number)
            if (unit is None or task.unit is unit) and not task.unit.dead
        )

    def _tasks_of(self, unit: Unit) -> list[CountedTask]:
        return sorted((task for task in self._tasks() if task.unit is unit), key=_number)

    def _tasks(self) -> set[CountedTask]:
        return cast(set[CountedTask], asyncio.all_tasks(self))

    # -- running ---------------------------------------------------------------------------------------------------------

    def run(self, until_s: float) -> None:
        """Run what happens before `until_s`, and stand there; or stop earlier if `stop` is called."""
        self._stopping = False
        asyncio._set_running_loop(self)
        try:
            while not self._stopping:
                self._drop_void()
                if self._runnable:
                    self._round()
                elif not self._timers:
                    raise Deadlock(f"at {self._now_s:.3f} s nothing is ready and no timer is left:\n{self.waits()}")
                elif self._timers[0][0] >= until_s:
                    break
                else:
                    self._jump()
        finally:
            asyncio._set_running_loop(None)
        if not self._stopping:
            self._move(until_s)

    def _move(self, to_s: float) -> None:
        if to_s > self._now_s:
            self._now_s = to_s
            self._events_max = self.events + _SPIN_EVENTS

    def _drop_void(self) -> None:
        """What was cancelled, and what the dead had set: nobody waits for these."""
        timers = self._timers
        while timers and (timers[0][2].cancelled_ or timers[0][2].unit.dead):
            heappop(timers)

    def _jump(self) -> None:
        """To the next timer, and make ready all that are due then."""
        timers = self._timers
        self._move(timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            handle = heappop(timers)[2]
            unit = handle.unit
            if not handle.cancelled_ and not unit.dead:
                unit.ready.append(handle)
                self._queue(unit)

    def _round(self) -> None:
        """Until nothing is ready: choose a process, and run its next callback."""
        runnable, unhashed, lots = self._runnable, self._unhashed, self._lots
        while runnable and not self._stopping:
            many = len(runnable)
            index = int(lots() * many) if many > 1 else 0
            unit = runnable[index]
            if unit.frozen or not unit.ready:
                runnable[index] = runnable[-1]
                runnable.pop()
                unit.queued = False
                continue
            handle = unit.ready.popleft()
            callback = handle.callback
            if callback is None:
                continue
            self.events += 1
            if self.events > self._events_max:
                whose = _turn(unit, callback)
                raise Spin(f"time stands still at {self._now_s:.3f} s: {_SPIN_EVENTS} events, and next is {whose}")
            unhashed.append(_event(self._now_s, unit.number))
            if len(unhashed) >= _DIGEST_EVERY:
                self._fold()
            try:
                handle.context.run(callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - a callback that fails is its process's failure, and is told
                self._failed(unit, error, "a callback failed")

    def stop(self) -> None:
        self._stopping = True

    def finish(self) -> None:
        """End all that is left, without a trace: every process is dead first, so nothing reaches anything."""
        for unit in self._units:
            unit.dead = True
        left = sorted({*self._tasks(), *self._buried}, key=_number)
        self._timers.clear()
        self._runnable.clear()
        for task in left:
            _close(task.get_coro())
        self._buried.clear()
        self._spawned.clear()
        self._closed = True

    # -- the record ------------------------------------------------------------------------------------------------------

    def note(self, what: bytes) -> None:
        """Add to the digest something that happened now: a delivery, a commit, a fault."""
        self._unhashed.append(_event(self._now_s, len(what)))
        self._unhashed.append(what)

    def digest(self) -> str:
        self._fold()
        return self._hash.hexdigest()

    def _fold(self) -> None:
        self._hash.update(b"".join(self._unhashed))
        self._unhashed.clear()

    # -- what asyncio asks of a loop -------------------------------------------------------------------------------------

    def count(self) -> int:
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if context is None:
            context = contextvars.copy_context()
        unit = context.get(CURRENT) or self.root
        handle = Handle(callback, args, context, unit)
        if not unit.dead:
            unit.ready.append(handle)
            if not unit.queued:
                self._queue(unit)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self.call_at(self._now_s + delay if delay > 0 else self._now_s, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, context.get(CURRENT) or self.root)
        handle.when_s = when
        self._numbers = number = self._numbers + 1
        heappush(self._timers, (when, number, handle))
        return handle

    def _queue(self, unit: Unit) -> None:
        if not unit.queued and not unit.frozen and unit.ready:
            unit.queued = True
            self._runnable.append(unit)

    def create_future(self) -> asyncio.Future[Any]:
        return CountedFuture(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None, **more: Any
    ) -> asyncio.Task[Any]:
        context = contextvars.copy_context() if context is None else context
        unit = context.get(CURRENT) or self.root
        name = name or getattr(coro, "__qualname__", "task")
        task = CountedTask(coro, loop=self, unit=unit, name=name, context=context, **more)
        if unit.dead:
            self._buried.append(task)
        return task

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str, unit: Unit | None = None) -> None:
        """A task that nobody waits for; what it fails with is told by its process. In `unit`, or where this is called."""
        context = contextvars.copy_context() if unit is None else unit.context.copy()
        task = self.create_task(coro, name=name, context=context)
        self._spawned[cast(CountedTask, task)] = None  # else it may be collected as garbage while it waits
        task.add_done_callback(self._told, context=context)

    def _told(self, task: asyncio.Task[Any]) -> None:
        self._spawned.pop(cast(CountedTask, task), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call_exception_handler({"message": f"{task.get_name()} failed", "exception": error, "task": task})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("future") or context.get("task")
        unit = task.unit if isinstance(task, CountedTask) else CURRENT.get(self.root)
        if not self._closed and not unit.dead:
            self._failed(unit, context.get("exception"), str(context.get("message", "")))

    def _failed(self, unit: Unit, error: BaseException | None, message: str) -> None:
        self.failures.append((unit, error, message))
        if self.on_failure is not None:
            self.on_failure(unit, error, message)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        raise RuntimeError("there are no threads in a simulated world")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("there are no threads in a simulated world: use world.offload")

    async def shutdown_asyncgens(self) -> None:
        return

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's own name
        return


def _close(coroutine: Any) -> None:
    """From the inside out, and again while anybody awaits in a `finally`: an outer one would leave such an inner one behind."""
    for _ in range(_CLOSES_MAX):
        if getattr(coroutine, "cr_frame", None) is None:
            return
        inner, step = coroutine, None
        while (following := _awaited(inner)) is not None:
            inner, step = following
        with suppress(BaseException):  # whatever the dead still want to say
            if step is None:
                inner.close()
            else:
                step.throw(GeneratorExit())


def _awaited(outer: Any) -> tuple[Any, Any] | None:
    """The coroutine or generator that this one stands in, if it has not ended; and of a generator the step that it is in: to
    close what awaits that step would leave the generator running for ever.
    """
    step = getattr(outer, "cr_await", None) or getattr(outer, "ag_await", None)
    if getattr(step, "cr_frame", None) is not None:
        return step, None
    while type(step) in _STEPS:
        within = gc.get_referents(step)
        for one in within:
            if isinstance(one, AsyncGeneratorType) and one.ag_frame is not None:
                return one, step
        step = next((one for one in within if type(one) in _STEPS), None)
    return None


def _steps() -> Iterator[type]:
    """What it is that awaits the next item of a generator: types that have no name to import."""

    async def items() -> AsyncGenerator[None, None]:
        yield

    steps: list[Any] = [anext(items(), None), items().asend(None), items().aclose()]
    for step in steps:
        yield type(step)
        step.close()


_STEPS: Final = frozenset(_steps())


def _number(task: CountedTask) -> int:
    return task.number


def _turn(unit: Unit, callback: Callable[..., object]) -> str:
    """Whose turn it is: a task and the line that it stands at, or else a plain callback."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, CountedTask):
        return f"{unit.name}: {task.get_name()} at {_where(task)}"
    return f"{unit.name}: {getattr(callback, '__qualname__', callback)}"


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line that it stands at, and through which calls it came there."""
    places = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        following = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None) or getattr(inner, "gi_yieldfrom", None)
        if following is None or following is inner:
            break
        inner = following
    return " > ".join(places[-4:]) or "its beginning"
