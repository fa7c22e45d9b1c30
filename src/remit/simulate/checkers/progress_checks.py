"""Parts of the liveness checks: desired state, quiescence, attempts and scheduling latency.

The bounds are in liveness_checks.py, which evaluates these parts once no new work is requested.

Quiescence counts writes regardless of their author, and refusals by author and object.

Scheduling latency is measured per replica. Its wait starts when it becomes pending, and starts again at every tick at which
it does not fit, or not all pending replicas fit: then the scheduler chooses the order. It ends when the replica is bound.
Gangs and replicas with terms towards others are not measured, because they wait for other replicas. (The simulated naive
scheduler learns of such terms only by refusals.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from remit.simulate.checkers.reference.feasibility import has_peer_terms
from remit.simulate.checkers.reference.history import CommitStep, History
from remit.simulate.checkers.reference.lifecycle import DEFAULT_RETRIES
from remit.simulate.checkers.reference.rows import Json, failures_of, generation_key, phase_of
from remit.simulate.checkers.registry import Findings

READY_PHASES: Final = ("ready", "serving")

FIELDS_WITHOUT_EFFECT: Final = ("replicas", "completions", "retries", "deadline", "keep", "schedule", "disruption", "rollout")
"""Fields of a spec that do not affect its replicas: changing them restarts nothing."""


def missing_replicas(history: History, key: str, members: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield the workload or replica concerned and what is missing; nothing if the workload has what it wants, or waits for
    something outside its control: capacity, or that new replicas become ready.
    """
    workload = history.row(key)
    if workload["spec"]["type"] == "job":
        reason = _job_deficit(workload, list(members.values()))
    else:
        old = {
            member: row
            for member, row in members.items()
            if phase_of(row) != "released" and _is_outdated(history, workload, row)
        }
        for member in (member for member, row in old.items() if phase_of(row) not in READY_PHASES):
            # Each replica separately: they are removed one after another, and each takes its time.
            yield member, "it is of an older generation and not ready, but was not removed"
        reason = _service_deficit(workload, list(members.values()), list(old.values()))
    if reason:
        yield key, reason


def _job_deficit(workload: Json, members: Sequence[Json]) -> str:
    """There is a replica for each completion, and each that ended without success is retried; unless one has failed too often:
    then the job has failed, and its condition `Failed` must be true.
    """
    spec = workload["spec"]
    desired, retries = spec.get("completions") or spec.get("replicas", 1), spec.get("retries", DEFAULT_RETRIES)
    ended = [member for member in members if phase_of(member) == "released"]
    undone = [member for member in ended if member["status"].get("result") != "ok"]
    if exhausted := [member["metadata"]["name"] for member in undone if failures_of(member) > retries]:
        conditions = [member for member in workload.get("status", {}).get("conditions", ()) if member["type"] == "Failed"]
        has_failed = bool(conditions) and conditions[0]["status"] == "True"
        return "" if has_failed else f"{exhausted} failed too often, but the job has no condition Failed"
    # A job that shrank may have as many running replicas as it may have: then ended ones are surplus.
    full = len(members) - len(ended) >= max(spec.get("replicas", 1), spec.get("completions", 0))
    if undone and not full:
        return f"{[member['metadata']['name'] for member in undone]} ended without success, and have retries left"
    return f"{len(members)} of {desired} replicas exist" if len(members) < desired else ""


def _service_deficit(workload: Json, members: Sequence[Json], old: Sequence[Json]) -> str:
    spec, desired = workload["spec"], workload["spec"].get("replicas", 1)
    live = [member for member in members if phase_of(member) != "released"]
    if not old:
        return "" if len(live) == desired else f"{len(live)} replicas are not released, but {desired} are desired"
    ready = [member for member in live if phase_of(member) in READY_PHASES]
    minimum = max(spec.get("disruption", {}).get("minAvailable", 0), desired - spec.get("rollout", {}).get("maxUnavailable", 0))
    if len(ready) > minimum and any(member in ready for member in old):
        return f"{len(ready)} are ready where {minimum} are required, and some are of an older generation"
    surge_left = desired + spec.get("rollout", {}).get("maxSurge", 1) - len(live)
    if len(live) - len(old) < desired and surge_left > 0:
        return f"{len(old)} are of an older generation, and {surge_left} more of the new one are allowed"
    return ""


def _is_outdated(history: History, workload: Json, replica: Json) -> bool:
    """Whether its generation's replicas differ from the desired ones."""
    meta = workload["metadata"]
    if replica["spec"]["generation"] == meta.get("generation", 1):
        return False
    row = history.row(generation_key(replica))
    if row is None:
        return True
    own = row["spec"]
    # Compare with the generation: defaults applied by a policy are only there.
    current = history.row(f"generation/{meta['tenant']}/{meta['name']}/{meta.get('generation', 1):08d}")
    runs = workload["spec"] if current is None else current["spec"]["spec"]
    return bool(own.get("labels", {}) != meta.get("labels", {}) or _replica_fields(own["spec"]) != _replica_fields(runs))


def _replica_fields(spec: Json) -> Json:
    return {name: value for name, value in spec.items() if name not in FIELDS_WITHOUT_EFFECT}


QUIET_KINDS: Final = ("head", "batch", "summary", "event", "decision")
"""Kinds that may be written while nothing happens: heartbeats, reports and events."""

WRITES_PER_EXIT: Final = 12
"""Writes that the end of one process may cause: the transitions of its replica to its next attempt, until that runs."""

