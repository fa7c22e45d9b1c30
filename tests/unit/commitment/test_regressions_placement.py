"""Would anybody notice if a promise about placing were broken? Ranks, daemons, gangs, reservations, and where a node stands."""

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
from tests.properties.authority_world import HOUR, OPERATOR, TAINTED, USER, Scope, amounts, node, story, tenant, workload
from tests.unit.commitment.authority_fixture import T1, bind, held, move, slice_of, spawned

MINUTE = Duration(60_000)


def to(scope: Scope, key: str, name: str = "n1", grant: str = T1) -> Bind:
    return Bind(key, scope.at(key), name, grant)


async def refusal(scope: Scope, claim: Bind | Reserve | BindGang) -> Refused:
    before = await scope.dump()
    (verdict,) = await scope.ask(scope.actors["scheduler"], claim)
    assert isinstance(verdict, Refused), f"{claim} was accepted"
    assert await scope.dump() == before
    return verdict


# -- ranks ------------------------------------------------------------------------------------------------------------------


def capped(most: int, name: str = "cap", **match: object) -> Apply:
    rule = PolicyRule(match=PolicyMatch(**match), priority_max=most)  # type: ignore[arg-type]
    return Apply(Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=(rule,))))


async def priority(scope: Scope, name: str, owner: str = "t1", **shape: object) -> int:
    """The priority that a new replica is given: also one whose author wrote its class before there was a rule."""
    await scope.must(scope.actors["rollout"], Apply(workload(name, owner=owner, priority="top", **shape)))  # type: ignore[arg-type]
    await scope.must(scope.actors["workloads"], Spawn(owner, name, 1, 0))
    return int(scope.row(f"replica/{owner}/{name}-0")["spec"].get("priority", 0))


@story
async def test_no_replica_ranks_above_what_the_policies_allow_its_tenant(scope: Scope) -> None:
    assert await priority(scope, "before") == 1000
    await scope.must(OPERATOR, capped(50, tenants=("t1",)))
    assert await priority(scope, "ours") == 50
    assert await priority(scope, "theirs", "t2") == 1000, "the rule does not speak of them"
    await scope.must(OPERATOR, capped(20, "second", labels={"tier": "batch"}))
    assert await priority(scope, "batch", labels={"tier": "batch"}) == 20, "of two rules the stricter"
    assert await priority(scope, "online", labels={"tier": "online"}) == 50
    await scope.must(OPERATOR, capped(5000, "generous"))
    assert await priority(scope, "theirs-too", "t2") == 1000, "a limit raises nobody"
    assert scope.row("replica/t1/before-0")["spec"]["priority"] == 1000, "and is of new replicas alone"


@story
async def test_a_rank_can_be_limited_by_the_name_of_the_workload_as_places_can(scope: Scope) -> None:
    """A rule that speaks of a workload by its own label binds its rank as it binds its place."""
    await scope.must(OPERATOR, capped(7, labels={"remit/workload": "loud"}))
    assert await priority(scope, "loud") == 7
    assert await priority(scope, "quiet") == 1000


@story
async def test_work_whose_rank_was_limited_preempts_only_what_is_below_the_limit(scope: Scope) -> None:
    (weak,) = await spawned(scope, "weak", priority="high")
    await bind(scope, weak)
    await scope.must(USER, Apply(workload("strong", priority="top", replicas=1)))
    await scope.must(OPERATOR, capped(100))
    await scope.must(scope.actors["workloads"], Spawn("t1", "strong", 1, 0))
    strong = "replica/t1/strong-0"
    said = await refusal(scope, Reserve(strong, scope.at(strong), "n1", T1, victims={weak: scope.at(weak)}))
    assert said.code is Code.VICTIMS and "has priority 100, which is not lower than 100 of " in said.detail
    assert scope.phase(weak) == "bound"


