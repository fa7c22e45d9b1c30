"""What do people's overrides mean for placing? A filter over columns, and what sets work apart. It only reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from remit.law.columns import Bools, Columns
from remit.law.fit import Ask, Peers, Site
from remit.law.overrides import Effects, Instant, PlaceSet, in_force
from remit.model.claims import Code
from remit.model.kinds import Override
from remit.proposal.plugins import Cure, Filter

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
