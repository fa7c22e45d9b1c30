"""Fit rules: does a replica fit a node, for one node or a whole column of nodes.

Asked by proposers over columns and by the authority node by node.

Each rule is one expression over an `Ask` (what the replica needs), a `Site` (what the node has left) and its `Peers` (who is
where). The operands may be numbers or NumPy columns: `site.free["cpu"] >= 500` is a bool for one node and a mask for all of
them, and `ask.regions[site.region]` looks a name up in a dictionary or a column of ids in an array. So a proposer and the
authority cannot disagree about what fits: they run the same line. Only label matching has two forms (labels.py).

Nothing is decided here about grants, quota, leases or phases: those are the authority's books.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from remit.model.claims import Code
from remit.model.kinds import Device, DeviceAsk, NodeExpression
from remit.model.metadata import Deadline
from remit.model.resources import WHOLE, Amount

KNOWN_MAX: Final = 100_000

Truth = Any
"""A bool, or a column of them."""

ANY: Final = ""
"""In place of a device model: whichever."""


class Index(NamedTuple):
    """Replicas of a tenant that a selector picks, counted by topology domain; or those that *carry* the term, to shun it."""

    tenant: str
    selector: tuple[tuple[str, str], ...]
    key: str
    carriers: bool = False


class Term(NamedTuple):
    """One constraint towards other replicas; `own` is 1 if the replica is itself picked by the selector."""

    of: Index
    own: int
    skew: int = 0


class Devices(NamedTuple):
    """So many whole devices, or one share in thousandths, of a kind and any of these models (none named: of any).

    Among the whole ones of an ask, those with amount 0 stand for the unions of model sets that overlap: see `devices`.
    """

    kind: str
    models: tuple[str, ...]
    amount: int


Model = tuple[str, str]
"""A device's kind and model; or its kind and ANY."""


def devices_left(devices: Iterable[Device], used: Mapping[str, int]) -> tuple[dict[Model, int], dict[Model, int]]:
    """How many devices nobody uses, and the largest unused share on one device; each by model, and for the kind as a whole."""
    whole: dict[Model, int] = {}
    room: dict[Model, int] = {}
    for device in devices:
        left = max(WHOLE - used.get(device.name, 0), 0)
        # A device without a model must not count twice under ANY.
        for at in dict.fromkeys(((device.kind, device.model), (device.kind, ANY))):
            whole[at] = whole.get(at, 0) + (left == WHOLE)
            room[at] = max(room.get(at, 0), left)
    return whole, room


class Ask(NamedTuple):
    """What a replica needs. The look-up tables are keyed by name here; columns.py makes the same ones keyed by id."""

    tenant: str
    generation: tuple[str, str, int]
    labels: Mapping[str, str]
    open: bool
    """False if the workload is gone or going, so that nothing more of it is placed."""
    charge: Amount
    resources: tuple[tuple[str, int], ...]
    devices: tuple[DeviceAsk, ...]
    whole: tuple[Devices, ...]
    shares: tuple[Devices, ...]
    wanted: tuple[NodeExpression, ...]
    regions: Any
    zones: Any
    pools: Any
    allowed_regions: Any
    allowed_zones: Any
    allowed_pools: Any
    tolerates: Any
    spread: tuple[Term, ...]
    affinity: tuple[Term, ...]
    anti: tuple[Term, ...]
    prefer: tuple[Term, ...]
    """Spreading that ranks, and forbids nothing."""
    dislikes: Any
    """Taints that only rank, and are not tolerated."""
    gang: int
    fenced: bool
    """Must it never run twice at once?"""
    policy: int
    policy_until: Deadline | None
    quota: tuple[str, ...]
    """The ledger of the tenant's own quota, where this scope is its home."""
    known: dict[Any, Code | None]
    """Answers of the static rules, by what a node is: most binds ask again what was asked for their like."""
    checks: tuple[tuple[Callable[..., Truth], Code], ...]
    """The rules about what is left that can fail for this ask at all."""
    plain: bool
    """Is it asked of a node only what it is, and that it has the resources? Then nobody else needs to be looked at, nor the
    clock."""
    pins: tuple[Any, ...] = ()
    """Places that a person's override keeps it to; a proposer's affair, not the law's."""
    hinted: str = ""
    """The workload, as `tenant/name`, if somebody has hinted where it would start sooner; a proposer's affair too."""
    demands: Hashable = ()
    """Stands for all that is asked of a node's standing: where it is equal, so is the answer of every static rule, under one
    policy. Empty if nobody has compared it with others (likeness.py)."""


