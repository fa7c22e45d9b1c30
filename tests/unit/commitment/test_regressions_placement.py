"""Regression tests of placement: priorities, daemons, gangs, reservations, node constraints."""

from __future__ import annotations

import pytest

from remit.model.claims import Apply, Bind, BindGang, Close, Code, Issue, Mark, Refused, Reserve, Spawn
from remit.model.kinds import (
    Affinity,
    NodeHealth,
    Placement,
    Policy,
    PolicyMatch,
    PolicyRule,
    PolicySpec,
    PriorityClass,
    PriorityClassSpec,
    Toleration,
)
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec
from remit.model.resources import Duration
from tests.properties.authority_world import HOUR, OPERATOR, TAINTED, USER, Scope, amounts, node, scope_test, tenant, workload
from tests.unit.commitment.authority_fixture import T1, bind, commit_transitions, slice_of, spawn_replicas, used_on

MINUTE = Duration(60_000)


def bind_to(scope: Scope, key: str, name: str = "n1", grant: str = T1) -> Bind:
    return Bind(key, scope.at(key), name, grant)


async def refusal(scope: Scope, claim: Bind | Reserve | BindGang) -> Refused:
    before = await scope.dump()
    (verdict,) = await scope.ask(scope.actors["scheduler"], claim)
    assert isinstance(verdict, Refused), f"{claim} was accepted"
    assert await scope.dump() == before
    return verdict


# -- priorities -------------------------------------------------------------------------------------------------------------


def priority_limit(most: int, name: str = "cap", **match: object) -> Apply:
    rule = PolicyRule(match=PolicyMatch(**match), priority_max=most)  # type: ignore[arg-type]
    return Apply(Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=(rule,))))


async def priority_of_new_replica(scope: Scope, name: str, owner: str = "t1", **shape: object) -> int:
    """Priority of a new replica of class `top`, also if the class was declared before a policy."""
    await scope.must(scope.actors["rollout"], Apply(workload(name, owner=owner, priority="top", **shape)))  # type: ignore[arg-type]
    await scope.must(scope.actors["workloads"], Spawn(owner, name, 1, 0))
    return int(scope.row(f"replica/{owner}/{name}-0")["spec"].get("priority", 0))


@scope_test
async def test_new_replicas_respect_priority_limits_of_policies(scope: Scope) -> None:
    assert await priority_of_new_replica(scope, "before") == 1000
    await scope.must(OPERATOR, priority_limit(50, tenants=("t1",)))
    assert await priority_of_new_replica(scope, "ours") == 50
    assert await priority_of_new_replica(scope, "theirs", "t2") == 1000, "the rule does not match the tenant"
    await scope.must(OPERATOR, priority_limit(20, "second", labels={"tier": "batch"}))
    assert await priority_of_new_replica(scope, "batch", labels={"tier": "batch"}) == 20, "the stricter of two rules"
    assert await priority_of_new_replica(scope, "online", labels={"tier": "online"}) == 50
    await scope.must(OPERATOR, priority_limit(5000, "generous"))
    assert await priority_of_new_replica(scope, "theirs-too", "t2") == 1000, "a limit never raises a priority"
    assert scope.row("replica/t1/before-0")["spec"]["priority"] == 1000, "existing replicas keep theirs"


@scope_test
async def test_priority_limit_may_match_workload_name(scope: Scope) -> None:
    """The built-in workload label selects for priorities as it does for placement."""
    await scope.must(OPERATOR, priority_limit(7, labels={"remit/workload": "loud"}))
    assert await priority_of_new_replica(scope, "loud") == 7
    assert await priority_of_new_replica(scope, "quiet") == 1000


@scope_test
async def test_replica_with_limited_priority_preempts_only_below_limit(scope: Scope) -> None:
    (weak,) = await spawn_replicas(scope, "weak", priority="high")
    await bind(scope, weak)
    await scope.must(USER, Apply(workload("strong", priority="top", replicas=1)))
    await scope.must(OPERATOR, priority_limit(100))
    await scope.must(scope.actors["workloads"], Spawn("t1", "strong", 1, 0))
    strong = "replica/t1/strong-0"
    refused = await refusal(scope, Reserve(strong, scope.at(strong), "n1", T1, victims={weak: scope.at(weak)}))
    assert refused.code is Code.VICTIMS and "has priority 100, which is not lower than 100 of " in refused.detail
    assert scope.phase(weak) == "bound"


