"""Apply, delete, finalizers, owner references and policy revisions.

What people and controllers want, and the numbered policies. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.rulings.admission import admits, allowed_token, given, void_with_node, void_with_tenant
from remit.commitment.rulings.registry import Coordination, refuse, ruling
from remit.commitment.rulings.transitions import make_replicas
from remit.law.admission import loosens, permitted, ranks_in, unheld, unpermitted
from remit.law.overrides import is_live
from remit.law.requirements import WORKLOAD_LABEL, make_ask
from remit.law.workload_rules import begins_with
from remit.model.claims import Adopt, Apply, Code, Delete, Operation, Refused, Role, Rollback
from remit.model.identity import Token
from remit.model.kinds import Node, Override, OverrideStatus, Placement, Policy, PolicySpec, Tenant, Workload, WorkloadSpec
from remit.model.manifests.validation import judge
from remit.model.metadata import Deadline, Metadata, Owner, Stamp
from remit.model.objects import DECLARED, TENANTED, AnyObject, encode, key, key_of
from remit.model.problems import an
from remit.model.records import Generation, GenerationSpec, PolicyRevision, PolicyRevisionSpec
from remit.model.secrets import Secret, is_sealed

GENERATIONS_KEPT = 10
FILL_MAX = 100
"""More replicas than that are not made with their workload: one claim would be a large part of a batch."""
POLICY_REVISIONS_KEPT = 256
POLICIES_BYTES_MAX = 4 << 20
OVERRIDES_MAX = 1_000
_ANYWHERE = Placement()

PEOPLE = frozenset({Role.USER, Role.OPERATOR})
DECLARERS: dict[str, frozenset[Role]] = {
    "Region": frozenset({Role.OPERATOR}),
    "Node": frozenset({Role.OPERATOR, Role.AGENT}),
    "NodePool": frozenset({Role.OPERATOR}),
    "Tenant": frozenset({Role.OPERATOR}),
    "PriorityClass": frozenset({Role.OPERATOR}),
    "Policy": frozenset({Role.OPERATOR, Role.POLICY}),
    "Workload": frozenset({*PEOPLE, Role.ROLLOUT}),
    "Secret": PEOPLE,
    "Config": PEOPLE,
    "Allotment": frozenset({Role.OPERATOR, Role.WORKLOADS, Role.BUDGETS}),
    "Override": frozenset({Role.OPERATOR}),
    "Token": frozenset({Role.OPERATOR}),
}
"""Who may declare each kind; the rest are the authority's own records."""

ANY_DECLARER = frozenset(role for roles in DECLARERS.values() for role in roles)


@ruling(Apply, ANY_DECLARER, Coordination.HARD, "one object per name, one spec per generation")
def apply(draft: Draft, operation: Operation, claim: Apply) -> int | Refused:
    thing = claim.thing
    kind, meta = type(thing).__name__, thing.metadata
    if kind not in DECLARED or not isinstance(meta, Metadata):
        return refuse(Code.INVALID, f"{an(kind)} is the authority's own record; it is not declared")
    if operation.actor.role not in DECLARERS[kind]:
        declarers = ", ".join(sorted(DECLARERS[kind]))
        return refuse(Code.ROLE, f"{an(kind)} is declared by {declarers}, not by {operation.actor.role}")
    if (refused := _foreign(operation, meta.tenant)) is not None:
        return refused
    problems = judge(thing)
    if problems:
        # Every one, as far as the answer has room: whoever mends one mistake at a time asks once for each.
        code = Code.RESERVED if any(problem.reserved for problem in problems) else Code.INVALID
        return refuse(code, " | ".join(problem.words for problem in problems[:8]))
    if (
        isinstance(thing, Secret)
        and (bare := next((k for k, v in thing.spec.data.items() if not is_sealed(v)), None)) is not None
    ):
        return refuse(
            Code.INVALID, f"spec.data.{bare}: it is not sealed; secrets are declared by a server's API, which does that"
        )
    found = draft.thing(key(thing))
    before = None if found is None else found[0]
    refused = _expected(key(thing), claim.expect, found) or _allowed(draft, operation, thing, found)
    if refused is not None:
        return refused
    if before is not None and before.metadata.deleting:
        return let_go(draft, before, thing)
    refused = _room_for(draft, thing) if isinstance(thing, Policy) else None
    refused = refused or admits(draft, operation, thing, before)
    if refused is not None:
        return refused
    owners = owned_by(draft, thing, before)
    if isinstance(owners, Refused):
        return owners
    meta = replace(meta, owners=owners)
    changed = before is None or before.spec != thing.spec or before.metadata.labels != meta.labels
    generation = 1 if before is None else before.metadata.generation + changed
    stamped = replace(
        thing,
        metadata=replace(
            meta,
            uid=draft.uid() if before is None else before.metadata.uid,
            generation=generation,
            revision=0,
            created=draft.moment.wall if before is None else before.metadata.created,
            deleting=False,
        ),
    )
    if hasattr(thing, "status"):
        # What is observed is not declared: a new node is joining, whatever it says of itself.
        stamped = replace(stamped, status=type(thing.status)() if before is None else before.status)
    if isinstance(stamped, Override) and (before is None or before.spec != stamped.spec):
        stamped = replace(stamped, status=OverrideStatus(deadline=_term(draft, stamped)))
    if isinstance(stamped, Workload) and changed:
        stamped, spec = given(draft, stamped)
        kept = _keep_generation(draft, stamped, spec)
        if claim.fill and before is None and begins_with(spec) <= FILL_MAX:
            # What the controller of workloads would ask for next, without the way there and back.
            make_replicas(draft, kept, range(begins_with(spec)))
    draft.put(stamped)
    if isinstance(stamped, Policy):
        _publish(draft, {**_policies(draft), stamped.metadata.name: stamped.spec})
    return generation


