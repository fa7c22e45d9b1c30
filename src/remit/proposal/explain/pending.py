"""Why replicas are pending: reason, funnel, quota, preemption.

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
from remit.observation.scheduler_view import View
from remit.proposal.attempts import QueueKey, queue_key_for, gang_minimum
from remit.proposal.explain.remedies import find_remedies
from remit.proposal.explain.result_types import (
    FailedRule,
    Change,
    ExplanationEvidence,
    GangExplanation,
    NearestNodeExplanation,
    NodeFitExplanation,
    FilterFunnel,
    PreemptionExplanation,
    QuotaExplanation,
    FilterStep,
    Remedy,
    VictimInfo,
    PendingExplanation,
)
from remit.proposal.explain.what_if import DAEMON_FILTERS, TrialSetting, Trial
from remit.proposal.placement.builtin_plugins import DEFAULT_SCORES
from remit.proposal.placement.funnel import Funnel, could_ever_fit, funnel, missing_capacity, nearest_fit
from remit.proposal.placement.plugins import UnblockEvent, Filter, Score
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

    def effects(self, view: View) -> ActiveOverrides:
        return active_overrides(view.things.overrides.values(), self.now)


class PendingWork(NamedTuple):
    """Equal pending replicas of one generation, with everything a scheduler knows about them."""

    key: QueueKey
    ask: Requirements
    generation: int
    waiting: int
    least: int
    purse: QuotaSource
    trial: Trial

    @property
    def want(self) -> int:
        """How many replicas must be placed at once."""
        return max(self.least, 1)


def pending_work(view: View, generation: int, priority: int, rules: PlacementInputs) -> PendingWork:
    effects = rules.effects(view)
    key = queue_key_for(view, effects, generation, priority)
    ask = view.shapes.ask(key.shape)
    of, phase = view.replicas.column("generation"), view.replicas.column("phase")
    waiting = int(np.count_nonzero((of == generation) & (phase == PENDING)))
    fixed = DAEMON_FILTERS if view.shapes.cut_of(generation).spec.type == "daemon" else ()
    trial = Trial.of(view, TrialSetting(ask, key.pins, effects, rules.filters, rules.scores, fixed))
    least = gang_minimum(view, key)
    from_ = quota_source(view, key.tenant, rules.now[1], ask.charge.pairs, max(least, 1))
    return PendingWork(key, ask, generation, waiting, least, from_, trial)


def explain_pending(view: View, generation: int, priority: int, rules: PlacementInputs) -> PendingExplanation:
    """Why replicas of this generation and priority are pending now."""
    work = pending_work(view, generation, priority, rules)
    seen = funnel(work.trial.kernel, work.trial.one)
    code, detail, never = _reason(view, work, seen)
    if code is None and _policy_lapsed(work.ask, rules.now):
        code, detail = Code.POLICY_LAPSED, f"the lease on policy {work.ask.policy} has expired"
    refusal = None if code is None else REFUSALS[code]
    near = nearest_fit(work.trial.kernel, work.trial.one) if not seen.fits else None
    found = work.trial.tried(work.want)
    gang = None
    if work.key.gang:
        gang = GangExplanation(work.key.gang, view.standing(generation), work.waiting, len(work.trial.tried(work.waiting).rows))
    return PendingExplanation(
        verdict="now" if code is None else "never" if never else "not-now",
        reason="" if code is None else code.value,
        meaning="" if code is None else reason_text(code, seen),
        cure="" if refusal is None else refusal.cure,
        detail=detail,
        cures=_unblock_events(work, seen, code),
        passage=filter_funnel(seen),
        quota=_quota_explanation(work),
        nearest=near
        and NearestNodeExplanation(work.trial.kernel.name(near.row), tuple(one.name for one in near.refused), missing_amount(work.trial, near.row)),
        gang=gang,
        preemption=_preemption(view, work) if code is not None and len(found.rows) < work.want else None,
        unblocks=_remedies(work, code, lapsed=_policy_lapsed(work.ask, rules.now)),
        candidates=candidates(work.trial) if code is None else (),
    )


# -- the reason ----------------------------------------------------------------------------------------------------------------


def _reason(view: View, work: PendingWork, seen: Funnel) -> tuple[Code | None, str, bool]:
    """Returns the dominant reason, its detail, and whether it is permanent.

    Permanent (`never`): no existing node could hold the replica even if it were empty, so waiting does not help.
    """
    key, from_ = work.key, work.purse
    if not view.shapes.open(work.generation):
        return Code.DELETING, "the workload is deleted or being deleted", True
    never = not could_ever_fit(work.trial.kernel, work.trial.one)
    if key.paused:
        return Code.OVERRIDE, f"paused by override {key.paused}", never
    if work.least > 1 and work.waiting < work.least:
        return Code.GANG_SHORT, f"{work.waiting} of {work.least} required gang members exist", never
    if from_.covers(work.ask.charge.pairs, work.want) < work.want:
        return from_.reason, _quota_text(from_), never
    if work.trial.places(work.want):
        return None, "", False
    if key.gang and seen.fits:
        return Code.GANG_SHORT, f"{len(work.trial.tried(work.want).rows)} of {work.want} gang members fit, and they must be bound at once", never
    step = seen.dominant
    detail = (
        f"{step.filter.name} refused the last {step.refused} of {seen.nodes} nodes"
        if step is not None
        else "the cluster has no nodes"
    )
    return seen.reason, f"{detail}; no node could hold it even if empty" if never and seen.nodes else detail, never


def _policy_lapsed(ask: Requirements, now: Instant) -> bool:
    """Whether the authority would refuse a bind because the lease on the policy has expired. A scheduler learns that from the
    refusal.
    """
    until = ask.policy_deadline
    return until is not None and (until.boot != now[0] or now[1] >= until.at_ms)


def _quota_text(from_: QuotaSource) -> str:
    if from_.ledger is None:
        return f"{from_.name} does not exist in this scope"
    return f"{from_.name} has too little quota left"


def _unblock_events(work: PendingWork, seen: Funnel, code: Code | None) -> tuple[str, ...]:
    """Kinds of events that end a wait for this reason."""
    match code:
        case None:
            return ()
        case Code.DELETING:
            return (UnblockEvent.WORKLOAD,)
        case Code.OVERRIDE if work.key.paused:
            return (UnblockEvent.OVERRIDE,)
        case Code.GANG_SHORT if work.waiting < work.least:
            return ("member", UnblockEvent.WORKLOAD)
        case Code.OVER_QUOTA | Code.GRANT_VOID | Code.GRANT_EXPIRED:
            return (UnblockEvent.QUOTA,)
        case Code.POLICY_LAPSED:
            return (UnblockEvent.POLICY,)
    more = (UnblockEvent.ROOM,) if work.key.gang or seen.fits else ()
    return tuple(dict.fromkeys((*seen.cures(), *more)))


def filter_funnel(seen: Funnel) -> FilterFunnel:
    left, steps = seen.nodes, []
    for step in seen.steps:
        left -= step.refused
        steps.append(FilterStep(step.filter.name, step.filter.code.value, step.refused, left, filter_reason(step.filter)))
    return FilterFunnel(seen.nodes, tuple(steps), seen.fits)


def filter_reason(one: Filter) -> str:
    """Why a filter rejects nodes: its own `reason`, or the meaning of its code."""
    return one.reason or REFUSALS[one.code].meaning


def reason_text(code: Code, seen: Funnel) -> str:
    """The meaning of a refusal code; if the dominant filter has this code, that filter's own reason."""
    step = seen.dominant
    return filter_reason(step.filter) if step is not None and step.filter.code is code else REFUSALS[code].meaning


