"""Independent placement rules: selectors, taints, affinity, spread, policy.

Does not use law/fit.py. Free capacity and ledgers are not considered here.
"""

from __future__ import annotations

from collections.abc import Mapping

from remit.simulate.checkers.reference.history import History
from remit.simulate.checkers.reference.rows import Json, ReferenceNode, ReferenceShape


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def static_violation(shape: ReferenceShape, node: ReferenceNode, policy: Json) -> str:
    """Return the rule by which a node could never accept such a replica, regardless of its free capacity; empty if there is
    none.
    """
    return (
        _location_violation(shape, node)
        or _policy_violation(shape, node, policy)
        or _taint_violation(shape, node)
        or _label_violation(shape, node)
    )


def _location_violation(shape: ReferenceShape, node: ReferenceNode) -> str:
    for name, value in node.locations.items():
        if shape.placement.get(f"{name}s") and value not in shape.placement[f"{name}s"]:
            return f"{name} {value} is not requested"
    return ""


def _policy_violation(shape: ReferenceShape, node: ReferenceNode, policy: Json) -> str:
    for rule in (rule for policy_spec in (policy or {}).get("policies", {}).values() for rule in policy_spec["rules"]):
        match, allow = rule.get("match", {}), rule.get("allow", {})
        tenants = match.get("tenants")
        if (tenants and shape.tenant not in tenants) or not matches(shape.labels, match.get("labels", {})):
            continue
        for name, value in node.locations.items():
            if allow.get(f"{name}s") and value not in allow[f"{name}s"]:
                return f"policy forbids {name} {value}"
    return ""


def _taint_violation(shape: ReferenceShape, node: ReferenceNode) -> str:
    tolerations = shape.placement.get("tolerations", ())
    for taint in node.taints:
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(t, taint) for t in tolerations):
            return f"taint {taint} is not tolerated"
    return ""


def _label_violation(shape: ReferenceShape, node: ReferenceNode) -> str:
    if not matches(node.labels, shape.placement.get("nodeSelector", {})):
        return f"labels {node.labels} do not match the node selector"
    for expression in shape.placement.get("expressions", ()):
        if not _matches_expression(expression, node.labels.get(expression["key"])):
            return f"{expression} does not match labels {node.labels}"
    return ""


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    return bool(toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))


def _matches_expression(expression: Json, value: str | None) -> bool:
    values = expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and value.isdigit() and int(value) > int(values[0])
        case _:
            return value is not None and value.isdigit() and int(value) < int(values[0])


class PeerReplicas:
    """Replicas of one tenant that hold capacity, without the one under consideration if it is among them."""

    def __init__(self, history: History, shape: ReferenceShape, own: str) -> None:
        self.history, self.shape, self.own_node = history, shape, own

    def positions(self, generation: str, by_node: Mapping[str, int]) -> list[tuple[ReferenceNode, int]]:
        """Return the nodes of one generation's replicas, with their numbers."""
        positions = []
        for node, count in by_node.items():
            site = self.history.reference_nodes.get(node)
            count_others = count - (generation == self.shape.key and node == self.own_node)
            if site is not None and count_others:
                positions.append((site, count_others))
        return positions

    def count_by_domain(self, selector: Mapping[str, str], topology: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for generation, by_node in self.history.sums.positions.get(self.shape.tenant, {}).items():
            shape = self.history.shapes.get(generation)
            if shape is not None and matches(shape.labels, selector):
                for site, count in self.positions(generation, by_node):
                    domain = site.domain(topology)
                    counts[domain] = counts.get(domain, 0) + count
        return counts


def peer_violation(
    history: History, shape: ReferenceShape, node: ReferenceNode, *, counted: bool = True, spread: bool = True
) -> str:
    """Return the constraint towards other replicas of its tenant that a replica of this shape on this node breaks; empty if
    none.

    `counted` means that the replica is already there and among those that hold capacity.
    """
    others = PeerReplicas(history, shape, node.name if counted else "")
    violation = (
        _anti_affinity_violation(others, node)
        or _violation_of_other_anti_affinity(others, node)
        or _affinity_violation(others, node)
    )
    terms = shape.placement.get("topologySpread", ()) if spread else ()
    hard = (term for term in terms if term.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule")
    return violation or next(filter(None, (_spread_violation(others, node, term) for term in hard)), "")


def _anti_affinity_violation(others: PeerReplicas, node: ReferenceNode) -> str:
    for term in others.shape.anti_affinity:
        domain = node.domain(term["topologyKey"])
        if domain and others.count_by_domain(term["labelSelector"], term["topologyKey"]).get(domain):
            return f"anti-affinity {term} in {domain}"
    return ""


def _violation_of_other_anti_affinity(others: PeerReplicas, node: ReferenceNode) -> str:
    history, shape = others.history, others.shape
    for generation, by_node in history.sums.positions.get(shape.tenant, {}).items():
        other = history.shapes.get(generation)
        for term in other.anti_affinity if other is not None else ():
            domain = node.domain(term["topologyKey"])
            if not domain or not matches(shape.labels, term["labelSelector"]):
                continue
            if any(site.domain(term["topologyKey"]) == domain for site, _ in others.positions(generation, by_node)):
                return f"anti-affinity {term} of {generation} in {domain}"
    return ""


def _affinity_violation(others: PeerReplicas, node: ReferenceNode) -> str:
    shape = others.shape
    for term in shape.placement.get("affinity", ()):
        counts, domain = others.count_by_domain(term["labelSelector"], term["topologyKey"]), node.domain(term["topologyKey"])
        first = not any(counts.values()) and matches(shape.labels, term["labelSelector"])
        if not domain or not (counts.get(domain) or first):
            return f"affinity {term} in {domain}"
    return ""


def _spread_violation(others: PeerReplicas, node: ReferenceNode, term: Json) -> str:
    shape, topology = others.shape, term["topologyKey"]
    selector = term.get("labelSelector") or {"remit/workload": shape.workload}
    counts, domain = others.count_by_domain(selector, topology), node.domain(topology)
    minimum = min(
        (counts.get(other_domain, 0) for other_domain in feasible_domains(others.history, shape, topology)), default=0
    )
    if not domain or counts.get(domain, 0) + matches(shape.labels, selector) - minimum > term.get("maxSkew", 1):
        return f"spread {term} in {domain}: {counts}"
    return ""


def feasible_domains(history: History, shape: ReferenceShape, topology: str) -> frozenset[str]:
    """Return the domains in which such a replica could be placed at all."""
    domains = history.feasible_domains.get((shape.key, topology))
    if domains is None:
        sites = [site for site in history.reference_nodes.values() if not static_violation(shape, site, history.policy)]
        domains = history.feasible_domains[shape.key, topology] = frozenset(site.domain(topology) for site in sites) - {""}
    return domains
