"""Measures the memory of a scheduler view, for `bench schedule`.

Feeds rows to a view as a list does, one page at a time. Runs in a process of its own (schedule.py).
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from remit.model.kinds import Node, NodeHealth, NodeSpec, NodeStatus, Template, Tenant, TenantSpec, Workload, WorkloadSpec
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.objects import encode, key
from remit.model.records import Generation, GenerationSpec, Phase, Replica, ReplicaSpec, ReplicaStatus
from remit.model.resources import Amount
from remit.observation.scheduler_view import SchedulerView
from remit.proposal.cycle import Cycle
from remit.store.protocol import Head, Row
from remit.world.clock import BootClock

PAGE_ROWS: Final = 1_000
REPLICAS_PER_WORKLOAD: Final = 100
"""Replicas per workload."""
_TENANT: Final = "acme"
_SPEC: Final = WorkloadSpec(
    type="service",
    replicas=REPLICAS_PER_WORKLOAD,
    template=Template(command=("serve",), resources=Amount({"cpu": 100, "memory": 128 << 20})),
)


def measure_view_memory(nodes: int, replicas: int) -> dict[str, Any]:
    """Return resident memory by part. `million_mib` is extrapolated to a million replicas."""
    empty = _resident_bytes()
    view = SchedulerView(BootClock())
    view.begin_list(Head("bench", 1, 1, "bench", 0, ""), 1)
    _feed(view, _nodes(nodes))
    gc.collect()
    with_nodes = _resident_bytes()
    workloads = replicas // REPLICAS_PER_WORKLOAD
    _feed(view, _workloads(workloads))
    _feed(view, _generations(workloads))
    _feed(view, _replicas(workloads, nodes))
    view.end_list()
    cycle = Cycle(view, lambda limit: 0, "bench")
    cycle.on_changes(0, None)
    cycle.propose(0, PAGE_ROWS)
    gc.collect()
    grown = _resident_bytes() - with_nodes
    return {
        "feature": "memory",
        "nodes": nodes,
        "replicas": replicas,
        "nodes_mib": (with_nodes - empty) / (1 << 20),
        "bytes_a_replica": grown / replicas,
        "million_mib": (with_nodes - empty + grown / replicas * 1_000_000) / (1 << 20),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _feed(view: SchedulerView, objects: Iterator[AnyObject]) -> None:
    page: list[Row] = []
    for obj in objects:
        page.append(Row(key(obj), encode(obj), 1))
        if len(page) == PAGE_ROWS:
            view.add_page(page)
            page = []
    view.add_page(page)


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
        yield Generation(metadata=RecordMetadata(name=f"{name}/{1:08d}", tenant=_TENANT), spec=spec)


def _replicas(workloads: int, nodes: int) -> Iterator[AnyObject]:
    """Yield replicas: nine of ten are bound, the tenth is pending."""
    for i in range(workloads):
        for index in range(REPLICAS_PER_WORKLOAD):
            node = (i * REPLICAS_PER_WORKLOAD + index) * 7 % nodes
            bound = ReplicaStatus(phase=Phase.BOUND, node=f"node-{node}", grants=(f"tenant/{_TENANT}",))
            yield Replica(
                metadata=RecordMetadata(name=f"work-{i}-{index}", tenant=_TENANT, uid=f"bench-{i:x}-{index:x}"),
                spec=ReplicaSpec(workload=f"work-{i}", generation=1, index=index),
                status=bound if index % 10 else ReplicaStatus(),
            )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
