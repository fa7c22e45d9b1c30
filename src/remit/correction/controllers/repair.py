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

from remit.correction.controllers.desired_replicas import Census
from remit.correction.framework.actions import Again, Concern, Deed, Later, Remit, Wish
from remit.correction.framework.loop import Controller, Times
from remit.law.ledgers import SCOPE_PREFIX
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.law.overrides import Instant, active_overrides
from remit.model.claims import Accepted, Close, Move, Role, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Grant, GrantPhase, Phase, Replica
from remit.model.resources import Duration
from remit.observation.watch_cache import Kept
from remit.world.interfaces import Clock

P = Phase
AGAIN_BASE_MS: Final = 1_000
AGAIN_MAX_MS: Final = 60_000
LATE_MS: Final = 1_000
"""Added to every time limit, because the authority starts counting slightly later."""

_WAITED: Final = {
    phase: (wait.limit_ms, wait.transition)
    for phase, wait in PHASE_TIMEOUTS.items()
    if wait.role is Role.REPAIR and wait.transition in ("reclaim", "abort")
}
_WHY: Final = {
    P.RESERVED: f"not bound within {Duration(_WAITED[P.RESERVED][0])}",
    P.BOUND: f"not started within {Duration(_WAITED[P.BOUND][0])}",
    P.STARTING: f"not running within {Duration(_WAITED[P.STARTING][0])}",
}
_MINE: Final = (P.FAILED, *_WAITED)


