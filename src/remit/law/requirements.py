"""Compiles a workload generation and the policies in force into its node requirements.

Done once per generation; the rules that evaluate the requirements are in fit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from remit.law.fit import (
    ANY_MODEL,
    RULES,
    BoolOrMask,
    DeviceRequirement,
    MemoizedPredicate,
    NodeView,
    PeerCounts,
    PeerIndex,
    PeerTerm,
    Requirements,
    accepting,
    affinity,
    anti_affinity,
    devices,
    ready,
    shares,
    spread,
    symmetric_anti_affinity,
)
from remit.law.selectors import expressions, selects
from remit.model.claims import Code
from remit.model.kinds import DeviceRequest, Placement, PolicyMatch, PolicySpec, Taint, Toleration, WorkloadSpec
from remit.model.metadata import Deadline
from remit.model.resources import DEVICES_PREFIX, WHOLE_DEVICE, Amount, parse_quantity

WORKLOAD_LABEL: Final = "remit/workload"
"""Every replica has its workload's name under this label, so that a selector can match the replicas of one workload."""

PREFER_NO_SCHEDULE: Final = "PreferNoSchedule"

DEVICE_SETS_MAX: Final = 64
"""Limit of the number of model sets of one workload, including the unions of overlapping sets, which could be exponentially
many.
"""


def compile_requirements(
    tenant: str,
    workload: str,
    labels: Mapping[str, str],
    spec: WorkloadSpec,
    policies: Sequence[PolicySpec],
    generation: int = 0,
    in_force: tuple[int, Deadline | None] = (0, None),
    placeable: bool = True,
) -> Requirements:
    """Returns what each replica of this generation requires, under these policies. Raises ValueError for requirements that
    cannot be met.
    """
    all_labels = {**labels, WORKLOAD_LABEL: workload}
    placement, template = spec.placement, spec.template
    wholes, shares = _device_requirements(template.devices)
    charge = template.resources + Amount(
        _sum_by_name((DEVICES_PREFIX + item.kind, item.amount * WHOLE_DEVICE) for item in wholes)
    )
    charge += Amount(_sum_by_name((DEVICES_PREFIX + item.kind, item.amount) for item in shares))
    rules = [rule for policy in policies for rule in policy.rules]
    allowed = [rule.allow for rule in rules if rule_matches(rule.match, tenant, all_labels)]

    def term(selector: Mapping[str, str], key: str, skew: int = 0) -> PeerTerm:
        pairs = tuple(sorted(selector.items())) or ((WORKLOAD_LABEL, workload),)
        return PeerTerm(PeerIndex(tenant, pairs, key), int(selects(pairs, all_labels)), skew)

    def spreads(unsatisfiable: str) -> tuple[PeerTerm, ...]:
        matching = [item for item in placement.topology_spread if item.when_unsatisfiable == unsatisfiable]
        return tuple(term(item.label_selector, item.topology_key, item.max_skew) for item in matching)

    anti = tuple(term(a.label_selector, a.topology_key) for a in placement.anti_affinity)
    if spec.type == "daemon":
        # A daemon runs one replica per node, so it has anti-affinity to itself.
        anti = (*anti, term({}, "node"))
    checks = _dynamic_checks(bool(wholes), bool(shares), placement, bool(anti))
    return Requirements(
        tenant=tenant,
        generation=(tenant, workload, generation),
        labels=all_labels,
        placeable=placeable,
        charge=charge,
        resources=template.resources.pairs,
        devices=template.devices,
        whole_devices=wholes,
        device_shares=shares,
        node_expressions=expressions(placement),
        regions=_in_every_list([placement.regions]),
        zones=_in_every_list([placement.zones]),
        pools=_in_every_list([placement.pools]),
        allowed_regions=_in_every_list([allow.regions for allow in allowed]),
        allowed_zones=_in_every_list([allow.zones for allow in allowed]),
        allowed_pools=_in_every_list([allow.pools for allow in allowed]),
        tolerates=MemoizedPredicate(lambda tainted: all(is_tolerated(taint, placement.tolerations) for taint in tainted)),
        spread=spreads("DoNotSchedule"),
        affinity=tuple(term(a.label_selector, a.topology_key) for a in placement.affinity),
        anti_affinity=anti,
        preferred_spread=spreads("ScheduleAnyway"),
        untolerated_soft=MemoizedPredicate(
            lambda tainted: not all(_is_covered(t, placement.tolerations) for t in tainted if t.effect == PREFER_NO_SCHEDULE)
        ),
        fenced=spec.is_fenced,
        gang=spec.gang.min if spec.gang else 0,
        policy=in_force[0],
        policy_deadline=in_force[1],
        quota=(f"tenant/{tenant}",),
        static_results={},
        dynamic_checks=checks,
        resources_only=not spec.gang and in_force[1] is None and checks == _dynamic_checks(False, False, _NO_PLACEMENT, False),
    )


