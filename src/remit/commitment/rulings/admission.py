"""Admission of declared objects: policies, tenant limits, token rules.

Asked whichever way it came. Pure.

Only what grows, or is said anew, is refused: a rule that was made tighter since, or a limit that was lowered, keeps nobody from
scaling down, nor from touching something else.

What a token then allows is law/authorization.py's. Pure.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import refuse
from remit.law.admission import BY_POLICY, forbidden, settled
from remit.law.charges import COUNTED, SAYS, takes
from remit.model.claims import Code, Operation, Refused, Role
from remit.model.identity import Token
from remit.model.kinds import Policy, Tenant, Workload, WorkloadSpec
from remit.model.metadata import Condition
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


TOKENS_MAX = 100_000
_TOKENS = key_of("Token", "")


def allowed_token(draft: Draft, token: Token, before: Token | None) -> Refused | None:
    """Whose token it is, and for what, does not change: an answer that was given to one must never be another's by its name."""
    spec, name = token.spec, token.metadata.name
    if spec.tenant and draft.thing(key_of("Tenant", spec.tenant)) is None:
        return refuse(Code.NOT_FOUND, f"spec.tenant: there is no tenant {spec.tenant}")
    if before is None:
        if len(draft.keys(_TOKENS)) >= TOKENS_MAX:
            return refuse(Code.LIMIT, f"there are {TOKENS_MAX} tokens already; delete those that have ended")
        if any(one.spec.digest == spec.digest for one in _tokens(draft)):  # else whoever shows it would be somebody else now
            return refuse(Code.EXISTS, "spec.digest: another token has it; make a new one")
        return _alone(draft, token) if spec.joined else None
    was = before.spec
    if was.revoked and not spec.revoked:
        return refuse(Code.EXISTS, f"token {name} was revoked, for good; make a new one")
    if was.spent and spec.spent != was.spent:
        return refuse(Code.EXISTS, f"token {name} was used, by one agent for good; make a new one")
    if replace(spec, revoked=was.revoked, expires=was.expires, spent=was.spent) != was:
        return refuse(Code.EXISTS, f"token {name} exists; only when it ends may be changed. Make a new one for anything else")
    return None


def _alone(draft: Draft, token: Token) -> Refused | None:
    """Whoever looked before asking may have looked at the same time as another, at another server: here one comes first."""
    for one in _tokens(draft):
        if one.spec.role != "agent" or one.spec.revoked or one.spec.expires <= draft.moment.wall:
            continue
        if taken := sorted(set(one.spec.nodes) & set(token.spec.nodes)):
            known = f"known by the token {one.metadata.name}"
            return refuse(Code.EXISTS, f"spec.nodes: node {taken[0]} has an agent already, {known}")
    return None


def void_with_tenant(draft: Draft, tenant: str) -> None:
    """Else a later tenant of the same name would be open to the members of this one."""
    for token in _tokens(draft):
        if token.spec.tenant == tenant:
            _revoke(draft, token)


def void_with_node(draft: Draft, node: str) -> None:
    """An agent whose last node is gone has nothing left to speak for."""
    for token in _tokens(draft):
        spec = token.spec
        if node in spec.nodes and all(draft.thing(key_of("Node", one)) is None for one in spec.nodes if one != node):
            _revoke(draft, token)


def _tokens(draft: Draft) -> list[Token]:
    found = (draft.thing(name) for name in draft.keys(_TOKENS))
    return [one[0] for one in found if one is not None]


def _revoke(draft: Draft, token: Token) -> None:
    if not token.spec.revoked:
        meta = replace(token.metadata, generation=token.metadata.generation + 1)
        draft.put(replace(token, metadata=meta, spec=replace(token.spec, revoked=True)))
