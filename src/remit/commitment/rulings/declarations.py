"""Apply and delete of declared objects: preconditions, finalizers, stamps. Pure.

The same for all kinds; rules of single kinds are in kind_rules.py, owner references in owners.py.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.admission import check_limits
from remit.commitment.rulings.kind_rules import KIND_RULES, NO_RULES, check_unused
from remit.commitment.rulings.owners import is_orphaned, resolve_owners
from remit.commitment.rulings.registry import Coordination, refuse, ruling
from remit.model.claims import Apply, Code, Delete, Operation, Refused
from remit.model.kinds.definition import KindDefinition
from remit.model.kinds.registry import BY_KIND, BY_STRUCT, DEFINITIONS, AnyObject
from remit.model.manifests.validation import validate
from remit.model.metadata import Metadata, Owner
from remit.model.objects import key, key_of
from remit.model.problems import an
from remit.model.roles import Role

ANY_DECLARING_ROLE = frozenset(role for definition in DEFINITIONS for role in definition.declared_by)
_INITIAL_STATUSES = {definition.struct: definition.initial_status for definition in DEFINITIONS}


@ruling(Apply, ANY_DECLARING_ROLE, Coordination.HARD, "one object per name, one spec per generation")
def apply(draft: Draft, operation: Operation, claim: Apply) -> int | Refused:
    obj = claim.thing
    definition, meta = BY_STRUCT[type(obj)], obj.metadata
    refused = _check_may_declare(operation, definition, meta) or _check_valid(obj)
    if refused is not None:
        return refused
    name, rules = key(obj), KIND_RULES.get(definition.kind, NO_RULES)
    entry = draft.lookup(name)
    before = None if entry is None else entry[0]
    refused = _check_precondition(name, claim.expect, entry)
    if refused is not None:
        return refused
    if before is not None and before.metadata.deleting:
        return _check_change_while_deleting(before, obj) or release_finalizers(draft, before, obj)
    if meta.tenant:
        refused = _check_tenant_exists(draft, meta.tenant, new=before is None)
    if refused is None and rules.check is not None:
        refused = rules.check(draft, operation, obj, before)
    refused = refused or check_limits(draft, obj, before)
    if refused is not None:
        return refused
    owners = resolve_owners(draft, obj, before)
    if isinstance(owners, Refused):
        return owners
    stamped = _stamp(draft, obj, before, owners)
    if rules.prepare is not None:
        stamped = rules.prepare(draft, claim, stamped, before)
    draft.put(stamped)
    if rules.on_stored is not None:
        rules.on_stored(draft, stamped)
    return int(stamped.metadata.generation)


def _check_may_declare(operation: Operation, definition: KindDefinition, meta: Any) -> Refused | None:
    kind, role = definition.kind, operation.actor.role
    if not definition.is_declared or not isinstance(meta, Metadata):
        return refuse(Code.INVALID, f"{an(kind)} is a record of the authority and cannot be declared")
    if role not in definition.declared_by:
        declarers = ", ".join(sorted(definition.declared_by))
        return refuse(Code.ROLE, f"{an(kind)} may be declared by {declarers}, not by role {role}")
    return _check_tenant(operation, meta.tenant)


def _check_valid(obj: AnyObject) -> Refused | None:
    problems = validate(obj)
    if not problems:
        return None
    # Report all problems that fit into the answer, so that the user can fix them in one round.
    code = Code.RESERVED if any(problem.reserved for problem in problems) else Code.INVALID
    return refuse(code, " | ".join(problem.description for problem in problems[:8]))


def _stamp(draft: Draft, obj: Any, before: Any, owners: tuple[Owner, ...]) -> Any:
    """Return the object with the fields that the authority sets. The generation counts changes of the spec and the labels."""
    meta = replace(obj.metadata, owners=owners, revision=0, deleting=False)
    if before is None:
        meta = replace(meta, uid=draft.new_uid(), generation=1, created=draft.time.wall)
    else:
        old = before.metadata
        changed = before.spec != obj.spec or old.labels != meta.labels
        meta = replace(meta, uid=old.uid, generation=old.generation + changed, created=old.created)
    # Status is observed, not declared: a new node starts as joining, even if its manifest contains a status.
    status = _INITIAL_STATUSES[type(obj)] if before is None else before.status
    return replace(obj, metadata=meta, status=status)


def _check_precondition(name: str, expect: int | None, entry: tuple[Any, int] | None) -> Refused | None:
    if expect is None:
        return None
    if expect == 0 and entry is not None:
        return refuse(Code.EXISTS, f"{name} exists already, at revision {entry[1]}; update it instead of creating it")
    if expect and entry is None:
        return refuse(Code.NOT_FOUND, f"{name} no longer exists; create it again if you need it")
    if expect and entry is not None and (entry[1] != expect or expect < 0):
        return refuse(
            Code.REVISION, f"{name} was read at revision {expect} and has changed since; read it again and reapply the change"
        )
    return None


def _check_tenant(operation: Operation, tenant: str) -> Refused | None:
    """Refuse changes outside the actor's tenant, whichever way the claim arrived."""
    own_tenant = operation.actor.tenant
    if not own_tenant or tenant == own_tenant:
        return None
    return refuse(
        Code.TENANT,
        f"metadata.tenant: {operation.actor.name} may act only in tenant {own_tenant}, not in "
        f"{tenant or 'objects without a tenant'}",
    )


