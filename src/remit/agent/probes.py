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
    """Probe states of one process. `of` counts the restarts within the attempt. `started`: its startup probe has passed before.
    """

    def __init__(self, probes: Probes, now_ms: int, restarts: int = 0, *, started: bool = False) -> None:
        self.restarts = restarts
        wanted: tuple[tuple[ProbeName, Probe | None], ...] = (
            ("start", None if started else probes.start),
            ("ready", probes.ready),
            ("live", probes.live),
        )
        self.states: dict[ProbeName, ProbeState] = {which: ProbeState(probe, now_ms) for which, probe in wanted if probe is not None}

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
        ended_by = [self.states[which] for which in ("start", "live") if which in self.states]
        return any(one.is_decided and not one.passed for one in ended_by)

    @property
    def failure_message(self) -> str:
        return next((f"{which} probe failed: {one.detail}" for which, one in self.states.items() if one.failures), "")

    def due_probes(self, now_ms: int) -> Iterator[ProbeName]:
        for which, one in self.states.items():
            if one.next_run_ms <= now_ms and self._is_enabled(which, one):
                yield which

    def next_run_ms(self) -> int | None:
        return min((one.next_run_ms for which, one in self.states.items() if self._is_enabled(which, one)), default=None)

    def _is_enabled(self, which: ProbeName, one: ProbeState) -> bool:
        return not one.passed if which == "start" else self.has_started

    def mark_running(self, which: ProbeName, now_ms: int) -> None:
        """Mark a probe as running, so that it is not started again before its timeout."""
        one = self.states[which]
        one.next_run_ms = now_ms + int(one.probe.timeout) + int(one.probe.period)

    def record(self, which: ProbeName, ok: bool, detail: str, now_ms: int) -> None:
        self.states[which].record(ok, detail, now_ms)


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
