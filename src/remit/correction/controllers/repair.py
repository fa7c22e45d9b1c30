"""Repair: stuck phases, expired reservations and grants, new attempts of failed replicas.

Ends waits that are over, and brings back what was released and is wanted.

Which released replicas are wanted is in wanted.py. One that crashed comes back after a pause that doubles with its failures;
one that was moved, lost or pushed aside comes back at once. Waits are counted here from when a phase was first seen, and by the
authority on its own clock: a new authority counts anew, so what it refuses is asked again later.

A grant that has run out, and is held in this scope, is closed. What another scope holds is only its own to give back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from remit.correction.controllers.desired_replicas import Census
from remit.correction.framework.actions import Again, Concern, Deed, Later, Remit, Wish
from remit.correction.framework.loop import Controller, Times
from remit.law.ledgers import SCOPE
from remit.law.lifecycle import WAITS
from remit.law.overrides import Instant, in_force
from remit.model.claims import Accepted, Close, Move, Role, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Grant, GrantPhase, Phase, Replica
from remit.observation.watch_cache import Kept
from remit.world.interfaces import Clock

P = Phase
AGAIN_BASE_MS: Final = 1_000
AGAIN_MAX_MS: Final = 60_000
LATE_MS: Final = 1_000
"""A little longer than a wait may last: the authority counts from a little later."""

_WAITED: Final = {
    phase: (wait.limit_ms, wait.transition)
    for phase, wait in WAITS.items()
    if wait.role is Role.REPAIR and wait.transition in ("reclaim", "abort")
}
_WHY: Final = {
    P.RESERVED: "it was not bound in time",
    P.BOUND: "it was not started in time",
    P.STARTING: "it did not run in time",
}
_MINE: Final = (P.FAILED, *_WAITED)


class Repair(Controller):
    """Its keys are those of replicas that wait or have failed, of workloads with replicas to bring back, and of grants."""

    remit = Remit(Role.REPAIR, claims=(Close,), transitions=("release", "requeue", "reclaim", "abort"))

    def __init__(self, census: Census, clock: Clock) -> None:
        super().__init__(census.board)
        self._clock = clock
        self._census = census
        self._since: dict[str, tuple[Phase, int, int]] = {}
        """By replica: in which phase and attempt it waits, and since when."""
        self._drawn: dict[str, None] = {}
        """Closed grants of which nothing has been given back since it was last asked whether they may go."""
        self._not_before: dict[str, int] = {}
        """Grants that had not run out when they were last asked to be closed."""

    # -- hearing ---------------------------------------------------------------------------------------------------------

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[Concern]:
        match new if new is not None else old:
            case Replica() as replica:
                self._note(key, None if new is None else replica)
                mine = (_looked_at(key, replica.status.phase),) if new is not None and replica.status.phase in _MINE else ()
                if not _left(old, new):
                    return mine
                # One that goes may be wanted again, or make room for another; and be the last that held up a grant.
                workload = f"workload/{replica.metadata.tenant}/{replica.spec.workload}"
                return (*mine, workload, *self._freed(old))
            case Workload() as workload:
                # Without replicas there is nothing to bring back.
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

    # -- looking ---------------------------------------------------------------------------------------------------------

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
        """Has a person said that it is to be left as it is?"""
        overrides = [kept.thing for _, kept in self.board.kind("override/")]
        if not overrides:
            return False
        node: Node | None = self.board.get(f"node/{replica.status.node}")
        place = ("", "", "") if node is None else (node.spec.region, node.spec.zone, node.spec.pool)
        tenant, workload = replica.metadata.tenant, replica.spec.workload
        return bool(in_force(overrides, now).repair_held(tenant, workload, *place, replica.status.node))

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
        if spec.holder.startswith(SCOPE) or spec.issuer or key in self._drawn:
            return
        wait_ms = self._not_before.get(key, 0) - times.now_ms
        if status.phase is GrantPhase.LIVE:
            if status.deadline is None:
                return  # it does not run out
            boot, now_ms = times.authority or ("", 0)
            if status.deadline.boot == boot:
                wait_ms = max(wait_ms, status.deadline.at_ms - now_ms)
        if wait_ms > 0:
            yield Again(wait_ms + LATE_MS)
        else:
            yield Deed(Close(grant.metadata.name))


def pause_ms(failures: int) -> int:
    """How long a replica that has crashed so often rests before its next attempt."""
    return 0 if failures <= 0 else min(AGAIN_MAX_MS, AGAIN_BASE_MS << min(failures - 1, 16))


def _looked_at(key: str, phase: Phase) -> Concern:
    """A wait that has only begun is looked at when it is over."""
    return Later(key, _WAITED[phase][0] + LATE_MS) if phase in _WAITED else key


def _left(old: Any, new: Any) -> bool:
    """Has a replica ceased to count, or begun to?"""
    was, now = (one is not None and one.status.phase is not P.RELEASED for one in (old, new))
    return was != now
