"""What is left of a node, and of a grant? The books of one each; sums of postings, kept by books.py alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from remit.law.fit import devices_left
from remit.law.labels import match_labels
from remit.model.kinds import Grant, GrantPhase, Node, NodeExpression, NodeHealth, Taint, encode
from remit.model.resources import WHOLE, Amount

Pairs = Iterable[tuple[str, int]]

DEVICE = "@"
"""A device stands in its node's ledger as one more resource, `@gpu-0`, of which there are 1000 thousandths. So a whole device
has one owner for the same reason that memory is not sold twice."""


class Facts:
    """What a node is, apart from what is left of it; shared by every copy of its ledger."""

    __slots__ = ("capacity", "node", "open", "pool", "ready", "region", "standing", "taints", "zone")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.region, self.zone, self.pool = node.spec.region, node.spec.zone, node.spec.pool
        self.taints: tuple[Taint, ...] = node.spec.taints
        self.ready = node.status.health is NodeHealth.READY
        self.open = not (node.spec.unschedulable or node.spec.draining)
        # Bytes, since they keep their hash: nodes of one make share one answer to every static rule.
        self.standing = encode([self.region, self.zone, self.pool, self.taints, sorted(node.metadata.labels.items())])
        self.capacity = {**dict(node.spec.capacity.pairs), **{DEVICE + d.name: WHOLE for d in node.spec.devices}}


class NodeLedger:
    """One node: what it has, what is left of each resource and device, and how many hold the rest. Satisfies `fit.Site`."""

    __slots__ = ("facts", "free", "held", "open", "ready", "room", "whole")

    def __init__(self, node: Node) -> None:
        self.facts = Facts(node)
        self.ready, self.open = self.facts.ready, self.facts.open
        self.held = 0
        self.free: dict[str, int] = self.facts.capacity.copy()
        self._count_devices()

    @property
    def node(self) -> Node:
        return self.facts.node

    @property
    def standing(self) -> bytes:
        return self.facts.standing

    @property
    def region(self) -> str:
        return self.facts.region

    @property
    def zone(self) -> str:
        return self.facts.zone

    @property
    def pool(self) -> str:
        return self.facts.pool

    @property
    def taints(self) -> tuple[Taint, ...]:
        return self.facts.taints

    def replaced(self, node: Node) -> NodeLedger:
        """The same postings on a changed node; a resource that shrank may be left below zero until its excess is drained."""
        ledger = NodeLedger(node)
        before, after = self.facts.capacity, ledger.facts.capacity
        used = {name: before.get(name, 0) - self.free.get(name, 0) for name in (*before, *self.free)}
        names = dict.fromkeys((*after, *(name for name in used if used[name])))
        ledger.free = {name: after.get(name, 0) - used.get(name, 0) for name in names}
        ledger.held = self.held
        ledger._count_devices()
        return ledger

    def copy(self) -> NodeLedger:
        ledger = NodeLedger.__new__(NodeLedger)
        ledger.facts, ledger.ready, ledger.open = self.facts, self.ready, self.open
        ledger.free, ledger.held, ledger.whole, ledger.room = self.free.copy(), self.held, self.whole, self.room
        return ledger

    def post(self, pairs: Pairs, sign: int) -> None:
        """Take what one holder needs (`sign` 1), or give it back (-1)."""
        free, touched = self.free, False
        self.held += sign
        for name, count in pairs:
            free[name] = free.get(name, 0) - sign * count
            touched = touched or name[0] == DEVICE
        if touched:
            self._count_devices()

    def _count_devices(self) -> None:
        # Made anew, never changed in place: copies share these two until a device of theirs is touched.
        devices = self.facts.node.spec.devices
        used = {device.name: WHOLE - self.free.get(DEVICE + device.name, 0) for device in devices}
        self.whole, self.room = devices_left(devices, used)

    def over(self) -> Amount:
        """What is held beyond capacity, after a lawful reduction."""
        return Amount({name: -left for name, left in self.free.items() if left < 0})

    def labelled(self, wanted: Sequence[NodeExpression]) -> bool:
        return not wanted or match_labels(wanted, self.node.metadata.labels)

    def domain(self, key: str) -> tuple[bool, str]:
        name = domain_of(self.node, key)
        return name != "", name


def domain_of(node: Node, key: str) -> str:
    """The topology domain of a node; empty if it is in none."""
    match key:
        case "node":
            return node.metadata.name
        case "zone":
            return node.spec.zone
        case "region":
            return node.spec.region
        case "pool":
            return node.spec.pool
        case _:
            return node.metadata.labels.get(key, "")


class Short(NamedTuple):
    """What a ledger lacks to cover a charge."""

    resource: str
    need: int
    left: int


class GrantLedger:
    """One grant, or one tenant's quota: how much there is, what is granted on, and what is left; the rest is drawn.

    *Used plus granted on never rises above the amount.* It may stand above it after a lawful reduction; then nothing more is
    drawn until enough is released.
    """

    __slots__ = ("amount", "deadline_ms", "grant", "left", "lent", "name", "tenant")

    def __init__(self, name: str, amount: Mapping[str, int], grant: Grant | None, tenant: str, deadline_ms: int | None) -> None:
        self.name = name
        self.amount = amount
        self.grant = grant
        self.tenant = tenant
        self.deadline_ms = deadline_ms
        self.lent: dict[str, int] = {}
        self.left: dict[str, int] = dict(amount)

    def copy(self) -> GrantLedger:
        ledger = GrantLedger(self.name, self.amount, self.grant, self.tenant, self.deadline_ms)
        ledger.lent, ledger.left = self.lent.copy(), self.left.copy()
        return ledger

    def resize(self, amount: Mapping[str, int]) -> None:
        for name in dict.fromkeys((*self.amount, *amount)):
            self.left[name] = self.left.get(name, 0) + amount.get(name, 0) - self.amount.get(name, 0)
        self.amount = amount

    def short_of(self, pairs: Pairs) -> Short | None:
        """The first resource that `pairs` would take too much of."""
        left = self.left
        for name, count in pairs:
            if count > left.get(name, 0):
                return Short(name, count, left.get(name, 0))
        return None

    def draw(self, pairs: Pairs, sign: int) -> None:
        left = self.left
        for name, count in pairs:
            left[name] = left.get(name, 0) - sign * count

    def lend(self, pairs: Pairs, sign: int) -> None:
        for name, count in pairs:
            total = self.lent[name] = self.lent.get(name, 0) + sign * count
            if not total:
                del self.lent[name]
            self.left[name] = self.left.get(name, 0) - sign * count

    @property
    def used(self) -> dict[str, int]:
        """What is drawn, by resource."""
        drawn = {name: self.amount.get(name, 0) - left - self.lent.get(name, 0) for name, left in self.left.items()}
        return {name: count for name, count in drawn.items() if count}

    def taken(self) -> Amount:
        """Drawn and granted on, together."""
        return Amount({name: self.amount.get(name, 0) - left for name, left in self.left.items()})

    def over(self) -> Amount:
        return Amount({name: -left for name, left in self.left.items() if left < 0})

    def alive(self, now_ms: int) -> bool:
        return self.deadline_ms is None or now_ms < self.deadline_ms

    @property
    def live(self) -> bool:
        return self.grant is None or self.grant.status.phase is GrantPhase.LIVE

    @property
    def parent(self) -> str:
        return "" if self.grant is None or self.grant.spec.issuer else self.grant.spec.parent

    @property
    def lent_away(self) -> bool:
        """Is it another scope that draws on this?"""
        return self.grant is not None and not self.grant.spec.issuer and self.grant.spec.holder.startswith(SCOPE)


SCOPE = "scope/"


def outstanding(grant: Grant) -> tuple[tuple[str, int], ...]:
    """What of an issued grant still burdens its parent: all of it, less what the holder reported back."""
    return (grant.spec.amount - grant.status.returned).pairs
