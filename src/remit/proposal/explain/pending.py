"""Explains why replicas are pending: reason, funnel, quota, preemption.

Read-only: it queries a view and places nothing. The reason is the one a scheduler would record now, found in the same order
as in attempts.py: paused or deleted workload, missing gang members, quota, then the funnel over the nodes. Remedies are
tried on frozen copies (what_if.py, remedies.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law.fit import Requirements
from remit.law.overrides import ActiveOverrides, Instant, active_overrides
from remit.law.refusals import REFUSALS
from remit.model.claims import Code
from remit.model.records import DecisionCandidate
from remit.model.resources import DEVICES_PREFIX, WHOLE_DEVICE, Amount
from remit.observation.replica_table import PENDING
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.attempts import QueueKey, gang_minimum, gang_shortage_text, queue_key_for
from remit.proposal.explain.remedies import find_remedies
from remit.proposal.explain.result_types import (
    Change,
    ExplanationEvidence,
    FailedRule,
    FilterFunnel,
    FilterStep,
    GangExplanation,
    NearestNodeExplanation,
    NodeFitExplanation,
    PendingExplanation,
    PreemptionExplanation,
    QuotaExplanation,
    Remedy,
    VictimInfo,
)
from remit.proposal.explain.what_if import DAEMON_FILTERS, Trial, TrialSetting
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.funnel import Funnel, could_ever_fit, funnel, missing_capacity, nearest_fit, rejection_text
from remit.proposal.placement.plugins import GANG_MEMBER, Filter, Score, UnblockEvent
from remit.proposal.placement.preemption import DisruptionAllowance, plan_evictions
from remit.proposal.placement.preemption_candidates import VictimRateLimit, VictimSelector
from remit.proposal.quota import QuotaSource, quota_source

CANDIDATES: Final = 3
VICTIMS_MAX: Final = 1_000


class PlacementInputs(NamedTuple):
    """Inputs of placement besides the view: the current time, and third-party plug-ins."""

    now: Instant
    filters: tuple[Filter, ...] = ()
    scores: tuple[Score, ...] = DEFAULT_SCORES

    def effects(self, view: SchedulerView) -> ActiveOverrides:
        return active_overrides(view.objects.overrides.values(), self.now)


class PendingWork(NamedTuple):
    """Equal pending replicas of one generation, with everything a scheduler knows about them."""

    key: QueueKey
    requirements: Requirements
    generation: int
    pending: int
    gang_minimum: int
    quota_source: QuotaSource
    trial: Trial

    @property
    def needed(self) -> int:
        """How many replicas must be placed at once."""
        return max(self.gang_minimum, 1)


def pending_work(view: SchedulerView, generation: int, priority: int, rules: PlacementInputs) -> PendingWork:
    effects = rules.effects(view)
    key = queue_key_for(view, effects, generation, priority)
    requirements = view.shapes.requirements_of(key.shape)
    of, phase = view.replicas.column("generation"), view.replicas.column("phase")
    waiting = int(np.count_nonzero((of == generation) & (phase == PENDING)))
    fixed = DAEMON_FILTERS if view.shapes.placement_of(generation).spec.type == "daemon" else ()
    trial = Trial.of(view, TrialSetting(requirements, key.pins, effects, rules.filters, rules.scores, fixed))
    minimum = gang_minimum(view, key)
    source = quota_source(view, key.tenant, rules.now[1], requirements.charge.pairs, max(minimum, 1))
    return PendingWork(key, requirements, generation, waiting, minimum, source, trial)


def explain_pending(view: SchedulerView, generation: int, priority: int, rules: PlacementInputs) -> PendingExplanation:
    """Why replicas of this generation and priority are pending now."""
    work = pending_work(view, generation, priority, rules)
    node_funnel = funnel(work.trial.kernel, work.trial.work_class)
    code, detail, never = _reason(view, work, node_funnel)
    if code is None and _policy_lapsed(work.requirements, rules.now):
        code, detail = Code.POLICY_LAPSED, f"the lease on policy revision {work.requirements.policy} has expired"
    refusal = None if code is None else REFUSALS[code]
    nearest = nearest_fit(work.trial.kernel, work.trial.work_class) if not node_funnel.fits else None
    placements = work.trial.try_place(work.needed)
    gang = None
    if work.key.gang:
        gang = GangExplanation(
            work.key.gang, view.holds.bound_count(generation), work.pending, len(work.trial.try_place(work.pending).rows)
        )
    return PendingExplanation(
        verdict="now" if code is None else "never" if never else "not-now",
        reason="" if code is None else code.value,
        meaning="" if code is None else reason_text(code, node_funnel),
        cure="" if refusal is None else refusal.cure,
        detail=detail,
        cures=_unblock_events(work, node_funnel, code),
        passage=filter_funnel(node_funnel),
        quota=_quota_explanation(work),
        nearest=nearest
        and NearestNodeExplanation(
            work.trial.kernel.node_name(nearest.row),
            tuple(filter_.name for filter_ in nearest.refused),
            missing_amount(work.trial, nearest.row),
        ),
        gang=gang,
        preemption=_preemption(view, work) if code is not None and len(placements.rows) < work.needed else None,
        unblocks=_remedies(work, code, lapsed=_policy_lapsed(work.requirements, rules.now)),
        candidates=candidates(work.trial) if code is None else (),
    )


# -- the reason ----------------------------------------------------------------------------------------------------------------


def _reason(view: SchedulerView, work: PendingWork, node_funnel: Funnel) -> tuple[Code | None, str, bool]:
    """Returns the dominant reason, its detail, and whether it is permanent.

    Permanent (`never`): no existing node could hold the replica even if it were empty, so waiting does not help.
    """
    key, source = work.key, work.quota_source
    if not view.shapes.is_open(work.generation):
        return Code.DELETING, "the workload is deleted or being deleted", True
    never = not could_ever_fit(work.trial.kernel, work.trial.work_class)
    if key.paused:
        return Code.OVERRIDE, f"paused by override {key.paused}", never
    if work.gang_minimum > 1 and work.pending < work.gang_minimum:
        return Code.GANG_SHORT, f"{work.pending} of {work.gang_minimum} required gang members exist", never
    if source.covers(work.requirements.charge.pairs, work.needed) < work.needed:
        return source.reason, source.shortage_text(work.requirements.charge.pairs, work.needed), never
    if work.trial.can_place(work.needed):
        return None, "", False
    if key.gang and node_funnel.fits:
        return (
            Code.GANG_SHORT,
            gang_shortage_text(len(work.trial.try_place(work.needed).rows), work.needed),
            never,
        )
    detail = rejection_text(node_funnel, work.requirements)
    return (
        node_funnel.reason,
        f"{detail}; no node could hold it even if empty" if never and node_funnel.nodes else detail,
        never,
    )


def _policy_lapsed(requirements: Requirements, now: Instant) -> bool:
    """Whether the authority would refuse a bind because the lease on the policy has expired. A scheduler learns that from the
    refusal.
    """
    until = requirements.policy_deadline
    return until is not None and (until.boot != now[0] or now[1] >= until.at_ms)


def _unblock_events(work: PendingWork, node_funnel: Funnel, code: Code | None) -> tuple[str, ...]:
    """Returns the kinds of events after which a replica that is pending for this reason may be placeable."""
    match code:
        case None:
            return ()
        case Code.DELETING:
            return (UnblockEvent.WORKLOAD,)
        case Code.OVERRIDE if work.key.paused:
            return (UnblockEvent.OVERRIDE,)
        case Code.GANG_SHORT if work.pending < work.gang_minimum:
            return (GANG_MEMBER, UnblockEvent.WORKLOAD)
        case Code.OVER_QUOTA | Code.GRANT_VOID | Code.GRANT_EXPIRED:
            return (UnblockEvent.QUOTA,)
        case Code.POLICY_LAPSED:
            return (UnblockEvent.POLICY,)
    more = (UnblockEvent.ROOM,) if work.key.gang or node_funnel.fits else ()
    return tuple(dict.fromkeys((*node_funnel.unblock_events(), *more)))


def filter_funnel(node_funnel: Funnel) -> FilterFunnel:
    remaining, steps = node_funnel.nodes, []
    for step in node_funnel.steps:
        remaining -= step.refused
        steps.append(FilterStep(step.filter.name, step.filter.code.value, step.refused, remaining, filter_reason(step.filter)))
    return FilterFunnel(node_funnel.nodes, tuple(steps), node_funnel.fits)


def filter_reason(filter_: Filter) -> str:
    """Why a filter rejects nodes: its own `reason`, or the meaning of its code."""
    return filter_.reason or REFUSALS[filter_.code].meaning


def reason_text(code: Code, node_funnel: Funnel) -> str:
    """The meaning of a refusal code; if the dominant filter has this code, that filter's own reason."""
    step = node_funnel.dominant
    return filter_reason(step.filter) if step is not None and step.filter.code is code else REFUSALS[code].meaning


