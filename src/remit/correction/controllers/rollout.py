"""Rollout: retires replicas of older generations within maxUnavailable.

Old replicas that are not available are retired at once. Of the available ones, as many are retired as the workload can
spare: at least `minAvailable`, and at least the desired number minus `maxUnavailable`, stay available. The workload
controller creates the new replicas, within `maxSurge`. If these never become ready, the old ones stay, and the `Progressing`
condition reports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.controllers.desired_replicas import RUNS, Census, available, floor
from remit.correction.controllers.disruption import Leaving
from remit.correction.framework.actions import Deed, Remit, Wish
from remit.correction.framework.loop import Controller, Times
from remit.model.claims import Move, Role, Verdict
from remit.model.kinds import Workload
from remit.model.records import Replica


class Rollouts(Controller):
    """Keys: workloads."""

    remit = Remit(Role.ROLLOUT, transitions=("retire",))

    def __init__(self, census: Census, leaving: Leaving) -> None:
        super().__init__(census.board)
        self._census, self._leaving = census, leaving
        self._rolling: dict[str, None] = {}
        """Workloads that had old replicas at the last reconcile. Replica changes of other workloads need no reconcile."""

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[str]:
        match new if new is not None else old:
            case Replica() as replica:
                whose = f"workload/{replica.metadata.tenant}/{replica.spec.workload}"
                return (whose,) if whose in self._rolling else ()
            case Workload() as workload:
                if new is None:
                    self._rolling.pop(key, None)
                return () if workload.spec.type == "job" else (key,)
        return ()

    def everything(self) -> Iterable[str]:
        return [key for key, _ in self.board.kind("workload/")]

    def reconcile(self, key: str, times: Times) -> Iterator[Wish]:
        workload: Workload | None = self.board.get(key)
        self._rolling.pop(key, None)
        if workload is None or workload.spec.type == "job" or workload.metadata.deleting:
            return
        members = self.board.of(workload.metadata.tenant, workload.metadata.name)
        runs = [one for one in members if one.thing.status.phase in RUNS]
        old = [one for one in runs if not self._census.is_current(workload, one.thing)]
        if not old:
            return
        self._rolling[key] = None
        old = [one for one in old if self._leaving.stays(one)]
        up = {one.key for one in available(workload, members) if self._leaving.stays(one)}
        spare = len(up) - floor(workload.spec, self._census.many(workload))
        for one in sorted(old, key=lambda one: (one.key in up, -one.thing.spec.index)):
            if one.key in up:
                if spare <= 0:
                    break
                spare -= 1
            self._leaving.ask(one)
            yield Deed(Move(one.key, one.revision, "retire", reason="replaced by a newer generation"))

    def heard(self, key: str, deed: Deed, verdict: Verdict | None) -> None:
        if isinstance(deed.claim, Move):
            self._leaving.heard(deed.claim.replica, verdict)
