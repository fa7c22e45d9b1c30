"""Workload conditions (Admitted, Scheduled, Ready, Available, Progressing, Complete, Failed).

Services and daemons have Admitted, Scheduled, Ready, Available and Progressing; jobs have Admitted, Scheduled, and Complete
or Failed. Each carries the generation that it describes. None contains a count, because every change of the count would be a
write: progress is computed when it is read (law/workload_rules.py).

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
    UNPLACED_PHASES,
    DesiredReplicas,
    ReplicaDiff,
    available,
    available_min,
    failure_reason,
    has_exhausted_retries,
)
from remit.correction.framework.actions import Action, ReconcileResult, RequeueAfter, update_condition
from remit.correction.framework.loop import ReconcileTime
from remit.law.timing import Timing
from remit.law.workload_rules import condition_of, stage_reason
from remit.model.claims import Delete, Refused
from remit.model.kinds import Workload, WorkloadSpec
from remit.model.records import Phase, ReplicaStatus, result_text
from remit.observation.watch_cache import CachedRow
from remit.world.interfaces import Clock

_FAILURE_MESSAGES: Final = {
    DEADLINE_EXCEEDED: "the job did not complete within its spec.deadline",
    RETRIES_EXHAUSTED: "a replica has failed more often than spec.retries allows",
}
MESSAGE_CHARS_MAX: Final = 300
_DEBOUNCED_TYPES: Final = ("Admitted", "Scheduled", "Ready")
_ANY_STATE: Final = "either", "either"
"""Placeholder for a state that was not evaluated yet. Any state counts as unchanged against it."""
_SCHEDULES_UNSUPPORTED: Final = "schedules are not implemented yet, so this job never runs; remove spec.schedule to run it now"


def condition_debounce_ms(timing: Timing) -> int:
    """Return how long a condition must stay false before that is written."""
    return 5 * timing.heartbeat_ms // 2


class WorkloadConditions:
    """Maintains the conditions of workloads, as part of the workload controller. It has no keys of its own."""

    def __init__(self, desired: DesiredReplicas, clock: Clock) -> None:
        self._desired, self._cache, self._clock = desired, desired.cache, clock
        self._first_seen: dict[str, int] = {}
        """By uid: when a job with a deadline was first seen."""
        self._finished: dict[str, int] = {}
        """By uid: when a job was first seen finished."""
        self._rollout_progress: dict[str, tuple[tuple[int, int], int]] = {}
        """By uid: the generation with the progress of its rollout, and since when."""
        self._pending_updates: dict[tuple[str, str], tuple[tuple[str, str], int]] = {}
        """By uid and condition type: the state to be written if it lasts, and since when."""
        self._spawn_refusals: dict[str, Refused] = {}
        """By uid: the refusal of its last spawn claim."""

    # -- inputs --------------------------------------------------------------------------------------------------------------

    def on_workload_change(self, old: Workload | None, new: Workload | None) -> None:
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            uid = old.metadata.uid
            for state in (self._first_seen, self._finished, self._rollout_progress, self._spawn_refusals):
                state.pop(uid, None)
            for type_ in _DEBOUNCED_TYPES:
                self._pending_updates.pop((uid, type_), None)
        if new is not None and new.spec.type == "job" and new.spec.deadline:
            self._first_seen.setdefault(new.metadata.uid, self._clock.now_ms())

    def start_debounce(self, workload: Workload) -> None:
        """Schedule the first conditions of a job that was created with all its initial replicas. They show its state at the end
        of the debounce, so that a job which starts at once costs one write.
        """
        for type_ in ("Admitted", "Scheduled"):
            self._pending_updates[workload.metadata.uid, type_] = _ANY_STATE, self._clock.now_ms()

    def on_spawn_verdict(self, workload: Workload, refused: Refused | None) -> None:
        """Record whether replicas could be created."""
        if refused is None:
            self._spawn_refusals.pop(workload.metadata.uid, None)
        else:
            self._spawn_refusals[workload.metadata.uid] = refused

    # -- reconcile ----------------------------------------------------------------------------------------------------------

    def reconcile(self, workload: Workload, diff: ReplicaDiff, time: ReconcileTime) -> Iterator[ReconcileResult]:
        members = self._cache.replicas_of(workload.metadata.tenant, workload.metadata.name)
        if not diff.spawn:
            self.on_spawn_verdict(workload, None)
        if workload.spec.type == "job":
            yield from self._job_conditions(workload, diff, members, time)
        else:
            yield from self._service_conditions(workload, members, time)

    def _update_admitted(self, workload: Workload, time: ReconcileTime) -> Iterator[ReconcileResult]:
        refused = self._spawn_refusals.get(workload.metadata.uid)
        if workload.spec.schedule:
            yield from self._update_debounced(workload, "Admitted", "NoSchedules", "", _SCHEDULES_UNSUPPORTED, time)
        elif refused is None:
            yield from self._update_debounced(workload, "Admitted", "", "Accepted", "", time)
        else:
            yield from self._update_debounced(workload, "Admitted", _camel_case(refused.code), "", refused.detail, time)

    def _update_debounced(
        self, workload: Workload, type_: str, bad: str, good: str, message: str, time: ReconcileTime
    ) -> Iterator[ReconcileResult]:
        """Write a condition once its state has lasted. `bad` is the reason why it is false; if empty, it is true for the reason
        `good`.
        """
        meta = workload.metadata
        known, condition_key = condition_of(workload.status.conditions, type_), (meta.uid, type_)
        update = update_condition(workload, type_, "False" if bad else "True", bad or good, message, time.wall)
        was_set = known is not None and known.observed_generation == meta.generation
        if not update or (not bad and (was_set or workload.spec.type != "job")):
            self._pending_updates.pop(condition_key, None)
            yield from update
            return
        state = bad, message
        before, since_ms = self._pending_updates.get(condition_key, (state, time.now_ms))
        if before not in (state, _ANY_STATE) or condition_key not in self._pending_updates:
            since_ms = time.now_ms
            self._pending_updates[condition_key] = state, since_ms
        remaining_ms = since_ms + condition_debounce_ms(time.timing) - time.now_ms
        if remaining_ms > 0:
            yield RequeueAfter(remaining_ms)
        else:
            yield from update

    # -- jobs ----------------------------------------------------------------------------------------------------------------

    def _job_conditions(
        self, workload: Workload, diff: ReplicaDiff, members: Sequence[CachedRow], time: ReconcileTime
    ) -> Iterator[ReconcileResult]:
        uid, deadline_ms = workload.metadata.uid, int(workload.spec.deadline)
        failed = diff.failed
        if deadline_ms and not diff.complete and not failed:
            remaining_ms = self._first_seen.setdefault(uid, time.now_ms) + deadline_ms - time.now_ms
            if remaining_ms > 0:
                yield RequeueAfter(remaining_ms)
            else:
                failed = DEADLINE_EXCEEDED
        if failed:
            yield from update_condition(
                workload, "Failed", "True", failed, _failure_message(workload, failed, members), time.wall
            )
        elif diff.complete:
            yield from update_condition(workload, "Complete", "True", "Done", "", time.wall)
        for type_, holds in (("Failed", bool(failed)), ("Complete", diff.complete)):
            known = condition_of(workload.status.conditions, type_)
            if not holds and known is not None and known.status == "True":
                yield from update_condition(workload, type_, "False", "Changed", "", time.wall)
        if failed or diff.complete:
            yield from self._delete_expired(workload, time)
            return
        self._finished.pop(uid, None)
        yield from self._update_admitted(workload, time)
        is_waiting = bool(diff.spawn) or any(row.obj.status.phase in UNPLACED_PHASES for row in members)
        bad = _stage_reason(workload, workload.spec.replicas, members) if is_waiting else ""
        yield from self._update_debounced(
            workload, "Scheduled", bad, "AllBound", _no_node(workload) if bad == "Queued" else "", time
        )

    def _delete_expired(self, workload: Workload, time: ReconcileTime) -> Iterator[ReconcileResult]:
        """Delete a finished job after its `keep` time."""
        meta = workload.metadata
        remaining_ms = self._finished.setdefault(meta.uid, time.now_ms) + int(workload.spec.keep) - time.now_ms
        if remaining_ms > 0:
            yield RequeueAfter(remaining_ms)
        else:
            revision = self._cache.rows[f"workload/{meta.tenant}/{meta.name}"].revision
            yield Action(Delete("Workload", meta.name, meta.tenant, expect=revision))

    # -- services and daemons ------------------------------------------------------------------------------------------------

    def _service_conditions(
        self, workload: Workload, members: Sequence[CachedRow], time: ReconcileTime
    ) -> Iterator[ReconcileResult]:
        spec = workload.spec
        live = [row for row in members if row.obj.status.phase is not Phase.RELEASED]
        desired, placeable = self._desired.desired_count(workload), self._desired.placeable_count(workload)
        current = [row for row in live if self._desired.is_current(workload, row.obj)]
        available_rows, minimum = available(workload, live), available_min(spec, desired)
        ready = sum(self._desired.is_current(workload, row.obj) for row in available_rows)
        retriable = sum(
            row.obj.status.phase is Phase.RELEASED and self._desired.is_current(workload, row.obj) for row in members
        )
        limit = _stage_reason(workload, placeable, current, retriable) or "NotReady"
        bad = limit if sum(row.obj.status.phase not in UNPLACED_PHASES for row in current) < placeable else ""
        yield from self._update_admitted(workload, time)
        yield from self._update_debounced(
            workload, "Scheduled", bad, "AllBound", _no_node(workload) if bad == "Queued" else "", time
        )
        yield from self._update_debounced(workload, "Ready", limit if ready < placeable else "", "AllReady", "", time)
        if len(available_rows) >= minimum:
            yield from update_condition(workload, "Available", "True", "EnoughReady", "", time.wall)
        else:
            yield from update_condition(
                workload,
                "Available",
                "False",
                "TooFewReady",
                _too_few_ready(spec, minimum, desired),
                time.wall,
            )
        failed = [row for row in members if row.obj.status.failures and self._desired.is_current(workload, row.obj)]
        yield from self._update_progressing(workload, time, desired, ready, len(live) - len(current), failed)

    def _update_progressing(
        self, workload: Workload, time: ReconcileTime, desired: int, ready: int, old: int, failed: Sequence[CachedRow]
    ) -> Iterator[ReconcileResult]:
        """Maintain `Progressing`. A completed rollout stays completed until the next generation, even if replicas fail."""
        meta = workload.metadata
        known = condition_of(workload.status.conditions, "Progressing")
        if known is not None and known.reason == "RolledOut" and known.observed_generation == meta.generation:
            self._rollout_progress.pop(meta.uid, None)
            return
        if ready >= desired and not old:
            yield from update_condition(workload, "Progressing", "True", "RolledOut", "", time.wall)
            return
        progress_now = meta.generation, ready - old
        before, since_ms = self._rollout_progress.get(meta.uid, ((0, 0), time.now_ms))
        if before[0] != progress_now[0] or progress_now[1] > before[1] or meta.uid not in self._rollout_progress:
            since_ms = time.now_ms
            self._rollout_progress[meta.uid] = progress_now, since_ms
        remaining_ms = since_ms + int(workload.spec.rollout.progress_deadline) - time.now_ms
        if remaining_ms > 0:
            yield RequeueAfter(remaining_ms)
            yield from update_condition(
                workload, "Progressing", "True", "RollingOut", _replica_failure(workload, failed), time.wall
            )
        else:
            failure = _replica_failure(workload, failed)
            message = f"the rollout made no progress for {workload.spec.rollout.progress_deadline}" + (
                f"; {failure}" if failure else ""
            )
            yield from update_condition(workload, "Progressing", "False", "ProgressDeadlineExceeded", message, time.wall)


def _too_few_ready(spec: WorkloadSpec, minimum: int, desired: int) -> str:
    """Return the message of an unavailable workload: the minimum, and the field that requires it."""
    if spec.disruption.min_available == minimum:
        rule = f"at least {minimum} must be available (disruption.minAvailable)"
    else:
        rule = f"at most {desired - minimum} may be unavailable (rollout.maxUnavailable)"
    subject = "no replica is" if minimum == 1 else f"fewer than {minimum} of {desired} desired replicas are"
    return f"{subject} ready; {rule}"


def _failure_message(workload: Workload, failed: str, members: Sequence[CachedRow]) -> str:
    """Return the message of a failed job. Once written for this generation it stays, even when the failed replicas are gone."""
    known = condition_of(workload.status.conditions, "Failed")
    if known is not None and failure_reason(workload) == failed:
        return known.message
    if failed == RETRIES_EXHAUSTED:
        for row in members:
            name, status = row.obj.metadata.name, row.obj.status
            if has_exhausted_retries(row.obj, workload.spec) and (result := _last_result(status)):
                times = "once" if status.failures == 1 else f"{status.failures} times"
                return f"{name} failed {times}; last failure: {result}"
    return _FAILURE_MESSAGES.get(failed, "")


def _replica_failure(workload: Workload, failed: Sequence[CachedRow]) -> str:
    """Return how a new replica failed. While the replica is retried it reports no failure; the earlier message is then kept."""
    failures = {row.obj.metadata.name: result for row in failed if (result := _last_result(row.obj.status))}
    known = condition_of(workload.status.conditions, "Progressing")
    if known is not None and known.observed_generation == workload.metadata.generation and known.reason == "RollingOut":
        before = known.message.partition(": ")[2]
        if before and failed and (not failures or before in failures.values()):
            return known.message
    return next((f"{name}: {result}" for name, result in failures.items()), "")


def _last_result(status: ReplicaStatus) -> str:
    """Return how the last attempt ended."""
    return result_text(status.result, status.reason)[:MESSAGE_CHARS_MAX] if status.result else ""


def _stage_reason(workload: Workload, desired: int, members: Sequence[CachedRow], retriable: int = 0) -> str:
    return stage_reason(workload.spec.type, desired, (row.obj.status.phase for row in members), retriable)


def _no_node(workload: Workload) -> str:
    meta = workload.metadata
    return f"some replicas have no node yet; `remit explain workload/{meta.tenant}/{meta.name}` lists the reasons"


def _camel_case(code: str) -> str:
    return "".join(part.capitalize() for part in code.split("_"))
