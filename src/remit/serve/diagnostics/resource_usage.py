"""`top`: usage of nodes and replicas from heartbeats.

What nodes last said of themselves, beside what they have and what is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from remit.client.endpoint import Endpoint
from remit.model.kinds import Node
from remit.model.records import Generation, Replica
from remit.model.wire.agent_messages import Heard, NodeState, RunState
from remit.model.wire.api_types import ListMeta, ListOf, NodeTop, ReplicaTop, Taken
from remit.observation.scheduler_view import View
from remit.serve.diagnostics.view_snapshots import Look, Looking, Seen

AGE_MS: Final = 3_000
"""How old the sums may be: who looks again and again must not have them made anew each time."""

_MEASURED: Final = ("cpu", "memory")


async def top_nodes(looking: Looking, endpoint: Endpoint) -> ListOf[NodeTop]:
    states, heard = await endpoint.states(()), await endpoint.heard()
    return await looking.ask(lambda look: _nodes(look, {one.node: one for one in states}, heard), age_ms=AGE_MS)


def _nodes(look: Look, states: Mapping[str, NodeState], heard: Heard) -> ListOf[NodeTop]:
    view = look.view
    running = _held(view)
    nodes = [node for node in view.columns.nodes if node is not None]
    found = [_node(view, node, states.get(node.metadata.name), heard, running) for node in nodes]
    found.sort(key=lambda one: one.node)
    return ListOf(kind="NodeTopList", metadata=ListMeta(revision=look.seen.revision), items=found)


def _node(view: View, node: Node, state: NodeState | None, heard: Heard, running: Mapping[int, int]) -> NodeTop:
    name, row = node.metadata.name, view.columns.rows[node.metadata.name]
    silent = heard.nodes.get(name)
    capacity = dict(node.spec.capacity.pairs)
    free = {what: int(left[row]) for what, left in view.columns.free.items() if what in _MEASURED}
    asked = {what: max(0, capacity.get(what, 0) - free.get(what, capacity.get(what, 0))) for what in _MEASURED}
    return NodeTop(
        node=name,
        region=node.spec.region,
        zone=node.spec.zone,
        health=node.status.health.value,
        cpu_milli=0 if state is None else state.cpu_milli,
        memory_bytes=0 if state is None else state.memory_bytes,
        capacity=_taken(capacity),
        requests=_taken(asked),
        replicas=running.get(row, 0),
        restarts=0 if state is None else sum(run.restarts for run in state.runs),
        age_ms=None if state is None or silent is None else silent.silent_ms,
    )


def _taken(amount: Mapping[str, int]) -> Taken:
    """Cores are kept in thousandths, memory in bytes."""
    return Taken(cpu_milli=amount.get("cpu", 0), memory_bytes=amount.get("memory", 0))


def _held(view: View) -> dict[int, int]:
    """How many hold room on each row."""
    rows = view.replicas.column("node")
    at, counts = np.unique(rows[rows >= 0], return_counts=True)
    return dict(zip(at.tolist(), counts.tolist(), strict=True))


async def top_replicas(looking: Looking, endpoint: Endpoint, tenant: str = "") -> ListOf[ReplicaTop]:
    """Of those that run: what no node tells of is not among them."""
    states, heard = await endpoint.states(()), await endpoint.heard()
    seen = looking.now()
    return await looking.elsewhere(lambda: _replicas(seen, states, heard, tenant))


def _replicas(seen: Seen, states: Iterable[NodeState], heard: Heard, tenant: str) -> ListOf[ReplicaTop]:
    prefix = f"replica/{tenant}/" if tenant else "replica/"
    runs = [(state.node, run) for state in states for run in state.runs if run.replica.startswith(prefix)]
    found = [one for node, run in runs if (one := _replica(seen, node, run, heard)) is not None]
    found.sort(key=lambda one: (one.tenant, one.replica))
    return ListOf(kind="ReplicaTopList", metadata=ListMeta(revision=seen.revision), items=found)


def _replica(seen: Seen, node: str, run: RunState, heard: Heard) -> ReplicaTop | None:
    """None if the scope knows no such copy (any more): what a node that fell silent has said last may have been replaced."""
    replica: Replica | None = seen.get(run.replica)
    if replica is None or (replica.metadata.uid, replica.status.attempt, replica.status.node) != (run.uid, run.attempt, node):
        return None
    meta, spec = replica.metadata, replica.spec
    generation: Generation | None = seen.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
    silent = heard.nodes.get(node)
    return ReplicaTop(
        tenant=meta.tenant,
        replica=meta.name,
        workload=spec.workload,
        node=node,
        phase=replica.status.phase.value,
        pid=run.pid,
        cpu_milli=run.cpu_milli,
        memory_bytes=run.memory_bytes,
        requests=Taken() if generation is None else _taken(dict(generation.spec.spec.template.resources.pairs)),
        restarts=run.restarts,
        said=run.said,
        age_ms=None if silent is None else silent.silent_ms,
    )
