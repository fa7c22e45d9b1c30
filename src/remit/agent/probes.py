"""Probe thresholds and restart backoff (pure).

Counts probe results; probes are run in probe_runner.py, and time is an argument.

The startup probe comes first: the other two are not run until it has passed once. A ready process stays ready until its
readiness probe has failed `failures` times in a row; one success makes it ready again. A startup or liveness probe that
fails that often ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from remit.model.kinds import Probe, Probes

ProbeName = Literal["start", "ready", "live"]


class ProbeState:
    """State of one probe of one process."""

    def __init__(self, probe: Probe, now_ms: int) -> None:
        self.probe = probe
        self.failures = 0
        self.passed = False
        """It has passed, and has not failed too often since."""
        self.is_decided = False
        """It has passed or reached its failure limit at least once."""
        self.next_run_ms = now_ms
        self.detail = ""

    def record(self, ok: bool, detail: str, now_ms: int) -> None:
        self.next_run_ms = now_ms + int(self.probe.period)
        self.detail = detail
        if ok:
            self.failures, self.passed, self.is_decided = 0, True, True
            return
        self.failures += 1
        if self.failures >= self.probe.failures:
            self.passed, self.is_decided = False, True


class ProcessHealth:
    """Probe states of one process, after `restarts` restarts of its attempt. `started`: its startup probe has passed before."""

    def __init__(self, probes: Probes, now_ms: int, restarts: int = 0, *, started: bool = False) -> None:
        self.restarts = restarts
        configured: tuple[tuple[ProbeName, Probe | None], ...] = (
            ("start", None if started else probes.start),
            ("ready", probes.ready),
            ("live", probes.live),
        )
        self.states: dict[ProbeName, ProbeState] = {
            name: ProbeState(probe, now_ms) for name, probe in configured if probe is not None
        }

    @property
    def has_started(self) -> bool:
        start = self.states.get("start")
        return start is None or start.passed

    @property
    def is_ready(self) -> bool:
        ready = self.states.get("ready")
        return self.has_started and (ready is None or ready.passed)

    @property
    def is_unready(self) -> bool:
        """Return whether the process is known not to be ready. Before its probe has passed or failed often enough, that is
        unknown.
        """
        ready = self.states.get("ready")
        return ready is not None and ready.is_decided and not ready.passed

    @property
    def is_dead(self) -> bool:
        fatal = [self.states[name] for name in ("start", "live") if name in self.states]
        return any(state.is_decided and not state.passed for state in fatal)

    @property
    def failure_message(self) -> str:
        return next((f"{name} probe failed: {state.detail}" for name, state in self.states.items() if state.failures), "")

    def due_probes(self, now_ms: int) -> Iterator[ProbeName]:
        for name, state in self.states.items():
            if state.next_run_ms <= now_ms and self._is_enabled(name, state):
                yield name

    def next_run_ms(self) -> int | None:
        return min((state.next_run_ms for name, state in self.states.items() if self._is_enabled(name, state)), default=None)

    def _is_enabled(self, name: ProbeName, state: ProbeState) -> bool:
        return not state.passed if name == "start" else self.has_started

    def mark_running(self, name: ProbeName, now_ms: int) -> None:
        """Mark a probe as running, so that it is not started again before its timeout."""
        state = self.states[name]
        state.next_run_ms = now_ms + int(state.probe.timeout) + int(state.probe.period)

    def record(self, name: ProbeName, ok: bool, detail: str, now_ms: int) -> None:
        self.states[name].record(ok, detail, now_ms)


STABLE_RUN_MS: Final = 60_000
"""A process that ran this long had started properly: its backoff is reset."""

_DOUBLINGS_MAX: Final = 30


def restart_after_ms(
    when: Literal["always", "failure", "never"],
    *,
    failed: bool,
    restarts: int,
    ran_ms: int,
    backoff_ms: int,
    backoff_max_ms: int,
    limit: int,
) -> int | None:
    """Return the delay before a restart, counted from the end of the process; None: no restart. `restarts` is their number so
    far within the attempt.
    """
    if when == "never" or (when == "failure" and not failed):
        return None
    if limit and restarts >= limit:
        return None
    if ran_ms >= STABLE_RUN_MS:
        return backoff_ms
    return min(max(backoff_ms, backoff_max_ms), backoff_ms << min(restarts, _DOUBLINGS_MAX))
