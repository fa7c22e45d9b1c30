"""Simulated clocks with drift, seeded ids, deterministic offload.

Clocks differ in start value and rate, as on real machines. Ids are drawn from the seed, so that they are the same in every
run. Offloaded work runs inline, one item at a time, in virtual time.
"""

from __future__ import annotations

import asyncio
from base64 import b32encode
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeVar

from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.random_streams import stream
from remit.world.clock import TaskTimeout
from remit.world.interfaces import OffloadClosed

_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)


class SimClock:
    """The clock of one machine. It is monotonic and continues while a process is frozen; start value and rate differ by
    machine.

    `rate` 1.01 runs one percent fast. A change of the rate keeps the current reading: a corrected clock is slewed, not
    stepped.
    """

    def __init__(self, loop: SimLoop, name: str, *, start_ms: int = 0, rate: float = 1.0) -> None:
        self._loop = loop
        self._name = name
        self._boots = 0
        self._base_ms = float(start_ms)
        self._since_s = loop.time()
        self._rate = rate
        self.wall_offset_ms = 0

    def now_ms(self) -> int:
        return int(self._base_ms + (self._loop.time() - self._since_s) * 1000 * self._rate)

    def boot(self) -> str:
        return f"{self._name}-{self._boots}"

    def wall(self) -> str:
        wall = _EPOCH + timedelta(seconds=self._loop.time(), milliseconds=self.wall_offset_ms)
        return wall.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"

    async def sleep_ms(self, ms: int) -> None:
        if ms < 0:
            raise ValueError(f"cannot sleep {ms} ms")
        until_ms = self.now_ms() + ms
        remaining_ms = ms
        if not remaining_ms:
            await asyncio.sleep(0)
        while remaining_ms > 0:
            await asyncio.sleep(remaining_ms / (1000 * self._rate))
            remaining_ms = until_ms - self.now_ms()

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        return _ExactTimeout(self._loop, ms / (1000 * self._rate))

    # -- faults ----------------------------------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        return self._rate

    def drift(self, rate: float) -> None:
        now_s = self._loop.time()
        self._base_ms += (now_s - self._since_s) * 1000 * self._rate
        self._since_s, self._rate = now_s, rate

    def reboot(self) -> None:
        """Restart the monotonic clock at 0. Instants from before the reboot cannot be compared with later ones."""
        self._boots += 1
        self._base_ms, self._since_s = 0.0, self._loop.time()


class _ExactTimeout(TaskTimeout):
    """A timeout with its own exact timer. The product shares coarse timers between timeouts."""

    __slots__ = ("_delay_s", "_handle", "_loop")

    def __init__(self, loop: SimLoop, delay_s: float) -> None:
        self._loop, self._delay_s = loop, delay_s

    def _schedule(self) -> None:
        loop, delay_s = self._loop, self._delay_s
        self._handle = loop.call_later(delay_s, self.expired) if delay_s > 0 else loop.call_soon(self.expired)

    def _cancel(self) -> None:
        self._handle.cancel()


class SeededIds:
    """Unique ids drawn from the seed: the same in every run."""

    def __init__(self, seed: str) -> None:
        self._rng = stream(seed)

    def nonce(self) -> str:
        return b32encode(self._rng.randbytes(10)).decode().lower()

    def incarnation(self) -> str:
        return b32encode(self._rng.randbytes(5)).decode().lower()


T = TypeVar("T")


class _OffloadedCall(NamedTuple):
    work: Callable[[], Any]
    future: asyncio.Future[Any]


class SimOffload:
    """Runs offloaded work in order, without threads. Each item takes `delay_ms()` of virtual time, drawn when its turn comes,
    and then runs at one instant.

    When `alive()` becomes false, the process was killed: queued work does not run, and its waiters are cancelled, also those
    that come later. A cancelled task ends without a reported failure, and its `finally` blocks run.
    """

    def __init__(self, delay_ms: Callable[[], int], alive: Callable[[], bool]) -> None:
        self._delay_ms, self._alive = delay_ms, alive
        self._queue: deque[_OffloadedCall] = deque()
        self._idle: asyncio.Event | None = None
        """Present while work is queued; set when the queue becomes empty."""
        self._closed = False

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        if self._closed:
            raise OffloadClosed("the offload is closed", "restart the component")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not self._alive():
            future.cancel()
            return future
        self._queue.append(_OffloadedCall(work, future))
        if self._idle is None:
            self._idle = asyncio.Event()
            self._begin_next()
        return future

    async def close(self) -> None:
        self._closed = True
        if self._idle is not None:
            await self._idle.wait()

    def _begin_next(self) -> None:
        delay_ms = self._delay_ms()
        if delay_ms < 0:
            raise ValueError(f"delay_ms() returned {delay_ms}; it must be 0 or more")
        # A timer, not a task: the waiter or the caller may be cancelled, and the work must still run.
        asyncio.get_running_loop().call_later(delay_ms / 1000, self._run_first)

    def _run_first(self) -> None:
        if self._alive():
            call = self._queue.popleft()
            _run_call(call, self._alive)
        if not self._alive():
            for call in self._queue:
                call.future.cancel()
            self._queue.clear()
        if self._queue:
            self._begin_next()
        elif self._idle is not None:
            self._idle.set()
            self._idle = None


def _run_call(call: _OffloadedCall, alive: Callable[[], bool]) -> None:
    try:
        result = call.work()
    except (KeyboardInterrupt, SystemExit):
        raise  # end the simulator itself; they are no failure of the simulated work
    except BaseException as error:  # noqa: BLE001 - any exception is passed to the waiter
        _fail_call(call.future, error, alive)
    else:
        if not alive():  # the work itself ended its process, so no result is delivered
            call.future.cancel()
        elif not call.future.done():
            call.future.set_result(result)


def _fail_call(future: asyncio.Future[Any], error: BaseException, alive: Callable[[], bool]) -> None:
    if not alive():
        future.cancel()
    elif future.done():
        # The waiter was cancelled, but its work failed: report the failure instead of dropping it.
        failure_context = {"message": "work failed after its waiter was cancelled", "exception": error}
        future.get_loop().call_exception_handler(failure_context)
    elif isinstance(error, StopIteration):  # asyncio futures reject StopIteration, because it would end the awaiting coroutine
        wrapped = RuntimeError("work raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
