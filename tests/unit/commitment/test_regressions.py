"""Would anybody notice if a guard were gone? Lapsed leases, old evidence, one batch's own changes, whose grant it is."""

from __future__ import annotations

from remit.model.claims import (
    Accepted,
    Acquire,
    Actor,
    Apply,
    Bind,
    BindGang,
    Close,
    Code,
    Delete,
    Evidence,
    Issue,
    Mark,
    Operation,
    Refused,
    Renew,
    Reserve,
    Role,
    Spawn,
    Verdict,
)
from remit.model.kinds import Affinity, NodeHealth, Placement, Policy, PolicyAllow, PolicyRule, PolicySpec, Spread, Standby
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec
from remit.model.resources import Duration
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, node, story, workload
from tests.unit.commitment.authority_fixture import T1, bind, move, moving, slice_of, spawned

TEN_SECONDS = Duration(10_000)
APART = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
EVEN = Placement(topology_spread=(Spread(topology_key="zone"),))


def to(scope: Scope, key: str, name: str = "n1", grant: str = T1) -> Bind:
    return Bind(key, scope.at(key), name, grant)


def only_in(*zones: str) -> Apply:
    rule = PolicyRule(allow=PolicyAllow(zones=zones))
    return Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,))))


async def joined(scope: Scope, name: str, zone: str) -> None:
    """One more node, and ready."""
    await scope.must(OPERATOR, Apply(node(name, zone=zone)))
    await scope.must(scope.actors["node-lifecycle"], Mark(name, scope.at(f"node/{name}"), NodeHealth.READY))


async def batch(scope: Scope, *operations: Operation) -> list[Code | None]:
    """All in one batch; why each was refused, or None."""
    verdicts = await scope.send(operations)
    assert isinstance(verdicts, list)
    assert len({verdict.revision for verdict in verdicts}) == 1, "they were not decided together"
    return [code(verdict) for verdict in verdicts]


def code(verdict: Verdict) -> Code | None:
    return verdict.code if isinstance(verdict, Refused) else None


async def scheduler_called(scope: Scope, name: str, ttl: Duration = HOUR) -> Actor:
    await scope.acquire(f"scheduler/{name}", ttl=ttl)
    return scope.actors[f"scheduler/{name}"]


# -- leases -----------------------------------------------------------------------------------------------------------------


@story
async def test_a_lease_that_was_not_renewed_lets_nobody_act(scope: Scope) -> None:
    a, b = await spawned(scope, "w", 2)
    holder = await scheduler_called(scope, "x", TEN_SECONDS)
    scope.clock.at_ms += 10_000
    await scope.must(holder, to(scope, a))
    scope.clock.at_ms += 1
    assert await scope.refused(holder, to(scope, b)) is Code.LEASE_EXPIRED
    assert not await scope.lead.authority.renew(holder), "what has lapsed is acquired anew, not renewed"
    assert await scope.refused(holder, to(scope, b)) is Code.LEASE_EXPIRED


