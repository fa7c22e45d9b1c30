"""Does the meddler reach every refusal, and leave the rest of the cluster as it was?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from remit.model.claims import Accepted, Code
from remit.simulate.actors.adversary import ATTEMPTS_BY_CODE, Adversary
from remit.simulate.actors.adversary_limits import LIMIT_ATTEMPTS
from remit.simulate.actors.adversary_tenant import NAME
from remit.simulate.actors.budget_controllers import BudgetHolder
from remit.simulate.actors.policy_publishers import PolicyAdopter
from remit.simulate.world.processes import SimProcess
from tests.unit.simulate.world_fixtures import Scene, furnish_region, furnish_upper, furnish_work


class Play:
    def __init__(self, scene: Scene, meddlers: list[Adversary]) -> None:
        self.scene, self.meddlers = scene, meddlers

    @property
    def meddler(self) -> Adversary:
        return self.meddlers[0]


@pytest.fixture
def play() -> Iterator[Play]:
    scene = Scene("meddler", ["global", "r1"])
    scene.do("global", furnish_upper)
    scene.do("r1", furnish_region)
    scene.do("r1", furnish_work)
    meddlers: list[Adversary] = []

    async def controllers(process: SimProcess) -> None:
        upper, region = scene.seat(process, "global"), scene.seat(process, "r1")
        async with asyncio.TaskGroup() as group:
            for seat in (upper, region):
                group.create_task(seat.view.follow())
            group.create_task(BudgetHolder(region, upper).run())
            group.create_task(PolicyAdopter(region, upper).run())

    async def meddling(process: SimProcess) -> None:
        upper, region = scene.seat(process, "global"), scene.seat(process, "r1")
        meddlers.append(Adversary(region, upper, mean_beats=2))
        async with asyncio.TaskGroup() as group:
            group.create_task(region.view.follow())
            group.create_task(meddlers[-1].run())

    scene.start("r1-controllers", controllers)
    scene.start("r1-meddler", meddling)
    yield Play(scene, meddlers)
    scene.finish()


def test_every_code_but_the_one_of_our_own_bugs_has_a_mischief() -> None:
    assert set(ATTEMPTS_BY_CODE) == set(Code) - {Code.INTERNAL_ERROR, Code.OVERRIDE}  # a proposer says that one to itself


def test_every_refusal_is_reached_within_an_hour(play: Play) -> None:
    for _ in range(12):
        play.scene.run(5)
        unreached = sorted(set(ATTEMPTS_BY_CODE) - set(play.meddler.refusal_counts))
        untried = sorted(name for name in LIMIT_ATTEMPTS if not play.meddler.attempt_counts.get(name))
        if not unreached and not untried:
            break
    assert not unreached
    assert not untried
    assert Code.INTERNAL_ERROR not in play.meddler.refusal_counts
    assert Code.INTERNAL_ERROR.value not in play.scene.listener.codes()


def test_what_is_not_its_own_stays_as_it_was(play: Play) -> None:
    def others() -> dict[str, object]:
        kinds = ("node/", "tenant/", "workload/", "replica/", "region/")
        rows = {key: thing for kind in kinds for key, thing in play.scene.rows("r1", kind).items()}
        return {
            key: (thing.spec, thing.status if hasattr(thing, "status") else None)
            for key, thing in rows.items()
            if f"/{NAME}" not in key
        }

    before = others()
    assert {"node/r1-n0", "tenant/t1", "workload/t1/w", "replica/t1/w-0", "replica/t1/w-1"} <= before.keys()
    play.scene.run(20)
    assert others() == before


def test_it_takes_its_yard_away_when_it_is_told_to_be_quiet(play: Play) -> None:
    play.scene.run(10)
    assert play.scene.rows("r1", f"node/{NAME}")
    play.meddler.context.timing.quiet = True
    play.scene.run(3)
    for kind in ("replica", "workload", "node", "grant", "tenant", "priorityclass"):
        left = [key for key in play.scene.rows("r1", f"{kind}/") if f"/{NAME}" in key]
        assert not left, left
    assert any(isinstance(verdict, Accepted) for _, _, verdict in play.scene.listener.verdicts)
