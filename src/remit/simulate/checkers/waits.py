"""How long did work wait that could have been placed? One measure a replica, and what they come to; nothing is placed here.

A replica's wait begins when it becomes pending, and begins anew at every look that finds no place for it, or not for all who
wait: whose turn it is then is the scheduler's to say. It ends when it is bound. Gangs wait for each other, and what has terms
towards others for where those are: neither is measured. (The scheduler that is played learns of such terms by refusals only.)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from remit.simulate.checkers.feasibility import has_terms
from remit.simulate.checkers.history import History, Step
from remit.simulate.checkers.rows import phase_of

WAITS_MIN: Final = 100
"""A percentile of fewer says nothing."""

PERCENTILE: Final = 99


class Wait(NamedTuple):
    ms: int
    key: str


class Waits:
    """Of one scope, while work is asked for and nothing is broken."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        """Since when nothing but the scheduler keeps it waiting, as far as was seen."""
        self.ended: list[Wait] = []

    def absorb(self, step: Step, at_ms: int) -> None:
        for key, old, new in step.moves:
            was, now = phase_of(old), phase_of(new)
            shape = None if new is None else step.history.shape(new)
            if shape is None or shape.gang or has_terms(shape):
                self.since.pop(key, None)
            elif now == "pending":
                self.since.setdefault(key, at_ms)
            elif now == "bound" and was in ("pending", "reserved"):
                if key in self.since:
                    self.ended.append(Wait(at_ms - self.since.pop(key), key))
            elif now != "reserved" or new["status"].get("victims"):
                self.since.pop(key, None)  # what waits for others to stop waits for them, not for the scheduler

    def saw(self, history: History, able: Collection[str], now_ms: int) -> None:
        """Of all that is pending these could be placed now, all of them at once."""
        for key, _ in history.replicas("pending"):
            if key not in able and key in self.since:
                self.since[key] = now_ms

    def close(self, now_ms: int, may_ms: float) -> None:
        """Nothing is measured from here on. What waits is known to have waited for so long: if that is too long, it counts."""
        self.ended += [Wait(now_ms - since, key) for key, since in self.since.items() if now_ms - since > may_ms]
        self.since.clear()

    def percentile(self) -> Wait | None:
        """The wait that all but a hundredth are no longer than; None if there are too few."""
        if len(self.ended) < WAITS_MIN:
            return None
        return sorted(self.ended)[-(-len(self.ended) * PERCENTILE // 100) - 1]
