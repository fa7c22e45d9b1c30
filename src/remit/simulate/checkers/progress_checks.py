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

from remit.simulate.checkers.reference.feasibility import has_terms
from remit.simulate.checkers.reference.history import History, Step
from remit.simulate.checkers.reference.lifecycle import RETRIES
from remit.simulate.checkers.reference.rows import Json, failures_of, generation_key, phase_of
from remit.simulate.checkers.registry import Found

UP: Final = ("ready", "serving")

UNSEEN: Final = ("replicas", "completions", "retries", "deadline", "keep", "schedule", "disruption", "rollout")
"""Fields of a spec that do not affect its replicas: changing them restarts nothing."""


def lacks(history: History, key: str, members: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield the workload or replica concerned and what is missing; nothing if the workload has what it wants, or waits for
    something outside its control: capacity, or that new replicas become ready.
    """
    workload = history.row(key)
    if workload["spec"]["type"] == "job":
        why = _job(workload, list(members.values()))
    else:
        old = {one: row for one, row in members.items() if phase_of(row) != "released" and _is_other(history, workload, row)}
        for one in (one for one, row in old.items() if phase_of(row) not in UP):
            # Each replica separately: they are removed one after another, and each takes its time.
            yield one, "it is of an older generation and not ready, but was not removed"
        why = _service(workload, list(members.values()), list(old.values()))
    if why:
        yield key, why


def _job(workload: Json, members: Sequence[Json]) -> str:
    """There is a replica for each completion, and each that ended without success is retried; unless one has failed too often:
    then the job has failed, and its condition must say so.
    """
    spec = workload["spec"]
    wanted, retries = spec.get("completions") or spec.get("replicas", 1), spec.get("retries", RETRIES)
    over = [one for one in members if phase_of(one) == "released"]
    undone = [one for one in over if one["status"].get("result") != "ok"]
    if spent := [one["metadata"]["name"] for one in undone if failures_of(one) > retries]:
        said = [one for one in workload.get("status", {}).get("conditions", ()) if one["type"] == "Failed"]
        told = bool(said) and said[0]["status"] == "True"
        return "" if told else f"{spent} failed too often, but the job has no condition Failed"
    # A job that shrank may have as many running replicas as it may have: then ended ones are surplus.
    full = len(members) - len(over) >= max(spec.get("replicas", 1), spec.get("completions", 0))
    if undone and not full:
        return f"{[one['metadata']['name'] for one in undone]} ended without success, and have retries left"
    return f"{len(members)} of {wanted} replicas exist" if len(members) < wanted else ""


def _service(workload: Json, members: Sequence[Json], old: Sequence[Json]) -> str:
    spec, wanted = workload["spec"], workload["spec"].get("replicas", 1)
    live = [one for one in members if phase_of(one) != "released"]
    if not old:
        return "" if len(live) == wanted else f"{len(live)} replicas are not released, but {wanted} are desired"
    up = [one for one in live if phase_of(one) in UP]
    least = max(spec.get("disruption", {}).get("minAvailable", 0), wanted - spec.get("rollout", {}).get("maxUnavailable", 0))
    if len(up) > least and any(one in up for one in old):
        return f"{len(up)} are ready where {least} are required, and some are of an older generation"
    room = wanted + spec.get("rollout", {}).get("maxSurge", 1) - len(live)
    if len(live) - len(old) < wanted and room > 0:
        return f"{len(old)} are of an older generation, and {room} more of the new one are allowed"
    return ""


def _is_other(history: History, workload: Json, replica: Json) -> bool:
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
    return bool(own.get("labels", {}) != meta.get("labels", {}) or _seen(own["spec"]) != _seen(runs))


def _seen(spec: Json) -> Json:
    return {name: value for name, value in spec.items() if name not in UNSEEN}


QUIET_KINDS: Final = ("head", "batch", "summary", "event", "decision")
"""Kinds that may be written while nothing happens: heartbeats, reports and events."""

LIFE_WRITES: Final = 12
"""Writes that the end of one process may cause: the transitions of its replica to its next attempt, until that runs."""

Wish = tuple[str, str, str]
"""The actor, the operation, and the object of a refused request."""


class Quiet:
    """Writes and refusals of one scope, from when it is healthy."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        """Times of commits that changed more than heartbeats and events."""
        self.refused: dict[Wish, list[int]] = {}

    def absorb(self, step: Step, at_ms: int) -> None:
        if any(key.partition("/")[0] not in QUIET_KINDS for key in step.changed):
            self.writes.append(at_ms)
        for entry in step.entries:
            if entry.code and entry.actor and entry.subject:  # a gang has many subjects
                self.refused.setdefault((entry.actor, entry.did, entry.subject), []).append(at_ms)

    def writes_cease(self, since_ms: float, may: float) -> Found:
        """L10: without new requests, writes fall to the rate of heartbeats."""
        late = sum(at > since_ms for at in self.writes)
        if late > may:
            yield "head", f"{late} commits changed something since {since_ms:.0f} ms, limit {may:.0f}"

    def refusals_back_off(self, since_ms: float, may: float) -> Found:
        """L10: refused requests are not repeated faster than heartbeats."""
        for (actor, did, subject), times in self._late(since_ms):
            if len(times) > may:
                yield subject, f"{actor} was refused {did} {len(times)} times since {since_ms:.0f} ms, limit {may:.0f}"

    def _late(self, since_ms: float) -> Iterator[tuple[Wish, list[int]]]:
        for wish, times in sorted(self.refused.items()):
            yield wish, [at for at in times if at > since_ms]


VERDICTS: Final = ("bound", "reserved", "refused", "waiting")
_REPLICA: Final = "replica/"
_CLAIMS: Final = ("bind", "reserve")


def decisions(step: Step) -> Iterator[tuple[str, Json]]:
    """Yield the decisions that schedulers recorded in this commit; those of other actors are ignored."""
    by = {entry.subject for entry in step.accepted if entry.did == "explain" and entry.role == "scheduler" and entry.lease}
    for key, _, new in step.of_kind("decision") if by else ():
        if new is not None and key.rpartition("/")[2] in by:
            yield key, new["spec"]


class Tries:
    """Scheduling attempts of one scope."""

    def __init__(self) -> None:
        self.pending: dict[str, int] = {}
        """Since when each replica is pending, in virtual time."""
        self.tried: dict[str, int] = {}
        self.said: dict[str, int] = {}

    def absorb(self, step: Step, at_ms: int) -> None:
        for key, old, new in step.moves:
            if phase_of(new) != "pending":
                for kept in (self.pending, self.tried, self.said):
                    kept.pop(key, None)
            elif phase_of(old) != "pending" or key not in self.pending:
                self.pending[key] = at_ms
        for entry in step.entries:
            if entry.did in _CLAIMS and entry.role == "scheduler" and entry.subject in self.pending:
                self.tried[entry.subject] = at_ms
        for _, spec in decisions(step):
            for name in spec.get("replicas", ()):
                key = _REPLICA + name
                if key in self.pending:
                    self.tried[key] = at_ms
                    if spec.get("verdict") in VERDICTS:
                        self.said[key] = at_ms

    def restore(self, pending: Iterable[str], at_ms: int) -> None:
        """Restart the waits of everything that is pending in a restored backup."""
        self.pending, self.tried, self.said = dict.fromkeys(pending, at_ms), {}, {}


WAITS_MIN: Final = 100
"""A percentile of fewer waits is meaningless."""

PERCENTILE: Final = 99


class Wait(NamedTuple):
    ms: int
    key: str


class Waits:
    """Waiting times of one scope, while work is requested and nothing is broken."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        """Since when only the scheduler keeps a replica waiting, as far as observed."""
        self.ended: list[Wait] = []

    def absorb(self, step: Step, at_ms: int) -> None:
        for key, old, new in step.moves:
            was, now = phase_of(old), phase_of(new)
            shape = None if new is None else step.history.shape(new)
            if shape is None or shape.gang or has_terms(shape):
                self.since.pop(key, None)
            elif now == "pending":
                self.since.setdefault(key, at_ms)
            elif now == "bound" and was in ("pending", "reserved"):
                if key in self.since:
                    self.ended.append(Wait(at_ms - self.since.pop(key), key))
            elif now != "reserved" or new["status"].get("victims"):
                self.since.pop(key, None)  # it waits for its victims, not for the scheduler

    def saw(self, history: History, able: Collection[str], now_ms: int) -> None:
        """Restart the waits of all pending replicas except these, which could all be placed now."""
        for key, _ in history.replicas("pending"):
            if key not in able and key in self.since:
                self.since[key] = now_ms

    def close(self, now_ms: int, may_ms: float) -> None:
        """Stop measuring. Replicas that have already waited too long count."""
        self.ended += [Wait(now_ms - since, key) for key, since in self.since.items() if now_ms - since > may_ms]
        self.since.clear()

    def percentile(self) -> Wait | None:
        """Return the 99th percentile of the waits; None if there are too few."""
        if len(self.ended) < WAITS_MIN:
            return None
        return sorted(self.ended)[-(-len(self.ended) * PERCENTILE // 100) - 1]