def _room_for(draft: Draft, policy: Policy) -> Refused | None:
    """All policies stand in one row, so that a number stands for all of them; and a row has its bounds."""
    size = len(encode({**_policies(draft), policy.metadata.name: policy.spec}))
    if size <= POLICIES_BYTES_MAX:
        return None
    return refuse(Code.LIMIT, f"with it all policies have {size} bytes, {POLICIES_BYTES_MAX} at most: shorten or delete some")


def _expected(name: str, expect: int | None, found: tuple[Any, int] | None) -> Refused | None:
    if expect is None:
        return None
    if expect == 0 and found is not None:
        return refuse(Code.EXISTS, f"{name} exists, at revision {found[1]}")
    if expect and found is None:
        return refuse(Code.NOT_FOUND, f"there is no {name} any more")
    if expect and found is not None and (found[1] != expect or expect < 0):
        return refuse(Code.REVISION, f"{name} was seen at revision {expect} and has changed since")
    return None


def _allowed(draft: Draft, operation: Operation, thing: AnyObject, found: tuple[Any, int] | None) -> Refused | None:
    """What each kind asks of what else is there; its own fields have been judged."""
    if found is not None and found[0].metadata.deleting:
        return _of_one_going(found[0], thing)
    if thing.metadata.tenant and (refused := _allowed_in(draft, thing.metadata.tenant, new=found is None)) is not None:
        return refused
    if isinstance(thing, Node):
        own = f"{Role.AGENT}/{thing.metadata.name}"
        if operation.actor.role is Role.AGENT and operation.actor.lease != own:
            return refuse(Code.NOT_OWNER, f"an agent declares only its own node, {operation.actor.lease}")
        if operation.actor.role is Role.AGENT:
            return _allowed_node(draft, thing, None if found is None else found[0])
    if isinstance(thing, Policy):
        return _home_of_policy(draft)
    if isinstance(thing, Workload):
        return _allowed_workload(draft, operation, thing, None if found is None else found[0])
    if isinstance(thing, Override):
        return _allowed_override(draft, thing, None if found is None else found[0])
    if isinstance(thing, Token):
        return allowed_token(draft, thing, None if found is None else found[0])
    return None


def _foreign(operation: Operation, tenant: str) -> Refused | None:
    """Whoever belongs to a tenant declares nothing anywhere else, whatever way the claim has come."""
    mine = operation.actor.tenant
    if not mine or tenant == mine:
        return None
    return refuse(Code.TENANT, f"metadata.tenant: {operation.actor.name} acts in tenant {mine}, not in {tenant or 'none'}")


