"""Regression tests of guards: leases, evidence, claims of one batch, ownership of grants."""

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
    Spawn,
    Verdict,
)
from remit.model.kinds import Affinity, NodeHealth, Placement, Policy, PolicyAllow, PolicyRule, PolicySpec, Spread, Standby
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec
from remit.model.resources import Duration
from remit.model.roles import Role
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, node, scope_test, workload
from tests.unit.commitment.authority_fixture import T1, bind, commit_transitions, slice_of, spawn_replicas, transition_claim

TEN_SECONDS = Duration(10_000)
APART = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
EVEN = Placement(topology_spread=(Spread(topology_key="zone"),))


def bind_to(scope: Scope, key: str, name: str = "n1", grant: str = T1) -> Bind:
    return Bind(key, scope.at(key), name, grant)


def only_in(*zones: str) -> Apply:
    rule = PolicyRule(allow=PolicyAllow(zones=zones))
    return Apply(Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(rule,))))


async def join_node(scope: Scope, name: str, zone: str) -> None:
    """Add one node and mark it ready."""
    await scope.must(OPERATOR, Apply(node(name, zone=zone)))
    await scope.must(scope.actors["node-lifecycle"], Mark(name, scope.at(f"node/{name}"), NodeHealth.READY))


async def send_batch(scope: Scope, *operations: Operation) -> list[Code | None]:
    """Send all in one batch; the refusal code of each, or None."""
    verdicts = await scope.send(operations)
    assert isinstance(verdicts, list)
    assert len({verdict.revision for verdict in verdicts}) == 1, "not decided in one batch"
    return [code(verdict) for verdict in verdicts]


def code(verdict: Verdict) -> Code | None:
    return verdict.code if isinstance(verdict, Refused) else None


async def acquire_scheduler(scope: Scope, name: str, ttl: Duration = HOUR) -> Actor:
    await scope.acquire(f"scheduler/{name}", ttl=ttl)
    return scope.actors[f"scheduler/{name}"]


# -- leases -----------------------------------------------------------------------------------------------------------------


@scope_test
async def test_expired_lease_refuses_claims_and_renewal(scope: Scope) -> None:
    a, b = await spawn_replicas(scope, "w", 2)
    holder = await acquire_scheduler(scope, "x", TEN_SECONDS)
    scope.clock.at_ms += 10_000
    await scope.must(holder, bind_to(scope, a))
    scope.clock.at_ms += 1
    assert await scope.refused(holder, bind_to(scope, b)) is Code.LEASE_EXPIRED
    assert not await scope.lead.authority.renew(holder), "an expired lease must be acquired again"
    assert await scope.refused(holder, bind_to(scope, b)) is Code.LEASE_EXPIRED


