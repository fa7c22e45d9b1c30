"""Parts of the liveness checks: desired state, quiescence, attempts and scheduling latency.

Judged once nobody wants anything new; for how long it may is in liveness.py.

What is still written, and what is refused again and again. Why: liveness.py asks.

Rows are counted, and not who wrote them; a refusal is somebody's, and about something.

Read from rows; nothing is judged here.

One measure a replica, and what they come to; nothing is placed here.

A replica's wait begins when it becomes pending, and begins anew at every look that finds no place for it, or not for all who
wait: whose turn it is then is the scheduler's to say. It ends when it is bound. Gangs wait for each other, and what has terms
towards others for where those are: neither is measured. (The scheduler that is played learns of such terms by refusals only.)
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
"""Of a spec: what a replica of it does not notice. Whoever scales a service restarts nothing."""


def lacks(history: History, key: str, members: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Whom it concerns, the workload or one of its replicas, and in words what; nothing if it has what it wants, or waits for
    what is others' to give: room, or that the new become ready.
    """
    workload = history.row(key)
    if workload["spec"]["type"] == "job":
        why = _job(workload, list(members.values()))
    else:
        old = {one: row for one, row in members.items() if phase_of(row) != "released" and _is_other(history, workload, row)}
        for one in (one for one, row in old.items() if phase_of(row) not in UP):
            # Each by itself: one after another they go, and each takes its time.
            yield one, "it is of an older generation and does nothing, and is not gone"
        why = _service(workload, list(members.values()), list(old.values()))
    if why:
        yield key, why


def _job(workload: Json, members: Sequence[Json]) -> str:
    """There is a replica for each, and each that ended without success is tried again; unless one of them was too often: then
    the job has failed, and that is said.
    """
    spec = workload["spec"]
    wanted, retries = spec.get("completions") or spec.get("replicas", 1), spec.get("retries", RETRIES)
    over = [one for one in members if phase_of(one) == "released"]
    undone = [one for one in over if one["status"].get("result") != "ok"]
    if spent := [one["metadata"]["name"] for one in undone if failures_of(one) > retries]:
        said = [one for one in workload.get("status", {}).get("conditions", ()) if one["type"] == "Failed"]
        told = bool(said) and said[0]["status"] == "True"
        return "" if told else f"{spent} failed too often, and the job is not said to have failed"
    # Of a job that shrank there may be as many at work as it may have: then whoever has ended is spare.
    full = len(members) - len(over) >= max(spec.get("replicas", 1), spec.get("completions", 0))
    if undone and not full:
        return f"{[one['metadata']['name'] for one in undone]} ended without success, and have attempts left"
    return f"{len(members)} of {wanted} replicas are there" if len(members) < wanted else ""


def _service(workload: Json, members: Sequence[Json], old: Sequence[Json]) -> str:
    spec, wanted = workload["spec"], workload["spec"].get("replicas", 1)
    live = [one for one in members if phase_of(one) != "released"]
    if not old:
        return "" if len(live) == wanted else f"{len(live)} replicas are not released, and {wanted} are wanted"
    up = [one for one in live if phase_of(one) in UP]
    least = max(spec.get("disruption", {}).get("minAvailable", 0), wanted - spec.get("rollout", {}).get("maxUnavailable", 0))
    if len(up) > least and any(one in up for one in old):
        return f"{len(up)} are ready where {least} must be, and some are of an older generation"
    room = wanted + spec.get("rollout", {}).get("maxSurge", 1) - len(live)
    if len(live) - len(old) < wanted and room > 0:
        return f"{len(old)} are of an older generation, and there may be {room} more of the new"
    return ""


def _is_other(history: History, workload: Json, replica: Json) -> bool:
    """Is it of a generation whose replicas differ from those that are wanted?"""
    meta = workload["metadata"]
    if replica["spec"]["generation"] == meta.get("generation", 1):
        return False
    row = history.row(generation_key(replica))
    if row is None:
        return True
    own = row["spec"]
    # As it runs: what a policy has given stands in the generation alone.
    current = history.row(f"generation/{meta['tenant']}/{meta['name']}/{meta.get('generation', 1):08d}")
    runs = workload["spec"] if current is None else current["spec"]["spec"]
    return bool(own.get("labels", {}) != meta.get("labels", {}) or _seen(own["spec"]) != _seen(runs))