def _quota_explanation(work: PendingWork) -> QuotaExplanation:
    source = work.quota_source
    quota_left = (
        Amount() if source.ledger is None else Amount({name: max(count, 0) for name, count in source.ledger.free.items()})
    )
    unusable = "" if source.unusable is None else source.unusable.value
    covers = source.covers(work.requirements.charge.pairs, work.needed)
    return QuotaExplanation(source.name, quota_left, work.requirements.charge, work.needed, covers, unusable)


def candidates(trial: Trial, count: int = CANDIDATES) -> tuple[DecisionCandidate, ...]:
    rows = trial.kernel.top_rows(trial.work_class, count)
    return tuple(DecisionCandidate(node=trial.kernel.node_name(row), score=total, parts=parts) for row, total, parts in rows)


def missing_amount(trial: Trial, row: int) -> Amount:
    """Amounts that this node lacks, with devices in the units of `Amount`."""
    missing = missing_capacity(trial.kernel, trial.work_class, row)
    kinds = {part.kind for part in trial.work_class.requirements.whole_devices}
    shared = {f"{part.kind} share": part.kind for part in trial.work_class.requirements.device_shares}
    amount: dict[str, int] = {}
    for name, count in missing.items():
        if name in shared:
            amount[DEVICES_PREFIX + shared[name]] = count
        elif name in kinds:
            amount[DEVICES_PREFIX + name] = count * WHOLE_DEVICE
        else:
            amount[name] = count
    return Amount(amount)


