"""Oracle for placement rules: does a replica fit a node, by nested loops and exhaustive search.

It does not import `law/`; the definitions are those a reader of Kubernetes expects from the manifest, so that a wrong
rule cannot confirm itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from remit.model.claims import Code
from remit.model.kinds import Device, DeviceRequest, Node, NodeExpression, PolicySpec, Taint, Toleration, WorkloadSpec

if TYPE_CHECKING:
    from remit.observation.node_columns import NodeFree  # a node and its free capacity


class Work(NamedTuple):
    """A workload, as far as its placement is concerned."""

    tenant: str
    name: str
    labels: dict[str, str]
    spec: WorkloadSpec


class PlacementCase(NamedTuple):
    """Nodes, replicas bound to them, policies, and a workload that needs one more replica."""

    left: list[NodeFree]
    standing: list[tuple[Work, int]]
    policies: list[PolicySpec]
    work: Work


def violations(scene: PlacementCase, row: int) -> set[Code]:
    """Every refusal that the replica must get on that node."""
    here, work = scene.left[row], scene.work
    node, template = here.node, work.spec.template
    found = static_violations(scene, node)
    if str(node.status.health) != "ready":
        found.add(Code.NODE_UNREADY)
    if node.spec.unschedulable or node.spec.draining:
        found.add(Code.DRAINING)
    for name, count in template.resources.pairs:
        if name not in here.free or here.free[name] < count:
            found.add(Code.NO_ROOM)
    if not devices_available(template.devices, list(node.spec.devices), dict(here.used)):
        found.add(Code.DEVICE_TAKEN)
    if not spread_satisfied(scene, node):
        found.add(Code.SPREAD)
    if not affinity_satisfied(scene, node):
        found.add(Code.AFFINITY)
    if not anti_affinity_satisfied(scene, node):
        found.add(Code.ANTI_AFFINITY)
    return found


def static_violations(scene: PlacementCase, node: Node) -> set[Code]:
    """Refusals that hold even in an empty, healthy, idle cluster."""
    found, work, where, spec = set(), scene.work, scene.work.spec.placement, node.spec
    for names, name in ((where.regions, spec.region), (where.zones, spec.zone), (where.pools, spec.pool)):
        if len(names) > 0 and name not in names:
            found.add(Code.PLACE)
    for policy in scene.policies:
        for rule in policy.rules:
            meant = len(rule.match.tenants) == 0 or work.tenant in rule.match.tenants
            meant = meant and selects(rule.match.labels, work)
            allow = rule.allow
            for names, name in ((allow.regions, spec.region), (allow.zones, spec.zone), (allow.pools, spec.pool)):
                if meant and len(names) > 0 and name not in names:
                    found.add(Code.POLICY)
    for taint in spec.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and not any(
            tolerates(toleration, taint) for toleration in where.tolerations
        ):
            found.add(Code.TAINT)
    labels = node.metadata.labels
    for key, value in where.node_selector.items():
        if key not in labels or labels[key] != value:
            found.add(Code.SELECTOR)
    for expression in where.expressions:
        if not matches(expression, labels):
            found.add(Code.SELECTOR)
    return found


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect != "" and toleration.effect != taint.effect:
        return False
    if toleration.key != "" and toleration.key != taint.key:
        return False
    return toleration.operator == "Exists" or toleration.value == taint.value


def matches(expression: NodeExpression, labels: dict[str, str]) -> bool:
    there, operator = expression.key in labels, expression.operator
    if operator in ("Exists", "DoesNotExist"):
        return there == (operator == "Exists")
    if operator in ("In", "NotIn"):
        return (there and labels[expression.key] in expression.values) == (operator == "In")
    digits = set("0123456789")
    if not there or not expression.values:
        return False
    value, limit = labels[expression.key], expression.values[0]
    if not value or not limit or not set(value) <= digits or not set(limit) <= digits:
        return False
    return int(value) > int(limit) if operator == "Gt" else int(value) < int(limit)


def devices_available(requests: Sequence[DeviceRequest], devices: list[Device], used: dict[str, int]) -> bool:
    """Try every assignment of devices, one request after the other."""
    if not requests:
        return True
    request, rest = requests[0], requests[1:]
    suited = [
        device for device in devices if device.kind == request.kind and (not request.models or device.model in request.models)
    ]
    if request.share != "":
        text = str(request.share)
        share = Fraction(text[:-1]) if text.endswith("m") else Fraction(text) * 1000
        return any(
            used.get(one.name, 0) + share <= 1000 and devices_available(rest, devices, {**used, one.name: 1000})
            for one in suited
        )
    if request.count == 0:
        return devices_available(rest, devices, used)
    less = DeviceRequest(kind=request.kind, count=request.count - 1, models=request.models)
    return any(
        devices_available([less, *rest], devices, {**used, one.name: 1000}) for one in suited if not used.get(one.name, 0)
    )


def selects(selector: dict[str, str], work: Work) -> bool:
    labels = {**work.labels, "remit/workload": work.name}
    return all(key in labels and labels[key] == value for key, value in selector.items())


def domain(node: Node, key: str) -> str | None:
    match key:
        case "node":
            return node.metadata.name
        case "zone":
            return node.spec.zone
        case "region":
            return node.spec.region
        case "pool":
            return node.spec.pool
    return node.metadata.labels.get(key) or None


def replicas_in(scene: PlacementCase, key: str, name: str, selector: dict[str, str]) -> int:
    """Number of the tenant's replicas in that domain that the selector matches."""
    found = 0
    for work, row in scene.standing:
        if domain(scene.left[row].node, key) == name and work.tenant == scene.work.tenant and selects(selector, work):
            found += 1
    return found


