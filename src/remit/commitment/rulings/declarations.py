"""Apply and delete of declared objects: preconditions, finalizers, owner references, policy revisions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.rulings.admission import (
    apply_defaults,
    check_admission,
    check_token,
    revoke_node_tokens,
    revoke_tenant_tokens,
)
from remit.commitment.rulings.registry import Coordination, refuse, ruling
from remit.commitment.rulings.transitions import create_replicas
from remit.law.admission import (
    isolation_violation,
    overrides_isolation,
    permission_violation,
    permissions_of,
    priority_classes_in,
)
from remit.law.overrides import is_live
from remit.law.requirements import WORKLOAD_LABEL, compile_requirements
from remit.law.workload_rules import initial_replicas
from remit.model.claims import Adopt, Apply, Code, Delete, Operation, Refused, Role, Rollback
from remit.model.identity import Token
from remit.model.kinds import Node, Override, OverrideStatus, Placement, Policy, PolicySpec, Tenant, Workload, WorkloadSpec
from remit.model.manifests.validation import validate
from remit.model.metadata import Deadline, Metadata, Owner, RecordMetadata
from remit.model.objects import DECLARED, TENANTED, AnyObject, encode, key, key_of
from remit.model.problems import an
from remit.model.records import Generation, GenerationSpec, PolicyRevision, PolicyRevisionSpec
from remit.model.secrets import Secret, is_sealed

GENERATIONS_KEPT = 10
INITIAL_REPLICAS_MAX = 100
"""Maximum number of replicas created together with their workload. More would make one claim a large part of a batch."""
POLICY_REVISIONS_KEPT = 256
POLICIES_BYTES_MAX = 4 << 20
OVERRIDES_MAX = 1_000
_ANYWHERE = Placement()

HUMAN_ROLES = frozenset({Role.USER, Role.OPERATOR})
DECLARING_ROLES: dict[str, frozenset[Role]] = {
    "Region": frozenset({Role.OPERATOR}),
    "Node": frozenset({Role.OPERATOR, Role.AGENT}),
    "NodePool": frozenset({Role.OPERATOR}),
    "Tenant": frozenset({Role.OPERATOR}),
    "PriorityClass": frozenset({Role.OPERATOR}),
    "Policy": frozenset({Role.OPERATOR, Role.POLICY}),
    "Workload": frozenset({*HUMAN_ROLES, Role.ROLLOUT}),
    "Secret": HUMAN_ROLES,
    "Config": HUMAN_ROLES,
    "Allotment": frozenset({Role.OPERATOR, Role.WORKLOADS, Role.BUDGETS}),
    "Override": frozenset({Role.OPERATOR}),
    "Token": frozenset({Role.OPERATOR}),
}
"""Roles that may declare each kind. All other kinds are records of the authority."""

ANY_DECLARING_ROLE = frozenset(role for roles in DECLARING_ROLES.values() for role in roles)


@ruling(Apply, ANY_DECLARING_ROLE, Coordination.HARD, "one object per name, one spec per generation")
def apply(draft: Draft, operation: Operation, claim: Apply) -> int | Refused:
    obj = claim.thing
    kind, meta = type(obj).__name__, obj.metadata
    if kind not in DECLARED or not isinstance(meta, Metadata):
        return refuse(Code.INVALID, f"{an(kind)} is a record of the authority and cannot be declared")
    if operation.actor.role not in DECLARING_ROLES[kind]:
        declarers = ", ".join(sorted(DECLARING_ROLES[kind]))
        return refuse(Code.ROLE, f"{an(kind)} may be declared by {declarers}, not by role {operation.actor.role}")
    if (refused := _check_tenant(operation, meta.tenant)) is not None:
        return refused
    problems = validate(obj)
    if problems:
        # Report all problems that fit into the answer, so that the user can fix them in one round.
        code = Code.RESERVED if any(problem.reserved for problem in problems) else Code.INVALID
        return refuse(code, " | ".join(problem.description for problem in problems[:8]))
    if isinstance(obj, Secret) and (bare := next((k for k, v in obj.spec.data.items() if not is_sealed(v)), None)) is not None:
        return refuse(
            Code.INVALID, f"spec.data.{bare}: not sealed; declare secrets through the HTTP API of a server, which seals them"
        )
    entry = draft.lookup(key(obj))
    before = None if entry is None else entry[0]
    refused = _check_precondition(key(obj), claim.expect, entry) or _check_kind(draft, operation, obj, entry)
    if refused is not None:
        return refused
    if before is not None and before.metadata.deleting:
        return release_finalizers(draft, before, obj)
    refused = _check_policies_size(draft, obj) if isinstance(obj, Policy) else None
    refused = refused or check_admission(draft, operation, obj, before)
    if refused is not None:
        return refused
    owners = resolve_owners(draft, obj, before)
    if isinstance(owners, Refused):
        return owners
    meta = replace(meta, owners=owners)
    changed = before is None or before.spec != obj.spec or before.metadata.labels != meta.labels
    generation = 1 if before is None else before.metadata.generation + changed
    stamped = replace(
        obj,
        metadata=replace(
            meta,
            uid=draft.new_uid() if before is None else before.metadata.uid,
            generation=generation,
            revision=0,
            created=draft.time.wall if before is None else before.metadata.created,
            deleting=False,
        ),
    )
    if hasattr(obj, "status"):
        # Status is observed, not declared: a new node starts as joining, even if its manifest contains a status.
        stamped = replace(stamped, status=type(obj.status)() if before is None else before.status)
    if isinstance(stamped, Override) and (before is None or before.spec != stamped.spec):
        stamped = replace(stamped, status=OverrideStatus(deadline=_deadline(draft, stamped)))
    if isinstance(stamped, Workload) and changed:
        stamped, spec = apply_defaults(draft, stamped)
        generation_record = _store_generation(draft, stamped, spec)
        if claim.fill and before is None and initial_replicas(spec) <= INITIAL_REPLICAS_MAX:
            # The workload controller would request these replicas next; creating them here saves the round trip.
            create_replicas(draft, generation_record, range(initial_replicas(spec)))
    draft.put(stamped)
    if isinstance(stamped, Policy):
        _publish(draft, {**_policies(draft), stamped.metadata.name: stamped.spec})
    return generation


def _check_policies_size(draft: Draft, policy: Policy) -> Refused | None:
    """Refuse a policy with which the policies no longer fit into one row: they share a row so that one revision number covers
    all.
    """
    size = len(encode({**_policies(draft), policy.metadata.name: policy.spec}))
    if size <= POLICIES_BYTES_MAX:
        return None
    return refuse(
        Code.LIMIT,
        f"with this policy all policies have {size} bytes, {POLICIES_BYTES_MAX} are allowed; shorten or delete some",
    )


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


def _check_kind(draft: Draft, operation: Operation, obj: AnyObject, entry: tuple[Any, int] | None) -> Refused | None:
    """Check what each kind requires of other objects and of the caller. The object's own fields were validated before."""
    if entry is not None and entry[0].metadata.deleting:
        return _check_change_while_deleting(entry[0], obj)
    if obj.metadata.tenant and (refused := _check_tenant_exists(draft, obj.metadata.tenant, new=entry is None)) is not None:
        return refused
    if isinstance(obj, Node):
        own = f"{Role.AGENT}/{obj.metadata.name}"
        if operation.actor.role is Role.AGENT and operation.actor.lease != own:
            return refuse(Code.NOT_OWNER, f"an agent declares only its own node; this one acts for {operation.actor.lease}")
        if operation.actor.role is Role.AGENT:
            return _check_agent_node(draft, obj, None if entry is None else entry[0])
    if isinstance(obj, Policy):
        return _check_policy_home(draft)
    if isinstance(obj, Workload):
        return _check_workload(draft, operation, obj, None if entry is None else entry[0])
    if isinstance(obj, Override):
        return _check_override(draft, obj, None if entry is None else entry[0])
    if isinstance(obj, Token):
        return check_token(draft, obj, None if entry is None else entry[0])
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


