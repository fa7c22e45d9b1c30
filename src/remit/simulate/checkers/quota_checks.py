"""Safety: grants and tenant usage across scopes, admission limits, initial replicas.

Grants are compared between issuer and holder, and a tenant's usage over all scopes, at one instant. Priorities stay within
policy and declared objects within the tenant's limits.

Policies and limits are read from the rows. A batch may change a rule or a limit together with what it admits, in any order,
so the more generous of the two states counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from remit.simulate.checkers.reference.history import CommitStep, History
from remit.simulate.checkers.reference.placement import matches
from remit.simulate.checkers.reference.rows import (
    RESTORE_MARKER,
    SCOPE_PREFIX,
    Amounts,
    Json,
    ReferenceShape,
    Rows,
    amount,
    of_kind,
    outstanding,
    owner_of,
    phase_of,
)
from remit.simulate.checkers.registry import Findings, check_property


def compare_scopes(issuer: Rows, holder: Rows, scope: str) -> Findings:
    """Compare two scopes by all their rows: a holder never has more than its issuer has debited."""
    for key, grant in of_kind(holder, "grant"):
        if grant["spec"].get("issuer"):
            source = issuer.get(key)
            yield from _exceeds_issued(key, grant, None if source is None else source[1], scope)


def _exceeds_issued(key: str, held: Json, issued: Json, scope: str) -> Findings:
    if held.get("status", {}).get("phase") == "void":
        return
    issued_amount = {} if issued is None else outstanding(issued)
    for name, n in amount(held["spec"]["amount"]).items():
        if n > issued_amount.get(name, 0):
            yield key, f"{scope} holds {n} {name} of {key}, but its issuer has debited {issued_amount.get(name, 0)}"


class CrossScopeGrants:
    """Grants and usage over all scopes of a run."""

    def __init__(self, histories: Mapping[str, History]) -> None:
        self.histories = histories
        self.written_off: set[tuple[str, str]] = set()
        """Grants that an operator declared lost, by issuer and grant. The operator vouches that the holder is gone."""
        self.quotas: dict[str, dict[str, Amounts]] = {}
        """The highest quota a tenant ever had in each scope. When a quota shrinks, issued slices stay and may still be charged.
        """

    def on_commit(self, history: History, changed: Mapping[str, tuple[Json, Json]]) -> None:
        for key, (_, new) in changed.items():
            if new is None or not key.startswith("tenant/"):
                continue
            highest = self.quotas.setdefault(key.removeprefix("tenant/"), {}).setdefault(history.scope, {})
            quota, emergency = amount(new["spec"]["quota"]), amount(new["spec"].get("emergencyQuota"))
            for name in {**quota, **emergency}:
                highest[name] = max(highest.get(name, 0), quota.get(name, 0) + emergency.get(name, 0))

    def held_grants_are_debited_by_issuer(self, step: CommitStep) -> Findings:
        """S4 between scopes: a grant is never larger at its holder than what the issuer has debited for it."""
        history = step.history
        lost = any(entry.operation == "declare-lost" for entry in step.accepted)
        changed = [key for key, _, _ in step.of_kind("grant")]
        for key in changed:
            if history.row(key) is not None:
                self.written_off.discard((history.scope, key))
            elif lost:
                self.written_off.add((history.scope, key))
        # Changes of peers, and the review after a restore, affect every grant between the two scopes.
        if RESTORE_MARKER in step.changed or any(key.startswith("peer/") for key in step.changed):
            changed = [key for other in self.histories.values() for key in other.kind("grant")]
        for key in dict.fromkeys(changed):
            yield from self._compare_grant(history, key)

    def _compare_grant(self, history: History, key: str) -> Findings:
        own = history.row(key)
        if own is not None and own["spec"].get("issuer"):
            pairs = [(self.histories.get(own["spec"]["issuer"].removeprefix(SCOPE_PREFIX)), history)]
        else:
            pairs = [(history, other) for other in self.histories.values() if other is not history]
        for issuer, holder in pairs:
            held = holder.row(key)
            if issuer is None or held is None or held["spec"].get("issuer") != SCOPE_PREFIX + issuer.scope:
                continue
            if (issuer.scope, key) not in self.written_off and _restores_resolved(issuer, holder):
                yield from _exceeds_issued(key, held, issuer.row(key), holder.scope)

    def tenant_usage_stays_within_quota(self, step: CommitStep) -> Findings:
        """Over all scopes, charges never rise above quota plus emergency quota."""
        sums = step.history.sums
        if step.after_restore:
            return
        for (tenant, name), before in sums.tenants_before.items():
            if sums.tenants.get((tenant, name), 0) <= before or tenant not in self.quotas:
                continue
            total = sum(other.sums.tenants.get((tenant, name), 0) for other in self.histories.values())
            limit = sum(highest.get(name, 0) for highest in self.quotas[tenant].values())
            if total > limit:
                yield f"tenant/{tenant}", f"its use of {name} over all scopes rose to {total}, highest limit so far {limit}"


def _restores_resolved(issuer: History, holder: History) -> bool:
    """Whether restores of both sides are resolved. Until then a restored issuer may not know what it granted, and issues
    nothing; the grants of a restored holder become void with its first batches.
    """
    for side in (issuer, holder):
        if side.head is None or side.row(RESTORE_MARKER) != side.head["incarnation"]:
            return False
    if len(issuer.incarnations) < 2:
        return True
    peer = issuer.row(f"peer/{SCOPE_PREFIX}{holder.scope}")
    return peer is not None and peer["spec"].get("standing") == "vouched"


PRIORITY_LIMIT: Final = 2_000_000_000
KINDS: Final = {"workloads": "workload", "secrets": "secret", "configs": "config"}


@check_property("S29")
def replica_priorities_stay_within_policy(step: CommitStep) -> Findings:
    """Applies to replicas created by this commit; older ones keep their priority."""
    if not any(entry.operation in ("spawn", "apply") for entry in step.accepted):
        return
    for key, old, new in step.moves:
        shape = step.history.shape(new) if old is None and new is not None else None
        if shape is None:
            continue
        limit = max(_priority_max(policy, shape) for policy in (step.policy_before, step.history.policy))
        priority = new["spec"].get("priority", 0)
        if priority > limit:
            yield key, f"it has priority {priority}, but the policy in force allows {limit}"


def _priority_max(policy: Json, shape: ReferenceShape) -> int:
    limit = PRIORITY_LIMIT
    for rule in (rule for policy_spec in (policy or {}).get("policies", {}).values() for rule in policy_spec["rules"]):
        match = rule.get("match", {})
        tenants = match.get("tenants")
        if (not tenants or shape.tenant in tenants) and matches(shape.labels, match.get("labels", {})):
            limit = min(limit, rule.get("priorityMax", PRIORITY_LIMIT))
    return limit


@check_property("S30")
def tenant_objects_stay_within_limits(step: CommitStep) -> Findings:
    """Increases stay within the limits; what already exceeds a limit may only shrink."""
    history = step.history
    touched = {_tenant(old, new) for kind in KINDS.values() for _, old, new in step.of_kind(kind)}
    for tenant in sorted(touched):
        key = f"tenant/{tenant}"
        limits = [_limits(row) for row in (step.row_before(key), history.row(key)) if row is not None]
        if not any(limits):
            continue  # the defaults are far beyond what a run declares
        declared = _declared(history, tenant)
        for name, count in declared.items():
            highest = max(limit.get(name, PRIORITY_LIMIT) for limit in limits)
            if count > highest and _increase(step, tenant, name) > 0:
                yield key, f"it declares {count} {name}, limit {highest}"


def _limits(tenant: Json) -> Mapping[str, int]:
    limits: Mapping[str, int] = tenant["spec"].get("limits", {})
    return limits


def _tenant(old: Json, new: Json) -> str:
    return str((new if new is not None else old)["metadata"]["tenant"])


def _declared(history: History, tenant: str) -> dict[str, int]:
    counts = {
        name: sum(row["metadata"]["tenant"] == tenant for row in history.kind(kind).values()) for name, kind in KINDS.items()
    }
    workloads = (row for row in history.kind("workload").values() if row["metadata"]["tenant"] == tenant)
    return {**counts, "replicas": sum(_declared_replicas(row) for row in workloads)}


def _increase(step: CommitStep, tenant: str, name: str) -> int:
    """Return by how much a commit has raised the count."""
    kind = KINDS.get(name, "workload")
    changes = [(old, new) for _, old, new in step.of_kind(kind) if _tenant(old, new) == tenant]
    if name in KINDS:
        return sum((new is not None) - (old is not None) for old, new in changes)
    return sum(_declared_replicas(new) - _declared_replicas(old) for old, new in changes)


def _declared_replicas(workload: Json) -> int:
    if workload is None or workload["spec"]["type"] == "daemon":
        return 0
    return max(int(workload["spec"].get("replicas", 1)), int(workload["spec"].get("completions", 0)))


DECLARING_OPERATIONS = ("apply", "delete")


def created_with_workload(step: CommitStep, replica: Json) -> bool:
    """Whether this commit created both, by one claim."""
    key = owner_of(replica)
    return _is_new(step, key) and any(entry.operation == "apply" and entry.subject == key for entry in step.accepted)


def _is_new(step: CommitStep, key: str) -> bool:
    """Whether this commit created the object. If it replaced another of the same name, the new one counts."""
    old, new = step.changed.get(key, (None, None))
    return new is not None and (old is None or old["metadata"].get("uid") != new["metadata"].get("uid"))


@check_property("S13")
def initial_replicas_match_workload_spec(step: CommitStep) -> Findings:
    """A new workload comes with all of its initial replicas or none, from index 0, of its first generation: no surge is needed
    when nothing is replaced.
    """
    created: dict[str, list[Json]] = {}
    for _, old, new in step.moves:
        if old is None and new is not None and not step.after_restore and _is_new(step, owner_of(new)):
            created.setdefault(owner_of(new), []).append(new)
    for key, replicas in created.items():
        workload = step.history.row(key)
        meta, spec = workload["metadata"], workload["spec"]
        if any(entry.operation == "spawn" and entry.subject == meta["name"] for entry in step.accepted):
            continue  # the same commit also spawned replicas on request
        if sum(entry.operation in DECLARING_OPERATIONS and entry.subject == key for entry in step.accepted) > 1:
            continue  # the initial state is in no row
        indexes = sorted(replica["spec"].get("index", 0) for replica in replicas)
        if indexes != list(range(_initial_replicas(spec))) or any(phase_of(replica) != "pending" for replica in replicas):
            yield key, f"it came with replicas {indexes}, but its initial number is {_initial_replicas(spec)}"
        elif any(replica["spec"]["generation"] != meta.get("generation", 1) for replica in replicas):
            yield key, f"it came with replicas of another generation than {meta.get('generation', 1)}"


def _initial_replicas(spec: Json) -> int:
    """Return the initial number of replicas. Daemons depend on the nodes, and scheduled workloads wait for their time: both
    start with 0.
    """
    if spec["type"] == "daemon" or spec.get("schedule"):
        return 0
    desired = int(spec.get("replicas", 1))
    return min(desired, int(spec["completions"])) if spec.get("completions") else desired
