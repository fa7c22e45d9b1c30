"""Built-in scores and the override filter.

A filter over columns, and what sets work apart. It only reads.

Each score is one expression over columns, from 0 (worst) to 1. Nothing is forbidden here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from remit.law.fit import Ask, Peers, Site
from remit.law.overrides import Effects, Instant, PlaceSet, in_force
from remit.model.claims import Code
from remit.model.kinds import Override
from remit.observation.hints import Hints
from remit.observation.node_columns import Bools, Columns
from remit.proposal.placement.plugins import Cure, Filter, Score

_NONE: Final = Effects()


class Steering:
    """The overrides in force, as one filter: avoided places for everybody, and pins for the asks that carry them."""

    def __init__(self) -> None:
        self.effects = _NONE
        self.filter = Filter("overrides", Code.OVERRIDE, self._check, (Cure.OVERRIDE, Cure.NODE), self._applies)
        self._avoided: tuple[Columns, int, Bools] | None = None

    def renew(self, overrides: Iterable[Override], now: Instant | None) -> bool:
        """As of this instant; True if that changed anything, so that everything that was known of nodes is to be asked anew."""
        effects = in_force(overrides, now)
        if effects.overrides == self.effects.overrides:
            return False
        self.effects, self._avoided = effects, None
        return True

    def _applies(self, ask: Ask) -> bool:
        return bool(self.effects.avoids or ask.pins)

    def _check(self, ask: Ask, site: Site, peers: Peers) -> Any:
        columns: Any = getattr(site, "columns", site)
        stood = columns.restood.count
        known = self._avoided
        if known is None or known[0] is not columns or known[1] != stood or len(known[2]) != len(columns):
            known = self._avoided = columns, stood, ~_covered(self.effects.avoids, columns)
        free = known[2]
        for pin in ask.pins:
            free = free & _covered((pin,), columns)
        rows = getattr(site, "rows", None)
        return free if columns is site or rows is None else free[rows]


def _covered(places: Sequence[PlaceSet], columns: Columns) -> Bools:
    """The rows that one of these covers."""
    found = np.zeros(len(columns), dtype=np.bool_)
    for one in places:
        for names, ids, column in (
            (one.regions, columns.regions, columns.region),
            (one.zones, columns.zones, columns.zone),
            (one.pools, columns.pools, columns.pool),
        ):
            if names:
                found |= np.isin(column, [number for number, name in enumerate(ids) if name in names])
        for name in sorted(one.nodes):
            if name in columns.rows:
                found[columns.rows[name]] = True
    return found


def _names(ask: Ask, site: Any) -> list[tuple[str, Any]]:
    """What counts: the resources asked for; all of them, if none are."""
    return list(ask.resources) or [(name, 0) for name in site.free]


def least_allocated(ask: Ask, site: Any) -> Any:
    """The share that stays free, over the resources asked for: work spreads out."""
    names = _names(ask, site)
    total: Any = 0.0
    for name, need in names:
        total = total + (site.free.get(name, 0) - need) * site.share.get(name, 0.0)
    return total / len(names) if len(names) > 1 else total


def most_allocated(ask: Ask, site: Any) -> Any:
    """The share that is taken then: work packs together, and whole nodes stay free."""
    return 1.0 - least_allocated(ask, site)


def balanced(ask: Ask, site: Any) -> Any:
    """How equally the resources asked for are used up: what is left of one without the other serves nobody."""
    left = [(site.free.get(name, 0) - need) * site.share.get(name, 0.0) for name, need in _names(ask, site)]
    if len(left) < 2:
        return left[0] * 0 + 1.0 if left else 1.0
    mean = sum(left) / len(left)
    return 1.0 - 2 * sum(abs(one - mean) for one in left) / len(left)


def liked(ask: Ask, site: Any) -> Any:
    """Taints that only ask to be avoided are avoided, if the replica does not tolerate them."""
    return 1.0 - ask.dislikes[site.taints]


def locality(columns: Columns, hints: Hints) -> Score:
    """Where it is said to be warm. A hint ranks: whether it may stand there at all, the filters say."""

    def warm(ask: Ask, site: Any) -> Any:
        found = hints.warmth(ask.hinted, columns)
        return found if site is columns else found[site.rows]

    return Score("locality", warm, applies=lambda ask: bool(ask.hinted), epoch=lambda: hints.version)


LEAST: Final = Score("least-allocated", least_allocated)
MOST: Final = Score("most-allocated", most_allocated)
BALANCED: Final = Score("balanced", balanced)
LIKED: Final = Score("preferred-taints", liked, weight=3, static=True)
RANKS: Final = (LEAST, MOST, BALANCED, LIKED)
DEFAULT: Final = (LEAST, LIKED)