def _check_tenant_exists(draft: Draft, tenant: str, *, new: bool) -> Refused | None:
    entry = draft.lookup(key_of("Tenant", tenant))
    if entry is None:
        return refuse(Code.NOT_FOUND, f"metadata.tenant: tenant {tenant} does not exist")
    if new and entry[0].metadata.deleting:
        return refuse(Code.DELETING, f"metadata.tenant: tenant {tenant} is being deleted and accepts no new objects")
    return None


@ruling(Delete, ANY_DECLARING_ROLE, Coordination.HARD, "nothing is deleted while something depends on it")
def delete(draft: Draft, operation: Operation, claim: Delete) -> int | Refused:
    definition, role = BY_KIND.get(claim.kind), operation.actor.role
    if definition is None or not definition.is_declared:
        return refuse(Code.INVALID, f"kind: {an(claim.kind)} is a record of the authority and cannot be deleted")
    may_delete = role in definition.declared_by or role in definition.deleted_by
    if not may_delete and role is not Role.WORKLOADS:
        return refuse(Code.ROLE, f"role {role} may not delete {an(claim.kind)}")
    if role is Role.AGENT:  # it would declare the node again, without the labels and taints that operators set
        return refuse(Code.NOT_OWNER, f"node {claim.name} may be deleted by an operator, not by an agent")
    if (refused := _check_tenant(operation, claim.tenant)) is not None:
        return refused
    name = key_of(claim.kind, claim.name, claim.tenant)
    entry = draft.lookup(name)
    if entry is None:
        return refuse(Code.NOT_FOUND, f"{name} does not exist")
    obj = entry[0]
    if not may_delete and not obj.metadata.deleting and not is_orphaned(draft, obj):
        return refuse(Code.ROLE, f"role {role} may delete {name} only if all its owners are gone or it is being deleted")
    refused = _check_precondition(name, claim.expect, entry) or check_unused(draft, definition, claim.name, claim.tenant)
    if refused is not None:
        return refused
    return _finish_delete(draft, definition, obj)


def _finish_delete(draft: Draft, definition: KindDefinition, obj: Any) -> int:
    """Delete the object and return 1; or mark it as being deleted and return 0, if finalizers or replicas remain."""
    meta, rules = obj.metadata, KIND_RULES.get(definition.kind, NO_RULES)
    if meta.finalizers or (rules.is_held is not None and rules.is_held(draft, obj)):
        if not meta.deleting:
            draft.put(replace(obj, metadata=replace(meta, deleting=True)))
        return 0
    if rules.on_deleted is not None:
        rules.on_deleted(draft, obj)
    draft.delete(key(obj))
    return 1


def _check_change_while_deleting(before: Any, obj: AnyObject) -> Refused | None:
    """Check a change of an object that is being deleted: finalizers may only be removed, and annotations may change, because
    the holders of finalizers report their progress there.
    """
    old, meta = before.metadata, obj.metadata
    if not isinstance(meta, Metadata) or not set(meta.finalizers) <= set(old.finalizers):
        return refuse(Code.DELETING, f"{key(obj)} is being deleted; finalizers can only be removed")
    unchanged = (before.spec, old.labels) == (obj.spec, meta.labels)
    same_owners = [(owner.kind, owner.name) for owner in old.owners] == [(owner.kind, owner.name) for owner in meta.owners]
    if not unchanged or not same_owners or not old.finalizers:
        return refuse(Code.DELETING, f"{key(obj)} is being deleted; only finalizers and annotations may change")
    return None


def release_finalizers(draft: Draft, before: Any, obj: AnyObject) -> int:
    """Update the finalizers of an object that is being deleted. Without finalizers and dependents it is deleted."""
    old, meta = before.metadata, obj.metadata
    if not isinstance(meta, Metadata):
        return 0
    after = replace(before, metadata=replace(old, finalizers=meta.finalizers, annotations=meta.annotations))
    if after != before:
        draft.put(after)
    definition = BY_STRUCT[type(obj)]
    if not meta.finalizers and check_unused(draft, definition, meta.name, meta.tenant) is None:
        _finish_delete(draft, definition, after)
    return int(old.generation)
