"""What does a simulated machine take for the time? Skewed, drifting clocks, and names that are the same in every run."""

from __future__ import annotations

import asyncio
from base64 import b32encode
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Final

from remit.simulate.loop import SimLoop
from remit.simulate.lots import stream
from remit.world.patience import Bounded

_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)


class SimClock:
    """One machine's clock. It never goes back and goes on through a freeze; only its speed and its start are its own.

    `rate` 1.01 runs one percent fast. Changing it keeps the reading: a clock that is corrected is slewed, not set.
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
        shown = _EPOCH + timedelta(seconds=self._loop.time(), milliseconds=self.wall_offset_ms)
        return shown.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"

    async def sleep_ms(self, ms: int) -> None:
        if ms < 0:
            raise ValueError(f"cannot sleep {ms} ms")
        until_ms = self.now_ms() + ms
        left_ms = ms
        if not left_ms:
            await asyncio.sleep(0)
        while left_ms > 0:
            await asyncio.sleep(left_ms / (1000 * self._rate))
            left_ms = until_ms - self.now_ms()

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        return _Within(self._loop, ms / (1000 * self._rate))

    # -- what faults do to it --------------------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        return self._rate

    def drift(self, rate: float) -> None:
        now_s = self._loop.time()
        self._base_ms += (now_s - self._since_s) * 1000 * self._rate
        self._since_s, self._rate = now_s, rate

    def reboot(self) -> None:
        """Counts from nothing again; instants of before cannot be compared."""
        self._boots += 1
        self._base_ms, self._since_s = 0.0, self._loop.time()


class _Within(Bounded):
    """By a timer of its own: to the instant."""

    __slots__ = ("_delay_s", "_handle", "_loop")

    def __init__(self, loop: SimLoop, delay_s: float) -> None:
        self._loop, self._delay_s = loop, delay_s

    def _begin(self) -> None:
        loop, delay_s = self._loop, self._delay_s
        self._handle = loop.call_later(delay_s, self.over) if delay_s > 0 else loop.call_soon(self.over)

    def _end(self) -> None:
        self._handle.cancel()


class SeededIds:
    """Names that nobody else has in this run, and that are the same in the next."""

    def __init__(self, seed: str) -> None:
        self._lots = stream(seed)

    def nonce(self) -> str:
        return b32encode(self._lots.randbytes(10)).decode().lower()

    def incarnation(self) -> str:
        return b32encode(self._lots.randbytes(5)).decode().lower()
