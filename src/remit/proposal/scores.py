"""Which place is better? Each score is one expression over columns, from 0 (worst) to 1. Nothing is forbidden here."""

from __future__ import annotations

from typing import Any, Final

from remit.law.columns import Columns
from remit.law.fit import Ask
from remit.observation.hints import Hints
from remit.proposal.plugins import Score


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
