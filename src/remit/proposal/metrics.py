"""Scheduler counters, and named rare code paths that simulation must reach.

Attempts, their results, victims and time, counted as it goes. Nothing is decided by it.

Each has a name, told to whoever counts them; nothing is done here.

A path that no test takes says nothing, and does so in green: so simulated runs count these, and must reach them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from remit.model.claims import Accepted, Bind, Explain, Ganged, Reserve, Verdict
from remit.model.counters import FEW, SECONDS, Buckets, Counts
from remit.proposal.proposals import Proposal

RESULTS = ("bound", "reserved", "waiting", "refused", "unanswered")


class SchedulerCounts:
    """Of one copy, over all its terms. `attempts` counts replicas: one that is tried again counts again."""

    def __init__(self) -> None:
        self.attempts = Counts(RESULTS)
        self.rounds = Buckets(SECONDS)
        """How long it took to propose; most of them for many replicas at once."""
        self.victims = Buckets(FEW)

    def proposed(self, proposal: Proposal, took_s: float) -> None:
        self.rounds.add(took_s)
        for claim in proposal.claims:
            if isinstance(claim, Explain) and claim.decision.verdict == "waiting":
                self.attempts.add("waiting", len(claim.decision.replicas))

    def answered(self, proposal: Proposal, verdicts: Sequence[Verdict] | None) -> None:
        """None: there was no answer."""
        for index, (claim, slots) in enumerate(zip(proposal.claims, proposal.slots, strict=True)):
            if not isinstance(claim, Bind | Ganged | Reserve):
                continue
            if verdicts is None:
                self.attempts.add("unanswered", len(slots))
            elif not isinstance(verdicts[index], Accepted):
                self.attempts.add("refused", len(slots))
            elif isinstance(claim, Reserve):
                self.attempts.add("reserved")
                self.victims.add(len(claim.victims))
            else:
                self.attempts.add("bound", len(slots))


class Path(StrEnum):
    REFUSED = "refused"
    """A refusal is learned from."""
    EXPIRED = "expired"
    """What was assumed was not seen in time, and is dropped."""
    REDONE = "redone"
    """There is too little for all: one turn after another, in their order."""
    WHOLE = "whole"
    """A gang is tried whole, beyond what a batch takes."""
    PACED = "paced"
    """Nobody more may be pushed aside for now."""
    RESUMED = "resumed"
    """A proposal that was met with silence is asked for again."""
    OVER = "over"
    """The term ends while proposals are under way."""
    PLUGIN = "plugin"
    """A plug-in failed."""


Tell = Callable[[Path], None]


def untold(path: Path) -> None:
    """For whoever does not count."""
