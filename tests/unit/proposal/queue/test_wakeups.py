"""Wake-ups: a change wakes the replicas it helps, also if their recorded reason is another one."""

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
    PolicyAllow,
    PolicyRule,
    PolicySpec,
    Spread,
    Taint,
)
from remit.model.metadata import Metadata
from remit.model.resources import Duration
from tests.properties.authority_world import OPERATOR, Scope
from tests.unit.commitment.authority_fixture import commit_transitions
from tests.unit.proposal.scheduler_fixture import CycleFixture, create_pending, cycle_test, mark

SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))


async def filled(scope: Scope, *names: str) -> None:
    """Fill these nodes with one replica of `full` each."""
    await create_pending(scope, "full", len(names), "4")
    for i, name in enumerate(names):
        key = f"replica/t1/full-{i}"
        await scope.must(scope.actors["scheduler"], Bind(key, scope.at(key), name, "tenant/t1"))


async def changed(scope: Scope, name: str, **spec: object) -> None:
    now = scope.books.nodes[name].node
    await scope.must(OPERATOR, Apply(Node(metadata=Metadata(name=name), spec=replace(now.spec, **spec))))


async def allow(scope: Scope, *zones: str) -> None:
    rule = PolicyRule(allow=PolicyAllow(zones=zones))
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,)))))


@cycle_test
async def test_end_of_override_wakes_replica_that_waited_for_capacity(cycle_fixture: CycleFixture) -> None:
    """L1 F22: no capacity was free when it was tried, so its reason did not mention the override."""
    await filled(cycle_fixture.scope, "n1", "n2")
    scope = OverrideScope(nodes=("n1",))
    spec = OverrideSpec(effect="avoid", scope=scope, ttl=Duration(3_600_000), reason="r", author="a")
    await cycle_fixture.scope.must(OPERATOR, Apply(Override(metadata=Metadata(name="o"), spec=spec)))
    await create_pending(cycle_fixture.scope, "w", 1, "3")
    await cycle_fixture.settle()
    assert cycle_fixture.reason("w-0") == "no_room"
    await commit_transitions(cycle_fixture.scope, "replica/t1/full-0", "start", "run", "ready", "remove", "stop", "stopped")
    await cycle_fixture.settle()
    assert cycle_fixture.reason("w-0") == "override"
    await cycle_fixture.scope.must(OPERATOR, Delete("Override", "o"))
    await cycle_fixture.settle()
    assert cycle_fixture.where("w") == {"w-0": "n1"}


@cycle_test
async def test_policy_change_wakes_replica_kept_from_recovered_node(cycle_fixture: CycleFixture) -> None:
    await filled(cycle_fixture.scope, "n2")
    await mark(cycle_fixture.scope, "n1", NodeHealth.SUSPECT)
    await create_pending(cycle_fixture.scope, "w", 1, "3")
    await cycle_fixture.settle()
    await allow(cycle_fixture.scope, "b")
    await mark(cycle_fixture.scope, "n1", NodeHealth.READY)
    await cycle_fixture.settle()
    assert cycle_fixture.where("w") == {}
    await allow(cycle_fixture.scope, "a", "b")
    await cycle_fixture.settle()
    assert cycle_fixture.where("w") == {"w-0": "n1"}


@cycle_test
async def test_change_of_node_does_not_wake_replica_excluded_from_it(cycle_fixture: CycleFixture) -> None:
    await filled(cycle_fixture.scope, "n1", "n2")
    await create_pending(cycle_fixture.scope, "w", 1, "3", placement=Placement(zones=("b",)))
    await cycle_fixture.settle()
    line = cycle_fixture.cycle.backlog.queue_of(cycle_fixture.slot("w-0"))
    assert line is not None
    attempts = line.attempts
    await commit_transitions(cycle_fixture.scope, "replica/t1/full-0", "start", "run", "ready", "remove", "stop", "stopped")
    await changed(cycle_fixture.scope, "n1", pool="other")
    await cycle_fixture.settle()
    assert line.attempts == attempts


@pytest.mark.parametrize("how", ["gone", "tainted", "moved", "forbidden"])
def test_loss_of_spread_domain_wakes_replicas(how: str) -> None:
    """L1 F22: with one domain less, the others may take more."""

    @cycle_test
    async def scenario(cycle_fixture: CycleFixture) -> None:
        await changed(cycle_fixture.scope, "n2", unschedulable=True)
        await create_pending(cycle_fixture.scope, "w", 2, placement=SPREAD)
        await cycle_fixture.settle()
        assert (cycle_fixture.where("w"), cycle_fixture.reason("w-1")) == ({"w-0": "n1"}, "spread")
        match how:
            case "gone":
                await cycle_fixture.scope.must(OPERATOR, Delete("Node", "n2"))
            case "tainted":
                await changed(cycle_fixture.scope, "n2", taints=(Taint(key="a", effect="NoSchedule"),))
            case "moved":
                await changed(cycle_fixture.scope, "n2", zone="a")
            case _:
                await allow(cycle_fixture.scope, "a")
        await cycle_fixture.settle()
        assert cycle_fixture.where("w") == {"w-0": "n1", "w-1": "n1"}

    scenario()
