"""How does an agent come by a keeper? It starts one where there is none; what a keeper does is in keeper.py.

A keeper holds its lock while it lives, also while it is stopped. So one that does not answer and still has its lock is left
alone: a second one beside it would start again what it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from remit.world.promises import Busy, Disk, Missing, Order, Running, World, WorldError

BACKOFF_MS: Final = 250
BACKOFF_MS_MAX: Final = 15_000
STEADY_MS: Final = 60_000
"""One that lived for so long had come up well: the pauses begin anew."""


class Reviver:
    """Called whenever the keeper does not answer. `order` starts one, in a session of its own: it outlives this process."""

    def __init__(self, world: World, order: Order, lock: Path, tell: Callable[[str], None]) -> None:
        self._world, self._order, self._lock, self._tell = world, order, lock, tell
        self._started: Running | None = None
        self._started_ms = 0
        self._failures = 0
        self._not_before_ms = 0

    async def __call__(self) -> None:
        if self._started is not None and not self._world.runner.alive(self._started):
            ended = await self._world.runner.wait(self._started)
            self._tell(
                f"the keeper (process {self._started.pid}) has ended: {ended.code if ended.signal is None else ended.signal}"
            )
            self._started = None
        now_ms = self._world.clock.now_ms()
        if now_ms < self._not_before_ms or await self._world.offload(lambda: is_held(self._world.disk, self._lock)):
            return
        self._failures = 0 if now_ms - self._started_ms > STEADY_MS else self._failures + 1
        self._not_before_ms = now_ms + min(BACKOFF_MS_MAX, BACKOFF_MS << min(self._failures, 10))
        self._started_ms = now_ms
        try:
            self._started = await self._world.runner.start(self._order)
        except WorldError as error:
            self._tell(f"no keeper can be started: {error}")


def is_held(disk: Disk, lock: Path) -> bool:
    """Does somebody have this lock now?"""
    try:
        with disk.lock(lock):
            return False
    except Busy:
        return True
    except Missing:  # its directory is not there
        return False
