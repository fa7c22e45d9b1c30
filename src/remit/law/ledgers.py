"""Node ledger and grant ledger: capacity, used, granted on, free.

Ledgers are sums of postings. Which postings a row makes is decided in charges.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from remit.law.fit import ANY_MODEL, DeviceModel, is_open, is_ready
from remit.law.selectors import domain_of, match_labels
from remit.model.kinds import Node, NodeExpression, Taint, Tenant
from remit.model.objects import encode
from remit.model.records import Grant, GrantPhase
from remit.model.resources import WHOLE_DEVICE, Amount

Pairs = Iterable[tuple[str, int]]

DEVICE_PREFIX = "@"
"""In a node's ledger a device is one more resource, such as `@gpu-0`, with 1000 thousandths. So a whole device cannot be
allocated twice, for the same reason that memory cannot.
"""


class NodeFacts:
    """Attributes of a node apart from its free capacity; shared by all copies of its ledger."""

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
        self.ready = is_ready(node)
        self.open = is_open(node)
        # Bytes, because they cache their hash. Nodes with equal attributes share the results of the static rules.
        self.node_attributes = encode([self.region, self.zone, self.pool, self.taints, sorted(node.metadata.labels.items())])
        self.capacity = {**dict(spec.capacity.pairs), **{DEVICE_PREFIX + d.name: WHOLE_DEVICE for d in spec.devices}}
        self.devices = {device.name: device for device in spec.devices}
        self.models: dict[DeviceModel, tuple[str, ...]] = {}
        for device in spec.devices:
            for model in dict.fromkeys(((device.kind, device.model), (device.kind, ANY_MODEL))):
                self.models[model] = (*self.models.get(model, ()), DEVICE_PREFIX + device.name)


class FreeWholeDevices:
    """Number of unused devices by model."""

    __slots__ = ("ledger",)

    def __init__(self, ledger: NodeLedger) -> None:
        self.ledger = ledger

    def get(self, model: DeviceModel, default: int) -> int:
        free = self.ledger.free
        return sum(free[device] == WHOLE_DEVICE for device in self.ledger.facts.models.get(model, ()))


class LargestFreeShare(FreeWholeDevices):
    """Largest unused share on one device, by model."""

    __slots__ = ()

    def get(self, model: DeviceModel, default: int) -> int:
        free = self.ledger.free
        return max((free[device] for device in self.ledger.facts.models.get(model, ())), default=default)


class NodeLedger:
    """Ledger of one node: its attributes, what is free of each resource and device, and the number of replicas that hold
    capacity. Implements `fit.NodeView`.
    """

    __slots__ = ("facts", "free", "holders", "node_attributes", "open", "ready")

    def __init__(self, node: Node) -> None:
        self.facts = facts = NodeFacts(node)
        # Copies of the attributes that every fit check reads.
        self.ready, self.open, self.node_attributes = facts.ready, facts.open, facts.node_attributes
        self.holders = 0
        self.free: dict[str, int] = facts.capacity.copy()

    @property
    def node(self) -> Node:
        return self.facts.node

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
        """Returns a ledger with the same postings on a changed node. A resource that shrank may be negative until its excess is
        drained.
        """
        ledger = NodeLedger(node)
        before, after = self.facts.capacity, ledger.facts.capacity
        used = {name: before.get(name, 0) - self.free.get(name, 0) for name in (*before, *self.free)}
        names = dict.fromkeys((*after, *(name for name in used if used[name])))
        ledger.free = {name: after.get(name, 0) - used.get(name, 0) for name in names}
        ledger.holders = self.holders
        return ledger

    def copy(self) -> NodeLedger:
        ledger = NodeLedger.__new__(NodeLedger)
        ledger.facts, ledger.ready, ledger.open, ledger.node_attributes = (
            self.facts,
            self.ready,
            self.open,
            self.node_attributes,
        )
        ledger.free, ledger.holders = self.free.copy(), self.holders
        return ledger

    def post(self, pairs: Pairs, sign: int) -> None:
        """Posts the charge of one holder (`sign` 1), or removes it (-1)."""
        self.holders += sign
        free = self.free
        for name, count in pairs:
            free[name] = free.get(name, 0) - sign * count

    def adjust(self, pairs: Pairs) -> None:
        """Adds to the charge of a replica that is already counted as a holder."""
        self.post(pairs, 1)
        self.holders -= 1

    def over(self) -> Amount:
        """Returns what is held beyond capacity, after the capacity was reduced."""
        return Amount({name: -free for name, free in self.free.items() if free < 0})

    def labelled(self, expressions: Sequence[NodeExpression]) -> bool:
        return not expressions or match_labels(expressions, self.facts.node.metadata.labels)

    def domain(self, key: str) -> tuple[bool, str]:
        name = domain_of(self.facts.node, key)
        return name != "", name


class Shortage(NamedTuple):
    """The first resource of which a ledger has too little for a charge."""

    resource: str
    need: int
    available: int


class GrantLedger:
    """Ledger of one grant or of one tenant's quota: the amount, what is granted on, and what is free; the rest is used.

    *Used plus granted on never exceeds the amount*, except after the amount was reduced. Then nothing more can be drawn
    until enough is released.
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
        """Returns the first resource of which `pairs` would take too much; None if the ledger covers all of them."""
        free = self.free
        for name, count in pairs:
            if count > free.get(name, 0):
                return Shortage(name, count, free.get(name, 0))
        return None

    def draw(self, pairs: Pairs, sign: int) -> None:
        free = self.free
        for name, count in pairs:
            free[name] = free.get(name, 0) - sign * count

    def grant_on(self, pairs: Pairs, sign: int) -> None:
        for name, count in pairs:
            total = self.granted_on[name] = self.granted_on.get(name, 0) + sign * count
            if not total:
                del self.granted_on[name]
            self.free[name] = self.free.get(name, 0) - sign * count

    @property
    def used(self) -> dict[str, int]:
        """The drawn amount, by resource."""
        drawn = {name: self.amount.get(name, 0) - free - self.granted_on.get(name, 0) for name, free in self.free.items()}
        return {name: count for name, count in drawn.items() if count}

    def committed(self) -> Amount:
        """Returns what is drawn plus what is granted on."""
        return Amount({name: self.amount.get(name, 0) - free for name, free in self.free.items()})

    def over(self) -> Amount:
        return Amount({name: -free for name, free in self.free.items() if free < 0})

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
        """Whether the holder is another scope."""
        return self.grant is not None and not self.grant.spec.issuer and self.grant.spec.holder.startswith(SCOPE_PREFIX)


