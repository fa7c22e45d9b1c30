"""Deterministic asyncio event loop with virtual time.

The loop injects no faults itself; the network, store and clocks of this package do. Every callback belongs to one execution
unit (one start of a simulated process), found through its context. Four rules make a run repeatable and still adversarial:

1. Time is a number. When nothing is ready, it jumps to the next timer, so an hour of waiting costs nothing.
2. A seeded draw chooses among the units that have a ready callback. Within one unit, callbacks run in the order in which
   they were scheduled, as asyncio guarantees. Any other order could not happen in a real process.
3. A killed unit runs nothing more. Its scheduled callbacks are dropped and its tasks are never resumed, so none of their
   `finally` blocks run during the simulation, as after `kill -9`. A frozen unit keeps its due callbacks until it is thawed;
   its clock continues.
4. Nothing depends on memory addresses. Tasks and futures are hashed by a counter, so that sets of them iterate in the same
   order in every run (`asyncio.TaskGroup` cancels its tasks in set order).

Threads, executors and real sleeping raise an error. If nothing is ready and no timer is left, the loop raises `Deadlock`
with a list of all waiting tasks. If callbacks are ready without end, so that virtual time cannot advance, it raises
`Livelock` with the task that would run next.
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
from types import AsyncGeneratorType
from typing import Any, Final, cast

from remit.simulate.world import random_streams

_DIGEST_EVERY: Final = 2_048
_CLOSES_MAX: Final = 1_000
_LIVELOCK_EVENTS: Final = 500_000
"""Callbacks at one virtual instant. Many processes that wake at once need some thousands; a loop that reaches this number does
not end.
"""
_pack_event = struct.Struct("<dI").pack

CURRENT_UNIT: contextvars.ContextVar[ExecutionUnit] = contextvars.ContextVar("process")


class Deadlock(Exception):
    """No callback is ready and no timer is left: all tasks wait for each other."""


class Livelock(Exception):
    """Callbacks are always ready, so virtual time cannot advance."""


class ExecutionUnit:
    """The callbacks and tasks of one start of a process. They are killed and frozen together; `processes.py` builds a process
    on it.
    """

    __slots__ = ("context", "dead", "frozen", "name", "number", "queued", "ready")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ready: deque[Handle] = deque()
        self.queued = False
        """Whether the loop's list of runnable units contains it."""
        self.dead = False
        self.frozen = 0
        """Number of freezes in effect. The unit runs again when the last of them is thawed."""
        self.context = contextvars.copy_context()
        self.context.run(CURRENT_UNIT.set, self)