@scope_test
async def test_class_without_preemption_may_not_preempt(scope: Scope) -> None:
    polite = PriorityClass(metadata=Metadata(name="polite"), spec=PriorityClassSpec(value=500, preempts=False))
    await scope.must(OPERATOR, Apply(polite))
    (weak,) = await spawn_replicas(scope, "weak", cpu="3")
    (strong,) = await spawn_replicas(scope, "strong", cpu="4", priority="polite")
    await bind(scope, weak)
    refused = await refusal(scope, Reserve(strong, scope.at(strong), "n1", T1, victims={weak: scope.at(weak)}))
    assert refused.code is Code.VICTIMS and "does not allow preemption" in refused.detail
    assert scope.phase(weak) == "bound"
    await scope.must(scope.actors["scheduler"], Reserve(strong, scope.at(strong), "n2", T1))


# -- daemons ----------------------------------------------------------------------------------------------------------------


@scope_test
async def test_daemon_has_one_replica_per_node_on_all_nodes(scope: Scope) -> None:
    replicas = await spawn_replicas(scope, "d", 4, replicas=1, type_="daemon")
    (other,) = await spawn_replicas(scope, "e", type_="daemon")
    scheduler = scope.actors["scheduler"]
    first, second = await scope.ask(scheduler, bind_to(scope, replicas[0]), bind_to(scope, replicas[1]))
    assert not isinstance(first, Refused), "a daemon counts nodes, not `replicas`"
    assert isinstance(second, Refused) and second.code is Code.ANTI_AFFINITY, "also within one batch"
    assert await scope.refused(scheduler, bind_to(scope, replicas[1])) is Code.ANTI_AFFINITY
    assert await scope.refused(scheduler, Reserve(replicas[1], scope.at(replicas[1]), "n1", T1)) is Code.ANTI_AFFINITY
    await scope.take_over()
    assert await scope.refused(scheduler, bind_to(scope, replicas[1])) is Code.ANTI_AFFINITY
    await bind(scope, replicas[1], "n2")
    await bind(scope, other)
    await commit_transitions(scope, replicas[0], "remove", "stop")
    assert await scope.refused(scheduler, bind_to(scope, replicas[2])) is Code.ANTI_AFFINITY, "until the old one has stopped"
    await commit_transitions(scope, replicas[0], "stopped")
    await bind(scope, replicas[2])


@scope_test
async def test_daemon_respects_its_anti_affinity(scope: Scope) -> None:
    apart = Placement(anti_affinity=(Affinity(label_selector={"app": "db"}, topology_key="zone"),))
    (db,) = await spawn_replicas(scope, "db", labels={"app": "db"})
    (daemon,) = await spawn_replicas(scope, "d", type_="daemon", placement=apart)
    await bind(scope, db)
    assert await scope.refused(scope.actors["scheduler"], bind_to(scope, daemon)) is Code.ANTI_AFFINITY
    await bind(scope, daemon, "n2")


# -- gangs ------------------------------------------------------------------------------------------------------------------


def bind_gang(scope: Scope, *keys: str, on: str = "n1") -> BindGang:
    return BindGang(tuple(bind_to(scope, key, on) for key in keys))


@pytest.mark.parametrize(
    "gone",
    [("remove",), ("remove", "stop"), ("doubt",), ("start", "run", "finish"), ("start", "crash")],
    ids=lambda moves: moves[-1],
)
def test_member_joins_only_gang_with_enough_working_members(gone: tuple[str, ...]) -> None:
    """Draining, unknown, finished and failed members use capacity but do not count as working."""

    @scope_test
    async def run_test(scope: Scope) -> None:
        a, b, late, later = await spawn_replicas(scope, "g", 4, gang=2, type_="job", replace="eager")
        await scope.must(scope.actors["scheduler"], bind_gang(scope, a, b))
        await commit_transitions(scope, a, *gone)
        refused = await refusal(scope, bind_to(scope, late, "n2"))
        assert refused.code is Code.GANG_SHORT and "gang of at least 2" in refused.detail
        await scope.take_over()
        assert (await refusal(scope, bind_to(scope, late, "n2"))).code is Code.GANG_SHORT
        await scope.must(scope.actors["scheduler"], bind_gang(scope, late, later, on="n2"))

    run_test()


