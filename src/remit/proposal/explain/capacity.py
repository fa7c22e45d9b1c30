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
from remit.law.refusals import REFUSALS
from remit.law.requirements import compile_requirements
from remit.model.claims import Code
from remit.model.kinds import Node, NodeHealth, NodePool, NodeSpec, NodeStatus, Workload
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.scheduler_view import View
from remit.proposal.explain.pending import PlacementInputs, reason_text, filter_funnel, missing_amount, remove_replica
from remit.proposal.explain.remedies import NAMED_MAX, find_remedies
from remit.proposal.explain.result_types import Change, NearestNodeExplanation, FilterFunnel, Remedy
from remit.proposal.explain.what_if import NODE_STATE_FILTERS, DAEMON_FILTERS, TrialSetting, Trial
from remit.proposal.placement.funnel import could_ever_fit, funnel, nearest_fit
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
    """Capacity that is free now. `room` is what the nodes allow, `quota` what the tenant may use, `replicas` what both allow.
    """

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
    purse: QuotaSource
    trial: Trial
    most: int

    @property
    def gang(self) -> int:
        return self.workload.spec.gang.min if self.workload.spec.gang is not None else 0

    def within(self, room: int, before: int = 0) -> int:
        """How many of `room` replicas the quota covers after `before` were charged. A gang is counted complete or not at all.
        """
        left = max(0, self.purse.covers(self.trial.setting.ask.charge.pairs, before + room) - before)
        count = min(room, left)
        return 0 if self.paused or (before + count < self.gang) else count


def compute_capacity(
    view: View, workload: Workload, rules: PlacementInputs, *, most: int = COUNT_MAX, pools: Sequence[NodePool] = ()
) -> CapacityAnswer:
    """Computes how many replicas of `workload` fit. A gang is tried complete even if that exceeds `most`.

    Raises ValueError if the workload would not be admitted.
    """
    most = max(most, workload.spec.gang.min if workload.spec.gang is not None else 1)
    asked = _capacity_request(view, workload, rules, most)
    trial = asked.trial
    free = trial.kernel.run(trial.one, most)
    room = len(free.rows)
    ask = trial.setting.ask
    hard = HardFit(asked.within(room), room, asked.purse.covers(ask.charge.pairs, most), _distribution(trial, free.rows))
    return CapacityAnswer(
        tenant=ask.tenant,
        workload=workload.metadata.name,
        priority=asked.priority,
        charge=ask.charge,
        most=most,
        capped=room == most,
        revision=view.revision,
        nodes=len(view.columns.rows),
        hard=hard,
        reclaimable=_reclaimable(view, asked, hard),
        soft=_soft(asked, hard, pools),
        stop=_capacity_limit(asked, hard, free),
    )


def _capacity_request(view: View, workload: Workload, rules: PlacementInputs, most: int) -> _CapacityRequest:
    meta, policy = workload.metadata, view.policy
    terms = Admission({} if policy is None else policy.spec.policies).terms(meta.tenant, meta.name, meta.labels)
    spec, _ = apply_policy_defaults(workload.spec, terms)
    rank = view.things.classes.get(spec.priority_class)
    if spec.priority_class and rank is None:
        raise ValueError(f"spec.priorityClass: there is no priority class {spec.priority_class}")
    policies = () if policy is None else tuple(policy.spec.policies.values())
    in_force = (0, None) if policy is None else (policy.spec.number, policy.spec.deadline)
    ask = compile_requirements(meta.tenant, meta.name, meta.labels, spec, policies, 0, in_force)
    effects = rules.effects(view)
    pins = effects.pinned_places(meta.tenant, meta.name) or ()
    return _CapacityRequest(
        workload,
        min(0 if rank is None else rank.spec.value, terms.priority_max),
        rank is None or rank.spec.preempts,
        effects.paused_by(meta.tenant, meta.name),
        quota_source(view, meta.tenant, rules.now[1]),
        Trial.of(view, TrialSetting(ask, pins, effects, rules.filters, rules.scores, DAEMON_FILTERS if spec.type == "daemon" else ())),
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


def _reclaimable(view: View, asked: _CapacityRequest, hard: HardFit) -> ReclaimableFit:
    left = asked.most - hard.room
    why = "class" if not asked.preempts else "gang" if asked.gang else "most" if not left else ""
    trial = asked.trial.eased()
    if why or not could_ever_fit(trial.kernel, trial.one):
        return ReclaimableFit(0, 0, 0, _distribution(trial, ()), why or "place")
    victims = VictimSelector(VictimRateLimit())
    found, spare = victims.candidates(view, trial.one, asked.priority), victims.limits(view)
    if found is None:
        return ReclaimableFit(0, 0, 0, _distribution(trial, ()), "priority")
    # Capacity of replicas that are terminating already becomes free without preemption. It is not reclaimable, and must not
    # stop the search for further victims.
    found = found._replace(coming=found.firm)
    rows, gone = list[int](), list[int]()
    # If replicas depend on their peers, one placement changes where the next one may go, so victims are searched one at a time.
    ask = trial.one.ask
    alone = depends_on_peers(ask) or bool(trial.peers.anti_affinity_owners(ask))
    for _ in range(ROUNDS_MAX):
        wanted = 1 if alone else left - len(rows)
        open_rows, there = trial.kernel.roomless(trial.one), _remaining_candidates(found, gone)
        plans = plan_evictions(ask, trial.columns, open_rows, there, spare, count=wanted, victims_max=len(there.slots)).evictions
        for made in plans:
            for slot in made.victims:
                remove_replica(view, trial, slot)
            trial.kernel.post(trial.one, made.row, made.devices)
            rows.append(made.row)
            gone += made.victims
        rows += trial.kernel.run(trial.one, left - len(rows)).rows if plans else ()
        if not plans or len(rows) >= left:
            break
    count = asked.within(len(rows), hard.room)
    return ReclaimableFit(count, len(rows), len(gone), _distribution(trial, rows), "" if rows else "protected")


def _remaining_candidates(found: VictimCandidates, gone: Sequence[int]) -> VictimCandidates:
    """The candidates without those already evicted in the trial, whose capacity is free there."""
    at = ~np.isin(found.slots, gone)
    return found._replace(
        slots=found.slots[at],
        rows=found.rows[at],
        priority=found.priority[at],
        groups=found.groups[at],
        up=found.up[at],
        amounts={name: held[at] for name, held in found.amounts.items()},
    )


# -- soft capacity
# ---------------------------------------------------------------------------------------------------------------


def _soft(asked: _CapacityRequest, hard: HardFit, pools: Sequence[NodePool]) -> SoftFit:
    """Capacity on existing nodes that accept no replicas now, and on nodes that pools may still add. Lost nodes do not count.
    """
    causes = {node.metadata.name: cause for node in asked.trial.columns.nodes if node is not None and (cause := _soft_cause(node))}
    trial = asked.trial.eased(*sorted(NODE_STATE_FILTERS), nodes=causes)
    brought = list(_pool_nodes(asked.trial, pools))
    trial = trial.grown(*brought)
    causes |= {node.metadata.name: f"pool {node.spec.pool} may grow" for node in brought}
    rows = trial.kernel.run(trial.one, asked.most - hard.room).rows
    found = Counter(causes.get(trial.kernel.name(row), "nodes that become eligible with these") for row in rows)
    why = "" if rows else "most" if hard.room >= asked.most else "place" if causes else "none"
    by_cause = dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))
    return SoftFit(asked.within(len(rows), hard.room), len(rows), by_cause, _distribution(trial, rows), why)


