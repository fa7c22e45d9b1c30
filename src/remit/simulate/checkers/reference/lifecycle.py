"""Second, independent copy of the lifecycle table.

Written from the design and not imported from law/lifecycle.py, so that an error there is detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

Edge = tuple[str | None, str | None, str]
"""Old phase, new phase, and the role that may make the transition."""

ACTIVE: Final = ("bound", "starting", "running", "ready", "serving")
ON_NODE: Final = (*ACTIVE, "draining", "stopping")
HOLDING: Final = frozenset((*ON_NODE, "reserved", "unknown", "failed", "finished"))
"""Phases that hold capacity, devices and quota."""

ASSIGNED: Final = frozenset((*ON_NODE, "unknown", "failed", "finished"))
"""Phases of an attempt that was bound to a node and is not released."""

STOPPABLE: Final = frozenset(("draining", "stopping", "failed", "finished", "released"))
"""Phases in which an attempt may be stopped: it is to end, or has ended according to the committed rows."""

ROLES_WITHOUT_LEASE: Final = ("user", "operator", "authority")


def _edges() -> Iterator[Edge]:
    yield None, "pending", "workloads"
    yield "pending", "reserved", "scheduler"
    yield "pending", "bound", "scheduler"
    yield "reserved", "bound", "scheduler"
    yield "reserved", "pending", "scheduler"
    yield "reserved", "pending", "repair"
    yield "pending", "released", "workloads"
    yield "reserved", "released", "workloads"
    yield "bound", "starting", "agent"
    yield "starting", "running", "agent"
    yield "running", "ready", "agent"
    yield "ready", "running", "agent"
    yield "serving", "running", "agent"
    yield "ready", "serving", "endpoints"
    yield "serving", "ready", "endpoints"
    yield "starting", "finished", "agent"
    yield "running", "finished", "agent"
    yield "ready", "finished", "agent"
    for phase in ("starting", "running", "ready", "serving"):
        yield phase, "failed", "agent"
    for phase in ACTIVE:
        for role in ("scheduler", "node-lifecycle", "rollout", "workloads"):
            yield phase, "draining", role
    yield "bound", "draining", "repair"
    yield "starting", "draining", "repair"
    yield "draining", "stopping", "agent"
    yield "stopping", "released", "agent"
    for phase in ON_NODE:
        yield phase, "unknown", "node-lifecycle"
        yield phase, "unknown", "authority"
        yield "unknown", phase, "agent"
    yield "unknown", "failed", "node-lifecycle"
    yield "failed", "released", "repair"
    yield "finished", "released", "workloads"
    yield "released", "pending", "repair"
    yield "released", None, "workloads"


EDGES: Final = frozenset(_edges())

RESULT_EDGES: Final = frozenset(
    {("finished", "agent"), ("failed", "agent"), ("released", "agent"), ("failed", "node-lifecycle")}
)
"""New phase and role of the transitions that give an attempt its result."""

NODE_EDGES: Final = frozenset(
    {
        ("joining", "ready"),
        ("joining", "lost"),
        ("ready", "suspect"),
        ("suspect", "ready"),
        ("suspect", "unknown"),
        ("unknown", "lost"),
        ("unknown", "joining"),
        ("lost", "joining"),
    }
)

SILENT_HEALTH: Final = ("unknown", "lost")
"""Health of nodes that send no heartbeats. A suspect node may be back before its health is updated, so it is not included."""

MASS_SILENCE: Final = 0.55
"""Fraction of silent nodes in a scope from which on nothing is evicted (S17)."""

KILL_GRACE_MS: Final = 5_000
DRIFT_MAX: Final = 0.01
CLOCK_RATIO_MAX: Final = 1 + DRIFT_MAX
"""Upper bound of the ratio between the rates of two clocks."""

EAGER_FENCE_MS: Final = 30_000

DEFAULT_RETRIES: Final = 3
"""Default number of retries of a job."""

SNAPSHOT_FRESH_MS: Final = 60_000
REPORT_FRESH_MS: Final = 15_000
"""Maximum age of the evidence of a decision: in general, and of an agent's report."""


def lost_after_ms(fenced: bool, fence_ms: int, pace: float = 1.0) -> int:
    """Return how long a node must be silent before its attempt may be replaced. `pace` scales for heartbeats longer than two
    seconds.
    """
    return int((fence_ms + KILL_GRACE_MS * pace) * (1 + DRIFT_MAX)) if fenced else int(EAGER_FENCE_MS * pace)
