"""Refusals of contradictory grants, declarations and transitions: code, detail, no effect."""

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
    Spawn,
)
from remit.model.kinds import Config, DataSpec, Device, DeviceRequest, NodeHealth, Region
from remit.model.metadata import Metadata, RecordMetadata
from remit.model.records import GrantSpec, Lease, LeaseSpec
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, node, scope_test, workload
from tests.unit.commitment.authority_fixture import (
    T1,
    accept_peer,
    bind,
    commit_transitions,
    slice_of,
    spawn_replicas,
    transition_claim,
)

SLICE = slice_of("1", "scheduler")
BUDGET = GrantSpec(holder="scheduler", amount=amounts(cpu="2"), shares={"t1": amounts(cpu="1")}, purpose="budget", ttl=HOUR)
HELD = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu="2"), tenant="t1", ttl=HOUR)


async def refusal(scope: Scope, actor: Any, claim: AnyClaim) -> tuple[Code, str]:
    """The code and the detail of the refusal; the store is unchanged."""
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
def test_contradictory_grant_is_not_issued(name: str, spec: Any, code: Code, words: str) -> None:
    @scope_test
    async def run_test(scope: Scope) -> None:
        budgets = scope.actors["budgets"]
        await scope.must(budgets, Issue("taken", BUDGET), Issue("away", slice_of("4", "scope/r2")))
        actual, detail = await refusal(scope, budgets, Issue(name, spec))
        assert actual is code and words in detail, detail

    run_test()


@scope_test
async def test_peer_grant_is_accepted_only_as_issued(scope: Scope) -> None:
    budgets, now, here = scope.actors["budgets"], scope.clock.at_ms, scope.row("head")["incarnation"]
    await accept_peer(scope, "scope/x", "g1")
    await accept_peer(scope, "scope/global", "g1")
    await scope.must(budgets, Issue("own", SLICE), Accept("held", HELD, 3, now, "g1", here))
    wrong = {
        "name, spec.issuer": Accept("g", replace(HELD, issuer=""), 1, now, "g1", here),
        "spec.ttl": Accept("g", replace(HELD, ttl=Duration(0)), 1, now, "g1", here),
        "name": Accept("No Name", HELD, 1, now, "g1", here),
        "spec.amount": Accept("g", replace(HELD, amount=Amount({"cpu": -1})), 1, now, "g1", here),
        "asked_ms": Accept("g", HELD, 1, now + 1, "g1", here),
    }
    for words, claim in wrong.items():
        code, detail = await refusal(scope, budgets, claim)
        assert code is Code.INVALID and words in detail
    assert (await refusal(scope, budgets, Accept("own", HELD, 9, now, "g1", here)))[0] is Code.EXISTS
    assert (await refusal(scope, budgets, Accept("held", replace(HELD, issuer="scope/x"), 9, now, "g1", here)))[
        0
    ] is Code.EXISTS
    assert (await refusal(scope, budgets, Accept("held", HELD, 3, now, "g1", here)))[0] is Code.REVISION
    await scope.must(budgets, Close("held"))
    assert (await refusal(scope, budgets, Accept("held", HELD, 9, now, "g1", here)))[0] is Code.GRANT_VOID, "closed finally"


@scope_test
async def test_only_free_capacity_of_peer_grant_is_returned(scope: Scope) -> None:
    budgets, here = scope.actors["budgets"], scope.row("head")["incarnation"]
    await accept_peer(scope, "scope/global", "g1")
    await scope.must(budgets, Issue("own", SLICE), Accept("held", HELD, 1, scope.clock.at_ms, "g1", here))
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key, grant="held")
    assert (await refusal(scope, budgets, ReturnCapacity("none", amounts(cpu="1"))))[0] is Code.NOT_FOUND
    assert (await refusal(scope, budgets, ReturnCapacity("own", amounts(cpu="1"))))[0] is Code.INVALID
    assert (await refusal(scope, budgets, ReturnCapacity("held", Amount({"cpu": -1}))))[0] is Code.INVALID
    code, detail = await refusal(scope, budgets, ReturnCapacity("held", amounts(cpu="2")))
    assert code is Code.GRANT_SHORT and detail == "grant held has 1 cpu free, 2 is needed"
    assert await scope.must(budgets, ReturnCapacity("held", amounts(cpu="1"))) == [1]
    assert await scope.must(budgets, Close("held")) == [2], "reports are numbered"
    assert scope.row("grant/held")["spec"]["amount"] == {"cpu": "1"}, "the drawn part stays"


