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
from remit.observation.replica_table import PHASE_NUMBERS
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.kernel import Kernel
from remit.proposal.placement.preemption import (
    VICTIMS_MAX,
    DisruptionAllowance,
    Eviction,
    ReleasingCapacity,
    VictimCandidates,
    plan_evictions,
)

PREEMPTIBLE: Final = np.array(
    sorted(PHASE_NUMBERS[row.source] for row in TRANSITIONS if row.name == "preempt" and row.source is not None)
)


UP: Final = np.array(sorted(PHASE_NUMBERS[phase] for phase in (Phase.RUNNING, Phase.READY, Phase.SERVING)))
"""Phases of replicas that are running. The other preemptible phases come before that."""

TERMINATING: Final = np.array(sorted(PHASE_NUMBERS[phase] for phase in (Phase.DRAINING, Phase.STOPPING)))
"""Phases of replicas that are terminating and will release their capacity, for any cause."""


class VictimRateLimit(NamedTuple):
    """Token bucket for victims: `per_s` victims per second, `burst` at once.

    Wrong priorities then show up in monitoring before a large part of the cluster is evicted.
    """

    per_s: int = 100
    burst: int = 1_000


class VictimSelector:
    """Preemption candidates of a view, victims of in-flight claims, and the state of the rate limit."""

    def __init__(self, rate_limit: VictimRateLimit) -> None:
        self.rate_limit = rate_limit
        self._tokens = float(rate_limit.burst)
        self._at_ms = 0
        self.capacity_coming = False
        """Whether a plan left capacity to replicas that are terminating already. Other work may take it first, so the caller
        retries soon.
        """
        self._victims_lacking = 0
        """Victims beyond the rate limit that a plan of this cycle would have needed."""
        self._cached: tuple[int, Ints] | None = None
        self._taken: dict[int, int] = {}
        """Victims of in-flight claims by slot, with the revision at which they were taken; the view does not show them as
        terminating yet.
        """
        self._assigned: dict[int, tuple[int, dict[str, int]]] = {}
        """By the first victim of an in-flight claim: the row, and the capacity of the victims that the preemptor takes over."""

    def forget(self) -> None:
        """Drops all state by slot: after a relist, slots refer to other replicas."""
        self._taken.clear()
        self._assigned.clear()
        self._cached = None

    def begin(self, now_ms: int, view: SchedulerView) -> None:
        """Starts a cycle: refills the rate limit, and drops victims whose rows have changed since they were taken."""
        self._tokens = min(float(self.rate_limit.burst), self._tokens + self.rate_limit.per_s * (now_ms - self._at_ms) / 1000)
        self._at_ms = now_ms
        self._victims_lacking = 0
        self._cached = None
        at = view.replicas.at
        self._taken = {slot: revision for slot, revision in self._taken.items() if at.revision[slot] == revision}
        self._assigned = {slot: assigned for slot, assigned in self._assigned.items() if slot in self._taken}

    def release(self, victims: Iterable[str], view: SchedulerView) -> None:
        """Returns victims of a claim that was refused or not delivered."""
        for key in victims:
            slot = view.replicas.slots.get(key)
            if slot is not None and self._taken.pop(slot, None) is not None:
                self._tokens = min(float(self.rate_limit.burst), self._tokens + 1)
                self._assigned.pop(slot, None)

    def retry_after_ms(self) -> int:
        """Time until the rate limit allows the victims that were lacking; 0 if the rate limit is not the cause."""
        tokens_lacking = max(self._victims_lacking, 1) - self._tokens
        return (
            0
            if tokens_lacking <= 0 or self._victims_lacking > self.rate_limit.burst
            else round(tokens_lacking * 1000 / self.rate_limit.per_s) + 1
        )

    def plan(
        self, view: SchedulerView, kernel: Kernel, work_class: WorkClass, open_rows: Bools, priority: int, count: int
    ) -> list[Eviction]:
        """Plans evictions for up to `count` replicas of a class, one per node. Their victims count as taken from then on."""
        allowed = int(self._tokens)
        if allowed < 1:
            return []
        candidates = self.candidates(view, work_class, priority)
        if candidates is None:
            return []
        allowance = self.disruption_allowance(view)
        plan = plan_evictions(
            work_class.requirements, kernel.columns, open_rows, candidates, allowance, count=count, victims_max=allowed
        )
        self._victims_lacking = max(self._victims_lacking, plan.victims_lacking if plan.victims_lacking <= VICTIMS_MAX else 0)
        self.capacity_coming = self.capacity_coming or plan.capacity_coming
        for eviction in plan.evictions:
            self._tokens -= len(eviction.victims)
            self._taken.update({slot: view.replicas.at.revision[slot] for slot in eviction.victims})
            self._assigned[eviction.victims[0]] = eviction.row, self._capacity_taken_over(view, work_class, eviction)
        return plan.evictions

    def _capacity_taken_over(self, view: SchedulerView, work_class: WorkClass, eviction: Eviction) -> dict[str, int]:
        """The part of the preemptor's requirements that its victims hold."""
        held: Counter[str] = Counter()
        for slot in eviction.victims:
            held.update(dict(node_charge(view.requirements_of(slot), view.replicas.devices.get(slot, {}))))
        return {name: min(held[name], need) for name, need in node_charge(work_class.requirements, eviction.devices)}

    def _preemptible(self, view: SchedulerView) -> Ints:
        """Replicas that are preemptible and not taken yet."""
        if self._cached is None or self._cached[0] != view.revision:
            phases = view.replicas.column("phase")
            self._cached = view.revision, np.flatnonzero(np.isin(phases, PREEMPTIBLE))
        slots = self._cached[1]
        return slots[~np.isin(slots, list(self._taken))] if self._taken else slots

    def candidates(self, view: SchedulerView, work_class: WorkClass, priority: int) -> VictimCandidates | None:
        """Replicas below this priority that are not taken yet; None if there are none."""
        replicas, shapes = view.replicas, view.shapes
        slots = self._preemptible(view)
        slots = slots[replicas.column("priority")[slots] < priority]
        for term in (*work_class.requirements.affinity, *work_class.requirements.spread):
            # Replicas that its affinity or spread counts are not evicted for it: without them it might not fit there.
            slots = slots[~np.isin(replicas.column("generation")[slots], shapes.generations_in(term.peers))]
        if not len(slots):
            return None
        generations = replicas.column("generation")[slots]
        names = [name for name, _ in work_class.requirements.resources]
        return VictimCandidates(
            slots=slots,
            rows=replicas.column("node")[slots].astype(np.int64),
            priority=replicas.column("priority")[slots].astype(np.int64),
            groups=shapes.column("workload")[generations].astype(np.int64),
            up=np.isin(replicas.column("phase")[slots], UP),
            amounts=_amounts(view, generations, names),
            devices=replicas.devices,
            assigned=self._assigned_capacity(names),
            releasing=self._releasing_capacity(view, names),
        )

    def _assigned_capacity(self, names: Sequence[str]) -> ReleasingCapacity:
        """As the authority counts: capacity still held by victims is not charged a second time for their preemptor."""
        assigned = list(self._assigned.values())
        amounts = {name: np.array([amounts_due.get(name, 0) for _, amounts_due in assigned], dtype=np.int64) for name in names}
        devices: dict[int, list[Mapping[str, int]]] = {}
        for row, amounts_due in assigned:
            part = {
                name.removeprefix(DEVICE_PREFIX): share for name, share in amounts_due.items() if name.startswith(DEVICE_PREFIX)
            }
            devices.setdefault(row, []).append(part)
        return ReleasingCapacity(np.array([row for row, _ in assigned], dtype=np.int64), amounts, devices)

    def _releasing_capacity(self, view: SchedulerView, names: Sequence[str]) -> ReleasingCapacity:
        """Capacity of terminating replicas and of victims of in-flight claims, without the part assigned to preemptors."""
        replicas = view.replicas
        terminating = np.flatnonzero(np.isin(replicas.column("phase"), TERMINATING))
        slots = np.concatenate([terminating, np.array(list(self._taken), dtype=np.int64)])
        rows = replicas.column("node")[slots].astype(np.int64)
        amounts = _amounts(view, replicas.column("generation")[slots], names)
        devices: dict[int, list[Mapping[str, int]]] = {}
        for slot in (slot for slot in slots.tolist() if slot in replicas.devices):
            devices.setdefault(replicas.at.node[slot], []).append(replicas.devices[slot])
        assigned = list(view.holds.reservations.reduced_amounts())
        for row, amounts_due in assigned:
            part = {
                name.removeprefix(DEVICE_PREFIX): -share
                for name, share in amounts_due.items()
                if name.startswith(DEVICE_PREFIX)
            }
            devices.setdefault(row, []).append(part)
        rows = np.concatenate([rows, np.array([row for row, _ in assigned], dtype=np.int64)])
        assigned_amounts = {
            name: np.array([-amounts_due.get(name, 0) for _, amounts_due in assigned], dtype=np.int64) for name in names
        }
        return ReleasingCapacity(
            rows, {name: np.concatenate([amounts[name], assigned_amounts[name]]) for name in names}, devices
        )

    def disruption_allowance(self, view: SchedulerView) -> DisruptionAllowance:
        """How many replicas of each workload may be evicted, from its `minAvailable`."""
        shapes, replicas = view.shapes, view.replicas
        preemptible = self._preemptible(view)
        workloads = shapes.column("workload")
        owners = workloads[replicas.column("generation")[preemptible]]
        groups = int(workloads.max(initial=-1)) + 1
        total = np.bincount(owners, minlength=groups)
        up = np.bincount(owners[np.isin(replicas.column("phase")[preemptible], UP)], minlength=groups)
        minimum = np.zeros(groups, dtype=np.int64)
        protected = np.flatnonzero(shapes.column("min_available") > 0)
        np.maximum.at(minimum, workloads[protected], shapes.column("min_available")[protected])
        return DisruptionAllowance(total - minimum, up - minimum)


def _amounts(view: SchedulerView, generations: npt.NDArray[Any], names: Iterable[str]) -> dict[str, Ints]:
    """The amount of each of these resources that replicas of these generations hold."""
    _, first, at = np.unique(view.shapes.column("placement")[generations], return_index=True, return_inverse=True)
    resources = [dict(view.shapes.placement_of(int(generation)).resources) for generation in generations[first]]
    return {name: np.array([amounts.get(name, 0) for amounts in resources], dtype=np.int64)[at] for name in names}
