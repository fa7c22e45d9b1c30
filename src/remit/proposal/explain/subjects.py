"""Explanation of one replica or one workload, with recorded decisions.

Puts together what is seen and what was recorded; no words here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.model.kinds import Workload
from remit.model.records import Decision, DecisionSpec, Phase, Replica
from remit.model.resources import Amount
from remit.observation.replica_table import PENDING, PHASES
from remit.observation.scheduler_view import View
from remit.proposal.explain.pending import Rules, answer_for, evidence, explain_waiting, without, work_of
from remit.proposal.explain.result_types import (
    Chosen,
    Group,
    NodeAnswer,
    Passage,
    ReplicaTold,
    Step,
    Told,
    Waits,
    WorkloadTold,
)
from remit.proposal.placement.plugins import LAW

HISTORY_MAX: Final = 50
GROUPS_MAX: Final = 8
QUEUED: Final = "queued"
_REASONS: Final = {one.name: one.code.value for one in LAW}
_ARRIVED: Final = {"job": (Phase.RUNNING, Phase.READY, Phase.SERVING, Phase.FINISHED), "": (Phase.READY, Phase.SERVING)}
_GOES_BY: Final = (Phase.RELEASED,)
ROLLED_OUT: Final = "RolledOut"


class NoNode(Exception):
    """There is no node of the name that was asked about."""


class Records(NamedTuple):
    """What was written down about it, by revision: schedulers' decisions, the authority's answers, and when each was."""

    decisions: Sequence[tuple[int, Decision]] = ()
    answers: Sequence[Told] = ()
    at: Mapping[int, str] = {}

    def history(self) -> tuple[Told, ...]:
        """All of it, the oldest first; of very much, the latest."""
        told = [_decided(revision, self.at.get(revision, ""), one.spec) for revision, one in self.decisions]
        return tuple(sorted((*told, *self.answers), key=lambda one: one.revision)[-HISTORY_MAX:])


def tell_replica(view: View, row: Replica, revision: int, records: Records, rules: Rules, node: str = "") -> ReplicaTold:
    """`node`: another one, of which it is asked why it is not there. Raises `NoNode` if there is none of that name."""
    meta, spec, status = row.metadata, row.spec, row.status
    slot = view.replicas.slots[f"replica/{meta.tenant}/{meta.name}"]
    generation = view.replicas.at.generation[slot]
    waits = None
    if status.phase is Phase.PENDING:
        waits = explain_waiting(view, generation, spec.priority, rules)
    there, here = _answers(view, slot, rules, node, status.node)
    return ReplicaTold(
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
        chosen=_chosen(records, f"{meta.tenant}/{meta.name}", status.node) if status.node else None,
        grants=status.grants,
        devices=dict(status.devices),
        victims={victim: _gone(view, victim, copy) for victim, copy in status.victims.items()},
        there=there,
        here=here,
        history=records.history(),
        result=status.result,
        reason=status.reason,
    )


def _gone(view: View, victim: str, copy: str) -> bool:
    slot = view.replicas.slots.get(victim)
    return slot is None or view.replicas.at.node[slot] < 0 or not view.replicas.is_copy(slot, copy)


def _answers(view: View, slot: int, rules: Rules, node: str, now_on: str) -> tuple[NodeAnswer | None, NodeAnswer | None]:
    """Of the node that is asked about, and of the one where it stands, as if it stood nowhere."""
    if not node:
        return None, None
    generation, priority = view.replicas.at.generation[slot], view.replicas.at.priority[slot]
    trial = work_of(view, generation, priority, rules).trial
    without(view, trial, slot)
    there = answer_for(trial, node)
    if there is None:
        raise NoNode(node)
    return there, answer_for(trial, now_on) if now_on else None


def _chosen(records: Records, name: str, node: str) -> Chosen | None:
    """The last decision that put it where it is, if that is still kept."""
    for revision, one in sorted(records.decisions, key=lambda pair: -pair[0]):
        spec = one.spec
        if spec.replicas.get(name) == node and spec.verdict in ("bound", "reserved"):
            return Chosen(
                revision=revision,
                at=records.at.get(revision, ""),
                seen=spec.revision,
                age_ms=spec.age_ms,
                attempt=spec.attempt,
                passage=_recorded(spec),
                candidates=spec.candidates,
                grant=spec.grant,
                left=Amount(spec.left),
                policy=spec.policy,
                overrides=spec.overrides,
                victims=tuple(victim for victim, patron in spec.victims.items() if patron == f"replica/{name}"),
            )
    return None


def _recorded(spec: DecisionSpec) -> Passage:
    left, steps = spec.nodes, []
    for name, refused in spec.funnel:
        left -= refused
        steps.append(Step(name, _REASONS.get(name, ""), refused, left))
    return Passage(spec.nodes, tuple(steps), spec.fits)


def _decided(revision: int, at: str, spec: DecisionSpec) -> Told:
    return Told(revision, at, "scheduler", spec.verdict, spec.reason, spec.detail, spec.attempt)


# -- a workload ----------------------------------------------------------------------------------------------------------------


def tell_workload(
    view: View, declared: Workload | None, tenant: str, name: str, records: Records, rules: Rules, node: str = ""
) -> WorkloadTold:
    """`declared` is None if only replicas of it are left. Raises `NoNode` if there is no `node` of that name."""
    slots = _slots(view, tenant, name)
    phases = view.replicas.column("phase")[slots]
    counts = {phase: int(np.count_nonzero(phases == number)) for number, phase in enumerate(PHASES)}
    stages = {QUEUED if phase is Phase.PENDING else phase.value: count for phase, count in counts.items() if count}
    kind = "" if declared is None else declared.spec.type
    gone = (*_GOES_BY, Phase.FINISHED) if kind == "job" else _GOES_BY  # what has ended takes nobody's place, settled or not
    there = sum(count for phase, count in counts.items() if phase not in gone)
    wanted, missing = _wanted(declared, there, len(slots))
    groups = tuple(_groups(view, slots, rules))
    answered = None
    if node and len(slots):
        answered, _ = _answers(view, int(slots[np.argmax(phases == PENDING)]), rules, node, "")
    revisions = view.replicas.column("revision")[slots[phases == PENDING]].tolist()
    limit, detail = _limit(counts, groups, missing, kind), ""
    said = None if declared is None else _said(declared)
    if said is not None and (said.ended or not groups):
        limit, detail = said.word, said.detail
    return WorkloadTold(
        kind="workload",
        tenant=tenant,
        name=name,
        wanted=wanted,
        stages=stages,
        missing=missing,
        since=records.at.get(min(revisions), "") if revisions else "",
        evidence=evidence(view, rules),
        groups=groups,
        limit=limit,
        there=answered,
        history=records.history(),
        detail=detail,
    )


def _wanted(declared: Workload | None, there: int, made: int) -> tuple[int, int]:
    """How many in all, and how many of those are not made yet: of a job with completions, for now."""
    if declared is None or declared.metadata.deleting:
        return 0, 0
    spec = declared.spec
    if spec.type == "daemon":
        return there, 0  # as many as there are nodes for it; who makes them knows
    if spec.type != "job":
        return spec.replicas, max(0, spec.replicas - there)
    wanted = spec.completions or spec.replicas
    said = _said(declared)
    over = said is not None and said.ended
    return wanted, 0 if over else max(0, min(wanted - made, spec.replicas - there))


class _Saying(NamedTuple):
    """What its controllers say of it. `ended`: nothing more is done for it."""

    word: str
    detail: str
    ended: bool = False


def _said(declared: Workload) -> _Saying | None:
    current = {one.type: one for one in declared.status.conditions if one.observed_generation == declared.metadata.generation}
    failed, complete, rolls = current.get("Failed"), current.get("Complete"), current.get("Progressing")
    if failed is not None and failed.status == "True":
        return _Saying(failed.reason, failed.message, ended=True)
    if complete is not None and complete.status == "True":
        return _Saying("", "it is done", ended=True)
    admitted = current.get("Admitted")
    if admitted is not None and admitted.status == "False":
        return _Saying(admitted.reason, admitted.message)
    if rolls is not None and rolls.reason != ROLLED_OUT and rolls.message:
        return _Saying("rollout", rolls.message)
    return None


def _slots(view: View, tenant: str, name: str) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    owner = view.shapes.workloads.ids.get(f"{tenant}/{name}")
    mine = np.flatnonzero(view.shapes.column("workload") == (-2 if owner is None else owner))
    found: np.ndarray[tuple[int], np.dtype[np.intp]] = np.flatnonzero(np.isin(view.replicas.column("generation"), mine))
    return found


def _groups(view: View, slots: np.ndarray[tuple[int], np.dtype[np.intp]], rules: Rules) -> list[Group]:
    """Those that wait, by what makes their fate the same; the most first."""
    at, keys = view.replicas.at, view.replicas.keys
    alike: dict[tuple[int, int], list[int]] = {}
    for slot in slots.tolist():
        if at.phase[slot] == PENDING:
            alike.setdefault((at.generation[slot], at.priority[slot]), []).append(slot)
    found = []
    for (generation, priority), some in sorted(alike.items(), key=lambda pair: -len(pair[1]))[:GROUPS_MAX]:
        first = min(some, key=lambda slot: at.index[slot])
        waits: Waits = explain_waiting(view, generation, priority, rules)
        name = keys[first].split("/", 2)[2]
        found.append(Group(view.shapes.at.number[generation], priority, len(some), name, waits))
    return found


def _limit(counts: Mapping[Phase, int], groups: Sequence[Group], missing: int, kind: str) -> str:
    """What keeps it from being whole: a reason; replicas that are not made yet; or the stage in which most are under way."""
    if groups:
        return groups[0].waits.reason or QUEUED
    if missing:
        return "missing"
    arrived = _ARRIVED["job"] if kind == "job" else _ARRIVED[""]
    under_way = {phase: count for phase, count in counts.items() if count and phase not in arrived and phase not in _GOES_BY}
    return max(under_way, key=lambda phase: under_way[phase]).value if under_way else ""
