"""Admission of declared objects: policies and tenant limits. Pure.

The same checks apply whichever way an object arrives. Only growth and changed fields are refused: after a rule was tightened
or a limit lowered, an existing object can still be scaled down or changed in other fields.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import refuse
from remit.law.admission import BY_POLICY_CONDITION, apply_policy_defaults, forbidden_field
from remit.law.charges import LIMIT_FIELDS, TENANT_LIMITS, limit_charges
from remit.model.claims import Code, Operation, Refused
from remit.model.kinds import Policy, Tenant, Workload, WorkloadSpec
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition
from remit.model.objects import key_of
from remit.model.roles import PEOPLE


def _policy_inputs_differ(before: Workload, after: Workload) -> bool:
    """Return whether the fields that policies read have changed."""
    old, spec = before.spec, after.spec
    return (old.priority_class, old.placement, before.metadata.labels) != (
        spec.priority_class,
        spec.placement,
        after.metadata.labels,
    )


def check_policies(draft: Draft, operation: Operation, workload: Workload, before: Workload | None) -> Refused | None:
    """Check the policies that match the workload.

    An actor without a tenant (an operator) may use any priority class. A class that was admitted stays until another is
    requested. A controller that rolls back sends a spec that was admitted once. It gets the policies' current defaults, and
    is not refused.
    """
    if operation.actor.role not in PEOPLE or (before is not None and not _policy_inputs_differ(before, workload)):
        return None
    meta = workload.metadata
    terms = draft.requirements.interner().admission.terms(meta.tenant, meta.name, meta.labels)
    unchanged = before is not None and before.spec.priority_class == workload.spec.priority_class
    granted = unchanged or not operation.actor.tenant
    violation = forbidden_field(workload.spec, terms, lambda name: _priority_value(draft, name), may_raise_priority=granted)
    return None if violation is None else refuse(Code.POLICY, f"{violation.field}: {violation.message}")


def _priority_value(draft: Draft, priority_class: str) -> int | None:
    entry = draft.lookup(key_of("PriorityClass", priority_class))
    return None if entry is None else int(entry[0].spec.value)


def check_priority_classes(draft: Draft, policy: Policy) -> Refused | None:
    for number, rule in enumerate(policy.spec.rules):
        for field, priority_class in (
            ("priorityClass", rule.priority_class),
            ("defaults.priorityClass", rule.defaults.priority_class),
        ):
            if priority_class and _priority_value(draft, priority_class) is None:
                detail = f"spec.rules[{number}].{field}: priority class {priority_class} does not exist"
                return refuse(Code.INVALID, detail)
    return None


def check_limits(draft: Draft, obj: AnyObject, before: Any) -> Refused | None:
    """Refuse growth past the limits of the object's tenant. `before` is the current object, or None."""
    if type(obj) not in TENANT_LIMITS:
        return None
    tenant = obj.metadata.tenant
    entry = draft.lookup(key_of("Tenant", tenant))
    if entry is None or not isinstance(entry[0], Tenant):
        return None
    charged_before = limit_charges(before)
    for limit, amount in limit_charges(obj).items():
        growth, maximum = amount - charged_before.get(limit, 0), int(getattr(entry[0].spec.limits, limit))
        if growth <= 0:
            continue
        used = draft.books.used.get((tenant, limit), 0) + draft.changes.used.get((tenant, limit), 0)
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
    admission = draft.requirements.interner().admission
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