def _allowed_node(draft: Draft, node: Node, before: Node | None) -> Refused | None:
    """What an agent may say of its own node: what it has, and where it is reached. What people have set on it is theirs: a node
    that could label itself, or lift its own taint, would choose whose work it gets.
    """
    meta, spec = node.metadata, node.spec
    if meta.owners or meta.finalizers:
        return refuse(Code.NOT_OWNER, f"metadata: an agent sets no owners or finalizers on node {meta.name}")
    if before is not None:
        was = before.spec
        told = replace(was, capacity=spec.capacity, devices=spec.devices, address=spec.address, port=spec.port)
        if told != spec or meta.labels != before.metadata.labels or meta.annotations != before.metadata.annotations:
            return refuse(
                Code.NOT_OWNER, f"an agent changes capacity, devices, address and port of node {meta.name}, and no more"
            )
    pool = draft.thing(key_of("NodePool", spec.pool))
    if pool is not None and not spec.capacity <= pool[0].spec.capacity:
        most = f"nodes of pool {spec.pool} have at most {pool[0].spec.capacity}"
        return refuse(Code.INVALID, f"spec.capacity: {most}, and this one says {spec.capacity}")
    return None


def _allowed_in(draft: Draft, tenant: str, *, new: bool) -> Refused | None:
    found = draft.thing(key_of("Tenant", tenant))
    if found is None:
        return refuse(Code.NOT_FOUND, f"metadata.tenant: there is no tenant {tenant}")
    if new and found[0].metadata.deleting:
        return refuse(Code.DELETING, f"metadata.tenant: tenant {tenant} is being deleted, and takes nothing new")
    return None


def _allowed_override(draft: Draft, override: Override, before: Override | None) -> Refused | None:
    """A script that sends the same again and again must not keep it in force for ever; nor may anybody believe that it does."""
    name, now = override.metadata.name, (draft.moment.boot, draft.moment.now_ms)
    if before is not None and before.spec == override.spec and not is_live(before, now):
        return refuse(Code.EXISTS, f"override {name} has ended, and the same spec does not begin again: delete it first")
    if before is None and len(draft.keys(key_of("Override", ""))) >= OVERRIDES_MAX:
        return refuse(Code.LIMIT, f"there are {OVERRIDES_MAX} overrides already; delete those that have ended")
    return None


def _term(draft: Draft, override: Override) -> Deadline:
    return Deadline(boot=draft.moment.boot, at_ms=draft.moment.now_ms + override.spec.ttl)


def _home_of_policy(draft: Draft) -> Refused | None:
    """Policies are published in one scope; where they come on lease from above, a local one would share their numbers."""
    latest = draft.in_force()
    if latest is None or latest.spec.deadline is None:
        return None
    return refuse(Code.NOT_OWNER, f"policy revision {latest.spec.number} comes from the scope above: publish there")


def _allowed_workload(draft: Draft, operation: Operation, workload: Workload, before: Workload | None) -> Refused | None:
    spec, meta = workload.spec, workload.metadata
    if spec.priority_class and draft.thing(key_of("PriorityClass", spec.priority_class)) is None:
        return refuse(Code.NOT_FOUND, f"spec.priorityClass: there is no priority class {spec.priority_class}")
    if spec.template.devices or spec.placement != _ANYWHERE:  # nothing else can be asked for so that nothing could ever give it
        try:
            make_ask(meta.tenant, meta.name, meta.labels, spec, ())
        except ValueError as error:
            return refuse(Code.INVALID, f"spec.template.devices: {error}")
    same = before is not None and before.spec.template == spec.template  # what was permitted stays, whoever writes it again
    return None if same else _permitted(draft, operation, workload)


def _permitted(draft: Draft, operation: Operation, workload: Workload) -> Refused | None:
    """It may ask for nothing of the machines that no policy permits. The node looks again, when it comes to that."""
    meta, template = workload.metadata, workload.spec.template
    loose = bool(operation.actor.tenant) and loosens(template)  # whoever runs the whole of it may say how work is held
    if not (template.artifacts or template.volumes or template.rootfs or loose):
        return None
    labels = {**meta.labels, WORKLOAD_LABEL: meta.name}
    permit = permitted(_policies(draft).values(), meta.tenant, labels)
    wrong = unpermitted(template, permit) or (unheld(template, permit) if loose else None)
    return None if wrong is None else refuse(Code.INVALID, f"spec.template.{wrong.field}: {wrong.why}; {wrong.cure}")