def spread_satisfied(scene: PlacementCase, node: Node) -> bool:
    """Skew: replicas in the domain afterwards, minus the minimum over all domains the replica may use."""
    for spread in scene.work.spec.placement.topology_spread:
        if spread.when_unsatisfiable == "ScheduleAnyway":
            continue
        key, selector = spread.topology_key, spread.label_selector or {"remit/workload": scene.work.name}
        here = domain(node, key)
        if here is None:
            return False
        held = []
        for other in scene.left:
            there = domain(other.node, key)
            if there is not None and not static_violations(scene, other.node):
                held.append(replicas_in(scene, key, there, selector))
        would = replicas_in(scene, key, here, selector) + (1 if selects(selector, scene.work) else 0)
        if would - (min(held) if held else 0) > spread.max_skew:
            return False
    return True


def affinity_satisfied(scene: PlacementCase, node: Node) -> bool:
    for term in scene.work.spec.placement.affinity:
        here = domain(node, term.topology_key)
        if here is None:
            return False
        if replicas_in(scene, term.topology_key, here, term.label_selector) > 0:
            continue
        domains = {domain(other.node, term.topology_key) for other in scene.left} - {None}
        anywhere = any(replicas_in(scene, term.topology_key, str(name), term.label_selector) for name in domains)
        if anywhere or not selects(term.label_selector, scene.work):
            return False
    return True


def anti_affinity_satisfied(scene: PlacementCase, node: Node) -> bool:
    """Its own anti-affinity, and that of the replicas it would join."""
    for term in scene.work.spec.placement.anti_affinity:
        here = domain(node, term.topology_key)
        if here is not None and replicas_in(scene, term.topology_key, here, term.label_selector) > 0:
            return False
    for other, row in scene.standing:
        for term in other.spec.placement.anti_affinity:
            here, there = domain(node, term.topology_key), domain(scene.left[row].node, term.topology_key)
            if (
                here is not None
                and here == there
                and other.tenant == scene.work.tenant
                and selects(term.label_selector, scene.work)
            ):
                return False
    return True