def _quota_explanation(work: PendingWork) -> QuotaExplanation:
    from_ = work.purse
    left = Amount() if from_.ledger is None else Amount({name: max(count, 0) for name, count in from_.ledger.free.items()})
    dead = "" if from_.dead is None else from_.dead.value
    covers = from_.covers(work.ask.charge.pairs, work.want)
    return QuotaExplanation(from_.name, left, work.ask.charge, work.want, covers, dead)


def candidates(trial: Trial, count: int = CANDIDATES) -> tuple[DecisionCandidate, ...]:
    rows = trial.kernel.best(trial.one, count)
    return tuple(DecisionCandidate(node=trial.kernel.name(row), score=total, parts=parts) for row, total, parts in rows)


def missing_amount(trial: Trial, row: int) -> Amount:
    """What this node lacks, with devices in the units of `Amount`."""
    found = missing_capacity(trial.kernel, trial.one, row)
    kinds = {part.kind for part in trial.one.ask.whole_devices}
    shared = {f"{part.kind} share": part.kind for part in trial.one.ask.device_shares}
    amount: dict[str, int] = {}
    for name, count in found.items():
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
    if work.trial.places(work.want):
        rows = np.flatnonzero(work.trial.fits())
        names = tuple(work.trial.kernel.name(row) for row in rows[:CANDIDATES].tolist())
        return (Remedy(tuple(_changes_before_capacity(work, work.ask.charge, lapsed=lapsed)), len(rows), names),)
    found = []
    for one in find_remedies(work.trial, work.want):
        less = sum((change.amount for change in one.changes if change.kind == "shrink"), Amount())
        first = _changes_before_capacity(work, work.ask.charge - less, lapsed=lapsed)
        found.append(Remedy((*first, *one.changes), one.fits, one.nodes))
    return tuple(found)