def _check_tenant_exists(draft: Draft, tenant: str, *, new: bool) -> Refused | None:
    entry = draft.lookup(key_of("Tenant", tenant))
    if entry is None:
        return refuse(Code.NOT_FOUND, f"metadata.tenant: tenant {tenant} does not exist")
    if new and entry[0].metadata.deleting:
        return refuse(Code.DELETING, f"metadata.tenant: tenant {tenant} is being deleted and accepts no new objects")
    return None


def _check_override(draft: Draft, override: Override, before: Override | None) -> Refused | None:
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


def _deadline(draft: Draft, override: Override) -> Deadline:
    return Deadline(boot=draft.time.boot, at_ms=draft.time.now_ms + override.spec.ttl)


def _check_policy_home(draft: Draft) -> Refused | None:
    """Refuse local policies in a scope that leases its policies from the scope above: the revision numbers would clash."""
    latest = draft.current_policy()
    if latest is None or latest.spec.deadline is None:
        return None
    return refuse(Code.NOT_OWNER, f"policy revision {latest.spec.number} comes from the scope above; change policies there")


def _check_workload(draft: Draft, operation: Operation, workload: Workload, before: Workload | None) -> Refused | None:
    spec, meta = workload.spec, workload.metadata
    if spec.priority_class and draft.lookup(key_of("PriorityClass", spec.priority_class)) is None:
        return refuse(Code.NOT_FOUND, f"spec.priorityClass: priority class {spec.priority_class} does not exist")
    # Only these fields can contain requirements that no node could ever satisfy.
    if spec.template.devices or spec.placement != _ANYWHERE:
        try:
            compile_requirements(meta.tenant, meta.name, meta.labels, spec, ())
        except ValueError as error:
            return refuse(Code.INVALID, f"spec.template.devices: {error}")
    # A template that was permitted once stays permitted when it is applied again.
    unchanged = before is not None and before.spec.template == spec.template
    return None if unchanged else _check_permissions(draft, operation, workload)


