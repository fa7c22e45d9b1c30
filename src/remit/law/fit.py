"""Fit rules: does a replica fit a node, for one node or a whole column of nodes.

Asked by proposers over columns and by the authority node by node.

Each rule is one expression over an `Requirements` (what the replica needs), a `NodeView` (what the node has left) and its `PeerCounts` (who is
where). The operands may be numbers or NumPy columns: `site.free["cpu"] >= 500` is a bool for one node and a mask for all of
them, and `ask.regions[site.region]` looks a name up in a dictionary or a column of ids in an array. So a proposer and the
authority cannot disagree about what fits: they run the same line. Only label matching has two forms (labels.py).

Nothing is decided here about grants, quota, leases or phases: those are the authority's books.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from remit.model.claims import Code
from remit.model.kinds import Device, DeviceRequest, NodeExpression
from remit.model.metadata import Deadline
from remit.model.resources import WHOLE_DEVICE, Amount

STATIC_RESULTS_MAX: Final = 100_000

BoolOrMask = Any
"""A bool, or a column of them."""

ANY_MODEL: Final = ""
"""In place of a device model: whichever."""


class PeerIndex(NamedTuple):
    """Replicas of a tenant that a selector picks, counted by topology domain; or those that *carry* the term, to shun it."""

    tenant: str
    selector: tuple[tuple[str, str], ...]
    topology_key: str
    owners: bool = False


class PeerTerm(NamedTuple):
    """One constraint towards other replicas; `own` is 1 if the replica is itself picked by the selector."""

    peers: PeerIndex
    own: int
    max_skew: int = 0


class DeviceRequirement(NamedTuple):
    """So many whole devices, or one share in thousandths, of a kind and any of these models (none named: of any).

    Among the whole ones of an ask, those with amount 0 stand for the unions of model sets that overlap: see `devices`.
    """

    kind: str
    models: tuple[str, ...]
    amount: int


DeviceModel = tuple[str, str]
"""A device's kind and model; or its kind and ANY."""


def free_devices(devices: Iterable[Device], used: Mapping[str, int]) -> tuple[dict[DeviceModel, int], dict[DeviceModel, int]]:
    """How many devices nobody uses, and the largest unused share on one device; each by model, and for the kind as a whole."""
    whole: dict[DeviceModel, int] = {}
    room: dict[DeviceModel, int] = {}
    for device in devices:
        left = max(WHOLE_DEVICE - used.get(device.name, 0), 0)
        # A device without a model must not count twice under ANY.
        for at in dict.fromkeys(((device.kind, device.model), (device.kind, ANY_MODEL))):
            whole[at] = whole.get(at, 0) + (left == WHOLE_DEVICE)
            room[at] = max(room.get(at, 0), left)
    return whole, room


class Requirements(NamedTuple):
    """What a replica needs. The look-up tables are keyed by name here; columns.py makes the same ones keyed by id."""

    tenant: str
    generation: tuple[str, str, int]
    labels: Mapping[str, str]
    open: bool
    """False if the workload is gone or going, so that nothing more of it is placed."""
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
    """Spreading that ranks, and forbids nothing."""
    untolerated_soft: Any
    """Taints that only rank, and are not tolerated."""
    gang: int
    fenced: bool
    """Must it never run twice at once?"""
    policy: int
    policy_deadline: Deadline | None
    quota: tuple[str, ...]
    """The ledger of the tenant's own quota, where this scope is its home."""
    static_results: dict[Any, Code | None]
    """Answers of the static rules, by what a node is: most binds ask again what was asked for their like."""
    dynamic_checks: tuple[tuple[Callable[..., BoolOrMask], Code], ...]
    """The rules about what is left that can fail for this ask at all."""
    resources_only: bool
    """Is it asked of a node only what it is, and that it has the resources? Then nobody else needs to be looked at, nor the
    clock."""
    pins: tuple[Any, ...] = ()
    """Places that a person's override keeps it to; a proposer's affair, not the law's."""
    hinted_workload: str = ""
    """The workload, as `tenant/name`, if somebody has hinted where it would start sooner; a proposer's affair too."""
    static_key: Hashable = ()
    """Stands for all that is asked of a node's standing: where it is equal, so is the answer of every static rule, under one
    policy. Empty if nobody has compared it with others (likeness.py)."""


class ByModel(Protocol):
    """A number, or a column, by kind and model of device."""

    def get(self, model: DeviceModel, default: int, /) -> Any: ...


class NodeView(Protocol):
    """What a node is and has left; every attribute may be one value or a column."""

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
        """Stands for all that a node is, apart from what is left of it: another one for every change of that."""
        ...

    def labelled(self, wanted: Sequence[NodeExpression]) -> BoolOrMask: ...

    def domain(self, key: str) -> tuple[BoolOrMask, Any]:
        """Is the node in a domain of this topology key, and in which? A label with an empty value names no domain."""
        ...


class PeerCounts(Protocol):
    """Who is where, counted by topology domain; phases that hold room count."""

    def counts(self, index: PeerIndex) -> Any: ...

    def min_count(self, ask: Requirements, index: PeerIndex) -> int:
        """The smallest count over the domains in which the replica could be placed at all."""
        ...

    def total(self, index: PeerIndex) -> int: ...

    def anti_affinity_owners(self, ask: Requirements) -> Sequence[PeerIndex]:
        """Indexes of carriers whose anti-affinity picks this replica."""
        ...


