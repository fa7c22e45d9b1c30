"""Fit rules (cordon and drain, taints, capacity, devices, spread): whether a replica fits a node or a column of nodes.

Each rule is one expression over `Requirements` (what the replica needs), a `NodeView` (attributes and free capacity of the
node) and `PeerCounts` (replicas per topology domain). The operands may be numbers or NumPy columns:
`node.free["cpu"] >= 500` is a bool for one node and a mask for all of them, and `requirements.regions[node.region]` looks up a
name in a dictionary or a column of ids in an array. So the scheduler, which evaluates columns, and the authority, which
evaluates single nodes, run the same code and cannot disagree about what fits. Only label matching has two forms (selectors.py).

Grants, quota, leases and phases are not checked here; the authority checks them against its books.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from remit.model.claims import Code
from remit.model.kinds import Device, DeviceRequest, Node, NodeExpression, NodeHealth
from remit.model.metadata import Deadline
from remit.model.resources import WHOLE_DEVICE, Amount

STATIC_RESULTS_MAX: Final = 100_000

BoolOrMask = Any
"""A bool, or a column of bools."""

ANY_MODEL: Final = ""
"""Used as a device's model: any model."""


class PeerIndex(NamedTuple):
    """Identifies a count of replicas by topology domain: replicas of a tenant that match the selector or, with `owners`,
    replicas whose own anti-affinity has this selector.
    """

    tenant: str
    selector: tuple[tuple[str, str], ...]
    topology_key: str
    owners: bool = False


class PeerTerm(NamedTuple):
    """One constraint on other replicas. `own` is 1 if the replica itself matches the selector."""

    peers: PeerIndex
    own: int
    max_skew: int = 0


class DeviceRequirement(NamedTuple):
    """A number of whole devices, or one share in thousandths, of a kind and of any of these models (empty: of any model).

    Among the whole devices, entries with amount 0 are unions of overlapping model sets: see `devices`.
    """

    kind: str
    models: tuple[str, ...]
    amount: int


DeviceModel = tuple[str, str]
"""A device's kind and model, or its kind and ANY_MODEL."""


def free_devices(devices: Iterable[Device], used: Mapping[str, int]) -> tuple[dict[DeviceModel, int], dict[DeviceModel, int]]:
    """Returns the number of unused devices, and the largest free share on one device: each by model, and by kind for any
    model.
    """
    unused: dict[DeviceModel, int] = {}
    largest: dict[DeviceModel, int] = {}
    for device in devices:
        free = max(WHOLE_DEVICE - used.get(device.name, 0), 0)
        # A device without a model must not count twice under ANY_MODEL.
        for model in dict.fromkeys(((device.kind, device.model), (device.kind, ANY_MODEL))):
            unused[model] = unused.get(model, 0) + (free == WHOLE_DEVICE)
            largest[model] = max(largest.get(model, 0), free)
    return unused, largest


class Requirements(NamedTuple):
    """The requirements of a replica on a node. The lookup tables are keyed by name; observation/node_columns.py makes equal
    ones that are keyed by id.
    """

    tenant: str
    generation: tuple[str, str, int]
    labels: Mapping[str, str]
    placeable: bool
    """False if the workload is deleted or being deleted: no more replicas of it are placed."""
    charge: Amount
    resources: tuple[tuple[str, int], ...]
    devices: tuple[DeviceRequest, ...]
    whole_devices: tuple[DeviceRequirement, ...]
    device_shares: tuple[DeviceRequirement, ...]
    node_expressions: tuple[NodeExpression, ...]
    regions: Any
    zones: Any
    pools: Any
    allowed_regions: Any
    allowed_zones: Any
    allowed_pools: Any
    tolerates: Any
    spread: tuple[PeerTerm, ...]
    affinity: tuple[PeerTerm, ...]
    anti_affinity: tuple[PeerTerm, ...]
    preferred_spread: tuple[PeerTerm, ...]
    """Spread constraints that only influence the score."""
    untolerated_soft: Any
    """Lookup: whether a set of taints has a PreferNoSchedule taint that is not tolerated."""
    gang: int
    fenced: bool
    """Whether two attempts must never run at once."""
    policy: int
    policy_deadline: Deadline | None
    quota: tuple[str, ...]
    """The ledger of the tenant's quota, if this scope is the tenant's home."""
    static_results: dict[Any, Code | None]
    """Cached results of the static rules, by node attributes. Most binds are for requirements and nodes that were checked
    before.
    """
    dynamic_checks: tuple[tuple[Callable[..., BoolOrMask], Code], ...]
    """The rules about free capacity and peers that can fail for these requirements."""
    resources_only: bool
    """Whether only node attributes and resources matter. Then neither peers nor the clock need to be read."""
    pins: tuple[Any, ...] = ()
    """Places to which overrides pin the workload. Set and used by the scheduler only."""
    hinted_workload: str = ""
    """The workload, as `tenant/name`, if a hint suggests where it would start sooner. Set and used by the scheduler only."""
    static_key: Hashable = ()
    """Key of all that is required of a node's attributes: requirements with equal keys get equal results from all static rules,
    under one policy. Empty if the requirements were not interned (shared_requirements.py).
    """


