"""`top`: usage of nodes and replicas from heartbeats.

Combines the usage in the latest heartbeat of each node with capacity and requests from the scope's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from remit.client.endpoint import Endpoint
from remit.model.kinds import Node
from remit.model.records import Generation, Replica
from remit.model.wire.agent_messages import HeartbeatReport, NodeState, RunState
from remit.model.wire.api_types import ListMeta, ListOf, NodeTop, ReplicaTop, ResourceUsage
from remit.observation.scheduler_view import SchedulerView
from remit.serve.diagnostics.view_snapshots import CachedRows, ViewSnapshot, ViewSnapshots

VIEW_AGE_MS_MAX: Final = 3_000
"""How old the sums may be, so that repeated calls do not rebuild the view each time."""

_MEASURED: Final = ("cpu", "memory")


async def node_usage(snapshots: ViewSnapshots, endpoint: Endpoint) -> ListOf[NodeTop]:
    states, heartbeats = await endpoint.node_states(()), await endpoint.heartbeat_ages()
    return await snapshots.query(
        lambda snapshot: _node_list(snapshot, {state.node: state for state in states}, heartbeats), age_ms=VIEW_AGE_MS_MAX
    )


def _node_list(snapshot: ViewSnapshot, states: Mapping[str, NodeState], heartbeats: HeartbeatReport) -> ListOf[NodeTop]:
    view = snapshot.view
    running = _replicas_per_node(view)
    nodes = [node for node in view.columns.nodes if node is not None]
    items = [_node_item(view, node, states.get(node.metadata.name), heartbeats, running) for node in nodes]
    items.sort(key=lambda item: item.node)
    return ListOf(kind="NodeTopList", metadata=ListMeta(revision=snapshot.rows.revision), items=items)


def _node_item(
    view: SchedulerView, node: Node, state: NodeState | None, heartbeats: HeartbeatReport, running: Mapping[int, int]
) -> NodeTop:
    name, row = node.metadata.name, view.columns.rows[node.metadata.name]
    heartbeat_age = heartbeats.nodes.get(name)
    capacity = dict(node.spec.capacity.pairs)
    free = {resource: int(free_by_row[row]) for resource, free_by_row in view.columns.free.items() if resource in _MEASURED}
    requested = {
        resource: max(0, capacity.get(resource, 0) - free.get(resource, capacity.get(resource, 0))) for resource in _MEASURED
    }
    return NodeTop(
        node=name,
        region=node.spec.region,
        zone=node.spec.zone,
        health=node.status.health.value,
        cpu_milli=0 if state is None else state.cpu_milli,
        memory_bytes=0 if state is None else state.memory_bytes,
        capacity=_resource_amounts(capacity),
        requests=_resource_amounts(requested),
        replicas=running.get(row, 0),
        restarts=0 if state is None else sum(run.restarts for run in state.runs),
        age_ms=None if state is None or heartbeat_age is None else heartbeat_age.silent_ms,
    )


def _resource_amounts(amount: Mapping[str, int]) -> ResourceUsage:
    """CPU is in thousandths of a core, memory in bytes."""
    return ResourceUsage(cpu_milli=amount.get("cpu", 0), memory_bytes=amount.get("memory", 0))


def _replicas_per_node(view: SchedulerView) -> dict[int, int]:
    """Return how many replicas hold capacity on each node, by row."""
    rows = view.replicas.column("node")
    nodes, counts = np.unique(rows[rows >= 0], return_counts=True)
    return dict(zip(nodes.tolist(), counts.tolist(), strict=True))


async def replica_usage(snapshots: ViewSnapshots, endpoint: Endpoint, tenant: str = "") -> ListOf[ReplicaTop]:
    """Return the usage of replicas that a node reports as running."""
    states, heartbeats = await endpoint.node_states(()), await endpoint.heartbeat_ages()
    rows = snapshots.cached_rows()
    return await snapshots.offload(lambda: _replica_list(rows, states, heartbeats, tenant))


def _replica_list(
    rows: CachedRows, states: Iterable[NodeState], heartbeats: HeartbeatReport, tenant: str
) -> ListOf[ReplicaTop]:
    prefix = f"replica/{tenant}/" if tenant else "replica/"
    runs = [(state.node, run) for state in states for run in state.runs if run.replica.startswith(prefix)]
    items = [item for node, run in runs if (item := _replica_item(rows, node, run, heartbeats)) is not None]
    items.sort(key=lambda item: (item.tenant, item.replica))
    return ListOf(kind="ReplicaTopList", metadata=ListMeta(revision=rows.revision), items=items)


def _replica_item(rows: CachedRows, node: str, run: RunState, heartbeats: HeartbeatReport) -> ReplicaTop | None:
    """Return the item of a run; None if it is not the current attempt of a replica: the last report of a silent node may be
    outdated.
    """
    replica: Replica | None = rows.get(run.replica)
    if replica is None or (replica.metadata.uid, replica.status.attempt, replica.status.node) != (run.uid, run.attempt, node):
        return None
    meta, spec = replica.metadata, replica.spec
    generation: Generation | None = rows.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
    heartbeat_age = heartbeats.nodes.get(node)
    return ReplicaTop(
        tenant=meta.tenant,
        replica=meta.name,
        workload=spec.workload,
        node=node,
        phase=replica.status.phase.value,
        pid=run.pid,
        cpu_milli=run.cpu_milli,
        memory_bytes=run.memory_bytes,
        requests=ResourceUsage()
        if generation is None
        else _resource_amounts(dict(generation.spec.spec.template.resources.pairs)),
        restarts=run.restarts,
        said=run.said,
        age_ms=None if heartbeat_age is None else heartbeat_age.silent_ms,
    )
