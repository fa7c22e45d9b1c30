"""Filter and score plug-in API and entry points.

Small named functions over whole columns, ours and others'. Nothing is chosen here.

A **filter** says where a replica may stand. Ours are the rules of law/fit.py, so proposer and authority cannot disagree; others
may only forbid more than the law does, and the authority does not know them: where it counts the domains that a replica could
spread over, it counts those that they forbid too. Each names the reason that people read, and the cures: the sorts of events
after which a node that it refused may pass.

A **score** says how good a place is, from 0 to 1, for every node at once. It may rank, never authorise.

Both are asked for one ask over a `Site`: all nodes, or only those that changed since. So an answer must depend on the node's
own row (and slowly changing knowledge, announced by another `epoch`); filters that look at others are the law's alone.

An ask speaks for all work that needs the same of a node. Whose it is, and with what labels, differs among them, so others are
not told: no plug-in can go by it.

Others are found as entry points of installed packages, in the groups `remit.filters` and `remit.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NamedTuple

from remit.law import fit
from remit.law.fit import Ask, Peers, Site, Truth
from remit.model.claims import Code

_ANYBODY: Final = ("", "", 0)
FILTERS: Final = "remit.filters"
SCORES: Final = "remit.scores"
WEIGHT_MAX: Final = 1_000
WEIGHTS_MAX: Final = 2_000
"""Of all scores together."""
SCORE_NAMES: Final = ("least-allocated", "most-allocated", "balanced", "preferred-taints", "locality", "fragmentation")
"""Of scores.py and fragmentation.py."""


class Cure(StrEnum):
    """After which sort of event may a refusal be over?"""

    __hash__ = str.__hash__

    NODE = "node"
    """A node came, or changed what it is or how it is."""
    ROOM = "room"
    """Somebody gave room back."""
    PEERS = "peers"
    """Somebody of the same tenant was placed, or went."""
    POLICY = "policy"
    """Another policy is in force."""
    OVERRIDE = "override"
    """A human's override began or ended."""
    QUOTA = "quota"
    """More is left of a quota, a slice or a grant."""
    WORKLOAD = "workload"
    """The workload was declared anew."""
    TIME = "time"
    """It only takes time: nothing else has to happen."""


class PluginError(Exception):
    """A plug-in failed, or answered what is no answer. Cure: mend it, or leave it out."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"plug-in {name!r}: {why}; mend it, or uninstall its package")


class Filter(NamedTuple):
    name: str
    code: Code
    check: Callable[[Ask, Site, Peers], Truth]
    cures: tuple[Cure, ...] = (Cure.NODE,)
    applies: Callable[[Ask], bool] = lambda ask: True
    """Can it refuse this ask at all?"""
    foreign: bool = False
    """Did others write it? Then its answers are checked."""
    reason: str = ""
    """Why it refuses, for people; if there is none, what the code means."""


def STEADY() -> int:  # noqa: N802  (a constant that is asked)
    """The epoch of what knows nothing beyond the row."""
    return 0


class Score(NamedTuple):
    name: str
    score: Callable[[Ask, Any], Any]
    weight: int = 1
    applies: Callable[[Ask], bool] = lambda ask: True
    epoch: Callable[[], int] = STEADY
    """Another number whenever what it knows beyond the row has changed: then every node is scored anew."""
    static: bool = False
    """Does it depend only on what the node is, not on what is left of it?"""
    foreign: bool = False
    instead_of: tuple[str, ...] = ()
    """Scores that do not count where this one applies: they rank by the same thing, and would blur it."""
    fine: bool = False
    """Do differences matter that are smaller than a millionth? Then numbers have 64 bits where it applies."""
    choose: Callable[[Ask, int], dict[str, int]] | None = None
    """Which devices a replica gets on a row where it fits, if the score supposes anything about that."""


_MOVED: Final = (Cure.ROOM, Cure.NODE)
_BESIDE: Final = (Cure.PEERS, Cure.NODE)
BUILT_IN: Final[dict[Callable[..., Truth], tuple[str, tuple[Cure, ...], Callable[[Ask], bool]]]] = {
    fit.ready: ("node-health", (Cure.NODE,), lambda ask: True),
    fit.accepting: ("takes-work", (Cure.NODE,), lambda ask: True),
    fit.place: ("place", (Cure.NODE,), lambda ask: True),
    fit.policy: ("policy", (Cure.POLICY, Cure.NODE), lambda ask: bool(ask.policy)),
    fit.taints: ("taints", (Cure.NODE,), lambda ask: True),
    fit.labels: ("labels", (Cure.NODE,), lambda ask: bool(ask.wanted)),
    fit.resources: ("resources", _MOVED, lambda ask: bool(ask.resources)),
    fit.devices: ("devices", _MOVED, lambda ask: bool(ask.whole)),
    fit.shares: ("device-shares", _MOVED, lambda ask: bool(ask.shares)),
    # Over which domains it could spread is a matter of policy too.
    fit.spread: ("spread", (*_BESIDE, Cure.POLICY), lambda ask: bool(ask.spread)),
    fit.affinity: ("affinity", _BESIDE, lambda ask: bool(ask.affinity)),
    fit.anti_affinity: ("anti-affinity", _BESIDE, lambda ask: bool(ask.anti)),
    fit.shunned: ("shunned", _BESIDE, lambda ask: True),
}
LAW: Final = tuple(Filter(BUILT_IN[rule.check][0], rule.code, rule.check, *BUILT_IN[rule.check][1:]) for rule in fit.RULES)
"""The law as filters, in its order; a funnel shows them so."""

STATIC: Final = frozenset(rule.check for rule in fit.STATIC)
COUPLED: Final = frozenset((fit.spread, fit.affinity, fit.anti_affinity, fit.shunned))
"""Those that look at others: a placement may change their answer about other nodes."""

ROOM: Final = frozenset((fit.resources, fit.devices, fit.shares))
"""Those that only ask whether there is enough left."""


def installed_filters(points: Iterable[EntryPoint] | None = None) -> tuple[Filter, ...]:
    """Those of installed packages, in the order of their entry points' names; or of these entry points."""
    found = tuple(
        _load(point, Filter) for point in sorted(entry_points(group=FILTERS) if points is None else points, key=_name)
    )
    for one in found:
        wrong = [cure for cure in one.cures if not isinstance(cure, Cure)]
        if one.name in {rule.name for rule in LAW}:
            raise PluginError(one.name, "this is the name of a built-in filter")
        if not callable(one.check) or not isinstance(one.code, Code):
            raise PluginError(one.name, "a filter has a code of remit.model.claims and a function that checks")
        if wrong or not one.cures:
            raise PluginError(one.name, f"its cures are {one.cures}, not one or more of {', '.join(Cure)}")
    return tuple(one._replace(foreign=True) for one in found)