def _check_permissions(draft: Draft, operation: Operation, workload: Workload) -> Refused | None:
    """Refuse access to host resources that no policy permits. The node checks again when it starts a replica."""
    meta, template = workload.metadata, workload.spec.template
    loose = bool(operation.actor.tenant) and overrides_isolation(template)  # an operator may relax isolation without a policy
    if not (template.artifacts or template.volumes or template.rootfs or loose):
        return None
    labels = {**meta.labels, WORKLOAD_LABEL: meta.name}
    permit = permissions_of(_policies(draft).values(), meta.tenant, labels)
    violation = permission_violation(template, permit) or (isolation_violation(template, permit) if loose else None)
    if violation is None:
        return None
    return refuse(Code.INVALID, f"spec.template.{violation.field}: {violation.reason}; {violation.cure}")


def _store_generation(draft: Draft, workload: Workload, effective_spec: WorkloadSpec) -> Generation:
    """Store this generation with its effective spec, and delete old generations that no longer have replicas."""
    meta = workload.metadata
    name = f"{meta.name}/{meta.generation:08d}"
    spec = GenerationSpec(workload=meta.name, generation=meta.generation, labels=dict(meta.labels), spec=effective_spec)
    generation = Generation(metadata=RecordMetadata(name=name, tenant=meta.tenant, uid=meta.uid), spec=spec)
    draft.put(generation)
    if meta.generation <= GENERATIONS_KEPT:
        return generation  # at most GENERATIONS_KEPT generations can exist
    for old_key in draft.keys(key_of("Generation", f"{meta.name}/", meta.tenant))[:-GENERATIONS_KEPT]:
        entry = draft.lookup(old_key)
        if entry is not None and not draft.replica_count((meta.tenant, meta.name, entry[0].spec.generation)):
            draft.delete(old_key)
    return generation


@ruling(Delete, ANY_DECLARING_ROLE, Coordination.HARD, "nothing is deleted while something depends on it")
def delete(draft: Draft, operation: Operation, claim: Delete) -> int | Refused:
    if claim.kind not in DECLARING_ROLES:
        return refuse(Code.INVALID, f"kind: {an(claim.kind)} is a record of the authority and cannot be deleted")
    role = operation.actor.role
    is_cleanup = role is Role.WORKLOADS and claim.kind not in ("Workload", "Allotment")
    if role not in DECLARING_ROLES[claim.kind] and role is not Role.WORKLOADS:
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
    if is_cleanup and not obj.metadata.deleting and not is_orphaned(draft, obj):
        return refuse(Code.ROLE, f"role {role} may delete {name} only if all its owners are gone or it is being deleted")
    refused = _check_precondition(name, claim.expect, entry) or _check_unused(draft, claim.kind, claim.name, claim.tenant)
    if refused is not None:
        return refused
    return _finish_delete(draft, obj)


