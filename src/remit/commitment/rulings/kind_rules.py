"""Rules of each kind for apply and delete, besides those of all kinds, in one table. Pure.

A kind without an entry has only the rules of all kinds (declarations.py) and those that follow from its definition, such as its
references. Rules between the fields of one object are in model/manifests/field_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.rulings.policies import (
    check_policy,
    check_policy_home,
    policies_in_force,
    publish_policy,
    withdraw_policy,
)
from remit.commitment.rulings.registry import refuse
from remit.commitment.rulings.tokens import check_token, revoke_node_tokens, revoke_tenant_tokens
from remit.commitment.rulings.workloads import check_workload, delete_generations, has_replicas, prepare_workload
from remit.law.admission import priority_classes_in
from remit.law.overrides import is_live
from remit.model.claims import Apply, Code, Operation, Refused
from remit.model.kinds import Node, Override, Secret, Workload
from remit.model.kinds.definition import KindDefinition
from remit.model.kinds.registry import DEFINITIONS
from remit.model.metadata import Deadline
from remit.model.objects import key_of
from remit.model.roles import Role
from remit.model.secrets import is_sealed

OVERRIDES_MAX = 1_000


class KindRules(NamedTuple):
    """Rules of one kind. `before` is the stored object, or None if there is none."""

    check: Callable[[Draft, Operation, Any, Any], Refused | None] | None = None
    """`(draft, operation, obj, before)`: refuses an object for what it requires of other objects or of the caller."""
    prepare: Callable[[Draft, Apply, Any, Any], Any] | None = None
    """`(draft, claim, obj, before)`: returns the object to store, and writes the records that belong to it."""
    on_stored: Callable[[Draft, Any], None] | None = None
    check_unused: Callable[[Draft, str, str], Refused | None] | None = None
    """`(draft, name, tenant)`: refuses to delete an object that others depend on."""
    is_held: Callable[[Draft, Any], bool] | None = None
    """Whether a deleted object is only marked as being deleted for now."""
    on_deleted: Callable[[Draft, Any], None] | None = None


# -- nodes -------------------------------------------------------------------------------------------------------------------


def _check_node(draft: Draft, operation: Operation, node: Node, before: Node | None) -> Refused | None:
    if operation.actor.role is not Role.AGENT:
        return None
    if operation.actor.lease != f"{Role.AGENT}/{node.metadata.name}":
        return refuse(Code.NOT_OWNER, f"an agent declares only its own node; this one acts for {operation.actor.lease}")
    return _check_agent_node(draft, node, before)


def _check_agent_node(draft: Draft, node: Node, before: Node | None) -> Refused | None:
    """Check what an agent declares for its own node: only capacity, devices and address.

    Labels, taints and the other fields belong to operators. A node that could label itself, or remove its own taint, would
    choose which work it receives.
    """
    meta, spec = node.metadata, node.spec
    if meta.owners or meta.finalizers:
        return refuse(
            Code.NOT_OWNER, f"metadata: an agent may not set owners or finalizers of node {meta.name}; an operator may"
        )
    if before is not None:
        old = before.spec
        allowed = replace(old, capacity=spec.capacity, devices=spec.devices, address=spec.address, port=spec.port)
        if allowed != spec or meta.labels != before.metadata.labels or meta.annotations != before.metadata.annotations:
            return refuse(
                Code.NOT_OWNER,
                f"an agent may change only capacity, devices, address and port of node {meta.name}; an operator may change the "
                "rest",
            )
    pool = draft.lookup(key_of("NodePool", spec.pool))
    if pool is not None and not spec.capacity <= pool[0].spec.capacity:
        limit = f"pool {spec.pool} allows at most {pool[0].spec.capacity} per node"
        return refuse(Code.INVALID, f"spec.capacity: {limit}, node {node.metadata.name} declares {spec.capacity}")
    return None


def _check_node_unused(draft: Draft, name: str, tenant: str) -> Refused | None:
    ledger = draft.ledgers.node(name)
    if ledger is not None and ledger.holders:
        return refuse(Code.IN_USE, f"node {name} holds {ledger.holders} replicas; drain it first")
    if draft.lookup(key_of("Summary", AWAITED_NODE + name)) is not None:
        awaited = "has not reported since the restore and may be running replicas unknown here"
        return refuse(Code.AWAITING_REPORTS, f"node {name} {awaited}; wait until it is ready or lost")
    return None


# -- tenants and priority classes --------------------------------------------------------------------------------------------


def _check_tenant_unused(draft: Draft, name: str, tenant: str) -> Refused | None:
    ledgers = [draft.ledgers.grant(f"tenant/{name}"), draft.ledgers.grant(f"tenant/{name}/emergency")]
    owns = any(draft.keys(f"{definition.prefix}/{name}/") for definition in DEFINITIONS if definition.tenanted)
    if owns or any(ledger is not None and ledger.committed() for ledger in ledgers):
        return refuse(Code.IN_USE, f"tenant {name} still has objects, running work or grants; delete these first")
    return None


def _check_priority_class_unused(draft: Draft, name: str, tenant: str) -> Refused | None:
    users = [k for k in draft.keys("workload/") if (w := draft.lookup(k)) and w[0].spec.priority_class == name]
    users += [k for k in draft.keys("generation/") if (g := draft.lookup(k)) and g[0].spec.spec.priority_class == name]
    users += [f"policy/{k}" for k, policy in policies_in_force(draft).items() if name in priority_classes_in(policy)]
    if not users:
        return None
    return refuse(
        Code.IN_USE, f"priority class {name} is used by {len(users)} objects, for example {users[0]}; change these first"
    )


def _check_policy_unused(draft: Draft, name: str, tenant: str) -> Refused | None:
    return check_policy_home(draft)


# -- secrets and configs -----------------------------------------------------------------------------------------------------


def _check_secret(draft: Draft, operation: Operation, secret: Secret, before: Secret | None) -> Refused | None:
    plain = next((name for name, value in secret.spec.data.items() if not is_sealed(value)), None)
    if plain is None:
        return None
    return refuse(
        Code.INVALID, f"spec.data.{plain}: not sealed; declare secrets through the HTTP API of a server, which seals them"
    )


def _check_secret_unused(draft: Draft, name: str, tenant: str) -> Refused | None:
    return _check_not_mounted(draft, "secret", name, tenant)


def _check_config_unused(draft: Draft, name: str, tenant: str) -> Refused | None:
    return _check_not_mounted(draft, "config", name, tenant)


def _check_not_mounted(draft: Draft, kind: str, name: str, tenant: str) -> Refused | None:
    user = _mounting_workload(draft, f"{kind}s", name, tenant)
    if not user:
        return None
    return refuse(Code.IN_USE, f"{kind} {name} is used by {user}; remove it from spec.template.{kind}s there first")


def _mounting_workload(draft: Draft, mounts: str, name: str, tenant: str) -> str:
    """Return the key of a workload that may still start replicas with this secret or config: by its current spec, or by an
    older generation that has replicas. Empty if there is none.
    """
    for workload_key in draft.keys(f"workload/{tenant}/"):
        entry = draft.lookup(workload_key)
        if entry is None or entry[0].metadata.deleting:
            continue
        workload: Workload = entry[0]
        specs = [workload.spec.template]
        for old_key in draft.keys(key_of("Generation", f"{workload.metadata.name}/", tenant)):
            generation_row = draft.lookup(old_key)
            if generation_row is not None and draft.replicas.count(
                (tenant, workload.metadata.name, generation_row[0].spec.generation)
            ):
                specs.append(generation_row[0].spec.spec.template)
        if any(mount.name == name for template in specs for mount in getattr(template, mounts)):
            return workload_key
    return ""


# -- overrides ---------------------------------------------------------------------------------------------------------------


def _check_override(draft: Draft, operation: Operation, override: Override, before: Override | None) -> Refused | None:
    """Check a declared override. An expired one is not restarted by the same spec: a script that applies it repeatedly must not
    keep it in force forever.
    """
    name, now = override.metadata.name, (draft.time.boot, draft.time.now_ms)
    if before is not None and before.spec == override.spec and not is_live(before, now):
        return refuse(
            Code.EXISTS, f"override {name} has expired, and applying the same spec does not restart it; delete it first"
        )
    if before is None and len(draft.keys(key_of("Override", ""))) >= OVERRIDES_MAX:
        return refuse(Code.LIMIT, f"the scope has reached its limit of {OVERRIDES_MAX} overrides; delete expired ones")
    return None


def _prepare_override(draft: Draft, claim: Apply, override: Override, before: Override | None) -> Override:
    """Start the term of an override that is new or was changed."""
    if before is not None and before.spec == override.spec:
        return override
    deadline = Deadline(boot=draft.time.boot, at_ms=draft.time.now_ms + override.spec.ttl)
    return replace(override, status=replace(override.status, deadline=deadline))


# -- the table ---------------------------------------------------------------------------------------------------------------

NO_RULES: Final = KindRules()
KIND_RULES: Final[dict[str, KindRules]] = {
    "Node": KindRules(check=_check_node, check_unused=_check_node_unused, on_deleted=revoke_node_tokens),
    "Tenant": KindRules(check_unused=_check_tenant_unused, on_deleted=revoke_tenant_tokens),
    "PriorityClass": KindRules(check_unused=_check_priority_class_unused),
    "Policy": KindRules(
        check=check_policy, on_stored=publish_policy, check_unused=_check_policy_unused, on_deleted=withdraw_policy
    ),
    "Secret": KindRules(check=_check_secret, check_unused=_check_secret_unused),
    "Config": KindRules(check_unused=_check_config_unused),
    "Workload": KindRules(check=check_workload, prepare=prepare_workload, is_held=has_replicas, on_deleted=delete_generations),
    "Override": KindRules(check=_check_override, prepare=_prepare_override),
    "Token": KindRules(check=check_token),
}

_Field = Callable[[Any], str | tuple[str, ...]]
_REFERRERS: Final[dict[str, list[tuple[KindDefinition, _Field]]]] = {}
"""Kinds that refer to a kind, each with the field that has the name."""
for _definition in DEFINITIONS:
    for _reference in _definition.references:
        _REFERRERS.setdefault(_reference.kind, []).append((_definition, attrgetter(_reference.path)))


def check_unused(draft: Draft, definition: KindDefinition, name: str, tenant: str) -> Refused | None:
    """Refuse to delete an object that others depend on."""
    for referrer, field in _REFERRERS.get(definition.kind, ()):
        within = f"{referrer.prefix}/{tenant}/" if definition.tenanted and referrer.tenanted else f"{referrer.prefix}/"
        users = [k for k in draft.keys(within) if (entry := draft.lookup(k)) and _names(field(entry[0]), name)]
        if users:
            return refuse(Code.IN_USE, f"{definition.prefix} {name} has {len(users)} {referrer.plural}; delete these first")
    check = KIND_RULES.get(definition.kind, NO_RULES).check_unused
    return None if check is None else check(draft, name, tenant)


def _names(value: str | tuple[str, ...], name: str) -> bool:
    return value == name if isinstance(value, str) else name in value
