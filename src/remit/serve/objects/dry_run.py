"""`plan`: field differences and trial placement of an apply, without writing.

Differences are a flat list of paths with the value before and after, as a manifest would have it: fields with their default
value are absent. Fields that the authority sets, and the status, are not compared; secret values are hidden.

The manifests are decided by the authority's own rules (`commitment.decide`) on a copy, in apply order, each on top of those
before it. The replicas that the controllers would create (`correction.controllers.desired_replicas`) are then placed on a
private view by the real placement kernel: first those that can be created at once, then, where an older generation frees
capacity, the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from remit.commitment.books import Books, DecisionTime
from remit.commitment.decide import decide
from remit.commitment.draft import Draft
from remit.commitment.rulings.transitions import spawn
from remit.correction.controllers.desired_replicas import RUNNING_PHASES, DesiredReplicas, available, available_min
from remit.law.admission import apply_policy_defaults
from remit.model.claims import Actor, Apply, Operation, OperationID, Refused, Spawn
from remit.model.kinds import Secret, Workload
from remit.model.kinds.registry import DEFINITIONS, AnyObject
from remit.model.manifests.validation import to_manifest
from remit.model.metadata import Metadata
from remit.model.objects import TENANTED, encode, key, key_of
from remit.model.problems import Path, format_path
from remit.model.records import Phase
from remit.model.roles import Role
from remit.model.wire.api_types import Difference, PlanAnswer, PlanItem, PlannedPlacement
from remit.observation.replica_table import PENDING
from remit.observation.scheduler_view import SchedulerView
from remit.observation.watch_cache import CachedRow, WatchCache
from remit.proposal.explain.pending import explain_pending, pending_work
from remit.proposal.explain.result_types import PendingExplanation
from remit.serve.diagnostics.view_snapshots import CachedRows, ViewSnapshot
from remit.serve.http.replies import refusal_problem
from remit.serve.objects.writes import apply_order
from remit.store.protocol import Row, RowChange, WatchEvent
from remit.world.interfaces import Clock

DIFFERENCES_MAX: Final = 1_000
TEXT_MAX: Final = 4_096

_SERVER_FIELDS: Final = ("name", "tenant", "uid", "generation", "revision", "deleting")
"""Fields that the authority sets, and the name, which is reported separately."""
_HIDDEN: Final = "(hidden)"


def diff_objects(before: AnyObject | None, after: AnyObject | None) -> tuple[Difference, ...]:
    """Return the differences in field order, at most `DIFFERENCES_MAX`."""
    secret = isinstance(before, Secret) or isinstance(after, Secret)
    differences: list[Difference] = []
    for path, old, new in _walk_differences((), _manifest_fields(before), _manifest_fields(after)):
        if len(differences) == DIFFERENCES_MAX:
            break
        if secret and path[:2] == ("spec", "data"):
            old, new = None if old is None else _HIDDEN, None if new is None else _HIDDEN
        differences.append(Difference(path=format_path(path), before=_shortened(old), after=_shortened(new)))
    return tuple(differences)


def _manifest_fields(obj: AnyObject | None) -> dict[str, Any]:
    """Return what a manifest of this object would contain."""
    if obj is None:
        return {}
    written = msgspec.json.decode(encode(obj))
    fields = {name: written[name] for name in ("metadata", "spec") if name in written}
    fields["metadata"] = {name: value for name, value in fields["metadata"].items() if name not in _SERVER_FIELDS}
    for owner in fields["metadata"].get("owners", ()):
        owner.pop("uid", None)
    return fields


def _walk_differences(path: Path, before: Any, after: Any) -> Iterator[tuple[Path, Any, Any]]:
    if before == after or not (_is_set(before) or _is_set(after)):
        return
    if isinstance(before, dict | None) and isinstance(after, dict | None):
        old, new = before or {}, after or {}
        for name in dict.fromkeys((*old, *new)):
            yield from _walk_differences((*path, name), old.get(name), new.get(name))
    elif _is_list_or_none(before) and _is_list_or_none(after) and (_has_objects(before) or _has_objects(after)):
        for index, (old_item, new_item) in enumerate(zip_longest(before or (), after or ())):
            yield from _walk_differences((*path, index), old_item, new_item)
    else:
        yield path, before, after


def _is_list_or_none(value: Any) -> bool:
    return value is None or isinstance(value, list | tuple)


def _has_objects(value: Any) -> bool:
    """Return whether a list has objects. A list of plain values is compared as a whole, since single positions mean nothing."""
    return any(isinstance(item, dict) for item in value or ())


def _shortened(value: Any) -> Any:
    if value is None:
        return UNSET
    return value[:TEXT_MAX] + "…" if isinstance(value, str) and len(value) > TEXT_MAX else value


def _is_set(value: Any) -> bool:
    """An empty map or list counts as absent."""
    return value is not None and value != {} and value != []


TRIAL_REPLICAS_MAX: Final = 20_000
"""Replicas of one plan that are placed on trial."""

TRIAL_BATCH_MAX: Final = 512
"""After this many changes the decided ones are committed to the copy: lookups in a draft scan all of it."""

PLACEMENT_MS_MAX: Final = 5_000
"""Time limit of the trial placement. Workloads that were not reached have no placement in the answer."""

SPAWN_MAX: Final = 10_000
NODES_REPORTED_MAX: Final = 1_000

_ROLLOUT_BLOCKED: Final = {
    "reason": "rollout_blocked",
    "meaning": "no new replica can be placed, and the old ones stay until new ones are ready",
    "cure": "add capacity for one more replica, or allow spec.rollout.maxUnavailable",
}

_NUMEROUS_KINDS: Final = ("secret", "config", "workload", "generation", "allotment", "node")
"""Kinds with possibly very many objects: only those that the manifests name are loaded."""


def plan(snapshot: ViewSnapshot, objects: Sequence[AnyObject], actor: Actor, clock: Clock) -> PlanAnswer:
    """Plan an apply of `objects`. The view of `snapshot` must be private: it is changed here."""
    authority = _TrialAuthority(snapshot.rows, objects, actor, clock)
    items = {key(objects[index]): authority.rule(objects[index]) for index in apply_order(objects)}
    placer = _TrialPlacement(snapshot, authority, clock)
    for name, placement in placer.placements([name for name, item in items.items() if item.action in ("create", "replace")]):
        items[name] = replace(items[name], placement=placement)
    return PlanAnswer(revision=snapshot.rows.revision, items=tuple(items[key(obj)] for obj in objects))


# -- verdicts ----------------------------------------------------------------------------------------------------------------


class _TrialAuthority:
    """Decides manifests one after another, each on top of those before it. `written` are the resulting objects by key."""

    def __init__(self, rows: CachedRows, objects: Sequence[AnyObject], actor: Actor, clock: Clock) -> None:
        now_ms = clock.now_ms()
        self._rows, self._actor = rows, actor
        self._time = DecisionTime(now_ms, clock.boot(), {}, now_ms, rows.head.sequence + 1, rows.head.incarnation)
        self._books = _trial_books(rows, objects, self._time)
        self.draft = Draft(self._books, self._time)
        self.written: dict[str, AnyObject] = {}

    def rule(self, obj: AnyObject) -> PlanItem:
        if len(self.draft.changes.objects) >= TRIAL_BATCH_MAX:
            self._commit_batch()
        kind, meta, name = type(obj).__name__, obj.metadata, key(obj)
        before: AnyObject | None = self._rows.get(name)
        item = PlanItem(kind=kind, name=meta.name, tenant=meta.tenant, action="unchanged")
        if before is not None and to_manifest(before) == to_manifest(obj) and not _is_deleting(before):
            return item
        # A refusal leaves the draft unchanged.
        verdict = decide(self.draft, Operation(OperationID("plan"), self._actor, Apply(obj)))
        if isinstance(verdict, Refused):
            return replace(item, action="refused", problem=refusal_problem(verdict).document)
        drafted = self.draft.lookup(name)
        after: AnyObject | None = None if drafted is None else drafted[0]
        self.written |= {
            key_: drafted_object
            for key_, drafted_object in self.draft.changes.objects.items()
            if drafted_object is not None and key_ not in self.written
        }
        return replace(item, action="create" if before is None else "replace", diff=diff_objects(before, after))

    def _commit_batch(self) -> None:
        """Commit the draft to the copied books, so that lookups do not have to scan it."""
        born = self.draft.uids_issued
        self._books.absorb(self.draft.changes, self._time, self._rows.revision, {})
        self.draft = Draft(self._books, self._time)
        self.draft.uids_issued = born


def _trial_books(cached: CachedRows, objects: Sequence[AnyObject], time: DecisionTime) -> Books:
    """Return books with the rows that rulings on these objects read; replicas are not among them."""
    books, named = Books(), _named_keys(objects)
    rows: dict[str, list[CachedRow]] = {}
    for name, row in cached.rows.items():
        kind = name.partition("/")[0]
        is_needed = kind != "replica" and (kind not in _NUMEROUS_KINDS or name in named or _workload_key(name) in named)
        if is_needed:
            rows.setdefault(kind, []).append(row)
    for definition in DEFINITIONS:
        for row in rows.get(definition.prefix, ()):
            draft = Draft(books, time, takeover=True)
            draft.put(row.obj)
            books.absorb(draft.changes, time, row.revision, {})
    return books


def _named_keys(objects: Sequence[AnyObject]) -> set[str]:
    """Return the keys of these objects and of their owners."""
    keys = {key(obj) for obj in objects}
    for obj in objects:
        meta = obj.metadata
        owners = meta.owners if isinstance(meta, Metadata) else ()
        keys.update(key_of(owner.kind, owner.name, meta.tenant if owner.kind in TENANTED else "") for owner in owners)
    return keys


def _workload_key(name: str) -> str:
    """Return the workload key of a generation key; empty for other keys."""
    return f"workload/{name.removeprefix('generation/').rpartition('/')[0]}" if name.startswith("generation/") else ""


def _is_deleting(obj: AnyObject) -> bool:
    return isinstance(obj.metadata, Metadata) and obj.metadata.deleting


# -- placement ---------------------------------------------------------------------------------------------------------------


class _WorkloadPlan(NamedTuple):
    """A changed workload and what the controllers would do for it."""

    workload: Workload
    first_indexes: list[int]
    """Indexes of replicas that can be created at once."""
    later_indexes: list[int]
    """Indexes of replicas that are created as older ones are removed."""
    removed: list[CachedRow]
    outdated: list[CachedRow]
    needs_surge: bool
    """Whether no outdated replica may stop before a new one is ready."""


class _TrialPlacement:
    """Places the replicas of changed workloads on the private view of a snapshot."""

    def __init__(self, snapshot: ViewSnapshot, authority: _TrialAuthority, clock: Clock) -> None:
        self._rows, self._view, self._rules = snapshot.rows, snapshot.view, snapshot.rules
        self._draft, self._written = authority.draft, authority.written
        self._clock = clock
        self._replicas_left = TRIAL_REPLICAS_MAX
        self._revision = snapshot.rows.revision

    def placements(self, names: Sequence[str]) -> Iterator[tuple[str, PlannedPlacement]]:
        """Place the changed workloads, by descending priority, each on top of the previous ones."""
        self._apply_to_view({name: encode(obj) for name, obj in self._written.items()})
        workloads = [obj for name in names if isinstance(obj := self._written.get(name), Workload)]
        if not workloads:
            return
        desired = DesiredReplicas(self._controller_cache(workloads))
        plans = [_plan_workload(desired, workload) for workload in workloads if not workload.metadata.deleting]
        self._apply_to_view({row.key: None for workload_plan in plans for row in workload_plan.removed})
        until_ms = self._clock.now_ms() + PLACEMENT_MS_MAX
        for workload_plan in sorted(plans, key=lambda workload_plan: -self._priority(workload_plan.workload)):
            if self._clock.now_ms() >= until_ms:
                break
            yield key(workload_plan.workload), self._place_workload(workload_plan)

    def _controller_cache(self, workloads: Sequence[Workload]) -> WatchCache:
        """Return a watch cache with what the controllers would read for these workloads."""
        named = {f"{workload.metadata.tenant}/{workload.metadata.name}" for workload in workloads}
        rows = dict[str, Row]()
        for name, row in self._rows.rows.items():
            kind, _, path = name.partition("/")
            is_own = path.rpartition("-" if kind == "replica" else "/")[0] in named
            if kind in ("node", "policyrevision") or (kind in ("replica", "generation") and is_own):
                rows[name] = Row(name, row.value, row.revision)
        for name, obj in self._written.items():
            rows[name] = Row(name, encode(obj), self._revision)
        cache = WatchCache(self._clock)
        cache.begin_list(self._rows.head, self._revision)
        cache.add_page(list(rows.values()))
        cache.end_list()
        return cache

    def _priority(self, workload: Workload) -> int:
        meta = workload.metadata
        terms = self._draft.requirements.interner().admission.terms(meta.tenant, meta.name, meta.labels)
        priority_class = self._view.objects.classes.get(apply_policy_defaults(workload.spec, terms)[0].priority_class)
        return 0 if priority_class is None else priority_class.spec.value

    def _place_workload(self, workload_plan: _WorkloadPlan) -> PlannedPlacement:
        replicas_by_node, waits, stops, capped = Counter[str](), None, None, False
        ends = sum(row.obj.status.phase in RUNNING_PHASES for row in (*workload_plan.removed, *workload_plan.outdated))
        for indexes, freed in ((workload_plan.first_indexes, ()), (workload_plan.later_indexes, workload_plan.outdated)):
            if freed and workload_plan.needs_surge and workload_plan.first_indexes and not replicas_by_node:
                stops = _ROLLOUT_BLOCKED
                break
            self._apply_to_view({row.key: None for row in freed})
            indexes_tried = indexes[: max(0, self._replicas_left)]
            self._replicas_left -= len(indexes_tried)
            capped = capped or len(indexes_tried) < len(indexes)
            if indexes_tried and (priority := self._spawn(workload_plan.workload, indexes_tried)) is not None:
                nodes_found, reason = self._place(workload_plan.workload, priority, len(indexes_tried))
                replicas_by_node.update(nodes_found)
                waits = waits or reason
        nodes = dict(sorted(replicas_by_node.items(), key=lambda pair: (-pair[1], pair[0]))[:NODES_REPORTED_MAX])
        desired = len(workload_plan.first_indexes) + len(workload_plan.later_indexes)
        return PlannedPlacement(
            wanted=desired, placed=replicas_by_node.total(), nodes=nodes, waits=waits, stops=stops, ends=ends, capped=capped
        )

    def _spawn(self, workload: Workload, indexes: Sequence[int]) -> int | None:
        """Create the replicas as the authority would, and return their priority."""
        meta, draft, priority = workload.metadata, self._draft, None
        rows: dict[str, bytes | None] = {}
        for first, count in _index_ranges(indexes):
            claim = Spawn(meta.tenant, meta.name, meta.generation, first, count)
            if isinstance(spawn(draft, Operation(OperationID("plan"), Actor("plan", Role.WORKLOADS), claim), claim), Refused):
                continue
            for index in range(first, first + count):
                name = key_of("Replica", f"{meta.name}-{index}", meta.tenant)
                replica = draft.changes.replicas[name]
                if replica is not None:
                    rows[name], priority = encode(replica), replica.spec.priority
        self._apply_to_view(rows)
        return priority

    def _place(self, workload: Workload, priority: int, count: int) -> tuple[list[str], PendingExplanation | None]:
        view, meta = self._view, workload.metadata
        generation = view.shapes.find(meta.tenant, meta.name, meta.generation)
        if generation is None:
            return [], None
        work = pending_work(view, generation, priority, self._rules)
        slots = [slot for slot in _pending_slots(view, generation) if slot not in view.assumed][:count]
        able = 0 if work.key.paused or not view.shapes.is_open(generation) else len(slots)
        placed = work.trial.try_place(work.quota_source.covers(work.requirements.charge.pairs, able))
        rows = placed.rows if len(placed.rows) >= work.gang_minimum else []
        devices: Sequence[Mapping[str, int]] = placed.devices or [{}] * len(rows)
        view.holds.assume_many(zip(slots, rows, devices, strict=False), (work.quota_source.name,))
        waits = explain_pending(view, generation, priority, self._rules) if len(rows) < count else None
        return [work.trial.kernel.node_name(row) for row in rows], waits

    def _apply_to_view(self, rows: Mapping[str, bytes | None]) -> None:
        """Apply rows to the view as if they were committed."""
        if rows:
            self._revision += 1
            changes = tuple(RowChange(name, value, self._revision) for name, value in rows.items())
            self._view.apply(WatchEvent(self._revision - 1, self._revision, changes, 0, 0, None, None))


def _plan_workload(desired: DesiredReplicas, workload: Workload) -> _WorkloadPlan:
    members = desired.cache.replicas_of(workload.metadata.tenant, workload.metadata.name)
    diff = desired.diff(workload)
    respawned = [row.obj.spec.index for row in diff.requeue]
    first_indexes = [*respawned, *(index for start, count in diff.spawn for index in range(start, start + count))]
    removed_keys = {row.key for row in diff.remove}
    current_rows = [row for row in members if row.obj.status.phase is not Phase.RELEASED and row.key not in removed_keys]
    outdated = [row for row in current_rows if workload.spec.type != "job" and not desired.is_current(workload, row.obj)]
    target = desired.desired_count(workload) if workload.spec.type != "job" else 0
    missing = target - (len(current_rows) - len(outdated)) - len(first_indexes) if outdated else 0
    used_indexes = {row.obj.spec.index for row in members} | set(first_indexes)
    later_indexes = [index for index in range(len(used_indexes) + max(0, missing)) if index not in used_indexes][
        : max(0, missing)
    ]
    spare = len(available(workload, members)) - available_min(workload.spec, target)
    removed = [*diff.remove, *diff.requeue, *diff.forget]
    return _WorkloadPlan(workload, first_indexes, later_indexes, removed, outdated, spare <= 0)


def _index_ranges(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Group consecutive indexes into ranges of (start, count)."""
    start, count = -1, 0
    for index in sorted(indexes):
        if index == start + count and count < SPAWN_MAX:
            count += 1
            continue
        if count:
            yield start, count
        start, count = index, 1
    if count:
        yield start, count


def _pending_slots(view: SchedulerView, generation: int) -> list[int]:
    generations, phase = view.replicas.column("generation"), view.replicas.column("phase")
    slots: list[int] = np.flatnonzero((generations == generation) & (phase == PENDING)).tolist()
    return slots
