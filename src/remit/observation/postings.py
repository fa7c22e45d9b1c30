"""What do many changes at once come to? Gathered by what they have in common, and posted together; no row is decoded here.

A batch binds a thousand replicas of a few shapes. One after another they would cost a microsecond for each amount; by shape
they cost a few array operations in all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from remit.law.columns import Columns
from remit.observation.accounts import Accounts
from remit.observation.peers import SeenPeers
from remit.observation.replicas import Replicas
from remit.observation.shapes import Cut, Shapes
from remit.observation.tables import NONE

_FEW: Final = 8
"""Below it, arrays cost more than they save."""


class Postings:
    """Takes room for replicas, or gives it back. Nothing shows anywhere until `flush`."""

    def __init__(self, columns: Columns, accounts: Accounts, peers: SeenPeers, shapes: Shapes) -> None:
        self._columns, self._accounts, self._peers, self._shapes = columns, accounts, peers, shapes
        self._counted = peers.counted
        self._taken: dict[tuple[Cut, tuple[str, ...]], list[int]] = {}
        self._given: dict[tuple[Cut, tuple[str, ...]], list[int]] = {}
        self._spots: dict[tuple[int, int], list[int]] = {}
        self.freed: dict[int, None] = {}
        """Rows on which room was given back, since somebody last took notice."""
        self.met: dict[str, None] = {}
        """Tenants whose replicas came or went, of those that somebody counts."""

    def hold(self, generation: int, row: int, grants: tuple[str, ...], sign: int) -> None:
        """One replica of this generation, without devices."""
        of = self._taken if sign > 0 else self._given
        what = (self._shapes.cut_of(generation), grants)
        rows = of.get(what)
        if rows is None:
            of[what] = [row]
        else:
            rows.append(row)
        if self._counted:
            self._spots.setdefault((generation, sign), []).append(row)

    def spot(self, generation: int, row: int, sign: int) -> None:
        """It holds something else than its like do; it counts as one of them all the same."""
        if self._counted:
            self._spots.setdefault((generation, sign), []).append(row)

    def hold_all(self, replicas: Replicas, later: Collection[int]) -> None:
        """Everything that is held, but by those whose turn comes later: after a list from nothing, and at once."""
        node, shapes = replicas.column("node"), self._shapes
        slots = np.flatnonzero((node >= 0) & ~np.isin(np.arange(len(node)), list(later)))
        rows, generations = node[slots].astype(np.int64), replicas.column("generation")[slots]
        cuts, grants = shapes.column("cut")[generations], replicas.column("grants")[slots]
        for number in np.unique(cuts).tolist():
            of, cut = cuts == number, shapes.cuts[number]
            if cut is None:
                raise LookupError(f"cut {number} is gone")
            unique, counts = np.unique(rows[of], return_counts=True)
            self._columns.post_run(unique, counts, cut.resources)
            for charged, times in zip(*np.unique(grants[of], return_counts=True), strict=True):
                if charged != NONE:
                    self._accounts.draw(replicas.charged[int(charged)], cut.charge, int(times))
        for slot, devices in replicas.devices.items():
            if slot not in later and node[slot] >= 0:
                self._columns.post(int(node[slot]), (), devices)

    def flush(self) -> None:
        for of, sign in ((self._taken, 1), (self._given, -1)):
            if of:
                for (cut, grants), rows in of.items():
                    self._post(cut, rows, sign)
                    self._accounts.draw(grants, cut.charge, sign * len(rows))
                of.clear()
        if self._spots:
            for (generation, sign), rows in self._spots.items():
                self._peers.move(generation, rows, sign)
                self.met[self._shapes.tenant_of(generation)] = None
            self._spots = {}

    def _post(self, cut: Cut, rows: list[int], sign: int) -> None:
        if sign < 0:
            self.freed.update(dict.fromkeys(rows))
        if len(rows) < _FEW:
            for row in rows:
                self._columns.post(row, cut.resources, sign=sign)
        else:
            unique, counts = np.unique(np.array(rows, dtype=np.int64), return_counts=True)
            self._columns.post_run(unique, counts * sign, cut.resources)