@scope_test
async def test_gang_that_does_not_fit_binds_nothing(scope: Scope) -> None:
    members = await spawn_replicas(scope, "g", 3, gang=3, cpu="2")
    refused = await refusal(scope, bind_gang(scope, *members))
    assert refused.code is Code.GANG_SHORT
    assert refused.detail.startswith("2 members fit, the gang needs at least 3; last misfit: no_room: ")
    assert [scope.phase(key) for key in members] == ["pending"] * 3
    assert used_on(scope, "n1") == 0
    gone = BindGang((*bind_gang(scope, *members[:2]).members, Bind("replica/t1/g-9", 1, "n2", T1)))
    assert "not_found" in (await refusal(scope, gone)).detail
    spread = (*bind_gang(scope, *members[:2]).members, bind_to(scope, members[2], "n2"))
    assert await scope.must(scope.actors["scheduler"], BindGang(spread)) == [3]


@scope_test
async def test_gang_claim_contains_one_gang_only(scope: Scope) -> None:
    ours = await spawn_replicas(scope, "g", 2, gang=2)
    theirs = await spawn_replicas(scope, "h", 2, gang=2)
    (single,) = await spawn_replicas(scope, "w")
    assert (await refusal(scope, bind_gang(scope, *ours, theirs[0]))).code is Code.INVALID
    assert (await refusal(scope, bind_gang(scope, *ours, single))).code is Code.INVALID
    assert (await refusal(scope, bind_gang(scope, single))).code is Code.INVALID
    assert (await refusal(scope, bind_to(scope, ours[0]))).code is Code.GANG_SHORT
    assert [scope.phase(key) for key in (*ours, *theirs, single)] == ["pending"] * 5


@scope_test
async def test_gang_claim_contains_one_generation_only(scope: Scope) -> None:
    """S9: two of the old generation and one of the new are not a gang of three."""
    keys = await spawn_replicas(scope, "g", 2, gang=3, replicas=3)
    await scope.must(USER, Apply(workload("g", "2", 3, gang=3)))
    await scope.must(scope.actors["workloads"], Spawn("t1", "g", 2, 2, 1))
    binds = tuple(Bind(key, scope.at(key), "n1", T1) for key in (*keys, "replica/t1/g-2"))
    assert await scope.refused(scope.actors["scheduler"], BindGang(binds)) == Code.INVALID


@scope_test
async def test_gang_larger_than_replicas_is_refused(scope: Scope) -> None:
    assert await scope.refused(USER, Apply(workload("g", replicas=2, gang=3))) is Code.INVALID
    await scope.must(USER, Apply(workload("g", replicas=3, gang=3)))


# -- reservations -----------------------------------------------------------------------------------------------------------


@scope_test
async def test_reservation_binds_although_grant_expired_or_closed(scope: Scope) -> None:
    """Existing draws stay valid: only new ones end with the grant."""
    budgets, scheduler = scope.actors["budgets"], scope.actors["scheduler"]
    await scope.must(budgets, Issue("offer", slice_of("4", "scheduler", MINUTE)))
    a, b, late = await spawn_replicas(scope, "w", 3)
    for key in (a, b):
        await scope.must(scheduler, Reserve(key, scope.at(key), "n1", "offer"))
    scope.clock.at_ms += 60_000
    assert await scope.refused(scheduler, bind_to(scope, late, grant="offer")) is Code.GRANT_EXPIRED
    assert await scope.refused(scheduler, Reserve(late, scope.at(late), "n1", "offer")) is Code.GRANT_EXPIRED
    await bind(scope, a, grant="offer")
    await scope.must(budgets, Close("offer"))
    await bind(scope, b, grant="offer")
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}, "the draws stay charged"
    assert await scope.refused(scheduler, bind_to(scope, late, grant="offer")) is Code.GRANT_VOID


