"""Replica phase latency and attempt counts, from the watch cache.

A replica is timed from when the watch cache first shows it as pending; each new attempt starts again. Replicas that were
pending when the server started are not timed, because their start is unknown.
"""

from __future__ import annotations

from typing import Any, Final

from remit.model.counters import LONG_SECONDS_BUCKETS, SMALL_COUNT_BUCKETS, BoundedCounter, Histogram
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import WatchCache
from remit.world.interfaces import Clock

TRACKED_MAX: Final = 200_000
"""Replicas timed at once. While there are more, new ones are not timed."""

_HAS_RUN: Final = (Phase.RUNNING, Phase.FINISHED)
"""A replica that ends before it was reported running goes to finished directly."""


class LifecycleMetrics:
    """Times replicas from pending to bound, running and ready. Satisfies `observation.watch_cache.CacheListener`."""

    def __init__(self, watch_cache: WatchCache, clock: Clock) -> None:
        self._clock = clock
        self._pending_since_ms: dict[str, int] = {}
        self._listed = False
        self._watch_cache = watch_cache
        self.bind_durations, self.start_durations, self.ready_durations = (
            Histogram(LONG_SECONDS_BUCKETS),
            Histogram(LONG_SECONDS_BUCKETS),
            Histogram(LONG_SECONDS_BUCKETS),
        )
        """Time from pending to bound, from bound to running, and from bound to ready."""
        self._bound_since_ms: dict[str, int] = {}
        self.attempts = Histogram(SMALL_COUNT_BUCKETS)
        self.phase_entries = BoundedCounter(Phase)
        watch_cache.subscribe(self)

    def on_change(self, key: str, old: Any, new: Any) -> None:
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

    def on_commit(self) -> None:
        """The first call ends the initial list, whose replicas existed before."""
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