def _finish_delete(draft: Draft, obj: AnyObject) -> int:
    """Delete the object and return 1; or mark it as being deleted and return 0, if finalizers or replicas remain."""
    meta = obj.metadata
    generations: Sequence[str] = ()
    is_held = bool(meta.finalizers) if isinstance(meta, Metadata) else False
    if isinstance(obj, Workload):
        generations = draft.keys(key_of("Generation", f"{meta.name}/", meta.tenant))
        is_held = is_held or any(
            draft.replica_count((meta.tenant, meta.name, int(old_key.rsplit("/", 1)[1]))) for old_key in generations
        )
    if is_held and isinstance(meta, Metadata):
        if not meta.deleting:
            draft.put(replace(obj, metadata=replace(meta, deleting=True)))
        return 0
    for old_key in generations:
        draft.delete(old_key)
    if isinstance(obj, Policy):
        _publish(draft, {k: v for k, v in _policies(draft).items() if k != meta.name})
    elif isinstance(obj, Tenant):
        revoke_tenant_tokens(draft, meta.name)
    elif isinstance(obj, Node):
        revoke_node_tokens(draft, meta.name)
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
    if not meta.finalizers and _check_unused(draft, type(obj).__name__, meta.name, meta.tenant) is None:
        _finish_delete(draft, after)
    return int(old.generation)


def resolve_owners(draft: Draft, obj: AnyObject, before: Any) -> tuple[Owner, ...] | Refused:
    """Return the owner references with the uid of each owner, so that a later object of the same name is not taken for the
    owner. References that existed before are kept.
    """
    meta, known = obj.metadata, {}
    if not isinstance(meta, Metadata):
        return ()
    if before is not None:
        known = {(owner.kind, owner.name): owner for owner in before.metadata.owners}
    owners: list[Owner] = []
    for owner in meta.owners:
        existing = known.get((owner.kind, owner.name))
        if existing is not None and owner.uid in ("", existing.uid):
            owners.append(existing)
            continue
        if meta.tenant and owner.kind not in TENANTED and (owner.kind, owner.name) != ("Tenant", meta.tenant):
            # Otherwise deleting a cluster-wide object or another tenant would delete this tenant's objects, and its uid would
            # be disclosed.
            which = f"{owner.kind} {owner.name} does not belong to tenant {meta.tenant}"
            return refuse(Code.INVALID, f"metadata.owners: {which}; reference an object of the same tenant, or none")
        uid = _uid_of(draft, owner, meta.tenant)
        if uid is None or owner.uid not in ("", uid):
            which = f" with uid {owner.uid}" if owner.uid else ""
            return refuse(Code.INVALID, f"metadata.owners: {owner.kind} {owner.name}{which} does not exist")
        owners.append(replace(owner, uid=uid))
    return tuple(owners)


def is_orphaned(draft: Draft, obj: AnyObject) -> bool:
    """Return whether the object had owners and all of them are gone. An object of the same name with another uid is not the
    owner.
    """
    meta = obj.metadata
    if not isinstance(meta, Metadata) or not meta.owners:
        return False
    return all(owner.kind in DECLARED and _is_gone(_uid_of(draft, owner, meta.tenant), owner.uid) for owner in meta.owners)


def _is_gone(current_uid: str | None, uid: str) -> bool:
    return current_uid is None or (bool(uid) and current_uid != uid)


def _uid_of(draft: Draft, owner: Owner, tenant: str) -> str | None:
    """Return the uid of the object with an owner's name, in the tenant of the owned object; None if there is none."""
    entry = draft.lookup(key_of(owner.kind, owner.name, tenant)) if owner.kind in DECLARED else None
    return None if entry is None else str(entry[0].metadata.uid)


def _check_unused(draft: Draft, kind: str, name: str, tenant: str) -> Refused | None:
    """Refuse to delete an object that others depend on."""
    match kind:
        case "Policy":
            return _check_policy_home(draft)
        case "Node":
            ledger = draft.node(name)
            if ledger is not None and ledger.holders:
                return refuse(Code.IN_USE, f"node {name} holds {ledger.holders} replicas; drain it first")
            if draft.lookup(key_of("Summary", AWAITED_NODE + name)) is not None:
                awaited = "has not reported since the restore and may be running replicas unknown here"
                return refuse(Code.AWAITING_REPORTS, f"node {name} {awaited}; wait until it is ready or lost")
        case "Tenant":
            ledgers = [draft.grant(f"tenant/{name}"), draft.grant(f"tenant/{name}/emergency")]
            owned = [k for kind in sorted(TENANTED) for k in draft.keys(f"{kind.lower()}/{name}/")]
            if owned or any(ledger is not None and ledger.committed() for ledger in ledgers):
                return refuse(Code.IN_USE, f"tenant {name} still has objects, running work or grants; delete these first")
        case "PriorityClass":
            users = [k for k in draft.keys("workload/") if (w := draft.lookup(k)) and w[0].spec.priority_class == name]
            users += [k for k in draft.keys("generation/") if (g := draft.lookup(k)) and g[0].spec.spec.priority_class == name]
            users += [f"policy/{k}" for k, policy in _policies(draft).items() if name in priority_classes_in(policy)]
            if users:
                return refuse(
                    Code.IN_USE,
                    f"priority class {name} is used by {len(users)} objects, for example {users[0]}; change these first",
                )
        case "Secret" | "Config":
            user = _mounting_workload(draft, f"{kind.lower()}s", name, tenant)
            if user:
                return refuse(
                    Code.IN_USE,
                    f"{kind.lower()} {name} is used by {user}; remove it from spec.template.{kind.lower()}s there first",
                )
        case "Region":
            inside = [k for k in draft.keys("node/") if (n := draft.lookup(k)) and n[0].spec.region == name]
            if inside:
                return refuse(Code.IN_USE, f"region {name} has {len(inside)} nodes; delete these first")
    return None


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
            if generation_row is not None and draft.replica_count(
                (tenant, workload.metadata.name, generation_row[0].spec.generation)
            ):
                specs.append(generation_row[0].spec.spec.template)
        if any(mount.name == name for template in specs for mount in getattr(template, mounts)):
            return workload_key
    return ""