class ByModel(Protocol):
    """An amount by kind and model of device: a number for one node, or a NumPy column for all nodes."""

    def get(self, model: DeviceModel, default: int, /) -> Any: ...


class NodeView(Protocol):
    """Attributes and free capacity of a node. Every attribute may be a single value or a column."""

    @property
    def free(self) -> Mapping[str, Any]: ...
    @property
    def whole_devices(self) -> ByModel: ...
    @property
    def largest_shares(self) -> ByModel: ...
    @property
    def ready(self) -> Any: ...
    @property
    def open(self) -> Any: ...
    @property
    def region(self) -> Any: ...
    @property
    def zone(self) -> Any: ...
    @property
    def pool(self) -> Any: ...
    @property
    def taints(self) -> Any: ...

    @property
    def node_attributes(self) -> Hashable:
        """Key of all attributes of a node apart from its free capacity. It changes whenever one of them changes."""
        ...

    def labelled(self, expressions: Sequence[NodeExpression]) -> BoolOrMask: ...

    def domain(self, key: str) -> tuple[BoolOrMask, Any]:
        """Returns whether the node is in a domain of this topology key, and in which. An empty label value is no domain."""
        ...


class PeerCounts(Protocol):
    """Numbers of replicas by topology domain. Replicas count in all phases that hold capacity."""

    def counts(self, index: PeerIndex) -> Any: ...

    def min_count(self, requirements: Requirements, index: PeerIndex) -> int:
        """The smallest count over all domains in which the replica could be placed."""
        ...

    def total(self, index: PeerIndex) -> int: ...

    def anti_affinity_owners(self, requirements: Requirements) -> Sequence[PeerIndex]:
        """Returns the indexes of replicas whose anti-affinity matches this replica."""
        ...


def is_ready(node: Node) -> bool:
    """Whether the node's agent reports regularly. A node in any other health takes no new work."""
    return node.status.health is NodeHealth.READY


def is_open(node: Node) -> bool:
    """Whether the node is neither cordoned, nor draining, nor being deleted."""
    return not (node.spec.unschedulable or node.spec.draining or node.metadata.deleting)


def takes_new_work(node: Node) -> bool:
    return is_ready(node) and is_open(node)


def keeps_work(node: Node) -> bool:
    """Whether replicas on the node may stay there. Those on a cordoned node stay; no new ones are placed beside them."""
    return is_ready(node) and not node.spec.draining