def _seen(spec: Json) -> Json:
    return {name: value for name, value in spec.items() if name not in UNSEEN}


QUIET_KINDS: Final = ("head", "batch", "summary", "event", "decision")
"""What may be written while nothing is going on: beats, reports and notes."""

LIFE_WRITES: Final = 12
"""What one process that ends may lead to: its replica's moves to its next attempt, and from there to where that runs."""

Wish = tuple[str, str, str]
"""Who asks, for what, and of which object."""


class Quiet:
    """One scope, from when it is healthy."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        """When something was written that says that something goes on."""
        self.refused: dict[Wish, list[int]] = {}

    def absorb(self, step: Step, at_ms: int) -> None:
        if any(key.partition("/")[0] not in QUIET_KINDS for key in step.changed):
            self.writes.append(at_ms)
        for entry in step.entries:
            if entry.code and entry.actor and entry.subject:  # a gang has many
                self.refused.setdefault((entry.actor, entry.did, entry.subject), []).append(at_ms)

    def writes_cease(self, since_ms: float, may: float) -> Found:
        """L10: with a fixed desire, writes fall to the rate of beats."""
        late = sum(at > since_ms for at in self.writes)
        if late > may:
            yield "head", f"{late} commits changed something since {since_ms:.0f} ms, of {may:.0f}"

    def refusals_back_off(self, since_ms: float, may: float) -> Found:
        """L10: what is refused is not asked again and again, faster than beats."""
        for (actor, did, subject), times in self._late(since_ms):
            if len(times) > may:
                yield subject, f"{actor} was refused {did} {len(times)} times since {since_ms:.0f} ms, of {may:.0f}"

    def _late(self, since_ms: float) -> Iterator[tuple[Wish, list[int]]]:
        for wish, times in sorted(self.refused.items()):
            yield wish, [at for at in times if at > since_ms]


VERDICTS: Final = ("bound", "reserved", "refused", "waiting")
_REPLICA: Final = "replica/"
_CLAIMS: Final = ("bind", "reserve")


def decisions(step: Step) -> Iterator[tuple[str, Json]]:
    """Those that a scheduler has written in this commit; what others write under that name says nothing of a scheduler."""
    by = {entry.subject for entry in step.accepted if entry.did == "explain" and entry.role == "scheduler" and entry.lease}
    for key, _, new in step.of_kind("decision") if by else ():
        if new is not None and key.rpartition("/")[2] in by:
            yield key, new["spec"]


class Tries:
    """Of one scope."""

    def __init__(self) -> None:
        self.pending: dict[str, int] = {}
        """Since when, in virtual time."""
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
        """A backup stands in the store's place, and whoever waits there waits anew."""
        self.pending, self.tried, self.said = dict.fromkeys(pending, at_ms), {}, {}


WAITS_MIN: Final = 100
"""A percentile of fewer says nothing."""

PERCENTILE: Final = 99


class Wait(NamedTuple):
    ms: int
    key: str


class Waits:
    """Of one scope, while work is asked for and nothing is broken."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        """Since when nothing but the scheduler keeps it waiting, as far as was seen."""
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
                self.since.pop(key, None)  # what waits for others to stop waits for them, not for the scheduler

    def saw(self, history: History, able: Collection[str], now_ms: int) -> None:
        """Of all that is pending these could be placed now, all of them at once."""
        for key, _ in history.replicas("pending"):
            if key not in able and key in self.since:
                self.since[key] = now_ms

    def close(self, now_ms: int, may_ms: float) -> None:
        """Nothing is measured from here on. What waits is known to have waited for so long: if that is too long, it counts."""
        self.ended += [Wait(now_ms - since, key) for key, since in self.since.items() if now_ms - since > may_ms]
        self.since.clear()

    def percentile(self) -> Wait | None:
        """The wait that all but a hundredth are no longer than; None if there are too few."""
        if len(self.ended) < WAITS_MIN:
            return None
        return sorted(self.ended)[-(-len(self.ended) * PERCENTILE // 100) - 1]
