"""Workload controller: creates, ends and forgets replicas; deletes finished jobs after their TTL.

desired_replicas.py computes how many replicas are desired. This controller creates and ends replicas, settles finished ones,
forgets released ones, maintains the workload's conditions (workload_status.py), and deletes finished jobs when their `keep`
time has passed. Running replicas of an older generation belong to the rollout controller, failed ones to the repair
controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.controllers.desired_replicas import (
    PROGRESSING_PHASES,
    RUNNING_PHASES,
    UNPLACED_PHASES,
    DesiredReplicas,
    ReplicaDiff,
)
from remit.correction.controllers.workload_status import WorkloadConditions, condition_debounce_ms
from remit.correction.framework.actions import Action, ControllerPermissions, KeyTrigger, ReconcileResult, RequeueCoalesced
from remit.correction.framework.loop import Controller, ReconcileTime
from remit.law.timing import Timing
from remit.law.workload_rules import initial_replicas
from remit.model.claims import Delete, Forget, Move, Refused, Spawn, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica
from remit.model.roles import Role
from remit.observation.watch_cache import CachedRow
from remit.world.interfaces import Clock

_SPAWN_CLAIM_MAX = 10_000


class WorkloadController(Controller):
    """The workload controller. Keys: workloads."""

    permissions = ControllerPermissions(
        Role.WORKLOADS,
        claims=(Spawn, Forget, Delete),
        transitions=("create", "cancel", "remove", "settle", "forget"),
        declares=("Workload",),
    )

    def __init__(self, desired: DesiredReplicas, clock: Clock, timing: Timing = Timing()) -> None:
        super().__init__(desired.cache)
        self.desired, self.conditions = desired, WorkloadConditions(desired, clock)
        self._debounce_ms = condition_debounce_ms(timing)
        self._daemons: dict[str, None] = {}

    # -- watch events --------------------------------------------------------------------------------------------------------

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[KeyTrigger]:
        match new if new is not None else old:
            case Replica() as replica:
                workload_key = f"workload/{replica.metadata.tenant}/{replica.spec.workload}"
                return (
                    RequeueCoalesced(workload_key, self._debounce_ms)
                    if self._only_progresses(workload_key, old, new)
                    else workload_key,
                )
            case Workload() as workload:
                self._track(key, old, workload if new is not None else None)
                if old is None and self._has_initial_replicas(workload):
                    self.conditions.start_debounce(workload)
                    deadline_ms = int(workload.spec.deadline)
                    return (RequeueCoalesced(key, min(self._debounce_ms, deadline_ms or self._debounce_ms)),)
                return (key,)
            case Node():
                return tuple(self._daemons) if old is None or new is None or _affects_daemons(old, new) else ()
        return tuple(self._daemons) if key.startswith("policyrevision/") else ()

    def _only_progresses(self, workload_key: str, old: Replica | None, new: Replica | None) -> bool:
        """Return whether a job's replica only progresses, so that none is missing or surplus. That affects only the job's
        conditions, which are debounced anyway. A new replica whose workload is not yet known counts as progress: both were
        created in one commit, and the workload follows.
        """
        if (
            new is None
            or new.status.phase not in PROGRESSING_PHASES
            or (old is not None and old.status.phase not in PROGRESSING_PHASES)
        ):
            return False
        workload: Workload | None = self.cache.get(workload_key)
        if workload is None:
            return old is None
        return old is not None and workload.spec.type == "job" and not workload.metadata.deleting

    def _has_initial_replicas(self, workload: Workload) -> bool:
        """Return whether a new job already has all its initial replicas. Most such jobs are over soon."""
        meta, spec = workload.metadata, workload.spec
        if spec.type != "job" or meta.deleting:
            return False
        return 0 < initial_replicas(spec) == len(self.cache.by_workload.get((meta.tenant, meta.name), ()))

    def _track(self, key: str, old: Workload | None, new: Workload | None) -> None:
        if new is None or new.spec.type != "daemon":
            self._daemons.pop(key, None)
        else:
            self._daemons[key] = None
        self.conditions.on_workload_change(old, new)

    def all_keys(self) -> Iterable[str]:
        keys = [key for key, _ in self.cache.of_kind("workload/")]
        return dict.fromkeys((*keys, *(f"workload/{tenant}/{name}" for tenant, name in self.cache.by_workload)))

    def on_verdict(self, key: str, action: Action, verdict: Verdict | None) -> None:
        workload: Workload | None = self.cache.get(key)
        if isinstance(action.claim, Spawn) and workload is not None and verdict is not None:
            self.conditions.on_spawn_verdict(workload, verdict if isinstance(verdict, Refused) else None)

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        _, tenant, name = key.split("/")
        workload: Workload | None = self.cache.get(key)
        if workload is None or workload.metadata.deleting:
            yield from self._end_workload(tenant, name, workload)
            return
        diff = self.desired.diff(workload)
        yield from self._apply_diff(workload, diff)
        yield from self.conditions.reconcile(workload, diff, time)

    def _end_workload(self, tenant: str, name: str, workload: Workload | None) -> Iterator[ReconcileResult]:
        """End all replicas of a deleted workload. The workload itself is deleted when no replica and no finalizer remains."""
        rows = self.cache.replicas_of(tenant, name)
        for row in rows:
            yield from self._end_replica(row, workload)
            if row.obj.status.phase is Phase.FINISHED:
                yield Action(Move(row.key, row.revision, "settle"))
            elif row.obj.status.phase is Phase.RELEASED:
                yield Action(Forget(row.key, row.revision))
        if workload is not None and not rows and not workload.metadata.finalizers:
            yield Action(Delete("Workload", name, tenant), f"delete {workload.metadata.uid}")

    def _end_replica(self, row: CachedRow, workload: Workload | None) -> Iterator[Action]:
        """End a replica in its current phase. The identifier omits the attempt: if the replica is queued again, that undoes
        this action.
        """
        replica: Replica = row.obj
        generation = 0 if workload is None else workload.metadata.generation
        suffix = f"of replica {replica.metadata.uid} at workload generation {generation}"
        if replica.status.phase in UNPLACED_PHASES:
            # Replicas of a daemon come and go with its nodes, so repetitions are legitimate.
            undo_key = "" if workload is not None and workload.spec.type == "daemon" else f"cancel {suffix}"
            yield Action(Move(row.key, row.revision, "cancel", reason="no longer desired"), undo_key)
        elif replica.status.phase in RUNNING_PHASES:
            yield Action(Move(row.key, row.revision, "remove", reason="no longer desired"))

    def _apply_diff(self, workload: Workload, diff: ReplicaDiff) -> Iterator[ReconcileResult]:
        meta = workload.metadata
        for row in diff.settle:
            yield Action(Move(row.key, row.revision, "settle"))
        for row in diff.remove:
            yield from self._end_replica(row, workload)
        for row in diff.forget:
            yield Action(Forget(row.key, row.revision))
        for first, count in diff.spawn:
            for start in range(first, first + count, _SPAWN_CLAIM_MAX):
                chunk = min(_SPAWN_CLAIM_MAX, first + count - start)
                undo_key = "" if workload.spec.type == "daemon" else f"spawn {meta.uid} {meta.generation} {start}+{chunk}"
                yield Action(Spawn(meta.tenant, meta.name, meta.generation, start, chunk), undo_key)


def _affects_daemons(old: Node, new: Node) -> bool:
    """Return whether the change can affect which daemons the node runs."""
    return (old.spec, old.metadata.labels, old.status.health) != (new.spec, new.metadata.labels, new.status.health)
