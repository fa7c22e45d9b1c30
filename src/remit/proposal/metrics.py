"""Scheduler counters, and named rare code paths that simulation must reach.

Counting only; no decision depends on it. A test suite that never takes a rare path passes without testing it, so simulated
runs count these paths and fail if one is never reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from remit.model.claims import Accepted, Bind, BindGang, RecordDecision, Reserve, Verdict
from remit.model.counters import SECONDS_BUCKETS, SMALL_COUNT_BUCKETS, BoundedCounter, Histogram
from remit.proposal.proposals import Proposal

RESULTS = ("bound", "reserved", "waiting", "refused", "unanswered")


class SchedulerCounts:
    """Counters of one scheduler replica over all its terms. `attempts` counts replicas; a retried replica counts again."""

    def __init__(self) -> None:
        self.attempts = BoundedCounter(RESULTS)
        self.propose_s = Histogram(SECONDS_BUCKETS)
        """Duration of `propose`, usually for many replicas at once."""
        self.victims = Histogram(SMALL_COUNT_BUCKETS)

    def count_proposal(self, proposal: Proposal, took_s: float) -> None:
        self.propose_s.add(took_s)
        for claim in proposal.claims:
            if isinstance(claim, RecordDecision) and claim.decision.verdict == "waiting":
                self.attempts.add("waiting", len(claim.decision.replicas))

    def count_verdicts(self, proposal: Proposal, verdicts: Sequence[Verdict] | None) -> None:
        """Counts the verdicts of a proposal; None if there was no answer."""
        for index, (claim, slots) in enumerate(zip(proposal.claims, proposal.slots, strict=True)):
            if not isinstance(claim, Bind | BindGang | Reserve):
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


class CoverageMark(StrEnum):
    REFUSED = "refused"
    """A claim was refused and its replicas were held."""
    EXPIRED = "expired"
    """An assumed placement did not become visible in time and was dropped."""
    REDONE = "redone"
    """Capacity or quota was short, so turns were attempted one by one."""
    WHOLE = "whole"
    """A gang was attempted complete, beyond the batch limit."""
    PACED = "paced"
    """The rate limit for victims was reached."""
    RESUMED = "resumed"
    """A proposal with an unknown outcome was retried."""
    OVER = "over"
    """The term ended with proposals in flight."""
    PLUGIN = "plugin"
    """A plug-in failed."""


OnMark = Callable[[CoverageMark], None]


def ignore_mark(path: CoverageMark) -> None:
    """Default sink: ignores the path."""