def installed_scores(points: Iterable[EntryPoint] | None = None) -> tuple[Score, ...]:
    """As `installed_filters`."""
    found = tuple(_load(point, Score) for point in sorted(entry_points(group=SCORES) if points is None else points, key=_name))
    for one in found:
        if one.name in SCORE_NAMES:
            raise PluginError(one.name, "this is the name of a built-in score")
        if not callable(one.score):
            raise PluginError(one.name, "a score has a function that ranks")
        if type(one.weight) is not int or not 0 <= one.weight <= WEIGHT_MAX:
            raise PluginError(one.name, f"its weight is {one.weight!r}, not a whole number from 0 to {WEIGHT_MAX}")
    return tuple(one._replace(foreign=True) for one in found)


def _name(point: EntryPoint) -> str:
    return point.name


def _load(point: EntryPoint, kind: type[Any]) -> Any:
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # whatever others' code does
        raise PluginError(point.name, f"{point.value} does not load ({error!r})") from error
    if not isinstance(found, kind):
        raise PluginError(point.name, f"{point.value} is {type(found).__name__}, not a {kind.__name__}")
    return found


def for_others(ask: Ask) -> Ask:
    """The ask without what is that of one among many who share it."""
    return ask._replace(generation=_ANYBODY, labels={})


def applies(one: Filter | Score, ask: Ask) -> bool:
    if not one.foreign:
        return one.applies(ask)
    try:
        return bool(one.applies(for_others(ask)))
    except (Exception, SystemExit) as error:
        raise PluginError(one.name, f"it failed to say whether it applies: {error!r}") from error


def epoch_of(score: Score) -> int:
    if not score.foreign:
        return score.epoch()
    try:
        return int(score.epoch())
    except (Exception, SystemExit) as error:
        raise PluginError(score.name, f"it failed to name its epoch: {error!r}") from error


def bounded(scores: Sequence[Score]) -> None:
    """Numbers have 32 bits, where no score is fine."""
    total = sum(score.weight for score in scores)
    if total > WEIGHTS_MAX:
        heaviest = max(scores, key=lambda score: score.weight)
        raise PluginError(heaviest.name, f"with it, all weights come to {total}, and {WEIGHTS_MAX} is the most")


def distinct(plugins: Sequence[Filter] | Sequence[Score]) -> None:
    seen: set[str] = set()
    for one in plugins:
        if one.name in seen:
            raise PluginError(one.name, "there are two of this name")
        seen.add(one.name)
