"""State at past revisions, and clock bounds of commits.

Claims are checked against the state their author had seen; this module stores these states and evaluates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from remit.simulate.checkers.reference.rows import Amounts, Json, group_of, phase_of

READY_PHASES: Final = ("ready", "serving")


class CommitTimes(NamedTuple):
    """Readings of the authority's own clock around a commit. `decided_ms` is the earliest time at which it can have been
    decided; `applied_ms` is when the store applied it.
    """

    boot: str
    decided_ms: int
    sent_ms: int
    applied_ms: int


TimedCommit = tuple[int, int, CommitTimes]


class PastStates:
    """State at past revisions. Most lists hold pairs of a revision and the value from that revision on."""

    def __init__(self) -> None:
        self.commits: list[TimedCommit] = []
        """Every commit: revision, virtual time, and clock readings."""
        self.commits_by_boot: dict[str, list[TimedCommit]] = {}
        """The same, by boot of the clock."""
        self.node_counts: list[tuple[int, int]] = []
        """Number of nodes."""
        self.running_counts: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """Number of replicas in active phases, by tenant and workload."""
        self.ready_counts: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """Number of ready replicas, by tenant and workload."""
        self.serving_counts: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """Number of serving replicas, by tenant and workload."""
        self.evicted: dict[tuple[str, int, tuple[str, str]], list[int]] = {}
        """Revisions at which a ready replica was evicted or retired, by lease, epoch, and tenant and workload."""
        self.became_unknown: dict[tuple[int, str, str], list[int]] = {}
        """Times at which nodes became unknown, by epoch, region and zone."""
        self.recording_leases: set[str] = set()
        """Leases of schedulers that record their decisions and verdicts."""
        self.preempted: dict[tuple[str, int, tuple[str, str]], list[tuple[int, int]]] = {}
        """Revisions and numbers of preempted replicas, by lease, epoch, and tenant and workload."""
        self.policies: list[tuple[int, Json]] = []
        """Policy in force."""
        self.free: dict[str, list[tuple[int, Amounts]]] = {}
        """Free capacity, by node."""

    def restore(self, revision: int, replicas: Iterable[Json]) -> None:
        """Recount ready and serving replicas from a backup."""
        self.ready_counts, self.serving_counts, self.evicted = {}, {}, {}
        for replica in replicas:
            self.count(revision, None, replica)

    def count(self, revision: int, old: Json, new: Json) -> None:
        group = group_of(new if new is not None else old)
        for counts, phases in ((self.ready_counts, READY_PHASES), (self.serving_counts, ("serving",))):
            rise = (phase_of(new) in phases) - (phase_of(old) in phases)
            if rise:
                known = counts.setdefault(group, [])
                known.append((revision, (known[-1][1] if known else 0) + rise))
