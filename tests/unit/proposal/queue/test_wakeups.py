"""Does news wake whom it helps, also if it is not what he was told to wait for?"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.model.claims import Apply, Bind, Delete
from remit.model.kinds import (
    Node,
    NodeHealth,
    Override,
    OverrideScope,
    OverrideSpec,
    Placement,
    Policy,
    PolicySpec,
    Spread,
    Taint,
)
from remit.model.metadata import Metadata
from remit.model.policies import PolicyAllow, PolicyRule
from remit.model.resources import Duration
from tests.properties.authority_world import OPERATOR, Scope
from tests.unit.commitment.authority_fixture import commit_transitions
from tests.unit.proposal.scheduler_fixture import Mind, mark, minds, want

SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))


async def filled(scope: Scope, *names: str) -> None:
    """All of these nodes, with one replica of `full` each."""
    await want(scope, "full", len(names), "4")
    for i, name in enumerate(names):
        key = f"replica/t1/full-{i}"
        await scope.must(scope.actors["scheduler"], Bind(key, scope.at(key), name, "tenant/t1"))


async def changed(scope: Scope, name: str, **spec: object) -> None:
    now = scope.books.nodes[name].node
    await scope.must(OPERATOR, Apply(Node(metadata=Metadata(name=name), spec=replace(now.spec, **spec))))


async def allow(scope: Scope, *zones: str) -> None:
    rule = PolicyRule(allow=PolicyAllow(zones=zones))
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,)))))


@minds
async def test_room_came_where_an_override_forbids_it__its_end_wakes(mind: Mind) -> None:
    """L1 F22: there was no room there when it was tried, so it was not told that an override would keep it out."""
    await filled(mind.scope, "n1", "n2")
    scope = OverrideScope(nodes=("n1",))
    spec = OverrideSpec(effect="avoid", scope=scope, ttl=Duration(3_600_000), reason="r", author="a")
    await mind.scope.must(OPERATOR, Apply(Override(metadata=Metadata(name="o"), spec=spec)))
    await want(mind.scope, "w", 1, "3")
    await mind.settle()
    assert mind.reason("w-0") == "no_room"
    await commit_transitions(mind.scope, "replica/t1/full-0", "start", "run", "ready", "remove", "stop", "stopped")
    await mind.settle()
    assert mind.reason("w-0") == "override"
    await mind.scope.must(OPERATOR, Delete("Override", "o"))
    await mind.settle()
    assert mind.where("w") == {"w-0": "n1"}


@minds
async def test_a_node_came_back_that_a_policy_forbids__another_policy_wakes(mind: Mind) -> None:
    await filled(mind.scope, "n2")
    await mark(mind.scope, "n1", NodeHealth.SUSPECT)
    await want(mind.scope, "w", 1, "3")
    await mind.settle()
    await allow(mind.scope, "b")
    await mark(mind.scope, "n1", NodeHealth.READY)
    await mind.settle()
    assert mind.where("w") == {}
    await allow(mind.scope, "a", "b")
    await mind.settle()
    assert mind.where("w") == {"w-0": "n1"}


@minds
async def test_news_of_a_row_wakes_nobody_who_is_kept_out_by_what_he_waits_for(mind: Mind) -> None:
    await filled(mind.scope, "n1", "n2")
    await want(mind.scope, "w", 1, "3", placement=Placement(zones=("b",)))
    await mind.settle()
    line = mind.cycle.backlog.queue_of(mind.slot("w-0"))
    assert line is not None
    attempts = line.attempts
    await commit_transitions(mind.scope, "replica/t1/full-0", "start", "run", "ready", "remove", "stop", "stopped")
    await changed(mind.scope, "n1", pool="other")
    await mind.settle()
    assert line.attempts == attempts


@pytest.mark.parametrize("how", ["gone", "tainted", "elsewhere", "forbidden"])
def test_a_domain_that_nobody_can_be_placed_in_any_more_holds_up_no_spread(how: str) -> None:
    """L1 F22: with one domain less, the others may take more."""

    @minds
    async def tell(mind: Mind) -> None:
        await changed(mind.scope, "n2", unschedulable=True)
        await want(mind.scope, "w", 2, placement=SPREAD)
        await mind.settle()
        assert (mind.where("w"), mind.reason("w-1")) == ({"w-0": "n1"}, "spread")
        match how:
            case "gone":
                await mind.scope.must(OPERATOR, Delete("Node", "n2"))
            case "tainted":
                await changed(mind.scope, "n2", taints=(Taint(key="a", effect="NoSchedule"),))
            case "elsewhere":
                await changed(mind.scope, "n2", zone="a")
            case _:
                await allow(mind.scope, "a")
        await mind.settle()
        assert mind.where("w") == {"w-0": "n1", "w-1": "n1"}

    tell()
