"""Which replicas come with their workload, and are they those that it begins with? Of others somebody was asked: conduct.py."""

from __future__ import annotations

from remit.simulate.checkers.history import Step
from remit.simulate.checkers.promise import Found, promise
from remit.simulate.checkers.rows import Json, owner_of, phase_of

DECLARING = ("apply", "delete")


def comes_with_its_workload(step: Step, replica: Json) -> bool:
    """Did this commit make both, by one claim?"""
    key = owner_of(replica)
    return _is_new(step, key) and any(entry.did == "apply" and entry.subject == key for entry in step.accepted)


def _is_new(step: Step, key: str) -> bool:
    """Of two of one name in one commit the later counts."""
    old, new = step.changed.get(key, (None, None))
    return new is not None and (old is None or old["metadata"].get("uid") != new["metadata"].get("uid"))


@promise("S13")
def what_comes_with_a_workload_is_what_it_begins_with(step: Step) -> Found:
    """All of them or none, from the first on, of its first generation: no surge is needed for what replaces nothing."""
    born: dict[str, list[Json]] = {}
    for _, old, new in step.moves:
        if old is None and new is not None and not step.doubting and _is_new(step, owner_of(new)):
            born.setdefault(owner_of(new), []).append(new)
    for key, replicas in born.items():
        workload = step.history.row(key)
        meta, spec = workload["metadata"], workload["spec"]
        if any(entry.did == "spawn" and entry.subject == meta["name"] for entry in step.accepted):
            continue  # somebody has asked for more, within the same commit
        if sum(entry.did in DECLARING and entry.subject == key for entry in step.accepted) > 1:
            continue  # what it began with is in no row
        indexes = sorted(one["spec"].get("index", 0) for one in replicas)
        if indexes != list(range(_first(spec))) or any(phase_of(one) != "pending" for one in replicas):
            yield key, f"it came with {indexes}, and begins with {_first(spec)}"
        elif any(one["spec"]["generation"] != meta.get("generation", 1) for one in replicas):
            yield key, f"it came with replicas of another generation than {meta.get('generation', 1)}"


def _first(spec: Json) -> int:
    """A daemon's nodes are looked at first, and what has a schedule waits for its time."""
    if spec["type"] == "daemon" or spec.get("schedule"):
        return 0
    many = int(spec.get("replicas", 1))
    return min(many, int(spec["completions"])) if spec.get("completions") else many
