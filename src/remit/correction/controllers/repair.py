"""Repair: stuck phases, expired reservations and grants, new attempts of failed replicas.

desired_replicas.py decides which released replicas are desired again. A replica that crashed is retried after a backoff that
doubles with its failures; one that was moved, lost or preempted is retried at once. How long a phase lasts is counted from
when this process first saw it, and by the authority on its own clock. A new authority starts counting again, so a refused
request is repeated later.

An expired grant that is held in this scope is closed. A grant held by another scope is returned only by that scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.correction.framework.actions import (
    Action,
    ControllerPermissions,
    KeyTrigger,
    ReconcileResult,
    RequeueAfter,
    RequeueCoalesced,
)
from remit.correction.framework.loop import Controller, ReconcileTime
from remit.law.ledgers import SCOPE_PREFIX
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.law.overrides import Instant, active_overrides
from remit.model.claims import Accepted, Close, Move, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Grant, GrantPhase, Phase, Replica
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.observation.watch_cache import CachedRow
from remit.world.interfaces import Clock

P = Phase
RETRY_BASE_MS: Final = 1_000
RETRY_MS_MAX: Final = 60_000
LIMIT_MARGIN_MS: Final = 1_000
"""Added to every time limit, because the authority starts counting slightly later."""

_PHASE_LIMITS: Final = {
    phase: (wait.limit_ms, wait.transition)
    for phase, wait in PHASE_TIMEOUTS.items()
    if wait.role is Role.REPAIR and wait.transition in ("reclaim", "abort")
}
_LIMIT_MESSAGES: Final = {
    P.RESERVED: f"not bound within {Duration(_PHASE_LIMITS[P.RESERVED][0])}",
    P.BOUND: f"not started within {Duration(_PHASE_LIMITS[P.BOUND][0])}",
    P.STARTING: f"not running within {Duration(_PHASE_LIMITS[P.STARTING][0])}",
}
_REPAIRED_PHASES: Final = (P.FAILED, *_PHASE_LIMITS)


class RepairController(Controller):
    """The repair controller. Keys: replicas that wait or have failed, workloads with replicas to retry, and grants."""

    permissions = ControllerPermissions(Role.REPAIR, claims=(Close,), transitions=("release", "requeue", "reclaim", "abort"))

    def __init__(self, desired: DesiredReplicas, clock: Clock) -> None:
        super().__init__(desired.cache)
        self._clock = clock
        self._desired = desired
        self._phases: dict[str, tuple[Phase, int, int]] = {}
        """By replica: its phase, its attempt, and when they were first seen."""
        self._closed_in_use: dict[str, None] = {}
        """Closed grants that are still in use, and of which nothing was released since the last close request."""
        self._not_before: dict[str, int] = {}
        """Grants that had not expired at the last close request: when to try again."""

    # -- watch events --------------------------------------------------------------------------------------------------------

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[KeyTrigger]:
        match new if new is not None else old:
            case Replica() as replica:
                self._track_phase(key, None if new is None else replica)
                own_trigger = (
                    (_trigger_for(key, replica.status.phase),)
                    if new is not None and replica.status.phase in _REPAIRED_PHASES
                    else ()
                )
                if not _liveness_changed(old, new):
                    return own_trigger
                # A released replica may be desired again, may allow another to be created, and may be the last one that used a
                # grant.
                workload = f"workload/{replica.metadata.tenant}/{replica.spec.workload}"
                return (*own_trigger, workload, *self._released_grants(old))
            case Workload() as workload:
                # Without replicas there is nothing to retry.
                has_replicas = (workload.metadata.tenant, workload.metadata.name) in self.cache.by_workload
                return (key,) if new is not None and has_replicas else ()
            case Grant():
                self._closed_in_use.pop(key, None)
                self._not_before.pop(key, None)
                return (key,) if new is not None else ()
        return ()

    def _track_phase(self, key: str, replica: Replica | None) -> None:
        if replica is None or replica.status.phase not in (*_REPAIRED_PHASES, P.RELEASED):
            self._phases.pop(key, None)
            return
        phase_and_attempt = replica.status.phase, replica.status.attempt
        if self._phases.get(key, ())[:2] != phase_and_attempt:
            self._phases[key] = *phase_and_attempt, self._clock.now_ms()

    def _released_grants(self, old: Replica | None) -> list[str]:
        grants = [] if old is None else [f"grant/{name.partition('/')[0]}" for name in old.status.grants]
        keys = [key for key in grants if key in self._closed_in_use]
        for key in keys:
            self._closed_in_use.pop(key, None)
        return keys

    def all_keys(self) -> Iterable[str]:
        for phase in _REPAIRED_PHASES:
            yield from tuple(self.cache.by_phase[phase])
        for kind in ("workload/", "grant/"):
            yield from tuple(key for key, _ in self.cache.of_kind(kind))

    def on_lease_acquired(self, time: ReconcileTime) -> None:
        self._closed_in_use.clear()

    def on_verdict(self, key: str, action: Action, verdict: Verdict | None) -> None:
        if not isinstance(action.claim, Close):
            return
        grant: Grant | None = self.cache.get(key)
        if isinstance(verdict, Accepted):
            self._closed_in_use[key] = None
        elif verdict is not None and grant is not None:
            self._not_before[key] = self._clock.now_ms() + int(grant.spec.ttl) // 4

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        row = self.cache.rows.get(key)
        match None if row is None else row.obj:
            case Grant() as grant:
                yield from self._close_grant(key, grant, time)
            case Workload() as workload if not workload.metadata.deleting:
                for released in self._desired.diff(workload).requeue:
                    yield from self._requeue(released, time)
            case Replica() as replica if row is not None and replica.status.phase in _REPAIRED_PHASES:
                if not self._is_repair_held(replica, time.authority):
                    yield from self._repair_replica(row, time)

    def _is_repair_held(self, replica: Replica, now: Instant | None) -> bool:
        """Return whether an override (hold-repair) excludes the replica from repair."""
        overrides = [row.obj for _, row in self.cache.of_kind("override/")]
        if not overrides:
            return False
        node: Node | None = self.cache.get(f"node/{replica.status.node}")
        location = ("", "", "") if node is None else (node.spec.region, node.spec.zone, node.spec.pool)
        tenant, workload = replica.metadata.tenant, replica.spec.workload
        return bool(active_overrides(overrides, now).repair_held_by(tenant, workload, *location, replica.status.node))

    def _repair_replica(self, row: CachedRow, time: ReconcileTime) -> Iterator[ReconcileResult]:
        phase: Phase = row.obj.status.phase
        if phase is P.FAILED:
            yield Action(Move(row.key, row.revision, "release"))
            return
        limit_ms, transition = _PHASE_LIMITS[phase]
        remaining_ms = self._seen_since(row, time) + limit_ms + LIMIT_MARGIN_MS - time.now_ms
        if remaining_ms > 0:
            yield RequeueAfter(remaining_ms)
        else:
            yield Action(Move(row.key, row.revision, transition, reason=_LIMIT_MESSAGES[phase]))

    def _seen_since(self, row: CachedRow, time: ReconcileTime) -> int:
        status = row.obj.status
        return self._phases.setdefault(row.key, (status.phase, status.attempt, time.now_ms))[2]

    def _requeue(self, row: CachedRow, time: ReconcileTime) -> Iterator[ReconcileResult]:
        replica: Replica = row.obj
        if self._is_repair_held(replica, time.authority):
            yield RequeueAfter(time.timing.lease_ms)
            return
        remaining_ms = self._seen_since(row, time) + retry_backoff_ms(replica.status.failures) - time.now_ms
        if remaining_ms > 0:
            yield RequeueAfter(remaining_ms)
        else:
            undo_key = f"requeue {replica.metadata.uid} {replica.status.attempt}"
            yield Action(Move(row.key, row.revision, "requeue"), undo_key)

    def _close_grant(self, key: str, grant: Grant, time: ReconcileTime) -> Iterator[ReconcileResult]:
        status, spec = grant.status, grant.spec
        if spec.holder.startswith(SCOPE_PREFIX) or spec.issuer or key in self._closed_in_use:
            return
        wait_ms = self._not_before.get(key, 0) - time.now_ms
        if status.phase is GrantPhase.LIVE:
            if status.deadline is None:
                return  # it never expires
            boot, now_ms = time.authority or ("", 0)
            if status.deadline.boot == boot:
                wait_ms = max(wait_ms, status.deadline.at_ms - now_ms)
        if wait_ms > 0:
            yield RequeueAfter(wait_ms + LIMIT_MARGIN_MS)
        else:
            yield Action(Close(grant.metadata.name))


def retry_backoff_ms(failures: int) -> int:
    """Return the backoff before the next attempt of a replica that has crashed this often."""
    return 0 if failures <= 0 else min(RETRY_MS_MAX, RETRY_BASE_MS << min(failures - 1, 16))


def _trigger_for(key: str, phase: Phase) -> KeyTrigger:
    """Return the trigger for a replica: a time limit that just started is checked when it ends."""
    return RequeueCoalesced(key, _PHASE_LIMITS[phase][0] + LIMIT_MARGIN_MS) if phase in _PHASE_LIMITS else key


def _liveness_changed(old: Any, new: Any) -> bool:
    """Return whether the replica started or stopped counting towards its workload."""
    was_live, is_live = (replica is not None and replica.status.phase is not P.RELEASED for replica in (old, new))
    return was_live != is_live