def _keep_generation(draft: Draft, workload: Workload, runs: WorkloadSpec) -> Generation:
    """Keep this generation, as it runs, and let go of old ones that no replica is of any more."""
    meta = workload.metadata
    name = f"{meta.name}/{meta.generation:08d}"
    spec = GenerationSpec(workload=meta.name, generation=meta.generation, labels=dict(meta.labels), spec=runs)
    generation = Generation(metadata=Stamp(name=name, tenant=meta.tenant, uid=meta.uid), spec=spec)
    draft.put(generation)
    if meta.generation <= GENERATIONS_KEPT:
        return generation  # there cannot be more than their numbers
    for old in draft.keys(key_of("Generation", f"{meta.name}/", meta.tenant))[:-GENERATIONS_KEPT]:
        found = draft.thing(old)
        if found is not None and not draft.alike((meta.tenant, meta.name, found[0].spec.generation)):
            draft.drop(old)
    return generation


@ruling(Delete, ANY_DECLARER, Coordination.HARD, "nothing is deleted while something depends on it")
def delete(draft: Draft, operation: Operation, claim: Delete) -> int | Refused:
    if claim.kind not in DECLARERS:
        return refuse(Code.INVALID, f"kind: {an(claim.kind)} is not declared, so not deleted either")
    role = operation.actor.role
    cleans = role is Role.WORKLOADS and claim.kind not in ("Workload", "Allotment")
    if role not in DECLARERS[claim.kind] and role is not Role.WORKLOADS:
        return refuse(Code.ROLE, f"{an(claim.kind)} is not deleted by {role}")
    if role is Role.AGENT:  # it would declare it anew, without the labels and taints that people have set on it
        return refuse(Code.NOT_OWNER, f"node {claim.name} is deleted by people, not by an agent")
    if (refused := _foreign(operation, claim.tenant)) is not None:
        return refused
    name = key_of(claim.kind, claim.name, claim.tenant)
    found = draft.thing(name)
    if found is None:
        return refuse(Code.NOT_FOUND, f"there is no {name}")
    thing = found[0]
    if cleans and not thing.metadata.deleting and not orphaned(draft, thing):
        return refuse(Code.ROLE, f"{role} deletes {an(claim.kind)} only if all that own it are gone, or it is being deleted")
    refused = _expected(name, claim.expect, found) or _free(draft, claim.kind, claim.name, claim.tenant)
    if refused is not None:
        return refused
    return _end(draft, thing)


def _end(draft: Draft, thing: AnyObject) -> int:
    """It goes, and 1 is answered; or it is marked, and goes once nobody holds it by a finalizer and no replica is left."""
    meta = thing.metadata
    generations: Sequence[str] = ()
    held = bool(meta.finalizers) if isinstance(meta, Metadata) else False
    if isinstance(thing, Workload):
        generations = draft.keys(key_of("Generation", f"{meta.name}/", meta.tenant))
        held = held or any(draft.alike((meta.tenant, meta.name, int(old.rsplit("/", 1)[1]))) for old in generations)
    if held and isinstance(meta, Metadata):
        if not meta.deleting:
            draft.put(replace(thing, metadata=replace(meta, deleting=True)))
        return 0
    for old in generations:
        draft.drop(old)
    if isinstance(thing, Policy):
        _publish(draft, {k: v for k, v in _policies(draft).items() if k != meta.name})
    elif isinstance(thing, Tenant):
        void_with_tenant(draft, meta.name)
    elif isinstance(thing, Node):
        void_with_node(draft, meta.name)
    draft.drop(key(thing))
    return 1


def _of_one_going(before: Any, thing: AnyObject) -> Refused | None:
    """Of what is being deleted only the finalizers may change, and they only go; and annotations, by which those who hold it
    say how far they are.
    """
    mine, meta = before.metadata, thing.metadata
    if not isinstance(meta, Metadata) or not set(meta.finalizers) <= set(mine.finalizers):
        return refuse(Code.DELETING, f"{key(thing)} is being deleted: finalizers only go")
    same = (before.spec, mine.labels) == (thing.spec, meta.labels)
    owned = [(one.kind, one.name) for one in mine.owners] == [(one.kind, one.name) for one in meta.owners]
    if not same or not owned or not mine.finalizers:
        return refuse(Code.DELETING, f"{key(thing)} is being deleted: only finalizers and annotations may change")
    return None