@story
async def test_a_class_that_preempts_nobody_waits_its_turn(scope: Scope) -> None:
    polite = PriorityClass(metadata=Metadata(name="polite"), spec=PriorityClassSpec(value=500, preempts=False))
    await scope.must(OPERATOR, Apply(polite))
    (weak,) = await spawned(scope, "weak", cpu="3")
    (strong,) = await spawned(scope, "strong", cpu="4", priority="polite")
    await bind(scope, weak)
    said = await refusal(scope, Reserve(strong, scope.at(strong), "n1", T1, victims={weak: scope.at(weak)}))
    assert said.code is Code.VICTIMS and "does not allow preemption" in said.detail
    assert scope.phase(weak) == "bound"
    await scope.must(scope.actors["scheduler"], Reserve(strong, scope.at(strong), "n2", T1))


# -- daemons ----------------------------------------------------------------------------------------------------------------


@story
async def test_a_daemon_has_one_replica_a_node_and_as_many_as_there_are_nodes(scope: Scope) -> None:
    replicas = await spawned(scope, "d", 4, replicas=1, type_="daemon")
    (other,) = await spawned(scope, "e", type_="daemon")
    scheduler = scope.actors["scheduler"]
    first, second = await scope.ask(scheduler, to(scope, replicas[0]), to(scope, replicas[1]))
    assert not isinstance(first, Refused), "more of them than `replicas` says: a daemon counts nodes"
    assert isinstance(second, Refused) and second.code is Code.ANTI_AFFINITY, "in one batch too"
    assert await scope.refused(scheduler, to(scope, replicas[1])) is Code.ANTI_AFFINITY
    assert await scope.refused(scheduler, Reserve(replicas[1], scope.at(replicas[1]), "n1", T1)) is Code.ANTI_AFFINITY
    await scope.take_over()
    assert await scope.refused(scheduler, to(scope, replicas[1])) is Code.ANTI_AFFINITY
    await bind(scope, replicas[1], "n2")
    await bind(scope, other)
    await move(scope, replicas[0], "remove", "stop")
    assert await scope.refused(scheduler, to(scope, replicas[2])) is Code.ANTI_AFFINITY, "until the old one is gone"
    await move(scope, replicas[0], "stopped")
    await bind(scope, replicas[2])


@story
async def test_a_daemon_keeps_what_else_it_must_stay_away_from(scope: Scope) -> None:
    apart = Placement(anti_affinity=(Affinity(label_selector={"app": "db"}, topology_key="zone"),))
    (db,) = await spawned(scope, "db", labels={"app": "db"})
    (daemon,) = await spawned(scope, "d", type_="daemon", placement=apart)
    await bind(scope, db)
    assert await scope.refused(scope.actors["scheduler"], to(scope, daemon)) is Code.ANTI_AFFINITY
    await bind(scope, daemon, "n2")


# -- gangs ------------------------------------------------------------------------------------------------------------------


def together(scope: Scope, *keys: str, on: str = "n1") -> BindGang:
    return BindGang(tuple(to(scope, key, on) for key in keys))


@pytest.mark.parametrize(
    "gone",
    [("remove",), ("remove", "stop"), ("doubt",), ("start", "run", "finish"), ("start", "crash")],
    ids=lambda moves: moves[-1],
)
def test_a_straggler_joins_only_a_gang_that_still_works(gone: tuple[str, ...]) -> None:
    """One that drains, is unknown, has finished or failed holds room, and is no member that works."""

    @story
    async def tell(scope: Scope) -> None:
        a, b, late, later = await spawned(scope, "g", 4, gang=2, type_="job", replace="eager")
        await scope.must(scope.actors["scheduler"], together(scope, a, b))
        await move(scope, a, *gone)
        said = await refusal(scope, to(scope, late, "n2"))
        assert said.code is Code.GANG_SHORT and "gang of at least 2" in said.detail
        await scope.take_over()
        assert (await refusal(scope, to(scope, late, "n2"))).code is Code.GANG_SHORT
        await scope.must(scope.actors["scheduler"], together(scope, late, later, on="n2"))

    tell()


