"""Policy publishers: policies reach a region on a lease that lapses and is renewed, and a single scope publishes its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from remit.model.claims import Accepted, Adopt, Apply, Rollback
from remit.model.records import PolicyRevision
from remit.simulate.actors.budget_controllers import BudgetHolder
from remit.simulate.actors.policy_publishers import TTL_BEATS, PolicyAdopter
from remit.simulate.world.processes import SimProcess
from tests.unit.simulate.world_fixtures import ActorScene, create_parent_scope, create_region


@pytest.fixture
def scene() -> Iterator[ActorScene]:
    scene = ActorScene("policies", ["global", "r1"])
    scene.do("global", create_parent_scope)
    scene.do("r1", create_region)

    async def main(process: SimProcess) -> None:
        upper, region = scene.role_context(process, "global"), scene.role_context(process, "r1")
        policies = PolicyAdopter(region, upper)
        scene.record(policies)
        scene.record(policies.publisher)
        async with asyncio.TaskGroup() as group:
            for role_context in (upper, region):
                group.create_task(role_context.view.follow())
            group.create_task(BudgetHolder(region, upper).run())
            group.create_task(policies.run())

    scene.start("r1-controllers", main)
    yield scene
    scene.finish()


def in_force(scene: ActorScene, scope: str) -> PolicyRevision:
    rows = scene.rows(scope, "policyrevision/")
    found = rows[max(rows)]
    assert isinstance(found, PolicyRevision)
    return found


def test_published_policy_is_adopted_on_lease_that_sometimes_lapses(scene: ActorScene) -> None:
    lapsed, live = 0, 0
    scene.run(3)
    for _ in range(120):
        scene.run(0.5)
        deadline = in_force(scene, "r1").spec.deadline
        assert deadline is not None
        clock = next(p.machine.clock for p in scene.processes.values() if p.machine.clock.boot() == deadline.boot)
        assert deadline.at_ms <= clock.now_ms() + TTL_BEATS * scene.pace.heartbeat_ms, "a lease counts from its request"
        lapsed, live = lapsed + (clock.now_ms() >= deadline.at_ms), live + (clock.now_ms() < deadline.at_ms)
    assert live > 4 * lapsed > 0
    assert scene.accepted(Adopt) > 20 and scene.accepted(Apply) > 10 and scene.accepted(Rollback) > 2
    assert in_force(scene, "global").spec.number - in_force(scene, "r1").spec.number < 5


def test_restored_parent_publishes_past_forgotten_numbers(scene: ActorScene) -> None:
    scene.run(5)
    backup = scene.backup("global")
    scene.run(30)
    before = in_force(scene, "r1").spec.number
    scene.restore("global", backup, "again")
    assert in_force(scene, "global").spec.number < before
    scene.recorded_verdicts.clear()
    scene.run(20)
    assert in_force(scene, "r1").spec.number > before
    assert [v for claim, v in scene.recorded_verdicts if isinstance(claim, Adopt) and isinstance(v, Accepted)]


def test_single_scope_publishes_for_itself() -> None:
    scene = ActorScene("alone", ["r1"])
    scene.do("r1", create_region)
    scene.do("r1", create_parent_scope)

    async def main(process: SimProcess) -> None:
        role_context = scene.role_context(process, "r1")
        policies = PolicyAdopter(role_context)
        scene.record(policies.publisher)
        async with asyncio.TaskGroup() as group:
            group.create_task(role_context.view.follow())
            group.create_task(policies.run())

    scene.start("r1-controllers", main)
    scene.run(30)
    assert scene.accepted(Apply) > 5 and scene.accepted(Rollback) > 0 and not scene.accepted(Adopt)
    published = [row.spec for row in scene.rows("r1", "policyrevision/").values()]
    restricted = [any(r.allow.zones for p in spec.policies.values() for r in p.rules) for spec in published]
    assert any(restricted) and not any(one and after for one, after in pairwise(restricted))
    scene.finish()
