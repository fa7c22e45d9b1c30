"""From workload to replicas: are there as many as are wanted, and none when it goes? How many are wanted is in wanted.py.

It makes replicas and ends them, settles what has finished, forgets what is over, says how a workload fares (faring.py), and
deletes finished jobs once they were kept for long enough. What runs of an older generation is the rollout's, what failed is
repair's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.faring import Faring
from remit.correction.loop import Controller, Times
from remit.correction.remits import Deed, Remit, Wish
from remit.correction.wanted import RUNS, UNPLACED, Census, Wanted
from remit.model.claims import Delete, Forget, Move, Refused, Role, Spawn, Verdict
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica
from remit.observation.board import Kept
from remit.world.promises import Clock

_SPAWN_MAX = 10_000


class Workloads(Controller):
    """Its keys are those of workloads."""

    remit = Remit(
        Role.WORKLOADS,
        claims=(Spawn, Forget, Delete),
        transitions=("create", "cancel", "remove", "settle", "forget"),
        declares=("Workload",),
    )

    def __init__(self, census: Census, clock: Clock) -> None:
        super().__init__(census.board)
        self.census, self.faring = census, Faring(census, clock)
        self._daemons: dict[str, None] = {}

    # -- hearing ---------------------------------------------------------------------------------------------------------

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[str]:
        match new if new is not None else old:
            case Replica() as replica:
                return (f"workload/{replica.metadata.tenant}/{replica.spec.workload}",)
            case Workload() as workload:
                self._note(key, old, workload if new is not None else None)
                return (key,)
            case Node():
                return tuple(self._daemons) if old is None or new is None or _differs(old, new) else ()
        return tuple(self._daemons) if key.startswith("policyrevision/") else ()

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