def _policies(draft: Draft) -> dict[str, PolicySpec]:
    latest = draft.current_policy()
    return {} if latest is None else dict(latest.spec.policies)


def _publish(draft: Draft, policies: dict[str, PolicySpec], number: int = 0, deadline: Deadline | None = None) -> int:
    latest = draft.current_policy()
    number = number or (1 if latest is None else latest.spec.number + 1)
    spec = PolicyRevisionSpec(number=number, policies=policies, deadline=deadline)
    draft.put(PolicyRevision(metadata=RecordMetadata(name=f"{number:08d}"), spec=spec))
    for old_key in draft.keys("policyrevision/")[:-POLICY_REVISIONS_KEPT]:
        draft.delete(old_key)
    return number


@ruling(Rollback, frozenset({Role.OPERATOR, Role.POLICY}), Coordination.HARD, "policy revisions are numbered in sequence")
def rollback(draft: Draft, operation: Operation, claim: Rollback) -> int | Refused:
    refusal = _check_policy_home(draft)
    if refusal is not None:
        return refusal
    entry = draft.lookup(key_of("PolicyRevision", f"{claim.to:08d}"))
    if entry is None:
        return refuse(
            Code.NOT_FOUND,
            f"to: policy revision {claim.to} does not exist or is no longer stored; the last {POLICY_REVISIONS_KEPT} are",
        )
    policies: dict[str, PolicySpec] = dict(entry[0].spec.policies)
    for name in draft.keys("policy/"):
        if name.removeprefix("policy/") not in policies:
            draft.delete(name)
    for name, spec in policies.items():
        current = draft.lookup(key_of("Policy", name))
        if current is None or current[0].spec != spec:
            meta = current[0].metadata if current is not None else _new_metadata(draft, name)
            draft.put(Policy(metadata=replace(meta, generation=meta.generation + 1), spec=spec))
    return _publish(draft, policies)


def _new_metadata(draft: Draft, name: str) -> Metadata:
    return Metadata(name=name, uid=draft.new_uid(), created=draft.time.wall)


@ruling(Adopt, frozenset({Role.POLICY}), Coordination.BOUNDED, "the higher number wins; one number has one content")
def adopt(draft: Draft, operation: Operation, claim: Adopt) -> int | Refused:
    latest = draft.current_policy()
    if latest is not None and claim.number < latest.spec.number:
        return refuse(Code.REVISION, f"number: policy revision {latest.spec.number} is in force, {claim.number} is older")
    if latest is not None and claim.number == latest.spec.number and claim.policies != latest.spec.policies:
        return refuse(
            Code.OPERATION_MISMATCH,
            f"policies: revision {claim.number} is already stored here with different content; publish a new number",
        )
    if claim.asked_ms > draft.time.now_ms:
        return refuse(
            Code.INVALID,
            f"asked_ms: {claim.asked_ms} is in the future (now {draft.time.now_ms}); send the time of the request on this "
            "scope's clock",
        )
    until_ms = claim.asked_ms + claim.ttl
    deadline_before = None if latest is None or latest.spec.number != claim.number else latest.spec.deadline
    if deadline_before is not None and deadline_before.boot == draft.time.boot:
        until_ms = max(until_ms, deadline_before.at_ms)  # of two leases on one number the longer wins, in any order of arrival
    deadline = Deadline(boot=draft.time.boot, at_ms=until_ms)
    return _publish(draft, dict(claim.policies), claim.number, deadline)