# -- remedies ------------------------------------------------------------------------------------------------------------------


def _remedies(work: PendingWork, code: Code | None, *, lapsed: bool) -> tuple[Remedy, ...]:
    """Remedies, each sufficient alone. Changes needed besides capacity (override, members, quota) are part of every one of
    them.
    """
    if code is None or code is Code.DELETING:
        return ()
    if work.trial.can_place(work.needed):
        rows = np.flatnonzero(work.trial.fits())
        names = tuple(work.trial.kernel.node_name(row) for row in rows[:CANDIDATES].tolist())
        return (Remedy(tuple(_changes_before_capacity(work, work.requirements.charge, lapsed=lapsed)), len(rows), names),)
    remedies = []
    for remedy in find_remedies(work.trial, work.needed):
        less = sum((change.amount for change in remedy.changes if change.kind == "shrink"), Amount())
        first = _changes_before_capacity(work, work.requirements.charge - less, lapsed=lapsed)
        remedies.append(Remedy((*first, *remedy.changes), remedy.fits, remedy.nodes))
    return tuple(remedies)


def _changes_before_capacity(work: PendingWork, charge: Amount, *, lapsed: bool) -> Iterable[Change]:
    key, source = work.key, work.quota_source
    if lapsed:
        yield Change("policy", f"{work.requirements.policy}")
    if key.paused:
        yield Change("override", key.paused)
    if work.gang_minimum > 1 and work.pending < work.gang_minimum:
        yield Change("members", count=work.gang_minimum - work.pending)
    if source.ledger is None:
        yield Change("tenant", source.name)
        return
    if source.unusable is not None:
        yield Change("grant", source.name)
    missing = (charge * work.needed).excess_over(Amount(source.ledger.free))
    if missing:
        yield Change("quota", source.name, missing)