def let_go(draft: Draft, before: Any, thing: AnyObject) -> int:
    """Whoever held it by a finalizer holds it no more. The last one lets it go, if nothing depends on it."""
    mine, meta = before.metadata, thing.metadata
    if not isinstance(meta, Metadata):
        return 0
    after = replace(before, metadata=replace(mine, finalizers=meta.finalizers, annotations=meta.annotations))
    if after != before:
        draft.put(after)
    if not meta.finalizers and _free(draft, type(thing).__name__, meta.name, meta.tenant) is None:
        _end(draft, after)
    return int(mine.generation)


def owned_by(draft: Draft, thing: AnyObject, before: Any) -> tuple[Owner, ...] | Refused:
    """Its owners, each by the uid of what stands there: a later one of that name is another. What was owned before stays so."""
    meta, known = thing.metadata, {}
    if not isinstance(meta, Metadata):
        return ()
    if before is not None:
        known = {(one.kind, one.name): one for one in before.metadata.owners}
    found: list[Owner] = []
    for one in meta.owners:
        kept = known.get((one.kind, one.name))
        if kept is not None and one.uid in ("", kept.uid):
            found.append(kept)
            continue
        if meta.tenant and one.kind not in TENANTED and (one.kind, one.name) != ("Tenant", meta.tenant):
            # Else whoever ends something of nobody's, or another tenant, would end this one's objects too; and its uid is told.
            which = f"{one.kind} {one.name} is not of tenant {meta.tenant}"
            return refuse(Code.INVALID, f"metadata.owners: {which}; name what is of the same tenant, or nothing")
        uid = _uid_of(draft, one, meta.tenant)
        if uid is None or one.uid not in ("", uid):
            which = f" with uid {one.uid}" if one.uid else ""
            return refuse(Code.INVALID, f"metadata.owners: there is no {one.kind} {one.name}{which}; declare it first")
        found.append(replace(one, uid=uid))
    return tuple(found)


def orphaned(draft: Draft, thing: AnyObject) -> bool:
    """Had it owners, and are all of them gone? What stands there now under the same name is another."""
    meta = thing.metadata
    if not isinstance(meta, Metadata) or not meta.owners:
        return False
    return all(one.kind in DECLARED and _is_gone(_uid_of(draft, one, meta.tenant), one.uid) for one in meta.owners)


def _is_gone(stands: str | None, uid: str) -> bool:
    return stands is None or (bool(uid) and stands != uid)


def _uid_of(draft: Draft, owner: Owner, tenant: str) -> str | None:
    """The uid of what stands under an owner's name, in the tenant of what is owned; None if nothing does."""
    found = draft.thing(key_of(owner.kind, owner.name, tenant)) if owner.kind in DECLARED else None
    return None if found is None else str(found[0].metadata.uid)


def _free(draft: Draft, kind: str, name: str, tenant: str) -> Refused | None:
    """Is anything left that depends on it?"""
    match kind:
        case "Policy":
            return _home_of_policy(draft)
        case "Node":
            ledger = draft.node(name)
            if ledger is not None and ledger.held:
                return refuse(Code.IN_USE, f"node {name} holds {ledger.held} replicas; drain it first")
            if draft.thing(key_of("Summary", AWAITED_NODE + name)) is not None:
                awaited = "has not reported since the restore, and may be running what nobody knows of"
                return refuse(Code.AWAITING_REPORTS, f"node {name} {awaited}; it becomes ready, or lost, before it goes")
        case "Tenant":
            ledgers = [draft.grant(f"tenant/{name}"), draft.grant(f"tenant/{name}/emergency")]
            owned = [k for kind in sorted(TENANTED) for k in draft.keys(f"{kind.lower()}/{name}/")]
            if owned or any(ledger is not None and ledger.taken() for ledger in ledgers):
                return refuse(Code.IN_USE, f"tenant {name} still has objects, work or grants; delete them first")
        case "PriorityClass":
            users = [k for k in draft.keys("workload/") if (w := draft.thing(k)) and w[0].spec.priority_class == name]
            users += [k for k in draft.keys("generation/") if (g := draft.thing(k)) and g[0].spec.spec.priority_class == name]
            users += [f"policy/{k}" for k, policy in _policies(draft).items() if name in ranks_in(policy)]
            if users:
                return refuse(Code.IN_USE, f"priority class {name} is used by {users[0]}")
        case "Secret" | "Config":
            user = _reader(draft, f"{kind.lower()}s", name, tenant)
            if user:
                return refuse(
                    Code.IN_USE, f"{kind.lower()} {name} is read by {user}; take it out of template.{kind.lower()}s first"
                )
        case "Region":
            inside = [k for k in draft.keys("node/") if (n := draft.thing(k)) and n[0].spec.region == name]
            if inside:
                return refuse(Code.IN_USE, f"region {name} has {len(inside)} nodes; delete them first")
    return None