@scope_test
async def test_grant_is_closed_and_renewed_only_by_its_owner_in_time(scope: Scope) -> None:
    budgets, repair, here = scope.actors["budgets"], scope.actors["repair"], scope.row("head")["incarnation"]
    await accept_peer(scope, "scope/global", "g1")
    await accept_peer(scope, "scope/r2", "r2")
    await scope.must(budgets, Issue("own", slice_of("1", "scheduler", Duration(1_000))), Issue("away", slice_of("1")))
    await scope.must(budgets, Accept("held", HELD, 1, scope.clock.at_ms, "g1", here))
    for claim in (Close("none"), Renew("none"), Credit("none", 1, 1, Amount(), "r2", here)):
        assert (await refusal(scope, budgets, claim))[0] is Code.NOT_FOUND
    assert (await refusal(scope, budgets, Renew("held")))[0] is Code.NOT_OWNER, "only its issuer renews it"
    assert (await refusal(scope, budgets, Credit("own", 1, 1, Amount(), "r2", here)))[0] is Code.INVALID, (
        "a local grant needs no report"
    )
    assert (await refusal(scope, repair, Close("own")))[0] is Code.WAIT
    scope.clock.at_ms += 1_000
    await scope.must(repair, Close("own"))
    await scope.must(budgets, Credit("away", 1, 1, Amount(), "r2", here, final=True))
    assert (await refusal(scope, budgets, Renew("away")))[0] is Code.GRANT_VOID
    assert await scope.must(budgets, Credit("away", 1, 1, Amount(), "r2", here)) == [1], "a repeated report is accepted"


@scope_test
async def test_grant_of_peer_scope_is_not_drawn_by_local_namesake(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("away", slice_of("4", "scope/r2")))
    (key,) = await spawn_replicas(scope, "w")
    (epoch,) = await scope.must(Actor("scope/r2", Role.SCHEDULER), Acquire("scheduler/x", HOUR))
    namesake = Actor("scope/r2", Role.SCHEDULER, "scheduler/x", epoch)
    code, detail = await refusal(scope, namesake, Bind(key, scope.at(key), "n1", "away"))
    assert code is Code.NOT_OWNER and detail.endswith("only that scope draws on it")


@scope_test
async def test_only_peer_scope_can_be_declared_lost(scope: Scope) -> None:
    assert (await refusal(scope, OPERATOR, DeclareLost("scheduler")))[0] is Code.INVALID


@scope_test
async def test_holder_confirms_only_its_own_chargeable_grants(scope: Scope) -> None:
    await scope.must(OPERATOR, *(Apply(Region(metadata=Metadata(name=name))) for name in ("r2", "r3")))
    await scope.must(scope.actors["budgets"], Issue("s", slice_of("4")))
    await scope.restore(await scope.store.inner.backup())
    await scope.take_over()
    here = scope.row("head")["incarnation"]
    for name in ("r2", "r3"):
        await accept_peer(scope, f"scope/{name}", name)
    budgets = scope.actors["budgets"]
    wrong: list[tuple[Code, ConfirmHoldings]] = [
        (Code.INVALID, ConfirmHoldings("scope/r2", 7, {"s": replace(slice_of("1"), ttl=Duration(0))}, "r2", here)),
        (Code.NOT_OWNER, ConfirmHoldings("scope/r2", 7, {"new": slice_of("1", "scope/r3")}, "r2", here)),
        (Code.NOT_OWNER, ConfirmHoldings("scope/r3", 7, {"s": slice_of("1", "scope/r3")}, "r3", here)),
        (Code.NOT_FOUND, ConfirmHoldings("scope/r2", 7, {"new": slice_of("1", parent="none")}, "r2", here)),
    ]
    for code, claim in wrong:
        assert (await refusal(scope, budgets, claim))[0] is code, claim
    await scope.must(budgets, ConfirmHoldings("scope/r2", 7, {"s": slice_of("5")}, "r2", here))
    assert scope.books.grants[T1].granted_on == {"cpu": 5000}, "more than in the backup"


