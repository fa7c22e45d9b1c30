"""What has a scheduler done? Attempts, their results, victims and time, counted as it goes. Nothing is decided by it."""

from __future__ import annotations

from collections.abc import Sequence

from remit.model.claims import Accepted, Bind, Explain, Ganged, Reserve, Verdict
from remit.model.tallies import FEW, SECONDS, Buckets, Counts
from remit.proposal.asking import Proposal

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