class ByModel(Protocol):
    """A number, or a column, by kind and model of device."""

    def get(self, model: Model, default: int, /) -> Any: ...


class Site(Protocol):
    """What a node is and has left; every attribute may be one value or a column."""

    @property
    def free(self) -> Mapping[str, Any]: ...
    @property
    def whole(self) -> ByModel: ...
    @property
    def room(self) -> ByModel: ...
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
    def standing(self) -> Hashable:
        """Stands for all that a node is, apart from what is left of it: another one for every change of that."""
        ...

    def labelled(self, wanted: Sequence[NodeExpression]) -> Truth: ...

    def domain(self, key: str) -> tuple[Truth, Any]:
        """Is the node in a domain of this topology key, and in which? A label with an empty value names no domain."""
        ...


class Peers(Protocol):
    """Who is where, counted by topology domain; phases that hold room count."""

    def counts(self, index: Index) -> Any: ...

    def least(self, ask: Ask, index: Index) -> int:
        """The smallest count over the domains in which the replica could be placed at all."""
        ...

    def total(self, index: Index) -> int: ...

    def shunners(self, ask: Ask) -> Sequence[Index]:
        """Indexes of carriers whose anti-affinity picks this replica."""
        ...


def ready(ask: Ask, site: Site, peers: Peers) -> Truth:
    return site.ready


def accepting(ask: Ask, site: Site, peers: Peers) -> Truth:
    return site.open


def place(ask: Ask, site: Site, peers: Peers) -> Truth:
    return ask.regions[site.region] & ask.zones[site.zone] & ask.pools[site.pool]


def policy(ask: Ask, site: Site, peers: Peers) -> Truth:
    return ask.allowed_regions[site.region] & ask.allowed_zones[site.zone] & ask.allowed_pools[site.pool]


def taints(ask: Ask, site: Site, peers: Peers) -> Truth:
    return ask.tolerates[site.taints]


def labels(ask: Ask, site: Site, peers: Peers) -> Truth:
    return site.labelled(ask.wanted)


def resources(ask: Ask, site: Site, peers: Peers) -> Truth:
    fits: Truth = True
    for name, count in ask.resources:
        fits = fits & (site.free.get(name, 0) >= count)
    return fits


def devices(ask: Ask, site: Site, peers: Peers) -> Truth:
    """Hall's condition: for each set of models asked for, all asks inside that set together must find devices in it.

    It is exact, because `make_ask` adds the unions of overlapping sets: one device of B meets {A, B} and {B, C}, each alone.
    """
    fits: Truth = True
    for one in ask.whole:
        inside = sum(o.amount for o in ask.whole if o.kind == one.kind and _within(o.models, one.models))
        fits = fits & (sum(site.whole.get((one.kind, model), 0) for model in one.models or (ANY,)) >= inside)
    return fits


def shares(ask: Ask, site: Site, peers: Peers) -> Truth:
    fits: Truth = True
    for one in ask.shares:
        found: Truth = False
        for model in one.models or (ANY,):
            found = found | (site.room.get((one.kind, model), 0) >= one.amount)
        fits = fits & found
    return fits


def spread(ask: Ask, site: Site, peers: Peers) -> Truth:
    fits: Truth = True
    for term in ask.spread:
        known, domain = site.domain(term.of.key)
        fits = fits & known & (peers.counts(term.of)[domain] + term.own - peers.least(ask, term.of) <= term.skew)
    return fits