@story
async def test_of_a_gang_that_does_not_fit_nothing_is_bound(scope: Scope) -> None:
    members = await spawned(scope, "g", 3, gang=3, cpu="2")
    said = await refusal(scope, together(scope, *members))
    assert said.code is Code.GANG_SHORT
    assert said.detail.startswith("2 members fit, the gang needs at least 3; last misfit: no_room: ")
    assert [scope.phase(key) for key in members] == ["pending"] * 3
    assert held(scope, "n1") == 0
    gone = BindGang((*together(scope, *members[:2]).members, Bind("replica/t1/g-9", 1, "n2", T1)))
    assert "not_found" in (await refusal(scope, gone)).detail
    spread = (*together(scope, *members[:2]).members, to(scope, members[2], "n2"))
    assert await scope.must(scope.actors["scheduler"], BindGang(spread)) == [3]


@story
async def test_a_gang_claim_is_of_one_gang(scope: Scope) -> None:
    ours = await spawned(scope, "g", 2, gang=2)
    theirs = await spawned(scope, "h", 2, gang=2)
    (single,) = await spawned(scope, "w")
    assert (await refusal(scope, together(scope, *ours, theirs[0]))).code is Code.INVALID
    assert (await refusal(scope, together(scope, *ours, single))).code is Code.INVALID
    assert (await refusal(scope, together(scope, single))).code is Code.INVALID
    assert (await refusal(scope, to(scope, ours[0]))).code is Code.GANG_SHORT
    assert [scope.phase(key) for key in (*ours, *theirs, single)] == ["pending"] * 5


@story
async def test_a_gang_claim_is_of_one_generation(scope: Scope) -> None:
    """S9: two of the old one and one of the new are no gang of three, neither of them."""
    keys = await spawned(scope, "g", 2, gang=3, replicas=3)
    await scope.must(USER, Apply(workload("g", "2", 3, gang=3)))
    await scope.must(scope.actors["workloads"], Spawn("t1", "g", 2, 2, 1))
    binds = tuple(Bind(key, scope.at(key), "n1", T1) for key in (*keys, "replica/t1/g-2"))
    assert await scope.refused(scope.actors["scheduler"], BindGang(binds)) == Code.INVALID


@story
async def test_a_gang_that_can_never_be_bound_is_not_declared(scope: Scope) -> None:
    assert await scope.refused(USER, Apply(workload("g", replicas=2, gang=3))) is Code.INVALID
    await scope.must(USER, Apply(workload("g", replicas=3, gang=3)))


# -- reservations -----------------------------------------------------------------------------------------------------------


@story
async def test_a_reservation_is_bound_though_its_grant_ran_out_or_was_closed(scope: Scope) -> None:
    """What was drawn stays drawn: only new draws end with the grant."""
    budgets, scheduler = scope.actors["budgets"], scope.actors["scheduler"]
    await scope.must(budgets, Issue("offer", slice_of("4", "scheduler", MINUTE)))
    a, b, late = await spawned(scope, "w", 3)
    for key in (a, b):
        await scope.must(scheduler, Reserve(key, scope.at(key), "n1", "offer"))
    scope.clock.at_ms += 60_000
    assert await scope.refused(scheduler, to(scope, late, grant="offer")) is Code.GRANT_EXPIRED
    assert await scope.refused(scheduler, Reserve(late, scope.at(late), "n1", "offer")) is Code.GRANT_EXPIRED
    await bind(scope, a, grant="offer")
    await scope.must(budgets, Close("offer"))
    await bind(scope, b, grant="offer")
    assert scope.books.grants[T1].granted_on == {"cpu": 2000}, "and stays charged"
    assert await scope.refused(scheduler, to(scope, late, grant="offer")) is Code.GRANT_VOID


