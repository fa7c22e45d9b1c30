"""Did admission keep its word? No replica ranks above what policy allows its work, and no tenant declares more than it may.

Both are read from the rows: a policy's rules as they are published, a tenant's limits as its row has them. A batch may publish
a rule, or lower a limit, beside what it admits, in any order: then the more generous of the two is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from remit.simulate.checkers.history import History, Step
from remit.simulate.checkers.placement import includes
from remit.simulate.checkers.promise import Found, promise
from remit.simulate.checkers.rows import Json, Shape

PRIORITY_LIMIT: Final = 2_000_000_000
KINDS: Final = {"workloads": "workload", "secrets": "secret", "configs": "config"}


@promise("S29")
def replicas_rank_as_policy_allows(step: Step) -> Found:
    """Of those that a commit makes; what was made before a rule keeps its rank."""
    if not any(entry.did in ("spawn", "apply") for entry in step.accepted):
        return
    for key, old, new in step.moves:
        shape = step.history.shape(new) if old is None and new is not None else None
        if shape is None:
            continue
        most = max(_most(policy, shape) for policy in (step.policy_before, step.history.policy))
        priority = new["spec"].get("priority", 0)
        if priority > most:
            yield key, f"it has priority {priority}, and the policy in force allows {most}"


def _most(policy: Json, shape: Shape) -> int:
    most = PRIORITY_LIMIT
    for rule in (rule for one in (policy or {}).get("policies", {}).values() for rule in one["rules"]):
        match = rule.get("match", {})
        tenants = match.get("tenants")
        if (not tenants or shape.tenant in tenants) and includes(shape.labels, match.get("labels", {})):
            most = min(most, rule.get("priorityMax", PRIORITY_LIMIT))
    return most


@promise("S30")
def tenants_declare_no_more_than_their_limits(step: Step) -> Found:
    """What grows stays within; what was above a limit already may only shrink."""
    history = step.history
    touched = {_tenant(old, new) for kind in KINDS.values() for _, old, new in step.of_kind(kind)}
    for tenant in sorted(touched):
        key = f"tenant/{tenant}"
        limits = [_limits(row) for row in (step.was(key), history.row(key)) if row is not None]
        if not any(limits):
            continue  # the defaults are far beyond what a run declares
        now = _declared(history, tenant)
        for name, count in now.items():
            most = max(one.get(name, PRIORITY_LIMIT) for one in limits)
            if count > most and _grown(step, tenant, name) > 0:
                yield key, f"it declares {count} {name} of at most {most}"


def _limits(tenant: Json) -> Mapping[str, int]:
    found: Mapping[str, int] = tenant["spec"].get("limits", {})
    return found


def _tenant(old: Json, new: Json) -> str:
    return str((new if new is not None else old)["metadata"]["tenant"])


def _declared(history: History, tenant: str) -> dict[str, int]:
    found = {
        name: sum(row["metadata"]["tenant"] == tenant for row in history.kind(kind).values()) for name, kind in KINDS.items()
    }
    mine = (row for row in history.kind("workload").values() if row["metadata"]["tenant"] == tenant)
    return {**found, "replicas": sum(_many(row) for row in mine)}


def _grown(step: Step, tenant: str, name: str) -> int:
    """By how much a commit has raised it."""
    kind = KINDS.get(name, "workload")
    mine = [(old, new) for _, old, new in step.of_kind(kind) if _tenant(old, new) == tenant]
    if name in KINDS:
        return sum((new is not None) - (old is not None) for old, new in mine)
    return sum(_many(new) - _many(old) for old, new in mine)


def _many(workload: Json) -> int:
    if workload is None or workload["spec"]["type"] == "daemon":
        return 0
    return max(int(workload["spec"].get("replicas", 1)), int(workload["spec"].get("completions", 0)))
