"""Start queue of an agent: bounded concurrency, first come first served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remit.agent.assignments import REPORTED_MAX, SANDBOX_SETUP_MS, WAITING_FOR_SLOT, StartQueue, slot_hold_ms
from remit.agent.attempts import AttemptId
from remit.agent.heartbeat import HeartbeatSender
from remit.agent.hosted_node import HostedNode, HostedNodeSpec
from remit.agent.run_spec import NodeSettings
from remit.agent.runtime import AgentRuntime
from remit.client.lease_holder import LeaseHold
from remit.model.claims import Actor
from remit.model.kinds import Node, NodeSpec
from remit.model.metadata import Metadata
from remit.model.records import Phase
from remit.model.resources import Amount
from remit.model.roles import Role
from remit.world.interfaces import ProcessSpec
from tests.unit.agent.reconciler_bench import COPY, TEMPO, Bench
from tests.unit.world.virtual_world import virtual_world


def copy(number: int) -> AttemptId:
    return AttemptId(f"replica/t/a-{number}", f"u{number}", 1)


def starts(queue: StartQueue, number: int) -> bool:
    if queue.may_start(copy(number), "n1"):
        queue.mark_starting(copy(number))
        return True
    return False


def test_concurrent_starts_are_bounded_and_queue_is_fifo() -> None:
    queue = StartQueue(2)
    assert [starts(queue, number) for number in range(5)] == [True, True, False, False, False]
    assert queue.admit() == []
    queue.release(copy(1))
    assert not starts(queue, 4), "earlier attempts go first although a slot is free"
    assert queue.admit() == [("n1", copy(2))]
    assert not starts(queue, 3)
    assert starts(queue, 2)
    queue.release(copy(0))
    queue.release(copy(2))
    assert queue.admit() == [("n1", copy(3)), ("n1", copy(4))]


def test_sandbox_setup_holds_start_slot() -> None:
    bare = ProcessSpec(("true",))
    assert slot_hold_ms(bare) == 0
    assert slot_hold_ms(bare._replace(sandbox="bwrap")) == SANDBOX_SETUP_MS


def test_running_start_needs_no_second_slot() -> None:
    queue = StartQueue(1)
    assert starts(queue, 0)
    assert starts(queue, 0)
    assert not starts(queue, 1)
    queue.release(copy(0))
    queue.release(copy(0))
    assert queue.admit() == [("n1", copy(1))]


def test_cancelled_attempt_yields_its_slot_to_next() -> None:
    queue = StartQueue(1)
    assert starts(queue, 0)
    assert not starts(queue, 1)
    assert not starts(queue, 2)
    queue.release(copy(0))
    assert queue.admit() == [("n1", copy(1))]
    assert queue.admit() == [("n1", copy(2))]
    assert queue.admit() == []
    assert starts(queue, 3)


def test_waiting_attempts_are_reported_by_node_and_bounded() -> None:
    queue = StartQueue(0)
    for number in range(REPORTED_MAX + 5):
        assert not starts(queue, number)
    assert not queue.may_start(copy(1_000), "n2")
    shown = queue.waiting_by_node()
    assert shown == {"n1": [copy(number) for number in range(REPORTED_MAX)], "n2": [copy(1_000)]}


def test_heartbeat_reports_waiting_attempt_until_it_drains(tmp_path: Path) -> None:
    unused: Any = None
    bench, queue = Bench(Phase.STARTING), StartQueue(0)
    node = HostedNode(NodeSettings("n1", "local", tmp_path, tmp_path, sandbox=False), TEMPO, None)
    node.lease_hold = LeaseHold(Actor("a", Role.AGENT, "agent/n1", 1), 1_000, 0)
    spec = HostedNodeSpec(
        Node(metadata=Metadata(name="n1"), spec=NodeSpec(region="eu", zone="a", capacity=Amount())), node.settings
    )
    runtime = AgentRuntime(virtual_world(), [spec], name="a", timing=TEMPO)
    runtime.assignments, runtime.nodes, runtime.start_queue = bench.orders, {"n1": node}, queue
    sender = HeartbeatSender(runtime, unused, unused, unused)
    assert not queue.may_start(COPY, "n1")

    def reported() -> list[tuple[str, str]]:
        beat = sender._heartbeat_of(node, queue.waiting_by_node()["n1"])
        assert beat is not None
        return [(run.replica, run.said) for run in beat.state.runs]

    assert reported() == [(COPY.key, WAITING_FOR_SLOT)]
    bench.phase(Phase.DRAINING)
    assert reported() == []