SCOPE_PREFIX = "scope/"


def outstanding(grant: Grant) -> tuple[tuple[str, int], ...]:
    """Returns what an issued grant still takes from its parent: its amount, less what the holder has returned."""
    return (grant.spec.amount - grant.status.returned).pairs


def ledgers_of(obj: Tenant | Grant) -> tuple[tuple[str, Amount, str], ...]:
    """Returns the ledgers that a row opens: the name, the amount and the tenant of each."""
    name = obj.metadata.name
    if isinstance(obj, Tenant):
        return (f"tenant/{name}", obj.spec.quota, name), (f"tenant/{name}/emergency", obj.spec.emergency_quota, name)
    amount = obj.spec.amount if obj.spec.issuer else obj.spec.amount - obj.status.returned
    shares = ((f"{name}/{tenant}", share, tenant) for tenant, share in obj.spec.shares.items())
    return (name, amount, obj.spec.tenant), *shares


def parent_charges(grant: Grant) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    """Returns what an issued grant takes from other ledgers: from its parent and, for the shares of a budget, from the tenants'
    emergency quota. A grant that was issued by another scope takes nothing here.
    """
    if grant.spec.issuer:
        return ()
    amount = outstanding(grant)
    parent = ((grant.spec.parent, amount),) if grant.spec.parent else ()
    if grant.status.phase is GrantPhase.CLOSED and not amount:
        return parent
    return *parent, *((f"tenant/{tenant}/emergency", share.pairs) for tenant, share in grant.spec.shares.items())


def deadline_ms(grant: Grant, boot: str, now_ms: int, *, new_term: bool) -> int | None:
    """Returns when a grant ends on this authority's clock; None if it has no deadline.

    With `new_term`, after a change of leader, a grant that was issued here gets a full new term, like every lease: it could
    not be renewed while there was no leader. A grant from another scope keeps its deadline within the same boot, and has
    otherwise expired until it is renewed.
    """
    deadline = grant.status.deadline
    if deadline is None:
        return None
    if not grant.spec.issuer and new_term:
        return now_ms + grant.spec.ttl
    return deadline.at_ms if deadline.boot == boot else 0
