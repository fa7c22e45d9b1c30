"""Whose turn is it to be started? So many at once, the rest in the order in which they came."""

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
from remit.model.claims import Actor, Role
from remit.model.kinds import Node, NodeSpec
from remit.model.metadata import Metadata
from remit.model.records import Phase
from remit.model.resources import Amount
from remit.world.interfaces import ProcessSpec
from tests.unit.agent.test_reconciler import COPY, TEMPO, Bench
from tests.unit.world.virtual_world import virtual_world


def copy(number: int) -> AttemptId:
    return AttemptId(f"replica/t/a-{number}", f"u{number}", 1)


def begun(lineup: StartQueue, number: int) -> bool:
    if lineup.may_start(copy(number), "n1"):
        lineup.mark_starting(copy(number))
        return True
    return False


def test_so_many_at_once_and_the_rest_in_the_order_in_which_they_came() -> None:
    lineup = StartQueue(2)
    assert [begun(lineup, number) for number in range(5)] == [True, True, False, False, False]
    assert lineup.admit() == []
    lineup.release(copy(1))
    assert not begun(lineup, 4), "whoever came first is called first, although there is room"
    assert lineup.admit() == [("n1", copy(2))]
    assert not begun(lineup, 3)
    assert begun(lineup, 2)
    lineup.release(copy(0))
    lineup.release(copy(2))
    assert lineup.admit() == [("n1", copy(3)), ("n1", copy(4))]


def test_a_sandbox_keeps_its_turn_while_it_is_made() -> None:
    bare = ProcessSpec(("true",))
    assert slot_hold_ms(bare) == 0
    assert slot_hold_ms(bare._replace(sandbox="bwrap")) == SANDBOX_SETUP_MS


def test_what_is_under_way_does_not_wait_and_takes_no_second_turn() -> None:
    lineup = StartQueue(1)
    assert begun(lineup, 0)
    assert begun(lineup, 0)
    assert not begun(lineup, 1)
    lineup.release(copy(0))
    lineup.release(copy(0))
    assert lineup.admit() == [("n1", copy(1))]


def test_one_that_is_not_wanted_any_more_lets_its_turn_pass() -> None:
    lineup = StartQueue(1)
    assert begun(lineup, 0)
    assert not begun(lineup, 1)
    assert not begun(lineup, 2)
    lineup.release(copy(0))
    assert lineup.admit() == [("n1", copy(1))]
    assert lineup.admit() == [("n1", copy(2))]
    assert lineup.admit() == []
    assert begun(lineup, 3)


def test_who_waits_is_shown_by_node_and_only_so_many() -> None:
    lineup = StartQueue(0)
    for number in range(REPORTED_MAX + 5):
        assert not begun(lineup, number)
    assert not lineup.may_start(copy(1_000), "n2")
    shown = lineup.waiting_by_node()
    assert shown == {"n1": [copy(number) for number in range(REPORTED_MAX)], "n2": [copy(1_000)]}


def test_who_waits_is_told_with_each_beat_unless_it_is_not_wanted_any_more(tmp_path: Path) -> None:
    nobody: Any = None
    bench, lineup = Bench(Phase.STARTING), StartQueue(0)
    site = HostedNode(NodeSettings("n1", "local", tmp_path, tmp_path, sandbox=False), TEMPO, None)
    site.lease_hold = LeaseHold(Actor("a", Role.AGENT, "agent/n1", 1), 1_000, 0)
    spec = HostedNodeSpec(
        Node(metadata=Metadata(name="n1"), spec=NodeSpec(region="eu", zone="a", capacity=Amount())), site.settings
    )
    runtime = AgentRuntime(virtual_world(), [spec], name="a", timing=TEMPO)
    runtime.assignments, runtime.nodes, runtime.start_queue = bench.orders, {"n1": site}, lineup
    standing = HeartbeatSender(runtime, nobody, nobody, nobody)
    assert not lineup.may_start(COPY, "n1")

    def told() -> list[tuple[str, str]]:
        beat = standing._heartbeat_of(site, lineup.waiting_by_node()["n1"])
        assert beat is not None
        return [(run.replica, run.said) for run in beat.state.runs]

    assert told() == [(COPY.key, WAITING_FOR_SLOT)]
    bench.phase(Phase.DRAINING)
    assert told() == []