class Handle:
    """A scheduled callback: the part of `asyncio.Handle` that asyncio uses."""

    __slots__ = ("args", "callback", "cancelled_", "context", "unit", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context, unit: ExecutionUnit
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
    """A task hashed by a counter, so that sets of tasks have the same order in every run."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: SimLoop, unit: ExecutionUnit, **options: Any) -> None:
        self.number = loop.next_number()
        self.unit = unit
        super().__init__(coro, loop=loop, **options)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self.number


class CountedFuture(asyncio.Future[Any]):
    __slots__ = ("number",)

    def __hash__(self) -> int:
        try:
            return self.number
        except AttributeError:
            self.number: int = cast(SimLoop, self.get_loop()).next_number()
            return self.number


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one run.

    `run` runs until the virtual time `until_s` or until `stop`; `finish` closes all tasks that are left.
    """

    def __init__(self, seed: str) -> None:
        self.events = 0
        self._events_max = _LIVELOCK_EVENTS
        """The number of events at which this virtual instant counts as a livelock."""
        self.failures: list[tuple[ExecutionUnit, BaseException | None, str]] = []
        """Exceptions that no code caught: unit, exception, message."""
        self.on_failure: Callable[[ExecutionUnit, BaseException | None, str], None] | None = None
        self._now_s = 0.0
        self._counter = 0
        self._timers: list[tuple[float, int, Handle]] = []
        self._runnable: list[ExecutionUnit] = []
        self._draw = random_streams.stream(random_streams.event_order(seed)).random
        self._stopping = False
        self._closed = False
        self._hash = sha256()
        self._pending_digest: list[bytes] = []
        self._dead_tasks: list[CountedTask] = []
        self._background_tasks: dict[CountedTask, None] = {}
        self._units: list[ExecutionUnit] = []
        self.root = self.new_unit("world")

    @classmethod
    def seeded(cls, seed: str) -> SimLoop:
        """A new loop. Sockets, signals and subprocesses raise NotImplementedError."""
        return cls(seed)

    # -- processes -------------------------------------------------------------------------------------------------------

    def new_unit(self, name: str) -> ExecutionUnit:
        unit = ExecutionUnit(name, len(self._units))
        self._units.append(unit)
        return unit

    def kill(self, unit: ExecutionUnit) -> None:
        """Stop the unit for good. Its tasks stay referenced, so that garbage collection does not run their cleanup code."""
        unit.dead = True
        self._dead_tasks += self._tasks_of(unit)  # before the queue is cleared: it may hold the only references to some tasks
        unit.ready.clear()

    def freeze(self, unit: ExecutionUnit) -> None:
        unit.frozen += 1

    def thaw(self, unit: ExecutionUnit) -> None:
        unit.frozen -= 1
        self._make_runnable(unit)

    def waiting_tasks(self, unit: ExecutionUnit | None = None) -> str:
        """One line for each unfinished task, with the place where it waits."""
        return "\n".join(
            f"  {task.unit.name}: {task.get_name()} waits at {_await_stack(task)}"
            for task in sorted(self._tasks(), key=_task_number)
            if (unit is None or task.unit is unit) and not task.unit.dead
        )

    def _tasks_of(self, unit: ExecutionUnit) -> list[CountedTask]:
        return sorted((task for task in self._tasks() if task.unit is unit), key=_task_number)

    def _tasks(self) -> set[CountedTask]:
        return cast(set[CountedTask], asyncio.all_tasks(self))

    # -- running ---------------------------------------------------------------------------------------------------------

    def run(self, until_s: float) -> None:
        """Run all events before `until_s` and set the time to it, or return earlier if `stop` is called."""
        self._stopping = False
        asyncio._set_running_loop(self)
        try:
            while not self._stopping:
                self._drop_cancelled_timers()
                if self._runnable:
                    self._run_ready()
                elif not self._timers:
                    raise Deadlock(
                        f"deadlock at {self._now_s:.3f} s: no callback is ready and no timer is set\n{self.waiting_tasks()}"
                    )
                elif self._timers[0][0] >= until_s:
                    break
                else:
                    self._advance_to_next_timer()
        finally:
            asyncio._set_running_loop(None)
        if not self._stopping:
            self._advance_time(until_s)

    def _advance_time(self, to_s: float) -> None:
        if to_s > self._now_s:
            self._now_s = to_s
            self._events_max = self.events + _LIVELOCK_EVENTS

    def _drop_cancelled_timers(self) -> None:
        """Drop timers that were cancelled or belong to dead units, so that time does not jump to them."""
        timers = self._timers
        while timers and (timers[0][2].cancelled_ or timers[0][2].unit.dead):
            heappop(timers)

    def _advance_to_next_timer(self) -> None:
        """Advance time to the next timer and queue all callbacks that are due then."""
        timers = self._timers
        self._advance_time(timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            handle = heappop(timers)[2]
            unit = handle.unit
            if not handle.cancelled_ and not unit.dead:
                unit.ready.append(handle)
                self._make_runnable(unit)

    def _run_ready(self) -> None:
        """Run ready callbacks, each from a randomly chosen unit, until none is left."""
        runnable, pending, draw = self._runnable, self._pending_digest, self._draw
        while runnable and not self._stopping:
            runnable_count = len(runnable)
            index = int(draw() * runnable_count) if runnable_count > 1 else 0
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
                next_callback = _describe_next(unit, callback)
                cause = f"{_LIVELOCK_EVENTS} events without time advancing; next is {next_callback}"
                raise Livelock(f"livelock at {self._now_s:.3f} s: {cause}")
            pending.append(_pack_event(self._now_s, unit.number))
            if len(pending) >= _DIGEST_EVERY:
                self._flush_digest()
            try:
                handle.context.run(callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - recorded as a failure of its process
                self._record_failure(unit, error, "a callback failed")

    def stop(self) -> None:
        self._stopping = True

    def finish(self) -> None:
        """Close all remaining tasks. Every unit is marked dead first, so that their cleanup code has no effect."""
        for unit in self._units:
            unit.dead = True
        tasks = sorted({*self._tasks(), *self._dead_tasks}, key=_task_number)
        self._timers.clear()
        self._runnable.clear()
        for task in tasks:
            _close_coroutine(task.get_coro())
        self._dead_tasks.clear()
        self._background_tasks.clear()
        self._closed = True

    # -- digest ----------------------------------------------------------------------------------------------------------

    def add_to_digest(self, event: bytes) -> None:
        """Add to the digest of the run an event that happens now: a delivery, a commit, a fault."""
        self._pending_digest.append(_pack_event(self._now_s, len(event)))
        self._pending_digest.append(event)

    def digest(self) -> str:
        self._flush_digest()
        return self._hash.hexdigest()

    def _flush_digest(self) -> None:
        self._hash.update(b"".join(self._pending_digest))
        self._pending_digest.clear()

    # -- asyncio.AbstractEventLoop ----------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self._counter += 1
        return self._counter

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if context is None:
            context = contextvars.copy_context()
        unit = context.get(CURRENT_UNIT) or self.root
        handle = Handle(callback, args, context, unit)
        if not unit.dead:
            unit.ready.append(handle)
            if not unit.queued:
                self._make_runnable(unit)
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
        handle = Handle(callback, args, context, context.get(CURRENT_UNIT) or self.root)
        handle.when_s = when
        self._counter = number = self._counter + 1
        heappush(self._timers, (when, number, handle))
        return handle

    def _make_runnable(self, unit: ExecutionUnit) -> None:
        if not unit.queued and not unit.frozen and unit.ready:
            unit.queued = True
            self._runnable.append(unit)

    def create_future(self) -> asyncio.Future[Any]:
        return CountedFuture(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        context = contextvars.copy_context() if context is None else context
        unit = context.get(CURRENT_UNIT) or self.root
        name = name or getattr(coro, "__qualname__", "task")
        task = CountedTask(coro, loop=self, unit=unit, name=name, context=context, **options)
        if unit.dead:
            self._dead_tasks.append(task)
        return task

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str, unit: ExecutionUnit | None = None) -> None:
        """Start a background task that nothing awaits, in `unit` or else in the current one. An exception counts as a failure
        of that unit.
        """
        context = contextvars.copy_context() if unit is None else unit.context.copy()
        task = self.create_task(coro, name=name, context=context)
        self._background_tasks[cast(CountedTask, task)] = (
            None  # a task without references could be garbage-collected while it waits
        )
        task.add_done_callback(self._on_task_done, context=context)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._background_tasks.pop(cast(CountedTask, task), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call_exception_handler({"message": f"{task.get_name()} failed", "exception": error, "task": task})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("future") or context.get("task")
        unit = task.unit if isinstance(task, CountedTask) else CURRENT_UNIT.get(self.root)
        if not self._closed and not unit.dead:
            self._record_failure(unit, context.get("exception"), str(context.get("message", "")))

    def _record_failure(self, unit: ExecutionUnit, error: BaseException | None, message: str) -> None:
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
        raise RuntimeError("threads do not exist in the simulation")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("threads do not exist in the simulation: use world.offload")

    async def shutdown_asyncgens(self) -> None:
        return

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's name
        return


def _close_coroutine(coroutine: Any) -> None:
    """Close a coroutine from the innermost await outwards, again while a `finally` block awaits something. Closing the outer
    coroutine first would leave an inner one open.
    """
    for _ in range(_CLOSES_MAX):
        if getattr(coroutine, "cr_frame", None) is None:
            return
        inner, step = coroutine, None
        while (awaited := _innermost_await(inner)) is not None:
            inner, step = awaited
        with suppress(BaseException):  # cleanup code of a dead process may raise anything
            if step is None:
                inner.close()
            else:
                step.throw(GeneratorExit())


def _innermost_await(outer: Any) -> tuple[Any, Any] | None:
    """The coroutine or generator that `outer` awaits, if it has not ended. For an async generator also the step object that is
    in progress: closing only what awaits that step would leave the generator running.
    """
    step = getattr(outer, "cr_await", None) or getattr(outer, "ag_await", None)
    if getattr(step, "cr_frame", None) is not None:
        return step, None
    while type(step) in _GENERATOR_STEP_TYPES:
        referents = gc.get_referents(step)
        for referent in referents:
            if isinstance(referent, AsyncGeneratorType) and referent.ag_frame is not None:
                return referent, step
        step = next((referent for referent in referents if type(referent) in _GENERATOR_STEP_TYPES), None)
    return None


def _generator_step_types() -> Iterator[type]:
    """The types of the objects that await the next item of an async generator. They have no importable names."""

    async def items() -> AsyncGenerator[None, None]:
        yield

    steps: list[Any] = [anext(items(), None), items().asend(None), items().aclose()]
    for step in steps:
        yield type(step)
        step.close()


_GENERATOR_STEP_TYPES: Final = frozenset(_generator_step_types())


def _task_number(task: CountedTask) -> int:
    return task.number


def _describe_next(unit: ExecutionUnit, callback: Callable[..., object]) -> str:
    """The task or plain callback that runs next, with the line at which the task waits."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, CountedTask):
        return f"{unit.name}: {task.get_name()} at {_await_stack(task)}"
    return f"{unit.name}: {getattr(callback, '__qualname__', callback)}"


def _await_stack(task: asyncio.Task[Any]) -> str:
    """The line at which a task waits, with up to three calls that led there."""
    frames = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None) or getattr(inner, "gi_yieldfrom", None)
        if awaited is None or awaited is inner:
            break
        inner = awaited
    return " > ".join(frames[-4:]) or "its start"