@story
async def test_a_lease_that_is_renewed_in_time_goes_on(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    holder = await scheduler_called(scope, "x", TEN_SECONDS)
    for _ in range(3):
        scope.clock.at_ms += 9_000
        assert await scope.lead.authority.renew(holder)
    scope.clock.at_ms += 9_000
    await scope.must(holder, to(scope, key))


@story
async def test_nobody_without_a_lease_of_their_own_renews_one(scope: Scope) -> None:
    """An operator acts without a lease, and so has none to renew, whatever it names: only the agent ends its silence."""
    named = Actor(OPERATOR.name, OPERATOR.role, "agent/n1", scope.actors["agent/n1"].epoch)
    scope.clock.at_ms += 1
    assert not await scope.lead.authority.renew(named)
    assert scope.lead.authority.renewals.renewed_ms["agent/n1"] == scope.clock.at_ms - 1


@story
async def test_a_lease_is_taken_from_its_holder_only_once_it_has_lapsed(scope: Scope) -> None:
    (key,) = await spawned(scope, "w")
    holder = await scheduler_called(scope, "x", TEN_SECONDS)
    rival, taking = Actor("rival", Role.SCHEDULER), Acquire("scheduler/x", TEN_SECONDS)
    scope.clock.at_ms += 10_000
    assert await scope.refused(rival, taking) is Code.LEASE_HELD
    scope.clock.at_ms += 1
    assert await scope.must(rival, taking) == [holder.epoch + 1]
    assert await scope.refused(holder, to(scope, key)) is Code.STALE_EPOCH


# -- evidence ---------------------------------------------------------------------------------------------------------------


@story
async def test_nothing_is_placed_on_evidence_older_than_a_minute(scope: Scope) -> None:
    a, b, _ = await spawned(scope, "w", 3)
    scheduler, old, last = scope.actors["scheduler"], Evidence(age_ms=60_001), Evidence(age_ms=60_000)
    reserving = Reserve(b, scope.at(b), "n1", T1)
    assert await scope.refused(scheduler, to(scope, a), old) is Code.STALE_EVIDENCE
    assert await scope.refused(scheduler, reserving, old) is Code.STALE_EVIDENCE
    for claim in (to(scope, a), reserving):
        (verdict,) = await scope.ask(scheduler, claim, evidence=last)
        assert isinstance(verdict, Accepted)
    assert await scope.refused(scheduler, to(scope, b), old) is Code.STALE_EVIDENCE, "nor is a reservation bound"


@story
async def test_no_gang_is_bound_on_evidence_older_than_a_minute(scope: Scope) -> None:
    members = await spawned(scope, "g", 2, gang=2)
    binds = BindGang(tuple(to(scope, key) for key in members))
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, binds, Evidence(age_ms=60_001)) is Code.GANG_SHORT
    await scope.must(scheduler, binds)


# -- within one batch -------------------------------------------------------------------------------------------------------


@story
async def test_a_policy_binds_the_next_claim_of_its_own_batch(scope: Scope) -> None:
    a, b, c = await spawned(scope, "w", 3)
    scheduler = scope.actors["scheduler"]
    await bind(scope, a)
    answers = await batch(
        scope,
        await scope.operation(OPERATOR, only_in("b")),
        await scope.operation(scheduler, to(scope, b, "n1")),
        await scope.operation(OPERATOR, only_in("a")),
        await scope.operation(scheduler, to(scope, b, "n1")),
        await scope.operation(scheduler, to(scope, c, "n2")),
    )
    assert answers == [None, Code.POLICY, None, None, Code.POLICY]
    assert scope.row(b)["status"]["policy"] == 2, "as the second policy allowed"
    assert await scope.refused(scheduler, to(scope, c, "n2")) is Code.POLICY, "and in every later batch"
    assert await scope.refused(scheduler, Reserve(c, scope.at(c), "n2", T1)) is Code.POLICY


@story
async def test_a_workload_deleted_earlier_in_a_batch_is_bound_no_more(scope: Scope) -> None:
    a, b = await spawned(scope, "w", 2)
    scheduler = scope.actors["scheduler"]
    await bind(scope, a)
    answers = await batch(
        scope,
        await scope.operation(USER, Delete("Workload", "w", "t1")),
        await scope.operation(scheduler, to(scope, b)),
    )
    assert answers == [None, Code.DELETING]
    assert await scope.refused(scheduler, to(scope, b)) is Code.DELETING, "and in every later batch"


@story
async def test_a_workload_bound_and_then_deleted_in_one_batch_is_bound_no_more(scope: Scope) -> None:
    a, b = await spawned(scope, "w", 2)
    scheduler = scope.actors["scheduler"]
    answers = await batch(
        scope,
        await scope.operation(OPERATOR, only_in("a")),
        await scope.operation(scheduler, to(scope, a)),
        await scope.operation(USER, Delete("Workload", "w", "t1")),
        await scope.operation(scheduler, to(scope, b)),
    )
    assert answers == [None, None, None, Code.DELETING]


