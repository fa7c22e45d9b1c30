"""How many more replicas fit: hard, reclaimable, soft.

Placed with the kernel on frozen copies; nothing is claimed.

Three answers that never add: **hard** is free now; **reclaimable** is held by lower work that would have to go; **soft** is on
nodes that nobody should count on yet. Each is told as what room allows, and as how many of those the tenant's quota covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from remit.law.admission import Admission, settled
from remit.law.refusals import REFUSALS
from remit.law.requirements import make_ask
from remit.model.claims import Code
from remit.model.kinds import Node, NodeHealth, NodePool, NodeSpec, NodeStatus, Workload
from remit.model.metadata import Metadata
from remit.model.resources import Amount
from remit.observation.scheduler_view import View
from remit.proposal.explain.pending import Rules, meaning_of, passage, short_of, without
from remit.proposal.explain.remedies import NAMED_MAX, options
from remit.proposal.explain.result_types import Change, Nearest, Passage, Unblock
from remit.proposal.explain.what_if import MENDED, ONE_A_NODE, Setting, Trial
from remit.proposal.placement.funnel import ever, funnel, nearest
from remit.proposal.placement.kernel import Placed
from remit.proposal.placement.preemption import Candidates, plan
from remit.proposal.placement.preemption_candidates import Pace, Victims
from remit.proposal.placement.topology_gates import minds_others
from remit.proposal.quota import Purse, purse

COUNT_MAX: Final = 100_000
ROUNDS_MAX: Final = 2_000
"""How often victims are looked for; what it would take more for is told as at least so many."""
BROUGHT_MAX: Final = 1_000


class Where(Struct, frozen=True):
    """How many stand where, the most first."""

    zones: dict[str, int]
    pools: dict[str, int]
    nodes: dict[str, int]


class HardFit(Struct, frozen=True):
    """Free now. `room` is what the nodes allow, `quota` what the tenant may draw, `replicas` what both do."""

    replicas: int
    room: int
    quota: int
    where: Where


class ReclaimableFit(Struct, frozen=True):
    """After so many `victims` of lower priority went, within what their workloads say of disruption. `why` says why none."""

    replicas: int
    room: int
    victims: int
    where: Where
    why: str


class SoftFit(Struct, frozen=True):
    """On nodes that do not take work now, or that are not there yet, by cause. `why` says why none."""

    replicas: int
    room: int
    causes: dict[str, int]
    where: Where
    why: str


class Stop(Struct, frozen=True):
    """What stops the next one, beyond the hard ones; and what would let it in."""

    reason: str
    meaning: str
    cure: str
    detail: str
    passage: Passage
    nearest: Nearest | None
    unblocks: tuple[Unblock, ...]


class Capacity(Struct, frozen=True):
    """`capped`: no more than `most` were looked for, so there may be room for more."""

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
    stop: Stop | None


class _Asked(NamedTuple):
    workload: Workload
    priority: int
    preempts: bool
    paused: str
    purse: Purse
    trial: Trial
    most: int

    @property
    def gang(self) -> int:
        return self.workload.spec.gang.min if self.workload.spec.gang is not None else 0

    def within(self, room: int, before: int = 0) -> int:
        """How many of these the quota covers, when `before` have drawn on it; a gang comes whole or not at all."""
        left = max(0, self.purse.covers(self.trial.setting.ask.charge.pairs, before + room) - before)
        count = min(room, left)
        return 0 if self.paused or (before + count < self.gang) else count


def room_for(
    view: View, workload: Workload, rules: Rules, *, most: int = COUNT_MAX, pools: Sequence[NodePool] = ()
) -> Capacity:
    """Raises ValueError if the workload could not be declared here. A gang is looked for whole, whatever `most` is."""
    most = max(most, workload.spec.gang.min if workload.spec.gang is not None else 1)
    asked = _asked(view, workload, rules, most)
    trial = asked.trial
    free = trial.kernel.run(trial.one, most)
    room = len(free.rows)
    ask = trial.setting.ask
    hard = HardFit(asked.within(room), room, asked.purse.covers(ask.charge.pairs, most), _where(trial, free.rows))
    return Capacity(
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
        stop=_stop(asked, hard, free),
    )


def _asked(view: View, workload: Workload, rules: Rules, most: int) -> _Asked:
    meta, policy = workload.metadata, view.policy
    terms = Admission({} if policy is None else policy.spec.policies).terms(meta.tenant, meta.name, meta.labels)
    spec, _ = settled(workload.spec, terms)
    rank = view.things.classes.get(spec.priority_class)
    if spec.priority_class and rank is None:
        raise ValueError(f"spec.priorityClass: there is no priority class {spec.priority_class}")
    policies = () if policy is None else tuple(policy.spec.policies.values())
    in_force = (0, None) if policy is None else (policy.spec.number, policy.spec.deadline)
    ask = make_ask(meta.tenant, meta.name, meta.labels, spec, policies, 0, in_force)
    effects = rules.effects(view)
    pins = effects.pinned(meta.tenant, meta.name) or ()
    return _Asked(
        workload,
        min(0 if rank is None else rank.spec.value, terms.priority_max),
        rank is None or rank.spec.preempts,
        effects.paused(meta.tenant, meta.name),
        purse(view, meta.tenant, rules.now[1]),
        Trial.of(view, Setting(ask, pins, effects, rules.filters, rules.scores, ONE_A_NODE if spec.type == "daemon" else ())),
        most,
    )


def _where(trial: Trial, rows: Iterable[int]) -> Where:
    nodes = [node for row in rows if (node := trial.columns.nodes[row]) is not None]

    def counted(names: Iterable[str]) -> dict[str, int]:
        return dict(sorted(Counter(names).items(), key=lambda pair: (-pair[1], pair[0])))

    return Where(
        zones=counted(node.spec.zone for node in nodes),
        pools=counted(node.spec.pool for node in nodes),
        nodes=counted(node.metadata.name for node in nodes),
    )


# -- room made by force --------------------------------------------------------------------------------------------------------


def _reclaimable(view: View, asked: _Asked, hard: HardFit) -> ReclaimableFit:
    left = asked.most - hard.room
    why = "class" if not asked.preempts else "gang" if asked.gang else "most" if not left else ""
    trial = asked.trial.eased()
    if why or not ever(trial.kernel, trial.one):
        return ReclaimableFit(0, 0, 0, _where(trial, ()), why or "place")
    victims = Victims(Pace())
    found, spare = victims.candidates(view, trial.one, asked.priority), victims.limits(view)
    if found is None:
        return ReclaimableFit(0, 0, 0, _where(trial, ()), "priority")
    # What those hold who go already comes whoever asks: it is nobody's to reclaim, and keeps nobody else from being counted.
    found = found._replace(coming=found.firm)
    rows, gone = list[int](), list[int]()
    # Where they look at each other, one placement changes what the next one may do.
    ask = trial.one.ask
    alone = minds_others(ask) or bool(trial.peers.shunners(ask))
    for _ in range(ROUNDS_MAX):
        wanted = 1 if alone else left - len(rows)
        open_rows, there = trial.kernel.roomless(trial.one), _but(found, gone)
        plans = plan(ask, trial.columns, open_rows, there, spare, count=wanted, victims_max=len(there.slots)).evictions
        for made in plans:
            for slot in made.victims:
                without(view, trial, slot)
            trial.kernel.post(trial.one, made.row, made.devices)
            rows.append(made.row)
            gone += made.victims
        rows += trial.kernel.run(trial.one, left - len(rows)).rows if plans else ()
        if not plans or len(rows) >= left:
            break
    count = asked.within(len(rows), hard.room)
    return ReclaimableFit(count, len(rows), len(gone), _where(trial, rows), "" if rows else "protected")


def _but(found: Candidates, gone: Sequence[int]) -> Candidates:
    """Without those who are gone in the trial: the room that they held shows there already."""
    at = ~np.isin(found.slots, gone)
    return found._replace(
        slots=found.slots[at],
        rows=found.rows[at],
        priority=found.priority[at],
        groups=found.groups[at],
        up=found.up[at],
        amounts={name: held[at] for name, held in found.amounts.items()},
    )


# -- room that nobody should count on ------------------------------------------------------------------------------------------


def _soft(asked: _Asked, hard: HardFit, pools: Sequence[NodePool]) -> SoftFit:
    """On nodes that are there and take no work now, and on those that their pools may yet bring; lost ones are not there."""
    causes = {node.metadata.name: cause for node in asked.trial.columns.nodes if node is not None and (cause := _cause(node))}
    trial = asked.trial.eased(*sorted(MENDED), nodes=causes)
    brought = list(_brought(asked.trial, pools))
    trial = trial.grown(*brought)
    causes |= {node.metadata.name: f"pool {node.spec.pool} may grow" for node in brought}
    rows = trial.kernel.run(trial.one, asked.most - hard.room).rows
    found = Counter(causes.get(trial.kernel.name(row), "freed by those") for row in rows)
    why = "" if rows else "most" if hard.room >= asked.most else "place" if causes else "none"
    by_cause = dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))
    return SoftFit(asked.within(len(rows), hard.room), len(rows), by_cause, _where(trial, rows), why)


def _cause(node: Node) -> str:
    health = node.status.health
    if health is NodeHealth.LOST:
        return ""
    if health is not NodeHealth.READY:
        return health.value
    return "draining" if node.spec.draining else "cordoned" if node.spec.unschedulable else ""


def _brought(trial: Trial, pools: Sequence[NodePool]) -> Iterable[Node]:
    there = Counter(node.spec.pool for node in trial.columns.nodes if node is not None)
    for pool in pools:
        name, spec = pool.metadata.name, pool.spec
        for number in range(min(spec.max - there[name], BROUGHT_MAX)):
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


# -- what stops the next one ---------------------------------------------------------------------------------------------------


def _stop(asked: _Asked, hard: HardFit, free: Placed) -> Stop | None:
    """As a scheduler would say it of one more; None if no more were looked for. It places no more than quota covers."""
    trial, from_ = asked.trial.eased(), asked.purse
    drawn = min(hard.room, hard.quota)
    trial.kernel.undo(trial.one, Placed(free.rows[drawn:], free.devices[drawn:]))
    seen = funnel(trial.kernel, trial.one)
    code, detail = seen.reason, ""
    if asked.paused:
        code, detail = Code.OVERRIDE, f"override {asked.paused} pauses it"
    elif hard.quota < min(hard.room + 1, asked.most):
        code = from_.reason
        detail = f"{from_.name} does not cover one more" if from_.ledger is not None else f"there is no {from_.name} here"
    elif hard.room >= asked.most:
        return None
    elif asked.gang and hard.room < asked.gang:
        code, detail = Code.GANG_SHORT, f"{hard.room} would find a place, and {asked.gang} must be bound at once"
    elif (step := seen.dominant) is not None:
        detail = f"{step.filter.name} refuses the last {step.refused} of {seen.nodes} nodes"
    else:
        detail = "there are no nodes"
    near = nearest(trial.kernel, trial.one) if not seen.fits else None
    closest = near and Nearest(trial.kernel.name(near.row), tuple(one.name for one in near.refused), short_of(trial, near.row))
    unblocks = () if asked.paused else tuple(_unblocks(trial, from_, drawn + 1))
    return Stop(code.value, meaning_of(code, seen), REFUSALS[code].cure, detail, passage(seen), closest, unblocks)


def _unblocks(trial: Trial, from_: Purse, wanted: int) -> Iterable[Unblock]:
    """What would let in one more, the `wanted`th: more quota, or room, or both."""
    if from_.ledger is None or from_.dead is not None:
        return
    left, charge = Amount(from_.ledger.left), trial.setting.ask.charge

    def quota(less: Amount) -> tuple[Change, ...]:
        """What is lacking, if each asks for so much less."""
        lacking = ((charge - less) * wanted).over(left)
        return (Change("quota", from_.name, lacking),) if lacking else ()

    if trial.places(1):
        rows = np.flatnonzero(trial.fits()).tolist()
        yield Unblock(quota(Amount()), len(rows), tuple(trial.kernel.name(row) for row in rows[:NAMED_MAX]))
        return
    for one in options(trial, 1):
        less = sum((change.amount for change in one.changes if change.kind == "shrink"), Amount())
        yield Unblock((*quota(less), *one.changes), one.fits, one.nodes)
