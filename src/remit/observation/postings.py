"""Quota and grant ledgers of the view, and batched postings to ledgers and columns.

Ledgers as the authority keeps them, from its rows. Nothing is granted here.

Gathered by what they have in common, and posted together; no row is decoded here.

A batch binds a thousand replicas of a few shapes. One after another they would cost a microsecond for each amount; by shape
they cost a few array operations in all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from remit.law.ledgers import GrantLedger, parent_charges, ledgers_of
from remit.model.kinds import Tenant
from remit.model.records import Grant
from remit.observation.column_table import NONE
from remit.observation.node_columns import Columns
from remit.observation.replica_table import Replicas
from remit.observation.shapes import Cut, Shapes
from remit.observation.topology_counts import SeenPeers
from remit.store.protocol import Corrupt

Pairs = Iterable[tuple[str, int]]


class Accounts:
    """Tenants and grants by name, and the ledgers that they open. `freed` are those of which more is left than before, since
    somebody last took notice.
    """

    def __init__(self, boot: str) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.grants: dict[str, Grant] = {}
        self.slices: dict[str, dict[str, None]] = {}
        """By tenant: grants of its quota that this scope holds from another."""
        self.ledgers: dict[str, GrantLedger] = {}
        self.freed: dict[str, None] = {}
        self._boot = boot

    def change(self, puts: Sequence[Tenant | Grant], gone: Sequence[Tenant | Grant]) -> None:
        """All that one event changed: in whatever order it tells it, each finds the ledgers that it stands on."""
        changed = (*puts, *gone)
        old = [
            self.grants[name] for thing in changed if isinstance(thing, Grant) and (name := thing.metadata.name) in self.grants
        ]
        names = dict.fromkeys(name for thing in (*changed, *old) for name in self._touched(thing))
        left = {name: dict(self.ledgers[name].free) for name in names if name in self.ledgers}
        for grant in old:
            self._burden(grant, -1)
        for thing in gone:
            self._drop(thing)
        for thing in puts:
            self._put(thing)
        for thing in puts:
            if isinstance(thing, Grant):
                self._burden(thing, 1)
        for name, before in left.items():
            ledger = self.ledgers.get(name)
            if ledger is not None and any(count > before.get(resource, 0) for resource, count in ledger.free.items()):
                self.freed[name] = None

    def draw(self, names: Iterable[str], pairs: Pairs, times: int) -> None:
        """So many equal holders draw on each of these ledgers; fewer than none: they give back."""
        charge = [(resource, count * times) for resource, count in pairs]
        for name in names:
            ledger = self.ledgers.get(name)
            if ledger is None:
                raise Corrupt(f"replicas are charged to {name}, which is not there; restore a backup")
            ledger.draw(charge, 1)
            if times < 0:
                self.freed[name] = None

    def draw_each(self, names: Iterable[str], charges: Iterable[Pairs], sign: int) -> None:
        """As one holder does that is not charged the same everywhere: a reservation."""
        for name, charge in zip(names, charges, strict=True):
            self.draw((name,), charge, sign)

    def kind(self, name: str) -> str:
        """Is a ledger one of quota, or one of another sort of grant?"""
        ledger = self.ledgers.get(name)
        return "quota" if ledger is None or ledger.grant is None or ledger.grant.spec.purpose == "quota" else "grant"

    def _touched(self, thing: Tenant | Grant) -> Iterable[str]:
        yield from (name for name, _, _ in ledgers_of(thing))
        if isinstance(thing, Grant):
            yield from (name for name, _ in parent_charges(thing))

    def _put(self, thing: Tenant | Grant) -> None:
        grant = thing if isinstance(thing, Grant) else None
        if isinstance(thing, Grant):
            if (before := self.grants.get(thing.metadata.name)) is not None:
                self._slice(before, there=False)
            self.grants[thing.metadata.name] = thing
            self._slice(thing, there=True)
        else:
            self.tenants[thing.metadata.name] = thing
        deadline = self._deadline(grant)
        for name, amount, tenant in ledgers_of(thing):
            ledger = self.ledgers.get(name)
            if ledger is None:
                self.ledgers[name] = GrantLedger(name, dict(amount.pairs), grant, tenant, deadline)
                self.freed[name] = None
            else:
                ledger.resize(dict(amount.pairs))
                ledger.grant, ledger.deadline_ms = grant, deadline

    def _drop(self, thing: Tenant | Grant) -> None:
        kept: dict[str, Tenant] | dict[str, Grant] = self.grants if isinstance(thing, Grant) else self.tenants
        before = kept.pop(thing.metadata.name, None)
        if isinstance(before, Grant):
            self._slice(before, there=False)
        for name, _, _ in ledgers_of(thing):
            self.ledgers.pop(name, None)

    def _slice(self, grant: Grant, *, there: bool) -> None:
        theirs = self.slices.setdefault(grant.spec.tenant, {})
        theirs.pop(grant.metadata.name, None)
        if there and grant.spec.issuer and grant.spec.purpose == "quota":
            theirs[grant.metadata.name] = None

    def _burden(self, grant: Grant, sign: int) -> None:
        for name, pairs in parent_charges(grant):
            ledger = self.ledgers.get(name)
            if ledger is not None:
                ledger.grant_on(pairs, sign)

    def _deadline(self, grant: Grant | None) -> int | None:
        """On this machine's clock. An instant of another boot says nothing here; then the authority alone knows."""
        deadline = None if grant is None else grant.status.deadline
        return deadline.at_ms if deadline is not None and deadline.boot == self._boot else None


def same(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Equal amounts; what is zero need not be named."""
    return all(one.get(name, 0) == other.get(name, 0) for name in (*one, *other))


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