RefusedRequest = tuple[str, str, str]
"""The actor, the operation, and the object of a refused request."""


class Quiescence:
    """Writes and refusals of one scope, from when it is healthy."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        """Times of commits that changed more than heartbeats and events."""
        self.refused: dict[RefusedRequest, list[int]] = {}

    def on_commit(self, step: CommitStep, at_ms: int) -> None:
        if any(key.partition("/")[0] not in QUIET_KINDS for key in step.changed):
            self.writes.append(at_ms)
        for entry in step.entries:
            if entry.code and entry.actor and entry.subject:  # a gang has many subjects
                self.refused.setdefault((entry.actor, entry.operation, entry.subject), []).append(at_ms)

    def writes_cease(self, since_ms: float, limit: float) -> Findings:
        """L10: without new requests, writes fall to the rate of heartbeats."""
        late = sum(at > since_ms for at in self.writes)
        if late > limit:
            yield "head", f"{late} commits changed something since {since_ms:.0f} ms, limit {limit:.0f}"

    def refused_requests_back_off(self, since_ms: float, limit: float) -> Findings:
        """L10: refused requests are not repeated faster than heartbeats."""
        for (actor, did, subject), times in self._refused_since(since_ms):
            if len(times) > limit:
                yield subject, f"{actor} was refused {did} {len(times)} times since {since_ms:.0f} ms, limit {limit:.0f}"

    def _refused_since(self, since_ms: float) -> Iterator[tuple[RefusedRequest, list[int]]]:
        for request, times in sorted(self.refused.items()):
            yield request, [at for at in times if at > since_ms]


VERDICTS: Final = ("bound", "reserved", "refused", "waiting")
_REPLICA: Final = "replica/"
_CLAIMS: Final = ("bind", "reserve")


def decisions(step: CommitStep) -> Iterator[tuple[str, Json]]:
    """Yield the decisions that schedulers recorded in this commit; those of other actors are ignored."""
    by = {
        entry.subject for entry in step.accepted if entry.operation == "explain" and entry.role == "scheduler" and entry.lease
    }
    for key, _, new in step.of_kind("decision") if by else ():
        if new is not None and key.rpartition("/")[2] in by:
            yield key, new["spec"]


class SchedulingAttempts:
    """Scheduling attempts of one scope."""

    def __init__(self) -> None:
        self.pending: dict[str, int] = {}
        """Since when each replica is pending, in virtual time."""
        self.tried: dict[str, int] = {}
        self.recorded: dict[str, int] = {}

    def on_commit(self, step: CommitStep, at_ms: int) -> None:
        for key, old, new in step.moves:
            if phase_of(new) != "pending":
                for times in (self.pending, self.tried, self.recorded):
                    times.pop(key, None)
            elif phase_of(old) != "pending" or key not in self.pending:
                self.pending[key] = at_ms
        for entry in step.entries:
            if entry.operation in _CLAIMS and entry.role == "scheduler" and entry.subject in self.pending:
                self.tried[entry.subject] = at_ms
        for _, spec in decisions(step):
            for name in spec.get("replicas", ()):
                key = _REPLICA + name
                if key in self.pending:
                    self.tried[key] = at_ms
                    if spec.get("verdict") in VERDICTS:
                        self.recorded[key] = at_ms

    def restore(self, pending: Iterable[str], at_ms: int) -> None:
        """Restart the waits of everything that is pending in a restored backup."""
        self.pending, self.tried, self.recorded = dict.fromkeys(pending, at_ms), {}, {}


DELAYS_MIN: Final = 100
"""A percentile of fewer waits is meaningless."""

PERCENTILE: Final = 99


class SchedulingDelay(NamedTuple):
    ms: int
    key: str


class SchedulingDelays:
    """Waiting times of one scope, while work is requested and nothing is broken."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        """Since when only the scheduler keeps a replica waiting, as far as observed."""
        self.ended: list[SchedulingDelay] = []

    def on_commit(self, step: CommitStep, at_ms: int) -> None:
        for key, old, new in step.moves:
            old_phase, new_phase = phase_of(old), phase_of(new)
            shape = None if new is None else step.history.shape(new)
            if shape is None or shape.gang or has_peer_terms(shape):
                self.since.pop(key, None)
            elif new_phase == "pending":
                self.since.setdefault(key, at_ms)
            elif new_phase == "bound" and old_phase in ("pending", "reserved"):
                if key in self.since:
                    self.ended.append(SchedulingDelay(at_ms - self.since.pop(key), key))
            elif new_phase != "reserved" or new["status"].get("victims"):
                self.since.pop(key, None)  # it waits for its victims, not for the scheduler

    def on_tick(self, history: History, placeable: Collection[str], now_ms: int) -> None:
        """Restart the waits of all pending replicas except these, which could all be placed now."""
        for key, _ in history.replicas("pending"):
            if key not in placeable and key in self.since:
                self.since[key] = now_ms

    def close(self, now_ms: int, bound_ms: float) -> None:
        """Stop measuring. Replicas that have already waited too long count."""
        self.ended += [SchedulingDelay(now_ms - since, key) for key, since in self.since.items() if now_ms - since > bound_ms]
        self.since.clear()

    def percentile(self) -> SchedulingDelay | None:
        """Return the 99th percentile of the waits; None if there are too few."""
        if len(self.ended) < DELAYS_MIN:
            return None
        return sorted(self.ended)[-(-len(self.ended) * PERCENTILE // 100) - 1]
