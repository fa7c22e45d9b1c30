"""Lifecycle table of replicas: phases, transitions, owners, guards, timeouts.

The table is the only definition of the lifecycle. A replica is one instance of a workload, which is bound to a node and run:

    pending -> reserved -> bound -> starting -> running -> ready -> serving -> draining -> stopping -> released

A job ends in `finished`, directly from `starting` if it ended before the agent could report that it runs. From any phase in
which a node may run it, a replica can become `unknown`. This is a phase with a timeout and an owner like any other: the
replica returns to its previous phase, or becomes `failed` once the fence has passed. From `failed` and `finished` it is
released. A released replica may be queued again as a new attempt.

Three properties of the table are the basis of the safety argument:

1. *One owner per transition.* A transition is a name with one role. Several roles may drain a replica, each for its own reason
   and under its own name, so that the record shows which role did it and why. Only the first replicas of a workload may also
   be created together with it; then the `apply` is their record.
2. *From `reserved` until `released` a replica holds its capacity.* Not ready, draining, stopping, unknown, failed: in all of
   these it holds capacity, devices and quota. Only `release`, `settle` and `stopped` free what was bound, and each of them
   requires that no process is left: the agent saw it end, or the fence has passed. A reservation is freed by `cancel`,
   `unreserve` and `reclaim`, because nothing has been started on it yet.
3. *No start from a stale assignment.* An agent starts a process only after its own `start` is committed for that attempt, and
   `start` is possible only from `bound`.

A transition that is not in the table is refused, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from remit.model.kinds import NodeHealth
from remit.model.records import Phase
from remit.model.roles import Role

P = Phase


PHASE_MEANINGS: Final[dict[Phase, str]] = {
    P.PENDING: "created or queued again; it has no node yet",
    P.RESERVED: "capacity of a node is reserved; preempted replicas have not been released yet",
    P.BOUND: "assigned to a node; its agent has not begun to start it",
    P.STARTING: "the agent prepares and starts the process",
    P.RUNNING: "the process runs, or is restarted within the attempt",
    P.READY: "the process runs and is ready; not in the endpoints",
    P.SERVING: "ready and in the endpoints",
    P.DRAINING: "it is to be stopped; its agent has not begun yet",
    P.STOPPING: "the agent stops the process",
    P.FINISHED: "ended successfully; its capacity is not free yet",
    P.UNKNOWN: "its node does not report, so the process may still run",
    P.FAILED: "ended with a failure or was declared lost; its capacity is not free yet",
    P.RELEASED: "ended; its capacity is free",
}
"""The meaning of each phase, for people."""


class PhaseTimeout(NamedTuple):
    """How long a phase may last before `role` ends it by `transition`. With 0 ms the workload sets the limit."""

    limit_ms: int
    role: Role
    transition: str


class Transition(NamedTuple):
    """One transition from one phase. The authority checks the `guards` in the same transaction; `evidence_age_ms_max` bounds
    the age of the claim's evidence.
    """

    name: str
    source: Phase | None
    target: Phase | None
    role: Role
    guards: tuple[str, ...]
    evidence_age_ms_max: int

    @property
    def timeout(self) -> PhaseTimeout | None:
        return PHASE_TIMEOUTS.get(self.target) if self.target else None


GUARDS: Final[dict[str, str]] = {
    "claimant": "the claimant holds its role's lease, at the current epoch",
    "as_seen": "the replica is still at the revision that the claim names",
    "attempt": "the claim names the current attempt",
    "own_node": "the claimant is the agent of the node that the replica is bound to",
    "fits": "the replica fits the node by law/fit.py, against the books and the earlier claims of the batch",
    "devices": "the named devices are on the node, of the requested kind, and free",
    "grant": "the grant and all its parents are in force and cover the charge",
    "quota": "the tenant's quota, or its grant from it, covers the charge",
    "policy": "the policy in force allows the place",
    "victims_leave": "every victim has a lower priority, is on that node, and moves to draining in the same transaction",
    "victims_gone": "every victim of the reservation has been released",
    "wait_over": "the phase has lasted longer than its timeout",
    "fence_passed": "the node has been silent for longer than the workload's fence and kill grace, corrected for clock drift",
    "result": "the claim carries the result of the attempt",
    "was_there": "the target is the phase that `unknown` interrupted",
    "attempts_left": "the workload still exists and allows another attempt",
    "restored": "the scope was restored from a backup, so the state of running replicas is unknown",
}

_RUNNING_PHASES = (P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING)
_NODE_PHASES = (*_RUNNING_PHASES, P.DRAINING, P.STOPPING)
_PLACEMENT_GUARDS = ("claimant", "as_seen", "fits", "devices", "grant", "quota", "policy")
_AGENT_GUARDS = ("claimant", "as_seen", "attempt", "own_node")
_CONTROLLER_GUARDS = ("claimant", "as_seen")

SNAPSHOT_AGE_MS_MAX: Final = 60_000
REPORT_AGE_MS_MAX: Final = 15_000


def _transitions() -> Iterable[Transition]:
    def edge(
        name: str, sources: Iterable[Phase | None], target: Phase | None, role: Role, guards: tuple[str, ...]
    ) -> Iterable[Transition]:
        fresh = REPORT_AGE_MS_MAX if role is Role.AGENT else SNAPSHOT_AGE_MS_MAX
        return [Transition(name, source, target, role, guards, fresh) for source in sources]

    yield from edge("create", [None], P.PENDING, Role.WORKLOADS, ("claimant",))
    yield from edge("reserve", [P.PENDING], P.RESERVED, Role.SCHEDULER, (*_PLACEMENT_GUARDS, "victims_leave"))
    yield from edge("bind", [P.PENDING], P.BOUND, Role.SCHEDULER, _PLACEMENT_GUARDS)
    yield from edge("confirm", [P.RESERVED], P.BOUND, Role.SCHEDULER, (*_PLACEMENT_GUARDS, "victims_gone"))
    yield from edge("unreserve", [P.RESERVED], P.PENDING, Role.SCHEDULER, _CONTROLLER_GUARDS)
    yield from edge("reclaim", [P.RESERVED], P.PENDING, Role.REPAIR, (*_CONTROLLER_GUARDS, "wait_over"))
    yield from edge("cancel", [P.PENDING, P.RESERVED], P.RELEASED, Role.WORKLOADS, _CONTROLLER_GUARDS)
    yield from edge("start", [P.BOUND], P.STARTING, Role.AGENT, _AGENT_GUARDS)
    yield from edge("run", [P.STARTING], P.RUNNING, Role.AGENT, _AGENT_GUARDS)
    yield from edge("ready", [P.RUNNING], P.READY, Role.AGENT, _AGENT_GUARDS)
    yield from edge("unready", [P.READY, P.SERVING], P.RUNNING, Role.AGENT, _AGENT_GUARDS)
    yield from edge("serve", [P.READY], P.SERVING, Role.ENDPOINTS, _CONTROLLER_GUARDS)
    yield from edge("unserve", [P.SERVING], P.READY, Role.ENDPOINTS, _CONTROLLER_GUARDS)
    yield from edge("finish", [P.STARTING, P.RUNNING, P.READY], P.FINISHED, Role.AGENT, (*_AGENT_GUARDS, "result"))
    yield from edge("crash", [P.STARTING, P.RUNNING, P.READY, P.SERVING], P.FAILED, Role.AGENT, (*_AGENT_GUARDS, "result"))
    yield from edge("preempt", _RUNNING_PHASES, P.DRAINING, Role.SCHEDULER, _CONTROLLER_GUARDS)
    yield from edge("evict", _RUNNING_PHASES, P.DRAINING, Role.NODES, _CONTROLLER_GUARDS)
    yield from edge("retire", _RUNNING_PHASES, P.DRAINING, Role.ROLLOUT, _CONTROLLER_GUARDS)
    yield from edge("remove", _RUNNING_PHASES, P.DRAINING, Role.WORKLOADS, _CONTROLLER_GUARDS)
    yield from edge("abort", [P.BOUND, P.STARTING], P.DRAINING, Role.REPAIR, (*_CONTROLLER_GUARDS, "wait_over"))
    yield from edge("stop", [P.DRAINING], P.STOPPING, Role.AGENT, _AGENT_GUARDS)
    yield from edge("stopped", [P.STOPPING], P.RELEASED, Role.AGENT, (*_AGENT_GUARDS, "result"))
    yield from edge("doubt", _NODE_PHASES, P.UNKNOWN, Role.NODES, _CONTROLLER_GUARDS)
    yield from edge("distrust", _NODE_PHASES, P.UNKNOWN, Role.AUTHORITY, ("restored",))
    for phase in _NODE_PHASES:
        yield from edge("resume", [P.UNKNOWN], phase, Role.AGENT, (*_AGENT_GUARDS, "was_there"))
    yield from edge("lose", [P.UNKNOWN], P.FAILED, Role.NODES, (*_CONTROLLER_GUARDS, "fence_passed", "result"))
    yield from edge("release", [P.FAILED], P.RELEASED, Role.REPAIR, _CONTROLLER_GUARDS)
    yield from edge("settle", [P.FINISHED], P.RELEASED, Role.WORKLOADS, _CONTROLLER_GUARDS)
    yield from edge("requeue", [P.RELEASED], P.PENDING, Role.REPAIR, (*_CONTROLLER_GUARDS, "attempts_left"))
    yield from edge("forget", [P.RELEASED], None, Role.WORKLOADS, _CONTROLLER_GUARDS)


TRANSITIONS: Final[tuple[Transition, ...]] = tuple(_transitions())

PHASE_TIMEOUTS: Final[dict[Phase, PhaseTimeout]] = {
    P.RESERVED: PhaseTimeout(60_000, Role.REPAIR, "reclaim"),
    P.BOUND: PhaseTimeout(60_000, Role.REPAIR, "abort"),
    P.STARTING: PhaseTimeout(600_000, Role.REPAIR, "abort"),
    P.DRAINING: PhaseTimeout(60_000, Role.NODES, "doubt"),
    P.STOPPING: PhaseTimeout(60_000, Role.NODES, "doubt"),
    P.UNKNOWN: PhaseTimeout(0, Role.NODES, "lose"),
    P.FAILED: PhaseTimeout(30_000, Role.REPAIR, "release"),
    P.FINISHED: PhaseTimeout(30_000, Role.WORKLOADS, "settle"),
}
"""Phases that another role must end after a timeout. The other phases last as long as the work does; a `pending` replica has a
recorded reason and the events that can end its wait.
"""

OWNERS: Final[dict[str, Role]] = {row.name: row.role for row in TRANSITIONS}
"""The owning role of each transition."""

_TRANSITIONS_BY_SOURCE: Final[dict[tuple[str, Phase | None], tuple[Transition, ...]]] = {
    (name, source): tuple(row for row in TRANSITIONS if (row.name, row.source) == (name, source))
    for name, source in dict.fromkeys((row.name, row.source) for row in TRANSITIONS)
}

HOLDING_PHASES: Final[frozenset[Phase]] = frozenset(Phase) - {P.PENDING, P.RELEASED}
"""Phases that hold capacity, devices and quota."""

ON_NODE_PHASES: Final[frozenset[Phase]] = frozenset((*_NODE_PHASES, P.UNKNOWN))
"""Phases in which a node may be running the replica."""

BINDING_TRANSITIONS: Final[dict[Phase, str]] = {P.PENDING: "bind", P.RESERVED: "confirm"}
"""The transition that binds a replica, by its present phase."""


def find_transition(name: str, source: Phase | None, before: str = "") -> Transition | None:
    """Returns the transition `name` from `source`, or None. `resume` returns to `before`, the phase that was interrupted."""
    rows = _TRANSITIONS_BY_SOURCE.get((name, source), ())
    if len(rows) <= 1:
        return rows[0] if rows else None
    return next((row for row in rows if row.target == before), None)


NODE_HEALTH_TRANSITIONS: Final[frozenset[tuple[NodeHealth, NodeHealth]]] = frozenset(
    {
        (NodeHealth.JOINING, NodeHealth.READY),
        (NodeHealth.JOINING, NodeHealth.LOST),
        (NodeHealth.READY, NodeHealth.SUSPECT),
        (NodeHealth.SUSPECT, NodeHealth.READY),
        (NodeHealth.SUSPECT, NodeHealth.UNKNOWN),
        (NodeHealth.UNKNOWN, NodeHealth.LOST),
        (NodeHealth.UNKNOWN, NodeHealth.JOINING),
        (NodeHealth.LOST, NodeHealth.JOINING),
    }
)
"""Transitions of a node's health, all made by node-lifecycle. A node that was unknown or lost joins again before it takes work.
"""