@scope_test
async def test_lease_renewed_in_time_stays_valid(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    holder = await acquire_scheduler(scope, "x", TEN_SECONDS)
    for _ in range(3):
        scope.clock.at_ms += 9_000
        assert await scope.lead.authority.renew(holder)
    scope.clock.at_ms += 9_000
    await scope.must(holder, bind_to(scope, key))


@scope_test
async def test_renewal_without_own_lease_is_refused(scope: Scope) -> None:
    """An operator acts without a lease, so it cannot renew an agent's: only the agent ends its own silence."""
    named = Actor(OPERATOR.name, OPERATOR.role, "agent/n1", scope.actors["agent/n1"].epoch)
    scope.clock.at_ms += 1
    assert not await scope.lead.authority.renew(named)
    assert scope.lead.authority.renewals.renewed_ms["agent/n1"] == scope.clock.at_ms - 1


@scope_test
async def test_lease_is_taken_over_only_after_expiry(scope: Scope) -> None:
    (key,) = await spawn_replicas(scope, "w")
    holder = await acquire_scheduler(scope, "x", TEN_SECONDS)
    rival, taking = Actor("rival", Role.SCHEDULER), Acquire("scheduler/x", TEN_SECONDS)
    scope.clock.at_ms += 10_000
    assert await scope.refused(rival, taking) is Code.LEASE_HELD
    scope.clock.at_ms += 1
    assert await scope.must(rival, taking) == [holder.epoch + 1]
    assert await scope.refused(holder, bind_to(scope, key)) is Code.STALE_EPOCH


# -- evidence ---------------------------------------------------------------------------------------------------------------


@scope_test
async def test_placement_on_evidence_over_a_minute_old_is_refused(scope: Scope) -> None:
    a, b, _ = await spawn_replicas(scope, "w", 3)
    scheduler, old, last = scope.actors["scheduler"], Evidence(age_ms=60_001), Evidence(age_ms=60_000)
    reserving = Reserve(b, scope.at(b), "n1", T1)
    assert await scope.refused(scheduler, bind_to(scope, a), old) is Code.STALE_EVIDENCE
    assert await scope.refused(scheduler, reserving, old) is Code.STALE_EVIDENCE
    for claim in (bind_to(scope, a), reserving):
        (verdict,) = await scope.ask(scheduler, claim, evidence=last)
        assert isinstance(verdict, Accepted)
    assert await scope.refused(scheduler, bind_to(scope, b), old) is Code.STALE_EVIDENCE, "also for a reserved replica"


@scope_test
async def test_gang_on_evidence_over_a_minute_old_is_refused(scope: Scope) -> None:
    members = await spawn_replicas(scope, "g", 2, gang=2)
    binds = BindGang(tuple(bind_to(scope, key) for key in members))
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, binds, Evidence(age_ms=60_001)) is Code.GANG_SHORT
    await scope.must(scheduler, binds)


# -- within one batch -------------------------------------------------------------------------------------------------------


@scope_test
async def test_policy_applies_to_next_claim_of_same_batch(scope: Scope) -> None:
    a, b, c = await spawn_replicas(scope, "w", 3)
    scheduler = scope.actors["scheduler"]
    await bind(scope, a)
    answers = await send_batch(
        scope,
        await scope.operation(OPERATOR, only_in("b")),
        await scope.operation(scheduler, bind_to(scope, b, "n1")),
        await scope.operation(OPERATOR, only_in("a")),
        await scope.operation(scheduler, bind_to(scope, b, "n1")),
        await scope.operation(scheduler, bind_to(scope, c, "n2")),
    )
    assert answers == [None, Code.POLICY, None, None, Code.POLICY]
    assert scope.row(b)["status"]["policy"] == 2, "permitted by the second policy"
    assert await scope.refused(scheduler, bind_to(scope, c, "n2")) is Code.POLICY, "also in later batches"
    assert await scope.refused(scheduler, Reserve(c, scope.at(c), "n2", T1)) is Code.POLICY


@scope_test
async def test_workload_deleted_earlier_in_batch_is_not_bound(scope: Scope) -> None:
    a, b = await spawn_replicas(scope, "w", 2)
    scheduler = scope.actors["scheduler"]
    await bind(scope, a)
    answers = await send_batch(
        scope,
        await scope.operation(USER, Delete("Workload", "w", "t1")),
        await scope.operation(scheduler, bind_to(scope, b)),
    )
    assert answers == [None, Code.DELETING]
    assert await scope.refused(scheduler, bind_to(scope, b)) is Code.DELETING, "also in later batches"


@scope_test
async def test_workload_deleted_after_bind_in_batch_is_not_bound_again(scope: Scope) -> None:
    a, b = await spawn_replicas(scope, "w", 2)
    scheduler = scope.actors["scheduler"]
    answers = await send_batch(
        scope,
        await scope.operation(OPERATOR, only_in("a")),
        await scope.operation(scheduler, bind_to(scope, a)),
        await scope.operation(USER, Delete("Workload", "w", "t1")),
        await scope.operation(scheduler, bind_to(scope, b)),
    )
    assert answers == [None, None, None, Code.DELETING]