@story
async def test_a_workload_changed_earlier_in_a_batch_leaves_older_replicas_as_they_were_asked_for(scope: Scope) -> None:
    (old,) = await spawned(scope, "w", cpu="3", replicas=2)
    answers = await batch(
        scope,
        await scope.operation(USER, Apply(workload("w", cpu="1", replicas=2))),
        await scope.operation(scope.actors["workloads"], Spawn("t1", "w", 2, 1)),
        await scope.operation(scope.actors["scheduler"], to(scope, old)),
    )
    assert answers == [None, None, None]
    new = "replica/t1/w-1"
    await bind(scope, new)
    assert scope.books.nodes["n1"].free["cpu"] == 0, "3 and 1 of 4: each by its own generation"


# -- after a node has moved -------------------------------------------------------------------------------------------------


@story
async def test_later_batches_spread_over_the_zones_where_nodes_are_now(scope: Scope) -> None:
    a, b, c = await spawned(scope, "w", 3, placement=EVEN)
    await joined(scope, "n3", "b")
    await bind(scope, a, "n1")
    await bind(scope, b, "n2")
    await scope.must(OPERATOR, Apply(node("n2", zone="a")))
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, to(scope, c, "n1")) is Code.SPREAD, "two are in a now, and none in b"
    await bind(scope, c, "n3")


@story
async def test_a_zone_without_nodes_is_no_longer_to_be_filled(scope: Scope) -> None:
    a, b = await spawned(scope, "w", 2, placement=EVEN)
    await bind(scope, a, "n1")
    assert await scope.refused(scope.actors["scheduler"], to(scope, b, "n1")) is Code.SPREAD, "b is empty"
    await scope.must(OPERATOR, Apply(node("n2", zone="a")))
    await bind(scope, b, "n1")


@story
async def test_later_batches_keep_apart_by_the_zones_where_nodes_are_now(scope: Scope) -> None:
    a, b = await spawned(scope, "w", 2, placement=APART, labels={"app": "x"})
    (other,) = await spawned(scope, "v", labels={"app": "x"})
    await joined(scope, "n3", "a")
    await bind(scope, a, "n1")
    scheduler = scope.actors["scheduler"]
    for key in (b, other):
        assert await scope.refused(scheduler, to(scope, key, "n3")) is Code.ANTI_AFFINITY
    await scope.must(OPERATOR, Apply(node("n1", zone="b", gpus=2)))
    for key in (b, other):
        assert await scope.refused(scheduler, to(scope, key, "n2")) is Code.ANTI_AFFINITY, "its neighbour moved in"
    await bind(scope, b, "n3")


@story
async def test_a_node_may_go_in_the_batch_in_which_its_last_replica_goes(scope: Scope) -> None:
    """Its replica was counted in a zone that nobody can look up any more."""
    a, b = await spawned(scope, "w", 2, placement=APART, labels={"app": "x"})
    await joined(scope, "n3", "a")
    await bind(scope, a, "n1")
    assert await scope.refused(scope.actors["scheduler"], to(scope, b, "n3")) is Code.ANTI_AFFINITY
    await move(scope, a, "remove", "stop")
    actor, claim = moving(scope, a, "stopped")
    gone = await scope.operation(OPERATOR, Delete("Node", "n1"))
    assert await batch(scope, await scope.operation(actor, claim), gone) == [None, None]
    await bind(scope, b, "n3")


# -- whose grant it is ------------------------------------------------------------------------------------------------------


