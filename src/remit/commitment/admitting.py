"""Do the policies in force, and its tenant's limits, admit what is declared? Asked whichever way it came. Pure.

Only what grows, or is said anew, is refused: a rule that was made tighter since, or a limit that was lowered, keeps nobody from
scaling down, nor from touching something else.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings import refuse
from remit.law.admission import BY_POLICY, forbidden, settled
from remit.law.allowances import COUNTED, SAYS, takes
from remit.model.claims import Code, Operation, Refused, Role
from remit.model.fields import Condition
from remit.model.kinds import Policy, Tenant, Workload, WorkloadSpec
from remit.model.objects import AnyObject, key_of

PEOPLE: Final = frozenset({Role.USER, Role.OPERATOR})


def admits(draft: Draft, operation: Operation, thing: AnyObject, before: Any) -> Refused | None:
    """`before` is what stands there, or None."""
    if isinstance(thing, Policy):
        return _known_ranks(draft, thing)
    if not isinstance(thing, COUNTED):
        return None
    # A controller that rolls back sends what was admitted once: it is given what is in force, and not turned away.
    if isinstance(thing, Workload) and operation.actor.role in PEOPLE and (before is None or _differs(before, thing)):
        refused = _by_policy(draft, operation, thing, before)
        if refused is not None:
            return refused
    return _within(draft, thing, before)


def _differs(before: Workload, after: Workload) -> bool:
    """In what policies look at."""
    mine, spec = before.spec, after.spec
    return (mine.priority_class, mine.placement, before.metadata.labels) != (
        spec.priority_class,
        spec.placement,
        after.metadata.labels,
    )


def _by_policy(draft: Draft, operation: Operation, workload: Workload, before: Workload | None) -> Refused | None:
    """Whoever answers for no tenant grants a class by writing it; one that was granted stays while nobody writes another."""
    meta = workload.metadata
    terms = draft.asks_now().admission.terms(meta.tenant, meta.name, meta.labels)
    stands = before is not None and before.spec.priority_class == workload.spec.priority_class
    granted = stands or not operation.actor.tenant
    found = forbidden(workload.spec, terms, lambda name: _value(draft, name), granted=granted)
    return None if found is None else refuse(Code.POLICY, f"{found.field}: {found.words}")


def _value(draft: Draft, rank: str) -> int | None:
    found = draft.thing(key_of("PriorityClass", rank))
    return None if found is None else int(found[0].spec.value)


def _known_ranks(draft: Draft, policy: Policy) -> Refused | None:
    for at, rule in enumerate(policy.spec.rules):
        for field, rank in (("priorityClass", rule.priority_class), ("defaults.priorityClass", rule.defaults.priority_class)):
            if rank and _value(draft, rank) is None:
                detail = f"spec.rules[{at}].{field}: there is no priority class {rank}; declare it first"
                return refuse(Code.INVALID, detail)
    return None


def _within(draft: Draft, thing: AnyObject, before: Any) -> Refused | None:
    tenant = thing.metadata.tenant
    found = draft.thing(key_of("Tenant", tenant))
    if found is None or not isinstance(found[0], Tenant):
        return None
    had = takes(before)
    for limit, amount in takes(thing).items():
        more, most = amount - had.get(limit, 0), int(getattr(found[0].spec.limits, limit))
        if more <= 0:
            continue
        used = draft.books.used.get((tenant, limit), 0) + draft.used.get((tenant, limit), 0)
        if used + more > most:
            field = SAYS.get(limit, "metadata.tenant")
            detail = f"{field}: tenant {tenant} has {used} {limit} of at most {most}, and {more} more are too many: "
            return refuse(Code.LIMIT, detail + f"delete some, or ask an operator to raise spec.limits.{limit} of the tenant")
    return None


def given(draft: Draft, workload: Workload) -> tuple[Workload, WorkloadSpec]:
    """The workload with a condition that tells what it was given, and its spec as it is to run."""
    meta, status = workload.metadata, workload.status
    admission = draft.asks_now().admission
    spec, words = settled(workload.spec, admission.terms(meta.tenant, meta.name, meta.labels))
    conditions = tuple(one for one in status.conditions if one.type != BY_POLICY)
    if words:
        told = Condition(
            type=BY_POLICY,
            status="True",
            reason=f"PolicyRevision{admission.number}",
            message="; ".join(words)[:4_096],
            observed_generation=meta.generation,
            last_transition=draft.moment.wall,
        )
        conditions = tuple(sorted((*conditions, told), key=lambda one: one.type))
    if conditions != status.conditions:
        workload = replace(workload, status=replace(status, conditions=conditions))
    return workload, spec
