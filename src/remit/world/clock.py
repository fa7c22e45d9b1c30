"""Boot-time clock, and one shared timer for long timeouts.

One timer for all long waits; what is done about it is theirs.

Almost none of them comes to its end, and a timer costs more than most of what is waited for. Whose time is over hears it a tick
late at most.

Reads the system's clocks; nothing is scheduled or decided here.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Final, Protocol

from remit.world.interfaces import NoBoot

TICK_S: Final = 0.25


class Waiter(Protocol):
    """`due_s` is of the event loop's time."""

    due_s: float

    def over(self) -> None:
        """Its time is. It is called once, and never after it was let go."""
        ...


class Patience:
    """Of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._all: dict[Waiter, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_s = inf

    def keep(self, one: Waiter, for_s: float) -> None:
        """Whoever is kept already waits anew."""
        due_s = one.due_s = self.loop.time() + for_s
        self._all[one] = None
        if due_s < self._looks_s:
            self._look_at(due_s)

    def let_go(self, one: Waiter) -> None:
        self._all.pop(one, None)

    def _look_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_s = at_s
        self._timer = self.loop.call_at(at_s, self._look)

    def _look(self) -> None:
        now_s = self.loop.time()
        self._timer, self._looks_s = None, inf
        for one in [one for one in self._all if one.due_s <= now_s]:
            if self._all.pop(one, self) is None:  # nobody before it has let it go meanwhile
                one.over()
        if self._all:
            self._look_at(max(now_s + TICK_S, min(one.due_s for one in self._all)))


class Bounded:
    """As much of `asyncio.timeout` as is asked of one. Who sets the bound is told by `over`."""

    __slots__ = ("_before", "_late", "_task")

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be told that its time is over")
        self._task, self._before, self._late = task, task.cancelling(), False
        self._begin()

    def over(self) -> None:
        self._late = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end()
        if self._late and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _begin(self) -> None:
        """Have `over` called in time."""
        raise NotImplementedError

    def _end(self) -> None:
        """It need not be called any more."""
        raise NotImplementedError


class Within(Bounded):
    """By one timer for many."""

    __slots__ = ("_for_s", "_patience", "due_s")

    due_s: float

    def __init__(self, patience: Patience, for_s: float) -> None:
        self._patience, self._for_s = patience, for_s

    def _begin(self) -> None:
        self._patience.keep(self, self._for_s)

    def _end(self) -> None:
        self._patience.let_go(self)


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE: Final = Path("/proc/self/ns/time")
_TIME_NAMESPACE_FIRST: Final = 0xEFFFFFFA
"""The inode of the namespace that the machine booted into; the kernel fixes it (PROC_TIME_INIT_INO)."""

_NAP_NS_MAX: Final = 1_000_000_000
"""The event loop's clock stands still during a suspend. Short naps wake a sleeper within a second of the resume."""

_LONG_MS: Final = 5_000
"""A bound that is as long as this or longer may come a quarter of a second late."""


class BootClock:
    """CLOCK_BOOTTIME: counts from boot, suspend included, the same for every process of the machine."""

    def __init__(self) -> None:
        self._boot = _boot()
        self._second, self._said = -1, ""
        self._patience: Patience | None = None

    def now_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def now_ns(self) -> int:
        """The same instant, finer: for measuring, which nothing decides by."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def boot(self) -> str:
        return self._boot

    def wall(self) -> str:
        """Asked for at every turn, and most of it is that of the last time."""
        second, ns = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            self._second, self._said = second, datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")
        return f"{self._said}.{ns // 1_000_000:03d}Z"

    async def sleep_ms(self, ms: int) -> None:
        if ms < 0:
            raise ValueError(f"cannot sleep {ms} ms")
        until_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + ms * 1_000_000
        left_ns = ms * 1_000_000
        await asyncio.sleep(0)
        # A timer of the event loop may fire a little early by this clock, so the clock has the last word.
        while left_ns > 0:
            await asyncio.sleep(min(left_ns, _NAP_NS_MAX) / 1e9)
            left_ns = until_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(ms / 1000) if ms < _LONG_MS else Within(self.patience(), ms / 1000)

    def patience(self) -> Patience:
        """For long waits, of the event loop that runs now."""
        loop = asyncio.get_running_loop()
        if self._patience is None or self._patience.loop is not loop:
            self._patience = Patience(loop)
        return self._patience


def stopwatch_ns() -> int:
    """For measuring how long something took, in this process; nothing decides by it."""
    return time.perf_counter_ns()


def _boot() -> str:
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError as error:
        raise NoBoot(f"{_BOOT_ID} cannot be read ({error.strerror})", "mount /proc, and run on Linux") from error
    if not boot:
        raise NoBoot(f"{_BOOT_ID} is empty", "mount a real /proc")
    # A time namespace shifts CLOCK_BOOTTIME but not the boot id: instants from inside and outside must not be compared.
    space = _time_namespace()
    return boot if space == _TIME_NAMESPACE_FIRST else f"{boot}-{space:x}"


def _time_namespace() -> int:
    try:
        return _TIME_NAMESPACE.stat().st_ino
    except OSError:  # a kernel without time namespaces has one time for all
        return _TIME_NAMESPACE_FIRST
