"""What time is it on this machine? Reads the system's clocks; nothing is scheduled or decided here."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from remit.world.patience import Patience, Within
from remit.world.promises import NoBoot

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