def ready(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    return node.ready


def accepting(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    return node.open


def place(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    return requirements.regions[node.region] & requirements.zones[node.zone] & requirements.pools[node.pool]


def policy(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    return (
        requirements.allowed_regions[node.region]
        & requirements.allowed_zones[node.zone]
        & requirements.allowed_pools[node.pool]
    )


def taints(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    return requirements.tolerates[node.taints]


def labels(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    return node.labelled(requirements.node_expressions)


def resources(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for name, count in requirements.resources:
        fits = fits & (node.free.get(name, 0) >= count)
    return fits


def devices(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    """Whether enough whole devices are free (Hall's condition): for each requested set of models, all requests inside that set
    together must find enough devices in it.

    The condition is exact because `compile_requirements` adds the unions of overlapping sets. Without them, one device of
    model B would satisfy both {A, B} and {B, C}.
    """
    fits: BoolOrMask = True
    for requested in requirements.whole_devices:
        inside = sum(
            other.amount
            for other in requirements.whole_devices
            if other.kind == requested.kind and _is_subset(other.models, requested.models)
        )
        fits = fits & (
            sum(node.whole_devices.get((requested.kind, model), 0) for model in requested.models or (ANY_MODEL,)) >= inside
        )
    return fits


def shares(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for share in requirements.device_shares:
        fits_one: BoolOrMask = False
        for model in share.models or (ANY_MODEL,):
            fits_one = fits_one | (node.largest_shares.get((share.kind, model), 0) >= share.amount)
        fits = fits & fits_one
    return fits


def spread(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for term in requirements.spread:
        in_domain, domain = node.domain(term.peers.topology_key)
        fits = (
            fits
            & in_domain
            & (peers.counts(term.peers)[domain] + term.own - peers.min_count(requirements, term.peers) <= term.max_skew)
        )
    return fits


def affinity(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for term in requirements.affinity:
        in_domain, domain = node.domain(term.peers.topology_key)
        # The first replica of a group with affinity to itself may be placed anywhere; otherwise no group could start.
        first = bool(term.own) and peers.total(term.peers) == 0
        fits = fits & in_domain & ((peers.counts(term.peers)[domain] > 0) | first)
    return fits


def anti_affinity(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    return clear_of([term.peers for term in requirements.anti_affinity], node, peers)


def symmetric_anti_affinity(requirements: Requirements, node: NodeView, peers: PeerCounts) -> BoolOrMask:
    """Anti-affinity is symmetric: a replica must not be placed beside a replica whose anti-affinity matches it."""
    owners = peers.anti_affinity_owners(requirements)
    return clear_of(owners, node, peers) if owners else True


def clear_of(indexes: Sequence[PeerIndex], node: NodeView, peers: PeerCounts) -> BoolOrMask:
    """Whether no replica that is counted in one of these indexes is in the same domain."""
    fits: BoolOrMask = True
    for index in indexes:
        in_domain, domain = node.domain(index.topology_key)
        fits = fits & ((in_domain == False) | (peers.counts(index)[domain] == 0))  # noqa: E712 (`not` does not work on a column)
    return fits


class MemoizedPredicate(dict[Any, bool]):
    """Results of a predicate by value, computed on first use."""

    def __init__(self, predicate: Callable[[Any], bool]) -> None:
        self.predicate = predicate

    def __missing__(self, value: Any) -> bool:
        answer = self[value] = self.predicate(value)
        return answer


class _NoPeers:
    """Peer counts of a cluster without replicas."""

    def counts(self, index: PeerIndex) -> Any:
        return MemoizedPredicate(lambda domain: False)

    def min_count(self, requirements: Requirements, index: PeerIndex) -> int:
        return 0

    def total(self, index: PeerIndex) -> int:
        return 0

    def anti_affinity_owners(self, requirements: Requirements) -> Sequence[PeerIndex]:
        return ()


NO_PEERS: Final[PeerCounts] = _NoPeers()


class Rule(NamedTuple):
    code: Code
    check: Callable[[Requirements, NodeView, PeerCounts], BoolOrMask]
    static: bool
    """Whether the rule depends only on node attributes and not on free capacity or peers."""


RULES: Final[tuple[Rule, ...]] = (
    Rule(Code.NODE_UNREADY, ready, False),
    Rule(Code.DRAINING, accepting, False),
    Rule(Code.PLACE, place, True),
    Rule(Code.POLICY, policy, True),
    Rule(Code.TAINT, taints, True),
    Rule(Code.SELECTOR, labels, True),
    Rule(Code.NO_ROOM, resources, False),
    Rule(Code.DEVICE_TAKEN, devices, False),
    Rule(Code.DEVICE_TAKEN, shares, False),
    Rule(Code.SPREAD, spread, False),
    Rule(Code.AFFINITY, affinity, False),
    Rule(Code.ANTI_AFFINITY, anti_affinity, False),
    Rule(Code.ANTI_AFFINITY, symmetric_anti_affinity, False),
)
STATIC_RULES: Final = tuple(rule for rule in RULES if rule.static)
_CHECKS: Final = tuple((rule.check, rule.code) for rule in RULES)


def static_misfit(requirements: Requirements, node: NodeView) -> Code | None:
    """Returns the code of the first static rule that the node violates. Valid until the node, the requirements or the policy
    changes.
    """
    return next((rule.code for rule in STATIC_RULES if not rule.check(requirements, node, NO_PEERS)), None)


def cached_static_misfit(requirements: Requirements, node: NodeView) -> Code | None:
    """Like `static_misfit`, computed once for all nodes with equal attributes."""
    results, attributes = requirements.static_results, node.node_attributes
    try:
        return results[attributes]
    except KeyError:
        if len(results) >= STATIC_RESULTS_MAX:
            results.clear()
        code = results[attributes] = static_misfit(requirements, node)
        return code


def misfit(requirements: Requirements, node: NodeView, peers: PeerCounts) -> Code | None:
    """Returns the code of the first rule that the node violates; None if the replica fits."""
    if not node.ready:
        return Code.NODE_UNREADY
    if not node.open:
        return Code.DRAINING
    code = cached_static_misfit(requirements, node)
    if code is not None:
        return code
    for check, code in requirements.dynamic_checks:
        if not check(requirements, node, peers):
            return code
    # Always checked: it depends on the anti-affinity of other workloads, which can change without these requirements.
    owners = peers.anti_affinity_owners(requirements)
    return Code.ANTI_AFFINITY if owners and not clear_of(owners, node, peers) else None


def misfits(requirements: Requirements, node: NodeView, peers: PeerCounts) -> tuple[Code, ...]:
    """Returns the codes of all rules that the node violates."""
    return tuple(dict.fromkeys(code for check, code in _CHECKS if not check(requirements, node, peers)))


def mask(requirements: Requirements, nodes: NodeView, peers: PeerCounts, rules: Sequence[Rule] = RULES) -> BoolOrMask:
    """Evaluates the rules over columns: True where the replica fits."""
    fits: BoolOrMask = True
    for rule in rules:
        fits = fits & rule.check(requirements, nodes, peers)
    return fits


def owned_anti_affinity(requirements: Requirements) -> tuple[PeerIndex, ...]:
    """Returns the indexes in which a replica counts because of its own anti-affinity, which later placements must respect."""
    return (
        tuple([PeerIndex(index.tenant, index.selector, index.topology_key, True) for index, _, _ in requirements.anti_affinity])
        if requirements.anti_affinity
        else ()
    )


def _is_subset(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return not outer or (bool(inner) and set(inner) <= set(outer))
