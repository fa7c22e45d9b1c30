"""Work queue by key with backoff, a token bucket, and detection of repeatedly undone actions. Reads no clock.

At most one reconcile per key runs at a time. A key is due when it changed or its time has come. It is *held* for two
reasons, both of which must have passed:

- **a revision**: an action for it was accepted. Until the watch cache has reached that revision, a reconcile would not see the
  action's effect and would request it again.
- **a backoff**: an action was refused or not answered. The backoff doubles up to a limit, with full jitter. A change of the
  object shortens it to the first backoff, without resetting the failure count. Retries of all keys share one budget.

A key whose actions were all refused or unanswered for long enough is *stuck*. It is reported once, and retried at the
slowest rate.

`UndoDetector` counts actions by identifier. A level-triggered controller repeats whatever was undone, so two controllers
with opposite goals would run forever. An action that was applied twice and is requested a third time has been undone twice.
It is reported once, and not repeated until its identifier changes (because the object changed) or a long pause has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Final, NamedTuple

from msgspec import Struct

from remit.client.retry import RetryBudget

_DOUBLINGS_MAX: Final = 20


class BackoffPolicy(NamedTuple):
    """Backoff of a key after failures: first and maximum. `stuck_after_ms` is when a key counts as stuck, `slow_ms` its backoff
    then.
    """

    base_ms: int = 100
    cap_ms: int = 10_000
    stuck_after_ms: int = 300_000
    slow_ms: int = 30_000


class _KeyState(Struct, gc=False):
    """State of a key. Most keys have no entry most of the time."""

    busy: bool = False
    dirty: bool = False
    failures: int = 0
    failing_ms: int = -1
    reported: bool = False
    next_run_ms: int = -1
    paused: bool = False
    at_revision: int = 0

    @property
    def idle(self) -> bool:
        return not (self.busy or self.dirty or self.failures or self.next_run_ms >= 0 or self.at_revision)


class WorkQueue:
    """The queue of one loop. `jitter(n)` draws a random integer from 0 to `n` inclusive."""

    def __init__(
        self, jitter: Callable[[int], int], backoff: BackoffPolicy = BackoffPolicy(), budget: RetryBudget | None = None
    ) -> None:
        self._jitter, self._backoff = jitter, backoff
        self._budget = RetryBudget() if budget is None else budget
        self._states: dict[str, _KeyState] = {}
        self._ready: dict[str, None] = {}
        self._resync: dict[str, None] = {}
        """Keys queued by a resync. They are reconciled when no changed key is due."""
        self._timers: list[tuple[int, int, str]] = []
        self._revision_holds: list[tuple[int, int, str]] = []
        self._count = 0
        self._stuck: dict[str, None] = {}

    def __len__(self) -> int:
        """Number of keys known to be due."""
        return len(self._ready)

    # -- adding keys -----------------------------------------------------------------------------------------------------------

    def enqueue(self, key: str, now_ms: int) -> None:
        """Queue a key after a change of something that it depends on."""
        state = self._states.get(key)
        if state is None:
            self._ready[key] = None
        elif state.busy:
            state.dirty = True
        elif state.paused:
            self._schedule(key, state, now_ms + 1 + self._jitter(self._backoff.base_ms))
        elif not state.at_revision:
            self._ready[key] = None

    def resync(self, keys: Iterable[str]) -> None:
        """Queue all keys behind the changed ones: there may be very many, and most need no action."""
        self._resync.update(dict.fromkeys(keys))

    def enqueue_at(self, key: str, at_ms: int) -> None:
        """Queue a key for this time at the latest."""
        self._schedule(key, self._states.setdefault(key, _KeyState()), at_ms)

    # -- taking keys -----------------------------------------------------------------------------------------------------------

    def take(self, now_ms: int, revision: int) -> str | None:
        """Return a key that is due, given the revision of the watch cache. The key is busy until its result is reported."""
        self._wake(now_ms, revision)
        while (key := self._next(now_ms)) is not None:
            state = self._states.setdefault(key, _KeyState())
            if state.failures and self._budget.take(now_ms, 0) is None:
                state.paused = True
                self._schedule(key, state, now_ms + self._backoff.base_ms + self._jitter(self._backoff.cap_ms))
                continue
            if not state.failures:
                self._budget.on_first_attempt(now_ms)
            state.busy, state.dirty = True, False
            return key
        return None

    def _next(self, now_ms: int) -> str | None:
        while not self._ready and self._resync:
            resync_key = next(iter(self._resync))
            del self._resync[resync_key]
            self.enqueue(resync_key, now_ms)
        key = next(iter(self._ready), None)
        if key is not None:
            del self._ready[key]
            self._resync.pop(key, None)
        return key

    def is_waiting_for(self, revision: int) -> bool:
        """Return whether a key is held until the watch cache reaches this revision."""
        return bool(self._revision_holds) and self._revision_holds[0][0] <= revision

    def next_run_ms(self) -> int | None:
        """Return the time at which the next key becomes due without a change."""
        while self._timers:
            at_ms, _, key = self._timers[0]
            state = self._states.get(key)
            if state is not None and state.next_run_ms == at_ms:
                return at_ms
            heappop(self._timers)
        return None

    # -- results ---------------------------------------------------------------------------------------------------------------

    def done(self, key: str) -> None:
        """The key was reconciled and needs no action."""
        state = self._states[key]
        state.failures, state.failing_ms, state.reported, state.paused = 0, -1, False, False
        self._stuck.pop(key, None)
        self._finish(key, state)

    def accepted(self, key: str, revision: int, cache_revision: int) -> None:
        """All actions were accepted, the last at `revision`. The watch cache is at `cache_revision`."""
        state = self._states[key]
        state.failures, state.failing_ms, state.reported, state.paused, state.dirty = 0, -1, False, False, True
        self._stuck.pop(key, None)
        self._hold(key, state, revision, cache_revision)
        self._finish(key, state)

    def failed(self, key: str, now_ms: int, revision: int = 0, cache_revision: int = 0, *, progress: bool = False) -> None:
        """An action was refused or not answered. `progress`: another action of the key was accepted."""
        state = self._states[key]
        state.failures = 1 if progress else state.failures + 1
        if progress or state.failing_ms < 0:
            state.failing_ms = now_ms
        backoff = self._backoff
        if now_ms - state.failing_ms >= backoff.stuck_after_ms:
            if not state.reported:
                state.reported = True
                self._stuck[key] = None
            pause_ms = backoff.slow_ms // 2 + self._jitter(backoff.slow_ms // 2)
        else:
            pause_ms = 1 + self._jitter(min(backoff.cap_ms, backoff.base_ms << min(state.failures - 1, _DOUBLINGS_MAX)))
        state.paused, state.next_run_ms = True, -1
        self._schedule(key, state, now_ms + pause_ms)
        self._hold(key, state, revision, cache_revision)
        state.dirty = False
        self._finish(key, state)

    def take_stuck(self) -> Iterator[str]:
        """Yield keys that became stuck since the last call."""
        keys, self._stuck = self._stuck, {}
        yield from keys

    # -- holds -----------------------------------------------------------------------------------------------------------------

    def _hold(self, key: str, state: _KeyState, revision: int, cache_revision: int) -> None:
        if revision > max(cache_revision, state.at_revision):
            state.at_revision = revision
            self._count += 1
            heappush(self._revision_holds, (revision, self._count, key))

    def _schedule(self, key: str, state: _KeyState, at_ms: int) -> None:
        if state.next_run_ms < 0 or at_ms < state.next_run_ms:
            state.next_run_ms = at_ms
            self._count += 1
            heappush(self._timers, (at_ms, self._count, key))

    def _finish(self, key: str, state: _KeyState) -> None:
        state.busy = False
        if state.dirty and not state.at_revision:
            state.dirty = False
            self._ready[key] = None
        elif state.at_revision:
            state.dirty = True
        if state.idle and key not in self._ready:
            del self._states[key]

    def _wake(self, now_ms: int, revision: int) -> None:
        while self._timers and self._timers[0][0] <= now_ms:
            at_ms, _, key = heappop(self._timers)
            state = self._states.get(key)
            if state is None or state.next_run_ms != at_ms:
                continue  # the key was queued earlier, or is done
            state.next_run_ms, state.paused = -1, False
            self._release(key, state)
        while self._revision_holds and self._revision_holds[0][0] <= revision:
            at_revision, _, key = heappop(self._revision_holds)
            state = self._states.get(key)
            if state is not None and state.at_revision == at_revision:
                state.at_revision = 0
                self._release(key, state)

    def _release(self, key: str, state: _KeyState) -> None:
        """End one of the key's holds, and make it due if no other remains."""
        if state.busy:
            state.dirty = True
        elif not state.paused and not state.at_revision:
            state.dirty = False
            self._ready[key] = None


