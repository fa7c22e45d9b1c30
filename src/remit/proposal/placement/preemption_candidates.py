"""Preemption candidates in a view, and the victim rate limit.

Collects the candidates and their limits; preemption.py selects the victims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remit.law.charges import node_charge
from remit.law.ledgers import DEVICE_PREFIX
from remit.law.lifecycle import TRANSITIONS
from remit.model.records import Phase
from remit.observation.node_columns import Bools, Ints
from remit.observation.replica_table import NUMBER
from remit.observation.scheduler_view import View
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.preemption import VICTIMS_MAX, VictimCandidates, Eviction, ReleasingCapacity, DisruptionAllowance, plan_evictions

PREEMPTIBLE: Final = np.array(sorted(NUMBER[row.source] for row in TRANSITIONS if row.name == "preempt" and row.source is not None))


UP: Final = np.array(sorted(NUMBER[phase] for phase in (Phase.RUNNING, Phase.READY, Phase.SERVING)))
"""Phases of replicas that are running. The other preemptible phases come before that."""

TERMINATING: Final = np.array(sorted(NUMBER[phase] for phase in (Phase.DRAINING, Phase.STOPPING)))
"""Phases of replicas that are terminating and will release their capacity, whatever the cause."""


class VictimRateLimit(NamedTuple):
    """Token bucket for victims: `per_s` victims per second, `burst` at once.

    Wrong priorities then show up in monitoring before a large part of the cluster is evicted.
    """

    per_s: int = 100
    burst: int = 1_000


class VictimSelector:
    """Preemption candidates of a view, victims of in-flight claims, and the state of the rate limit."""

    def __init__(self, pace: VictimRateLimit) -> None:
        self.pace = pace
        self._left = float(pace.burst)
        self._at_ms = 0
        self.coming = False
        """Whether a plan left capacity to replicas that are terminating already. Other work may take it first, so the caller
        retries soon.
        """
        self._lacking = 0
        """Victims beyond the rate limit that a plan of this cycle would have needed."""
        self._kept: tuple[int, Ints] | None = None
        self._taken: dict[int, int] = {}
        """Victims of in-flight claims by slot, with the revision at which they were taken; the view does not show them as
        terminating yet.
        """
        self._owed: dict[int, tuple[int, dict[str, int]]] = {}
        """By the first victim of an in-flight claim: the row, and the capacity of the victims that the preemptor takes over."""

    def forget(self) -> None:
        """Drops all state by slot: after a relist, slots refer to other replicas."""
        self._taken.clear()
        self._owed.clear()
        self._kept = None

    def begin(self, now_ms: int, view: View) -> None:
        """Starts a cycle: refills the rate limit, and drops victims whose rows have changed since they were taken."""
        self._left = min(float(self.pace.burst), self._left + self.pace.per_s * (now_ms - self._at_ms) / 1000)
        self._at_ms = now_ms
        self._lacking = 0
        self._kept = None
        at = view.replicas.at
        self._taken = {slot: revision for slot, revision in self._taken.items() if at.revision[slot] == revision}
        self._owed = {slot: owed for slot, owed in self._owed.items() if slot in self._taken}

    def spare(self, victims: Iterable[str], view: View) -> None:
        """Returns victims of a claim that was refused or not delivered."""
        for key in victims:
            slot = view.replicas.slots.get(key)
            if slot is not None and self._taken.pop(slot, None) is not None:
                self._left = min(float(self.pace.burst), self._left + 1)
                self._owed.pop(slot, None)

    def again_ms(self) -> int:
        """Time until the rate limit allows the victims that were lacking; 0 if the rate limit is not the cause."""
        short = max(self._lacking, 1) - self._left
        return 0 if short <= 0 or self._lacking > self.pace.burst else round(short * 1000 / self.pace.per_s) + 1

    def plan(self, view: View, kernel: Kernel, one: WorkClass, open_rows: Bools, priority: int, count: int) -> list[Eviction]:
        """Plans evictions for up to `count` replicas of a class, one per node. Their victims count as taken from then on."""
        allowed = int(self._left)
        if allowed < 1:
            return []
        found = self.candidates(view, one, priority)
        if found is None:
            return []
        spare = self.limits(view)
        made = plan_evictions(one.ask, kernel.columns, open_rows, found, spare, count=count, victims_max=allowed)
        self._lacking = max(self._lacking, made.lacking if made.lacking <= VICTIMS_MAX else 0)
        self.coming = self.coming or made.coming
        for eviction in made.evictions:
            self._left -= len(eviction.victims)
            self._taken.update({slot: view.replicas.at.revision[slot] for slot in eviction.victims})
            self._owed[eviction.victims[0]] = eviction.row, self._given(view, one, eviction)
        return made.evictions

    def _given(self, view: View, one: WorkClass, eviction: Eviction) -> dict[str, int]:
        """The part of the preemptor's requirements that its victims hold."""
        held: Counter[str] = Counter()
        for slot in eviction.victims:
            held.update(dict(node_charge(view.ask(slot), view.replicas.devices.get(slot, {}))))
        return {name: min(held[name], need) for name, need in node_charge(one.ask, eviction.devices)}

    def _running(self, view: View) -> Ints:
        """Replicas that are preemptible and not taken yet."""
        if self._kept is None or self._kept[0] != view.revision:
            phases = view.replicas.column("phase")
            self._kept = view.revision, np.flatnonzero(np.isin(phases, PREEMPTIBLE))
        slots = self._kept[1]
        return slots[~np.isin(slots, list(self._taken))] if self._taken else slots

    def candidates(self, view: View, one: WorkClass, priority: int) -> VictimCandidates | None:
        """Replicas below this priority that are not taken yet; None if there are none."""
        replicas, shapes = view.replicas, view.shapes
        slots = self._running(view)
        slots = slots[replicas.column("priority")[slots] < priority]
        for term in (*one.ask.affinity, *one.ask.spread):
            # Replicas that its affinity or spread counts are not evicted for it: without them it might not fit there.
            slots = slots[~np.isin(replicas.column("generation")[slots], shapes.picked(term.peers))]
        if not len(slots):
            return None
        generations = replicas.column("generation")[slots]
        names = [name for name, _ in one.ask.resources]
        return VictimCandidates(
            slots=slots,
            rows=replicas.column("node")[slots].astype(np.int64),
            priority=replicas.column("priority")[slots].astype(np.int64),
            groups=shapes.column("workload")[generations].astype(np.int64),
            up=np.isin(replicas.column("phase")[slots], UP),
            amounts=_amounts(view, generations, names),
            devices=replicas.devices,
            firm=self._firm(names),
            coming=self._coming(view, names),
        )

    def _firm(self, names: Sequence[str]) -> ReleasingCapacity:
        """As the authority counts: capacity still held by victims is not charged a second time for their preemptor."""
        owed = list(self._owed.values())
        amounts = {name: np.array([due.get(name, 0) for _, due in owed], dtype=np.int64) for name in names}
        devices: dict[int, list[Mapping[str, int]]] = {}
        for row, due in owed:
            part = {name.removeprefix(DEVICE_PREFIX): share for name, share in due.items() if name.startswith(DEVICE_PREFIX)}
            devices.setdefault(row, []).append(part)
        return ReleasingCapacity(np.array([row for row, _ in owed], dtype=np.int64), amounts, devices)

    def _coming(self, view: View, names: Sequence[str]) -> ReleasingCapacity:
        """Capacity of terminating replicas and of victims of in-flight claims, minus the part that is assigned to preemptors.
        """
        replicas = view.replicas
        going = np.flatnonzero(np.isin(replicas.column("phase"), TERMINATING))
        slots = np.concatenate([going, np.array(list(self._taken), dtype=np.int64)])
        rows = replicas.column("node")[slots].astype(np.int64)
        amounts = _amounts(view, replicas.column("generation")[slots], names)
        devices: dict[int, list[Mapping[str, int]]] = {}
        for slot in (slot for slot in slots.tolist() if slot in replicas.devices):
            devices.setdefault(replicas.at.node[slot], []).append(replicas.devices[slot])
        owed = list(view.owed())
        for row, due in owed:
            part = {name.removeprefix(DEVICE_PREFIX): -share for name, share in due.items() if name.startswith(DEVICE_PREFIX)}
            devices.setdefault(row, []).append(part)
        rows = np.concatenate([rows, np.array([row for row, _ in owed], dtype=np.int64)])
        due_of = {name: np.array([-due.get(name, 0) for _, due in owed], dtype=np.int64) for name in names}
        return ReleasingCapacity(rows, {name: np.concatenate([amounts[name], due_of[name]]) for name in names}, devices)

    def limits(self, view: View) -> DisruptionAllowance:
        """How many replicas of each workload may be evicted, from its `minAvailable`."""
        shapes, replicas = view.shapes, view.replicas
        running = self._running(view)
        workloads = shapes.column("workload")
        of = workloads[replicas.column("generation")[running]]
        groups = int(workloads.max(initial=-1)) + 1
        there = np.bincount(of, minlength=groups)
        up = np.bincount(of[np.isin(replicas.column("phase")[running], UP)], minlength=groups)
        least = np.zeros(groups, dtype=np.int64)
        protected = np.flatnonzero(shapes.column("min_available") > 0)
        np.maximum.at(least, workloads[protected], shapes.column("min_available")[protected])
        return DisruptionAllowance(there - least, up - least)


def _amounts(view: View, generations: npt.NDArray[Any], names: Iterable[str]) -> dict[str, Ints]:
    """The amount of each of these resources that replicas of these generations hold."""
    _, first, at = np.unique(view.shapes.column("cut")[generations], return_index=True, return_inverse=True)
    cuts = [dict(view.shapes.cut_of(int(generation)).resources) for generation in generations[first]]
    return {name: np.array([cut.get(name, 0) for cut in cuts], dtype=np.int64)[at] for name in names}
