"""Node ledger and grant ledger: capacity, used, granted on, free.

The books of one each: sums of postings. Who posts what is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from remit.law.fit import ANY_MODEL, DeviceModel
from remit.law.selectors import domain_of, match_labels
from remit.model.kinds import Node, NodeExpression, NodeHealth, Taint, Tenant
from remit.model.objects import encode
from remit.model.records import Grant, GrantPhase
from remit.model.resources import WHOLE_DEVICE, Amount

Pairs = Iterable[tuple[str, int]]

DEVICE_PREFIX = "@"
"""A device stands in its node's ledger as one more resource, `@gpu-0`, of which there are 1000 thousandths. So a whole device
has one owner for the same reason that memory is not sold twice."""


class NodeFacts:
    """What a node is, apart from what is left of it; shared by every copy of its ledger."""

    __slots__ = (
        "capacity",
        "devices",
        "models",
        "node",
        "node_attributes",
        "open",
        "pool",
        "ready",
        "region",
        "taints",
        "zone",
    )  # fmt: skip

    def __init__(self, node: Node) -> None:
        spec = node.spec
        self.node = node
        self.region, self.zone, self.pool = spec.region, spec.zone, spec.pool
        self.taints: tuple[Taint, ...] = spec.taints
        self.ready = node.status.health is NodeHealth.READY
        self.open = not (spec.unschedulable or spec.draining or node.metadata.deleting)
        # Bytes, since they keep their hash: nodes of one make share one answer to every static rule.
        self.node_attributes = encode([self.region, self.zone, self.pool, self.taints, sorted(node.metadata.labels.items())])
        self.capacity = {**dict(spec.capacity.pairs), **{DEVICE_PREFIX + d.name: WHOLE_DEVICE for d in spec.devices}}
        self.devices = {device.name: device for device in spec.devices}
        self.models: dict[DeviceModel, tuple[str, ...]] = {}
        for device in spec.devices:
            for model in dict.fromkeys(((device.kind, device.model), (device.kind, ANY_MODEL))):
                self.models[model] = (*self.models.get(model, ()), DEVICE_PREFIX + device.name)


class FreeWholeDevices:
    """How many devices of a model nobody uses."""

    __slots__ = ("ledger",)

    def __init__(self, ledger: NodeLedger) -> None:
        self.ledger = ledger

    def get(self, model: DeviceModel, default: int) -> int:
        free = self.ledger.free
        return sum(free[device] == WHOLE_DEVICE for device in self.ledger.facts.models.get(model, ()))


class LargestFreeShare(FreeWholeDevices):
    """The largest unused share on one device of a model."""

    __slots__ = ()

    def get(self, model: DeviceModel, default: int) -> int:
        free = self.ledger.free
        return max((free[device] for device in self.ledger.facts.models.get(model, ())), default=default)


class NodeLedger:
    """One node: what it is, what is left of each resource and device, and how many hold the rest. Satisfies `fit.Site`."""

    __slots__ = ("facts", "free", "holders")

    def __init__(self, node: Node) -> None:
        self.facts = NodeFacts(node)
        self.holders = 0
        self.free: dict[str, int] = self.facts.capacity.copy()

    @property
    def node(self) -> Node:
        return self.facts.node

    @property
    def ready(self) -> bool:
        return self.facts.ready

    @property
    def open(self) -> bool:
        return self.facts.open

    @property
    def node_attributes(self) -> bytes:
        return self.facts.node_attributes

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

    @property
    def whole_devices(self) -> FreeWholeDevices:
        return FreeWholeDevices(self)

    @property
    def largest_shares(self) -> LargestFreeShare:
        return LargestFreeShare(self)

    def with_node(self, node: Node) -> NodeLedger:
        """The same postings on a changed node; a resource that shrank may be left below zero until its excess is drained."""
        ledger = NodeLedger(node)
        before, after = self.facts.capacity, ledger.facts.capacity
        used = {name: before.get(name, 0) - self.free.get(name, 0) for name in (*before, *self.free)}
        names = dict.fromkeys((*after, *(name for name in used if used[name])))
        ledger.free = {name: after.get(name, 0) - used.get(name, 0) for name in names}
        ledger.holders = self.holders
        return ledger

    def copy(self) -> NodeLedger:
        ledger = NodeLedger.__new__(NodeLedger)
        ledger.facts, ledger.free, ledger.holders = self.facts, self.free.copy(), self.holders
        return ledger

    def post(self, pairs: Pairs, sign: int) -> None:
        """Take what one holder needs (`sign` 1), or give it back (-1)."""
        self.holders += sign
        self.adjust(pairs, sign)

    def adjust(self, pairs: Pairs, sign: int = 1) -> None:
        """The same, for one who holds something already."""
        free = self.free
        for name, count in pairs:
            free[name] = free.get(name, 0) - sign * count

    def over(self) -> Amount:
        """What is held beyond capacity, after a lawful reduction."""
        return Amount({name: -left for name, left in self.free.items() if left < 0})

    def labelled(self, wanted: Sequence[NodeExpression]) -> bool:
        return not wanted or match_labels(wanted, self.facts.node.metadata.labels)

    def domain(self, key: str) -> tuple[bool, str]:
        name = domain_of(self.facts.node, key)
        return name != "", name


class Shortage(NamedTuple):
    """What a ledger lacks to cover a charge."""

    resource: str
    need: int
    available: int


class GrantLedger:
    """One grant, or one tenant's quota: how much there is, what is granted on, and what is left; the rest is drawn.

    *Used plus granted on never rises above the amount.* It may stand above it after a lawful reduction; then nothing more is
    drawn until enough is released.
    """

    __slots__ = ("amount", "deadline_ms", "free", "grant", "granted_on", "name", "tenant")

    def __init__(self, name: str, amount: Mapping[str, int], grant: Grant | None, tenant: str, deadline_ms: int | None) -> None:
        self.name = name
        self.amount = amount
        self.grant = grant
        self.tenant = tenant
        self.deadline_ms = deadline_ms
        self.granted_on: dict[str, int] = {}
        self.free: dict[str, int] = dict(amount)

    def copy(self) -> GrantLedger:
        ledger = GrantLedger(self.name, self.amount, self.grant, self.tenant, self.deadline_ms)
        ledger.granted_on, ledger.free = self.granted_on.copy(), self.free.copy()
        return ledger

    def resize(self, amount: Mapping[str, int]) -> None:
        for name in dict.fromkeys((*self.amount, *amount)):
            self.free[name] = self.free.get(name, 0) + amount.get(name, 0) - self.amount.get(name, 0)
        self.amount = amount

    def shortage_for(self, pairs: Pairs) -> Shortage | None:
        """The first resource that `pairs` would take too much of."""
        left = self.free
        for name, count in pairs:
            if count > left.get(name, 0):
                return Shortage(name, count, left.get(name, 0))
        return None

    def draw(self, pairs: Pairs, sign: int) -> None:
        left = self.free
        for name, count in pairs:
            left[name] = left.get(name, 0) - sign * count

    def grant_on(self, pairs: Pairs, sign: int) -> None:
        for name, count in pairs:
            total = self.granted_on[name] = self.granted_on.get(name, 0) + sign * count
            if not total:
                del self.granted_on[name]
            self.free[name] = self.free.get(name, 0) - sign * count

    @property
    def used(self) -> dict[str, int]:
        """What is drawn, by resource."""
        drawn = {name: self.amount.get(name, 0) - left - self.granted_on.get(name, 0) for name, left in self.free.items()}
        return {name: count for name, count in drawn.items() if count}

    def committed(self) -> Amount:
        """Drawn and granted on, together."""
        return Amount({name: self.amount.get(name, 0) - left for name, left in self.free.items()})

    def over(self) -> Amount:
        return Amount({name: -left for name, left in self.free.items() if left < 0})

    def is_unexpired(self, now_ms: int) -> bool:
        return self.deadline_ms is None or now_ms < self.deadline_ms

    @property
    def is_live(self) -> bool:
        return self.grant is None or self.grant.status.phase is GrantPhase.LIVE

    @property
    def parent(self) -> str:
        return "" if self.grant is None or self.grant.spec.issuer else self.grant.spec.parent

    @property
    def granted_to_other_scope(self) -> bool:
        """Is it another scope that draws on this?"""
        return self.grant is not None and not self.grant.spec.issuer and self.grant.spec.holder.startswith(SCOPE_PREFIX)


SCOPE_PREFIX = "scope/"


def outstanding(grant: Grant) -> tuple[tuple[str, int], ...]:
    """What of an issued grant still burdens its parent: all of it, less what the holder reported back."""
    return (grant.spec.amount - grant.status.returned).pairs


def ledgers_of(thing: Tenant | Grant) -> tuple[tuple[str, Amount, str], ...]:
    """Which ledgers a row opens: the name of each, how much there is of it, and for which tenant."""
    name = thing.metadata.name
    if isinstance(thing, Tenant):
        return (f"tenant/{name}", thing.spec.quota, name), (f"tenant/{name}/emergency", thing.spec.emergency_quota, name)
    amount = thing.spec.amount if thing.spec.issuer else thing.spec.amount - thing.status.returned
    shares = ((f"{name}/{tenant}", share, tenant) for tenant, share in thing.spec.shares.items())
    return (name, amount, thing.spec.tenant), *shares


def parent_charges(grant: Grant) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """What an issued grant takes of other ledgers: of what it was carved out of, and for a budget's shares of the tenants'
    emergency quota. A copy that is held from elsewhere takes nothing here.
    """
    if grant.spec.issuer:
        return ()
    due = outstanding(grant)
    parent = ((grant.spec.parent, due),) if grant.spec.parent else ()
    if grant.status.phase is GrantPhase.CLOSED and not due:
        return parent
    return *parent, *((f"tenant/{tenant}/emergency", share.pairs) for tenant, share in grant.spec.shares.items())


def deadline_ms(grant: Grant, boot: str, now_ms: int, *, new_term: bool) -> int | None:
    """When a grant ends on this authority's clock. If it takes over `anew`, what was issued here gets a full new term, as every
    lease does: nobody could renew it while nobody led. What is held from elsewhere keeps its instant if this is the same boot,
    and has otherwise lapsed until it is renewed.
    """
    deadline = grant.status.deadline
    if deadline is None:
        return None
    if not grant.spec.issuer and new_term:
        return now_ms + grant.spec.ttl
    return deadline.at_ms if deadline.boot == boot else 0
