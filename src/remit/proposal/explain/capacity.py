"""How many more replicas of a workload fit: hard, reclaimable, soft.

Replicas are placed with the kernel on frozen copies of the nodes; no claim is made.

The three numbers must not be added: **hard** is free now; **reclaimable** is held by replicas of lower priority that would
have to be preempted; **soft** is on nodes that are not ready, not schedulable, or not created yet. Each is given as the
number that capacity allows (`room`), and as the number that the tenant's quota also covers (`replicas`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from remit.law.admission import Admission, apply_policy_defaults
from remit.law.fit import is_ready, takes_new_work
from remit.law.refusals import REFUSALS
from remit.law.requirements import compile_requirements
from remit.model.claims import Code
from remit.model.kinds import Node, NodeHealth, NodePool, NodeSpec, NodeStatus, Workload
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.explain.pending import PlacementInputs, filter_funnel, missing_amount, reason_text, remove_replica
from remit.proposal.explain.remedies import NAMED_MAX, find_remedies
from remit.proposal.explain.result_types import Change, FilterFunnel, NearestNodeExplanation, Remedy
from remit.proposal.explain.what_if import DAEMON_FILTERS, NODE_STATE_FILTERS, Trial, TrialSetting
from remit.proposal.placement.funnel import could_ever_fit, funnel, nearest_fit, rejection_text
from remit.proposal.placement.kernel import Placements
from remit.proposal.placement.preemption import VictimCandidates, plan_evictions
from remit.proposal.placement.preemption_candidates import VictimRateLimit, VictimSelector
from remit.proposal.placement.topology_gates import depends_on_peers
from remit.proposal.quota import QuotaSource, quota_source

COUNT_MAX: Final = 100_000
ROUNDS_MAX: Final = 2_000
"""Rounds of the search for victims. If more would be needed, the result is a lower bound."""
POOL_NODES_MAX: Final = 1_000


class ReplicaDistribution(Struct, frozen=True):
    """Number of replicas by zone, pool and node, largest first."""

    zones: dict[str, int]
    pools: dict[str, int]
    nodes: dict[str, int]


class HardFit(Struct, frozen=True):
    """Capacity that is free now: `room` is what nodes allow, `quota` what the tenant may use, `replicas` what both allow."""

    replicas: int
    room: int
    quota: int
    where: ReplicaDistribution


class ReclaimableFit(Struct, frozen=True):
    """Capacity freed by preempting `victims` replicas of lower priority within their disruption limits. `why` is set if there
    is none.
    """

    replicas: int
    room: int
    victims: int
    where: ReplicaDistribution
    why: str


class SoftFit(Struct, frozen=True):
    """Capacity on nodes that accept no replicas now or are not created yet, by cause. `why` is set if there is none."""

    replicas: int
    room: int
    causes: dict[str, int]
    where: ReplicaDistribution
    why: str


class CapacityLimit(Struct, frozen=True):
    """Why no further replica fits beyond the hard capacity, and what would make one fit."""

    reason: str
    meaning: str
    cure: str
    detail: str
    passage: FilterFunnel
    nearest: NearestNodeExplanation | None
    unblocks: tuple[Remedy, ...]


class CapacityAnswer(Struct, frozen=True):
    """Answer of `remit capacity`. `capped`: the search stopped at `most` replicas, so more may fit."""

    tenant: str
    workload: str
    priority: int
    charge: Amount
    most: int
    capped: bool
    revision: int
    nodes: int
    hard: HardFit
    reclaimable: ReclaimableFit
    soft: SoftFit
    stop: CapacityLimit | None


class _CapacityRequest(NamedTuple):
    workload: Workload
    priority: int
    preempts: bool
    paused: str
    quota_source: QuotaSource
    trial: Trial
    most: int

    @property
    def gang(self) -> int:
        return self.workload.spec.gang.min if self.workload.spec.gang is not None else 0

    def covered(self, fitting: int, before: int = 0) -> int:
        """How many of `fitting` replicas the quota covers, if `before` others are charged first. A gang that is not covered
        completely counts as 0.
        """
        available = max(0, self.quota_source.covers(self.trial.setting.requirements.charge.pairs, before + fitting) - before)
        count = min(fitting, available)
        return 0 if self.paused or (before + count < self.gang) else count


def compute_capacity(
    view: SchedulerView, workload: Workload, rules: PlacementInputs, *, most: int = COUNT_MAX, pools: Sequence[NodePool] = ()
) -> CapacityAnswer:
    """Computes how many replicas of `workload` fit. A gang is tried complete even if that exceeds `most`.

    Raises ValueError if the workload would not be admitted.
    """
    most = max(most, workload.spec.gang.min if workload.spec.gang is not None else 1)
    request = _capacity_request(view, workload, rules, most)
    trial = request.trial
    free = trial.kernel.place_run(trial.work_class, most)
    hard_count = len(free.rows)
    requirements = trial.setting.requirements
    hard = HardFit(
        request.covered(hard_count),
        hard_count,
        request.quota_source.covers(requirements.charge.pairs, most),
        _distribution(trial, free.rows),
    )
    return CapacityAnswer(
        tenant=requirements.tenant,
        workload=workload.metadata.name,
        priority=request.priority,
        charge=requirements.charge,
        most=most,
        capped=hard_count == most,
        revision=view.revision,
        nodes=len(view.columns.rows),
        hard=hard,
        reclaimable=_reclaimable(view, request, hard),
        soft=_soft(request, hard, pools),
        stop=_capacity_limit(request, hard, free),
    )


def _capacity_request(view: SchedulerView, workload: Workload, rules: PlacementInputs, most: int) -> _CapacityRequest:
    meta, policy = workload.metadata, view.shapes.policy
    terms = Admission({} if policy is None else policy.spec.policies).terms(meta.tenant, meta.name, meta.labels)
    spec, _ = apply_policy_defaults(workload.spec, terms)
    priority_class = view.objects.classes.get(spec.priority_class)
    if spec.priority_class and priority_class is None:
        raise ValueError(f"spec.priorityClass: there is no priority class {spec.priority_class}")
    policies = () if policy is None else tuple(policy.spec.policies.values())
    in_force = (0, None) if policy is None else (policy.spec.number, policy.spec.deadline)
    requirements = compile_requirements(meta.tenant, meta.name, meta.labels, spec, policies, 0, in_force)
    effects = rules.effects(view)
    pins = effects.pinned_places(meta.tenant, meta.name) or ()
    return _CapacityRequest(
        workload,
        min(0 if priority_class is None else priority_class.spec.value, terms.priority_max),
        priority_class is None or priority_class.spec.preempts,
        effects.paused_by(meta.tenant, meta.name),
        quota_source(view, meta.tenant, rules.now[1]),
        Trial.of(
            view,
            TrialSetting(
                requirements, pins, effects, rules.filters, rules.scores, DAEMON_FILTERS if spec.type == "daemon" else ()
            ),
        ),
        most,
    )


def _distribution(trial: Trial, rows: Iterable[int]) -> ReplicaDistribution:
    nodes = [node for row in rows if (node := trial.columns.nodes[row]) is not None]

    def counted(names: Iterable[str]) -> dict[str, int]:
        return dict(sorted(Counter(names).items(), key=lambda pair: (-pair[1], pair[0])))

    return ReplicaDistribution(
        zones=counted(node.spec.zone for node in nodes),
        pools=counted(node.spec.pool for node in nodes),
        nodes=counted(node.metadata.name for node in nodes),
    )


# -- preemption
# ------------------------------------------------------------------------------------------------------------------


def _reclaimable(view: SchedulerView, request: _CapacityRequest, hard: HardFit) -> ReclaimableFit:
    remaining = request.most - hard.room
    reason = "class" if not request.preempts else "gang" if request.gang else "most" if not remaining else ""
    trial = request.trial.relaxed()
    if reason or not could_ever_fit(trial.kernel, trial.work_class):
        return ReclaimableFit(0, 0, 0, _distribution(trial, ()), reason or "place")
    victims = VictimSelector(VictimRateLimit())
    candidates, allowance = victims.candidates(view, trial.work_class, request.priority), victims.disruption_allowance(view)
    if candidates is None:
        return ReclaimableFit(0, 0, 0, _distribution(trial, ()), "priority")
    # Capacity of replicas that are terminating already becomes free without preemption. It is not reclaimable, and must not
    # stop the search for further victims.
    candidates = candidates._replace(releasing=candidates.assigned)
    rows, evicted = list[int](), list[int]()
    # If replicas depend on their peers, one placement changes where the next one may go, so victims are searched one at a time.
    requirements = trial.work_class.requirements
    one_at_a_time = depends_on_peers(requirements) or bool(trial.peers.anti_affinity_owners(requirements))
    for _ in range(ROUNDS_MAX):
        count = 1 if one_at_a_time else remaining - len(rows)
        open_rows, remaining_candidates = (
            trial.kernel.without_capacity_check(trial.work_class),
            _remaining_candidates(candidates, evicted),
        )
        plans = plan_evictions(
            requirements,
            trial.columns,
            open_rows,
            remaining_candidates,
            allowance,
            count=count,
            victims_max=len(remaining_candidates.slots),
        ).evictions
        for eviction in plans:
            for slot in eviction.victims:
                remove_replica(view, trial, slot)
            trial.kernel.post(trial.work_class, eviction.row, eviction.devices)
            rows.append(eviction.row)
            evicted += eviction.victims
        rows += trial.kernel.place_run(trial.work_class, remaining - len(rows)).rows if plans else ()
        if not plans or len(rows) >= remaining:
            break
    covered = request.covered(len(rows), hard.room)
    return ReclaimableFit(covered, len(rows), len(evicted), _distribution(trial, rows), "" if rows else "protected")


def _remaining_candidates(candidates: VictimCandidates, evicted: Sequence[int]) -> VictimCandidates:
    """The candidates without those already evicted in the trial, whose capacity is free there."""
    mask = ~np.isin(candidates.slots, evicted)
    return candidates._replace(
        slots=candidates.slots[mask],
        rows=candidates.rows[mask],
        priority=candidates.priority[mask],
        groups=candidates.groups[mask],
        up=candidates.up[mask],
        amounts={name: held[mask] for name, held in candidates.amounts.items()},
    )


# -- soft capacity
# ---------------------------------------------------------------------------------------------------------------


def _soft(request: _CapacityRequest, hard: HardFit, pools: Sequence[NodePool]) -> SoftFit:
    """Capacity on existing nodes that accept no replicas now, and on nodes that pools may add. Lost nodes do not count."""
    causes = {
        node.metadata.name: cause for node in request.trial.columns.nodes if node is not None and (cause := _soft_cause(node))
    }
    trial = request.trial.relaxed(*sorted(NODE_STATE_FILTERS), nodes=causes)
    pool_nodes = list(_pool_nodes(request.trial, pools))
    trial = trial.with_nodes(*pool_nodes)
    causes |= {node.metadata.name: f"pool {node.spec.pool} may grow" for node in pool_nodes}
    rows = trial.kernel.place_run(trial.work_class, request.most - hard.room).rows
    counts = Counter(causes.get(trial.kernel.node_name(row), "nodes that become eligible with these") for row in rows)
    reason = "" if rows else "most" if hard.room >= request.most else "place" if causes else "none"
    by_cause = dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
    return SoftFit(request.covered(len(rows), hard.room), len(rows), by_cause, _distribution(trial, rows), reason)


def _soft_cause(node: Node) -> str:
    if node.status.health is NodeHealth.LOST or takes_new_work(node):
        return ""
    if not is_ready(node):
        return node.status.health.value
    return "draining" if node.spec.draining else "cordoned" if node.spec.unschedulable else ""


def _pool_nodes(trial: Trial, pools: Sequence[NodePool]) -> Iterable[Node]:
    existing = Counter(node.spec.pool for node in trial.columns.nodes if node is not None)
    for pool in pools:
        name, spec = pool.metadata.name, pool.spec
        for number in range(min(spec.max - existing[name], POOL_NODES_MAX)):
            yield Node(
                metadata=Metadata(name=f"{name}-new-{number + 1}"[:63], labels=spec.labels),
                spec=NodeSpec(
                    region=spec.region,
                    zone=spec.zones[number % len(spec.zones)],
                    pool=name,
                    capacity=spec.capacity,
                    devices=spec.devices,
                    taints=spec.taints,
                ),
                status=NodeStatus(health=NodeHealth.READY),
            )


# -- what limits the next replica
# ------------------------------------------------------------------------------------------------


def _capacity_limit(request: _CapacityRequest, hard: HardFit, free: Placements) -> CapacityLimit | None:
    """Why one more replica would not be placed, as a scheduler would report it; None if the search stopped at `most`.

    Only the replicas that quota covers stay placed while this is determined.
    """
    trial, source = request.trial.relaxed(), request.quota_source
    charged = min(hard.room, hard.quota)
    trial.kernel.undo(trial.work_class, Placements(free.rows[charged:], free.devices[charged:]))
    node_funnel = funnel(trial.kernel, trial.work_class)
    code, detail = node_funnel.reason, ""
    if request.paused:
        code, detail = Code.OVERRIDE, f"paused by override {request.paused}"
    elif hard.quota < min(hard.room + 1, request.most):
        code = source.reason
        detail = (
            f"{source.name} has no quota left for another replica"
            if source.ledger is not None
            else f"{source.name} does not exist in this scope"
        )
    elif hard.room >= request.most:
        return None
    elif request.gang and hard.room < request.gang:
        code, detail = Code.GANG_SHORT, f"{hard.room} of {request.gang} replicas fit, and the gang must be bound at once"
    else:
        detail = rejection_text(node_funnel, trial.work_class.requirements)
    nearest = nearest_fit(trial.kernel, trial.work_class) if not node_funnel.fits else None
    closest = nearest and NearestNodeExplanation(
        trial.kernel.node_name(nearest.row),
        tuple(filter_.name for filter_ in nearest.refused),
        missing_amount(trial, nearest.row),
    )
    unblocks = () if request.paused else tuple(_remedies(trial, source, charged + 1))
    return CapacityLimit(
        code.value, reason_text(code, node_funnel), REFUSALS[code].cure, detail, filter_funnel(node_funnel), closest, unblocks
    )


def _remedies(trial: Trial, source: QuotaSource, count: int) -> Iterable[Remedy]:
    """Changes that would allow `count` replicas: more quota, more capacity, or both."""
    if source.ledger is None or source.unusable is not None:
        return
    quota_left, charge = Amount(source.ledger.free), trial.setting.requirements.charge

    def quota(less: Amount) -> tuple[Change, ...]:
        """The missing quota if the requests of each replica were reduced by `less`."""
        missing = ((charge - less) * count).excess_over(quota_left)
        return (Change("quota", source.name, missing),) if missing else ()

    if trial.can_place(1):
        rows = np.flatnonzero(trial.fits()).tolist()
        yield Remedy(quota(Amount()), len(rows), tuple(trial.kernel.node_name(row) for row in rows[:NAMED_MAX]))
        return
    for remedy in find_remedies(trial, 1):
        less = sum((change.amount for change in remedy.changes if change.kind == "shrink"), Amount())
        yield Remedy((*quota(less), *remedy.changes), remedy.fits, remedy.nodes)
