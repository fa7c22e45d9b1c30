"""Lifecycle moves of replicas, spawn and forget, node health marks.

Everything the lifecycle table allows but placing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE, generation_key, generation_of
from remit.commitment.draft import Draft
from remit.commitment.rulings.placement import find
from remit.commitment.rulings.registry import LOOPS, Coordination, refuse, ruling
from remit.law.lifecycle import NODE_EDGES, OWNER, WAITS, Row, edge
from remit.law.timing import lost_after_ms
from remit.model.claims import Code, Forget, Mark, Move, Operation, Refused, Role, Spawn
from remit.model.kinds import NodeHealth, WorkloadSpec
from remit.model.metadata import Stamp
from remit.model.objects import key_of
from remit.model.records import Generation, Phase, Replica, ReplicaSpec, ReplicaStatus

REPLICAS_MAX = 4_000_000
PLACED = frozenset({"create", "reserve", "bind", "confirm", "forget", "distrust"})
"""Transitions with claims of their own."""


@ruling(Spawn, frozenset({Role.WORKLOADS}), Coordination.HARD, "no more replicas than desired and the surge")
def spawn(draft: Draft, operation: Operation, claim: Spawn) -> int | Refused:
    generation = (claim.tenant, claim.workload, claim.generation)
    owner = draft.thing(key_of("Workload", claim.workload, claim.tenant))
    shape = draft.thing(generation_key(generation))
    if owner is None or shape is None:
        return refuse(Code.NOT_FOUND, f"there is no workload {claim.tenant}/{claim.workload} at generation {claim.generation}")
    if owner[0].metadata.deleting:
        return refuse(Code.DELETING, f"workload {claim.workload} is being deleted")
    spec: WorkloadSpec = owner[0].spec
    limit = _most(spec)
    there = draft.members(claim.tenant, claim.workload)
    if there + claim.count > limit:
        return refuse(Code.LIMIT, f"{claim.workload} has {there} replicas of at most {limit}; {claim.count} more are too many")
    indexes = range(claim.first, claim.first + claim.count)
    for index in indexes:
        if draft.replica(key_of("Replica", f"{claim.workload}-{index}", claim.tenant)) is not None:
            return refuse(Code.EXISTS, f"there is a replica {claim.tenant}/{claim.workload}-{index} already")
    make_replicas(draft, shape[0], indexes)
    return claim.count


def make_replicas(draft: Draft, of: Generation, indexes: Iterable[int]) -> None:
    """Pending replicas of a generation, none of which is there yet."""
    tenant, workload, number = of.metadata.tenant, of.spec.workload, of.spec.generation
    runs: WorkloadSpec = of.spec.spec
    rank = draft.thing(key_of("PriorityClass", runs.priority_class)) if runs.priority_class else None
    terms = draft.asks_now().admission.terms(tenant, workload, of.spec.labels)
    priority = min(0 if rank is None else rank[0].spec.value, terms.priority_max)
    for index in indexes:
        name = f"{workload}-{index}"
        replica = Replica(
            metadata=Stamp(name=name, tenant=tenant, uid=draft.uid()),
            spec=ReplicaSpec(workload=workload, generation=number, index=index, priority=priority),
        )
        draft.put_replica(key_of("Replica", name, tenant), None, replica)


def _most(spec: WorkloadSpec) -> int:
    """How many replicas a workload may have that are not released. A job is not rolled over, and has no surge."""
    if spec.type == "daemon":
        return REPLICAS_MAX
    return max(spec.replicas, spec.completions) + (spec.rollout.max_surge if spec.type == "service" else 0)


MOVERS = frozenset({Role.SCHEDULER, Role.AGENT, *LOOPS})


@ruling(Move, MOVERS, Coordination.HARD, "each transition from where the last one ended, by its owner; one result per attempt")
def move(draft: Draft, operation: Operation, claim: Move) -> int | Refused:
    owner = OWNER.get(claim.transition)
    if owner is None or claim.transition in PLACED:
        return refuse(Code.INVALID, f"{claim.transition} is not a transition that a move may name")
    if owner is not operation.actor.role:
        return refuse(Code.ROLE, f"{claim.transition} is owned by {owner}, not by {operation.actor.role}")
    replica = find(draft, claim.replica, claim.at)
    if isinstance(replica, Refused):
        return replica
    row = edge(claim.transition, replica.status.phase, replica.status.before)
    if row is None or row.target is None:
        return refuse(Code.PHASE, f"{claim.replica} is {replica.status.phase}; {claim.transition} does not start there")
    if operation.evidence.age_ms > row.fresh_ms:
        return refuse(Code.STALE_EVIDENCE, f"the evidence is {operation.evidence.age_ms} ms old; {row.fresh_ms} at most")
    for guard in row.guards:
        if guard in GUARDED:
            refused: Refused | None = GUARDED[guard](draft, operation, claim, replica)
            if refused is not None:
                return refused
    draft.put_replica(claim.replica, replica, replace(replica, status=_after(replica.status, row, claim)))
    return 0


def _after(status: ReplicaStatus, row: Row, claim: Move) -> ReplicaStatus:
    """Where the move leaves the replica. What it held goes with the phases that hold."""
    match row.target:
        case Phase.PENDING:
            again = status.attempt + (row.name == "requeue")
            return ReplicaStatus(phase=Phase.PENDING, attempt=again, failures=status.failures, reason=claim.reason)
        case Phase.RELEASED:
            result = status.result or _carried(row, claim)
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
                result=status.result or _carried(row, claim),
                reason=claim.reason or status.reason,
            )


def _carried(row: Row, claim: Move) -> str:
    """An attempt has one result, and only a transition that ends it may bring that."""
    return claim.result if "result" in row.guards else ""


def _attempt(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    if claim.attempt != replica.status.attempt:
        return refuse(Code.ATTEMPT, f"{claim.replica} is in attempt {replica.status.attempt}, not {claim.attempt}")
    return None


def _own_node(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    if operation.actor.lease != agent_lease(replica.status.node):
        return refuse(Code.NOT_OWNER, f"{claim.replica} is on {replica.status.node}, not with {operation.actor.name}")
    return None


def _result(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    return None if claim.result else refuse(Code.INVALID, f"{claim.transition} must carry a result")


def _wait_over(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    limit = WAITS[replica.status.phase].limit_ms
    lasted = draft.waiting_ms(claim.replica)
    if lasted < limit:
        return refuse(Code.WAIT, f"{claim.replica} has been {replica.status.phase} for {lasted} ms of {limit}")
    return None


def _fence_passed(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    shape = draft.thing(generation_key(generation_of(replica)))
    if shape is None:
        return refuse(Code.NOT_FOUND, f"{claim.replica} has no generation")
    spec: WorkloadSpec = shape[0].spec.spec
    tempo = draft.moment.tempo
    limit = lost_after_ms(spec.fence, tempo) if spec.never_twice else tempo.eager_ms
    silent = draft.moment.silent_ms(agent_lease(replica.status.node))
    if silent < limit:
        return refuse(Code.FENCE, f"{replica.status.node} has been silent for {silent} ms of {limit}; its copy may still run")
    return None


def _attempts_left(draft: Draft, operation: Operation, claim: Move, replica: Replica) -> Refused | None:
    owner = draft.thing(key_of("Workload", replica.spec.workload, replica.metadata.tenant))
    if owner is None or owner[0].metadata.deleting:
        return refuse(Code.DELETING, f"workload {replica.spec.workload} is gone or going")
    spec: WorkloadSpec = owner[0].spec
    if spec.type == "job" and replica.status.failures > spec.retries:
        return refuse(Code.LIMIT, f"{claim.replica} has failed {replica.status.failures} times; {spec.retries} retries allowed")
    if spec.type == "job" and replica.status.result == "ok":
        return refuse(Code.PHASE, f"{claim.replica} has done its work")
    if draft.members(replica.metadata.tenant, replica.spec.workload) >= _most(spec):
        return refuse(Code.LIMIT, f"{replica.spec.workload} has {_most(spec)} replicas, as many as it may; this one is spare")
    return None


GUARDED: dict[str, Any] = {
    "attempt": _attempt,
    "own_node": _own_node,
    "result": _result,
    "wait_over": _wait_over,
    "fence_passed": _fence_passed,
    "attempts_left": _attempts_left,
}
"""Guards that are checked here, row by row; `claimant` and `as_seen` hold before, `was_there` is in the look-up itself."""


@ruling(Forget, frozenset({Role.WORKLOADS}), Coordination.HARD, "a record is dropped only while nobody else moves it on")
def forget(draft: Draft, operation: Operation, claim: Forget) -> int | Refused:
    replica = find(draft, claim.replica, claim.at)
    if isinstance(replica, Refused):
        return replica
    if edge("forget", replica.status.phase) is None:
        return refuse(Code.PHASE, f"{claim.replica} is {replica.status.phase}; only a released replica is forgotten")
    draft.drop(claim.replica)
    return 0


@ruling(Mark, frozenset({Role.NODES}), Coordination.HARD, "a node's health moves along its table, by one owner")
def mark(draft: Draft, operation: Operation, claim: Mark) -> int | Refused:
    found = draft.thing(key_of("Node", claim.node))
    if found is None:
        return refuse(Code.NOT_FOUND, f"there is no node {claim.node}")
    node, revision = found
    if revision != claim.at or revision < 0:
        return refuse(Code.REVISION, f"node {claim.node} was seen at revision {claim.at} and has changed since")
    if (node.status.health, claim.health) not in NODE_EDGES:
        return refuse(Code.PHASE, f"node {claim.node} is {node.status.health}; it does not become {claim.health} from there")
    draft.put(replace(node, status=replace(node.status, health=claim.health, reason=claim.reason)))
    if claim.health in (NodeHealth.READY, NodeHealth.LOST):
        draft.drop(key_of("Summary", AWAITED_NODE + claim.node))
    return 0


def agent_lease(node: str) -> str:
    """The lease that a node's agent renews; its silence is the node's."""
    return f"{Role.AGENT}/{node}"
