"""State at past revisions, and clock bounds of commits.

What is remembered of revisions that are past; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from remit.simulate.checkers.reference.rows import Counted, Json, group_of, phase_of

UP: Final = ("ready", "serving")


class Stand(NamedTuple):
    """On whose clock a commit was sent: three readings of its authority's own. `decided_ms` is the earliest moment at which it
    can have been decided, `applied_ms` is when the store applied it.
    """

    boot: str
    decided_ms: int
    sent_ms: int
    applied_ms: int


Timed = tuple[int, int, Stand]


class Past:
    """How things stood at revisions that are past: whoever claims something is judged by what it had seen."""

    def __init__(self) -> None:
        self.stands: list[Timed] = []
        """Every revision, when it came, and on whose clock."""
        self.of_boot: dict[str, list[Timed]] = {}
        """The same by clock."""
        self.nodes: list[tuple[int, int]] = []
        """How many nodes there are from a revision on."""
        self.running: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """By tenant and workload: how many of its replicas are to run, or do, from a revision on."""
        self.up: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """By tenant and workload: how many of its replicas are ready, from a revision on."""
        self.serving: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """The same of those that are served."""
        self.spared: dict[tuple[str, int, tuple[str, str]], list[int]] = {}
        """By lease, epoch, and tenant and workload: at which revisions one that was ready was told to go."""
        self.silenced: dict[tuple[int, str, str], list[int]] = {}
        """By epoch, region and zone: when nodes became unknown."""
        self.explainers: set[str] = set()
        """Leases of those who write down what they decide, and what came of it."""
        self.preempted: dict[tuple[str, int, tuple[str, str]], list[tuple[int, int]]] = {}
        """By lease, epoch, and tenant and workload: at which revision how many were told to make room."""
        self.policies: list[tuple[int, Json]] = []
        """Which policy is in force from a revision on."""
        self.left: dict[str, list[tuple[int, Counted]]] = {}
        """By node: what is left of it from a revision on."""

    def restore(self, revision: int, replicas: Iterable[Json]) -> None:
        """What is ready and served is counted anew from what a backup holds."""
        self.up, self.serving, self.spared = {}, {}, {}
        for replica in replicas:
            self.count(revision, None, replica)

    def count(self, revision: int, old: Json, new: Json) -> None:
        group = group_of(new if new is not None else old)
        for counts, phases in ((self.up, UP), (self.serving, ("serving",))):
            rise = (phase_of(new) in phases) - (phase_of(old) in phases)
            if rise:
                known = counts.setdefault(group, [])
                known.append((revision, (known[-1][1] if known else 0) + rise))
