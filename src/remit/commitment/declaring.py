"""May this be declared, replaced or deleted? What people and controllers want, and the numbered policies. Pure."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.commitment.books import AWAITED_NODE
from remit.commitment.draft import Draft
from remit.commitment.rulings import Coordination, refuse, ruling
from remit.law.asks import make_ask
from remit.law.overrides import is_live
from remit.model.claims import Adopt, Apply, Code, Delete, Operation, Refused, Role, Rollback
from remit.model.fields import Deadline, Metadata, Stamp
from remit.model.judging import judge
from remit.model.kinds import Node, Override, OverrideStatus, Policy, PolicySpec, Workload
from remit.model.objects import DECLARED, TENANTED, AnyObject, encode, key, key_of
from remit.model.problems import an
from remit.model.records import Generation, GenerationSpec, PolicyRevision, PolicyRevisionSpec

GENERATIONS_KEPT = 10
POLICY_REVISIONS_KEPT = 256
POLICIES_BYTES_MAX = 4 << 20
OVERRIDES_MAX = 1_000

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
        owners = ", ".join(sorted(DECLARERS[kind]))
        return refuse(Code.ROLE, f"{an(kind)} is declared by {owners}, not by {operation.actor.role}")
    problems = judge(thing)
    if problems:
        # Every one, as far as the answer has room: whoever mends one mistake at a time asks once for each.
        return refuse(Code.INVALID, " | ".join(problem.words for problem in problems[:8]))
    found = draft.thing(key(thing))
    refused = _expected(key(thing), claim.expect, found) or _allowed(draft, operation, thing, found)
    if refused is not None:
        return refused
    refused = _room_for(draft, thing) if isinstance(thing, Policy) else None
    if refused is not None:
        return refused
    before = None if found is None else found[0]
    changed = before is None or before.spec != thing.spec or before.metadata.labels != meta.labels
    generation = 1 if before is None else before.metadata.generation + changed
    stamped = replace(
        thing,
        metadata=replace(
            meta, uid=draft.uid() if before is None else before.metadata.uid, generation=generation, revision=0, deleting=False
        ),
    )
    if hasattr(thing, "status"):
        # What is observed is not declared: a new node is joining, whatever it says of itself.
        stamped = replace(stamped, status=type(thing.status)() if before is None else before.status)
    if isinstance(stamped, Override) and (before is None or before.spec != stamped.spec):
        stamped = replace(stamped, status=OverrideStatus(deadline=_term(draft, stamped)))
    draft.put(stamped)
    if isinstance(stamped, Workload) and changed:
        _keep_generation(draft, stamped)
    elif isinstance(stamped, Policy):
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
        return refuse(Code.DELETING, f"{key(thing)} is being deleted")
    if thing.metadata.tenant and draft.thing(key_of("Tenant", thing.metadata.tenant)) is None:
        return refuse(Code.NOT_FOUND, f"metadata.tenant: there is no tenant {thing.metadata.tenant}")
    if isinstance(thing, Node):
        own = f"{Role.AGENT}/{thing.metadata.name}"
        if operation.actor.role is Role.AGENT and operation.actor.lease != own:
            return refuse(Code.NOT_OWNER, f"an agent declares only its own node, {operation.actor.lease}")
    if isinstance(thing, Policy):
        return _home_of_policy(draft)
    if isinstance(thing, Workload):
        return _allowed_workload(draft, thing)
    if isinstance(thing, Override):
        return _allowed_override(draft, thing, None if found is None else found[0])
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


def _allowed_workload(draft: Draft, workload: Workload) -> Refused | None:
    spec, meta = workload.spec, workload.metadata
    if spec.priority_class and draft.thing(key_of("PriorityClass", spec.priority_class)) is None:
        return refuse(Code.NOT_FOUND, f"spec.priorityClass: there is no priority class {spec.priority_class}")
    try:
        make_ask(meta.tenant, meta.name, meta.labels, spec, ())
    except ValueError as error:
        return refuse(Code.INVALID, f"spec.template.devices: {error}")
    return None


def _keep_generation(draft: Draft, workload: Workload) -> None:
    """Keep this generation, and let go of old ones that no replica is of any more."""
    meta = workload.metadata
    name = f"{meta.name}/{meta.generation:08d}"
    spec = GenerationSpec(workload=meta.name, generation=meta.generation, labels=dict(meta.labels), spec=workload.spec)
    draft.put(Generation(metadata=Stamp(name=name, tenant=meta.tenant, uid=meta.uid), spec=spec))
    for old in draft.keys(key_of("Generation", f"{meta.name}/", meta.tenant))[:-GENERATIONS_KEPT]:
        found = draft.thing(old)
        if found is not None and not draft.alike((meta.tenant, meta.name, found[0].spec.generation)):
            draft.drop(old)


@ruling(Delete, ANY_DECLARER, Coordination.HARD, "nothing is deleted while something depends on it")
def delete(draft: Draft, operation: Operation, claim: Delete) -> int | Refused:
    if claim.kind not in DECLARERS:
        return refuse(Code.INVALID, f"kind: {an(claim.kind)} is not declared, so not deleted either")
    finishes = operation.actor.role is Role.WORKLOADS and claim.kind == "Workload"
    if operation.actor.role not in DECLARERS[claim.kind] and not finishes:
        return refuse(Code.ROLE, f"{an(claim.kind)} is not deleted by {operation.actor.role}")
    if operation.actor.role is Role.AGENT and operation.actor.lease != f"{Role.AGENT}/{claim.name}":
        return refuse(Code.NOT_OWNER, f"an agent deletes only its own node, {operation.actor.lease}")
    name = key_of(claim.kind, claim.name, claim.tenant)
    found = draft.thing(name)
    if found is None:
        return refuse(Code.NOT_FOUND, f"there is no {name}")
    refused = _expected(name, claim.expect, found) or _free(draft, claim)
    if refused is not None:
        return refused
    thing = found[0]
    if isinstance(thing, Workload):
        generations = draft.keys(key_of("Generation", f"{claim.name}/", claim.tenant))
        if any(draft.alike((claim.tenant, claim.name, int(old.rsplit("/", 1)[1]))) for old in generations):
            draft.put(replace(thing, metadata=replace(thing.metadata, deleting=True)))
            return 0
        for old in generations:
            draft.drop(old)
    if isinstance(thing, Policy):
        _publish(draft, {k: v for k, v in _policies(draft).items() if k != claim.name})
    draft.drop(name)
    return 1


def _free(draft: Draft, claim: Delete) -> Refused | None:
    """Is anything left that depends on it?"""
    match claim.kind:
        case "Policy":
            return _home_of_policy(draft)
        case "Node":
            ledger = draft.node(claim.name)
            if ledger is not None and ledger.held:
                return refuse(Code.IN_USE, f"node {claim.name} holds {ledger.held} replicas; drain it first")
            if draft.thing(key_of("Summary", AWAITED_NODE + claim.name)) is not None:
                awaited = "has not reported since the restore, and may be running what nobody knows of"
                return refuse(Code.AWAITING_REPORTS, f"node {claim.name} {awaited}; it becomes ready, or lost, before it goes")
        case "Tenant":
            ledgers = [draft.grant(f"tenant/{claim.name}"), draft.grant(f"tenant/{claim.name}/emergency")]
            owned = [k for kind in sorted(TENANTED) for k in draft.keys(f"{kind.lower()}/{claim.name}/")]
            if owned or any(ledger is not None and ledger.taken() for ledger in ledgers):
                return refuse(Code.IN_USE, f"tenant {claim.name} still has objects, work or grants; delete them first")
        case "PriorityClass":
            users = [k for k in draft.keys("workload/") if (w := draft.thing(k)) and w[0].spec.priority_class == claim.name]
            if users:
                return refuse(Code.IN_USE, f"priority class {claim.name} is used by {users[0]}")
        case "Region":
            inside = [k for k in draft.keys("node/") if (n := draft.thing(k)) and n[0].spec.region == claim.name]
            if inside:
                return refuse(Code.IN_USE, f"region {claim.name} has {len(inside)} nodes; delete them first")
    return None


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
    return Metadata(name=name, uid=draft.uid())


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