def _preemption(view: SchedulerView, work: PendingWork) -> PreemptionExplanation:
    """The victims that one replica would preempt, selected as in attempts.py but without the victim rate limit."""
    key, trial = work.key, work.trial
    if not key.preempts:
        return PreemptionExplanation(False, "class")
    if key.gang:
        return PreemptionExplanation(False, "gang")
    if work.quota_source.covers(work.requirements.charge.pairs, 1) < 1:
        return PreemptionExplanation(False, "quota")
    open_rows = trial.kernel.without_capacity_check(trial.work_class)
    if not open_rows.any() or not could_ever_fit(trial.kernel, trial.work_class):
        return PreemptionExplanation(False, "place")
    victims = VictimSelector(VictimRateLimit())
    candidates = victims.candidates(view, trial.work_class, key.priority)
    if candidates is None or not open_rows[candidates.rows].any():
        return PreemptionExplanation(False, "priority")
    for allowance, reason in (
        (victims.disruption_allowance(view), ""),
        (DisruptionAllowance.unlimited(int(candidates.groups.max()) + 1), "protected"),
    ):
        plans = plan_evictions(
            trial.work_class.requirements, trial.columns, open_rows, candidates, allowance, count=1, victims_max=VICTIMS_MAX
        ).evictions
        if plans:
            victim_infos = tuple(_victim(view, slot) for slot in plans[0].victims)
            return PreemptionExplanation(not reason, reason, trial.kernel.node_name(plans[0].row), victim_infos)
    return PreemptionExplanation(False, "little")


def _victim(view: SchedulerView, slot: int) -> VictimInfo:
    replicas = view.replicas
    name = replicas.keys[slot].removeprefix("replica/")
    return VictimInfo(name, view.shapes.workload_of(replicas.at.generation[slot]), replicas.at.priority[slot])


# -- one node ------------------------------------------------------------------------------------------------------------------


def explain_node(trial: Trial, node: str) -> NodeFitExplanation | None:
    """Every rule that this node violates now; None if there is no such node."""
    row = trial.columns.rows.get(node)
    if row is None:
        return None
    broken = [
        FailedRule(filter_.name, filter_.code.value, filter_reason(filter_), REFUSALS[filter_.code].cure)
        for filter_ in trial.refusing_filters(row)
    ]
    score = next(
        (filter_ for filter_ in trial.kernel.top_rows(trial.work_class, len(trial.columns)) if filter_[0] == row), None
    )
    if broken or score is None:
        return NodeFitExplanation(node, False, tuple(broken), missing_amount(trial, row))
    return NodeFitExplanation(node, True, (), Amount(), score[1], score[2])


def remove_replica(view: SchedulerView, trial: Trial, slot: int) -> None:
    """Removes a replica from a trial, so that the trial shows where else the replica could run."""
    row, generation = view.replicas.at.node[slot], view.replicas.at.generation[slot]
    if row < 0:
        return
    trial.columns.post(row, view.shapes.placement_of(generation).resources, view.replicas.devices.get(slot, {}), -1)
    trial.count_peer([index for index in trial.peers.indexes() if view.shapes.counts_in(generation, index)], row, -1)


def evidence(view: SchedulerView, rules: PlacementInputs) -> ExplanationEvidence:
    policy, effects = view.shapes.policy, rules.effects(view)
    names: Sequence[str] = [override.metadata.name for override in effects.overrides]
    return ExplanationEvidence(view.revision, view.age_ms(), 0 if policy is None else policy.spec.number, tuple(names))