def ready(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    return site.ready


def accepting(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    return site.open


def place(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    return ask.regions[site.region] & ask.zones[site.zone] & ask.pools[site.pool]


def policy(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    return ask.allowed_regions[site.region] & ask.allowed_zones[site.zone] & ask.allowed_pools[site.pool]


def taints(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    return ask.tolerates[site.taints]


def labels(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    return site.labelled(ask.node_expressions)


def resources(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for name, count in ask.resources:
        fits = fits & (site.free.get(name, 0) >= count)
    return fits


def devices(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    """Hall's condition: for each set of models asked for, all asks inside that set together must find devices in it.

    It is exact, because `make_ask` adds the unions of overlapping sets: one device of B meets {A, B} and {B, C}, each alone.
    """
    fits: BoolOrMask = True
    for one in ask.whole_devices:
        inside = sum(o.amount for o in ask.whole_devices if o.kind == one.kind and _is_subset(o.models, one.models))
        fits = fits & (sum(site.whole_devices.get((one.kind, model), 0) for model in one.models or (ANY_MODEL,)) >= inside)
    return fits


def shares(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for one in ask.device_shares:
        found: BoolOrMask = False
        for model in one.models or (ANY_MODEL,):
            found = found | (site.largest_shares.get((one.kind, model), 0) >= one.amount)
        fits = fits & found
    return fits


def spread(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for term in ask.spread:
        known, domain = site.domain(term.peers.topology_key)
        fits = fits & known & (peers.counts(term.peers)[domain] + term.own - peers.min_count(ask, term.peers) <= term.max_skew)
    return fits


def affinity(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    fits: BoolOrMask = True
    for term in ask.affinity:
        known, domain = site.domain(term.peers.topology_key)
        # The first of a group that must be near itself may stand anywhere; otherwise no group could ever begin.
        first = bool(term.own) and peers.total(term.peers) == 0
        fits = fits & known & ((peers.counts(term.peers)[domain] > 0) | first)
    return fits


def anti_affinity(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    return clear_of([term.peers for term in ask.anti_affinity], site, peers)


def symmetric_anti_affinity(ask: Requirements, site: NodeView, peers: PeerCounts) -> BoolOrMask:
    """Anti-affinity holds both ways: who must stay away from this replica must not have it put beside them either."""
    shunners = peers.anti_affinity_owners(ask)
    return clear_of(shunners, site, peers) if shunners else True


def clear_of(indexes: Sequence[PeerIndex], site: NodeView, peers: PeerCounts) -> BoolOrMask:
    """Is nobody who counts in one of these in the same domain?"""
    fits: BoolOrMask = True
    for index in indexes:
        known, domain = site.domain(index.topology_key)
        fits = fits & ((known == False) | (peers.counts(index)[domain] == 0))  # noqa: E712  (a column cannot be `not`ed)
    return fits


class MemoizedPredicate(dict[Any, bool]):
    """Answers of one predicate by value, each found when it is first asked for."""

    def __init__(self, predicate: Callable[[Any], bool]) -> None:
        self.predicate = predicate

    def __missing__(self, value: Any) -> bool:
        answer = self[value] = self.predicate(value)
        return answer


class _NoPeers:
    """Peers of a cluster in which nothing runs."""

    def counts(self, index: PeerIndex) -> Any:
        return MemoizedPredicate(lambda domain: False)

    def min_count(self, ask: Requirements, index: PeerIndex) -> int:
        return 0

    def total(self, index: PeerIndex) -> int:
        return 0

    def anti_affinity_owners(self, ask: Requirements) -> Sequence[PeerIndex]:
        return ()


NO_PEERS: Final[PeerCounts] = _NoPeers()


class Rule(NamedTuple):
    code: Code
    check: Callable[[Requirements, NodeView, PeerCounts], BoolOrMask]
    static: bool
    """True if it depends only on what the node is, not on what is left of it."""


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


def static_misfit(ask: Requirements, site: NodeView) -> Code | None:
    """The first rule that a node breaks by what it is; the answer is good until the node, the ask or the policy changes."""
    return next((rule.code for rule in STATIC_RULES if not rule.check(ask, site, NO_PEERS)), None)


def cached_static_misfit(ask: Requirements, site: NodeView) -> Code | None:
    """The same, found once for all nodes of one standing."""
    known, standing = ask.static_results, site.node_attributes
    if standing in known:
        return known[standing]
    if len(known) >= STATIC_RESULTS_MAX:
        known.clear()
    code = known[standing] = static_misfit(ask, site)
    return code


def misfit(ask: Requirements, site: NodeView, peers: PeerCounts) -> Code | None:
    """The first rule that one node breaks; None if the replica fits."""
    if not site.ready:
        return Code.NODE_UNREADY
    if not site.open:
        return Code.DRAINING
    code = cached_static_misfit(ask, site)
    if code is not None:
        return code
    for check, code in ask.dynamic_checks:
        if not check(ask, site, peers):
            return code
    shunners = peers.anti_affinity_owners(ask)
    return Code.ANTI_AFFINITY if shunners and not clear_of(shunners, site, peers) else None


def misfits(ask: Requirements, site: NodeView, peers: PeerCounts) -> tuple[Code, ...]:
    """Every rule that one node breaks."""
    return tuple(dict.fromkeys(code for check, code in _CHECKS if not check(ask, site, peers)))


def mask(ask: Requirements, sites: NodeView, peers: PeerCounts, rules: Sequence[Rule] = RULES) -> BoolOrMask:
    """Over columns: where does it fit?"""
    fits: BoolOrMask = True
    for rule in rules:
        fits = fits & rule.check(ask, sites, peers)
    return fits


def owned_anti_affinity(ask: Requirements) -> tuple[PeerIndex, ...]:
    """The indexes in which a replica counts as a carrier: its own anti-affinity, which others must respect."""
    return (
        tuple([PeerIndex(of.tenant, of.selector, of.topology_key, True) for of, _, _ in ask.anti_affinity])
        if ask.anti_affinity
        else ()
    )


def _is_subset(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return not outer or (bool(inner) and set(inner) <= set(outer))
