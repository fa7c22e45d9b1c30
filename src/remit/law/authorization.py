"""What a token may read, write, claim, renew and receive.

Decided from what a token says, with a pencil. No I/O here.

Two doors are told apart. People ask for objects: a tenant's member may read and write that tenant's, a viewer only read, an
admin anything; for somebody of a tenant the others' objects are not there. Components make claims under a role and a lease: an
agent only as the agent of its own nodes, a scheduler and the controllers only in their own roles. What stands against what is
stored (is the replica bound to that node? does the asker hold the lease?) the authority decides, by the lifecycle table.

The one that it is bound to, in that attempt, while it may run there. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from remit.model.claims import (
    Abandon,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Claim,
    Move,
    Operation,
    Role,
    SetCondition,
    Vacate,
)
from remit.model.identity import Principal
from remit.model.objects import TENANTED
from remit.model.records import Phase, Replica
from remit.model.wire.agent_messages import NodeHeartbeat, SecretMaterialRequest

ROLES: Final[dict[str, frozenset[Role]]] = {
    "agent": frozenset({Role.AGENT}),
    "scheduler": frozenset({Role.SCHEDULER}),
    "controllers": frozenset(
        {Role.NODES, Role.REPAIR, Role.ROLLOUT, Role.WORKLOADS, Role.ENDPOINTS, Role.BUDGETS, Role.POLICY, Role.AUTOSCALER}
    ),
}
"""In which roles the holder of a component's token may act."""

AGENT_CLAIMS: Final[tuple[type[Claim], ...]] = (Acquire, Vacate, Apply, Move, SetCondition, Abandon)
TENANT_READABLE_KINDS: Final = frozenset({"Region", "NodePool", "PriorityClass", "Tenant"})
"""Kinds of no tenant that work refers to: whoever writes work may look them up. Of tenants each sees its own."""


def actor_of(principal: Principal) -> Actor:
    """In whose name a person's token asks the authority."""
    if principal.role == "admin":
        return Actor(principal.subject, Role.OPERATOR)
    return Actor(principal.subject, Role.USER, tenant=principal.tenant)


# ---------------------------------------------------------------------------------------------------------------- people


def may_read(principal: Principal, kind: str, tenant: str, name: str = "") -> bool:
    """Is this object there at all for whoever asks? `tenant` is the one that it stands in, `name` its own."""
    if not principal.tenant:
        return True
    if kind in TENANTED:
        return tenant == principal.tenant
    return kind in TENANT_READABLE_KINDS and (kind != "Tenant" or name == principal.tenant)


def may_write(principal: Principal) -> bool:
    return principal.role in ("admin", "member")


# ------------------------------------------------------------------------------------------------------------ components


def claim_denial_reason(principal: Principal, operation: Operation) -> str:
    """Empty if this may be asked; else why not."""
    wrong = actor_denial_reason(principal, operation.actor)
    if wrong or principal.role != "agent":
        return wrong
    claim: AnyClaim = operation.claim
    if not isinstance(claim, AGENT_CLAIMS):
        return f"an agent does not {claim.__struct_config__.tag}"
    match claim:
        case Acquire(lease=lease) | Vacate(lease=lease):
            return _lease_denial_reason(principal, lease)
        case Apply(thing=thing) if type(thing).__name__ != "Node":
            return f"an agent declares its nodes, and no {type(thing).__name__}"
        case Apply(thing=thing):
            return _node_denial_reason(principal, thing.metadata.name)
        case SetCondition(kind="Node", name=name):
            return _node_denial_reason(principal, name)
        case SetCondition():
            return f"an agent speaks of its nodes, and of no {claim.kind}"
        case _:
            return ""


def actor_denial_reason(principal: Principal, actor: Actor) -> str:
    """May it speak as this actor?"""
    if actor.role not in ROLES.get(principal.role, ()):
        return f"a token of role {principal.role} does not act as {actor.role.value}"
    if principal.role == "agent" and actor.lease:
        return _lease_denial_reason(principal, actor.lease)
    return ""


def heartbeat_denial_reason(principal: Principal, beats: Iterable[NodeHeartbeat]) -> str:
    if principal.role != "agent":
        return f"a token of role {principal.role} has no nodes to speak for"
    for beat in beats:
        wrong = actor_denial_reason(principal, beat.actor) or _node_denial_reason(principal, beat.state.node)
        if wrong:
            return wrong
    return ""


def assignments_denial_reason(principal: Principal, nodes: Iterable[str]) -> str:
    """May it be told the orders of these nodes?"""
    if principal.role != "agent":
        return f"a token of role {principal.role} has no nodes that are given orders"
    return next((wrong for node in nodes if (wrong := _node_denial_reason(principal, node))), "")


def _lease_denial_reason(principal: Principal, lease: str) -> str:
    role, _, node = lease.partition("/")
    return _node_denial_reason(principal, node) if role == Role.AGENT.value else f"lease {lease} is no agent's"


def _node_denial_reason(principal: Principal, node: str) -> str:
    return "" if node in principal.nodes else f"node {node} is not one of those that the token {principal.token} is for"


MATERIAL_PHASES: Final = frozenset({Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING})
"""In which it is started, or started again within its attempt. What ends, is unknown or was given up reads nothing any more."""


def material_denial_reason(asked: SecretMaterialRequest, replica: Replica | None) -> str:
    """Why whoever holds the lease that is named may not have it, by the replica as it is stored; empty: it may."""
    node = asked.actor.lease.partition("/")[2]
    if replica is None or replica.metadata.uid != asked.uid or replica.status.node != node:
        return f"{asked.key} is not bound to {node}"  # also if there is none: who asks for others' learns nothing
    if replica.status.attempt != asked.attempt:
        return f"{asked.key} is in another attempt than {asked.attempt}"
    if replica.status.phase not in MATERIAL_PHASES:
        return f"{asked.key} is {replica.status.phase}, and is not started any more"
    return ""
