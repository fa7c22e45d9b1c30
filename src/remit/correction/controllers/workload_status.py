"""Workload conditions (Admitted, Scheduled, Ready, Available, Progressing, Complete, Failed).

Services and daemons have Admitted, Scheduled, Ready, Available and Progressing; jobs have Admitted, Scheduled, and Complete
or Failed. Each carries the generation that it describes. None contains a count, because every change of the count would be a
write: readers count the replicas themselves (law/workload_rules.py).

A condition that becomes true is written at once. One that becomes false is written only if it stays false for
`condition_debounce_ms`, so that short interruptions cost no writes. For a job both directions wait, because most jobs are
over by then.

A job's `deadline` counts from when this process first saw the job, and `keep` from when it first saw the job finished, on
its own clock. A restarted process starts counting again, so both can only be late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from remit.correction.controllers.desired_replicas import (
    DEADLINE_EXCEEDED,
    RETRIES_EXHAUSTED,
    UNPLACED,
    Census,
    Wanted,
    available,
    condition_of,
    failure,
    floor,
    is_spent,
)
from remit.correction.framework.actions import Again, Deed, Wish, say
from remit.correction.framework.loop import Times
from remit.law.timing import Timing
from remit.law.workload_rules import progress
from remit.model.claims import Delete, Refused
from remit.model.kinds import Workload
from remit.model.records import Phase, ReplicaStatus
from remit.observation.watch_cache import Kept
from remit.world.interfaces import Clock

_WHY: Final = {
    DEADLINE_EXCEEDED: "the job did not complete within its spec.deadline",
    RETRIES_EXHAUSTED: "a replica has failed more often than spec.retries allows",
}
MESSAGE_MAX: Final = 300
_PATIENT: Final = ("Admitted", "Scheduled", "Ready")
_EITHER: Final = "either", "either"
"""Placeholder for a state that was not evaluated yet. Any state counts as unchanged against it."""
_NO_SCHEDULES: Final = "schedules are not implemented yet, so this job never runs; remove spec.schedule to run it now"


def patience_ms(tempo: Timing) -> int:
    """Return how long a condition must stay false before that is written."""
    return 5 * tempo.heartbeat_ms // 2


class Faring:
    """Maintains the conditions of workloads, as part of the workload controller. It has no keys of its own."""

    def __init__(self, census: Census, clock: Clock) -> None:
        self._census, self._board, self._clock = census, census.board, clock
        self._born: dict[str, int] = {}
        """By uid: when a job with a deadline was first seen."""
        self._ended: dict[str, int] = {}
        """By uid: when a job was first seen finished."""
        self._rolled: dict[str, tuple[tuple[int, int], int]] = {}
        """By uid: the generation with the progress of its rollout, and since when."""
        self._untold: dict[tuple[str, str], tuple[tuple[str, str], int]] = {}
        """By uid and condition type: the state to be written if it lasts, and since when."""
        self._refused: dict[str, Refused] = {}
        """By uid: the refusal of its last spawn claim."""

    # -- inputs --------------------------------------------------------------------------------------------------------------

    def note(self, old: Workload | None, new: Workload | None) -> None:
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            uid = old.metadata.uid
            for notes in (self._born, self._ended, self._rolled, self._refused):
                notes.pop(uid, None)
            for type_ in _PATIENT:
                self._untold.pop((uid, type_), None)
        if new is not None and new.spec.type == "job" and new.spec.deadline:
            self._born.setdefault(new.metadata.uid, self._clock.now_ms())

    def awaits(self, workload: Workload) -> None:
        """Start the debounce of a job that was created with all its initial replicas: its state at the end of the debounce is
        written.
        """
        for type_ in ("Admitted", "Scheduled"):
            self._untold[workload.metadata.uid, type_] = _EITHER, self._clock.now_ms()

    def spawned(self, workload: Workload, refused: Refused | None) -> None:
        """Record whether replicas could be created."""
        if refused is None:
            self._refused.pop(workload.metadata.uid, None)
        else:
            self._refused[workload.metadata.uid] = refused

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, workload: Workload, wanted: Wanted, times: Times) -> Iterator[Wish]:
        members = self._board.of(workload.metadata.tenant, workload.metadata.name)
        if not wanted.spawn:
            self.spawned(workload, None)
        if workload.spec.type == "job":
            yield from self._job(workload, wanted, members, times)
        else:
            yield from self._service(workload, members, times)

    def _admitted(self, workload: Workload, times: Times) -> Iterator[Wish]:
        refused = self._refused.get(workload.metadata.uid)
        if workload.spec.schedule:
            yield from self._tell(workload, "Admitted", "NoSchedules", "", _NO_SCHEDULES, times)
        elif refused is None:
            yield from self._tell(workload, "Admitted", "", "Accepted", "", times)
        else:
            yield from self._tell(workload, "Admitted", _camel(refused.code), "", refused.detail, times)

    def _tell(self, workload: Workload, type_: str, bad: str, good: str, message: str, times: Times) -> Iterator[Wish]:
        """Write a condition once its state has lasted. `bad` is the reason why it is false; if empty, it is true for the reason
        `good`.
        """
        meta = workload.metadata
        known, at = condition_of(workload.status.conditions, type_), (meta.uid, type_)
        said = say(workload, type_, "False" if bad else "True", bad or good, message, times.wall)
        told_before = known is not None and known.observed_generation == meta.generation
        if not said or (not bad and (told_before or workload.spec.type != "job")):
            self._untold.pop(at, None)
            yield from said
            return
        should = bad, message
        before, since_ms = self._untold.get(at, (should, times.now_ms))
        if before not in (should, _EITHER) or at not in self._untold:
            since_ms = times.now_ms
            self._untold[at] = should, since_ms
        left_ms = since_ms + patience_ms(times.tempo) - times.now_ms
        if left_ms > 0:
            yield Again(left_ms)
        else:
            yield from said

    # -- jobs ----------------------------------------------------------------------------------------------------------------

    def _job(self, workload: Workload, wanted: Wanted, members: Sequence[Kept], times: Times) -> Iterator[Wish]:
        uid, deadline_ms = workload.metadata.uid, int(workload.spec.deadline)
        failed = wanted.failed
        if deadline_ms and not wanted.complete and not failed:
            left_ms = self._born.setdefault(uid, times.now_ms) + deadline_ms - times.now_ms
            if left_ms > 0:
                yield Again(left_ms)
            else:
                failed = DEADLINE_EXCEEDED
        if failed:
            yield from say(workload, "Failed", "True", failed, _why(workload, failed, members), times.wall)
        elif wanted.complete:
            yield from say(workload, "Complete", "True", "Done", "", times.wall)
        for type_, true in (("Failed", bool(failed)), ("Complete", wanted.complete)):
            known = condition_of(workload.status.conditions, type_)
            if not true and known is not None and known.status == "True":
                yield from say(workload, type_, "False", "Changed", "", times.wall)
        if failed or wanted.complete:
            yield from self._expire(workload, times)
            return
        self._ended.pop(uid, None)
        yield from self._admitted(workload, times)
        waits = bool(wanted.spawn) or any(one.thing.status.phase in UNPLACED for one in members)
        bad = _limit(workload, workload.spec.replicas, members) if waits else ""
        yield from self._tell(workload, "Scheduled", bad, "AllBound", _no_node(workload) if bad == "Queued" else "", times)

    def _expire(self, workload: Workload, times: Times) -> Iterator[Wish]:
        """Delete a finished job after its `keep` time."""
        meta = workload.metadata
        left_ms = self._ended.setdefault(meta.uid, times.now_ms) + int(workload.spec.keep) - times.now_ms
        if left_ms > 0:
            yield Again(left_ms)
        else:
            revision = self._board.rows[f"workload/{meta.tenant}/{meta.name}"].revision
            yield Deed(Delete("Workload", meta.name, meta.tenant, expect=revision))

    # -- services and daemons ------------------------------------------------------------------------------------------------

    def _service(self, workload: Workload, members: Sequence[Kept], times: Times) -> Iterator[Wish]:
        spec = workload.spec
        live = [one for one in members if one.thing.status.phase is not Phase.RELEASED]
        wanted, takes = self._census.many(workload), self._census.taken(workload)
        current = [one for one in live if self._census.is_current(workload, one.thing)]
        up, least = available(workload, live), floor(spec, wanted)
        ready = sum(self._census.is_current(workload, one.thing) for one in up)
        limit = _limit(workload, takes, current) or "NotReady"
        bad = limit if sum(one.thing.status.phase not in UNPLACED for one in current) < takes else ""
        yield from self._admitted(workload, times)
        yield from self._tell(workload, "Scheduled", bad, "AllBound", _no_node(workload) if bad == "Queued" else "", times)
        yield from self._tell(workload, "Ready", limit if ready < takes else "", "AllReady", "", times)
        if len(up) >= least:
            yield from say(workload, "Available", "True", "EnoughReady", "", times.wall)
        else:
            yield from say(
                workload,
                "Available",
                "False",
                "TooFewReady",
                f"fewer than {least} replicas are ready, the minimum from minAvailable and maxUnavailable",
                times.wall,
            )
        fails = [one for one in members if one.thing.status.failures and self._census.is_current(workload, one.thing)]
        yield from self._progress(workload, times, wanted, ready, len(live) - len(current), fails)

    def _progress(
        self, workload: Workload, times: Times, wanted: int, ready: int, old: int, fails: Sequence[Kept]
    ) -> Iterator[Wish]:
        """Maintain `Progressing`. A completed rollout stays completed until the next generation, whatever happens to its
        replicas.
        """
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
            yield from say(workload, "Progressing", "True", "RollingOut", _trouble(workload, fails), times.wall)
        else:
            trouble = _trouble(workload, fails)
            why = f"the rollout made no progress for {workload.spec.rollout.progress_deadline}" + (
                f"; {trouble}" if trouble else ""
            )
            yield from say(workload, "Progressing", "False", "ProgressDeadlineExceeded", why, times.wall)


def _why(workload: Workload, failed: str, members: Sequence[Kept]) -> str:
    """Return the message of a failed job. Once written for this generation it stays, even when the failed replicas are gone."""
    known = condition_of(workload.status.conditions, "Failed")
    if known is not None and failure(workload) == failed:
        return known.message
    if failed == RETRIES_EXHAUSTED:
        for one in members:
            name, status = one.thing.metadata.name, one.thing.status
            if is_spent(one.thing, workload.spec) and (words := _ended(status)):
                times = "once" if status.failures == 1 else f"{status.failures} times"
                return f"{name} failed {times}; last failure: {words}"
    return _WHY.get(failed, "")


def _trouble(workload: Workload, fails: Sequence[Kept]) -> str:
    """Return how a new replica failed. While the replica is retried it reports no failure; the earlier message is then kept."""
    found = {one.thing.metadata.name: words for one in fails if (words := _ended(one.thing.status))}
    known = condition_of(workload.status.conditions, "Progressing")
    if known is not None and known.observed_generation == workload.metadata.generation and known.reason == "RollingOut":
        before = known.message.partition(": ")[2]
        if before and fails and (not found or before in found.values()):
            return known.message
    return next((f"{name}: {words}" for name, words in found.items()), "")


def _ended(status: ReplicaStatus) -> str:
    """Return how the last attempt ended."""
    return f"{status.result} {status.reason}".strip()[:MESSAGE_MAX] if status.result else ""


def _limit(workload: Workload, wanted: int, members: Sequence[Kept]) -> str:
    return progress(workload.spec.type, wanted, (one.thing.status.phase for one in members)).limit


def _no_node(workload: Workload) -> str:
    meta = workload.metadata
    return f"some replicas have no node yet; `remit explain workload/{meta.tenant}/{meta.name}` lists the reasons"


def _camel(code: str) -> str:
    return "".join(part.capitalize() for part in code.split("_"))
