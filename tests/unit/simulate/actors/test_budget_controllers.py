"""Do quota slices flow between a scope and its region, in calm, after a takeover and after a restore?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from remit.model.claims import Accept, AcceptIncarnation, Close, ConfirmHoldings, Credit, Issue, Refused, Renew, ReturnCapacity
from remit.model.records import Grant, GrantPhase
from remit.simulate.actors.budget_controllers import BudgetHolder, BudgetIssuer, read_clock
from remit.simulate.world.processes import SimProcess
from tests.unit.simulate.world_fixtures import Scene, furnish_region, furnish_upper


class Pair(Scene):
    """The two scopes, and the two who write to each other."""

    budgets: BudgetHolder
    lender: BudgetIssuer


@pytest.fixture
def scene() -> Iterator[Pair]:
    scene = Pair("budgets", ["global", "r1"])
    scene.do("global", furnish_upper)
    scene.do("r1", furnish_region)

    async def main(process: SimProcess) -> None:
        upper, region = scene.seat(process, "global"), scene.seat(process, "r1")
        budgets = scene.budgets = BudgetHolder(region, upper)
        assert isinstance(budgets.issuer, BudgetIssuer)
        scene.lender = budgets.issuer
        scene.note(budgets)
        scene.note(budgets.issuer)
        async with asyncio.TaskGroup() as group:
            for seat in (upper, region):
                group.create_task(seat.view.follow())
            group.create_task(budgets.run())

    scene.start("r1-controllers", main)
    yield scene
    scene.finish()


def held(scene: Scene) -> dict[str, Grant]:
    return {key: grant for key, grant in scene.rows("r1", "grant/").items() if grant.spec.issuer}


def runs(scene: Scene, grant: Grant) -> bool:
    """Is its deadline ahead, on the clock that it was read from?"""
    clocks = {process.machine.clock.boot(): process.machine.clock for process in scene.processes.values()}
    deadline = grant.status.deadline
    return deadline is not None and clocks[deadline.boot].now_ms() < deadline.at_ms


def working(scene: Scene) -> list[Grant]:
    """Slices that both sides agree on, at the same serial, and that run."""
    above = scene.rows("global", "grant/")
    return [
        grant
        for key, grant in held(scene).items()
        if grant.status.phase is GrantPhase.LIVE and key in above and above[key].status.serial == grant.status.serial
    ]


def test_slices_are_issued_taken_up_renewed_given_back_in_part_reported_and_closed(scene: Scene) -> None:
    scene.run(40)
    for kind in (AcceptIncarnation, Issue, Accept, Renew, ReturnCapacity, Credit, Close):
        assert scene.accepted(kind) > 1, f"{kind.__name__}: {scene.listener.codes()}"
    assert {grant.spec.tenant for grant in working(scene)} >= {"t1", "t2"}
    purposes = {
        claim.spec.purpose for claim, verdict in scene.noted if isinstance(claim, Issue) and not isinstance(verdict, Refused)
    }
    assert purposes == {"quota", "budget", "offer"}


def test_what_the_region_has_is_never_more_than_what_was_lent(scene: Scene) -> None:
    for _ in range(40):
        scene.run(0.5)
        above = scene.rows("global", "grant/")
        for key, grant in held(scene).items():
            lent = above[key].spec.amount - above[key].status.returned if key in above else None
            assert grant.spec.amount <= lent if lent is not None else not grant.spec.amount, key


def test_the_region_changes_its_server__slices_lapse_there_and_are_renewed_on_the_new_clock(scene: Scene) -> None:
    scene.run(5)
    before = {grant.status.deadline.boot for grant in working(scene) if grant.status.deadline}
    leader = next(name for name in scene.servers["r1"] if f"m-{name}-0" in before)
    scene.processes[leader].kill()
    scene.run(5)
    after = {grant.status.deadline.boot for grant in working(scene) if grant.status.deadline}
    assert before and after and before.isdisjoint(after)


@pytest.mark.parametrize("scope", ["r1", "global"])
def test_a_scope_is_restored__they_recognise_each_other_again_and_slices_flow(scene: Scene, scope: str) -> None:
    scene.run(6)
    backup = scene.backup(scope)
    scene.run(6)
    scene.restore(scope, backup, "again")
    scene.noted.clear()
    scene.run(12)
    assert scene.accepted(AcceptIncarnation) >= 1 and scene.accepted(ConfirmHoldings) >= 1
    assert scene.accepted(Accept) > 1 and scene.accepted(Credit) > 1
    assert {grant.spec.tenant for grant in working(scene)} >= {"t1", "t2"}
    assert not [key for key, grant in held(scene).items() if grant.status.phase is GrantPhase.VOID]


def test_answers_are_lost__intents_keep_their_ids_and_slices_flow_when_answers_come_again(scene: Pair) -> None:
    scene.run(4)
    for n in range(30):
        servers = scene.servers["global" if n % 2 else "r1"]
        for name in servers:
            scene.network.cut(name, "r1-controllers")
        scene.run(0.7)
        for name in servers:
            scene.network.heal(name, "r1-controllers")
        scene.run(0.5)
    assert scene.budgets.resumed + scene.lender.resumed > 0
    assert scene.budgets.abandoned + scene.lender.abandoned > 0
    scene.run(6)
    assert {grant.spec.tenant for grant in working(scene)} >= {"t1", "t2"}


@pytest.mark.parametrize("seed", ["one", "two", "three"])
def test_two_pairs_stand_by_for_each_other__one_of_them_holds_both_roles(seed: str) -> None:
    """A letter reaches only who sits beside its writer, so both ends of the mail must be with one pair."""
    scene = Scene(seed, ["global", "r1"])
    scene.do("global", furnish_upper)
    scene.do("r1", furnish_region)

    async def main(process: SimProcess) -> None:
        upper, region = scene.seat(process, "global"), scene.seat(process, "r1")
        async with asyncio.TaskGroup() as group:
            for seat in (upper, region):
                group.create_task(seat.view.follow())
            group.create_task(BudgetHolder(region, upper).run())

    names = ["r1-controllers-1", "r1-controllers-2"]
    for name in names:
        scene.start(name, main)
    for name in (*names, *names):
        scene.run(5)
        live = [grant for grant in held(scene).values() if grant.status.phase is GrantPhase.LIVE and runs(scene, grant)]
        assert {grant.spec.tenant for grant in live} >= {"t1", "t2"}
        leases = [scene.rows("r1", "lease/budgets")["lease/budgets"], scene.rows("global", "lease/budgets")["lease/budgets/r1"]]
        assert len({lease.spec.holder for lease in leases}) == 1
        scene.processes[name].kill()
        scene.run(1)
        scene.processes[name].start()
    scene.finish()


def test_a_scope_alone_plays_offers_only() -> None:
    scene = Scene("alone", ["r1"])
    scene.do("r1", furnish_region)
    scene.do("r1", furnish_upper)
    budgets: list[BudgetHolder] = []

    async def main(process: SimProcess) -> None:
        seat = scene.seat(process, "r1")
        budgets.append(BudgetHolder(seat))
        scene.note(budgets[0])
        async with asyncio.TaskGroup() as group:
            group.create_task(seat.view.follow())
            group.create_task(budgets[0].run())

    scene.start("r1-controllers", main)
    scene.run(15)
    assert {grant.spec.purpose for grant in scene.rows("r1", "grant/").values()} == {"offer"}
    assert scene.accepted(Issue) > 3 and scene.accepted(Close) > 1 and not scene.accepted(Accept)
    assert read_clock(budgets[0].view) is not None
    scene.finish()
