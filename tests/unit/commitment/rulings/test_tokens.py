"""Authority of members, agents and tokens: tenants, nodes, revocation."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from remit.model.claims import Actor, Apply, Code, Delete, Refused
from remit.model.identity import token_digest
from remit.model.kinds import Node, NodePool, NodePoolSpec, Taint, Tenant, TenantSpec, Token, TokenRole, TokenSpec
from remit.model.metadata import Metadata
from remit.model.objects import dec_hook
from remit.model.resources import Amount
from remit.model.roles import Role
from tests.properties.authority_world import OPERATOR, Scope, scope_test, workload

LATER = "2999-01-01T00:00:00Z"


def token(
    name: str, role: TokenRole = "viewer", *, tenant: str = "", nodes: tuple[str, ...] = (), revoked: bool = False
) -> Token:
    spec = TokenSpec(role=role, digest=token_digest(name), expires=LATER, tenant=tenant, nodes=nodes, revoked=revoked)
    return Token(metadata=Metadata(name=name), spec=spec)


def the_node(scope: Scope, name: str) -> Node:
    return msgspec.convert(scope.row(f"node/{name}"), Node, dec_hook=dec_hook)


@scope_test
async def test_member_acts_only_in_own_tenant(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Tenant(metadata=Metadata(name="t9"), spec=TenantSpec(quota=Amount()))))
    ann, bob = Actor("ann", Role.USER, tenant="t1"), Actor("bob", Role.USER, tenant="t9")
    await scope.must(ann, Apply(workload("w")))
    assert await scope.refused(bob, Apply(workload("w"))) is Code.TENANT
    assert await scope.refused(bob, Apply(workload("x"))) is Code.TENANT
    assert await scope.refused(bob, Delete("Workload", "w", "t1")) is Code.TENANT
    assert scope.row("workload/t1/w") and "workload/t1/x" not in scope.books.keys("workload/")
    await scope.must(ann, Delete("Workload", "w", "t1"))


@scope_test
async def test_agent_may_change_only_facts_of_its_node(scope: Scope) -> None:
    agent, node = scope.actors["agent/n1"], the_node(scope, "n1")
    spec = node.spec
    await scope.must(agent, Apply(replace(node, spec=replace(spec, port=4711))))
    for wrong in (
        replace(node, metadata=replace(node.metadata, labels={"tier": "gold"})),
        replace(node, metadata=replace(node.metadata, annotations={"a": "b"})),
        replace(node, metadata=replace(node.metadata, finalizers=("mine",))),
        replace(node, spec=replace(spec, taints=(Taint(key="k", effect="NoSchedule"),))),
        replace(node, spec=replace(spec, unschedulable=True)),
        replace(node, spec=replace(spec, region="elsewhere")),
    ):
        assert await scope.refused(agent, Apply(wrong)) is Code.NOT_OWNER


@scope_test
async def test_node_capacity_is_capped_by_its_pool(scope: Scope) -> None:
    node = the_node(scope, "n1")
    pool = NodePoolSpec(region=node.spec.region, zones=(node.spec.zone,), capacity=node.spec.capacity)
    await scope.must(OPERATOR, Apply(NodePool(metadata=Metadata(name=node.spec.pool), spec=pool)))
    larger = replace(node, spec=replace(node.spec, capacity=node.spec.capacity * 2))
    assert await scope.refused(scope.actors["agent/n1"], Apply(larger)) is Code.INVALID
    await scope.must(OPERATOR, Apply(larger))


@scope_test
async def test_token_purpose_is_immutable_and_revocation_final(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(token("a")))
    for other in (replace(token("a").spec, role="admin"), replace(token("a").spec, digest="b" * 64)):
        assert await scope.refused(OPERATOR, Apply(replace(token("a"), spec=other))) is Code.EXISTS
    await scope.must(OPERATOR, Apply(replace(token("a"), spec=replace(token("a").spec, expires="2998-01-01T00:00:00Z"))))
    await scope.must(OPERATOR, Apply(token("a", revoked=True)))
    assert await scope.refused(OPERATOR, Apply(token("a"))) is Code.EXISTS
    assert await scope.refused(Actor("ann", Role.USER, tenant="t1"), Apply(token("b"))) is Code.ROLE
    assert await scope.refused(OPERATOR, Apply(token("m", "member", tenant="nobody"))) is Code.NOT_FOUND


@scope_test
async def test_join_token_is_used_once(scope: Scope) -> None:
    """Of two holders the first to write joins; the other's write has a stale revision."""
    await scope.must(OPERATOR, Apply(token("j", "join", nodes=("n9",))))
    seen = scope.at("token/j")
    await scope.must(OPERATOR, Apply(token("j", "join", nodes=("n9",), revoked=True), expect=seen))
    assert await scope.refused(OPERATOR, Apply(token("j", "join", nodes=("n9",), revoked=True), expect=seen)) is Code.REVISION


