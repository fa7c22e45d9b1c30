"""Budget controllers: quota slices flow between a scope and its parent, also after takeovers and restores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from remit.model.claims import Accept, AcceptIncarnation, Close, ConfirmHoldings, Credit, Issue, Refused, Renew, ReturnCapacity
from remit.model.records import Grant, GrantPhase
from remit.simulate.actors.budget_controllers import BudgetHolder, BudgetIssuer, read_clock
from remit.simulate.world.processes import SimProcess
from tests.unit.simulate.world_fixtures import ActorScene, create_parent_scope, create_region


class Pair(ActorScene):
    """The two scopes, and the budget controllers of both."""

    budgets: BudgetHolder
    issuer: BudgetIssuer


@pytest.fixture
def scene() -> Iterator[Pair]:
    scene = Pair("budgets", ["global", "r1"])
    scene.do("global", create_parent_scope)
    scene.do("r1", create_region)

    async def main(process: SimProcess) -> None:
        upper, region = scene.role_context(process, "global"), scene.role_context(process, "r1")
        budgets = scene.budgets = BudgetHolder(region, upper)
        assert isinstance(budgets.issuer, BudgetIssuer)
        scene.issuer = budgets.issuer
        scene.record(budgets)
        scene.record(budgets.issuer)
        async with asyncio.TaskGroup() as group:
            for role_context in (upper, region):
                group.create_task(role_context.view.follow())
            group.create_task(budgets.run())

    scene.start("r1-controllers", main)
    yield scene
    scene.finish()


def held(scene: ActorScene) -> dict[str, Grant]:
    return {key: grant for key, grant in scene.rows("r1", "grant/").items() if grant.spec.issuer}


def is_live(scene: ActorScene, grant: Grant) -> bool:
    """Whether its deadline is in the future, on the clock that set it."""
    clocks = {process.machine.clock.boot(): process.machine.clock for process in scene.processes.values()}
    deadline = grant.status.deadline
    return deadline is not None and clocks[deadline.boot].now_ms() < deadline.at_ms


def agreed_slices(scene: ActorScene) -> list[Grant]:
    """Live slices on which both sides agree, at the same serial."""
    above = scene.rows("global", "grant/")
    return [
        grant
        for key, grant in held(scene).items()
        if grant.status.phase is GrantPhase.LIVE and key in above and above[key].status.serial == grant.status.serial
    ]


def test_slices_go_through_whole_lifecycle(scene: ActorScene) -> None:
    scene.run(40)
    for kind in (AcceptIncarnation, Issue, Accept, Renew, ReturnCapacity, Credit, Close):
        assert scene.accepted(kind) > 1, f"{kind.__name__}: {scene.listener.codes()}"
    assert {grant.spec.tenant for grant in agreed_slices(scene)} >= {"t1", "t2"}
    purposes = {
        claim.spec.purpose
        for claim, verdict in scene.recorded_verdicts
        if isinstance(claim, Issue) and not isinstance(verdict, Refused)
    }
    assert purposes == {"quota", "budget", "offer"}


def test_region_never_holds_more_than_was_granted(scene: ActorScene) -> None:
    for _ in range(40):
        scene.run(0.5)
        above = scene.rows("global", "grant/")
        for key, grant in held(scene).items():
            lent = above[key].spec.amount - above[key].status.returned if key in above else None
            assert grant.spec.amount <= lent if lent is not None else not grant.spec.amount, key


def test_server_change_in_region_lapses_slices_and_renews_them(scene: ActorScene) -> None:
    scene.run(5)
    before = {grant.status.deadline.boot for grant in agreed_slices(scene) if grant.status.deadline}
    leader = next(name for name in scene.servers["r1"] if f"m-{name}-0" in before)
    scene.processes[leader].kill()
    scene.run(5)
    after = {grant.status.deadline.boot for grant in agreed_slices(scene) if grant.status.deadline}
    assert before and after and before.isdisjoint(after)


@pytest.mark.parametrize("scope", ["r1", "global"])
def test_slices_flow_again_after_restore_of_either_scope(scene: ActorScene, scope: str) -> None:
    scene.run(6)
    backup = scene.backup(scope)
    scene.run(6)
    scene.restore(scope, backup, "again")
    scene.recorded_verdicts.clear()
    scene.run(12)
    assert scene.accepted(AcceptIncarnation) >= 1 and scene.accepted(ConfirmHoldings) >= 1
    assert scene.accepted(Accept) > 1 and scene.accepted(Credit) > 1
    assert {grant.spec.tenant for grant in agreed_slices(scene)} >= {"t1", "t2"}
    assert not [key for key, grant in held(scene).items() if grant.status.phase is GrantPhase.VOID]


def test_lost_answers_keep_operation_ids_and_slices_flow_afterwards(scene: Pair) -> None:
    scene.run(4)
    for n in range(30):
        servers = scene.servers["global" if n % 2 else "r1"]
        for name in servers:
            scene.network.cut(name, "r1-controllers")
        scene.run(0.7)
        for name in servers:
            scene.network.heal(name, "r1-controllers")
        scene.run(0.5)
    assert scene.budgets.resumed + scene.issuer.resumed > 0
    assert scene.budgets.abandoned + scene.issuer.abandoned > 0
    scene.run(6)
    assert {grant.spec.tenant for grant in agreed_slices(scene)} >= {"t1", "t2"}


@pytest.mark.parametrize("seed", ["one", "two", "three"])
def test_standby_controller_pair_takes_over_both_roles_together(seed: str) -> None:
    """A peer message reaches only a recipient beside its sender, so one pair must hold both ends."""
    scene = ActorScene(seed, ["global", "r1"])
    scene.do("global", create_parent_scope)
    scene.do("r1", create_region)

    async def main(process: SimProcess) -> None:
        upper, region = scene.role_context(process, "global"), scene.role_context(process, "r1")
        async with asyncio.TaskGroup() as group:
            for role_context in (upper, region):
                group.create_task(role_context.view.follow())
            group.create_task(BudgetHolder(region, upper).run())

    names = ["r1-controllers-1", "r1-controllers-2"]
    for name in names:
        scene.start(name, main)
    for name in (*names, *names):
        scene.run(5)
        live = [grant for grant in held(scene).values() if grant.status.phase is GrantPhase.LIVE and is_live(scene, grant)]
        assert {grant.spec.tenant for grant in live} >= {"t1", "t2"}
        leases = [scene.rows("r1", "lease/budgets")["lease/budgets"], scene.rows("global", "lease/budgets")["lease/budgets/r1"]]
        assert len({lease.spec.holder for lease in leases}) == 1
        scene.processes[name].kill()
        scene.run(1)
        scene.processes[name].start()
    scene.finish()


def test_single_scope_uses_only_offers() -> None:
    scene = ActorScene("alone", ["r1"])
    scene.do("r1", create_region)
    scene.do("r1", create_parent_scope)
    budgets: list[BudgetHolder] = []

    async def main(process: SimProcess) -> None:
        role_context = scene.role_context(process, "r1")
        budgets.append(BudgetHolder(role_context))
        scene.record(budgets[0])
        async with asyncio.TaskGroup() as group:
            group.create_task(role_context.view.follow())
            group.create_task(budgets[0].run())

    scene.start("r1-controllers", main)
    scene.run(15)
    assert {grant.spec.purpose for grant in scene.rows("r1", "grant/").values()} == {"offer"}
    assert scene.accepted(Issue) > 3 and scene.accepted(Close) > 1 and not scene.accepted(Accept)
    assert read_clock(budgets[0].view) is not None
    scene.finish()