@story
async def test_a_reservation_that_is_given_up_after_its_grant_ran_out_is_not_made_again(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler", MINUTE)))
    (key,) = await spawned(scope, "w")
    await scope.must(scope.actors["scheduler"], Reserve(key, scope.at(key), "n1", "offer"))
    scope.clock.at_ms += 60_000
    await move(scope, key, "unreserve")
    assert await scope.refused(scope.actors["scheduler"], to(scope, key, grant="offer")) is Code.GRANT_EXPIRED


@story
async def test_a_reservation_is_not_bound_above_a_quota_that_shrank_since(scope: Scope) -> None:
    (key,) = await spawned(scope, "w", cpu="3")
    await scope.must(scope.actors["scheduler"], Reserve(key, scope.at(key), "n1", T1))
    await scope.must(OPERATOR, Apply(tenant("t1", "2")))
    said = await refusal(scope, to(scope, key))
    assert said.code is Code.OVER_QUOTA and said.detail == "tenant/t1 has 2 cpu free, 3 is needed"
    assert scope.phase(key) == "reserved"


@story
async def test_only_what_is_pending_is_reserved_for_and_only_what_is_there(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await bind(scope, key)
    assert (await refusal(scope, Reserve(key, scope.at(key), "n1", T1))).code is Code.PHASE
    assert (await refusal(scope, to(scope, key))).code is Code.PHASE
    assert (await refusal(scope, Reserve("replica/t1/none-0", 1, "n1", T1))).code is Code.NOT_FOUND
    (strong,) = await spawned(scope, "s", priority="high")
    (twice,) = await spawned(scope, "t")
    await scope.must(scope.actors["scheduler"], Reserve(twice, scope.at(twice), "n1", T1))
    assert (await refusal(scope, Reserve(twice, scope.at(twice), "n1", T1))).code is Code.PHASE
    stale = Reserve(strong, scope.at(strong), "n1", T1, victims={key: scope.at(key) - 1})
    assert (await refusal(scope, stale)).code is Code.REVISION, "a victim is as it was seen, too"


# -- an offer's other side --------------------------------------------------------------------------------------------------


@story
async def test_an_offer_is_charged_to_the_quota_of_whoever_it_is_used_for(scope: Scope) -> None:
    """An offer is authority over room, not over a tenant's quota: both must cover the draw."""
    spec = GrantSpec(holder="scheduler", amount=amounts(cpu="8"), purpose="offer", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("offer", spec))
    await scope.must(OPERATOR, Apply(tenant("t1", "1")))
    a, b = await spawned(scope, "w", 2)
    await bind(scope, a, grant="offer")
    assert scope.row(a)["status"]["grants"] == ["offer", T1]
    assert (await refusal(scope, to(scope, b, grant="offer"))).code is Code.OVER_QUOTA


# -- where a node stands ----------------------------------------------------------------------------------------------------


@story
async def test_a_node_is_taken_by_its_labels_taints_and_neighbours(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(node("n2", zone="b", labels={"disk": "ssd"}, taints=(TAINTED,))))
    (fast,) = await spawned(scope, "fast", placement=Placement(node_selector={"disk": "ssd"}))
    assert (await refusal(scope, to(scope, fast))).code is Code.SELECTOR
    assert (await refusal(scope, to(scope, fast, "n2"))).code is Code.TAINT
    tolerant = Placement(node_selector={"disk": "ssd"}, tolerations=(Toleration(key="dedicated", operator="Exists"),))
    (welcome,) = await spawned(scope, "welcome", placement=tolerant, labels={"app": "x"})
    near = Placement(affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
    (follower,) = await spawned(scope, "follower", placement=near)
    assert (await refusal(scope, to(scope, follower))).code is Code.AFFINITY, "nobody to be near"
    await bind(scope, welcome, "n2")
    assert (await refusal(scope, to(scope, follower))).code is Code.AFFINITY, "not there"


@story
async def test_a_node_that_is_not_ready_takes_nothing_and_says_why(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    await scope.must(scope.actors["node-lifecycle"], Mark("n1", scope.at("node/n1"), NodeHealth.SUSPECT))
    said = await refusal(scope, to(scope, key))
    assert said.code is Code.NODE_UNREADY and said.detail.endswith("the node is suspect")
