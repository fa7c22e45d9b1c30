"""Is what contradicts itself refused in words that say where? Grants, declarations, moves; nothing changes by any of them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.model.claims import (
    Accept,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Bind,
    Close,
    Code,
    ConfirmHoldings,
    Credit,
    DeclareLost,
    Delete,
    Forget,
    Issue,
    Mark,
    Move,
    Refused,
    Renew,
    ReturnCapacity,
    Role,
    Spawn,
)
from remit.model.kinds import Config, DataSpec, Device, DeviceRequest, NodeHealth, Region
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.records import GrantSpec, Lease, LeaseSpec
from remit.model.resources import Amount, Duration
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, node, story, workload
from tests.unit.commitment.authority_fixture import T1, bind, meets, move, moving, slice_of, spawned

SLICE = slice_of("1", "scheduler")
BUDGET = GrantSpec(holder="scheduler", amount=amounts(cpu="2"), shares={"t1": amounts(cpu="1")}, purpose="budget", ttl=HOUR)
HELD = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu="2"), tenant="t1", ttl=HOUR)


async def told(scope: Scope, actor: Any, claim: AnyClaim) -> tuple[Code, str]:
    """Why it was refused, in both forms; nothing has changed."""
    before = await scope.dump()
    (verdict,) = await scope.ask(actor, claim)
    assert isinstance(verdict, Refused), f"{claim} was accepted"
    assert await scope.dump() == before
    return verdict.code, verdict.detail


# -- grants -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "code", "words"),
    [
        ("No Name", SLICE, Code.INVALID, "name: "),
        ("g", replace(SLICE, amount=Amount()), Code.INVALID, "spec.amount: must be positive"),
        ("g", replace(SLICE, amount=Amount({"cpu": -1})), Code.INVALID, "no part of it, or of spec.shares, may be negative"),
        (
            "g",
            replace(BUDGET, shares={"t1": Amount({"cpu": -1})}),
            Code.INVALID,
            "no part of it, or of spec.shares, may be negative",
        ),
        ("g", replace(SLICE, issuer="scope/global"), Code.INVALID, "spec.issuer: "),
        ("g", replace(SLICE, shares={"t1": amounts(cpu="1")}), Code.INVALID, "spec.shares: "),
        ("g", replace(BUDGET, shares={}), Code.INVALID, "spec.shares: "),
        ("g", replace(BUDGET, shares={"t1": amounts(cpu="3")}), Code.INVALID, "must not exceed the budget's amount of cpu 2"),
        ("g", replace(SLICE, tenant=""), Code.INVALID, "spec.tenant, spec.parent: "),
        ("g", replace(SLICE, parent=""), Code.INVALID, "spec.tenant, spec.parent: "),
        ("g", replace(SLICE, ttl=Duration(0)), Code.INVALID, "spec.ttl: "),
        ("g", replace(SLICE, parent="none"), Code.NOT_FOUND, "spec.parent: "),
        ("g", replace(SLICE, parent="taken/t1"), Code.NOT_FOUND, "spec.parent: "),
        ("g", replace(BUDGET, shares={"t9": amounts(cpu="1")}), Code.NOT_FOUND, "tenant/t9/emergency"),
        ("g", replace(SLICE, parent="tenant/t2"), Code.NOT_OWNER, "tenant/t2 belongs to tenant t2, not to t1"),
        ("g", replace(SLICE, parent="away"), Code.NOT_OWNER, "held by another scope"),
        ("g", replace(SLICE, amount=amounts(cpu="99")), Code.GRANT_SHORT, "99 is needed"),
        ("taken", SLICE, Code.EXISTS, "grant taken exists already"),
    ],
)
def test_a_grant_that_contradicts_itself_or_the_books_is_not_issued(name: str, spec: Any, code: Code, words: str) -> None:
    @story
    async def tell(scope: Scope) -> None:
        budgets = scope.actors["budgets"]
        await scope.must(budgets, Issue("taken", BUDGET), Issue("away", slice_of("4", "scope/r2")))
        found, said = await told(scope, budgets, Issue(name, spec))
        assert found is code and words in said, said

    tell()


@story
async def test_a_grant_from_elsewhere_is_taken_up_only_as_it_was_made_out(scope: Scope) -> None:
    budgets, now, here = scope.actors["budgets"], scope.clock.at_ms, scope.row("head")["incarnation"]
    await meets(scope, "scope/x", "g1")
    await meets(scope, "scope/global", "g1")
    await scope.must(budgets, Issue("own", SLICE), Accept("held", HELD, 3, now, "g1", here))
    wrong = {
        "name, spec.issuer": Accept("g", replace(HELD, issuer=""), 1, now, "g1", here),
        "spec.ttl": Accept("g", replace(HELD, ttl=Duration(0)), 1, now, "g1", here),
        "name": Accept("No Name", HELD, 1, now, "g1", here),
        "spec.amount": Accept("g", replace(HELD, amount=Amount({"cpu": -1})), 1, now, "g1", here),
        "asked_ms": Accept("g", HELD, 1, now + 1, "g1", here),
    }
    for words, claim in wrong.items():
        code, said = await told(scope, budgets, claim)
        assert code is Code.INVALID and words in said
    assert (await told(scope, budgets, Accept("own", HELD, 9, now, "g1", here)))[0] is Code.EXISTS
    assert (await told(scope, budgets, Accept("held", replace(HELD, issuer="scope/x"), 9, now, "g1", here)))[0] is Code.EXISTS
    assert (await told(scope, budgets, Accept("held", HELD, 3, now, "g1", here)))[0] is Code.REVISION
    await scope.must(budgets, Close("held"))
    assert (await told(scope, budgets, Accept("held", HELD, 9, now, "g1", here)))[0] is Code.GRANT_VOID, "closed for good"


@story
async def test_what_is_given_back_is_held_from_elsewhere_and_not_drawn(scope: Scope) -> None:
    budgets, here = scope.actors["budgets"], scope.row("head")["incarnation"]
    await meets(scope, "scope/global", "g1")
    await scope.must(budgets, Issue("own", SLICE), Accept("held", HELD, 1, scope.clock.at_ms, "g1", here))
    (key,) = await spawned(scope, "w")
    await bind(scope, key, grant="held")
    assert (await told(scope, budgets, ReturnCapacity("none", amounts(cpu="1"))))[0] is Code.NOT_FOUND
    assert (await told(scope, budgets, ReturnCapacity("own", amounts(cpu="1"))))[0] is Code.INVALID
    assert (await told(scope, budgets, ReturnCapacity("held", Amount({"cpu": -1}))))[0] is Code.INVALID
    code, said = await told(scope, budgets, ReturnCapacity("held", amounts(cpu="2")))
    assert code is Code.GRANT_SHORT and said == "grant held has 1 cpu free, 2 is needed"
    assert await scope.must(budgets, ReturnCapacity("held", amounts(cpu="1"))) == [1]
    assert await scope.must(budgets, Close("held")) == [2], "each report has its number"
    assert scope.row("grant/held")["spec"]["amount"] == {"cpu": "1"}, "what is drawn stays"


@story
async def test_a_grant_is_ended_by_those_who_may_and_when_they_may(scope: Scope) -> None:
    budgets, repair, here = scope.actors["budgets"], scope.actors["repair"], scope.row("head")["incarnation"]
    await meets(scope, "scope/global", "g1")
    await meets(scope, "scope/r2", "r2")
    await scope.must(budgets, Issue("own", slice_of("1", "scheduler", Duration(1_000))), Issue("away", slice_of("1")))
    await scope.must(budgets, Accept("held", HELD, 1, scope.clock.at_ms, "g1", here))
    for claim in (Close("none"), Renew("none"), Credit("none", 1, 1, Amount(), "r2", here)):
        assert (await told(scope, budgets, claim))[0] is Code.NOT_FOUND
    assert (await told(scope, budgets, Renew("held")))[0] is Code.NOT_OWNER, "its issuer renews it"
    assert (await told(scope, budgets, Credit("own", 1, 1, Amount(), "r2", here)))[0] is Code.INVALID, (
        "no report is needed of it"
    )
    assert (await told(scope, repair, Close("own")))[0] is Code.WAIT
    scope.clock.at_ms += 1_000
    await scope.must(repair, Close("own"))
    await scope.must(budgets, Credit("away", 1, 1, Amount(), "r2", here, final=True))
    assert (await told(scope, budgets, Renew("away")))[0] is Code.GRANT_VOID
    assert await scope.must(budgets, Credit("away", 1, 1, Amount(), "r2", here)) == [1], "what was reported is reported"


@story
async def test_what_another_scope_holds_is_drawn_there_whatever_somebody_here_is_called(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("away", slice_of("4", "scope/r2")))
    (key,) = await spawned(scope, "w")
    (epoch,) = await scope.must(Actor("scope/r2", Role.SCHEDULER), Acquire("scheduler/x", HOUR))
    namesake = Actor("scope/r2", Role.SCHEDULER, "scheduler/x", epoch)
    code, said = await told(scope, namesake, Bind(key, scope.at(key), "n1", "away"))
    assert code is Code.NOT_OWNER and said.endswith("only that scope draws on it")


@story
async def test_only_another_scope_is_declared_lost(scope: Scope) -> None:
    assert (await told(scope, OPERATOR, DeclareLost("scheduler")))[0] is Code.INVALID


@story
async def test_a_holder_vouches_for_its_own_and_for_what_can_be_charged(scope: Scope) -> None:
    await scope.must(OPERATOR, *(Apply(Region(metadata=Metadata(name=name))) for name in ("r2", "r3")))
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    here = scope.row("head")["incarnation"]
    for name in ("r2", "r3"):
        await meets(scope, f"scope/{name}", name)
    budgets = scope.actors["budgets"]
    wrong: list[tuple[Code, ConfirmHoldings]] = [
        (Code.INVALID, ConfirmHoldings("scope/r2", 7, {"s": replace(slice_of("1"), ttl=Duration(0))}, "r2", here)),
        (Code.NOT_OWNER, ConfirmHoldings("scope/r2", 7, {"new": slice_of("1", "scope/r3")}, "r2", here)),
        (Code.NOT_OWNER, ConfirmHoldings("scope/r3", 7, {"s": slice_of("1", "scope/r3")}, "r3", here)),
        (Code.NOT_FOUND, ConfirmHoldings("scope/r2", 7, {"new": slice_of("1", parent="none")}, "r2", here)),
    ]
    for code, claim in wrong:
        assert (await told(scope, budgets, claim))[0] is code, claim
    await scope.must(budgets, ConfirmHoldings("scope/r2", 7, {"s": slice_of("5")}, "r2", here))
    assert scope.books.grants[T1].granted_on == {"cpu": 5000}, "it knows of more than the backup does"


# -- declarations -----------------------------------------------------------------------------------------------------------


@story
async def test_a_declaration_names_what_there_is_and_what_can_be(scope: Scope) -> None:
    own = Lease(metadata=RecordMetadata(name="scheduler"), spec=LeaseSpec(holder="me", epoch=9))
    twice = (Device(name="gpu-0", kind="gpu"), Device(name="gpu-0", kind="gpu"))
    same = node("n9")
    wrong: list[tuple[Any, AnyClaim, Code, str]] = [
        (OPERATOR, Apply(own), Code.INVALID, "a Lease is a record of the authority and cannot be declared"),
        (USER, Apply(workload("w", owner="")), Code.INVALID, "metadata.tenant: is required for a Workload"),
        (
            OPERATOR,
            Apply(replace(same, metadata=Metadata(name="n9", tenant="t1"))),
            Code.INVALID,
            "does not belong to a tenant",
        ),
        (USER, Apply(workload("w", owner="t9")), Code.NOT_FOUND, "tenant t9 does not exist"),
        (USER, Apply(workload("w", priority="none")), Code.NOT_FOUND, "spec.priorityClass: "),
        (USER, Apply(workload("w"), expect=7), Code.NOT_FOUND, "no longer exists"),
        (OPERATOR, Apply(replace(same, spec=replace(same.spec, devices=twice))), Code.INVALID, "is listed twice"),
        (USER, Delete("Lease", "scheduler"), Code.INVALID, "a Lease is a record of the authority and cannot be deleted"),
        (USER, Delete("Node", "n1"), Code.ROLE, "role user may not delete a Node"),
        (USER, Delete("Workload", "none", "t1"), Code.NOT_FOUND, "workload/t1/none does not exist"),
    ]
    for actor, claim, code, words in wrong:
        found, said = await told(scope, actor, claim)
        assert found is code and words in said, (claim, said)
    models = tuple(DeviceRequest(kind="gpu", count=1, models=(f"M{n}", f"M{n + 1}")) for n in range(80))
    code, said = await told(scope, USER, Apply(workload("w", devices=models)))
    assert code is Code.INVALID and said.startswith("spec.template.devices: ")


@story
async def test_a_region_with_nodes_stays(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r1"))))
    code, said = await told(scope, OPERATOR, Delete("Region", "r1"))
    assert code is Code.IN_USE and said == "region r1 has 2 nodes; delete these first"
    await scope.must(OPERATOR, Delete("Node", "n1"), Delete("Node", "n2"), Delete("Region", "r1"))


@story
async def test_the_loop_that_ends_workloads_may_delete_them_and_nothing_else(scope: Scope) -> None:
    workloads = scope.actors["workloads"]
    await scope.must(USER, Apply(workload("w")))
    await scope.must(USER, Apply(Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={"k": "v"}))))
    assert (await told(scope, workloads, Delete("Config", "c", "t1")))[0] is Code.ROLE
    assert await scope.must(workloads, Delete("Workload", "w", "t1")) == [1]


# -- moves ------------------------------------------------------------------------------------------------------------------


@story
async def test_a_move_is_of_what_is_there_and_stands_where_it_starts(scope: Scope) -> None:
    (key,) = await spawned(scope, "w", type_="job", retries=3)
    workloads, nodes = scope.actors["workloads"], scope.actors["node-lifecycle"]
    assert (await told(scope, workloads, Forget("replica/t1/none-0", 1)))[0] is Code.NOT_FOUND
    code, said = await told(scope, workloads, Forget(key, scope.at(key)))
    assert code is Code.PHASE and said.endswith("only a released replica can be forgotten")
    assert (await told(scope, nodes, Mark("none", 1, NodeHealth.READY)))[0] is Code.NOT_FOUND
    assert (await told(scope, nodes, Mark("n1", scope.at("node/n1") - 1, NodeHealth.SUSPECT)))[0] is Code.REVISION
    assert (await told(scope, scope.actors["repair"], Move(key, scope.at(key), "bind", 1)))[0] is Code.INVALID
    assert (await told(scope, scope.actors["repair"], Move(key, scope.at(key), "cancel", 1)))[0] is Code.ROLE
    assert (await told(scope, workloads, Spawn("t1", "none", 1, 0)))[0] is Code.NOT_FOUND
    code, said = await told(scope, scope.actors["repair"], Move(key, scope.at(key), "requeue", 1))
    assert code is Code.PHASE and said == f"{key} is pending; requeue does not start from that phase"


@story
async def test_what_has_done_its_work_or_lost_its_workload_is_not_queued_again(scope: Scope) -> None:
    done, cancelled = await spawned(scope, "w", 2, type_="job", retries=3, replicas=2)
    await bind(scope, done)
    await move(scope, done, "start", "run")
    await scope.must(scope.actors["agent/n1"], Move(done, scope.at(done), "finish", 1, "ok"))
    await move(scope, done, "settle")
    code, said = await told(scope, *moving(scope, done, "requeue"))
    assert code is Code.PHASE and said.startswith(f"{done} completed its work")
    await move(scope, cancelled, "cancel")
    await scope.must(USER, Delete("Workload", "w", "t1"))
    assert (await told(scope, *moving(scope, cancelled, "requeue")))[0] is Code.DELETING