def _changes_before_capacity(work: PendingWork, charge: Amount, *, lapsed: bool) -> Iterable[Change]:
    key, from_ = work.key, work.purse
    if lapsed:
        yield Change("policy", f"{work.ask.policy}")
    if key.paused:
        yield Change("override", key.paused)
    if work.least > 1 and work.waiting < work.least:
        yield Change("members", count=work.least - work.waiting)
    if from_.ledger is None:
        yield Change("tenant", from_.name)
        return
    if from_.dead is not None:
        yield Change("grant", from_.name)
    lacking = (charge * work.want).excess_over(Amount(from_.ledger.free))
    if lacking:
        yield Change("quota", from_.name, lacking)


def _preemption(view: View, work: PendingWork) -> PreemptionExplanation:
    """The victims that one replica would preempt, selected as in attempts.py but without the victim rate limit."""
    key, trial = work.key, work.trial
    if not key.preempts:
        return PreemptionExplanation(False, "class")
    if key.gang:
        return PreemptionExplanation(False, "gang")
    if work.purse.covers(work.ask.charge.pairs, 1) < 1:
        return PreemptionExplanation(False, "quota")
    open_rows = trial.kernel.roomless(trial.one)
    if not open_rows.any() or not could_ever_fit(trial.kernel, trial.one):
        return PreemptionExplanation(False, "place")
    victims = VictimSelector(VictimRateLimit())
    found = victims.candidates(view, trial.one, key.priority)
    if found is None or not open_rows[found.rows].any():
        return PreemptionExplanation(False, "priority")
    for spare, why in ((victims.limits(view), ""), (DisruptionAllowance.boundless(int(found.groups.max()) + 1), "protected")):
        plans = plan_evictions(trial.one.ask, trial.columns, open_rows, found, spare, count=1, victims_max=VICTIMS_MAX).evictions
        if plans:
            told = tuple(_victim(view, slot) for slot in plans[0].victims)
            return PreemptionExplanation(not why, why, trial.kernel.name(plans[0].row), told)
    return PreemptionExplanation(False, "little")


def _victim(view: View, slot: int) -> VictimInfo:
    replicas = view.replicas
    name = replicas.keys[slot].removeprefix("replica/")
    return VictimInfo(name, view.shapes.name(replicas.at.generation[slot]), replicas.at.priority[slot])


# -- one node ------------------------------------------------------------------------------------------------------------------


def explain_node(trial: Trial, node: str) -> NodeFitExplanation | None:
    """Every rule that this node violates now; None if there is no such node."""
    row = trial.columns.rows.get(node)
    if row is None:
        return None
    broken = [FailedRule(one.name, one.code.value, filter_reason(one), REFUSALS[one.code].cure) for one in trial.refusing(row)]
    score = next((one for one in trial.kernel.best(trial.one, len(trial.columns)) if one[0] == row), None)
    if broken or score is None:
        return NodeFitExplanation(node, False, tuple(broken), missing_amount(trial, row))
    return NodeFitExplanation(node, True, (), Amount(), score[1], score[2])


def remove_replica(view: View, trial: Trial, slot: int) -> None:
    """Removes a replica from a trial, so that the trial shows where else the replica could run."""
    row, generation = view.replicas.at.node[slot], view.replicas.at.generation[slot]
    if row < 0:
        return
    trial.columns.post(row, view.shapes.cut_of(generation).resources, view.replicas.devices.get(slot, {}), -1)
    trial.moved([index for index in trial.peers.indexes() if view.shapes.counts_in(generation, index)], row, -1)


def evidence(view: View, rules: PlacementInputs) -> ExplanationEvidence:
    policy, effects = view.policy, rules.effects(view)
    names: Sequence[str] = [one.metadata.name for one in effects.overrides]
    return ExplanationEvidence(view.revision, view.age_ms(), 0 if policy is None else policy.spec.number, tuple(names))
