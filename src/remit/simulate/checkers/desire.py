"""What does a workload lack, by what stands? Judged once nobody wants anything new; for how long it may is in liveness.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from remit.simulate.checkers.history import History
from remit.simulate.checkers.lifecycle import RETRIES
from remit.simulate.checkers.rows import Json, failures_of, generation_key, phase_of

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
