"""Workload controller: creates, ends and forgets replicas; deletes finished jobs after their TTL.

How many are wanted is in wanted.py.

It makes replicas and ends them, settles what has finished, forgets what is over, says how a workload fares (faring.py), and
deletes finished jobs once they were kept for long enough. What runs of an older generation is the rollout's, what failed is
repair's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.controllers.desired_replicas import ON_ITS_WAY, RUNS, UNPLACED, Census, Wanted
from remit.correction.controllers.workload_status import Faring, patience_ms
from remit.correction.framework.actions import Concern, Deed, Later, Remit, Wish
from remit.correction.framework.loop import Controller, Times
from remit.law.timing import Tempo
from remit.law.workload_rules import begins_with
from remit.model.claims import Delete, Forget, Move, Refused, Role, Spawn, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica
from remit.observation.watch_cache import Kept
from remit.world.interfaces import Clock

_SPAWN_MAX = 10_000


class Workloads(Controller):
    """Its keys are those of workloads."""

    remit = Remit(
        Role.WORKLOADS,
        claims=(Spawn, Forget, Delete),
        transitions=("create", "cancel", "remove", "settle", "forget"),
        declares=("Workload",),
    )

    def __init__(self, census: Census, clock: Clock, tempo: Tempo = Tempo()) -> None:
        super().__init__(census.board)
        self.census, self.faring = census, Faring(census, clock)
        self._patience_ms = patience_ms(tempo)
        self._daemons: dict[str, None] = {}

    # -- hearing ---------------------------------------------------------------------------------------------------------

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
        """Does a job's replica come nearer to its end, so that none is missing or too many? Then it only tells how the job
        fares, and not before that has lasted. One that is born before its workload is seen was made together with it.
        """
        if new is None or new.status.phase not in ON_ITS_WAY or (old is not None and old.status.phase not in ON_ITS_WAY):
            return False
        workload: Workload | None = self.board.get(whose)
        if workload is None:
            return old is None
        return old is not None and workload.spec.type == "job" and not workload.metadata.deleting

    def _is_full(self, workload: Workload) -> bool:
        """Has it come with all the replicas that it begins with, and is it one of those that most is soon over with?"""
        meta, spec = workload.metadata, workload.spec
        if spec.type != "job" or meta.deleting:
            return False
        return 0 < begins_with(spec) == len(self.board.by_workload.get((meta.tenant, meta.name), ()))

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

    # -- looking ---------------------------------------------------------------------------------------------------------

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
        """It goes once nothing of it is left, and nobody holds it by a finalizer."""
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
        """End it where it stands. Named without its attempt: if it is queued again, that undoes this."""
        replica: Replica = one.thing
        generation = 0 if workload is None else workload.metadata.generation
        named = f"of {replica.metadata.uid} wanted at generation {generation}"
        if replica.status.phase in UNPLACED:
            # A daemon's comes and goes with its nodes.
            once = "" if workload is not None and workload.spec.type == "daemon" else f"cancel {named}"
            yield Deed(Move(one.key, one.revision, "cancel", reason="not wanted any more"), once)
        elif replica.status.phase in RUNS:
            yield Deed(Move(one.key, one.revision, "remove", reason="not wanted any more"))

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
    """Is it another node to those who look for one?"""
    return (old.spec, old.metadata.labels, old.status.health) != (new.spec, new.metadata.labels, new.status.health)
