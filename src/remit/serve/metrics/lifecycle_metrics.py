"""Replica phase latency and attempt counts, from the watch cache.

Seen from the board: nothing is asked.

A replica counts from when the board first showed it pending, also for a new attempt. What was pending when this server began
is not counted: nobody here knows since when.
"""

from __future__ import annotations

from typing import Any, Final

from remit.model.counters import SMALL_COUNT_BUCKETS, LONG_SECONDS_BUCKETS, Histogram, BoundedCounter
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import Board
from remit.world.interfaces import Clock

TRACKED_MAX: Final = 200_000
"""Of so many it is known since when they wait; those who come while there are more are not counted."""

_HAS_RUN: Final = (Phase.RUNNING, Phase.FINISHED)
"""What is over before that it runs could be told finishes right away."""


class LifecycleMetrics:
    """Satisfies `board.Listener`."""

    def __init__(self, watch_cache: Board, clock: Clock) -> None:
        self._clock = clock
        self._pending_since_ms: dict[str, int] = {}
        self._listed = False
        self._watch_cache = watch_cache
        self.bind_durations, self.start_durations, self.ready_durations = Histogram(LONG_SECONDS_BUCKETS), Histogram(LONG_SECONDS_BUCKETS), Histogram(LONG_SECONDS_BUCKETS)
        """From pending to bound; from bound to running; from bound to ready."""
        self._bound_since_ms: dict[str, int] = {}
        self.attempts = Histogram(SMALL_COUNT_BUCKETS)
        self.phase_entries = BoundedCounter(Phase)
        watch_cache.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        if type(new) is not Replica:
            if type(old) is Replica:
                self._pending_since_ms.pop(key, None)
                self._bound_since_ms.pop(key, None)
            return
        phase = new.status.phase
        if old is not None and old.status.phase is phase:
            return
        self.phase_entries.add(phase)
        if phase is Phase.PENDING:
            if self._listed and len(self._pending_since_ms) < TRACKED_MAX:
                self._pending_since_ms[key] = self._clock.now_ms()
        elif phase is Phase.BOUND:
            self._record_bound(key)
        elif phase in _HAS_RUN and old is not None and old.status.phase is Phase.STARTING:
            self._record_since_bound(key, self.start_durations)
        elif phase is Phase.READY:
            self._record_since_bound(key, self.ready_durations)
            self._bound_since_ms.pop(key, None)
        elif phase is Phase.RELEASED:
            self._pending_since_ms.pop(key, None)
            self._bound_since_ms.pop(key, None)
            self.attempts.add(new.status.attempt)

    def reached(self) -> None:
        """What the first list showed was there before."""
        self._listed = True

    def _record_bound(self, key: str) -> None:
        now_ms, since_ms = self._clock.now_ms(), self._pending_since_ms.pop(key, None)
        if since_ms is not None:
            self.bind_durations.add((now_ms - since_ms) / 1000)
        if len(self._bound_since_ms) < TRACKED_MAX:
            self._bound_since_ms[key] = now_ms

    def _record_since_bound(self, key: str, histogram: Histogram) -> None:
        since_ms = self._bound_since_ms.get(key)
        if since_ms is not None:
            histogram.add((self._clock.now_ms() - since_ms) / 1000)
