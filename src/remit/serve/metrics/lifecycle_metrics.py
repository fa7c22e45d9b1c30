"""Replica phase latency and attempt counts, from the watch cache.

Seen from the board: nothing is asked.

A replica counts from when the board first showed it pending, also for a new attempt. What was pending when this server began
is not counted: nobody here knows since when.
"""

from __future__ import annotations

from typing import Any, Final

from remit.model.counters import FEW, LONG_SECONDS, Buckets, Counts
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import Board
from remit.world.interfaces import Clock

PENDING_MAX: Final = 200_000
"""Of so many it is known since when they wait; those who come while there are more are not counted."""

_HAS_RUN: Final = (Phase.RUNNING, Phase.FINISHED)
"""What is over before that it runs could be told finishes right away."""


class Passages:
    """Satisfies `board.Listener`."""

    def __init__(self, board: Board, clock: Clock) -> None:
        self._clock = clock
        self._since_ms: dict[str, int] = {}
        self._listed = False
        self._board = board
        self.bound, self.started, self.ready = Buckets(LONG_SECONDS), Buckets(LONG_SECONDS), Buckets(LONG_SECONDS)
        """From pending to bound; from bound to running; from bound to ready."""
        self._bound_ms: dict[str, int] = {}
        self.attempts = Buckets(FEW)
        self.entered = Counts(Phase)
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        if type(new) is not Replica:
            if type(old) is Replica:
                self._since_ms.pop(key, None)
                self._bound_ms.pop(key, None)
            return
        phase = new.status.phase
        if old is not None and old.status.phase is phase:
            return
        self.entered.add(phase)
        if phase is Phase.PENDING:
            if self._listed and len(self._since_ms) < PENDING_MAX:
                self._since_ms[key] = self._clock.now_ms()
        elif phase is Phase.BOUND:
            self._place(key)
        elif phase in _HAS_RUN and old is not None and old.status.phase is Phase.STARTING:
            self._note(key, self.started)
        elif phase is Phase.READY:
            self._note(key, self.ready)
            self._bound_ms.pop(key, None)
        elif phase is Phase.RELEASED:
            self._since_ms.pop(key, None)
            self._bound_ms.pop(key, None)
            self.attempts.add(new.status.attempt)

    def reached(self) -> None:
        """What the first list showed was there before."""
        self._listed = True

    def _place(self, key: str) -> None:
        now_ms, since_ms = self._clock.now_ms(), self._since_ms.pop(key, None)
        if since_ms is not None:
            self.bound.add((now_ms - since_ms) / 1000)
        if len(self._bound_ms) < PENDING_MAX:
            self._bound_ms[key] = now_ms

    def _note(self, key: str, spread: Buckets) -> None:
        since_ms = self._bound_ms.get(key)
        if since_ms is not None:
            spread.add((self._clock.now_ms() - since_ms) / 1000)
