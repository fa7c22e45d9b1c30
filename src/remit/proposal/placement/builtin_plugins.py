"""Built-in scores and the override filter.

Each score is one expression over columns, from 0 (worst) to 1. Scores never reject a node; the override filter does, for
avoided places and pins. Nothing here modifies the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from remit.law.fit import NodeView, PeerCounts, Requirements
from remit.law.overrides import ActiveOverrides, Instant, PlaceSet, active_overrides
from remit.model.claims import Code
from remit.model.kinds import Override
from remit.observation.hints import Hints
from remit.observation.node_columns import Bools, NodeColumns
from remit.proposal.placement.plugins import Filter, Score, UnblockEvent

_NO_EFFECTS: Final = ActiveOverrides()


class OverrideFilter:
    """The overrides in force as one filter: avoided places apply to all work, pins to the requirements that carry them."""

    def __init__(self) -> None:
        self.effects = _NO_EFFECTS
        self.filter = Filter("overrides", Code.OVERRIDE, self._check, (UnblockEvent.OVERRIDE, UnblockEvent.NODE), self._applies)
        self._avoided: tuple[NodeColumns, int, Bools] | None = None

    def update(self, overrides: Iterable[Override], now: Instant | None) -> bool:
        """Recomputes the overrides in force at `now`. Returns True if they changed, so that cached filter results must be
        dropped.
        """
        effects = active_overrides(overrides, now)
        if effects.overrides == self.effects.overrides:
            return False
        self.effects, self._avoided = effects, None
        return True

    def _applies(self, requirements: Requirements) -> bool:
        return bool(self.effects.excluded_places or requirements.pins)

    def _check(self, requirements: Requirements, site: NodeView, peers: PeerCounts) -> Any:
        columns: Any = getattr(site, "columns", site)
        version = columns.attributes_changed.count
        cached = self._avoided
        if cached is None or cached[0] is not columns or cached[1] != version or len(cached[2]) != len(columns):
            cached = self._avoided = columns, version, ~_covered_rows(self.effects.excluded_places, columns)
        allowed = cached[2]
        for pin in requirements.pins:
            allowed = allowed & _covered_rows((pin,), columns)
        rows = getattr(site, "rows", None)
        return allowed if columns is site or rows is None else allowed[rows]


def _covered_rows(places: Sequence[PlaceSet], columns: NodeColumns) -> Bools:
    """Rows covered by at least one of these place sets."""
    covered = np.zeros(len(columns), dtype=np.bool_)
    for place_set in places:
        for names, ids, column in (
            (place_set.regions, columns.regions, columns.region),
            (place_set.zones, columns.zones, columns.zone),
            (place_set.pools, columns.pools, columns.pool),
        ):
            if names:
                covered |= np.isin(column, [number for number, name in enumerate(ids) if name in names])
        for name in sorted(place_set.nodes):
            if name in columns.rows:
                covered[columns.rows[name]] = True
    return covered


def _counted_resources(requirements: Requirements, site: Any) -> list[tuple[str, Any]]:
    """The requested resources; all resources if none is requested."""
    return list(requirements.resources) or [(name, 0) for name in site.free]


def least_allocated(requirements: Requirements, site: Any) -> Any:
    """Free share after the placement, averaged over the requested resources: spreads work."""
    names = _counted_resources(requirements, site)
    total: Any = 0.0
    for name, need in names:
        total = total + (site.free.get(name, 0) - need) * site.share.get(name, 0.0)
    return total / len(names) if len(names) > 1 else total


def most_allocated(requirements: Requirements, site: Any) -> Any:
    """Used share after the placement: packs work, so that some nodes stay empty."""
    return 1.0 - least_allocated(requirements, site)


def balanced(requirements: Requirements, site: Any) -> Any:
    """How evenly the requested resources are used: free cpu without free memory is of no use to other work."""
    shares = [
        (site.free.get(name, 0) - need) * site.share.get(name, 0.0) for name, need in _counted_resources(requirements, site)
    ]
    if len(shares) < 2:
        return shares[0] * 0 + 1.0 if shares else 1.0
    mean = sum(shares) / len(shares)
    return 1.0 - 2 * sum(abs(share - mean) for share in shares) / len(shares)


def preferred_taints(requirements: Requirements, site: Any) -> Any:
    """Penalises taints with effect PreferNoSchedule that the replica does not tolerate."""
    return 1.0 - requirements.untolerated_soft[site.taints]


def locality(columns: NodeColumns, hints: Hints) -> Score:
    """Prefers nodes that hints report as warm for the workload. A hint only ranks; filters decide eligibility."""

    def warm(requirements: Requirements, site: Any) -> Any:
        warmth = hints.warmth(requirements.hinted_workload, columns)
        return warmth if site is columns else warmth[site.rows]

    return Score("locality", warm, applies=lambda requirements: bool(requirements.hinted_workload), epoch=lambda: hints.version)


LEAST_ALLOCATED: Final = Score("least-allocated", least_allocated)
MOST_ALLOCATED: Final = Score("most-allocated", most_allocated)
BALANCED: Final = Score("balanced", balanced)
PREFERRED_TAINTS: Final = Score("preferred-taints", preferred_taints, weight=3, static=True)
STATELESS_SCORES: Final = (LEAST_ALLOCATED, MOST_ALLOCATED, BALANCED, PREFERRED_TAINTS)
DEFAULT_SCORES: Final = (LEAST_ALLOCATED, PREFERRED_TAINTS)