@scope_test
async def test_released_reservation_is_not_repeated_after_grant_expiry(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler", MINUTE)))
    (key,) = await spawn_replicas(scope, "w")
    await scope.must(scope.actors["scheduler"], Reserve(key, scope.at(key), "n1", "offer"))
    scope.clock.at_ms += 60_000
    await commit_transitions(scope, key, "unreserve")
    assert await scope.refused(scope.actors["scheduler"], bind_to(scope, key, grant="offer")) is Code.GRANT_EXPIRED


@scope_test
async def test_reservation_over_shrunk_quota_is_not_bound(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w", cpu="3")
    await scope.must(scope.actors["scheduler"], Reserve(key, scope.at(key), "n1", T1))
    await scope.must(OPERATOR, Apply(tenant("t1", "2")))
    refused = await refusal(scope, bind_to(scope, key))
    assert refused.code is Code.OVER_QUOTA and refused.detail == "tenant/t1 has 2 cpu free, 3 is needed"
    assert scope.phase(key) == "reserved"


@scope_test
async def test_reservation_needs_pending_existing_replica_and_current_victims(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await bind(scope, key)
    assert (await refusal(scope, Reserve(key, scope.at(key), "n1", T1))).code is Code.PHASE
    assert (await refusal(scope, bind_to(scope, key))).code is Code.PHASE
    assert (await refusal(scope, Reserve("replica/t1/none-0", 1, "n1", T1))).code is Code.NOT_FOUND
    (strong,) = await spawn_replicas(scope, "s", priority="high")
    (twice,) = await spawn_replicas(scope, "t")
    await scope.must(scope.actors["scheduler"], Reserve(twice, scope.at(twice), "n1", T1))
    assert (await refusal(scope, Reserve(twice, scope.at(twice), "n1", T1))).code is Code.PHASE
    stale = Reserve(strong, scope.at(strong), "n1", T1, victims={key: scope.at(key) - 1})
    assert (await refusal(scope, stale)).code is Code.REVISION, "victims need their current revision too"


# -- offers and quota -------------------------------------------------------------------------------------------------------


@scope_test
async def test_offer_draw_is_charged_to_tenant_quota_too(scope: Scope) -> None:
    """An offer grants capacity, not quota: both must cover the draw."""
    spec = GrantSpec(holder="scheduler", amount=amounts(cpu="8"), purpose="offer", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("offer", spec))
    await scope.must(OPERATOR, Apply(tenant("t1", "1")))
    a, b = await spawn_replicas(scope, "w", 2)
    await bind(scope, a, grant="offer")
    assert scope.row(a)["status"]["grants"] == ["offer", T1]
    assert (await refusal(scope, bind_to(scope, b, grant="offer"))).code is Code.OVER_QUOTA


# -- node constraints -------------------------------------------------------------------------------------------------------


@scope_test
async def test_bind_respects_selector_taints_and_affinity(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n2", zone="b", labels={"disk": "ssd"}, taints=(TAINTED,))))
    (fast,) = await spawn_replicas(scope, "fast", placement=Placement(node_selector={"disk": "ssd"}))
    assert (await refusal(scope, bind_to(scope, fast))).code is Code.SELECTOR
    assert (await refusal(scope, bind_to(scope, fast, "n2"))).code is Code.TAINT
    tolerant = Placement(node_selector={"disk": "ssd"}, tolerations=(Toleration(key="dedicated", operator="Exists"),))
    (welcome,) = await spawn_replicas(scope, "welcome", placement=tolerant, labels={"app": "x"})
    near = Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
    (follower,) = await spawn_replicas(scope, "follower", placement=near)
    assert (await refusal(scope, bind_to(scope, follower))).code is Code.AFFINITY, "no matching neighbour"
    await bind(scope, welcome, "n2")
    assert (await refusal(scope, bind_to(scope, follower))).code is Code.AFFINITY, "neighbour in another zone"


@scope_test
async def test_bind_to_unready_node_is_refused_with_health(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    await scope.must(scope.actors["node-lifecycle"], Mark("n1", scope.at("node/n1"), NodeHealth.SUSPECT))
    refused = await refusal(scope, bind_to(scope, key))
    assert refused.code is Code.NODE_UNREADY and refused.detail.endswith("the node is suspect")