_NO_PLACEMENT = Placement()


def _dynamic_checks(
    devices_requested: bool, shares_requested: bool, placement: Placement, anti: bool
) -> tuple[tuple[Callable[..., BoolOrMask], Code], ...]:
    """Resources are always checked; the other rules only if the requirements need them. Symmetric anti-affinity is checked
    last, for all requirements.
    """
    skipped: dict[Callable[[Requirements, NodeView, PeerCounts], BoolOrMask], bool] = {
        devices: not devices_requested,
        shares: not shares_requested,
        spread: not placement.topology_spread,
        affinity: not placement.affinity,
        anti_affinity: not anti,
        ready: True,
        accepting: True,
        symmetric_anti_affinity: True,
    }
    return tuple((rule.check, rule.code) for rule in RULES if not rule.static and not skipped.get(rule.check, False))


def is_tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    """Whether the taint permits placement: PreferNoSchedule always does, the other effects only with a matching toleration."""
    return taint.effect == PREFER_NO_SCHEDULE or _is_covered(taint, tolerations)


def _is_covered(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    return any(
        (not t.key or t.key == taint.key)
        and (t.operator == "Exists" or t.value == taint.value)
        and (not t.effect or t.effect == taint.effect)
        for t in tolerations
    )


def share_of(request: DeviceRequest) -> int:
    """Returns a share in thousandths of one device."""
    return parse_quantity("share", request.share)


def _device_requirements(
    requests: Sequence[DeviceRequest],
) -> tuple[tuple[DeviceRequirement, ...], tuple[DeviceRequirement, ...]]:
    wholes: dict[tuple[str, tuple[str, ...]], int] = {}
    shares: dict[str, DeviceRequirement] = {}
    for request in requests:
        models = tuple(sorted(set(request.models)))
        if ANY_MODEL in models:
            raise ValueError(f"a model of {request.kind} without a name: leave models out to accept any")
        if request.share == "":
            wholes[request.kind, models] = wholes.get((request.kind, models), 0) + request.count
        elif request.kind in shares:
            raise ValueError(f"two shares of {request.kind}: request one share, or whole devices")
        else:
            shares[request.kind] = DeviceRequirement(request.kind, models, share_of(request))
            if not 0 < shares[request.kind].amount < WHOLE_DEVICE:
                raise ValueError(f"a share of {request.kind} must be between 1m and 999m; for a whole device, use count: 1")
    mixed = sorted(set(shares) & {kind for kind, _ in wholes})
    if mixed:
        raise ValueError(f"a share and whole devices of {mixed[0]} in one replica: request one or the other")
    for kind, models in _with_unions(list(wholes)):
        wholes.setdefault((kind, models), 0)
    return tuple(DeviceRequirement(kind, models, count) for (kind, models), count in wholes.items()), tuple(shares.values())


def _with_unions(requested: Sequence[tuple[str, tuple[str, ...]]]) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Returns the requested model sets and every union of overlapping ones; nested or disjoint sets add none."""
    sets = list(requested)
    for kind, models in sets:  # the list grows while it is iterated
        for other_kind, other_models in requested:
            union = kind, tuple(sorted({*models, *other_models}))
            if kind == other_kind and set(models) & set(other_models) and union not in sets:
                sets.append(union)
        if len(sets) > max(DEVICE_SETS_MAX, len(requested)):
            raise ValueError(f"the requested models of {kind} overlap in too many ways")
    return sets


def _in_every_list(lists: Sequence[Sequence[str]]) -> MemoizedPredicate:
    """A lookup that accepts a place if every non-empty list names it."""
    sets = [frozenset(names) for names in lists if names]
    return MemoizedPredicate(lambda value: all(value in names for names in sets))


def rule_matches(match: PolicyMatch, tenant: str, labels: Mapping[str, str]) -> bool:
    """Whether a policy rule applies to workloads of this tenant with these labels."""
    return (not match.tenants or tenant in match.tenants) and selects(match.labels, labels)


def exec_denied_by(policies: Mapping[str, PolicySpec], tenant: str, labels: Mapping[str, str]) -> str:
    """Returns the first policy that forbids exec in this workload's replicas, with its reason; empty if there is none."""
    for name, policy in sorted(policies.items()):
        for rule in policy.rules:
            if not rule.exec and rule_matches(rule.match, tenant, labels):
                return f"{name}: {rule.reason}" if rule.reason else name
    return ""


def _sum_by_name(pairs: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, count in pairs:
        total[name] = total.get(name, 0) + count
    return total