@scope_test
async def test_workload_changed_in_batch_keeps_spec_of_older_replicas(scope: Scope) -> None:
    (old,) = await spawn_replicas(scope, "w", cpu="3", replicas=2)
    answers = await send_batch(
        scope,
        await scope.operation(USER, Apply(workload("w", cpu="1", replicas=2))),
        await scope.operation(scope.actors["workloads"], Spawn("t1", "w", 2, 1)),
        await scope.operation(scope.actors["scheduler"], bind_to(scope, old)),
    )
    assert answers == [None, None, None]
    new = "replica/t1/w-1"
    await bind(scope, new)
    assert scope.books.nodes["n1"].free["cpu"] == 0, "3 and 1 of 4: each by its own generation"


# -- after a node has changed zones -----------------------------------------------------------------------------------------


@scope_test
async def test_spread_counts_replicas_in_present_zones_of_nodes(scope: Scope) -> None:
    a, b, c = await spawn_replicas(scope, "w", 3, placement=EVEN)
    await join_node(scope, "n3", "b")
    await bind(scope, a, "n1")
    await bind(scope, b, "n2")
    await scope.must(OPERATOR, Apply(node("n2", zone="a")))
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, bind_to(scope, c, "n1")) is Code.SPREAD, "two in a, none in b"
    await bind(scope, c, "n3")


@scope_test
async def test_zone_without_nodes_does_not_count_for_spread(scope: Scope) -> None:
    a, b = await spawn_replicas(scope, "w", 2, placement=EVEN)
    await bind(scope, a, "n1")
    assert await scope.refused(scope.actors["scheduler"], bind_to(scope, b, "n1")) is Code.SPREAD, "b is empty"
    await scope.must(OPERATOR, Apply(node("n2", zone="a")))
    await bind(scope, b, "n1")


@scope_test
async def test_anti_affinity_follows_present_zones_of_nodes(scope: Scope) -> None:
    a, b = await spawn_replicas(scope, "w", 2, placement=APART, labels={"app": "x"})
    (other,) = await spawn_replicas(scope, "v", labels={"app": "x"})
    await join_node(scope, "n3", "a")
    await bind(scope, a, "n1")
    scheduler = scope.actors["scheduler"]
    for key in (b, other):
        assert await scope.refused(scheduler, bind_to(scope, key, "n3")) is Code.ANTI_AFFINITY
    await scope.must(OPERATOR, Apply(node("n1", zone="b", gpus=2)))
    for key in (b, other):
        assert await scope.refused(scheduler, bind_to(scope, key, "n2")) is Code.ANTI_AFFINITY, "its neighbour is in b now"
    await bind(scope, b, "n3")


@scope_test
async def test_node_and_its_last_replica_may_go_in_one_batch(scope: Scope) -> None:
    """The replica was counted in a zone that cannot be looked up any more."""
    a, b = await spawn_replicas(scope, "w", 2, placement=APART, labels={"app": "x"})
    await join_node(scope, "n3", "a")
    await bind(scope, a, "n1")
    assert await scope.refused(scope.actors["scheduler"], bind_to(scope, b, "n3")) is Code.ANTI_AFFINITY
    await commit_transitions(scope, a, "remove", "stop")
    actor, claim = transition_claim(scope, a, "stopped")
    gone = await scope.operation(OPERATOR, Delete("Node", "n1"))
    assert await send_batch(scope, await scope.operation(actor, claim), gone) == [None, None]
    await bind(scope, b, "n3")


# -- ownership of grants ----------------------------------------------------------------------------------------------------


