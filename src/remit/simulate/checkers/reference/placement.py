"""Independent placement rules: selectors, taints, affinity, spread, policy.

Does not use law/fit.py. Free capacity and ledgers are not considered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from remit.simulate.checkers.reference.rows import Json, Shape

if TYPE_CHECKING:
    from remit.simulate.checkers.reference.history import History


class Site:
    """Attributes and location of a node."""

    __slots__ = ("labels", "name", "places", "standing", "taints")

    def __init__(self, name: str, node: Json) -> None:
        spec = node["spec"]
        self.name = name
        self.labels: dict[str, str] = node["metadata"].get("labels", {})
        self.places = {"region": str(spec["region"]), "zone": str(spec["zone"]), "pool": str(spec.get("pool", "default"))}
        self.taints: list[Json] = spec.get("taints", [])
        self.standing = (self.labels, self.places, self.taints)

    def domain(self, key: str) -> str:
        return self.name if key == "node" else self.places[key] if key in self.places else str(self.labels.get(key, ""))


def includes(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def barred(shape: Shape, site: Site, policy: Json) -> str:
    """Return the rule by which a node could never accept such a replica, regardless of its free capacity; empty if there is
    none.
    """
    where = shape.where
    for name, value in site.places.items():
        if where.get(f"{name}s") and value not in where[f"{name}s"]:
            return f"{name} {value} is not requested"
    for rule in (rule for one in (policy or {}).get("policies", {}).values() for rule in one["rules"]):
        match, allow = rule.get("match", {}), rule.get("allow", {})
        tenants = match.get("tenants")
        if (tenants and shape.tenant not in tenants) or not includes(shape.labels, match.get("labels", {})):
            continue
        for name, value in site.places.items():
            if allow.get(f"{name}s") and value not in allow[f"{name}s"]:
                return f"policy forbids {name} {value}"
    for taint in site.taints:
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(t, taint) for t in where.get("tolerations", ())):
            return f"taint {taint} is not tolerated"
    if not includes(site.labels, where.get("nodeSelector", {})):
        return f"labels {site.labels} do not match the node selector"
    wanted = where.get("expressions", ())
    return next((f"{e} does not match labels {site.labels}" for e in wanted if not _admits(e, site.labels.get(e["key"]))), "")


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    return bool(toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))


def _admits(expression: Json, value: str | None) -> bool:
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


class Others:
    """Replicas of one tenant that hold capacity, without the one under consideration if it is among them."""

    def __init__(self, history: History, shape: Shape, own: str) -> None:
        self.history, self.shape, self.own = history, shape, own

    def spots(self, generation: str, there: Mapping[str, int]) -> list[tuple[Site, int]]:
        """Return the nodes of one generation's replicas, with their numbers."""
        found = []
        for node, count in there.items():
            site = self.history.sites.get(node)
            left = count - (generation == self.shape.key and node == self.own)
            if site is not None and left:
                found.append((site, left))
        return found

    def counted(self, selector: Mapping[str, str], topology: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for generation, there in self.history.sums.spots.get(self.shape.tenant, {}).items():
            shape = self.history.shapes.get(generation)
            if shape is not None and includes(shape.labels, selector):
                for site, count in self.spots(generation, there):
                    domain = site.domain(topology)
                    counts[domain] = counts.get(domain, 0) + count
        return counts


def towards_others(history: History, shape: Shape, here: Site, *, counted: bool = True, spread: bool = True) -> str:
    """Return the constraint towards other replicas of its tenant that a replica of this shape on this node breaks; empty if
    none.

    `counted` means that the replica is already there and among those that hold capacity.
    """
    others = Others(history, shape, here.name if counted else "")
    for term in shape.anti:
        domain = here.domain(term["topologyKey"])
        if domain and others.counted(term["labelSelector"], term["topologyKey"]).get(domain):
            return f"anti-affinity {term} in {domain}"
    for generation, there in history.sums.spots.get(shape.tenant, {}).items():
        other = history.shapes.get(generation)
        for term in other.anti if other is not None else ():
            domain = here.domain(term["topologyKey"])
            if not domain or not includes(shape.labels, term["labelSelector"]):
                continue
            if any(site.domain(term["topologyKey"]) == domain for site, _ in others.spots(generation, there)):
                return f"anti-affinity {term} of {generation} in {domain}"
    for term in shape.where.get("affinity", ()):
        counts, domain = others.counted(term["labelSelector"], term["topologyKey"]), here.domain(term["topologyKey"])
        first = not any(counts.values()) and includes(shape.labels, term["labelSelector"])
        if not domain or not (counts.get(domain) or first):
            return f"affinity {term} in {domain}"
    for term in shape.where.get("topologySpread", ()) if spread else ():
        if term.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule" and (why := _skewed(others, here, term)):
            return why
    return ""


def _skewed(others: Others, here: Site, term: Json) -> str:
    shape, topology = others.shape, term["topologyKey"]
    selector = term.get("labelSelector") or {"remit/workload": shape.workload}
    counts, domain = others.counted(selector, topology), here.domain(topology)
    least = min((counts.get(one, 0) for one in open_to(others.history, shape, topology)), default=0)
    if not domain or counts.get(domain, 0) + includes(shape.labels, selector) - least > term.get("maxSkew", 1):
        return f"spread {term} in {domain}: {counts}"
    return ""


def open_to(history: History, shape: Shape, topology: str) -> frozenset[str]:
    """Return the domains in which such a replica could be placed at all."""
    found = history.open_to.get((shape.key, topology))
    if found is None:
        sites = [site for site in history.sites.values() if not barred(shape, site, history.policy)]
        found = history.open_to[shape.key, topology] = frozenset(site.domain(topology) for site in sites) - {""}
    return found
