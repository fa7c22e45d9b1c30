"""Do policies and limits admit what is declared? What is given is told, what is forbidden is refused with its reason."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.model.claims import Actor, Apply, Code, Delete, Refused, Role, Spawn
from remit.model.kinds import (
    Config,
    DataSpec,
    Placement,
    Policy,
    PolicyAllow,
    PolicyDefaults,
    PolicyMatch,
    PolicyRule,
    PolicySpec,
    Standby,
    Tenant,
    TenantLimits,
    Workload,
)
from remit.model.metadata import Metadata, Owner
from remit.model.objects import AnyObject, decode
from remit.model.resources import Amount, Duration
from tests.properties.authority_world import OPERATOR, USER, Scope, priority_class, story, tenant, workload


def policy(*rules: PolicyRule, name: str = "p") -> Apply:
    return Apply(Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=rules)))


def ranked(name: str, rank: str) -> Workload:
    return workload(name, priority=rank)


def placed(name: str, **where: Any) -> Workload:
    one = workload(name)
    return replace(one, spec=replace(one.spec, placement=Placement(**where)))


async def no(scope: Scope, thing: AnyObject, code: Code, actor: Any = USER) -> str:
    before = await scope.dump()
    (verdict,) = await scope.ask(actor, Apply(thing))
    assert isinstance(verdict, Refused) and verdict.code is code, verdict
    assert await scope.dump() == before
    return verdict.detail


def generation(scope: Scope, name: str, number: int = 1) -> Any:
    return scope.row(f"generation/t1/{name}/{number:08d}")["spec"]["spec"]


RECOVERY = PolicyRule(
    match=PolicyMatch(tenants=("t1",), labels={"app": "risk-api"}), priority_class="top", reason="customers wait for it"
)


@story
async def test_admission_marks_recovery_work_as_critical__not_its_author(scope: Scope) -> None:
    await scope.must(OPERATOR, policy(RECOVERY, PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=100)))
    await scope.must(USER, Apply(workload("risk-api", labels={"app": "risk-api"}, replicas=1)))
    row = scope.row("workload/t1/risk-api")
    assert "priorityClass" not in row["spec"], "the author's words stay as they are"
    assert generation(scope, "risk-api")["priorityClass"] == "top"
    (told,) = [one for one in row["status"]["conditions"] if one["type"] == "ByPolicy"]
    assert told["reason"] == "PolicyRevision1"
    assert told["message"] == "priorityClass top by policy p (customers wait for it)"
    detail = await no(scope, replace(ranked("risk-api", "high"), metadata=Metadata(
        name="risk-api", tenant="t1", labels={"app": "risk-api"})), Code.POLICY)  # fmt: skip
    assert detail.startswith("spec.priorityClass: high cannot be chosen: policy p (customers wait for it)")


@story
async def test_a_class_above_what_policy_allows_is_refused_with_the_rules_reason__not_clipped(scope: Scope) -> None:
    """A19."""
    rule = PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=100, reason="batch stays below customers")
    await scope.must(OPERATOR, policy(rule))
    detail = await no(scope, ranked("w", "top"), Code.POLICY)
    assert "top has priority 1000" in detail and "batch stays below customers" in detail and "at most 100" in detail
    await no(scope, ranked("w", "top"), Code.POLICY, OPERATOR)
    await scope.must(USER, Apply(ranked("w", "high")))
    theirs = replace(ranked("w", "top"), metadata=Metadata(name="w", tenant="t2"))
    await scope.must(USER, Apply(theirs))


@story
async def test_somebody_of_a_tenant_gives_work_no_more_than_the_ordinary_priority__unless_a_rule_lets_them(
    scope: Scope,
) -> None:
    """A19: else every tenant's work would be the most critical there is."""
    member = Actor("ann", Role.USER, tenant="t1")
    await scope.must(OPERATOR, Apply(priority_class("low", -10)))
    detail = await no(scope, ranked("w", "high"), Code.POLICY, member)
    assert detail.startswith("spec.priorityClass: high has priority 100, but no policy in force permits more than 0")
    assert detail.endswith("; leave it out, or ask an operator for a policy rule with priorityClass or priorityMax")
    await scope.must(member, Apply(ranked("w", "low")), Apply(ranked("plain", "")))
    await no(scope, ranked("w", "top"), Code.POLICY, member)
    # A rule that says something else, or speaks of others, lets nobody have more.
    other = PolicyRule(match=PolicyMatch(tenants=("t2",)), priority_max=1_000)
    await scope.must(OPERATOR, policy(other, PolicyRule(defaults=PolicyDefaults(stop_grace=Duration(5_000)))))
    await no(scope, ranked("w", "high"), Code.POLICY, member)
    # What people of no tenant have written stays while nobody writes another.
    await scope.must(OPERATOR, Apply(ranked("w", "high")))
    await scope.must(member, Apply(replace(ranked("w", "high"), spec=replace(ranked("w", "high").spec, replicas=1))))
    await no(scope, ranked("w", "top"), Code.POLICY, member)
    for rule in (
        PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=100),
        PolicyRule(match=PolicyMatch(tenants=("t1",)), defaults=PolicyDefaults(priority_class="high")),
        PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_class="high"),
    ):
        await scope.must(OPERATOR, policy(rule))
        await scope.must(member, Apply(ranked("new", "high")))
        await no(scope, ranked("newer", "top"), Code.POLICY, member)
        await scope.must(member, Delete("Workload", "new", "t1"))


