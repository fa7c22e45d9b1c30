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
        self.failed = 0
        self.passed = False
        """It has passed, and has not failed too often since."""
        self.judged = False
        """It has passed or reached its failure limit at least once."""
        self.due_ms = now_ms
        self.said = ""

    def told(self, ok: bool, said: str, now_ms: int) -> None:
        self.due_ms = now_ms + int(self.probe.period)
        self.said = said
        if ok:
            self.failed, self.passed, self.judged = 0, True, True
            return
        self.failed += 1
        if self.failed >= self.probe.failures:
            self.passed, self.judged = False, True


class ProcessHealth:
    """Probe states of one process. `of` counts the restarts within the attempt. `started`: its startup probe has passed before.
    """

    def __init__(self, probes: Probes, now_ms: int, of: int = 0, *, started: bool = False) -> None:
        self.of = of
        wanted: tuple[tuple[ProbeName, Probe | None], ...] = (
            ("start", None if started else probes.start),
            ("ready", probes.ready),
            ("live", probes.live),
        )
        self.tries: dict[ProbeName, ProbeState] = {which: ProbeState(probe, now_ms) for which, probe in wanted if probe is not None}

    @property
    def has_started(self) -> bool:
        start = self.tries.get("start")
        return start is None or start.passed

    @property
    def is_ready(self) -> bool:
        ready = self.tries.get("ready")
        return self.has_started and (ready is None or ready.passed)

    @property
    def is_unready(self) -> bool:
        """Return whether the process is known not to be ready. Before its probe has passed or failed often enough, that is
        unknown.
        """
        ready = self.tries.get("ready")
        return ready is not None and ready.judged and not ready.passed

    @property
    def is_dead(self) -> bool:
        ended_by = [self.tries[which] for which in ("start", "live") if which in self.tries]
        return any(one.judged and not one.passed for one in ended_by)

    @property
    def said(self) -> str:
        return next((f"{which} probe failed: {one.said}" for which, one in self.tries.items() if one.failed), "")

    def due(self, now_ms: int) -> Iterator[ProbeName]:
        for which, one in self.tries.items():
            if one.due_ms <= now_ms and self._asked(which, one):
                yield which

    def next_ms(self) -> int | None:
        return min((one.due_ms for which, one in self.tries.items() if self._asked(which, one)), default=None)

    def _asked(self, which: ProbeName, one: ProbeState) -> bool:
        return not one.passed if which == "start" else self.has_started

    def asked(self, which: ProbeName, now_ms: int) -> None:
        """Mark a probe as running, so that it is not started again before its timeout."""
        one = self.tries[which]
        one.due_ms = now_ms + int(one.probe.timeout) + int(one.probe.period)

    def told(self, which: ProbeName, ok: bool, said: str, now_ms: int) -> None:
        self.tries[which].told(ok, said, now_ms)


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
