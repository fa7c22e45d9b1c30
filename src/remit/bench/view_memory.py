"""Memory of a scheduler view.

Rows are fed to it as a list would, a page at a time. Run by itself.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from remit.model.kinds import Node, NodeHealth, NodeSpec, NodeStatus, Template, Tenant, TenantSpec, Workload, WorkloadSpec
from remit.model.metadata import Metadata, Stamp
from remit.model.objects import AnyObject, encode, key
from remit.model.records import Generation, GenerationSpec, Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.model.resources import Amount
from remit.observation.scheduler_view import View
from remit.proposal.cycle import Cycle
from remit.store.protocol import Head, Row
from remit.world.clock import BootClock

PAGE: Final = 1_000
EACH: Final = 100
"""Replicas a workload."""
_TENANT: Final = "acme"
_SPEC: Final = WorkloadSpec(
    type="service", replicas=EACH, template=Template(command=("serve",), resources=Amount({"cpu": 100, "memory": 128 << 20}))
)


def held(nodes: int, replicas: int) -> dict[str, Any]:
    """Resident memory by part; `million_mib` is that of a million replicas at this rate."""
    empty = _resident()
    view = View(BootClock())
    view.begin(Head("bench", 1, 1, "bench", 0, ""), 1)
    _feed(view, _nodes(nodes))
    gc.collect()
    with_nodes = _resident()
    workloads = replicas // EACH
    _feed(view, _workloads(workloads))
    _feed(view, _generations(workloads))
    _feed(view, _replicas(workloads, nodes))
    view.end()
    cycle = Cycle(view, lambda limit: 0, "bench")
    cycle.hear(0, None)
    cycle.propose(0, PAGE)
    gc.collect()
    grown = _resident() - with_nodes
    return {
        "feature": "memory",
        "nodes": nodes,
        "replicas": replicas,
        "nodes_mib": (with_nodes - empty) / (1 << 20),
        "bytes_a_replica": grown / replicas,
        "million_mib": (with_nodes - empty + grown / replicas * 1_000_000) / (1 << 20),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _feed(view: View, things: Iterator[AnyObject]) -> None:
    page: list[Row] = []
    for thing in things:
        page.append(Row(key(thing), encode(thing), 1))
        if len(page) == PAGE:
            view.page(page)
            page = []
    view.page(page)


def _nodes(count: int) -> Iterator[AnyObject]:
    capacity = Amount({"cpu": 64_000, "memory": 256 << 30})
    for i in range(count):
        yield Node(
            metadata=Metadata(name=f"node-{i}", labels={"disk": "ssd"}),
            spec=NodeSpec(region="eu", zone=f"eu-{i % 3}", capacity=capacity),
            status=NodeStatus(health=NodeHealth.READY),
        )
    yield Tenant(metadata=Metadata(name=_TENANT), spec=TenantSpec(quota=Amount({"cpu": 10**14, "memory": 10**17})))


def _workloads(count: int) -> Iterator[AnyObject]:
    for i in range(count):
        yield Workload(metadata=Metadata(name=f"work-{i}", tenant=_TENANT, uid=f"bench-{i:x}", generation=1), spec=_SPEC)


def _generations(count: int) -> Iterator[AnyObject]:
    for i in range(count):
        name = f"work-{i}"
        spec = GenerationSpec(workload=name, generation=1, labels={"app": name}, spec=_SPEC)
        yield Generation(metadata=Stamp(name=f"{name}/{1:08d}", tenant=_TENANT), spec=spec)


def _replicas(workloads: int, nodes: int) -> Iterator[AnyObject]:
    """Nine of ten are bound; the tenth waits."""
    for i in range(workloads):
        for index in range(EACH):
            at = (i * EACH + index) * 7 % nodes
            bound = ReplicaStatus(phase=Phase.BOUND, node=f"node-{at}", grants=(f"tenant/{_TENANT}",))
            yield Replica(
                metadata=Stamp(name=f"work-{i}-{index}", tenant=_TENANT, uid=f"bench-{i:x}-{index:x}"),
                spec=ReplicaSpec(workload=f"work-{i}", generation=1, index=index),
                status=bound if index % 10 else ReplicaStatus(),
            )


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
