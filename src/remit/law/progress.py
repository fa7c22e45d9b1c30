"""How far has a workload come, and what holds it up? Counts by stage, from the phases of its replicas; nothing is stored.

A replica stands at exactly one stage. Who wants to know counts when asked: were counts written down, every move of a replica
would be two writes. `limit` names the earliest stage at which something stands that should be further.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from remit.model.records import Phase

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

LIMITS: Final[dict[str, str]] = {
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

_ENOUGH: Final = {"job": ("running", "ready"), "service": (), "daemon": ()}
"""Stages that are as far as work of this sort has to come."""


class Progress(NamedTuple):
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


def progress(type_: Literal["job", "service", "daemon"], wanted: int, phases: Iterable[Phase]) -> Progress:
    """Of a workload that wants so many in all."""
    counts = dict.fromkeys(_STAGE.values(), 0)
    made = 0
    for phase in phases:
        counts[_STAGE[phase]] += 1
        made += type_ == "job" or phase is not P.RELEASED  # a job's that is over has been made; a service's makes room
    counts["admitted"] = max(0, wanted - made)
    limit = next((word for stage, word in LIMITS.items() if counts[stage] and stage not in _ENOUGH[type_]), "")
    return Progress(**counts, limit=limit)
