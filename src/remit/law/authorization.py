"""Authorization by token: reading, writing, claims, heartbeats, assignments and secrets.

Decided from the token alone; no I/O. There are two kinds of callers. Users work with objects: a member reads and writes the
objects of its tenant, a viewer only reads them, an admin has access to everything; objects of other tenants do not exist for
a caller with a tenant. Components make claims under a role and a lease: an agent only for its own nodes, a scheduler and the
controllers only in their own roles. Conditions on stored state (whether the caller holds the lease, whether the replica is
bound to the node) are checked by the authority, by the lifecycle table.

An agent receives the secrets of a replica only while the replica is bound to its node and may run there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from remit.model.claims import Abandon, Acquire, Actor, AnyClaim, Apply, Claim, Move, Operation, SetCondition, Vacate
from remit.model.identity import Principal
from remit.model.kinds.registry import BY_KIND
from remit.model.records import Phase, Replica
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeHeartbeat, SecretMaterialRequest

ROLES: Final[dict[str, frozenset[Role]]] = {
    "agent": frozenset({Role.AGENT}),
    "scheduler": frozenset({Role.SCHEDULER}),
    "controllers": frozenset(
        {Role.NODES, Role.REPAIR, Role.ROLLOUT, Role.WORKLOADS, Role.ENDPOINTS, Role.BUDGETS, Role.POLICY, Role.AUTOSCALER}
    ),
}
"""The roles in which the holder of a component token may act."""

AGENT_CLAIMS: Final[tuple[type[Claim], ...]] = (Acquire, Vacate, Apply, Move, SetCondition, Abandon)


def actor_of(principal: Principal) -> Actor:
    """Returns the actor under which a user's token makes claims."""
    if principal.role == "admin":
        return Actor(principal.subject, Role.OPERATOR)
    return Actor(principal.subject, Role.USER, tenant=principal.tenant)


# ----------------------------------------------------------------------------------------------------------------- users


def may_read(principal: Principal, kind: str, tenant: str, name: str = "") -> bool:
    """Whether the caller may read this object; otherwise the API reports that it does not exist. `tenant` is the object's
    tenant.
    """
    if not principal.tenant:
        return True
    definition = BY_KIND[kind]
    if definition.tenanted:
        return tenant == principal.tenant
    return definition.tenant_readable and (kind != "Tenant" or name == principal.tenant)


def may_write(principal: Principal) -> bool:
    return principal.role in ("admin", "member")


# ------------------------------------------------------------------------------------------------------------ components


def claim_denial_reason(principal: Principal, operation: Operation) -> str:
    """Returns why this claim is denied; empty if it is allowed."""
    wrong = actor_denial_reason(principal, operation.actor)
    if wrong or principal.role != "agent":
        return wrong
    claim: AnyClaim = operation.claim
    if not isinstance(claim, AGENT_CLAIMS):
        return f"an agent may not make the claim {claim.__struct_config__.tag}"
    match claim:
        case Acquire(lease=lease) | Vacate(lease=lease):
            return _lease_denial_reason(principal, lease)
        case Apply(thing=thing) if type(thing).__name__ != "Node":
            return f"an agent may declare only its nodes, not {type(thing).__name__}"
        case Apply(thing=thing):
            return _node_denial_reason(principal, thing.metadata.name)
        case SetCondition(kind="Node", name=name):
            return _node_denial_reason(principal, name)
        case SetCondition():
            return f"an agent may set conditions only of its nodes, not of {claim.kind}"
        case _:
            return ""


def actor_denial_reason(principal: Principal, actor: Actor) -> str:
    """Returns why the principal may not act as this actor; empty if it may."""
    if actor.role not in ROLES.get(principal.role, ()):
        return f"a token of role {principal.role} may not act as {actor.role.value}"
    if principal.role == "agent" and actor.lease:
        return _lease_denial_reason(principal, actor.lease)
    return ""


def heartbeat_denial_reason(principal: Principal, beats: Iterable[NodeHeartbeat]) -> str:
    if principal.role != "agent":
        return f"a token of role {principal.role} has no nodes"
    for beat in beats:
        wrong = actor_denial_reason(principal, beat.actor) or _node_denial_reason(principal, beat.state.node)
        if wrong:
            return wrong
    return ""


def assignments_denial_reason(principal: Principal, nodes: Iterable[str]) -> str:
    """Returns why the principal may not watch the assignments of these nodes; empty if it may."""
    if principal.role != "agent":
        return f"a token of role {principal.role} has no nodes"
    return next((wrong for node in nodes if (wrong := _node_denial_reason(principal, node))), "")


def _lease_denial_reason(principal: Principal, lease: str) -> str:
    role, _, node = lease.partition("/")
    return _node_denial_reason(principal, node) if role == Role.AGENT.value else f"lease {lease} is not an agent's lease"


def _node_denial_reason(principal: Principal, node: str) -> str:
    return "" if node in principal.nodes else f"node {node} is not one of the nodes of token {principal.token}"


MATERIAL_PHASES: Final = frozenset({Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING})
"""Phases in which a replica is started or restarted within its attempt. A replica that is ending, unknown or failed receives no
secrets.
"""


def material_denial_reason(request: SecretMaterialRequest, replica: Replica | None) -> str:
    """Returns why the lease holder may not receive the secrets of a replica, given the stored replica; empty if it may."""
    node = request.actor.lease.partition("/")[2]
    if replica is None or replica.metadata.uid != request.uid or replica.status.node != node:
        # The same text if the replica does not exist, so that the caller learns nothing about other replicas.
        return f"{request.key} is not bound to {node}"
    if replica.status.attempt != request.attempt:
        return f"{request.key} is not in attempt {request.attempt}"
    if replica.status.phase not in MATERIAL_PHASES:
        return f"{request.key} is {replica.status.phase} and will not be started again"
    return ""
