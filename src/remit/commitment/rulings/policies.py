"""Policy revisions: publication of declared policies, rollback, adoption from the scope above. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.admission import check_priority_classes
from remit.commitment.rulings.registry import Coordination, refuse, ruling
from remit.model.claims import Adopt, Code, Operation, Refused, Rollback
from remit.model.kinds import Policy, PolicySpec
from remit.model.metadata import Deadline, Metadata, RecordMetadata
from remit.model.objects import encode, key_of
from remit.model.records import PolicyRevision, PolicyRevisionSpec
from remit.model.roles import Role

POLICY_REVISIONS_KEPT = 256
POLICIES_BYTES_MAX = 4 << 20


def policies_in_force(draft: Draft) -> dict[str, PolicySpec]:
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


def check_policy(draft: Draft, operation: Operation, policy: Policy, before: Policy | None) -> Refused | None:
    return check_policy_home(draft) or _check_policies_size(draft, policy) or check_priority_classes(draft, policy)


def check_policy_home(draft: Draft) -> Refused | None:
    """Refuse local policies in a scope that leases its policies from the scope above: the revision numbers would clash."""
    latest = draft.current_policy()
    if latest is None or latest.spec.deadline is None:
        return None
    return refuse(Code.NOT_OWNER, f"policy revision {latest.spec.number} comes from the scope above; change policies there")


def _check_policies_size(draft: Draft, policy: Policy) -> Refused | None:
    """Refuse a policy with which the policies no longer fit into one row: they share a row so that one revision number covers
    all.
    """
    size = len(encode({**policies_in_force(draft), policy.metadata.name: policy.spec}))
    if size <= POLICIES_BYTES_MAX:
        return None
    return refuse(
        Code.LIMIT,
        f"with this policy all policies have {size} bytes, {POLICIES_BYTES_MAX} are allowed; shorten or delete some",
    )


def publish_policy(draft: Draft, policy: Policy) -> None:
    """Publish a declared policy together with the others."""
    _publish(draft, {**policies_in_force(draft), policy.metadata.name: policy.spec})


def withdraw_policy(draft: Draft, policy: Policy) -> None:
    """Publish the policies without a deleted one."""
    _publish(draft, {name: spec for name, spec in policies_in_force(draft).items() if name != policy.metadata.name})


@ruling(Rollback, frozenset({Role.OPERATOR, Role.POLICY}), Coordination.HARD, "policy revisions are numbered in sequence")
def rollback(draft: Draft, operation: Operation, claim: Rollback) -> int | Refused:
    refusal = check_policy_home(draft)
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
            policy: Policy = Policy(metadata=_new_metadata(draft, name), spec=spec) if current is None else current[0]
            meta = replace(policy.metadata, generation=policy.metadata.generation + 1)
            draft.put(replace(policy, metadata=meta, spec=spec))
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
