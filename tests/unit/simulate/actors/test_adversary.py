"""The adversary reaches every refusal code and leaves the rest of the cluster unchanged."""

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
from tests.unit.simulate.world_fixtures import ActorScene, create_parent_scope, create_region, create_work


class AdversaryRun:
    def __init__(self, scene: ActorScene, adversaries: list[Adversary]) -> None:
        self.scene, self.adversaries = scene, adversaries

    @property
    def adversary(self) -> Adversary:
        return self.adversaries[0]


@pytest.fixture
def adversary_run() -> Iterator[AdversaryRun]:
    scene = ActorScene("meddler", ["global", "r1"])
    scene.do("global", create_parent_scope)
    scene.do("r1", create_region)
    scene.do("r1", create_work)
    adversaries: list[Adversary] = []

    async def controllers(process: SimProcess) -> None:
        upper, region = scene.role_context(process, "global"), scene.role_context(process, "r1")
        async with asyncio.TaskGroup() as group:
            for role_context in (upper, region):
                group.create_task(role_context.view.follow())
            group.create_task(BudgetHolder(region, upper).run())
            group.create_task(PolicyAdopter(region, upper).run())

    async def run_adversary(process: SimProcess) -> None:
        upper, region = scene.role_context(process, "global"), scene.role_context(process, "r1")
        adversaries.append(Adversary(region, upper, mean_beats=2))
        async with asyncio.TaskGroup() as group:
            group.create_task(region.view.follow())
            group.create_task(adversaries[-1].run())

    scene.start("r1-controllers", controllers)
    scene.start("r1-meddler", run_adversary)
    yield AdversaryRun(scene, adversaries)
    scene.finish()


def test_every_refusal_code_but_faults_has_an_attempt() -> None:
    assert set(ATTEMPTS_BY_CODE) == set(Code) - {Code.INTERNAL_ERROR, Code.OVERRIDE}  # a proposer reports that one itself


def test_every_refusal_is_reached_within_an_hour(adversary_run: AdversaryRun) -> None:
    for _ in range(12):
        adversary_run.scene.run(5)
        unreached = sorted(set(ATTEMPTS_BY_CODE) - set(adversary_run.adversary.refusal_counts))
        untried = sorted(name for name in LIMIT_ATTEMPTS if not adversary_run.adversary.attempt_counts.get(name))
        if not unreached and not untried:
            break
    assert not unreached
    assert not untried
    assert Code.INTERNAL_ERROR not in adversary_run.adversary.refusal_counts
    assert Code.INTERNAL_ERROR.value not in adversary_run.scene.listener.codes()


def test_objects_of_others_stay_unchanged(adversary_run: AdversaryRun) -> None:
    def foreign_objects() -> dict[str, object]:
        kinds = ("node/", "tenant/", "workload/", "replica/", "region/")
        rows = {key: obj for kind in kinds for key, obj in adversary_run.scene.rows("r1", kind).items()}
        return {
            key: (obj.spec, obj.status if hasattr(obj, "status") else None)
            for key, obj in rows.items()
            if f"/{NAME}" not in key
        }

    before = foreign_objects()
    assert {"node/r1-n0", "tenant/t1", "workload/t1/w", "replica/t1/w-0", "replica/t1/w-1"} <= before.keys()
    adversary_run.scene.run(20)
    assert foreign_objects() == before


def test_adversary_removes_its_objects_when_set_to_quiet(adversary_run: AdversaryRun) -> None:
    adversary_run.scene.run(10)
    assert adversary_run.scene.rows("r1", f"node/{NAME}")
    adversary_run.adversary.context.timing.quiet = True
    adversary_run.scene.run(3)
    for kind in ("replica", "workload", "node", "grant", "tenant", "priorityclass"):
        left = [key for key in adversary_run.scene.rows("r1", f"{kind}/") if f"/{NAME}" in key]
        assert not left, left
    assert any(isinstance(verdict, Accepted) for _, _, verdict in adversary_run.scene.listener.verdicts)
