"""Why replicas are pending: reason, funnel, quota, preemption.

Asked of a view and of what was recorded; nothing is placed.

The reason is the one that a scheduler would give now, found in the same order (attempts.py): leave, members, quota, then the
funnel of the nodes. What would help is tried on frozen copies (trial.py, unblocking.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from remit.law.fit import Ask
from remit.law.overrides import Effects, Instant, in_force
from remit.law.refusals import REFUSALS
from remit.model.claims import Code
from remit.model.records import Candidate
from remit.model.resources import DEVICES, WHOLE, Amount
from remit.observation.replica_table import PENDING
from remit.observation.scheduler_view import View
from remit.proposal.attempts import Key, key_for, least_of
from remit.proposal.explain.remedies import options
from remit.proposal.explain.result_types import (
    Broken,
    Change,
    Evidence,
    GangTold,
    Nearest,
    NodeAnswer,
    Passage,
    Preemption,
    QuotaTold,
    Step,
    Unblock,
    VictimTold,
    Waits,
)
from remit.proposal.explain.what_if import ONE_A_NODE, Setting, Trial
from remit.proposal.placement.builtin_plugins import DEFAULT
from remit.proposal.placement.funnel import Funnel, ever, funnel, lacks, nearest
from remit.proposal.placement.plugins import Cure, Filter, Score
from remit.proposal.placement.preemption import Spare, plan
from remit.proposal.placement.preemption_candidates import Pace, Victims
from remit.proposal.quota import Purse, purse

CANDIDATES: Final = 3
VICTIMS_MAX: Final = 1_000


class Rules(NamedTuple):
    """What placing is steered by beside the rows: the instant, and other people's plug-ins."""

    now: Instant
    filters: tuple[Filter, ...] = ()
    scores: tuple[Score, ...] = DEFAULT

    def effects(self, view: View) -> Effects:
        return in_force(view.things.overrides.values(), self.now)


class Work(NamedTuple):
    """Equal replicas of one generation that wait, and all that a scheduler knows of them."""

    key: Key
    ask: Ask
    generation: int
    waiting: int
    least: int
    purse: Purse
    trial: Trial

    @property
    def want(self) -> int:
        """How many must find a place at once."""
        return max(self.least, 1)


def work_of(view: View, generation: int, priority: int, rules: Rules) -> Work:
    effects = rules.effects(view)
    key = key_for(view, effects, generation, priority)
    ask = view.shapes.ask(key.shape)
    of, phase = view.replicas.column("generation"), view.replicas.column("phase")
    waiting = int(np.count_nonzero((of == generation) & (phase == PENDING)))
    fixed = ONE_A_NODE if view.shapes.cut_of(generation).spec.type == "daemon" else ()
    trial = Trial.of(view, Setting(ask, key.pins, effects, rules.filters, rules.scores, fixed))
    least = least_of(view, key)
    from_ = purse(view, key.tenant, rules.now[1], ask.charge.pairs, max(least, 1))
    return Work(key, ask, generation, waiting, least, from_, trial)


def explain_waiting(view: View, generation: int, priority: int, rules: Rules) -> Waits:
    """Why replicas of this generation and priority that wait for a node do, as of now."""
    work = work_of(view, generation, priority, rules)
    seen = funnel(work.trial.kernel, work.trial.one)
    code, detail, never = _reason(view, work, seen)
    if code is None and _lapsed(work.ask, rules.now):
        code, detail = Code.POLICY_LAPSED, f"policy {work.ask.policy} came on a lease that has run out"
    refusal = None if code is None else REFUSALS[code]
    near = nearest(work.trial.kernel, work.trial.one) if not seen.fits else None
    found = work.trial.tried(work.want)
    gang = None
    if work.key.gang:
        gang = GangTold(work.key.gang, view.standing(generation), work.waiting, len(work.trial.tried(work.waiting).rows))
    return Waits(
        verdict="now" if code is None else "never" if never else "not-now",
        reason="" if code is None else code.value,
        meaning="" if code is None else meaning_of(code, seen),
        cure="" if refusal is None else refusal.cure,
        detail=detail,
        cures=_cures(work, seen, code),
        passage=passage(seen),
        quota=_quota(work),
        nearest=near
        and Nearest(work.trial.kernel.name(near.row), tuple(one.name for one in near.refused), short_of(work.trial, near.row)),
        gang=gang,
        preemption=_preemption(view, work) if code is not None and len(found.rows) < work.want else None,
        unblocks=_unblocks(work, code, lapsed=_lapsed(work.ask, rules.now)),
        candidates=candidates(work.trial) if code is None else (),
    )


