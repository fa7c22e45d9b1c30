"""Do policies reach a region on lease, and lapse and come back; and are they published where they are at home?"""

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
from tests.unit.simulate.world_fixtures import Scene, furnish_region, furnish_upper


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene("policies", ["global", "r1"])
    scene.do("global", furnish_upper)
    scene.do("r1", furnish_region)

    async def main(process: SimProcess) -> None:
        upper, region = scene.seat(process, "global"), scene.seat(process, "r1")
        policies = PolicyAdopter(region, upper)
        scene.note(policies)
        scene.note(policies.publisher)
        async with asyncio.TaskGroup() as group:
            for seat in (upper, region):
                group.create_task(seat.view.follow())
            group.create_task(BudgetHolder(region, upper).run())
            group.create_task(policies.run())

    scene.start("r1-controllers", main)
    yield scene
    scene.finish()


def in_force(scene: Scene, scope: str) -> PolicyRevision:
    rows = scene.rows(scope, "policyrevision/")
    found = rows[max(rows)]
    assert isinstance(found, PolicyRevision)
    return found


def test_what_is_published_above_is_adopted_on_a_lease_that_is_renewed_and_sometimes_lapses(scene: Scene) -> None:
    lapsed, live = 0, 0
    scene.run(3)
    for _ in range(120):
        scene.run(0.5)
        deadline = in_force(scene, "r1").spec.deadline
        assert deadline is not None
        clock = next(p.machine.clock for p in scene.processes.values() if p.machine.clock.boot() == deadline.boot)
        assert deadline.at_ms <= clock.now_ms() + TTL_BEATS * scene.pace.heartbeat_ms, "a lease begins when it was asked for"
        lapsed, live = lapsed + (clock.now_ms() >= deadline.at_ms), live + (clock.now_ms() < deadline.at_ms)
    assert live > 4 * lapsed > 0
    assert scene.accepted(Adopt) > 20 and scene.accepted(Apply) > 10 and scene.accepted(Rollback) > 2
    assert in_force(scene, "global").spec.number - in_force(scene, "r1").spec.number < 5


def test_the_scope_above_is_restored_and_has_forgotten_numbers__it_publishes_past_them(scene: Scene) -> None:
    scene.run(5)
    backup = scene.backup("global")
    scene.run(30)
    before = in_force(scene, "r1").spec.number
    scene.restore("global", backup, "again")
    assert in_force(scene, "global").spec.number < before
    scene.noted.clear()
    scene.run(20)
    assert in_force(scene, "r1").spec.number > before
    assert [v for claim, v in scene.noted if isinstance(claim, Adopt) and isinstance(v, Accepted)]


def test_a_scope_alone_publishes_for_itself() -> None:
    scene = Scene("alone", ["r1"])
    scene.do("r1", furnish_region)
    scene.do("r1", furnish_upper)

    async def main(process: SimProcess) -> None:
        seat = scene.seat(process, "r1")
        policies = PolicyAdopter(seat)
        scene.note(policies.publisher)
        async with asyncio.TaskGroup() as group:
            group.create_task(seat.view.follow())
            group.create_task(policies.run())

    scene.start("r1-controllers", main)
    scene.run(30)
    assert scene.accepted(Apply) > 5 and scene.accepted(Rollback) > 0 and not scene.accepted(Adopt)
    published = [row.spec for row in scene.rows("r1", "policyrevision/").values()]
    narrow = [any(r.allow.zones for p in spec.policies.values() for r in p.rules) for spec in published]
    assert any(narrow) and not any(one and after for one, after in pairwise(narrow))
    scene.finish()
