"""Workload rules: initial replicas, generation equivalence, progress by stage.

Progress is counted from the phases of a workload's replicas when it is read. It is not stored, because then every transition
of a replica would need a second write. Each replica is in exactly one stage; `limit` names the earliest stage in which
replicas are held up.

Every change of a workload's spec creates a new generation. Most changes concern the replicas, which are then replaced.
Changes of the number of replicas, or of how the workload is managed, are equivalent for a replica: scaling a service does
not restart it.
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
"""The reason word of each stage in which a workload can be held up, in the order in which they are reported."""

_FINAL_STAGES: Final = {"job": ("running", "ready"), "service": (), "daemon": ()}
"""Stages that are sufficient for this type of workload and do not hold it up."""


class WorkloadProgress(NamedTuple):
    """`admitted` is the number of desired replicas that are not created yet; the other fields count replicas by stage."""

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


def progress(type_: Literal["job", "service", "daemon"], desired: int, phases: Iterable[Phase]) -> WorkloadProgress:
    """Returns the progress of a workload with `desired` replicas."""
    counts = dict.fromkeys(_STAGE.values(), 0)
    created = 0
    for phase in phases:
        counts[_STAGE[phase]] += 1
        created += (
            type_ == "job" or phase is not P.RELEASED
        )  # a released replica of a job counts as created; one of a service is replaced
    counts["admitted"] = max(0, desired - created)
    limit = next((reason for stage, reason in STAGE_REASONS.items() if counts[stage] and stage not in _FINAL_STAGES[type_]), "")
    return WorkloadProgress(**counts, limit=limit)


_ZERO: Final = Duration(0)


def is_equivalent(old: GenerationSpec, new: GenerationSpec) -> bool:
    """Whether replicas of both generations would be the same."""
    return old.generation == new.generation or (old.labels == new.labels and _replica_spec(old.spec) == _replica_spec(new.spec))


def initial_replicas(spec: WorkloadSpec) -> int:
    """Returns how many replicas a new workload starts with. A daemon starts with none, because its nodes must be determined
    first; so does a scheduled job.
    """
    if spec.type == "daemon" or spec.schedule:
        return 0
    return min(spec.replicas, spec.completions) if spec.completions else spec.replicas


def _replica_spec(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns the spec without the fields that do not concern replicas."""
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