def affinity(ask: Ask, site: Site, peers: Peers) -> Truth:
    fits: Truth = True
    for term in ask.affinity:
        known, domain = site.domain(term.of.key)
        # The first of a group that must be near itself may stand anywhere; otherwise no group could ever begin.
        first = bool(term.own) and peers.total(term.of) == 0
        fits = fits & known & ((peers.counts(term.of)[domain] > 0) | first)
    return fits


def anti_affinity(ask: Ask, site: Site, peers: Peers) -> Truth:
    return away_from([term.of for term in ask.anti], site, peers)


def shunned(ask: Ask, site: Site, peers: Peers) -> Truth:
    """Anti-affinity holds both ways: who must stay away from this replica must not have it put beside them either."""
    shunners = peers.shunners(ask)
    return away_from(shunners, site, peers) if shunners else True


def away_from(indexes: Sequence[Index], site: Site, peers: Peers) -> Truth:
    """Is nobody who counts in one of these in the same domain?"""
    fits: Truth = True
    for index in indexes:
        known, domain = site.domain(index.key)
        fits = fits & ((known == False) | (peers.counts(index)[domain] == 0))  # noqa: E712  (a column cannot be `not`ed)
    return fits


class Lookup(dict[Any, bool]):
    """Answers of one predicate by value, each found when it is first asked for."""

    def __init__(self, predicate: Callable[[Any], bool]) -> None:
        self.predicate = predicate

    def __missing__(self, value: Any) -> bool:
        answer = self[value] = self.predicate(value)
        return answer


class _Nobody:
    """Peers of a cluster in which nothing runs."""

    def counts(self, index: Index) -> Any:
        return Lookup(lambda domain: False)

    def least(self, ask: Ask, index: Index) -> int:
        return 0

    def total(self, index: Index) -> int:
        return 0

    def shunners(self, ask: Ask) -> Sequence[Index]:
        return ()


NOBODY: Final[Peers] = _Nobody()


class Rule(NamedTuple):
    code: Code
    check: Callable[[Ask, Site, Peers], Truth]
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
    Rule(Code.ANTI_AFFINITY, shunned, False),
)
STATIC: Final = tuple(rule for rule in RULES if rule.static)
_CHECKS: Final = tuple((rule.check, rule.code) for rule in RULES)


def static_misfit(ask: Ask, site: Site) -> Code | None:
    """The first rule that a node breaks by what it is; the answer is good until the node, the ask or the policy changes."""
    return next((rule.code for rule in STATIC if not rule.check(ask, site, NOBODY)), None)


def static_answer(ask: Ask, site: Site) -> Code | None:
    """The same, found once for all nodes of one standing."""
    known, standing = ask.known, site.standing
    if standing in known:
        return known[standing]
    if len(known) >= KNOWN_MAX:
        known.clear()
    code = known[standing] = static_misfit(ask, site)
    return code


def misfit(ask: Ask, site: Site, peers: Peers) -> Code | None:
    """The first rule that one node breaks; None if the replica fits."""
    if not site.ready:
        return Code.NODE_UNREADY
    if not site.open:
        return Code.DRAINING
    code = static_answer(ask, site)
    if code is not None:
        return code
    for check, code in ask.checks:
        if not check(ask, site, peers):
            return code
    shunners = peers.shunners(ask)
    return Code.ANTI_AFFINITY if shunners and not away_from(shunners, site, peers) else None


def misfits(ask: Ask, site: Site, peers: Peers) -> tuple[Code, ...]:
    """Every rule that one node breaks."""
    return tuple(dict.fromkeys(code for check, code in _CHECKS if not check(ask, site, peers)))


def mask(ask: Ask, sites: Site, peers: Peers, rules: Sequence[Rule] = RULES) -> Truth:
    """Over columns: where does it fit?"""
    fits: Truth = True
    for rule in rules:
        fits = fits & rule.check(ask, sites, peers)
    return fits


def carried(ask: Ask) -> tuple[Index, ...]:
    """The indexes in which a replica counts as a carrier: its own anti-affinity, which others must respect."""
    return tuple([Index(of.tenant, of.selector, of.key, True) for of, _, _ in ask.anti]) if ask.anti else ()


def _within(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return not outer or (bool(inner) and set(inner) <= set(outer))
