"""Lifecycle moves of replicas, spawn and forget, node health marks. Pure. Placement is in placement.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.generations import generation_key, generation_of
from remit.commitment.rulings.placement import find_replica
from remit.commitment.rulings.registry import CONTROLLER_ROLES, Coordination, refuse, ruling
from remit.law.lifecycle import NODE_HEALTH_TRANSITIONS, OWNERS, PHASE_TIMEOUTS, Transition, find_transition
from remit.law.timing import lost_after_ms
from remit.model.claims import Code, Forget, Mark, Move, Operation, Refused, Spawn
from remit.model.kinds import NodeHealth, WorkloadSpec
from remit.model.metadata import RecordMetadata
from remit.model.objects import key_of
from remit.model.records import Generation, Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.model.roles import Role

REPLICAS_MAX = 4_000_000
SEPARATE_CLAIMS = frozenset({"create", "reserve", "bind", "confirm", "forget", "distrust"})
"""Transitions that have claim types of their own."""


@ruling(Spawn, frozenset({Role.WORKLOADS}), Coordination.HARD, "no more replicas than desired plus the surge")
def spawn(draft: Draft, operation: Operation, claim: Spawn) -> int | Refused:
    generation = (claim.tenant, claim.workload, claim.generation)
    owner = draft.lookup(key_of("Workload", claim.workload, claim.tenant))
    generation_row = draft.lookup(generation_key(generation))
    if owner is None or generation_row is None:
        return refuse(
            Code.NOT_FOUND,
            f"workload {claim.tenant}/{claim.workload} has no generation {claim.generation}, or does not exist; read it again",
        )
    if owner[0].metadata.deleting:
        return refuse(Code.DELETING, f"workload {claim.tenant}/{claim.workload} is being deleted; no replicas are created")
    spec: WorkloadSpec = owner[0].spec
    limit = _replicas_max(spec)
    existing = draft.replicas.active_count(claim.tenant, claim.workload)
    if existing + claim.count > limit:
        return refuse(
            Code.LIMIT,
            f"workload {claim.tenant}/{claim.workload} has {existing} of at most {limit} replicas; {claim.count} more exceed "
            "the limit",
        )
    indexes = range(claim.first, claim.first + claim.count)
    for index in indexes:
        if draft.replicas.get(key_of("Replica", f"{claim.workload}-{index}", claim.tenant)) is not None:
            return refuse(Code.EXISTS, f"replica {claim.tenant}/{claim.workload}-{index} exists already; choose a free index")
    create_replicas(draft, generation_row[0], indexes)
    return claim.count


def create_replicas(draft: Draft, generation: Generation, indexes: Iterable[int]) -> None:
    """Create pending replicas of a generation. None of these indexes exists yet."""
    tenant, workload, number = generation.metadata.tenant, generation.spec.workload, generation.spec.generation
    spec: WorkloadSpec = generation.spec.spec
    priority_class = draft.lookup(key_of("PriorityClass", spec.priority_class)) if spec.priority_class else None
    terms = draft.requirements.interner().admission.terms(tenant, workload, generation.spec.labels)
    priority = min(0 if priority_class is None else priority_class[0].spec.value, terms.priority_max)
    for index in indexes:
        name = f"{workload}-{index}"
        replica = Replica(
            metadata=RecordMetadata(name=name, tenant=tenant, uid=draft.new_uid()),
            spec=ReplicaSpec(workload=workload, generation=number, index=index, priority=priority),
        )
        draft.replicas.put(key_of("Replica", name, tenant), None, replica)


def _replicas_max(spec: WorkloadSpec) -> int:
    """Return how many unreleased replicas a workload may have. Jobs are not rolled out, so they have no surge."""
    if spec.type == "daemon":
        return REPLICAS_MAX
    return max(spec.replicas, spec.completions) + (spec.rollout.max_surge if spec.type == "service" else 0)


MOVING_ROLES = frozenset({Role.SCHEDULER, Role.AGENT, *CONTROLLER_ROLES})


@ruling(
    Move,
    MOVING_ROLES,
    Coordination.HARD,
    "a transition starts where the last one ended, and is made by its owner; one result per attempt",
)
def move(draft: Draft, operation: Operation, claim: Move) -> int | Refused:
    owner = OWNERS.get(claim.transition)
    if owner is None or claim.transition in SEPARATE_CLAIMS:
        return refuse(Code.INVALID, f"transition: {claim.transition!r} cannot be made by a move; see docs/lifecycle.md")
    if owner is not operation.actor.role:
        return refuse(
            Code.ROLE, f"transition {claim.transition} is owned by role {owner}; {operation.actor.role} may not make it"
        )
    replica = find_replica(draft, claim.replica, claim.at)
    if isinstance(replica, Refused):
        return replica
    row = find_transition(claim.transition, replica.status.phase, replica.status.before)
    if row is None or row.target is None:
        return refuse(
            Code.PHASE, f"{claim.replica} is {replica.status.phase}; {claim.transition} does not start from that phase"
        )
    if operation.evidence.age_ms > row.evidence_age_ms_max:
        return refuse(
            Code.STALE_EVIDENCE,
            f"the evidence is {operation.evidence.age_ms} ms old, {claim.transition} allows {row.evidence_age_ms_max} ms; "
            "observe again",
        )
    for guard in row.guards:
        if guard in GUARD_CHECKS:
            refused: Refused | None = GUARD_CHECKS[guard](draft, operation, claim, replica)
            if refused is not None:
                return refused
    draft.replicas.put(claim.replica, replica, replace(replica, status=_status_after(replica.status, row, claim)))
    return 0


def _status_after(status: ReplicaStatus, row: Transition, claim: Move) -> ReplicaStatus:
    """Return the status after the move. Node, devices and grants are cleared in phases that hold no capacity."""
    match row.target:
        case Phase.PENDING:
            attempt = status.attempt + (row.name == "requeue")
            return ReplicaStatus(phase=Phase.PENDING, attempt=attempt, failures=status.failures, reason=claim.reason)
        case Phase.RELEASED:
            result = status.result or _carried_result(row, claim)
            return ReplicaStatus(
                phase=Phase.RELEASED,
                attempt=status.attempt,
                failures=status.failures,
                node=status.node,
                result=result,
                reason=claim.reason or status.reason,
            )
        case Phase.UNKNOWN:
            return replace(status, phase=Phase.UNKNOWN, before=status.phase.value, reason=claim.reason)
        case target:
            return replace(
                status,
                phase=target,
                before="",
                failures=status.failures + (row.name == "crash"),
                ports=dict(claim.ports) if row.name == "run" else status.ports,
                result=status.result or _carried_result(row, claim),
                reason=claim.reason or status.reason,
            )


def _carried_result(row: Transition, claim: Move) -> str:
    """Return the result that the move carries. An attempt has one result, and only a transition that ends it may set it."""
    return claim.result if "result" in row.guards else ""


def _check_attempt(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    if claim.attempt != replica.status.attempt:
        return refuse(
            Code.ATTEMPT,
            f"{claim.replica} is in attempt {replica.status.attempt}, the move names attempt {claim.attempt}; read it again",
        )
    return None


def _check_own_node(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    if operation.actor.lease != agent_lease(replica.status.node):
        return refuse(
            Code.NOT_OWNER,
            f"{claim.replica} is on node {replica.status.node}; only that node's agent may move it, not {operation.actor.name}",
        )
    return None


def _check_result(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    return None if claim.result else refuse(Code.INVALID, f"result: {claim.transition} must carry a result")


def _check_wait_over(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    limit_ms = PHASE_TIMEOUTS[replica.status.phase].limit_ms
    age_ms = draft.replicas.phase_age_ms(claim.replica, draft.time)
    if age_ms < limit_ms:
        return refuse(
            Code.WAIT,
            f"{claim.replica} has been {replica.status.phase} for {age_ms} ms; {claim.transition} is allowed after {limit_ms} "
            "ms",
        )
    return None


def _check_fence_passed(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    generation_row = draft.lookup(generation_key(generation_of(replica)))
    if generation_row is None:
        return refuse(Code.NOT_FOUND, f"{claim.replica} has no stored generation, so its fence is unknown")
    spec: WorkloadSpec = generation_row[0].spec.spec
    timing = draft.time.timing
    limit_ms = lost_after_ms(spec.fence, timing) if spec.is_fenced else timing.eager_ms
    silent_ms = draft.time.silent_ms(agent_lease(replica.status.node))
    if silent_ms < limit_ms:
        return refuse(
            Code.FENCE,
            f"node {replica.status.node} has been silent for {silent_ms} ms, the fence passes at {limit_ms} ms; the replica "
            "may still be running there",
        )
    return None


def _check_attempts_left(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    owner = draft.lookup(key_of("Workload", replica.spec.workload, replica.metadata.tenant))
    if owner is None or owner[0].metadata.deleting:
        return refuse(
            Code.DELETING, f"workload {replica.spec.workload} is being deleted or is gone; its replicas get no new attempt"
        )
    spec: WorkloadSpec = owner[0].spec
    if spec.type == "job" and replica.status.failures > spec.retries:
        return refuse(
            Code.LIMIT,
            f"{claim.replica} has failed {replica.status.failures} times; the workload allows {spec.retries} retries",
        )
    if spec.type == "job" and replica.status.result == "ok":
        return refuse(Code.PHASE, f"{claim.replica} completed its work; a job's completed replica gets no new attempt")
    if draft.replicas.active_count(replica.metadata.tenant, replica.spec.workload) >= _replicas_max(spec):
        return refuse(
            Code.LIMIT,
            f"workload {replica.spec.workload} already has all {_replicas_max(spec)} replicas that it may have; "
            f"{claim.replica} is surplus",
        )
    return None


GUARD_CHECKS: dict[str, Any] = {
    "attempt": _check_attempt,
    "own_node": _check_own_node,
    "result": _check_result,
    "wait_over": _check_wait_over,
    "fence_passed": _check_fence_passed,
    "attempts_left": _check_attempts_left,
}
"""Guard checks by name. The other guards hold already: `claimant` and `as_seen` were checked before, `was_there` by the table
lookup.
"""


@ruling(
    Forget, frozenset({Role.WORKLOADS}), Coordination.HARD, "a record is deleted only while no other transition is possible"
)
def forget(draft: Draft, operation: Operation, claim: Forget) -> int | Refused:
    replica = find_replica(draft, claim.replica, claim.at)
    if isinstance(replica, Refused):
        return replica
    if find_transition("forget", replica.status.phase) is None:
        return refuse(Code.PHASE, f"{claim.replica} is {replica.status.phase}; only a released replica can be forgotten")
    draft.delete(claim.replica)
    return 0


@ruling(Mark, frozenset({Role.NODES}), Coordination.HARD, "a node's health changes along its table, by one owner")
def mark(draft: Draft, operation: Operation, claim: Mark) -> int | Refused:
    entry = draft.lookup(key_of("Node", claim.node))
    if entry is None:
        return refuse(Code.NOT_FOUND, f"node {claim.node} does not exist")
    node, revision = entry
    if revision != claim.at or revision < 0:
        return refuse(
            Code.REVISION, f"node {claim.node} was observed at revision {claim.at} and has changed since; read it again"
        )
    if (node.status.health, claim.health) not in NODE_HEALTH_TRANSITIONS:
        return refuse(Code.PHASE, f"node {claim.node} is {node.status.health}; it cannot become {claim.health} from there")
    draft.put(replace(node, status=replace(node.status, health=claim.health, reason=claim.reason)))
    if claim.health in (NodeHealth.READY, NodeHealth.LOST):
        draft.delete(key_of("Summary", AWAITED_NODE + claim.node))
    return 0


def agent_lease(node: str) -> str:
    """Return the lease that a node's agent renews. The lease's silence is the node's silence."""
    return f"{Role.AGENT}/{node}"
