"""Filter and score plug-in API and entry points.

Defines the interfaces and loads installed plug-ins. The kernel runs them; nothing is placed here.

A **filter** decides on which nodes a replica may run. The built-in filters are the rules of law/fit.py, which the authority
checks too, so scheduler and authority cannot disagree. A third-party filter can only reject more nodes than these rules, and
the authority does not know it: where the authority counts the domains available for a topology spread, it includes domains
that a third-party filter rejects. Every filter has a reason for people, and the kinds of events after which a rejected node
may pass.

A **score** rates nodes from 0 to 1, for all nodes at once. It ranks candidates and never makes a node eligible.

Both are called with the requirements of a class and a `NodeView`: all nodes, or only those that changed. The result for a node
must therefore depend only on that node's row, plus slowly changing data whose changes are announced by a new `epoch`.
Filters that depend on other replicas (spread, affinity) exist only as built-in rules.

Requirements are shared by all workloads that need the same of a node. Workload name and labels differ among these workloads,
so they are removed before a third-party plug-in is called, and no plug-in can depend on them.

Third-party plug-ins are entry points of installed packages, in the groups `remit.filters` and `remit.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NamedTuple

from remit.law import fit
from remit.law.fit import BoolOrMask, NodeView, PeerCounts, Requirements
from remit.model.claims import Code

_NO_GENERATION: Final = ("", "", 0)
FILTER_GROUP: Final = "remit.filters"
SCORE_GROUP: Final = "remit.scores"
WEIGHT_MAX: Final = 1_000
WEIGHT_SUM_MAX: Final = 2_000
"""Upper bound on the sum of the weights of all scores."""
SCORE_NAMES: Final = ("least-allocated", "most-allocated", "balanced", "preferred-taints", "locality", "fragmentation")
"""Names of the built-in scores (builtin_plugins.py, fragmentation.py); a third-party score must not reuse one."""


class UnblockEvent(StrEnum):
    """Kinds of events after which a rejected node may pass (kube-scheduler: cluster events)."""

    __hash__ = str.__hash__

    NODE = "node"
    """A node was added, or its attributes or health changed."""
    ROOM = "room"
    """Capacity was released on a node."""
    PEERS = "peers"
    """A replica of the same tenant was placed or removed."""
    POLICY = "policy"
    """A different policy is in force."""
    OVERRIDE = "override"
    """An override started or ended."""
    QUOTA = "quota"
    """Capacity was returned to a quota or grant, or its limit was raised."""
    WORKLOAD = "workload"
    """The workload was updated."""
    TIME = "time"
    """No event is needed; the rejection ends with time."""


GANG_MEMBER: Final = "member"
"""Event of one gang: another replica of it was created. Filters cannot wait for it."""


class PluginError(Exception):
    """A plug-in raised an exception or returned an invalid result."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"plug-in {name!r}: {reason}; fix it, or uninstall its package")


class Filter(NamedTuple):
    name: str
    code: Code
    check: Callable[[Requirements, NodeView, PeerCounts], BoolOrMask]
    unblock_events: tuple[UnblockEvent, ...] = (UnblockEvent.NODE,)
    applies: Callable[[Requirements], bool] = lambda requirements: True
    """Whether the filter can reject anything for these requirements; if not, it is skipped."""
    third_party: bool = False
    """Third-party filter: its results are validated and its exceptions become `PluginError`."""
    reason: str = ""
    """Why it rejects a node, for people. Default: the meaning of its code."""


def constant_epoch() -> int:  # used like a constant
    """Epoch of a score that depends on nothing but the row."""
    return 0


class Score(NamedTuple):
    name: str
    score: Callable[[Requirements, Any], Any]
    weight: int = 1
    applies: Callable[[Requirements], bool] = lambda requirements: True
    epoch: Callable[[], int] = constant_epoch
    """Returns a new number whenever data other than the row has changed; all nodes are then scored again."""
    static: bool = False
    """Whether the score depends only on node attributes, not on free capacity. It is then not recomputed after a placement."""
    third_party: bool = False
    replaces: tuple[str, ...] = ()
    """Scores disabled where this one applies: they rank by the same quantity and would distort it."""
    high_precision: bool = False
    """Whether differences below one millionth matter. Totals are then kept in 64 bits instead of 32."""
    choose_devices: Callable[[Requirements, int], dict[str, int]] | None = None
    """Device assignment that the score assumes for a row where the replica fits; None if it assumes none."""


_CAPACITY_EVENTS: Final = (UnblockEvent.ROOM, UnblockEvent.NODE)
_PEER_EVENTS: Final = (UnblockEvent.PEERS, UnblockEvent.NODE)
FILTER_DEFINITIONS: Final[
    dict[Callable[..., BoolOrMask], tuple[str, tuple[UnblockEvent, ...], Callable[[Requirements], bool]]]
] = {
    fit.ready: ("node-health", (UnblockEvent.NODE,), lambda requirements: True),
    fit.accepting: ("schedulable", (UnblockEvent.NODE,), lambda requirements: True),
    fit.place: ("placement", (UnblockEvent.NODE,), lambda requirements: True),
    fit.policy: ("policy", (UnblockEvent.POLICY, UnblockEvent.NODE), lambda requirements: bool(requirements.policy)),
    fit.taints: ("taints", (UnblockEvent.NODE,), lambda requirements: True),
    fit.labels: ("labels", (UnblockEvent.NODE,), lambda requirements: bool(requirements.node_expressions)),
    fit.resources: ("resources", _CAPACITY_EVENTS, lambda requirements: bool(requirements.resources)),
    fit.devices: ("devices", _CAPACITY_EVENTS, lambda requirements: bool(requirements.whole_devices)),
    fit.shares: ("device-shares", _CAPACITY_EVENTS, lambda requirements: bool(requirements.device_shares)),
    # The policy decides which domains are available for a spread, so a new policy can unblock it.
    fit.spread: ("spread", (*_PEER_EVENTS, UnblockEvent.POLICY), lambda requirements: bool(requirements.spread)),
    fit.affinity: ("affinity", _PEER_EVENTS, lambda requirements: bool(requirements.affinity)),
    fit.anti_affinity: ("anti-affinity", _PEER_EVENTS, lambda requirements: bool(requirements.anti_affinity)),
    fit.symmetric_anti_affinity: ("others-anti-affinity", _PEER_EVENTS, lambda requirements: True),
}
BUILTIN_FILTERS: Final = tuple(
    Filter(FILTER_DEFINITIONS[rule.check][0], rule.code, rule.check, *FILTER_DEFINITIONS[rule.check][1:]) for rule in fit.RULES
)
"""The rules of law/fit.py as filters, in the same order; funnels list them in this order."""

