"""One scheduling attempt for a queue of equal replicas: place, preempt, or explain why not.

An attempt assumes placements in the view and returns them. It submits no claims (see cycle.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from remit.law.overrides import ActiveOverrides, PlaceSet
from remit.model.claims import Code, RecordDecision, Reserve
from remit.model.kinds import USER_PRIORITY_MAX
from remit.model.records import NearestNode
from remit.model.resources import DEVICES_PREFIX, WHOLE_DEVICE
from remit.observation.node_columns import Rows
from remit.observation.replica_table import PENDING
from remit.observation.scheduler_view import View
from remit.observation.shapes import THERE, Cut
from remit.proposal.metrics import CoverageMark, OnMark, ignore_mark
from remit.proposal.placement.builtin_plugins import OverrideFilter
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.funnel import could_ever_fit
from remit.proposal.placement.kernel import Kernel, Placements
from remit.proposal.placement.plugins import UnblockEvent, PluginError
from remit.proposal.placement.preemption import Eviction
from remit.proposal.placement.preemption_candidates import VictimSelector
from remit.proposal.placement.topology_gates import depends_on_peers
from remit.proposal.proposals import NO_VICTIMS, DecisionRecorder, ClassSurvey, DecisionOutcome, nearest_node
from remit.proposal.queue.backlog import Backlog
from remit.proposal.queue.class_queues import ClassQueue
from remit.proposal.quota import QuotaSource, quota_source

NO_PLACEMENTS: Final = Placements([], [])
REPORT_INTERVAL_MS: Final = 5_000
"""The same reason for the same replicas is not recorded again within this time."""
_KEYS_MAX: Final = 1 << 17
_REPORTS_MAX: Final = 4_096
PREEMPTION_ROUNDS_MAX: Final = 8
"""Preemption rounds in one attempt; each plans at most one more replica per node."""

RECORD_RESERVATIONS_MAX: Final = 128
"""Reservations, or victims of them, in one decision record."""

PREEMPTION_RETRY_MS: Final = 1_000
"""Retry delay if preemption helped only some replicas of a queue, or if capacity of terminating replicas is about to become
free.
"""


class QueueKey(NamedTuple):
    """Key of a queue: equal requirements, tenant and priority.

    Work that must be identified by its generation has a queue of its own: gangs, work with a deadline, work that an override
    or hint names, and work whose workload is being deleted.
    """

    tenant: str
    shape: int
    priority: int
    """0 for a gang: its members must share a queue even if the value of their priority class changed between their creations.
    """
    boost: int
    preempts: bool
    generation: int
    """-1 if the generation does not matter."""
    gang: int
    open: bool
    """Whether the workload exists and is not being deleted."""
    paused: str
    pins: tuple[PlaceSet, ...]
    hinted: str


def queue_key_for(view: View, effects: ActiveOverrides, generation: int, priority: int) -> QueueKey:
    """The queue of replicas of this generation and priority, given the overrides in force."""
    shapes, at = view.shapes, view.shapes.at
    tenant, workload = shapes.tenant_of(generation), shapes.name(generation)
    rank = view.things.classes.get(shapes.ranks[at.rank[generation]])
    priority = 0 if at.gang[generation] else priority
    paused = effects.paused_by(tenant, workload) if effects.overrides else ""
    pins = (effects.pinned_places(tenant, workload) or ()) if effects.overrides else ()
    path = f"{tenant}/{workload}"
    hinted = path if view.things.hints.about(path) else ""
    is_open = shapes.open(generation)
    apart = bool(at.gang[generation] or at.deadline[generation] or paused or pins or hinted or not is_open)
    return QueueKey(
        tenant=tenant,
        shape=at.shape[generation],
        priority=priority,
        boost=effects.boost(tenant, workload, priority) if effects.overrides else 0,
        preempts=rank is None or rank.spec.preempts,
        generation=generation if apart else -1,
        gang=at.gang[generation],
        open=is_open,
        paused=paused,
        pins=pins,
        hinted=hinted,
    )


def gang_minimum(view: View, key: QueueKey) -> int:
    """How many members of a gang must be bound at once: its minimum, until that many are running; 0 if replicas may be bound
    one by one.
    """
    if not key.gang:
        return 0
    return key.gang if view.standing(key.generation) < key.gang else 0


class AttemptShortage(Enum):
    """What ran out before all replicas of an attempt were placed."""

    NOTHING = "nothing"
    ROOM = "room"
    QUOTA = "quota"
    MEMBERS = "members"
    LEAVE = "leave"
    PLUGIN = "plugin"


class Attempt(NamedTuple):
    """Result of one attempt for a queue: the slots tried, what was surveyed, and the placements of the leading slots."""

    line: ClassQueue
    since: int
    slots: list[int]
    found: Placements
    purse: QuotaSource
    one: WorkClass | None
    seen: ClassSurvey | None
    short: AttemptShortage
    policy: int
    gang: bool
    why: str = ""
    left: ClassSurvey | None = None
    """The survey at the moment when no further replica fitted."""
    forced: dict[int, Reserve] = {}  # noqa: RUF012  (every attempt gets its own)
    """By slot, reservations that preempt other replicas."""
    pause_ms: list[int] = []  # noqa: RUF012
    """Delays after which preemption may succeed."""
    whole: bool = False
    """Whether the attempt included the members of all later turns."""

    def placed(self) -> Iterator[tuple[int, int, Mapping[str, int]]]:
        """Slot, row and devices of each placed replica."""
        devices = self.found.devices or [{}] * len(self.found.rows)
        return zip(self.slots[: len(self.found.rows)], self.found.rows, devices, strict=True)


class LastReport(NamedTuple):
    """The last recorded reason of a waiting queue: time, reason code and slots."""

    at_ms: int
    reason: Code
    slots: dict[int, None]


class Attempts:
    def __init__(
        self,
        view: View,
        kernel: Kernel,
        backlog: Backlog,
        victims: VictimSelector,
        decisions: DecisionRecorder,
        steering: OverrideFilter,
        tell: OnMark = ignore_mark,
    ) -> None:
        self._tell = tell
        self._view, self._kernel, self._backlog = view, kernel, backlog
        self._victims, self._decisions, self._steering = victims, decisions, steering
        self._keys: dict[tuple[int, str, int], QueueKey] = {}
        self._said: dict[ClassQueue, LastReport] = {}

    # -- queues -------------------------------------------------------------------------------------------------------------

    def key(self, slot: int) -> QueueKey:
        at, shapes = self._view.replicas.at, self._view.shapes
        generation, priority = at.generation[slot], at.priority[slot]
        of = shapes.at
        apart = of.gang[generation] or of.deadline[generation] or not shapes.open(generation)
        if apart or self._steering.effects.overrides or self._view.things.hints:
            return queue_key_for(self._view, self._steering.effects, generation, priority)
        # The generation does not matter for this work, so all of its shape and priority class share one key.
        known = (of.shape[generation], shapes.ranks[of.rank[generation]], priority)
        found = self._keys.get(known)
        if found is None:
            if len(self._keys) >= _KEYS_MAX:
                self._keys.clear()
            found = self._keys[known] = queue_key_for(self._view, self._steering.effects, generation, priority)
        return found

    def line(self, key: QueueKey, slot: int, now_ms: int) -> ClassQueue:
        shapes = self._view.shapes
        generation = self._view.replicas.at.generation[slot]
        deadline_ms = shapes.at.deadline[generation]
        charge = shapes.cut_of(generation).charge
        priority = min(self._view.replicas.at.priority[slot] + key.boost, USER_PRIORITY_MAX)
        return ClassQueue(key, key.tenant, priority, charge, now_ms + deadline_ms if deadline_ms else None)

    def forget(self) -> None:
        self._keys.clear()

    def class_of(self, key: QueueKey) -> WorkClass:
        ask = self._view.shapes.ask(key.shape)
        if not (key.pins or key.hinted):
            return self._kernel.known(key.shape, ask)
        return self._kernel.known((key.shape, key.pins, key.hinted), ask, pins=key.pins, hinted_workload=key.hinted)

    def closed_to(self, paths: Iterable[str]) -> list[int]:
        """Pending replicas of those of these workloads (`tenant/name`) that accept no further placements."""
        return self.waiting_of(paths, lambda owner: self._view.shapes.workloads.at.state[owner] != THERE)

    def waiting_of(self, paths: Iterable[str], which: Callable[[int], bool] = lambda owner: True) -> list[int]:
        """Pending replicas of these workloads (`tenant/name`), filtered by `which`."""
        shapes, replicas = self._view.shapes, self._view.replicas
        owners = [owner for path in paths if (owner := shapes.workloads.ids.get(path)) is not None and which(owner)]
        if not owners:
            return []
        of = np.flatnonzero(np.isin(shapes.column("workload"), owners))
        waits = replicas.column("phase") == PENDING
        found: list[int] = np.flatnonzero(waits & np.isin(replicas.column("generation"), of)).tolist()
        return found

    def class_of_line(self, line: ClassQueue) -> WorkClass | None:
        """The class of a queue; None if its shape no longer exists, in which case the queue is about to be removed."""
        key = _key_of(line)
        return self.class_of(key) if self._view.shapes.has(key.shape) else None

    def capacity(self) -> dict[str, int]:
        """Capacity of all nodes, in the units that quota is charged in."""
        columns = self._view.columns
        found = {name: int(columns.capacity[at].sum()) for name, at in columns.resources.items()}
        for node in columns.nodes:
            for device in node.spec.devices if node is not None else ():
                name = DEVICES_PREFIX + device.kind
                found[name] = found.get(name, 0) + WHOLE_DEVICE
        return found

    def held(self) -> dict[str, dict[str, int]]:
        """Usage of each tenant over all ledgers of its quota, without assumed placements: the backlog counts these as in
        flight.
        """
        found: dict[str, dict[str, int]] = {}
        for name, ledger in self._view.ledgers.items():
            if ledger.tenant and not name.endswith("/emergency"):
                theirs = found.setdefault(ledger.tenant, {})
                for resource, count in ledger.used.items():
                    theirs[resource] = theirs.get(resource, 0) + max(count, 0)
        shapes = self._view.shapes
        for generation, times in Counter(one.generation for one in self._view.assumed.values()).items():
            theirs = found.get(shapes.tenant_of(generation), {})
            for resource, count in shapes.cut_of(generation).charge:
                theirs[resource] = max(0, theirs.get(resource, 0) - times * count)
        return found

    # -- one attempt --------------------------------------------------------------------------------------------------------

    def attempt(self, line: ClassQueue, slots: list[int], now_ms: int) -> Attempt:
        """Places as many replicas as possible; they are assumed in the view from then on."""
        key, view = _key_of(line), self._view
        since = self._backlog.begin(line)
        cut, least = view.shapes.cut_of(view.replicas.at.generation[slots[0]]), gang_minimum(view, key)
        from_ = quota_source(view, key.tenant, now_ms, cut.charge, max(least, 1))
        policy = view.policy.spec.number if view.policy is not None else 0

        def ended(short: AttemptShortage, one: WorkClass | None = None, seen: ClassSurvey | None = None, why: str = "") -> Attempt:
            return Attempt(line, since, slots, NO_PLACEMENTS, from_, one, seen, short, policy, False, why)

        if key.paused or (key.generation >= 0 and not view.shapes.open(key.generation)):
            return ended(AttemptShortage.LEAVE)
        covered = from_.covers(cut.charge, len(slots))
        if least > 1 and len(slots) < least:
            rest = [slot for slot in self._backlog.take_rest(line) if isinstance(slot, int)]
            slots += rest
            if rest:
                self._tell(CoverageMark.WHOLE)
            covered = from_.covers(cut.charge, len(slots))
            if len(slots) < least:
                return ended(AttemptShortage.MEMBERS)
        try:
            one = self.class_of(key)
            if covered < max(least, 1):
                return ended(AttemptShortage.QUOTA, one)
            seen = self._decisions.look(self._kernel, one, now_ms)
            found = self._kernel.run(one, covered)
        except PluginError as error:
            self._tell(CoverageMark.PLUGIN)
            return ended(AttemptShortage.PLUGIN, why=str(error))
        self._kernel.undo(one, found)
        if len(found.rows) < least:
            return self._roomless(ended(AttemptShortage.ROOM, one, seen), one, now_ms)
        made = Attempt(line, since, slots, found, from_, one, seen, AttemptShortage.NOTHING, policy, least > 0)
        view.assume_run(made.placed(), (from_.name,))
        if len(found.rows) < covered:
            return self._roomless(made, one, now_ms)
        return made if covered == len(slots) else made._replace(short=AttemptShortage.QUOTA)

    def _roomless(self, attempt: Attempt, one: WorkClass, now_ms: int) -> Attempt:
        """Surveys the nodes at once, because later placements would change the result."""
        try:
            left = self._decisions.look(self._kernel, one, now_ms, anew=True)
            return attempt._replace(short=AttemptShortage.ROOM, left=left, forced={}, pause_ms=[])
        except PluginError as error:
            return attempt._replace(short=AttemptShortage.PLUGIN, why=str(error))

    def is_gang(self, line: ClassQueue) -> bool:
        return gang_minimum(self._view, _key_of(line)) > 0

    def undo(self, attempt: Attempt) -> None:
        for slot, _, _ in attempt.placed():
            self._view.forget(slot)

    def explain(
        self, attempt: Attempt, where: Mapping[int, str], word: DecisionOutcome, victims: Mapping[str, str] = NO_VICTIMS
    ) -> list[RecordDecision]:
        line = attempt.line
        return self._decisions.records(
            line.tenant,
            where,
            word,
            attempt=line.attempts,
            purse=attempt.purse,
            seen=attempt.seen,
            overrides=self._named(_key_of(line)),
            victims=victims,
        )

    def _named(self, key: QueueKey) -> tuple[str, ...]:
        """The overrides that affect this queue."""
        effects = self._steering.effects
        avoids = [one.override for one in effects.excluded_places]
        return tuple(dict.fromkeys((*avoids, *(pin.override for pin in key.pins), *((key.paused,) if key.paused else ()))))

    def forbidden(self, slot: int) -> bool:
        """Whether an override now forbids the reservation of this replica."""
        if not self._steering.effects.overrides:
            return False
        key, row = self.key(slot), np.array([self._view.replicas.at.node[slot]])
        ask = self._view.ask(slot)._replace(pins=key.pins)
        allowed = self._steering.filter.check(ask, Rows(self._kernel.columns, row), self._view.peers)
        return bool(key.paused) or not allowed.all()

    # -- preemption ----------------------------------------------------------------------------------------------------------

    def force(self, attempt: Attempt, slots: Sequence[int]) -> None:
        """Plans reservations that preempt other replicas, for slots that found no capacity. Gangs do not preempt: they must be
        bound at once.
        """
        key, one, view, victims = _key_of(attempt.line), attempt.one, self._view, self._victims
        if one is None or not key.preempts or key.gang:
            return
        count = attempt.purse.covers(self._cut(slots[0]).charge, len(slots))
        left = list(slots)
        victims.coming = False
        try:
            for _ in range(PREEMPTION_ROUNDS_MAX if count and could_ever_fit(self._kernel, one) else 0):
                # One replica per node and round. If replicas depend on their peers, one in total, because each placement
                # changes the rules.
                most = 1 if depends_on_peers(one.ask) or view.peers.anti_affinity_owners(one.ask) else count
                plans = victims.plan(view, self._kernel, one, self._kernel.roomless(one), key.priority, most)
                count -= len(plans)
                for plan in plans:
                    slot = left.pop(0)
                    attempt.forced[slot] = self._reserve(attempt, slot, plan)
                if not plans or not count:
                    break
        except PluginError:
            return
        if left:
            soon = attempt.forced or victims.coming
            attempt.pause_ms.append(max(victims.again_ms(), PREEMPTION_RETRY_MS if soon else 0))

    def _reserve(self, attempt: Attempt, slot: int, plan: Eviction) -> Reserve:
        view, purse_ = self._view, attempt.purse
        at, keys = view.replicas.at, view.replicas.keys
        victims = {keys[victim]: at.revision[victim] for victim in plan.victims}
        view.assume(slot, plan.row, plan.devices, (purse_.name,))
        node = self._kernel.name(plan.row)
        return Reserve(keys[slot], at.revision[slot], node, purse_.name, plan.devices, attempt.policy, victims)

    def explain_forced(self, attempt: Attempt) -> list[RecordDecision]:
        """Decision records of reservations; each covers several, up to a number of reservations and victims."""
        made, where, victims = list[RecordDecision](), dict[int, str](), dict[str, str]()
        last = next(reversed(attempt.forced), None)
        for slot, claim in attempt.forced.items():
            where[slot] = claim.node
            victims.update(dict.fromkeys(claim.victims, claim.replica))
            if slot == last or max(len(where), len(victims)) >= RECORD_RESERVATIONS_MAX:
                word = DecisionOutcome("reserved", Code.NO_ROOM, f"{len(victims)} replicas of lower priority preempted for {len(where)}")
                made += self.explain(attempt, where, word, victims)
                where, victims = {}, {}
        return made

    def _cut(self, slot: int) -> Cut:
        return self._view.shapes.cut_of(self._view.replicas.at.generation[slot])

    # -- waiting -------------------------------------------------------------------------------------------------------------

    def put_aside(self, attempt: Attempt, slots: Sequence[int], now_ms: int) -> list[RecordDecision]:
        """Puts the queue into a wait with a reason, unblock events and a deadline; returns the decision records to write."""
        line, key, short = attempt.line, _key_of(attempt.line), attempt.short
        if short is AttemptShortage.QUOTA and attempt.found.rows and self._has_more(line, now_ms):
            return []  # the remaining replicas are charged to another grant in the next attempt
        reason, cures, detail, never = self._reason(attempt)
        pause_ms = max(attempt.pause_ms, default=0)
        until_ms = now_ms + pause_ms if pause_ms else None
        if pause_ms:
            self._tell(CoverageMark.PACED)
        waits = self._backlog.wait(line, reason, cures, since=attempt.since, now_ms=now_ms, until_ms=until_ms)
        if not waits or not slots or self._is_said(line, reason, slots, now_ms):
            return []
        seen, closest = attempt.left or attempt.seen, None
        if short is AttemptShortage.ROOM and attempt.one is not None:
            closest = self._near(attempt.one)
        return self._decisions.records(
            line.tenant,
            slots,
            DecisionOutcome("waiting", reason, detail, event_names(cures), never),
            attempt=line.attempts,
            purse=attempt.purse,
            seen=seen,
            near=closest,
            overrides=self._named(key),
        )

    def _has_more(self, line: ClassQueue, now_ms: int) -> bool:
        return quota_source(self._view, line.tenant, now_ms, line.amount).covers(line.amount, 1) > 0

    def _is_said(self, line: ClassQueue, reason: Code, slots: Sequence[int], now_ms: int) -> bool:
        """Whether the same reason was recorded for all these replicas recently. Without this, a queue that is woken often would
        fill the store.
        """
        last = self._said.get(line)
        if last is not None and last.reason is reason and now_ms - last.at_ms < REPORT_INTERVAL_MS:
            return all(slot in last.slots for slot in slots)
        if len(self._said) >= _REPORTS_MAX:
            self._said.clear()
        self._said[line] = LastReport(now_ms, reason, dict.fromkeys(slots))
        return False

    def _near(self, one: WorkClass) -> NearestNode | None:
        try:
            return nearest_node(self._kernel, one)
        except PluginError:
            return None

    def _reason(self, attempt: Attempt) -> tuple[Code, frozenset[Hashable], str, bool]:
        key = _key_of(attempt.line)
        workload = ("workload", key.tenant, self._view.shapes.name(key.generation)) if key.generation >= 0 else None
        match attempt.short:
            case AttemptShortage.LEAVE if key.paused:
                return Code.OVERRIDE, frozenset({("override",)}), f"paused by override {key.paused}", False
            case AttemptShortage.LEAVE:
                return Code.DELETING, frozenset({workload}), "the workload is deleted or being deleted", True
            case AttemptShortage.QUOTA:
                cures = frozenset({("quota", key.tenant)})
                return attempt.purse.reason, cures, f"{attempt.purse.name} has too little quota left", False
            case AttemptShortage.MEMBERS:
                return Code.GANG_SHORT, frozenset({("member", key), workload}), f"fewer than {key.gang} gang members exist", False
            case AttemptShortage.PLUGIN:
                return Code.FAULT, frozenset({("node",)}), attempt.why, False
            case AttemptShortage.ROOM | AttemptShortage.NOTHING:
                return self._refused(key, attempt.one, attempt.left)

    def _refused(self, key: QueueKey, one: WorkClass | None, left: ClassSurvey | None) -> tuple[Code, frozenset[Hashable], str, bool]:
        if one is None or left is None:
            return Code.NO_ROOM, frozenset({("room",), ("node",)}), "", False
        funnel = left.funnel
        try:
            never = not could_ever_fit(self._kernel, one)
        except PluginError as error:
            return Code.FAULT, frozenset({("node",)}), str(error), False
        cures: set[Hashable] = {self._cure(cure, key) for cure in funnel.cures()}
        if key.gang or funnel.fits:
            # Some members fit, so more free capacity may be enough for all.
            cures.add(("room",))
        reason = Code.GANG_SHORT if key.gang and funnel.fits else funnel.reason
        step = funnel.dominant
        detail = f"{funnel.nodes} nodes; {step.filter.name} refused the last {step.refused}" if step is not None else ""
        return reason, frozenset(cures), detail, never

    def _cure(self, cure: UnblockEvent, key: QueueKey) -> Hashable:
        match cure:
            case UnblockEvent.PEERS:
                return ("peers", key.tenant)
            case _:
                return (cure.value,)


def event_names(cures: Iterable[Hashable]) -> tuple[str, ...]:
    """Kinds of the events that end a wait; `time` if there are none."""
    return tuple(sorted({str(cure[0]) if isinstance(cure, tuple) else str(cure) for cure in cures})) or (UnblockEvent.TIME.value,)


def _key_of(line: ClassQueue) -> QueueKey:
    if not isinstance(line.key, QueueKey):
        raise TypeError(f"{line!r} was not created by this scheduler")
    return line.key
