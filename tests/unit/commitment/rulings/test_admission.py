"""Admission: defaults and limits of policies and tenants, and reasons of refusals."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.model.claims import Actor, Apply, Code, Delete, Refused, Spawn
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
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata, Owner
from remit.model.objects import decode
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from tests.properties.authority_world import OPERATOR, USER, Scope, priority_class, scope_test, tenant, workload


def policy(*rules: PolicyRule, name: str = "p") -> Apply:
    return Apply(Policy(metadata=Metadata(name=name), spec=PolicySpec(rules=rules)))


def ranked(name: str, rank: str) -> Workload:
    return workload(name, priority=rank)


def placed(name: str, **where: Any) -> Workload:
    one = workload(name)
    return replace(one, spec=replace(one.spec, placement=Placement(**where)))


async def refusal_detail(scope: Scope, obj: AnyObject, code: Code, actor: Any = USER) -> str:
    before = await scope.dump()
    (verdict,) = await scope.ask(actor, Apply(obj))
    assert isinstance(verdict, Refused) and verdict.code is code, verdict
    assert await scope.dump() == before
    return verdict.detail


def generation(scope: Scope, name: str, number: int = 1) -> Any:
    return scope.row(f"generation/t1/{name}/{number:08d}")["spec"]["spec"]


RECOVERY = PolicyRule(
    match=PolicyMatch(tenants=("t1",), labels={"app": "risk-api"}), priority_class="top", reason="customers wait for it"
)


@scope_test
async def test_policy_sets_priority_class_and_author_cannot_override_it(scope: Scope) -> None:
    await scope.must(OPERATOR, policy(RECOVERY, PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=100)))
    await scope.must(USER, Apply(workload("risk-api", labels={"app": "risk-api"}, replicas=1)))
    row = scope.row("workload/t1/risk-api")
    assert "priorityClass" not in row["spec"], "the declared spec is stored unchanged"
    assert generation(scope, "risk-api")["priorityClass"] == "top"
    (condition,) = [one for one in row["status"]["conditions"] if one["type"] == "ByPolicy"]
    assert condition["reason"] == "PolicyRevision1"
    assert condition["message"] == "priorityClass top by policy p (customers wait for it)"
    detail = await refusal_detail(scope, replace(ranked("risk-api", "high"), metadata=Metadata(
        name="risk-api", tenant="t1", labels={"app": "risk-api"})), Code.POLICY)  # fmt: skip
    assert detail.startswith("spec.priorityClass: high cannot be chosen: policy p (customers wait for it)")


@scope_test
async def test_class_above_policy_maximum_is_refused_not_clipped(scope: Scope) -> None:
    """A19."""
    rule = PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=100, reason="batch stays below customers")
    await scope.must(OPERATOR, policy(rule))
    detail = await refusal_detail(scope, ranked("w", "top"), Code.POLICY)
    assert "top has priority 1000" in detail and "batch stays below customers" in detail and "at most 100" in detail
    await refusal_detail(scope, ranked("w", "top"), Code.POLICY, OPERATOR)
    await scope.must(USER, Apply(ranked("w", "high")))
    theirs = replace(ranked("w", "top"), metadata=Metadata(name="w", tenant="t2"))
    await scope.must(USER, Apply(theirs))


@scope_test
async def test_member_gets_default_priority_at_most_unless_policy_permits(
    scope: Scope,
) -> None:
    """A19: otherwise every tenant would declare its work most critical."""
    member = Actor("ann", Role.USER, tenant="t1")
    await scope.must(OPERATOR, Apply(priority_class("low", -10)))
    detail = await refusal_detail(scope, ranked("w", "high"), Code.POLICY, member)
    assert detail.startswith("spec.priorityClass: high has priority 100, but no policy in force permits more than 0")
    assert detail.endswith("; leave it out, or ask an operator for a policy rule with priorityClass or priorityMax")
    await scope.must(member, Apply(ranked("w", "low")), Apply(ranked("plain", "")))
    await refusal_detail(scope, ranked("w", "top"), Code.POLICY, member)
    # A rule about other fields or other tenants permits nothing more.
    other = PolicyRule(match=PolicyMatch(tenants=("t2",)), priority_max=1_000)
    await scope.must(OPERATOR, policy(other, PolicyRule(defaults=PolicyDefaults(stop_grace=Duration(5_000)))))
    await refusal_detail(scope, ranked("w", "high"), Code.POLICY, member)
    # A class set by an operator stays while a member changes other fields.
    await scope.must(OPERATOR, Apply(ranked("w", "high")))
    await scope.must(member, Apply(replace(ranked("w", "high"), spec=replace(ranked("w", "high").spec, replicas=1))))
    await refusal_detail(scope, ranked("w", "top"), Code.POLICY, member)
    for rule in (
        PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_max=100),
        PolicyRule(match=PolicyMatch(tenants=("t1",)), defaults=PolicyDefaults(priority_class="high")),
        PolicyRule(match=PolicyMatch(tenants=("t1",)), priority_class="high"),
    ):
        await scope.must(OPERATOR, policy(rule))
        await scope.must(member, Apply(ranked("new", "high")))
        await refusal_detail(scope, ranked("newer", "top"), Code.POLICY, member)
        await scope.must(member, Delete("Workload", "new", "t1"))


@scope_test
async def test_later_policy_does_not_refuse_unchanged_priority(scope: Scope) -> None:
    await scope.must(USER, Apply(ranked("w", "top")))
    await scope.must(OPERATOR, policy(PolicyRule(priority_max=100)))
    smaller = replace(ranked("w", "top"), spec=replace(ranked("w", "top").spec, replicas=1))
    await scope.must(USER, Apply(smaller))
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 2, 0))
    assert scope.row("replica/t1/w-0")["spec"]["priority"] == 100, "new replicas get the permitted priority"
    await scope.must(USER, Apply(ranked("w", "high")))
    await refusal_detail(scope, ranked("w", "top"), Code.POLICY)


@scope_test
async def test_policy_defaults_fill_omitted_fields_only(scope: Scope) -> None:
    given = PolicyDefaults(priority_class="high", resources=Amount({"cpu": 250, "memory": 1 << 20}), stop_grace=Duration(5_000))
    await scope.must(OPERATOR, policy(PolicyRule(match=PolicyMatch(tenants=("t1",)), defaults=given)))
    await scope.must(USER, Apply(workload("w", cpu="1")))
    spec = generation(scope, "w")
    assert spec["priorityClass"] == "high" and spec["template"]["stopGrace"] == "5s"
    assert spec["template"]["resources"] == {"cpu": "1", "memory": "1Mi"}, "declared values win over defaults"
    (condition,) = scope.row("workload/t1/w")["status"]["conditions"]
    assert "template.resources.memory 1Mi by policy p" in condition["message"] and "cpu" not in condition["message"]
    await scope.must(USER, Apply(ranked("mine", "top")))
    assert generation(scope, "mine")["priorityClass"] == "top"
    stands = scope.row("workload/t1/w")
    await scope.must(USER, Apply(workload("w", cpu="1")))
    again = scope.row("workload/t1/w")
    assert again["metadata"]["generation"] == stands["metadata"]["generation"], "no new generation"


@scope_test
async def test_default_condition_disappears_with_policy(scope: Scope) -> None:
    await scope.must(OPERATOR, policy(PolicyRule(defaults=PolicyDefaults(priority_class="high"))))
    await scope.must(USER, Apply(workload("w")))
    await scope.must(OPERATOR, Delete("Policy", "p"))
    await scope.must(USER, Apply(workload("w", replicas=7)))
    assert "priorityClass" not in generation(scope, "w", 2)
    assert not scope.row("workload/t1/w").get("status", {}).get("conditions")


@scope_test
async def test_first_policy_by_name_wins_conflicting_priority_class(scope: Scope) -> None:
    await scope.must(OPERATOR, policy(PolicyRule(priority_class="top"), name="zebra"))
    await scope.must(OPERATOR, policy(PolicyRule(priority_class="high"), name="ant"))
    await scope.must(USER, Apply(workload("w")))
    assert generation(scope, "w")["priorityClass"] == "high"


@scope_test
async def test_policy_needs_existing_class_and_blocks_its_deletion(scope: Scope) -> None:
    detail = await refusal_detail(scope, policy(PolicyRule(priority_class="none")).thing, Code.INVALID, OPERATOR)
    assert detail.startswith("spec.rules[0].priorityClass: priority class none does not exist")
    lost = PolicyRule(defaults=PolicyDefaults(priority_class="none"))
    assert "defaults.priorityClass" in await refusal_detail(scope, policy(lost).thing, Code.INVALID, OPERATOR)
    await scope.must(OPERATOR, Apply(priority_class("urgent", 7)), policy(PolicyRule(priority_class="urgent")))
    (verdict,) = await scope.ask(OPERATOR, Delete("PriorityClass", "urgent"))
    assert isinstance(verdict, Refused) and verdict.code is Code.IN_USE and "policy/p" in verdict.detail
    await scope.must(USER, Apply(workload("w")))
    await scope.must(OPERATOR, Delete("Policy", "p"))
    (verdict,) = await scope.ask(OPERATOR, Delete("PriorityClass", "urgent"))
    assert isinstance(verdict, Refused) and "generation/t1/w" in verdict.detail


@scope_test
async def test_unplaceable_workload_is_refused_with_permitted_regions(
    scope: Scope,
) -> None:
    rule = PolicyRule(
        match=PolicyMatch(tenants=("t1",)), allow=PolicyAllow(regions=("eu-central", "eu-west")), reason="its data stays here"
    )
    await scope.must(OPERATOR, policy(rule))
    detail = await refusal_detail(scope, placed("w", regions=("us-east",)), Code.POLICY)
    assert detail.startswith("spec.placement.regions: us-east can never be used: policy p (its data stays here)")
    assert "eu-central or eu-west" in detail
    standby = (Standby(region="us-east", replicas=1, budget="b"),)
    assert "spec.placement.standby[0].region" in await refusal_detail(scope, placed("w", standby=standby), Code.POLICY)
    await scope.must(USER, Apply(placed("w", regions=("us-east", "eu-west"))), Apply(placed("anywhere")))
    await scope.must(OPERATOR, policy(PolicyRule(allow=PolicyAllow(regions=("us-east",))), name="q"))
    assert "together allow no regions" in await refusal_detail(scope, placed("x"), Code.POLICY)


def limited(**limits: int) -> Tenant:
    one = tenant("t1")
    return replace(one, spec=replace(one.spec, limits=TenantLimits(**limits)))


@scope_test
async def test_tenant_over_limit_is_refused_with_figures_and_cure(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(limited(workloads=2, replicas=10, configs=1, bytes=5_000)))
    await scope.must(USER, Apply(workload("a", replicas=4)), Apply(workload("b", replicas=6)))
    detail = await refusal_detail(scope, workload("c", replicas=0), Code.LIMIT)
    assert detail.startswith("metadata.tenant: tenant t1 uses 2 of 2 workloads, 1 more exceed the limit by 1; ")
    assert "spec.limits.workloads" in detail
    assert "spec.replicas: tenant t1 uses 10 of 10 replicas, 1 more exceed the limit by 1" in await refusal_detail(
        scope, workload("b", replicas=7), Code.LIMIT
    )
    await scope.must(USER, Apply(workload("a", replicas=3)), Apply(workload("b", replicas=7)))
    big = Config(metadata=Metadata(name="big", tenant="t1"), spec=DataSpec(data={"x": "y" * 6_000}))
    assert "uses 290 of 5000 bytes" in await refusal_detail(scope, big, Code.LIMIT)
    small = replace(big, spec=DataSpec(data={"x": "y"}))
    await scope.must(USER, Apply(small))
    assert "configs" in await refusal_detail(scope, replace(small, metadata=Metadata(name="more", tenant="t1")), Code.LIMIT)
    theirs = replace(workload("c"), metadata=Metadata(name="c", tenant="t2"))
    await scope.must(USER, Apply(theirs))
    await scope.must(USER, Delete("Workload", "a", "t1"))
    await scope.must(USER, Apply(workload("c", replicas=3)))


@scope_test
async def test_lowered_limit_refuses_only_growth(scope: Scope) -> None:
    await scope.must(USER, *(Apply(workload(name, replicas=5)) for name in "abc"))
    await scope.must(OPERATOR, Apply(limited(workloads=1, replicas=6)))
    await scope.must(USER, Apply(workload("a", replicas=4)))
    await scope.must(USER, Apply(workload("a", replicas=4, priority="high")))
    await refusal_detail(scope, workload("a", replicas=5, priority="high"), Code.LIMIT)
    await refusal_detail(scope, workload("d", replicas=0), Code.LIMIT)


@scope_test
async def test_takeover_recounts_tenant_usage_from_rows(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(limited(workloads=2, replicas=10)))
    await scope.must(USER, Apply(workload("a", replicas=4)), Apply(workload("b", replicas=6)))
    await scope.must(USER, Apply(workload("b", replicas=5)))
    used = dict(scope.books.used)
    await scope.take_over()
    assert dict(scope.books.used) == used and used["t1", "replicas"] == 9
    await refusal_detail(scope, workload("c"), Code.LIMIT)


@scope_test
async def test_owner_of_other_tenant_or_no_tenant_is_refused(scope: Scope) -> None:
    """A18: neither with its uid nor as an object without a tenant."""
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
        detail = await refusal_detail(scope, owned(**owner), Code.INVALID)
        assert detail.startswith("metadata.owners: ") and uid not in detail.replace(owner.get("uid", "-"), "")
    await scope.must(USER, Apply(owned(kind="Tenant", name="t1")))
