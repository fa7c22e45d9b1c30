"""Counters of the authority: batch sizes, verdicts, commit latency. They influence no decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from remit.commitment.decide import tag
from remit.commitment.outcomes import AuditEntry
from remit.law.lifecycle import OWNERS
from remit.model.claims import CLAIMS, Code
from remit.model.counters import SECONDS_BUCKETS, SIZE_BUCKETS, BoundedCounter, Histogram

_MOVE_PREFIX: Final = "move "
OPERATION_NAMES: Final = (*sorted(tag(claim) for claim in CLAIMS), *sorted(_MOVE_PREFIX + name for name in OWNERS))
"""Every operation name that can be accepted. A refused move may name any transition, because that text comes from the caller.
"""
NODE_LOSS_TRANSITIONS: Final = ("evict", "retire", "remove", "abort", "lose", "crash")
"""Transitions by which a replica loses its node, other than preemption."""


class AuthorityMetrics:
    """Counters over all terms in which this process led."""

    def __init__(self) -> None:
        self.batches = Histogram(SIZE_BUCKETS)
        self.commits = Histogram(SECONDS_BUCKETS)
        self.accepted = BoundedCounter(OPERATION_NAMES)
        self.refused = BoundedCounter(Code)
        self.on_entry: Callable[[AuditEntry], None] | None = None
        """Called with each decided entry, if set."""

    def record_batch(self, entries: Sequence[AuditEntry], took_ms: int) -> None:
        """Count a committed batch."""
        if self.on_entry is not None:
            for entry in entries:
                self.on_entry(entry)
        size = 0
        for (name, code), count in Counter([(entry.did, entry.code) for entry in entries]).items():
            size += count
            if code:
                self.refused.add(code, count)
            else:
                self.accepted.add(name, count)
        if size:
            self.batches.add(size)
            self.commits.add(took_ms / 1000)

    def node_losses(self) -> dict[str, int]:
        """Return how many replicas lost their node, by transition."""
        return {name: self.accepted.get(_MOVE_PREFIX + name, 0) for name in NODE_LOSS_TRANSITIONS}
