"""Counters of the authority: batches, verdicts, commit latency.

Batches, verdicts and how long a commit took, counted as it goes. Nothing is decided by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from remit.commitment.decide import tag
from remit.commitment.outcomes import Entry
from remit.law.lifecycle import OWNER
from remit.model.claims import CLAIMS, Code
from remit.model.counters import SECONDS, SIZES, Buckets, Counts

_MOVE: Final = "move "
DEEDS: Final = (*sorted(tag(claim) for claim in CLAIMS), *sorted(_MOVE + name for name in OWNER))
"""All that may be accepted. A refused move may name any transition: its words are the asker's."""
LEAVING: Final = ("evict", "retire", "remove", "abort", "lose", "crash")
"""Moves by which a replica loses its place, other than by a preemption."""


class AuthorityCounts:
    """Of all terms in which one process led."""

    def __init__(self) -> None:
        self.batches = Buckets(SIZES)
        self.commits = Buckets(SECONDS)
        self.accepted = Counts(DEEDS)
        self.refused = Counts(Code)
        self.tell: Callable[[Entry], None] | None = None
        """Hears of each decision, if anybody wants to."""

    def wrote(self, entries: Sequence[Entry], took_ms: int) -> None:
        """A batch is in the store."""
        if self.tell is not None:
            for entry in entries:
                self.tell(entry)
        size = 0
        for (did, code), count in Counter([(entry.did, entry.code) for entry in entries]).items():
            size += count
            if code:
                self.refused.add(code, count)
            else:
                self.accepted.add(did, count)
        if size:
            self.batches.add(size)
            self.commits.add(took_ms / 1000)

    def left(self) -> dict[str, int]:
        """How many lost their place, by what took it."""
        return {name: self.accepted.get(_MOVE + name, 0) for name in LEAVING}
