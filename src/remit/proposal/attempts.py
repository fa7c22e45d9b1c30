"""One scheduling attempt for a queue of equal replicas or a gang: place, preempt, or explain why not.

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
from remit.observation.node_columns import SelectedRows
from remit.observation.replica_table import PENDING
from remit.observation.scheduler_view import SchedulerView
from remit.observation.shapes import PRESENT, PlacementSpec
from remit.proposal.metrics import CoverageMark, OnMark, ignore_mark
from remit.proposal.placement.builtin_plugins import OverrideFilter
from remit.proposal.placement.class_scores import WorkClass
from remit.proposal.placement.funnel import could_ever_fit, rejection_text
from remit.proposal.placement.kernel import Kernel, Placements
from remit.proposal.placement.plugins import GANG_MEMBER, PluginError, UnblockEvent
from remit.proposal.placement.preemption import Eviction
from remit.proposal.placement.preemption_candidates import VictimSelector
from remit.proposal.placement.topology_gates import depends_on_peers
from remit.proposal.proposals import NO_VICTIMS, ClassSurvey, DecisionOutcome, DecisionRecorder, nearest_node
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
    is_open: bool
    """Whether the workload exists and is not being deleted."""
    paused: str
    pins: tuple[PlaceSet, ...]
    hinted: str


def queue_key_for(view: SchedulerView, effects: ActiveOverrides, generation: int, priority: int) -> QueueKey:
    """The queue of replicas of this generation and priority, given the overrides in force."""
    shapes, at = view.shapes, view.shapes.at
    tenant, workload = shapes.tenant_of(generation), shapes.workload_of(generation)
    priority_class = view.objects.classes.get(shapes.priority_classes[at.priority_class[generation]])
    priority = 0 if at.gang[generation] else priority
    paused = effects.paused_by(tenant, workload) if effects.overrides else ""
    pins = (effects.pinned_places(tenant, workload) or ()) if effects.overrides else ()
    path = f"{tenant}/{workload}"
    hinted = path if view.objects.hints.has_hint(path) else ""
    is_open = shapes.is_open(generation)
    needs_own_queue = bool(at.gang[generation] or at.deadline[generation] or paused or pins or hinted or not is_open)
    return QueueKey(
        tenant=tenant,
        shape=at.shape[generation],
        priority=priority,
        boost=effects.boost(tenant, workload, priority) if effects.overrides else 0,
        preempts=priority_class is None or priority_class.spec.preempts,
        generation=generation if needs_own_queue else -1,
        gang=at.gang[generation],
        is_open=is_open,
        paused=paused,
        pins=pins,
        hinted=hinted,
    )


def gang_minimum(view: SchedulerView, key: QueueKey) -> int:
    """How many members of a gang must be bound at once: its minimum, until that many are running; 0 if replicas may be bound
    one by one.
    """
    if not key.gang:
        return 0
    return key.gang if view.holds.bound_count(key.generation) < key.gang else 0


def gang_shortage_text(fitting: int, minimum: int) -> str:
    return f"{fitting} of {minimum} gang members fit, and they must be bound at once"


class AttemptShortage(Enum):
    """The resource that ran out before all replicas of an attempt were placed."""

    NONE = "nothing"
    CAPACITY = "room"
    QUOTA = "quota"
    MEMBERS = "members"
    PERMISSION = "leave"
    PLUGIN = "plugin"


class Attempt(NamedTuple):
    """Result of one attempt for a queue: the slots tried, what was surveyed, and the placements of the leading slots."""

    queue: ClassQueue
    since: int
    slots: list[int]
    placements: Placements
    quota_source: QuotaSource
    work_class: WorkClass | None
    survey: ClassSurvey | None
    shortage: AttemptShortage
    policy: int
    gang: bool
    error: str = ""
    survey_at_end: ClassSurvey | None = None
    """The survey at the moment when no further replica fitted."""
    reservations: dict[int, Reserve] = {}  # noqa: RUF012  (every attempt gets its own)
    """By slot, reservations that preempt other replicas."""
    retry_delays_ms: list[int] = []  # noqa: RUF012
    """Delays after which preemption may succeed."""
    complete: bool = False
    """Whether the attempt included the members of all later turns."""
    gang_minimum: int = 0
    """How many gang members must be bound at once; 0 if replicas may be bound one by one."""
    gang_fits: int = 0
    """How many members of a gang fitted, if fewer than its minimum did."""

    def placed(self) -> Iterator[tuple[int, int, Mapping[str, int]]]:
        """Slot, row and devices of each placed replica."""
        devices = self.placements.devices or [{}] * len(self.placements.rows)
        return zip(self.slots[: len(self.placements.rows)], self.placements.rows, devices, strict=True)


class LastReport(NamedTuple):
    """The last recorded reason of a waiting queue: time, reason code and slots."""

    at_ms: int
    reason: Code
    slots: dict[int, None]


class Attempts:
    def __init__(
        self,
        view: SchedulerView,
        kernel: Kernel,
        backlog: Backlog,
        victims: VictimSelector,
        decisions: DecisionRecorder,
        override_filter: OverrideFilter,
        on_mark: OnMark = ignore_mark,
    ) -> None:
        self._on_mark = on_mark
        self._view, self._kernel, self._backlog = view, kernel, backlog
        self._victims, self._decisions, self._override_filter = victims, decisions, override_filter
        self._keys: dict[tuple[int, str, int], QueueKey] = {}
        self._last_reports: dict[ClassQueue, LastReport] = {}

    # -- queues -------------------------------------------------------------------------------------------------------------

    def key(self, slot: int) -> QueueKey:
        at, shapes = self._view.replicas.at, self._view.shapes
        generation, priority = at.generation[slot], at.priority[slot]
        generations = shapes.at
        needs_own_queue = generations.gang[generation] or generations.deadline[generation] or not shapes.is_open(generation)
        if needs_own_queue or self._override_filter.effects.overrides or self._view.objects.hints:
            return queue_key_for(self._view, self._override_filter.effects, generation, priority)
        # The generation does not matter for this work, so all of its shape and priority class share one key.
        cache_key = (generations.shape[generation], shapes.priority_classes[generations.priority_class[generation]], priority)
        key = self._keys.get(cache_key)
        if key is None:
            if len(self._keys) >= _KEYS_MAX:
                self._keys.clear()
            key = self._keys[cache_key] = queue_key_for(self._view, self._override_filter.effects, generation, priority)
        return key

    def make_queue(self, key: QueueKey, slot: int, now_ms: int) -> ClassQueue:
        shapes = self._view.shapes
        generation = self._view.replicas.at.generation[slot]
        deadline_ms = shapes.at.deadline[generation]
        charge = shapes.placement_of(generation).charge
        priority = min(self._view.replicas.at.priority[slot] + key.boost, USER_PRIORITY_MAX)
        return ClassQueue(key, key.tenant, priority, charge, now_ms + deadline_ms if deadline_ms else None)

    def forget(self) -> None:
        self._keys.clear()

    def class_of(self, key: QueueKey) -> WorkClass:
        requirements = self._view.shapes.requirements_of(key.shape)
        if not (key.pins or key.hinted):
            return self._kernel.class_for(key.shape, requirements)
        return self._kernel.class_for(
            (key.shape, key.pins, key.hinted), requirements, pins=key.pins, hinted_workload=key.hinted
        )

    def pending_of_closed(self, paths: Iterable[str]) -> list[int]:
        """Pending replicas of those of these workloads (`tenant/name`) that accept no further placements."""
        return self.pending_of(paths, lambda owner: self._view.shapes.workloads.at.state[owner] != PRESENT)

    def pending_of(self, paths: Iterable[str], which: Callable[[int], bool] = lambda owner: True) -> list[int]:
        """Pending replicas of these workloads (`tenant/name`), filtered by `which`."""
        shapes, replicas = self._view.shapes, self._view.replicas
        owners = [owner for path in paths if (owner := shapes.workloads.ids.get(path)) is not None and which(owner)]
        if not owners:
            return []
        generations = np.flatnonzero(np.isin(shapes.column("workload"), owners))
        is_pending = replicas.column("phase") == PENDING
        slots: list[int] = np.flatnonzero(is_pending & np.isin(replicas.column("generation"), generations)).tolist()
        return slots

    def class_of_queue(self, queue: ClassQueue) -> WorkClass | None:
        """The class of a queue; None if its shape no longer exists, in which case the queue is about to be removed."""
        key = _key_of(queue)
        return self.class_of(key) if self._view.shapes.has_shape(key.shape) else None

    def capacity(self) -> dict[str, int]:
        """Capacity of all nodes, in the units that quota is charged in."""
        columns = self._view.columns
        totals = {name: int(columns.capacity[at].sum()) for name, at in columns.resources.items()}
        for node in columns.nodes:
            for device in node.spec.devices if node is not None else ():
                name = DEVICES_PREFIX + device.kind
                totals[name] = totals.get(name, 0) + WHOLE_DEVICE
        return totals

    def usage_by_tenant(self) -> dict[str, dict[str, int]]:
        """Usage of each tenant over all ledgers of its quota, without assumed placements: the backlog counts these as in
        flight.
        """
        usage: dict[str, dict[str, int]] = {}
        for name, ledger in self._view.quota_ledgers.ledgers.items():
            if ledger.tenant and not name.endswith("/emergency"):
                tenant_usage = usage.setdefault(ledger.tenant, {})
                for resource, count in ledger.used.items():
                    tenant_usage[resource] = tenant_usage.get(resource, 0) + max(count, 0)
        shapes = self._view.shapes
        for generation, replicas in Counter(assumed.generation for assumed in self._view.assumed.values()).items():
            tenant_usage = usage.get(shapes.tenant_of(generation), {})
            for resource, count in shapes.placement_of(generation).charge:
                tenant_usage[resource] = max(0, tenant_usage.get(resource, 0) - replicas * count)
        return usage

    # -- one attempt --------------------------------------------------------------------------------------------------------

    def attempt(self, queue: ClassQueue, slots: list[int], now_ms: int) -> Attempt:
        """Places as many replicas as possible; they are assumed in the view from then on."""
        key, view = _key_of(queue), self._view
        since = self._backlog.begin_attempt(queue)
        spec, minimum = view.shapes.placement_of(view.replicas.at.generation[slots[0]]), gang_minimum(view, key)
        source = quota_source(view, key.tenant, now_ms, spec.charge, max(minimum, 1))
        policy = view.shapes.policy.spec.number if view.shapes.policy is not None else 0

        def ended(
            shortage: AttemptShortage,
            attempted_class: WorkClass | None = None,
            first_survey: ClassSurvey | None = None,
            error_text: str = "",
        ) -> Attempt:
            """An attempt that placed nothing."""
            return Attempt(
                queue, since, slots, NO_PLACEMENTS, source, attempted_class, first_survey, shortage, policy, False, error_text
            )

        if key.paused or (key.generation >= 0 and not view.shapes.is_open(key.generation)):
            return ended(AttemptShortage.PERMISSION)
        covered = source.covers(spec.charge, len(slots))
        if minimum > 1 and len(slots) < minimum:
            remaining_members = [slot for slot in self._backlog.take_rest(queue) if isinstance(slot, int)]
            slots += remaining_members
            if remaining_members:
                self._on_mark(CoverageMark.WHOLE)
            covered = source.covers(spec.charge, len(slots))
            if len(slots) < minimum:
                return ended(AttemptShortage.MEMBERS)
        try:
            work_class = self.class_of(key)
            if covered < max(minimum, 1):
                return ended(AttemptShortage.QUOTA, work_class)
            survey = self._decisions.survey(self._kernel, work_class, now_ms)
            placements = self._kernel.place_run(work_class, covered)
        except PluginError as error:
            self._on_mark(CoverageMark.PLUGIN)
            return ended(AttemptShortage.PLUGIN, error_text=str(error))
        self._kernel.undo(work_class, placements)
        if len(placements.rows) < minimum:
            shortage = ended(AttemptShortage.CAPACITY, work_class, survey)
            shortage = shortage._replace(gang_minimum=minimum, gang_fits=len(placements.rows))
            return self._out_of_capacity(shortage, work_class, now_ms)
        attempt = Attempt(
            queue, since, slots, placements, source, work_class, survey, AttemptShortage.NONE, policy, minimum > 0
        )
        view.holds.assume_many(attempt.placed(), (source.name,))
        if len(placements.rows) < covered:
            return self._out_of_capacity(attempt, work_class, now_ms)
        return attempt if covered == len(slots) else attempt._replace(shortage=AttemptShortage.QUOTA)

    def _out_of_capacity(self, attempt: Attempt, work_class: WorkClass, now_ms: int) -> Attempt:
        """Surveys the nodes at once, because later placements would change the result."""
        try:
            survey = self._decisions.survey(self._kernel, work_class, now_ms, refresh=True)
            return attempt._replace(
                shortage=AttemptShortage.CAPACITY, survey_at_end=survey, reservations={}, retry_delays_ms=[]
            )
        except PluginError as error:
            return attempt._replace(shortage=AttemptShortage.PLUGIN, error=str(error))

    def is_gang(self, queue: ClassQueue) -> bool:
        return gang_minimum(self._view, _key_of(queue)) > 0

    def undo(self, attempt: Attempt) -> None:
        for slot, _, _ in attempt.placed():
            self._view.holds.forget(slot)

    def explain(
        self, attempt: Attempt, nodes: Mapping[int, str], outcome: DecisionOutcome, victims: Mapping[str, str] = NO_VICTIMS
    ) -> list[RecordDecision]:
        queue = attempt.queue
        return self._decisions.records(
            queue.tenant,
            nodes,
            outcome,
            attempt=queue.attempts,
            quota_source=attempt.quota_source,
            survey=attempt.survey,
            overrides=self._affecting_overrides(_key_of(queue)),
            victims=victims,
        )

    def _affecting_overrides(self, key: QueueKey) -> tuple[str, ...]:
        """The overrides that affect this queue."""
        effects = self._override_filter.effects
        avoid_overrides = [places.override for places in effects.excluded_places]
        return tuple(
            dict.fromkeys((*avoid_overrides, *(pin.override for pin in key.pins), *((key.paused,) if key.paused else ())))
        )

    def is_forbidden(self, slot: int) -> bool:
        """Whether an override now forbids the reservation of this replica."""
        if not self._override_filter.effects.overrides:
            return False
        key, row = self.key(slot), np.array([self._view.replicas.at.node[slot]])
        requirements = self._view.requirements_of(slot)._replace(pins=key.pins)
        allowed = self._override_filter.filter.check(requirements, SelectedRows(self._kernel.columns, row), self._view.peers)
        return bool(key.paused) or not allowed.all()

    # -- preemption ----------------------------------------------------------------------------------------------------------

    def preempt(self, attempt: Attempt, slots: Sequence[int]) -> None:
        """Plans reservations that preempt other replicas, for slots that found no capacity. Gangs do not preempt: they must be
        bound at once.
        """
        key, work_class, view, victims = _key_of(attempt.queue), attempt.work_class, self._view, self._victims
        if work_class is None or not key.preempts or key.gang:
            return
        count = attempt.quota_source.covers(self._placement_spec(slots[0]).charge, len(slots))
        remaining = list(slots)
        victims.capacity_coming = False
        try:
            for _ in range(PREEMPTION_ROUNDS_MAX if count and could_ever_fit(self._kernel, work_class) else 0):
                # One replica per node and round. If replicas depend on their peers, one in total, because each placement
                # changes the rules.
                most = (
                    1
                    if depends_on_peers(work_class.requirements) or view.peers.anti_affinity_owners(work_class.requirements)
                    else count
                )
                plans = victims.plan(
                    view, self._kernel, work_class, self._kernel.without_capacity_check(work_class), key.priority, most
                )
                count -= len(plans)
                for plan in plans:
                    slot = remaining.pop(0)
                    attempt.reservations[slot] = self._reserve(attempt, slot, plan)
                if not plans or not count:
                    break
        except PluginError:
            return
        if remaining:
            retry_soon = attempt.reservations or victims.capacity_coming
            attempt.retry_delays_ms.append(max(victims.retry_after_ms(), PREEMPTION_RETRY_MS if retry_soon else 0))

    def _reserve(self, attempt: Attempt, slot: int, plan: Eviction) -> Reserve:
        view, source = self._view, attempt.quota_source
        at, keys = view.replicas.at, view.replicas.keys
        victims = {keys[victim]: at.revision[victim] for victim in plan.victims}
        view.holds.assume(slot, plan.row, plan.devices, (source.name,))
        node = self._kernel.node_name(plan.row)
        return Reserve(keys[slot], at.revision[slot], node, source.name, plan.devices, attempt.policy, victims)

    def explain_reservations(self, attempt: Attempt) -> list[RecordDecision]:
        """Decision records of reservations; each covers several, up to a number of reservations and victims."""
        records, nodes, victims = list[RecordDecision](), dict[int, str](), dict[str, str]()
        last = next(reversed(attempt.reservations), None)
        for slot, claim in attempt.reservations.items():
            nodes[slot] = claim.node
            victims.update(dict.fromkeys(claim.victims, claim.replica))
            if slot == last or max(len(nodes), len(victims)) >= RECORD_RESERVATIONS_MAX:
                outcome = DecisionOutcome(
                    "reserved", Code.NO_ROOM, f"{len(victims)} replicas of lower priority preempted for {len(nodes)}"
                )
                records += self.explain(attempt, nodes, outcome, victims)
                nodes, victims = {}, {}
        return records

    def _placement_spec(self, slot: int) -> PlacementSpec:
        return self._view.shapes.placement_of(self._view.replicas.at.generation[slot])

    # -- waiting -------------------------------------------------------------------------------------------------------------

    def begin_wait(self, attempt: Attempt, slots: Sequence[int], now_ms: int) -> list[RecordDecision]:
        """Puts the queue into a wait with a reason, unblock events and a deadline; returns the decision records to write."""
        queue, key, shortage = attempt.queue, _key_of(attempt.queue), attempt.shortage
        if shortage is AttemptShortage.QUOTA and attempt.placements.rows and self._another_source_covers(queue, now_ms):
            return []  # the remaining replicas are charged to another grant in the next attempt
        reason, unblock_events, detail, never = self._reason(attempt)
        pause_ms = max(attempt.retry_delays_ms, default=0)
        until_ms = now_ms + pause_ms if pause_ms else None
        if pause_ms:
            self._on_mark(CoverageMark.PACED)
        is_waiting = self._backlog.wait(
            queue, reason, unblock_events, since=attempt.since, now_ms=now_ms, until_ms=until_ms, detail=detail
        )
        if not is_waiting or not slots or self._is_reported(queue, reason, slots, now_ms):
            return []
        survey, closest = attempt.survey_at_end or attempt.survey, None
        if shortage is AttemptShortage.CAPACITY and attempt.work_class is not None:
            closest = self._nearest_node(attempt.work_class)
        return self._decisions.records(
            queue.tenant,
            slots,
            DecisionOutcome("waiting", reason, detail, event_names(unblock_events), never),
            attempt=queue.attempts,
            quota_source=attempt.quota_source,
            survey=survey,
            nearest=closest,
            overrides=self._affecting_overrides(key),
        )

    def _another_source_covers(self, queue: ClassQueue, now_ms: int) -> bool:
        return quota_source(self._view, queue.tenant, now_ms, queue.amount).covers(queue.amount, 1) > 0

    def _is_reported(self, queue: ClassQueue, reason: Code, slots: Sequence[int], now_ms: int) -> bool:
        """Whether the same reason was recorded for all these replicas recently. Without this, a queue that is woken often would
        fill the store.
        """
        last = self._last_reports.get(queue)
        if last is not None and last.reason is reason and now_ms - last.at_ms < REPORT_INTERVAL_MS:
            return all(slot in last.slots for slot in slots)
        if len(self._last_reports) >= _REPORTS_MAX:
            self._last_reports.clear()
        self._last_reports[queue] = LastReport(now_ms, reason, dict.fromkeys(slots))
        return False

    def _nearest_node(self, work_class: WorkClass) -> NearestNode | None:
        try:
            return nearest_node(self._kernel, work_class)
        except PluginError:
            return None

    def _reason(self, attempt: Attempt) -> tuple[Code, frozenset[Hashable], str, bool]:
        key = _key_of(attempt.queue)
        workload = ("workload", key.tenant, self._view.shapes.workload_of(key.generation)) if key.generation >= 0 else None
        match attempt.shortage:
            case AttemptShortage.PERMISSION if key.paused:
                return Code.OVERRIDE, frozenset({("override",)}), f"paused by override {key.paused}", False
            case AttemptShortage.PERMISSION:
                return Code.DELETING, frozenset({workload}), "the workload is deleted or being deleted", True
            case AttemptShortage.QUOTA:
                unblock_events = frozenset({("quota", key.tenant)})
                needed = max(gang_minimum(self._view, key), 1)
                detail = attempt.quota_source.shortage_text(attempt.queue.amount, needed)
                return attempt.quota_source.reason, unblock_events, detail, False
            case AttemptShortage.MEMBERS:
                return (
                    Code.GANG_SHORT,
                    frozenset({(GANG_MEMBER, key), workload}),
                    f"fewer than {key.gang} gang members exist",
                    False,
                )
            case AttemptShortage.PLUGIN:
                return Code.INTERNAL_ERROR, frozenset({("node",)}), attempt.error, False
            case AttemptShortage.CAPACITY | AttemptShortage.NONE:
                return self._placement_reason(key, attempt)

    def _placement_reason(self, key: QueueKey, attempt: Attempt) -> tuple[Code, frozenset[Hashable], str, bool]:
        work_class, survey = attempt.work_class, attempt.survey_at_end
        if work_class is None or survey is None:
            return Code.NO_ROOM, frozenset({("room",), ("node",)}), "", False
        funnel = survey.funnel
        try:
            never = not could_ever_fit(self._kernel, work_class)
        except PluginError as error:
            return Code.INTERNAL_ERROR, frozenset({("node",)}), str(error), False
        unblock_events: set[Hashable] = {self._unblock_key(event, key) for event in funnel.unblock_events()}
        if key.gang or funnel.fits:
            # Some members fit, so more free capacity may be enough for all.
            unblock_events.add(("room",))
        reason = Code.GANG_SHORT if key.gang and funnel.fits else funnel.reason
        detail = (
            gang_shortage_text(attempt.gang_fits, attempt.gang_minimum)
            if reason is Code.GANG_SHORT and attempt.gang_minimum
            else rejection_text(funnel, work_class.requirements)
        )
        return reason, frozenset(unblock_events), detail, never

    def _unblock_key(self, event: UnblockEvent, key: QueueKey) -> Hashable:
        match event:
            case UnblockEvent.PEERS:
                return ("peers", key.tenant)
            case _:
                return (event.value,)


def event_names(events: Iterable[Hashable]) -> tuple[str, ...]:
    """Kinds of the events that end a wait; `time` if there are none."""
    return tuple(sorted({str(event[0]) if isinstance(event, tuple) else str(event) for event in events})) or (
        UnblockEvent.TIME.value,
    )


def _key_of(queue: ClassQueue) -> QueueKey:
    if not isinstance(queue.key, QueueKey):
        raise TypeError(f"{queue!r} was not created by this scheduler")
    return queue.key