# -- the reason ----------------------------------------------------------------------------------------------------------------


def _reason(view: View, work: Work, seen: Funnel) -> tuple[Code | None, str, bool]:
    """The dominant one, what there is to add, and whether it is for ever: what no node could take does not wait for quota."""
    key, from_ = work.key, work.purse
    if not view.shapes.open(work.generation):
        return Code.DELETING, "its workload is gone or going", True
    never = not ever(work.trial.kernel, work.trial.one)
    if key.paused:
        return Code.OVERRIDE, f"override {key.paused} pauses it", never
    if work.least > 1 and work.waiting < work.least:
        return Code.GANG_SHORT, f"{work.waiting} members wait, and {work.least} must be bound at once", never
    if from_.covers(work.ask.charge.pairs, work.want) < work.want:
        return from_.reason, _quota_words(from_), never
    if work.trial.places(work.want):
        return None, "", False
    if key.gang and seen.fits:
        return Code.GANG_SHORT, f"{len(work.trial.tried(work.want).rows)} of {work.want} would find a place", never
    step = seen.dominant
    detail = (
        f"{step.filter.name} refused the last {step.refused} of {seen.nodes} nodes"
        if step is not None
        else "there are no nodes"
    )
    return seen.reason, f"{detail}, and none could take it if it were empty" if never and seen.nodes else detail, never


def _lapsed(ask: Ask, now: Instant) -> bool:
    """Would the authority refuse it for the policy's age? A scheduler finds that out by asking."""
    until = ask.policy_until
    return until is not None and (until.boot != now[0] or now[1] >= until.at_ms)


def _quota_words(from_: Purse) -> str:
    if from_.ledger is None:
        return f"there is no {from_.name} here"
    return f"{from_.name} does not cover it"


def _cures(work: Work, seen: Funnel, code: Code | None) -> tuple[str, ...]:
    """The sorts of events that a wait for this reason ends with."""
    match code:
        case None:
            return ()
        case Code.DELETING:
            return (Cure.WORKLOAD,)
        case Code.OVERRIDE if work.key.paused:
            return (Cure.OVERRIDE,)
        case Code.GANG_SHORT if work.waiting < work.least:
            return ("member", Cure.WORKLOAD)
        case Code.OVER_QUOTA | Code.GRANT_VOID | Code.GRANT_EXPIRED:
            return (Cure.QUOTA,)
        case Code.POLICY_LAPSED:
            return (Cure.POLICY,)
    more = (Cure.ROOM,) if work.key.gang or seen.fits else ()
    return tuple(dict.fromkeys((*seen.cures(), *more)))


def passage(seen: Funnel) -> Passage:
    left, steps = seen.nodes, []
    for step in seen.steps:
        left -= step.refused
        steps.append(Step(step.filter.name, step.filter.code.value, step.refused, left, words_of(step.filter)))
    return Passage(seen.nodes, tuple(steps), seen.fits)


def words_of(one: Filter) -> str:
    """Why it refuses: as whoever wrote it says, or else as its code does."""
    return one.reason or REFUSALS[one.code].meaning


def meaning_of(code: Code, seen: Funnel) -> str:
    """In words. If it is a filter that the nodes met last, its own ones."""
    step = seen.dominant
    return words_of(step.filter) if step is not None and step.filter.code is code else REFUSALS[code].meaning


def _quota(work: Work) -> QuotaTold:
    from_ = work.purse
    left = Amount() if from_.ledger is None else Amount({name: max(count, 0) for name, count in from_.ledger.left.items()})
    dead = "" if from_.dead is None else from_.dead.value
    covers = from_.covers(work.ask.charge.pairs, work.want)
    return QuotaTold(from_.name, left, work.ask.charge, work.want, covers, dead)


def candidates(trial: Trial, count: int = CANDIDATES) -> tuple[Candidate, ...]:
    rows = trial.kernel.best(trial.one, count)
    return tuple(Candidate(node=trial.kernel.name(row), score=total, parts=parts) for row, total, parts in rows)


