"""Implementations of the interfaces of `law/fit.py` by plain values, for tests; the product's are in `commitment/`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from remit.law import fit
from remit.law.selectors import match_labels, selects
from remit.model.kinds import Node, NodeExpression, NodeHealth
from remit.observation.node_columns import NodeFree


class OneNode:
    """A `fit.Site` of plain values."""

    def __init__(self, left: NodeFree) -> None:
        self.node = node = left.node
        self.free: Any = left.free
        self.whole_devices: Any = Counter()
        self.largest_shares: Any = Counter()
        for device in node.spec.devices:
            unused = 1000 - left.used.get(device.name, 0)
            for key in {(device.kind, device.model), (device.kind, fit.ANY_MODEL)}:
                self.whole_devices[key] += unused == 1000
                self.largest_shares[key] = max(self.largest_shares[key], unused)
        self.node_attributes = object()
        self.ready = node.status.health == NodeHealth.READY
        self.open = not node.spec.unschedulable and not node.spec.draining
        self.region = node.spec.region
        self.zone = node.spec.zone
        self.pool = node.spec.pool
        self.taints = node.spec.taints

    def labelled(self, expressions: Sequence[NodeExpression]) -> bool:
        return match_labels(expressions, self.node.metadata.labels)

    def domain(self, key: str) -> tuple[bool, str]:
        return domain_of(self.node, key)


def domain_of(node: Node, key: str) -> tuple[bool, str]:
    own = {"node": node.metadata.name, "zone": node.spec.zone, "region": node.spec.region, "pool": node.spec.pool}
    found = own.get(key, node.metadata.labels.get(key))
    return bool(found), found or ""  # an empty label is no domain


class PlainPeers:
    """Implements `fit.Peers` by recounting all bound replicas each time."""

    def __init__(self, sites: Sequence[OneNode], standing: Sequence[tuple[fit.Requirements, Node]]) -> None:
        self.sites = sites
        self.standing = standing

    def counts(self, index: fit.PeerIndex) -> Counter[str]:
        found: Counter[str] = Counter()
        for ask, node in self.standing:
            known, domain = domain_of(node, index.topology_key)
            if index.owners:
                picked = index in fit.owned_anti_affinity(ask)
            else:
                picked = ask.tenant == index.tenant and selects(index.selector, ask.labels)
            if known and picked:
                found[domain] += 1
        return found

    def min_count(self, ask: fit.Requirements, index: fit.PeerIndex) -> int:
        possible = [site for site in self.sites if all(rule.check(ask, site, self) for rule in fit.STATIC_RULES)]
        domains = {domain for known, domain in (site.domain(index.topology_key) for site in possible) if known}
        counts = self.counts(index)
        return min((counts[domain] for domain in domains), default=0)

    def total(self, index: fit.PeerIndex) -> int:
        return sum(self.counts(index).values())

    def anti_affinity_owners(self, ask: fit.Requirements) -> list[fit.PeerIndex]:
        carried = dict.fromkeys(index for standing, _ in self.standing for index in fit.owned_anti_affinity(standing))
        return [index for index in carried if index.tenant == ask.tenant and selects(index.selector, ask.labels)]

    def counted(self, asks: Sequence[fit.Requirements]) -> dict[fit.PeerIndex, Counter[str]]:
        """Input of `columns.ColumnPeers`: counts of everything these requirements or bound replicas refer to."""
        terms = [term.peers for ask in asks for term in (*ask.spread, *ask.affinity, *ask.anti_affinity, *ask.preferred_spread)]
        carried = [
            index for ask in [*asks, *(standing for standing, _ in self.standing)] for index in fit.owned_anti_affinity(ask)
        ]
        return {index: self.counts(index) for index in dict.fromkeys(terms + carried)}
