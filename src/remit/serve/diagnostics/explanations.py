"""Explain and capacity on a frozen view, with start-up progress reported by nodes.

The explanations are computed in proposal/explain. A replica that is `starting` may still be fetching artifacts: its node
reports this with every heartbeat, and it is added here, so that a slow download is not mistaken for a slow scheduler.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from remit.client.endpoint import Endpoint
from remit.model.kinds import NodePool, Workload
from remit.model.problems import quoted, suggest_names
from remit.model.records import Phase, Replica
from remit.model.wire.agent_messages import RunState
from remit.proposal.explain.capacity import COUNT_MAX, CapacityAnswer, compute_capacity
from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation
from remit.proposal.explain.subjects import NodeNotFound
from remit.serve.diagnostics.history import StoredHistory, read_batches, read_rows, replica_explanation, workload_explanation
from remit.serve.diagnostics.view_snapshots import ViewSnapshot, ViewSnapshots
from remit.serve.http.replies import ApiProblem

_INVALID_WORKLOAD_CURE = "correct the field it names, or declare the object it refers to first"


async def explain_workload(snapshots: ViewSnapshots, tenant: str, name: str, node: str = "") -> WorkloadExplanation:
    history = await _stored_history(snapshots, tenant)

    def explain(snapshot: ViewSnapshot) -> WorkloadExplanation:
        declared: Workload | None = snapshot.rows.get(f"workload/{tenant}/{name}")
        if declared is None and not _has_replicas(snapshot, tenant, name):
            raise subject_not_found(snapshot, "workload", tenant, name)
        try:
            return workload_explanation(snapshot.view, declared, tenant, name, history, snapshot.rules, node)
        except NodeNotFound:
            raise node_not_found(snapshot, node) from None

    return await snapshots.query(explain)


async def explain_replica(snapshots: ViewSnapshots, tenant: str, name: str, node: str = "") -> ReplicaExplanation:
    history = await _stored_history(snapshots, tenant)

    def explain(snapshot: ViewSnapshot) -> ReplicaExplanation:
        row = snapshot.rows.rows.get(f"replica/{tenant}/{name}")
        if row is None:
            raise subject_not_found(snapshot, "replica", tenant, name)
        replica: Replica = row.obj
        try:
            return replica_explanation(snapshot.view, replica, row.revision, history, snapshot.rules, node)
        except NodeNotFound:
            raise node_not_found(snapshot, node) from None

    return await snapshots.query(explain)


async def capacity_for(snapshots: ViewSnapshots, workload: Workload, count: int | None = None) -> CapacityAnswer:
    """Compute how many replicas of `workload` fit. Raises `ApiProblem`, also if such a workload could not be declared here."""

    def compute(snapshot: ViewSnapshot) -> CapacityAnswer:
        pools = [obj for row in snapshot.rows.kind("nodepool/") if isinstance(obj := row.obj, NodePool)]
        try:
            return compute_capacity(
                snapshot.view, workload, snapshot.rules, most=min(count or COUNT_MAX, COUNT_MAX), pools=pools
            )
        except ValueError as error:
            field, _, message = str(error).partition(": ")
            raise ApiProblem(422, "invalid", str(error), field=field if message else "", cure=_INVALID_WORKLOAD_CURE) from error

    return await snapshots.query(compute)


def subject_not_found(snapshot: ViewSnapshot, kind: str, tenant: str, name: str) -> ApiProblem:
    prefix = f"{kind}/{tenant}/"
    names = [row.key.removeprefix(prefix) for row in snapshot.rows.kind(prefix)]
    detail = f"there is no {kind} {quoted(name)} in tenant {quoted(tenant)}"
    return ApiProblem(404, "not_found", detail, field="name", cure=suggest_names(name, names, f"{kind}s"))


def node_not_found(snapshot: ViewSnapshot, node: str) -> ApiProblem:
    cure = suggest_names(node, sorted(snapshot.view.columns.rows), "nodes")
    return ApiProblem(404, "not_found", f"there is no node {quoted(node)}", field="node", cure=cure)


def _has_replicas(snapshot: ViewSnapshot, tenant: str, name: str) -> bool:
    """Return whether replicas of a workload remain. A deleted workload keeps its replicas for a while."""
    workloads = snapshot.view.shapes.workloads
    owner = workloads.ids.get(f"{tenant}/{name}")
    return owner is not None and bool(workloads.at.users[owner])


async def _stored_history(snapshots: ViewSnapshots, tenant: str) -> StoredHistory:
    await snapshots.wait_until_current()
    revision, sequence = await snapshots.store.revision(), snapshots.sequence
    decisions = await read_rows(snapshots.store, f"decision/{tenant}/", revision)
    return StoredHistory(decisions, await read_batches(snapshots.store, sequence, revision))


_STARTING_PHASES: Final = (Phase.STARTING, Phase.RUNNING)


async def add_startup_progress(explanation: ReplicaExplanation, endpoint: Endpoint) -> ReplicaExplanation:
    if not explanation.node or explanation.phase not in _STARTING_PHASES:
        return explanation
    key = f"replica/{explanation.tenant}/{explanation.name}"
    runs = [run for state in await endpoint.node_states((explanation.node,)) for run in state.runs]
    progress = next((run.said for run in runs if (run.replica, run.attempt) == (key, explanation.attempt)), "")
    return replace(explanation, said=progress) if progress else explanation


async def add_workload_startup_progress(explanation: WorkloadExplanation, endpoint: Endpoint) -> WorkloadExplanation:
    """If the workload waits for starting replicas: what one of them waits for, and how many do."""
    if explanation.limit != Phase.STARTING or explanation.detail:
        return explanation
    prefix = f"replica/{explanation.tenant}/{explanation.name}-"
    runs = [run for state in await endpoint.node_states(()) for run in state.runs if _is_starting_replica(run, prefix)]
    if not runs:
        return explanation
    first = min(runs, key=lambda run: run.replica)
    more = f" (and {len(runs) - 1} more)" if len(runs) > 1 else ""
    return replace(explanation, detail=f"{first.replica.rpartition('/')[2]} is {first.said}{more}")


def _is_starting_replica(run: RunState, prefix: str) -> bool:
    return bool(run.said) and not run.pid and run.replica.startswith(prefix) and run.replica[len(prefix) :].isdigit()