@story
async def test_a_grant_is_drawn_on_by_its_holder_alone(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler/x")))
    await scope.must(scope.actors["budgets"], Issue("by-name", slice_of("4", "scheduler/x!")))
    a, b = await spawned(scope, "w", 2)
    holder, rival = await scheduler_called(scope, "x"), await scheduler_called(scope, "y")
    for name in ("offer", "by-name"):
        assert await scope.refused(rival, to(scope, a, grant=name)) is Code.NOT_OWNER
        assert await scope.refused(scope.actors["scheduler"], to(scope, a, grant=name)) is Code.NOT_OWNER
    await scope.must(holder, to(scope, a, grant="offer"), to(scope, b, grant="by-name"))


@story
async def test_a_grant_is_drawn_on_for_its_tenant_alone(scope: Scope) -> None:
    amount, budgets = amounts(cpu="4"), scope.actors["budgets"]
    await scope.must(budgets, Issue("slice", slice_of("4", "scheduler")))
    await scope.must(
        budgets, Issue("offer", GrantSpec(holder="scheduler", amount=amount, tenant="t1", purpose="offer", ttl=HOUR))
    )
    await scope.must(USER, Apply(workload("v", owner="t2")))
    await scope.must(scope.actors["workloads"], Spawn("t2", "v", 1, 0))
    ours = await spawned(scope, "w", 2)
    for key, grant in zip(ours, ("slice", "offer"), strict=True):
        assert await scope.refused(scope.actors["scheduler"], to(scope, "replica/t2/v-0", grant=grant)) is Code.NOT_OWNER
        await bind(scope, key, grant=grant)


@story
async def test_a_budget_is_drawn_on_only_for_tenants_that_have_a_share_of_it(scope: Scope) -> None:
    shares = {"t2": amounts(cpu="1")}
    spec = GrantSpec(holder="scheduler", amount=amounts(cpu="1"), shares=shares, purpose="budget", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("recovery", spec))
    (key,) = await spawned(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], to(scope, key, grant="recovery")) is Code.NOT_OWNER


@story
async def test_a_scheduler_hands_on_only_what_it_holds(scope: Scope) -> None:
    holder, rival = await scheduler_called(scope, "x"), await scheduler_called(scope, "y")
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler/x")))
    part = Issue("part", slice_of("1", "scheduler/y", parent="offer"))
    assert await scope.refused(rival, part) is Code.NOT_OWNER
    assert await scope.refused(holder, Issue("quota", slice_of("1", "scheduler/x"))) is Code.NOT_OWNER, (
        "the quota is not its own"
    )
    await scope.must(holder, part)
    (key,) = await spawned(scope, "w")
    assert await scope.refused(holder, to(scope, key, grant="part")) is Code.NOT_OWNER, "it handed that on"
    await scope.must(rival, to(scope, key, grant="part"))


@story
async def test_a_scheduler_renews_and_closes_only_what_it_holds_or_has_handed_on(scope: Scope) -> None:
    holder, rival = await scheduler_called(scope, "x"), await scheduler_called(scope, "y")
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler/x")))
    await scope.must(holder, Issue("part", slice_of("1", "scheduler/y", parent="offer")))
    for claim in (Renew("offer"), Close("offer")):
        assert await scope.refused(rival, claim) is Code.NOT_OWNER
    await scope.must(rival, Renew("part"))
    await scope.must(holder, Renew("part"), Close("part"), Renew("offer"), Close("offer"))


@story
async def test_a_scheduler_makes_no_budgets(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler")))
    shares = {"t2": amounts(cpu="1")}
    spec = GrantSpec(holder="x", amount=amounts(cpu="1"), shares=shares, parent="offer", purpose="budget", ttl=HOUR)
    assert await scope.refused(scope.actors["scheduler"], Issue("own", spec)) is Code.NOT_OWNER


# -- gangs ------------------------------------------------------------------------------------------------------------------


@story
async def test_a_gang_lives_in_one_region_and_has_no_standby(scope: Scope) -> None:
    wide = Placement(regions=("r1", "r2"))
    spare = Placement(regions=("r1",), standby=(Standby(region="r2", replicas=1, budget="recovery"),))
    for where in (wide, spare):
        assert await scope.refused(USER, Apply(workload("g", gang=2, placement=where))) is Code.INVALID
        await scope.must(USER, Apply(workload("loose", placement=where)))
        assert await scope.refused(USER, Apply(workload("loose", gang=2, placement=where))) is Code.INVALID, "nor later"
    await scope.must(USER, Apply(workload("g", gang=2, placement=Placement(regions=("r1",)))))
