"""Boot-time clock, and one shared timer for long timeouts.

Almost all long timeouts are cancelled before they expire, and an event-loop timer for each of them would cost more than most
of the operations it guards. `SharedTimer` checks all of them with one timer instead, at the price of firing up to `TICK_S`
late.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Final, Protocol

from remit.world.interfaces import BootIdUnavailable

TICK_S: Final = 0.25


class TimerEntry(Protocol):
    """An entry of a `SharedTimer`. `due_s` is an instant of the event loop's time."""

    due_s: float

    def expired(self) -> None:
        """Called once when the timeout expires, and never after the entry was cancelled."""
        ...


class SharedTimer:
    """One timer for many coarse timeouts of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._entries: dict[TimerEntry, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_check_s = inf

    def schedule(self, entry: TimerEntry, for_s: float) -> None:
        """Schedule `entry` to expire in `for_s` seconds. An entry that is already scheduled is rescheduled."""
        due_s = entry.due_s = self.loop.time() + for_s
        self._entries[entry] = None
        if due_s < self._next_check_s:
            self._check_at(due_s)

    def cancel(self, entry: TimerEntry) -> None:
        self._entries.pop(entry, None)

    def _check_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_check_s = at_s
        self._timer = self.loop.call_at(at_s, self._check)

    def _check(self) -> None:
        now_s = self.loop.time()
        self._timer, self._next_check_s = None, inf
        for entry in [entry for entry in self._entries if entry.due_s <= now_s]:
            if self._entries.pop(entry, self) is None:  # skip entries that an earlier callback of this loop has cancelled
                entry.expired()
        if self._entries:
            self._check_at(max(now_s + TICK_S, min(entry.due_s for entry in self._entries)))


class TaskTimeout:
    """A minimal `asyncio.timeout`. A subclass arranges that `expired` is called when the timeout has passed."""

    __slots__ = ("_cancelling_before", "_has_expired", "_task")

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a timeout needs a running task")
        self._task, self._cancelling_before, self._has_expired = task, task.cancelling(), False
        self._schedule()

    def expired(self) -> None:
        self._has_expired = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._cancel()
        if self._has_expired and self._task.uncancel() <= self._cancelling_before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _schedule(self) -> None:
        """Arrange for `expired` to be called."""
        raise NotImplementedError

    def _cancel(self) -> None:
        """Cancel the scheduled call of `expired`."""
        raise NotImplementedError


class SharedTimeout(TaskTimeout):
    """A timeout on a `SharedTimer`."""

    __slots__ = ("_for_s", "_timer", "due_s")

    due_s: float

    def __init__(self, timer: SharedTimer, for_s: float) -> None:
        self._timer, self._for_s = timer, for_s

    def _schedule(self) -> None:
        self._timer.schedule(self, self._for_s)

    def _cancel(self) -> None:
        self._timer.cancel(self)


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE: Final = Path("/proc/self/ns/time")
_TIME_NAMESPACE_FIRST: Final = 0xEFFFFFFA
"""Inode of the initial time namespace; fixed by the kernel (PROC_TIME_INIT_INO)."""

_SLEEP_STEP_NS_MAX: Final = 1_000_000_000
"""The event loop's clock stands still during a suspend. Sleeping in short steps wakes a sleeper within a second of the resume.
"""

_SHARED_TIMER_MS_MIN: Final = 5_000
"""Timeouts of this length or longer use the shared timer and may fire `TICK_S` late."""


class BootClock:
    """CLOCK_BOOTTIME: counts from boot, suspend included, and is the same for all processes of the machine."""

    def __init__(self) -> None:
        self._boot = _read_boot_id()
        self._second, self._formatted = -1, ""
        self._shared_timer: SharedTimer | None = None

    def now_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def now_ns(self) -> int:
        """Return the current instant in nanoseconds, for measurements only."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def boot(self) -> str:
        return self._boot

    def wall(self) -> str:
        """Formats the second only when it changes: this is called for every log line and record."""
        second, ns = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            self._second, self._formatted = second, datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")
        return f"{self._formatted}.{ns // 1_000_000:03d}Z"

    async def sleep_ms(self, ms: int) -> None:
        if ms < 0:
            raise ValueError(f"cannot sleep {ms} ms")
        until_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + ms * 1_000_000
        left_ns = ms * 1_000_000
        await asyncio.sleep(0)
        # An event-loop timer may fire slightly early by this clock, so check the clock itself.
        while left_ns > 0:
            await asyncio.sleep(min(left_ns, _SLEEP_STEP_NS_MAX) / 1e9)
            left_ns = until_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(ms / 1000) if ms < _SHARED_TIMER_MS_MIN else SharedTimeout(self.shared_timer(), ms / 1000)

    def shared_timer(self) -> SharedTimer:
        """Return the shared timer of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._shared_timer is None or self._shared_timer.loop is not loop:
            self._shared_timer = SharedTimer(loop)
        return self._shared_timer


def stopwatch_ns() -> int:
    """Return a counter for measuring durations within this process. No decision may depend on it."""
    return time.perf_counter_ns()


def _read_boot_id() -> str:
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError as error:
        raise BootIdUnavailable(f"{_BOOT_ID} cannot be read ({error.strerror})", "run on Linux with /proc mounted") from error
    if not boot:
        raise BootIdUnavailable(f"{_BOOT_ID} is empty", "mount a complete /proc")
    # A time namespace shifts CLOCK_BOOTTIME but not the boot id, so instants from inside and outside must not be compared.
    space = _time_namespace()
    return boot if space == _TIME_NAMESPACE_FIRST else f"{boot}-{space:x}"


def _time_namespace() -> int:
    try:
        return _TIME_NAMESPACE.stat().st_ino
    except OSError:  # a kernel without time namespaces has only one
        return _TIME_NAMESPACE_FIRST
