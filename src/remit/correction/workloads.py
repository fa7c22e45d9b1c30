"""From workload to replicas: are there as many as are wanted, and none when it goes? How many are wanted is in wanted.py.

It makes replicas and ends them, settles what has finished, forgets what is over, says how a workload fares, and deletes
finished jobs once they were kept for long enough. What runs of an older generation is the rollout's, what failed is repair's.

A job's `deadline` counts from when this process first saw the job, and `keep` from when it first saw it finished, on its own
clock: a copy that restarts counts anew, and so errs to the late side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from remit.correction.conditions import say
from remit.correction.loop import Controller, Times
from remit.correction.remits import Again, Deed, Remit, Wish
from remit.correction.wanted import (
    DEADLINE_EXCEEDED,
    RETRIES_EXHAUSTED,
    RUNS,
    UNPLACED,
    Census,
    Wanted,
    available,
    condition_of,
    floor,
)
from remit.model.claims import Delete, Forget, Move, Role, Spawn
from remit.model.kinds import Node, Workload
from remit.model.records import Phase, Replica
from remit.observation.board import Kept
from remit.world.promises import Clock

_SPAWN_MAX = 10_000
_WHY = {
    DEADLINE_EXCEEDED: "its deadline has passed",
    RETRIES_EXHAUSTED: "a replica has failed more often than its retries allow",
}


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
        self._clock = clock
        self.census = census
        self._daemons: dict[str, None] = {}
        self._born: dict[str, int] = {}
        """By uid: since when jobs with a deadline are known."""
        self._ended: dict[str, int] = {}
        """By uid: since when jobs are known to be finished."""
        self._rolled: dict[str, tuple[tuple[int, int], int]] = {}
        """By uid: generation and how far its rollout has come, and since when."""

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
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            for notes in (self._born, self._ended, self._rolled):
                notes.pop(old.metadata.uid, None)
        if new is not None and new.spec.type == "job" and new.spec.deadline:
            self._born.setdefault(new.metadata.uid, self._clock.now_ms())

    def everything(self) -> Iterable[str]:
        keys = [key for key, _ in self.board.kind("workload/")]
        return dict.fromkeys((*keys, *(f"workload/{tenant}/{name}" for tenant, name in self.board.by_workload)))

    # -- looking ---------------------------------------------------------------------------------------------------------

    def reconcile(self, key: str, times: Times) -> Iterator[Wish]:
        _, tenant, name = key.split("/")
        workload: Workload | None = self.board.get(key)
        if workload is None or workload.metadata.deleting:
            yield from self._clear(tenant, name, workload)
            return
        wanted = self.census.wanted(workload)
        yield from self._fill(workload, wanted)
        yield from self._fares(workload, wanted, times)

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

    # -- saying ----------------------------------------------------------------------------------------------------------

    def _fares(self, workload: Workload, wanted: Wanted, times: Times) -> Iterator[Wish]:
        if workload.spec.type == "job":
            yield from self._job_fares(workload, wanted, times)
        else:
            yield from self._service_fares(workload, times)

    def _job_fares(self, workload: Workload, wanted: Wanted, times: Times) -> Iterator[Wish]:
        uid, deadline_ms = workload.metadata.uid, int(workload.spec.deadline)
        failed = wanted.failed
        if deadline_ms and not wanted.complete and not failed:
            left_ms = self._born.setdefault(uid, times.now_ms) + deadline_ms - times.now_ms
            if left_ms > 0:
                yield Again(left_ms)
            else:
                failed = DEADLINE_EXCEEDED
        if failed:
            yield from say(workload, "Failed", "True", failed, _WHY.get(failed, ""), times.wall)
        elif wanted.complete:
            yield from say(workload, "Complete", "True", "Done", "", times.wall)
        for type_, true in (("Failed", bool(failed)), ("Complete", wanted.complete)):
            known = condition_of(workload.status.conditions, type_)
            if not true and known is not None and known.status == "True":
                yield from say(workload, type_, "False", "Changed", "", times.wall)
        if failed or wanted.complete:
            yield from self._expire(workload, times)
        else:
            self._ended.pop(uid, None)

    def _expire(self, workload: Workload, times: Times) -> Iterator[Wish]:
        """A finished job is kept for a while, for people to look at."""
        meta = workload.metadata
        left_ms = self._ended.setdefault(meta.uid, times.now_ms) + int(workload.spec.keep) - times.now_ms
        if left_ms > 0:
            yield Again(left_ms)
        else:
            revision = self.board.rows[f"workload/{meta.tenant}/{meta.name}"].revision
            yield Deed(Delete("Workload", meta.name, meta.tenant, expect=revision))

    def _service_fares(self, workload: Workload, times: Times) -> Iterator[Wish]:
        meta, spec = workload.metadata, workload.spec
        members = [one for one in self.board.of(meta.tenant, meta.name) if one.thing.status.phase is not Phase.RELEASED]
        wanted = self.census.many(workload)
        up, least = available(workload, members), floor(spec, wanted)
        if len(up) >= least:
            yield from say(workload, "Available", "True", "EnoughReady", "", times.wall)
        else:
            yield from say(workload, "Available", "False", "TooFewReady", f"fewer than {least} are ready", times.wall)
        ready = sum(self.census.is_current(workload, one.thing) for one in up)
        old = sum(not self.census.is_current(workload, one.thing) for one in members)
        yield from self._progress(workload, times, wanted, ready, old)

    def _progress(self, workload: Workload, times: Times, wanted: int, ready: int, old: int) -> Iterator[Wish]:
        """Once it was rolled out it stays so until the next generation, whatever becomes of its replicas."""
        meta = workload.metadata
        known = condition_of(workload.status.conditions, "Progressing")
        if known is not None and known.reason == "RolledOut" and known.observed_generation == meta.generation:
            self._rolled.pop(meta.uid, None)
            return
        if ready >= wanted and not old:
            yield from say(workload, "Progressing", "True", "RolledOut", "", times.wall)
            return
        come = meta.generation, ready - old
        before, since_ms = self._rolled.get(meta.uid, ((0, 0), times.now_ms))
        if before[0] != come[0] or come[1] > before[1] or meta.uid not in self._rolled:
            since_ms = times.now_ms
            self._rolled[meta.uid] = come, since_ms
        left_ms = since_ms + int(workload.spec.rollout.progress_deadline) - times.now_ms
        if left_ms > 0:
            yield Again(left_ms)
            yield from say(workload, "Progressing", "True", "RollingOut", "", times.wall)
        else:
            why = f"nothing has come closer for {workload.spec.rollout.progress_deadline}"
            yield from say(workload, "Progressing", "False", "ProgressDeadlineExceeded", why, times.wall)


def _differs(old: Node, new: Node) -> bool:
    """Is it another node to those who look for one?"""
    return (old.spec, old.metadata.labels, old.status.health) != (new.spec, new.metadata.labels, new.status.health)
