"""Explains one replica or one workload: the entry points of `remit explain`.

Combines the current view with the recorded history. The wording of the output is in cli/output/explanations.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law.workload_rules import (
    NO_LIMIT,
    QUEUED,
    Limit,
    desired_replicas,
    existing_replicas,
    limiting_factor,
    missing_replicas,
    phase_limit,
)
from remit.model.kinds import Workload
from remit.model.records import Decision, DecisionSpec, Phase, Replica
from remit.model.resources import Amount
from remit.observation.replica_table import PENDING, PHASES
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.explain.pending import (
    PlacementInputs,
    evidence,
    explain_node,
    explain_pending,
    pending_work,
    remove_replica,
)
from remit.proposal.explain.result_types import (
    FilterFunnel,
    FilterStep,
    HistoryEntry,
    NodeFitExplanation,
    PendingExplanation,
    PendingGroup,
    PlacementExplanation,
    ReplicaExplanation,
    WorkloadExplanation,
)
from remit.proposal.placement.plugins import BUILTIN_FILTERS, FORMER_FILTER_NAMES

HISTORY_MAX: Final = 50
GROUPS_MAX: Final = 8
_UNFINISHED: Final = (Phase.RUNNING, Phase.READY, Phase.SERVING)
"""Phases in which a replica of a job runs and has not ended."""
_REASONS: Final = {filter_.name: filter_.code.value for filter_ in BUILTIN_FILTERS}


class NodeNotFound(Exception):
    """There is no node with the requested name."""


class RecordedHistory(NamedTuple):
    """Recorded history of a replica or workload by revision: scheduler decisions, authority verdicts, and the wall clock time
    of each.
    """

    decisions: Sequence[tuple[int, Decision]] = ()
    verdicts: Sequence[HistoryEntry] = ()
    at: Mapping[int, str] = {}

    def history(self) -> tuple[HistoryEntry, ...]:
        """All entries, oldest first; only the latest HISTORY_MAX."""
        entries = [_history_entry(revision, self.at.get(revision, ""), decision.spec) for revision, decision in self.decisions]
        return tuple(sorted((*entries, *self.verdicts), key=lambda entry: entry.revision)[-HISTORY_MAX:])


def explain_replica(
    view: SchedulerView, row: Replica, revision: int, records: RecordedHistory, rules: PlacementInputs, node: str = ""
) -> ReplicaExplanation:
    """Explains one replica. If `node` is given, also whether the replica would fit on that node.

    Raises `NodeNotFound` if there is no node of that name.
    """
    meta, spec, status = row.metadata, row.spec, row.status
    slot = view.replicas.slots[f"replica/{meta.tenant}/{meta.name}"]
    generation = view.replicas.at.generation[slot]
    waits = None
    if status.phase is Phase.PENDING:
        waits = explain_pending(view, generation, spec.priority, rules)
    named_node, current_node = _node_answers(view, slot, rules, node, status.node)
    return ReplicaExplanation(
        kind="replica",
        tenant=meta.tenant,
        name=meta.name,
        workload=spec.workload,
        generation=spec.generation,
        phase=status.phase.value,
        attempt=status.attempt,
        priority=spec.priority,
        node=status.node,
        since=records.at.get(revision, ""),
        evidence=evidence(view, rules),
        waits=waits,
        chosen=_placement_explanation(records, f"{meta.tenant}/{meta.name}", status.node) if status.node else None,
        grants=status.grants,
        devices=dict(status.devices),
        victims={victim: _has_left(view, victim, copy) for victim, copy in status.victims.items()},
        there=named_node,
        here=current_node,
        history=records.history(),
        result=status.result,
        reason=status.reason,
    )


def _has_left(view: SchedulerView, victim: str, copy: str) -> bool:
    slot = view.replicas.slots.get(victim)
    return slot is None or view.replicas.at.node[slot] < 0 or not view.replicas.is_attempt(slot, copy)


def _node_answers(
    view: SchedulerView, slot: int, rules: PlacementInputs, node: str, now_on: str
) -> tuple[NodeFitExplanation | None, NodeFitExplanation | None]:
    """Explain whether the replica would fit on the requested node, and on its present node, if it were not placed yet."""
    if not node:
        return None, None
    generation, priority = view.replicas.at.generation[slot], view.replicas.at.priority[slot]
    trial = pending_work(view, generation, priority, rules).trial
    remove_replica(view, trial, slot)
    named_node = explain_node(trial, node)
    if named_node is None:
        raise NodeNotFound(node)
    return named_node, explain_node(trial, now_on) if now_on else None


def _placement_explanation(records: RecordedHistory, name: str, node: str) -> PlacementExplanation | None:
    """The latest decision that placed the replica on its current node, if that decision is still retained."""
    for revision, decision in sorted(records.decisions, key=lambda pair: -pair[0]):
        spec = decision.spec
        if spec.replicas.get(name) == node and spec.verdict in ("bound", "reserved"):
            return PlacementExplanation(
                revision=revision,
                at=records.at.get(revision, ""),
                seen=spec.revision,
                age_ms=spec.age_ms,
                attempt=spec.attempt,
                passage=_recorded_funnel(spec),
                candidates=spec.candidates,
                grant=spec.grant,
                left=Amount(spec.left),
                policy=spec.policy,
                overrides=spec.overrides,
                victims=tuple(victim for victim, patron in spec.victims.items() if patron == f"replica/{name}"),
            )
    return None


def _recorded_funnel(spec: DecisionSpec) -> FilterFunnel:
    remaining, steps = spec.nodes, []
    for stored_name, refused in spec.funnel:
        name = FORMER_FILTER_NAMES.get(stored_name, stored_name)
        remaining -= refused
        steps.append(FilterStep(name, _REASONS.get(name, ""), refused, remaining))
    return FilterFunnel(spec.nodes, tuple(steps), spec.fits)


def _history_entry(revision: int, at: str, spec: DecisionSpec) -> HistoryEntry:
    return HistoryEntry(revision, at, "scheduler", spec.verdict, spec.reason, spec.detail, spec.attempt)


# -- a workload ----------------------------------------------------------------------------------------------------------------


def explain_workload(
    view: SchedulerView,
    declared: Workload | None,
    tenant: str,
    name: str,
    records: RecordedHistory,
    rules: PlacementInputs,
    node: str = "",
) -> WorkloadExplanation:
    """Explains one workload. `declared` is None if only replicas of it remain.

    Raises `NodeNotFound` if there is no node called `node`.
    """
    slots = _slots(view, tenant, name)
    phases = view.replicas.column("phase")[slots]
    counts = {phase: int(np.count_nonzero(phases == number)) for number, phase in enumerate(PHASES)}
    stages = {QUEUED if phase is Phase.PENDING else phase.value: count for phase, count in counts.items() if count}
    groups = tuple(_groups(view, slots, rules))
    node_fit = None
    if node and len(slots):
        node_fit, _ = _node_answers(view, int(slots[np.argmax(phases == PENDING)]), rules, node, "")
    revisions = view.replicas.column("revision")[slots[phases == PENDING]].tolist()
    pending = Limit(groups[0].waits.reason or QUEUED) if groups else None
    limit = limiting_factor(declared, counts, pending) if declared is not None else pending or phase_limit("service", counts)
    if declared is not None and declared.spec.type == "job" and limit == NO_LIMIT and any(map(counts.get, _UNFINISHED)):
        limit = Limit(detail="all its replicas that may run now are running")
    return WorkloadExplanation(
        kind="workload",
        tenant=tenant,
        name=name,
        wanted=0 if declared is None else desired_replicas(declared, existing_replicas(declared.spec.type, counts)),
        stages=stages,
        missing=0 if declared is None else missing_replicas(declared, counts),
        since=records.at.get(min(revisions), "") if revisions else "",
        evidence=evidence(view, rules),
        groups=groups,
        limit=limit.code,
        there=node_fit,
        history=records.history(),
        detail=limit.detail,
    )


def _slots(view: SchedulerView, tenant: str, name: str) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    owner = view.shapes.workloads.ids.get(f"{tenant}/{name}")
    generations = np.flatnonzero(view.shapes.column("workload") == (-2 if owner is None else owner))
    slots: np.ndarray[tuple[int], np.dtype[np.intp]] = np.flatnonzero(np.isin(view.replicas.column("generation"), generations))
    return slots


def _groups(
    view: SchedulerView, slots: np.ndarray[tuple[int], np.dtype[np.intp]], rules: PlacementInputs
) -> list[PendingGroup]:
    """Pending replicas grouped by generation and priority, which share a reason; the largest group first."""
    at, keys = view.replicas.at, view.replicas.keys
    by_class: dict[tuple[int, int], list[int]] = {}
    for slot in slots.tolist():
        if at.phase[slot] == PENDING:
            by_class.setdefault((at.generation[slot], at.priority[slot]), []).append(slot)
    groups = []
    for (generation, priority), members in sorted(by_class.items(), key=lambda pair: -len(pair[1]))[:GROUPS_MAX]:
        first = min(members, key=lambda slot: at.index[slot])
        waits: PendingExplanation = explain_pending(view, generation, priority, rules)
        name = keys[first].split("/", 2)[2]
        groups.append(PendingGroup(view.shapes.at.number[generation], priority, len(members), name, waits))
    return groups