@story
async def test_a_rule_that_came_later_refuses_nothing_that_does_not_change(scope: Scope) -> None:
    await scope.must(USER, Apply(ranked("w", "top")))
    await scope.must(OPERATOR, policy(PolicyRule(priority_max=100)))
    smaller = replace(ranked("w", "top"), spec=replace(ranked("w", "top").spec, replicas=1))
    await scope.must(USER, Apply(smaller))
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 2, 0))
    assert scope.row("replica/t1/w-0")["spec"]["priority"] == 100, "and new replicas have what is allowed now"
    await scope.must(USER, Apply(ranked("w", "high")))
    await no(scope, ranked("w", "top"), Code.POLICY)


@story
async def test_what_an_author_leaves_out_is_given__and_what_is_written_stands(scope: Scope) -> None:
    given = PolicyDefaults(priority_class="high", resources=Amount({"cpu": 250, "memory": 1 << 20}), stop_grace=Duration(5_000))
    await scope.must(OPERATOR, policy(PolicyRule(match=PolicyMatch(tenants=("t1",)), defaults=given)))
    await scope.must(USER, Apply(workload("w", cpu="1")))
    spec = generation(scope, "w")
    assert spec["priorityClass"] == "high" and spec["template"]["stopGrace"] == "5s"
    assert spec["template"]["resources"] == {"cpu": "1", "memory": "1Mi"}, "what was written stands, the rest is given"
    (told,) = scope.row("workload/t1/w")["status"]["conditions"]
    assert "template.resources.memory 1Mi by policy p" in told["message"] and "cpu" not in told["message"]
    await scope.must(USER, Apply(ranked("mine", "top")))
    assert generation(scope, "mine")["priorityClass"] == "top"
    stands = scope.row("workload/t1/w")
    await scope.must(USER, Apply(workload("w", cpu="1")))
    again = scope.row("workload/t1/w")
    assert again["metadata"]["generation"] == stands["metadata"]["generation"], "sent again it is the same"


@story
async def test_what_was_given_is_no_longer_told_once_nothing_is(scope: Scope) -> None:
    await scope.must(OPERATOR, policy(PolicyRule(defaults=PolicyDefaults(priority_class="high"))))
    await scope.must(USER, Apply(workload("w")))
    await scope.must(OPERATOR, Delete("Policy", "p"))
    await scope.must(USER, Apply(workload("w", replicas=7)))
    assert "priorityClass" not in generation(scope, "w", 2)
    assert not scope.row("workload/t1/w").get("status", {}).get("conditions")


@story
async def test_of_two_rules_that_set_a_class_the_first_by_name_stands(scope: Scope) -> None:
    await scope.must(OPERATOR, policy(PolicyRule(priority_class="top"), name="zebra"))
    await scope.must(OPERATOR, policy(PolicyRule(priority_class="high"), name="ant"))
    await scope.must(USER, Apply(workload("w")))
    assert generation(scope, "w")["priorityClass"] == "high"


@story
async def test_a_policy_names_classes_that_there_are__and_they_stay_for_as_long_as_it_does(scope: Scope) -> None:
    detail = await no(scope, policy(PolicyRule(priority_class="none")).thing, Code.INVALID, OPERATOR)
    assert detail.startswith("spec.rules[0].priorityClass: priority class none does not exist")
    lost = PolicyRule(defaults=PolicyDefaults(priority_class="none"))
    assert "defaults.priorityClass" in await no(scope, policy(lost).thing, Code.INVALID, OPERATOR)
    await scope.must(OPERATOR, Apply(priority_class("urgent", 7)), policy(PolicyRule(priority_class="urgent")))
    (verdict,) = await scope.ask(OPERATOR, Delete("PriorityClass", "urgent"))
    assert isinstance(verdict, Refused) and verdict.code is Code.IN_USE and "policy/p" in verdict.detail
    await scope.must(USER, Apply(workload("w")))
    await scope.must(OPERATOR, Delete("Policy", "p"))
    (verdict,) = await scope.ask(OPERATOR, Delete("PriorityClass", "urgent"))
    assert isinstance(verdict, Refused) and "generation/t1/w" in verdict.detail