_TOKEN: Final = 1_000_000


class TokenBucket:
    """Token bucket that holds at most `burst` tokens; each call of `wait_ms` gives the refill rate.

    Counts millionths of a token, so that the arithmetic is exact.
    """

    def __init__(self, burst: int) -> None:
        self._full = self._level = burst * _TOKEN
        self._at_ms: int | None = None

    def wait_ms(self, now_ms: int, milli_per_s: int) -> int:
        """Take a token and return 0, or return the time until one is available. The bucket is refilled
        for the time since the last call, at the rate of this call.
        """
        passed_ms = 0 if self._at_ms is None else max(0, now_ms - self._at_ms)
        self._level, self._at_ms = min(self._full, self._level + passed_ms * milli_per_s), now_ms
        if self._level >= _TOKEN:
            self._level -= _TOKEN
            return 0
        return -(-(_TOKEN - self._level) // max(1, milli_per_s))


UNDONE_MAX: Final = 2
ACTIONS_TRACKED_MAX: Final = 50_000


class _AppliedAction(NamedTuple):
    times: int
    last_ms: int
    reported: bool = False


class UndoDetector:
    """Counts how often each action was applied. `pause_ms`: an action not applied for this long is forgotten."""

    def __init__(self, pause_ms: int) -> None:
        self._pause_ms = pause_ms
        self._applied: dict[str, _AppliedAction] = {}

    def is_held(self, undo_key: str, now_ms: int) -> bool:
        """Return whether the action was undone too often to be repeated now."""
        applied = self._recent(undo_key, now_ms)
        return applied is not None and applied.times >= UNDONE_MAX

    def take_unreported(self, undo_key: str) -> bool:
        """Return True once for each held action, so that it is reported only once."""
        applied = self._applied.get(undo_key)
        if applied is None or applied.reported:
            return False
        self._applied[undo_key] = applied._replace(reported=True)
        return True

    def record(self, undo_key: str, now_ms: int) -> None:
        """Record that the action was accepted."""
        applied = self._recent(undo_key, now_ms)
        self._applied.pop(undo_key, None)  # re-inserted at the end: the oldest entries are evicted first
        self._applied[undo_key] = (
            _AppliedAction(1, now_ms) if applied is None else _AppliedAction(applied.times + 1, now_ms, applied.reported)
        )
        while len(self._applied) > ACTIONS_TRACKED_MAX:
            del self._applied[next(iter(self._applied))]

    def _recent(self, undo_key: str, now_ms: int) -> _AppliedAction | None:
        applied = self._applied.get(undo_key)
        if applied is not None and now_ms - applied.last_ms >= self._pause_ms:
            del self._applied[undo_key]
            return None
        return applied