FORMER_FILTER_NAMES: Final = {"takes-work": "schedulable", "place": "placement", "shunned": "others-anti-affinity"}
"""By former name: filters in the funnels of decisions that were stored before their renaming."""

STATIC_CHECKS: Final = frozenset(rule.check for rule in fit.STATIC_RULES)
PEER_CHECKS: Final = frozenset((fit.spread, fit.affinity, fit.anti_affinity, fit.symmetric_anti_affinity))
"""Checks that depend on other replicas: a placement can change their result on other nodes."""

CAPACITY_CHECKS: Final = frozenset((fit.resources, fit.devices, fit.shares))
"""Checks of free capacity only."""


def installed_filters(points: Iterable[EntryPoint] | None = None) -> tuple[Filter, ...]:
    """Filters of installed packages, ordered by entry point name; or of the given entry points.

    Raises `PluginError` if one does not load or is invalid.
    """
    filters = tuple(
        _load(point, Filter) for point in sorted(entry_points(group=FILTER_GROUP) if points is None else points, key=_name)
    )
    for plugin in filters:
        invalid = [event for event in plugin.unblock_events if not isinstance(event, UnblockEvent)]
        if plugin.name in {*(rule.name for rule in BUILTIN_FILTERS), *FORMER_FILTER_NAMES}:
            raise PluginError(plugin.name, "this name belongs to a built-in filter")
        if not callable(plugin.check) or not isinstance(plugin.code, Code):
            raise PluginError(plugin.name, "a Filter needs a code of remit.model.claims.Code and a callable check")
        if invalid or not plugin.unblock_events:
            raise PluginError(
                plugin.name,
                f"its unblock events are {plugin.unblock_events}; expected one or more of {', '.join(UnblockEvent)}",
            )
    return tuple(plugin._replace(third_party=True) for plugin in filters)


def installed_scores(points: Iterable[EntryPoint] | None = None) -> tuple[Score, ...]:
    """Scores of installed packages, loaded and checked like `installed_filters`."""
    scores = tuple(
        _load(point, Score) for point in sorted(entry_points(group=SCORE_GROUP) if points is None else points, key=_name)
    )
    for plugin in scores:
        if plugin.name in SCORE_NAMES:
            raise PluginError(plugin.name, "this name belongs to a built-in score")
        if not callable(plugin.score):
            raise PluginError(plugin.name, "a Score needs a callable score")
        if type(plugin.weight) is not int or not 0 <= plugin.weight <= WEIGHT_MAX:
            raise PluginError(plugin.name, f"its weight is {plugin.weight!r}; expected an integer from 0 to {WEIGHT_MAX}")
    return tuple(plugin._replace(third_party=True) for plugin in scores)


def _name(point: EntryPoint) -> str:
    return point.name


def _load(point: EntryPoint, kind: type[Any]) -> Any:
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise PluginError(point.name, f"{point.value} could not be loaded ({error!r})") from error
    if not isinstance(plugin, kind):
        raise PluginError(point.name, f"{point.value} is a {type(plugin).__name__}; expected a {kind.__name__}")
    return plugin


def without_identity(requirements: Requirements) -> Requirements:
    """The requirements without workload name and labels, which differ among the workloads that share them."""
    return requirements._replace(generation=_NO_GENERATION, labels={})


def applies(plugin: Filter | Score, requirements: Requirements) -> bool:
    if not plugin.third_party:
        return plugin.applies(requirements)
    try:
        return bool(plugin.applies(without_identity(requirements)))
    except (Exception, SystemExit) as error:
        raise PluginError(plugin.name, f"applies() raised {error!r}") from error


def epoch_of(score: Score) -> int:
    if not score.third_party:
        return score.epoch()
    try:
        return int(score.epoch())
    except (Exception, SystemExit) as error:
        raise PluginError(score.name, f"epoch() raised {error!r}") from error


def check_weight_sum(scores: Sequence[Score]) -> None:
    """Checks that the weighted sum of all scores fits into 32 bits."""
    total = sum(score.weight for score in scores)
    if total > WEIGHT_SUM_MAX:
        heaviest = max(scores, key=lambda score: score.weight)
        raise PluginError(heaviest.name, f"the weights of all scores add up to {total}; the limit is {WEIGHT_SUM_MAX}")


def check_unique_names(plugins: Sequence[Filter] | Sequence[Score]) -> None:
    seen: set[str] = set()
    for plugin in plugins:
        if plugin.name in seen:
            raise PluginError(plugin.name, "this name is used twice")
        seen.add(plugin.name)
