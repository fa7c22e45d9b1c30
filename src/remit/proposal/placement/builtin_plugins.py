"""Built-in scores and the override filter.

Each score is one expression over columns, from 0 (worst) to 1. Scores never reject a node; the override filter does, for
avoided places and pins. Nothing here modifies the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from remit.law.fit import Requirements, PeerCounts, NodeView
from remit.law.overrides import ActiveOverrides, Instant, PlaceSet, active_overrides
from remit.model.claims import Code
from remit.model.kinds import Override
from remit.observation.hints import Hints
from remit.observation.node_columns import Bools, Columns
from remit.proposal.placement.plugins import UnblockEvent, Filter, Score

_NO_EFFECTS: Final = ActiveOverrides()


class OverrideFilter:
    """The overrides in force as one filter: avoided places apply to all work, pins to the requirements that carry them."""

    def __init__(self) -> None:
        self.effects = _NO_EFFECTS
        self.filter = Filter("overrides", Code.OVERRIDE, self._check, (UnblockEvent.OVERRIDE, UnblockEvent.NODE), self._applies)
        self._avoided: tuple[Columns, int, Bools] | None = None

    def renew(self, overrides: Iterable[Override], now: Instant | None) -> bool:
        """Recomputes the overrides in force at `now`. Returns True if they changed, so that cached filter results must be
        dropped.
        """
        effects = active_overrides(overrides, now)
        if effects.overrides == self.effects.overrides:
            return False
        self.effects, self._avoided = effects, None
        return True

    def _applies(self, ask: Requirements) -> bool:
        return bool(self.effects.excluded_places or ask.pins)

    def _check(self, ask: Requirements, site: NodeView, peers: PeerCounts) -> Any:
        columns: Any = getattr(site, "columns", site)
        stood = columns.restood.count
        known = self._avoided
        if known is None or known[0] is not columns or known[1] != stood or len(known[2]) != len(columns):
            known = self._avoided = columns, stood, ~_covered_rows(self.effects.excluded_places, columns)
        free = known[2]
        for pin in ask.pins:
            free = free & _covered_rows((pin,), columns)
        rows = getattr(site, "rows", None)
        return free if columns is site or rows is None else free[rows]


def _covered_rows(places: Sequence[PlaceSet], columns: Columns) -> Bools:
    """Rows covered by at least one of these place sets."""
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


def _counted_resources(ask: Requirements, site: Any) -> list[tuple[str, Any]]:
    """The requested resources; all resources if none is requested."""
    return list(ask.resources) or [(name, 0) for name in site.free]


def least_allocated(ask: Requirements, site: Any) -> Any:
    """Free share after the placement, averaged over the requested resources: spreads work."""
    names = _counted_resources(ask, site)
    total: Any = 0.0
    for name, need in names:
        total = total + (site.free.get(name, 0) - need) * site.share.get(name, 0.0)
    return total / len(names) if len(names) > 1 else total


def most_allocated(ask: Requirements, site: Any) -> Any:
    """Used share after the placement: packs work, so that some nodes stay empty."""
    return 1.0 - least_allocated(ask, site)


def balanced(ask: Requirements, site: Any) -> Any:
    """How evenly the requested resources are used: free cpu without free memory is of no use to other work."""
    left = [(site.free.get(name, 0) - need) * site.share.get(name, 0.0) for name, need in _counted_resources(ask, site)]
    if len(left) < 2:
        return left[0] * 0 + 1.0 if left else 1.0
    mean = sum(left) / len(left)
    return 1.0 - 2 * sum(abs(one - mean) for one in left) / len(left)


def preferred_taints(ask: Requirements, site: Any) -> Any:
    """Penalises taints with effect PreferNoSchedule that the replica does not tolerate."""
    return 1.0 - ask.untolerated_soft[site.taints]


def locality(columns: Columns, hints: Hints) -> Score:
    """Prefers nodes that hints report as warm for the workload. A hint only ranks; filters decide eligibility."""

    def warm(ask: Requirements, site: Any) -> Any:
        found = hints.warmth(ask.hinted_workload, columns)
        return found if site is columns else found[site.rows]

    return Score("locality", warm, applies=lambda ask: bool(ask.hinted_workload), epoch=lambda: hints.version)


LEAST_ALLOCATED: Final = Score("least-allocated", least_allocated)
MOST_ALLOCATED: Final = Score("most-allocated", most_allocated)
BALANCED: Final = Score("balanced", balanced)
PREFERRED_TAINTS: Final = Score("preferred-taints", preferred_taints, weight=3, static=True)
STATELESS_SCORES: Final = (LEAST_ALLOCATED, MOST_ALLOCATED, BALANCED, PREFERRED_TAINTS)
DEFAULT_SCORES: Final = (LEAST_ALLOCATED, PREFERRED_TAINTS)
