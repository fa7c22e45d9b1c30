"""Resource usage: what nodes report, beside capacity and requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from remit.client.endpoint import AuthorityStatus
from remit.model.claims import Actor, Operation, Verdict
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeHeartbeatAge, NodeState, RunState
from remit.model.wire.api_types import ResourceUsage
from remit.serve.diagnostics.resource_usage import node_usage, replica_usage
from tests.unit.observation.row_fixtures import ready, replica, tenant, work
from tests.unit.serve.watch_cache_fixtures import CacheFixture


class ReportedStates:
    """An endpoint of which only the reported node states are used."""

    def __init__(self, *states: NodeState, heard: dict[str, int]) -> None:
        self._states, self._heartbeat_ages = states, heard

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return [one for one in self._states if not nodes or one.node in nodes]

    async def heartbeat_ages(self) -> HeartbeatReport:
        return HeartbeatReport("one", 10_000, {name: NodeHeartbeatAge(ms) for name, ms in self._heartbeat_ages.items()})

    async def status(self) -> AuthorityStatus:
        raise NotImplementedError

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        raise NotImplementedError

    async def renew(self, actor: Actor, /) -> bool:
        raise NotImplementedError

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        raise NotImplementedError


def run(name: str, index: int, **more: Any) -> RunState:
    return RunState(f"replica/t1/{name}-{index}", f"u{name}{index}", 1, 100, **more)


def scope() -> tuple[CacheFixture, ReportedStates]:
    web = (replica("web", 0, "serving", "n1"), replica("web", 1, "running", "n1"), replica("web", 2))
    cache = CacheFixture(ready("n2", "4"), ready("n1", "4"), tenant("t1"), *work("web", "1"), *web)
    runs = (
        run("web", 0, cpu_milli=700, memory_bytes=5, restarts=2),
        run("web", 1, cpu_milli=10, restarts=1, said="refused"),
        run("old", 7),
    )
    return cache, ReportedStates(NodeState("n1", "one", 900, 64, runs), heard={"n1": 1_500})


def test_node_usage_is_sorted_by_name_with_use_capacity_and_requests() -> None:
    cache, states = scope()
    found = asyncio.run(node_usage(cache.view_snapshots(), states))
    one, two = found.items
    assert (one.node, two.node, found.metadata.revision) == ("n1", "n2", 1)
    assert (one.cpu_milli, one.memory_bytes, one.restarts, one.replicas, one.age_ms) == (900, 64, 3, 2, 1_500)
    assert (one.capacity.cpu_milli, one.requests) == (4_000, ResourceUsage(cpu_milli=2_000))
    assert (two.age_ms, two.cpu_milli, two.requests.cpu_milli, two.health) == (None, 0, 0, "ready")


def test_replica_usage_shows_use_beside_requests() -> None:
    cache, states = scope()
    found = asyncio.run(replica_usage(cache.view_snapshots(), states)).items
    assert [(one.replica, one.cpu_milli, one.restarts, one.requests.cpu_milli, one.phase) for one in found] == [
        ("web-0", 700, 2, 1_000, "serving"),
        ("web-1", 10, 1, 1_000, "running"),
    ]
    assert [one.said for one in found] == ["", "refused"]
    assert found[0].age_ms == 1_500 and found[0].workload == "web" and found[0].node == "n1"


def test_replica_usage_is_filtered_by_tenant() -> None:
    cache, states = scope()
    assert asyncio.run(replica_usage(cache.view_snapshots(), states, "t2")).items == []
    assert len(asyncio.run(replica_usage(cache.view_snapshots(), states, "t1")).items) == 2


def test_reported_run_unknown_to_scope_is_not_listed() -> None:
    cache, _ = scope()
    stray = RunState("replica/t1/web-0", "another", 1)
    assert (
        asyncio.run(replica_usage(cache.view_snapshots(), ReportedStates(NodeState("n1", runs=(stray,)), heard={}))).items == []
    )