@scope_test
async def test_grant_is_drawn_only_by_its_holder(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler/x")))
    await scope.must(scope.actors["budgets"], Issue("by-name", slice_of("4", "scheduler/x!")))
    a, b = await spawn_replicas(scope, "w", 2)
    holder, rival = await acquire_scheduler(scope, "x"), await acquire_scheduler(scope, "y")
    for name in ("offer", "by-name"):
        assert await scope.refused(rival, bind_to(scope, a, grant=name)) is Code.NOT_OWNER
        assert await scope.refused(scope.actors["scheduler"], bind_to(scope, a, grant=name)) is Code.NOT_OWNER
    await scope.must(holder, bind_to(scope, a, grant="offer"), bind_to(scope, b, grant="by-name"))


@scope_test
async def test_grant_is_drawn_only_for_its_tenant(scope: Scope) -> None:
    amount, budgets = amounts(cpu="4"), scope.actors["budgets"]
    await scope.must(budgets, Issue("slice", slice_of("4", "scheduler")))
    await scope.must(
        budgets, Issue("offer", GrantSpec(holder="scheduler", amount=amount, tenant="t1", purpose="offer", ttl=HOUR))
    )
    await scope.must(USER, Apply(workload("v", owner="t2")))
    await scope.must(scope.actors["workloads"], Spawn("t2", "v", 1, 0))
    ours = await spawn_replicas(scope, "w", 2)
    for key, grant in zip(ours, ("slice", "offer"), strict=True):
        assert await scope.refused(scope.actors["scheduler"], bind_to(scope, "replica/t2/v-0", grant=grant)) is Code.NOT_OWNER
        await bind(scope, key, grant=grant)


@scope_test
async def test_budget_is_drawn_only_for_tenants_with_share(scope: Scope) -> None:
    shares = {"t2": amounts(cpu="1")}
    spec = GrantSpec(holder="scheduler", amount=amounts(cpu="1"), shares=shares, purpose="budget", ttl=HOUR)
    await scope.must(scope.actors["budgets"], Issue("recovery", spec))
    (key,) = await spawn_replicas(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], bind_to(scope, key, grant="recovery")) is Code.NOT_OWNER


@scope_test
async def test_scheduler_passes_on_only_its_own_grants(scope: Scope) -> None:
    holder, rival = await acquire_scheduler(scope, "x"), await acquire_scheduler(scope, "y")
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler/x")))
    part = Issue("part", slice_of("1", "scheduler/y", parent="offer"))
    assert await scope.refused(rival, part) is Code.NOT_OWNER
    assert await scope.refused(holder, Issue("quota", slice_of("1", "scheduler/x"))) is Code.NOT_OWNER, (
        "the quota belongs to the tenant"
    )
    await scope.must(holder, part)
    (key,) = await spawn_replicas(scope, "w")
    assert await scope.refused(holder, bind_to(scope, key, grant="part")) is Code.NOT_OWNER, "passed on to y"
    await scope.must(rival, bind_to(scope, key, grant="part"))


@scope_test
async def test_scheduler_renews_and_closes_only_own_or_passed_on_grants(scope: Scope) -> None:
    holder, rival = await acquire_scheduler(scope, "x"), await acquire_scheduler(scope, "y")
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler/x")))
    await scope.must(holder, Issue("part", slice_of("1", "scheduler/y", parent="offer")))
    for claim in (Renew("offer"), Close("offer")):
        assert await scope.refused(rival, claim) is Code.NOT_OWNER
    await scope.must(rival, Renew("part"))
    await scope.must(holder, Renew("part"), Close("part"), Renew("offer"), Close("offer"))


@scope_test
async def test_scheduler_may_not_issue_budget(scope: Scope) -> None:
    await scope.must(scope.actors["budgets"], Issue("offer", slice_of("4", "scheduler")))
    shares = {"t2": amounts(cpu="1")}
    spec = GrantSpec(holder="x", amount=amounts(cpu="1"), shares=shares, parent="offer", purpose="budget", ttl=HOUR)
    assert await scope.refused(scope.actors["scheduler"], Issue("own", spec)) is Code.NOT_OWNER


# -- gangs ------------------------------------------------------------------------------------------------------------------


@scope_test
async def test_gang_in_two_regions_or_with_standby_is_refused(scope: Scope) -> None:
    wide = Placement(regions=("r1", "r2"))
    spare = Placement(regions=("r1",), standby=(Standby(region="r2", replicas=1, budget="recovery"),))
    for where in (wide, spare):
        assert await scope.refused(USER, Apply(workload("g", gang=2, placement=where))) is Code.INVALID
        await scope.must(USER, Apply(workload("loose", placement=where)))
        assert await scope.refused(USER, Apply(workload("loose", gang=2, placement=where))) is Code.INVALID, "nor by update"
    await scope.must(USER, Apply(workload("g", gang=2, placement=Placement(regions=("r1",)))))