class Repair(Controller):
    """Keys: replicas that wait or have failed, workloads with replicas to retry, and grants."""

    remit = Remit(Role.REPAIR, claims=(Close,), transitions=("release", "requeue", "reclaim", "abort"))

    def __init__(self, census: Census, clock: Clock) -> None:
        super().__init__(census.board)
        self._clock = clock
        self._census = census
        self._since: dict[str, tuple[Phase, int, int]] = {}
        """By replica: its phase, its attempt, and when they were first seen."""
        self._drawn: dict[str, None] = {}
        """Closed grants that are still in use, and of which nothing was released since the last close request."""
        self._not_before: dict[str, int] = {}
        """Grants that had not expired at the last close request: when to try again."""

    # -- watch events --------------------------------------------------------------------------------------------------------

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[Concern]:
        match new if new is not None else old:
            case Replica() as replica:
                self._note(key, None if new is None else replica)
                mine = (_looked_at(key, replica.status.phase),) if new is not None and replica.status.phase in _MINE else ()
                if not _left(old, new):
                    return mine
                # A released replica may be desired again, may allow another to be created, and may be the last one that used a
                # grant.
                workload = f"workload/{replica.metadata.tenant}/{replica.spec.workload}"
                return (*mine, workload, *self._freed(old))
            case Workload() as workload:
                # Without replicas there is nothing to retry.
                there = (workload.metadata.tenant, workload.metadata.name) in self.board.by_workload
                return (key,) if new is not None and there else ()
            case Grant():
                self._drawn.pop(key, None)
                self._not_before.pop(key, None)
                return (key,) if new is not None else ()
        return ()

    def _note(self, key: str, replica: Replica | None) -> None:
        if replica is None or replica.status.phase not in (*_MINE, P.RELEASED):
            self._since.pop(key, None)
            return
        stands = replica.status.phase, replica.status.attempt
        if self._since.get(key, ())[:2] != stands:
            self._since[key] = *stands, self._clock.now_ms()

    def _freed(self, old: Replica | None) -> list[str]:
        found = [] if old is None else [f"grant/{name.partition('/')[0]}" for name in old.status.grants]
        keys = [key for key in found if key in self._drawn]
        for key in keys:
            self._drawn.pop(key, None)
        return keys

    def everything(self) -> Iterable[str]:
        for phase in _MINE:
            yield from tuple(self.board.by_phase[phase])
        for kind in ("workload/", "grant/"):
            yield from tuple(key for key, _ in self.board.kind(kind))

    def began(self, times: Times) -> None:
        self._drawn.clear()

    def heard(self, key: str, deed: Deed, verdict: Verdict | None) -> None:
        if not isinstance(deed.claim, Close):
            return
        grant: Grant | None = self.board.get(key)
        if isinstance(verdict, Accepted):
            self._drawn[key] = None
        elif verdict is not None and grant is not None:
            self._not_before[key] = self._clock.now_ms() + int(grant.spec.ttl) // 4

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, times: Times) -> Iterator[Wish]:
        kept = self.board.rows.get(key)
        match None if kept is None else kept.thing:
            case Grant() as grant:
                yield from self._close(key, grant, times)
            case Workload() as workload if not workload.metadata.deleting:
                for one in self._census.wanted(workload).again:
                    yield from self._again(one, times)
            case Replica() as replica if kept is not None and replica.status.phase in _MINE:
                if not self._is_held(replica, times.authority):
                    yield from self._mend(kept, times)

    def _is_held(self, replica: Replica, now: Instant | None) -> bool:
        """Return whether an override (hold-repair) excludes the replica from repair."""
        overrides = [kept.thing for _, kept in self.board.kind("override/")]
        if not overrides:
            return False
        node: Node | None = self.board.get(f"node/{replica.status.node}")
        place = ("", "", "") if node is None else (node.spec.region, node.spec.zone, node.spec.pool)
        tenant, workload = replica.metadata.tenant, replica.spec.workload
        return bool(active_overrides(overrides, now).repair_held_by(tenant, workload, *place, replica.status.node))

    def _mend(self, kept: Kept, times: Times) -> Iterator[Wish]:
        phase: Phase = kept.thing.status.phase
        if phase is P.FAILED:
            yield Deed(Move(kept.key, kept.revision, "release"))
            return
        limit_ms, transition = _WAITED[phase]
        left_ms = self._lasts_since(kept, times) + limit_ms + LATE_MS - times.now_ms
        if left_ms > 0:
            yield Again(left_ms)
        else:
            yield Deed(Move(kept.key, kept.revision, transition, reason=_WHY[phase]))

    def _lasts_since(self, kept: Kept, times: Times) -> int:
        status = kept.thing.status
        return self._since.setdefault(kept.key, (status.phase, status.attempt, times.now_ms))[2]

    def _again(self, kept: Kept, times: Times) -> Iterator[Wish]:
        replica: Replica = kept.thing
        if self._is_held(replica, times.authority):
            yield Again(times.tempo.lease_ms)
            return
        left_ms = self._lasts_since(kept, times) + pause_ms(replica.status.failures) - times.now_ms
        if left_ms > 0:
            yield Again(left_ms)
        else:
            once = f"requeue {replica.metadata.uid} {replica.status.attempt}"
            yield Deed(Move(kept.key, kept.revision, "requeue"), once)

    def _close(self, key: str, grant: Grant, times: Times) -> Iterator[Wish]:
        status, spec = grant.status, grant.spec
        if spec.holder.startswith(SCOPE_PREFIX) or spec.issuer or key in self._drawn:
            return
        wait_ms = self._not_before.get(key, 0) - times.now_ms
        if status.phase is GrantPhase.LIVE:
            if status.deadline is None:
                return  # it never expires
            boot, now_ms = times.authority or ("", 0)
            if status.deadline.boot == boot:
                wait_ms = max(wait_ms, status.deadline.at_ms - now_ms)
        if wait_ms > 0:
            yield Again(wait_ms + LATE_MS)
        else:
            yield Deed(Close(grant.metadata.name))


def pause_ms(failures: int) -> int:
    """Return the backoff before the next attempt of a replica that has crashed this often."""
    return 0 if failures <= 0 else min(AGAIN_MAX_MS, AGAIN_BASE_MS << min(failures - 1, 16))


def _looked_at(key: str, phase: Phase) -> Concern:
    """Return the trigger for a replica: a time limit that just started is checked when it ends."""
    return Later(key, _WAITED[phase][0] + LATE_MS) if phase in _WAITED else key


def _left(old: Any, new: Any) -> bool:
    """Return whether the replica started or stopped counting towards its workload."""
    was, now = (one is not None and one.status.phase is not P.RELEASED for one in (old, new))
    return was != now
