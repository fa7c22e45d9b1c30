"""Authorization: what each role may claim, read and write, by its token."""

from __future__ import annotations

import pytest

from remit.law import authorization
from remit.model.claims import (
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Delete,
    Mark,
    Move,
    Operation,
    OperationID,
    RecordEvent,
    SetCondition,
    Spawn,
    Vacate,
)
from remit.model.identity import Principal
from remit.model.kinds import Config, DataSpec, Node, NodeHealth, NodeSpec
from remit.model.metadata import Condition, Metadata
from remit.model.records import EventSpec
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeHeartbeat, NodeState

AGENT = Principal("a", "machine-1", "agent", nodes=frozenset({"n1", "n2"}))
SCHEDULER = Principal("s", "s", "scheduler")
CONTROLLERS = Principal("c", "c", "controllers")
ADMIN, VIEWER = Principal("r", "root", "admin"), Principal("v", "eye", "viewer")
MEMBER, TENANT_VIEWER = Principal("m", "ann", "member", "t1"), Principal("l", "lou", "viewer", "t1")
MINE = Actor("machine-1", Role.AGENT, "agent/n1", 3)


def operation(claim: AnyClaim, actor: Actor = MINE) -> Operation:
    return Operation(OperationID("i.1.n"), actor, claim)


def node(name: str) -> Node:
    return Node(metadata=Metadata(name=name), spec=NodeSpec(region="r", zone="z", capacity=Amount()))


OWN: list[AnyClaim] = [
    Acquire("agent/n2", Duration(1)),
    Vacate("agent/n1"),
    Apply(node("n1")),
    Move("replica/t/a-0", 1, "start"),
    SetCondition("Node", "n1", Condition(type="Disk", status="True")),
]
NOT_OWN: list[AnyClaim] = [
    Acquire("agent/n3", Duration(1)),
    Acquire("scheduler", Duration(1)),
    Vacate("repair"),
    Apply(node("n3")),
    Delete("Node", "n1"),
    Delete("Node", "n3"),
    Apply(Config(metadata=Metadata(name="c", tenant="t"), spec=DataSpec())),
    Delete("Workload", "w", "t"),
    SetCondition("Workload", "w", Condition(type="Ready", status="True"), "t"),
    Spawn("t", "w", 1, 0),
    RecordEvent("n", EventSpec(regarding="workload/t/w", source="scheduler")),
    Mark("n1", 1, NodeHealth.READY),
]


@pytest.mark.parametrize("claim", OWN, ids=lambda claim: type(claim).__name__)
def test_agent_may_claim_for_own_nodes(claim: AnyClaim) -> None:
    assert authorization.claim_denial_reason(AGENT, operation(claim)) == ""


@pytest.mark.parametrize("claim", NOT_OWN, ids=lambda claim: type(claim).__name__)
def test_agent_may_claim_nothing_else(claim: AnyClaim) -> None:
    assert authorization.claim_denial_reason(AGENT, operation(claim))


def test_token_role_limits_actor_roles() -> None:
    roles = {
        principal: authorization.ROLES.get(principal.role, frozenset())
        for principal in (AGENT, SCHEDULER, CONTROLLERS, ADMIN, MEMBER)
    }
    for principal, own in roles.items():
        for role in Role:
            assert (authorization.actor_denial_reason(principal, Actor("x", role)) == "") == (role in own), (
                principal.role,
                role,
            )
    assert not any({Role.OPERATOR, Role.USER, Role.AUTHORITY} & own for own in roles.values()), "not roles of components"
    assert authorization.actor_denial_reason(AGENT, Actor("x", Role.AGENT, "agent/n9"))


def test_heartbeats_and_assignments_are_limited_to_own_nodes() -> None:
    mine, other = NodeHeartbeat(MINE, NodeState("n1")), NodeHeartbeat(MINE, NodeState("n3"))
    foreign = NodeHeartbeat(Actor("machine-1", Role.AGENT, "agent/n3"), NodeState("n1"))
    assert (
        authorization.heartbeat_denial_reason(AGENT, [mine]) == ""
        and authorization.assignments_denial_reason(AGENT, ["n1", "n2"]) == ""
    )
    assert all(authorization.heartbeat_denial_reason(AGENT, [mine, one]) for one in (other, foreign))
    assert authorization.assignments_denial_reason(AGENT, ["n1", "n3"])
    assert authorization.heartbeat_denial_reason(SCHEDULER, [mine]) and authorization.assignments_denial_reason(
        CONTROLLERS, ["n1"]
    )


def test_tenant_users_read_own_tenant_and_shared_kinds() -> None:
    for everyone in (ADMIN, VIEWER):
        assert authorization.may_read(everyone, "Workload", "t2") and authorization.may_read(everyone, "Node", "", "n1")
    for one in (MEMBER, TENANT_VIEWER):
        assert authorization.may_read(one, "Workload", "t1") and not authorization.may_read(one, "Workload", "t2")
        assert authorization.may_read(one, "Tenant", "", "t1") and not authorization.may_read(one, "Tenant", "", "t2")
        assert not authorization.may_read(one, "Tenant", "") and authorization.may_read(one, "PriorityClass", "")
        assert not any(authorization.may_read(one, kind, "") for kind in ("Node", "Policy", "Token", "Lease", "Grant"))
    assert [authorization.may_write(one) for one in (ADMIN, MEMBER, VIEWER, TENANT_VIEWER)] == [True, True, False, False]


def test_member_token_acts_in_its_tenant_only() -> None:
    assert authorization.actor_of(MEMBER) == Actor("ann", Role.USER, tenant="t1")
    assert authorization.actor_of(ADMIN) == Actor("root", Role.OPERATOR)