def _soft_cause(node: Node) -> str:
    health = node.status.health
    if health is NodeHealth.LOST:
        return ""
    if health is not NodeHealth.READY:
        return health.value
    return "draining" if node.spec.draining else "cordoned" if node.spec.unschedulable else ""


def _pool_nodes(trial: Trial, pools: Sequence[NodePool]) -> Iterable[Node]:
    there = Counter(node.spec.pool for node in trial.columns.nodes if node is not None)
    for pool in pools:
        name, spec = pool.metadata.name, pool.spec
        for number in range(min(spec.max - there[name], POOL_NODES_MAX)):
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


def _capacity_limit(asked: _CapacityRequest, hard: HardFit, free: Placements) -> CapacityLimit | None:
    """Why one more replica would not be placed, as a scheduler would report it; None if the search stopped at `most`.

    Only the replicas that quota covers stay placed while this is determined.
    """
    trial, from_ = asked.trial.eased(), asked.purse
    drawn = min(hard.room, hard.quota)
    trial.kernel.undo(trial.one, Placements(free.rows[drawn:], free.devices[drawn:]))
    seen = funnel(trial.kernel, trial.one)
    code, detail = seen.reason, ""
    if asked.paused:
        code, detail = Code.OVERRIDE, f"paused by override {asked.paused}"
    elif hard.quota < min(hard.room + 1, asked.most):
        code = from_.reason
        detail = f"{from_.name} has no quota left for another replica" if from_.ledger is not None else f"{from_.name} does not exist in this scope"
    elif hard.room >= asked.most:
        return None
    elif asked.gang and hard.room < asked.gang:
        code, detail = Code.GANG_SHORT, f"{hard.room} of {asked.gang} replicas fit, and the gang must be bound at once"
    elif (step := seen.dominant) is not None:
        detail = f"{step.filter.name} refuses the last {step.refused} of {seen.nodes} nodes"
    else:
        detail = "the cluster has no nodes"
    near = nearest_fit(trial.kernel, trial.one) if not seen.fits else None
    closest = near and NearestNodeExplanation(trial.kernel.name(near.row), tuple(one.name for one in near.refused), missing_amount(trial, near.row))
    unblocks = () if asked.paused else tuple(_remedies(trial, from_, drawn + 1))
    return CapacityLimit(code.value, reason_text(code, seen), REFUSALS[code].cure, detail, filter_funnel(seen), closest, unblocks)


def _remedies(trial: Trial, from_: QuotaSource, wanted: int) -> Iterable[Remedy]:
    """Changes that would allow replica number `wanted`: more quota, more capacity, or both."""
    if from_.ledger is None or from_.dead is not None:
        return
    left, charge = Amount(from_.ledger.free), trial.setting.ask.charge

    def quota(less: Amount) -> tuple[Change, ...]:
        """The missing quota if each replica requests `less` less."""
        lacking = ((charge - less) * wanted).excess_over(left)
        return (Change("quota", from_.name, lacking),) if lacking else ()

    if trial.places(1):
        rows = np.flatnonzero(trial.fits()).tolist()
        yield Remedy(quota(Amount()), len(rows), tuple(trial.kernel.name(row) for row in rows[:NAMED_MAX]))
        return
    for one in find_remedies(trial, 1):
        less = sum((change.amount for change in one.changes if change.kind == "shrink"), Amount())
        yield Remedy((*quota(less), *one.changes), one.fits, one.nodes)
