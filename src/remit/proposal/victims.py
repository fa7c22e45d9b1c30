"""Who could be pushed aside, as this view has it, and how many may be in a while? Which of them should, preemption.py says."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from remit.law.columns import Bools, Ints
from remit.law.lifecycle import TABLE
from remit.observation.replicas import NUMBER
from remit.observation.view import View
from remit.proposal.kernel import Class, Kernel
from remit.proposal.preemption import Candidates, Eviction, Spare, plan

MOVABLE: Final = np.array(sorted(NUMBER[row.source] for row in TABLE if row.name == "preempt" and row.source is not None))


class Pace(NamedTuple):
    """So many victims a second, and so many at once: what is wrong with the priorities shows before a cluster is emptied."""

    per_s: int = 100
    burst: int = 1_000


class Victims:
    """The candidates of one view at one version, and what is left of the pace."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._left = float(pace.burst)
        self._at_ms = 0
        self._kept: tuple[int, Ints] | None = None
        self._taken: dict[int, None] = {}

    def begin(self, now_ms: int) -> None:
        """A cycle begins: whom an earlier one took is seen to go by now, or was not taken."""
        self._left = min(float(self.pace.burst), self._left + self.pace.per_s * (now_ms - self._at_ms) / 1000)
        self._at_ms = now_ms
        self._kept = None
        self._taken.clear()

    def again_ms(self) -> int:
        """How long until another may be taken."""
        return 0 if self._left >= 1 else round((1 - self._left) * 1000 / self.pace.per_s) + 1

    def plan(self, view: View, kernel: Kernel, one: Class, open_rows: Bools, priority: int, count: int) -> list[Eviction]:
        allowed = int(self._left)
        if allowed < 1:
            return []
        found = self.candidates(view, one, priority)
        if found is None:
            return []
        plans = plan(one.ask, kernel.columns, open_rows, found, self.spare(view), count=count, victims_max=allowed)
        for made in plans:
            self._left -= len(made.victims)
            self._taken.update(dict.fromkeys(made.victims))
        return plans

    def _running(self, view: View) -> Ints:
        if self._kept is None or self._kept[0] != view.version:
            phases = view.replicas.column("phase")
            self._kept = view.version, np.flatnonzero(np.isin(phases, MOVABLE))
        return self._kept[1]

    def candidates(self, view: View, one: Class, priority: int) -> Candidates | None:
        """Who runs below this priority and was not taken; None if nobody does."""
        replicas, shapes = view.replicas, view.shapes
        slots = self._running(view)
        slots = slots[replicas.column("priority")[slots] < priority]
        if self._taken:
            slots = slots[~np.isin(slots, list(self._taken))]
        if not len(slots):
            return None
        generations = replicas.column("generation")[slots]
        unique, at = np.unique(generations, return_inverse=True)
        cuts = [dict(shapes.cut_of(generation).resources) for generation in unique.tolist()]
        return Candidates(
            slots=slots,
            rows=replicas.column("node")[slots].astype(np.int64),
            priority=replicas.column("priority")[slots].astype(np.int64),
            groups=shapes.column("workload")[generations].astype(np.int64),
            amounts={name: np.array([cut.get(name, 0) for cut in cuts], dtype=np.int64)[at] for name, _ in one.ask.resources},
            devices=replicas.devices,
        )

    def spare(self, view: View) -> Spare:
        """How many of each workload may go, by what it says of disruption."""
        shapes = view.shapes
        running = self._running(view)
        if self._taken:
            running = running[~np.isin(running, list(self._taken))]
        workloads = shapes.column("workload")
        available = np.bincount(workloads[view.replicas.column("generation")[running]], minlength=1)
        least: dict[int, int] = {}
        for generation in np.flatnonzero(shapes.column("min_available") > 0).tolist():
            workload = int(workloads[generation])
            least[workload] = max(least.get(workload, 0), int(shapes.at.min_available[generation]))
        return Spare(lambda group: (int(available[group]) if group < len(available) else 0) - least.get(group, 0))
