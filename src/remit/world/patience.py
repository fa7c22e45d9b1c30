"""Who has waited for too long? One timer for all long waits; what is done about it is theirs.

Almost none of them comes to its end, and a timer costs more than most of what is waited for. Whose time is over hears it a tick
late at most.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Final, Protocol

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
