"""Is it quiet once nothing is going on? What is still written, and what is refused again and again. Why: liveness.py asks.

Rows are counted, and not who wrote them; a refusal is somebody's, and about something.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from remit.simulate.checkers.history import Step
from remit.simulate.checkers.promise import Found

QUIET_KINDS: Final = ("head", "batch", "summary", "event", "decision")
"""What may be written while nothing is going on: beats, reports and notes."""

LIFE_WRITES: Final = 12
"""What one process that ends may lead to: its replica's moves to its next attempt, and from there to where that runs."""

Wish = tuple[str, str, str]
"""Who asks, for what, and of which object."""


class Quiet:
    """One scope, from when it is healthy."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        """When something was written that says that something goes on."""
        self.refused: dict[Wish, list[int]] = {}

    def absorb(self, step: Step, at_ms: int) -> None:
        if any(key.partition("/")[0] not in QUIET_KINDS for key in step.changed):
            self.writes.append(at_ms)
        for entry in step.entries:
            if entry.code and entry.actor and entry.subject:  # a gang has many
                self.refused.setdefault((entry.actor, entry.did, entry.subject), []).append(at_ms)

    def writes_cease(self, since_ms: float, may: float) -> Found:
        """L10: with a fixed desire, writes fall to the rate of beats."""
        late = sum(at > since_ms for at in self.writes)
        if late > may:
            yield "head", f"{late} commits changed something since {since_ms:.0f} ms, of {may:.0f}"

    def refusals_back_off(self, since_ms: float, may: float) -> Found:
        """L10: what is refused is not asked again and again, faster than beats."""
        for (actor, did, subject), times in self._late(since_ms):
            if len(times) > may:
                yield subject, f"{actor} was refused {did} {len(times)} times since {since_ms:.0f} ms, of {may:.0f}"

    def _late(self, since_ms: float) -> Iterator[tuple[Wish, list[int]]]:
        for wish, times in sorted(self.refused.items()):
            yield wish, [at for at in times if at > since_ms]
