"""Workload rules: initial replicas, generation equivalence, progress by stage.

Counts by stage, from the phases of its replicas; nothing is stored.

A replica stands at exactly one stage. Who wants to know counts when asked: were counts written down, every move of a replica
would be two writes. `limit` names the earliest stage at which something stands that should be further.

By what it runs, where and how.

Every change of a workload's spec makes a new generation. Most of them change what a replica is: it is replaced. Some only say
how many there are to be, or how the rest is to be treated: whoever scales a service does not restart it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from remit.model.kinds import Disruption, Rollout, WorkloadSpec
from remit.model.records import GenerationSpec, Phase
from remit.model.resources import Duration

P = Phase

_STAGE: Final[dict[Phase, str]] = {
    P.PENDING: "queued",
    P.RESERVED: "scheduled",
    P.BOUND: "bound",
    P.STARTING: "starting",
    P.RUNNING: "running",
    P.READY: "ready",
    P.SERVING: "serving",
    P.DRAINING: "leaving",
    P.STOPPING: "leaving",
    P.UNKNOWN: "unknown",
    P.FAILED: "failed",
    P.FINISHED: "finished",
    P.RELEASED: "released",
}

STAGE_REASONS: Final[dict[str, str]] = {
    "admitted": "Creating",
    "queued": "Queued",
    "scheduled": "WaitsForRoom",
    "bound": "NotStarted",
    "starting": "Starting",
    "unknown": "NodeSilent",
    "failed": "BeingReleased",
    "leaving": "Leaving",
    "running": "NotReady",
    "ready": "NotServed",
}
"""The word for each stage at which work may be held up, the first to be named first."""

_FINAL_STAGES: Final = {"job": ("running", "ready"), "service": (), "daemon": ()}
"""Stages that are as far as work of this sort has to come."""


class WorkloadProgress(NamedTuple):
    """`admitted` are wanted and not made yet; the rest are replicas, each where it stands."""

    admitted: int = 0
    queued: int = 0
    scheduled: int = 0
    bound: int = 0
    starting: int = 0
    running: int = 0
    ready: int = 0
    serving: int = 0
    leaving: int = 0
    unknown: int = 0
    failed: int = 0
    finished: int = 0
    released: int = 0
    limit: str = ""


def progress(type_: Literal["job", "service", "daemon"], wanted: int, phases: Iterable[Phase]) -> WorkloadProgress:
    """Of a workload that wants so many in all."""
    counts = dict.fromkeys(_STAGE.values(), 0)
    made = 0
    for phase in phases:
        counts[_STAGE[phase]] += 1
        made += type_ == "job" or phase is not P.RELEASED  # a job's that is over has been made; a service's makes room
    counts["admitted"] = max(0, wanted - made)
    limit = next((word for stage, word in STAGE_REASONS.items() if counts[stage] and stage not in _FINAL_STAGES[type_]), "")
    return WorkloadProgress(**counts, limit=limit)


_ZERO: Final = Duration(0)


def is_equivalent(old: GenerationSpec, new: GenerationSpec) -> bool:
    """Would a replica of the new generation be any different?"""
    return old.generation == new.generation or (old.labels == new.labels and _replica_spec(old.spec) == _replica_spec(new.spec))


def initial_replicas(spec: WorkloadSpec) -> int:
    """How many replicas a workload has at once when it is new. A daemon has none, whose nodes must be looked at first, nor has
    what waits for its time.
    """
    if spec.type == "daemon" or spec.schedule:
        return 0
    return min(spec.replicas, spec.completions) if spec.completions else spec.replicas


def _replica_spec(spec: WorkloadSpec) -> WorkloadSpec:
    """All but what the replicas themselves never see."""
    return replace(
        spec,
        replicas=0,
        completions=0,
        retries=0,
        deadline=_ZERO,
        keep=_ZERO,
        schedule="",
        disruption=Disruption(),
        rollout=Rollout(),
    )