@story
async def test_work_that_could_never_be_placed_under_the_policy_is_refused_with_the_places_that_are_allowed(
    scope: Scope,
) -> None:
    rule = PolicyRule(
        match=PolicyMatch(tenants=("t1",)), allow=PolicyAllow(regions=("eu-central", "eu-west")), reason="its data stays here"
    )
    await scope.must(OPERATOR, policy(rule))
    detail = await no(scope, placed("w", regions=("us-east",)), Code.POLICY)
    assert detail.startswith("spec.placement.regions: us-east can never be used: policy p (its data stays here)")
    assert "eu-central or eu-west" in detail
    standby = (Standby(region="us-east", replicas=1, budget="b"),)
    assert "spec.placement.standby[0].region" in await no(scope, placed("w", standby=standby), Code.POLICY)
    await scope.must(USER, Apply(placed("w", regions=("us-east", "eu-west"))), Apply(placed("anywhere")))
    await scope.must(OPERATOR, policy(PolicyRule(allow=PolicyAllow(regions=("us-east",))), name="q"))
    assert "together allow no regions" in await no(scope, placed("x"), Code.POLICY)


def limited(**limits: int) -> Tenant:
    one = tenant("t1")
    return replace(one, spec=replace(one.spec, limits=TenantLimits(**limits)))


@story
async def test_a_tenant_has_no_more_than_its_limits__and_is_told_the_figure_and_the_cure(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(limited(workloads=2, replicas=10, configs=1, bytes=5_000)))
    await scope.must(USER, Apply(workload("a", replicas=4)), Apply(workload("b", replicas=6)))
    detail = await no(scope, workload("c", replicas=0), Code.LIMIT)
    assert detail.startswith("metadata.tenant: tenant t1 uses 2 of 2 workloads, 1 more exceed the limit by 1; ")
    assert "spec.limits.workloads" in detail
    assert "spec.replicas: tenant t1 uses 10 of 10 replicas, 1 more exceed the limit by 1" in await no(
        scope, workload("b", replicas=7), Code.LIMIT
    )
    await scope.must(USER, Apply(workload("a", replicas=3)), Apply(workload("b", replicas=7)))
    big = Config(metadata=Metadata(name="big", tenant="t1"), spec=DataSpec(data={"x": "y" * 6_000}))
    assert "uses 290 of 5000 bytes" in await no(scope, big, Code.LIMIT)
    small = replace(big, spec=DataSpec(data={"x": "y"}))
    await scope.must(USER, Apply(small))
    assert "configs" in await no(scope, replace(small, metadata=Metadata(name="more", tenant="t1")), Code.LIMIT)
    theirs = replace(workload("c"), metadata=Metadata(name="c", tenant="t2"))
    await scope.must(USER, Apply(theirs))
    await scope.must(USER, Delete("Workload", "a", "t1"))
    await scope.must(USER, Apply(workload("c", replicas=3)))


@story
async def test_a_limit_that_is_lowered_below_use_refuses_growth_alone(scope: Scope) -> None:
    await scope.must(USER, *(Apply(workload(name, replicas=5)) for name in "abc"))
    await scope.must(OPERATOR, Apply(limited(workloads=1, replicas=6)))
    await scope.must(USER, Apply(workload("a", replicas=4)))
    await scope.must(USER, Apply(workload("a", replicas=4, priority="high")))
    await no(scope, workload("a", replicas=5, priority="high"), Code.LIMIT)
    await no(scope, workload("d", replicas=0), Code.LIMIT)


@story
async def test_limits_are_counted_anew_from_the_rows_by_whoever_takes_over(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(limited(workloads=2, replicas=10)))
    await scope.must(USER, Apply(workload("a", replicas=4)), Apply(workload("b", replicas=6)))
    await scope.must(USER, Apply(workload("b", replicas=5)))
    used = dict(scope.books.used)
    await scope.take_over()
    assert dict(scope.books.used) == used and used["t1", "replicas"] == 9
    await no(scope, workload("c"), Code.LIMIT)


@story
async def test_an_owner_of_another_tenant_or_of_nobody_is_refused(scope: Scope) -> None:
    """A18: neither by its uid, nor as something that belongs to no tenant."""
    theirs = replace(workload("boss"), metadata=Metadata(name="boss", tenant="t2"))
    await scope.must(USER, Apply(theirs))
    stands = decode((await scope.dump())["workload/t2/boss"])
    uid = stands.metadata.uid

    def owned(**owner: str) -> Workload:
        return replace(workload("w"), metadata=Metadata(name="w", tenant="t1", owners=(Owner(**owner),)))

    for owner in (
        {"kind": "Workload", "name": "boss"},
        {"kind": "Workload", "name": "boss", "uid": uid},
        {"kind": "Tenant", "name": "t2"},
        {"kind": "Node", "name": "n1"},
    ):
        detail = await no(scope, owned(**owner), Code.INVALID)
        assert detail.startswith("metadata.owners: ") and uid not in detail.replace(owner.get("uid", "-"), "")
    await scope.must(USER, Apply(owned(kind="Tenant", name="t1")))
