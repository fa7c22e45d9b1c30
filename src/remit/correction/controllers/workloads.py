"""Workload controller: creates, ends and forgets replicas; deletes finished jobs after their TTL.

desired_replicas.py computes how many replicas are desired. This controller creates and ends replicas, settles finished ones,
forgets released ones, maintains the workload's conditions (workload_status.py), and deletes finished jobs when their `keep`
time has passed. Running replicas of an older generation belong to the rollout controller, failed ones to the repair
controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.controllers.desired_replicas import ON_ITS_WAY, RUNS, UNPLACED, Census, Wanted
from remit.correction.controllers.workload_status import Faring, patience_ms
from remit.correction.framework.actions import Concern, Deed, Later, Remit, Wish
from remit.correction.framework.loop import Controller, Times
from remit.law.timing import Timing
from remit.law.workload_rules import initial_replicas
from remit.model.claims import Delete, Forget, Move, Refused, Role, Spawn, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import Kept
from remit.world.interfaces import Clock

_SPAWN_MAX = 10_000


class Workloads(Controller):
    """Keys: workloads."""

    remit = Remit(
        Role.WORKLOADS,
        claims=(Spawn, Forget, Delete),
        transitions=("create", "cancel", "remove", "settle", "forget"),
        declares=("Workload",),
    )

    def __init__(self, census: Census, clock: Clock, tempo: Timing = Timing()) -> None:
        super().__init__(census.board)
        self.census, self.faring = census, Faring(census, clock)
        self._patience_ms = patience_ms(tempo)
        self._daemons: dict[str, None] = {}

    # -- watch events --------------------------------------------------------------------------------------------------------

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[Concern]:
        match new if new is not None else old:
            case Replica() as replica:
                whose = f"workload/{replica.metadata.tenant}/{replica.spec.workload}"
                return (Later(whose, self._patience_ms) if self._goes_its_way(whose, old, new) else whose,)
            case Workload() as workload:
                self._note(key, old, workload if new is not None else None)
                if old is None and self._is_full(workload):
                    self.faring.awaits(workload)
                    deadline_ms = int(workload.spec.deadline)
                    return (Later(key, min(self._patience_ms, deadline_ms or self._patience_ms)),)
                return (key,)
            case Node():
                return tuple(self._daemons) if old is None or new is None or _differs(old, new) else ()
        return tuple(self._daemons) if key.startswith("policyrevision/") else ()

    def _goes_its_way(self, whose: str, old: Replica | None, new: Replica | None) -> bool:
        """Return whether a job's replica only progresses, so that none is missing or surplus. That affects only the job's
        conditions, which are debounced anyway. A replica that is seen before its workload was created together with it.
        """
        if new is None or new.status.phase not in ON_ITS_WAY or (old is not None and old.status.phase not in ON_ITS_WAY):
            return False
        workload: Workload | None = self.board.get(whose)
        if workload is None:
            return old is None
        return old is not None and workload.spec.type == "job" and not workload.metadata.deleting

    def _is_full(self, workload: Workload) -> bool:
        """Return whether a new job already has all its initial replicas. Most such jobs are over soon."""
        meta, spec = workload.metadata, workload.spec
        if spec.type != "job" or meta.deleting:
            return False
        return 0 < initial_replicas(spec) == len(self.board.by_workload.get((meta.tenant, meta.name), ()))

    def _note(self, key: str, old: Workload | None, new: Workload | None) -> None:
        if new is None or new.spec.type != "daemon":
            self._daemons.pop(key, None)
        else:
            self._daemons[key] = None
        self.faring.note(old, new)

    def everything(self) -> Iterable[str]:
        keys = [key for key, _ in self.board.kind("workload/")]
        return dict.fromkeys((*keys, *(f"workload/{tenant}/{name}" for tenant, name in self.board.by_workload)))

    def heard(self, key: str, deed: Deed, verdict: Verdict | None) -> None:
        workload: Workload | None = self.board.get(key)
        if isinstance(deed.claim, Spawn) and workload is not None and verdict is not None:
            self.faring.spawned(workload, verdict if isinstance(verdict, Refused) else None)

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, times: Times) -> Iterator[Wish]:
        _, tenant, name = key.split("/")
        workload: Workload | None = self.board.get(key)
        if workload is None or workload.metadata.deleting:
            yield from self._clear(tenant, name, workload)
            return
        wanted = self.census.wanted(workload)
        yield from self._fill(workload, wanted)
        yield from self.faring.reconcile(workload, wanted, times)

    def _clear(self, tenant: str, name: str, workload: Workload | None) -> Iterator[Wish]:
        """End all replicas of a deleted workload. The workload itself is deleted when no replica and no finalizer remains."""
        left = self.board.of(tenant, name)
        for one in left:
            yield from self._away(one, workload)
            if one.thing.status.phase is Phase.FINISHED:
                yield Deed(Move(one.key, one.revision, "settle"))
            elif one.thing.status.phase is Phase.RELEASED:
                yield Deed(Forget(one.key, one.revision))
        if workload is not None and not left and not workload.metadata.finalizers:
            yield Deed(Delete("Workload", name, tenant), f"delete {workload.metadata.uid}")

    def _away(self, one: Kept, workload: Workload | None) -> Iterator[Deed]:
        """End a replica in its current phase. The identifier omits the attempt: if the replica is queued again, that undoes
        this action.
        """
        replica: Replica = one.thing
        generation = 0 if workload is None else workload.metadata.generation
        named = f"of {replica.metadata.uid} wanted at generation {generation}"
        if replica.status.phase in UNPLACED:
            # Replicas of a daemon come and go with its nodes, so repetitions are legitimate.
            once = "" if workload is not None and workload.spec.type == "daemon" else f"cancel {named}"
            yield Deed(Move(one.key, one.revision, "cancel", reason="no longer desired"), once)
        elif replica.status.phase in RUNS:
            yield Deed(Move(one.key, one.revision, "remove", reason="no longer desired"))

    def _fill(self, workload: Workload, wanted: Wanted) -> Iterator[Wish]:
        meta = workload.metadata
        for one in wanted.settle:
            yield Deed(Move(one.key, one.revision, "settle"))
        for one in wanted.away:
            yield from self._away(one, workload)
        for one in wanted.forget:
            yield Deed(Forget(one.key, one.revision))
        for first, count in wanted.spawn:
            for start in range(first, first + count, _SPAWN_MAX):
                many = min(_SPAWN_MAX, first + count - start)
                once = "" if workload.spec.type == "daemon" else f"spawn {meta.uid} {meta.generation} {start}+{many}"
                yield Deed(Spawn(meta.tenant, meta.name, meta.generation, start, many), once)


def _differs(old: Node, new: Node) -> bool:
    """Return whether the change can affect which daemons the node runs."""
    return (old.spec, old.metadata.labels, old.status.health) != (new.spec, new.metadata.labels, new.status.health)
