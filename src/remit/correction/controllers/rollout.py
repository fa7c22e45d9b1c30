"""Rollout: retires replicas of older generations within maxUnavailable.

Old replicas that are not available are retired at once. Of the available ones, as many are retired as the workload can
spare: at least `minAvailable`, and at least the desired number minus `maxUnavailable`, stay available. The workload
controller creates the new replicas, within `maxSurge`. If these never become ready, the old ones stay, and the `Progressing`
condition reports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.controllers.desired_replicas import RUNNING_PHASES, DesiredReplicas, available, available_min
from remit.correction.controllers.disruption import PendingEvictions
from remit.correction.framework.actions import Action, ControllerPermissions, ReconcileResult
from remit.correction.framework.loop import Controller, ReconcileTime
from remit.model.claims import Move, Verdict
from remit.model.kinds import Workload
from remit.model.records import Replica
from remit.model.roles import Role


class RolloutController(Controller):
    """The rollout controller. Keys: workloads."""

    permissions = ControllerPermissions(Role.ROLLOUT, transitions=("retire",))

    def __init__(self, desired: DesiredReplicas, evictions: PendingEvictions) -> None:
        super().__init__(desired.cache)
        self._desired, self._evictions = desired, evictions
        self._rolling: dict[str, None] = {}
        """Workloads that had old replicas at the last reconcile. Replica changes of other workloads need no reconcile."""

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[str]:
        match new if new is not None else old:
            case Replica() as replica:
                workload_key = f"workload/{replica.metadata.tenant}/{replica.spec.workload}"
                return (workload_key,) if workload_key in self._rolling else ()
            case Workload() as workload:
                if new is None:
                    self._rolling.pop(key, None)
                return () if workload.spec.type == "job" else (key,)
        return ()

    def all_keys(self) -> Iterable[str]:
        return [key for key, _ in self.cache.of_kind("workload/")]

    def reconcile(self, key: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        workload: Workload | None = self.cache.get(key)
        self._rolling.pop(key, None)
        if workload is None or workload.spec.type == "job" or workload.metadata.deleting:
            return
        members = self.cache.replicas_of(workload.metadata.tenant, workload.metadata.name)
        running = [row for row in members if row.obj.status.phase in RUNNING_PHASES]
        old = [row for row in running if not self._desired.is_current(workload, row.obj)]
        if not old:
            return
        self._rolling[key] = None
        old = [row for row in old if self._evictions.is_staying(row)]
        available_keys = {row.key for row in available(workload, members) if self._evictions.is_staying(row)}
        spare = len(available_keys) - available_min(workload.spec, self._desired.desired_count(workload))
        for row in sorted(old, key=lambda row: (row.key in available_keys, -row.obj.spec.index)):
            if row.key in available_keys:
                if spare <= 0:
                    break
                spare -= 1
            self._evictions.add(row)
            yield Action(Move(row.key, row.revision, "retire", reason="replaced by a newer generation"))

    def on_verdict(self, key: str, action: Action, verdict: Verdict | None) -> None:
        if isinstance(action.claim, Move):
            self._evictions.on_verdict(action.claim.replica, verdict)
