"""Rules of declared workloads: what they refer to, host permissions, generations and first replicas. Pure."""

from __future__ import annotations

from remit.commitment.draft import Draft
from remit.commitment.rulings.admission import apply_defaults, check_policies
from remit.commitment.rulings.policies import policies_in_force
from remit.commitment.rulings.registry import refuse
from remit.commitment.rulings.transitions import create_replicas
from remit.law.admission import isolation_violation, overrides_isolation, permission_violation, permissions_of
from remit.law.requirements import WORKLOAD_LABEL, compile_requirements
from remit.law.workload_rules import initial_replicas
from remit.model.claims import Apply, Code, Operation, Refused
from remit.model.kinds import Placement, Workload, WorkloadSpec
from remit.model.metadata import RecordMetadata
from remit.model.objects import key_of
from remit.model.records import Generation, GenerationSpec

GENERATIONS_KEPT = 10
INITIAL_REPLICAS_MAX = 100
"""Maximum number of replicas created together with their workload. More would make one claim a large part of a batch."""
_ANYWHERE = Placement()


def check_workload(draft: Draft, operation: Operation, workload: Workload, before: Workload | None) -> Refused | None:
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
    refused = None if unchanged else _check_permissions(draft, operation, workload)
    return refused or check_policies(draft, operation, workload, before)


def _check_permissions(draft: Draft, operation: Operation, workload: Workload) -> Refused | None:
    """Refuse access to host resources that no policy permits. The node checks again when it starts a replica."""
    meta, template = workload.metadata, workload.spec.template
    loose = bool(operation.actor.tenant) and overrides_isolation(template)  # an operator may relax isolation without a policy
    if not (template.artifacts or template.volumes or template.rootfs or loose):
        return None
    labels = {**meta.labels, WORKLOAD_LABEL: meta.name}
    permit = permissions_of(policies_in_force(draft).values(), meta.tenant, labels)
    violation = permission_violation(template, permit) or (isolation_violation(template, permit) if loose else None)
    if violation is None:
        return None
    return refuse(Code.INVALID, f"spec.template.{violation.field}: {violation.reason}; {violation.cure}")


def prepare_workload(draft: Draft, claim: Apply, workload: Workload, before: Workload | None) -> Workload:
    """Store the generation of a changed workload, with the defaults of policies, and create the first replicas of a new one."""
    if before is not None and before.metadata.generation == workload.metadata.generation:
        return workload
    workload, spec = apply_defaults(draft, workload)
    generation = _store_generation(draft, workload, spec)
    if claim.fill and before is None and initial_replicas(spec) <= INITIAL_REPLICAS_MAX:
        # The workload controller would request these replicas next; creating them here saves the round trip.
        create_replicas(draft, generation, range(initial_replicas(spec)))
    return workload


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
        if entry is not None and not draft.replicas.count((meta.tenant, meta.name, entry[0].spec.generation)):
            draft.delete(old_key)
    return generation


def has_replicas(draft: Draft, workload: Workload) -> bool:
    """Return whether replicas of any generation are left."""
    meta = workload.metadata
    return any(
        draft.replicas.count((meta.tenant, meta.name, int(name.rsplit("/", 1)[1])))
        for name in _generation_keys(draft, workload)
    )


def delete_generations(draft: Draft, workload: Workload) -> None:
    for name in _generation_keys(draft, workload):
        draft.delete(name)


def _generation_keys(draft: Draft, workload: Workload) -> list[str]:
    return draft.keys(key_of("Generation", f"{workload.metadata.name}/", workload.metadata.tenant))