def _reader(draft: Draft, mounts: str, name: str, tenant: str) -> str:
    """A workload of which a replica may still be started with it: by its spec, or by an older one that has replicas left."""
    for one in draft.keys(f"workload/{tenant}/"):
        found = draft.thing(one)
        if found is None or found[0].metadata.deleting:
            continue
        workload: Workload = found[0]
        specs = [workload.spec.template]
        for old in draft.keys(key_of("Generation", f"{workload.metadata.name}/", tenant)):
            kept = draft.thing(old)
            if kept is not None and draft.alike((tenant, workload.metadata.name, kept[0].spec.generation)):
                specs.append(kept[0].spec.spec.template)
        if any(mount.name == name for template in specs for mount in getattr(template, mounts)):
            return one
    return ""


def _policies(draft: Draft) -> dict[str, PolicySpec]:
    latest = draft.in_force()
    return {} if latest is None else dict(latest.spec.policies)


def _publish(draft: Draft, policies: dict[str, PolicySpec], number: int = 0, deadline: Deadline | None = None) -> int:
    latest = draft.in_force()
    number = number or (1 if latest is None else latest.spec.number + 1)
    spec = PolicyRevisionSpec(number=number, policies=policies, deadline=deadline)
    draft.put(PolicyRevision(metadata=Stamp(name=f"{number:08d}"), spec=spec))
    for old in draft.keys("policyrevision/")[:-POLICY_REVISIONS_KEPT]:
        draft.drop(old)
    return number


@ruling(Rollback, frozenset({Role.OPERATOR, Role.POLICY}), Coordination.HARD, "policy revisions are numbered one after another")
def rollback(draft: Draft, operation: Operation, claim: Rollback) -> int | Refused:
    away = _home_of_policy(draft)
    if away is not None:
        return away
    found = draft.thing(key_of("PolicyRevision", f"{claim.to:08d}"))
    if found is None:
        return refuse(Code.NOT_FOUND, f"policy revision {claim.to} is not kept; the last {POLICY_REVISIONS_KEPT} are")
    policies: dict[str, PolicySpec] = dict(found[0].spec.policies)
    for name in draft.keys("policy/"):
        if name.removeprefix("policy/") not in policies:
            draft.drop(name)
    for name, spec in policies.items():
        now = draft.thing(key_of("Policy", name))
        if now is None or now[0].spec != spec:
            meta = now[0].metadata if now is not None else _fresh(draft, name)
            draft.put(Policy(metadata=replace(meta, generation=meta.generation + 1), spec=spec))
    return _publish(draft, policies)


def _fresh(draft: Draft, name: str) -> Metadata:
    return Metadata(name=name, uid=draft.uid(), created=draft.moment.wall)


@ruling(Adopt, frozenset({Role.POLICY}), Coordination.BOUNDED, "the higher number stands; one number has one content")
def adopt(draft: Draft, operation: Operation, claim: Adopt) -> int | Refused:
    latest = draft.in_force()
    if latest is not None and claim.number < latest.spec.number:
        return refuse(Code.REVISION, f"policy revision {latest.spec.number} is in force here, {claim.number} is older")
    if latest is not None and claim.number == latest.spec.number and claim.policies != latest.spec.policies:
        return refuse(Code.OPERATION_MISMATCH, f"policy revision {claim.number} is known here with other content")
    if claim.asked_ms > draft.moment.now_ms:
        return refuse(Code.INVALID, "asked_ms: the lease cannot have been asked for in the future")
    until_ms = claim.asked_ms + claim.ttl
    known = None if latest is None or latest.spec.number != claim.number else latest.spec.deadline
    if known is not None and known.boot == draft.moment.boot:
        until_ms = max(until_ms, known.at_ms)  # of two leases on one number the longer stands, in any order of arrival
    deadline = Deadline(boot=draft.moment.boot, at_ms=until_ms)
    return _publish(draft, dict(claim.policies), claim.number, deadline)