@scope_test
async def test_second_agent_for_joined_node_is_refused(scope: Scope) -> None:
    """A12. An operator may create a second agent token before revoking the first."""
    one, other, third = (
        token(name, "agent", nodes=nodes) for name, nodes in (("a", ("n8", "n9")), ("b", ("n9",)), ("c", ("n7",)))
    )
    one, other, third = (replace(each, spec=replace(each.spec, joined=True)) for each in (one, other, third))
    verdicts = await scope.ask(OPERATOR, Apply(one, expect=0), Apply(other, expect=0), Apply(third, expect=0))
    assert [isinstance(verdict, Refused) for verdict in verdicts] == [False, True, False]
    assert isinstance(verdicts[1], Refused) and verdicts[1].code is Code.EXISTS
    assert verdicts[1].detail == (
        "spec.nodes: node n9 already has an agent, identified by token a; revoke that token first, or choose another name"
    )
    await scope.must(OPERATOR, Apply(token("made", "agent", nodes=("n9",))))
    revoked = [replace(each, spec=replace(each.spec, revoked=True)) for each in (one, token("made", "agent", nodes=("n9",)))]
    await scope.must(OPERATOR, *map(Apply, revoked))
    await scope.must(OPERATOR, Apply(other, expect=0))


@scope_test
async def test_takeover_keeps_token_revocations_and_digests(scope: Scope) -> None:
    """A03, A04, A12: a restarted server must still refuse revoked tokens."""
    joined = token("agent", "agent", nodes=("n9",))
    joined = replace(joined, spec=replace(joined.spec, joined=True))
    await scope.must(OPERATOR, Apply(Tenant(metadata=Metadata(name="t9"), spec=TenantSpec(quota=Amount()))))
    await scope.must(OPERATOR, Apply(token("a")), Apply(token("gone", revoked=True)), Apply(token("m", "member", tenant="t9")))
    await scope.must(OPERATOR, Apply(joined))
    await scope.take_over()
    assert await scope.refused(OPERATOR, Apply(token("gone"))) is Code.EXISTS, "revocation is final"
    forged = replace(token("mallory"), spec=replace(token("mallory").spec, digest=token("a").spec.digest))
    assert await scope.refused(OPERATOR, Apply(forged)) is Code.EXISTS
    second = token("second", "agent", nodes=("n9",))
    assert await scope.refused(OPERATOR, Apply(replace(second, spec=replace(second.spec, joined=True)))) is Code.EXISTS
    await scope.must(OPERATOR, Apply(token("a", revoked=True), expect=scope.at("token/a")), Delete("Tenant", "t9"))
    assert scope.row("token/a")["spec"]["revoked"] and scope.row("token/m")["spec"]["revoked"]


@scope_test
async def test_tokens_are_revoked_with_their_tenant_or_last_node(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(Tenant(metadata=Metadata(name="t9"), spec=TenantSpec(quota=Amount()))))
    await scope.must(OPERATOR, Apply(token("m", "member", tenant="t9")), Apply(token("both", "agent", nodes=("n1", "n2"))))
    await scope.must(OPERATOR, Apply(token("one", "agent", nodes=("n1",))), Apply(token("all")))
    await scope.must(OPERATOR, Delete("Tenant", "t9"), Delete("Node", "n1"))
    assert [name for name in ("m", "one", "both", "all") if scope.row(f"token/{name}")["spec"].get("revoked")] == ["m", "one"]
    await scope.must(OPERATOR, Delete("Node", "n2"))
    assert scope.row("token/both")["spec"]["revoked"]


@scope_test
async def test_duplicate_token_digest_is_refused(scope: Scope) -> None:
    """A joining agent sends its own digest: with another token's digest it would be taken for that token."""
    await scope.must(OPERATOR, Apply(token("grace", "admin")))
    forged = token("mallory", "agent", nodes=("n9",))
    forged = replace(forged, spec=replace(forged.spec, digest=token("grace").spec.digest))
    assert await scope.refused(OPERATOR, Apply(forged)) is Code.EXISTS
    await scope.must(OPERATOR, Apply(token("grace", "admin", revoked=True)))
    assert await scope.refused(OPERATOR, Apply(forged)) is Code.EXISTS, "revocation does not free a digest"