def short_of(trial: Trial, row: int) -> Amount:
    """What this node lacks, devices as an amount has them."""
    found = lacks(trial.kernel, trial.one, row)
    kinds = {part.kind for part in trial.one.ask.whole}
    shared = {f"{part.kind} share": part.kind for part in trial.one.ask.shares}
    amount: dict[str, int] = {}
    for name, count in found.items():
        if name in shared:
            amount[DEVICES + shared[name]] = count
        elif name in kinds:
            amount[DEVICES + name] = count * WHOLE
        else:
            amount[name] = count
    return Amount(amount)


# -- what would help -----------------------------------------------------------------------------------------------------------


def _unblocks(work: Work, code: Code | None, *, lapsed: bool) -> tuple[Unblock, ...]:
    """Each alone is enough. What stands before room (an override, members, quota) is part of every one of them."""
    if code is None or code is Code.DELETING:
        return ()
    if work.trial.places(work.want):
        rows = np.flatnonzero(work.trial.fits())
        names = tuple(work.trial.kernel.name(row) for row in rows[:CANDIDATES].tolist())
        return (Unblock(tuple(_before_room(work, work.ask.charge, lapsed=lapsed)), len(rows), names),)
    found = []
    for one in options(work.trial, work.want):
        less = sum((change.amount for change in one.changes if change.kind == "shrink"), Amount())
        first = _before_room(work, work.ask.charge - less, lapsed=lapsed)
        found.append(Unblock((*first, *one.changes), one.fits, one.nodes))
    return tuple(found)


def _before_room(work: Work, charge: Amount, *, lapsed: bool) -> Iterable[Change]:
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
    lacking = (charge * work.want).over(Amount(from_.ledger.left))
    if lacking:
        yield Change("quota", from_.name, lacking)


def _preemption(view: View, work: Work) -> Preemption:
    """Who would have to go for one of them; as attempts.py asks, and without regard to how many may go in a while."""
    key, trial = work.key, work.trial
    if not key.preempts:
        return Preemption(False, "class")
    if key.gang:
        return Preemption(False, "gang")
    if work.purse.covers(work.ask.charge.pairs, 1) < 1:
        return Preemption(False, "quota")
    open_rows = trial.kernel.roomless(trial.one)
    if not open_rows.any() or not ever(trial.kernel, trial.one):
        return Preemption(False, "place")
    victims = Victims(Pace())
    found = victims.candidates(view, trial.one, key.priority)
    if found is None or not open_rows[found.rows].any():
        return Preemption(False, "priority")
    for spare, why in ((victims.limits(view), ""), (Spare.boundless(int(found.groups.max()) + 1), "protected")):
        plans = plan(trial.one.ask, trial.columns, open_rows, found, spare, count=1, victims_max=VICTIMS_MAX).evictions
        if plans:
            told = tuple(_victim(view, slot) for slot in plans[0].victims)
            return Preemption(not why, why, trial.kernel.name(plans[0].row), told)
    return Preemption(False, "little")


def _victim(view: View, slot: int) -> VictimTold:
    replicas = view.replicas
    name = replicas.keys[slot].removeprefix("replica/")
    return VictimTold(name, view.shapes.name(replicas.at.generation[slot]), replicas.at.priority[slot])


# -- one node ------------------------------------------------------------------------------------------------------------------


def answer_for(trial: Trial, node: str) -> NodeAnswer | None:
    """Every rule that this node breaks now; None if there is no such node."""
    row = trial.columns.rows.get(node)
    if row is None:
        return None
    broken = [Broken(one.name, one.code.value, words_of(one), REFUSALS[one.code].cure) for one in trial.refusing(row)]
    score = next((one for one in trial.kernel.best(trial.one, len(trial.columns)) if one[0] == row), None)
    if broken or score is None:
        return NodeAnswer(node, False, tuple(broken), short_of(trial, row))
    return NodeAnswer(node, True, (), Amount(), score[1], score[2])


def without(view: View, trial: Trial, slot: int) -> None:
    """As if this replica, which holds room, were not there: then it can be asked where else it could stand."""
    row, generation = view.replicas.at.node[slot], view.replicas.at.generation[slot]
    if row < 0:
        return
    trial.columns.post(row, view.shapes.cut_of(generation).resources, view.replicas.devices.get(slot, {}), -1)
    trial.moved([index for index in trial.peers.indexes() if view.shapes.counts_in(generation, index)], row, -1)


def evidence(view: View, rules: Rules) -> Evidence:
    policy, effects = view.policy, rules.effects(view)
    names: Sequence[str] = [one.metadata.name for one in effects.overrides]
    return Evidence(view.revision, view.age_ms(), 0 if policy is None else policy.spec.number, tuple(names))