# -- declarations -----------------------------------------------------------------------------------------------------------


@scope_test
async def test_invalid_declaration_is_refused_with_field_and_reason(scope: Scope) -> None:
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
        actual, detail = await refusal(scope, actor, claim)
        assert actual is code and words in detail, (claim, detail)
    models = tuple(DeviceRequest(kind="gpu", count=1, models=(f"M{n}", f"M{n + 1}")) for n in range(80))
    code, detail = await refusal(scope, USER, Apply(workload("w", devices=models)))
    assert code is Code.INVALID and detail.startswith("spec.template.devices: ")


@scope_test
async def test_region_with_nodes_is_not_deleted(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Region(metadata=Metadata(name="r1"))))
    code, detail = await refusal(scope, OPERATOR, Delete("Region", "r1"))
    assert code is Code.IN_USE and detail == "region r1 has 2 nodes; delete these first"
    await scope.must(OPERATOR, Delete("Node", "n1"), Delete("Node", "n2"), Delete("Region", "r1"))


@scope_test
async def test_workload_controller_may_delete_only_workloads(scope: Scope) -> None:
    workloads = scope.actors["workloads"]
    await scope.must(USER, Apply(workload("w")))
    await scope.must(USER, Apply(Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={"k": "v"}))))
    assert (await refusal(scope, workloads, Delete("Config", "c", "t1")))[0] is Code.ROLE
    assert await scope.must(workloads, Delete("Workload", "w", "t1")) == [1]


# -- transitions ------------------------------------------------------------------------------------------------------------


@scope_test
async def test_transition_needs_existing_object_revision_and_phase(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w", type_="job", retries=3)
    workloads, nodes = scope.actors["workloads"], scope.actors["node-lifecycle"]
    assert (await refusal(scope, workloads, Forget("replica/t1/none-0", 1)))[0] is Code.NOT_FOUND
    code, detail = await refusal(scope, workloads, Forget(key, scope.at(key)))
    assert code is Code.PHASE and detail.endswith("only a released replica can be forgotten")
    assert (await refusal(scope, nodes, Mark("none", 1, NodeHealth.READY)))[0] is Code.NOT_FOUND
    assert (await refusal(scope, nodes, Mark("n1", scope.at("node/n1") - 1, NodeHealth.SUSPECT)))[0] is Code.REVISION
    assert (await refusal(scope, scope.actors["repair"], Move(key, scope.at(key), "bind", 1)))[0] is Code.INVALID
    assert (await refusal(scope, scope.actors["repair"], Move(key, scope.at(key), "cancel", 1)))[0] is Code.ROLE
    assert (await refusal(scope, workloads, Spawn("t1", "none", 1, 0)))[0] is Code.NOT_FOUND
    code, detail = await refusal(scope, scope.actors["repair"], Move(key, scope.at(key), "requeue", 1))
    assert code is Code.PHASE and detail == f"{key} is pending; requeue does not start from that phase"


@scope_test
async def test_completed_or_orphaned_replica_is_not_requeued(scope: Scope) -> None:
    done, cancelled = await spawn_replicas(scope, "w", 2, type_="job", retries=3, replicas=2)
    await bind(scope, done)
    await commit_transitions(scope, done, "start", "run")
    await scope.must(scope.actors["agent/n1"], Move(done, scope.at(done), "finish", 1, "ok"))
    await commit_transitions(scope, done, "settle")
    code, detail = await refusal(scope, *transition_claim(scope, done, "requeue"))
    assert code is Code.PHASE and detail.startswith(f"{done} completed its work")
    await commit_transitions(scope, cancelled, "cancel")
    await scope.must(USER, Delete("Workload", "w", "t1"))
    assert (await refusal(scope, *transition_claim(scope, cancelled, "requeue")))[0] is Code.DELETING
