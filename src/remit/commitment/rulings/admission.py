"""Admission of declared objects: policies, tenant limits, token rules. Pure.

The same checks apply whichever way an object arrives. Only growth and changed fields are refused: after a rule was tightened
or a limit lowered, an existing object can still be scaled down or changed in other fields.

law/authorization.py decides what a token allows; this module decides which tokens may be declared.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import refuse
from remit.law.admission import BY_POLICY_CONDITION, apply_policy_defaults, forbidden_field
from remit.law.charges import LIMIT_FIELDS, LIMITED_KINDS, limit_charges
from remit.model.claims import Code, Operation, Refused, Role
from remit.model.identity import Token
from remit.model.kinds import Policy, Tenant, Workload, WorkloadSpec
from remit.model.metadata import Condition
from remit.model.objects import AnyObject, key_of

HUMAN_ROLES: Final = frozenset({Role.USER, Role.OPERATOR})


def check_admission(draft: Draft, operation: Operation, obj: AnyObject, before: Any) -> Refused | None:
    """Refuse an object that policies or tenant limits forbid. `before` is the current object, or None."""
    if isinstance(obj, Policy):
        return _check_priority_classes(draft, obj)
    if not isinstance(obj, LIMITED_KINDS):
        return None
    # A controller that rolls back sends a spec that was admitted once. It gets the policies' current defaults, and is not
    # refused.
    if (
        isinstance(obj, Workload)
        and operation.actor.role in HUMAN_ROLES
        and (before is None or _policy_inputs_differ(before, obj))
    ):
        refused = _check_policies(draft, operation, obj, before)
        if refused is not None:
            return refused
    return _check_limits(draft, obj, before)


def _policy_inputs_differ(before: Workload, after: Workload) -> bool:
    """Return whether the fields that policies read have changed."""
    old, spec = before.spec, after.spec
    return (old.priority_class, old.placement, before.metadata.labels) != (
        spec.priority_class,
        spec.placement,
        after.metadata.labels,
    )


def _check_policies(draft: Draft, operation: Operation, workload: Workload, before: Workload | None) -> Refused | None:
    """Check the policies that match the workload.

    An actor without a tenant (an operator) may use any priority class. A class that was admitted stays until another is
    requested.
    """
    meta = workload.metadata
    terms = draft.current_interner().admission.terms(meta.tenant, meta.name, meta.labels)
    unchanged = before is not None and before.spec.priority_class == workload.spec.priority_class
    granted = unchanged or not operation.actor.tenant
    violation = forbidden_field(workload.spec, terms, lambda name: _priority_value(draft, name), may_raise_priority=granted)
    return None if violation is None else refuse(Code.POLICY, f"{violation.field}: {violation.message}")


def _priority_value(draft: Draft, priority_class: str) -> int | None:
    entry = draft.lookup(key_of("PriorityClass", priority_class))
    return None if entry is None else int(entry[0].spec.value)


def _check_priority_classes(draft: Draft, policy: Policy) -> Refused | None:
    for number, rule in enumerate(policy.spec.rules):
        for field, priority_class in (
            ("priorityClass", rule.priority_class),
            ("defaults.priorityClass", rule.defaults.priority_class),
        ):
            if priority_class and _priority_value(draft, priority_class) is None:
                detail = f"spec.rules[{number}].{field}: priority class {priority_class} does not exist"
                return refuse(Code.INVALID, detail)
    return None


def _check_limits(draft: Draft, obj: AnyObject, before: Any) -> Refused | None:
    tenant = obj.metadata.tenant
    entry = draft.lookup(key_of("Tenant", tenant))
    if entry is None or not isinstance(entry[0], Tenant):
        return None
    charged_before = limit_charges(before)
    for limit, amount in limit_charges(obj).items():
        growth, maximum = amount - charged_before.get(limit, 0), int(getattr(entry[0].spec.limits, limit))
        if growth <= 0:
            continue
        used = draft.books.used.get((tenant, limit), 0) + draft.used.get((tenant, limit), 0)
        if used + growth > maximum:
            field = LIMIT_FIELDS.get(limit, "metadata.tenant")
            detail = (
                f"{field}: tenant {tenant} uses {used} of {maximum} {limit}, {growth} more exceed the limit by "
                f"{used + growth - maximum}; "
            )
            return refuse(Code.LIMIT, detail + f"delete some, or ask an operator to raise spec.limits.{limit} of the tenant")
    return None


def apply_defaults(draft: Draft, workload: Workload) -> tuple[Workload, WorkloadSpec]:
    """Return the workload with a condition that lists the defaults applied by policies, and its spec with these defaults."""
    meta, status = workload.metadata, workload.status
    admission = draft.current_interner().admission
    spec, messages = apply_policy_defaults(workload.spec, admission.terms(meta.tenant, meta.name, meta.labels))
    conditions = tuple(item for item in status.conditions if item.type != BY_POLICY_CONDITION)
    if messages:
        condition = Condition(
            type=BY_POLICY_CONDITION,
            status="True",
            reason=f"PolicyRevision{admission.number}",
            message="; ".join(messages)[:4_096],
            observed_generation=meta.generation,
            last_transition=draft.time.wall,
        )
        conditions = tuple(sorted((*conditions, condition), key=lambda item: item.type))
    if conditions != status.conditions:
        workload = replace(workload, status=replace(status, conditions=conditions))
    return workload, spec


TOKENS_MAX = 100_000
_TOKENS = key_of("Token", "")


def check_token(draft: Draft, token: Token, before: Token | None) -> Refused | None:
    """Check a declared token. Its owner and role never change: an answer given to one holder must not reach another by reuse of
    the name.
    """
    spec, name = token.spec, token.metadata.name
    if spec.tenant and draft.lookup(key_of("Tenant", spec.tenant)) is None:
        return refuse(Code.NOT_FOUND, f"spec.tenant: tenant {spec.tenant} does not exist")
    if before is None:
        if len(draft.keys(_TOKENS)) >= TOKENS_MAX:
            return refuse(Code.LIMIT, f"the scope has reached its limit of {TOKENS_MAX} tokens; delete expired or revoked ones")
        if any(
            other.spec.digest == spec.digest for other in _tokens(draft)
        ):  # otherwise one secret would authenticate as two tokens
            return refuse(Code.EXISTS, "spec.digest: another token has the same secret; generate a new one")
        return _check_nodes_unclaimed(draft, token) if spec.joined else None
    old = before.spec
    if old.revoked and not spec.revoked:
        return refuse(Code.EXISTS, f"token {name} was revoked, which is final; create a new token")
    if old.spent and spec.spent != old.spent:
        return refuse(Code.EXISTS, f"token {name} was already used by an agent to join, which is final; create a new token")
    if replace(spec, revoked=old.revoked, expires=old.expires, spent=old.spent) != old:
        return refuse(
            Code.EXISTS,
            f"token {name} exists, and only spec.expires, spec.revoked and spec.spent may change; create a new token instead",
        )
    return None


def _check_nodes_unclaimed(draft: Draft, token: Token) -> Refused | None:
    """Refuse a join token's nodes that another agent has. Two servers may have checked this at the same time; here one comes
    first.
    """
    for other in _tokens(draft):
        if other.spec.role != "agent" or other.spec.revoked or other.spec.expires <= draft.time.wall:
            continue
        if taken := sorted(set(other.spec.nodes) & set(token.spec.nodes)):
            how = f"by token {other.metadata.name}"
            return refuse(
                Code.EXISTS,
                f"spec.nodes: node {taken[0]} already has an agent, identified {how}; revoke that token first, or choose "
                "another name",
            )
    return None


def revoke_tenant_tokens(draft: Draft, tenant: str) -> None:
    """Revoke the tokens of a deleted tenant. Otherwise they would be valid for a later tenant of the same name."""
    for token in _tokens(draft):
        if token.spec.tenant == tenant:
            _revoke(draft, token)


def revoke_node_tokens(draft: Draft, node: str) -> None:
    """Revoke the tokens of agents whose last node is deleted."""
    for token in _tokens(draft):
        spec = token.spec
        if node in spec.nodes and all(draft.lookup(key_of("Node", name)) is None for name in spec.nodes if name != node):
            _revoke(draft, token)


def _tokens(draft: Draft) -> list[Token]:
    entries = (draft.lookup(name) for name in draft.keys(_TOKENS))
    return [entry[0] for entry in entries if entry is not None]


def _revoke(draft: Draft, token: Token) -> None:
    if not token.spec.revoked:
        meta = replace(token.metadata, generation=token.metadata.generation + 1)
        draft.put(replace(token, metadata=meta, spec=replace(token.spec, revoked=True)))
