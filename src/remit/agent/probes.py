"""Probe thresholds and restart backoff (pure).

What probes answered, counted; nobody is asked here, and time comes as an argument.

The start-up probe comes first: until it has passed once the other two are not asked. One that is ready stays so until it has
failed `failures` times in a row; one that is not is ready after one success. A start-up probe that fails so often, or a
liveness probe, ends it.

Arithmetic over how often and how long it ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from remit.model.kinds import Probe, Probes

Which = Literal["start", "ready", "live"]


class Tries:
    """One probe of one process."""

    def __init__(self, probe: Probe, now_ms: int) -> None:
        self.probe = probe
        self.failed = 0
        self.passed = False
        """Did it pass, and not fail too often since?"""
        self.judged = False
        """Has it passed, or failed too often, at least once?"""
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


class Health:
    """All probes of one start of a copy: the `of`th within its attempt. `started`: its start-up probe has passed before."""

    def __init__(self, probes: Probes, now_ms: int, of: int = 0, *, started: bool = False) -> None:
        self.of = of
        wanted: tuple[tuple[Which, Probe | None], ...] = (
            ("start", None if started else probes.start),
            ("ready", probes.ready),
            ("live", probes.live),
        )
        self.tries: dict[Which, Tries] = {which: Tries(probe, now_ms) for which, probe in wanted if probe is not None}

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
        """Is it known not to be ready? Until its probe has been answered often enough nothing is known."""
        ready = self.tries.get("ready")
        return ready is not None and ready.judged and not ready.passed

    @property
    def is_dead(self) -> bool:
        ended_by = [self.tries[which] for which in ("start", "live") if which in self.tries]
        return any(one.judged and not one.passed for one in ended_by)

    @property
    def said(self) -> str:
        return next((f"its {which} probe failed: {one.said}" for which, one in self.tries.items() if one.failed), "")

    def due(self, now_ms: int) -> Iterator[Which]:
        for which, one in self.tries.items():
            if one.due_ms <= now_ms and self._asked(which, one):
                yield which

    def next_ms(self) -> int | None:
        return min((one.due_ms for which, one in self.tries.items() if self._asked(which, one)), default=None)

    def _asked(self, which: Which, one: Tries) -> bool:
        return not one.passed if which == "start" else self.has_started

    def asked(self, which: Which, now_ms: int) -> None:
        """It is under way: not again before its time is over."""
        one = self.tries[which]
        one.due_ms = now_ms + int(one.probe.timeout) + int(one.probe.period)

    def told(self, which: Which, ok: bool, said: str, now_ms: int) -> None:
        self.tries[which].told(ok, said, now_ms)


STEADY_MS: Final = 60_000
"""What ran for so long had come up well: its pause begins anew."""

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
    """How long to wait, from its end on; None: it is not started again. `restarts`: how often it was, within this attempt."""
    if when == "never" or (when == "failure" and not failed):
        return None
    if limit and restarts >= limit:
        return None
    if ran_ms >= STEADY_MS:
        return backoff_ms
    return min(max(backoff_ms, backoff_max_ms), backoff_ms << min(restarts, _DOUBLINGS_MAX))
